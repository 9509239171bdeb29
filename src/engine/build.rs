//! Makes a database file from a checked-in SQL text: our own sample data, never a model's.

use std::path::{Path, PathBuf};

use rusqlite::Connection;

use super::{QueryError, QueryErrorKind};

/// Runs the text into a new database under `folder`, named by the text's digest, and returns its path. A text that was
/// built before is not built again.
///
/// # Errors
/// Where the text cannot be read or run, or the folder not be written.
pub fn build_database(text: &Path, folder: &Path) -> Result<PathBuf, QueryError> {
    let fail = |reason: String| {
        QueryError::new(
            QueryErrorKind::Database,
            format!("cannot build {}: {reason}", text.display()),
        )
    };
    let sql = std::fs::read_to_string(text).map_err(|error| fail(error.to_string()))?;
    let digest = blake3::hash(sql.as_bytes()).to_hex();
    let name = text.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let home = folder.join(&digest[..16]);
    let path = home.join(format!("{name}.sqlite"));
    if path.is_file() {
        return Ok(path);
    }
    std::fs::create_dir_all(&home).map_err(|error| fail(error.to_string()))?;
    let unfinished = home.join(format!("{name}.{}.unfinished", std::process::id()));
    let _ = std::fs::remove_file(&unfinished);
    let connection = Connection::open(&unfinished).map_err(|error| fail(error.to_string()))?;
    connection
        .execute_batch(&sql)
        .map_err(|error| fail(error.to_string()))?;
    drop(connection);
    std::fs::rename(&unfinished, &path).map_err(|error| fail(error.to_string()))?;
    Ok(path)
}
