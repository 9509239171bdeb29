//! Tables about runs, for terminals.
//!
//! In: summaries and verdicts, as a run folder holds them. Out: text.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};
use serde::Serialize;

use crate::llm::Usd;
use crate::metric::{Outcome, Verdict};
use crate::run::{RunStatus, StageEffort, StageSummary, Summary};
use crate::stats::{mcnemar_exact, mean_and_sd};

/// A run that is to be shown.
#[derive(Debug, Clone)]
pub struct RunResult {
    pub folder: PathBuf,
    pub summary: Summary,
    pub verdicts: Vec<Verdict>,
}

/// Both runs' answers to the examples that both have come to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Paired {
    pub both: u64,
    pub only_first: u64,
    pub only_second: u64,
    pub neither: u64,
}

impl Paired {
    pub fn new(first: &[Verdict], second: &[Verdict]) -> Self {
        // An example that a stopped run did not come to is no wrong answer of its pipeline.
        let reached = |verdict: &&Verdict| verdict.outcome != Outcome::Budget;
        let known: HashMap<&str, bool> = first
            .iter()
            .filter(reached)
            .map(|verdict| (verdict.id.as_str(), verdict.is_right()))
            .collect();
        let mut paired = Paired::default();
        for verdict in second.iter().filter(reached) {
            match (known.get(verdict.id.as_str()), verdict.is_right()) {
                (Some(true), true) => paired.both += 1,
                (Some(true), false) => paired.only_first += 1,
                (Some(false), true) => paired.only_second += 1,
                (Some(false), false) => paired.neither += 1,
                (None, _) => {}
            }
        }
        paired
    }

    pub fn n(&self) -> u64 {
        self.both + self.only_first + self.only_second + self.neither
    }
}

/// Runs side by side: score, interval, and the paired difference to the first pipeline in the same language.
pub fn comparison(results: &[RunResult]) -> String {
    let baseline = results
        .first()
        .map(|result| result.summary.pipeline.as_str())
        .unwrap_or_default();
    let compared = results.iter().any(|result| result.summary.pipeline != baseline);
    let mut header = vec!["pipeline", "lang", "N", "EX %", "95 % interval"];
    let versus = format!("vs {baseline}");
    if compared {
        header.extend([versus.as_str(), "better/worse", "p"]);
    }
    header.extend(["calls", "tokens/ex", "s/ex"]);
    let priced = results.iter().any(|result| result.summary.usage.cost > Usd(0));
    if priced {
        header.push("cost");
    }
    let mut table = table(&header);
    let mut notes = Vec::new();
    for result in in_order(results) {
        let summary = &result.summary;
        let ex = &summary.metrics["ex"];
        let mut name = name(result, results);
        if summary.status != RunStatus::Complete {
            name.push_str(" (partial)");
        }
        let mut row = vec![
            name,
            summary.lang.clone(),
            summary.n.to_string(),
            format!("{:.1}", ex.value * 100.0),
            format!("{:.1} – {:.1}", ex.low * 100.0, ex.high * 100.0),
        ];
        if compared {
            let reference = results.iter().find(|other| {
                other.summary.pipeline == baseline
                    && other.summary.lang == summary.lang
                    && other.summary.repeat == summary.repeat
            });
            match reference.filter(|_| summary.pipeline != baseline) {
                Some(reference) => {
                    let paired = Paired::new(&reference.verdicts, &result.verdicts);
                    if paired.n() < summary.n as u64 {
                        notes.push(format!(
                            "{} {} is compared with {baseline} over the {} examples that both came to, of {}",
                            summary.pipeline,
                            summary.lang,
                            paired.n(),
                            summary.n
                        ));
                    }
                    let difference =
                        (paired.only_second as f64 - paired.only_first as f64) / (paired.n().max(1) as f64) * 100.0;
                    row.push(format!("{difference:+.1}").replace('-', "−"));
                    row.push(format!("{}/{}", paired.only_second, paired.only_first));
                    row.push(p_value(mcnemar_exact(paired.only_first, paired.only_second)));
                }
                None => row.extend(["", "", ""].map(str::to_owned)),
            }
        }
        let per_example = |amount: u64| amount as f64 / summary.n.max(1) as f64;
        row.push(summary.usage.calls.to_string());
        row.push(
            if summary.usage.calls > 0 && summary.usage.calls_without_usage == summary.usage.calls {
                "unknown".into()
            } else {
                format!(
                    "{:.0}",
                    per_example(summary.usage.prompt_tokens + summary.usage.completion_tokens)
                )
            },
        );
        row.push(if summary.usage.calls == 0 {
            "–".into()
        } else if summary.effort.cache_hits == summary.usage.calls {
            "cached".into()
        } else {
            format!("{:.1}", per_example(summary.effort.latency_ms) / 1000.0)
        });
        if priced {
            row.push(cost(&summary.usage));
        }
        add(&mut table, row);
    }
    let mut text = table.to_string();
    for note in notes {
        text.push('\n');
        text.push_str(&note);
    }
    text
}

