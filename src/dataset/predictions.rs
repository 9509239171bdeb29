//! Predictions made elsewhere: BIRD's JSON object, Spider's lines, JSONL.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value as Json;

use super::error::{DatasetError, Problem};
use super::{Example, text};

/// BIRD's separator between a query and its database.
const BIRD_SEPARATOR: &str = "\t----- bird -----\t";
/// Names under which files keep an example's id, and its query.
const ID_KEYS: &[&str] = &["id", "question_id", "spider_index", "example_id", "idx", "index"];
const SQL_KEYS: &[&str] = &["sql", "predicted_sql", "prediction", "pred", "query", "SQL"];

/// Predictions by example id; `None` where what stands there is not a text.
#[derive(Debug, Default)]
pub struct Predictions {
    pub sql: HashMap<String, Option<String>>,
    /// What a person should know of the file.
    pub notes: Vec<String>,
}

/// Reads a file of predictions for these examples (the whole split, in file order).
///
/// # Errors
/// Where the file cannot be read, is in none of the forms, or does not fit the examples.
pub fn read_predictions(path: &Path, examples: &[Example]) -> Result<Predictions, DatasetError> {
    let content = text::read(path)?;
    let trimmed = content.trim_start();
    let fail = |place: String, message: String| DatasetError::Malformed {
        path: path.to_owned(),
        problems: vec![Problem {
            code: "prediction",
            place,
            message,
        }],
        total: 1,
    };
    let by_extension = |wanted: &str| {
        path.extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case(wanted))
    };
    if by_extension("jsonl") || (trimmed.starts_with('{') && is_json_line(trimmed)) {
        return read_lines_of_json(&content, examples, &fail);
    }
    if trimmed.starts_with('{') || trimmed.starts_with('[') {
        let json: Json = serde_json::from_str(&content).map_err(|error| {
            fail(
                format!("line {}, column {}", error.line(), error.column()),
                format!("not valid JSON: {error}"),
            )
        })?;
        return match json {
            Json::Object(fields) => Ok(read_bird(fields.into_iter().collect(), examples)),
            Json::Array(items) => read_records(
                items
                    .into_iter()
                    .enumerate()
                    .map(|(at, item)| (format!("element {at}"), item)),
                examples,
                &fail,
            ),
            _ => Err(fail(String::new(), "expected an object or a list".into())),
        };
    }
    read_plain_lines(&content, examples, &fail)
}

type Fail<'a> = &'a dyn Fn(String, String) -> DatasetError;

/// Whether the first line alone is a JSON object with an id and a query: BIRD's object is not, even on one line.
fn is_json_line(content: &str) -> bool {
    let first = content.lines().next().unwrap_or_default();
    serde_json::from_str::<Json>(first)
        .is_ok_and(|json| find(&json, ID_KEYS).is_some() && find(&json, SQL_KEYS).is_some())
}

fn find<'a>(json: &'a Json, keys: &[&str]) -> Option<&'a Json> {
    keys.iter().find_map(|key| json.get(key))
}

fn read_lines_of_json(content: &str, examples: &[Example], fail: Fail<'_>) -> Result<Predictions, DatasetError> {
    let mut records = Vec::new();
    for (index, line) in content.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = format!("line {}", index + 1);
        let json: Json =
            serde_json::from_str(line).map_err(|error| fail(place.clone(), format!("not valid JSON: {error}")))?;
        records.push((place, json));
    }
    read_records(records.into_iter(), examples, fail)
}

fn read_records(
    records: impl Iterator<Item = (String, Json)>,
    examples: &[Example],
    fail: Fail<'_>,
) -> Result<Predictions, DatasetError> {
    let known: std::collections::HashSet<&str> = examples.iter().map(|example| example.id.as_str()).collect();
    let mut predictions = Predictions::default();
    let mut unknown = Vec::new();
    for (place, record) in records {
        let id = match find(&record, ID_KEYS) {
            Some(Json::String(id)) => id.clone(),
            Some(Json::Number(id)) => id.to_string(),
            _ => return Err(fail(place, format!("no id (looked for {})", ID_KEYS.join(", ")))),
        };
        let Some(sql) = find(&record, SQL_KEYS) else {
            return Err(fail(place, format!("no query (looked for {})", SQL_KEYS.join(", "))));
        };
        if !known.contains(id.as_str()) {
            unknown.push(id);
            continue;
        }
        if predictions
            .sql
            .insert(id.clone(), sql.as_str().map(str::to_owned))
            .is_some()
        {
            return Err(fail(place, format!("a second prediction for `{id}`")));
        }
    }
    if predictions.sql.is_empty() {
        let shown: Vec<&str> = unknown.iter().take(3).map(String::as_str).collect();
        return Err(fail(
            String::new(),
            format!("none of its ids is in the dataset (first ones: {})", shown.join(", ")),
        ));
    }
    if !unknown.is_empty() {
        predictions.notes.push(format!(
            "{} predictions are for examples that the dataset does not have",
            unknown.len()
        ));
    }
    Ok(predictions)
}

