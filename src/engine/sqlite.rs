//! SQLite under guard: read-only opens, an authorizer that lets only reading through, one statement, and limits.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rusqlite::hooks::{AuthAction, AuthContext, Authorization};
use rusqlite::limits::Limit;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, Statement};

use super::deadline::Deadline;
use super::{Limits, QueryError, QueryErrorKind, QueryResult, Value, memory, open_trusted};
use crate::sql::text::{StatementSplit, split_first_statement};

/// SQLite's virtual machine steps between two looks at the clock: some tens of microseconds.
const STEPS_BETWEEN_CHECKS: i32 = 1_000;
/// Longest text or blob that a value may become, so that `zeroblob` and `printf` bombs fail at once.
const MAX_VALUE_BYTES: i32 = 64 << 20;
/// What a row and each of its values take beside their content, for the byte cap.
const ROW_OVERHEAD: usize = 24;
const VALUE_OVERHEAD: usize = 32;

/// The version of the SQLite that is built in.
pub fn sqlite_version() -> &'static str {
    rusqlite::version()
}

/// How much longer than its time limit a query may take before no other waits for it.
const PATIENCE: Duration = Duration::from_millis(500);

/// What the hooks of one connection share with its user.
#[derive(Debug, Default)]
struct Watch {
    deadline: Deadline,
    expired: AtomicBool,
    refused: AtomicBool,
    /// The heap limit was reached, by this query or by others beside it.
    starved: AtomicBool,
}

impl Watch {
    fn reset(&self) {
        for flag in [&self.expired, &self.refused, &self.starved] {
            flag.store(false, Ordering::Relaxed);
        }
    }
}

/// A read-only connection on which untrusted SQL may run. What a query nests deeply (`LIKE` with thousands of wildcards)
/// takes some 4 MiB of its thread's stack.
#[derive(Debug)]
pub struct SqliteConnection {
    connection: Connection,
    watch: Arc<Watch>,
    /// Whether the schema is valid UTF-8: rusqlite panics on a column name that is not.
    readable_names: bool,
}

impl SqliteConnection {
    /// Opens the file for reading untrusted SQL.
    ///
    /// # Errors
    /// Where the file is missing, is not a database or cannot be read.
    pub fn open(path: &Path) -> Result<Self, QueryError> {
        Self::open_with(path, Deadline::default())
    }

    /// Opens the file, and has `deadline` tell when the query that runs must end.
    pub(super) fn open_with(path: &Path, deadline: Deadline) -> Result<Self, QueryError> {
        let mut connection = open_trusted(path)?;
        let database_error = |error: rusqlite::Error| QueryError::new(QueryErrorKind::Database, error.to_string());
        let watch = Arc::new(Watch {
            deadline,
            ..Watch::default()
        });
        for (limit, value) in [
            (Limit::SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES),
            (Limit::SQLITE_LIMIT_SQL_LENGTH, 1 << 20),
            (Limit::SQLITE_LIMIT_ATTACHED, 0),
        ] {
            connection.set_limit(limit, value).map_err(database_error)?;
        }
        // Before the authorizer, which lets no setting through.
        memory::limit(&connection).map_err(database_error)?;
        let readable_names = names_are_text(&connection).map_err(database_error)?;
        let seen = Arc::clone(&watch);
        connection
            .progress_handler(
                STEPS_BETWEEN_CHECKS,
                Some(move || {
                    let over = seen.deadline.is_past(Duration::ZERO);
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
            readable_names,
        })
    }

    /// Runs one statement and fetches its rows. An empty or comment-only text gives no rows and no error, as in
    /// Python's `sqlite3`; anything after the first statement other than comments is an error, as there.
    ///
    /// # Errors
    /// See [`QueryErrorKind`].
    pub fn query(&self, sql: &str, limits: &Limits) -> Result<QueryResult, QueryError> {
        let columns = |statement: &Statement<'_>| {
            (0..statement.column_count())
                .map(|index| self.column_name(statement, index))
                .collect()
        };
        let ((columns, rows), elapsed) = self.run(
            sql,
            limits,
            |statement| (statement.map(columns).unwrap_or_default(), Vec::new()),
            |(_, rows), row| rows.push(std::mem::take(row)),
        )?;
        Ok(QueryResult { columns, rows, elapsed })
    }

