//! What runs cost and how that is bounded: prices, budgets, repeats, the cache that nobody pays twice for.

mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};

use support::{Known, Ran, Reply, Server, Workspace, oracle, read, read_json, read_lines, run_folder, tiny};

/// A project whose server has prices: 10 dollars for a million prompt tokens, 50 for a million of answers.
fn priced(workspace: &Workspace, server: &Server) {
    workspace.write(
        "dinsql.yaml",
        format!(
            "providers:\n  mock:\n    base_url: {}\n    model: tester\n    prices:\n      tester: {{ input: 10, output: 50 }}\n",
            server.url
        ),
    );
}

#[track_caller]
fn run(workspace: &Workspace, arguments: &[&str]) -> Ran {
    workspace.call(&[&["run"], arguments, &["--provider", "mock", "--json"]].concat())
}

fn summary_of(folder: &Path) -> Json {
    let mut summary = read_json(&folder.join("summary.json"));
    summary.as_object_mut().expect("an object").remove("effort");
    summary
}

/// Cost of one call by the prices above, in dollars.
fn cost_of(completion: &Json) -> f64 {
    let tokens = |name: &str| completion["usage"][name].as_f64().expect("a count");
    (tokens("prompt") * 10.0 + tokens("completion") * 50.0) / 1e6
}

fn calls(folder: &Path) -> Vec<Json> {
    read_lines(&folder.join("traces.jsonl"))
        .iter()
        .flat_map(|trace| trace["stages"].as_array().cloned().unwrap_or_default())
        .map(|stage| stage["completion"].clone())
        .collect()
}

#[test]
fn a_budget_of_half_the_cost_stops_within_a_call_of_it_and_goes_on_to_the_same_end() {
    let workspace = Workspace::new();
    let known = workspace.many(60);
    let server = Server::start(oracle(&known));
    priced(&workspace, &server);
    let arguments = ["din-sql", "--data", "many", "--concurrency", "8"];

    let whole = ["--runs-dir", "whole", "--cache", "whole-cache"];
    run(&workspace, &[&arguments[..], &whole].concat()).expect(0);
    let whole = run_folder(&workspace.path("whole"), "din-sql.many.en.");
    let total = read_json(&whole.join("summary.json"))["usage"]["cost"]
        .as_f64()
        .expect("a cost");
    let by_hand: f64 = calls(&whole).iter().map(cost_of).sum();
    assert!((total - by_hand).abs() < 1e-6, "{total} {by_hand}");
    let dearest = calls(&whole).iter().map(cost_of).fold(0.0, f64::max);
    let asked_for_all = server.count();
    assert_eq!(asked_for_all, 240);

    let cap = total / 2.0;
    let cap_text = cap.to_string();
    let capped = [&arguments[..], &["--max-cost", &cap_text]].concat();
    let ran = run(&workspace, &capped).expect(4);
    assert!(ran.err.contains("stopped by the budget"), "{}", ran.err);
    let first = ran.json()["runs"][0].clone();
    assert_eq!(first["status"], "partial");
    let asked = server.count() - asked_for_all;
    let folder = workspace.run_folder("din-sql.many.en.");
    // Every call has the same shape, so that calls and money go together.
    let spent = total * asked as f64 / 240.0;
    assert!(
        spent <= cap + dearest && spent >= cap - 2.0 * dearest,
        "{spent} of {cap}, a call up to {dearest}"
    );
    let stopped = read_json(&folder.join("run.json"));
    assert_eq!(stopped["status"], "partial");
    assert!(
        stopped["stopped"]
            .as_str()
            .is_some_and(|reason| reason.contains("is spent")),
        "{stopped:#}"
    );

    // The same cap again buys nothing more, also where calls are in the cache and in no trace.
    run(&workspace, &capped).expect(4);
    assert!(server.count() - asked_for_all <= asked + 1);

    let ran = run(&workspace, &[&arguments[..], &["--max-cost", "1000"]].concat()).expect(0);
    assert_eq!(ran.json()["runs"][0]["status"], "complete");
    assert_eq!(server.count(), 2 * asked_for_all, "nothing was bought twice");
    assert_eq!(summary_of(&folder), summary_of(&whole));
    let effort = |folder: &Path| read_json(&folder.join("summary.json"))["effort"]["spent"].clone();
    assert_eq!(effort(&folder), effort(&whole), "what the parts paid adds up");
}

