//! Opens database files for reading.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use super::{QueryError, QueryErrorKind};

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
