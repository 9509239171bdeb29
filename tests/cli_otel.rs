//! What observers get of a run: a log file of JSON lines and, with the feature `otel`, spans at a collector.

mod support;

use serde_json::Value as Json;

use support::{Server, Workspace, oracle, read, read_lines, tiny};

const KEY: &str = "sk-observers-must-not-see-this";

/// Nothing that was asked or answered, and no key.
#[track_caller]
fn assert_without_words(text: &str) {
    for word in [KEY, "on the menu", "SELECT", "price_cents", "Label:", "It is clear"] {
        assert!(!text.contains(word), "`{word}` in {text}");
    }
}

#[test]
fn a_log_file_has_a_line_a_call_with_the_spans_around_it() {
    let workspace = Workspace::new();
    let server = Server::start(oracle(&tiny("en")));
    let log = workspace.path("log.jsonl");
    let run = |data: &str| {
        let arguments = [
            "din-sql",
            "--data",
            data,
            "--lang",
            "en",
            "--log-file",
            "log.jsonl",
            "--no-cache",
        ];
        let mut command = workspace.dinsql();
        command
            .arg("run")
            .args(arguments)
            .args(support::at(&server))
            .env("OPENAI_API_KEY", KEY);
        support::Ran::from(&command.output().expect("the binary runs"))
    };
    let ran = run("tiny").expect(0);
    assert!(
        !ran.err.contains("call{"),
        "the terminal is as quiet as before: {}",
        ran.err
    );
    let calls = |lines: Vec<Json>| -> Vec<Json> {
        let is_call = |line: &Json| line["message"] == "close" && line["span"]["name"] == "call";
        lines.into_iter().filter(is_call).collect()
    };
    let first = calls(read_lines(&log));
    assert_eq!(first.len(), server.count());
    for line in &first {
        let around = line["spans"].as_array().expect("spans");
        let names: Vec<&str> = around.iter().filter_map(|span| span["name"].as_str()).collect();
        assert_eq!(names, ["run", "example", "stage"]);
        assert_eq!(around[0]["pipeline"], "din-sql");
        assert!(around[1]["id"].is_string() && around[1]["db"].is_string() && around[2]["stage"].is_string());
        assert_eq!(line["span"]["gen_ai.request.model"], "tester");
        assert!(line["span"]["gen_ai.usage.input_tokens"].is_u64(), "{line:#}");
    }
    assert_without_words(&read(&log));
    // A second run adds to it.
    std::fs::remove_dir_all(workspace.path("runs")).expect("run folders");
    run("tiny").expect(0);
    assert_eq!(calls(read_lines(&log)).len(), 2 * first.len());
}

#[test]
fn a_log_file_that_cannot_be_is_an_error_of_usage() {
    let workspace = Workspace::new();
    let ran = workspace
        .call(&["dataset", "list", "--log-file", "no/such/folder/log.jsonl"])
        .expect(2);
    assert!(
        ran.err.contains("cannot write the log file `no/such/folder/log.jsonl`"),
        "{}",
        ran.err
    );
    let ran = workspace.call(&["dataset", "list", "--log", "dinsql=loud"]).expect(2);
    assert!(ran.err.contains("`dinsql=loud` is no log filter"), "{}", ran.err);
}

#[cfg(not(feature = "otel"))]
#[test]
fn a_collector_needs_the_feature() {
    let workspace = Workspace::new();
    let ran = workspace
        .call(&["dataset", "list", "--otlp-endpoint", "http://127.0.0.1:4318"])
        .expect(2);
    assert!(ran.err.contains("feature `otel`"), "{}", ran.err);
}

#[cfg(feature = "otel")]
mod collector {
    use std::collections::HashMap;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    use super::*;

    struct Export {
        path: String,
        content_type: String,
        body: Vec<u8>,
    }

    /// Takes whatever is sent and says that it is well.
    struct Collector {
        address: String,
        received: Arc<Mutex<Vec<Export>>>,
    }

