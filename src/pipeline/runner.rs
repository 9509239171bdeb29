//! One example's way through the stages.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use indexmap::IndexMap;
use minijinja::Value;
use regex::Regex;

use super::extract::{OutputValue, continue_from, extract};
use super::{Call, CallFailure, RouteError, Router, StageTrace, Trace};
use crate::config::pipeline::{ExtractKind, ModelSpec, OutputRef, Pipeline, StageKind};
use crate::dataset::{DatabaseRef, Dialect, Example};
use crate::engine::QueryError;
use crate::llm::{Action, CallError, ErrorClass};
use crate::outcome::Outcome;
use crate::prompt::{Message, PromptError, Prompts};
use crate::schema::SchemaCache;
use crate::sql::parse::parse;

/// What stages draw on.
pub struct Resources {
    pub pipeline: Pipeline,
    pub prompts: Arc<Prompts>,
    pub schemas: Arc<SchemaCache>,
    pub router: Arc<Router>,
    pub dialect: Dialect,
    pub databases: BTreeMap<String, DatabaseRef>,
    /// Which of several independent repeats of the run this is.
    pub repeat: u32,
    /// The run folder's own id; empty where there is none.
    pub run: String,
}

/// Something that ends the run, not just the example.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    #[error("example `{example}`, stage `{stage}`: {source}")]
    Call {
        example: String,
        stage: String,
        source: Box<CallError>,
    },
    #[error("example `{example}`, stage `{stage}`: {source}")]
    Prompt {
        example: String,
        stage: String,
        source: Box<PromptError>,
    },
    #[error("stage `{stage}`: {source}")]
    Route { stage: String, source: RouteError },
    #[error("example `{example}`: {source}")]
    Database { example: String, source: QueryError },
    #[error("example `{example}` names the database `{database}`, which the dataset does not have")]
    NoDatabase { example: String, database: String },
}

/// An example on its way.
pub struct ExampleRun {
    example: Arc<Example>,
    outputs: BTreeMap<String, IndexMap<String, OutputValue>>,
    stages: Vec<StageTrace>,
    ended: Option<(Outcome, String)>,
    error_class: Option<ErrorClass>,
}

impl ExampleRun {
    pub fn new(example: Arc<Example>) -> Self {
        ExampleRun {
            example,
            outputs: BTreeMap::new(),
            stages: Vec::new(),
            ended: None,
            error_class: None,
        }
    }

    /// Whether no further stage is needed.
    pub fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    pub fn example(&self) -> &Arc<Example> {
        &self.example
    }

    /// What the stages did so far.
    pub fn stages(&self) -> &[StageTrace] {
        &self.stages
    }

    /// Gives a stage's outputs without asking a model: recorded ones, or placeholders.
    pub fn supply(&mut self, stage: &str, outputs: IndexMap<String, OutputValue>) {
        self.outputs.insert(stage.to_owned(), outputs);
    }

