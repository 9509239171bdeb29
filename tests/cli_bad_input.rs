//! Everything that a person can get wrong: a message that names the thing and the remedy, an exit code, nothing asked and
//! nothing lost.

mod support;

use std::path::Path;

use serde_json::json;

use support::{Ran, Reply, Server, Workspace, at, both, column, files, oracle, tiny, wait_until};

/// Runs `dinsql run` against a server that must not be asked.
#[track_caller]
fn refused(workspace: &Workspace, arguments: &[&str]) -> Ran {
    let server = Server::start(|_, _| Reply::text("SELECT 1"));
    let ran = workspace.run(&server, arguments);
    assert_eq!(
        server.count(),
        0,
        "nothing is asked before all is known to be fine: {ran:#?}"
    );
    assert_eq!(ran.out, "", "results only on standard output");
    ran
}

const TINY: [&str; 5] = ["zero-shot", "--data", "tiny", "--lang", "en"];

/// One snapshot for each `bad-*.yaml`.
#[test]
fn every_mistake_in_a_pipeline_file_is_pointed_at() {
    let workspace = Workspace::new();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pipelines");
    let mut names: Vec<String> = std::fs::read_dir(&fixtures)
        .expect("fixtures")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("bad-"))
        .collect();
    names.sort();
    assert!(names.len() >= 40, "{names:?}");
    let server = Server::start(|_, _| Reply::text("SELECT 1"));
    for name in names {
        std::fs::copy(fixtures.join(&name), workspace.path(&name)).expect("a copy");
        let ran = workspace.run(&server, &[&name, "--data", "tiny", "--lang", "en"]);
        assert_eq!(ran.code, Some(2), "{name}: {ran:#?}");
        assert!(ran.err.contains(&name), "{name} is named: {}", ran.err);
        let snapshot = format!("pipeline_{}", name.trim_end_matches(".yaml").replace('-', "_"));
        insta::assert_snapshot!(snapshot, workspace.complaint(&ran));
    }
    assert_eq!(server.count(), 0);
}

#[test]
fn a_pipeline_that_is_not_there() {
    let workspace = Workspace::new();
    let ran = refused(&workspace, &["zero-shoot", "--data", "tiny"]);
    insta::assert_snapshot!("unknown_pipeline", workspace.complaint(&ran));
    let ran = refused(&workspace, &["my/pipeline.yaml", "--data", "tiny"]);
    insta::assert_snapshot!("unknown_pipeline_path", workspace.complaint(&ran));
    let ran = refused(&workspace, &["zero-shot", "zero-shot", "--data", "tiny"]);
    insta::assert_snapshot!("the_same_pipeline_twice", workspace.complaint(&ran));
}

#[test]
fn a_setting_that_does_not_fit() {
    let workspace = Workspace::new();
    for (name, setting) in [
        ("set_unknown_stage", "generatoin.max_tokens=20"),
        ("set_unknown_key", "generation.max_token=20"),
        ("set_wrong_type", "model.temperature=hot"),
        ("set_without_value", "model.temperature"),
    ] {
        let ran = refused(&workspace, &[&TINY[..], &["--set", setting]].concat());
        assert_eq!(ran.code, Some(2), "{ran:#?}");
        insta::assert_snapshot!(name, workspace.complaint(&ran));
    }
}

#[test]
fn a_dataset_that_is_not_there() {
    let workspace = Workspace::new();
    let ran = refused(&workspace, &["zero-shot", "--data", "tinny"]);
    insta::assert_snapshot!("unknown_dataset", workspace.complaint(&ran));
    std::fs::create_dir(workspace.path("empty-folder")).expect("a folder");
    let ran = refused(&workspace, &["zero-shot", "--data", "./empty-folder"]);
    insta::assert_snapshot!("folder_without_a_dataset", workspace.complaint(&ran));
}

