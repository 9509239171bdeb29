//! The `extract` section of a stage: which outputs are read from a completion, and how.
//!
//! In: the section's node. Out: extractors by output name, each with what the later check of references needs.

use std::collections::HashMap;

use indexmap::IndexMap;
use regex::Regex;

use super::check::{Checker, list, misspells, suggest};
use super::keys;
use super::pipeline::{DefaultValue, ExtractKind, Extractor, Take};
use super::validate::{identifier_like, is_identifier};
use super::yaml::{Entry, Node, Place, ScalarKind, Value};

const TAKES: &[(&str, Take)] = &[("first", Take::First), ("last", Take::Last)];

/// An output as far as it could be read.
pub(super) struct OutputDraft {
    /// `None` where its section holds a mistake.
    pub extractor: Option<Extractor>,
    /// Known also where only the rest of the section is wrong.
    pub kind: Option<ExtractKind>,
    /// Texts of its default, which may hold `{{ stage.output }}`.
    pub default_texts: Vec<(String, Place)>,
    /// Where it is read as JSON: what a response format has to have.
    pub json: Option<JsonPart>,
}

/// What a JSON output takes of the value.
pub(super) struct JsonPart {
    pub pointer: Option<String>,
    pub place: Place,
}

/// All outputs of a stage; `None` where their names are not to be had.
pub(super) fn read_outputs(checker: &mut Checker, node: &Node) -> Option<IndexMap<String, OutputDraft>> {
    const EXAMPLE: &str = "as in `extract: { sql: { sql_after: \"SQL:\" } }`";
    let Value::Mapping(entries) = &node.value else {
        checker
            .wrong_type(node, "a mapping of outputs", "`extract`")
            .help(EXAMPLE);
        return None;
    };
    if entries.is_empty() {
        checker
            .report(
                "config::empty",
                &node.place,
                "`extract` is empty",
                "expected at least one output",
            )
            .help(EXAMPLE);
        return None;
    }
    let mut outputs = IndexMap::new();
    for Entry { key, key_place, value } in entries {
        if !is_identifier(key) {
            let better = identifier_like(key).map_or(String::new(), |other| format!(", as in `{other}`"));
            checker
                .report(
                    "config::bad_name",
                    key_place,
                    format!("`{key}` is no name for an output"),
                    "not a name",
                )
                .help(format!(
                    "a name is a lowercase letter, then lowercase letters, digits and `_`{better}"
                ));
        }
        outputs.insert(key.clone(), read_output(checker, key, key_place, value));
    }
    Some(outputs)
}

fn read_output(checker: &mut Checker, name: &str, name_place: &Place, node: &Node) -> OutputDraft {
    let what = format!("the output `{name}`");
    let mut draft = OutputDraft {
        extractor: None,
        kind: None,
        default_texts: Vec::new(),
        json: None,
    };
    if !matches!(node.value, Value::Mapping(_)) {
        checker.wrong_type(node, "a mapping", &what).help(format!(
            "as in `{name}: {{ sql_after: \"SQL:\" }}` or `{name}: {{ text: whole_answer }}`"
        ));
        return draft;
    }
    checker.known_keys(node, &what, keys::EXTRACTOR);

    let kind = read_kind(checker, &what, name_place, node);
    let take = node.get("take").map_or(Some(Take::default()), |entry| {
        checker.choice(&entry.value, "`take`", TAKES)
    });
    let default = match node.get("default") {
        None => Some(None),
        Some(entry) => {
            draft.default_texts = default_texts(&entry.value);
            read_default(checker, kind.as_ref().map(|(kind, _)| kind), entry).map(Some)
        }
    };
    let optional = node
        .get("optional")
        .map_or(Some(false), |entry| checker.boolean(&entry.value, "`optional`"));
    let fallback = node.get("fallback").map_or(Some(None), |entry| {
        read_fallback(checker, name, kind.as_ref().map(|(kind, _)| kind), entry).map(Some)
    });
    draft.kind = kind.as_ref().map(|(kind, _)| kind.clone());
    if let Some(ExtractKind::Json { pointer }) = &draft.kind {
        draft.json = Some(JsonPart {
            pointer: pointer.clone(),
            place: node
                .get("pointer")
                .map_or(name_place, |entry| &entry.value.place)
                .clone(),
        });
    }
    if let (Some((kind, after)), Some(take), Some(default), Some(optional), Some(fallback)) =
        (kind, take, default, optional, fallback)
    {
        draft.extractor = Some(Extractor {
            kind,
            after,
            take,
            default,
            optional,
            fallback: fallback.map(Box::new),
        });
    }
    draft
}

