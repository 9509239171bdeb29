//! How much memory SQLite may take, and who is blamed when it is used up.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rusqlite::Connection;

/// What SQLite may allocate in this process, all connections together: sorting and grouping happen in memory, so this
/// is what stops a query that would fill the machine before its time is up.
pub const HEAP_LIMIT_BYTES: i64 = 1 << 30;

/// Held shared while a query runs, and alone by one that is tried again for want of memory: the limit is the process's,
/// so only a query that had all of it may be blamed for reaching it.
static MEMORY: RwLock<()> = RwLock::new(());

/// Held while a query runs.
pub fn shared() -> RwLockReadGuard<'static, ()> {
    MEMORY.read().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until no query runs, and lets none begin.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    MEMORY.write().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the limit, and has the connection sort and group in memory instead of in files, which nothing would limit. A
/// limit can only be lowered: setting it again with each connection changes nothing.
pub fn limit(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch("PRAGMA temp_store = MEMORY")?;
    connection.pragma_update_and_check(None, "hard_heap_limit", HEAP_LIMIT_BYTES, |_| Ok(()))
}

#[cfg(test)]
mod tests {
    use crate::engine::{Limits, QueryErrorKind, SqliteConnection};

    /// The limit is the process's, so it is tried in a process of its own, where no other test is hit by it.
    #[test]
    fn a_query_that_fills_the_memory_fails_alone() {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "engine::memory::tests::fills_the_memory", "--ignored"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    #[ignore = "takes the whole heap that SQLite may use; run by the test above, in a process of its own"]
    fn fills_the_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sample.sqlite");
        rusqlite::Connection::open(&path)
            .and_then(|writer| writer.execute_batch("CREATE TABLE t (a)"))
            .unwrap();
        let sorted = |bytes: u32| {
            format!(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 400)
                SELECT count(*) FROM (SELECT i, zeroblob({bytes}) AS z FROM n ORDER BY z, i)"
            )
        };
        let (greedy, modest) = (sorted(5_000_000), sorted(50_000));
        let (connection, other) = (
            SqliteConnection::open(&path).unwrap(),
            SqliteConnection::open(&path).unwrap(),
        );
        std::thread::scope(|scope| {
            let others = scope.spawn(|| {
                let other = other;
                (0..100).all(|_| other.query(&modest, &Limits::default()).is_ok())
            });
            let error = connection.query(&greedy, &Limits::default()).unwrap_err();
            assert_eq!(
                (error.kind, error.message.as_str()),
                (QueryErrorKind::TooLarge, "needs more than 1024 MiB of memory")
            );
            assert!(connection.query(&modest, &Limits::default()).is_ok());
            assert!(others.join().unwrap());
        });
    }
}
