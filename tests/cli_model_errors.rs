//! Servers that refuse, fail, lie or say nothing: what becomes of the example and of the run, and that nothing is asked for
//! ever.

mod support;

use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};

use support::{Ran, Reply, Server, Workspace, column, last_user_message, oracle, read_json, read_lines, tiny};

/// Attempts at one call, at most; and where each was refused for being too many.
const ATTEMPTS: usize = 5;
const ATTEMPTS_WHEN_LIMITED: usize = 10;
/// Stands in the question that gets the odd reply.
const ODD: &str = "longest river";

/// A server that answers right, but for one question.
fn odd_server(reply: impl Fn(usize) -> Reply + Send + Sync + 'static) -> Server {
    let answer = oracle(&tiny("en"));
    let asked = std::sync::atomic::AtomicUsize::new(0);
    Server::start(move |body, number| {
        if last_user_message(body).contains(ODD) {
            reply(asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst))
        } else {
            answer(body, number)
        }
    })
}

fn odd_requests(server: &Server) -> usize {
    let received = server.received();
    received
        .iter()
        .filter(|request| request.question().contains(ODD))
        .count()
}

fn trace_of(workspace: &Workspace, id: &str) -> Json {
    read_lines(&workspace.run_folder("zero-shot.tiny.en.").join("traces.jsonl"))
        .into_iter()
        .find(|trace| trace["id"] == id)
        .unwrap_or_else(|| panic!("no trace of {id}"))
}

const ZERO_SHOT: [&str; 6] = ["zero-shot", "--data", "tiny", "--lang", "en", "--json"];

/// All examples but the odd one are right, which ends with a model error of this class, after so many requests.
#[track_caller]
fn ends_only_the_example(reply: Reply, class: &str, requests: usize) -> (Workspace, Ran) {
    let workspace = Workspace::new();
    let server = odd_server(move |_| reply.clone());
    let ran = workspace.run(&server, &ZERO_SHOT).expect(3);
    let run = &ran.json()["runs"][0];
    assert_eq!(run["status"], "complete");
    assert_eq!(run["outcomes"], json!({ "answered": 5, "model_error": 1 }));
    assert_eq!(run["metrics"]["ex"]["value"].as_f64(), Some(5.0 / 6.0));
    assert_eq!(odd_requests(&server), requests);
    let trace = trace_of(&workspace, "v1");
    assert_eq!(trace["outcome"], "model_error");
    let error = trace["error"].as_str().expect("a reason");
    assert!(error.contains(&format!("({class})")), "{error}");
    assert!(trace.get("prediction").is_none_or(Json::is_null));
    (workspace, ran)
}

/// The odd call is answered in the end, after so many requests.
#[track_caller]
fn comes_out_right(server: &Server, more: &[&str], attempts: usize) -> Json {
    let workspace = Workspace::new();
    let ran = workspace.run(server, &[&ZERO_SHOT, more].concat()).expect(0);
    let run = &ran.json()["runs"][0];
    assert_eq!(run["metrics"]["ex"]["value"], 1.0);
    assert_eq!(odd_requests(server), attempts);
    let trace = trace_of(&workspace, "v1");
    let completion = trace["stages"][0]["completion"].clone();
    assert_eq!(completion["attempts"], attempts, "retries are counted");
    assert_eq!(run["effort"]["retries"], attempts - 1);
    trace
}

/// The first refusal stops the run, resumably; returns what was said.
#[track_caller]
fn stops_the_run(reply: Reply) -> (Workspace, String) {
    let workspace = Workspace::new();
    let server = Server::start(move |_, _| reply.clone());
    let one = [&ZERO_SHOT[..], &["--limit", "1"]].concat();
    let ran = workspace.run(&server, &one).expect(4);
    assert_eq!(server.count(), 1, "asked once, and believed");
    assert_eq!(ran.json()["runs"][0]["status"], "partial");
    let folder = workspace.run_folder("zero-shot.tiny.en.");
    assert_eq!(read_json(&folder.join("run.json"))["status"], "partial");
    assert!(
        column(&folder.join("traces.jsonl"), "id").is_empty(),
        "the example is not done, so that it is asked again"
    );
    let said = workspace.complaint(&ran);
    (workspace, said)
}

#[test]
fn a_wrong_key_stops_the_run() {
    let (_, said) = stops_the_run(Reply::error(401, "invalid_api_key", "Incorrect API key provided."));
    insta::assert_snapshot!("wrong_key_401", said);
    let (_, said) = stops_the_run(Reply::plain(403, "text/html", "<html><h1>Forbidden</h1></html>"));
    insta::assert_snapshot!("forbidden_403", said);
}

