//! Runs a pipeline's stages over one example: render, ask, extract, hand over.
//!
//! In: a validated pipeline, an example, prompts, models. Out: a [`Trace`] that holds all that happened. Knows nothing of run
//! folders, scheduling or scores.

pub mod extract;
mod router;
mod runner;

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

pub use extract::OutputValue;
pub use router::{Provider, Route, RouteError, Router};
pub use runner::{ExampleRun, Resources, StageError};

use crate::llm::Completion;
use crate::outcome::Outcome;
use crate::prompt::Message;

/// All that happened to one example in a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    pub id: String,
    pub db: String,
    /// `answered` (there is a prediction), `no_sql` or `model_error`; execution decides the rest.
    pub outcome: Outcome,
    /// The final SQL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<String>,
    /// Why there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub stages: Vec<StageTrace>,
}

/// What one stage did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageTrace {
    pub stage: String,
    pub template: String,
    pub messages: Vec<Message>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion: Option<Completion>,
    #[serde(default)]
    pub outputs: IndexMap<String, OutputValue>,
    /// Outputs that were not found in the answer and took their default.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub defaulted: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}
