//! `dinsql run`: pipelines over a dataset in one or more languages, scored and compared.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use serde_json::{Value as Json, json};
use tracing::Instrument;

use super::arguments::{BudgetArguments, CacheChoice, Cli, Command, Global, RunArguments};
use super::estimate;
use super::exit::{Exit, Failure};
use super::output::count;
use super::plan::{self, Ready, resources};
use super::progress::{Progress, duration};
use super::providers::{Control, Providers};
use super::settings::{Settings, executor};
use crate::config::Pipeline;
use crate::llm::budget::{Amount, Budget, SpendingCaps};
use crate::llm::cache_store::spent_by;
use crate::llm::{ErrorClass, StopSignal, Usd};
use crate::metric::{Outcome, Scorer};
use crate::pipeline::StageError;
use crate::prompt::Prompts;
use crate::report::{RunResult, comparison, difficulty_table, outcome_lines, repeats, repeats_table, stage_table};
use crate::run::{
    Errors, Order, RunEnd, RunFolder, RunRecord, RunStatus, Summary, Work, execute, finish, folder_id, spent_in,
};
use crate::schema::SchemaCache;

/// Examples that go through the stages together at the embedded model.
const LOCAL_GROUP: usize = 16;

/// Runs, scores, compares.
pub async fn run(arguments: RunArguments, global: &Global) -> Result<Exit, Failure> {
    let (arguments, settings, only) = match &arguments.resume {
        Some(folder) => {
            let (again, settings, only) = recorded(folder, &arguments)?;
            (again, settings, Some(only))
        }
        None => (arguments, Settings::resolve(global)?, None),
    };
    let data = arguments.data.clone().unwrap_or_default();
    let prompts = settings.prompts();
    let pipelines: Vec<Pipeline> = arguments
        .pipelines
        .iter()
        .map(|name| settings.pipeline(name, &arguments.set))
        .collect::<Result<_, _>>()?;
    plan::refuse_equal_names(&pipelines)?;
    let planned = plan::plan(&arguments, &settings, &data, &pipelines)?;
    plan::check_templates(&planned, &prompts)?;
    plan::check_databases(&planned)?;
    let control = Control {
        budget: Arc::new(Budget::new(caps(&arguments.budget)?)),
        ..Control::default()
    };
    let providers = Providers::set_up(&arguments.model, &settings, &pipelines, &control)?;
    plan::check_models(&providers, &pipelines)?;
    let ready = plan::make_ready(planned, &settings, &prompts, &providers, only)?;
    if arguments.budget.max_cost.is_some() {
        plan::refuse_unknown_prices(&ready, &providers)?;
    }
    if arguments.estimate {
        let estimates = estimate::estimate_all(&ready, &settings, &prompts, &providers, &arguments)?;
        if arguments.json {
            say!("{}", estimate::json(&estimates));
        } else {
            estimate::show(&estimates);
        }
        providers.shut_down().await;
        return Ok(Exit::Fine);
    }
    estimate::confirm(&ready, &arguments, &settings, &prompts, &providers)?;
    if !control.budget.caps().is_none() {
        for run in &ready {
            let identity = &run.record.identity;
            let in_traces = spent_in(&run.path, identity);
            // Examples under way are in no trace yet.
            let stored = match folder_id(&run.path, identity) {
                Some(id) if arguments.model.cache_choice() != CacheChoice::Off => {
                    spent_by(&settings.completions(), &id)?
                }
                _ => Amount::default(),
            };
            control.budget.add(in_traces.answered.max(stored));
            control.budget.add(in_traces.wasted);
        }
    }
    watch_signals(control.stop.clone());
    if let Some(limit) = arguments.budget.max_time {
        watch_time(limit, &control);
    }
    let outcome = run_all(&ready, &arguments, &prompts, &providers, &control).await;
    providers.shut_down().await;
    let (results, failure) = outcome?;
    if arguments.json {
        let runs: Vec<Json> = results.iter().map(run_json).collect();
        say!("{}", json!({ "runs": runs, "repeats": repeats(&results) }));
    } else if !results.is_empty() {
        print_results(&results);
    }
    if let Some(failure) = failure {
        return Err(failure.hint("what was done is kept: the same command goes on from there"));
    }
    let is_whole = results.len() == ready.len()
        && results
            .iter()
            .all(|result| result.summary.status == RunStatus::Complete);
    if let Some(reason) = control.budget.ended().filter(|_| !is_whole) {
        return Err(
            Failure::message(Exit::Stopped, format!("stopped by the budget: {reason}"))
                .hint("what was done is kept: the same command with a higher limit goes on from there"),
        );
    }
    if control.stop.is_stopped() && !is_whole {
        eprintln!("interrupted; the same command goes on from there");
        return Ok(Exit::Interrupted);
    }
    let model_errors = results
        .iter()
        .any(|result| result.summary.outcomes.contains_key(&Outcome::ModelError));
    Ok(if model_errors { Exit::ModelErrors } else { Exit::Fine })
}

