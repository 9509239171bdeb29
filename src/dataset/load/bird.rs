//! BIRD's questions: `question_id`, `db_id`, `question`, `evidence`, `SQL`, `difficulty`. Train and mini-dev files have
//! the same keys; copies in JSON Lines circulate too.

use super::super::manifest::Fields;
use super::record::Item;
use super::{FormatEntry, json, jsonl};

pub(super) const FORMAT: FormatEntry = FormatEntry {
    name: "bird",
    description: "BIRD's dev.json, train.json or mini-dev",
    read,
    fields,
    databases: "dev_databases",
    beside: None,
};

/// A list of records, or a record a line.
pub(super) fn read(text: &str, sink: &mut dyn FnMut(Item)) {
    if text.trim_start().starts_with('{') {
        jsonl::read(text, sink);
    } else {
        json::read(text, sink);
    }
}

fn fields() -> Fields {
    let named = |name: &str| Some(name.to_owned());
    Fields {
        id: named("question_id"),
        question: named("question"),
        evidence: named("evidence"),
        gold: named("SQL"),
        golds: None,
        database: named("db_id"),
        language: None,
        difficulty: named("difficulty"),
    }
}
