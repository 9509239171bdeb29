//! SQLite under guard: read-only opens, an authorizer that lets only reading through, one statement, and limits.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rusqlite::hooks::{AuthAction, AuthContext, Authorization};
use rusqlite::limits::Limit;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OpenFlags};

use super::{Limits, QueryError, QueryErrorKind, QueryResult, Value};
use crate::sql::text::{StatementSplit, split_first_statement};

/// SQLite's virtual machine steps between two looks at the clock: some tens of microseconds.
const STEPS_BETWEEN_CHECKS: i32 = 1_000;
/// Longest text or blob that a value may become, so that `zeroblob` and `printf` bombs fail at once.
const MAX_VALUE_BYTES: i32 = 64 << 20;
/// Open databases a thread keeps.
const MAX_OPEN: usize = 32;

/// The version of the SQLite that is built in.
pub fn sqlite_version() -> &'static str {
    rusqlite::version()
}

/// What the hooks of one connection share with its user.
#[derive(Debug, Default)]
struct Watch {
    /// Nanoseconds after `origin` at which the query must end; 0 is never.
    deadline: AtomicU64,
    expired: AtomicBool,
    refused: AtomicBool,
}

/// A read-only connection on which untrusted SQL may run.
#[derive(Debug)]
pub struct SqliteConnection {
    connection: Connection,
    watch: Arc<Watch>,
    origin: Instant,
}

