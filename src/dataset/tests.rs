//! The loaders on files with faults, and on the published data where it lies beside the repository.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use super::*;

/// A folder with these files, and the manifest `m.yaml` in it.
fn folder(files: &[(&str, &str)]) -> (tempfile::TempDir, Source) {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    let source = Source::from_manifest(&folder.path().join("m.yaml")).unwrap();
    (folder, source)
}

fn fault(files: &[(&str, &str)]) -> String {
    let (_folder, source) = folder(files);
    load(&source, &LoadOptions::default()).unwrap_err().to_string()
}

fn language(code: &str) -> LoadOptions {
    LoadOptions {
        language: Some(code.to_owned()),
        split: None,
    }
}

#[test]
fn all_faults_of_a_file_are_listed_with_their_places() {
    let lines = r#"{"id": 1, "question": "a", "database": "d"}
{"id": 2, "question": 5, "database": "d"}
{"id": 3, "question": "c"
{"id": 1, "question": "d", "database": "d"}

{"id": 5, "question": " ", "database": "../d"}
{"id": 6, "question": "f"}
[]
"#;
    let message = fault(&[("m.yaml", "format: jsonl\nquestions: q.jsonl\n"), ("q.jsonl", lines)]);
    for expected in [
        "q.jsonl` has 7 problems",
        "\n  line 2: the question is a number, expected text",
        "\n  line 3 column 25: EOF while parsing an object",
        "\n  line 4: the id `1` is line 1's already",
        "\n  line 6: the question is empty",
        "\n  line 6: the database `../d` is a path, expected a plain name",
        "\n  line 7: no `database`, which holds the database",
        "\n  line 8: the record is a list, expected an object",
    ] {
        assert!(message.contains(expected), "{expected}\nnot in\n{message}");
    }
}

#[test]
fn a_field_that_no_record_has_is_one_problem_with_a_suggestion() {
    let manifest = "format: csv\nquestions: q.csv\nfields: {question: qestion, database: db, gold: sql}\n";
    let message = fault(&[("m.yaml", manifest), ("q.csv", "db,question,sql\nd,a,b\nd,c,d\n")]);
    assert!(
        message.contains("has 1 problem\n  no record has `qestion`"),
        "{message}"
    );
    assert!(message.ends_with("did you mean `question`?"), "{message}");
    let unknown = "format: csv\nquestions: q.csv\nwhere: {okk: 1}\n";
    let message = fault(&[("m.yaml", unknown), ("q.csv", "database,question,ok\nd,a,1\n")]);
    assert!(
        message.contains("no record has `okk`, which `where` asks for; did you mean `ok`?"),
        "{message}"
    );
}

#[test]
fn ragged_and_unclosed_rows_doubled_columns_and_wrong_formats_are_named() {
    let csv = ("m.yaml", "format: csv\nquestions: q\n");
    let message = fault(&[csv, ("q", "database,question\nd\nd,a\nd,a,b\nd,\"x\nd,y\n")]);
    assert!(
        message.contains("line 2: the row has 1 fields, the header has 2\n"),
        "{message}"
    );
    assert!(message.contains("line 4: the row has 3 fields"), "{message}");
    assert!(fault(&[csv, ("q", "question,question\na,b\n")]).contains("two columns are named `question`"));
    let json = ("m.yaml", "format: json\nquestions: q\n");
    assert!(fault(&[json, ("q", "[{\"id\": 1},\n {\"id\" 2}]")]).contains("line 2 column 8: expected `:`"));
    assert!(fault(&[json, ("q", "{\"id\": 1}\n{}")]).contains("say `format: jsonl`"));
    assert!(fault(&[json, ("q", "[]")]).ends_with("holds no records"));
    assert!(fault(&[json, ("q", "[] []")]).contains("trailing characters"));
    assert!(fault(&[json]).starts_with("cannot read `"));
    let jsonl = ("m.yaml", "format: jsonl\nquestions: q\n");
    assert!(fault(&[jsonl, ("q", "[{\"id\": 1}]")]).contains("say `format: json`"));
    assert!(fault(&[jsonl, ("q", r#"{"question": "a\u0000b", "database": "d"}"#)]).contains("a null character"));
}

#[test]
fn text_becomes_nfc_but_sql_and_database_names_stay_as_written() {
    let (folder, source) = folder(&[
        (
            "m.yaml",
            "format: json\nquestions: q.json\nfields: {golds: alternatives, evidence: more.hint}\n",
        ),
        (
            "q.json",
            "[{\"question\": \" u\u{308}ber \\n\", \"database\": \"mu\u{308}ze\", \"gold\": \"SELECT u\u{308}\",\
             \"alternatives\": [\"SELECT 2\", \"SELECT u\u{308}\"], \"more\": {\"hint\": \"o\u{308}\"}, \"n\": 4, \"ok\": true}]",
        ),
        // On disk composed, in the data decomposed.
        ("databases/m\u{fc}ze/m\u{fc}ze.sqlite", ""),
    ]);
    let dataset = load(&source, &language("de")).unwrap();
    let example = &dataset.examples[0];
    assert_eq!((example.id.as_str(), example.language.as_str()), ("0", "de"));
    assert_eq!(
        (example.question.as_str(), example.evidence.as_str()),
        ("\u{fc}ber", "\u{f6}")
    );
    assert_eq!(example.gold, ["SELECT u\u{308}", "SELECT 2"]);
    assert_eq!(example.database, "mu\u{308}ze");
    assert_eq!(
        dataset.databases["mu\u{308}ze"].path,
        folder.path().join("databases/m\u{fc}ze/m\u{fc}ze.sqlite")
    );
    assert_eq!(example.fields["n"], "4");
    assert_eq!(example.fields["ok"], "true");
}

#[test]
fn records_may_name_their_language() {
    let manifest = "format: csv\nquestions: q.csv\nfields: {language: lang}\n";
    let rows = "id,database,question,lang\n1,d,a,en\n1,d,b,de\n2,d,c,DE\n";
    let (_folder, source) = folder(&[("m.yaml", manifest), ("q.csv", rows)]);
    assert_eq!(
        languages_available(&source, None).unwrap(),
        Languages::PerRecord(vec!["de".to_owned(), "en".to_owned()])
    );
    assert_eq!(load(&source, &language("de")).unwrap().examples.len(), 2);
    let all = load(&source, &LoadOptions::default()).unwrap_err().to_string();
    assert!(all.contains("load one language at a time"), "{all}");
    let absent = load(&source, &language("tr")).unwrap_err().to_string();
    assert_eq!(absent, "no language `tr` in dataset `m`; it has `de`, `en`");
}

#[test]
fn parallel_languages_and_splits_are_chosen_by_name() {
    let manifest = "format: jsonl\nquestions: en.jsonl\nlanguages: {tr: {fields: {question: soru}}}\n\
                    splits: {train: {questions: train.jsonl}}\n";
    let line = r#"{"id": 1, "question": "how many", "soru": "kaç", "database": "d"}"#;
    let (_folder, source) = folder(&[("m.yaml", manifest), ("en.jsonl", line), ("train.jsonl", line)]);
    assert_eq!(
        languages_available(&source, None).unwrap(),
        Languages::Declared(vec!["en".to_owned(), "tr".to_owned()])
    );
    let turkish = load(&source, &language("TR")).unwrap();
    assert_eq!(
        (
            turkish.examples[0].question.as_str(),
            turkish.examples[0].language.as_str()
        ),
        ("kaç", "tr")
    );
    assert_eq!(
        load(&source, &LoadOptions::default()).unwrap().examples[0].language,
        "en"
    );
    let absent = load(&source, &language("fr")).unwrap_err().to_string();
    assert_eq!(absent, "no language `fr` in dataset `m`; it has `en`, `tr`");
    let train = LoadOptions {
        language: None,
        split: Some("train".to_owned()),
    };
    assert_eq!(load(&source, &train).unwrap().split, "train");
    let test = LoadOptions {
        language: None,
        split: Some("test".to_owned()),
    };
    assert!(
        load(&source, &test)
            .unwrap_err()
            .to_string()
            .contains("it has `dev`, `train`")
    );
}

/// Opens databases with SQLite directly; the room itself does not.
struct Probe;

impl DatabaseProbe for Probe {
    fn open_and_check(&self, path: &Path) -> Result<ProbeInfo, String> {
        let open = || -> rusqlite::Result<Vec<(String, u64)>> {
            let connection = rusqlite::Connection::open_with_flags(path, rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY)?;
            let mut statement = connection.prepare("SELECT name FROM sqlite_master WHERE type = 'table'")?;
            let names: Vec<String> = statement.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
            let count = |name: String| {
                let sql = format!("SELECT count(*) FROM \"{}\"", name.replace('"', "\"\""));
                let rows: i64 = connection.query_row(&sql, [], |row| row.get(0))?;
                Ok((name, rows.unsigned_abs()))
            };
            names.into_iter().map(count).collect()
        };
        let tables = open().map_err(|error| error.to_string())?;
        Ok(ProbeInfo {
            size_bytes: fs::metadata(path).map_err(|error| error.to_string())?.len(),
            tables,
        })
    }

    fn prepare(&self, path: &Path, sql: &str) -> Result<(), String> {
        let connection = rusqlite::Connection::open_with_flags(path, rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY)
            .map_err(|error| error.to_string())?;
        connection.prepare(sql).map(drop).map_err(|error| error.to_string())
    }
}

fn codes(report: &CheckReport) -> Vec<&str> {
    report.problems.iter().map(|problem| problem.code).collect()
}

#[test]
fn a_check_goes_on_after_every_problem() {
    let lines = r#"{"id": 1, "question": "a", "database": "good", "gold": "SELECT x FROM t"}
{"id": 2, "question": "a", "database": "good", "gold": "SELECT y FROM t"}
{"id": 3, "question": "", "database": "good", "gold": "SELECT 1"}
{"id": 4, "question": "d", "database": "good", "gold": " "}
{"id": 5, "question": "e", "database": "broken", "gold": "SELECT 1"}
{"id": 6, "question": "f", "database": "absent", "gold": "SELECT 1"}
"#;
    let (folder, source) = folder(&[
        ("m.yaml", "format: jsonl\nquestions: q.jsonl\ntables: tables.json\n"),
        ("q.jsonl", lines),
        (
            "tables.json",
            r#"[{"db_id": "good", "table_names_original": ["T", "u"]}]"#,
        ),
        ("databases/good/database_description/t.csv", "original_column_name\nx\n"),
        (
            "databases/broken/broken.sqlite",
            "this is no database, however long the text may be made to go on",
        ),
    ]);
    let good = folder.path().join("databases/good/good.sqlite");
    rusqlite::Connection::open(&good)
        .unwrap()
        .execute_batch("CREATE TABLE t (x); CREATE TABLE v (x)")
        .unwrap();
    let report = check(&source, &LoadOptions::default(), &Probe);
    let found = codes(&report);
    for code in [
        "empty_question",
        "duplicate_question",
        "empty_gold",
        "bad_database",
        "missing_database",
        "gold_error",
        "empty_database",
        "tables_differ",
        "tables_missing",
        "undescribed_tables",
    ] {
        assert!(found.contains(&code), "{code} not in {found:?}");
    }
    assert_eq!((report.examples, report.languages.len()), (5, 1));
    assert_eq!(report.errors + report.warnings, found.len());
    assert!(report.problems.is_sorted_by_key(|problem| problem.severity));
    let gold = report
        .problems
        .iter()
        .find(|problem| problem.code == "gold_error")
        .unwrap();
    assert!(
        gold.message.contains("`2`") && gold.place.ends_with("line 2"),
        "{gold:?}"
    );
    let database = report.languages[0]
        .databases
        .iter()
        .find(|database| database.id == "good")
        .unwrap();
    assert_eq!((database.tables, database.rows), (Some(2), Some(0)));
    assert_eq!(database.digest, file_digest(&good).ok());
    serde_json::to_string(&report).unwrap();
}

#[test]
fn a_check_of_missing_files_is_a_report_too() {
    let (_folder, source) = folder(&[("m.yaml", "format: jsonl\nquestions: q.jsonl\n")]);
    assert_eq!(
        codes(&check(&source, &LoadOptions::default(), &Probe)),
        ["unreadable_file"]
    );
}

/// The published data beside the repository; without it these tests say so and pass, except where CI requires it.
fn published(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data").join(name);
    if path.is_dir() {
        return Some(path);
    }
    assert!(
        std::env::var_os("CI").is_none_or(|value| value != "true"),
        "`{}` is required in CI",
        path.display()
    );
    writeln!(std::io::stderr(), "skipped: no `{}`", path.display()).unwrap();
    None
}

fn manifest(text: &str) -> (tempfile::TempDir, Source) {
    folder(&[("m.yaml", text)])
}

#[test]
fn published_bird_loads() {
    let Some(path) = published("bird") else { return };
    let source = resolve(path.to_str().unwrap(), &[], &[]).unwrap();
    let dataset = load(&source, &LoadOptions::default()).unwrap();
    assert_eq!((dataset.examples.len(), dataset.databases.len()), (1303, 11));
    assert_eq!((dataset.name.as_str(), dataset.split.as_str()), ("bird", "dev"));
    let heroes = Selection {
        databases: vec!["superhero".to_owned()],
        ..Selection::default()
    };
    assert_eq!(heroes.apply(dataset.examples).unwrap().len(), 109);
    assert!(dataset.databases["superhero"].path.is_file());
    assert!(
        dataset
            .databases
            .values()
            .all(|database| database.descriptions.is_some())
    );
    let mini = LoadOptions {
        language: None,
        split: Some("mini_dev_postgresql".to_owned()),
    };
    // 430 records, two of which are there twice, word for word.
    let postgresql = load(&source, &mini).unwrap();
    assert_eq!(
        (postgresql.examples.len(), postgresql.dialect),
        (428, Dialect::Postgresql)
    );
    let report = check(&source, &mini, &Probe);
    assert_eq!((report.errors, report.examples), (0, 428));
    assert_eq!(
        codes(&report).iter().filter(|code| **code == "repeated_record").count(),
        2
    );
}

#[test]
fn published_bird_descriptions_lose_nothing() {
    let Some(path) = published("bird") else { return };
    let (mut tables, mut columns, mut guessed) = (0, 0, Vec::new());
    for entry in fs::read_dir(path.join("dev_databases")).unwrap() {
        for table in load_descriptions(&entry.unwrap().path().join("database_description")).unwrap() {
            tables += 1;
            columns += table.columns.len();
            assert!(
                table.columns.iter().all(|column| !column.original_name.is_empty()),
                "{}",
                table.table
            );
            assert!(!format!("{table:?}").contains(['\u{feff}', '\r']), "{}", table.table);
            if table.table == "account" {
                assert!(
                    table.columns[2]
                        .value_description
                        .contains("stands for monthly issuance")
                );
            }
            if !table.warnings.is_empty() {
                guessed.push(table.table);
            }
        }
    }
    guessed.sort();
    // 799 rows that are not blank, counted with another CSV reader.
    assert_eq!((tables, columns), (75, 799));
    assert_eq!(
        guessed,
        [
            "Player_Attributes",
            "Team_Attributes",
            "account",
            "budget",
            "qualifying"
        ]
    );
}

#[test]
fn published_spider_loads_and_german_keeps_the_ids() {
    let (Some(english), Some(german)) = (published("spider"), published("spider_de")) else {
        return;
    };
    let load_folder = |path: &Path, options: &LoadOptions| {
        load(&resolve(path.to_str().unwrap(), &[], &[]).unwrap(), options).unwrap()
    };
    let english = load_folder(&english, &LoadOptions::default());
    let german = load_folder(&german, &language("de"));
    assert_eq!((english.examples.len(), german.examples.len()), (877, 873));
    assert!(
        german
            .examples
            .iter()
            .all(|example| example.language == "de" && example.difficulty.is_some())
    );
    assert_eq!(german.examples.last().unwrap().id, "1033");
    assert!(
        english
            .databases
            .values()
            .chain(german.databases.values())
            .all(|database| database.path.is_file())
    );
    assert_eq!(english.files.len(), 2);
}

#[test]
fn published_german_spider_is_checked() {
    let Some(path) = published("spider_de") else { return };
    let source = resolve(path.to_str().unwrap(), &[], &[]).unwrap();
    let report = check(&source, &language("de"), &Probe);
    let count = |code: &str| report.problems.iter().filter(|problem| problem.code == code).count();
    // The column `alter` is a keyword, and the published gold does not quote it.
    assert_eq!(
        (count("gold_error"), count("missing_database"), count("empty_database")),
        (42, 0, 1)
    );
    assert_eq!(report.languages[0].databases.len(), 20);
}

#[test]
fn published_turkish_spider_loads_by_a_short_manifest() {
    let Some(path) = published("spider_tr") else { return };
    let (_folder, source) = manifest(&format!(
        "format: jsonl\nlanguage: tr\nquestions: {0}/dev.jsonl\ndatabases: {0}/database\n\
         fields: {{id: spider_index, question: question_tr, gold: query_tr, database: db_id_tr, difficulty: hardness}}\n\
         where: {{exec_tr: same}}\nsplits:\n  all: {{where: {{exec_tr: [same, differs]}}}}\n",
        path.display()
    ));
    let dataset = load(&source, &LoadOptions::default()).unwrap();
    assert_eq!(dataset.examples.len(), 757);
    assert!(dataset.databases.values().all(|database| database.path.is_file()));
    assert_eq!(dataset.examples[0].fields["exec_tr"], "same");
    let all = LoadOptions {
        language: None,
        split: Some("all".to_owned()),
    };
    assert_eq!(load(&source, &all).unwrap().examples.len(), 877);
    let (_folder, train) = manifest(&format!(
        "format: tsv\nlanguage: tr\nquestions: {}/train.tsv\n\
         fields: {{gold: query, database: db_id, difficulty: hardness}}\n",
        path.display()
    ));
    assert_eq!(load(&train, &LoadOptions::default()).unwrap().examples.len(), 8659);
}

#[test]
fn published_statbot_loads_by_a_short_manifest() {
    let Some(path) = published("statbot_swiss") else { return };
    let (_folder, source) = manifest(&format!(
        "format: csv\ndialect: postgresql\nsplit: test\nquestions: {}/test.csv\n\
         fields: {{gold: query, database: db_id, language: lang, difficulty: hardness}}\n",
        path.display()
    ));
    let dataset = load(&source, &LoadOptions::default()).unwrap();
    assert_eq!((dataset.examples.len(), dataset.dialect), (144, Dialect::Postgresql));
    assert_eq!(load(&source, &language("de")).unwrap().examples.len(), 83);
    assert!(dataset.examples[0].question.starts_with("Which offences"));
}