#[test]
fn a_manifest_with_mistakes() {
    let workspace = Workspace::new();
    for (name, text) in [
        ("manifest_unknown_key", "format: jsonl\nquestion: tiny/en.jsonl\n"),
        (
            "manifest_unknown_format",
            "format: jsonlines\nquestions: tiny/en.jsonl\n",
        ),
        ("manifest_syntax", "format: [jsonl\n"),
        ("manifest_empty", "# nothing yet\n"),
    ] {
        workspace.write("datasets/broken.yaml", text);
        let ran = refused(&workspace, &["zero-shot", "--data", "broken"]);
        assert_eq!(ran.code, Some(2), "{ran:#?}");
        insta::assert_snapshot!(name, workspace.complaint(&ran));
    }
}

#[test]
fn an_empty_dataset() {
    let workspace = Workspace::new();
    workspace.write("datasets/tiny/en.jsonl", "");
    let ran = refused(&workspace, &TINY);
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("empty_dataset", workspace.complaint(&ran));
}

#[test]
fn a_malformed_dataset() {
    let workspace = Workspace::new();
    workspace.write(
        "datasets/tiny/en.jsonl",
        "{\"id\": \"c1\", \"db\": \"cafe\", \"question\": \"How many?\", \"gold\": \"SELECT 1\"}\n\
         {\"id\": \"c1\", \"db\": \"cafe\", \"question\": \"How many again?\", \"gold\": \"SELECT 1\"}\n\
         {\"id\": \"c2\", \"db\": \"cafe\", \"gold\": \"SELECT 1\"}\n\
         {\"id\": \"c3\", \"db\": \"cafe\", \n\
         [1, 2]\n",
    );
    let ran = refused(&workspace, &TINY);
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("malformed_dataset", workspace.complaint(&ran));
}

#[test]
fn questions_file_that_is_not_there() {
    let workspace = Workspace::new();
    std::fs::remove_file(workspace.path("datasets/tiny/en.jsonl")).expect("a file");
    let ran = refused(&workspace, &TINY);
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("missing_questions_file", workspace.complaint(&ran));
}

#[test]
fn a_database_that_is_not_there() {
    let workspace = Workspace::new();
    std::fs::remove_file(workspace.path("datasets/tiny/databases/valley/valley.sqlite")).expect("a file");
    let ran = refused(&workspace, &TINY);
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("missing_database", workspace.complaint(&ran));
    // What needs only the other database runs.
    let server = Server::start(oracle(&both()));
    workspace
        .run(&server, &[&TINY[..], &["--db", "cafe"]].concat())
        .expect(0);
}

#[test]
fn a_database_that_is_none() {
    let workspace = Workspace::new();
    workspace.write(
        "datasets/tiny/databases/valley/valley.sqlite",
        "This is a text, and longer than the header of a database. ".repeat(100),
    );
    let ran = refused(&workspace, &TINY);
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("database_that_is_none", workspace.complaint(&ran));
}

#[test]
fn gold_that_is_not_there() {
    let workspace = Workspace::new();
    let mut known = tiny("en");
    known[1].gold = String::new();
    known[4].gold = String::new();
    workspace.dataset("ungraded", &known);
    std::fs::rename(
        workspace.path("datasets/tiny/databases"),
        workspace.path("datasets/ungraded/databases"),
    )
    .expect("databases");
    let ran = refused(&workspace, &["zero-shot", "--data", "ungraded"]);
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("missing_gold", workspace.complaint(&ran));
    // Asked for, they are taken along, and count as what they are.
    let server = Server::start(|_, _| Reply::text("SELECT 1"));
    let ran = workspace
        .run(
            &server,
            &["zero-shot", "--data", "ungraded", "--allow-missing-gold", "--json"],
        )
        .expect(0);
    assert_eq!(
        ran.json()["runs"][0]["outcomes"],
        json!({ "answered": 4, "gold_error": 2 })
    );
}

