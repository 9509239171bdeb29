//! What a prediction is worth: verdicts from executed results.
//!
//! In: examples, predictions, the executor. Out: a [`Verdict`] an example, each with an outcome that says how it ended. Where
//! an official evaluator exists, its verdict is the right one (see `docs/metrics.md`). Knows nothing of models.

mod execution_accuracy;
mod same_text;
mod scorer;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use crate::outcome::Outcome;
pub use execution_accuracy::{RowSet, RowSetBuilder, execution_accuracy};
pub use scorer::{ScoreItem, Scorer};

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
