//! How an example ended: a word that pipelines, run folders, metrics and reports share.

use serde::{Deserialize, Serialize};

/// How an example ended. An example counts as wrong in every metric unless it is `answered`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The prediction ran; the verdict says whether it is right.
    Answered,
    /// The pipeline ended without a query.
    NoSql,
    /// A model call failed for good.
    ModelError,
    /// The run ended before the example was done.
    Budget,
    SqlError,
    SqlTimeout,
    NotReadOnly,
    ResultTooLarge,
    GoldError,
    GoldTimeout,
}

impl Outcome {
    pub const ALL: [Outcome; 10] = [
        Outcome::Answered,
        Outcome::NoSql,
        Outcome::ModelError,
        Outcome::Budget,
        Outcome::SqlError,
        Outcome::SqlTimeout,
        Outcome::NotReadOnly,
        Outcome::ResultTooLarge,
        Outcome::GoldError,
        Outcome::GoldTimeout,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Outcome::Answered => "answered",
            Outcome::NoSql => "no_sql",
            Outcome::ModelError => "model_error",
            Outcome::Budget => "budget",
            Outcome::SqlError => "sql_error",
            Outcome::SqlTimeout => "sql_timeout",
            Outcome::NotReadOnly => "not_read_only",
            Outcome::ResultTooLarge => "result_too_large",
            Outcome::GoldError => "gold_error",
            Outcome::GoldTimeout => "gold_timeout",
        }
    }
}