#[test]
fn a_model_that_is_not_there_stops_the_run() {
    let (_, said) = stops_the_run(Reply::error(
        404,
        "model_not_found",
        "The model `tester` does not exist or you do not have access to it.",
    ));
    insta::assert_snapshot!("unknown_model_404", said);
}

#[test]
fn a_wrong_address_stops_the_run() {
    let (_, said) = stops_the_run(Reply::plain(404, "text/plain", "404 page not found"));
    insta::assert_snapshot!("wrong_address_404", said);
}

#[test]
fn an_exhausted_quota_stops_the_run() {
    let (_, said) = stops_the_run(Reply::error(
        429,
        "insufficient_quota",
        "You exceeded your current quota, please check your plan and billing details.",
    ));
    insta::assert_snapshot!("quota_exhausted_429", said);
}

/// What was done before a refusal that ends the run is kept, and the same command goes on once the cause is gone.
#[test]
fn a_stopped_run_goes_on_where_it_ended() {
    let workspace = Workspace::new();
    let paid = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (answer, has_paid) = (oracle(&tiny("en")), std::sync::Arc::clone(&paid));
    let server = Server::start(move |body, number| {
        if number < 3 || has_paid.load(std::sync::atomic::Ordering::SeqCst) {
            answer(body, number)
        } else {
            Reply::error(429, "insufficient_quota", "You exceeded your current quota.")
        }
    });
    let arguments = [&ZERO_SHOT[..], &["--concurrency", "1"]].concat();
    let ran = workspace.run(&server, &arguments).expect(4);
    let run = &ran.json()["runs"][0];
    assert_eq!(run["outcomes"], json!({ "answered": 3, "budget": 3 }));
    let asked = server.count();
    assert!(
        (4..=5).contains(&asked),
        "{asked} requests: only what was under way goes on after a refusal"
    );
    paid.store(true, std::sync::atomic::Ordering::SeqCst);
    let ran = workspace.run(&server, &arguments).expect(0);
    assert_eq!(ran.json()["runs"][0]["metrics"]["ex"]["value"], 1.0);
    assert_eq!(server.count(), asked + 3, "only the three that were left");
}

#[test]
fn a_prompt_that_is_too_long_ends_only_its_example() {
    let message = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9120 tokens.";
    let (workspace, ran) = ends_only_the_example(
        Reply::error(400, "context_length_exceeded", message),
        "context_length",
        1,
    );
    assert!(
        trace_of(&workspace, "v1")["error"]
            .as_str()
            .unwrap_or_default()
            .contains("maximum context length is 8192 tokens"),
        "the server's words are kept"
    );
    insta::assert_snapshot!("context_length_on_the_terminal", workspace.redact(&ran.err));
}

#[test]
fn a_filtered_answer_ends_only_its_example() {
    let filtered = Reply::Completion {
        text: None,
        finish_reason: Some("content_filter".into()),
        usage: None,
        model: Some("tester".into()),
    };
    ends_only_the_example(filtered, "content_filter", 1);
    let refused = Reply::error(
        400,
        "content_filter",
        "The response was filtered due to the prompt triggering the content management policy.",
    );
    ends_only_the_example(refused, "content_filter", 1);
}

/// llama.cpp and vLLM give an integer where OpenAI gives a text.
#[test]
fn an_error_code_that_is_a_number_is_read() {
    let reply = Reply::status(
        400,
        json!({ "error": { "code": 400, "message": "top_p must be below 1", "type": "invalid_request_error" } }),
    );
    let (workspace, _) = ends_only_the_example(reply, "bad_request", 1);
    let trace = trace_of(&workspace, "v1");
    assert!(
        trace["error"]
            .as_str()
            .unwrap_or_default()
            .contains("top_p must be below 1"),
        "{trace:#}"
    );
}

#[test]
fn a_server_that_is_busy_for_a_moment_is_asked_again() {
    let html = "<html><head><title>503</title></head><body>Service Unavailable</body></html>";
    let answer = || Reply::text("SELECT name FROM river ORDER BY length_km DESC LIMIT 1");
    for reply in [
        Reply::plain(503, "text/html", html),
        Reply::plain(429, "text/plain", "slow down"),
        Reply::error(
            500,
            "server_error",
            "The server had an error while processing your request.",
        ),
        Reply::Close,
        Reply::CutBody,
    ] {
        let server = odd_server(move |number| if number < 2 { reply.clone() } else { answer() });
        comes_out_right(&server, &[], 3);
    }
}

