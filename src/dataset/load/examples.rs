//! From records to examples: fields are mapped, text becomes NFC, and every problem of a file is collected.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::super::digest::{dataset_digest, example_digest};
use super::super::error::{DatasetError, Problem, SHOWN_PROBLEMS, hint, nearest, quoted};
use super::super::manifest::{Fields, Variant};
use super::super::source::Source;
use super::super::text::{self, nfc, nfd};
use super::super::{DatabaseRef, Dataset, Dialect, Example};
use super::record::{Item, Place, Values, kind, lookup, plain};
use super::role::{Need, Role};

/// Which part of a dataset to read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// One of the dataset's languages, the first where absent. For data that declares no language, the language of its
    /// examples (`en` where absent).
    pub language: Option<String>,
    /// One of the dataset's splits, the manifest's own where absent.
    pub split: Option<String>,
}

/// The languages a dataset has, and how it says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Languages {
    /// Named by the manifest; the first is the default.
    Declared(Vec<String>),
    /// Named by each record; all are loaded unless one is asked for.
    PerRecord(Vec<String>),
    /// Not named: any language may be asked for, and `en` is assumed.
    Undeclared,
}

/// What was read, with what was wrong.
pub(in crate::dataset) struct Loaded {
    pub dataset: Dataset,
    /// Place of each example in its file.
    pub places: Vec<String>,
    /// In file order.
    pub problems: Vec<Problem>,
    /// Records left out since they repeat an earlier one.
    pub repeats: Vec<Problem>,
    pub questions: PathBuf,
    pub databases: PathBuf,
    pub tables: Option<PathBuf>,
    /// Whether the manifest says where column descriptions are.
    pub descriptions_named: bool,
    /// Records in the file, before conditions.
    pub records: usize,
    languages: BTreeSet<String>,
}

/// Reads one split of a dataset in one language. Problems of the file are reported together.
pub fn load(source: &Source, options: &LoadOptions) -> Result<Dataset, DatasetError> {
    let mut loaded = read_examples(source, options)?;
    let path = loaded.questions;
    if !loaded.problems.is_empty() {
        let total = loaded.problems.len();
        loaded.problems.truncate(SHOWN_PROBLEMS);
        return Err(DatasetError::Malformed {
            path,
            problems: loaded.problems,
            total,
        });
    }
    if loaded.dataset.examples.is_empty() {
        if let Some(language) = options.language.clone().filter(|_| !loaded.languages.is_empty()) {
            let present = loaded.languages.into_iter().collect();
            return Err(DatasetError::UnknownLanguage {
                dataset: source.name().to_owned(),
                language,
                present,
            });
        }
        let reason = match loaded.records {
            0 => "holds no records".to_owned(),
            records => format!("has {records} records, and `where` lets none of them in"),
        };
        return Err(DatasetError::Empty { path, reason });
    }
    Ok(loaded.dataset)
}

/// The languages of a split. Reads its questions where each record names its own language.
pub fn languages_available(source: &Source, split: Option<&str>) -> Result<Languages, DatasetError> {
    let split = chosen_split(source, split)?;
    let codes = source.manifest.language_codes(&split);
    if !codes.is_empty() {
        return Ok(Languages::Declared(codes));
    }
    if source.manifest.variant(&split, None).fields.language.is_none() {
        return Ok(Languages::Undeclared);
    }
    let loaded = read_examples(
        source,
        &LoadOptions {
            language: None,
            split: Some(split),
        },
    )?;
    Ok(Languages::PerRecord(loaded.languages.into_iter().collect()))
}

fn chosen_split(source: &Source, split: Option<&str>) -> Result<String, DatasetError> {
    let present = source.manifest.split_names();
    match split {
        None => Ok(source.manifest.split.clone()),
        Some(split) if present.iter().any(|name| name == split) => Ok(split.to_owned()),
        Some(split) => Err(DatasetError::UnknownSplit {
            dataset: source.name().to_owned(),
            split: split.to_owned(),
            present,
        }),
    }
}

