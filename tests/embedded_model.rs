//! The embedded default model for real: fetched once into the user's cache folder, started, asked, scored, and gone.
//!
//! Where the model cannot be fetched the tests say so and pass, except under CI.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value as Json;

fn dinsql() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dinsql"));
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    for variable in [
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "DINSQL_PROVIDER",
        "DINSQL_MODEL",
        "DINSQL_MODEL_FILE",
    ] {
        command.env_remove(variable);
    }
    command
}

/// Whether the model is here, after a try to fetch it.
fn has_model(test: &str) -> bool {
    let pulled = dinsql().args(["model", "pull"]).output().unwrap();
    if pulled.status.success() {
        return true;
    }
    let reason = String::from_utf8_lossy(&pulled.stderr).into_owned();
    assert!(
        std::env::var_os("CI").is_none(),
        "{test}: the embedded model is required under CI:\n{reason}"
    );
    // Past the test runner's capture, so that a skipped test is seen.
    let _ = writeln!(
        std::io::stderr(),
        "skipped {test}: the embedded model cannot be fetched: {}",
        reason.trim()
    );
    false
}

fn traces(folder: &Path) -> Vec<Json> {
    let text = std::fs::read_to_string(folder.join("traces.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_local_model_answers_in_three_languages() {
    if !has_model("a_local_model_answers_in_three_languages") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run = |pipeline: &str, languages: &str| {
        let output = dinsql()
            .args([
                "run",
                pipeline,
                "--data",
                "sample",
                "--lang",
                languages,
                "--ids",
                "s001",
                "--no-cache",
                "--json",
                "--runs-dir",
            ])
            .arg(folder.path())
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{errors}");
        assert!(
            errors.contains("using the embedded model qwen2.5-coder-0.5b-instruct"),
            "{errors}"
        );
        serde_json::from_slice::<Json>(&output.stdout).unwrap()["runs"]
            .as_array()
            .unwrap()
            .clone()
    };
    let mut right = 0.0;
    for summary in run("zero-shot", "en,tr,de").iter().chain(&run("din-sql", "en")) {
        assert_eq!(summary["status"], "complete");
        right += summary["metrics"]["ex"]["value"].as_f64().unwrap();
        let traces = traces(Path::new(summary["dir"].as_str().unwrap()));
        assert_eq!(traces.len(), 1);
        let stages = traces[0]["stages"].as_array().unwrap();
        assert_eq!(stages.len(), if summary["pipeline"] == "din-sql" { 4 } else { 1 });
        for stage in stages {
            let completion = &stage["completion"];
            assert!(!completion["text"].as_str().unwrap().trim().is_empty());
            assert!(completion["usage"]["prompt"].as_u64().unwrap() > 50);
            assert!(completion["usage"]["completion"].as_u64().unwrap() > 0);
            assert_eq!(completion["cached"], false);
        }
    }
    // The question is an easy one; at least one of the four answers is right, whatever the processor's rounding.
    assert!(right >= 1.0, "no answer is right");
}

/// The processes that a process started, by Linux's own list.
fn children(process: u32) -> Vec<u32> {
    let path = format!("/proc/{process}/task");
    let tasks = std::fs::read_dir(path).into_iter().flatten().flatten();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|list| {
            list.split_whitespace()
                .filter_map(|id| id.parse().ok())
                .collect::<Vec<u32>>()
        })
        .collect()
}

fn is_alive(process: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/stat")).is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .trim_start()
            .starts_with('Z')
    })
}

fn wait_until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    while started.elapsed() < limit {
        if done() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    false
}

#[cfg(target_os = "linux")]
#[test]
fn a_killed_run_leaves_no_server_behind() {
    if !has_model("a_killed_run_leaves_no_server_behind") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut run = dinsql()
        .args([
            "run",
            "zero-shot",
            "--data",
            "sample",
            "--lang",
            "en",
            "--limit",
            "3",
            "--no-cache",
            "--runs-dir",
        ])
        .arg(folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut family: Vec<u32> = Vec::new();
    let found = wait_until(Duration::from_mins(2), || {
        // dinsql, its guard, and the guard's server.
        family = children(run.id());
        let servers: Vec<u32> = family.iter().flat_map(|&guard| children(guard)).collect();
        family.extend(&servers);
        !servers.is_empty()
    });
    // Time for the server to load the model and be at work.
    std::thread::sleep(Duration::from_secs(3));
    run.kill().unwrap();
    run.wait().unwrap();
    assert!(found, "no server was started");
    let gone = wait_until(Duration::from_secs(15), || {
        family.iter().all(|&process| !is_alive(process))
    });
    assert!(
        gone,
        "still alive: {:?}",
        family.iter().filter(|&&process| is_alive(process)).collect::<Vec<_>>()
    );
    let run_folder: PathBuf = std::fs::read_dir(folder.path())
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    assert!(run_folder.join("run.json").is_file());
}
