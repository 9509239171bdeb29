//! What a call costs on its way through the library, beside a bare loop over async-openai: processor time and rate, at 1 to
//! 512 calls in flight, without cache, with an empty one and with a full one; and the cache's size and time a look-up.
//! Prints figures; see README.md.
//!
//! Here the benchmark's own process is what is measured: it starts itself again on a core of its own, and the mock server on
//! another.

#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

mod measure;
mod mock_server;

use std::error::Error;
use std::future::{Future, ready};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use dinsql::llm::cache::{Cache, CacheMode};
use dinsql::llm::cached::CachedModel;
use dinsql::llm::openai::{Endpoint, OpenAiModel};
use dinsql::llm::retry::{RetryPolicy, RetryingModel};
use dinsql::llm::{Model, Request};
use dinsql::prompt::{Message, Role};
use futures::{StreamExt, stream};
use serde_json::{Value as Json, json};
use tokio::runtime::Runtime;

use measure::{Figure, is_asked_for, on_core, print_table, processor_seconds, two_cores};
use mock_server::{MockServer, Traffic, asked_to_serve, serve};

/// Scales the benchmark.
const CALLS_VARIABLE: &str = "DINSQL_BENCH_CALLS";
const CALLS: usize = 10_000;
const IN_FLIGHT: [usize; 4] = [1, 8, 64, 512];
/// Of each measurement; the one with the least processor time counts, since what disturbs only ever adds.
const ROUNDS: usize = 3;
/// Before the clock starts: connections are made, code and allocator are warm.
const FIRST_CALLS: usize = 1_000;
/// Tells the copy of the benchmark that it has a core of its own, and which is left to the server.
const SERVER_CORE_VARIABLE: &str = "DINSQL_BENCH_SERVER_CORE";
/// Nobody answers here: whoever asks in spite of a full cache fails.
const NOWHERE: &str = "http://127.0.0.1:9/v1";

type Failure = Box<dyn Error>;

fn main() -> Result<(), Failure> {
    if let Some(latency) = asked_to_serve() {
        return Ok(serve(latency, answer)?);
    }
    if !is_asked_for() {
        println!("calls: measured by `cargo bench` only");
        return Ok(());
    }
    let server_core = match std::env::var(SERVER_CORE_VARIABLE) {
        Ok(core) => Some(core.parse()?),
        Err(_) => None,
    };
    if server_core.is_none()
        && let Some((own, server)) = two_cores()
    {
        let status = on_core(std::env::current_exe()?, Some(own))
            .arg("--bench")
            .env(SERVER_CORE_VARIABLE, server.to_string())
            .status()?;
        return if status.success() {
            Ok(())
        } else {
            Err(format!("the copy on core {own} ended with {status}").into())
        };
    }
    let calls = match std::env::var(CALLS_VARIABLE) {
        Ok(text) => text
            .parse()
            .ok()
            .filter(|&number| number > 0)
            .ok_or_else(|| format!("{CALLS_VARIABLE}: `{text}` is no number of calls"))?,
        Err(_) => CALLS,
    };
    // The binary does the same; without it no client can be made.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let bench = Bench {
        runtime: tokio::runtime::Builder::new_multi_thread().enable_all().build()?,
        folder: tempfile::tempdir()?,
        requests: (0..calls + FIRST_CALLS).map(request).collect(),
        calls,
        server_core,
    };
    let mut figures = Vec::new();
    for in_flight in IN_FLIGHT {
        figures.extend(bench.at(in_flight)?);
    }
    let pinned = match server_core {
        Some(server) => format!("on one core, the server on core {server}"),
        None => "not pinned to cores: `taskset` and two cores are needed".into(),
    };
    print_table(
        &format!("calls: {calls} calls, best of {ROUNDS} rounds, processor time of this process; {pinned}"),
        &figures,
    );
    print_table("cache", &bench.cache()?);
    Ok(())
}

/// The library's way to a server.
fn uncached(base_url: &str, in_flight: usize) -> Result<Arc<dyn Model>, Failure> {
    let endpoint = Endpoint {
        local: true,
        ..Endpoint::new("mock", base_url, None)
    };
    let client = Arc::new(OpenAiModel::new(endpoint)?);
    Ok(Arc::new(RetryingModel::with_concurrency(
        client,
        RetryPolicy::default(),
        in_flight,
    )))
}

/// The same behind a cache.
fn cached(inner: Arc<dyn Model>, cache: &Cache) -> Arc<dyn Model> {
    Arc::new(CachedModel::new(inner, cache.clone(), CacheMode::On))
}

