//! Runs that are killed, interrupted, damaged or started twice: they go on, and come to the same result.

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value as Json, json};

use support::{
    Known, Reply, Server, Workspace, both, column, oracle, read, read_json, read_lines, run_folder, wait_until,
};

/// Examples that are done in a run that is under way.
fn traced(workspace: &Workspace) -> usize {
    let runs = std::fs::read_dir(workspace.path("runs"))
        .into_iter()
        .flatten()
        .flatten();
    runs.filter_map(|run| std::fs::read(run.path().join("traces.jsonl")).ok())
        .map(|bytes| bytes.iter().filter(|&&byte| byte == b'\n').count())
        .sum()
}

/// What must not depend on how often a run was interrupted.
fn result_of(folder: &Path) -> (Json, String, String, String, BTreeSet<String>) {
    let mut summary = read_json(&folder.join("summary.json"));
    summary.as_object_mut().expect("an object").remove("effort");
    (
        summary,
        read(&folder.join("predictions.json")),
        read(&folder.join("predictions.sql")),
        read(&folder.join("verdicts.jsonl")),
        column(&folder.join("traces.jsonl"), "id").into_iter().collect(),
    )
}

/// Answers right. While the brake is on, requests after the first so many get another reply in place of the answer, or the
/// answer late.
fn braked_oracle(
    known: &[Known],
    brake: &Arc<AtomicBool>,
    first: usize,
    late: impl Fn(Reply) -> Reply + Send + Sync + 'static,
) -> Server {
    let (answer, brake) = (oracle(known), Arc::clone(brake));
    Server::start(move |body, number| {
        let reply = answer(body, number);
        if number >= first && brake.load(Ordering::SeqCst) {
            late(reply)
        } else {
            reply
        }
    })
}

#[test]
fn a_run_that_was_killed_goes_on_to_the_same_result() {
    let workspace = Workspace::new();
    let known = workspace.many(40);
    let brake = Arc::new(AtomicBool::new(true));
    // Some examples are done, others half done, when the server falls silent and the process is killed.
    let server = braked_oracle(&known, &brake, 60, |_| Reply::Hang);
    let arguments = ["din-sql", "--data", "many", "--concurrency", "4"];
    let killed = workspace.start(&server, &arguments);
    wait_until("a few examples are done and the server is silent", || {
        traced(&workspace) >= 5 && server.count() > 60
    });
    killed.kill();
    let folder = workspace.run_folder("din-sql.many.en.");
    let before = read_lines(&folder.join("traces.jsonl")).len();
    assert!((5..40).contains(&before), "{before} examples were done");
    assert_eq!(read_json(&folder.join("run.json"))["status"], "running");
    assert!(!folder.join("summary.json").exists());

    // The kill may also have left half a line.
    let traces = folder.join("traces.jsonl");
    let mut torn = std::fs::read(&traces).expect("traces");
    let whole_lines = torn.clone();
    torn.extend_from_slice(b"{\"id\":\"q0");
    std::fs::write(&traces, torn).expect("traces");

    brake.store(false, Ordering::SeqCst);
    let ran = workspace.run(&server, &arguments).expect(0);
    assert!(
        ran.err.contains(&format!("going on after {before} of 40 examples")),
        "{}",
        ran.err
    );
    // What was answered was stored before it was used, so only the calls in flight are asked again.
    let asked_again = server.count() - 160;
    assert!(asked_again <= 4, "{asked_again} calls were asked twice");

    let mut uninterrupted = arguments.to_vec();
    uninterrupted.extend(["--runs-dir", "uninterrupted", "--cache", "other-cache"]);
    workspace.run(&server, &uninterrupted).expect(0);
    let whole = run_folder(&workspace.path("uninterrupted"), "din-sql.many.en.");
    assert_eq!(result_of(&folder), result_of(&whole));
    assert_eq!(read_lines(&traces).len(), 40, "no example is done twice");
    let after = std::fs::read(&traces).expect("traces");
    assert!(
        after.starts_with(&whole_lines),
        "what was written stays as it is, and the rest is added"
    );
    assert_eq!(
        read(&folder.join("examples.jsonl")),
        read(&whole.join("examples.jsonl"))
    );
    assert_eq!(read_json(&folder.join("run.json"))["status"], "complete");
}

