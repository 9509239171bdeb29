//! BIRD's column descriptions: `database_description/<table>.csv`, as people saved them.
//!
//! In: a folder. Out: one [`TableDescription`] a table, ordered by name, with a warning for whatever had to be guessed.
//! Byte-order marks, CRLF, Windows-1252, stray columns and blank rows all occur in the published files.

use std::path::Path;

use serde::Serialize;

use super::error::{DatasetError, quoted};
use super::text::nfc;

/// What is said of one column.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ColumnDescription {
    /// The column's name in the database, as written.
    pub original_name: String,
    /// A readable name.
    pub name: String,
    pub description: String,
    pub data_format: String,
    pub value_description: String,
}

/// The descriptions of a table's columns, in file order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TableDescription {
    pub table: String,
    pub columns: Vec<ColumnDescription>,
    /// What was wrong and how it was read anyway.
    pub warnings: Vec<String>,
}

const COLUMNS: [&str; 5] = [
    "original_column_name",
    "column_name",
    "column_description",
    "data_format",
    "value_description",
];

/// Reads every CSV file of a `database_description` folder.
pub fn load_descriptions(folder: &Path) -> Result<Vec<TableDescription>, DatasetError> {
    let fault = |path: &Path, source| DatasetError::Read {
        path: path.to_owned(),
        source,
    };
    let mut tables = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|source| fault(folder, source))? {
        let path = entry.map_err(|source| fault(folder, source))?.path();
        let is_csv = path
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("csv"));
        let Some(stem) = path
            .file_stem()
            .map(|stem| stem.to_string_lossy().into_owned())
            .filter(|_| is_csv)
        else {
            continue;
        };
        // `._table.csv` and the like are a system's own notes.
        if stem.starts_with('.') {
            continue;
        }
        let bytes = std::fs::read(&path).map_err(|source| fault(&path, source))?;
        tables.push(parse(&stem, &bytes));
    }
    tables.sort_by(|one, other| one.table.cmp(&other.table));
    Ok(tables)
}

/// Reads one table's file; any bytes give a result.
#[must_use]
pub fn parse(table: &str, bytes: &[u8]) -> TableDescription {
    let mut warnings = Vec::new();
    let text = decode(bytes, &mut warnings);
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .from_reader(text.as_bytes());
    let mut rows: Vec<(u64, Vec<String>)> = Vec::new();
    for record in reader.records() {
        match record {
            Ok(record) => {
                let line = record.position().map_or(0, csv::Position::line);
                rows.push((line, record.iter().map(tidy).collect()));
            }
            Err(error) => warnings.push(format!("a row was left out: {error}")),
        }
    }
    rows.retain(|(_, row)| row.iter().any(|cell| !cell.is_empty()));
    let mut places: Vec<Option<usize>> = (0..COLUMNS.len()).map(Some).collect();
    if rows
        .first()
        .is_some_and(|(_, row)| row.iter().any(|cell| known_column(cell).is_some()))
    {
        let (_, header) = rows.remove(0);
        places = header.iter().map(|cell| known_column(cell)).collect();
        let strange: Vec<&String> = header
            .iter()
            .filter(|cell| !cell.is_empty() && known_column(cell).is_none())
            .collect();
        if !strange.is_empty() {
            warnings.push(format!(
                "unknown columns {} were added to the value descriptions",
                quoted(&strange)
            ));
        }
        if !places.contains(&Some(0)) {
            warnings.push("no column `original_column_name`; the first column was taken for it".to_owned());
            if let Some(first) = places.first_mut() {
                *first = Some(0);
            }
        }
    } else if !rows.is_empty() {
        warnings.push("no header row; columns were taken in the usual order".to_owned());
    }
    let mut columns: Vec<ColumnDescription> = Vec::new();
    for (line, row) in rows {
        let mut column = ColumnDescription::default();
        let mut stray = Vec::new();
        for (index, cell) in row.into_iter().enumerate() {
            match places.get(index).copied().flatten() {
                Some(0) => column.original_name = cell,
                Some(1) => column.name = nfc(&cell),
                Some(2) => column.description = nfc(&cell),
                Some(3) => column.data_format = nfc(&cell),
                Some(_) => column.value_description = nfc(&cell),
                None if cell.is_empty() => {}
                None => stray.push(nfc(&cell)),
            }
        }
        if !stray.is_empty() {
            warnings.push(format!(
                "line {line}: cells beyond the known columns were added to the value description"
            ));
            append(&mut column.value_description, &stray.join(", "));
        }
        match columns.last_mut().filter(|_| column.original_name.is_empty()) {
            // Text without a column's name continues the column above: a line break that nobody quoted.
            Some(last) => {
                warnings.push(format!(
                    "line {line}: a row without a column's name was added to the row above"
                ));
                for text in [
                    column.name,
                    column.description,
                    column.data_format,
                    column.value_description,
                ] {
                    append(&mut last.value_description, &text);
                }
            }
            None => columns.push(column),
        }
    }
    if columns.is_empty() {
        warnings.push("no column is described".to_owned());
    }
    TableDescription {
        table: table.to_owned(),
        columns,
        warnings,
    }
}

