//! Looks at a database for `dataset check`: does it open, is it sound, what is in it.

use std::path::Path;
use std::sync::Mutex;

use super::{Connections, QueryErrorKind, open_trusted};
use crate::dataset::{DatabaseProbe, ProbeInfo};
use crate::sql::text::quote_identifier;

/// SQLite's answer to `dataset check`.
#[derive(Debug, Default)]
pub struct SqliteProbe {
    connections: Mutex<Connections>,
}

impl DatabaseProbe for SqliteProbe {
    fn open_and_check(&self, path: &Path) -> Result<ProbeInfo, String> {
        let connection = open_trusted(path).map_err(|error| error.message)?;
        let report: String = connection
            .query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))
            .map_err(|error| error.to_string())?;
        if report != "ok" {
            return Err(format!("integrity check: {report}"));
        }
        let names: Vec<String> = connection
            .prepare("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY name")
            .and_then(|mut statement| statement.query_map([], |row| row.get(0))?.collect())
            .map_err(|error| error.to_string())?;
        let mut tables = Vec::with_capacity(names.len());
        for name in names {
            let count: i64 = connection
                .query_row(
                    &format!("SELECT count(*) FROM {}", quote_identifier(&name)),
                    [],
                    |row| row.get(0),
                )
                .map_err(|error| format!("table `{name}`: {error}"))?;
            tables.push((name, u64::try_from(count).unwrap_or(0)));
        }
        let size_bytes = std::fs::metadata(path).map_err(|error| error.to_string())?.len();
        Ok(ProbeInfo { size_bytes, tables })
    }

    fn prepare(&self, path: &Path, sql: &str) -> Result<(), String> {
        let mut connections = self
            .connections
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let prepared = connections.get(path).and_then(|connection| connection.prepare(sql));
        prepared.map_err(|error| match error.kind {
            QueryErrorKind::NotReadOnly => format!("not read-only: {}", error.message),
            _ => error.message,
        })
    }
}
