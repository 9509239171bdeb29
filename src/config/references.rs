//! What stages read from each other: `switch`, `{{ stage.output }}` in defaults, and `answer`.
//!
//! In: all stages as far as they could be read. Out: a mistake for each reference that nothing earlier fills; since a stage reads
//! only from earlier ones, no pipeline can go round in a circle.

use super::check::{Checker, list, suggest};
use super::extract::OutputDraft;
use super::pipeline::{ExtractKind, OutputRef};
use super::validate::{KindDraft, StageDraft};
use super::yaml::Place;
use crate::diagnostic::did_you_mean;

pub(super) fn check(checker: &mut Checker, stages: &[StageDraft<'_>], answer: Option<&(String, Place)>) {
    for (index, stage) in stages.iter().enumerate() {
        if let Some(KindDraft::Switch { on, cases }) = &stage.kind {
            let label = on.as_ref().and_then(|(text, place)| {
                let output = resolve(checker, stages, Some(index), text, place, "`switch`")?;
                switch_labels(checker, text, place, output)
            });
            if let (Some(labels), Some((cases_place, cases))) = (label, cases) {
                check_cases(
                    checker,
                    on.as_ref().map_or("", |(text, _)| text),
                    labels,
                    cases_place,
                    cases,
                );
            }
        }
        for output in stage.outputs.values() {
            for (text, place) in &output.default_texts {
                check_default(checker, stages, index, text, place);
            }
        }
    }
    if let Some((text, place)) = answer {
        check_answer(checker, stages, text, place);
    }
}

/// The output that `stage.output` names, if an earlier stage than `reader` gives it.
fn resolve<'s>(
    checker: &mut Checker,
    stages: &'s [StageDraft<'_>],
    reader: Option<usize>,
    text: &str,
    place: &Place,
    what: &str,
) -> Option<&'s OutputDraft> {
    let earlier = &stages[..reader.unwrap_or(stages.len())];
    let available: Vec<String> = earlier
        .iter()
        .flat_map(|stage| {
            stage
                .outputs
                .keys()
                .map(move |output| format!("{}.{output}", stage.name))
        })
        .collect();
    let outputs = || match available.as_slice() {
        [] => "no earlier stage gives an output".to_owned(),
        some => format!(
            "outputs that can be read here: {}",
            list(some.iter().take(30).map(String::as_str), ", ")
        ),
    };
    let Ok(reference) = OutputRef::try_from(text.to_owned()) else {
        checker
            .report(
                "config::bad_reference",
                place,
                format!("{what} reads `{text}`, which is not of the form `stage.output`"),
                "expected `stage.output`",
            )
            .help(outputs());
        return None;
    };
    let found = earlier.iter().find(|stage| stage.name == reference.stage);
    let Some(stage) = found else {
        if earlier.iter().any(|stage| stage.name.is_empty()) {
            // A stage whose name could not be read may be the one.
            return None;
        }
        let later = reader.and_then(|reader| {
            let position = stages[reader..]
                .iter()
                .position(|stage| stage.name == reference.stage)?;
            Some(position == 0)
        });
        let (code, message, label) = match later {
            Some(true) => (
                "config::forward_reference",
                format!("{what} reads `{text}`, an output of this stage itself"),
                "not there yet",
            ),
            Some(false) => (
                "config::forward_reference",
                format!("{what} reads `{text}`, but the stage `{}` comes later", reference.stage),
                "not there yet",
            ),
            None => (
                "config::unknown_stage",
                format!("{what} reads `{text}`, but there is no stage `{}`", reference.stage),
                "no such stage",
            ),
        };
        let near = did_you_mean(text, available.iter().map(String::as_str))
            .map(str::to_owned)
            .or_else(|| {
                let stage = did_you_mean(&reference.stage, earlier.iter().map(|stage| stage.name.as_str()))?;
                let whole = format!("{stage}.{}", reference.output);
                available.contains(&whole).then_some(whole)
            })
            .filter(|_| later.is_none());
        let help = near.map_or_else(outputs, |near| format!("did you mean `{near}`? {}", outputs()));
        checker.report(code, place, message, label).help(help);
        return None;
    };
    let output = stage.outputs.get(&reference.output);
    if output.is_none() && stage.complete {
        let names = stage.outputs.keys().map(String::as_str);
        let near = did_you_mean(&reference.output, names).map_or(String::new(), |name| {
            format!("did you mean `{}.{name}`? ", reference.stage)
        });
        checker
            .report(
                "config::unknown_output",
                place,
                format!(
                    "{what} reads `{text}`, but the stage `{}` gives no `{}`",
                    reference.stage, reference.output
                ),
                "no such output",
            )
            .help(format!("{near}{}", outputs()));
    }
    output
}

