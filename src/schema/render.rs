//! Renderings of a schema: `ddl`, `compact` (as DIN-SQL on Spider), `table`.

use std::fmt::Write;

use super::{ForeignKey, Schema, Table};
use crate::config::pipeline::{SchemaFormat, SchemaSpec};
use crate::dataset::ColumnDescription;
use crate::engine::Value;
use crate::sql::text::quote_if_needed;

/// Characters of one column's description that a prompt shows.
const MAX_DESCRIPTION: usize = 200;

/// The schema's text in the asked form; ends without a newline.
pub fn render(schema: &Schema, spec: &SchemaSpec) -> String {
    let mut out = String::new();
    match spec.format {
        SchemaFormat::Ddl => {
            for table in &schema.tables {
                ddl(table, &mut out);
                samples(table, spec, &mut out);
                out.push('\n');
            }
        }
        SchemaFormat::Table => {
            for table in &schema.tables {
                one_line(table, &mut out);
                describe_columns(table, &mut out);
                samples(table, spec, &mut out);
            }
        }
        SchemaFormat::Compact => compact(schema, spec, &mut out),
    }
    out.truncate(out.trim_end().len());
    out
}

fn ddl(table: &Table, out: &mut String) {
    let kind = if table.is_view { "VIEW" } else { "TABLE" };
    let _ = writeln!(out, "CREATE {kind} {} (", quote_if_needed(&table.name));
    let key: Vec<&str> = primary_key(table);
    let mut lines: Vec<(String, Option<&str>)> = Vec::new();
    for column in &table.columns {
        let mut line = quote_if_needed(&column.name);
        if !column.declared_type.is_empty() {
            let _ = write!(line, " {}", column.declared_type);
        }
        if key.len() == 1 && column.primary_key > 0 {
            line.push_str(" PRIMARY KEY");
        } else if column.not_null {
            line.push_str(" NOT NULL");
        }
        for reference in table
            .foreign_keys
            .iter()
            .filter(|key| key.columns.len() == 1 && key.columns[0] == column.name)
        {
            let _ = write!(line, " REFERENCES {}", target(reference));
        }
        lines.push((line, column.description.as_deref()));
    }
    if key.len() > 1 {
        lines.push((format!("PRIMARY KEY ({})", names(&key)), None));
    }
    for reference in table.foreign_keys.iter().filter(|key| key.columns.len() > 1) {
        let columns: Vec<&str> = reference.columns.iter().map(String::as_str).collect();
        lines.push((
            format!("FOREIGN KEY ({}) REFERENCES {}", names(&columns), target(reference)),
            None,
        ));
    }
    let last = lines.len().saturating_sub(1);
    for (index, (line, description)) in lines.iter().enumerate() {
        let comma = if index == last { "" } else { "," };
        let comment = description.map(|text| format!(" -- {text}")).unwrap_or_default();
        let _ = writeln!(out, "  {line}{comma}{comment}");
    }
    out.push_str(");\n");
}

fn one_line(table: &Table, out: &mut String) {
    let key = primary_key(table);
    let columns: Vec<String> = table
        .columns
        .iter()
        .map(|column| {
            let mut text = quote_if_needed(&column.name);
            if !column.declared_type.is_empty() {
                let _ = write!(text, " {}", column.declared_type);
            }
            if key.contains(&column.name.as_str()) {
                text.push_str(" PRIMARY KEY");
            }
            for reference in table
                .foreign_keys
                .iter()
                .filter(|key| key.columns.contains(&column.name))
            {
                let place = reference
                    .columns
                    .iter()
                    .position(|name| *name == column.name)
                    .unwrap_or(0);
                let _ = write!(text, " -> {}", quote_if_needed(&reference.table));
                if let Some(referenced) = reference.referenced.get(place) {
                    let _ = write!(text, ".{}", quote_if_needed(referenced));
                }
            }
            text
        })
        .collect();
    let _ = writeln!(out, "{}({})", quote_if_needed(&table.name), columns.join(", "));
}

fn describe_columns(table: &Table, out: &mut String) {
    for column in &table.columns {
        if let Some(description) = &column.description {
            let _ = writeln!(out, "-- {}: {description}", quote_if_needed(&column.name));
        }
    }
}

