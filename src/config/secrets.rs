//! Keeps keys out of what is shown of a project file.
//!
//! In: the file's text, and later its tree. Out: the text, byte for byte of the same length, with `*` where a secret stands or may
//! stand. It refuses nothing: `project` says what is wrong with a key in the file.

use std::sync::LazyLock;

use regex::Regex;

use super::yaml::{Entry, Node, Value};

/// Whether a key's value is likely a secret (`api_key`, `apiKey`, `x-api-key`, `token`, `password`, …).
pub(super) fn is_key_name(name: &str) -> bool {
    let plain: String = name
        .to_lowercase()
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .collect();
    plain.ends_with("apikey")
        || matches!(
            plain.as_str(),
            "key" | "token" | "secret" | "password" | "accesstoken" | "bearer"
        )
}

/// The text with everything that looks like a secret blotted out, byte for byte, before it is known to be YAML.
pub(super) fn without_secrets(text: &str) -> String {
    static AFTER_KEY: LazyLock<Option<Regex>> = LazyLock::new(|| {
        Regex::new(
            r#"(?im)["']?(?:[\w-]*api[_-]?key|key|token|secret|password|access[_-]?token|bearer|authorization|api_key_env)["']?[ \t]*:[ \t]*(?P<secret>[^\r\n]+)"#,
        )
        .ok()
    });
    static BY_SHAPE: LazyLock<Option<Regex>> = LazyLock::new(|| {
        Regex::new(r"\bsk-[A-Za-z0-9_-]{8,}|\bAIza[A-Za-z0-9_-]{20,}|(?i:\bbearer\s+[A-Za-z0-9._~+/=-]{8,})").ok()
    });
    static PASSWORD: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"://[^/\s@]+@").ok());
    static QUERY: LazyLock<Option<Regex>> = LazyLock::new(|| {
        // In an address, and in a `base_url` that has no scheme.
        Regex::new(r#"(?i)(?:://|\bbase_url["']?[ \t]*:[ \t]*)[^\s?#]*[?#](?P<secret>[^\r\n]+)"#).ok()
    });
    static VARIABLE: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r#"^["']?[A-Z_][A-Z0-9_]*["']?\s*(?:[,}#].*)?$"#).ok());

    let mut shown = text.to_owned();
    if let Some(pattern) = AFTER_KEY.as_ref() {
        for found in pattern
            .captures_iter(text)
            .filter_map(|captures| captures.name("secret"))
        {
            // The name of a variable, as it should be, stays readable.
            if !VARIABLE
                .as_ref()
                .is_some_and(|variable| variable.is_match(found.as_str()))
            {
                blot_out(&mut shown, found.start(), found.end());
            }
        }
    }
    for found in QUERY
        .iter()
        .flat_map(|pattern| pattern.captures_iter(text))
        .filter_map(|captures| captures.name("secret"))
    {
        blot_out(&mut shown, found.start(), found.end());
    }
    for pattern in [BY_SHAPE.as_ref(), PASSWORD.as_ref()].into_iter().flatten() {
        for found in pattern.find_iter(text) {
            blot_out(&mut shown, found.start(), found.end());
        }
    }
    shown
}

/// As [`without_secrets`], now that it is known which values belong to which keys (blocks, aliases, odd layouts).
pub(super) fn blot_out_keys(shown: &str, node: &Node) -> String {
    fn walk(shown: &mut String, node: &Node) {
        match &node.value {
            Value::Scalar(_) => {}
            Value::Sequence(items) => items.iter().for_each(|item| walk(shown, item)),
            Value::Mapping(entries) => {
                for Entry { key, value, .. } in entries {
                    if is_key_name(key) || key.eq_ignore_ascii_case("authorization") {
                        blot_out(shown, value.place.span.start, value.place.span.end);
                    } else if let ("base_url", Value::Scalar(scalar)) = (key.as_str(), &value.value) {
                        let span = &value.place.span;
                        if scalar.text.contains(['?', '#']) {
                            // Where an escape hides the sign, all of it may be secret.
                            let written = shown.get(span.clone()).unwrap_or_default();
                            let start = written.find(['?', '#']).map_or(span.start, |at| span.start + at + 1);
                            blot_out(shown, start, span.end);
                        }
                    } else {
                        walk(shown, value);
                    }
                }
            }
        }
    }
    let mut shown = shown.to_owned();
    walk(&mut shown, node);
    shown
}

/// Replaces a range by as many bytes of `*`; line breaks and brackets that close stay.
fn blot_out(shown: &mut String, start: usize, end: usize) {
    let Some(secret) = shown.get(start..end) else { return };
    let blotted: String = secret
        .chars()
        .flat_map(|c| match c {
            '\n' | '\r' | ' ' | '\t' => std::iter::repeat_n(c, 1),
            other => std::iter::repeat_n('*', other.len_utf8()),
        })
        .collect();
    shown.replace_range(start..end, &blotted);
}
