//! What a prediction is worth: verdicts from executed results.
//!
//! In: examples, predictions, the executor. Out: a [`Verdict`] an example, each with an outcome that says how it ended. Where
//! an official evaluator exists, its verdict is the right one (see `docs/metrics.md`). Knows nothing of models.

mod execution_accuracy;
mod scorer;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use execution_accuracy::{RowSet, execution_accuracy};
pub use scorer::{ScoreItem, Scorer};

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

/// What a metric says of one example.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    pub id: String,
    pub db: String,
    pub outcome: Outcome,
    /// Metric name → value in 0..=1.
    pub metrics: BTreeMap<String, f64>,
    /// Why, where the outcome is not `answered`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Verdict {
    pub fn is_right(&self) -> bool {
        self.metrics.get("ex").is_some_and(|&value| value >= 1.0)
    }
}

/// Names of the metrics there are, for `--metrics`.
pub const METRICS: &[&str] = &["ex"];
