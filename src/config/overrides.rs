//! `--set stage.key=value`: quick changes to a pipeline file from the command line.
//!
//! In: the argument's text. Out: an [`Override`], which is written into the file's tree before validation, so that a mistake in
//! it gets the same diagnostics as one in the file, with the argument's own text underlined.

use std::ops::Range;
use std::sync::Arc;

use thiserror::Error;

use super::check::{Checker, suggest};
use super::keys;
use super::yaml::{Entry, Node, Place, Scalar, ScalarKind, Source, Value};

/// What diagnostics call the place of an override.
const SOURCE_NAME: &str = "--set";

/// One parsed `--set` argument.
#[derive(Debug, Clone, PartialEq)]
pub struct Override {
    text: String,
    path: Vec<Segment>,
    value: serde_yaml::Value,
    value_span: Range<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Segment {
    name: String,
    span: Range<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OverrideError {
    #[error("`{0}` has no `=`, expected `stage.key=value`, `model.key=value` or `schema.key=value`")]
    NoValue(String),
    #[error("`{0}` has an empty name before the `=`, expected `stage.key=value`")]
    EmptyName(String),
    #[error("the value of `{text}` is not valid YAML: {reason}")]
    Value { text: String, reason: String },
}

impl Override {
    /// Reads `path.to.key=value`. The value is YAML (`0.5`, `true`, `[a, b]`, `{seed: 1}`); what is neither a scalar nor
    /// in brackets is text as it stands, so that `SQL:` needs no quotes.
    pub fn parse(text: &str) -> Result<Override, OverrideError> {
        let Some(equals) = text.find('=') else {
            return Err(OverrideError::NoValue(text.to_owned()));
        };
        let mut path = Vec::new();
        let mut start = 0;
        for part in text[..equals].split('.') {
            let name = part.trim();
            if name.is_empty() {
                return Err(OverrideError::EmptyName(text.to_owned()));
            }
            let lead = part.len() - part.trim_start().len();
            path.push(Segment {
                name: name.to_owned(),
                span: start + lead..start + lead + name.len(),
            });
            start += part.len() + 1;
        }
        let raw = &text[equals + 1..];
        let trimmed = raw.trim();
        let value = read_value(trimmed).map_err(|error| OverrideError::Value {
            text: text.to_owned(),
            reason: error.to_string(),
        })?;
        let value_start = equals + 1 + (raw.len() - raw.trim_start().len());
        Ok(Override {
            text: text.to_owned(),
            path,
            value,
            value_span: value_start..value_start + trimmed.len(),
        })
    }

    /// As it was given.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

fn read_value(text: &str) -> Result<serde_yaml::Value, serde_yaml::Error> {
    let written_as_yaml = text.starts_with(['{', '[', '"', '\'']);
    match serde_yaml::from_str::<serde_yaml::Value>(text) {
        Ok(value) if written_as_yaml => Ok(value),
        Err(error) if written_as_yaml => Err(error),
        Ok(value @ (serde_yaml::Value::Bool(_) | serde_yaml::Value::Number(_) | serde_yaml::Value::Null)) => Ok(value),
        _ => Ok(serde_yaml::Value::String(text.to_owned())),
    }
}

/// Writes the overrides into the tree, later ones over earlier ones.
pub(super) fn apply(root: &mut Node, overrides: &[Override], checker: &mut Checker) {
    for change in overrides {
        let source = checker.sources.len();
        checker.sources.push(Source {
            name: SOURCE_NAME.to_owned(),
            text: Arc::from(change.text.as_str()),
        });
        let place = |segment: &Segment| Place {
            source,
            span: segment.span.clone(),
        };
        let value = to_node(
            &change.value,
            &Place {
                source,
                span: change.value_span.clone(),
            },
        );
        let Some((first, rest)) = change.path.split_first() else {
            continue;
        };
        if matches!(first.name.as_str(), "model" | "schema")
            || (rest.is_empty() && matches!(first.name.as_str(), "name" | "description" | "answer"))
        {
            insert(root, &change.path, value, source, checker);
            continue;
        }
        let names: Vec<String> = stage_names(root);
        let Some(stage) = find_stage(root, &first.name) else {
            let settable = names.iter().map(String::as_str).chain(["model", "schema"]);
            let help = suggest(&first.name, settable, "stages and sections");
            checker
                .report(
                    "set::unknown_stage",
                    &place(first),
                    format!("there is no stage `{}` to set", first.name),
                    "not a stage",
                )
                .help(help);
            continue;
        };
        let Some(key) = rest.first() else {
            checker
                .report(
                    "set::no_key",
                    &place(first),
                    format!("`{}` is a stage, which of its keys?", first.name),
                    "a stage as a whole can't be set",
                )
                .help(format!(
                    "write `{}.KEY=VALUE`, for example `{0}.temperature=0.5`",
                    first.name
                ));
            continue;
        };
        if key.name == "name" {
            checker
                .report(
                    "set::rename",
                    &place(key),
                    "a stage can't be renamed by --set",
                    "would rename the stage",
                )
                .help(format!("for the model's name write `{}.model.name=…`", first.name));
            continue;
        }
        if !keys::STAGE.contains(&key.name.as_str()) && !keys::MODEL.contains(&key.name.as_str()) {
            let valid = keys::STAGE
                .iter()
                .chain(keys::MODEL)
                .copied()
                .filter(|name| *name != "name");
            let help = suggest(&key.name, valid, "keys");
            let message = format!("unknown key `{}` for the stage `{}`", key.name, first.name);
            checker
                .report("config::unknown_key", &place(key), message, "not a key here")
                .help(help);
            continue;
        }
        insert(stage, &with_model_section(rest), value, source, checker);
    }
}

/// `temperature` → `model.temperature`, directly under a stage or a case.
fn with_model_section(path: &[Segment]) -> Vec<Segment> {
    let mut full = path.to_vec();
    let is_model_key = |segment: Option<&Segment>| segment.is_some_and(|s| keys::MODEL.contains(&s.name.as_str()));
    let at = if is_model_key(path.first()) {
        Some(0)
    } else if path.first().is_some_and(|segment| segment.name == "cases") && is_model_key(path.get(2)) {
        Some(2)
    } else {
        None
    };
    if let Some(at) = at {
        let span = full[at].span.clone();
        full.insert(
            at,
            Segment {
                name: "model".to_owned(),
                span,
            },
        );
    }
    full
}

fn insert(node: &mut Node, path: &[Segment], value: Node, source: usize, checker: &mut Checker) {
    let Some((segment, rest)) = path.split_first() else {
        return;
    };
    if matches!(&node.value, Value::Scalar(scalar) if scalar.kind() == ScalarKind::Nothing) {
        node.value = Value::Mapping(Vec::new());
    }
    let segment_place = Place {
        source,
        span: segment.span.clone(),
    };
    let Value::Mapping(entries) = &mut node.value else {
        let message = format!("`{}` can't be set: what holds it is no mapping", segment.name);
        checker.report("set::no_mapping", &segment_place, message, "nothing to set here");
        return;
    };
    if let Some(entry) = entries.iter_mut().find(|entry| entry.key == segment.name) {
        if rest.is_empty() {
            entry.value = value;
        } else {
            insert(&mut entry.value, rest, value, source, checker);
        }
        return;
    }
    let mut fresh = value;
    if !rest.is_empty() {
        let mut section = Node {
            place: segment_place.clone(),
            value: Value::Mapping(Vec::new()),
        };
        insert(&mut section, rest, fresh, source, checker);
        fresh = section;
    }
    entries.push(Entry {
        key: segment.name.clone(),
        key_place: segment_place,
        value: fresh,
    });
}

fn stage_nodes(root: &Node) -> &[Node] {
    match root.get("stages").map(|entry| &entry.value.value) {
        Some(Value::Sequence(stages)) => stages,
        _ => &[],
    }
}

fn name_of(stage: &Node) -> Option<&str> {
    match stage.get("name").map(|entry| &entry.value.value) {
        Some(Value::Scalar(scalar)) => Some(&scalar.text),
        _ => None,
    }
}

fn stage_names(root: &Node) -> Vec<String> {
    stage_nodes(root)
        .iter()
        .filter_map(name_of)
        .map(str::to_owned)
        .collect()
}

fn find_stage<'a>(root: &'a mut Node, name: &str) -> Option<&'a mut Node> {
    let Value::Mapping(entries) = &mut root.value else {
        return None;
    };
    let stages = entries.iter_mut().find(|entry| entry.key == "stages")?;
    let Value::Sequence(stages) = &mut stages.value.value else {
        return None;
    };
    stages.iter_mut().find(|stage| name_of(stage) == Some(name))
}

/// Every part of a value stands at the place of the whole.
fn to_node(value: &serde_yaml::Value, place: &Place) -> Node {
    let scalar = |text: String, quoted: bool| Value::Scalar(Scalar { text, quoted });
    let value = match value {
        serde_yaml::Value::Null => scalar(String::new(), false),
        serde_yaml::Value::Bool(flag) => scalar(flag.to_string(), false),
        serde_yaml::Value::Number(number) => scalar(number.to_string(), false),
        serde_yaml::Value::String(text) => scalar(text.clone(), true),
        serde_yaml::Value::Sequence(items) => Value::Sequence(items.iter().map(|item| to_node(item, place)).collect()),
        serde_yaml::Value::Mapping(mapping) => Value::Mapping(
            mapping
                .iter()
                .map(|(key, value)| Entry {
                    key: key_text(key),
                    key_place: place.clone(),
                    value: to_node(value, place),
                })
                .collect(),
        ),
        serde_yaml::Value::Tagged(tagged) => return to_node(&tagged.value, place),
    };
    Node {
        place: place.clone(),
        value,
    }
}

fn key_text(key: &serde_yaml::Value) -> String {
    match key {
        serde_yaml::Value::String(text) => text.clone(),
        other => serde_yaml::to_string(other).unwrap_or_default().trim_end().to_owned(),
    }
}