#[test]
fn no_key() {
    let workspace = Workspace::new();
    let ran = workspace.call(&[&["run"], &TINY[..], &["--provider", "openai", "--model", "gpt"]].concat());
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("no_key", workspace.complaint(&ran));
    let mut command = workspace.dinsql();
    command.arg("run").args(TINY).args([
        "--provider",
        "openai",
        "--model",
        "gpt",
        "--api-key-file",
        "no-such-file",
    ]);
    let ran = Ran::from(&command.output().expect("the binary runs"));
    insta::assert_snapshot!("no_key_file", workspace.complaint(&ran));
    workspace.write("empty-key", "\n\n");
    let ran = workspace.call(
        &[
            &["run"],
            &TINY[..],
            &["--provider", "openai", "--model", "gpt", "--api-key-file", "empty-key"],
        ]
        .concat(),
    );
    insta::assert_snapshot!("empty_key_file", workspace.complaint(&ran));
    workspace.write(
        "dinsql.yaml",
        "providers:\n  ours: { base_url: \"https://models.example.org/v1\", api_key_env: OUR_KEY }\n",
    );
    let ran = workspace.call(&[&["run"], &TINY[..], &["--provider", "ours", "--model", "m"]].concat());
    insta::assert_snapshot!("no_key_in_the_named_variable", workspace.complaint(&ran));
}

#[test]
fn a_provider_that_is_not_there() {
    let workspace = Workspace::new();
    let ran = workspace.call(&[&["run"], &TINY[..], &["--provider", "opnai", "--model", "m"]].concat());
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("unknown_provider", workspace.complaint(&ran));
}

#[test]
fn a_model_that_is_not_named_or_not_there() {
    let workspace = Workspace::new();
    let server = Server::start(|_, _| Reply::text("SELECT 1"));
    let ran = workspace.call(&[&["run"], &TINY[..], &["--base-url", &server.url]].concat());
    assert_eq!((ran.code, server.count()), (Some(2), 0), "{ran:#?}");
    insta::assert_snapshot!("no_model_named", workspace.complaint(&ran));
    let ran = workspace.call(&[&["run"], &TINY[..], &["--provider", "embedded", "--model", "qwen9"]].concat());
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("unknown_embedded_model", workspace.complaint(&ran));
    let ran = workspace.call(&["model", "pull", "qwen9"]);
    insta::assert_snapshot!("unknown_embedded_model_to_pull", workspace.complaint(&ran));
}

#[test]
fn an_address_that_is_none() {
    let workspace = Workspace::new();
    for (name, url) in [
        ("address_without_scheme", "localhost/v1"),
        ("address_of_another_scheme", "ftp://127.0.0.1/v1"),
        ("address_with_a_key", "http://user:sk-inside-the-address@127.0.0.1/v1"),
    ] {
        let ran = workspace.call(&[&["run"], &TINY[..], &["--base-url", url, "--model", "m"]].concat());
        assert_eq!(ran.code, Some(2), "{ran:#?}");
        assert!(!ran.err.contains("sk-inside-the-address"), "{}", ran.err);
        insta::assert_snapshot!(name, workspace.complaint(&ran));
    }
}

#[test]
fn a_language_that_is_not_there() {
    let workspace = Workspace::new();
    let ran = refused(&workspace, &["zero-shot", "--data", "tiny", "--lang", "fr"]);
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("language_that_the_data_lacks", workspace.complaint(&ran));
    let mut manifest = workspace.read("datasets/tiny.yaml");
    manifest.push_str("  fr: { questions: tiny/en.jsonl }\n");
    workspace.write("datasets/tiny.yaml", manifest);
    let ran = refused(&workspace, &["zero-shot", "--data", "tiny", "--lang", "en,fr"]);
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("language_without_templates", workspace.complaint(&ran));
}

#[test]
fn a_selection_of_nothing() {
    let workspace = Workspace::new();
    for (name, flags) in [
        ("unknown_split", ["--split", "test"]),
        ("unknown_id", ["--ids", "c11"]),
        ("unknown_database", ["--db", "vally"]),
        ("condition_without_value", ["--where", "difficulty"]),
        ("condition_that_nothing_meets", ["--where", "difficulty=impossible"]),
        ("offset_past_the_end", ["--offset", "100"]),
    ] {
        let ran = refused(&workspace, &[&TINY[..], &flags].concat());
        assert_eq!(ran.code, Some(2), "{name}: {ran:#?}");
        insta::assert_snapshot!(name, workspace.complaint(&ran));
    }
}