/// The second way to read an output. It says only how: what holds where both find nothing stands outside of it.
fn read_fallback(checker: &mut Checker, name: &str, main: Option<&ExtractKind>, entry: &Entry) -> Option<Extractor> {
    let node = &entry.value;
    let what = format!("the fallback of `{name}`");
    if !matches!(node.value, Value::Mapping(_)) {
        checker
            .wrong_type(node, "a mapping", &what)
            .help("as in `fallback: { sql_after: \"SQL:\" }`");
        return None;
    }
    let mut plain = checker.known_keys(node, &what, keys::EXTRACTOR);
    for key in ["default", "optional", "fallback"] {
        let Some(inner) = node.get(key) else { continue };
        let help = match key {
            "fallback" => "one fallback is all there is: leave this one out".to_owned(),
            _ => format!("put it beside `fallback`: it holds where both find nothing (`{name}: {{ …, {key}: … }}`)"),
        };
        checker
            .report(
                "config::fallback",
                &inner.key_place,
                format!("{what} has a `{key}` of its own"),
                "not inside a fallback",
            )
            .also(&entry.key_place, "the fallback")
            .help(help);
        plain = false;
    }
    let (mut kind, after) = read_kind(checker, &what, &entry.key_place, node)?;
    let take = node.get("take").map_or(Some(Take::default()), |entry| {
        checker.choice(&entry.value, "`take`", TAKES)
    })?;
    if let (Some(ExtractKind::Label { one_of }), ExtractKind::Label { one_of: own }) = (main, &mut kind)
        && own.is_empty()
    {
        own.clone_from(one_of);
    }
    if let Some(expected) = main.and_then(|main| other_value(main, &kind)) {
        checker
            .report(
                "config::fallback",
                &node.place,
                format!("{what} gives another kind of value than `{name}`"),
                format!("expected {expected}"),
            )
            .help("what reads the output later must find the same kind of value either way");
        return None;
    }
    plain.then_some(Extractor {
        kind,
        after,
        take,
        default: None,
        optional: false,
        fallback: None,
    })
}

/// What a fallback would have to give, where it gives something that the output's readers can't take.
fn other_value(main: &ExtractKind, fallback: &ExtractKind) -> Option<String> {
    use ExtractKind::{Json, Label, List, Regex, Sql, Text};
    match (main, fallback) {
        // A JSON value can be anything.
        (Json { .. }, _)
        | (List, List | Json { .. })
        | (Sql | Text | Regex { .. }, Sql | Text | Regex { .. } | Json { .. }) => None,
        (Label { one_of }, Label { one_of: own }) => {
            let same = one_of.is_empty() || own.iter().all(|label| one_of.contains(label));
            (!same).then(|| format!("labels among {}", list(one_of.iter().map(String::as_str), ", ")))
        }
        (Label { .. }, _) => Some("a label".to_owned()),
        (List, _) => Some("a list or JSON".to_owned()),
        (Sql | Text | Regex { .. }, _) => Some("SQL, text or JSON".to_owned()),
    }
}

