//! What providers can and cannot do: names of models, structured output with what to fall back on, several completions, log
//! probabilities, parameters under other names, limits by the minute.

mod support;

use std::time::Instant;

use serde_json::{Value as Json, json};

use support::{Ran, Reply, Server, Workspace, last_user_message, oracle, read_lines, tiny};

/// A project with the provider `mock` at the server, with more keys.
fn project(workspace: &Workspace, server: &Server, more: &str) {
    workspace.write(
        "dinsql.yaml",
        format!(
            "default_provider: mock\nproviders:\n  mock:\n    base_url: {}\n{more}",
            server.url
        ),
    );
}

#[track_caller]
fn run(workspace: &Workspace, arguments: &[&str]) -> Ran {
    workspace.call(&[&["run"], arguments, &["--data", "tiny", "--lang", "en", "--json"]].concat())
}

fn traces(workspace: &Workspace, start: &str) -> Vec<Json> {
    read_lines(&workspace.run_folder(start).join("traces.jsonl"))
}

const STRUCTURED: &str = r"
name: structured
model: { name: tester, temperature: 0, max_tokens: 300 }
stages:
  - name: generation
    prompt: zero-shot/generation
    response_format:
      schema:
        type: object
        properties: { sql: { type: string } }
        required: [sql]
        additionalProperties: false
    extract:
      sql: { json: whole_answer, pointer: /sql, fallback: { sql: whole_answer } }
answer: generation.sql
";

#[test]
fn names_for_models_are_resolved_before_anything_is_asked() {
    let workspace = Workspace::new();
    let server = Server::start(oracle(&tiny("en")));
    project(
        &workspace,
        &server,
        "    model: small\n    models: { small: vendor/model-v3-small }\n    prices:\n      small: { input: 1, output: 2 }\n",
    );
    let json = run(&workspace, &["zero-shot"]).expect(0).json();
    assert!(
        server
            .received()
            .iter()
            .all(|request| request.body["model"] == "vendor/model-v3-small")
    );
    assert_eq!(json["runs"][0]["model"], "vendor/model-v3-small");
    assert!(
        json["runs"][0]["usage"]["cost"].as_f64().is_some_and(|cost| cost > 0.0),
        "{json:#}"
    );
}

/// Where the server keeps to the schema, the answer is JSON.
#[test]
fn structured_output_is_asked_for_and_read() {
    let workspace = Workspace::new();
    workspace.write("structured.yaml", STRUCTURED);
    let right = oracle(&tiny("en"));
    let server = Server::start(move |body, number| {
        assert_eq!(body["response_format"]["type"], "json_schema");
        assert_eq!(body["response_format"]["json_schema"]["name"], "generation");
        match right(body, number) {
            Reply::Text(sql) => Reply::finished(Some(&json!({ "sql": sql }).to_string()), "stop"),
            other => other,
        }
    });
    project(&workspace, &server, "    model: tester\n");
    let ran = run(&workspace, &["./structured.yaml"]).expect(0);
    assert_eq!(ran.json()["runs"][0]["metrics"]["ex"]["value"], 1.0);
    for trace in traces(&workspace, "structured.tiny.en.") {
        assert!(trace["stages"][0].get("warnings").is_none(), "{trace:#}");
    }
}

/// Where it does not know how, the request goes without, once and for all, and the fallback reads the answer.
#[test]
fn without_structured_output_the_fallback_reads_the_answer() {
    let workspace = Workspace::new();
    workspace.write("structured.yaml", STRUCTURED);
    let right = oracle(&tiny("en"));
    let server = Server::start(move |body, number| {
        if body.get("response_format").is_some() {
            return Reply::error(
                400,
                "invalid_request_error",
                "response_format is not supported by this server",
            );
        }
        right(body, number)
    });
    project(&workspace, &server, "    model: tester\n");
    let ran = run(&workspace, &["./structured.yaml", "--concurrency", "1"]).expect(0);
    assert_eq!(ran.json()["runs"][0]["metrics"]["ex"]["value"], 1.0);
    assert_eq!(server.count(), 7, "the first call learns it, the others know");
    for trace in traces(&workspace, "structured.tiny.en.") {
        let warnings = trace["stages"][0]["warnings"].to_string();
        assert!(
            warnings.contains("does not know `response_format`") && warnings.contains("fallback"),
            "{warnings}"
        );
    }
    // A provider of which it is known is not even asked.
    let server = Server::start(oracle(&tiny("en")));
    project(&workspace, &server, "    model: tester\n    structured_output: false\n");
    run(&workspace, &["./structured.yaml", "--runs-dir", "r2"]).expect(0);
    assert!(
        server
            .received()
            .iter()
            .all(|request| request.body.get("response_format").is_none())
    );
    assert_eq!(server.count(), 6);
}

#[test]
fn several_completions_and_log_probabilities_are_kept() {
    let workspace = Workspace::new();
    let right = oracle(&tiny("en"));
    let server = Server::start(move |body, number| {
        assert_eq!((&body["n"], &body["logprobs"]), (&json!(3), &json!(true)));
        right(body, number)
    });
    project(&workspace, &server, "    model: tester\n");
    let set = ["--set", "model.n=3", "--set", "model.logprobs=true"];
    run(&workspace, &[&["zero-shot"], &set[..]].concat()).expect(0);
    for trace in traces(&workspace, "zero-shot.tiny.en.") {
        let completion = &trace["stages"][0]["completion"];
        assert_eq!(
            completion["alternatives"].as_array().map(Vec::len),
            Some(2),
            "{completion:#}"
        );
        assert!(completion["logprobs"].is_object(), "{completion:#}");
    }
}