/// One of many requests that differ in the question, with a schema as a prompt has it.
fn request(number: usize) -> Request {
    let mut schema = String::from("Write one SQLite query that answers the question.\n");
    for table in 0..12 {
        schema.push_str(&format!(
            "CREATE TABLE table_{table} (id INTEGER PRIMARY KEY, name TEXT NOT NULL, parent_id INTEGER, price REAL);\n"
        ));
    }
    let message = |role, content| Message { role, content };
    Request {
        provider: "mock".into(),
        model: "mock".into(),
        messages: vec![
            message(Role::System, schema),
            message(Role::User, format!("What is the name of item {number}?")),
        ],
        temperature: Some(0.0),
        top_p: None,
        max_tokens: Some(512),
        seed: None,
        stop: Vec::new(),
        repeat: 0,
        sample: 0,
        n: None,
        logprobs: false,
        response_format: None,
        timeout: None,
        origin: String::new(),
    }
}

/// What a bare client sends for the same.
fn body(request: &Request) -> Json {
    json!({
        "model": request.model,
        "messages": request.messages,
        "temperature": request.temperature,
        "max_tokens": request.max_tokens,
    })
}

/// Of the usual length; what it says does not matter here.
fn answer(_: &[u8]) -> String {
    "```sql\nSELECT name FROM table_1 JOIN table_2 ON table_2.parent_id = table_1.id WHERE table_1.id = 1\n```".into()
}

struct Bench {
    runtime: Runtime,
    folder: tempfile::TempDir,
    /// Those that are measured, and after them the first calls.
    requests: Vec<Request>,
    calls: usize,
    server_core: Option<usize>,
}

/// What calls took.
struct Spent {
    seconds: f64,
    processor_seconds: Option<f64>,
    traffic: Option<Traffic>,
}

impl Bench {
    /// All ways of calling with so many calls in flight.
    fn at(&self, in_flight: usize) -> Result<Vec<Figure>, Failure> {
        let bare = best(|_| self.bare(in_flight))?;
        let plain = best(|_| self.uncached(in_flight))?;
        let cold = best(|round| self.cold(in_flight, round))?;
        let warm = best(|_| self.warm(in_flight))?;
        let overhead = match (self.micros(&plain), self.micros(&bare)) {
            (Some(ours), Some(bare)) => format!("{:+.1} µs", ours - bare),
            _ => "unknown".into(),
        };
        let row = |what: &str, spent: &Spent, wanted| Figure::new(format!("  {what}"), self.row(spent), wanted);
        let busy = |spent: &Spent| spent.traffic.as_ref().map_or_else(String::new, Traffic::busy);
        Ok(vec![
            Figure::new(format!("{in_flight} in flight"), "", ""),
            row("bare async-openai", &bare, ""),
            row(
                "ours, no cache",
                &plain,
                "at least 3,000 /s from 8 in flight, at most 100 µs",
            ),
            row("ours, empty cache", &cold, ""),
            row("ours, full cache", &warm, "at least 20,000 /s"),
            Figure::new("  ours, no cache, over bare", overhead, ""),
            Figure::new(
                "  server's core was busy: bare, ours",
                format!("{}, {}", busy(&bare), busy(&plain)),
                "(near 100 %, the server sets the rate)",
            ),
        ])
    }

    fn bare(&self, in_flight: usize) -> Result<Spent, Failure> {
        let bodies: Vec<Json> = self.requests.iter().map(body).collect();
        self.with_server(|base_url| {
            let config = OpenAIConfig::new().with_api_base(base_url).with_api_key("none");
            let http = reqwest::Client::builder().no_proxy().build()?;
            let client = Client::build(http, config);
            let (client, bodies) = (&client, &bodies);
            Ok(self.spend(in_flight, |number| async move {
                let answer: Result<Json, _> = client.chat().create_byot(&bodies[number]).await;
                let answer = answer.unwrap_or_else(|error| panic!("call {number}: {error}"));
                assert!(answer["choices"][0]["message"]["content"].is_string(), "{answer}");
            }))
        })
    }

    fn uncached(&self, in_flight: usize) -> Result<Spent, Failure> {
        self.with_server(|base_url| Ok(self.spend_on(&*uncached(base_url, in_flight)?, in_flight)))
    }

    fn cold(&self, in_flight: usize, round: usize) -> Result<Spent, Failure> {
        let folder = self.cache_folder(in_flight);
        if round > 0 {
            std::fs::remove_dir_all(&folder)?;
        }
        let spent = self.with_server(|base_url| {
            let cache = Cache::open(&cache_file(&folder))?;
            Ok(self.spend_on(&*cached(uncached(base_url, in_flight)?, &cache), in_flight))
        })?;
        wait_for_writer(&folder);
        Ok(spent)
    }

    fn warm(&self, in_flight: usize) -> Result<Spent, Failure> {
        let cache = Cache::open(&cache_file(&self.cache_folder(in_flight)))?;
        Ok(self.spend_on(&*cached(uncached(NOWHERE, in_flight)?, &cache), in_flight))
    }

