//! Why a text is no YAML, in words for people who write configuration files.
//!
//! In: the parser's error. Out: a diagnostic that names the usual cause (a tab, a missing quote, an open bracket) and its remedy.

use std::borrow::Cow;
use std::sync::Arc;

use saphyr_parser::ScanError;

use crate::diagnostic::{CharOffsets, Diagnostic};

/// The parser's error with its place; `shown` is what the diagnostic displays, of the same length as `text`.
pub(super) fn explain(
    error: &ScanError,
    file: &str,
    text: &str,
    shown: &Arc<str>,
    offsets: &CharOffsets,
) -> Diagnostic {
    let marker = error.marker();
    if let Some(diagnostic) = tab_near(marker.line(), file, text, shown) {
        return diagnostic;
    }
    let start = offsets.byte(marker.index());
    let width = text
        .get(start..)
        .and_then(|rest| rest.chars().next())
        .map_or(0, char::len_utf8);
    let span = start..start + width;
    let info = error.info();
    let (message, help): (Cow<'_, str>, &str) = if info.contains("mapping values are not allowed") {
        ("a `:` makes no key here".into(), "put text that holds `: ` in quotes")
    } else if info.contains("did not find expected ',' or '}'") {
        ("expected `,` or `}` here".into(), "a `{` before this is not closed")
    } else if info.contains("expected ',' or ']'") {
        ("expected `,` or `]` here".into(), "a `[` before this is not closed")
    } else if info.contains("unknown anchor") {
        (
            "this alias has no anchor before it".into(),
            "quote a text that starts with `*`",
        )
    } else if info.contains("quoted scalar") && (info.contains("indentation") || info.contains("end of stream")) {
        (
            "this quoted text is not closed".into(),
            "add the closing quote, or indent the lines that belong to it",
        )
    } else if info.contains("unexpected character") {
        let character = shown.get(span.clone()).unwrap_or_default();
        (
            format!("text can't start with `{character}`").into(),
            "put the text in quotes",
        )
    } else if info.contains("indentation in flow construct") {
        (
            "a bracket before this is not closed".into(),
            "close each `{` and `[`, or indent the lines that belong to it",
        )
    } else if info.contains("expected '-' indicator")
        || info.contains("did not find expected key")
        || info.contains("invalid indentation")
    {
        (
            "this line's indentation fits no line above".into(),
            "keys that belong together start in the same column",
        )
    } else if info.contains("simple key expect") {
        (
            "expected `: ` after a key".into(),
            "each line is `key: value` or `- item`",
        )
    } else {
        let reason = info.rsplit_once(", ").map_or(info, |(_, reason)| reason);
        (format!("not valid YAML: {reason}").into(), "")
    };
    let diagnostic = Diagnostic::new("yaml::syntax", file, Arc::clone(shown), span, message, "here");
    if help.is_empty() {
        diagnostic
    } else {
        diagnostic.with_help(help)
    }
}

/// A tab in the indentation of the line where the parser stopped, or of the next one.
fn tab_near(line: usize, file: &str, text: &str, shown: &Arc<str>) -> Option<Diagnostic> {
    let mut start = 0;
    for (index, content) in text.split_inclusive('\n').enumerate() {
        let indentation = content.len() - content.trim_start_matches([' ', '\t']).len();
        let number = index + 1;
        if (number == line || number == line + 1)
            && !content.trim().is_empty()
            && let Some(tab) = content[..indentation].find('\t')
        {
            let message = "a tab indents this line, YAML takes spaces only";
            let span = start + tab..start + indentation;
            return Some(
                Diagnostic::new("yaml::tab", file, Arc::clone(shown), span, message, "tab")
                    .with_help("replace each tab by two spaces"),
            );
        }
        start += content.len();
    }
    None
}
