//! What is computed from a run folder alone: predictions in the benchmarks' forms, verdicts, the summary.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

use futures::StreamExt;
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::folder::{FolderError, Identified, NewFile, RunFolder, RunStatus, write_json, write_lines};
use crate::engine::QueryError;
use crate::llm::{ErrorClass, Usage, Usd, is_cut};
use crate::metric::{Outcome, ScoreItem, Scorer, Verdict};
use crate::pipeline::Trace;
use crate::stats::{bootstrap_mean, mean_and_sd, wilson};

/// Of the bootstrap interval of a metric that is no proportion.
const RESAMPLES: usize = 10_000;
const SEED: u64 = 0;

/// A metric over a set of examples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MetricSummary {
    /// Mean, 0 to 1.
    pub value: f64,
    /// 95 % interval: Wilson's for a proportion, else the bootstrap's percentiles.
    pub low: f64,
    pub high: f64,
    pub n: usize,
}

/// Scores of a part of the examples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub n: usize,
    pub metrics: BTreeMap<String, MetricSummary>,
}

/// Calls of one stage, or of all, whether the cache answered them or not.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StageSummary {
    pub calls: u64,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    /// Of the completion tokens, those that were thought and not said.
    pub reasoning_tokens: u64,
    /// Calls whose server did not count tokens.
    pub calls_without_usage: u64,
    /// What the calls cost when they were made, in US dollars; of those whose cost is known.
    pub cost: Usd,
    /// Calls whose cost is unknown.
    pub calls_without_cost: u64,
    /// Calls that brought nothing.
    pub failed_calls: u64,
    /// Outputs that were not found and took their default.
    pub defaults_used: u64,
    /// Answers cut at max_tokens.
    pub truncated: u64,
}

impl StageSummary {
    fn add(&mut self, other: &StageSummary) {
        self.calls += other.calls;
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        self.reasoning_tokens += other.reasoning_tokens;
        self.calls_without_usage += other.calls_without_usage;
        self.cost += other.cost;
        self.calls_without_cost += other.calls_without_cost;
        self.failed_calls += other.failed_calls;
        self.defaults_used += other.defaults_used;
        self.truncated += other.truncated;
    }
}

/// `summary.json`. Everything but `effort` is the same however often the run was interrupted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub format: u32,
    pub pipeline: String,
    pub data: String,
    pub split: String,
    pub lang: String,
    pub repeat: u32,
    pub model: String,
    pub status: RunStatus,
    pub n: usize,
    pub metrics: BTreeMap<String, MetricSummary>,
    pub outcomes: BTreeMap<Outcome, usize>,
    pub by_difficulty: IndexMap<String, Group>,
    pub by_database: BTreeMap<String, Group>,
    /// Of the model errors, those that may not come again: `--retry-errors` asks about them once more.
    #[serde(default)]
    pub passing_errors: usize,
    pub usage: StageSummary,
    pub stages: IndexMap<String, StageSummary>,
    /// What depends on the day: times, cache hits, retries.
    pub effort: Effort,
}

/// What the run really did.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Effort {
    #[serde(flatten)]
    pub all: StageEffort,
    pub stages: IndexMap<String, StageEffort>,
}

/// What the calls of one stage, or of all, took.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StageEffort {
    /// Calls answered from the completion cache.
    pub cache_hits: u64,
    /// Requests beyond the first of a call.
    pub retries: u64,
    /// Prompt tokens that the server said it had computed before.
    pub cached_prompt_tokens: u64,
    /// What this run paid: calls that were not cache hits, those included whose answers were of no use. Of those whose
    /// cost is known.
    pub spent: Usd,
    /// Tokens of the same calls.
    pub tokens: u64,
    /// Sum of the latencies of the calls that were not cache hits, in ms.
    pub latency_ms: u64,
    /// Median and 95th percentile of these latencies, in ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_p50_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_p95_ms: Option<u64>,
}

impl std::ops::Deref for Effort {
    type Target = StageEffort;

    fn deref(&self) -> &StageEffort {
        &self.all
    }
}

/// Why a run cannot be summarised.
#[derive(Debug, thiserror::Error)]
pub enum FinishError {
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error("cannot score: {0}")]
    Database(#[from] QueryError),
}

/// The prediction a trace ends in, or how it ended without one.
pub(super) fn prediction(trace: Trace) -> Result<String, (Outcome, String)> {
    trace.prediction.ok_or((trace.outcome, trace.error.unwrap_or_default()))
}

