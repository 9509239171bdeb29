//! How many examples a second `dinsql run` makes, and in how much memory, against a server that answers at once or after
//! a fixed latency. Prints figures; see README.md.
//!
//! Each example has its own question, gold query and answer, so nothing is shared that a real run would not share.

#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

mod measure;
mod mock_server;

use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value as Json, json};

use measure::{Figure, Measured, dinsql, is_asked_for, measure, print_table, two_cores};
use mock_server::{MockServer, asked_to_serve, serve};

/// Asks for the long run instead: 100,000 examples through the four stages of `din-sql`.
const LARGE_VARIABLE: &str = "DINSQL_BENCH_LARGE";
const LARGE: usize = 100_000;
/// Scales the benchmark.
const EXAMPLES_VARIABLE: &str = "DINSQL_BENCH_EXAMPLES";
const EXAMPLES: usize = 10_000;
/// Enough for the beginning and the end of a run not to matter much: ten seconds at the ideal rate.
const EXAMPLES_WITH_LATENCY: usize = 3_200;
const LATENCY: Duration = Duration::from_millis(200);
const CONCURRENCY: usize = 64;
/// Stands in each question before the number that makes it different from the others.
const ASKED: &str = "What is the name of item ";

fn main() -> io::Result<()> {
    if let Some(latency) = asked_to_serve() {
        return serve(latency, answer);
    }
    if !is_asked_for() {
        println!("throughput: measured by `cargo bench` only");
        return Ok(());
    }
    let examples = match std::env::var(EXAMPLES_VARIABLE) {
        Ok(text) => text
            .parse()
            .ok()
            .filter(|&number| number > 0)
            .ok_or_else(|| io::Error::other(format!("{EXAMPLES_VARIABLE}: `{text}` is no number of examples")))?,
        Err(_) if std::env::var_os(LARGE_VARIABLE).is_some() => LARGE,
        Err(_) => EXAMPLES,
    };
    let cores = two_cores();
    let bench = Bench {
        folder: tempfile::tempdir()?,
        own_core: cores.map(|(own, _)| own),
        server_core: cores.map(|(_, server)| server),
    };
    let data = bench.dataset("items", examples)?;
    if std::env::var_os(LARGE_VARIABLE).is_some() {
        let figures = bench.large(&data, examples)?;
        print_table(
            &format!("throughput: {examples} examples through din-sql, four calls each, {CONCURRENCY} in flight"),
            &figures,
        );
        return Ok(());
    }
    let mut figures = bench.without_latency(&data, examples)?;
    let with_latency = examples.min(EXAMPLES_WITH_LATENCY);
    let data = bench.dataset("few-items", with_latency)?;
    figures.extend(bench.with_latency(&data, with_latency)?);
    let pinned = match cores {
        Some((own, server)) => format!("dinsql on core {own}, the server on core {server}"),
        None => "not pinned to cores: `taskset` and two cores are needed".into(),
    };
    print_table(
        &format!("throughput: {examples} examples, one call each, {CONCURRENCY} in flight; {pinned}"),
        &figures,
    );
    Ok(())
}

/// The right query for a question, in a fence as models write it.
fn answer(body: &[u8]) -> String {
    let asked = ASKED.as_bytes();
    // The question stands near the end of the prompt, and the schema before it is long.
    let number: String = body
        .windows(asked.len())
        .rposition(|window| window == asked)
        .map(|at| &body[at + asked.len()..])
        .unwrap_or_default()
        .iter()
        .take_while(|byte| byte.is_ascii_digit())
        .map(|&byte| char::from(byte))
        .collect();
    if body
        .windows(SQL_IS_ASKED_FOR.len())
        .any(|window| window == SQL_IS_ASKED_FOR)
    {
        // What every stage of `din-sql` looks for, in one answer.
        let sql = query(&number);
        return format!("Schema_links: [item.id]\nLabel: \"EASY\"\nsub_questions: []\nSQL: {sql}\nRevised_SQL: {sql}");
    }
    format!("```sql\n{}\n```", query(&number))
}

