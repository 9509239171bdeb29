//! `dinsql prompt`: templates listed, rendered exactly as they would be sent, and checked.

mod support;

use std::path::Path;

use serde_json::{Value as Json, json};

use support::{Server, Workspace, both, oracle, read_lines};

/// Renders a shipped pipeline for the first example of the sample data.
fn rendered(workspace: &Workspace, pipeline: &str, language: &str) -> String {
    let datasets = Path::new(env!("CARGO_MANIFEST_DIR")).join("datasets");
    let datasets = datasets.to_str().expect("a path");
    let ran = workspace
        .call(&[
            "prompt",
            "render",
            pipeline,
            "--data",
            "sample",
            "--example",
            "s001",
            "--lang",
            language,
            "--datasets-dir",
            datasets,
        ])
        .expect(0);
    assert_eq!(ran.err, "");
    workspace.redact(&ran.out)
}

/// A changed prompt changes every result that was ever measured with it: each change must be seen.
#[test]
fn the_shipped_prompts_are_pinned() {
    let workspace = Workspace::new();
    for language in ["en", "tr", "de"] {
        for pipeline in ["zero-shot", "din-sql"] {
            let name = format!("prompt_{}_{language}", pipeline.replace('-', "_"));
            insta::assert_snapshot!(name, rendered(&workspace, pipeline, language));
        }
    }
}

#[test]
fn what_is_rendered_is_what_is_sent() {
    let workspace = Workspace::new();
    let server = Server::start(oracle(&both()));
    workspace
        .run(&server, &["din-sql", "--data", "tiny", "--lang", "tr"])
        .expect(0);
    let folder = workspace.run_folder("din-sql.tiny.tr.");
    let render = |more: &[&str]| {
        let arguments = [
            "prompt",
            "render",
            "din-sql",
            "--data",
            "tiny",
            "--example",
            "c3",
            "--lang",
            "tr",
            "--json",
        ];
        workspace.call(&[&arguments, more].concat()).expect(0).json()
    };
    let with_run = render(&["--run", folder.to_str().expect("a path")]);
    assert_eq!(
        (
            &with_run["pipeline"],
            &with_run["data"],
            &with_run["example"],
            &with_run["lang"]
        ),
        (&json!("din-sql"), &json!("tiny"), &json!("c3"), &json!("tr"))
    );
    let trace = read_lines(&folder.join("traces.jsonl"))
        .into_iter()
        .find(|trace| trace["id"] == "c3")
        .expect("a trace");
    let stages = with_run["stages"].as_array().expect("stages");
    assert_eq!(stages.len(), 4);
    for (stage, recorded) in stages.iter().zip(trace["stages"].as_array().expect("stages")) {
        assert_eq!(stage["stage"], recorded["stage"]);
        assert_eq!(stage["template"], recorded["template"]);
        assert_eq!(stage["messages"], recorded["messages"]);
        assert!(stage["tokens"].as_u64().unwrap_or_default() > 50);
        assert!(
            server
                .received()
                .iter()
                .any(|request| request.body["messages"] == stage["messages"]),
            "the messages went over the wire"
        );
    }
    let inputs: Vec<&str> = stages
        .iter()
        .map(|stage| stage["inputs"].as_str().unwrap_or_default())
        .collect();
    assert_eq!(inputs, ["data", "recorded", "recorded", "recorded"]);

    // Without a run, each case of the switch is shown, and earlier outputs are placeholders that say so.
    let without = render(&[]);
    let stages: Vec<(&str, &Json)> = without["stages"]
        .as_array()
        .expect("stages")
        .iter()
        .map(|stage| (stage["stage"].as_str().unwrap_or_default(), &stage["case"]))
        .collect();
    assert_eq!(
        stages,
        [
            ("schema_linking", &Json::Null),
            ("classification", &Json::Null),
            ("generation", &json!("EASY")),
            ("generation", &json!("NON-NESTED")),
            ("generation", &json!("NESTED")),
            ("self_correction", &Json::Null)
        ]
    );
    assert!(without.to_string().contains("<schema_linking.links>"));

    let one = render(&["--stage", "classification"]);
    assert_eq!(one["stages"].as_array().map(Vec::len), Some(1));
}