/// What is counted of a trace. Prompts and answers, which are most of it, are not even read into memory.
#[derive(Debug, Deserialize)]
struct TraceCounts {
    id: String,
    outcome: Outcome,
    #[serde(default)]
    prediction: Option<String>,
    #[serde(default)]
    error: Option<String>,
    #[serde(default)]
    error_class: Option<ErrorClass>,
    stages: Vec<StageCounts>,
}

#[derive(Debug, Deserialize)]
struct StageCounts {
    stage: String,
    #[serde(default)]
    completion: Option<CompletionCounts>,
    #[serde(default)]
    failure: Option<FailureCounts>,
    #[serde(default)]
    defaulted: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct FailureCounts {
    attempts: u32,
    #[serde(default)]
    usage: Usage,
    #[serde(default)]
    cost: Option<Usd>,
}

#[derive(Debug, Deserialize)]
struct CompletionCounts {
    #[serde(default)]
    finish_reason: Option<String>,
    #[serde(default)]
    usage: Usage,
    #[serde(default)]
    wasted: Usage,
    #[serde(default)]
    cost: Option<Usd>,
    #[serde(default)]
    served_model: Option<String>,
    latency_ms: u64,
    #[serde(default)]
    attempts: u32,
    #[serde(default)]
    cached: bool,
}

impl Identified for TraceCounts {
    fn id(&self) -> &str {
        &self.id
    }
}

/// Counts what traces tell of calls.
#[derive(Debug, Default)]
struct Tally {
    stages: IndexMap<String, (StageSummary, StageEffort, Vec<u64>)>,
    served: Vec<String>,
}

impl Tally {
    fn add(&mut self, trace: &StageCounts) {
        if !self.stages.contains_key(&trace.stage) {
            self.stages.insert(trace.stage.clone(), Default::default());
        }
        let Some((stage, effort, latencies)) = self.stages.get_mut(&trace.stage) else {
            return;
        };
        stage.defaults_used += trace.defaulted.len() as u64;
        if let Some(failure) = &trace.failure {
            stage.failed_calls += 1;
            effort.retries += u64::from(failure.attempts.saturating_sub(1));
            effort.tokens += failure.usage.total().unwrap_or(0);
            effort.spent += failure.cost.unwrap_or_default();
        }
        let Some(completion) = &trace.completion else { return };
        stage.calls += 1;
        match (completion.usage.prompt, completion.usage.completion) {
            (None, None) => stage.calls_without_usage += 1,
            (prompt, answer) => {
                stage.prompt_tokens += prompt.unwrap_or(0);
                stage.completion_tokens += answer.unwrap_or(0);
            }
        }
        stage.reasoning_tokens += completion.usage.reasoning.unwrap_or(0);
        match completion.cost {
            Some(cost) => stage.cost += cost,
            None => stage.calls_without_cost += 1,
        }
        stage.truncated += u64::from(is_cut(completion.finish_reason.as_deref()));
        if completion.cached {
            effort.cache_hits += 1;
        } else {
            effort.retries += u64::from(completion.attempts.saturating_sub(1));
            effort.latency_ms += completion.latency_ms;
            effort.cached_prompt_tokens += completion.usage.cached_prompt.unwrap_or(0);
            effort.spent += completion.cost.unwrap_or_default();
            effort.tokens += completion.usage.total().unwrap_or(0) + completion.wasted.total().unwrap_or(0);
            latencies.push(completion.latency_ms);
        }
        if let Some(model) = &completion.served_model
            && !self.served.contains(model)
        {
            self.served.push(model.clone());
        }
    }