/// The labels a switch can meet; `None` where that is unknown or a mistake.
fn switch_labels<'o>(
    checker: &mut Checker,
    text: &str,
    place: &Place,
    output: &'o OutputDraft,
) -> Option<&'o [String]> {
    match output.kind.as_ref()? {
        ExtractKind::Label { one_of } if one_of.is_empty() => {
            checker
                .report(
                    "config::open_label",
                    place,
                    format!("`switch` reads `{text}`, whose labels are not known"),
                    "has no `one_of`",
                )
                .help("list the labels where the output is extracted: `one_of: [EASY, NESTED]`");
            None
        }
        ExtractKind::Label { one_of } => Some(one_of),
        kind => {
            checker
                .report(
                    "config::not_a_label",
                    place,
                    format!("`switch` reads `{text}`, which is {} and no label", kind_name(kind)),
                    "not a label",
                )
                .help("a switch needs an output with `label_after: MARKER` (or `label: whole_answer`) and `one_of`");
            None
        }
    }
}

fn check_cases(
    checker: &mut Checker,
    on: &str,
    labels: &[String],
    cases_place: &Place,
    cases: &[(&super::yaml::Entry, Option<super::pipeline::Case>)],
) {
    let mut misspelt = Vec::new();
    for (entry, _) in cases.iter().filter(|(entry, _)| !labels.contains(&entry.key)) {
        let free = labels
            .iter()
            .map(String::as_str)
            .filter(|label| cases.iter().all(|(e, _)| e.key != *label));
        misspelt.extend(did_you_mean(&entry.key, free));
        checker
            .report(
                "config::unknown_label",
                &entry.key_place,
                format!("`{}` is none of the labels of `{on}`", entry.key),
                "not a label",
            )
            .help(suggest(&entry.key, labels.iter().map(String::as_str), "labels"));
    }
    let missing: Vec<&str> = labels
        .iter()
        .map(String::as_str)
        .filter(|label| !misspelt.contains(label) && cases.iter().all(|(entry, _)| entry.key != *label))
        .collect();
    if !missing.is_empty() {
        let plural = if missing.len() == 1 { "label" } else { "labels" };
        checker
            .report(
                "config::missing_case",
                cases_place,
                format!("no case for the {plural} {}", list(missing.iter().copied(), ", ")),
                "a case is missing",
            )
            .help(format!(
                "`{on}` can be {}; each needs a case",
                list(labels.iter().map(String::as_str), ", ")
            ));
    }
}

/// Each `{{ … }}` of a default names an output of an earlier stage.
fn check_default(checker: &mut Checker, stages: &[StageDraft<'_>], reader: usize, text: &str, place: &Place) {
    let mut rest = text;
    while let Some(open) = rest.find("{{") {
        let inside = &rest[open + 2..];
        let Some(close) = inside.find("}}") else {
            checker
                .report(
                    "config::bad_reference",
                    place,
                    "a `{{` in `default` is not closed",
                    "no `}}`",
                )
                .help("as in `default: \"{{ generation.sql }}\"`");
            return;
        };
        let reference = inside[..close].trim();
        let place = narrowed(checker, place, reference);
        resolve(checker, stages, Some(reader), reference, &place, "`default`");
        rest = &inside[close + 2..];
    }
}

/// The place of a word within the text of a place, if it stands there literally.
fn narrowed(checker: &Checker, place: &Place, word: &str) -> Place {
    let written = checker
        .sources
        .get(place.source)
        .and_then(|source| source.text.get(place.span.clone()));
    match written.and_then(|written| written.find(word)) {
        Some(at) if !word.is_empty() => {
            let start = place.span.start + at;
            Place {
                source: place.source,
                span: start..start + word.len(),
            }
        }
        _ => place.clone(),
    }
}

fn check_answer(checker: &mut Checker, stages: &[StageDraft<'_>], text: &str, place: &Place) {
    let Some(output) = resolve(checker, stages, None, text, place, "`answer`") else {
        return;
    };
    match &output.kind {
        // A part of a JSON value may well be a text.
        None
        | Some(
            ExtractKind::Sql | ExtractKind::Text | ExtractKind::Regex { .. } | ExtractKind::Json { pointer: Some(_) },
        ) => {}
        Some(kind) => {
            let fitting: Vec<String> = stages
                .iter()
                .flat_map(|stage| stage.outputs.iter().map(move |(name, output)| (stage, name, output)))
                .filter(|(_, _, output)| matches!(output.kind, Some(ExtractKind::Sql | ExtractKind::Text)))
                .map(|(stage, name, _)| format!("{}.{name}", stage.name))
                .collect();
            let help = match fitting.as_slice() {
                _ if matches!(kind, ExtractKind::Json { .. }) => {
                    "say which part of the value is the SQL, as in `pointer: /sql`".to_owned()
                }
                [] => "add an output with `sql_after: MARKER` or `sql: whole_answer`".to_owned(),
                some => format!(
                    "outputs that hold SQL or text: {}",
                    list(some.iter().map(String::as_str), ", ")
                ),
            };
            checker
                .report(
                    "config::answer_kind",
                    place,
                    format!("`answer` reads `{text}`, which is {}, expected SQL", kind_name(kind)),
                    "not SQL",
                )
                .help(help);
        }
    }
}

fn kind_name(kind: &ExtractKind) -> &'static str {
    match kind {
        ExtractKind::Sql => "SQL",
        ExtractKind::List => "a list",
        ExtractKind::Label { .. } => "a label",
        ExtractKind::Text => "text",
        ExtractKind::Regex { .. } => "a matched text",
        ExtractKind::Json { .. } => "a JSON value",
    }
}