    /// Runs one statement as [`SqliteConnection::query`] does, under the same limits, but hands over its rows one by one
    /// and keeps none: `step` folds each into what `start` made. `start` may be called twice, where a first attempt found
    /// no memory; what it made first is then gone. Neither may run queries. Returned with the time it took.
    ///
    /// # Errors
    /// See [`QueryErrorKind`].
    pub fn query_fold<T>(
        &self,
        sql: &str,
        limits: &Limits,
        start: impl Fn() -> T,
        step: impl Fn(&mut T, &[Value]),
    ) -> Result<(T, Duration), QueryError> {
        self.run(sql, limits, |_| start(), |folded, row| step(folded, row))
    }

    /// Prepares without running.
    ///
    /// # Errors
    /// As [`SqliteConnection::query`].
    pub fn prepare(&self, sql: &str) -> Result<(), QueryError> {
        let statement = one_statement(sql)?;
        self.watch.reset();
        match self.connection.prepare(statement) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.explain(&error, &Limits::default())),
        }
    }

    fn run<T>(
        &self,
        sql: &str,
        limits: &Limits,
        start: impl Fn(Option<&Statement<'_>>) -> T,
        step: impl Fn(&mut T, &mut Vec<Value>),
    ) -> Result<(T, Duration), QueryError> {
        let statement = one_statement(sql)?;
        {
            let _shared = memory::shared();
            let result = self.attempt(statement, limits, &start, &step);
            if !self.watch.starved.load(Ordering::Relaxed) {
                return result;
            }
        }
        let _alone = memory::alone(limits.time + PATIENCE);
        self.attempt(statement, limits, &start, &step)
    }

    fn attempt<T>(
        &self,
        sql: &str,
        limits: &Limits,
        start: &impl Fn(Option<&Statement<'_>>) -> T,
        step: &impl Fn(&mut T, &mut Vec<Value>),
    ) -> Result<(T, Duration), QueryError> {
        let started = Instant::now();
        self.watch.reset();
        self.watch.deadline.set(limits.time);
        let result = self.fetch(sql, limits, start, step);
        self.watch.deadline.clear();
        let (folded, elapsed) = (result?, started.elapsed());
        // A function that takes long by itself is not stopped at the limit.
        if elapsed > limits.time {
            return Err(QueryError::timeout(limits.time));
        }
        Ok((folded, elapsed))
    }

    fn fetch<T>(
        &self,
        sql: &str,
        limits: &Limits,
        start: &impl Fn(Option<&Statement<'_>>) -> T,
        step: &impl Fn(&mut T, &mut Vec<Value>),
    ) -> Result<T, QueryError> {
        let mut statement = match self.connection.prepare(sql) {
            Ok(statement) => statement,
            // rusqlite's word for a text without a statement.
            Err(rusqlite::Error::Empty) => return Ok(start(None)),
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
        let mut folded = start(Some(&statement));
        let width = statement.column_count();
        let (mut rows, mut bytes) = (0_usize, 0_usize);
        let mut values = Vec::new();
        let mut cursor = statement.query([]).map_err(|error| self.explain(&error, limits))?;
        while let Some(row) = cursor.next().map_err(|error| self.explain(&error, limits))? {
            if rows >= limits.rows {
                let message = format!("more than {} rows", limits.rows);
                return Err(QueryError::new(QueryErrorKind::TooLarge, message));
            }
            rows += 1;
            bytes += ROW_OVERHEAD;
            values.clear();
            values.reserve_exact(width);
            for index in 0..width {
                let value = row.get_ref(index).map_err(|error| self.explain(&error, limits))?;
                let value = own(value).ok_or_else(|| {
                    let column = self.column_name(row.as_ref(), index);
                    let message = format!("a text in column `{column}` is not valid UTF-8");
                    QueryError::new(QueryErrorKind::InvalidText, message)
                })?;
                bytes += VALUE_OVERHEAD + value.size();
                values.push(value);
            }
            if bytes > limits.bytes {
                let message = format!("a result of more than {} bytes", limits.bytes);
                return Err(QueryError::new(QueryErrorKind::TooLarge, message));
            }
            step(&mut folded, &mut values);
        }
        Ok(folded)
    }

    fn column_name(&self, statement: &Statement<'_>, index: usize) -> String {
        let name = self.readable_names.then(|| statement.column_name(index).ok()).flatten();
        name.map_or_else(|| format!("column {}", index + 1), str::to_owned)
    }

    fn explain(&self, error: &rusqlite::Error, limits: &Limits) -> QueryError {
        if self.watch.expired.load(Ordering::Relaxed) {
            return QueryError::timeout(limits.time);
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
                let starved =
                    code.code == ErrorCode::OutOfMemory || code.extended_code == rusqlite::ffi::SQLITE_IOERR_NOMEM;
                if starved {
                    self.watch.starved.store(true, Ordering::Relaxed);
                    let message = format!("needs more than {} MiB of memory", memory::HEAP_LIMIT_BYTES >> 20);
                    return QueryError::new(QueryErrorKind::TooLarge, message);
                }
                let kind = match code.code {
                    ErrorCode::TooBig => QueryErrorKind::TooLarge,
                    ErrorCode::DatabaseCorrupt
                    | ErrorCode::NotADatabase
                    | ErrorCode::CannotOpen
                    | ErrorCode::DatabaseBusy
                    | ErrorCode::DatabaseLocked
                    | ErrorCode::FileLockingProtocolFailed
                    | ErrorCode::PermissionDenied
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

/// The value, or nothing where it is a text that is not valid UTF-8.
fn own(value: ValueRef<'_>) -> Option<Value> {
    Some(match value {
        ValueRef::Null => Value::Null,
        ValueRef::Integer(number) => Value::Integer(number),
        ValueRef::Real(number) => Value::Real(number),
        ValueRef::Text(bytes) => Value::Text(std::str::from_utf8(bytes).ok()?.to_owned()),
        ValueRef::Blob(bytes) => Value::Blob(bytes.to_vec()),
    })
}

/// Column names come from the query, which is valid UTF-8, or from these texts.
fn names_are_text(connection: &Connection) -> rusqlite::Result<bool> {
    let mut statement = connection.prepare("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        if row.get_ref(0)?.as_str().is_err() {
            return Ok(false);
        }
    }
    Ok(true)
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

    /// Makes a database, changes bytes of its file, and opens it.
    fn damaged(sql: &str, damage: impl Fn(&mut Vec<u8>)) -> (tempfile::TempDir, SqliteConnection) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("damaged.sqlite");
        Connection::open(&path).unwrap().execute_batch(sql).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        damage(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        let connection = SqliteConnection::open(&path).unwrap();
        (folder, connection)
    }

    #[test]
    fn a_corrupt_table_is_the_databases_fault() {
        let sql = "CREATE TABLE good (a); CREATE TABLE bad (a); INSERT INTO bad VALUES (1)";
        let (_folder, connection) = damaged(sql, |bytes| bytes[2 * 4096..].fill(0xEE));
        assert_eq!(kind(&connection, "SELECT a FROM bad"), QueryErrorKind::Database);
        assert!(connection.query("SELECT a FROM good", &Limits::default()).is_ok());
    }

    #[test]
    fn a_column_name_that_is_not_text_does_no_harm() {
        let sql = "CREATE TABLE t (good, bad__); INSERT INTO t VALUES (1, 2);
            CREATE VIEW v AS SELECT good AS bad__ FROM t; CREATE VIEW w AS SELECT 1 + 1 AS bad__";
        let (_folder, connection) = damaged(sql, |bytes| {
            for at in 0..bytes.len() - 5 {
                if &bytes[at..at + 5] == b"bad__" {
                    bytes[at + 3..at + 5].copy_from_slice(b"\xFF\xFE");
                }
            }
        });
        // Refused by the authorizer already, as something that cannot be told to be reading.
        for sql in ["SELECT * FROM t", "SELECT * FROM v", "SELECT * FROM (SELECT * FROM w)"] {
            assert_eq!(kind(&connection, sql), QueryErrorKind::Sql, "{sql}");
        }
        let result = connection.query("SELECT good FROM t", &Limits::default()).unwrap();
        assert_eq!(
            (result.columns, result.rows),
            (vec!["column 1".to_owned()], vec![vec![Value::Integer(1)]])
        );
    }

    #[test]
    fn the_byte_cap_counts_rows_and_values() {
        let (_folder, connection) = sample();
        let limits = Limits {
            bytes: 10_000,
            ..Limits::default()
        };
        let rows = |count: u32| {
            format!("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {count}) SELECT NULL FROM n")
        };
        assert!(connection.query(&rows(175), &limits).is_ok());
        let error = connection.query(&rows(176), &limits).unwrap_err();
        assert_eq!(
            (error.kind, error.message.as_str()),
            (QueryErrorKind::TooLarge, "a result of more than 10000 bytes")
        );
    }

    #[test]
    fn rows_can_be_folded_without_being_kept() {
        let (_folder, connection) = sample();
        let sql = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 10) SELECT i, 1 FROM n";
        let add = |sum: &mut i64, row: &[Value]| match row {
            [Value::Integer(number), Value::Integer(1)] => *sum += number,
            other => panic!("{other:?}"),
        };
        assert_eq!(connection.query_fold(sql, &Limits::default(), || 0, add).unwrap().0, 55);
        assert_eq!(connection.query_fold("--", &Limits::default(), || 7, add).unwrap().0, 7);
    }
}
