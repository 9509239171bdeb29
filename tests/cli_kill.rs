//! A hundred times kill -9 at random moments: whatever was answered is used, nothing is asked twice that had been stored, and
//! in the end nothing tells the run from one that was never interrupted.

mod support;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::Value as Json;

use support::faults::Random;
use support::{Reply, Server, Workspace, last_user_message, oracle, read, read_json, read_lines, run_folder};

const ROUNDS: usize = 40;
const KILLS_A_ROUND: usize = 4;
/// Examples that are under way with `--concurrency 4`, each with one call that is in flight or about to be stored.
const UNDER_WAY: usize = 8;

/// Everything of a run but times.
fn whole_of(folder: &Path) -> (Json, BTreeMap<String, Json>, [String; 4]) {
    fn without_times(json: &mut Json) {
        match json {
            Json::Object(fields) => {
                fields.retain(|name, _| !name.starts_with("latency"));
                fields.values_mut().for_each(without_times);
            }
            Json::Array(items) => items.iter_mut().for_each(without_times),
            _ => {}
        }
    }
    let mut summary = read_json(&folder.join("summary.json"));
    without_times(&mut summary);
    let traces = read_lines(&folder.join("traces.jsonl"));
    let count = traces.len();
    let by_id: BTreeMap<String, Json> = traces
        .into_iter()
        .map(|mut trace| {
            without_times(&mut trace);
            (trace["id"].as_str().expect("an id").to_owned(), trace)
        })
        .collect();
    assert_eq!(by_id.len(), count, "no example is there twice");
    let files = [
        "predictions.json",
        "predictions.sql",
        "verdicts.jsonl",
        "examples.jsonl",
    ]
    .map(|name| read(&folder.join(name)));
    (summary, by_id, files)
}

/// The questions of completions that the cache holds, with their stages, as the server tells calls apart.
fn stored(cache: &Path) -> usize {
    if !cache.exists() {
        return 0;
    }
    let connection = rusqlite::Connection::open(cache).expect("the cache");
    connection
        .query_row("SELECT count(*) FROM completions", [], |row| row.get::<_, i64>(0))
        .map_or(0, |count| usize::try_from(count).expect("a count"))
}

#[test]
fn a_hundred_kills_leave_no_trace() {
    let workspace = Workspace::new();
    let known = workspace.many(30);
    let answer = oracle(&known);
    // Some answers are cut, which the cache does not give to others, and some questions are never answered.
    let server = Server::start(move |body, number| {
        let message = last_user_message(body);
        let reply = if message.contains("item 11?") {
            Reply::error(
                400,
                "context_length_exceeded",
                "This model's maximum context length is 10 tokens.",
            )
        } else if message.contains("item 12?") {
            Reply::finished(Some("Label: EASY\nSELECT"), "length")
        } else {
            answer(body, number)
        };
        Reply::Slow(Duration::from_millis(3), Box::new(reply))
    });
    let arguments = ["din-sql", "--data", "many", "--concurrency", "4"];
    workspace
        .run(
            &server,
            &[&arguments[..], &["--runs-dir", "whole", "--cache", "whole-cache"]].concat(),
        )
        .expect(3);
    let expected = whole_of(&run_folder(&workspace.path("whole"), "din-sql.many.en."));
    let calls = server.count();
    let mut random = Random(20_261_201);
    let mut kills = 0;
    for round in 0..ROUNDS {
        let (runs, cache) = (format!("runs{round}"), format!("cache{round}"));
        let arguments = [&arguments[..], &["--runs-dir", &runs, "--cache", &cache]].concat();
        let at_start = server.count();
        let mut lost = 0;
        for _ in 0..KILLS_A_ROUND {
            let before = server.count();
            let mut running = workspace.start(&server, &arguments);
            // A moment at random among the requests of this part, and a little more.
            let target = before + (random.next() % 30) as usize;
            let until = std::time::Instant::now() + support::PATIENCE;
            while server.count() < target && running.is_running() {
                assert!(std::time::Instant::now() < until, "the moment never came");
                std::thread::sleep(Duration::from_micros(500));
            }
            std::thread::sleep(Duration::from_micros(random.next() % 5000));
            if !running.is_running() {
                break;
            }
            running.kill();
            kills += 1;
            // What was sent before the kill is still to be read by the server.
            std::thread::sleep(Duration::from_millis(30));
            // What was answered and not yet stored is lost with its process: at most one call of each example under way.
            let asked = server.count() - at_start;
            let kept = stored(&workspace.path(&format!("{cache}/completions.sqlite")));
            let refused = asked_about(&server, at_start, "item 11?");
            assert!(
                asked <= kept + lost + refused + UNDER_WAY,
                "{asked} asked, {kept} kept, {lost} lost before"
            );
            lost = (asked - refused).saturating_sub(kept);
        }
        workspace.run(&server, &arguments).expect(3);
        let folder = run_folder(&workspace.path(&runs), "din-sql.many.en.");
        assert_eq!(whole_of(&folder), expected, "round {round}");
        assert_eq!(read_json(&folder.join("run.json"))["status"], "complete");
        let asked = server.count() - at_start;
        let again = asked_about(&server, at_start, "item 11?").saturating_sub(1);
        assert!(
            asked <= calls + lost + again,
            "round {round}: {asked} requests for {calls} calls, of which {lost} were lost in flight"
        );
    }
    assert!(kills >= 100, "{kills} kills met a running process");
}

/// Requests about a question, from the `first`.
fn asked_about(server: &Server, first: usize, question: &str) -> usize {
    let received = server.received();
    received[first..]
        .iter()
        .filter(|request| request.question().contains(question))
        .count()
}