#[test]
fn retry_after_is_read_and_capped() {
    for value in ["1", "0.01", "600", "Wed, 21 Oct 2020 07:28:00 GMT", "soon"] {
        let server = odd_server(move |number| {
            if number == 0 {
                Reply::Status {
                    status: 429,
                    headers: vec![("retry-after".into(), value.into())],
                    body: json!({ "error": { "message": "Rate limit reached", "code": "rate_limit_exceeded" } })
                        .to_string(),
                }
            } else {
                Reply::text("SELECT name FROM river ORDER BY length_km DESC LIMIT 1")
            }
        });
        let started = Instant::now();
        comes_out_right(&server, &[], 2);
        assert!(started.elapsed() < Duration::from_mins(1), "Retry-After: {value}");
    }
}

/// A wait that no run should sit out is a quota that is used up, whatever the body calls it.
#[test]
fn a_server_that_asks_for_a_day_stops_the_run() {
    for value in ["86400", "Wed, 21 Oct 2099 07:28:00 GMT"] {
        let (_, said) =
            stops_the_run(Reply::plain(429, "text/plain", "Too many requests").with_header("retry-after", value));
        assert!(said.contains("Too many requests"), "{said}");
    }
}

#[test]
fn what_never_works_is_given_up() {
    let choices = |choices: Json| Reply::Json(json!({ "id": "x", "object": "chat.completion", "choices": choices }));
    let message = |message: Json| choices(json!([{ "index": 0, "message": message, "finish_reason": "stop" }]));
    for (reply, class) in [
        (
            Reply::plain(503, "text/html", "<html>Service Unavailable</html>"),
            "server",
        ),
        (Reply::plain(429, "text/plain", "slow down"), "rate_limited"),
        (choices(json!([])), "bad_answer"),
        (choices(json!(null)), "bad_answer"),
        (message(json!({ "role": "assistant", "content": null })), "bad_answer"),
        (message(json!({ "role": "assistant", "content": "  \n" })), "bad_answer"),
        (
            Reply::plain(200, "text/html", "<html><body>Welcome to the proxy</body></html>"),
            "bad_answer",
        ),
        (Reply::CutBody, "connection"),
        (Reply::Close, "connection"),
    ] {
        let attempts = if class == "rate_limited" {
            ATTEMPTS_WHEN_LIMITED
        } else {
            ATTEMPTS
        };
        let (workspace, _) = ends_only_the_example(reply, class, attempts);
        let failure = &trace_of(&workspace, "v1")["stages"][0]["failure"];
        assert_eq!(
            (&failure["class"], &failure["attempts"]),
            (&json!(class), &json!(attempts))
        );
    }
}

/// Some gateways put an error into a 200.
#[test]
fn an_error_inside_an_answer_is_an_error() {
    let reply = Reply::Json(json!({ "error": { "code": 400, "message": "maximum context length exceeded" } }));
    ends_only_the_example(reply, "context_length", 1);
}

