//! Runs against servers that misbehave for long, and users who want to stop: everything ends, nothing is lost, nothing is
//! paid twice.

mod support;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value as Json, json};

use support::faults::{Effect, Ending, Fault, FaultPlan, with_faults};
use support::server::Digest;
use support::{Background, Known, Reply, Server, Workspace, oracle, read_json, read_lines, tiny, wait_until};

const ATTEMPTS: u32 = 5;
const ATTEMPTS_WHEN_LIMITED: u32 = 10;

/// How a call must end by the retry policy in docs/models.md: five attempts, ten where every one was refused for being too
/// many.
fn expected(plan: &FaultPlan, body: Digest) -> Ending {
    let limited = (0..ATTEMPTS).all(|attempt| {
        let effect = plan.fault(body, attempt).map(Fault::effect);
        effect == Some(Effect::Passing("rate_limited"))
    });
    if !limited {
        return plan.expected_after(body, 0, ATTEMPTS);
    }
    // The first other fault after the fifth attempt is the last.
    for attempts in ATTEMPTS + 1..=ATTEMPTS_WHEN_LIMITED {
        let ending = plan.expected_after(body, 0, attempts);
        let last_limited = ending
            == Ending::Failed {
                class: "rate_limited",
                attempts,
            };
        if !last_limited || attempts == ATTEMPTS_WHEN_LIMITED {
            return ending;
        }
    }
    unreachable!("the loop returns")
}

#[test]
fn ten_thousand_examples_through_thirty_percent_faults() {
    let workspace = Workspace::new();
    let known = workspace.many(10_000);
    let plan = FaultPlan::mixed(7, 0.3);
    let server = Server::start(with_faults(plan.clone(), oracle(&known)));
    let started = Instant::now();
    let ran = workspace.run(
        &server,
        &[
            "zero-shot",
            "--data",
            "many",
            "--concurrency",
            "64",
            "--set",
            "model.timeout=2",
            "--json",
        ],
    );
    let seconds = started.elapsed().as_secs_f64();
    let run = ran.expect(3).json()["runs"][0].clone();
    assert_eq!((&run["status"], &run["n"]), (&json!("complete"), &json!(10_000)));

    let bodies: HashMap<String, Digest> = server
        .received()
        .iter()
        .map(|request| (request.question().to_owned(), request.digest))
        .collect();
    let of_question = |known: &Known| {
        let asked = bodies.iter().find(|(message, _)| message.contains(&known.question));
        *asked.unwrap_or_else(|| panic!("never asked: {}", known.question)).1
    };
    // The questions end in their numbers and a question mark, so that none is a part of another.
    let by_message: HashMap<&str, Digest> = bodies
        .iter()
        .filter_map(|(message, digest)| {
            let at = message.find("What is the name of item ")?;
            Some((message[at..].lines().next()?, *digest))
        })
        .collect();
    let traces: HashMap<String, Json> = read_lines(&workspace.run_folder("zero-shot.many.en.").join("traces.jsonl"))
        .into_iter()
        .map(|trace| (trace["id"].as_str().expect("an id").to_owned(), trace))
        .collect();
    assert_eq!(traces.len(), 10_000);
    let mut requests = 0;
    let mut failed = 0;
    for known in &known {
        let digest = by_message
            .get(known.question.as_str())
            .copied()
            .unwrap_or_else(|| of_question(known));
        let ending = expected(&plan, digest);
        requests += ending.attempts() as usize;
        let stage = &traces[&known.id]["stages"][0];
        match ending {
            Ending::Answered { attempts, .. } => {
                assert_eq!(stage["completion"]["attempts"], attempts, "{}: {stage:#}", known.id);
                assert_eq!(
                    stage["completion"]["text"] == known.gold.as_str(),
                    ending.is_good(),
                    "{}",
                    known.id
                );
            }
            Ending::Failed { class, attempts } => {
                failed += 1;
                let failure = &stage["failure"];
                assert_eq!(
                    (&failure["class"], &failure["attempts"]),
                    (&json!(class), &json!(attempts)),
                    "{}: {stage:#}",
                    known.id
                );
                assert_eq!(traces[&known.id]["outcome"], "model_error");
            }
        }
    }
    assert_eq!(
        server.count(),
        requests,
        "every request is one that the policy asks for"
    );
    assert_eq!(run["outcomes"]["model_error"], failed);
    assert!(failed > 100, "{failed}: the faults were real");
    assert_eq!(server.paid_twice(), Vec::<String>::new());
    assert!(server.most_in_flight() <= 64);
    // The server's patience is the only thing that takes time.
    assert!(seconds < 300.0, "{seconds} s");
}