/// BIRD's object: a key is an example's place in the file, or its id; the databases named beside the queries tell which.
fn read_bird(fields: Vec<(String, Json)>, examples: &[Example]) -> Predictions {
    let by_id: HashMap<&str, &Example> = examples.iter().map(|example| (example.id.as_str(), example)).collect();
    let by_place: HashMap<String, &Example> = examples
        .iter()
        .map(|example| (example.position.to_string(), example))
        .collect();
    /// Key; query and named database, where it is a text.
    type Entry = (String, Option<(String, Option<String>)>);
    let split: Vec<Entry> = fields
        .into_iter()
        .map(|(key, value)| {
            let parts = value.as_str().map(|text| match text.split_once(BIRD_SEPARATOR) {
                Some((sql, database)) => (sql.to_owned(), Some(database.trim().to_owned())),
                None => (text.to_owned(), None),
            });
            (key, parts)
        })
        .collect();
    let fits = |find: &dyn Fn(&str) -> Option<String>| {
        split
            .iter()
            .filter(|(key, parts)| {
                let named = parts.as_ref().and_then(|(_, database)| database.as_deref());
                match (find(key), named) {
                    (Some(database), Some(named)) => database == named,
                    (found, None) => found.is_some(),
                    (None, Some(_)) => false,
                }
            })
            .count()
    };
    let id_database = |key: &str| by_id.get(key).map(|example| example.database.clone());
    let place_database = |key: &str| by_place.get(key).map(|example| example.database.clone());
    let use_ids = fits(&id_database) >= fits(&place_database);
    let mut predictions = Predictions::default();
    let (mut unknown, mut elsewhere) = (0, 0);
    for (key, parts) in split {
        let example = if use_ids {
            by_id.get(key.as_str())
        } else {
            by_place.get(&key)
        };
        let Some(example) = example else {
            unknown += 1;
            continue;
        };
        if parts
            .as_ref()
            .and_then(|(_, database)| database.as_ref())
            .is_some_and(|named| *named != example.database)
        {
            elsewhere += 1;
        }
        predictions.sql.insert(example.id.clone(), parts.map(|(sql, _)| sql));
    }
    if unknown > 0 {
        predictions.notes.push(format!(
            "{unknown} predictions are for examples that the dataset does not have"
        ));
    }
    if elsewhere > 0 {
        predictions.notes.push(format!(
            "{elsewhere} predictions name another database than their example"
        ));
    }
    predictions
}

/// Spider's form: line n is example n's query, its database after a tab at most.
fn read_plain_lines(content: &str, examples: &[Example], fail: Fail<'_>) -> Result<Predictions, DatasetError> {
    let mut lines: Vec<&str> = content
        .split('\n')
        .map(|line| line.strip_suffix('\r').unwrap_or(line))
        .collect();
    if lines.last().is_some_and(|line| line.is_empty()) {
        lines.pop();
    }
    if lines.len() != examples.len() {
        return Err(fail(
            String::new(),
            format!(
                "{} lines for {} examples; a file of one query a line needs one for each, blank where there is none",
                lines.len(),
                examples.len()
            ),
        ));
    }
    let mut predictions = Predictions::default();
    for (line, example) in lines.into_iter().zip(examples) {
        let sql = match line.rsplit_once('\t') {
            Some((sql, database)) if database.trim() == example.database => sql,
            _ => line,
        };
        predictions.sql.insert(example.id.clone(), Some(sql.to_owned()));
    }
    Ok(predictions)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn example(id: &str, position: usize, database: &str) -> Example {
        Example {
            id: id.into(),
            position,
            question: "q".into(),
            evidence: String::new(),
            database: database.into(),
            gold: vec!["SELECT 1".into()],
            language: "en".into(),
            difficulty: None,
            fields: BTreeMap::new(),
        }
    }

    fn read(name: &str, content: &str) -> Result<Predictions, DatasetError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        read_predictions(
            &path,
            &[example("7", 0, "a"), example("0", 1, "b"), example("9", 2, "a")],
        )
    }

    #[test]
    fn birds_keys_are_places_or_ids_as_their_databases_say() {
        let places = read(
            "p.json",
            r#"{"0": "SELECT 1\t----- bird -----\ta", "1": "SELECT 2\t----- bird -----\tb", "2": 5}"#,
        )
        .unwrap();
        assert_eq!(places.sql["7"].as_deref(), Some("SELECT 1"));
        assert_eq!(places.sql["9"], None);
        let ids = read(
            "p.json",
            r#"{"7": "SELECT 1\t----- bird -----\ta", "0": "SELECT 2\t----- bird -----\tb"}"#,
        )
        .unwrap();
        assert_eq!(ids.sql["0"].as_deref(), Some("SELECT 2"));
        assert!(!ids.sql.contains_key("9"));
    }

    #[test]
    fn lines_and_records() {
        let lines = read("p.sql", "SELECT 1\ta\nSELECT 'x\ty'\n\n").unwrap();
        assert_eq!(lines.sql["7"].as_deref(), Some("SELECT 1"));
        assert_eq!(lines.sql["0"].as_deref(), Some("SELECT 'x\ty'"));
        assert_eq!(lines.sql["9"].as_deref(), Some(""));
        assert!(
            read("p.sql", "SELECT 1\n")
                .unwrap_err()
                .to_string()
                .contains("1 lines for 3 examples")
        );
        let records = read("p.jsonl", "{\"question_id\": 7, \"predicted_sql\": \"SELECT 1\"}\n{\"id\": \"0\", \"sql\": null}\n{\"id\": 55, \"sql\": \"x\"}").unwrap();
        assert_eq!(
            (records.sql["7"].as_deref(), &records.sql["0"], records.notes.len()),
            (Some("SELECT 1"), &None, 1)
        );
        assert!(
            read("p.jsonl", "{\"id\": 7, \"sql\": \"a\"}\n{\"id\": 7, \"sql\": \"b\"}")
                .unwrap_err()
                .to_string()
                .contains("second prediction")
        );
        assert!(
            read("p.jsonl", "{\"id\": 7}")
                .unwrap_err()
                .to_string()
                .contains("no query")
        );
    }
}
