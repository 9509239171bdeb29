//! Checking a dataset: everything missing, malformed, duplicated or unreadable, in one report.
//!
//! In: a source, and a [`DatabaseProbe`] that opens databases (this room does not). Out: [`CheckReport`], for people and
//! programs. A problem never hides the next one.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::descriptions::load_descriptions;
use super::digest::database_digest;
use super::error::{DatasetError, or_none, quoted};
use super::load::{LoadOptions, Loaded, read_examples};
use super::source::Source;
use super::text;
use super::{DatabaseRef, Dialect};

/// What opens databases for a check.
pub trait DatabaseProbe {
    /// Where the database really is: a database may be built elsewhere from a text beside its place.
    fn locate(&self, path: &Path) -> PathBuf {
        path.to_owned()
    }
    /// Opens the database and runs its integrity check; the error says what is wrong.
    fn open_and_check(&self, path: &Path) -> Result<ProbeInfo, String>;
    /// Whether the query prepares on the database; the error says why not.
    fn prepare(&self, path: &Path, sql: &str) -> Result<(), String>;
}

/// A sound database.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ProbeInfo {
    pub size_bytes: u64,
    /// Tables with their numbers of rows.
    pub tables: Vec<(String, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Scores would be wrong or impossible.
    Error,
    /// Worth knowing.
    Warning,
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckProblem {
    pub severity: Severity,
    /// For programs, as in `missing_database`.
    pub code: &'static str,
    /// File, record or database.
    #[serde(rename = "where")]
    pub place: String,
    pub message: String,
}

/// A database that the examples use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckedDatabase {
    pub id: String,
    pub path: PathBuf,
    pub examples: usize,
    pub size_bytes: Option<u64>,
    pub tables: Option<usize>,
    pub rows: Option<u64>,
    pub digest: Option<String>,
}

/// One language of the dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckedLanguage {
    pub language: String,
    pub questions: PathBuf,
    /// Records in the file.
    pub records: usize,
    /// Examples that are well-formed and let in.
    pub examples: usize,
    pub with_gold: usize,
    pub difficulties: BTreeMap<String, usize>,
    pub digest: String,
    pub databases: Vec<CheckedDatabase>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    pub name: String,
    pub split: String,
    pub examples: usize,
    pub errors: usize,
    pub warnings: usize,
    pub languages: Vec<CheckedLanguage>,
    /// Errors first.
    pub problems: Vec<CheckProblem>,
}

/// Checks a split in the language asked for, or in all the languages that the dataset declares.
pub fn check(source: &Source, options: &LoadOptions, probe: &dyn DatabaseProbe) -> CheckReport {
    let split = options.split.clone().unwrap_or_else(|| source.manifest.split.clone());
    let languages: Vec<Option<String>> = match (&options.language, source.manifest.language_codes(&split)) {
        (Some(language), _) => vec![Some(language.clone())],
        (None, codes) if codes.is_empty() => vec![None],
        (None, codes) => codes.into_iter().map(Some).collect(),
    };
    let mut checker = Checker {
        probe,
        problems: Vec::new(),
        probed: HashMap::new(),
        noted: BTreeSet::new(),
    };
    let mut checked = Vec::new();
    for language in languages {
        match read_examples(
            source,
            &LoadOptions {
                language: language.clone(),
                split: options.split.clone(),
            },
        ) {
            Ok(mut loaded) => {
                for database in loaded.dataset.databases.values_mut() {
                    database.path = probe.locate(&database.path);
                }
                checked.extend(checker.language(&loaded, language, source.manifest.format.0.name));
            }
            Err(error) => checker.unreadable(source, &error),
        }
    }
    let mut problems = checker.problems;
    problems.sort_by_key(|problem| problem.severity);
    let errors = problems
        .iter()
        .filter(|problem| problem.severity == Severity::Error)
        .count();
    CheckReport {
        name: source.name().to_owned(),
        split,
        examples: checked.iter().map(|language: &CheckedLanguage| language.examples).sum(),
        errors,
        warnings: problems.len() - errors,
        languages: checked,
        problems,
    }
}

/// `1 example`, `2 examples`
fn count(examples: usize) -> String {
    format!("{examples} example{}", if examples == 1 { "" } else { "s" })
}