fn signal(process: &Background, signal: Signal) {
    let id = Pid::from_raw(i32::try_from(process.id()).expect("a process id")).expect("a process id");
    kill_process(id, signal).expect("a signal");
}

/// With the waits that users have, which tests otherwise shorten.
fn start_patiently(workspace: &Workspace, server: &Server, arguments: &[&str]) -> Background {
    Background::spawn(
        workspace
            .command()
            .env_remove("DINSQL_TEST_RETRY_MS")
            .args([&["run"], arguments, &support::at(server)[..]].concat()),
    )
}

/// Calls that wait for half a minute are woken by Ctrl+C, and by SIGTERM.
#[test]
fn whoever_waits_is_woken_by_the_wish_to_stop() {
    for kind in [Signal::INT, Signal::TERM] {
        let workspace = Workspace::new();
        let server =
            Server::start(|_, _| Reply::plain(429, "text/plain", "slow down").with_header("retry-after", "30"));
        let running = start_patiently(&workspace, &server, &["zero-shot", "--data", "tiny", "--lang", "en"]);
        // The first refusals hold the others back, so that there may be fewer requests than calls.
        wait_until("somebody has asked", || server.count() > 0);
        std::thread::sleep(Duration::from_millis(300));
        let before = server.count();
        let asked = Instant::now();
        signal(&running, kind);
        let ran = running.end().expect(130);
        assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
        assert!(
            ran.err.contains("interrupted; the same command goes on from there"),
            "{}",
            ran.err
        );
        let folder = workspace.run_folder("zero-shot.tiny.en.");
        let record = read_json(&folder.join("run.json"));
        assert_eq!(
            (&record["status"], &record["stopped"]),
            (&json!("partial"), &json!("interrupted"))
        );
        assert_eq!(
            read_lines(&folder.join("traces.jsonl")).len(),
            0,
            "an example that was not finished is not done"
        );
        assert_eq!(server.count(), before, "nothing was asked again");
    }
}

#[test]
fn the_second_ctrl_c_ends_at_once() {
    let workspace = Workspace::new();
    let server = Server::start(|_, _| Reply::Hang);
    let mut running = start_patiently(&workspace, &server, &["zero-shot", "--data", "tiny", "--lang", "en"]);
    wait_until("all have asked", || server.count() >= 6);
    signal(&running, Signal::INT);
    std::thread::sleep(Duration::from_millis(300));
    assert!(running.is_running(), "calls in flight are waited for");
    let asked = Instant::now();
    signal(&running, Signal::INT);
    running.end().expect(130);
    assert!(asked.elapsed() < Duration::from_secs(5));
}