#[test]
fn odd_but_usable_answers_are_used() {
    let text = "SELECT name FROM river ORDER BY length_km DESC LIMIT 1";
    let completion = |finish_reason: Option<&str>, usage: Option<Json>, model: Option<&str>| Reply::Completion {
        text: Some(text.into()),
        finish_reason: finish_reason.map(str::to_owned),
        usage,
        model: model.map(str::to_owned),
    };
    let usage = json!({ "prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110 });

    let strange = completion(Some("end_of_thought"), Some(usage.clone()), Some("other"));
    let trace = comes_out_right(&odd_server(move |_| strange.clone()), &[], 1);
    assert_eq!(trace["stages"][0]["completion"]["finish_reason"], "end_of_thought");
    assert_eq!(trace["stages"][0]["completion"]["served_model"], "other");

    let bare = completion(None, None, None);
    let trace = comes_out_right(&odd_server(move |_| bare.clone()), &[], 1);
    let completion_trace = &trace["stages"][0]["completion"];
    assert_eq!(
        completion_trace["usage"],
        json!({}),
        "what the server does not say is unknown, not 0"
    );
    assert!(completion_trace.get("served_model").is_none());

    let parts = Reply::Json(json!({
        "choices": [{ "message": { "content": [{ "type": "text", "text": text }] }, "finish_reason": "stop" }],
        "usage": usage,
    }));
    comes_out_right(&odd_server(move |_| parts.clone()), &[], 1);
}

#[test]
fn unknown_usage_is_shown_as_unknown() {
    let workspace = Workspace::new();
    let known = tiny("en");
    let server = Server::start(move |body, _| Reply::Completion {
        text: known
            .iter()
            .find(|known| last_user_message(body).contains(&known.question))
            .map(|known| known.gold.clone()),
        finish_reason: Some("stop".into()),
        usage: None,
        model: None,
    });
    let ran = workspace.run(&server, &ZERO_SHOT).expect(0);
    let usage = &ran.json()["runs"][0]["usage"];
    assert_eq!((&usage["calls"], &usage["calls_without_usage"]), (&json!(6), &json!(6)));
    let shown = workspace.run(&server, &ZERO_SHOT[..5]).expect(0);
    assert!(shown.out.contains("unknown"), "{}", shown.out);
}

#[test]
fn an_answer_that_was_cut_is_marked_and_not_kept() {
    let workspace = Workspace::new();
    let server = odd_server(|_| Reply::Completion {
        text: Some("SELECT name FROM river".into()),
        finish_reason: Some("length".into()),
        usage: None,
        model: None,
    });
    let ran = workspace.run(&server, &ZERO_SHOT).expect(0);
    assert_eq!(ran.json()["runs"][0]["usage"]["truncated"], 1);
    let trace = trace_of(&workspace, "v1");
    assert_eq!(
        trace["stages"][0]["warnings"],
        json!(["the answer was cut at max_tokens"])
    );
    workspace
        .run(&server, &[&ZERO_SHOT[..], &["--runs-dir", "again"]].concat())
        .expect(0);
    assert_eq!(odd_requests(&server), 2, "it may come out whole another time");
    assert_eq!(server.count(), 7, "the others come from the cache");
}

#[test]
fn a_server_that_is_not_there_ends_the_run() {
    let workspace = Workspace::new();
    // A port that was free a moment ago.
    let url = {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        format!("http://{}/v1", listener.local_addr().expect("an address"))
    };
    let started = Instant::now();
    let ran = workspace.call(&[
        "run",
        "zero-shot",
        "--data",
        "tiny",
        "--lang",
        "en",
        "--limit",
        "1",
        "--base-url",
        &url,
        "--model",
        "tester",
    ]);
    assert!(started.elapsed() < Duration::from_mins(1));
    assert!(ran.err.contains(&format!("no answer from {url}")), "{}", ran.err);
    insta::assert_snapshot!("server_not_there", workspace.complaint(&ran));
}

#[test]
fn a_server_that_says_nothing_is_not_waited_for() {
    let workspace = Workspace::new();
    let server = odd_server(|_| Reply::Hang);
    let started = Instant::now();
    let arguments = [&ZERO_SHOT[..], &["--set", "model.timeout=0.3"]].concat();
    let ran = workspace.run(&server, &arguments).expect(3);
    assert!(started.elapsed() < Duration::from_mins(1));
    assert_eq!(odd_requests(&server), ATTEMPTS);
    let run = &ran.json()["runs"][0];
    assert_eq!(run["outcomes"]["model_error"], 1, "{run:#}");
    let error = trace_of(&workspace, "v1")["error"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    assert!(error.contains("within 0.3 s") && error.contains("(timeout)"), "{error}");
}

#[test]
fn an_answer_that_comes_late_is_an_answer() {
    let server = odd_server(|_| {
        let answer = Reply::text("SELECT name FROM river ORDER BY length_km DESC LIMIT 1");
        Reply::Slow(Duration::from_millis(400), Box::new(answer))
    });
    let trace = comes_out_right(&server, &["--set", "model.timeout=30"], 1);
    let latency = trace["stages"][0]["completion"]["latency_ms"]
        .as_u64()
        .unwrap_or_default();
    assert!(latency >= 400, "{latency} ms");
}

#[test]
fn model_list_and_model_test_speak_to_the_server() {
    let workspace = Workspace::new();
    let server = Server::start(|_, _| Reply::text("SELECT 42"));
    let listed = workspace.call(&["model", "list", "--base-url", &server.url]).expect(0);
    assert_eq!(listed.out, "tester\ntester-large\n");
    let listed = workspace
        .call(&["model", "list", "--base-url", &server.url, "--json"])
        .expect(0);
    assert_eq!(listed.json(), json!({ "models": ["tester", "tester-large"] }));
    let tested = workspace
        .call(&[
            "model",
            "test",
            "--base-url",
            &server.url,
            "--model",
            "tester",
            "--json",
        ])
        .expect(0)
        .json();
    assert_eq!(tested["answer"]["text"], "SELECT 42");
    assert_eq!(server.count(), 2, "a plain call, and one that asks for everything");
    let refused = Server::start(|_, _| Reply::error(401, "invalid_api_key", "Incorrect API key provided."));
    let ran = workspace.call(&["model", "test", "--base-url", &refused.url, "--model", "tester"]);
    insta::assert_snapshot!("model_test_with_a_wrong_key", workspace.complaint(&ran));
}