struct Checker<'a> {
    probe: &'a dyn DatabaseProbe,
    problems: Vec<CheckProblem>,
    /// Languages may share databases, which are opened once.
    probed: HashMap<PathBuf, Option<ProbeInfo>>,
    /// Databases, description folders and schema files whose findings are listed already.
    noted: BTreeSet<(&'static str, PathBuf)>,
}

impl Checker<'_> {
    fn error(&mut self, code: &'static str, place: impl Into<String>, message: impl Into<String>) {
        let (place, message) = (place.into(), message.into());
        self.problems.push(CheckProblem {
            severity: Severity::Error,
            code,
            place,
            message,
        });
    }

    fn warning(&mut self, code: &'static str, place: impl Into<String>, message: impl Into<String>) {
        let (place, message) = (place.into(), message.into());
        self.problems.push(CheckProblem {
            severity: Severity::Warning,
            code,
            place,
            message,
        });
    }

    fn first_time(&mut self, what: &'static str, path: &Path) -> bool {
        self.noted.insert((what, path.to_owned()))
    }

    fn unreadable(&mut self, source: &Source, error: &DatasetError) {
        match error {
            DatasetError::Malformed { path, problems, .. } => {
                for problem in problems {
                    self.error(
                        problem.code,
                        format!("{}, {}", path.display(), problem.place),
                        problem.message.clone(),
                    );
                }
            }
            DatasetError::Read { path, source } => {
                self.error("unreadable_file", path.display().to_string(), source.to_string());
            }
            other => self.error("unreadable_dataset", source.name(), other.to_string()),
        }
    }

    fn language(&mut self, loaded: &Loaded, asked: Option<String>, format: &str) -> Vec<CheckedLanguage> {
        let file = loaded.questions.display().to_string();
        for problem in &loaded.problems {
            let place = if problem.place.is_empty() {
                file.clone()
            } else {
                format!("{file}, {}", problem.place)
            };
            self.error(problem.code, place, problem.message.clone());
        }
        for repeat in &loaded.repeats {
            self.warning(repeat.code, format!("{file}, {}", repeat.place), repeat.message.clone());
        }
        let dataset = &loaded.dataset;
        if dataset.examples.is_empty() && loaded.problems.is_empty() {
            let message = match loaded.records {
                0 => "the file holds no records".to_owned(),
                records => format!("none of the {records} records is let in"),
            };
            self.error("empty_dataset", file.clone(), message);
        }
        self.duplicates(loaded, &file);
        self.missing_gold(loaded, &file);
        let databases = self.databases(loaded);
        self.golds(loaded, &file);
        self.schemas(loaded);
        for database in dataset.databases.values() {
            self.descriptions(database, loaded.descriptions_named || format == "bird");
        }

        let mut languages: BTreeMap<&str, Vec<&super::Example>> = BTreeMap::new();
        for example in &dataset.examples {
            languages.entry(&example.language).or_default().push(example);
        }
        let fallback = asked.unwrap_or_else(|| "en".to_owned());
        if languages.is_empty() {
            languages.insert(&fallback, Vec::new());
        }
        let several = languages.len() > 1;
        languages
            .into_iter()
            .map(|(language, examples)| {
                let mut difficulties: BTreeMap<String, usize> = BTreeMap::new();
                let mut uses: HashMap<&str, usize> = HashMap::new();
                for example in &examples {
                    *uses.entry(&example.database).or_default() += 1;
                    if let Some(difficulty) = &example.difficulty {
                        *difficulties.entry(difficulty.clone()).or_default() += 1;
                    }
                }
                let owned: Vec<super::Example>;
                let digest = if several {
                    owned = examples.iter().map(|example| (*example).clone()).collect();
                    super::digest::dataset_digest(dataset.dialect, &owned)
                } else {
                    dataset.digest.clone()
                };
                let of_language = databases.iter().filter_map(|database| {
                    let examples = *uses.get(database.id.as_str())?;
                    Some(CheckedDatabase {
                        examples,
                        ..database.clone()
                    })
                });
                CheckedLanguage {
                    language: language.to_owned(),
                    questions: loaded.questions.clone(),
                    records: loaded.records,
                    examples: examples.len(),
                    with_gold: examples.iter().filter(|example| !example.gold.is_empty()).count(),
                    difficulties,
                    digest,
                    databases: of_language.collect(),
                }
            })
            .collect()
    }

    fn duplicates(&mut self, loaded: &Loaded, file: &str) {
        let mut seen: HashMap<(&str, &str, &str, &str), &str> = HashMap::new();
        for (example, place) in loaded.dataset.examples.iter().zip(&loaded.places) {
            let key = (
                example.language.as_str(),
                example.database.as_str(),
                example.question.as_str(),
                example.evidence.as_str(),
            );
            if let Some(first) = seen.get(&key) {
                let message = format!("the question of example `{}` is asked at {first} too", example.id);
                self.warning("duplicate_question", format!("{file}, {place}"), message);
            } else {
                seen.insert(key, place);
            }
        }
    }

    fn missing_gold(&mut self, loaded: &Loaded, file: &str) {
        let without = loaded
            .dataset
            .examples
            .iter()
            .zip(&loaded.places)
            .filter(|(example, _)| example.gold.is_empty());
        let without: Vec<_> = without
            .map(|(example, place)| (example.id.clone(), place.clone()))
            .collect();
        if without.is_empty() {
            return;
        }
        if without.len() == loaded.dataset.examples.len() {
            return self.warning("no_gold", file, "no example has gold SQL; predictions can't be scored");
        }
        for (id, place) in without {
            self.error(
                "empty_gold",
                format!("{file}, {place}"),
                format!("example `{id}` has no gold SQL"),
            );
        }
    }

    fn databases(&mut self, loaded: &Loaded) -> Vec<CheckedDatabase> {
        let dataset = &loaded.dataset;
        let mut uses: HashMap<&str, usize> = HashMap::new();
        for example in &dataset.examples {
            *uses.entry(&example.database).or_default() += 1;
        }
        let local = dataset.dialect == Dialect::Sqlite;
        let folder = loaded.databases.is_dir();
        if !local {
            let message = format!(
                "databases of dialect {} are not files; none was opened",
                dataset.dialect.name()
            );
            self.warning("not_opened", loaded.questions.display().to_string(), message);
        } else if !folder && !dataset.databases.is_empty() && self.first_time("folder", &loaded.databases) {
            let message = format!("no such folder; it should hold {} databases", dataset.databases.len());
            self.error("missing_databases", loaded.databases.display().to_string(), message);
        }
        let mut checked = Vec::new();
        for database in dataset.databases.values() {
            let examples = uses.get(database.id.as_str()).copied().unwrap_or_default();
            let info = if local && folder {
                self.database(database, examples)
            } else {
                None
            };
            checked.push(CheckedDatabase {
                id: database.id.clone(),
                path: database.path.clone(),
                examples,
                size_bytes: info.as_ref().map(|info| info.size_bytes),
                tables: info.as_ref().map(|info| info.tables.len()),
                rows: info.as_ref().map(|info| info.tables.iter().map(|(_, rows)| rows).sum()),
                digest: info.and_then(|_| database_digest(&database.path).ok()),
            });
        }
        checked
    }

    fn database(&mut self, database: &DatabaseRef, examples: usize) -> Option<ProbeInfo> {
        if let Some(known) = self.probed.get(&database.path) {
            return known.clone();
        }
        let place = database.path.display().to_string();
        let info = if database.path.is_file() {
            self.probe
                .open_and_check(&database.path)
                .map_err(|message| ("bad_database", message))
        } else {
            Err((
                "missing_database",
                format!(
                    "no such file; database `{}` is needed by {}",
                    database.id,
                    count(examples)
                ),
            ))
        };
        let info = info
            .map_err(|(code, message)| self.error(code, place.clone(), message))
            .ok();
        if let Some(info) = &info {
            let empty: Vec<&str> = info
                .tables
                .iter()
                .filter(|(_, rows)| *rows == 0)
                .map(|(table, _)| table.as_str())
                .collect();
            if info.tables.is_empty() {
                self.error("no_tables", place, "the database has no tables");
            } else if empty.len() == info.tables.len() {
                let message = format!(
                    "no table of the database has rows ({} in all); {} can't be told apart",
                    empty.len(),
                    count(examples)
                );
                self.warning("empty_database", place, message);
            } else if !empty.is_empty() {
                self.warning("empty_tables", place, format!("empty tables: {}", quoted(&empty)));
            }
        }
        self.probed.insert(database.path.clone(), info.clone());
        info
    }

    fn golds(&mut self, loaded: &Loaded, file: &str) {
        for (example, place) in loaded.dataset.examples.iter().zip(&loaded.places) {
            let Some(database) = loaded.dataset.databases.get(&example.database) else {
                continue;
            };
            if !matches!(self.probed.get(&database.path), Some(Some(_))) {
                continue;
            }
            for gold in &example.gold {
                if let Err(message) = self.probe.prepare(&database.path, gold) {
                    let message = format!("gold of example `{}` does not prepare: {message}", example.id);
                    self.error("gold_error", format!("{file}, {place}"), message);
                }
            }
        }
    }

    /// Compares `tables.json` with the databases themselves.
    fn schemas(&mut self, loaded: &Loaded) {
        #[derive(Deserialize)]
        struct Schema {
            db_id: String,
            table_names_original: Vec<String>,
        }
        let Some(path) = loaded.tables.as_deref().filter(|path| self.first_time("tables", path)) else {
            return;
        };
        let place = path.display().to_string();
        let content = match text::read(path) {
            Ok(content) => content,
            Err(DatasetError::Read { source, .. }) => return self.error("unreadable_file", place, source.to_string()),
            Err(error) => return self.error("unreadable_file", place, error.to_string()),
        };
        let schemas: Vec<Schema> = match serde_json::from_str(&content) {
            Ok(schemas) => schemas,
            Err(error) => return self.error("malformed_tables", place, error.to_string()),
        };
        for database in loaded.dataset.databases.values() {
            let Some(schema) = schemas
                .iter()
                .find(|schema| text::nfc(&schema.db_id) == text::nfc(&database.id))
            else {
                self.warning(
                    "tables_missing",
                    place.clone(),
                    format!("database `{}` is not described", database.id),
                );
                continue;
            };
            let Some(Some(info)) = self.probed.get(&database.path) else {
                continue;
            };
            let stated: BTreeSet<String> = schema
                .table_names_original
                .iter()
                .map(|name| name.to_lowercase())
                .collect();
            let real: BTreeSet<String> = info
                .tables
                .iter()
                .map(|(name, _)| name.to_lowercase())
                .filter(|name| !name.starts_with("sqlite_"))
                .collect();
            if stated != real {
                let only = |one: &BTreeSet<String>, other: &BTreeSet<String>| {
                    or_none(&one.difference(other).cloned().collect::<Vec<_>>())
                };
                let message = format!(
                    "tables of `{}` differ: only in the file {}, only in the database {}",
                    database.id,
                    only(&stated, &real),
                    only(&real, &stated)
                );
                self.warning("tables_differ", place.clone(), message);
            }
        }
    }

    fn descriptions(&mut self, database: &DatabaseRef, expected: bool) {
        let Some(folder) = &database.descriptions else {
            if expected && self.first_time("descriptions", &database.path) {
                let message = format!("database `{}` has no column descriptions", database.id);
                self.warning("missing_descriptions", database.path.display().to_string(), message);
            }
            return;
        };
        if !self.first_time("descriptions", folder) {
            return;
        }
        let place = folder.display().to_string();
        let described = match load_descriptions(folder) {
            Ok(described) => described,
            Err(DatasetError::Read { path, source }) => {
                return self.error("unreadable_file", path.display().to_string(), source.to_string());
            }
            Err(error) => return self.error("unreadable_file", place, error.to_string()),
        };
        for table in &described {
            for warning in &table.warnings {
                let file = folder.join(format!("{}.csv", table.table));
                self.warning("description", file.display().to_string(), warning.clone());
            }
        }
        let Some(Some(info)) = self.probed.get(&database.path) else {
            return;
        };
        let names: BTreeSet<String> = described.iter().map(|table| table.table.to_lowercase()).collect();
        let undescribed: Vec<String> = info
            .tables
            .iter()
            .map(|(name, _)| name.clone())
            .filter(|name| !name.starts_with("sqlite_") && !names.contains(&name.to_lowercase()))
            .collect();
        let real: BTreeSet<String> = info.tables.iter().map(|(name, _)| name.to_lowercase()).collect();
        let unknown: Vec<String> = names.into_iter().filter(|name| !real.contains(name)).collect();
        if !undescribed.is_empty() {
            self.warning(
                "undescribed_tables",
                place.clone(),
                format!("no description of {}", quoted(&undescribed)),
            );
        }
        if !unknown.is_empty() {
            self.warning(
                "unknown_tables",
                place,
                format!("the database has no table {}", quoted(&unknown)),
            );
        }
    }
}
