//! `dinsql run`: pipelines over a dataset in one or more languages, scored and compared.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Parser;
use serde_json::{Value as Json, json};

use super::arguments::{Cli, Command, RunArguments};
use super::exit::{Exit, Failure};
use super::progress::{Progress, duration};
use super::providers::Providers;
use super::settings::{Settings, executor};
use crate::config::Pipeline;
use crate::dataset::{self, Dataset, Languages};
use crate::engine::{open_trusted, sqlite_version};
use crate::metric::{Outcome, Scorer};
use crate::pipeline::Resources;
use crate::prompt::{Prompts, lint, template_digest};
use crate::report::{RunResult, comparison, difficulty_table, outcome_lines};
use crate::run::{
    DatabaseRecord, Digests, FORMAT, Order, RunEnd, RunFolder, RunRecord, RunStatus, StopSignal, Summary,
    TemplateRecord, execute, finish,
};
use crate::schema::SchemaCache;

/// Examples that go through the stages together at the embedded model.
const LOCAL_GROUP: usize = 16;

/// A run that is about to be made.
struct Planned {
    pipeline: Pipeline,
    language: String,
    dataset: Arc<Dataset>,
    data: String,
}

/// Runs, scores, compares.
pub async fn run(arguments: RunArguments, settings: Settings) -> Result<Exit, Failure> {
    let (arguments, only) = match &arguments.resume {
        Some(folder) => {
            let folder = folder.clone();
            let (again, identity) = recorded_arguments(&folder, &arguments)?;
            (again, Some(identity))
        }
        None => (arguments, None),
    };
    let data = arguments.data.clone().unwrap_or_default();
    let prompts = settings.prompts();
    let pipelines: Vec<Pipeline> = arguments
        .pipelines
        .iter()
        .map(|name| settings.pipeline(name, &arguments.set))
        .collect::<Result<_, _>>()?;
    refuse_equal_names(&pipelines)?;
    let plan = plan(&arguments, &settings, &data, &pipelines)?;
    check_templates(&plan, &prompts)?;
    check_databases(&plan)?;
    let providers = Providers::set_up(&arguments.model, &settings, &pipelines)?;
    check_models(&providers, &pipelines)?;
    let stop = StopSignal::default();
    watch_signals(stop.clone());
    let outcome = run_all(
        &plan,
        &arguments,
        &settings,
        &prompts,
        &providers,
        &stop,
        only.as_deref(),
    )
    .await;
    providers.shut_down().await;
    let (results, failure) = outcome?;
    if only.is_some() && results.is_empty() {
        let message =
            "the run's pipeline, templates, data, selection or model are not what they were when it was started";
        return Err(Failure::message(Exit::Usage, format!("cannot resume: {message}"))
            .hint("run.json in the folder tells what they were; `dinsql run` makes a new run of what they are now"));
    }
    if arguments.json {
        let runs: Vec<Json> = results.iter().map(run_json).collect();
        say!("{}", json!({ "runs": runs }));
    } else if !results.is_empty() {
        print_results(&results);
    }
    if let Some(failure) = failure {
        return Err(failure.hint("what was done is kept: the same command goes on from there"));
    }
    if stop.is_stopped() {
        eprintln!("interrupted; the same command goes on from there");
        return Ok(Exit::Interrupted);
    }
    let model_errors = results
        .iter()
        .any(|result| result.summary.outcomes.contains_key(&Outcome::ModelError));
    Ok(if model_errors { Exit::ModelErrors } else { Exit::Fine })
}