#[test]
fn rendering_complains_about_what_is_not_there() {
    let workspace = Workspace::new();
    let base = ["prompt", "render", "din-sql", "--data", "tiny", "--lang", "en"];
    for (name, more) in [
        ("render_unknown_example", &["--example", "c11"][..]),
        ("render_unknown_stage", &["--example", "c1", "--stage", "generatoin"]),
        ("render_unknown_run", &["--example", "c1", "--run", "runs/none"]),
    ] {
        let ran = workspace.call(&[&base, more].concat());
        assert_eq!((ran.code, &*ran.out), (Some(2), ""), "{ran:#?}");
        insta::assert_snapshot!(name, workspace.complaint(&ran));
    }
}

#[test]
fn list_shows_the_shipped_templates() {
    let workspace = Workspace::new();
    let ran = workspace.call(&["prompt", "list"]).expect(0);
    insta::assert_snapshot!("prompt_list", workspace.redact(&ran.out));
    let json = workspace.call(&["prompt", "list", "--json"]).expect(0).json();
    for template in [
        "zero-shot/generation",
        "din-sql/schema-linking",
        "din-sql/self-correction",
    ] {
        let mut languages: Vec<&str> = json["templates"][template]
            .as_array()
            .unwrap_or_else(|| panic!("{template}: {json:#}"))
            .iter()
            .filter_map(Json::as_str)
            .collect();
        languages.sort_unstable();
        assert_eq!(languages, ["de", "en", "tr"]);
    }
}

#[test]
fn the_shipped_templates_pass_the_lint() {
    let workspace = Workspace::new();
    let ran = workspace
        .call(&["prompt", "lint", "--data", "sample", "--json"])
        .expect(0);
    let json = ran.json();
    assert_eq!(json["problems"], json!([]));
    assert!(json["checked"].as_u64().unwrap_or_default() >= 3 * 13, "{json:#}");
    // Prompt and answer fit the embedded model's context, at the longest example of each database.
    for size in json["sizes"].as_array().expect("sizes") {
        assert!(
            size["prompt_tokens"].as_u64().unwrap_or(u64::MAX) + size["max_tokens"].as_u64().unwrap_or(u64::MAX) < 8192
        );
    }
    let ran = workspace.call(&[
        "prompt",
        "lint",
        "zero-shot",
        "--data",
        "sample",
        "--context",
        "500",
        "--json",
    ]);
    assert_eq!(ran.code, Some(1), "{ran:#?}");
    assert!(
        ran.json()["problems"].to_string().contains("exceed the context of 500"),
        "{}",
        ran.out
    );
}

/// Own templates with one fault each.
#[test]
fn the_lint_finds_what_is_wrong() {
    const GOOD: &str = "{{ system() }}\nYou know {{ dialect }}.\n{{ user() }}\n{{ schema }}\n\
                        {% if evidence %}{{ evidence }}{% endif %}\nQuestion: {{ question }}\n";
    let shot = "{{ user() }}\nQuestion: How many?\n{{ assistant() }}\nSELECT COUNT(*) FROM t\n{{ user() }}\n";
    for (name, turkish) in [
        (
            "lint_other_slots",
            GOOD.replace("{% if evidence %}{{ evidence }}{% endif %}", ""),
        ),
        ("lint_other_shots", GOOD.replace("{{ user() }}\n", shot)),
        ("lint_unknown_variable", GOOD.replace("{{ question }}", "{{ soru }}")),
        ("lint_does_not_parse", GOOD.replace("{% endif %}", "")),
        ("lint_no_role", "Question: {{ question }}\n".to_owned()),
    ] {
        let workspace = Workspace::new();
        workspace.write("prompts/en/zero-shot/generation.jinja", GOOD);
        workspace.write("prompts/tr/zero-shot/generation.jinja", &turkish);
        let ran = workspace.call(&["prompt", "lint", "zero-shot", "--lang", "en,tr"]);
        assert_eq!(ran.code, Some(1), "{name}: {ran:#?}");
        insta::assert_snapshot!(
            name,
            format!("{}{}", workspace.redact(&ran.out), workspace.redact(&ran.err))
        );
    }
    let workspace = Workspace::new();
    workspace.write("prompts/en/zero-shot/generation.jinja", GOOD);
    workspace.write("prompts/tr/zero-shot/generation.jinja", GOOD);
    workspace
        .call(&["prompt", "lint", "zero-shot", "--lang", "en,tr"])
        .expect(0);
    let ran = workspace.call(&["prompt", "lint", "zero-shot", "--lang", "en,fr"]);
    assert_eq!(ran.code, Some(1), "{ran:#?}");
    insta::assert_snapshot!("lint_missing_language", workspace.redact(&ran.out));
}