#[test]
fn calls_tokens_and_time_are_capped_too() {
    let workspace = Workspace::new();
    let known = workspace.many(30);
    let server = Server::start(oracle(&known));
    priced(&workspace, &server);
    let arguments = ["zero-shot", "--data", "many", "--concurrency", "4"];
    let ran = run(&workspace, &[&arguments[..], &["--max-calls", "7"]].concat()).expect(4);
    assert_eq!(server.count(), 7);
    assert!(ran.err.contains("7 of 7 calls are made"), "{}", ran.err);
    assert_eq!(
        ran.json()["runs"][0]["outcomes"],
        json!({ "answered": 7, "budget": 23 })
    );
    // Counted over the parts of the run.
    run(&workspace, &[&arguments[..], &["--max-calls", "12"]].concat()).expect(4);
    assert_eq!(server.count(), 12);

    let tokens = |run: &Json| {
        run["usage"]["prompt_tokens"].as_u64().unwrap() + run["usage"]["completion_tokens"].as_u64().unwrap()
    };
    let ran = run(
        &workspace,
        &[
            &arguments[..],
            &["--max-tokens", "2000", "--runs-dir", "t", "--no-cache"],
        ]
        .concat(),
    )
    .expect(4);
    let used = tokens(&ran.json()["runs"][0]);
    assert!((1500..=2000).contains(&used), "{used}");

    let slow = Server::start(|_, _| Reply::Slow(Duration::from_millis(200), Box::new(Reply::text("SELECT 1"))));
    let started = Instant::now();
    let arguments = [
        "run",
        "zero-shot",
        "--data",
        "many",
        "--concurrency",
        "1",
        "--max-time",
        "1s",
        "--runs-dir",
        "s",
    ];
    let ran = workspace
        .call(&[&arguments[..], &support::at(&slow)].concat())
        .expect(4);
    assert!(started.elapsed() < Duration::from_secs(20));
    assert!(ran.err.contains("the 1 s are over"), "{}", ran.err);
    assert!((1..30).contains(&slow.count()), "{}", slow.count());
}

/// What a budget cut off is no regression: only examples that both runs came to are compared, and that is said.
#[test]
fn a_run_that_was_cut_is_compared_over_what_both_came_to() {
    let workspace = Workspace::new();
    let known = workspace.many(20);
    let server = Server::start(oracle(&known));
    priced(&workspace, &server);
    let arguments = [
        "run",
        "zero-shot",
        "din-sql",
        "--data",
        "many",
        "--provider",
        "mock",
        "--concurrency",
        "1",
    ];
    // 20 calls for the first pipeline, and 40 of the 80 of the second.
    let ran = workspace
        .call(&[&arguments[..], &["--max-calls", "60"]].concat())
        .expect(4);
    let folder = workspace.run_folder("din-sql.many.en.");
    let done = read_lines(&folder.join("traces.jsonl")).len();
    assert!((8..=10).contains(&done), "{done}");
    assert!(
        ran.out.contains(&format!(
            "din-sql en is compared with zero-shot over the {done} examples that both came to, of 20"
        )),
        "{}",
        ran.out
    );
    let line = ran
        .out
        .lines()
        .find(|line| line.contains("din-sql (partial)"))
        .expect("a line of the table");
    assert!(
        line.contains("+0.0") && line.contains("0/0"),
        "all that it came to are right: {line}"
    );
    let summary = read_json(&folder.join("summary.json"));
    assert_eq!(summary["n"], 20, "but N is what was selected");
}

#[test]
fn an_unknown_price_is_unknown_and_no_basis_for_a_cap() {
    let workspace = Workspace::new();
    let server = Server::start(oracle(&tiny("en")));
    let ran = workspace
        .run(&server, &["zero-shot", "--data", "tiny", "--lang", "en"])
        .expect(0);
    assert!(ran.out.contains("unknown") && !ran.out.contains("$0"), "{}", ran.out);
    let ran = workspace.run(
        &server,
        &["zero-shot", "--data", "tiny", "--lang", "tr", "--max-cost", "1"],
    );
    insta::assert_snapshot!("max_cost_without_a_price", workspace.complaint(&ran));
    assert_eq!(server.count(), 6, "nothing was asked");
    let ran = workspace.run(&server, &["zero-shot", "--data", "tiny", "--max-cost", "-1"]);
    insta::assert_snapshot!("max_cost_below_nothing", workspace.complaint(&ran));
}

