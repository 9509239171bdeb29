//! A pipeline file's tree → [`Pipeline`], with all mistakes found in one go.
//!
//! In: the file's bytes, `--set` overrides and the names of the templates there are. Out: a pipeline that a run can rely on, or
//! every mistake with its place. It reads no other file and renders no template.

use std::collections::HashMap;

use indexmap::IndexMap;

use super::check::{Checker, list, misspells, scalar_kind, suggest};
use super::extract::{OutputDraft, read_outputs};
use super::keys;
use super::overrides::{self, Override};
use super::pipeline::{
    Case, ModelSpec, OutputRef, Pipeline, ResponseFormat, SchemaFormat, SchemaSpec, Stage, StageKind,
};
use super::references;
use super::response_format::{self, read_response_format};
use super::yaml::{self, Entry, Node, Place, Source, Value};
use crate::diagnostic::Diagnostics;

/// Servers take more, but nobody reads that many answers to one question.
const MOST_COMPLETIONS: u32 = 32;

/// Which templates exist, by path without language and ending (`din-sql/easy`).
pub trait TemplateNames {
    /// Codes of the languages that have this template; empty where there is no such template.
    fn languages_of(&self, template: &str) -> Vec<String>;

    /// Every template's path.
    fn all(&self) -> Vec<String>;
}

/// Reads, overrides and validates a pipeline file.
pub fn load_pipeline(
    file_name: &str,
    bytes: &[u8],
    overrides: &[Override],
    templates: &dyn TemplateNames,
) -> Result<Pipeline, Diagnostics> {
    let text = yaml::decode(file_name, bytes)?;
    let mut checker = Checker::new(Source {
        name: file_name.to_owned(),
        text: text.clone(),
    });
    let mut mistakes = Vec::new();
    let parsed = yaml::parse(file_name, &text, &text, &mut mistakes);
    checker.add(mistakes);
    let mut root = match parsed {
        Ok(root) => root,
        Err(diagnostic) => {
            checker.add([*diagnostic]);
            return checker.finish(None);
        }
    };
    overrides::apply(&mut root, overrides, &mut checker);
    let pipeline = Reader {
        checker: &mut checker,
        templates,
    }
    .pipeline(&root);
    checker.finish(pipeline)
}

/// The validated pipeline as YAML, in the form of its types (what a run folder records), not of the file.
pub fn to_yaml(pipeline: &Pipeline) -> Result<String, serde_yaml::Error> {
    serde_yaml::to_string(pipeline)
}

/// A stage as far as it could be read.
pub(super) struct StageDraft<'n> {
    pub name: String,
    pub kind: Option<KindDraft<'n>>,
    pub model: ModelSpec,
    pub outputs: IndexMap<String, OutputDraft>,
    pub response_format: Option<ResponseFormat>,
    /// Whether all output names are known; where not, nothing is said of outputs that seem to be missing.
    pub complete: bool,
}

/// Where `cases` stands, and each case as far as it could be read.
pub(super) type CasesDraft<'n> = (Place, Vec<(&'n Entry, Option<Case>)>);

pub(super) enum KindDraft<'n> {
    Prompt(Option<String>),
    Switch {
        on: Option<(String, Place)>,
        cases: Option<CasesDraft<'n>>,
    },
}

struct Reader<'c> {
    checker: &'c mut Checker,
    templates: &'c dyn TemplateNames,
}

