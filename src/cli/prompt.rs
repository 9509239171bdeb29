//! `dinsql prompt`: templates listed, rendered and checked, without a model.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use indexmap::IndexMap;
use serde_json::{Value as Json, json};

use super::arguments::{LintArguments, PromptCommand, RenderArguments};
use super::exit::{Exit, Failure};
use super::output::{count, printable_lines, table, thousands};
use super::settings::Settings;
use crate::config::{ExtractKind, ModelSpec, Pipeline, Stage, StageKind};
use crate::dataset::{Dataset, Example};
use crate::diagnostic::did_you_mean;
use crate::pipeline::{ExampleRun, OutputValue, Resources, Router, Trace};
use crate::prompt::{Message, Prompts, lint, tokens};
use crate::schema::SchemaCache;

/// Of the embedded model, and small enough to hold for most.
const DEFAULT_CONTEXT: usize = 8192;

/// The `prompt` commands.
pub fn prompt(command: PromptCommand, settings: &Settings) -> Result<Exit, Failure> {
    match command {
        PromptCommand::List { json } => Ok(list(settings, json)),
        PromptCommand::Render(arguments) => render(&arguments, settings),
        PromptCommand::Lint(arguments) => check(&arguments, settings),
    }
}

fn list(settings: &Settings, as_json: bool) -> Exit {
    let by_language = settings.store.list();
    let mut by_name: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (language, names) in &by_language {
        for name in names
            .iter()
            .filter(|name| !name.rsplit('/').next().unwrap_or_default().starts_with('_'))
        {
            by_name.entry(name).or_default().push(language);
        }
    }
    if as_json {
        say!("{}", json!({ "place": settings.store.place(), "templates": by_name }));
        return Exit::Fine;
    }
    let rows = by_name
        .iter()
        .map(|(name, languages)| vec![(*name).to_owned(), languages.join(", ")])
        .collect();
    say!("{}", table(&["template", "languages"], rows));
    say!("in {}", settings.store.place());
    Exit::Fine
}

/// One stage's prompt, as `prompt render` shows it.
struct Rendered {
    stage: String,
    template: String,
    case: Option<String>,
    messages: Vec<Message>,
    inputs: &'static str,
}

fn render(arguments: &RenderArguments, settings: &Settings) -> Result<Exit, Failure> {
    let pipeline = settings.pipeline(&arguments.pipeline, &arguments.set)?;
    let source = settings.source(&arguments.data)?;
    let dataset = settings.load(&source, arguments.lang.as_deref(), arguments.split.as_deref())?;
    let example = dataset
        .examples
        .iter()
        .find(|example| example.id == arguments.example)
        .cloned()
        .ok_or_else(|| {
            let failure = Failure::message(
                Exit::Usage,
                format!("no example `{}` in dataset `{}`", arguments.example, dataset.name),
            );
            match did_you_mean(
                &arguments.example,
                dataset.examples.iter().map(|example| example.id.as_str()),
            ) {
                Some(near) => failure.hint(format!("did you mean `{near}`?")),
                None => failure,
            }
        })?;
    if let Some(wanted) = &arguments.stage
        && pipeline.stage(wanted).is_none()
    {
        let names: Vec<&str> = pipeline.stages.iter().map(|stage| stage.name.as_str()).collect();
        return Err(Failure::message(
            Exit::Usage,
            format!(
                "pipeline `{}` has no stage `{wanted}` (there are: {})",
                pipeline.name,
                names.join(", ")
            ),
        ));
    }
    let recorded = match &arguments.run {
        Some(folder) => Some(recorded_trace(folder, &example.id)?),
        None => None,
    };
    let language = example.language.clone();
    let resources = resources(pipeline, settings.prompts(), &dataset);
    let rendered = render_stages(&resources, example, recorded.as_ref())?;
    let shown: Vec<&Rendered> = rendered
        .iter()
        .filter(|rendered| arguments.stage.as_ref().is_none_or(|stage| *stage == rendered.stage))
        .collect();
    if arguments.json {
        let stages: Vec<Json> = shown
            .iter()
            .map(|rendered| {
                json!({
                    "stage": rendered.stage,
                    "template": rendered.template,
                    "case": rendered.case,
                    "inputs": rendered.inputs,
                    "messages": rendered.messages,
                    "tokens": tokens::count(&rendered.messages),
                })
            })
            .collect();
        say!(
            "{}",
            json!({ "pipeline": resources.pipeline.name, "data": dataset.name, "example": arguments.example, "lang": language, "tokenizer": "o200k_base", "stages": stages })
        );
        return Ok(Exit::Fine);
    }
    for rendered in shown {
        let case = rendered
            .case
            .as_ref()
            .map(|case| format!(", case {case}"))
            .unwrap_or_default();
        let inputs = if rendered.inputs == "placeholder" {
            ", earlier stages' outputs are placeholders"
        } else {
            ""
        };
        say!(
            "━━ stage {} · {}/{}{case} · about {} tokens{inputs}",
            rendered.stage,
            language,
            rendered.template,
            thousands(tokens::count(&rendered.messages) as u64)
        );
        for message in &rendered.messages {
            say!(
                "── {} ({} tokens)",
                message.role.name(),
                tokens::count_text(&message.content)
            );
            say!("{}", printable_lines(&message.content));
        }
        say!("");
    }
    Ok(Exit::Fine)
}

