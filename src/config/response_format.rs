//! The `response_format` section of a stage: the form that the server is asked to give its answer.
//!
//! In: the section's node, and the stage's outputs. Out: a JSON Schema with a name, as the protocol wants it. Whether a server
//! can do it is not known here, nor is the schema itself checked: servers differ in what they take.

use indexmap::IndexMap;
use serde_json::{Map, Value as Json};

use super::check::{Checker, suggest};
use super::extract::OutputDraft;
use super::keys;
use super::pipeline::{ExtractKind, ResponseFormat};
use super::yaml::{Entry, Node, ScalarKind, Value};

/// The protocol's limit.
const LONGEST_NAME: usize = 64;

/// `stage` names the format where the section doesn't.
pub(super) fn read_response_format(checker: &mut Checker, entry: &Entry, stage: &str) -> Option<ResponseFormat> {
    const WHAT: &str = "`response_format`";
    const EXAMPLE: &str = "as in `response_format: { schema: { type: object, properties: { sql: { type: string } }, \
                           required: [sql], additionalProperties: false } }`";
    let node = &entry.value;
    if !matches!(node.value, Value::Mapping(_)) {
        checker.wrong_type(node, "a mapping", WHAT).help(EXAMPLE);
        return None;
    }
    checker.known_keys(node, WHAT, keys::RESPONSE_FORMAT);
    let name = match node.get("name") {
        None => Some(plain_name(stage)),
        Some(entry) => format_name(checker, &entry.value),
    };
    let Some(schema) = node.get("schema") else {
        checker.missing(node, &entry.key_place, "schema", WHAT, keys::RESPONSE_FORMAT, EXAMPLE);
        return None;
    };
    if !matches!(schema.value.value, Value::Mapping(_)) {
        checker
            .wrong_type(&schema.value, "a mapping (a JSON Schema)", "`schema`")
            .help(EXAMPLE);
        return None;
    }
    Some(ResponseFormat {
        name: name?,
        schema: to_json(&schema.value),
    })
}

/// An answer that has this form is JSON, so one of the outputs must read JSON, and only what the schema lets be there.
pub(super) fn check_outputs(
    checker: &mut Checker,
    entry: &Entry,
    what: &str,
    format: &ResponseFormat,
    outputs: &IndexMap<String, OutputDraft>,
) {
    // An output that could not be read may be the one.
    let reads_json = |output: &OutputDraft| match &output.extractor {
        Some(extractor) => [
            Some(&extractor.kind),
            extractor.fallback.as_ref().map(|fallback| &fallback.kind),
        ]
        .into_iter()
        .flatten()
        .any(|kind| matches!(kind, ExtractKind::Json { .. })),
        None => true,
    };
    if !outputs.values().any(reads_json) {
        checker
            .report(
                "config::response_format",
                &entry.key_place,
                format!("{what} asks for JSON, but none of its outputs reads JSON"),
                "an answer in this form has no markers",
            )
            .help(
                "add an extractor as in `sql: { json: whole_answer, pointer: /sql, fallback: { sql_after: \"SQL:\" } }`; \
                 the fallback is for servers that give plain text all the same",
            );
    }
    let Some(properties) = all_properties(&format.schema) else {
        return;
    };
    for part in outputs.values().filter_map(|output| output.json.as_ref()) {
        let first = part.pointer.as_deref().and_then(|pointer| pointer.split('/').nth(1));
        // RFC 6901's escapes, in this order.
        let Some(first) = first.map(|first| first.replace("~1", "/").replace("~0", "~")) else {
            continue;
        };
        if !properties.contains_key(&first) {
            let help = suggest(&first, properties.keys().map(String::as_str), "properties");
            checker
                .report(
                    "config::response_format",
                    &part.place,
                    format!("the `schema` of {what} has no `{first}`"),
                    "never in an answer of this form",
                )
                .also(&entry.key_place, "the form")
                .help(help);
        }
    }
}

/// The properties of an object that may have no others; `None` where that can't be told.
fn all_properties(schema: &Json) -> Option<&Map<String, Json>> {
    let closed = schema.get("type")? == "object" && schema.get("additionalProperties")? == false;
    let open = ["patternProperties", "allOf", "anyOf", "oneOf", "$ref"];
    if !closed || open.iter().any(|key| schema.get(key).is_some()) {
        return None;
    }
    schema.get("properties")?.as_object()
}

fn is_plain(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-')
}

fn plain_name(stage: &str) -> String {
    stage
        .chars()
        .take(LONGEST_NAME)
        .map(|letter| if is_plain(letter) { letter } else { '_' })
        .collect()
}

fn format_name(checker: &mut Checker, node: &Node) -> Option<String> {
    let name = checker.text(node, "`name`")?;
    if name.chars().all(is_plain) && name.len() <= LONGEST_NAME {
        return Some(name);
    }
    checker
        .report(
            "config::bad_name",
            &node.place,
            format!("`{name}` is no name for a response format"),
            "not a name",
        )
        .help(format!(
            "letters, digits, `_` and `-`, at most {LONGEST_NAME}, as in `{}`; or leave it out",
            plain_name(&name)
        ));
    None
}

/// YAML's core schema is what JSON has, except for numbers that are too large.
fn to_json(node: &Node) -> Json {
    match &node.value {
        Value::Mapping(entries) => entries
            .iter()
            .map(|entry| (entry.key.clone(), to_json(&entry.value)))
            .collect::<Map<_, _>>()
            .into(),
        Value::Sequence(items) => items.iter().map(to_json).collect::<Vec<_>>().into(),
        Value::Scalar(scalar) => match scalar.kind() {
            ScalarKind::Nothing => Json::Null,
            ScalarKind::Boolean(value) => value.into(),
            ScalarKind::Integer(value) => value.into(),
            ScalarKind::Number(value) if value.is_finite() => value.into(),
            ScalarKind::Number(_) | ScalarKind::Text => scalar.text.as_str().into(),
        },
    }
}
