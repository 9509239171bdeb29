//! Runs predictions and gold, and gives verdicts. Gold runs once for each query and database; equal predictions for one
//! example are judged once.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{Outcome, RowSet, Verdict, execution_accuracy};
use crate::engine::{Executor, QueryError, QueryErrorKind};

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

/// A gold query's rows and how long they took.
type Gold = Result<Arc<(RowSet, Duration)>, QueryError>;

/// Bytes of gold results that are kept for later predictions.
const GOLD_CACHE_BYTES: usize = 256 << 20;

/// Judges predictions; cheap to share.
#[derive(Debug)]
pub struct Scorer {
    executor: Executor,
    gold: Mutex<HashMap<(PathBuf, String), Gold>>,
    gold_bytes: Mutex<usize>,
    judged: Mutex<HashMap<[u8; 32], Verdict>>,
}

impl Scorer {
    pub fn new(executor: Executor) -> Self {
        Scorer {
            executor,
            gold: Mutex::default(),
            gold_bytes: Mutex::default(),
            judged: Mutex::default(),
        }
    }

    /// The verdict on one item. Prediction and gold share one time limit, as in BIRD's script; a gold query that fails or
    /// takes too long by itself has an outcome of its own, whatever the prediction does.
    pub async fn verdict(&self, item: &ScoreItem) -> Result<Verdict, QueryError> {
        let key = digest(item);
        if let Some(verdict) = lock(&self.judged).get(&key) {
            return Ok(verdict.clone());
        }
        let (outcome, ex, reason) = self.judge(item).await;
        let verdict = Verdict {
            id: item.id.clone(),
            db: item.db.clone(),
            outcome,
            metrics: BTreeMap::from([("ex".to_owned(), ex)]),
            reason,
        };
        lock(&self.judged).insert(key, verdict.clone());
        Ok(verdict)
    }

    async fn judge(&self, item: &ScoreItem) -> (Outcome, f64, Option<String>) {
        if item.gold.is_empty() {
            return (Outcome::GoldError, 0.0, Some("the example has no gold SQL".into()));
        }
        let mut golds = Vec::with_capacity(item.gold.len());
        let mut failed = None;
        for sql in &item.gold {
            match self.gold(&item.database, sql).await {
                Ok(gold) => golds.push(gold),
                Err(error) => failed = Some(error),
            }
        }
        if golds.is_empty()
            && let Some(error) = failed
        {
            let outcome = if error.kind == QueryErrorKind::Timeout {
                Outcome::GoldTimeout
            } else {
                Outcome::GoldError
            };
            return (outcome, 0.0, Some(error.message));
        }
        let sql = match &item.prediction {
            Ok(sql) => sql,
            Err((outcome, reason)) => return (*outcome, 0.0, Some(reason.clone())),
        };
        let limit = self.executor.limits().time;
        match self.rows(&item.database, sql).await {
            Ok((rows, elapsed)) => {
                if golds.iter().all(|gold| gold.1 + elapsed > limit) {
                    let reason = format!(
                        "prediction and gold together took longer than {} s",
                        limit.as_secs_f64()
                    );
                    return (Outcome::SqlTimeout, 0.0, Some(reason));
                }
                let ex = golds
                    .iter()
                    .map(|gold| execution_accuracy(&rows, &gold.0))
                    .fold(0.0, f64::max);
                (Outcome::Answered, ex, None)
            }
            Err(error) => {
                let outcome = match error.kind {
                    QueryErrorKind::Timeout => Outcome::SqlTimeout,
                    QueryErrorKind::NotReadOnly => Outcome::NotReadOnly,
                    QueryErrorKind::TooLarge => Outcome::ResultTooLarge,
                    QueryErrorKind::Sql | QueryErrorKind::InvalidText | QueryErrorKind::Database => Outcome::SqlError,
                };
                (outcome, 0.0, Some(error.message))
            }
        }
    }

    async fn gold(&self, database: &Path, sql: &str) -> Gold {
        let key = (database.to_owned(), sql.to_owned());
        if let Some(gold) = lock(&self.gold).get(&key) {
            return gold.clone();
        }
        let gold: Gold = self.rows(database, sql).await.map(Arc::new);
        let size = gold.as_ref().map_or(0, |gold| gold.0.size());
        let mut held = lock(&self.gold_bytes);
        if *held + size <= GOLD_CACHE_BYTES {
            *held += size;
            lock(&self.gold).insert(key, gold.clone());
        }
        gold
    }

    async fn rows(&self, database: &Path, sql: &str) -> Result<(RowSet, Duration), QueryError> {
        let (database, sql, limits) = (database.to_owned(), sql.to_owned(), self.executor.limits());
        self.executor
            .call(move |connections| {
                let result = connections.get(&database)?.query(&sql, &limits)?;
                Ok((RowSet::new(&result.rows), result.elapsed))
            })
            .await?
    }
}

fn digest(item: &ScoreItem) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let mut add = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    add(&item.id);
    add(&item.database.to_string_lossy());
    item.gold.iter().for_each(|sql| add(sql));
    match &item.prediction {
        Ok(sql) => {
            add("sql");
            add(sql);
        }
        Err((outcome, reason)) => {
            add(outcome.name());
            add(reason);
        }
    }
    *hasher.finalize().as_bytes()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
