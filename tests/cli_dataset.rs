//! `dinsql dataset`, `score`, `ask` and `completions`: everything around a run.

mod support;

use std::path::Path;

use serde_json::{Value as Json, json};

use support::{Reply, Server, Workspace, at, both, oracle, read_lines, tiny};

#[test]
fn list_shows_own_and_shipped_datasets() {
    let workspace = Workspace::new();
    workspace.write("datasets/broken.yaml", "format: [\n");
    let json = workspace.call(&["dataset", "list", "--json"]).expect(0).json();
    let find = |name: &str| {
        json["datasets"]
            .as_array()
            .expect("datasets")
            .iter()
            .find(|dataset| dataset["name"] == name)
            .unwrap_or_else(|| panic!("no {name}: {json:#}"))
    };
    assert_eq!(find("tiny")["languages"], "en, tr");
    assert_eq!(find("tiny")["description"], "A café and a valley");
    for language in ["en", "tr", "de"] {
        assert!(
            find("sample")["languages"]
                .as_str()
                .unwrap_or_default()
                .contains(language),
            "{json:#}"
        );
    }
    assert!(
        find("broken")["error"].is_string(),
        "one broken manifest hides none of the others: {json:#}"
    );
    let text = workspace.call(&["dataset", "list"]).expect(0).out;
    assert!(text.contains("A café and a valley"), "{text}");
}

#[test]
fn sound_data_passes_the_check() {
    let workspace = Workspace::new();
    let json = workspace.call(&["dataset", "check", "tiny", "--json"]).expect(0).json();
    assert_eq!((&json["errors"], &json["warnings"]), (&json!(0), &json!(0)), "{json:#}");
    assert_eq!(json["examples"], 12);
    let ran = workspace.call(&["dataset", "check", "tiny", "--lang", "tr"]).expect(0);
    assert!(
        ran.out.contains("6 examples") && ran.out.contains("0 errors"),
        "{}",
        ran.out
    );
}

#[test]
fn the_shipped_data_passes_the_check() {
    let workspace = Workspace::new();
    let json = workspace
        .call(&["dataset", "check", "sample", "--json"])
        .expect(0)
        .json();
    assert_eq!(json["errors"], 0, "{json:#}");
    // Link tables whose columns speak for themselves are not described.
    for problem in json["problems"].as_array().expect("problems") {
        assert_eq!(problem["code"], "undescribed_tables", "{problem:#}");
    }
    let sizes: Vec<&Json> = json["languages"]
        .as_array()
        .expect("languages")
        .iter()
        .map(|language| &language["examples"])
        .collect();
    assert_eq!(sizes.len(), 3);
    assert!(sizes[0].as_u64().unwrap_or_default() >= 60 && sizes.iter().all(|&size| size == sizes[0]));
}

#[test]
fn everything_wrong_is_found_at_once() {
    let workspace = Workspace::new();
    std::fs::remove_file(workspace.path("datasets/tiny/databases/valley/valley.sqlite")).expect("a file");
    workspace.database(
        "datasets/tiny/databases/bare/bare.sqlite",
        "CREATE TABLE shelf (id INTEGER);",
    );
    workspace.write(
        "datasets/tiny/databases/none/none.sqlite",
        "This is a text, and longer than the header of a database. ".repeat(100),
    );
    let record = |id: &str, db: &str, question: &str, gold: &str| {
        format!(
            "{}\n",
            json!({ "id": id, "db": db, "question": question, "gold": gold, "difficulty": "simple" })
        )
    };
    let questions = [
        record("a", "cafe", "How many drinks?", "SELECT COUNT(*) FROM drink"),
        record("b", "cafe", "How many drinks?", "SELECT COUNT(*) FROM drink"),
        record("a", "cafe", "How many sales?", "SELECT COUNT(*) FROM sale"),
        record("c", "cafe", "Which table?", "SELECT name FROM nowhere"),
        record("d", "cafe", "Which gold?", ""),
        record("e", "valley", "Which river?", "SELECT name FROM river"),
        record("f", "bare", "Which shelf?", "SELECT id FROM shelf"),
        record("g", "none", "Which text?", "SELECT 1"),
        "{\"id\": \"h\", \"db\": \"cafe\"}\n".to_owned(),
        "{\"id\": \"i\", \n".to_owned(),
    ];
    workspace.write("datasets/tiny/en.jsonl", questions.concat());
    let ran = workspace.call(&["dataset", "check", "tiny", "--lang", "en"]).expect(1);
    let findings: String = ran
        .out
        .lines()
        .filter(|line| line.starts_with("error [") || line.starts_with("warning [") || line.ends_with("warnings"))
        .map(|line| format!("{line}\n"))
        .collect();
    insta::assert_snapshot!("check_of_broken_data", workspace.redact(&findings));
    let json = workspace
        .call(&["dataset", "check", "tiny", "--lang", "en", "--json"])
        .expect(1)
        .json();
    let problems = json["problems"].as_array().expect("problems");
    for problem in problems {
        for key in ["severity", "code", "where", "message"] {
            assert!(problem[key].is_string(), "{problem:#}");
        }
    }
    assert_eq!(
        json["errors"].as_u64().unwrap_or_default() + json["warnings"].as_u64().unwrap_or_default(),
        problems.len() as u64
    );
}

