//! Checks that all configuration files share: keys, types and ranges of a [`Node`] tree.
//!
//! In: nodes. Out: plain values, and a diagnostic for every mistake met on the way; a check that fails gives `None` and the
//! caller goes on, so that all mistakes of a file are reported together.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::yaml::{Node, Place, ScalarKind, Source, Value};
use crate::diagnostic::{Diagnostic, Diagnostics, did_you_mean};

/// More mistakes than this help nobody.
const MOST_MISTAKES: usize = 100;

/// Collects the mistakes of one file (and of the `--set` arguments applied to it).
#[derive(Debug)]
pub(super) struct Checker {
    pub sources: Vec<Source>,
    /// The source of each mistake, for sorting.
    mistakes: Vec<(usize, Diagnostic)>,
}

impl Checker {
    pub fn new(source: Source) -> Checker {
        Checker {
            sources: vec![source],
            mistakes: Vec::new(),
        }
    }

    pub fn add(&mut self, diagnostics: impl IntoIterator<Item = Diagnostic>) {
        self.mistakes
            .extend(diagnostics.into_iter().map(|diagnostic| (0, diagnostic)));
    }

    /// Records a mistake; what is returned can be given help and further places.
    pub fn report(
        &mut self,
        code: &'static str,
        place: &Place,
        message: impl Into<String>,
        label: impl Into<String>,
    ) -> Mistake<'_> {
        let (file, text) = match self.sources.get(place.source) {
            Some(source) => (source.name.as_str(), Arc::clone(&source.text)),
            None => ("", Arc::from("")),
        };
        let diagnostic = Diagnostic::new(code, file, text, place.span.clone(), message, label);
        if self.mistakes.len() >= MOST_MISTAKES {
            self.mistakes.pop();
        }
        self.mistakes.push((place.source, diagnostic));
        Mistake {
            source: place.source,
            diagnostic: self.mistakes.last_mut().map(|(_, diagnostic)| diagnostic),
        }
    }

    /// The file's text as diagnostics display it.
    pub fn shown(&self) -> &str {
        self.sources.first().map_or("", |source| &source.text)
    }

    /// Replaces the displayed text, also in what was recorded before; it must be of the same length.
    pub fn show_instead(&mut self, text: &str) {
        let text: Arc<str> = Arc::from(text);
        if let Some(source) = self
            .sources
            .first_mut()
            .filter(|source| source.text.len() == text.len())
        {
            source.text = Arc::clone(&text);
            for (_, diagnostic) in self.mistakes.iter_mut().filter(|(source, _)| *source == 0) {
                diagnostic.text = Arc::clone(&text);
            }
        }
    }

    /// All mistakes in reading order, or `value` where there are none.
    pub fn finish<T>(mut self, value: Option<T>) -> Result<T, Diagnostics> {
        self.mistakes
            .sort_by_key(|(source, diagnostic)| (*source, diagnostic.span.start));
        let found = Diagnostics::from_vec(self.mistakes.into_iter().map(|(_, diagnostic)| diagnostic).collect());
        match (found, value) {
            (Some(diagnostics), _) => Err(diagnostics),
            (None, Some(value)) => Ok(value),
            (None, None) => {
                let (file, text) = self
                    .sources
                    .first()
                    .map_or(("", Arc::from("")), |s| (s.name.as_str(), Arc::clone(&s.text)));
                Err(Diagnostic::new("config::invalid", file, text, 0..0, "the file is not valid", "here").into())
            }
        }
    }

    /// The entries of a mapping, whose keys are checked against `keys`.
    pub fn known_keys(&mut self, node: &Node, what: &str, keys: &[&str]) -> bool {
        let Value::Mapping(entries) = &node.value else {
            self.wrong_type(node, "a mapping", what);
            return false;
        };
        for entry in entries {
            if !keys.contains(&entry.key.as_str()) {
                self.report(
                    "config::unknown_key",
                    &entry.key_place,
                    format!("unknown key `{}` in {what}", entry.key),
                    "not a key here",
                )
                .help(suggest(&entry.key, keys.iter().copied(), "keys"));
            }
        }
        true
    }

    /// Reports that `node` lacks a key, unless an unknown key, reported already, is most likely a misspelling of it.
    pub fn missing(&mut self, node: &Node, place: &Place, key: &str, what: &str, keys: &[&str], help: &str) {
        if misspells(node, keys, |meant| meant == key) {
            return;
        }
        self.report(
            "config::missing_key",
            place,
            format!("{what} has no `{key}`"),
            format!("`{key}` is missing"),
        )
        .help(help);
    }

    pub fn wrong_type(&mut self, node: &Node, expected: &str, key: &str) -> Mistake<'_> {
        self.report(
            "config::wrong_type",
            &node.place,
            format!("expected {expected} for {key}, found {}", found(node)),
            format!("expected {expected}"),
        )
    }

    pub fn text(&mut self, node: &Node, key: &str) -> Option<String> {
        match &node.value {
            Value::Scalar(scalar) if scalar.kind() == ScalarKind::Text => {
                if scalar.text.trim().is_empty() {
                    self.report(
                        "config::empty",
                        &node.place,
                        format!("{key} is empty"),
                        "expected some text",
                    );
                    return None;
                }
                Some(scalar.text.clone())
            }
            Value::Scalar(scalar) if scalar.kind() != ScalarKind::Nothing => {
                let help = format!("put it in quotes to make it text: \"{}\"", scalar.text);
                self.wrong_type(node, "text", key).help(help);
                None
            }
            _ => {
                self.wrong_type(node, "text", key);
                None
            }
        }
    }

    /// Text, or a number or truth value as it is written.
    pub fn word(&mut self, node: &Node, key: &str) -> Option<String> {
        match &node.value {
            Value::Scalar(scalar) if scalar.kind() != ScalarKind::Nothing => Some(scalar.text.clone()),
            _ => {
                self.wrong_type(node, "text", key);
                None
            }
        }
    }

    /// A list of words; with the place of each.
    pub fn words(&mut self, node: &Node, key: &str) -> Option<Vec<(String, Place)>> {
        let Value::Sequence(items) = &node.value else {
            self.wrong_type(node, "a list of texts", key);
            return None;
        };
        let mut words = Vec::with_capacity(items.len());
        for item in items {
            words.push((self.word(item, &format!("an item of {key}"))?, item.place.clone()));
        }
        Some(words)
    }

    pub fn number(&mut self, node: &Node, key: &str, range: RangeInclusive<f64>) -> Option<f64> {
        let number = match scalar_kind(node) {
            Some(ScalarKind::Integer(integer)) => integer as f64,
            Some(ScalarKind::Number(number)) => number,
            _ => {
                self.wrong_type(node, "a number", key);
                return None;
            }
        };
        if !range.contains(&number) {
            self.out_of_range(node, key, &format!("from {} to {}", range.start(), range.end()));
            return None;
        }
        Some(number)
    }

    /// Seconds, more than none.
    pub fn seconds(&mut self, node: &Node, key: &str) -> Option<f64> {
        let seconds = self.number(node, key, f64::NEG_INFINITY..=f64::INFINITY)?;
        if seconds <= 0.0 || seconds > 86_400.0 {
            self.out_of_range(node, key, "more than 0 and at most 86400 (seconds)");
            return None;
        }
        Some(seconds)
    }

    pub fn integer(&mut self, node: &Node, key: &str, range: RangeInclusive<i64>) -> Option<i64> {
        let Some(ScalarKind::Integer(integer)) = scalar_kind(node) else {
            self.wrong_type(node, "a whole number", key);
            return None;
        };
        if !range.contains(&integer) {
            let bounds = match (*range.start(), *range.end()) {
                (least, most) if most >= i64::from(u32::MAX) => format!("{least} or more (up to {most})"),
                (least, most) => format!("from {least} to {most}"),
            };
            self.out_of_range(node, key, &bounds);
            return None;
        }
        Some(integer)
    }

    /// A whole number that fits the plain type.
    pub fn count(&mut self, node: &Node, key: &str, range: RangeInclusive<u32>) -> Option<u32> {
        let integer = self.integer(node, key, i64::from(*range.start())..=i64::from(*range.end()))?;
        u32::try_from(integer).ok()
    }

    pub fn boolean(&mut self, node: &Node, key: &str) -> Option<bool> {
        if let Some(ScalarKind::Boolean(value)) = scalar_kind(node) {
            return Some(value);
        }
        self.wrong_type(node, "`true` or `false`", key);
        None
    }

    /// One of a few words.
    pub fn choice<T: Copy>(&mut self, node: &Node, key: &str, choices: &[(&str, T)]) -> Option<T> {
        let text = self.text(node, key)?;
        if let Some((_, value)) = choices.iter().find(|(word, _)| *word == text) {
            return Some(*value);
        }
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        self.report(
            "config::unknown_value",
            &node.place,
            format!("{key} can't be `{text}`"),
            format!("expected {}", list(words.iter().copied(), " or ")),
        )
        .help(suggest(&text, words, "values"));
        None
    }

    fn out_of_range(&mut self, node: &Node, key: &str, bounds: &str) {
        let value = scalar_text(node);
        self.report(
            "config::out_of_range",
            &node.place,
            format!("{key} is out of range: `{value}`"),
            format!("expected {bounds}"),
        )
        .help(format!("{key} is {bounds}"));
    }
}