/// An outage ends the run, and does not turn example after example into an error.
#[test]
fn an_outage_stops_the_run_and_what_failed_is_asked_again_on_request() {
    let workspace = Workspace::new();
    let known = workspace.many(100);
    let down = Arc::new(AtomicBool::new(false));
    let (answer, is_down) = (oracle(&known), Arc::clone(&down));
    let server = Server::start(move |body, number| {
        if number == 20 {
            is_down.store(true, Ordering::SeqCst);
        }
        if number >= 20 && is_down.load(Ordering::SeqCst) {
            Reply::plain(502, "text/html", "<html>Bad Gateway</html>")
        } else {
            answer(body, number)
        }
    });
    let arguments = ["zero-shot", "--data", "many", "--concurrency", "2", "--json"];
    let ran = workspace.run(&server, &arguments).expect(4);
    let run = ran.json()["runs"][0].clone();
    assert_eq!(run["status"], "partial");
    assert!(
        ran.err.contains("calls in a row failed for good") && ran.err.contains("--retry-errors"),
        "{}",
        ran.err
    );
    let errors = run["outcomes"]["model_error"].as_u64().expect("some");
    assert!((1..=12).contains(&errors), "{run:#}");
    assert!(server.count() < 20 + 70, "{} requests", server.count());

    down.store(false, Ordering::SeqCst);
    let ran = workspace.run(&server, &arguments).expect(3);
    let run = ran.json()["runs"][0].clone();
    assert_eq!(
        run["outcomes"],
        json!({ "answered": 100 - errors, "model_error": errors })
    );
    let before = server.count();
    let again = [&arguments[..], &["--retry-errors"]].concat();
    let ran = workspace.run(&server, &again).expect(0);
    assert_eq!(ran.json()["runs"][0]["outcomes"], json!({ "answered": 100 }));
    assert_eq!(server.count() as u64, before as u64 + errors, "only those");
    let traces = read_lines(&workspace.run_folder("zero-shot.many.en.").join("traces.jsonl"));
    assert_eq!(traces.len(), 100);
}

/// A poisoned answer in one example after another is no outage.
#[test]
fn many_bad_answers_in_a_row_are_no_outage() {
    let workspace = Workspace::new();
    workspace.many(30);
    let server = Server::start(|_, _| Reply::reasoning_only());
    let ran = workspace
        .run(&server, &["zero-shot", "--data", "many", "--json"])
        .expect(3);
    assert_eq!(ran.json()["runs"][0]["outcomes"], json!({ "model_error": 30 }));
}

/// The same command again asks nothing, and changes nothing.
#[test]
fn a_complete_run_is_left_as_it_is() {
    let workspace = Workspace::new();
    let server = Server::start(oracle(&tiny("en")));
    let arguments = ["zero-shot", "--data", "tiny", "--lang", "en", "--json"];
    let first = workspace.run(&server, &arguments).expect(0).json();
    let folder = workspace.run_folder("zero-shot.tiny.en.");
    let content = |folder: &std::path::Path| -> Vec<(std::path::PathBuf, Vec<u8>)> {
        let mut files = support::files(folder);
        files.sort();
        files
            .into_iter()
            .map(|path| (path.clone(), std::fs::read(path).expect("a file")))
            .collect()
    };
    let before = content(&folder);
    let second = workspace.run(&server, &arguments).expect(0).json();
    assert_eq!(server.count(), 6);
    assert_eq!(first, second);
    assert_eq!(before, content(&folder));
    // A trace that was added or changed by hand is not trusted to be in the summary.
    let traces = support::read(&folder.join("traces.jsonl"));
    let less: Vec<&str> = traces.lines().skip(1).collect();
    std::fs::write(folder.join("traces.jsonl"), less.join("\n") + "\n").expect("traces");
    workspace.run(&server, &arguments).expect(0);
    assert_eq!(content(&folder).len(), before.len());
    assert_eq!(support::read(&folder.join("summary.json")).len(), {
        let at = before
            .iter()
            .position(|(path, _)| path.ends_with("summary.json"))
            .expect("a summary");
        before[at].1.len()
    });
}