    fn finish(self) -> (StageSummary, IndexMap<String, StageSummary>, Effort) {
        let mut usage = StageSummary::default();
        let mut stages = IndexMap::new();
        let mut all = StageEffort::default();
        let mut all_latencies = Vec::new();
        let mut efforts = IndexMap::new();
        for (name, (stage, mut effort, mut latencies)) in self.stages {
            usage.add(&stage);
            all.cache_hits += effort.cache_hits;
            all.retries += effort.retries;
            all.cached_prompt_tokens += effort.cached_prompt_tokens;
            all.spent += effort.spent;
            all.tokens += effort.tokens;
            all.latency_ms += effort.latency_ms;
            percentiles(&mut effort, &mut latencies);
            all_latencies.append(&mut latencies);
            stages.insert(name.clone(), stage);
            efforts.insert(name, effort);
        }
        percentiles(&mut all, &mut all_latencies);
        let effort = Effort { all, stages: efforts };
        (usage, stages, effort)
    }
}

/// By the nearest rank.
fn percentiles(effort: &mut StageEffort, latencies: &mut [u64]) {
    latencies.sort_unstable();
    let rank = |percent: usize| {
        let place = (latencies.len() * percent).div_ceil(100).saturating_sub(1);
        latencies.get(place).copied()
    };
    effort.latency_p50_ms = rank(50);
    effort.latency_p95_ms = rank(95);
}

/// Scores a folder's traces, writes `predictions.json`, `predictions.sql`, `verdicts.jsonl` and `summary.json`, and gives
/// the run its final status. Where all this is there already, it is only read.
///
/// # Errors
/// Where the folder cannot be read or written, or a database cannot be read.
pub async fn finish(folder: &mut RunFolder, scorer: &Scorer) -> Result<(Summary, Vec<Verdict>), FinishError> {
    if folder.is_finished()
        && let Some(known) = read_finished(folder.path())
    {
        return Ok(known);
    }
    finish_with(folder, Some(scorer), HashMap::new()).await
}

/// The summary and verdicts of a finished run; none where they are not readable.
fn read_finished(path: &Path) -> Option<(Summary, Vec<Verdict>)> {
    let summary: Summary = serde_json::from_slice(&std::fs::read(path.join("summary.json")).ok()?).ok()?;
    let verdicts = read_verdicts(&path.join("verdicts.jsonl"))?;
    (summary.status == RunStatus::Complete && verdicts.len() == summary.n).then_some((summary, verdicts))
}

pub(super) fn read_verdicts(path: &Path) -> Option<Vec<Verdict>> {
    let file = std::fs::File::open(path).ok()?;
    BufReader::new(file)
        .lines()
        .map(|line| serde_json::from_str(&line.ok()?).ok())
        .collect()
}

/// As [`finish`]; verdicts that are `known` by id are taken as they are, and without a scorer only they.
pub(super) async fn finish_with(
    folder: &mut RunFolder,
    scorer: Option<&Scorer>,
    mut known: HashMap<String, Verdict>,
) -> Result<(Summary, Vec<Verdict>), FinishError> {
    let mut predictions: HashMap<String, Result<String, (Outcome, String)>> = HashMap::new();
    let mut tally = Tally::default();
    for stage in &folder.record.pipeline.stages {
        tally.stages.insert(stage.name.clone(), Default::default());
    }
    let mut passing_errors = 0;
    folder.for_each_trace(|trace: TraceCounts| {
        passing_errors += usize::from(trace.error_class.is_some_and(ErrorClass::passes));
        trace.stages.iter().for_each(|stage| tally.add(stage));
        let prediction = trace.prediction.ok_or((trace.outcome, trace.error.unwrap_or_default()));
        predictions.insert(trace.id, prediction);
    })?;
    let mut items: Vec<ScoreItem> = Vec::new();
    let mut difficulties: Vec<Option<String>> = Vec::new();
    let mut missing = 0;
    folder.for_each_example(|example| {
        let prediction = predictions.remove(&example.id).unwrap_or_else(|| {
            missing += 1;
            Err((Outcome::Budget, "the run ended before this example".to_owned()))
        });
        items.push(ScoreItem {
            database: folder
                .record
                .databases
                .get(&example.db)
                .map(|database| database.path.clone())
                .unwrap_or_default(),
            id: example.id,
            db: example.db,
            gold: example.gold,
            prediction,
        });
        difficulties.push(example.difficulty);
    })?;
    let path = folder.path().to_owned();
    let io = |source| FolderError::Io {
        path: path.clone(),
        source,
    };
    // Predictions are there even where they cannot be scored.
    write_predictions(&path, &items).map_err(io)?;
    let verdicts = match scorer {
        Some(scorer) => score_items(&items, scorer, &|_| {}).await?,
        None => items
            .iter()
            .map(|item| {
                known.remove(&item.id).ok_or_else(|| FolderError::NotOneRun {
                    reason: format!("no part has a verdict on the example `{}`", item.id),
                })
            })
            .collect::<Result<_, _>>()?,
    };
    drop(items);
    write_lines(&path.join("verdicts.jsonl"), &verdicts).map_err(io)?;
    let status = if missing == 0 {
        RunStatus::Complete
    } else {
        RunStatus::Partial
    };
    let difficulties: Vec<Option<&str>> = difficulties.iter().map(Option::as_deref).collect();
    let mut served = std::mem::take(&mut tally.served);
    served.sort();
    let (usage, stages, effort) = tally.finish();
    let parts = summarise(&verdicts, &difficulties);
    let record = &folder.record;
    let summary = Summary {
        format: super::folder::FORMAT,
        pipeline: record.pipeline.name.clone(),
        data: record.data.clone(),
        split: record.split.clone(),
        lang: record.language.clone(),
        repeat: record.repeat,
        model: record.model.clone(),
        status,
        n: verdicts.len(),
        metrics: parts.metrics,
        outcomes: parts.outcomes,
        by_difficulty: parts.by_difficulty,
        by_database: parts.by_database,
        passing_errors,
        usage,
        stages,
        effort,
    };
    write_json(&path.join("summary.json"), &summary).map_err(io)?;
    folder.record.served_models = served;
    if status == RunStatus::Complete {
        // The wish to stop came when the last call was under way.
        folder.record.stopped = None;
    }
    folder.record.traces_bytes = Some(folder.traces_size().map_err(io)?);
    folder.set_status(status)?;
    Ok((summary, verdicts))
}

/// Verdicts in the items' order, several judged at once.
///
/// # Errors
/// Where a database cannot be read.
pub async fn score_items(
    items: &[ScoreItem],
    scorer: &Scorer,
    on_verdict: &(dyn Fn(&Verdict) + Send + Sync),
) -> Result<Vec<Verdict>, QueryError> {
    let mut judged = futures::stream::iter(items)
        .map(|item| scorer.verdict(item))
        .buffered(32);
    let mut verdicts = Vec::with_capacity(items.len());
    while let Some(verdict) = judged.next().await {
        let verdict = verdict?;
        on_verdict(&verdict);
        verdicts.push(verdict);
    }
    Ok(verdicts)
}

/// Verdicts, one a line.
///
/// # Errors
/// Where the file cannot be written.
pub fn write_verdicts(path: &Path, verdicts: &[Verdict]) -> std::io::Result<()> {
    write_lines(path, verdicts)
}

/// BIRD's form (an object from the example's id to `SQL⇥----- bird -----⇥db`) and Spider's (a query a line).
fn write_predictions(folder: &Path, items: &[ScoreItem]) -> std::io::Result<()> {
    let mut bird = NewFile::create(&folder.join("predictions.json"))?;
    let mut spider = NewFile::create(&folder.join("predictions.sql"))?;
    bird.write_all(b"{")?;
    for (index, item) in items.iter().enumerate() {
        let sql = item.prediction.as_deref().unwrap_or_default();
        bird.write_all(if index == 0 { b"\n  " } else { b",\n  " })?;
        serde_json::to_writer(&mut bird, &item.id)?;
        bird.write_all(b": ")?;
        serde_json::to_writer(&mut bird, &format!("{sql}\t----- bird -----\t{}", item.db))?;
        // A line break would make two predictions of one; a `--` comment would swallow the rest.
        spider.write_all(one_line(sql).as_bytes())?;
        spider.write_all(b"\n")?;
    }
    bird.write_all(if items.is_empty() { b"}\n" } else { b"\n}\n" })?;
    bird.finish()?;
    spider.finish()
}

/// The query on one line: comments become blanks, line breaks inside literals stay as blanks.
fn one_line(sql: &str) -> String {
    use crate::sql::text::{Piece, Pieces};
    let mut out = String::with_capacity(sql.len());
    for (start, end, piece) in Pieces::new(sql) {
        match piece {
            Piece::Comment => out.push(' '),
            _ => out.extend(sql[start..end].chars().map(|letter| {
                if matches!(letter, '\n' | '\r' | '\t') {
                    ' '
                } else {
                    letter
                }
            })),
        }
    }
    out.trim().to_owned()
}

/// The numbers of a set of verdicts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Parts {
    pub metrics: BTreeMap<String, MetricSummary>,
    pub outcomes: BTreeMap<Outcome, usize>,
    pub by_difficulty: IndexMap<String, Group>,
    pub by_database: BTreeMap<String, Group>,
}

