//! Runs predictions and gold, and gives verdicts. Gold runs once for each query and database; equal predictions for one
//! example are judged once.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::OnceCell;

use super::same_text::{is_repeatable, is_same_text};
use super::{Metric, Outcome, RowSet, RowSetBuilder, Verdict, execution_accuracy, soft_f1};
use crate::engine::{Executor, QueryError, QueryErrorKind, Value};

/// What is judged: one example with a prediction.
#[derive(Debug, Clone)]
pub struct ScoreItem {
    pub id: String,
    pub db: String,
    pub database: PathBuf,
    /// Alternatives; a prediction is right where it equals one of them.
    pub gold: Vec<String>,
    /// `Err` where there is none: how the example ended, and why.
    pub prediction: Result<String, (Outcome, String)>,
}

/// What a query gave.
#[derive(Debug)]
struct Ran {
    set: RowSet,
    /// Without duplicates, first occurrences in order; only where a metric looks at them.
    rows: Vec<Vec<Value>>,
    elapsed: Duration,
}

impl Ran {
    /// Bytes held, about.
    fn size(&self) -> usize {
        let cells = self.rows.iter().flatten();
        self.set.size() + cells.map(|value| value.size() + 32).sum::<usize>()
    }
}

/// Takes a result as it is fetched.
#[derive(Default)]
struct Fetched {
    set: RowSetBuilder,
    rows: Vec<Vec<Value>>,
}

/// What a gold query came to; never an error that is the database's fault and not the query's.
type Gold = Result<Arc<Ran>, QueryError>;

/// The gold queries of one database by their text. Whoever comes first runs one, the others wait for it.
type Golds = HashMap<String, Arc<OnceCell<Gold>>>;

/// Bytes of gold results that are kept for later predictions.
const GOLD_CACHE_BYTES: usize = 256 << 20;

/// A verdict without what its item says.
#[derive(Debug, Clone)]
struct Judgement {
    outcome: Outcome,
    ex: f64,
    /// Values of the scorer's further metrics, in their order; none where all are 0.
    further: Box<[f64]>,
    reason: Option<Box<str>>,
}

impl Judgement {
    fn wrong(outcome: Outcome, reason: impl Into<Box<str>>) -> Self {
        Judgement {
            outcome,
            ex: 0.0,
            further: Box::default(),
            reason: Some(reason.into()),
        }
    }

    fn answered(ex: f64, further: Box<[f64]>) -> Self {
        Judgement {
            outcome: Outcome::Answered,
            ex,
            further,
            reason: None,
        }
    }
}

/// Judges predictions; cheap to share.
#[derive(Debug)]
pub struct Scorer {
    executor: Executor,
    /// Metrics beside `ex`.
    further: Vec<Metric>,
    gold: Mutex<HashMap<PathBuf, Golds>>,
    gold_bytes: Mutex<usize>,
    judged: Mutex<HashMap<[u8; 32], Judgement>>,
}

impl Scorer {
    pub fn new(executor: Executor) -> Self {
        Scorer {
            executor,
            further: Vec::new(),
            gold: Mutex::default(),
            gold_bytes: Mutex::default(),
            judged: Mutex::default(),
        }
    }

    /// Computes these metrics too; `ex` always is.
    #[must_use]
    pub fn with_metrics(mut self, metrics: &[Metric]) -> Self {
        self.further = metrics.iter().copied().filter(|metric| *metric != Metric::Ex).collect();
        self
    }

    /// The verdict on one item. Prediction and gold share one time limit, as in BIRD's script; a gold query that fails or
    /// takes too long by itself has an outcome of its own, whatever the prediction does. Where the run ended before there
    /// was a prediction, nothing is executed.
    ///
    /// # Errors
    /// Only with [`QueryErrorKind::Database`]: the database cannot be read, so that nothing is known of the item. A later
    /// call tries again.
    pub async fn verdict(&self, item: &ScoreItem) -> Result<Verdict, QueryError> {
        let Judgement {
            outcome,
            ex,
            further,
            reason,
        } = self.judgement(item).await?;
        let values = further.iter().copied().chain(std::iter::repeat(0.0));
        let further = self.further.iter().map(|metric| metric.name().to_owned()).zip(values);
        Ok(Verdict {
            id: item.id.clone(),
            db: item.db.clone(),
            outcome,
            metrics: further.chain([("ex".to_owned(), ex)]).collect(),
            reason: reason.map(String::from),
        })
    }