impl SqliteConnection {
    /// Opens the file for reading untrusted SQL.
    ///
    /// # Errors
    /// Where the file is missing, is not a database or cannot be read.
    pub fn open(path: &Path) -> Result<Self, QueryError> {
        let mut connection = open_trusted(path)?;
        let database_error = |error: rusqlite::Error| QueryError::new(QueryErrorKind::Database, error.to_string());
        let watch = Arc::new(Watch::default());
        let origin = Instant::now();
        for (limit, value) in [
            (Limit::SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES),
            (Limit::SQLITE_LIMIT_SQL_LENGTH, 1 << 20),
            (Limit::SQLITE_LIMIT_ATTACHED, 0),
        ] {
            connection.set_limit(limit, value).map_err(database_error)?;
        }
        let seen = Arc::clone(&watch);
        connection
            .progress_handler(
                STEPS_BETWEEN_CHECKS,
                Some(move || {
                    let deadline = seen.deadline.load(Ordering::Relaxed);
                    let over = deadline != 0 && nanoseconds(origin.elapsed()) > deadline;
                    if over {
                        seen.expired.store(true, Ordering::Relaxed);
                    }
                    over
                }),
            )
            .map_err(database_error)?;
        let seen = Arc::clone(&watch);
        connection
            .authorizer(Some(move |context: AuthContext<'_>| {
                if reads_only(&context.action) {
                    Authorization::Allow
                } else {
                    seen.refused.store(true, Ordering::Relaxed);
                    Authorization::Deny
                }
            }))
            .map_err(database_error)?;
        Ok(SqliteConnection {
            connection,
            watch,
            origin,
        })
    }

    /// Runs one statement and fetches its rows. An empty or comment-only text gives no rows and no error, as in
    /// Python's `sqlite3`; anything after the first statement other than comments is an error, as there.
    ///
    /// # Errors
    /// See [`QueryErrorKind`].
    pub fn query(&self, sql: &str, limits: &Limits) -> Result<QueryResult, QueryError> {
        let started = Instant::now();
        let statement = one_statement(sql)?;
        self.watch.expired.store(false, Ordering::Relaxed);
        self.watch.refused.store(false, Ordering::Relaxed);
        let deadline = nanoseconds(self.origin.elapsed())
            .saturating_add(nanoseconds(limits.time))
            .max(1);
        self.watch.deadline.store(deadline, Ordering::Relaxed);
        let result = self.fetch(statement, limits, started);
        self.watch.deadline.store(0, Ordering::Relaxed);
        result
    }

    /// Prepares without running.
    ///
    /// # Errors
    /// As [`SqliteConnection::query`].
    pub fn prepare(&self, sql: &str) -> Result<(), QueryError> {
        let statement = one_statement(sql)?;
        self.watch.refused.store(false, Ordering::Relaxed);
        match self.connection.prepare(statement) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.explain(&error, &Limits::default())),
        }
    }

    fn fetch(&self, sql: &str, limits: &Limits, started: Instant) -> Result<QueryResult, QueryError> {
        let mut statement = match self.connection.prepare(sql) {
            Ok(statement) => statement,
            // rusqlite's word for a text without a statement.
            Err(rusqlite::Error::Empty) => {
                return Ok(QueryResult {
                    columns: Vec::new(),
                    rows: Vec::new(),
                    elapsed: started.elapsed(),
                });
            }
            Err(error) => return Err(self.explain(&error, limits)),
        };
        if !statement.readonly() {
            return Err(QueryError::new(
                QueryErrorKind::NotReadOnly,
                "the statement would write",
            ));
        }
        if statement.parameter_count() > 0 {
            return Err(QueryError::new(
                QueryErrorKind::Sql,
                "the statement has a parameter that nothing binds",
            ));
        }
        let columns: Vec<String> = statement.column_names().map(str::to_owned).collect();
        let width = columns.len();
        let mut rows = Vec::new();
        let mut bytes = 0_usize;
        let mut cursor = statement.query([]).map_err(|error| self.explain(&error, limits))?;
        loop {
            let row = match cursor.next() {
                Ok(Some(row)) => row,
                Ok(None) => break,
                Err(error) => return Err(self.explain(&error, limits)),
            };
            if rows.len() >= limits.rows {
                let message = format!("more than {} rows", limits.rows);
                return Err(QueryError::new(QueryErrorKind::TooLarge, message));
            }
            let mut values = Vec::with_capacity(width);
            for (index, column) in columns.iter().enumerate() {
                let value = row.get_ref(index).map_err(|error| self.explain(&error, limits))?;
                let value = own(value, column)?;
                bytes += value.size();
                values.push(value);
            }
            if bytes > limits.bytes {
                let message = format!("a result of more than {} bytes", limits.bytes);
                return Err(QueryError::new(QueryErrorKind::TooLarge, message));
            }
            rows.push(values);
        }
        Ok(QueryResult {
            columns,
            rows,
            elapsed: started.elapsed(),
        })
    }

    fn explain(&self, error: &rusqlite::Error, limits: &Limits) -> QueryError {
        if self.watch.expired.load(Ordering::Relaxed) {
            let message = format!("not finished within {} s", limits.time.as_secs_f64());
            return QueryError::new(QueryErrorKind::Timeout, message);
        }
        if self.watch.refused.load(Ordering::Relaxed) {
            return QueryError::new(QueryErrorKind::NotReadOnly, "the statement does more than read");
        }
        match error {
            rusqlite::Error::SqlInputError { msg, offset, .. } => QueryError {
                kind: QueryErrorKind::Sql,
                message: msg.clone(),
                offset: usize::try_from(*offset).ok(),
            },
            rusqlite::Error::SqliteFailure(code, message) => {
                use rusqlite::ErrorCode;
                let kind = match code.code {
                    ErrorCode::TooBig | ErrorCode::OutOfMemory => QueryErrorKind::TooLarge,
                    ErrorCode::DatabaseCorrupt
                    | ErrorCode::NotADatabase
                    | ErrorCode::CannotOpen
                    | ErrorCode::DatabaseBusy
                    | ErrorCode::DatabaseLocked
                    | ErrorCode::SystemIoFailure => QueryErrorKind::Database,
                    ErrorCode::ReadOnly => QueryErrorKind::NotReadOnly,
                    _ => QueryErrorKind::Sql,
                };
                QueryError::new(kind, message.clone().unwrap_or_else(|| code.to_string()))
            }
            other => QueryError::new(QueryErrorKind::Sql, other.to_string()),
        }
    }
}