fn compact(schema: &Schema, spec: &SchemaSpec, out: &mut String) {
    for table in &schema.tables {
        let columns: Vec<String> = std::iter::once("*".to_owned())
            .chain(table.columns.iter().map(|column| quote_if_needed(&column.name)))
            .collect();
        let _ = writeln!(
            out,
            "Table {}, columns = [{}]",
            quote_if_needed(&table.name),
            columns.join(",")
        );
        describe_columns(table, out);
        samples(table, spec, out);
    }
    let mut links = Vec::new();
    for table in &schema.tables {
        for key in &table.foreign_keys {
            for (index, column) in key.columns.iter().enumerate() {
                if let Some(referenced) = referenced_column(schema, key, index) {
                    links.push(format!(
                        "{}.{} = {}.{}",
                        quote_if_needed(&table.name),
                        quote_if_needed(column),
                        quote_if_needed(&key.table),
                        quote_if_needed(&referenced)
                    ));
                }
            }
        }
    }
    let _ = writeln!(out, "Foreign_keys = [{}]", links.join(", "));
    let keys: Vec<String> = schema
        .tables
        .iter()
        .flat_map(|table| {
            primary_key(table)
                .into_iter()
                .map(|column| format!("{}.{}", quote_if_needed(&table.name), quote_if_needed(column)))
        })
        .collect();
    let _ = writeln!(out, "Primary_keys = [{}]", keys.join(", "));
}

/// The referenced column; where the declaration names none, the other table's primary key.
fn referenced_column(schema: &Schema, key: &ForeignKey, index: usize) -> Option<String> {
    if let Some(name) = key.referenced.get(index) {
        return Some(name.clone());
    }
    let table = schema
        .tables
        .iter()
        .find(|table| table.name.eq_ignore_ascii_case(&key.table))?;
    primary_key(table).get(index).map(|&name| name.to_owned())
}

fn samples(table: &Table, spec: &SchemaSpec, out: &mut String) {
    if table.sample_rows.is_empty() {
        return;
    }
    let count = table.sample_rows.len();
    let columns: Vec<&str> = table.columns.iter().map(|column| column.name.as_str()).collect();
    let _ = writeln!(
        out,
        "-- {count} sample row{}: ({})",
        if count == 1 { "" } else { "s" },
        columns.join(", ")
    );
    for row in &table.sample_rows {
        let cells: Vec<String> = row.iter().map(|value| cell(value, spec.max_cell as usize)).collect();
        let _ = writeln!(out, "-- ({})", cells.join(", "));
    }
}

/// A cell as a SQL literal on one line; a long one cut, visibly.
fn cell(value: &Value, max: usize) -> String {
    match value {
        Value::Null => "NULL".into(),
        Value::Integer(number) => number.to_string(),
        Value::Real(number) => number.to_string(),
        Value::Blob(bytes) => format!("<blob of {} bytes>", bytes.len()),
        Value::Text(text) => {
            let flat: String = text
                .chars()
                .map(|letter| if letter.is_control() { ' ' } else { letter })
                .collect();
            let length = flat.chars().count();
            if length <= max {
                format!("'{}'", flat.replace('\'', "''"))
            } else {
                let shown: String = flat.chars().take(max).collect();
                format!(
                    "'{}…' /* {} more characters */",
                    shown.replace('\'', "''"),
                    length - max
                )
            }
        }
    }
}

/// One line out of BIRD's description of a column; `None` where it adds nothing to the name.
pub(super) fn describe(column: &str, description: &ColumnDescription) -> Option<String> {
    let fold = |text: &str| -> String {
        text.chars()
            .filter(|letter| letter.is_alphanumeric())
            .flat_map(char::to_lowercase)
            .collect()
    };
    let mut parts: Vec<String> = Vec::new();
    for part in [
        &description.name,
        &description.description,
        &description.value_description,
    ] {
        let text = part.split_whitespace().collect::<Vec<_>>().join(" ");
        let folded = fold(&text);
        if folded.is_empty() || folded == fold(column) || parts.iter().any(|earlier| fold(earlier) == folded) {
            continue;
        }
        parts.push(text);
    }
    if parts.is_empty() {
        return None;
    }
    let text = parts.join("; ");
    if text.chars().count() <= MAX_DESCRIPTION {
        return Some(text);
    }
    let shown: String = text.chars().take(MAX_DESCRIPTION).collect();
    Some(format!("{shown}…"))
}

fn primary_key(table: &Table) -> Vec<&str> {
    let mut key: Vec<_> = table.columns.iter().filter(|column| column.primary_key > 0).collect();
    key.sort_by_key(|column| column.primary_key);
    key.into_iter().map(|column| column.name.as_str()).collect()
}