/// Stands in the prompts of `din-sql` and not in those of `zero-shot`.
const SQL_IS_ASKED_FOR: &[u8] = b"Schema_links";

fn query(number: &str) -> String {
    format!("SELECT name FROM item WHERE id = {number}")
}

struct Bench {
    folder: tempfile::TempDir,
    own_core: Option<usize>,
    server_core: Option<usize>,
}

impl Bench {
    /// Writes a data set of one database and so many questions, and returns its manifest's path.
    fn dataset(&self, name: &str, examples: usize) -> io::Result<PathBuf> {
        let folder = self.folder.path().join(name);
        let database = folder.join("databases/stock");
        std::fs::create_dir_all(&database)?;
        write_database(&database.join("stock.sqlite"), examples).map_err(io::Error::other)?;
        let mut lines = String::new();
        for number in 1..=examples {
            let line = json!({
                "id": number.to_string(),
                "db": "stock",
                "question": format!("{ASKED}{number}?"),
                "gold": query(&number.to_string()),
                "difficulty": "simple",
            });
            let _ = writeln!(lines, "{line}");
        }
        std::fs::write(folder.join("questions.jsonl"), lines)?;
        let manifest = folder.join(format!("{name}.yaml"));
        std::fs::write(
            &manifest,
            "format: jsonl\n\
             language: en\n\
             questions: questions.jsonl\n\
             databases: databases\n\
             fields: { id: id, database: db, question: question, gold: gold, difficulty: difficulty }\n",
        )?;
        Ok(manifest)
    }

    /// Runs `zero-shot` with its files under names of their own, and checks that it did what it was to do.
    fn run(&self, data: &Path, examples: usize, server: &MockServer, runs: &str, cache: Option<&str>) -> Measured {
        self.run_pipeline("zero-shot", data, examples, server, runs, cache)
    }

    fn run_pipeline(
        &self,
        pipeline: &str,
        data: &Path,
        examples: usize,
        server: &MockServer,
        runs: &str,
        cache: Option<&str>,
    ) -> Measured {
        let folder = self.folder.path();
        let mut command = dinsql(folder, self.own_core);
        command.args(["run", pipeline, "--json", "--model", "mock"]);
        command.arg("--data").arg(data);
        command.args([
            "--base-url",
            &server.base_url,
            "--concurrency",
            &CONCURRENCY.to_string(),
        ]);
        command.arg("--runs-dir").arg(folder.join(runs));
        match cache {
            Some(name) => command.arg("--cache").arg(folder.join(name)),
            None => command
                .arg("--no-cache")
                .arg("--cache")
                .arg(folder.join("no-completions")),
        };
        let measured = measure(&mut command);
        let summary: Json = serde_json::from_slice(&measured.stdout).unwrap_or_default();
        let run = &summary["runs"][0];
        assert_eq!(run["n"].as_u64(), Some(examples as u64), "{summary}");
        assert_eq!(run["metrics"]["ex"]["value"].as_f64(), Some(1.0), "{summary}");
        measured
    }