/// The pipeline's name, with the repeat's number where there are several.
fn name(result: &RunResult, results: &[RunResult]) -> String {
    let summary = &result.summary;
    if results.iter().any(|other| other.summary.repeat > 0) {
        format!("{} #{}", summary.pipeline, summary.repeat + 1)
    } else {
        summary.pipeline.clone()
    }
}

/// What calls cost; unknown is unknown, and never 0.
fn cost(usage: &StageSummary) -> String {
    match (usage.cost, usage.calls_without_cost) {
        _ if usage.calls == 0 => "–".into(),
        (cost, 0) => cost.to_string(),
        (_, without) if without == usage.calls => "unknown".into(),
        (cost, without) => format!("{cost} + {without} unknown"),
    }
}

/// Calls, tokens, cost, latency, cache hits and retries of each stage.
pub fn stage_table(results: &[RunResult]) -> String {
    let mut table = table(&[
        "stage",
        "lang",
        "calls",
        "cached",
        "retries",
        "prompt tokens",
        "completion tokens",
        "cost",
        "p50 s",
        "p95 s",
    ]);
    let several = results
        .iter()
        .any(|result| name(result, results) != name(&results[0], results));
    let seconds = |milliseconds: Option<u64>| {
        milliseconds.map_or_else(
            || "–".into(),
            |milliseconds| format!("{:.1}", milliseconds as f64 / 1000.0),
        )
    };
    let nothing = StageEffort::default();
    for result in in_order(results) {
        let summary = &result.summary;
        let mut rows: Vec<(String, &StageSummary, &StageEffort)> = summary
            .stages
            .iter()
            .map(|(name, stage)| (name.clone(), stage, summary.effort.stages.get(name).unwrap_or(&nothing)))
            .collect();
        if rows.len() > 1 {
            rows.push(("all stages".into(), &summary.usage, &summary.effort.all));
        }
        for (stage_name, stage, effort) in rows {
            let name = if several {
                format!("{} {stage_name}", name(result, results))
            } else {
                stage_name
            };
            let counted = stage.calls > stage.calls_without_usage;
            let tokens = |number: u64| {
                if counted || stage.calls == 0 {
                    number.to_string()
                } else {
                    "unknown".into()
                }
            };
            add(
                &mut table,
                vec![
                    name,
                    summary.lang.clone(),
                    stage.calls.to_string(),
                    effort.cache_hits.to_string(),
                    effort.retries.to_string(),
                    tokens(stage.prompt_tokens),
                    tokens(stage.completion_tokens),
                    cost(stage),
                    seconds(effort.latency_p50_ms),
                    seconds(effort.latency_p95_ms),
                ],
            );
        }
    }
    table.to_string()
}

/// Independent runs of one pipeline in one language, together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Repeats {
    pub pipeline: String,
    pub data: String,
    pub lang: String,
    /// How many runs.
    pub runs: usize,
    /// By metric: mean and standard deviation (divided by the number of runs) of the runs' values.
    pub metrics: BTreeMap<String, Spread>,
}

/// A mean with its spread.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    pub mean: f64,
    pub sd: f64,
    pub low: f64,
    pub high: f64,
}

/// Complete runs that differ in nothing but the repeat; those of which there is only one are left out.
pub fn repeats(results: &[RunResult]) -> Vec<Repeats> {
    let mut groups: Vec<(&Summary, Vec<&Summary>)> = Vec::new();
    for result in in_order(results) {
        let summary = &result.summary;
        if summary.status != RunStatus::Complete {
            continue;
        }
        let known = groups.iter_mut().find(|(first, _)| {
            (&first.pipeline, &first.data, &first.lang) == (&summary.pipeline, &summary.data, &summary.lang)
        });
        match known {
            Some((_, group)) => group.push(summary),
            None => groups.push((summary, vec![summary])),
        }
    }
    groups.retain(|(_, group)| group.len() > 1);
    groups
        .into_iter()
        .map(|(first, group)| Repeats {
            pipeline: first.pipeline.clone(),
            data: first.data.clone(),
            lang: first.lang.clone(),
            runs: group.len(),
            metrics: first
                .metrics
                .keys()
                .map(|name| {
                    let values: Vec<f64> = group
                        .iter()
                        .filter_map(|summary| summary.metrics.get(name).map(|metric| metric.value))
                        .collect();
                    let (mean, sd) = mean_and_sd(&values);
                    let spread = Spread {
                        mean,
                        sd,
                        low: values.iter().copied().fold(f64::INFINITY, f64::min),
                        high: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
                    };
                    (name.clone(), spread)
                })
                .collect(),
        })
        .collect()
}

