//! The pipeline file's form as JSON Schema (draft 7), for editors.
//!
//! In: nothing. Out: the schema, generated from types that mirror the YAML form (`sql_after: "SQL:"` and the like), which differs from
//! [`Pipeline`](super::Pipeline), the validated form. What a schema can't say (references, templates, labels) only the validator checks.

#![allow(dead_code, reason = "the mirror types exist for their schema and are never built")]

use std::collections::BTreeMap;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;

/// JSON Schema of a pipeline file.
pub fn pipeline_schema() -> serde_json::Value {
    SchemaSettings::draft07()
        .into_generator()
        .into_root_schema_for::<PipelineFile>()
        .to_value()
}

/// A pipeline: a named list of stages, and the output that is its answer.
#[derive(JsonSchema)]
#[schemars(title = "dinsql pipeline", deny_unknown_fields, extend("required" = ["name", "stages", "answer"]))]
struct PipelineFile {
    /// The pipeline's name; run folders are named after it.
    #[schemars(regex(pattern = r"^[^\s/\\.+_-][^\s/\\]*$"), length(max = 100))]
    name: String,
    /// What the pipeline is, in a sentence.
    #[schemars(extend("type" = ["string", "null"]))]
    description: Option<String>,
    /// Model and sampling parameters of every stage that doesn't say otherwise.
    #[schemars(with = "ModelSection")]
    model: Option<ModelSection>,
    /// What `{{ schema }}` renders to in templates.
    #[schemars(with = "SchemaSection")]
    schema: Option<SchemaSection>,
    /// The stages, in order of execution.
    #[schemars(length(min = 1))]
    stages: Vec<StageSection>,
    /// The output that holds the predicted SQL, as in `generation.sql`.
    #[schemars(regex(pattern = r"^[^.]+\.[^.]+$"))]
    answer: String,
}

/// Model and sampling parameters; what is absent is inherited.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields, extend("required" = []))]
struct ModelSection {
    /// A provider of `dinsql.yaml`, `embedded`, or `default`.
    #[schemars(with = "String", length(min = 1))]
    provider: Option<String>,
    /// The model's name at its provider.
    #[schemars(with = "String", length(min = 1))]
    name: Option<String>,
    /// Sampling temperature.
    #[schemars(with = "f64", range(min = 0, max = 2))]
    temperature: Option<f64>,
    /// Nucleus sampling: the share of probability that is sampled from.
    #[schemars(with = "f64", range(min = 0, max = 1))]
    top_p: Option<f64>,
    /// Completion tokens at most.
    #[schemars(with = "u32", range(min = 1))]
    max_tokens: Option<u32>,
    /// Seed of the sampling, for servers that take one.
    #[schemars(with = "i64")]
    seed: Option<i64>,
    /// Texts that end the completion.
    #[schemars(with = "OneOrMore")]
    stop: Option<OneOrMore>,
    /// Seconds for one attempt of one call.
    #[schemars(with = "f64", extend("exclusiveMinimum" = 0), range(max = 86400))]
    timeout: Option<f64>,
    /// Completions in one request: the first is the answer, all are in the trace.
    #[schemars(with = "u32", range(min = 1, max = 32))]
    n: Option<u32>,
    /// Whether the trace keeps the tokens' log probabilities, where the server gives them.
    #[schemars(with = "bool")]
    logprobs: Option<bool>,
}