/// A full disk: what is in flight ends and is kept in the cache, and the run goes on once there is room.
#[test]
fn a_full_disk_loses_nothing_that_was_paid_for() {
    let workspace = Workspace::new();
    let known = workspace.many(6);
    // Prompts so long that the traces outgrow the limit below, which nothing else comes near.
    let tables: String = (0..1000)
        .map(|number| {
            format!("CREATE TABLE a_table_that_nobody_asks_about_{number} (id INTEGER PRIMARY KEY, name TEXT);")
        })
        .collect();
    let items: String = (0..6)
        .map(|number| format!("INSERT INTO item VALUES ({number}, 'item number {number}');"))
        .collect();
    workspace.database(
        "datasets/many/databases/stock/stock.sqlite",
        &format!("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT); {items} {tables}"),
    );
    let server = Server::start(oracle(&known));
    let arguments = ["zero-shot", "--data", "many", "--json"];
    let limited = workspace.command();
    let mut shell = std::process::Command::new("bash");
    shell
        .current_dir(workspace.root())
        .env_clear()
        .envs(limited.get_envs().filter_map(|(name, value)| Some((name, value?))))
        // Writes beyond the limit fail as they do on a full disk, instead of killing the process.
        .args(["-c", "trap '' XFSZ; ulimit -f 300; exec \"$@\"", "bash"])
        .arg(limited.get_program())
        .arg("run")
        .args(arguments)
        .args(support::at(&server));
    let ran = Background::spawn(&mut shell).end().expect(1);
    insta::assert_snapshot!("full_disk", workspace.complaint(&ran));
    let asked = server.count();
    assert!((1..=6).contains(&asked));
    let folder = workspace.run_folder("zero-shot.many.en.");
    assert_eq!(read_json(&folder.join("run.json"))["status"], "partial");
    let ran = workspace.run(&server, &arguments).expect(0);
    assert_eq!(ran.json()["runs"][0]["metrics"]["ex"]["value"], 1.0);
    assert_eq!(server.count(), 6, "what was answered before is not asked again");
    assert_eq!(read_lines(&folder.join("traces.jsonl")).len(), 6);
}

#[test]
fn a_folder_that_cannot_be_made_is_named_before_anything_is_asked() {
    let workspace = Workspace::new();
    let server = Server::start(oracle(&tiny("en")));
    workspace.write("file", "not a folder");
    let ran = workspace.run(&server, &["zero-shot", "--data", "tiny", "--runs-dir", "file"]);
    insta::assert_snapshot!("runs_dir_is_a_file", workspace.complaint(&ran));
    assert_eq!(server.count(), 0);
}

/// A run goes on from anywhere, with the settings that it was started with.
#[test]
fn resume_takes_folders_and_environment_from_the_run() {
    let workspace = Workspace::new();
    let known = tiny("en");
    let slow = Arc::new(AtomicBool::new(true));
    let (answer, is_slow) = (oracle(&known), Arc::clone(&slow));
    let server = Server::start(move |body, number| {
        if number >= 3 && is_slow.load(Ordering::SeqCst) {
            Reply::error(429, "insufficient_quota", "You exceeded your current quota.")
        } else {
            answer(body, number)
        }
    });
    let mut command = workspace.command();
    command
        .env("DINSQL_RUNS_DIR", "runs of mine")
        .env("DINSQL_CACHE", "answers")
        .env("OPENAI_BASE_URL", &server.url)
        .env("DINSQL_MODEL", "tester")
        .args([
            "run",
            "zero-shot",
            "--data",
            "tiny",
            "--lang",
            "en",
            "--concurrency",
            "1",
        ]);
    Background::spawn(&mut command).end().expect(4);
    slow.store(false, Ordering::SeqCst);
    let folder = support::run_folder(&workspace.path("runs of mine"), "zero-shot.tiny.en.");
    // Elsewhere, with another environment, under another name.
    let moved = workspace.path("runs of mine/renamed");
    std::fs::rename(&folder, &moved).expect("another name");
    let elsewhere = tempfile::tempdir().expect("a folder");
    let mut command = workspace.command();
    command
        .current_dir(elsewhere.path())
        .args(["run", "--resume", moved.to_str().expect("a path"), "--json"]);
    let ran = Background::spawn(&mut command).end().expect(0);
    let run = ran.json()["runs"][0].clone();
    assert_eq!(
        (&run["status"], &run["metrics"]["ex"]["value"]),
        (&json!("complete"), &json!(1.0))
    );
    assert_eq!(
        std::fs::read_dir(elsewhere.path()).expect("a folder").count(),
        0,
        "nothing was made elsewhere"
    );
    assert_eq!(
        std::fs::read_dir(workspace.path("runs of mine"))
            .expect("a folder")
            .count(),
        1
    );
}
