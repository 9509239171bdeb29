//! The keys that configuration files have, in the order in which help texts list them.
//!
//! The validator, `--set` and the JSON Schema's test all read these lists, so none of them can drift from the others.

pub const PIPELINE: &[&str] = &["name", "description", "model", "schema", "stages", "answer"];
pub const MODEL: &[&str] = &[
    "provider",
    "name",
    "temperature",
    "top_p",
    "max_tokens",
    "seed",
    "stop",
    "timeout",
    "n",
    "logprobs",
];
pub const SCHEMA: &[&str] = &["format", "sample_rows", "descriptions", "max_cell"];
pub const STAGE: &[&str] = &[
    "name",
    "prompt",
    "switch",
    "cases",
    "model",
    "extract",
    "response_format",
];
pub const RESPONSE_FORMAT: &[&str] = &["name", "schema"];
pub const CASE: &[&str] = &["prompt", "model"];
pub const EXTRACTOR: &[&str] = &[
    "sql_after",
    "sql",
    "list_after",
    "list",
    "label_after",
    "label",
    "text_after",
    "text",
    "json_after",
    "json",
    "regex",
    "one_of",
    "pointer",
    "take",
    "default",
    "optional",
    "fallback",
];
/// Those of [`EXTRACTOR`] of which an extractor has exactly one.
pub const EXTRACTOR_KINDS: &[&str] = EXTRACTOR.split_at(11).0;

pub const PROJECT: &[&str] = &[
    "providers",
    "default_provider",
    "datasets",
    "prompts",
    "pipelines",
    "runs",
    "cache",
    "prices",
    "confirm_above",
];
pub const PROVIDER: &[&str] = &[
    "base_url",
    "api_key_env",
    "api_key_file",
    "headers",
    "model",
    "concurrency",
    "requests_per_minute",
    "tokens_per_minute",
    "timeout",
    "total_timeout",
    "attempts",
    "context",
    "models",
    "prices",
    "structured_output",
];
pub const PRICE_FILE: &[&str] = &["updated", "prices"];
pub const PRICE: &[&str] = &["input", "cached_input", "output"];
pub const PRICE_ENTRY: &[&str] = &["model", "names", "input", "cached_input", "output", "source", "date"];

/// Names that templates and `--set` give a meaning of their own.
pub const RESERVED_STAGE_NAMES: &[&str] = &[
    "question",
    "evidence",
    "schema",
    "dialect",
    "language",
    "shots",
    "values",
    "example",
    "system",
    "user",
    "assistant",
    "model",
];
