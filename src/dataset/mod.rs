//! Datasets: examples, databases and their descriptions, whatever layout they come in.
//!
//! In: a manifest (`datasets/<name>.yaml`), or a folder in BIRD's or Spider's layout. Out: [`Dataset`], with all text in
//! Unicode NFC and a digest of what was read. This room knows paths of databases, never opens them (see `engine`),
//! and knows nothing of models or prompts.

mod check;
mod descriptions;
mod digest;
mod error;
mod load;
mod manifest;
mod predictions;
mod select;
mod source;
mod text;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

pub use check::{
    CheckProblem, CheckReport, CheckedDatabase, CheckedLanguage, DatabaseProbe, ProbeInfo, Severity, check,
};
pub use descriptions::{ColumnDescription, TableDescription, load_descriptions};
pub use digest::{database_digest, dataset_digest, example_digest, file_digest};
pub use error::{DatasetError, Problem};
pub use load::{FORMATS, FormatEntry, Languages, LoadOptions, languages_available, load};
pub use manifest::{Fields, Manifest, Variant};
pub use predictions::{Predictions, read_predictions};
pub use select::{Condition, Selection};
pub use source::{Source, list, resolve};

/// One question with its evidence, database and gold SQL.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Example {
    /// Unique in the dataset: the file's own id, else the 0-based position as text.
    pub id: String,
    /// 0-based position in the questions file.
    pub position: usize,
    pub question: String,
    /// Empty where the data has none.
    pub evidence: String,
    /// Key into [`Dataset::databases`].
    pub database: String,
    /// Several are alternatives; empty where the data has none (a test split without gold).
    pub gold: Vec<String>,
    /// Language code, as in `prompts/<code>/`.
    pub language: String,
    pub difficulty: Option<String>,
    /// The record's other plain fields (text, numbers, booleans as text), for `--where`.
    pub fields: BTreeMap<String, String>,
}

/// Where a database lies; it may not exist (`dataset check` and the run say so).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DatabaseRef {
    pub id: String,
    pub path: PathBuf,
    /// Folder of BIRD's `database_description` CSV files, where there is one.
    pub descriptions: Option<PathBuf>,
}

#[derive(Debug, Clone, Serialize)]
pub struct Dataset {
    pub name: String,
    pub split: String,
    pub description: String,
    pub dialect: Dialect,
    /// In file order; not yet selected.
    pub examples: Vec<Example>,
    pub databases: BTreeMap<String, DatabaseRef>,
    /// BLAKE3 (hex) over the examples as read, after NFC.
    pub digest: String,
    /// Files that were read.
    pub files: Vec<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    Sqlite,
    Postgresql,
    Mysql,
}

impl Dialect {
    /// As prompts name it.
    pub fn name(self) -> &'static str {
        match self {
            Dialect::Sqlite => "SQLite",
            Dialect::Postgresql => "PostgreSQL",
            Dialect::Mysql => "MySQL",
        }
    }
}
