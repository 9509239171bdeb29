//! CSV and TSV with a header row; fields may be quoted and hold line breaks.

use std::collections::HashSet;

use serde_json::Value;

use super::record::{Item, Place, Values};
use super::{FormatEntry, plain_fields};

pub(super) const FORMAT: FormatEntry = FormatEntry {
    name: "csv",
    description: "comma-separated values with a header row",
    read: |text, sink| read(text, b',', sink),
    fields: plain_fields,
    databases: "databases",
    beside: None,
};

pub(super) const TAB_FORMAT: FormatEntry = FormatEntry {
    name: "tsv",
    description: "tab-separated values with a header row",
    read: |text, sink| read(text, b'\t', sink),
    fields: plain_fields,
    databases: "databases",
    beside: None,
};

fn read(text: &str, delimiter: u8, sink: &mut dyn FnMut(Item)) {
    // Flexible, so that every ragged row is reported and not the first one only.
    let mut reader = ::csv::ReaderBuilder::new()
        .delimiter(delimiter)
        .flexible(true)
        .from_reader(text.as_bytes());
    let fault = |line, message| Item {
        place: Place::Line(line),
        content: Err(message),
    };
    let header: Vec<String> = match reader.headers() {
        Ok(header) => header.iter().map(|name| name.trim().to_owned()).collect(),
        Err(error) => return sink(fault(1, error.to_string())),
    };
    let mut seen = HashSet::new();
    if let Some(twice) = header
        .iter()
        .find(|name| !name.is_empty() && !seen.insert(name.as_str()))
    {
        return sink(fault(1, format!("two columns are named `{twice}`")));
    }
    for record in reader.records() {
        let record = match record {
            Ok(record) => record,
            Err(error) => {
                let line = error.position().map_or(0, ::csv::Position::line);
                sink(fault(line, error.to_string()));
                continue;
            }
        };
        let line = record.position().map_or(0, ::csv::Position::line);
        if record.len() != header.len() {
            let mut message = format!("the row has {} fields, the header has {}", record.len(), header.len());
            if record.get(record.len() - 1).is_some_and(|last| last.contains('\n')) {
                message.push_str("; is a quote left open?");
            }
            sink(fault(line, message));
            continue;
        }
        let values: Values = header
            .iter()
            .zip(record.iter())
            .map(|(name, value)| {
                // An empty cell says nothing, like a null in JSON.
                let value = if value.is_empty() {
                    Value::Null
                } else {
                    Value::String(value.to_owned())
                };
                (name.clone(), value)
            })
            .collect();
        sink(Item {
            place: Place::Line(line),
            content: Ok(values),
        });
    }
}
