//! What is computed from a run folder alone: predictions in the benchmarks' forms, verdicts, the summary.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use futures::StreamExt;
use indexmap::IndexMap;
use serde::Serialize;

use super::folder::{ExampleRecord, FolderError, RunFolder, RunStatus, write_json, write_lines, write_whole};
use crate::metric::{Outcome, ScoreItem, Scorer, Verdict};
use crate::pipeline::Trace;
use crate::stats::wilson;

/// A metric over a set of examples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MetricSummary {
    /// Mean, 0 to 1.
    pub value: f64,
    /// 95 % Wilson interval.
    pub low: f64,
    pub high: f64,
    pub n: usize,
}

/// Scores of a part of the examples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Group {
    pub n: usize,
    pub metrics: BTreeMap<String, MetricSummary>,
}

/// Calls of one stage, or of all.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct StageSummary {
    pub calls: u64,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    /// Calls whose server did not count tokens.
    pub calls_without_usage: u64,
    /// Outputs that were not found and took their default.
    pub defaults_used: u64,
    /// Answers cut at max_tokens.
    pub truncated: u64,
}

/// `summary.json`. Everything but `effort` is the same however often the run was interrupted.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
    pub usage: StageSummary,
    pub stages: IndexMap<String, StageSummary>,
    /// What depends on the day: times, cache hits.
    pub effort: Effort,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Effort {
    /// Calls answered from the completion cache.
    pub cache_hits: u64,
    /// Requests beyond the first of a call.
    pub retries: u64,
    /// Prompt tokens that the server said it had computed before.
    pub cached_prompt_tokens: u64,
    /// Sum of the latencies of the calls that were not cache hits, in ms.
    pub latency_ms: u64,
}

/// The prediction a trace ends in, or how it ended without one.
pub(super) fn prediction(trace: &Trace) -> Result<String, (Outcome, String)> {
    trace
        .prediction
        .clone()
        .ok_or_else(|| (trace.outcome, trace.error.clone().unwrap_or_default()))
}

/// Scores a folder's traces, writes `predictions.json`, `predictions.sql`, `verdicts.jsonl` and `summary.json`, and gives
/// the run its final status.
///
/// # Errors
/// Where the folder cannot be read or written.
pub async fn finish(folder: &mut RunFolder, scorer: &Scorer) -> Result<(Summary, Vec<Verdict>), FolderError> {
    let examples = folder.examples()?;
    let mut predictions: HashMap<String, Result<String, (Outcome, String)>> = HashMap::new();
    let mut stages: IndexMap<String, StageSummary> = folder
        .record
        .pipeline
        .stages
        .iter()
        .map(|stage| (stage.name.clone(), StageSummary::default()))
        .collect();
    let mut effort = Effort::default();
    let mut served: Vec<String> = Vec::new();
    folder.for_each_trace(|trace| {
        for stage in &trace.stages {
            count(stages.entry(stage.stage.clone()).or_default(), &mut effort, stage);
            if let Some(model) = stage
                .completion
                .as_ref()
                .and_then(|completion| completion.served_model.as_ref())
                && !served.contains(model)
            {
                served.push(model.clone());
            }
        }
        predictions.insert(trace.id.clone(), prediction(&trace));
    })?;
    let unfinished = || Err((Outcome::Budget, "the run ended before this example".to_owned()));
    let missing = examples
        .iter()
        .filter(|example| !predictions.contains_key(&example.id))
        .count();
    let items: Vec<ScoreItem> = examples
        .iter()
        .map(|example| ScoreItem {
            id: example.id.clone(),
            db: example.db.clone(),
            database: folder
                .record
                .databases
                .get(&example.db)
                .map(|database| database.path.clone())
                .unwrap_or_default(),
            gold: example.gold.clone(),
            prediction: predictions.remove(&example.id).unwrap_or_else(unfinished),
        })
        .collect();
    let verdicts = score_items(&items, scorer, &|_| {}).await;
    let path = folder.path().to_owned();
    let io = |source| FolderError::Io {
        path: path.clone(),
        source,
    };
    write_predictions(&path, &examples, &items).map_err(io)?;
    write_lines(&path.join("verdicts.jsonl"), &verdicts).map_err(io)?;
    let difficulties: Vec<Option<&str>> = examples.iter().map(|example| example.difficulty.as_deref()).collect();
    let status = if missing == 0 {
        RunStatus::Complete
    } else {
        RunStatus::Partial
    };
    served.sort();
    folder.record.served_models = served;
    folder.set_status(status)?;
    let record = &folder.record;
    let parts = summarise(&verdicts, &difficulties);
    let usage = stages.values().fold(StageSummary::default(), |mut all, stage| {
        all.calls += stage.calls;
        all.prompt_tokens += stage.prompt_tokens;
        all.completion_tokens += stage.completion_tokens;
        all.calls_without_usage += stage.calls_without_usage;
        all.defaults_used += stage.defaults_used;
        all.truncated += stage.truncated;
        all
    });
    let summary = Summary {
        format: super::folder::FORMAT,
        pipeline: record.pipeline.name.clone(),
        data: record.data.clone(),
        split: record.split.clone(),
        lang: record.language.clone(),
        repeat: record.repeat,
        model: record.model.clone(),
        status,
        n: examples.len(),
        metrics: parts.metrics,
        outcomes: parts.outcomes,
        by_difficulty: parts.by_difficulty,
        by_database: parts.by_database,
        usage,
        stages,
        effort,
    };
    write_json(&path.join("summary.json"), &summary).map_err(io)?;
    Ok((summary, verdicts))
}