/// Opens a file read-only without a guard: for SQL of our own only.
///
/// # Errors
/// Where the file is missing, is not a database or cannot be read.
pub fn open_trusted(path: &Path) -> Result<Connection, QueryError> {
    let fail = |reason: String| {
        QueryError::new(
            QueryErrorKind::Database,
            format!("database {}: {reason}", path.display()),
        )
    };
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => return Err(fail("not a file".into())),
        Err(error) => return Err(fail(error.to_string())),
    }
    // Without a journal beside it nobody is writing: `immutable` then skips locks, also in folders we may not write to.
    let quiet = ["-wal", "-journal"].iter().all(|suffix| {
        let mut name = path.as_os_str().to_owned();
        name.push(suffix);
        std::fs::metadata(PathBuf::from(name)).map_or(true, |metadata| metadata.len() == 0)
    });
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
    let uri = format!(
        "file:{}?mode=ro{}",
        percent_encode(path),
        if quiet { "&immutable=1" } else { "" }
    );
    let connection = Connection::open_with_flags(uri, flags).map_err(|error| fail(error.to_string()))?;
    connection
        .busy_timeout(Duration::from_secs(2))
        .map_err(|error| fail(error.to_string()))?;
    connection
        .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get::<_, i64>(0))
        .map_err(|error| fail(error.to_string()))?;
    Ok(connection)
}

fn percent_encode(path: &Path) -> String {
    use std::fmt::Write;
    use std::os::unix::ffi::OsStrExt;
    path.as_os_str()
        .as_bytes()
        .iter()
        .fold(String::new(), |mut text, &byte| {
            if byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte) {
                text.push(char::from(byte));
            } else {
                let _ = write!(text, "%{byte:02X}");
            }
            text
        })
}

fn one_statement(sql: &str) -> Result<&str, QueryError> {
    if let Some(offset) = sql.find('\0') {
        return Err(QueryError {
            kind: QueryErrorKind::Sql,
            message: "the text holds a null character".into(),
            offset: Some(offset),
        });
    }
    match split_first_statement(sql) {
        StatementSplit::One(statement) => Ok(statement),
        StatementSplit::More { rest_at, .. } => Err(QueryError {
            kind: QueryErrorKind::Sql,
            message: "more than one statement".into(),
            offset: Some(rest_at),
        }),
    }
}

fn reads_only(action: &AuthAction<'_>) -> bool {
    match action {
        AuthAction::Select | AuthAction::Read { .. } | AuthAction::Recursive => true,
        AuthAction::Function { function_name } => {
            !["load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"]
                .iter()
                .any(|name| function_name.eq_ignore_ascii_case(name))
        }
        _ => false,
    }
}

