//! Spider's questions: `db_id`, `query`, `question`, the id from `spider_index` where the file has it. Difficulty
//! classes come from `hardness.jsonl` beside the file, since Spider's own files hold none.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::super::manifest::Fields;
use super::record::plain;
use super::{FormatEntry, bird};

pub(super) const FORMAT: FormatEntry = FormatEntry {
    name: "spider",
    description: "Spider's dev.json or train_spider.json",
    read: bird::read,
    fields,
    databases: "database",
    beside: Some(Hardness::beside),
};

fn fields() -> Fields {
    let named = |name: &str| Some(name.to_owned());
    Fields {
        id: named("spider_index"),
        question: named("question"),
        evidence: named("evidence"),
        gold: named("query"),
        golds: None,
        database: named("db_id"),
        language: None,
        difficulty: named("hardness"),
    }
}

/// Difficulty classes by id.
pub struct Hardness {
    pub(super) path: PathBuf,
    by_id: HashMap<String, (String, String)>,
}

#[derive(Deserialize)]
struct Line {
    spider_index: Option<Value>,
    db_id: String,
    hardness: String,
}

impl Hardness {
    /// Reads `hardness.jsonl` in the folder of the questions; none where it is absent or something else.
    fn beside(questions: &Path) -> Option<Hardness> {
        let path = questions.with_file_name("hardness.jsonl");
        let text = std::fs::read_to_string(&path).ok()?;
        let mut by_id = HashMap::new();
        for (position, line) in text.lines().filter(|line| !line.trim().is_empty()).enumerate() {
            let line: Line = serde_json::from_str(line).ok()?;
            let id = line
                .spider_index
                .as_ref()
                .and_then(plain)
                .unwrap_or_else(|| position.to_string());
            by_id.insert(id, (line.db_id, line.hardness));
        }
        Some(Hardness { path, by_id })
    }

    /// The class of the question with this id. The database must agree, since the file may belong to another split.
    pub(super) fn of(&self, id: &str, database: &str) -> Option<&str> {
        let (of_database, class) = self.by_id.get(id)?;
        (of_database == database).then_some(class.as_str())
    }
}
