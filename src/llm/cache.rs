//! The completion cache: a SQLite file, shared by runs and processes, keyed by the canonical request.
//!
//! Only finished, valid completions are stored, and a completion is stored before it is used, so that what was paid for
//! survives a crash. A file that is not ours is an error, never silently a new purchase.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use futures::future::BoxFuture;
use rusqlite::{Connection, OptionalExtension};
use tokio::sync::oneshot;

use super::{CallError, Completion, Model, Request};

/// Marks the file as ours: "dSQL".
const APPLICATION_ID: i32 = 0x6453_514c;
const SCHEMA_VERSION: i32 = 1;
/// Completions stored in one transaction.
const BATCH: usize = 512;

/// The cache cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("completion cache {}: {reason}", .path.display())]
pub struct CacheError {
    pub path: PathBuf,
    pub reason: String,
}

type Stored = oneshot::Sender<Result<(), String>>;

/// An open cache file; cloning shares it.
#[derive(Debug, Clone)]
pub struct Cache {
    path: Arc<PathBuf>,
    reader: Arc<Mutex<Connection>>,
    writer: mpsc::Sender<([u8; 32], String, Stored)>,
}

impl Cache {
    /// Opens or creates the file.
    ///
    /// # Errors
    /// Where the folder cannot be written, or the file is corrupt or not a cache of ours.
    pub fn open(path: &Path) -> Result<Self, CacheError> {
        let fail = |reason: String| CacheError {
            path: path.to_owned(),
            reason,
        };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|error| fail(error.to_string()))?;
        }
        let remedy = "; move it away, or name another with --cache";
        let connect = || -> Result<Connection, CacheError> {
            let connection = Connection::open(path).map_err(|error| fail(error.to_string()))?;
            connection
                .busy_timeout(Duration::from_secs(30))
                .map_err(|error| fail(error.to_string()))?;
            connection
                .query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))
                .and_then(|()| connection.execute_batch("PRAGMA synchronous = NORMAL"))
                .map_err(|error| fail(format!("{error}{remedy}")))?;
            Ok(connection)
        };
        let mut writer = connect()?;
        prepare(&mut writer).map_err(|reason| fail(format!("{reason}{remedy}")))?;
        let reader = connect()?;
        let (jobs, queue) = mpsc::channel::<([u8; 32], String, Stored)>();
        std::thread::Builder::new()
            .name("completion-cache".into())
            .spawn(move || write_all(&mut writer, &queue))
            .map_err(|error| fail(error.to_string()))?;
        Ok(Cache {
            path: Arc::new(path.to_owned()),
            reader: Arc::new(Mutex::new(reader)),
            writer: jobs,
        })
    }

    /// A stored completion.
    ///
    /// # Errors
    /// Where the file cannot be read or holds something else under the key.
    pub fn get(&self, key: &[u8; 32]) -> Result<Option<Completion>, CacheError> {
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let found: Option<String> = reader
            .prepare_cached("SELECT completion FROM completions WHERE key = ?1")
            .and_then(|mut statement| statement.query_row([key.as_slice()], |row| row.get(0)).optional())
            .map_err(|error| self.fail(error.to_string()))?;
        found
            .map(|text| {
                serde_json::from_str(&text)
                    .map_err(|error| self.fail(format!("a stored completion is damaged: {error}")))
            })
            .transpose()
    }

    /// Stores a completion; returns when it is on disk.
    ///
    /// # Errors
    /// Where the file cannot be written (disk full, read-only).
    pub async fn put(&self, key: [u8; 32], completion: &Completion) -> Result<(), CacheError> {
        let text = serde_json::to_string(completion).map_err(|error| self.fail(error.to_string()))?;
        let (done, wait) = oneshot::channel();
        let gone = || self.fail("its writer has ended".into());
        self.writer.send((key, text, done)).map_err(|_| gone())?;
        wait.await.map_err(|_| gone())?.map_err(|reason| self.fail(reason))
    }

    fn fail(&self, reason: String) -> CacheError {
        CacheError {
            path: self.path.as_ref().clone(),
            reason,
        }
    }
}