fn own(value: ValueRef<'_>, column: &str) -> Result<Value, QueryError> {
    Ok(match value {
        ValueRef::Null => Value::Null,
        ValueRef::Integer(number) => Value::Integer(number),
        ValueRef::Real(number) => Value::Real(number),
        ValueRef::Text(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => Value::Text(text.to_owned()),
            Err(_) => {
                let message = format!("a text in column `{column}` is not valid UTF-8");
                return Err(QueryError::new(QueryErrorKind::InvalidText, message));
            }
        },
        ValueRef::Blob(bytes) => Value::Blob(bytes.to_vec()),
    })
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The open databases of one thread.
#[derive(Debug, Default)]
pub struct Connections {
    open: HashMap<PathBuf, SqliteConnection>,
}

impl Connections {
    /// The connection to a file, opened at its first use.
    ///
    /// # Errors
    /// As [`SqliteConnection::open`].
    pub fn get(&mut self, path: &Path) -> Result<&SqliteConnection, QueryError> {
        if !self.open.contains_key(path) {
            if self.open.len() >= MAX_OPEN {
                self.open.clear();
            }
            self.open.insert(path.to_owned(), SqliteConnection::open(path)?);
        }
        Ok(&self.open[path])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> (tempfile::TempDir, SqliteConnection) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("öğe %1?.sqlite");
        let writer = Connection::open(&path).unwrap();
        writer
            .execute_batch("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT); INSERT INTO item VALUES (1, 'şeker'), (2, x'61ff62')")
            .unwrap();
        drop(writer);
        let connection = SqliteConnection::open(&path).unwrap();
        (folder, connection)
    }

    fn kind(connection: &SqliteConnection, sql: &str) -> QueryErrorKind {
        connection
            .query(
                sql,
                &Limits {
                    time: Duration::from_millis(200),
                    rows: 1000,
                    bytes: 1 << 20,
                },
            )
            .unwrap_err()
            .kind
    }

    #[test]
    fn reads_typed_rows() {
        let (_folder, connection) = sample();
        let result = connection
            .query(
                "SELECT id, name, NULL, 1.5 FROM item WHERE id = 1;  -- done",
                &Limits::default(),
            )
            .unwrap();
        assert_eq!(result.columns, ["id", "name", "NULL", "1.5"]);
        assert_eq!(
            result.rows,
            [[
                Value::Integer(1),
                Value::Text("şeker".into()),
                Value::Null,
                Value::Real(1.5)
            ]]
        );
    }

    #[test]
    fn nothing_that_writes_or_leaves_the_file_gets_through() {
        let (folder, connection) = sample();
        let before = std::fs::read_dir(folder.path()).unwrap().count();
        for sql in [
            "DROP TABLE item",
            "DELETE FROM item",
            "UPDATE item SET name = 'x'",
            "INSERT INTO item VALUES (3, 'x')",
            "CREATE TEMP TABLE t (a)",
            "CREATE TEMP VIEW item AS SELECT 9",
            "ATTACH 'other.sqlite' AS other",
            "PRAGMA writable_schema = ON",
            "VACUUM INTO 'copy.sqlite'",
            "BEGIN IMMEDIATE",
            "SELECT load_extension('x')",
            "WITH gone AS (SELECT 1) DELETE FROM item",
        ] {
            let kind = kind(&connection, sql);
            assert!(
                matches!(kind, QueryErrorKind::NotReadOnly | QueryErrorKind::Sql),
                "{sql}: {kind:?}"
            );
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), before);
        assert_eq!(
            connection
                .query("SELECT count(*) FROM item", &Limits::default())
                .unwrap()
                .rows,
            [[Value::Integer(2)]]
        );
    }

    #[test]
    fn limits_hold_and_the_next_query_works() {
        let (_folder, connection) = sample();
        let endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n";
        let started = Instant::now();
        assert_eq!(kind(&connection, endless), QueryErrorKind::Timeout);
        assert!(started.elapsed() < Duration::from_millis(700));
        let rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n";
        assert_eq!(kind(&connection, rows), QueryErrorKind::TooLarge);
        assert_eq!(
            kind(&connection, "SELECT zeroblob(1000000000)"),
            QueryErrorKind::TooLarge
        );
        assert_eq!(kind(&connection, "SELECT zeroblob(2000000)"), QueryErrorKind::TooLarge);
        assert_eq!(
            kind(
                &connection,
                "SELECT name FROM item WHERE id = 2 UNION ALL SELECT CAST(name AS TEXT) FROM item"
            ),
            QueryErrorKind::InvalidText
        );
        assert!(connection.query("SELECT 1", &Limits::default()).is_ok());
    }

    #[test]
    fn one_statement_as_python_takes_it() {
        let (_folder, connection) = sample();
        for empty in ["", "   ", "-- nothing", "/* nothing */", ";"] {
            assert!(
                connection.query(empty, &Limits::default()).unwrap().rows.is_empty(),
                "{empty:?}"
            );
        }
        for fine in [
            "SELECT 1;",
            "SELECT 1; -- c",
            "SELECT 1 /* ; */ ;\n/* c */",
            "SELECT ';' ;",
        ] {
            assert_eq!(
                connection.query(fine, &Limits::default()).unwrap().rows.len(),
                1,
                "{fine}"
            );
        }
        for bad in [
            "SELECT 1;;",
            "SELECT 1; SELECT 2",
            "SELECT 1;<|im_end|>",
            "SELECT 1; DROP TABLE item",
            "SELECT \0 1",
            "SELECT ?",
        ] {
            assert_eq!(kind(&connection, bad), QueryErrorKind::Sql, "{bad}");
        }
    }

    #[test]
    fn the_place_of_a_mistake_is_known() {
        let (_folder, connection) = sample();
        let error = connection
            .query("SELECT nam FROM item", &Limits::default())
            .unwrap_err();
        assert_eq!((error.message.as_str(), error.offset), ("no such column: nam", Some(7)));
        assert_eq!(
            SqliteConnection::open(Path::new("/nowhere.sqlite")).unwrap_err().kind,
            QueryErrorKind::Database
        );
    }
}