/// Reads the examples and whatever is wrong with them; fails only where nothing can be read at all.
pub(in crate::dataset) fn read_examples(source: &Source, options: &LoadOptions) -> Result<Loaded, DatasetError> {
    let manifest = &source.manifest;
    let format = manifest.format.0;
    let split = chosen_split(source, options.split.as_deref())?;
    let codes = manifest.language_codes(&split);
    let declared = match &options.language {
        None => codes.first().cloned(),
        Some(_) if codes.is_empty() => None,
        Some(asked) => Some(
            codes
                .iter()
                .find(|code| code.eq_ignore_ascii_case(asked))
                .cloned()
                .ok_or_else(|| DatasetError::UnknownLanguage {
                    dataset: source.name().to_owned(),
                    language: asked.clone(),
                    present: codes.clone(),
                })?,
        ),
    };
    let variant = manifest.variant(&split, declared.as_deref());
    let asked = options.language.as_deref().map(str::to_lowercase);
    let questions = source
        .root
        .join(variant.questions.as_deref().unwrap_or(Path::new("dev.json")));
    let content = text::read(&questions)?;
    let mut reader = Reader::new(
        &variant,
        (format.fields)(),
        declared.or_else(|| asked.clone()).unwrap_or_else(|| "en".to_owned()),
        asked,
    );
    (format.read)(&content, &mut |item| reader.item(item));
    drop(content);
    reader.finish();

    let mut files: Vec<PathBuf> = source.file.iter().cloned().collect();
    files.push(questions.clone());
    if let Some(hardness) = format.beside.and_then(|beside| beside(&questions)) {
        let mut used = false;
        for example in reader
            .examples
            .iter_mut()
            .filter(|example| example.difficulty.is_none())
        {
            example.difficulty = hardness.of(&example.id, &example.database).map(str::to_owned);
            used |= example.difficulty.is_some();
        }
        if used {
            files.push(hardness.path);
        }
    }
    let databases = source
        .root
        .join(variant.databases.as_deref().unwrap_or(Path::new(format.databases)));
    let mut refs = BTreeMap::new();
    for example in &reader.examples {
        if !refs.contains_key(&example.database) {
            refs.insert(
                example.database.clone(),
                locate(&databases, &variant, &example.database),
            );
        }
    }
    let dialect = variant.dialect.unwrap_or(Dialect::Sqlite);
    let mut problems = reader.problems;
    problems.sort_by_key(|(position, _)| *position);
    Ok(Loaded {
        dataset: Dataset {
            name: manifest.name.clone(),
            split,
            description: manifest.description.clone(),
            dialect,
            digest: dataset_digest(dialect, &reader.examples),
            examples: reader.examples,
            databases: refs,
            files,
        },
        places: reader.places,
        problems: problems.into_iter().map(|(_, problem)| problem).collect(),
        repeats: reader.repeats,
        questions,
        databases,
        tables: variant.tables.map(|tables| source.root.join(tables)),
        descriptions_named: variant.descriptions.is_some(),
        records: reader.records,
        languages: reader.languages,
    })
}

/// Finds a database's files. Ids come from a text file and names from a file system, and the two may hold the same letter
/// composed or decomposed: the id as given is tried first, then NFC, then NFD.
fn locate(folder: &Path, variant: &Variant, id: &str) -> DatabaseRef {
    let named = |pattern: &str, exists: fn(&Path) -> bool| {
        [id.to_owned(), nfc(id), nfd(id)]
            .iter()
            .map(|id| folder.join(pattern.replace("{db}", id)))
            .find(|path| exists(path))
    };
    let pattern = variant.database_file.as_deref().unwrap_or("{db}/{db}.sqlite");
    let descriptions = variant.descriptions.as_deref().unwrap_or("{db}/database_description");
    DatabaseRef {
        id: id.to_owned(),
        path: named(pattern, Path::is_file).unwrap_or_else(|| folder.join(pattern.replace("{db}", id))),
        descriptions: named(descriptions, Path::is_dir),
    }
}