    /// The template that a stage would render now, and its model.
    ///
    /// # Errors
    /// Where an earlier stage gave no label, or one without a case.
    pub fn choose<'a>(&self, resources: &'a Resources, index: usize) -> Result<(&'a str, ModelSpec), String> {
        let pipeline = &resources.pipeline;
        let stage = &pipeline.stages[index];
        let own = stage.model.over(&pipeline.model);
        match &stage.kind {
            StageKind::Prompt { template } => Ok((template, own)),
            StageKind::Switch { on, cases } => {
                let label = self.output(on).map(OutputValue::as_text).unwrap_or_default();
                let case = cases
                    .get(&label)
                    .ok_or_else(|| format!("`{on}` is `{label}`, which has no case"))?;
                Ok((&case.template, case.model.over(&own)))
            }
        }
    }

    /// The messages of a stage, as they would be sent now.
    ///
    /// # Errors
    /// Where the database cannot be read or the template fails.
    pub fn render(&self, resources: &Resources, index: usize, template: &str) -> Result<Vec<Message>, StageError> {
        let example = &self.example;
        let database = resources
            .databases
            .get(&example.database)
            .ok_or_else(|| StageError::NoDatabase {
                example: example.id.clone(),
                database: example.database.clone(),
            })?;
        let schema = resources
            .schemas
            .text(database, &resources.pipeline.schema)
            .map_err(|source| StageError::Database {
                example: example.id.clone(),
                source,
            })?;
        let mut variables: BTreeMap<String, Value> = BTreeMap::from([
            ("question".to_owned(), Value::from(example.question.as_str())),
            ("evidence".to_owned(), Value::from(example.evidence.as_str())),
            ("schema".to_owned(), Value::from(schema)),
            ("dialect".to_owned(), Value::from(resources.dialect.name())),
            ("language".to_owned(), Value::from(example.language.as_str())),
            (
                "example".to_owned(),
                minijinja::context! {
                    id => example.id.as_str(),
                    database => example.database.as_str(),
                    difficulty => example.difficulty.as_deref().unwrap_or_default(),
                },
            ),
        ]);
        for (stage, outputs) in &self.outputs {
            let fields: BTreeMap<String, Value> = outputs
                .iter()
                .map(|(name, output)| (name.clone(), to_template(output)))
                .collect();
            variables.insert(stage.clone(), Value::from_pairs(fields));
        }
        resources
            .prompts
            .render(&example.language, template, Value::from_pairs(variables))
            .map_err(|source| StageError::Prompt {
                example: example.id.clone(),
                stage: resources.pipeline.stages[index].name.clone(),
                source: Box::new(source),
            })
    }

    /// Runs one stage. What ends only the example is noted in it; what ends the run is an error.
    ///
    /// # Errors
    /// See [`StageError`].
    pub async fn run_stage(&mut self, resources: &Resources, index: usize) -> Result<(), StageError> {
        if self.ended.is_some() {
            return Ok(());
        }
        let stage = &resources.pipeline.stages[index];
        let (template, spec) = match self.choose(resources, index) {
            Ok(chosen) => chosen,
            Err(reason) => {
                self.ended = Some((Outcome::NoSql, format!("stage `{}`: {reason}", stage.name)));
                return Ok(());
            }
        };
        let messages = self.render(resources, index, template)?;
        let route = resources.router.route(&spec).map_err(|source| StageError::Route {
            stage: stage.name.clone(),
            source,
        })?;
        let request = route.request(
            messages,
            Call {
                repeat: resources.repeat,
                run: &resources.run,
                example: &self.example.id,
                stage: &stage.name,
                response_format: stage.response_format.as_ref(),
            },
        );
        let answer = route.provider.model.complete(&request).await;
        let mut trace = StageTrace {
            stage: stage.name.clone(),
            template: template.to_owned(),
            messages: request.messages,
            completion: None,
            failure: None,
            outputs: IndexMap::new(),
            defaulted: Vec::new(),
            warnings: Vec::new(),
        };
        match answer {
            Ok(completion) => {
                self.read(resources, index, &completion.text, &mut trace);
                if completion.is_cut() {
                    trace.warnings.push("the answer was cut at max_tokens".into());
                }
                for parameter in &completion.not_sent {
                    trace
                        .warnings
                        .push(format!("the server does not know `{parameter}`, so it was not sent"));
                }
                let wanted = request.n.unwrap_or(1) as usize;
                if completion.alternatives.len() + 1 < wanted && !completion.not_sent.iter().any(|name| name == "n") {
                    trace.warnings.push(format!(
                        "{wanted} completions were asked for, {} came",
                        completion.alternatives.len() + 1
                    ));
                }
                trace.completion = Some(completion);
            }
            Err(error) if error.class.action() == Action::FailRun => {
                return Err(StageError::Call {
                    example: self.example.id.clone(),
                    stage: stage.name.clone(),
                    source: Box::new(error),
                });
            }
            Err(error) => {
                trace.warnings.push(format!("{}: {error}", error.class.name()));
                let reason = format!("stage `{}`: {} ({})", stage.name, error, error.class.name());
                self.ended = Some((Outcome::ModelError, reason));
                self.error_class = Some(error.class);
                trace.failure = Some(CallFailure {
                    class: error.class,
                    message: error.message,
                    status: error.status,
                    attempts: error.attempts,
                    usage: *error.usage,
                    cost: error.cost,
                });
            }
        }
        self.outputs.insert(stage.name.clone(), trace.outputs.clone());
        self.stages.push(trace);
        Ok(())
    }

    fn read(&mut self, resources: &Resources, index: usize, answer: &str, trace: &mut StageTrace) {
        let stage = &resources.pipeline.stages[index];
        // A prompt may end in the beginning of the answer ("SELECT"), which then belongs to it.
        let whole = match trace.messages.last() {
            Some(last) if last.role == crate::prompt::Role::Assistant => continue_from(&last.content, answer),
            _ => answer.to_owned(),
        };
        for (name, extractor) in &stage.extract {
            let extracted = extract(extractor, &whole, &|text| self.fill(text));
            trace
                .warnings
                .extend(extracted.notes.into_iter().map(|note| format!("{name}: {note}")));
            if extracted.used_default && !extractor.optional {
                trace.defaulted.push(name.clone());
            }
            match extracted.value {
                Some(value) => {
                    if extractor.kind == ExtractKind::Sql
                        && let Err(problem) = parse(&value.as_text())
                    {
                        trace
                            .warnings
                            .push(format!("{name}: not SQL that can be analysed: {problem}"));
                    }
                    trace.outputs.insert(name.clone(), value);
                }
                None if self.ended.is_none() => {
                    let what = match (&extractor.kind, &extractor.after) {
                        (ExtractKind::Sql, None) => "no query in the answer".to_owned(),
                        (_, Some(marker)) => format!("nothing after `{marker}` in the answer"),
                        _ => format!("no `{name}` in the answer"),
                    };
                    self.ended = Some((Outcome::NoSql, format!("stage `{}`: {what}", stage.name)));
                }
                None => {}
            }
        }
    }

    /// Puts earlier outputs into a default's text.
    fn fill(&self, text: &str) -> String {
        static REFERENCE: OnceLock<Option<Regex>> = OnceLock::new();
        let reference =
            REFERENCE.get_or_init(|| Regex::new(r"\{\{\s*([a-z][a-z0-9_]*)\.([a-z][a-z0-9_]*)\s*\}\}").ok());
        let Some(reference) = reference else {
            return text.to_owned();
        };
        reference
            .replace_all(text, |found: &regex::Captures<'_>| {
                let output = OutputRef {
                    stage: found[1].to_owned(),
                    output: found[2].to_owned(),
                };
                self.output(&output).map(OutputValue::as_text).unwrap_or_default()
            })
            .into_owned()
    }

    fn output(&self, reference: &OutputRef) -> Option<&OutputValue> {
        self.outputs.get(&reference.stage)?.get(&reference.output)
    }

    /// The finished trace.
    pub fn finish(self, pipeline: &Pipeline) -> Trace {
        let prediction = self
            .output(&pipeline.answer)
            .map(OutputValue::as_text)
            .filter(|sql| !sql.trim().is_empty());
        let (outcome, error) = match (&self.ended, &prediction) {
            (Some((outcome, reason)), _) => (*outcome, Some(reason.clone())),
            (None, Some(_)) => (Outcome::Answered, None),
            (None, None) => (Outcome::NoSql, Some(format!("`{}` is empty", pipeline.answer))),
        };
        Trace {
            id: self.example.id.clone(),
            db: self.example.database.clone(),
            outcome,
            prediction: if outcome == Outcome::Answered { prediction } else { None },
            error,
            error_class: self.error_class,
            stages: self.stages,
        }
    }
}

fn to_template(output: &OutputValue) -> Value {
    match output {
        OutputValue::Text(text) => Value::from(text.as_str()),
        OutputValue::List(items) => items.iter().map(|item| Value::from(item.as_str())).collect(),
        OutputValue::Json(json) => Value::from(minijinja::value::Serde(json)),
    }
}