/// Scores over all, by difficulty (in the benchmarks' order) and by database. N is the number of verdicts: an example
/// without an answer counts as wrong.
pub fn summarise(verdicts: &[Verdict], difficulties: &[Option<&str>]) -> Parts {
    const ORDER: &[&str] = &[
        "simple",
        "moderate",
        "challenging",
        "easy",
        "medium",
        "hard",
        "extra",
        "unknown",
    ];
    let mut outcomes = BTreeMap::new();
    let mut by_database: BTreeMap<String, Vec<&Verdict>> = BTreeMap::new();
    let mut by_difficulty: BTreeMap<(usize, String), Vec<&Verdict>> = BTreeMap::new();
    for (verdict, difficulty) in verdicts.iter().zip(difficulties) {
        *outcomes.entry(verdict.outcome).or_insert(0) += 1;
        by_database.entry(verdict.db.clone()).or_default().push(verdict);
        if let Some(difficulty) = difficulty {
            let place = ORDER
                .iter()
                .position(|known| known == difficulty)
                .unwrap_or(ORDER.len());
            by_difficulty
                .entry((place, (*difficulty).to_owned()))
                .or_default()
                .push(verdict);
        }
    }
    let all: Vec<&Verdict> = verdicts.iter().collect();
    Parts {
        metrics: metrics(&all),
        outcomes,
        by_difficulty: by_difficulty
            .into_iter()
            .map(|((_, name), part)| (name, group(&part)))
            .collect(),
        by_database: by_database
            .into_iter()
            .map(|(name, part)| (name, group(&part)))
            .collect(),
    }
}