#[test]
fn a_template_that_does_not_fit() {
    let workspace = Workspace::new();
    let template = |text: &str| {
        workspace.write("prompts/en/zero-shot/generation.jinja", text);
    };
    for (name, text) in [
        (
            "template_with_an_unknown_variable",
            "{{ system() }}\nYou know SQL.\n{{ user() }}\n{{ schema }}\n{{ qestion }}\n",
        ),
        (
            "template_with_a_syntax_error",
            "{{ system() }}\nYou know SQL.\n{{ user() }}\n{% if evidence %}\n{{ question }}\n",
        ),
        (
            "template_that_reads_a_later_stage",
            "{{ user() }}\n{{ schema }}\n{{ question }}\n{{ self_correction.sql }}\n",
        ),
    ] {
        template(text);
        let ran = refused(&workspace, &TINY);
        assert_eq!(ran.code, Some(2), "{name}: {ran:#?}");
        insta::assert_snapshot!(name, workspace.complaint(&ran));
    }
    let ran = refused(&workspace, &[&TINY[..], &["--prompts-dir", "no-such-folder"]].concat());
    insta::assert_snapshot!("prompts_folder_that_is_not_there", workspace.complaint(&ran));
}

/// No check before the first call can see this: the template is fine, but for one example.
#[test]
fn a_template_that_fails_at_one_example() {
    let workspace = Workspace::new();
    let known = workspace.many(30);
    workspace.write(
        "prompts/en/zero-shot/generation.jinja",
        "{{ system() }}\n\
         You know {{ dialect }}.\n\
         {{ user() }}\n\
         {{ schema }}\n\
         Part {{ 100 // ((example.id | replace('q', '') | int) - 25) }}\n\
         Question: {{ question }}\n",
    );
    let server = Server::start(oracle(&known));
    let arguments = ["zero-shot", "--data", "many", "--concurrency", "1"];
    let ran = workspace.run(&server, &arguments);
    assert!(
        ran.err.contains("`q025`") && ran.err.contains("`generation`"),
        "the example and the stage are named: {}",
        ran.err
    );
    assert!(
        ran.err.contains("generation.jinja:5"),
        "the template and the line are named: {}",
        ran.err
    );
    let said: String = ran
        .err
        .lines()
        .filter(|line| !line.contains("EX "))
        .map(|line| format!("{line}\n"))
        .collect();
    insta::assert_snapshot!(
        "template_that_fails_at_one_example",
        format!("exit code {:?}\n{}", ran.code, workspace.redact(&said))
    );
    // Finished work is kept ...
    let folder = workspace.run_folder("zero-shot.many.en.");
    let done = column(&folder.join("traces.jsonl"), "id");
    assert!(
        done.len() >= 20 && !done.contains(&"q025".to_owned()),
        "{} traces",
        done.len()
    );
    assert_eq!(done.len(), server.count(), "what was paid for is in the folder");
    // ... and once the template is mended, the same command ends well.
    let mended = workspace
        .read("prompts/en/zero-shot/generation.jinja")
        .replace(" - 25)", " - 250)");
    workspace.write("prompts/en/zero-shot/generation.jinja", mended);
    let ran = workspace
        .run(&server, &[&arguments[..], &["--json"]].concat())
        .expect(0);
    assert_eq!(ran.json()["runs"][0]["metrics"]["ex"]["value"], 1.0);
}

#[test]
fn a_project_file_with_mistakes() {
    let workspace = Workspace::new();
    for (name, text) in [
        (
            "project_with_several_mistakes",
            "provider:\n  ours: { base_url: \"https://models.example.org/v1\" }\n\
             default_provider: [ours]\nprompts: 7\n",
        ),
        (
            "project_with_a_bad_provider",
            "providers:\n  ours: { base_ur: \"https://models.example.org/v1\", concurrency: many, timeout: -1 }\n",
        ),
        ("project_with_an_unknown_default", "default_provider: mine\n"),
        ("project_that_is_no_yaml", "providers: {\n"),
    ] {
        workspace.write("dinsql.yaml", text);
        let ran = refused(&workspace, &TINY);
        assert_eq!(ran.code, Some(2), "{name}: {ran:#?}");
        insta::assert_snapshot!(name, workspace.complaint(&ran));
    }
    let ran = refused(&workspace, &[&TINY[..], &["--config", "other.yaml"]].concat());
    insta::assert_snapshot!("project_file_that_is_not_there", workspace.complaint(&ran));
}

