//! Who is asked next. Against a remote model many examples are under way at once; against the embedded model, examples go
//! through the stages in small groups, so that one stage's prompts, which share their beginning, follow each other and the
//! server re-uses what it has computed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::StreamExt;
use futures::stream::FuturesUnordered;

use super::folder::{FolderError, RunFolder};
use crate::dataset::Example;
use crate::llm::Usage;
use crate::metric::{Outcome, ScoreItem, Scorer};
use crate::pipeline::{ExampleRun, Resources, StageError, Trace};

/// What happens in a run, for whoever shows it.
#[derive(Debug, Clone)]
pub enum Event {
    /// A model call ended well.
    Called {
        stage: String,
        cached: bool,
        usage: Usage,
        latency_ms: u64,
    },
    /// An example ended and was judged.
    Ended { id: String, outcome: Outcome, right: bool },
}

/// Asks a run to stop: calls in flight end, nothing new begins.
#[derive(Debug, Clone, Default)]
pub struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    pub fn stop(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// How the execution of a run ended.
#[derive(Debug)]
pub enum RunEnd {
    /// Every example has a trace.
    Complete,
    /// The signal was given.
    Stopped,
    /// Something that no further call would survive.
    Failed(StageError),
}

/// Order of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Examples independently, as many at once.
    Examples { at_once: usize },
    /// Groups of examples, stage after stage, `at_once` calls together.
    Stages { group: usize, at_once: usize },
}

/// Takes every example through the pipeline, appends its trace, has it judged and tells `on_event`.
///
/// # Errors
/// Where a trace cannot be written; what was written before stays.
pub async fn execute(
    resources: &Resources,
    examples: Vec<Arc<Example>>,
    order: Order,
    folder: &mut RunFolder,
    scorer: &Scorer,
    stop: &StopSignal,
    on_event: &(dyn Fn(Event) + Send + Sync),
) -> Result<RunEnd, FolderError> {
    let mut failure = None;
    match order {
        Order::Examples { at_once } => {
            let work = |example: Arc<Example>| async move {
                let mut run = ExampleRun::new(example);
                for index in 0..resources.pipeline.stages.len() {
                    if stop.is_stopped() {
                        return Ok(None);
                    }
                    stage(&mut run, resources, index, on_event).await?;
                }
                Ok(Some(run))
            };
            let mut queue = examples.into_iter();
            let mut under_way = FuturesUnordered::new();
            let mut judging = FuturesUnordered::new();
            loop {
                while under_way.len() < at_once.max(1) && !stop.is_stopped() {
                    let Some(example) = queue.next() else { break };
                    under_way.push(work(example));
                }
                // Judging goes on beside the calls; a slow query holds up no model call, but many of them hold up new ones.
                let full = judging.len() > 4 * at_once.max(16);
                tokio::select! {
                    biased;
                    Some(()) = judging.next(), if !judging.is_empty() => {}
                    Some(done) = under_way.next(), if !full && !under_way.is_empty() => match done {
                        Ok(Some(run)) => {
                            let (trace, example) = end(run, resources);
                            folder.append(&trace)?;
                            judging.push(judge(resources, scorer, example, trace, on_event));
                        }
                        Ok(None) => {}
                        Err(error) => {
                            stop.stop();
                            failure.get_or_insert(error);
                        }
                    },
                    else => break,
                }
            }
        }
        Order::Stages { group, at_once } => {
            let mut queue = examples.into_iter().peekable();
            while queue.peek().is_some() && !stop.is_stopped() {
                let mut runs: Vec<ExampleRun> = queue.by_ref().take(group.max(1)).map(ExampleRun::new).collect();
                for index in 0..resources.pipeline.stages.len() {
                    let mut next = runs.iter_mut();
                    let mut under_way = FuturesUnordered::new();
                    loop {
                        while under_way.len() < at_once.max(1) && !stop.is_stopped() {
                            let Some(run) = next.next() else { break };
                            under_way.push(stage(run, resources, index, on_event));
                        }
                        match under_way.next().await {
                            Some(Ok(())) => {}
                            Some(Err(error)) => {
                                stop.stop();
                                failure.get_or_insert(error);
                            }
                            None => break,
                        }
                    }
                    drop(under_way);
                    if stop.is_stopped() {
                        break;
                    }
                }
                if stop.is_stopped() {
                    // What the group's calls brought is in the cache; the examples themselves are not done.
                    break;
                }
                for run in runs {
                    let (trace, example) = end(run, resources);
                    folder.append(&trace)?;
                    judge(resources, scorer, example, trace, on_event).await;
                }
            }
        }
    }
    Ok(match failure {
        Some(error) => RunEnd::Failed(error),
        None if stop.is_stopped() => RunEnd::Stopped,
        None => RunEnd::Complete,
    })
}

async fn stage(
    run: &mut ExampleRun,
    resources: &Resources,
    index: usize,
    on_event: &(dyn Fn(Event) + Send + Sync),
) -> Result<(), StageError> {
    let before = run.stages().len();
    run.run_stage(resources, index).await?;
    if let Some(trace) = run.stages().get(before)
        && let Some(completion) = &trace.completion
    {
        on_event(Event::Called {
            stage: trace.stage.clone(),
            cached: completion.cached,
            usage: completion.usage,
            latency_ms: completion.latency_ms,
        });
    }
    Ok(())
}

fn end(run: ExampleRun, resources: &Resources) -> (Trace, Arc<Example>) {
    let example = Arc::clone(run.example());
    (run.finish(&resources.pipeline), example)
}

async fn judge(
    resources: &Resources,
    scorer: &Scorer,
    example: Arc<Example>,
    trace: Trace,
    on_event: &(dyn Fn(Event) + Send + Sync),
) {
    let Some(database) = resources.databases.get(&example.database) else {
        return;
    };
    let item = ScoreItem {
        id: example.id.clone(),
        db: example.database.clone(),
        database: database.path.clone(),
        gold: example.gold.clone(),
        prediction: super::summary::prediction(&trace),
    };
    let verdict = scorer.verdict(&item).await;
    on_event(Event::Ended {
        id: verdict.id.clone(),
        outcome: verdict.outcome,
        right: verdict.is_right(),
    });
}