impl Reader<'_> {
    fn pipeline(&mut self, root: &Node) -> Option<Pipeline> {
        if !self.checker.known_keys(root, "the pipeline", keys::PIPELINE) {
            return None;
        }
        let name = self.required(
            root,
            "name",
            "the pipeline",
            keys::PIPELINE,
            "give the pipeline a name, as in `name: zero-shot`",
        );
        let name = name.and_then(|entry| self.pipeline_name(&entry.value));
        let description = root.get("description").map_or(Some(String::new()), |entry| {
            // An empty description is as good as none.
            match scalar_kind(&entry.value) {
                Some(yaml::ScalarKind::Nothing) => Some(String::new()),
                _ => self.checker.text(&entry.value, "`description`"),
            }
        });
        let model = root
            .get("model")
            .map_or(Some(ModelSpec::default()), |entry| self.model(&entry.value));
        let schema = root
            .get("schema")
            .map_or(Some(SchemaSpec::default()), |entry| self.schema(&entry.value));

        let help = "a pipeline has at least one stage: `stages: [{ name: …, prompt: …, extract: … }]`";
        let drafts = self
            .required(root, "stages", "the pipeline", keys::PIPELINE, help)
            .and_then(|entry| self.stages(&entry.value));
        let help = "name the output that holds the SQL, as in `answer: generation.sql`";
        let answer = self
            .required(root, "answer", "the pipeline", keys::PIPELINE, help)
            .and_then(|entry| Some((self.checker.text(&entry.value, "`answer`")?, entry.value.place.clone())));

        let drafts = drafts?;
        references::check(self.checker, &drafts, answer.as_ref());
        let stages = drafts.into_iter().map(finish_stage).collect::<Option<Vec<Stage>>>();
        Some(Pipeline {
            name: name?,
            description: description?,
            model: model?,
            schema: schema?,
            stages: stages?,
            answer: OutputRef::try_from(answer?.0).ok()?,
        })
    }

    fn required<'n>(&mut self, node: &'n Node, key: &str, what: &str, keys: &[&str], help: &str) -> Option<&'n Entry> {
        let entry = node.get(key);
        if entry.is_none() {
            let place = heading(node);
            self.checker.missing(node, &place, key, what, keys, help);
        }
        entry
    }

    /// The pipeline's name is part of the run folder's.
    fn pipeline_name(&mut self, node: &Node) -> Option<String> {
        let name = self.checker.text(node, "`name`")?;
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.' | '+');
        if name.chars().all(plain) && name.starts_with(char::is_alphanumeric) && name.chars().count() <= 100 {
            return Some(name);
        }
        self.checker
            .report(
                "config::bad_name",
                &node.place,
                format!("`{name}` is no name for a pipeline"),
                "not a name",
            )
            .help("run folders are named after it: letters, digits, `-`, `_`, `.` and `+`, at most 100");
        None
    }

    fn model(&mut self, node: &Node) -> Option<ModelSpec> {
        if !self.checker.known_keys(node, "`model`", keys::MODEL) {
            return None;
        }
        let checker = &mut *self.checker;
        let mut model = ModelSpec::default();
        let mut complete = true;
        let Value::Mapping(entries) = &node.value else {
            return None;
        };
        for Entry { key, value, .. } in entries {
            let name = format!("`{key}`");
            let read = match key.as_str() {
                "provider" => store(&mut model.provider, checker.text(value, &name)),
                "name" => store(&mut model.name, checker.text(value, &name)),
                "temperature" => store(&mut model.temperature, checker.number(value, &name, 0.0..=2.0)),
                "top_p" => store(&mut model.top_p, checker.number(value, &name, 0.0..=1.0)),
                "max_tokens" => store(&mut model.max_tokens, checker.count(value, &name, 1..=u32::MAX)),
                "seed" => store(&mut model.seed, checker.integer(value, &name, i64::MIN..=i64::MAX)),
                "timeout" => store(&mut model.timeout, checker.seconds(value, &name)),
                "n" => store(&mut model.n, checker.count(value, &name, 1..=MOST_COMPLETIONS)),
                "logprobs" => store(&mut model.logprobs, checker.boolean(value, &name)),
                "stop" => match stop_texts(checker, value) {
                    Some(stop) => {
                        model.stop = stop;
                        true
                    }
                    None => false,
                },
                _ => true,
            };
            complete &= read;
        }
        complete.then_some(model)
    }

    fn schema(&mut self, node: &Node) -> Option<SchemaSpec> {
        if !self.checker.known_keys(node, "`schema`", keys::SCHEMA) {
            return None;
        }
        let checker = &mut *self.checker;
        let defaults = SchemaSpec::default();
        const FORMATS: &[(&str, SchemaFormat)] = &[
            ("ddl", SchemaFormat::Ddl),
            ("compact", SchemaFormat::Compact),
            ("table", SchemaFormat::Table),
        ];
        let format = node
            .get("format")
            .map_or(Some(defaults.format), |e| checker.choice(&e.value, "`format`", FORMATS));
        let sample_rows = node.get("sample_rows").map_or(Some(defaults.sample_rows), |entry| {
            checker.count(&entry.value, "`sample_rows`", 0..=1000)
        });
        let descriptions = node.get("descriptions").map_or(Some(defaults.descriptions), |entry| {
            checker.boolean(&entry.value, "`descriptions`")
        });
        let max_cell = node.get("max_cell").map_or(Some(defaults.max_cell), |entry| {
            checker.count(&entry.value, "`max_cell`", 1..=100_000)
        });
        Some(SchemaSpec {
            format: format?,
            sample_rows: sample_rows?,
            descriptions: descriptions?,
            max_cell: max_cell?,
        })
    }

    fn stages<'n>(&mut self, node: &'n Node) -> Option<Vec<StageDraft<'n>>> {
        let Value::Sequence(items) = &node.value else {
            self.checker
                .wrong_type(node, "a list of stages", "`stages`")
                .help("each stage starts with `- name: …`");
            return None;
        };
        if items.is_empty() {
            self.checker
                .report(
                    "config::empty",
                    &node.place,
                    "`stages` is empty",
                    "expected at least one stage",
                )
                .help("a stage is `- { name: …, prompt: …, extract: … }`");
            return None;
        }
        let mut names: HashMap<String, Place> = HashMap::new();
        let mut drafts = Vec::with_capacity(items.len());
        for item in items {
            let draft = self.stage(item, &mut names);
            // A stage that can't be read at all still holds its position.
            drafts.push(draft.unwrap_or_else(|| StageDraft {
                name: String::new(),
                kind: None,
                model: ModelSpec::default(),
                outputs: IndexMap::new(),
                response_format: None,
                complete: false,
            }));
        }
        Some(drafts)
    }

    fn stage<'n>(&mut self, node: &'n Node, names: &mut HashMap<String, Place>) -> Option<StageDraft<'n>> {
        if !self.checker.known_keys(node, "a stage", keys::STAGE) {
            return None;
        }
        let name_entry = self.required(
            node,
            "name",
            "this stage",
            keys::STAGE,
            "each stage has a name: `name: generation`",
        );
        let name = name_entry
            .and_then(|entry| self.stage_name(&entry.value, names))
            .unwrap_or_default();
        let what = if name.is_empty() {
            "this stage".to_owned()
        } else {
            format!("the stage `{name}`")
        };

        let kind = self.kind(node, &what);
        let model = node
            .get("model")
            .map_or(Some(ModelSpec::default()), |entry| self.model(&entry.value));
        let help = "say what to read from the answer: `extract: { sql: { sql_after: \"SQL:\" } }`";
        let outputs = self
            .required(node, "extract", &what, keys::STAGE, help)
            .and_then(|entry| read_outputs(self.checker, &entry.value));
        let response_format = node.get("response_format").and_then(|entry| {
            let format = read_response_format(self.checker, entry, &name)?;
            if let Some(outputs) = &outputs {
                response_format::check_outputs(self.checker, entry, &what, &format, outputs);
            }
            Some(format)
        });
        Some(StageDraft {
            name,
            response_format,
            kind,
            model: model.unwrap_or_default(),
            complete: outputs.is_some(),
            outputs: outputs.unwrap_or_default(),
        })
    }

    fn stage_name(&mut self, node: &Node, names: &mut HashMap<String, Place>) -> Option<String> {
        let name = self.checker.text(node, "`name`")?;
        if let Some(first) = names.get(&name) {
            self.checker
                .report(
                    "config::duplicate_stage",
                    &node.place,
                    format!("there are two stages `{name}`"),
                    "named again here",
                )
                .also(first, "first named here")
                .help("later stages read outputs by the stage's name, so each needs its own");
            return Some(name);
        }
        names.insert(name.clone(), node.place.clone());
        if keys::RESERVED_STAGE_NAMES.contains(&name.as_str()) {
            self.checker
                .report(
                    "config::bad_name",
                    &node.place,
                    format!("a stage can't be named `{name}`"),
                    "reserved",
                )
                .help(format!(
                    "reserved names: {}",
                    list(keys::RESERVED_STAGE_NAMES.iter().copied(), ", ")
                ));
        } else if !is_identifier(&name) {
            let better = identifier_like(&name).map_or(String::new(), |other| format!(", as in `{other}`"));
            self.checker
                .report(
                    "config::bad_name",
                    &node.place,
                    format!("`{name}` is no name for a stage"),
                    "not a name",
                )
                .help(format!(
                    "a name is a lowercase letter, then lowercase letters, digits and `_`{better}"
                ));
        }
        Some(name)
    }

    fn kind<'n>(&mut self, node: &'n Node, what: &str) -> Option<KindDraft<'n>> {
        match (node.get("prompt"), node.get("switch")) {
            (None, None) if misspells(node, keys::STAGE, |key| matches!(key, "prompt" | "switch")) => None,
            (None, None) => {
                self.checker
                    .report(
                        "config::stage_kind",
                        &heading(node),
                        format!("{what} has neither `prompt` nor `switch`"),
                        "nothing to do",
                    )
                    .help("add `prompt: TEMPLATE`, or `switch: stage.label` with `cases`");
                None
            }
            (Some(prompt), Some(switch)) => {
                self.checker
                    .report(
                        "config::stage_kind",
                        &switch.key_place,
                        format!("{what} has both `prompt` and `switch`"),
                        "only one of the two",
                    )
                    .also(&prompt.key_place, "and this")
                    .help("keep `prompt` for one template, or `switch` with `cases` for several");
                None
            }
            (Some(prompt), None) => {
                if let Some(cases) = node.get("cases") {
                    self.checker
                        .report(
                            "config::stage_kind",
                            &cases.key_place,
                            format!("{what} has `cases` but no `switch`"),
                            "cases of what?",
                        )
                        .help("add `switch: stage.label` in place of `prompt`, or remove `cases`");
                }
                Some(KindDraft::Prompt(self.template(&prompt.value)))
            }
            (None, Some(switch)) => {
                let on = self
                    .checker
                    .text(&switch.value, "`switch`")
                    .map(|text| (text, switch.value.place.clone()));
                let help = "add `cases: { LABEL: { prompt: TEMPLATE } }`, one for each label";
                let cases = self
                    .required(node, "cases", what, keys::STAGE, help)
                    .and_then(|entry| self.cases(entry));
                Some(KindDraft::Switch { on, cases })
            }
        }
    }

    fn cases<'n>(&mut self, cases: &'n Entry) -> Option<CasesDraft<'n>> {
        let Value::Mapping(entries) = &cases.value.value else {
            self.checker
                .wrong_type(&cases.value, "a mapping from labels to prompts", "`cases`")
                .help("as in `cases: { EASY: { prompt: din-sql/easy } }`");
            return None;
        };
        if entries.is_empty() {
            self.checker
                .report(
                    "config::empty",
                    &cases.value.place,
                    "`cases` is empty",
                    "expected a case for each label",
                )
                .help("as in `cases: { EASY: { prompt: din-sql/easy } }`");
            return None;
        }
        let read = entries.iter().map(|entry| (entry, self.case(entry))).collect();
        Some((cases.key_place.clone(), read))
    }

    fn case(&mut self, entry: &Entry) -> Option<Case> {
        let what = format!("the case `{}`", entry.key);
        if !self.checker.known_keys(&entry.value, &what, keys::CASE) {
            return None;
        }
        let model = entry
            .value
            .get("model")
            .map_or(Some(ModelSpec::default()), |model| self.model(&model.value));
        let Some(prompt) = entry.value.get("prompt") else {
            let help = "a case is `LABEL: { prompt: TEMPLATE }`";
            self.checker
                .missing(&entry.value, &entry.key_place, "prompt", &what, keys::CASE, help);
            return None;
        };
        let template = self.template(&prompt.value);
        Some(Case {
            template: template?,
            model: model?,
        })
    }

    fn template(&mut self, node: &Node) -> Option<String> {
        let template = self.checker.text(node, "`prompt`")?;
        if !self.templates.languages_of(&template).is_empty() {
            return Some(template);
        }
        let all = self.templates.all();
        let bare = template.trim_end_matches(".jinja");
        let help = if bare != template && all.iter().any(|name| name == bare) {
            format!("leave the ending out: `{bare}`")
        } else {
            suggest(&template, all.iter().map(String::as_str), "templates")
        };
        self.checker
            .report(
                "config::missing_template",
                &node.place,
                format!("there is no template `{template}`"),
                "not found in any language",
            )
            .help(help);
        None
    }
}