/// The command line that an earlier run was started with, and that run's identity.
fn recorded_arguments(folder: &Path, now: &RunArguments) -> Result<(RunArguments, String), Failure> {
    let path = folder.join("run.json");
    let fail = |reason: String| Failure::message(Exit::Usage, format!("cannot resume {}: {reason}", folder.display()));
    let bytes = std::fs::read(&path).map_err(|error| fail(format!("{}: {error}", path.display())))?;
    let record: RunRecord =
        serde_json::from_slice(&bytes).map_err(|error| fail(format!("{}: {error}", path.display())))?;
    let words = std::iter::once("dinsql".to_owned()).chain(record.arguments.iter().cloned());
    match Cli::try_parse_from(words).map(|cli| cli.command) {
        Ok(Command::Run(arguments)) => Ok((
            RunArguments {
                resume: None,
                json: now.json,
                ..arguments
            },
            record.identity,
        )),
        Ok(_) => Err(fail("it was not made by `dinsql run`".into())),
        Err(error) => Err(fail(format!("its arguments are not understood: {error}"))),
    }
}

fn refuse_equal_names(pipelines: &[Pipeline]) -> Result<(), Failure> {
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
fn plan(
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
            plan.push(Planned {
                pipeline: pipeline.clone(),
                language: language.clone(),
                dataset: Arc::clone(&dataset),
                data: source.name().to_owned(),
            });
        }
    }
    Ok(plan)
}