    async fn judgement(&self, item: &ScoreItem) -> Result<Judgement, QueryError> {
        if item.gold.is_empty() {
            return Ok(Judgement::wrong(Outcome::GoldError, "the example has no gold SQL"));
        }
        match &item.prediction {
            Ok(sql) => {
                let key = digest(item, sql);
                let known = lock(&self.judged).get(&key).cloned();
                if let Some(judgement) = known {
                    return Ok(judgement);
                }
                let judgement = self.judge(item, sql).await?;
                lock(&self.judged).insert(key, judgement.clone());
                Ok(judgement)
            }
            Err((outcome, reason)) => {
                if *outcome != Outcome::Budget
                    && let Err(failed) = self.golds(item).await?
                {
                    return Ok(failed);
                }
                Ok(Judgement::wrong(*outcome, reason.as_str()))
            }
        }
    }

    async fn judge(&self, item: &ScoreItem, sql: &str) -> Result<Judgement, QueryError> {
        let golds = match self.golds(item).await? {
            Ok(golds) => golds,
            Err(failed) => return Ok(failed),
        };
        let limit = self.executor.limits().time;
        let same = golds
            .iter()
            .find(|(text, _)| is_same_text(text, sql))
            .filter(|_| is_repeatable(sql));
        let ran;
        let predicted = match same {
            Some((_, gold)) => gold.as_ref(),
            None => match self.rows(&item.database, sql).await {
                Ok(rows) => {
                    ran = rows;
                    &ran
                }
                Err(error) => return failed_prediction(error),
            },
        };
        if golds.iter().all(|(_, gold)| gold.elapsed + predicted.elapsed > limit) {
            let reason = format!(
                "prediction and gold together took longer than {} s",
                limit.as_secs_f64()
            );
            return Ok(Judgement::wrong(Outcome::SqlTimeout, reason));
        }
        // Of several gold queries the one that fits best counts, for each metric.
        let best = |value: &dyn Fn(&Ran) -> f64| golds.iter().map(|(_, gold)| value(gold)).fold(0.0, f64::max);
        let ex = best(&|gold| execution_accuracy(&predicted.set, &gold.set));
        let further = self.further.iter().map(|metric| match metric {
            Metric::Ex => ex,
            Metric::SoftF1 => best(&|gold| soft_f1(&predicted.rows, &gold.rows)),
        });
        Ok(Judgement::answered(ex, further.collect()))
    }

    /// The item's gold queries that run, with their rows; or the judgement where none does.
    async fn golds<'a>(&self, item: &'a ScoreItem) -> Result<Result<Vec<(&'a str, Arc<Ran>)>, Judgement>, QueryError> {
        let mut golds = Vec::with_capacity(item.gold.len());
        let mut failed = None;
        for sql in &item.gold {
            match self.gold(&item.database, sql).await? {
                Ok(rows) => golds.push((sql.as_str(), rows)),
                Err(error) => failed = Some(error),
            }
        }
        Ok(match failed {
            Some(error) if golds.is_empty() => {
                let outcome = if error.kind == QueryErrorKind::Timeout {
                    Outcome::GoldTimeout
                } else {
                    Outcome::GoldError
                };
                Err(Judgement::wrong(outcome, error.message))
            }
            _ => Ok(golds),
        })
    }

    async fn gold(&self, database: &Path, sql: &str) -> Result<Gold, QueryError> {
        let cell = self.gold_cell(database, sql);
        let mut ran = false;
        let gold = cell
            .get_or_try_init(async || {
                ran = true;
                match self.rows(database, sql).await {
                    Err(error) if error.kind == QueryErrorKind::Database => Err(error),
                    result => Ok(result.map(Arc::new)),
                }
            })
            .await?
            .clone();
        if ran {
            let size = gold.as_ref().map_or(0, |gold| gold.size());
            let mut held = lock(&self.gold_bytes);
            if *held + size <= GOLD_CACHE_BYTES {
                *held += size;
            } else if let Some(golds) = lock(&self.gold).get_mut(database) {
                golds.remove(sql);
            }
        }
        Ok(gold)
    }

    fn gold_cell(&self, database: &Path, sql: &str) -> Arc<OnceCell<Gold>> {
        let mut gold = lock(&self.gold);
        if let Some(cell) = gold.get(database).and_then(|golds| golds.get(sql)) {
            return Arc::clone(cell);
        }
        let golds = gold.entry(database.to_owned()).or_default();
        Arc::clone(golds.entry(sql.to_owned()).or_default())
    }

    /// Runs a query; its rows become a set as they are fetched.
    async fn rows(&self, database: &Path, sql: &str) -> Result<Ran, QueryError> {
        let (database, sql, limits) = (database.to_owned(), sql.to_owned(), self.executor.limits());
        let keep = self.further.contains(&Metric::SoftF1);
        self.executor
            .call(move |connections| {
                let connection = connections.get(&database)?;
                let take = |fetched: &mut Fetched, row: &[Value]| {
                    if fetched.set.add(row) && keep {
                        fetched.rows.push(row.to_vec());
                    }
                };
                let (fetched, elapsed) = connection.query_fold(&sql, &limits, Fetched::default, take)?;
                Ok(Ran {
                    set: fetched.set.finish(),
                    rows: fetched.rows,
                    elapsed,
                })
            })
            .await?
    }
}

