//! `prompt lint`: does every template of a pipeline parse in every language, is every variable filled, and do the
//! languages agree in slots, roles, stages and worked examples?

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{PromptError, Prompts, VARIABLES};
use crate::config::pipeline::{Pipeline, StageKind};
use crate::diagnostic::did_you_mean;

/// One thing that is wrong with a template.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Problem {
    pub language: String,
    pub stage: String,
    pub template: String,
    pub message: String,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LintReport {
    /// Templates looked at, over all languages.
    pub checked: usize,
    pub problems: Vec<Problem>,
}

/// What must agree between the languages of one template.
#[derive(Debug, PartialEq)]
struct Shape {
    variables: BTreeSet<String>,
    roles: Vec<String>,
    includes: Vec<String>,
    /// How often each of the pipeline's markers stands at a line's beginning: one for each worked example, and the instruction.
    markers: BTreeMap<String, usize>,
    /// Lines that begin a list item or a step.
    items: usize,
}

/// Looks at each template in each of the languages. Template errors come first, then differences between languages,
/// measured against the first language given.
pub fn lint(pipeline: &Pipeline, prompts: &Prompts, languages: &[String]) -> LintReport {
    let mut report = LintReport::default();
    for (index, stage) in pipeline.stages.iter().enumerate() {
        let templates: Vec<&str> = match &stage.kind {
            StageKind::Prompt { template } => vec![template],
            StageKind::Switch { cases, .. } => cases.values().map(|case| case.template.as_str()).collect(),
        };
        let markers: Vec<&str> = stage
            .extract
            .values()
            .filter_map(|extractor| extractor.after.as_deref())
            .collect();
        for template in templates {
            let mut shapes: Vec<(&String, Shape)> = Vec::new();
            for language in languages {
                report.checked += 1;
                let mut problem = |message: String| {
                    report.problems.push(Problem {
                        language: language.clone(),
                        stage: stage.name.clone(),
                        template: template.to_owned(),
                        message,
                    });
                };
                match shape(prompts, language, template, &markers) {
                    Ok(found) => {
                        for name in &found.variables {
                            if let Some(message) = unfilled(pipeline, index, name) {
                                problem(message);
                            }
                        }
                        for (marker, count) in &found.markers {
                            if *count == 0 {
                                problem(format!(
                                    "never shows the marker `{marker}` that the stage reads the answer by"
                                ));
                            }
                        }
                        shapes.push((language, found));
                    }
                    Err(error) => problem(error.to_string()),
                }
            }
            let Some(((first, reference), others)) = shapes.split_first() else {
                continue;
            };
            for (language, found) in others {
                for message in differences(reference, found, first) {
                    report.problems.push(Problem {
                        language: (*language).clone(),
                        stage: stage.name.clone(),
                        template: template.to_owned(),
                        message,
                    });
                }
            }
        }
    }
    report
}

fn shape(prompts: &Prompts, language: &str, template: &str, markers: &[&str]) -> Result<Shape, PromptError> {
    let parts = prompts.parts(language, template)?;
    let mut text = String::new();
    for part in &parts {
        text.push_str(&prompts.source(language, part)?.0);
        text.push('\n');
    }
    let roles = text
        .split("{{")
        .skip(1)
        .filter_map(|rest| rest.trim_start_matches('-').trim_start().split_once('('))
        .filter(|(name, _)| super::ROLES.contains(name))
        .map(|(name, _)| name.to_owned())
        .collect();
    let markers = markers
        .iter()
        .map(|&marker| (marker.to_owned(), text.matches(marker).count()))
        .collect();
    let items = text
        .lines()
        .filter(|line| line.starts_with("- ") || line.starts_with("* ") || numbered(line))
        .count();
    Ok(Shape {
        variables: prompts.variables(language, template)?,
        roles,
        includes: parts[1..].to_vec(),
        markers,
        items,
    })
}

fn numbered(line: &str) -> bool {
    line.split_once(['.', ')']).is_some_and(|(number, rest)| {
        !number.is_empty()
            && number.len() < 3
            && number.bytes().all(|byte| byte.is_ascii_digit())
            && rest.starts_with(' ')
    })
}

/// Why nothing fills a variable at a stage; `None` where something does.
fn unfilled(pipeline: &Pipeline, at: usize, name: &str) -> Option<String> {
    let mut parts = name.split('.');
    let first = parts.next().unwrap_or_default();
    if VARIABLES.contains(&first) || is_global(first) {
        return None;
    }
    let earlier = &pipeline.stages[..at];
    let Some(stage) = earlier.iter().find(|stage| stage.name == first) else {
        let mut known: Vec<&str> = VARIABLES.to_vec();
        known.extend(earlier.iter().map(|stage| stage.name.as_str()));
        if let Some(later) = pipeline.stages[at..].iter().find(|stage| stage.name == first) {
            return Some(format!(
                "uses `{name}`, but stage `{}` comes no earlier than this one",
                later.name
            ));
        }
        let hint = did_you_mean(first, known.iter().copied())
            .map(|near| format!("; did you mean `{near}`?"))
            .unwrap_or_default();
        return Some(format!("uses `{name}`, which nothing fills{hint}"));
    };
    let output = parts.next()?;
    if stage.extract.contains_key(output) {
        return None;
    }
    let known: Vec<&str> = stage.extract.keys().map(String::as_str).collect();
    let hint = did_you_mean(output, known.iter().copied())
        .map(|near| format!("; did you mean `{first}.{near}`?"))
        .unwrap_or_default();
    Some(format!(
        "uses `{name}`, but stage `{first}` gives {}{hint}",
        known.join(", ")
    ))
}

fn is_global(name: &str) -> bool {
    matches!(
        name,
        "range" | "dict" | "debug" | "namespace" | "loop" | "self" | "super" | "caller" | "true" | "false" | "none"
    )
}

fn differences(reference: &Shape, found: &Shape, language: &str) -> Vec<String> {
    let mut messages = Vec::new();
    let list = |names: Vec<&String>| {
        names
            .into_iter()
            .map(|name| format!("`{name}`"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let missing: Vec<_> = reference.variables.difference(&found.variables).collect();
    if !missing.is_empty() {
        messages.push(format!("lacks {}, which `{language}` has", list(missing)));
    }
    let more: Vec<_> = found.variables.difference(&reference.variables).collect();
    if !more.is_empty() {
        messages.push(format!("has {}, which `{language}` lacks", list(more)));
    }
    if reference.roles != found.roles {
        messages.push(format!(
            "has the roles {:?}, `{language}` has {:?}",
            found.roles, reference.roles
        ));
    }
    if reference.includes != found.includes {
        messages.push(format!(
            "includes {:?}, `{language}` includes {:?}",
            found.includes, reference.includes
        ));
    }
    for (marker, count) in &reference.markers {
        let here = found.markers.get(marker).copied().unwrap_or(0);
        if here != *count {
            messages.push(format!(
                "shows `{marker}` {here} times, `{language}` {count} times (worked examples differ?)"
            ));
        }
    }
    if reference.items != found.items {
        messages.push(format!(
            "has {} listed rules or steps, `{language}` has {}",
            found.items, reference.items
        ));
    }
    messages
}