/// What a server says of its price beats the price list; cached prompt tokens have their own price.
#[test]
fn costs_as_the_server_tells_them() {
    let workspace = Workspace::new();
    let server = Server::start(|_, number| Reply::Completion {
        text: Some("SELECT 1".into()),
        finish_reason: Some("stop".into()),
        usage: Some(if number % 2 == 0 {
            json!({ "prompt_tokens": 1000, "completion_tokens": 10, "cost": 0.25 })
        } else {
            json!({ "prompt_tokens": 1000, "completion_tokens": 10, "prompt_tokens_details": { "cached_tokens": 900 } })
        }),
        model: Some("tester".into()),
    });
    workspace.write(
        "dinsql.yaml",
        format!(
            "providers:\n  mock:\n    base_url: {}\n    model: tester\n    prices:\n      tester: {{ input: 10, cached_input: 1, output: 50 }}\n",
            server.url
        ),
    );
    let arguments = [
        "zero-shot",
        "--data",
        "tiny",
        "--lang",
        "en",
        "--limit",
        "2",
        "--concurrency",
        "1",
    ];
    let ran = run(&workspace, &arguments).expect(0);
    // 0.25 and 100 × 10 + 900 × 1 + 10 × 50 millionths
    assert_eq!(ran.json()["runs"][0]["usage"]["cost"].as_f64(), Some(0.2524));
}

#[test]
fn repeats_are_independent_runs_and_summarised_with_their_spread() {
    let workspace = Workspace::new();
    let known = tiny("en");
    let right = oracle(&known);
    // The first repeat is right throughout, the second has one wrong answer, the third two.
    let server = Server::start(move |body, number| {
        let repeat = body["seed"].as_i64().unwrap_or(7) - 7;
        let question = support::last_user_message(body).to_owned();
        let wrong = ["longest river", "no town"];
        if wrong
            .iter()
            .take(usize::try_from(repeat).unwrap_or(0))
            .any(|part| question.contains(part))
        {
            return Reply::text("SELECT 'wrong'");
        }
        right(body, number)
    });
    let arguments = [
        "zero-shot",
        "--data",
        "tiny",
        "--lang",
        "en",
        "--set",
        "model.seed=7",
        "--repeat",
        "3",
    ];
    let ran = workspace
        .run(&server, &[&arguments[..], &["--json"]].concat())
        .expect(0);
    assert_eq!(server.count(), 18, "no repeat is served from another's answers");
    let seeds: std::collections::BTreeSet<i64> = server
        .received()
        .iter()
        .filter_map(|request| request.body["seed"].as_i64())
        .collect();
    assert_eq!(seeds.into_iter().collect::<Vec<_>>(), [7, 8, 9]);
    let json = ran.json();
    let values: Vec<f64> = (0..3)
        .map(|i| json["runs"][i]["metrics"]["ex"]["value"].as_f64().unwrap())
        .collect();
    assert_eq!(values, [1.0, 5.0 / 6.0, 4.0 / 6.0]);
    let ex = &json["repeats"][0]["metrics"]["ex"];
    assert_eq!(json["repeats"][0]["runs"], 3);
    assert!((ex["mean"].as_f64().unwrap() - 5.0 / 6.0).abs() < 1e-12);
    assert!((ex["sd"].as_f64().unwrap() - (2.0_f64 / 3.0).sqrt() / 6.0).abs() < 1e-12);
    // Each has a folder of its own, and a second time nothing is asked.
    let again = workspace.run(&server, &arguments).expect(0);
    assert_eq!(server.count(), 18);
    insta::assert_snapshot!("three_repeats", workspace.redact(&again.out));
}

#[test]
fn equal_questions_in_flight_are_asked_once() {
    let workspace = Workspace::new();
    let mut known: Vec<Known> = workspace.many(1);
    let first = known[0].clone();
    for number in 1..20 {
        known.push(Known {
            id: format!("copy{number}"),
            ..first.clone()
        });
    }
    workspace.dataset("many", &known);
    let answer = oracle(&known);
    let server =
        Server::start(move |body, number| Reply::Slow(Duration::from_millis(100), Box::new(answer(body, number))));
    let ran = workspace
        .run(&server, &["zero-shot", "--data", "many", "--json"])
        .expect(0);
    let run = &ran.json()["runs"][0];
    assert_eq!(server.count(), 1);
    assert_eq!(
        (&run["usage"]["calls"], &run["effort"]["cache_hits"]),
        (&json!(20), &json!(19))
    );
    assert_eq!(run["metrics"]["ex"]["value"], 1.0);
    // Without a cache nothing is shared.
    workspace
        .run(
            &server,
            &["zero-shot", "--data", "many", "--no-cache", "--runs-dir", "other"],
        )
        .expect(0);
    assert_eq!(server.count(), 21);
}