/// The command line that an earlier run was started with, the settings it had, and that run itself. What the present
/// command line says of budget, concurrency and errors comes first.
fn recorded(folder: &Path, now: &RunArguments) -> Result<(RunArguments, Settings, (String, PathBuf)), Failure> {
    let path = folder.join("run.json");
    let fail = |reason: String| Failure::message(Exit::Usage, format!("cannot resume {}: {reason}", folder.display()));
    let bytes = std::fs::read(&path).map_err(|error| fail(format!("{}: {error}", path.display())))?;
    let record: RunRecord =
        serde_json::from_slice(&bytes).map_err(|error| fail(format!("{}: {error}", path.display())))?;
    let itself = folder.canonicalize().map_err(|error| fail(error.to_string()))?;
    // Paths on the recorded command line mean the folder in which it was given.
    if !record.directory.as_os_str().is_empty() {
        std::env::set_current_dir(&record.directory)
            .map_err(|error| fail(format!("it was started in {}: {error}", record.directory.display())))?;
    }
    let words = std::iter::once("dinsql".to_owned()).chain(record.arguments.iter().cloned());
    let cli = Cli::try_parse_from(words).map_err(|error| fail(format!("its arguments are not understood: {error}")))?;
    let Command::Run(then) = cli.command else {
        return Err(fail("it was not made by `dinsql run`".into()));
    };
    let mut arguments = RunArguments {
        resume: None,
        json: now.json,
        estimate: now.estimate,
        yes: now.yes,
        retry_errors: now.retry_errors,
        budget: BudgetArguments {
            max_cost: now.budget.max_cost.or(then.budget.max_cost),
            max_calls: now.budget.max_calls.or(then.budget.max_calls),
            max_tokens: now.budget.max_tokens.or(then.budget.max_tokens),
            max_time: now.budget.max_time.or(then.budget.max_time),
        },
        ..then
    };
    arguments.model.concurrency = now.model.concurrency.or(arguments.model.concurrency);
    let settings = Settings::resolve(&cli.global)?;
    Ok((arguments, settings, (record.identity, itself)))
}

fn caps(arguments: &BudgetArguments) -> Result<SpendingCaps, Failure> {
    let cost = match arguments.max_cost {
        None => None,
        Some(dollars) => Some(Usd::from_dollars(dollars).ok_or_else(|| {
            Failure::message(
                Exit::Usage,
                format!("--max-cost {dollars}: not an amount of US dollars"),
            )
        })?),
    };
    Ok(SpendingCaps {
        cost,
        calls: arguments.max_calls,
        tokens: arguments.max_tokens,
    })
}

