//! The completion cache: a SQLite file, shared by runs and processes, keyed by the canonical request.
//!
//! Only finished, valid completions are stored, and a completion is stored before it is used, so that what was paid for
//! survives a crash. A file that is not ours, or is damaged, is an error, never silently a new purchase.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, OptionalExtension};
use tokio::sync::oneshot;

use super::{Completion, Request};

/// Marks the file as ours: "dSQL".
const APPLICATION_ID: i32 = 0x6453_514c;
/// 1: key, completion, time. 2: and who was asked, and for which call of which run it was bought.
const SCHEMA_VERSION: i32 = 2;
/// Completions stored in one transaction.
const BATCH: usize = 512;

const CREATE: &str = "CREATE TABLE completions (key BLOB PRIMARY KEY, completion TEXT NOT NULL, stored_at TEXT NOT NULL, \
                      provider TEXT, model TEXT, origin TEXT) WITHOUT ROWID;";
const FROM_1_TO_2: &str = "ALTER TABLE completions ADD COLUMN provider TEXT;
                           ALTER TABLE completions ADD COLUMN model TEXT;
                           ALTER TABLE completions ADD COLUMN origin TEXT;";

/// The cache cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
#[error("completion cache {}: {reason}", .path.display())]
pub struct CacheError {
    pub path: PathBuf,
    pub reason: String,
}

/// How the cache is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// What is there is used, what is new is stored.
    #[default]
    On,
    /// Only what is there: nothing is asked of a model.
    ReadOnly,
    /// Everything is asked again, and stored in place of what was there.
    Refresh,
}

/// A stored completion, and for which call it was bought.
#[derive(Debug, Clone, PartialEq)]
pub struct Hit {
    pub completion: Completion,
    pub origin: Option<String>,
}

struct Entry {
    key: [u8; 32],
    completion: String,
    provider: String,
    model: String,
    origin: String,
}

type Stored = oneshot::Sender<Result<(), String>>;

/// An open cache file; cloning shares it.
#[derive(Debug, Clone)]
pub struct Cache {
    path: Arc<PathBuf>,
    reader: Arc<Mutex<Connection>>,
    /// None where the file is only read.
    writer: Option<mpsc::Sender<(Entry, Stored)>>,
    /// Why nothing more can be stored.
    broken: Arc<OnceLock<CacheError>>,
}

const REMEDY: &str = "; move it away, or name another with --cache";

impl Cache {
    /// Opens or creates the file.
    ///
    /// # Errors
    /// Where the folder cannot be written, or the file is corrupt or not a cache of ours.
    pub fn open(path: &Path) -> Result<Self, CacheError> {
        let fail = |reason: String| error(path, reason);
        let mut writer = open_to_write(path)?;
        let reader = connect(path, OpenFlags::default())?;
        look_fast(&reader).map_err(|cause| fail(cause.to_string()))?;
        let (jobs, queue) = mpsc::channel::<(Entry, Stored)>();
        std::thread::Builder::new()
            .name("completion-cache".into())
            .spawn(move || write_all(&mut writer, &queue))
            .map_err(|error| fail(error.to_string()))?;
        Ok(Cache {
            path: Arc::new(path.to_owned()),
            reader: Arc::new(Mutex::new(reader)),
            writer: Some(jobs),
            broken: Arc::default(),
        })
    }