#[test]
fn cache_modes_through_the_command() {
    let workspace = Workspace::new();
    let server = Server::start(oracle(&tiny("en")));
    let arguments = |runs: &'static str, mode: &'static str| {
        [
            "zero-shot",
            "--data",
            "tiny",
            "--lang",
            "en",
            "--json",
            "--runs-dir",
            runs,
            "--cache-mode",
            mode,
        ]
    };
    // Nothing is there yet to be replayed.
    let ran = workspace.run(&server, &arguments("a", "read-only"));
    insta::assert_snapshot!("replay_without_a_cache", workspace.complaint(&ran));
    workspace.run(&server, &arguments("b", "off")).expect(0);
    assert!(!workspace.path("cache/completions.sqlite").exists(), "off is off");
    assert_eq!(server.count(), 6);
    workspace.run(&server, &arguments("c", "on")).expect(0);
    assert_eq!(server.count(), 12);
    let ran = workspace.run(&server, &arguments("d", "read-only")).expect(0);
    assert_eq!(server.count(), 12);
    assert_eq!(ran.json()["runs"][0]["effort"]["cache_hits"], 6);
    workspace.run(&server, &arguments("e", "refresh")).expect(0);
    assert_eq!(server.count(), 18);
    // A replay that lacks an answer stops, and says of which call.
    let ran = workspace.run(
        &server,
        &[
            "zero-shot",
            "--data",
            "tiny",
            "--lang",
            "tr",
            "--limit",
            "1",
            "--cache-mode",
            "read-only",
        ],
    );
    insta::assert_snapshot!("replay_of_what_is_not_there", workspace.complaint(&ran));
    assert_eq!(server.count(), 18);
}

#[test]
fn the_cache_can_be_looked_at_pruned_and_carried_elsewhere() {
    let workspace = Workspace::new();
    let server = Server::start(oracle(&tiny("en")));
    priced(&workspace, &server);
    assert_eq!(
        workspace.call(&["cache", "stats"]).expect(0).out,
        "cache/completions.sqlite: no completions yet\n"
    );
    run(&workspace, &["zero-shot", "--data", "tiny", "--lang", "en"]).expect(0);
    let stats = workspace.call(&["cache", "stats", "--json"]).expect(0).json();
    assert_eq!(
        (&stats["completions"], &stats["models"][0]["model"]),
        (&json!(6), &json!("tester"))
    );
    assert!(stats["models"][0]["cost"].as_f64().unwrap() > 0.0);
    let shown = workspace.call(&["cache", "stats"]).expect(0).out;
    assert!(shown.contains("tester") && shown.contains("6 completions"), "{shown}");

    workspace.call(&["cache", "export", "answers.jsonl"]).expect(0);
    assert_eq!(read_lines(&workspace.path("answers.jsonl")).len(), 6);
    let ran = workspace
        .call(&["cache", "import", "answers.jsonl", "--cache", "elsewhere"])
        .expect(0);
    assert_eq!(ran.out, "6 completions added, 0 there already\n");
    let ran = run(
        &workspace,
        &[
            "zero-shot",
            "--data",
            "tiny",
            "--lang",
            "en",
            "--cache",
            "elsewhere",
            "--runs-dir",
            "r2",
        ],
    )
    .expect(0);
    assert_eq!(ran.json()["runs"][0]["effort"]["cache_hits"], 6);
    assert_eq!(server.count(), 6);

    let ran = workspace.call(&["cache", "prune"]);
    insta::assert_snapshot!("prune_of_nothing_in_particular", workspace.complaint(&ran));
    workspace.call(&["cache", "prune", "--older-than", "1d"]).expect(0);
    let pruned = workspace
        .call(&["cache", "prune", "--model", "tester", "--provider", "mock", "--json"])
        .expect(0)
        .json();
    assert_eq!(pruned["completions"], 6);
    workspace.write("broken.jsonl", "{\"key\": \"12\"}\n");
    let ran = workspace.call(&["cache", "import", "broken.jsonl"]);
    insta::assert_snapshot!("import_of_a_broken_line", workspace.complaint(&ran));
}