/// Mean and standard deviation over repeats; none where nothing was repeated.
pub fn repeats_table(results: &[RunResult]) -> Option<String> {
    let groups = repeats(results);
    if groups.is_empty() {
        return None;
    }
    let mut table = table(&["over repeats", "lang", "runs", "EX % mean ± sd", "lowest – highest"]);
    for group in &groups {
        let ex = &group.metrics["ex"];
        add(
            &mut table,
            vec![
                group.pipeline.clone(),
                group.lang.clone(),
                group.runs.to_string(),
                format!("{:.1} ± {:.1}", ex.mean * 100.0, ex.sd * 100.0),
                format!("{:.1} – {:.1}", ex.low * 100.0, ex.high * 100.0),
            ],
        );
    }
    Some(table.to_string())
}

/// Scores by difficulty; `None` where no example has one, or all have the same.
pub fn difficulty_table(results: &[RunResult]) -> Option<String> {
    let mut classes: Vec<String> = Vec::new();
    for result in results {
        for class in result.summary.by_difficulty.keys() {
            if !classes.contains(class) {
                classes.push(class.clone());
            }
        }
    }
    if classes.len() < 2 {
        return None;
    }
    let mut header = vec!["EX % by difficulty", "lang"];
    header.extend(classes.iter().map(String::as_str));
    let mut table = table(&header);
    for result in in_order(results) {
        let mut row = vec![name(result, results), result.summary.lang.clone()];
        row.extend(
            classes
                .iter()
                .map(|class| match result.summary.by_difficulty.get(class) {
                    Some(group) => format!("{:.1} (N {})", group.metrics["ex"].value * 100.0, group.n),
                    None => "–".into(),
                }),
        );
        add(&mut table, row);
    }
    Some(table.to_string())
}

/// A line for each run in which some examples did not end as `answered`.
pub fn outcome_lines(results: &[RunResult]) -> Vec<String> {
    in_order(results)
        .filter_map(|result| {
            let others: Vec<String> = result
                .summary
                .outcomes
                .iter()
                .filter(|(outcome, _)| **outcome != Outcome::Answered)
                .map(|(outcome, count)| match outcome {
                    Outcome::Budget => format!("{count} not reached"),
                    other => format!("{count} {}", other.name()),
                })
                .collect();
            let defaults = result.summary.usage.defaults_used;
            let mut parts = others;
            if defaults > 0 {
                parts.push(format!("{defaults} outputs took their default"));
            }
            if result.summary.usage.truncated > 0 {
                parts.push(format!(
                    "{} answers were cut at max_tokens",
                    result.summary.usage.truncated
                ));
            }
            (!parts.is_empty()).then(|| {
                format!(
                    "{} {}: {}",
                    result.summary.pipeline,
                    result.summary.lang,
                    parts.join(", ")
                )
            })
        })
        .collect()
}

/// A pipeline's languages stand together, pipelines in the order they were given.
fn in_order(results: &[RunResult]) -> impl Iterator<Item = &RunResult> {
    let mut names: Vec<&str> = Vec::new();
    for result in results {
        if !names.contains(&result.summary.pipeline.as_str()) {
            names.push(&result.summary.pipeline);
        }
    }
    names
        .into_iter()
        .flat_map(move |name| results.iter().filter(move |result| result.summary.pipeline == name))
}

fn p_value(p: f64) -> String {
    if p < 0.001 { "< 0.001".into() } else { format!("{p:.3}") }
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.to_vec());
    table
}

fn add(table: &mut Table, row: Vec<String>) {
    table.add_row(row.into_iter().enumerate().map(|(index, text)| {
        let alignment = if index < 2 {
            CellAlignment::Left
        } else {
            CellAlignment::Right
        };
        Cell::new(text).set_alignment(alignment)
    }));
}