fn target(key: &ForeignKey) -> String {
    let mut text = quote_if_needed(&key.table);
    if !key.referenced.is_empty() {
        let columns: Vec<&str> = key.referenced.iter().map(String::as_str).collect();
        let _ = write!(text, "({})", names(&columns));
    }
    text
}

fn names(columns: &[&str]) -> String {
    columns
        .iter()
        .map(|name| quote_if_needed(name))
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::introspect;

    fn database() -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("library.sqlite");
        rusqlite::Connection::open(&path)
            .unwrap()
            .execute_batch(
                "CREATE TABLE author (id INTEGER PRIMARY KEY, \"full name\" TEXT NOT NULL, photo BLOB);
                 CREATE TABLE book (id INTEGER PRIMARY KEY, title TEXT, author_id INTEGER REFERENCES author, price REAL);
                 CREATE TABLE loan (book_id INTEGER REFERENCES book(id), day TEXT, PRIMARY KEY (book_id, day));
                 CREATE VIEW cheap AS SELECT title FROM book WHERE price < 5;
                 CREATE VIEW broken AS SELECT a FROM nowhere;
                 INSERT INTO author VALUES (1, 'Yaşar ''Kemal''', x'00ff'), (2, 'B' || char(10) || 'b', NULL);
                 INSERT INTO book VALUES (1, 'İnce Memed', 1, 9.5), (2, printf('%.*c', 100, 'x'), 2, 1);",
            )
            .unwrap();
        (folder, path)
    }

    fn text(format: SchemaFormat) -> String {
        let (_folder, path) = database();
        let spec = SchemaSpec {
            format,
            sample_rows: 2,
            descriptions: true,
            max_cell: 20,
        };
        render(&introspect(&path, 2).unwrap(), &spec)
    }

    #[test]
    fn ddl_shows_types_keys_and_rows() {
        insta::assert_snapshot!(text(SchemaFormat::Ddl), @r#"
        CREATE TABLE author (
          id INTEGER PRIMARY KEY,
          "full name" TEXT NOT NULL,
          photo BLOB
        );
        -- 2 sample rows: (id, full name, photo)
        -- (1, 'Yaşar ''Kemal''', <blob of 2 bytes>)
        -- (2, 'B b', NULL)

        CREATE TABLE book (
          id INTEGER PRIMARY KEY,
          title TEXT,
          author_id INTEGER REFERENCES author,
          price REAL
        );
        -- 2 sample rows: (id, title, author_id, price)
        -- (1, 'İnce Memed', 1, 9.5)
        -- (2, 'xxxxxxxxxxxxxxxxxxxx…' /* 80 more characters */, 2, 1)

        CREATE TABLE loan (
          book_id INTEGER REFERENCES book(id),
          day TEXT,
          PRIMARY KEY (book_id, day)
        );

        CREATE VIEW cheap (
          title TEXT
        );
        "#);
    }

    #[test]
    fn compact_is_spiders_form() {
        let text = text(SchemaFormat::Compact);
        assert!(
            text.contains("Table author, columns = [*,id,\"full name\",photo]"),
            "{text}"
        );
        assert!(
            text.contains("Foreign_keys = [book.author_id = author.id, loan.book_id = book.id]"),
            "{text}"
        );
        assert!(
            text.ends_with("Primary_keys = [author.id, book.id, loan.book_id, loan.day]"),
            "{text}"
        );
    }

    #[test]
    fn table_is_a_line_a_table() {
        let text = text(SchemaFormat::Table);
        assert!(
            text.contains("book(id INTEGER PRIMARY KEY, title TEXT, author_id INTEGER -> author, price REAL)"),
            "{text}"
        );
    }

    #[test]
    fn descriptions_add_only_what_the_name_does_not_say() {
        let description = |name: &str, text: &str, values: &str| ColumnDescription {
            original_name: "superhero_name".into(),
            name: name.into(),
            description: text.into(),
            data_format: "text".into(),
            value_description: values.into(),
        };
        assert_eq!(describe("superhero_name", &description("superhero name", "", "")), None);
        assert_eq!(
            describe(
                "superhero_name",
                &description("superhero name", "the name of\r\nthe hero", "commonsense: x")
            ),
            Some("the name of the hero; commonsense: x".into())
        );
    }
}