/// A recorded mistake, to be completed.
pub(super) struct Mistake<'a> {
    source: usize,
    diagnostic: Option<&'a mut Diagnostic>,
}

impl Mistake<'_> {
    pub fn help(mut self, help: impl Into<String>) -> Self {
        if let Some(diagnostic) = &mut self.diagnostic {
            diagnostic.help = Some(help.into());
        }
        self
    }

    /// Points at a second place; left out where that lies in another text.
    pub fn also(mut self, place: &Place, label: impl Into<String>) -> Self {
        if let Some(diagnostic) = self.diagnostic.as_mut().filter(|_| place.source == self.source) {
            diagnostic.also.push((place.span.clone(), label.into()));
        }
        self
    }
}

/// Whether an unknown key of the mapping is most likely a misspelling of a key that is `wanted`.
pub(super) fn misspells(node: &Node, keys: &[&str], wanted: impl Fn(&str) -> bool) -> bool {
    let Value::Mapping(entries) = &node.value else {
        return false;
    };
    entries
        .iter()
        .filter(|entry| !keys.contains(&entry.key.as_str()))
        .any(|entry| did_you_mean(&entry.key, keys.iter().copied()).is_some_and(&wanted))
}

pub(super) fn scalar_kind(node: &Node) -> Option<ScalarKind> {
    match &node.value {
        Value::Scalar(scalar) => Some(scalar.kind()),
        _ => None,
    }
}