#[test]
fn a_damaged_line_in_the_middle_is_named_not_skipped() {
    let workspace = Workspace::new();
    let server = Server::start(oracle(&both()));
    let arguments = ["zero-shot", "--data", "tiny", "--lang", "en"];
    workspace.run(&server, &arguments).expect(0);
    let traces = workspace.run_folder("zero-shot.tiny.en.").join("traces.jsonl");
    let text = read(&traces);
    let mut lines: Vec<&str> = text.lines().collect();
    lines[2] = "{\"id\": ";
    std::fs::write(&traces, lines.join("\n") + "\n").expect("traces");
    let ran = workspace.run(&server, &arguments);
    insta::assert_snapshot!("damaged_trace_in_the_middle", workspace.complaint(&ran));
}

#[test]
fn an_interrupted_run_ends_cleanly_and_goes_on() {
    let workspace = Workspace::new();
    let known = workspace.many(40);
    let brake = Arc::new(AtomicBool::new(true));
    let server = braked_oracle(&known, &brake, 6, |reply| {
        Reply::Slow(Duration::from_millis(700), Box::new(reply))
    });
    let arguments = ["zero-shot", "--data", "many", "--concurrency", "2", "--json"];
    let running = workspace.start(&server, &arguments);
    wait_until("a few examples are done", || traced(&workspace) >= 4);
    let id = rustix::process::Pid::from_raw(i32::try_from(running.id()).expect("a process id")).expect("a process id");
    rustix::process::kill_process(id, rustix::process::Signal::INT).expect("a signal");
    let ran = running.end().expect(130);
    let run = ran.json()["runs"][0].clone();
    assert_eq!(run["status"], "partial");
    assert_eq!(run["n"], 40, "the examples that are missing count");
    assert!(run["metrics"]["ex"]["value"].as_f64().unwrap_or(1.0) < 1.0);
    let folder = workspace.run_folder("zero-shot.many.en.");
    let done = read_lines(&folder.join("traces.jsonl")).len();
    assert_eq!(run["outcomes"], json!({ "answered": done, "budget": 40 - done }));
    assert_eq!(read_json(&folder.join("run.json"))["status"], "partial");
    assert_eq!(
        server.count(),
        done,
        "calls in flight end, and what they brought is kept"
    );

    // By --resume this time, which takes the command from the folder.
    brake.store(false, Ordering::SeqCst);
    let resumed = workspace.call(&["run", "--resume", folder.to_str().expect("a path"), "--json"]);
    let run = resumed.expect(0).json()["runs"][0].clone();
    assert_eq!(run["status"], "complete");
    assert_eq!(run["metrics"]["ex"]["value"], 1.0);
    assert_eq!(server.count(), 40);

    let mut uninterrupted = arguments.to_vec();
    uninterrupted.extend(["--runs-dir", "uninterrupted"]);
    workspace.run(&server, &uninterrupted).expect(0);
    let whole = run_folder(&workspace.path("uninterrupted"), "zero-shot.many.en.");
    assert_eq!(result_of(&folder), result_of(&whole));
}

#[test]
fn a_second_process_in_the_same_folder_is_refused() {
    let workspace = Workspace::new();
    let brake = Arc::new(AtomicBool::new(true));
    let server = braked_oracle(&both(), &brake, 0, |_| Reply::Hang);
    let arguments = ["zero-shot", "--data", "tiny", "--lang", "en"];
    let mut first = workspace.start(&server, &arguments);
    wait_until("the first process asks", || server.count() > 0);
    let second = workspace.run(&server, &arguments);
    assert!(first.is_running());
    insta::assert_snapshot!("folder_in_use", workspace.complaint(&second));
    // The lock ends with its process, though the file stays.
    first.kill();
    assert!(workspace.run_folder("zero-shot.tiny.en.").join("lock").is_file());
    brake.store(false, Ordering::SeqCst);
    workspace.run(&server, &arguments).expect(0);
}