/// Newer models of OpenAI want `max_completion_tokens`; a refused temperature stays refused, since without it the
/// experiment would be another.
#[test]
fn a_parameter_under_another_name_is_no_failure() {
    let workspace = Workspace::new();
    let right = oracle(&tiny("en"));
    let server = Server::start(move |body, number| {
        if body.get("max_tokens").is_some() {
            return Reply::status(
                400,
                json!({ "error": {
                    "message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
                    "type": "invalid_request_error", "param": "max_tokens", "code": "unsupported_parameter",
                }}),
            );
        }
        assert_eq!(body["max_completion_tokens"], 300);
        right(body, number)
    });
    project(&workspace, &server, "    model: tester\n");
    let ran = run(&workspace, &["zero-shot", "--concurrency", "1"]).expect(0);
    assert_eq!(ran.json()["runs"][0]["effort"]["retries"], 1);
    let strict = Server::start(|_, _| {
        Reply::status(
            400,
            json!({ "error": {
                "message": "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported.",
                "param": "temperature", "code": "unsupported_value",
            }}),
        )
    });
    project(&workspace, &strict, "    model: tester\n");
    let ran = run(&workspace, &["zero-shot", "--runs-dir", "r2"]).expect(3);
    assert_eq!(strict.count(), 6, "no call is tried again");
    assert!(ran.err.contains("'temperature' does not support 0"), "{}", ran.err);
}

#[test]
fn requests_a_minute_are_spread() {
    let workspace = Workspace::new();
    let server = Server::start(oracle(&tiny("en")));
    // One every 100 ms.
    project(&workspace, &server, "    model: tester\n    requests_per_minute: 600\n");
    let started = Instant::now();
    run(&workspace, &["zero-shot"]).expect(0);
    assert!(started.elapsed().as_millis() >= 500);
    let arrivals: Vec<Instant> = server.received().iter().map(|request| request.arrived).collect();
    let apart = arrivals
        .windows(2)
        .filter(|pair| (pair[1] - pair[0]).as_millis() >= 50)
        .count();
    assert!(apart >= 3, "they do not come in one burst: {arrivals:?}");
}

#[test]
fn model_test_tells_what_a_server_can_do() {
    let workspace = Workspace::new();
    let able = Server::builder()
        .model("tester", json!({ "max_model_len": 8192 }))
        .start(|body, _| {
            if body.get("response_format").is_some() {
                Reply::Texts(vec![r#"{"sql": "SELECT 42"}"#.into(), r#"{"sql": "SELECT 42"}"#.into()])
            } else {
                Reply::text("SELECT 42")
            }
        });
    let test = |server: &Server| {
        let ran = workspace.call(&[&["model", "test", "--json"], &support::at(server)[..]].concat());
        ran.expect(0).json()["abilities"].clone()
    };
    assert_eq!(
        test(&able),
        json!({ "usage": true, "seed": true, "n": true, "response_format": true, "logprobs": true, "context": 8192 })
    );
    // llama.cpp-like: one completion, and an error for more.
    let less = Server::start(|body, _| {
        if body["n"].as_u64().unwrap_or(1) > 1 {
            return Reply::error(400, "invalid_request_error", "Only one completion choice is allowed");
        }
        Reply::without_usage(&format!("SELECT {}", last_user_message(body).len()))
    });
    let abilities = test(&less);
    assert_eq!(
        (&abilities["usage"], &abilities["n"], &abilities["seed"]),
        (&json!(false), &json!(false), &json!(true))
    );
    let shown = workspace
        .call(&[&["model", "test"], &support::at(&able)[..]].concat())
        .expect(0)
        .out;
    assert!(
        shown.contains("8,192 tokens") && shown.contains("takes a seed"),
        "{shown}"
    );
}

/// A case of a switch may have a model of its own: it is set up, priced and looked at like any other.
#[test]
fn models_of_cases_are_models_too() {
    let workspace = Workspace::new();
    let server = Server::start(oracle(&tiny("en")));
    let pipeline = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/pipelines/din-sql.yaml"))
        .expect("the shipped pipeline")
        .replace(
            "{ prompt: din-sql/nested }",
            "{ prompt: din-sql/nested, model: { provider: other, name: large } }",
        );
    assert!(pipeline.contains("provider: other"), "{pipeline}");
    workspace.write("own.yaml", &pipeline);
    project(
        &workspace,
        &server,
        "    model: tester\n    prices:\n      tester: { input: 1, output: 1 }\n",
    );
    // Found before the first call.
    let ran = run(&workspace, &["./own.yaml"]);
    assert_eq!((ran.code, server.count()), (Some(2), 0), "{}", ran.err);
    project(
        &workspace,
        &server,
        &format!(
            "    model: tester\n    prices:\n      tester: {{ input: 1, output: 1 }}\n  other:\n    base_url: {}\n",
            server.url
        ),
    );
    let ran = run(&workspace, &["./own.yaml", "--max-cost", "1"]);
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    assert!(ran.err.contains("the price of `large` is not known"), "{}", ran.err);
    run(&workspace, &["./own.yaml"]).expect(0);
    assert!(server.received().iter().any(|request| request.body["model"] == "large"));
}