fn scalar_text(node: &Node) -> &str {
    match &node.value {
        Value::Scalar(scalar) => &scalar.text,
        _ => "",
    }
}

/// "did you mean `x`? keys: `a`, `b`", or only the list where nothing is near.
pub(super) fn suggest<'a>(word: &str, valid: impl IntoIterator<Item = &'a str>, what: &str) -> String {
    const MOST: usize = 20;
    let valid: Vec<&str> = valid.into_iter().collect();
    if valid.is_empty() {
        return format!("there are no {what}");
    }
    let shown = list(valid.iter().copied().take(MOST), ", ");
    let more = if valid.len() > MOST {
        format!(" and {} more", valid.len() - MOST)
    } else {
        String::new()
    };
    match did_you_mean(word, valid.iter().copied()) {
        Some(near) => format!("did you mean `{near}`? {what}: {shown}{more}"),
        None => format!("{what}: {shown}{more}"),
    }
}

pub(super) fn list<'a>(words: impl IntoIterator<Item = &'a str>, separator: &str) -> String {
    words
        .into_iter()
        .map(|word| format!("`{word}`"))
        .collect::<Vec<_>>()
        .join(separator)
}

/// What a node is, for "expected …, found …".
fn found(node: &Node) -> String {
    const MOST: usize = 60;
    match &node.value {
        Value::Sequence(_) => "a list".to_owned(),
        Value::Mapping(_) => "a mapping".to_owned(),
        Value::Scalar(scalar) => {
            let mut text: String = scalar.text.chars().take(MOST).collect();
            if text.len() < scalar.text.len() {
                text.push('…');
            }
            match scalar.kind() {
                ScalarKind::Nothing => "nothing".to_owned(),
                ScalarKind::Boolean(_) => format!("truth value `{text}`"),
                ScalarKind::Integer(_) | ScalarKind::Number(_) => format!("number `{text}`"),
                ScalarKind::Text => format!("text `{text}`"),
            }
        }
    }
}
