//! `dinsql score`: predictions made elsewhere against a dataset.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;

use super::arguments::ScoreArguments;
use super::exit::{Exit, Failure};
use super::output::{count, percent, table};
use super::settings::{Settings, executor};
use crate::dataset::read_predictions;
use crate::diagnostic::did_you_mean;
use crate::metric::{Metric, Outcome, ScoreItem, Scorer};
use crate::run::{MetricSummary, score_items, summarise, write_verdicts};

/// Scores and prints.
pub async fn score(arguments: ScoreArguments, settings: &Settings) -> Result<Exit, Failure> {
    let metrics = metrics(&arguments.metrics)?;
    let source = settings.source(&arguments.data)?;
    let mut dataset = settings.load(&source, arguments.lang.as_deref(), arguments.selection.split.as_deref())?;
    let mut predictions = read_predictions(&arguments.predictions, &dataset.examples)?;
    Settings::select(&mut dataset, &arguments.selection)?;
    let mut missing = 0_usize;
    let items: Vec<ScoreItem> = dataset
        .examples
        .iter()
        .map(|example| {
            let prediction = match predictions.sql.remove(&example.id) {
                Some(Some(sql)) => Ok(sql),
                Some(None) => Err((Outcome::NoSql, "the prediction is not a text".to_owned())),
                None => {
                    missing += 1;
                    Err((Outcome::NoSql, "the file has no prediction for this example".to_owned()))
                }
            };
            ScoreItem {
                id: example.id.clone(),
                db: example.database.clone(),
                database: dataset
                    .databases
                    .get(&example.database)
                    .map(|database| database.path.clone())
                    .unwrap_or_default(),
                gold: example.gold.clone(),
                prediction,
            }
        })
        .collect();
    if missing > 0 {
        eprintln!(
            "warning: {missing} of {} have no prediction; they count as wrong",
            count(items.len(), "example")
        );
    }
    for note in &predictions.notes {
        eprintln!("warning: {note}");
    }
    let scorer = Scorer::new(executor(&arguments.execution)?).with_metrics(&metrics);
    let done = AtomicU64::new(0);
    let verdicts = score_items(&items, &scorer, &|_| {
        done.fetch_add(1, Ordering::Relaxed);
    })
    .await
    .map_err(|error| Failure::message(Exit::Failed, format!("cannot score: {error}")))?;
    if let Some(path) = &arguments.verdicts {
        write_verdicts(path, &verdicts)
            .map_err(|error| Failure::message(Exit::Failed, format!("cannot write {}: {error}", path.display())))?;
    }
    let difficulties: Vec<Option<&str>> = dataset
        .examples
        .iter()
        .map(|example| example.difficulty.as_deref())
        .collect();
    let parts = summarise(&verdicts, &difficulties);
    if arguments.json {
        say!(
            "{}",
            json!({
                "n": items.len(),
                "metrics": parts.metrics,
                "outcomes": parts.outcomes,
                "by_difficulty": parts.by_difficulty,
                "by_database": parts.by_database,
                "data": dataset.name,
                "split": dataset.split,
                "dataset_digest": dataset.digest,
                "missing_predictions": missing,
            })
        );
        return Ok(Exit::Fine);
    }
    let mut rows = Vec::new();
    let mut row = |name: &str, group: &BTreeMap<String, MetricSummary>, n: usize| {
        let mut cells = vec![name.to_owned(), n.to_string()];
        for metric in &metrics {
            let metric = &group[metric.name()];
            cells.push(percent(metric.value));
            cells.push(format!("{} – {}", percent(metric.low), percent(metric.high)));
        }
        rows.push(cells);
    };
    row("all", &parts.metrics, items.len());
    for (name, group) in &parts.by_difficulty {
        row(&format!("difficulty {name}"), &group.metrics, group.n);
    }
    if parts.by_database.len() > 1 {
        for (name, group) in &parts.by_database {
            row(&format!("database {name}"), &group.metrics, group.n);
        }
    }
    let titles: Vec<String> = metrics.iter().map(|metric| format!("{} %", metric.title())).collect();
    let mut header = vec![dataset.name.as_str(), "N"];
    for title in &titles {
        header.extend([title.as_str(), "95 % interval"]);
    }
    say!("{}", table(&header, rows));
    let outcomes: Vec<String> = parts
        .outcomes
        .iter()
        .map(|(outcome, count)| format!("{count} {}", outcome.name()))
        .collect();
    say!("{}", outcomes.join(", "));
    Ok(Exit::Fine)
}

/// The metrics of these names, each once.
fn metrics(names: &[String]) -> Result<Vec<Metric>, Failure> {
    let known: Vec<&str> = Metric::ALL.iter().map(|metric| metric.name()).collect();
    let mut metrics = Vec::new();
    for name in names {
        let metric = Metric::by_name(name).ok_or_else(|| {
            let failure = Failure::message(
                Exit::Usage,
                format!("no metric `{name}` (there are: {})", known.join(", ")),
            );
            match did_you_mean(name, known.iter().copied()) {
                Some(near) => failure.hint(format!("did you mean `{near}`?")),
                None => failure,
            }
        })?;
        if !metrics.contains(&metric) {
            metrics.push(metric);
        }
    }
    Ok(metrics)
}
