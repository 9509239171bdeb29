//! Reads a SQLite database's own account of itself.

use std::path::Path;

use rusqlite::Connection;
use rusqlite::types::ValueRef;

use super::{Column, ForeignKey, Schema, Table};
use crate::engine::{QueryError, QueryErrorKind, Value, open_trusted};
use crate::sql::text::quote_identifier;

/// Longest cell that is read for a sample row; renderings cut further.
const SAMPLE_BYTES: usize = 4096;

/// Tables, views, columns, keys and `sample_rows` rows a table.
///
/// # Errors
/// Where the file cannot be opened or read.
pub fn introspect(path: &Path, sample_rows: u32) -> Result<Schema, QueryError> {
    let connection = open_trusted(path)?;
    let fail = |error: rusqlite::Error| QueryError {
        kind: QueryErrorKind::Database,
        message: format!("database {}: {error}", path.display()),
        offset: None,
    };
    let names: Vec<(String, bool)> = connection
        .prepare(
            "SELECT name, type = 'view' FROM sqlite_schema WHERE type IN ('table', 'view') \
             AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY type, rowid",
        )
        .and_then(|mut statement| statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect())
        .map_err(fail)?;
    let mut tables = Vec::with_capacity(names.len());
    for (name, is_view) in names {
        // A view over something that is gone cannot be read, and is no use in a prompt.
        match read_table(&connection, &name, is_view, sample_rows) {
            Ok(table) => tables.push(table),
            Err(_) if is_view => {}
            Err(error) => return Err(fail(error)),
        }
    }
    Ok(Schema { tables })
}

fn read_table(connection: &Connection, name: &str, is_view: bool, sample_rows: u32) -> rusqlite::Result<Table> {
    let columns: Vec<Column> = connection
        .prepare("SELECT name, type, \"notnull\", pk FROM pragma_table_info(?1) ORDER BY cid")?
        .query_map([name], |row| {
            Ok(Column {
                name: row.get(0)?,
                declared_type: row.get(1)?,
                not_null: row.get(2)?,
                primary_key: row.get(3)?,
                description: None,
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    let mut foreign_keys: Vec<(i64, ForeignKey)> = Vec::new();
    let mut statement = connection
        .prepare("SELECT id, \"table\", \"from\", \"to\" FROM pragma_foreign_key_list(?1) ORDER BY id DESC, seq")?;
    let mut rows = statement.query([name])?;
    while let Some(row) = rows.next()? {
        let (id, table, from, to): (i64, String, String, Option<String>) =
            (row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?);
        match foreign_keys.last_mut() {
            Some((last, key)) if *last == id => {
                key.columns.push(from);
                key.referenced.extend(to);
            }
            _ => foreign_keys.push((
                id,
                ForeignKey {
                    columns: vec![from],
                    table,
                    referenced: to.into_iter().collect(),
                },
            )),
        }
    }
    let sample_rows = if sample_rows == 0 || is_view {
        Vec::new()
    } else {
        sample(connection, name, &columns, sample_rows)?
    };
    Ok(Table {
        name: name.to_owned(),
        is_view,
        columns,
        foreign_keys: foreign_keys.into_iter().map(|(_, key)| key).collect(),
        sample_rows,
    })
}

fn sample(connection: &Connection, table: &str, columns: &[Column], count: u32) -> rusqlite::Result<Vec<Vec<Value>>> {
    let table = quote_identifier(table);
    let mut rows = Vec::new();
    let mut statement = connection.prepare(&format!("SELECT * FROM {table} LIMIT {count}"))?;
    let mut cursor = statement.query([])?;
    while let Some(row) = cursor.next()? {
        let values = (0..columns.len())
            .map(|index| {
                Ok(match row.get_ref(index)? {
                    ValueRef::Null => Value::Null,
                    ValueRef::Integer(number) => Value::Integer(number),
                    ValueRef::Real(number) => Value::Real(number),
                    ValueRef::Text(bytes) => Value::Text(cut_text(bytes)),
                    // Only its length is shown.
                    ValueRef::Blob(bytes) => Value::Blob(vec![0; bytes.len().min(SAMPLE_BYTES)]),
                })
            })
            .collect::<rusqlite::Result<Vec<_>>>()?;
        rows.push(values);
    }
    Ok(rows)
}

/// A prompt never needs more of a cell, and a cell may hold megabytes.
fn cut_text(bytes: &[u8]) -> String {
    let mut text = String::from_utf8_lossy(&bytes[..bytes.len().min(SAMPLE_BYTES)]).into_owned();
    if bytes.len() > SAMPLE_BYTES {
        text.push('…');
    }
    text
}