fn group(verdicts: &[&Verdict]) -> Group {
    Group {
        n: verdicts.len(),
        metrics: metrics(verdicts),
    }
}

fn metrics(verdicts: &[&Verdict]) -> BTreeMap<String, MetricSummary> {
    let n = verdicts.len();
    let right = verdicts.iter().filter(|verdict| verdict.is_right()).count();
    let (low, high) = wilson(right as u64, n as u64);
    let value = if n == 0 { 0.0 } else { right as f64 / n as f64 };
    let mut metrics = BTreeMap::from([("ex".to_owned(), MetricSummary { value, low, high, n })]);
    let further = verdicts
        .first()
        .map(|verdict| verdict.metrics.keys())
        .into_iter()
        .flatten();
    for name in further.filter(|name| *name != "ex") {
        let values: Vec<f64> = verdicts
            .iter()
            .map(|verdict| verdict.metrics.get(name).copied().unwrap_or(0.0))
            .collect();
        let (value, _) = mean_and_sd(&values);
        let (low, high) = bootstrap_mean(&values, RESAMPLES, SEED);
        metrics.insert(name.clone(), MetricSummary { value, low, high, n });
    }
    metrics
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_by_the_nearest_rank() {
        let mut effort = StageEffort::default();
        percentiles(&mut effort, &mut []);
        assert_eq!(effort.latency_p50_ms, None);
        percentiles(&mut effort, &mut [30, 10, 20]);
        assert_eq!((effort.latency_p50_ms, effort.latency_p95_ms), (Some(20), Some(30)));
        let mut hundred: Vec<u64> = (1..=100).rev().collect();
        percentiles(&mut effort, &mut hundred);
        assert_eq!((effort.latency_p50_ms, effort.latency_p95_ms), (Some(50), Some(95)));
    }

    #[test]
    fn predictions_stay_one_line() {
        assert_eq!(
            one_line("SELECT a -- note\nFROM t /* x\ny */ WHERE b = 'c\nd'"),
            "SELECT a  FROM t   WHERE b = 'c d'"
        );
    }

    #[test]
    fn n_is_every_example() {
        let verdict = |db: &str, outcome, ex| Verdict {
            id: String::new(),
            db: db.into(),
            outcome,
            metrics: BTreeMap::from([("ex".to_owned(), ex)]),
            reason: None,
        };
        let verdicts = [
            verdict("a", Outcome::Answered, 1.0),
            verdict("a", Outcome::Answered, 0.0),
            verdict("b", Outcome::ModelError, 0.0),
            verdict("b", Outcome::Budget, 0.0),
        ];
        let parts = summarise(&verdicts, &[Some("moderate"), Some("simple"), Some("simple"), None]);
        assert_eq!((parts.metrics["ex"].value, parts.metrics["ex"].n), (0.25, 4));
        assert_eq!(parts.by_difficulty.keys().collect::<Vec<_>>(), ["simple", "moderate"]);
        assert_eq!(parts.by_database["b"].metrics["ex"].value, 0.0);
        assert_eq!(parts.outcomes[&Outcome::Budget], 1);
    }
}