    fn without_latency(&self, data: &Path, examples: usize) -> io::Result<Vec<Figure>> {
        let server = MockServer::start(Duration::ZERO, self.server_core)?;
        let first = self.run(data, examples, &server, "runs", Some("cache"));
        let cached = self.run(data, examples, &server, "runs-cached", Some("cache"));
        let again = self.run(data, examples, &server, "runs", Some("cache"));
        let traffic = server.end()?;
        assert_eq!(traffic.requests, examples, "only the first run may ask the server");
        let server = MockServer::start(Duration::ZERO, self.server_core)?;
        let uncached = self.run(data, examples, &server, "runs-uncached", None);
        let uncached_traffic = server.end()?;
        assert_eq!(uncached_traffic.requests, examples, "one call an example");
        let busy = |traffic: &mock_server::Traffic| {
            traffic.busy_seconds.map_or_else(
                || "unknown".into(),
                |busy| format!("{:.0} %", busy / traffic.seconds * 100.0),
            )
        };
        Ok(vec![
            Figure::new("empty cache", first.rate(examples), "at least 2,000 /s"),
            Figure::new("  peak memory", first.peak(), "under 150 MB for 10,000 examples"),
            Figure::new(
                "  server's core was busy",
                busy(&traffic),
                "(near 100 %, the server sets the rate)",
            ),
            Figure::new("--no-cache", uncached.rate(examples), "at least 2,000 /s"),
            Figure::new("  peak memory", uncached.peak(), "under 150 MB for 10,000 examples"),
            Figure::new("  server's core was busy", busy(&uncached_traffic), ""),
            Figure::new("all from the cache, new run", cached.rate(examples), ""),
            Figure::new("  peak memory", cached.peak(), ""),
            Figure::new("finished run once more", format!("{:.2} s", again.seconds), ""),
        ])
    }

    /// A run of a size at which memory and the folder begin to matter, and the same command once more.
    fn large(&self, data: &Path, examples: usize) -> io::Result<Vec<Figure>> {
        let server = MockServer::start(Duration::ZERO, self.server_core)?;
        let run = || self.run_pipeline("din-sql", data, examples, &server, "runs", Some("cache"));
        let first = run();
        let again = run();
        let traffic = server.end()?;
        Ok(vec![
            Figure::new("calls", format!("{}", traffic.requests), ""),
            Figure::new(
                "calls a second, empty cache",
                first.rate(traffic.requests),
                "at least 3,000 /s",
            ),
            Figure::new("  peak memory", first.peak(), "under 300 MB"),
            Figure::new("finished run once more", format!("{:.2} s", again.seconds), "under 3 s"),
            Figure::new("  peak memory", again.peak(), ""),
        ])
    }

    fn with_latency(&self, data: &Path, examples: usize) -> io::Result<Vec<Figure>> {
        let server = MockServer::start(LATENCY, self.server_core)?;
        let measured = self.run(data, examples, &server, "runs-latency", Some("cache-latency"));
        let traffic = server.end()?;
        let ideal = CONCURRENCY as f64 / LATENCY.as_secs_f64();
        let share = |seconds: f64| format!("{:.1} %", examples as f64 / seconds / ideal * 100.0);
        Ok(vec![
            Figure::new(
                format!(
                    "{examples} examples, {} ± {} ms latency",
                    LATENCY.as_millis(),
                    LATENCY.as_millis() / 4
                ),
                measured.rate(examples),
                "",
            ),
            Figure::new(
                format!("  of the ideal {ideal:.0} /s, start to exit"),
                share(measured.seconds),
                "at least 97 %",
            ),
            Figure::new("  first request to last answer", share(traffic.seconds), ""),
            Figure::new("  most in flight at once", traffic.max_in_flight.to_string(), ""),
        ])
    }
}

fn write_database(path: &Path, rows: usize) -> rusqlite::Result<()> {
    let mut connection = rusqlite::Connection::open(path)?;
    connection.execute_batch(
        "CREATE TABLE category (id INTEGER PRIMARY KEY, title TEXT NOT NULL);
         CREATE TABLE item (
             id INTEGER PRIMARY KEY,
             name TEXT NOT NULL,
             category_id INTEGER REFERENCES category (id),
             price REAL
         );
         INSERT INTO category VALUES (0, 'tools'), (1, 'paint'), (2, 'wood');",
    )?;
    let change = connection.transaction()?;
    {
        let mut insert = change.prepare("INSERT INTO item VALUES (?1, ?2, ?3, ?4)")?;
        for number in 1..=i64::try_from(rows).unwrap_or(i64::MAX) {
            insert.execute((number, format!("name {number}"), number % 3, number as f64 / 4.0))?;
        }
    }
    change.commit()
}
