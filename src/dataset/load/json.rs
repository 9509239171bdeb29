//! JSON: a list of objects.

use std::fmt;

use serde::Deserializer as _;
use serde::de::{SeqAccess, Visitor};
use serde_json::Value;

use super::record::{Item, Place, json_message, kind};
use super::{FormatEntry, plain_fields};

pub(super) const FORMAT: FormatEntry = FormatEntry {
    name: "json",
    description: "a JSON list of objects",
    read,
    fields: plain_fields,
    databases: "databases",
    beside: None,
};

/// One element at a time, since whole files of parsed trees cost many times their size.
pub(super) fn read(text: &str, sink: &mut dyn FnMut(Item)) {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let result = deserializer
        .deserialize_seq(Records(&mut *sink))
        .and_then(|()| deserializer.end());
    if let Err(error) = result {
        let mut message = json_message(&error);
        if text.trim_start().starts_with('{') && message.contains("expected a list") {
            message.push_str("; for one object a line, say `format: jsonl`");
        }
        sink(Item {
            place: Place::LineColumn(error.line(), error.column()),
            content: Err(message),
        });
    }
}

struct Records<'a>(&'a mut dyn FnMut(Item));

impl<'de> Visitor<'de> for Records<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of records")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        let mut position = 0;
        while let Some(value) = elements.next_element::<Value>()? {
            let content = match value {
                Value::Object(values) => Ok(values),
                other => Err(format!("the record is {}, expected an object", kind(&other))),
            };
            (self.0)(Item {
                place: Place::Position(position),
                content,
            });
            position += 1;
        }
        Ok(())
    }
}