/// The kind and its marker, and the keys that belong to some kinds only.
fn read_kind(
    checker: &mut Checker,
    what: &str,
    name_place: &Place,
    node: &Node,
) -> Option<(ExtractKind, Option<String>)> {
    let Value::Mapping(entries) = &node.value else {
        return None;
    };
    let mut kinds = entries
        .iter()
        .filter(|entry| keys::EXTRACTOR_KINDS.contains(&entry.key.as_str()));
    let Some(chosen) = kinds.next() else {
        if misspells(node, keys::EXTRACTOR, |key| keys::EXTRACTOR_KINDS.contains(&key)) {
            return None;
        }
        checker
            .report(
                "config::extractor_kind",
                name_place,
                format!("{what} says not how it is read"),
                "no kind",
            )
            .help(format!(
                "give it one of {}",
                list(keys::EXTRACTOR_KINDS.iter().copied(), ", ")
            ));
        return None;
    };
    if let Some(second) = kinds.next() {
        checker
            .report(
                "config::extractor_kind",
                &second.key_place,
                format!("{what} has both `{}` and `{}`", chosen.key, second.key),
                "only one of the two",
            )
            .also(&chosen.key_place, "and this")
            .help("make two outputs of it, each with a name of its own");
        return None;
    }

    let base = chosen.key.strip_suffix("_after").unwrap_or(&chosen.key);
    for (key, owner) in [("one_of", "label"), ("pointer", "json")] {
        if let Some(entry) = node.get(key).filter(|_| owner != base) {
            checker
                .report(
                    "config::extractor_key",
                    &entry.key_place,
                    format!("`{key}` belongs to `{owner}` outputs, this one is `{base}`"),
                    "has no meaning here",
                )
                .help(format!(
                    "remove it, or write `{owner}_after` in place of `{}`",
                    chosen.key
                ));
        }
    }

    let key = format!("`{}`", chosen.key);
    if base == "regex" {
        return Some((
            ExtractKind::Regex {
                pattern: read_pattern(checker, &chosen.value)?,
            },
            None,
        ));
    }
    let after = if chosen.key == base {
        whole_answer(checker, base, &chosen.value)?;
        None
    } else {
        Some(checker.text(&chosen.value, &key)?)
    };
    let kind = match base {
        "sql" => ExtractKind::Sql,
        "list" => ExtractKind::List,
        "text" => ExtractKind::Text,
        "json" => ExtractKind::Json {
            pointer: match node.get("pointer") {
                None => None,
                Some(entry) => Some(read_pointer(checker, entry)?),
            },
        },
        _ => ExtractKind::Label {
            one_of: node
                .get("one_of")
                .map_or(Some(Vec::new()), |e| read_labels(checker, e))?,
        },
    };
    Some((kind, after))
}

fn whole_answer(checker: &mut Checker, kind: &str, node: &Node) -> Option<()> {
    let text = checker.text(node, &format!("`{kind}`"))?;
    if text == "whole_answer" {
        return Some(());
    }
    checker
        .report(
            "config::unknown_value",
            &node.place,
            format!("`{kind}` can't be `{text}`"),
            "expected `whole_answer`",
        )
        .help(format!(
            "write `{kind}: whole_answer`, or `{kind}_after: MARKER` for what follows a marker"
        ));
    None
}

fn read_pattern(checker: &mut Checker, node: &Node) -> Option<String> {
    let pattern = checker.text(node, "`regex`")?;
    match Regex::new(&pattern) {
        Ok(_) => Some(pattern),
        Err(error) => {
            // The library draws the pattern over several lines; its last line is the reason.
            let drawn = error.to_string();
            let reason = drawn
                .lines()
                .last()
                .unwrap_or_default()
                .trim_start_matches("error: ")
                .to_owned();
            checker
                .report(
                    "config::bad_regex",
                    &node.place,
                    format!("the pattern is not valid: {reason}"),
                    "not a pattern",
                )
                .help("in YAML, put a pattern in single quotes, where backslashes stand for themselves");
            None
        }
    }
}