/// Resources without a model: enough to render.
fn resources(pipeline: Pipeline, prompts: Arc<Prompts>, dataset: &Dataset) -> Resources {
    Resources {
        pipeline,
        prompts,
        schemas: Arc::new(SchemaCache::default()),
        router: Arc::new(Router {
            providers: BTreeMap::new(),
            default: String::new(),
            overrides: ModelSpec::default(),
        }),
        dialect: dataset.dialect,
        databases: dataset.databases.clone(),
        repeat: 0,
        run: String::new(),
    }
}

fn render_stages(resources: &Resources, example: Example, recorded: Option<&Trace>) -> Result<Vec<Rendered>, Failure> {
    let mut run = ExampleRun::new(Arc::new(example));
    let mut rendered = Vec::new();
    let mut inputs = "data";
    for (index, stage) in resources.pipeline.stages.iter().enumerate() {
        // With recorded outputs the label chooses one case; a placeholder label says nothing, so each case is shown.
        let templates: Vec<(Option<String>, String)> = match &stage.kind {
            StageKind::Switch { cases, .. } if inputs != "recorded" => cases
                .iter()
                .map(|(label, case)| (Some(label.clone()), case.template.clone()))
                .collect(),
            _ => match run.choose(resources, index) {
                Ok((template, _)) => vec![(None, template.to_owned())],
                Err(reason) => {
                    return Err(Failure::message(
                        Exit::Failed,
                        format!("stage `{}`: {reason}", stage.name),
                    ));
                }
            },
        };
        for (case, template) in templates {
            let messages = run.render(resources, index, &template)?;
            rendered.push(Rendered {
                stage: stage.name.clone(),
                template,
                case,
                messages,
                inputs,
            });
        }
        let known = recorded.and_then(|trace| trace.stages.iter().find(|known| known.stage == stage.name));
        match known {
            Some(known) => {
                run.supply(&stage.name, known.outputs.clone());
                if inputs != "placeholder" {
                    inputs = "recorded";
                }
            }
            None => {
                run.supply(&stage.name, placeholders(stage));
                inputs = "placeholder";
            }
        }
    }
    Ok(rendered)
}

fn placeholders(stage: &Stage) -> IndexMap<String, OutputValue> {
    stage
        .extract
        .iter()
        .map(|(name, extractor)| {
            let mark = format!("<{}.{name}>", stage.name);
            let value = match &extractor.kind {
                ExtractKind::List => OutputValue::List(vec![mark]),
                ExtractKind::Label { one_of } => OutputValue::Text(one_of.first().cloned().unwrap_or(mark)),
                ExtractKind::Json { .. } => OutputValue::Json(json!(mark)),
                _ => OutputValue::Text(mark),
            };
            (name.clone(), value)
        })
        .collect()
}

fn recorded_trace(folder: &Path, id: &str) -> Result<Trace, Failure> {
    let path = folder.join("traces.jsonl");
    let file = std::fs::File::open(&path)
        .map_err(|error| Failure::message(Exit::Usage, format!("cannot read {}: {error}", path.display())))?;
    for line in std::io::BufReader::new(file).lines().map_while(Result::ok) {
        if let Ok(trace) = serde_json::from_str::<Trace>(&line)
            && trace.id == id
        {
            return Ok(trace);
        }
    }
    Err(Failure::message(
        Exit::Usage,
        format!("{} has no trace of example `{id}`", path.display()),
    ))
}

