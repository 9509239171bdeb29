//! The open databases of one thread.

use std::cell::Cell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::deadline::Deadline;
use super::memory;
use super::{QueryError, SqliteConnection};

/// Open databases a thread keeps: each holds its schema and up to 2 MiB of pages.
const MAX_OPEN: usize = 16;
/// How long a second try to open a file waits for the queries that run.
const OPENING: Duration = Duration::from_secs(30);

/// Connections by file; the one unused for longest gives way.
#[derive(Debug, Default)]
pub struct Connections {
    /// Each with the number of its last use.
    open: HashMap<PathBuf, (Cell<u64>, SqliteConnection)>,
    /// Uses so far.
    uses: u64,
    /// When the thread's query must end.
    deadline: Deadline,
}

impl Connections {
    /// The connection to a file, opened at its first use.
    ///
    /// # Errors
    /// As [`SqliteConnection::open`].
    pub fn get(&mut self, path: &Path) -> Result<&SqliteConnection, QueryError> {
        self.uses += 1;
        if !self.open.contains_key(path) {
            let connection = SqliteConnection::open_with(path, self.deadline()).or_else(|error| {
                if !error.message.contains("out of memory") {
                    return Err(error);
                }
                // Another query may have had all the memory.
                let _alone = memory::alone(OPENING);
                SqliteConnection::open_with(path, self.deadline())
            })?;
            if self.open.len() >= MAX_OPEN
                && let Some(oldest) = self.open.iter().min_by_key(|(_, (used, _))| used.get())
            {
                let oldest = oldest.0.clone();
                self.open.remove(&oldest);
            }
            self.open.insert(path.to_owned(), (Cell::default(), connection));
        }
        let (used, connection) = &self.open[path];
        used.set(self.uses);
        Ok(connection)
    }

    /// Tells when the query that runs on one of the connections must end.
    pub(super) fn deadline(&self) -> Deadline {
        self.deadline.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_unused_for_longest_gives_way() {
        let folder = tempfile::tempdir().unwrap();
        let path = |number: usize| folder.path().join(format!("{number}.sqlite"));
        let mut connections = Connections::default();
        for number in 0..=MAX_OPEN {
            rusqlite::Connection::open(path(number))
                .and_then(|writer| writer.execute_batch("CREATE TABLE t (a)"))
                .unwrap();
            connections.get(&path(number)).unwrap();
            connections.get(&path(0)).unwrap();
        }
        assert_eq!(connections.open.len(), MAX_OPEN);
        assert!(connections.open.contains_key(&path(0)));
        assert!(!connections.open.contains_key(&path(1)));
        assert!(connections.get(&path(MAX_OPEN + 1)).is_err());
    }
}