fn read_pointer(checker: &mut Checker, entry: &Entry) -> Option<String> {
    let pointer = checker.text(&entry.value, "`pointer`")?;
    if pointer.starts_with('/') {
        return Some(pointer);
    }
    checker
        .report(
            "config::bad_pointer",
            &entry.value.place,
            format!("`{pointer}` is no JSON pointer"),
            "expected a leading `/`",
        )
        .help(format!(
            "as in `/{}` (RFC 6901)",
            pointer.trim_start_matches(['$', '.']).replace('.', "/")
        ));
    None
}

fn read_labels(checker: &mut Checker, entry: &Entry) -> Option<Vec<String>> {
    let words = checker.words(&entry.value, "`one_of`")?;
    if words.is_empty() {
        checker
            .report(
                "config::empty",
                &entry.value.place,
                "`one_of` is empty",
                "expected at least one label",
            )
            .help("as in `one_of: [EASY, NESTED]`, or leave it out to accept any word");
        return None;
    }
    let mut seen: HashMap<String, Place> = HashMap::new();
    for (word, place) in &words {
        if word.trim().is_empty() {
            checker.report(
                "config::empty",
                place,
                "a label of `one_of` is empty",
                "expected a word",
            );
            return None;
        }
        // Labels are compared without case.
        if let Some(first) = seen.insert(word.to_lowercase(), place.clone()) {
            checker
                .report(
                    "config::duplicate_label",
                    place,
                    format!("the label `{word}` is given twice"),
                    "again here",
                )
                .also(&first, "first given here")
                .help("labels are compared without case");
            return None;
        }
    }
    Some(words.into_iter().map(|(word, _)| word).collect())
}

fn default_texts(node: &Node) -> Vec<(String, Place)> {
    match &node.value {
        Value::Scalar(scalar) => vec![(scalar.text.clone(), node.place.clone())],
        Value::Sequence(items) => items.iter().flat_map(default_texts).collect(),
        Value::Mapping(_) => Vec::new(),
    }
}

fn read_default(checker: &mut Checker, kind: Option<&ExtractKind>, entry: &Entry) -> Option<DefaultValue> {
    let node = &entry.value;
    let is_reference = |text: &str| text.trim_start().starts_with("{{");
    match &node.value {
        Value::Sequence(items) => {
            if !matches!(kind, None | Some(ExtractKind::List | ExtractKind::Json { .. })) {
                checker.wrong_type(node, "text", "the `default` of an output that is no list");
                return None;
            }
            let words = items.iter().map(|item| checker.word(item, "an item of `default`"));
            Some(DefaultValue::List(words.collect::<Option<Vec<_>>>()?))
        }
        Value::Scalar(scalar) if scalar.quoted || scalar.kind() != ScalarKind::Nothing => {
            match kind {
                Some(ExtractKind::List) if !is_reference(&scalar.text) => {
                    checker
                        .wrong_type(node, "a list", "the `default` of a list")
                        .help("as in `default: []` or `default: \"{{ stage.output }}\"`");
                    return None;
                }
                Some(ExtractKind::Label { one_of })
                    if !one_of.is_empty() && !is_reference(&scalar.text) && !one_of.contains(&scalar.text) =>
                {
                    let help = suggest(&scalar.text, one_of.iter().map(String::as_str), "labels");
                    checker
                        .report(
                            "config::unknown_label",
                            &node.place,
                            format!("the default `{}` is none of the labels of `one_of`", scalar.text),
                            "not a label",
                        )
                        .help(help);
                    return None;
                }
                _ => {}
            }
            Some(DefaultValue::Text(scalar.text.clone()))
        }
        _ => {
            checker
                .wrong_type(node, "text or a list", "`default`")
                .help("for an empty text write `default: \"\"`; without a default, leave the key out");
            None
        }
    }
}
