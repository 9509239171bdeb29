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
pub use router::{Call, Provider, Route, RouteError, Router};
pub use runner::{ExampleRun, Resources, StageError};

use crate::llm::{Completion, ErrorClass, Usage, Usd};
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
    /// What kind of failure it was, where a model call failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_class: Option<ErrorClass>,
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
    /// Why there is no completion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<CallFailure>,
    #[serde(default)]
    pub outputs: IndexMap<String, OutputValue>,
    /// Outputs that were not found in the answer and took their default.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub defaulted: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A call that brought nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallFailure {
    pub class: ErrorClass,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Requests sent.
    pub attempts: u32,
    /// Of answers that could not be used, and are billed all the same.
    #[serde(default, skip_serializing_if = "Usage::is_unknown")]
    pub usage: Usage,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Usd>,
}