/// Finds what a template lacks before the first call is paid for.
fn check_templates(plan: &[Planned], prompts: &Prompts) -> Result<(), Failure> {
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
fn check_databases(plan: &[Planned]) -> Result<(), Failure> {
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
fn check_models(providers: &Providers, pipelines: &[Pipeline]) -> Result<(), Failure> {
    for pipeline in pipelines {
        for stage in &pipeline.stages {
            providers
                .router
                .route(&stage.model.over(&pipeline.model))
                .map_err(Failure::usage)?;
        }
    }
    Ok(())
}

/// The first Ctrl+C (or SIGTERM) lets calls in flight end, the second ends everything at once.
fn watch_signals(stop: StopSignal) {
    tokio::spawn(async move {
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).ok();
        let mut signals = 0;
        loop {
            let terminated = async {
                match &mut terminate {
                    Some(signal) => signal.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminated => {}
            }
            signals += 1;
            if signals > 1 {
                std::process::exit(Exit::Interrupted as i32);
            }
            eprintln!("stopping: calls in flight end first (again to end at once)");
            stop.stop();
        }
    });
}

type Results = (Vec<RunResult>, Option<Failure>);

async fn run_all(
    plan: &[Planned],
    arguments: &RunArguments,
    settings: &Settings,
    prompts: &Arc<Prompts>,
    providers: &Providers,
    stop: &StopSignal,
    only: Option<&str>,
) -> Result<Results, Failure> {
    let scorer = Scorer::new(executor(&arguments.execution)?);
    let schemas = Arc::new(SchemaCache::default());
    let mut results = Vec::new();
    for (index, planned) in plan.iter().enumerate() {
        let record = record(planned, providers, prompts)?;
        if only.is_some_and(|identity| identity != record.identity) {
            continue;
        }
        let path = settings.runs.join(folder_name(&record));
        let label = if plan.len() > 1 {
            format!(
                "[{}/{}] {} {}",
                index + 1,
                plan.len(),
                planned.pipeline.name,
                planned.language
            )
        } else {
            format!("{} {}", planned.pipeline.name, planned.language)
        };
        let resources = Resources {
            pipeline: planned.pipeline.clone(),
            prompts: Arc::clone(prompts),
            schemas: Arc::clone(&schemas),
            router: Arc::clone(&providers.router),
            dialect: planned.dataset.dialect,
            databases: planned.dataset.databases.clone(),
        };
        let (mut folder, done) = RunFolder::open(&path, record, &planned.dataset.examples)?;
        let done: BTreeSet<String> = done.into_iter().collect();
        let mut left: Vec<_> = planned
            .dataset
            .examples
            .iter()
            .filter(|example| !done.contains(&example.id))
            .cloned()
            .map(Arc::new)
            .collect();
        let order = if providers.embedded {
            // Examples of one database share the schema's tokens too.
            left.sort_by(|one, other| one.database.cmp(&other.database));
            Order::Stages {
                group: LOCAL_GROUP,
                at_once: providers.concurrency,
            }
        } else {
            Order::Examples {
                at_once: providers.concurrency * 2,
            }
        };
        if !done.is_empty() && !left.is_empty() {
            eprintln!(
                "{label}: going on after {} of {} examples",
                done.len(),
                planned.dataset.examples.len()
            );
        }
        let started = std::time::Instant::now();
        let end = if left.is_empty() {
            RunEnd::Complete
        } else {
            let progress = Progress::new(label.clone(), left.len() as u64);
            let end = execute(&resources, left, order, &mut folder, &scorer, stop, &|event| {
                progress.on_event(&event);
            })
            .await;
            progress.finish();
            match end {
                Ok(end) => end,
                Err(error) => {
                    let _ = folder.set_status(RunStatus::Partial);
                    return Err(error.into());
                }
            }
        };
        let (summary, verdicts) = finish(&mut folder, &scorer).await?;
        eprintln!("{label}: {}", one_line(&summary, started.elapsed().as_secs_f64()));
        let mut model_errors = verdicts.iter().filter(|verdict| verdict.outcome == Outcome::ModelError);
        if let Some(first) = model_errors.next() {
            let reason = first.reason.as_deref().unwrap_or_default();
            let others = model_errors.count();
            let more = if others > 0 {
                format!(" (and {others} more)")
            } else {
                String::new()
            };
            eprintln!("{label}: model error at example `{}`, {reason}{more}", first.id);
        }
        results.push(RunResult {
            folder: path,
            summary,
            verdicts,
        });
        match end {
            RunEnd::Complete => {}
            RunEnd::Stopped => break,
            RunEnd::Failed(error) => {
                let exit = if matches!(error, crate::pipeline::StageError::Call { .. }) {
                    Exit::Stopped
                } else {
                    Exit::Failed
                };
                return Ok((results, Some(Failure::new(exit, error))));
            }
        }
    }
    Ok((results, None))
}

/// What happened, for one line: speed and re-use where the model is local.
fn one_line(summary: &Summary, seconds: f64) -> String {
    use std::fmt::Write;
    if summary.status != RunStatus::Complete {
        let left = summary.outcomes.get(&Outcome::Budget).copied().unwrap_or(0);
        return format!("stopped after {} of {} examples", summary.n - left, summary.n);
    }
    let ex = &summary.metrics["ex"];
    let mut text = format!("EX {:.1} % of {}", ex.value * 100.0, summary.n);
    let calls = summary.usage.calls.saturating_sub(summary.effort.cache_hits);
    if calls > 0 {
        let _ = write!(text, " in {}", duration(seconds));
    }
    if summary.effort.cache_hits > 0 {
        let _ = write!(
            text,
            " · {} of {} calls cached",
            summary.effort.cache_hits, summary.usage.calls
        );
    }
    if calls > 0 && summary.effort.cache_hits == 0 && summary.usage.prompt_tokens > 0 {
        let (prompt, completion, cached) = (
            summary.usage.prompt_tokens as f64,
            summary.usage.completion_tokens as f64,
            summary.effort.cached_prompt_tokens as f64,
        );
        let _ = write!(text, " · {:.1} completion tokens/s", completion / seconds.max(0.001));
        if cached > 0.0 {
            let _ = write!(text, " · {:.0} % of prompt tokens re-used", cached / prompt * 100.0);
        }
    }
    text
}

/// All that decides the result, in one digest, and what is kept beside it.
fn record(planned: &Planned, providers: &Providers, prompts: &Prompts) -> Result<RunRecord, Failure> {
    let dataset = &planned.dataset;
    let mut templates: Vec<TemplateRecord> = Vec::new();
    for (_, template) in planned.pipeline.templates() {
        for name in prompts.parts(&planned.language, template)? {
            if templates.iter().all(|known| known.name != name) {
                let (text, file) = prompts.source(&planned.language, &name)?;
                templates.push(TemplateRecord { name, file, text });
            }
        }
    }
    templates.sort_by(|one, other| one.name.cmp(&other.name));
    let mut databases = BTreeMap::new();
    for example in &dataset.examples {
        if !databases.contains_key(&example.database)
            && let Some(database) = dataset.databases.get(&example.database)
        {
            let digest = dataset::database_digest(&database.path).map_err(|error| {
                Failure::message(
                    Exit::Failed,
                    format!("cannot read {}: {error}", database.path.display()),
                )
            })?;
            databases.insert(
                example.database.clone(),
                DatabaseRecord {
                    path: database.path.clone(),
                    digest,
                },
            );
        }
    }
    let mut models = Vec::new();
    for stage in &planned.pipeline.stages {
        let route = providers
            .router
            .route(&stage.model.over(&planned.pipeline.model))
            .map_err(Failure::usage)?;
        models.push(format!("{} {}", route.provider.identity, route.model_name));
    }
    let first = providers
        .router
        .route(&planned.pipeline.model)
        .map_err(Failure::usage)?;
    let hash = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
    let ids: Vec<&str> = dataset.examples.iter().map(|example| example.id.as_str()).collect();
    let digests = Digests {
        pipeline: hash(&serde_json::to_string(&planned.pipeline)?),
        templates: template_digest(
            templates
                .iter()
                .map(|template| (template.name.as_str(), template.text.as_str())),
        ),
        dataset: dataset.digest.clone(),
        selection: hash(&serde_json::to_string(&ids)?),
    };
    let database_digests: Vec<&str> = databases.values().map(|database| database.digest.as_str()).collect();
    let identity = hash(&serde_json::to_string(&json!([
        FORMAT,
        digests,
        database_digests,
        models,
        planned.language,
        dataset.split,
        providers.router.repeat
    ]))?);
    let now = jiff::Timestamp::now().to_string();
    Ok(RunRecord {
        format: FORMAT,
        identity,
        status: RunStatus::Running,
        dinsql: env!("CARGO_PKG_VERSION").into(),
        sqlite: sqlite_version().into(),
        started: now.clone(),
        updated: now,
        arguments: std::env::args().skip(1).collect(),
        data: planned.data.clone(),
        split: dataset.split.clone(),
        language: planned.language.clone(),
        dialect: dataset.dialect,
        repeat: providers.router.repeat,
        n: dataset.examples.len(),
        provider: first.provider.identity.clone(),
        model: first.model_name,
        served_models: Vec::new(),
        pipeline: planned.pipeline.clone(),
        templates,
        digests,
        databases,
    })
}

/// `din-sql.sample.tr.1f2e3d4c`
fn folder_name(record: &RunRecord) -> PathBuf {
    let plain = |text: &str| -> String {
        text.chars()
            .map(|letter| {
                if letter.is_alphanumeric() || matches!(letter, '-' | '_') {
                    letter
                } else {
                    '-'
                }
            })
            .collect()
    };
    format!(
        "{}.{}.{}.{}",
        plain(&record.pipeline.name),
        plain(&record.data),
        plain(&record.language),
        &record.identity[..8]
    )
    .into()
}

fn print_results(results: &[RunResult]) {
    say!("{}", comparison(results));
    if let Some(table) = difficulty_table(results) {
        say!("{table}");
    }
    for line in outcome_lines(results) {
        say!("{line}");
    }
    say!("Runs:");
    for result in results {
        say!("  {}", result.folder.display());
    }
}

fn run_json(result: &RunResult) -> Json {
    let summary = &result.summary;
    json!({
        "dir": result.folder,
        "pipeline": summary.pipeline,
        "data": summary.data,
        "split": summary.split,
        "lang": summary.lang,
        "repeat": summary.repeat,
        "model": summary.model,
        "status": summary.status,
        "n": summary.n,
        "metrics": summary.metrics,
        "outcomes": summary.outcomes,
        "usage": summary.usage,
        "effort": summary.effort,
    })
}
