//! How much memory SQLite may take, and who is blamed when it is used up.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::Connection;

/// What SQLite may allocate in this process, all connections together: sorting and grouping happen in memory, so this
/// is what stops a query that would fill the machine before its time is up.
pub const HEAP_LIMIT_BYTES: i64 = 1 << 30;

/// Who uses the memory: queries beside each other, or one that is tried again for want of memory. The limit is the
/// process's, so only a query that had all of it may be blamed for reaching it.
#[derive(Debug, Default)]
struct Users {
    beside: usize,
    /// How many are alone or wait to be.
    alone: usize,
    is_taken: bool,
}

static USERS: Mutex<Users> = Mutex::new(Users {
    beside: 0,
    alone: 0,
    is_taken: false,
});
static CHANGED: Condvar = Condvar::new();

/// Held while a query runs.
#[derive(Debug)]
pub struct Shared(());

/// Held while a query runs alone.
#[derive(Debug)]
pub struct Alone(());

/// Waits until no query is alone or wants to be.
pub fn shared() -> Shared {
    let waited = CHANGED.wait_while(users(), |users| users.alone > 0);
    waited.unwrap_or_else(PoisonError::into_inner).beside += 1;
    Shared(())
}

/// Lets no query begin, and waits until none runs, but for those that still do after `patience`: with more than the
/// longest time limit, these are ones that nothing can stop.
pub fn alone(patience: Duration) -> Alone {
    let mut users = users();
    users.alone += 1;
    let waited = CHANGED.wait_while(users, |users| users.is_taken);
    users = waited.unwrap_or_else(PoisonError::into_inner);
    users.is_taken = true;
    let waited = CHANGED.wait_timeout_while(users, patience, |users| users.beside > 0);
    drop(waited.unwrap_or_else(PoisonError::into_inner).0);
    Alone(())
}

impl Drop for Shared {
    fn drop(&mut self) {
        let mut users = users();
        users.beside -= 1;
        if users.beside == 0 && users.alone > 0 {
            CHANGED.notify_all();
        }
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        let mut users = users();
        users.alone -= 1;
        users.is_taken = false;
        CHANGED.notify_all();
    }
}

fn users() -> MutexGuard<'static, Users> {
    USERS.lock().unwrap_or_else(PoisonError::into_inner)
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
