//! What `dinsql run` is about to do: every pipeline in every language and repeat, checked before the first call is paid for.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use super::arguments::RunArguments;
use super::exit::{Exit, Failure};
use super::providers::Providers;
use super::record::{Planned, folder_name, record};
use super::settings::Settings;
use crate::config::Pipeline;
use crate::dataset::{self, Languages};
use crate::engine::open_trusted;
use crate::pipeline::Resources;
use crate::prompt::{Prompts, lint};
use crate::run::RunRecord;
use crate::schema::SchemaCache;

/// A planned run with its folder.
pub struct Ready {
    pub planned: Planned,
    pub record: RunRecord,
    pub path: PathBuf,
    pub label: String,
}

/// Every planned run with its record; where a folder is resumed, only the run that it holds.
pub fn make_ready(
    plan: Vec<Planned>,
    settings: &Settings,
    prompts: &Prompts,
    providers: &Providers,
    only: Option<(String, PathBuf)>,
) -> Result<Vec<Ready>, Failure> {
    let count = plan.len();
    let mut ready = Vec::new();
    for (index, planned) in plan.into_iter().enumerate() {
        let record = record(&planned, providers, prompts)?;
        let path = match &only {
            Some((identity, _)) if *identity != record.identity => continue,
            Some((_, folder)) => folder.clone(),
            None => settings.runs.join(folder_name(&record)),
        };
        let mut label = format!("{} {}", planned.pipeline.name, planned.language);
        if planned.repeat > 0 {
            label = format!("{label} #{}", planned.repeat + 1);
        }
        if let Some(shard) = planned.shard {
            label = format!("{label} part {}/{}", shard.index, shard.of);
        }
        if count > 1 && only.is_none() {
            label = format!("[{}/{count}] {label}", index + 1);
        }
        ready.push(Ready {
            planned,
            record,
            path,
            label,
        });
    }
    if ready.is_empty() {
        let message =
            "the run's pipeline, templates, data, selection or model are not what they were when it was started";
        return Err(Failure::message(Exit::Usage, format!("cannot resume: {message}"))
            .hint("run.json in the folder tells what they were; `dinsql run` makes a new run of what they are now"));
    }
    Ok(ready)
}

/// What the stages of a run draw on.
pub fn resources(run: &Ready, prompts: &Arc<Prompts>, schemas: &Arc<SchemaCache>, providers: &Providers) -> Resources {
    Resources {
        pipeline: run.planned.pipeline.clone(),
        prompts: Arc::clone(prompts),
        schemas: Arc::clone(schemas),
        router: Arc::clone(&providers.router),
        dialect: run.planned.dataset.dialect,
        databases: run.planned.dataset.databases.clone(),
        repeat: run.planned.repeat,
        run: run.record.id.clone(),
    }
}

/// Results are told apart by name.
pub fn refuse_equal_names(pipelines: &[Pipeline]) -> Result<(), Failure> {
    let mut names = BTreeSet::new();
    for pipeline in pipelines {
        if !names.insert(&pipeline.name) {
            return Err(Failure::message(
                Exit::Usage,
                format!("two of the pipelines are named `{}`", pipeline.name),
            )
            .hint("results are told apart by name: change one file's `name`"));
        }
    }
    Ok(())
}