#[test]
fn a_key_in_the_project_file_is_refused_and_not_repeated() {
    const KEY: &str = "sk-proj-Zr8NsLm4Hq2vXw97";
    let workspace = Workspace::new();
    for (name, text) in [
        (
            "literal_key_in_the_project_file",
            format!("providers:\n  ours:\n    base_url: https://models.example.org/v1\n    api_key: {KEY}\n"),
        ),
        (
            "literal_key_in_place_of_a_variable",
            format!("providers:\n  ours: {{ base_url: \"https://models.example.org/v1\", api_key_env: {KEY} }}\n"),
        ),
    ] {
        workspace.write("dinsql.yaml", &text);
        let ran = refused(&workspace, &TINY);
        assert_eq!(ran.code, Some(2), "{name}: {ran:#?}");
        assert!(!ran.err.contains(KEY) && !ran.out.contains(KEY), "{ran:#?}");
        insta::assert_snapshot!(name, workspace.complaint(&ran));
        for path in files(workspace.root()) {
            let bytes = std::fs::read(&path).expect("a file");
            assert!(
                path.ends_with("dinsql.yaml") || !bytes.windows(KEY.len()).any(|window| window == KEY.as_bytes()),
                "the key is in {}",
                path.display()
            );
        }
    }
}

#[test]
fn a_cache_that_cannot_be_used() {
    let workspace = Workspace::new();
    let path = workspace.write(
        "cache/completions.sqlite",
        "This is a text, and longer than the header of a database. ".repeat(100),
    );
    let before = std::fs::read(&path).expect("a file");
    let ran = refused(&workspace, &TINY);
    insta::assert_snapshot!("cache_that_is_no_database", workspace.complaint(&ran));
    assert_eq!(
        std::fs::read(&path).expect("a file"),
        before,
        "a file that is not ours is left alone"
    );
    std::fs::remove_file(&path).expect("a file");
    workspace.database("cache/completions.sqlite", "CREATE TABLE recipe (name TEXT);");
    let ran = refused(&workspace, &TINY);
    insta::assert_snapshot!("cache_that_is_another_database", workspace.complaint(&ran));
    workspace.write("file", "");
    let ran = refused(&workspace, &[&TINY[..], &["--cache", "file"]].concat());
    insta::assert_snapshot!("cache_folder_that_is_a_file", workspace.complaint(&ran));
}

#[test]
fn a_folder_that_cannot_be_resumed() {
    let workspace = Workspace::new();
    std::fs::create_dir_all(workspace.path("runs/nothing")).expect("a folder");
    let ran = workspace.call(&["run", "--resume", "runs/nothing"]);
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("resume_without_a_record", workspace.complaint(&ran));
    workspace.write("runs/broken/run.json", "{\"format\": 1,");
    let ran = workspace.call(&["run", "--resume", "runs/broken"]);
    insta::assert_snapshot!("resume_of_a_broken_record", workspace.complaint(&ran));
    let ran = workspace.call(&["run", "--resume", "runs/nothing", "zero-shot", "--data", "tiny"]);
    insta::assert_snapshot!("resume_and_a_pipeline", workspace.complaint(&ran));
}

/// A run whose data has changed since is another run, not the same one gone on with.
#[test]
fn a_folder_whose_data_has_changed() {
    let workspace = Workspace::new();
    let known = workspace.many(30);
    let server = Server::start(oracle(&known));
    let hanging = Server::start(|_, _| Reply::Hang);
    let arguments = ["zero-shot", "--data", "many"];
    let running = workspace.start(&hanging, &arguments);
    wait_until("it asks", || hanging.count() > 0);
    running.kill();
    let folder = workspace.run_folder("zero-shot.many.en.");
    workspace.many(31);
    let ran = workspace.call(&["run", "--resume", folder.to_str().expect("a path")]);
    assert_ne!(ran.code, Some(0), "nothing was resumed, and that is said: {ran:#?}");
    insta::assert_snapshot!("resume_after_the_data_has_changed", workspace.complaint(&ran));
    assert_eq!(server.count(), 0);
}

