//! A record as the formats hand it on: its place in the file and its values.

use std::fmt;

use serde_json::{Map, Value};

/// Values of a record by key or column.
pub(crate) type Values = Map<String, Value>;

/// Where a record is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// 1-based line.
    Line(u64),
    /// 1-based line and column.
    LineColumn(usize, usize),
    /// 0-based position in a list.
    Position(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line(line) => write!(f, "line {line}"),
            Place::LineColumn(line, column) => write!(f, "line {line} column {column}"),
            Place::Position(position) => write!(f, "record {position}"),
        }
    }
}

/// One record, or why it could not be read.
pub(crate) struct Item {
    pub place: Place,
    pub content: Result<Values, String>,
}

/// The value under a key; where there's no such key, dots lead into nested objects.
pub(super) fn lookup<'a>(values: &'a Values, path: &str) -> Option<&'a Value> {
    if let Some(value) = values.get(path) {
        return Some(value);
    }
    let (key, rest) = path.split_once('.')?;
    lookup(values.get(key)?.as_object()?, rest)
}

/// A plain value as text; none for null, lists and objects.
pub(super) fn plain(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(flag) => Some(flag.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

/// What a value is, in words.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The JSON parser's message without its place.
pub(super) fn json_message(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ")
        .map_or(text.as_str(), |(message, _)| message)
        .to_owned()
}