fn prepare(connection: &mut Connection) -> Result<(), String> {
    // Two processes may create the file at once: the second waits and finds it made.
    let change = connection
        .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
        .map_err(|error| error.to_string())?;
    let read = |pragma: &str| change.query_row(&format!("PRAGMA {pragma}"), [], |row| row.get::<_, i32>(0));
    let (application, version) = (
        read("application_id").map_err(|error| error.to_string())?,
        read("user_version").map_err(|error| error.to_string())?,
    );
    let tables: i64 = change
        .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
        .map_err(|error| error.to_string())?;
    match (application, version, tables) {
        (0, 0, 0) => change
            .execute_batch(&format!(
                "CREATE TABLE completions (key BLOB PRIMARY KEY, completion TEXT NOT NULL, stored_at TEXT NOT NULL) WITHOUT ROWID;
                 PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
            ))
            .map_err(|error| error.to_string())?,
        (APPLICATION_ID, SCHEMA_VERSION, _) => {}
        (APPLICATION_ID, newer, _) => return Err(format!("written by another version of dinsql (format {newer}, this one reads {SCHEMA_VERSION})")),
        _ => return Err("a database, but not a completion cache".into()),
    }
    change.commit().map_err(|error| error.to_string())
}

fn write_all(connection: &mut Connection, queue: &mpsc::Receiver<([u8; 32], String, Stored)>) {
    while let Ok(first) = queue.recv() {
        let mut batch = vec![first];
        while batch.len() < BATCH {
            match queue.try_recv() {
                Ok(next) => batch.push(next),
                Err(_) => break,
            }
        }
        let result = write_batch(connection, &batch).map_err(|error| error.to_string());
        for (_, _, done) in batch {
            let _ = done.send(result.clone());
        }
    }
}

fn write_batch(connection: &mut Connection, batch: &[([u8; 32], String, Stored)]) -> rusqlite::Result<()> {
    let change = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    {
        let now = jiff::Timestamp::now().to_string();
        let mut insert = change
            .prepare_cached("INSERT OR REPLACE INTO completions (key, completion, stored_at) VALUES (?1, ?2, ?3)")?;
        for (key, completion, _) in batch {
            insert.execute((key.as_slice(), completion, &now))?;
        }
    }
    change.commit()
}

/// Looks into the cache before it asks, and stores what was answered.
pub struct CachedModel {
    inner: Arc<dyn Model>,
    cache: Cache,
}

impl CachedModel {
    pub fn new(inner: Arc<dyn Model>, cache: Cache) -> Self {
        CachedModel { inner, cache }
    }

    async fn run(&self, request: &Request) -> Result<Completion, CallError> {
        let unusable = |error: CacheError| CallError {
            class: super::ErrorClass::Stopped,
            message: error.to_string(),
            status: None,
            retry_after: None,
            attempts: 0,
        };
        let key = request.key();
        if let Some(completion) = self.cache.get(&key).map_err(unusable)? {
            return Ok(Completion {
                cached: true,
                attempts: 0,
                ..completion
            });
        }
        let completion = self.inner.complete(request).await?;
        if is_whole(&completion) {
            self.cache.put(key, &completion).await.map_err(unusable)?;
        }
        Ok(completion)
    }
}

/// A truncated or filtered answer may come out better next time, so it's not kept.
fn is_whole(completion: &Completion) -> bool {
    matches!(
        completion.finish_reason.as_deref(),
        None | Some("stop" | "eos" | "end_turn" | "STOP")
    )
}

impl Model for CachedModel {
    fn complete<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Completion, CallError>> {
        Box::pin(self.run(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(text: &str) -> Completion {
        Completion {
            text: text.into(),
            finish_reason: Some("stop".into()),
            usage: super::super::Usage::default(),
            served_model: None,
            fingerprint: None,
            latency_ms: 3,
            attempts: 1,
            cached: false,
        }
    }

    #[tokio::test]
    async fn what_is_put_is_there_for_the_next_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/completions.sqlite");
        let cache = Cache::open(&path).unwrap();
        assert_eq!(cache.get(&[7; 32]).unwrap(), None);
        cache.put([7; 32], &completion("SELECT 'ş'")).await.unwrap();
        let other = Cache::open(&path).unwrap();
        assert_eq!(other.get(&[7; 32]).unwrap().unwrap().text, "SELECT 'ş'");
    }

    #[test]
    fn a_file_that_is_not_ours_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text");
        std::fs::write(
            &text,
            "not a database, but longer than a header of one would be".repeat(40),
        )
        .unwrap();
        assert!(Cache::open(&text).unwrap_err().to_string().contains("not a database"));
        let foreign = folder.path().join("foreign.sqlite");
        Connection::open(&foreign)
            .unwrap()
            .execute_batch("CREATE TABLE mine (a)")
            .unwrap();
        assert!(
            Cache::open(&foreign)
                .unwrap_err()
                .to_string()
                .contains("not a completion cache")
        );
    }

    #[test]
    fn truncated_answers_are_not_kept() {
        assert!(is_whole(&completion("x")));
        assert!(!is_whole(&Completion {
            finish_reason: Some("length".into()),
            ..completion("x")
        }));
        assert!(!is_whole(&Completion {
            finish_reason: Some("content_filter".into()),
            ..completion("x")
        }));
    }
}