    impl Collector {
        fn start() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let address = format!("http://{}", listener.local_addr().expect("an address"));
            let received = Arc::new(Mutex::new(Vec::new()));
            let kept = Arc::clone(&received);
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    let (stream, kept) = (stream.expect("a connection"), Arc::clone(&kept));
                    std::thread::spawn(move || serve(&stream, &kept));
                }
            });
            Collector { address, received }
        }

        /// All spans that came as JSON, by their ids.
        fn spans(&self) -> HashMap<String, Json> {
            let received = self.received.lock().unwrap();
            let bodies = received
                .iter()
                .map(|export| serde_json::from_slice::<Json>(&export.body).expect("JSON"));
            let mut spans = HashMap::new();
            for body in bodies {
                for resource in body["resourceSpans"].as_array().expect("resources") {
                    assert_eq!(attribute(&resource["resource"], "service.name"), "dinsql");
                    for span in resource["scopeSpans"]
                        .as_array()
                        .into_iter()
                        .flatten()
                        .flat_map(|scope| scope["spans"].as_array().cloned().unwrap_or_default())
                    {
                        spans.insert(span["spanId"].as_str().expect("an id").to_owned(), span);
                    }
                }
            }
            spans
        }
    }

    /// Requests of one connection, one after the other.
    fn serve(stream: &TcpStream, kept: &Mutex<Vec<Export>>) {
        let mut reader = BufReader::new(stream);
        loop {
            let mut head = Vec::new();
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line).unwrap_or(0) == 0 {
                    return;
                }
                if line.trim().is_empty() {
                    break;
                }
                head.push(line.trim().to_owned());
            }
            let header = |name: &str| {
                head.iter().skip(1).find_map(|line| {
                    let (found, value) = line.split_once(':')?;
                    found.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
                })
            };
            let length = header("content-length")
                .and_then(|length| length.parse().ok())
                .expect("a length");
            let mut body = vec![0; length];
            reader.read_exact(&mut body).expect("a body");
            kept.lock().unwrap().push(Export {
                path: head[0].clone(),
                content_type: header("content-type").unwrap_or_default(),
                body,
            });
            let mut out = stream;
            let answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
            if out.write_all(answer).is_err() {
                return;
            }
        }
    }

    /// An attribute's value in the form of JSON, null where it is absent.
    fn attribute(owner: &Json, name: &str) -> Json {
        let all = owner["attributes"].as_array().into_iter().flatten();
        let Some(found) = all.into_iter().find(|attribute| attribute["key"] == name) else {
            return Json::Null;
        };
        let value = found["value"]
            .as_object()
            .and_then(|value| value.values().next())
            .cloned()
            .unwrap_or_default();
        match &value {
            // 64-bit numbers are text in this form.
            Json::String(text) if found["value"].get("intValue").is_some() => {
                text.parse::<i64>().expect("a number").into()
            }
            _ => value,
        }
    }

    #[test]
    fn a_run_is_a_tree_of_spans_by_the_conventions() {
        let workspace = Workspace::new();
        let server = Server::start(oracle(&tiny("en")));
        let collector = Collector::start();
        let arguments = [
            "din-sql",
            "--data",
            "tiny",
            "--lang",
            "en",
            "--otlp-endpoint",
            &collector.address,
        ];
        let mut command = workspace.dinsql();
        command.arg("run").args(arguments).args(support::at(&server));
        command
            .env("OPENAI_API_KEY", KEY)
            .env("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json");
        let ran = support::Ran::from(&command.output().expect("the binary runs")).expect(0);
        assert!(!ran.err.contains("traces are not complete"), "{}", ran.err);

        let spans = collector.spans();
        let named = |name: &str| spans.values().filter(|span| span["name"] == name).collect::<Vec<_>>();
        assert_eq!(named("run").len(), 1);
        assert_eq!(named("example").len(), 6);
        let calls = named("chat tester");
        assert_eq!(calls.len(), server.count());
        let parent = |span: &Json| {
            spans
                .get(span["parentSpanId"].as_str().unwrap_or_default())
                .cloned()
                .unwrap_or_default()
        };
        for call in calls {
            let stage = parent(call);
            let example = parent(&stage);
            let run = parent(&example);
            for (span, name) in [(&stage, "stage"), (&example, "example"), (&run, "run")] {
                assert_eq!(span["name"], name, "{call:#}");
                assert_eq!(span["traceId"], call["traceId"]);
            }
            assert_eq!(run["parentSpanId"].as_str().unwrap_or_default(), "");
            assert_eq!(attribute(&run, "pipeline"), "din-sql");
            assert!(attribute(&example, "id").is_string() && attribute(&stage, "stage").is_string());
            let port: i64 = server
                .url
                .rsplit(':')
                .next()
                .unwrap()
                .split('/')
                .next()
                .unwrap()
                .parse()
                .unwrap();
            for (name, value) in [
                ("gen_ai.operation.name", "chat".into()),
                ("gen_ai.request.model", "tester".into()),
                ("gen_ai.response.model", "tester".into()),
                ("server.address", "127.0.0.1".into()),
                ("server.port", port.into()),
                ("dinsql.cached", false.into()),
                ("dinsql.attempts", 1.into()),
                ("error.type", Json::Null),
            ] {
                assert_eq!(attribute(call, name), value, "{name} of {call:#}");
            }
            assert!(attribute(call, "gen_ai.provider.name").is_string(), "{call:#}");
            assert!(attribute(call, "gen_ai.usage.input_tokens").is_i64(), "{call:#}");
            assert!(attribute(call, "gen_ai.usage.output_tokens").is_i64(), "{call:#}");
            let reasons = attribute(call, "gen_ai.response.finish_reasons");
            assert_eq!(reasons["values"][0]["stringValue"], "stop", "{call:#}");
            // 3 is a client's span.
            assert!(call["kind"] == 3 || call["kind"] == "SPAN_KIND_CLIENT", "{call:#}");
        }
        for export in collector.received.lock().unwrap().iter() {
            assert_eq!(export.path, "POST /v1/traces HTTP/1.1");
            assert_without_words(&String::from_utf8_lossy(&export.body));
        }
    }

    #[test]
    fn the_standard_variables_switch_it_on_and_off() {
        let workspace = Workspace::new();
        let server = Server::start(oracle(&tiny("en")));
        let collector = Collector::start();
        let run = |disabled: &str| {
            let mut command = workspace.dinsql();
            command
                .args(["run", "zero-shot", "--data", "tiny", "--lang", "en"])
                .args(support::at(&server));
            command
                .env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.address)
                .env("OTEL_SDK_DISABLED", disabled);
            command.args(["--runs-dir", &format!("runs-{disabled}")]);
            support::Ran::from(&command.output().expect("the binary runs")).expect(0);
        };
        run("true");
        assert_eq!(collector.received.lock().unwrap().len(), 0);
        run("false");
        let received = collector.received.lock().unwrap();
        assert_eq!(received[0].path, "POST /v1/traces HTTP/1.1");
        assert_eq!(received[0].content_type, "application/x-protobuf");
        for export in received.iter() {
            assert_without_words(&String::from_utf8_lossy(&export.body));
        }
    }

    #[test]
    fn a_dead_collector_costs_a_warning() {
        let workspace = Workspace::new();
        let server = Server::start(oracle(&tiny("en")));
        // Nobody listens at the first; the second accepts and never answers.
        let gone = {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            listener.local_addr().expect("an address")
        };
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        for (name, address) in [("gone", gone), ("silent", silent.local_addr().expect("an address"))] {
            let started = Instant::now();
            let endpoint = format!("http://{address}");
            let ran = workspace
                .run(
                    &server,
                    &[
                        "zero-shot",
                        "--data",
                        "tiny",
                        "--lang",
                        "en",
                        "--runs-dir",
                        name,
                        "--otlp-endpoint",
                        &endpoint,
                    ],
                )
                .expect(0);
            assert_eq!(ran.err.matches("traces are not complete").count(), 1, "{}", ran.err);
            let reason = if name == "gone" {
                "refused"
            } else {
                "did not reach the collector"
            };
            assert!(ran.err.contains(reason), "{}", ran.err);
            assert!(
                started.elapsed() < Duration::from_secs(30),
                "{name}: {:?}",
                started.elapsed()
            );
        }
        let ran = workspace
            .call(&["dataset", "list", "--otlp-endpoint", "localhost:4318"])
            .expect(2);
        assert!(ran.err.contains("no address of a collector"), "{}", ran.err);
    }
}