fn decode(bytes: &[u8], warnings: &mut Vec<String>) -> String {
    if let Some((encoding, mark)) = encoding_rs::Encoding::for_bom(bytes) {
        let (text, replaced) = encoding.decode_without_bom_handling(&bytes[mark..]);
        if !replaced {
            return text.into_owned();
        }
    } else if let Ok(text) = std::str::from_utf8(bytes) {
        return text.to_owned();
    }
    warnings.push("not UTF-8; read as Windows-1252".to_owned());
    let start = if bytes.starts_with(b"\xEF\xBB\xBF") { 3 } else { 0 };
    encoding_rs::WINDOWS_1252
        .decode_without_bom_handling(&bytes[start..])
        .0
        .into_owned()
}

fn tidy(cell: &str) -> String {
    cell.replace("\r\n", "\n").replace(['\r', '\0'], "\n").trim().to_owned()
}

fn known_column(header: &str) -> Option<usize> {
    let name = header
        .to_lowercase()
        .split([' ', '_', '-'])
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join("_");
    COLUMNS.iter().position(|column| *column == name)
}

fn append(text: &mut String, more: &str) {
    if more.is_empty() {
        return;
    }
    if !text.is_empty() {
        text.push('\n');
    }
    text.push_str(more);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn marks_line_ends_and_stray_columns_are_read() {
        let bytes =
            b"\xEF\xBB\xBFOriginal Column Name,column_name ,COLUMN_DESCRIPTION,data format,value_description,\r\n\
            \r\n,,,,,\r\n id ,ID,\"two\r\nlines\",integer,a,\r\nname,,,text,\"1, 2\",more\r\n";
        let table = parse("t", bytes);
        assert_eq!(table.columns.len(), 2);
        assert_eq!(table.columns[0].original_name, "id");
        assert_eq!(table.columns[0].description, "two\nlines");
        assert_eq!(table.columns[1].value_description, "1, 2\nmore");
        assert_eq!(table.warnings.len(), 1);
    }

    #[test]
    fn windows_1252_is_read_with_a_warning() {
        let table = parse("t", b"original_column_name,column_description\na,x \x96 y\n");
        assert_eq!(table.columns[0].description, "x \u{2013} y");
        assert_eq!(table.warnings, ["not UTF-8; read as Windows-1252"]);
    }

    #[test]
    fn a_missing_header_and_a_broken_row_lose_nothing() {
        let table = parse("t", b"a,b,c,d,e\n,,more,,\n");
        assert_eq!(table.columns.len(), 1);
        assert_eq!(table.columns[0].value_description, "e\nmore");
        assert_eq!(table.warnings.len(), 2);
        assert_eq!(parse("t", b"").warnings, ["no column is described"]);
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_table(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let table = parse("t", &bytes);
            prop_assert!(!table.columns.is_empty() || !table.warnings.is_empty());
        }
    }
}