    fn cache_folder(&self, in_flight: usize) -> PathBuf {
        self.folder.path().join(format!("cache-{in_flight}"))
    }

    fn with_server(&self, calls: impl FnOnce(&str) -> Result<Spent, Failure>) -> Result<Spent, Failure> {
        let server = MockServer::start(Duration::ZERO, self.server_core)?;
        let spent = calls(&server.base_url)?;
        let traffic = server.end()?;
        assert_eq!(traffic.requests, self.requests.len(), "one request a call");
        Ok(Spent {
            traffic: Some(traffic),
            ..spent
        })
    }

    fn spend_on(&self, model: &dyn Model, in_flight: usize) -> Spent {
        self.spend(in_flight, |number| async move {
            let answer = model.complete(&self.requests[number]).await;
            let answer = answer.unwrap_or_else(|error| panic!("call {number}: {error}"));
            assert!(!answer.text.is_empty(), "call {number}: {answer:?}");
        })
    }

    /// Makes the calls, of which the first do not count.
    fn spend<Call: Future<Output = ()>>(&self, in_flight: usize, call: impl Fn(usize) -> Call) -> Spent {
        let drive = |numbers: Range<usize>| {
            let calls = stream::iter(numbers).map(&call).buffer_unordered(in_flight);
            self.runtime.block_on(calls.for_each(|()| ready(())));
        };
        drive(self.calls..self.requests.len());
        let (started, before) = (Instant::now(), processor_seconds());
        drive(0..self.calls);
        Spent {
            seconds: started.elapsed().as_secs_f64(),
            processor_seconds: before.zip(processor_seconds()).map(|(before, after)| after - before),
            traffic: None,
        }
    }

    fn micros(&self, spent: &Spent) -> Option<f64> {
        spent.processor_seconds.map(|seconds| seconds * 1e6 / self.calls as f64)
    }

    fn row(&self, spent: &Spent) -> String {
        let rate = self.calls as f64 / spent.seconds;
        match self.micros(spent) {
            Some(micros) => format!("{rate:>7.0} /s {micros:>7.1} µs"),
            None => format!("{rate:>7.0} /s"),
        }
    }

    /// The file that the last calls have filled.
    fn cache(&self) -> Result<Vec<Figure>, Failure> {
        let folder = self.cache_folder(IN_FLIGHT[IN_FLIGHT.len() - 1]);
        let stored = self.requests.len();
        let mut size = 0;
        for entry in std::fs::read_dir(&folder)? {
            size += entry?.metadata()?.len();
        }
        let cache = Cache::open(&cache_file(&folder))?;
        let mut keys: Vec<[u8; 32]> = self.requests.iter().map(Request::key).collect();
        // Digests in their own order are not the order in which they were stored.
        keys.sort_unstable();
        let hits = look_up(&cache, &keys, true)?;
        let unknown: Vec<[u8; 32]> = keys.iter().map(|key| *blake3::hash(key).as_bytes()).collect();
        let misses = look_up(&cache, &unknown, false)?;
        Ok(vec![
            Figure::new(
                "file with 10,000 completions",
                format!("{:.2} MB", size as f64 / 1e6 * 10_000.0 / stored as f64),
                "",
            ),
            Figure::new("a look-up that finds", format!("{hits:.1} µs"), ""),
            Figure::new("a look-up that does not", format!("{misses:.1} µs"), ""),
        ])
    }
}

/// The round that took least.
fn best(measure: impl Fn(usize) -> Result<Spent, Failure>) -> Result<Spent, Failure> {
    let mut best: Option<Spent> = None;
    for round in 0..ROUNDS {
        let spent = measure(round)?;
        let cost = |spent: &Spent| spent.processor_seconds.unwrap_or(spent.seconds);
        if best.as_ref().is_none_or(|best| cost(&spent) < cost(best)) {
            best = Some(spent);
        }
    }
    best.ok_or_else(|| "no round".into())
}

fn cache_file(folder: &Path) -> PathBuf {
    folder.join("completions.sqlite")
}

/// Microseconds a key.
fn look_up(cache: &Cache, keys: &[[u8; 32]], there: bool) -> Result<f64, Failure> {
    let started = Instant::now();
    for key in keys {
        assert_eq!(cache.get(key)?.is_some(), there, "a key of the cache");
    }
    Ok(started.elapsed().as_secs_f64() * 1e6 / keys.len() as f64)
}

/// The cache's writer ends by itself, and then tidies up the file's log.
fn wait_for_writer(folder: &Path) {
    let log = folder.join("completions.sqlite-wal");
    let started = Instant::now();
    while log.exists() && started.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(5));
    }
}