/// A text, or a list of texts.
#[derive(JsonSchema)]
#[schemars(untagged)]
enum OneOrMore {
    One(#[schemars(length(min = 1))] String),
    More(Vec<String>),
}

/// How the database's schema is shown in prompts.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields, extend("required" = []))]
struct SchemaSection {
    /// `ddl`: CREATE TABLE statements; `compact`: Spider's lines; `table`: a line a table. Default: `ddl`.
    #[schemars(with = "FormatWord")]
    format: Option<FormatWord>,
    /// Rows shown for each table. Default: 3.
    #[schemars(with = "u32", range(max = 1000))]
    sample_rows: Option<u32>,
    /// Whether column descriptions follow. Default: true.
    #[schemars(with = "bool")]
    descriptions: Option<bool>,
    /// Characters of a cell that are shown. Default: 60.
    #[schemars(with = "u32", range(min = 1, max = 100_000))]
    max_cell: Option<u32>,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
enum FormatWord {
    Ddl,
    Compact,
    Table,
}

/// One model call: a template, or a switch between several, and what is read from the answer.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields, extend("required" = ["name", "extract"], "oneOf" = [
    { "required": ["prompt"], "not": { "required": ["cases"] } },
    { "required": ["switch", "cases"] },
]))]
struct StageSection {
    /// Later stages read this one's outputs by this name.
    #[schemars(regex(pattern = "^[a-z][a-z0-9_]*$"))]
    name: String,
    /// The template, without language and ending, as in `din-sql/easy`.
    #[schemars(with = "String", length(min = 1))]
    prompt: Option<String>,
    /// The label of an earlier stage that chooses the template, as in `classification.label`.
    #[schemars(with = "String", regex(pattern = r"^[^.]+\.[^.]+$"))]
    switch: Option<String>,
    /// A template for each label.
    #[schemars(with = "BTreeMap<String, CaseSection>", extend("minProperties" = 1))]
    cases: Option<BTreeMap<String, CaseSection>>,
    /// Overrides of the pipeline's model for this stage.
    #[schemars(with = "ModelSection")]
    model: Option<ModelSection>,
    /// Named outputs.
    #[schemars(extend("minProperties" = 1, "propertyNames" = { "pattern": "^[a-z][a-z0-9_]*$" }))]
    extract: BTreeMap<String, ExtractorSection>,
    /// The form of the answer that the server is asked to keep to, where it can; one of the outputs must read JSON.
    #[schemars(with = "ResponseFormatSection")]
    response_format: Option<ResponseFormatSection>,
}

/// A JSON Schema for the answer.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields, extend("required" = ["schema"]))]
struct ResponseFormatSection {
    /// The form's name at the server. Default: the stage's name.
    #[schemars(with = "String", regex(pattern = "^[A-Za-z0-9_-]{1,64}$"))]
    name: Option<String>,
    /// The JSON Schema, as the server takes it.
    schema: serde_json::Map<String, serde_json::Value>,
}

/// What a switch does for one label.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields, extend("required" = ["prompt"]))]
struct CaseSection {
    /// The template, without language and ending.
    #[schemars(length(min = 1))]
    prompt: String,
    /// Overrides of the stage's model for this case.
    #[schemars(with = "ModelSection")]
    model: Option<ModelSection>,
}

/// How one output is read from a completion; exactly one of the kinds.
#[derive(JsonSchema)]
#[schemars(deny_unknown_fields, extend("required" = [], "oneOf" = [
    { "required": ["sql_after"] }, { "required": ["sql"] },
    { "required": ["list_after"] }, { "required": ["list"] },
    { "required": ["label_after"] }, { "required": ["label"] },
    { "required": ["text_after"] }, { "required": ["text"] },
    { "required": ["json_after"] }, { "required": ["json"] },
    { "required": ["regex"] },
]))]
struct ExtractorSection {
    /// The SQL that follows this marker.
    #[schemars(with = "String", length(min = 1))]
    sql_after: Option<String>,
    /// The SQL of the whole answer.
    #[schemars(with = "WholeAnswer")]
    sql: Option<WholeAnswer>,
    /// The list, as in `[a, b]`, that follows this marker.
    #[schemars(with = "String", length(min = 1))]
    list_after: Option<String>,
    /// The list of the whole answer.
    #[schemars(with = "WholeAnswer")]
    list: Option<WholeAnswer>,
    /// The label that follows this marker.
    #[schemars(with = "String", length(min = 1))]
    label_after: Option<String>,
    /// The label of the whole answer.
    #[schemars(with = "WholeAnswer")]
    label: Option<WholeAnswer>,
    /// The text that follows this marker.
    #[schemars(with = "String", length(min = 1))]
    text_after: Option<String>,
    /// The whole answer as text.
    #[schemars(with = "WholeAnswer")]
    text: Option<WholeAnswer>,
    /// The JSON value that follows this marker.
    #[schemars(with = "String", length(min = 1))]
    json_after: Option<String>,
    /// The JSON value of the whole answer.
    #[schemars(with = "WholeAnswer")]
    json: Option<WholeAnswer>,
    /// A regular expression: its first group, else the whole match.
    #[schemars(with = "String", length(min = 1))]
    regex: Option<String>,
    /// The labels there are; a switch needs them.
    #[schemars(with = "Vec<Word>", length(min = 1))]
    one_of: Option<Vec<Word>>,
    /// Selects a part of the JSON value (RFC 6901).
    #[schemars(with = "String", regex(pattern = "^/"))]
    pointer: Option<String>,
    /// Which occurrence of the marker counts. Default: `last`.
    #[schemars(with = "TakeWord")]
    take: Option<TakeWord>,
    /// The value where nothing is found; texts may hold `{{ stage.output }}` of earlier stages.
    #[schemars(with = "DefaultSection")]
    default: Option<DefaultSection>,
    /// Whether an answer without it is as good as any: then the default's use is not flagged. Default: false.
    #[schemars(with = "bool")]
    optional: Option<bool>,
    /// How it is read where the rest finds nothing, before the default; without `default`, `optional` and `fallback` of its own.
    #[schemars(with = "FallbackSection")]
    fallback: Option<Box<FallbackSection>>,
}