fn count(stage: &mut StageSummary, effort: &mut Effort, trace: &crate::pipeline::StageTrace) {
    stage.defaults_used += trace.defaulted.len() as u64;
    let Some(completion) = &trace.completion else { return };
    stage.calls += 1;
    match (completion.usage.prompt, completion.usage.completion) {
        (None, None) => stage.calls_without_usage += 1,
        (prompt, answer) => {
            stage.prompt_tokens += prompt.unwrap_or(0);
            stage.completion_tokens += answer.unwrap_or(0);
        }
    }
    if completion.finish_reason.as_deref() == Some("length") {
        stage.truncated += 1;
    }
    if completion.cached {
        effort.cache_hits += 1;
    } else {
        effort.retries += u64::from(completion.attempts.saturating_sub(1));
        effort.latency_ms += completion.latency_ms;
        effort.cached_prompt_tokens += completion.usage.cached_prompt.unwrap_or(0);
    }
}

/// Verdicts in the items' order, several judged at once.
pub async fn score_items(
    items: &[ScoreItem],
    scorer: &Scorer,
    on_verdict: &(dyn Fn(&Verdict) + Send + Sync),
) -> Vec<Verdict> {
    futures::stream::iter(items)
        .map(|item| async move {
            let verdict = scorer.verdict(item).await;
            on_verdict(&verdict);
            verdict
        })
        .buffered(32)
        .collect()
        .await
}

/// Verdicts, one a line.
///
/// # Errors
/// Where the file cannot be written.
pub fn write_verdicts(path: &Path, verdicts: &[Verdict]) -> std::io::Result<()> {
    write_lines(path, verdicts)
}

/// BIRD's form (an object from the example's place to `SQL⇥----- bird -----⇥db`) and Spider's (a query a line).
fn write_predictions(folder: &Path, examples: &[ExampleRecord], items: &[ScoreItem]) -> std::io::Result<()> {
    let mut bird: IndexMap<String, String> = IndexMap::new();
    let mut spider = String::new();
    for (example, item) in examples.iter().zip(items) {
        let sql = item.prediction.as_deref().unwrap_or_default();
        bird.insert(example.id.clone(), format!("{sql}\t----- bird -----\t{}", example.db));
        // A line break would make two predictions of one; a `--` comment would swallow the rest.
        spider.push_str(&one_line(sql));
        spider.push('\n');
    }
    write_json(&folder.join("predictions.json"), &bird)?;
    write_whole(&folder.join("predictions.sql"), spider.as_bytes())
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
    BTreeMap::from([("ex".to_owned(), MetricSummary { value, low, high, n })])
}

#[cfg(test)]
mod tests {
    use super::*;

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
