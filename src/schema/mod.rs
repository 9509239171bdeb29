//! A database's tables, columns, keys and sample rows, and their renderings for prompts.
//!
//! In: a database file, BIRD's column descriptions. Out: a [`Schema`] and, by [`SchemaSpec`], its text. Rendered texts are
//! cached per database by [`SchemaCache`], since every example of a database shares them.

mod introspect;
mod render;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

pub use introspect::introspect;
pub use render::render;

use crate::config::pipeline::SchemaSpec;
use crate::dataset::DatabaseRef;
use crate::dataset::load_descriptions;
use crate::engine::{QueryError, Value};

/// Tables and views in name order of the database file (creation order).
#[derive(Debug, Clone, PartialEq)]
pub struct Schema {
    pub tables: Vec<Table>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    pub name: String,
    pub is_view: bool,
    pub columns: Vec<Column>,
    pub foreign_keys: Vec<ForeignKey>,
    /// The first rows in storage order, at most as many as were asked for.
    pub sample_rows: Vec<Vec<Value>>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    pub name: String,
    /// As declared; may be empty.
    pub declared_type: String,
    pub not_null: bool,
    /// 1-based place in the primary key; 0 where it is no part of it.
    pub primary_key: u32,
    pub description: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ForeignKey {
    pub columns: Vec<String>,
    pub table: String,
    /// Empty where the declaration names none (the primary key is meant).
    pub referenced: Vec<String>,
}

/// Rendered schemas by database file and specification.
#[derive(Debug, Default)]
pub struct SchemaCache {
    rendered: Mutex<HashMap<(String, SchemaSpec), Arc<str>>>,
}

impl SchemaCache {
    /// The text of `{{ schema }}` for a database.
    ///
    /// # Errors
    /// Where the database cannot be read.
    pub fn text(&self, database: &DatabaseRef, spec: &SchemaSpec) -> Result<Arc<str>, QueryError> {
        let key = (database.path.display().to_string(), spec.clone());
        if let Some(text) = self.rendered.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(Arc::clone(text));
        }
        let schema = read(&database.path, database.descriptions.as_deref(), spec)?;
        let text: Arc<str> = render(&schema, spec).into();
        self.rendered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(key, Arc::clone(&text));
        Ok(text)
    }
}

fn read(path: &Path, descriptions: Option<&Path>, spec: &SchemaSpec) -> Result<Schema, QueryError> {
    let mut schema = introspect(path, spec.sample_rows)?;
    if spec.descriptions
        && let Some(folder) = descriptions
        && let Ok(tables) = load_descriptions(folder)
    {
        for described in tables {
            let Some(table) = schema
                .tables
                .iter_mut()
                .find(|table| table.name.eq_ignore_ascii_case(&described.table))
            else {
                continue;
            };
            for description in described.columns {
                let column = table.columns.iter_mut().find(|column| {
                    column
                        .name
                        .trim()
                        .eq_ignore_ascii_case(description.original_name.trim())
                });
                if let Some(column) = column {
                    column.description = render::describe(&column.name, &description);
                }
            }
        }
    }
    Ok(schema)
}
