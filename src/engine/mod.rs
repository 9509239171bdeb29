//! The shared executor: one door for every SQL text that is run, whoever wrote it.
//!
//! In: a database file, SQL, [`Limits`]. Out: typed rows or a [`QueryError`] that says why there are none. SQL is
//! treated as hostile: one statement, reading only, bounded in time, rows and bytes. This room knows nothing of models,
//! prompts or metrics; how results compare is decided in `metric`.

mod build;
mod connections;
mod deadline;
mod memory;
mod open;
mod pool;
mod probe;
mod sqlite;
mod value;

use std::time::Duration;

pub use build::build_database;
pub use connections::Connections;
pub use open::open_trusted;
pub use pool::Executor;
pub use probe::SqliteProbe;
pub use sqlite::{SqliteConnection, sqlite_version};
pub use value::Value;

/// What one execution may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// From prepare to the last row fetched.
    pub time: Duration,
    pub rows: usize,
    /// Bytes of the whole result: its values' content, and what each row and value takes beside it.
    pub bytes: usize,
}

impl Default for Limits {
    /// BIRD's 30 s (its `meta_time_out`), and caps far above any gold result.
    fn default() -> Self {
        Limits {
            time: Duration::from_secs(30),
            rows: 2_000_000,
            bytes: 512 << 20,
        }
    }
}

/// A finished query.
#[derive(Debug, Clone, PartialEq)]
pub struct QueryResult {
    pub columns: Vec<String>,
    pub rows: Vec<Vec<Value>>,
    pub elapsed: Duration,
}

/// Why a query has no result; each kind is an outcome of its own in reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QueryErrorKind {
    /// The engine refused it: syntax, unknown names, a second statement, an unbound parameter, a failing function.
    Sql,
    /// The time limit ran out.
    Timeout,
    /// It would write, attach, or change settings.
    NotReadOnly,
    /// More rows or bytes than the caps, or more memory on the way to them than SQLite may use.
    TooLarge,
    /// A text value that is not valid UTF-8, which the official scripts cannot fetch either.
    InvalidText,
    /// The database itself cannot be opened or read, or the executor failed: no fault of the query, which says nothing
    /// about it.
    Database,
}

/// An execution that failed, in the engine's own words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct QueryError {
    pub kind: QueryErrorKind,
    pub message: String,
    /// Byte offset in the SQL of what is wrong, where the engine tells.
    pub offset: Option<usize>,
}

impl QueryError {
    pub(crate) fn new(kind: QueryErrorKind, message: impl Into<String>) -> Self {
        QueryError {
            kind,
            message: message.into(),
            offset: None,
        }
    }

    pub(crate) fn timeout(limit: Duration) -> Self {
        let message = format!("not finished within {} s", limit.as_secs_f64());
        QueryError::new(QueryErrorKind::Timeout, message)
    }
}