/// What a prediction that does not run is worth; the error again where that isn't its fault.
fn failed_prediction(error: QueryError) -> Result<Judgement, QueryError> {
    let outcome = match error.kind {
        QueryErrorKind::Timeout => Outcome::SqlTimeout,
        QueryErrorKind::NotReadOnly => Outcome::NotReadOnly,
        QueryErrorKind::TooLarge => Outcome::ResultTooLarge,
        QueryErrorKind::Sql | QueryErrorKind::InvalidText => Outcome::SqlError,
        QueryErrorKind::Database => return Err(error),
    };
    Ok(Judgement::wrong(outcome, error.message))
}

/// All that a prediction's judgement follows from.
fn digest(item: &ScoreItem, prediction: &str) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let mut add = |text: &[u8]| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text);
    };
    add(item.database.as_os_str().as_encoded_bytes());
    add(prediction.as_bytes());
    item.gold.iter().for_each(|sql| add(sql.as_bytes()));
    *hasher.finalize().as_bytes()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use rusqlite::Connection;

    use super::*;
    use crate::engine::Limits;

    struct Fixture {
        folder: tempfile::TempDir,
        scorer: Scorer,
    }

    impl Fixture {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let fixture = Fixture {
                folder,
                scorer: Scorer::new(Executor::new(2, Limits::default())),
            };
            let sql = "CREATE TABLE good (a); INSERT INTO good VALUES (1), (2);
                CREATE TABLE bad (a); INSERT INTO bad VALUES (1)";
            Connection::open(fixture.path()).unwrap().execute_batch(sql).unwrap();
            fixture
        }

        fn path(&self) -> PathBuf {
            self.folder.path().join("sample.sqlite")
        }

        fn item(&self, gold: &[&str], prediction: Result<&str, Outcome>) -> ScoreItem {
            ScoreItem {
                id: "1".into(),
                db: "sample".into(),
                database: self.path(),
                gold: gold.iter().map(|&sql| sql.to_owned()).collect(),
                prediction: prediction
                    .map(str::to_owned)
                    .map_err(|outcome| (outcome, "no prediction".to_owned())),
            }
        }

        async fn ends(&self, gold: &[&str], prediction: Result<&str, Outcome>) -> (Outcome, f64) {
            let verdict = self.scorer.verdict(&self.item(gold, prediction)).await.unwrap();
            (verdict.outcome, verdict.metrics["ex"])
        }

        fn golds_run(&self) -> usize {
            lock(&self.scorer.gold).values().map(HashMap::len).sum()
        }
    }

    #[tokio::test]
    async fn each_outcome_is_told_apart_and_told_again() {
        let fixture = Fixture::new();
        for _ in 0..2 {
            for (gold, prediction, expected) in [
                (
                    &["SELECT 1", "SELECT 2"][..],
                    Ok("SELECT 2.0"),
                    (Outcome::Answered, 1.0),
                ),
                (&["SELECT 1", "oops"], Ok(" SELECT 1; "), (Outcome::Answered, 1.0)),
                (&["SELECT 1", "oops"], Ok("oops"), (Outcome::SqlError, 0.0)),
                (&["SELECT 1"], Ok("SELECT 3"), (Outcome::Answered, 0.0)),
                (&["SELECT 1"], Ok("DROP TABLE good"), (Outcome::NotReadOnly, 0.0)),
                (&["SELECT 1"], Err(Outcome::NoSql), (Outcome::NoSql, 0.0)),
                (&["oops"], Err(Outcome::NoSql), (Outcome::GoldError, 0.0)),
                (&["oops"], Ok("SELECT 1"), (Outcome::GoldError, 0.0)),
                (&[], Ok("SELECT 1"), (Outcome::GoldError, 0.0)),
            ] {
                assert_eq!(
                    fixture.ends(gold, prediction).await,
                    expected,
                    "{gold:?} {prediction:?}"
                );
            }
        }
        let wrong = fixture.item(&["SELECT 1"], Ok("SELECT nope"));
        let verdict = fixture.scorer.verdict(&wrong).await.unwrap();
        assert_eq!(verdict.reason.as_deref(), Some("no such column: nope"));
        assert_eq!(fixture.scorer.verdict(&wrong).await.unwrap(), verdict);
    }

    #[tokio::test]
    async fn an_example_that_was_not_reached_runs_nothing() {
        let fixture = Fixture::new();
        assert_eq!(
            fixture.ends(&["oops"], Err(Outcome::Budget)).await,
            (Outcome::Budget, 0.0)
        );
        assert_eq!(fixture.golds_run(), 0);
        fixture.ends(&["oops"], Err(Outcome::ModelError)).await;
        assert_eq!(fixture.golds_run(), 1);
    }

    #[tokio::test]
    async fn a_database_that_cannot_be_read_is_no_verdict_and_is_not_remembered() {
        let fixture = Fixture::new();
        let (sound, broken) = (
            std::fs::read(fixture.path()).unwrap(),
            fixture.folder.path().join("broken"),
        );
        let mut bytes = sound.clone();
        bytes[2 * 4096..].fill(0xEE);
        let all = [
            fixture.item(&["SELECT a FROM bad"], Ok("SELECT 1")),
            fixture.item(&["SELECT 1", "SELECT a FROM bad"], Ok("SELECT 1")),
            fixture.item(&["SELECT 1"], Ok("SELECT a FROM bad")),
            fixture.item(&["SELECT a FROM bad"], Err(Outcome::NoSql)),
        ];
        // A table that is corrupt, a file that is no database, and none.
        for content in [Some(&bytes[..]), Some(b"no database"), None] {
            let _ = std::fs::remove_file(&broken);
            if let Some(content) = content {
                std::fs::write(&broken, content).unwrap();
            }
            let scorer = Scorer::new(Executor::new(1, Limits::default()));
            for item in &all {
                let item = ScoreItem {
                    database: broken.clone(),
                    ..item.clone()
                };
                let error = scorer.verdict(&item).await.unwrap_err();
                assert_eq!(error.kind, QueryErrorKind::Database, "{item:?}");
            }
        }
        // The file is there again: nothing of the failure was kept.
        let mut item = all[0].clone();
        item.database = fixture.folder.path().join("late.sqlite");
        assert!(fixture.scorer.verdict(&item).await.is_err());
        std::fs::write(&item.database, sound).unwrap();
        assert!(fixture.scorer.verdict(&item).await.unwrap().is_right());
    }

    #[tokio::test]
    async fn a_prediction_with_golds_text_is_not_run_again_unless_it_may_change() {
        let fixture = Fixture::new();
        let item = |text: &str| fixture.item(&[text], Ok(text));
        let random = "SELECT random()";
        assert!(!fixture.scorer.verdict(&item(random)).await.unwrap().is_right());
        // Whatever gold's rows are said to be, a prediction of the same text has them.
        let steady = "SELECT a FROM good";
        let cell = fixture.scorer.gold_cell(&fixture.path(), steady);
        let limit = fixture.scorer.executor.limits().time;
        let put = |elapsed| {
            Ok(Arc::new(Ran {
                set: RowSet::new(&[]),
                rows: Vec::new(),
                elapsed,
            }))
        };
        cell.set(put(limit / 2)).unwrap();
        assert!(fixture.scorer.verdict(&item(steady)).await.unwrap().is_right());
        // Gold's time counts twice: BIRD's script runs both.
        let slow = "SELECT count(*) FROM good";
        let cell = fixture.scorer.gold_cell(&fixture.path(), slow);
        cell.set(put(limit / 2 + Duration::from_millis(1))).unwrap();
        assert_eq!(fixture.ends(&[slow], Ok(slow)).await, (Outcome::SqlTimeout, 0.0));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn gold_runs_once_for_all_who_ask_at_once() {
        let fixture = Fixture::new();
        // Two runs would give two numbers, and only one of the predictions' verdicts would be of the kept one.
        let gold = "SELECT random()";
        let path = fixture.path();
        let rows = futures::future::join_all((0..16).map(|_| fixture.scorer.gold(&path, gold))).await;
        let first = rows[0].as_ref().unwrap().as_ref().unwrap();
        assert!(
            rows.iter()
                .all(|gold| Arc::ptr_eq(gold.as_ref().unwrap().as_ref().unwrap(), first))
        );
    }
}