struct Reader {
    id: Role,
    question: Role,
    evidence: Role,
    gold: Role,
    golds: Role,
    database: Role,
    language: Role,
    difficulty: Role,
    conditions: Vec<(String, Vec<String>, bool)>,
    default_language: String,
    asked: Option<String>,
    records: usize,
    /// Records that were let in, well-formed or not.
    let_in: usize,
    keys: BTreeSet<String>,
    /// Where an id was first, and its example unless that record was malformed.
    ids: HashMap<String, (Place, Option<usize>)>,
    /// Records that repeat an earlier one word for word.
    repeats: Vec<Problem>,
    languages: BTreeSet<String>,
    examples: Vec<Example>,
    places: Vec<String>,
    problems: Vec<(usize, Problem)>,
}

impl Reader {
    fn new(variant: &Variant, defaults: Fields, default_language: String, asked: Option<String>) -> Reader {
        let named = &variant.fields;
        let role = |part, named: &Option<String>, default: &Option<String>, by_default, if_named| {
            Role::new(part, named.as_ref(), default.as_ref(), by_default, if_named)
        };
        use Need::{AllOrNone, Always, Never, Somewhere};
        Reader {
            id: role("id", &named.id, &defaults.id, AllOrNone, Always),
            question: role("question", &named.question, &defaults.question, Always, Always),
            evidence: role("evidence", &named.evidence, &defaults.evidence, Never, Somewhere),
            gold: role("gold", &named.gold, &defaults.gold, AllOrNone, Always),
            golds: role("golds", &named.golds, &defaults.golds, Never, Somewhere),
            database: role("database", &named.database, &defaults.database, Always, Always),
            language: role("language", &named.language, &defaults.language, Never, Always),
            difficulty: role("difficulty", &named.difficulty, &defaults.difficulty, Never, Somewhere),
            conditions: variant
                .conditions
                .iter()
                .map(|(key, wanted)| (key.clone(), wanted.0.iter().map(|value| nfc(value)).collect(), false))
                .collect(),
            default_language,
            asked,
            records: 0,
            let_in: 0,
            keys: BTreeSet::new(),
            ids: HashMap::new(),
            repeats: Vec::new(),
            languages: BTreeSet::new(),
            examples: Vec::new(),
            places: Vec::new(),
            problems: Vec::new(),
        }
    }

    fn item(&mut self, item: Item) {
        let position = self.records;
        let place = item.place;
        self.records += 1;
        match item.content {
            Err(message) => self.problem(position, place, "malformed_record", message),
            Ok(values) => {
                // The first records show which keys there are; the union serves suggestions only.
                if position < 100 {
                    self.keys.extend(values.keys().cloned());
                }
                if self.wanted(&values) {
                    self.record(&values, position, place);
                }
            }
        }
    }

    fn problem(&mut self, position: usize, place: Place, code: &'static str, message: String) {
        self.problems.push((
            position,
            Problem {
                code,
                place: place.to_string(),
                message,
            },
        ));
    }

    fn wanted(&mut self, values: &Values) -> bool {
        let mut wanted = true;
        for (key, accepted, seen) in &mut self.conditions {
            let value = lookup(values, key);
            *seen |= value.is_some();
            wanted &= value.is_some_and(|value| accepted.contains(&nfc(&plain(value).unwrap_or_default())));
        }
        wanted
    }

