//! What a prediction is worth: verdicts from executed results.
//!
//! In: examples, predictions, the executor. Out: a [`Verdict`] an example, each with an outcome that says how it ended. Where
//! an official evaluator exists, its verdict is the right one (see `docs/metrics.md`). Knows nothing of models.

mod execution_accuracy;
mod same_text;
mod scorer;
mod soft_f1;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use crate::outcome::Outcome;
pub use execution_accuracy::{RowSet, RowSetBuilder, execution_accuracy};
pub use scorer::{ScoreItem, Scorer};
pub use soft_f1::soft_f1;

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

/// A metric by its name on the command line and in every file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    /// Execution accuracy, BIRD's: the sets of rows are equal. Decides what is right.
    Ex,
    /// BIRD mini-dev's soft F1.
    SoftF1,
}

impl Metric {
    pub const ALL: &[Metric] = &[Metric::Ex, Metric::SoftF1];

    pub fn name(self) -> &'static str {
        match self {
            Metric::Ex => "ex",
            Metric::SoftF1 => "soft_f1",
        }
    }

    /// As people write it in tables.
    pub fn title(self) -> &'static str {
        match self {
            Metric::Ex => "EX",
            Metric::SoftF1 => "soft F1",
        }
    }

    pub fn by_name(name: &str) -> Option<Metric> {
        Metric::ALL.iter().copied().find(|metric| metric.name() == name)
    }

    /// Whether an example is either right or wrong, so that the mean is a proportion.
    pub fn is_proportion(self) -> bool {
        self == Metric::Ex
    }
}