/// A second way to read an output: an extractor that has no default and no fallback.
#[derive(JsonSchema)]
#[schemars(transparent, extend("not" = { "anyOf": [
    { "required": ["default"] }, { "required": ["optional"] }, { "required": ["fallback"] },
] }))]
struct FallbackSection(Box<ExtractorSection>);

/// Reads the whole answer.
#[derive(JsonSchema)]
#[schemars(rename_all = "snake_case")]
enum WholeAnswer {
    WholeAnswer,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
enum TakeWord {
    First,
    Last,
}

/// A text; numbers and truth values are read as they are written.
#[derive(JsonSchema)]
#[schemars(untagged)]
enum Word {
    Text(String),
    Number(f64),
    Truth(bool),
}

/// A text, or a list of texts.
#[derive(JsonSchema)]
#[schemars(untagged)]
enum DefaultSection {
    Text(Word),
    List(Vec<Word>),
}

#[cfg(test)]
mod tests {
    use super::super::keys;
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    #[test]
    fn checked_in_schema_is_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/pipeline.schema.json");
        let generated = serde_json::to_string_pretty(&pipeline_schema()).expect("serialisable") + "\n";
        if std::env::var("DINSQL_UPDATE_DOCS").is_ok_and(|value| value == "1") {
            std::fs::write(&path, &generated).expect("docs/ is writable");
        }
        let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            checked_in == generated,
            "{} is stale; run the tests with DINSQL_UPDATE_DOCS=1",
            path.display()
        );
    }

    #[test]
    fn schema_and_validator_know_the_same_keys() {
        let schema = pipeline_schema();
        assert_eq!(schema["$schema"], "http://json-schema.org/draft-07/schema#");
        let names = |section: &serde_json::Value| -> BTreeSet<String> {
            assert_eq!(section["additionalProperties"], false);
            section["properties"]
                .as_object()
                .expect("properties")
                .keys()
                .cloned()
                .collect()
        };
        let listed = |list: &[&str]| -> BTreeSet<String> { list.iter().map(|&key| key.to_owned()).collect() };
        assert_eq!(names(&schema), listed(keys::PIPELINE));
        for (section, list) in [
            ("ModelSection", keys::MODEL),
            ("SchemaSection", keys::SCHEMA),
            ("StageSection", keys::STAGE),
            ("ResponseFormatSection", keys::RESPONSE_FORMAT),
            ("CaseSection", keys::CASE),
            ("ExtractorSection", keys::EXTRACTOR),
        ] {
            assert_eq!(names(&schema["definitions"][section]), listed(list), "{section}");
        }
        // Every other key may be left out; the attributes above list what may not.
        assert_eq!(schema["required"], serde_json::json!(["name", "stages", "answer"]));
        assert_eq!(
            schema["definitions"]["StageSection"]["required"],
            serde_json::json!(["name", "extract"])
        );
        assert_eq!(schema["definitions"]["ModelSection"]["required"], serde_json::json!([]));
        let kinds: BTreeSet<String> = schema["definitions"]["ExtractorSection"]["oneOf"]
            .as_array()
            .expect("kinds")
            .iter()
            .filter_map(|kind| kind["required"][0].as_str().map(str::to_owned))
            .collect();
        assert_eq!(kinds, listed(keys::EXTRACTOR_KINDS));
    }
}