    fn record(&mut self, values: &Values, position: usize, place: Place) {
        let faults = self.problems.len();
        let mut language = self.default_language.clone();
        if self.language.key.is_some() {
            let value = self.language.value(values, position, place);
            match self
                .text(value, "language", position, place)
                .map(|code| code.trim().to_lowercase())
            {
                Some(code) if !code.is_empty() => language = code,
                // Without its language a record is neither in nor out; the problem is noted where the value is missing.
                _ => {
                    self.let_in += 1;
                    if value.is_some_and(|value| value.as_str().is_some_and(|text| text.trim().is_empty())) {
                        self.problem(position, place, "empty_language", "the language is empty".to_owned());
                    }
                    return;
                }
            }
            self.languages.insert(language.clone());
            if self.asked.as_ref().is_some_and(|asked| *asked != language) {
                return;
            }
        }
        self.let_in += 1;
        let id = match self.id.value(values, position, place) {
            None => Some(position.to_string()),
            Some(Value::Number(number)) => Some(number.to_string()),
            value => self.text(value, "id", position, place),
        };
        let value = self.question.value(values, position, place);
        let question = self
            .text(value, "question", position, place)
            .map(|text| text.trim().to_owned());
        if question.as_deref() == Some("") || value.is_none() && self.question.seen > 0 && self.has_null(values) {
            self.problem(position, place, "empty_question", "the question is empty".to_owned());
        }
        let value = self.evidence.value(values, position, place);
        let evidence = self
            .text(value, "evidence", position, place)
            .unwrap_or_default()
            .trim()
            .to_owned();
        let database = self.database_id(values, position, place);
        let gold = self.gold_queries(values, position, place);
        let value = self.difficulty.value(values, position, place);
        let difficulty = value
            .and_then(plain)
            .map(|text| nfc(text.trim()))
            .filter(|text| !text.is_empty());
        let (Some(id), Some(question), Some(database)) = (id, question, database) else {
            return;
        };
        if self.problems.len() > faults {
            self.ids.entry(id).or_insert((place, None));
            return;
        }
        let fields = self.other_fields(values);
        let example = Example {
            id,
            position,
            question,
            evidence,
            database,
            gold,
            language,
            difficulty,
            fields,
        };
        if let Some((first, index)) = self.ids.get(&example.id) {
            let message = format!("the id `{}` is {first}'s already", example.id);
            // Published files repeat records whole; asking twice would count one question double.
            let same = index.is_some_and(|index| example_digest(&self.examples[index]) == example_digest(&example));
            if same {
                let message = format!("{message}, and so is the whole record; it counts once");
                self.repeats.push(Problem {
                    code: "repeated_record",
                    place: place.to_string(),
                    message,
                });
                return;
            }
            let several = self.language.key.is_some() && self.asked.is_none();
            let advice = if several {
                "; where languages share ids, load one language at a time"
            } else {
                ""
            };
            return self.problem(position, place, "duplicate_id", message + advice);
        }
        self.ids.insert(example.id.clone(), (place, Some(self.examples.len())));
        self.places.push(place.to_string());
        self.examples.push(example);
    }

    /// Whether the question is there and null.
    fn has_null(&self, values: &Values) -> bool {
        self.question
            .key
            .as_deref()
            .and_then(|key| lookup(values, key))
            .is_some_and(Value::is_null)
    }

    /// Text in NFC; anything else is noted as a problem. Absent values are none of this function's business.
    fn text(&mut self, value: Option<&Value>, part: &str, position: usize, place: Place) -> Option<String> {
        self.exact_text(value, part, position, place).map(|text| nfc(&text))
    }

    fn exact_text(&mut self, value: Option<&Value>, part: &str, position: usize, place: Place) -> Option<String> {
        match value? {
            Value::String(text) if text.contains('\0') => {
                self.problem(
                    position,
                    place,
                    "null_character",
                    format!("a null character in the {part}"),
                );
                None
            }
            Value::String(text) => Some(text.clone()),
            other => {
                self.problem(
                    position,
                    place,
                    "wrong_type",
                    format!("the {part} is {}, expected text", kind(other)),
                );
                None
            }
        }
    }

