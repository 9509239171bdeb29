//! Who is asked next. Against a remote model many examples are under way at once; against the embedded model, examples go
//! through the stages in small groups, so that one stage's prompts, which share their beginning, follow each other and the
//! server re-uses what it has computed.

use std::sync::Arc;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tracing::Instrument;

use super::folder::{FolderError, RunFolder};
use crate::dataset::Example;
use crate::llm::{ErrorClass, StopSignal, Usage, Usd};
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
        cost: Option<Usd>,
        latency_ms: u64,
    },
    /// An example ended and was judged.
    Ended { id: String, outcome: Outcome, right: bool },
}

/// How the execution of a run ended.
#[derive(Debug)]
pub enum RunEnd {
    /// Every example has a trace.
    Complete,
    /// The signal was given.
    Stopped,
    /// The budget allows no further call.
    Budget(String),
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

/// Where a run's work comes from and goes to.
pub struct Work<'a> {
    pub resources: &'a Resources,
    /// All examples of the selection.
    pub examples: &'a [Example],
    /// Places in `examples` of those that are left to do, in the order in which they are begun.
    pub left: Vec<usize>,
    pub order: Order,
    pub scorer: &'a Scorer,
    pub stop: &'a StopSignal,
    pub on_event: &'a (dyn Fn(Event) + Send + Sync),
}

/// What has gone wrong so far; the first of a kind counts.
#[derive(Default)]
struct Trouble {
    failure: Option<StageError>,
    budget: Option<String>,
    folder: Option<FolderError>,
}

impl Trouble {
    /// Takes the error that ended an example, and has everything else end too.
    fn note(&mut self, error: StageError, stop: &StopSignal) {
        stop.stop();
        match &error {
            StageError::Call { source, .. } if source.class == ErrorClass::Interrupted => {}
            StageError::Call { source, .. } if source.class == ErrorClass::Budget => {
                self.budget.get_or_insert_with(|| source.message.clone());
            }
            _ => {
                self.failure.get_or_insert(error);
            }
        }
    }

    /// Takes a trace that could not be written: what is under way still ends, and is kept in the cache.
    fn note_folder(&mut self, error: FolderError, stop: &StopSignal) {
        stop.stop();
        self.folder.get_or_insert(error);
    }
}

/// Takes every example through the pipeline, appends its trace, has it judged and tells `on_event`.
///
/// # Errors
/// Where a trace cannot be written; what was written before stays, and calls that were under way have ended.
pub async fn execute(work: Work<'_>, folder: &mut RunFolder) -> Result<RunEnd, FolderError> {
    let mut trouble = Trouble::default();
    match work.order {
        Order::Examples { at_once } => examples_at_once(&work, at_once.max(1), folder, &mut trouble).await,
        Order::Stages { group, at_once } => {
            stage_after_stage(&work, group.max(1), at_once.max(1), folder, &mut trouble).await;
        }
    }
    if let Some(error) = trouble.folder {
        return Err(error);
    }
    Ok(if let Some(error) = trouble.failure {
        RunEnd::Failed(error)
    } else if let Some(reason) = trouble.budget {
        RunEnd::Budget(reason)
    } else if work.stop.is_stopped() {
        RunEnd::Stopped
    } else {
        RunEnd::Complete
    })
}

