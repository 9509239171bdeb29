//! What a pipeline file says, after validation: plain data, no YAML and no places.

use std::collections::BTreeMap;
use std::fmt;

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

/// A validated pipeline: a named list of stages and the output that is its answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pipeline {
    pub name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Model and sampling parameters of every stage that does not say otherwise.
    #[serde(default)]
    pub model: ModelSpec,
    /// What `{{ schema }}` renders to.
    #[serde(default)]
    pub schema: SchemaSpec,
    /// In order of execution; never empty.
    pub stages: Vec<Stage>,
    /// The output that holds the predicted SQL.
    pub answer: OutputRef,
}

/// `stage.output`, as in `classification.label`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct OutputRef {
    pub stage: String,
    pub output: String,
}

impl fmt::Display for OutputRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.stage, self.output)
    }
}

impl From<OutputRef> for String {
    fn from(value: OutputRef) -> Self {
        value.to_string()
    }
}

impl TryFrom<String> for OutputRef {
    type Error = String;

    fn try_from(value: String) -> Result<Self, Self::Error> {
        match value.split_once('.') {
            Some((stage, output)) if !stage.is_empty() && !output.is_empty() && !output.contains('.') => {
                Ok(OutputRef {
                    stage: stage.to_owned(),
                    output: output.to_owned(),
                })
            }
            _ => Err(format!("`{value}` is not of the form `stage.output`")),
        }
    }
}

/// Model and sampling parameters; what is absent is inherited (stage ← pipeline ← project ← provider default).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// Completion tokens at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<i64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Seconds for one attempt of one call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<f64>,
    /// Completions in one request: the first is the answer, all are in the trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n: Option<u32>,
    /// Whether the trace keeps the tokens' log probabilities, where the server gives them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<bool>,
}

impl ModelSpec {
    /// `self` where it says something, else `base`.
    #[must_use]
    pub fn over(&self, base: &ModelSpec) -> ModelSpec {
        ModelSpec {
            provider: self.provider.clone().or_else(|| base.provider.clone()),
            name: self.name.clone().or_else(|| base.name.clone()),
            temperature: self.temperature.or(base.temperature),
            top_p: self.top_p.or(base.top_p),
            max_tokens: self.max_tokens.or(base.max_tokens),
            seed: self.seed.or(base.seed),
            stop: if self.stop.is_empty() {
                base.stop.clone()
            } else {
                self.stop.clone()
            },
            timeout: self.timeout.or(base.timeout),
            n: self.n.or(base.n),
            logprobs: self.logprobs.or(base.logprobs),
        }
    }
}

/// What `{{ schema }}` renders to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct SchemaSpec {
    pub format: SchemaFormat,
    /// Rows shown for each table.
    pub sample_rows: u32,
    /// Whether column descriptions follow (BIRD's `database_description`).
    pub descriptions: bool,
    /// Characters of a cell that are shown; the cut is marked.
    pub max_cell: u32,
}

impl Default for SchemaSpec {
    fn default() -> Self {
        SchemaSpec {
            format: SchemaFormat::Ddl,
            sample_rows: 3,
            descriptions: true,
            max_cell: 60,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SchemaFormat {
    /// `CREATE TABLE` statements.
    Ddl,
    /// Spider's `Table t, columns = [*,a,b]` lines, with foreign and primary keys.
    Compact,
    /// A line a table: `t(a INTEGER PRIMARY KEY, b TEXT -> u.c)`.
    Table,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    pub name: String,
    pub kind: StageKind,
    /// Overrides of the pipeline's model for this stage.
    #[serde(default)]
    pub model: ModelSpec,
    /// Named outputs, in file order. Never empty for stages that ask a model.
    pub extract: IndexMap<String, Extractor>,
    /// The form of the answer that the server is asked to keep to, where it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_format: Option<ResponseFormat>,
}

/// A JSON Schema for the answer of a stage. Servers without structured output never see it; the extractors'
/// fallbacks are for them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResponseFormat {
    /// Letters, digits, `_` and `-`, at most 64, as the protocol demands.
    pub name: String,
    pub schema: serde_json::Value,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageKind {
    /// One model call with the rendered template.
    Prompt { template: String },
    /// One model call, whose template is chosen by an earlier stage's label.
    Switch {
        on: OutputRef,
        cases: IndexMap<String, Case>,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    pub template: String,
    #[serde(default)]
    pub model: ModelSpec,
}

/// How one output is read from a completion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Extractor {
    pub kind: ExtractKind,
    /// The output is what follows this marker; the whole answer where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// Which occurrence of the marker (or match of the pattern) counts.
    #[serde(default)]
    pub take: Take,
    /// The value where nothing is found; its use is flagged in the trace.
    /// Strings may hold `{{ stage.output }}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<DefaultValue>,
    /// Whether an answer without it is as good as any: then the default's use is not flagged.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub optional: bool,
    /// How the output is read where the rest finds nothing, before the default; it has neither of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Box<Extractor>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExtractKind {
    Sql,
    /// `[a, b, "c, d"]` → list of text.
    List,
    /// One of a set of words, compared without case and quotes; empty `one_of` accepts any word.
    Label {
        one_of: Vec<String>,
    },
    Text,
    /// The first capture group, else the whole match.
    Regex {
        pattern: String,
    },
    /// A JSON value; `pointer` (RFC 6901) selects a part.
    Json {
        pointer: Option<String>,
    },
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Take {
    First,
    #[default]
    Last,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DefaultValue {
    Text(String),
    List(Vec<String>),
}

impl Pipeline {
    pub fn stage(&self, name: &str) -> Option<&Stage> {
        self.stages.iter().find(|stage| stage.name == name)
    }

    /// The model of every call the pipeline may make: of each stage, and of each case that says otherwise.
    pub fn models(&self) -> Vec<ModelSpec> {
        let mut models = Vec::new();
        for stage in &self.stages {
            let own = stage.model.over(&self.model);
            if let StageKind::Switch { cases, .. } = &stage.kind {
                models.extend(
                    cases
                        .values()
                        .filter(|case| case.model != ModelSpec::default())
                        .map(|case| case.model.over(&own)),
                );
            }
            models.push(own);
        }
        models
    }

    /// Every template the pipeline may render, with the stage that does, in order.
    pub fn templates(&self) -> Vec<(&str, &str)> {
        let mut found = Vec::new();
        for stage in &self.stages {
            match &stage.kind {
                StageKind::Prompt { template } => found.push((stage.name.as_str(), template.as_str())),
                StageKind::Switch { cases, .. } => {
                    found.extend(cases.values().map(|case| (stage.name.as_str(), case.template.as_str())));
                }
            }
        }
        found
    }

    /// Output names by stage.
    pub fn outputs(&self) -> BTreeMap<&str, Vec<&str>> {
        self.stages
            .iter()
            .map(|stage| (stage.name.as_str(), stage.extract.keys().map(String::as_str).collect()))
            .collect()
    }
}