    /// As written, since it names a file and maybe a schema. A name that leads out of the databases folder is refused.
    fn database_id(&mut self, values: &Values, position: usize, place: Place) -> Option<String> {
        let value = self.database.value(values, position, place);
        if value.is_none()
            && self
                .database
                .key
                .as_deref()
                .is_some_and(|key| lookup(values, key).is_some())
        {
            self.problem(position, place, "empty_database", "the database is empty".to_owned());
        }
        let id = self.exact_text(value, "database", position, place)?;
        if id.trim().is_empty() {
            self.problem(position, place, "empty_database", "the database is empty".to_owned());
            return None;
        }
        if id == "." || id == ".." || id.contains(['/', '\\']) {
            self.problem(
                position,
                place,
                "bad_database",
                format!("the database `{id}` is a path, expected a plain name"),
            );
            return None;
        }
        Some(id)
    }

    /// As written: identifiers in it must equal those in the database byte for byte, so NFC would break what works.
    fn gold_queries(&mut self, values: &Values, position: usize, place: Place) -> Vec<String> {
        let mut queries = Vec::new();
        let value = self.gold.value(values, position, place);
        queries.extend(self.exact_text(value, "gold", position, place));
        match self.golds.value(values, position, place) {
            Some(Value::Array(list)) => {
                for value in list {
                    queries.extend(self.exact_text(Some(value), "gold in the list", position, place));
                }
            }
            value => queries.extend(self.exact_text(value, "gold list", position, place)),
        }
        let mut distinct: Vec<String> = Vec::new();
        for query in queries {
            if !query.trim().is_empty() && !distinct.contains(&query) {
                distinct.push(query);
            }
        }
        distinct
    }

    fn roles(&self) -> [&Role; 8] {
        [
            &self.id,
            &self.question,
            &self.evidence,
            &self.gold,
            &self.golds,
            &self.database,
            &self.language,
            &self.difficulty,
        ]
    }

    fn other_fields(&self, values: &Values) -> BTreeMap<String, String> {
        let mapped = |key: &str| self.roles().iter().any(|role| role.key.as_deref() == Some(key));
        values
            .iter()
            .filter(|(key, _)| !key.is_empty() && !mapped(key))
            .filter_map(|(key, value)| Some((key.clone(), nfc(&plain(value)?))))
            .collect()
    }

    /// Notes missing fields, now that it is known whether all records lack them.
    fn finish(&mut self) {
        let keys: Vec<&str> = self.keys.iter().map(String::as_str).collect();
        let advice = |key: &str| {
            let near = nearest(key, keys.iter().copied());
            if near.is_some() {
                hint(near.as_deref())
            } else {
                format!("; there are {}", quoted(&keys))
            }
        };
        let whole = |code, message| {
            (
                0,
                Problem {
                    code,
                    place: String::new(),
                    message,
                },
            )
        };
        let mut found = Vec::new();
        let mut absent = BTreeSet::new();
        for role in self.roles() {
            let Some(key) = role.key.as_deref().filter(|_| self.let_in > 0) else {
                continue;
            };
            let nowhere = role.seen == 0 && !role.missing.is_empty();
            match role.need {
                Need::Always | Need::Somewhere if nowhere => {
                    absent.insert(role.part);
                    let message = format!(
                        "no record has `{key}`, which should hold the {}{}",
                        role.part,
                        advice(key)
                    );
                    found.push(whole("missing_field", message));
                }
                Need::Always | Need::AllOrNone if role.seen > 0 => {
                    for (position, place) in &role.missing {
                        let message = format!("no `{key}`, which holds the {}", role.part);
                        found.push((
                            *position,
                            Problem {
                                code: "missing_field",
                                place: place.to_string(),
                                message,
                            },
                        ));
                    }
                }
                _ => {}
            }
        }
        for (key, _, seen) in &self.conditions {
            if !seen && self.records > 0 && !keys.is_empty() {
                let message = format!("no record has `{key}`, which `where` asks for{}", advice(key));
                found.push(whole("missing_field", message));
            }
        }
        self.problems.extend(found);
    }
}