    /// Opens a file that must be there, to look completions up.
    ///
    /// # Errors
    /// Where it is not there, is of another version, corrupt, or not a cache of ours.
    pub fn open_to_read(path: &Path) -> Result<Self, CacheError> {
        let reader = open_to_read(path)?;
        Ok(Cache {
            path: Arc::new(path.to_owned()),
            reader: Arc::new(Mutex::new(reader)),
            writer: None,
            broken: Arc::default(),
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A stored completion. One that cannot be read any more counts as absent, with a warning in the log.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn get(&self, key: &[u8; 32]) -> Result<Option<Hit>, CacheError> {
        let found: Option<(String, Option<String>)> = {
            let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
            reader
                .prepare_cached("SELECT completion, origin FROM completions WHERE key = ?1")
                .and_then(|mut statement| {
                    statement
                        .query_row([key.as_slice()], |row| Ok((row.get(0)?, row.get(1)?)))
                        .optional()
                })
                .map_err(|error| self.fail(format!("{error}{REMEDY}")))?
        };
        let Some((text, origin)) = found else { return Ok(None) };
        match serde_json::from_str(&text) {
            Ok(completion) => Ok(Some(Hit { completion, origin })),
            Err(error) => {
                let key = blake3::Hash::from_bytes(*key).to_hex();
                tracing::warn!(%key, "a stored completion is damaged and is asked for again: {error}");
                Ok(None)
            }
        }
    }

    /// Stores a completion; returns when it is on disk.
    ///
    /// # Errors
    /// Where the file cannot be written (disk full, read-only); from then on nothing is stored.
    pub async fn put(&self, key: [u8; 32], request: &Request, completion: &Completion) -> Result<(), CacheError> {
        let result = self.try_put(key, request, completion).await;
        if let Err(error) = &result {
            let _ = self.broken.set(error.clone());
        }
        result
    }

    async fn try_put(&self, key: [u8; 32], request: &Request, completion: &Completion) -> Result<(), CacheError> {
        let Some(writer) = &self.writer else { return Ok(()) };
        let entry = Entry {
            key,
            completion: serde_json::to_string(completion).map_err(|error| self.fail(error.to_string()))?,
            provider: request.provider.clone(),
            model: request.model.clone(),
            origin: request.origin.clone(),
        };
        let (done, wait) = oneshot::channel();
        let gone = || self.fail("its writer has ended".into());
        writer.send((entry, done)).map_err(|_| gone())?;
        wait.await.map_err(|_| gone())?.map_err(|reason| self.fail(reason))
    }

    /// Why nothing more can be stored, where that is so.
    pub fn broken(&self) -> Option<&CacheError> {
        self.broken.get()
    }

    fn fail(&self, reason: String) -> CacheError {
        error(&self.path, reason)
    }
}

fn error(path: &Path, reason: String) -> CacheError {
    CacheError {
        path: path.to_owned(),
        reason,
    }
}

fn connect(path: &Path, flags: OpenFlags) -> Result<Connection, CacheError> {
    let connection = Connection::open_with_flags(path, flags).map_err(|cause| error(path, cause.to_string()))?;
    connection
        .busy_timeout(Duration::from_secs(30))
        .map_err(|cause| error(path, cause.to_string()))?;
    Ok(connection)
}

/// Pages are read where they lie in memory, since look-ups go all over the file.
fn look_fast(connection: &Connection) -> rusqlite::Result<()> {
    connection.query_row("PRAGMA mmap_size = 33554432", [], |_| Ok(()))
}

/// Opens or creates the file, brought to the present version.
pub(super) fn open_to_write(path: &Path) -> Result<Connection, CacheError> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|cause| error(path, cause.to_string()))?;
    }
    let mut connection = connect(path, OpenFlags::default())?;
    connection
        .query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))
        .and_then(|()| connection.execute_batch("PRAGMA synchronous = NORMAL"))
        .map_err(|cause| error(path, format!("{cause}{REMEDY}")))?;
    prepare(&mut connection).map_err(|reason| error(path, format!("{reason}{REMEDY}")))?;
    Ok(connection)
}