/// Six predictions: right, right in another way, wrong, broken, writing, and none.
fn predictions() -> [(&'static str, Option<&'static str>, &'static str, f64); 6] {
    [
        ("c1", Some("SELECT COUNT(id) FROM drink"), "answered", 1.0),
        (
            "c2",
            Some("SELECT name FROM drink WHERE id IN (SELECT drink_id FROM sale WHERE day LIKE '2024-05-01%')"),
            "answered",
            1.0,
        ),
        ("c3", Some("SELECT name FROM drink"), "answered", 0.0),
        ("v1", Some("SELECT FROM river"), "sql_error", 0.0),
        ("v2", Some("DROP TABLE town"), "not_read_only", 0.0),
        ("v3", None, "no_sql", 0.0),
    ]
}

#[test]
fn score_prints_one_object_and_writes_a_verdict_an_example() {
    let workspace = Workspace::new();
    let bird: serde_json::Map<String, Json> = predictions()
        .iter()
        .zip(tiny("en"))
        .filter_map(|((id, sql, ..), known)| {
            sql.map(|sql| {
                (
                    (*id).to_owned(),
                    json!(format!("{sql}\t----- bird -----\t{}", known.database)),
                )
            })
        })
        .collect();
    workspace.write("bird.json", Json::Object(bird).to_string());
    let lines: String = predictions()
        .iter()
        .filter_map(|(id, sql, ..)| sql.map(|sql| format!("{}\n", json!({ "id": id, "sql": sql }))))
        .collect();
    workspace.write("lines.jsonl", lines);
    let plain: String = predictions()
        .iter()
        .map(|(_, sql, ..)| format!("{}\n", sql.unwrap_or_default()))
        .collect();
    workspace.write("plain.sql", plain);
    for file in ["bird.json", "lines.jsonl", "plain.sql"] {
        let ran = workspace
            .call(&[
                "score",
                "--data",
                "tiny",
                "--lang",
                "en",
                "--predictions",
                file,
                "--json",
                "--verdicts",
                "verdicts.jsonl",
            ])
            .expect(0);
        let json = ran.json();
        assert_eq!(json["n"], 6, "{file}");
        let ex = &json["metrics"]["ex"];
        assert_eq!(
            (ex["value"].as_f64(), &ex["n"]),
            (Some(2.0 / 6.0), &json!(6)),
            "{file}: {json:#}"
        );
        assert!(ex["low"].as_f64() < ex["value"].as_f64() && ex["value"].as_f64() < ex["high"].as_f64());
        // A blank line is a text that gives no rows, as it is to BIRD's script; elsewhere the prediction is absent.
        let outcomes = if file == "plain.sql" {
            json!({ "answered": 4, "sql_error": 1, "not_read_only": 1 })
        } else {
            json!({ "answered": 3, "no_sql": 1, "sql_error": 1, "not_read_only": 1 })
        };
        assert_eq!(json["outcomes"], outcomes, "{file}");
        for (verdict, (id, _, outcome, value)) in
            read_lines(&workspace.path("verdicts.jsonl")).iter().zip(predictions())
        {
            let outcome = if file == "plain.sql" && outcome == "no_sql" {
                "answered"
            } else {
                outcome
            };
            assert_eq!(
                (&verdict["id"], &verdict["outcome"]),
                (&json!(id), &json!(outcome)),
                "{file}"
            );
            assert!(verdict["db"].is_string());
            assert_eq!(
                verdict["metrics"]["ex"].as_f64().unwrap_or(0.0),
                value,
                "{file}: {verdict}"
            );
        }
    }
    // The database is as it was.
    let json = workspace.call(&["dataset", "check", "tiny", "--json"]).expect(0).json();
    assert_eq!(json["errors"], 0);
    let ran = workspace
        .call(&["score", "--data", "tiny", "--lang", "en", "--predictions", "bird.json"])
        .expect(0);
    insta::assert_snapshot!("score_table", workspace.redact(&ran.out));
    insta::assert_snapshot!("score_warnings", workspace.redact(&ran.err));
}

/// A run's own predictions, in both forms, score as the run did.
#[test]
fn predictions_of_a_run_can_be_scored_again() {
    let workspace = Workspace::new();
    let server = Server::start(oracle(&both()));
    workspace
        .run(&server, &["zero-shot", "--data", "tiny", "--lang", "tr"])
        .expect(0);
    let folder = workspace.run_folder("zero-shot.tiny.tr.");
    for file in ["predictions.json", "predictions.sql"] {
        let path = folder.join(file);
        let json = workspace
            .call(&[
                "score",
                "--data",
                "tiny",
                "--lang",
                "tr",
                "--json",
                "--predictions",
                path.to_str().expect("a path"),
            ])
            .expect(0)
            .json();
        assert_eq!(json["metrics"]["ex"]["value"], 1.0, "{file}");
    }
}

#[test]
fn data_may_be_a_folder_or_a_path() {
    let workspace = Workspace::new();
    // A folder in BIRD's layout.
    let database = "datasets/tiny/databases/cafe/cafe.sqlite";
    std::fs::create_dir_all(workspace.path("bird/dev_databases/cafe")).expect("a folder");
    std::fs::copy(
        workspace.path(database),
        workspace.path("bird/dev_databases/cafe/cafe.sqlite"),
    )
    .expect("a copy");
    workspace.write(
        "bird/dev.json",
        json!([{
            "question_id": 7, "db_id": "cafe", "question": "How many drinks are on the menu?", "evidence": "",
            "SQL": "SELECT COUNT(*) FROM drink", "difficulty": "simple",
        }])
        .to_string(),
    );
    workspace.write(
        "bird/dev_tables.json",
        json!([{ "db_id": "cafe", "table_names_original": ["drink", "sale"] }]).to_string(),
    );
    let server = Server::start(oracle(&tiny("en")));
    let ran = workspace
        .run(&server, &["zero-shot", "--data", "bird", "--json"])
        .expect(0);
    assert_eq!(ran.json()["runs"][0]["metrics"]["ex"]["value"], 1.0, "{ran:#?}");
    let manifest = workspace.path("datasets/tiny.yaml");
    let ran = workspace
        .run(
            &server,
            &[
                "zero-shot",
                "--data",
                manifest.to_str().expect("a path"),
                "--lang",
                "en",
                "--json",
            ],
        )
        .expect(0);
    assert_eq!(ran.json()["runs"][0]["data"], "tiny");
}

#[test]
fn ask_answers_one_question() {
    let workspace = Workspace::new();
    let server =
        Server::start(|_, _| Reply::text("```sql\nSELECT name, price_cents FROM drink WHERE kind = 'tea'\n```"));
    let file = "datasets/tiny/databases/cafe/cafe.sqlite";
    let ask = |arguments: &[&str]| workspace.call(&[&["ask", "Which teas?"], arguments, &at(&server)[..]].concat());
    let ran = ask(&["--db", file]).expect(0);
    insta::assert_snapshot!("ask", workspace.redact(&ran.out));
    assert!(server.received()[0].question().contains("Which teas?"));
    assert!(server.received()[0].question().contains("CREATE TABLE"));
    let json = ask(&["--db", "cafe", "--data", "tiny", "--json", "--lang", "tr"])
        .expect(0)
        .json();
    assert_eq!(json["sql"], "SELECT name, price_cents FROM drink WHERE kind = 'tea'");
    assert_eq!(json["columns"], json!(["name", "price_cents"]));
    assert_eq!(json["rows"].as_array().map(Vec::len), Some(2), "{json:#}");

    let sorry = Server::start(|_, _| Reply::text("I am sorry."));
    let ran = workspace.call(&[&["ask", "Which teas?", "--db", file], &at(&sorry)[..]].concat());
    insta::assert_snapshot!("ask_without_an_answer", workspace.complaint(&ran));
    let broken = Server::start(|_, _| Reply::text("SELECT nme FROM drink"));
    let ran = workspace.call(&[&["ask", "Which teas?", "--db", file], &at(&broken)[..]].concat());
    insta::assert_snapshot!("ask_with_a_broken_answer", workspace.complaint(&ran));
}

/// `ask` and `run` share the way from a question to an answer, and the cache.
#[test]
fn a_model_cannot_write_to_a_database_by_ask() {
    let workspace = Workspace::new();
    let server = Server::start(|_, _| Reply::text("DELETE FROM drink"));
    let file = "datasets/tiny/databases/cafe/cafe.sqlite";
    let before = std::fs::read(workspace.path(file)).expect("a file");
    let ran = workspace.call(&[&["ask", "Tidy up!", "--db", file], &at(&server)[..]].concat());
    assert_eq!(ran.code, Some(1), "{ran:#?}");
    assert_eq!(std::fs::read(workspace.path(file)).expect("a file"), before);
}

#[test]
fn completions_are_printed() {
    let workspace = Workspace::new();
    for (shell, word) in [
        ("bash", "complete -F"),
        ("zsh", "#compdef dinsql"),
        ("fish", "complete -c dinsql"),
    ] {
        let ran = workspace.call(&["completions", shell]).expect(0);
        assert!(ran.out.contains(word) && ran.out.contains("dataset"), "{shell}");
        assert_eq!(ran.err, "");
    }
}

#[test]
fn help_and_version_go_to_standard_output() {
    let workspace = Workspace::new();
    let ran = workspace.call(&["--version"]).expect(0);
    assert_eq!(ran.out, format!("dinsql {}\n", env!("CARGO_PKG_VERSION")));
    for arguments in [&["--help"][..], &["run", "--help"], &["dataset", "check", "--help"]] {
        let ran = workspace.call(arguments).expect(0);
        assert!(ran.out.contains("Usage: dinsql") && ran.err.is_empty(), "{ran:#?}");
    }
    // Help costs no folder.
    assert!(!workspace.path("cache").exists() && !workspace.path("runs").exists());
    assert!(!Path::new(&workspace.path("home")).exists());
}