fn stop_texts(checker: &mut Checker, node: &Node) -> Option<Vec<String>> {
    let items = match &node.value {
        Value::Sequence(items) => items.iter().collect(),
        Value::Scalar(_) => vec![node],
        Value::Mapping(_) => {
            checker.wrong_type(node, "a list of texts", "`stop`");
            return None;
        }
    };
    items
        .into_iter()
        .map(|item| match &item.value {
            // White space such as a line break is a usual stop text.
            Value::Scalar(scalar) if scalar.quoted && !scalar.text.is_empty() => Some(scalar.text.clone()),
            _ => checker.text(item, "`stop`"),
        })
        .collect()
}

/// Puts what was read into a slot; says whether anything was.
fn store<T>(slot: &mut Option<T>, value: Option<T>) -> bool {
    let read = value.is_some();
    *slot = value;
    read
}

fn finish_stage(draft: StageDraft<'_>) -> Option<Stage> {
    let kind = match draft.kind? {
        KindDraft::Prompt(template) => StageKind::Prompt { template: template? },
        KindDraft::Switch { on, cases } => StageKind::Switch {
            on: OutputRef::try_from(on?.0).ok()?,
            cases: cases?
                .1
                .into_iter()
                .map(|(entry, case)| Some((entry.key.clone(), case?)))
                .collect::<Option<IndexMap<_, _>>>()?,
        },
    };
    let extract = draft
        .outputs
        .into_iter()
        .map(|(name, output)| Some((name, output.extractor?)))
        .collect::<Option<IndexMap<_, _>>>()?;
    Some(Stage {
        name: draft.name,
        kind,
        model: draft.model,
        extract,
        response_format: draft.response_format,
    })
}

/// Where to say that a mapping lacks something: its first key, or its braces where it is empty.
fn heading(node: &Node) -> Place {
    match &node.value {
        Value::Mapping(entries) => entries
            .iter()
            .map(|e| &e.key_place)
            .find(|p| p.source == node.place.source)
            .unwrap_or(&node.place)
            .clone(),
        _ => node.place.clone(),
    }
}

pub(super) fn is_identifier(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_lowercase())
        && name
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// The nearest valid name, for suggestions.
pub(super) fn identifier_like(name: &str) -> Option<String> {
    let changed: String = name
        .trim()
        .to_lowercase()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .collect();
    Some(changed).filter(|changed| is_identifier(changed) && !keys::RESERVED_STAGE_NAMES.contains(&changed.as_str()))
}