/// Opens the file without the wish, or the right, to change it.
pub(super) fn open_to_read(path: &Path) -> Result<Connection, CacheError> {
    if !path.is_file() {
        return Err(error(path, "there is none".into()));
    }
    let connection = connect(path, OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    let versions = versions(&connection).map_err(|reason| error(path, format!("{reason}{REMEDY}")))?;
    match versions {
        (APPLICATION_ID, SCHEMA_VERSION) => Ok(connection),
        (APPLICATION_ID, other) => Err(error(path, other_version(other))),
        _ => Err(error(path, format!("a database, but not a completion cache{REMEDY}"))),
    }
}

fn versions(connection: &Connection) -> Result<(i32, i32), String> {
    let read = |pragma: &str| {
        connection
            .query_row(&format!("PRAGMA {pragma}"), [], |row| row.get::<_, i32>(0))
            .map_err(|error| error.to_string())
    };
    Ok((read("application_id")?, read("user_version")?))
}

fn other_version(version: i32) -> String {
    if version < SCHEMA_VERSION {
        format!(
            "of an older dinsql (format {version}); any command that may write it brings it to format {SCHEMA_VERSION}"
        )
    } else {
        format!("written by a newer dinsql (format {version}, this one reads {SCHEMA_VERSION})")
    }
}

fn prepare(connection: &mut Connection) -> Result<(), String> {
    // Two processes may create the file at once: the second waits and finds it made.
    let change = connection
        .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
        .map_err(|error| error.to_string())?;
    let (application, version) = versions(&change)?;
    let tables: i64 = change
        .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
        .map_err(|error| error.to_string())?;
    let steps = match (application, version, tables) {
        (0, 0, 0) => format!("{CREATE} PRAGMA application_id = {APPLICATION_ID};"),
        (APPLICATION_ID, SCHEMA_VERSION, _) => return Ok(()),
        (APPLICATION_ID, 1, _) => FROM_1_TO_2.to_owned(),
        (APPLICATION_ID, newer, _) => return Err(other_version(newer)),
        _ => return Err("a database, but not a completion cache".into()),
    };
    change
        .execute_batch(&format!("{steps} PRAGMA user_version = {SCHEMA_VERSION};"))
        .and_then(|()| change.commit())
        .map_err(|error| error.to_string())
}

fn write_all(connection: &mut Connection, queue: &mpsc::Receiver<(Entry, Stored)>) {
    while let Ok(first) = queue.recv() {
        let mut batch = vec![first];
        while batch.len() < BATCH {
            match queue.try_recv() {
                Ok(next) => batch.push(next),
                Err(_) => break,
            }
        }
        let result = write_batch(connection, &batch)
            .or_else(|_| {
                // Memory that a query has taken for itself, or a lock, may be free again.
                std::thread::sleep(Duration::from_millis(50));
                write_batch(connection, &batch)
            })
            .map_err(|error| error.to_string());
        for (_, done) in batch {
            let _ = done.send(result.clone());
        }
    }
}

fn write_batch(connection: &mut Connection, batch: &[(Entry, Stored)]) -> rusqlite::Result<()> {
    let change = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    {
        let now = jiff::Timestamp::now().to_string();
        let mut insert = change.prepare_cached(
            "INSERT OR REPLACE INTO completions (key, completion, stored_at, provider, model, origin) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )?;
        for (entry, _) in batch {
            insert.execute((
                entry.key.as_slice(),
                &entry.completion,
                &now,
                &entry.provider,
                &entry.model,
                &entry.origin,
            ))?;
        }
    }
    change.commit()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{completion, request};
    use super::*;

    #[tokio::test]
    async fn what_is_put_is_there_for_the_next_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/completions.sqlite");
        let cache = Cache::open(&path).unwrap();
        assert_eq!(cache.get(&[7; 32]).unwrap(), None);
        let mut call = request();
        call.origin = "run/q1/generation".into();
        cache.put([7; 32], &call, &completion("SELECT 'ş'")).await.unwrap();
        for other in [Cache::open(&path).unwrap(), Cache::open_to_read(&path).unwrap()] {
            let hit = other.get(&[7; 32]).unwrap().unwrap();
            assert_eq!(hit.completion.text, "SELECT 'ş'");
            assert_eq!(hit.origin.as_deref(), Some("run/q1/generation"));
        }
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
        assert!(
            Cache::open_to_read(&text)
                .unwrap_err()
                .to_string()
                .contains("not a database")
        );
        let foreign = folder.path().join("foreign.sqlite");
        Connection::open(&foreign)
            .unwrap()
            .execute_batch("CREATE TABLE mine (a)")
            .unwrap();
        for refusal in [Cache::open(&foreign), Cache::open_to_read(&foreign)] {
            assert!(refusal.unwrap_err().to_string().contains("not a completion cache"));
        }
        let absent = Cache::open_to_read(&folder.path().join("absent")).unwrap_err();
        assert!(absent.to_string().contains("there is none"));
    }

    /// What users have bought with an earlier version stays reachable.
    #[tokio::test]
    async fn a_cache_of_the_first_version_is_brought_along() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("completions.sqlite");
        let old = Connection::open(&path).unwrap();
        old.execute_batch(&format!(
            "CREATE TABLE completions (key BLOB PRIMARY KEY, completion TEXT NOT NULL, stored_at TEXT NOT NULL) WITHOUT ROWID;
             PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 1;"
        ))
        .unwrap();
        old.execute(
            "INSERT INTO completions VALUES (?1, ?2, '2026-11-30T10:00:00Z')",
            (
                request().key().as_slice(),
                r#"{"text":"SELECT 1","finish_reason":"stop","usage":{"prompt":3,"completion":2},"latency_ms":7,"attempts":1,"cached":false}"#,
            ),
        )
        .unwrap();
        drop(old);
        let refusal = Cache::open_to_read(&path).unwrap_err();
        assert!(refusal.to_string().contains("of an older dinsql"), "{refusal}");
        let cache = Cache::open(&path).unwrap();
        let hit = cache.get(&request().key()).unwrap().unwrap();
        assert_eq!((hit.completion.text.as_str(), hit.origin), ("SELECT 1", None));
        Cache::open_to_read(&path).unwrap();
    }

    #[tokio::test]
    async fn one_damaged_completion_is_not_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("completions.sqlite");
        let cache = Cache::open(&path).unwrap();
        cache.put([1; 32], &request(), &completion("a")).await.unwrap();
        Connection::open(&path)
            .unwrap()
            .execute("UPDATE completions SET completion = '{'", [])
            .unwrap();
        assert_eq!(cache.get(&[1; 32]).unwrap(), None);
    }

    #[tokio::test]
    async fn a_cache_that_cannot_be_written_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("completions.sqlite");
        let cache = Cache::open(&path).unwrap();
        Connection::open(&path)
            .unwrap()
            .execute_batch("DROP TABLE completions")
            .unwrap();
        assert!(cache.put([1; 32], &request(), &completion("a")).await.is_err());
        assert!(cache.broken().is_some());
    }
}