fn check(arguments: &LintArguments, settings: &Settings) -> Result<Exit, Failure> {
    let names = if arguments.pipelines.is_empty() {
        settings.pipeline_names()
    } else {
        arguments.pipelines.clone()
    };
    let prompts = settings.prompts();
    let context = arguments.context.or_else(|| {
        let project = &settings.project;
        let provider = project
            .default_provider
            .as_ref()
            .and_then(|name| project.providers.get(name));
        provider
            .and_then(|provider| provider.context)
            .map(|tokens| tokens as usize)
    });
    let context = context.unwrap_or(DEFAULT_CONTEXT);
    let mut problems: Vec<Json> = Vec::new();
    let mut checked = 0;
    let mut sizes = Vec::new();
    for name in &names {
        let pipeline = settings.pipeline(name, &[])?;
        let languages = if arguments.lang.is_empty() {
            prompts.languages()
        } else {
            arguments.lang.clone()
        };
        let report = lint(&pipeline, &prompts, &languages);
        checked += report.checked;
        problems.extend(report.problems.iter().map(|problem| {
            json!({ "pipeline": pipeline.name, "lang": problem.language, "stage": problem.stage, "template": problem.template, "message": problem.message })
        }));
        // Sizes are only meaningful for templates that render.
        if report.problems.is_empty() {
            for language in &languages {
                if let Some(data) = &arguments.data {
                    let source = settings.source(data)?;
                    let Ok(dataset) = settings.load(&source, Some(language), None) else {
                        continue;
                    };
                    sizes.extend(longest(&pipeline, &prompts, &dataset, language)?);
                }
            }
        }
    }
    for (pipeline, language, stage, template, example, size, answer) in &sizes {
        if size + answer > context {
            problems.push(json!({
                "pipeline": pipeline, "lang": language, "stage": stage, "template": template,
                "message": format!("example `{example}`: about {size} prompt tokens and up to {answer} for the answer exceed the context of {context}"),
            }));
        }
    }
    if arguments.json {
        let sizes: Vec<Json> = sizes
            .iter()
            .map(|(pipeline, language, stage, template, example, size, answer)| {
                json!({ "pipeline": pipeline, "lang": language, "stage": stage, "template": template, "longest_example": example, "prompt_tokens": size, "max_tokens": answer })
            })
            .collect();
        say!(
            "{}",
            json!({ "checked": checked, "problems": problems, "sizes": sizes })
        );
    } else {
        for problem in &problems {
            let text = |key: &str| problem[key].as_str().unwrap_or_default().to_owned();
            say!(
                "{} · {}/{} (stage {}): {}",
                text("pipeline"),
                text("lang"),
                text("template"),
                text("stage"),
                text("message")
            );
        }
        if !sizes.is_empty() {
            let rows = sizes
                .iter()
                .map(|(pipeline, language, stage, template, example, size, answer)| {
                    vec![
                        pipeline.clone(),
                        language.clone(),
                        format!("{stage} ({template})"),
                        example.clone(),
                        thousands(*size as u64),
                        answer.to_string(),
                    ]
                })
                .collect();
            say!(
                "{}",
                table(
                    &[
                        "pipeline",
                        "lang",
                        "stage",
                        "longest example",
                        "prompt tokens",
                        "max_tokens"
                    ],
                    rows
                )
            );
        }
        say!(
            "{} looked at, {} found",
            count(checked, "template"),
            count(problems.len(), "problem")
        );
    }
    Ok(if problems.is_empty() { Exit::Fine } else { Exit::Failed })
}

type Size = (String, String, String, String, String, usize, usize);

/// The longest prompt of each template over a dataset: one example of each database, the one with the longest question.
fn longest(
    pipeline: &Pipeline,
    prompts: &Arc<Prompts>,
    dataset: &Dataset,
    language: &str,
) -> Result<Vec<Size>, Failure> {
    let mut by_database: BTreeMap<&str, &Example> = BTreeMap::new();
    for example in &dataset.examples {
        let known = by_database.entry(&example.database).or_insert(example);
        if example.question.len() + example.evidence.len() > known.question.len() + known.evidence.len() {
            *known = example;
        }
    }
    let resources = resources(pipeline.clone(), Arc::clone(prompts), dataset);
    let mut largest: IndexMap<(String, String), (String, usize)> = IndexMap::new();
    for example in by_database.into_values() {
        for rendered in render_stages(&resources, example.clone(), None)? {
            let size = tokens::count(&rendered.messages);
            let known = largest
                .entry((rendered.stage, rendered.template))
                .or_insert_with(|| (example.id.clone(), 0));
            if size > known.1 {
                *known = (example.id.clone(), size);
            }
        }
    }
    Ok(largest
        .into_iter()
        .map(|((stage, template), (example, size))| {
            let spec = pipeline
                .stage(&stage)
                .map(|found| found.model.over(&pipeline.model))
                .unwrap_or_default();
            (
                pipeline.name.clone(),
                language.to_owned(),
                stage,
                template,
                example,
                size,
                spec.max_tokens.unwrap_or(0) as usize,
            )
        })
        .collect())
}