async fn examples_at_once(work: &Work<'_>, at_once: usize, folder: &mut RunFolder, trouble: &mut Trouble) {
    let whole_example = |example: Arc<Example>| {
        let span = tracing::info_span!("example", id = example.id.as_str(), db = example.database.as_str());
        async move {
            let mut run = ExampleRun::new(example);
            for index in 0..work.resources.pipeline.stages.len() {
                if work.stop.is_stopped() && !run.has_ended() {
                    return Ok(None);
                }
                stage(&mut run, work, index).await?;
            }
            Ok(Some(run))
        }
        .instrument(span)
    };
    let mut queue = work.left.iter();
    let mut under_way = FuturesUnordered::new();
    let mut judging = FuturesUnordered::new();
    loop {
        // Judging goes on beside the calls. A slow query holds up no call under way, but many of them hold up new ones.
        while under_way.len() < at_once && judging.len() < 4 * at_once.max(16) && !work.stop.is_stopped() {
            let Some(&place) = queue.next() else { break };
            under_way.push(whole_example(Arc::new(work.examples[place].clone())));
        }
        tokio::select! {
            biased;
            Some(()) = judging.next(), if !judging.is_empty() => {}
            Some(done) = under_way.next(), if !under_way.is_empty() => match done {
                Ok(Some(run)) => {
                    let (trace, example) = end(run, work.resources);
                    match folder.append(&trace) {
                        Ok(()) => judging.push(judge(work, example, trace)),
                        Err(error) => trouble.note_folder(error, work.stop),
                    }
                }
                Ok(None) => {}
                Err(error) => trouble.note(error, work.stop),
            },
            else => break,
        }
    }
}

async fn stage_after_stage(
    work: &Work<'_>,
    group: usize,
    at_once: usize,
    folder: &mut RunFolder,
    trouble: &mut Trouble,
) {
    for group in work.left.chunks(group) {
        if work.stop.is_stopped() {
            return;
        }
        let mut runs: Vec<ExampleRun> = group
            .iter()
            .map(|&place| ExampleRun::new(Arc::new(work.examples[place].clone())))
            .collect();
        for index in 0..work.resources.pipeline.stages.len() {
            let mut next = runs.iter_mut();
            let mut under_way = FuturesUnordered::new();
            loop {
                while under_way.len() < at_once && !work.stop.is_stopped() {
                    let Some(run) = next.next() else { break };
                    let span = tracing::info_span!(
                        "example",
                        id = run.example().id.as_str(),
                        db = run.example().database.as_str()
                    );
                    under_way.push(stage(run, work, index).instrument(span));
                }
                match under_way.next().await {
                    Some(Ok(())) => {}
                    Some(Err(error)) => trouble.note(error, work.stop),
                    None => break,
                }
            }
            drop(under_way);
            if work.stop.is_stopped() {
                // What the group's calls brought is in the cache; the examples themselves are not done, but for those
                // that need no further stage.
                let is_last = index + 1 == work.resources.pipeline.stages.len();
                runs.retain(|run| run.has_ended() || is_last && run.stages().len() > index);
                break;
            }
        }
        for run in runs {
            let (trace, example) = end(run, work.resources);
            match folder.append(&trace) {
                Ok(()) => judge(work, example, trace).await,
                Err(error) => {
                    trouble.note_folder(error, work.stop);
                    return;
                }
            }
        }
    }
}

async fn stage(run: &mut ExampleRun, work: &Work<'_>, index: usize) -> Result<(), StageError> {
    let before = run.stages().len();
    let name = work.resources.pipeline.stages[index].name.as_str();
    run.run_stage(work.resources, index)
        .instrument(tracing::info_span!("stage", stage = name))
        .await?;
    if let Some(trace) = run.stages().get(before)
        && let Some(completion) = &trace.completion
    {
        (work.on_event)(Event::Called {
            stage: trace.stage.clone(),
            cached: completion.cached,
            usage: completion.usage,
            cost: completion.cost,
            latency_ms: completion.latency_ms,
        });
    }
    Ok(())
}

fn end(run: ExampleRun, resources: &Resources) -> (Trace, Arc<Example>) {
    let example = Arc::clone(run.example());
    (run.finish(&resources.pipeline), example)
}

async fn judge(work: &Work<'_>, example: Arc<Example>, trace: Trace) {
    let Some(database) = work.resources.databases.get(&example.database) else {
        return;
    };
    let item = ScoreItem {
        id: example.id.clone(),
        db: example.database.clone(),
        database: database.path.clone(),
        gold: example.gold.clone(),
        prediction: super::summary::prediction(trace),
    };
    // A database that cannot be read is reported when the run is scored.
    if let Ok(verdict) = work.scorer.verdict(&item).await {
        (work.on_event)(Event::Ended {
            right: verdict.is_right(),
            id: verdict.id,
            outcome: verdict.outcome,
        });
    }
}
