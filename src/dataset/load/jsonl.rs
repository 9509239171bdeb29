//! JSON Lines: an object a line. A bad line does not hide what is wrong with later ones.

use serde_json::Value;

use super::record::{Item, Place, json_message, kind};
use super::{FormatEntry, plain_fields};

pub(super) const FORMAT: FormatEntry = FormatEntry {
    name: "jsonl",
    description: "JSON Lines, an object a line",
    read,
    fields: plain_fields,
    databases: "databases",
    beside: None,
};

pub(super) fn read(text: &str, sink: &mut dyn FnMut(Item)) {
    if text.trim_start().starts_with('[') {
        let message = "the file is one JSON list; say `format: json`".to_owned();
        return sink(Item {
            place: Place::Line(1),
            content: Err(message),
        });
    }
    for (line, number) in text.lines().zip(1..) {
        if line.trim().is_empty() {
            continue;
        }
        let (place, content) = match serde_json::from_str::<Value>(line) {
            Ok(Value::Object(values)) => (Place::Line(number), Ok(values)),
            Ok(other) => (
                Place::Line(number),
                Err(format!("the record is {}, expected an object", kind(&other))),
            ),
            Err(error) => {
                let line = usize::try_from(number).unwrap_or(usize::MAX);
                (Place::LineColumn(line, error.column()), Err(json_message(&error)))
            }
        };
        sink(Item { place, content });
    }
}