/// Ends the budget when its time is up.
fn watch_time(limit: Duration, control: &Control) {
    let control = control.clone();
    tokio::spawn(async move {
        tokio::time::sleep(limit).await;
        control
            .budget
            .end(&format!("the {} are over", duration(limit.as_secs_f64())));
        control.stop.stop();
    });
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
    ready: &[Ready],
    arguments: &RunArguments,
    prompts: &Arc<Prompts>,
    providers: &Providers,
    control: &Control,
) -> Result<Results, Failure> {
    let scorer = Scorer::new(executor(&arguments.execution)?);
    let schemas = Arc::new(SchemaCache::default());
    let mut results = Vec::new();
    for run in ready {
        let label = &run.label;
        let examples = run.planned.examples();
        let errors = if arguments.retry_errors {
            Errors::Retry
        } else {
            Errors::Keep
        };
        let (mut folder, done) = RunFolder::open(&run.path, run.record.clone(), &examples, errors)?;
        let mut left: Vec<usize> = (0..examples.len())
            .filter(|&place| !done.contains(&examples[place].id))
            .collect();
        let done = done.len();
        let order = if providers.embedded {
            // Examples of one database share the schema's tokens too.
            left.sort_by(|&one, &other| examples[one].database.cmp(&examples[other].database));
            Order::Stages {
                group: LOCAL_GROUP,
                at_once: providers.concurrency,
            }
        } else {
            Order::Examples {
                at_once: providers.concurrency * 2,
            }
        };
        if done > 0 && !left.is_empty() {
            eprintln!("{label}: going on after {done} of {} examples", examples.len());
        }
        let started = std::time::Instant::now();
        let mut resources = resources(run, prompts, &schemas, providers);
        resources.run.clone_from(&folder.record.id);
        let end = if left.is_empty() {
            RunEnd::Complete
        } else {
            let progress = Progress::new(label.clone(), left.len() as u64, control, &providers.limiter);
            let work = Work {
                resources: &resources,
                examples: &examples,
                left,
                order,
                scorer: &scorer,
                stop: &control.stop,
                on_event: &|event| progress.on_event(&event),
            };
            let span = tracing::info_span!(
                "run",
                pipeline = run.planned.pipeline.name.as_str(),
                data = run.planned.data.as_str(),
                lang = run.planned.language.as_str(),
                repeat = i64::from(run.planned.repeat)
            );
            let end = progress.beside(execute(work, &mut folder).instrument(span)).await;
            progress.finish();
            match end {
                Ok(end) => end,
                Err(error) => {
                    folder.record.stopped = Some(error.to_string());
                    let _ = folder.set_status(RunStatus::Partial);
                    return Err(Failure::from(error)
                        .hint("what was answered is in the completion cache; the same command goes on from there"));
                }
            }
        };
        let was_finished = folder.is_finished();
        folder.record.stopped = match &end {
            RunEnd::Complete => None,
            RunEnd::Stopped => Some(control.budget.ended().unwrap_or_else(|| "interrupted".into())),
            RunEnd::Budget(reason) => Some(reason.clone()),
            RunEnd::Failed(error) => Some(error.to_string()),
        };
        let (summary, verdicts) = finish(&mut folder, &scorer).await?;
        let seconds = if was_finished {
            0.0
        } else {
            started.elapsed().as_secs_f64()
        };
        eprintln!("{label}: {}", one_line(&summary, seconds));
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
            if summary.passing_errors > 0 {
                let again = count(summary.passing_errors, "example");
                eprintln!("{label}: --retry-errors asks again about {again} whose error may be gone by now");
            }
        }
        results.push(RunResult {
            folder: run.path.clone(),
            summary,
            verdicts,
        });
        match end {
            RunEnd::Complete => {}
            RunEnd::Stopped | RunEnd::Budget(_) => break,
            RunEnd::Failed(error) => {
                let class = match &error {
                    StageError::Call { source, .. } => Some(source.class),
                    _ => None,
                };
                let exit = if class.is_some() { Exit::Stopped } else { Exit::Failed };
                let failure = Failure::new(exit, error);
                return Ok((
                    results,
                    Some(match class {
                        Some(ErrorClass::Outage) => failure.hint(
                            "the server seems to be down; once it answers again, --retry-errors asks also about the \
                             examples that failed before",
                        ),
                        Some(ErrorClass::NotCached) => {
                            failure.hint("--cache-mode on asks the model where the cache has no answer")
                        }
                        _ => failure,
                    }),
                ));
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

pub fn print_results(results: &[RunResult]) {
    say!("{}", comparison(results));
    if let Some(table) = repeats_table(results) {
        say!("{table}");
    }
    if let Some(table) = difficulty_table(results) {
        say!("{table}");
    }
    say!("{}", stage_table(results));
    for line in outcome_lines(results) {
        say!("{line}");
    }
    say!("Runs:");
    for result in results {
        say!("  {}", result.folder.display());
    }
}

pub fn run_json(result: &RunResult) -> Json {
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
