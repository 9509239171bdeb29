//! One run of its parts that several machines made (`--shard i/n`).

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use super::folder::{ExampleRecord, FolderError, NewFile, RunFolder, RunRecord, RunStatus, write_json, write_lines};
use super::summary::{FinishError, Summary, finish_with, read_verdicts};
use crate::metric::Verdict;

/// Puts the parts' examples, traces and verdicts together in a new folder under `runs`, named by `name` from the merged
/// record. Databases are not needed: each machine has scored its own part.
///
/// # Errors
/// Where the parts are not the parts of one run, one is missing or not complete, or a folder cannot be read or written.
pub async fn merge(
    parts: &[PathBuf],
    runs: &Path,
    name: impl Fn(&RunRecord) -> PathBuf,
) -> Result<(PathBuf, Summary, Vec<Verdict>), FinishError> {
    let mut folders = Vec::new();
    for path in parts {
        folders.push(RunFolder::open_existing(path)?);
    }
    let record = merged_record(&folders)?;
    let path = runs.join(name(&record));
    if path.join("run.json").exists() {
        return Err(not_one_run(format!("{} is there already", path.display())).into());
    }
    std::fs::create_dir_all(&path).map_err(|source| io(&path, source))?;
    let mut examples: Vec<ExampleRecord> = Vec::new();
    let mut verdicts: HashMap<String, Verdict> = HashMap::new();
    let mut traces = NewFile::create(&path.join("traces.jsonl")).map_err(|source| io(&path, source))?;
    for folder in &folders {
        folder.for_each_example(|example| examples.push(example))?;
        let of_part = read_verdicts(&folder.path().join("verdicts.jsonl"))
            .ok_or_else(|| not_one_run(format!("{} has no readable verdicts.jsonl", folder.path().display())))?;
        verdicts.extend(of_part.into_iter().map(|verdict| (verdict.id.clone(), verdict)));
        append(&folder.path().join("traces.jsonl"), &mut traces).map_err(|source| io(folder.path(), source))?;
    }
    traces.finish().map_err(|source| io(&path, source))?;
    examples.sort_by_key(|example| example.position);
    if examples.len() != record.n {
        return Err(not_one_run(format!(
            "{} examples in all, where the whole run has {}",
            examples.len(),
            record.n
        ))
        .into());
    }
    write_lines(&path.join("examples.jsonl"), &examples).map_err(|source| io(&path, source))?;
    // Last, so that a folder with a record is whole.
    write_json(&path.join("run.json"), &record).map_err(|source| io(&path, source))?;
    let mut folder = RunFolder::open_existing(&path)?;
    let (summary, verdicts) = finish_with(&mut folder, None, verdicts).await?;
    Ok((path, summary, verdicts))
}

/// What the run of all parts would have recorded on one machine.
fn merged_record(folders: &[RunFolder]) -> Result<RunRecord, FolderError> {
    let Some(first) = folders.first() else {
        return Err(not_one_run("none are named".into()));
    };
    let mut found: BTreeMap<u32, &Path> = BTreeMap::new();
    let mut databases = BTreeMap::new();
    let mut served: Vec<String> = Vec::new();
    for folder in folders {
        let path = folder.path();
        let Some(shard) = &folder.record.shard else {
            return Err(not_one_run(format!(
                "{} is not a part (run with --shard)",
                path.display()
            )));
        };
        let first_shard = first.record.shard.as_ref();
        if first_shard.is_none_or(|first| first.identity != shard.identity || first.of != shard.of) {
            return Err(not_one_run(format!(
                "{} and {} are parts of different runs",
                first.path().display(),
                path.display()
            )));
        }
        if let Some(other) = found.insert(shard.index, path) {
            return Err(not_one_run(format!(
                "{} and {} are both part {}",
                other.display(),
                path.display(),
                shard.index
            )));
        }
        if folder.record.status != RunStatus::Complete {
            return Err(not_one_run(format!(
                "{} is not complete; go on with `dinsql run --resume` there",
                path.display()
            )));
        }
        databases.extend(folder.record.databases.clone());
        for model in &folder.record.served_models {
            if !served.contains(model) {
                served.push(model.clone());
            }
        }
    }
    let Some(whole) = first.record.shard.clone() else {
        return Err(not_one_run("no part is named".into()));
    };
    let missing: Vec<String> = (1..=whole.of)
        .filter(|index| !found.contains_key(index))
        .map(|index| format!("{index}/{}", whole.of))
        .collect();
    if !missing.is_empty() {
        return Err(not_one_run(format!("missing: {}", missing.join(", "))));
    }
    let mut record = first.record.clone();
    record.identity = whole.identity;
    record.n = whole.n;
    record.digests.selection = whole.selection;
    record.shard = None;
    record.databases = databases;
    record.served_models = served;
    record.traces_bytes = None;
    record.started = folders
        .iter()
        .map(|folder| folder.record.started.clone())
        .min()
        .unwrap_or_default();
    record.arguments = without_shard(&record.arguments);
    Ok(record)
}

fn without_shard(arguments: &[String]) -> Vec<String> {
    let mut kept = Vec::new();
    let mut skip = false;
    for argument in arguments {
        if skip {
            skip = false;
        } else if argument == "--shard" {
            skip = true;
        } else if !argument.starts_with("--shard=") {
            kept.push(argument.clone());
        }
    }
    kept
}

fn append(path: &Path, out: &mut NewFile) -> std::io::Result<()> {
    for line in BufReader::new(File::open(path)?).lines() {
        out.write_all(line?.as_bytes())?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

fn not_one_run(reason: String) -> FolderError {
    FolderError::NotOneRun { reason }
}

fn io(path: &Path, source: std::io::Error) -> FolderError {
    FolderError::Io {
        path: path.to_owned(),
        source,
    }
}