#[test]
fn a_predictions_file_with_mistakes() {
    let workspace = Workspace::new();
    for (name, file, content) in [
        (
            "predictions_without_ids",
            "p.jsonl",
            "{\"sql\": \"SELECT 1\"}\n{\"sql\": \"SELECT 2\"}\n",
        ),
        ("predictions_without_queries", "p.jsonl", "{\"id\": \"c1\"}\n"),
        (
            "predictions_of_other_ids",
            "p.jsonl",
            "{\"id\": \"x1\", \"sql\": \"SELECT 1\"}\n{\"id\": \"x2\", \"sql\": \"SELECT 2\"}\n",
        ),
        (
            "predictions_given_twice",
            "p.jsonl",
            "{\"id\": \"c1\", \"sql\": \"SELECT 1\"}\n{\"id\": \"c1\", \"sql\": \"SELECT 2\"}\n",
        ),
        ("predictions_that_are_no_json", "p.json", "{\"c1\": \"SELECT 1\",\n"),
        ("predictions_one_line_short", "p.sql", "SELECT 1\nSELECT 2\n"),
        ("predictions_that_are_empty", "p.sql", ""),
    ] {
        workspace.write(file, content);
        let ran = workspace.call(&["score", "--data", "tiny", "--lang", "en", "--predictions", file]);
        insta::assert_snapshot!(name, workspace.complaint(&ran));
    }
    let ran = workspace.call(&[
        "score",
        "--data",
        "tiny",
        "--lang",
        "en",
        "--predictions",
        "nowhere.json",
    ]);
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("predictions_that_are_not_there", workspace.complaint(&ran));
    workspace.write("p.sql", "SELECT 1\n");
    let ran = workspace.call(&[
        "score",
        "--data",
        "tiny",
        "--lang",
        "en",
        "--predictions",
        "p.sql",
        "--metrics",
        "exx",
    ]);
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    insta::assert_snapshot!("unknown_metric", workspace.complaint(&ran));
}

#[test]
fn a_question_to_nothing() {
    let workspace = Workspace::new();
    let server = Server::start(|_, _| Reply::text("SELECT 1"));
    for (name, arguments) in [
        ("ask_without_a_file", &["--db", "nowhere.sqlite"][..]),
        ("ask_of_an_unknown_database", &["--db", "vally", "--data", "tiny"]),
        (
            "ask_in_a_language_without_templates",
            &["--db", "datasets/tiny/databases/cafe/cafe.sqlite", "--lang", "fr"],
        ),
    ] {
        let ran = workspace.call(&[&["ask", "How many?"], arguments, &at(&server)[..]].concat());
        assert_ne!(ran.code, Some(0), "{ran:#?}");
        insta::assert_snapshot!(name, workspace.complaint(&ran));
    }
    assert_eq!(server.count(), 0);
}

#[test]
fn wrong_usage() {
    let workspace = Workspace::new();
    for (name, arguments) in [
        ("usage_no_data", &["run", "zero-shot"][..]),
        ("usage_no_pipeline", &["run"]),
        (
            "usage_unknown_flag",
            &["run", "zero-shot", "--data", "tiny", "--langs", "en"],
        ),
        ("usage_unknown_command", &["rum"]),
        (
            "usage_no_number",
            &["run", "zero-shot", "--data", "tiny", "--limit", "few"],
        ),
        (
            "usage_no_concurrency",
            &["run", "zero-shot", "--data", "tiny", "--concurrency", "0"],
        ),
    ] {
        let ran = workspace.call(arguments);
        assert_eq!(ran.code, Some(2), "{ran:#?}");
        insta::assert_snapshot!(name, workspace.complaint(&ran));
    }
    let ran = refused(&workspace, &[&TINY[..], &["--sql-timeout", "0"]].concat());
    insta::assert_snapshot!("usage_no_time_for_sql", workspace.complaint(&ran));
}
