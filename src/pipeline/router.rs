//! From what a stage says of its model to who is asked, and how.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::config::pipeline::{ModelSpec, ResponseFormat};
use crate::llm::{self, Model, Request};
use crate::prompt::Message;

/// The name in pipeline files for "whatever the command or the project chooses".
const DEFAULT: &str = "default";

/// Somebody who can be asked.
pub struct Provider {
    /// Part of the cache key: name and address, or a model file's digest.
    pub identity: String,
    pub model: Arc<dyn Model>,
    /// Parameters for stages that do not say.
    pub defaults: ModelSpec,
    /// Whether `defaults.name` is the only model there is, whatever a pipeline asks for.
    pub fixed_model: bool,
    /// From names that pipelines use to the server's.
    pub aliases: BTreeMap<String, String>,
}

/// Chooses the provider for a stage.
pub struct Router {
    pub providers: BTreeMap<String, Provider>,
    /// Key into `providers`.
    pub default: String,
    /// From the command line: beats what a pipeline says.
    pub overrides: ModelSpec,
}

/// A stage's model, resolved.
pub struct Route<'a> {
    pub provider: &'a Provider,
    pub spec: ModelSpec,
    pub model_name: String,
}

/// Which call of a run a request is for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Call<'a> {
    /// Which repeat of the run: part of what is asked, so that repeats are independent.
    pub repeat: u32,
    /// The run folder's own id; empty where there is none.
    pub run: &'a str,
    pub example: &'a str,
    pub stage: &'a str,
    pub response_format: Option<&'a ResponseFormat>,
}

/// A stage asks for something that is not there.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RouteError {
    #[error("no provider `{name}` (there are: {})", .known.join(", "))]
    NoProvider { name: String, known: Vec<String> },
    #[error(
        "no model is named for provider `{provider}`: give --model NAME, or `model: {{ name: … }}` in the pipeline"
    )]
    NoModel { provider: String },
}

impl Router {
    /// Who answers a stage with this model specification (already merged with its pipeline's).
    ///
    /// # Errors
    /// Where the provider is unknown or no model is named.
    pub fn route(&self, spec: &ModelSpec) -> Result<Route<'_>, RouteError> {
        let spec = self.overrides.over(spec);
        let name = match spec.provider.as_deref() {
            None | Some(DEFAULT) => self.default.as_str(),
            Some(name) => name,
        };
        let provider = self.providers.get(name).ok_or_else(|| RouteError::NoProvider {
            name: name.to_owned(),
            known: self.providers.keys().cloned().collect(),
        })?;
        let mut spec = spec.over(&provider.defaults);
        if provider.fixed_model {
            spec.name.clone_from(&provider.defaults.name);
        }
        let model_name = spec.name.clone().ok_or_else(|| RouteError::NoModel {
            provider: name.to_owned(),
        })?;
        let model_name = provider.aliases.get(&model_name).cloned().unwrap_or(model_name);
        Ok(Route {
            provider,
            spec,
            model_name,
        })
    }
}

impl Route<'_> {
    pub fn request(&self, messages: Vec<Message>, call: Call<'_>) -> Request {
        let origin = if call.run.is_empty() {
            String::new()
        } else {
            format!("{}/{}/{}", call.run, call.example, call.stage)
        };
        Request {
            temperature: self.spec.temperature,
            top_p: self.spec.top_p,
            max_tokens: self.spec.max_tokens,
            // Equal seeds would make equal repeats.
            seed: self.spec.seed.map(|seed| seed.wrapping_add(i64::from(call.repeat))),
            stop: self.spec.stop.clone(),
            repeat: call.repeat,
            n: self.spec.n.filter(|&n| n > 1),
            logprobs: self.spec.logprobs.unwrap_or(false),
            response_format: call.response_format.map(|format| llm::ResponseFormat {
                name: format.name.clone(),
                schema: format.schema.clone(),
            }),
            timeout: self.spec.timeout.map(Duration::from_secs_f64),
            origin,
            ..Request::new(&self.provider.identity, &self.model_name, messages)
        }
    }
}