/// A damaged or foreign cache is an error: nothing is bought again behind the user's back.
#[test]
fn a_cache_that_is_none_is_refused() {
    let workspace = Workspace::new();
    let server = Server::start(oracle(&tiny("en")));
    workspace.write("cache/completions.sqlite", "this is no database at all, ".repeat(100));
    let ran = workspace.run(&server, &["zero-shot", "--data", "tiny"]);
    insta::assert_snapshot!("foreign_cache", workspace.complaint(&ran));
    assert_eq!(server.count(), 0);
}

#[test]
fn parts_on_several_machines_make_the_run_of_one() {
    let workspace = Workspace::new();
    let known = workspace.many(50);
    let server = Server::start(oracle(&known));
    let arguments = ["zero-shot", "--data", "many", "--json"];
    workspace
        .run(
            &server,
            &[&arguments[..], &["--runs-dir", "whole", "--no-cache"]].concat(),
        )
        .expect(0);
    let whole = run_folder(&workspace.path("whole"), "zero-shot.many.en.");
    let mut parts = Vec::new();
    let mut n = 0;
    for part in ["1/3", "2/3", "3/3"] {
        let ran = workspace
            .run(&server, &[&arguments[..], &["--shard", part]].concat())
            .expect(0);
        let run = ran.json()["runs"][0].clone();
        n += run["n"].as_u64().expect("a number");
        parts.push(run["dir"].as_str().expect("a folder").to_owned());
    }
    assert_eq!(n, 50);
    assert_eq!(server.count(), 100);
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let ran = workspace.call(&[&["runs", "merge", "--runs-dir", "merged"], &parts[..2]].concat());
    insta::assert_snapshot!("merge_without_a_part", workspace.complaint(&ran));
    // Without the databases: each part has been scored where it was made.
    std::fs::rename(workspace.path("datasets"), workspace.path("gone")).expect("another name");
    let merge = [&["runs", "merge", "--json", "--runs-dir", "merged"], &parts[..]].concat();
    let ran = workspace.call(&merge).expect(0);
    let merged = workspace.path(ran.json()["runs"][0]["dir"].as_str().expect("a folder"));
    assert_eq!(merged.file_name(), whole.file_name(), "the same run, so the same name");
    assert_eq!(summary_of(&merged), summary_of(&whole));
    for file in [
        "predictions.json",
        "predictions.sql",
        "verdicts.jsonl",
        "examples.jsonl",
    ] {
        assert_eq!(read(&merged.join(file)), read(&whole.join(file)), "{file}");
    }
    let again = workspace.call(&merge);
    assert_eq!(again.code, Some(1), "{again:?}");
    // The merged folder is the whole run: nothing is left to do in it.
    std::fs::rename(workspace.path("gone"), workspace.path("datasets")).expect("its name");
    workspace
        .run(&server, &[&arguments[..], &["--runs-dir", "merged"]].concat())
        .expect(0);
    assert_eq!(server.count(), 100);
}

/// A reasoning model that spends all of its tokens on thinking is billed for it: the cap holds, and the sum shows it.
#[test]
fn answers_that_cannot_be_used_count_too() {
    let workspace = Workspace::new();
    workspace.many(30);
    let server = Server::start(|_, _| Reply::Completion {
        text: None,
        finish_reason: Some("length".into()),
        usage: Some(json!({ "prompt_tokens": 100, "completion_tokens": 300 })),
        model: Some("tester".into()),
    });
    priced(&workspace, &server);
    let arguments = ["zero-shot", "--data", "many", "--concurrency", "2", "--max-calls", "10"];
    let ran = run(&workspace, &arguments).expect(4);
    assert_eq!(server.count(), 10);
    let effort = &ran.json()["runs"][0]["effort"];
    // 10 × (100 × 10 + 300 × 50) millionths
    assert_eq!(
        (&effort["tokens"], effort["spent"].as_f64()),
        (&json!(4000), Some(0.16))
    );
    // Also when the run goes on.
    run(&workspace, &arguments).expect(4);
    assert_eq!(server.count(), 10);
}