/// Every pipeline in every language, a language after the other.
pub fn plan(
    arguments: &RunArguments,
    settings: &Settings,
    data: &str,
    pipelines: &[Pipeline],
) -> Result<Vec<Planned>, Failure> {
    let source = settings.source(data)?;
    let split = arguments.selection.split.as_deref();
    let languages: Vec<Option<String>> = if arguments.lang.is_empty() {
        match dataset::languages_available(&source, split)? {
            Languages::Declared(codes) | Languages::PerRecord(codes) => codes.into_iter().map(Some).collect(),
            Languages::Undeclared => vec![None],
        }
    } else {
        let mut codes: Vec<String> = Vec::new();
        arguments.lang.iter().filter(|code| !code.is_empty()).for_each(|code| {
            if !codes.contains(code) {
                codes.push(code.clone());
            }
        });
        codes.into_iter().map(Some).collect()
    };
    let mut plan = Vec::new();
    for language in languages {
        let mut dataset = settings.load(&source, language.as_deref(), split)?;
        Settings::select(&mut dataset, &arguments.selection)?;
        let without: Vec<&str> = dataset
            .examples
            .iter()
            .filter(|example| example.gold.is_empty())
            .map(|example| example.id.as_str())
            .collect();
        if !without.is_empty() && !arguments.allow_missing_gold {
            let shown = without.iter().take(5).copied().collect::<Vec<_>>().join(", ");
            let message = format!(
                "{} of {} examples have no gold SQL and cannot be scored (ids {shown}{})",
                without.len(),
                dataset.examples.len(),
                if without.len() > 5 { ", …" } else { "" }
            );
            return Err(Failure::message(Exit::Usage, message)
                .hint("leave them out with --ids or --where, or take them along with --allow-missing-gold"));
        }
        let language = language
            .or_else(|| dataset.examples.first().map(|example| example.language.clone()))
            .unwrap_or_else(|| "en".into());
        let dataset = Arc::new(dataset);
        for pipeline in pipelines {
            for repeat in 0..arguments.repeat {
                plan.push(Planned {
                    pipeline: pipeline.clone(),
                    language: language.clone(),
                    dataset: Arc::clone(&dataset),
                    data: source.name().to_owned(),
                    repeat,
                    shard: arguments.shard,
                });
            }
        }
    }
    Ok(plan)
}

/// Finds what a template lacks before the first call is paid for.
pub fn check_templates(plan: &[Planned], prompts: &Prompts) -> Result<(), Failure> {
    let mut problems = Vec::new();
    for planned in plan {
        let report = lint(&planned.pipeline, prompts, std::slice::from_ref(&planned.language));
        problems.extend(report.problems.into_iter().map(|problem| {
            format!(
                "pipeline `{}`, stage `{}`, template `{}/{}`: {}",
                planned.pipeline.name, problem.stage, problem.language, problem.template, problem.message
            )
        }));
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(Failure::message(Exit::Usage, problems.join("\nerror: "))
        .hint("`dinsql prompt lint` checks all languages at once"))
}

/// Finds a database that is not there before the first call is paid for.
pub fn check_databases(plan: &[Planned]) -> Result<(), Failure> {
    let mut problems = Vec::new();
    let mut seen = BTreeSet::new();
    for planned in plan {
        for example in &planned.dataset.examples {
            let Some(database) = planned.dataset.databases.get(&example.database) else {
                continue;
            };
            if seen.insert(database.path.clone())
                && let Err(error) = open_trusted(&database.path)
            {
                problems.push(format!("{} (first needed by example `{}`)", error.message, example.id));
            }
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(Failure::message(Exit::Usage, problems.join("\nerror: "))
        .hint("`dinsql dataset check DATA` looks at all of a dataset"))
}

/// Finds a stage without a model, or with an unknown provider, before the first call.
pub fn check_models(providers: &Providers, pipelines: &[Pipeline]) -> Result<(), Failure> {
    for pipeline in pipelines {
        for model in pipeline.models() {
            providers.router.route(&model).map_err(Failure::usage)?;
        }
    }
    Ok(())
}

/// A cap on a cost that nobody can tell would be no cap.
pub fn refuse_unknown_prices(ready: &[Ready], providers: &Providers) -> Result<(), Failure> {
    for run in ready {
        for spec in run.planned.pipeline.models() {
            let route = providers.router.route(&spec).map_err(Failure::usage)?;
            if providers.price(&spec, &route.model_name).is_none() {
                return Err(Failure::message(
                    Exit::Usage,
                    format!("--max-cost: the price of `{}` is not known", route.model_name),
                )
                .hint("add it to dinsql.yaml (`prices` of the provider, or a price file), or use --max-tokens or --max-calls"));
            }
        }
    }
    Ok(())
}
