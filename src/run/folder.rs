//! The run folder: written as the run goes, healed and read again.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::Price;
use crate::config::pipeline::Pipeline;
use crate::dataset::{Dialect, Example};
use crate::llm::budget::Amount;
use crate::outcome::Outcome;
use crate::pipeline::Trace;

/// Version of the folder's files; see docs/run-folder.md.
pub const FORMAT: u32 = 1;

/// `run.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    pub format: u32,
    /// Drawn when the folder was made: tells this run's purchases in the completion cache from those of others.
    #[serde(default)]
    pub id: String,
    /// BLAKE3 over all that decides the run's result; a folder is resumed only by the same run.
    pub identity: String,
    pub status: RunStatus,
    /// Why it is not complete, where it was stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
    pub dinsql: String,
    pub sqlite: String,
    pub started: String,
    pub updated: String,
    /// The command line, without secrets, and with what came from the environment.
    pub arguments: Vec<String>,
    /// The folder in which it was given.
    #[serde(default)]
    pub directory: PathBuf,
    pub data: String,
    pub split: String,
    pub language: String,
    pub dialect: Dialect,
    pub repeat: u32,
    /// Size of the selection: what every score is divided by.
    pub n: usize,
    /// Which part of a run over several machines this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<ShardRecord>,
    pub provider: String,
    pub model: String,
    /// Model ids that the server returned.
    #[serde(default)]
    pub served_models: Vec<String>,
    pub pipeline: Pipeline,
    pub templates: Vec<TemplateRecord>,
    pub digests: Digests,
    pub databases: BTreeMap<String, DatabaseRecord>,
    /// US dollars per million tokens, by model, where they are known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub prices: BTreeMap<String, Price>,
    /// Size of `traces.jsonl` when the summary was made; another size means that it must be made anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traces_bytes: Option<u64>,
}

/// A part of a run: `index` of `of`, from 1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRecord {
    pub index: u32,
    pub of: u32,
    /// What the whole run would have here.
    pub identity: String,
    pub n: usize,
    pub selection: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    Running,
    /// Stopped before every example had ended.
    Partial,
    Complete,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateRecord {
    pub name: String,
    pub file: String,
    pub text: String,
}

/// BLAKE3 in hex.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digests {
    pub pipeline: String,
    pub templates: String,
    pub dataset: String,
    /// Of the selected examples' ids.
    pub selection: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatabaseRecord {
    pub path: PathBuf,
    pub digest: String,
}

/// A line of `examples.jsonl`: what scoring needs of an example.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExampleRecord {
    pub id: String,
    pub position: usize,
    pub db: String,
    pub question: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub evidence: String,
    pub gold: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub difficulty: Option<String>,
}

impl From<&Example> for ExampleRecord {
    fn from(example: &Example) -> Self {
        ExampleRecord {
            id: example.id.clone(),
            position: example.position,
            db: example.database.clone(),
            question: example.question.clone(),
            evidence: example.evidence.clone(),
            gold: example.gold.clone(),
            difficulty: example.difficulty.clone(),
        }
    }
}

/// Something that belongs to an example.
pub trait Identified {
    fn id(&self) -> &str;
}

impl Identified for Trace {
    fn id(&self) -> &str {
        &self.id
    }
}

/// Why a run folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    #[error("run folder {}: {source}", .path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("run folder {} is in use by another process", .path.display())]
    Locked { path: PathBuf },
    #[error("{} is not a run folder of this version: {reason}", .path.display())]
    Unreadable { path: PathBuf, reason: String },
    #[error(
        "run folder {} holds another run (its pipeline, templates, data, selection or model differ); name another --runs-dir",
        .path.display()
    )]
    OtherRun { path: PathBuf },
    #[error("run folders that do not make one run: {reason}")]
    NotOneRun { reason: String },
}

/// An open run folder, locked against other processes.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    pub record: RunRecord,
    traces: File,
    /// Whether a trace could not be written: what came after it would be glued to its torn rest.
    torn: bool,
    _lock: File,
}

/// What becomes of examples that ended with a model error in an earlier part of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Errors {
    Keep,
    /// They are asked again.
    Retry,
}

impl RunFolder {
    /// Opens a run's folder, making it where it is not there. Returns the ids of examples that have a trace.
    ///
    /// # Errors
    /// See [`FolderError`].
    pub fn open(
        path: &Path,
        record: RunRecord,
        examples: &[Example],
        errors: Errors,
    ) -> Result<(Self, HashSet<String>), FolderError> {
        let io = |source| FolderError::Io {
            path: path.to_owned(),
            source,
        };
        std::fs::create_dir_all(path).map_err(io)?;
        let lock = lock(path)?;
        let record = match read_json::<RunRecord>(&path.join("run.json")) {
            Ok(found) if found.identity == record.identity => RunRecord {
                dinsql: record.dinsql,
                sqlite: record.sqlite,
                databases: record.databases,
                prices: record.prices,
                // A folder of an earlier version has none.
                id: if found.id.is_empty() { record.id } else { found.id },
                // Scores may come out differently in another version.
                traces_bytes: found.traces_bytes.filter(|_| found.dinsql == env!("CARGO_PKG_VERSION")),
                ..found
            },
            Ok(_) => return Err(FolderError::OtherRun { path: path.to_owned() }),
            Err(ReadError::Missing) => {
                let lines = examples.iter().map(ExampleRecord::from);
                write_lines(&path.join("examples.jsonl"), lines).map_err(io)?;
                record
            }
            Err(ReadError::Bad(reason)) => {
                return Err(FolderError::Unreadable {
                    path: path.to_owned(),
                    reason,
                });
            }
        };
        let mut traces = open_traces(path).map_err(io)?;
        heal(&mut traces).map_err(io)?;
        let mut folder = RunFolder {
            path: path.to_owned(),
            record,
            traces,
            torn: false,
            _lock: lock,
        };
        if errors == Errors::Keep && folder.is_finished() {
            let all = examples.iter().map(|example| example.id.clone()).collect();
            return Ok((folder, all));
        }
        if errors == Errors::Retry {
            folder.drop_model_errors()?;
        }
        let done = folder.traced()?;
        folder.record.stopped = None;
        folder.set_status(RunStatus::Running)?;
        Ok((folder, done))
    }

    /// Opens a folder that is there, whatever run it is of; to read it, and to score it anew.
    ///
    /// # Errors
    /// See [`FolderError`].
    pub fn open_existing(path: &Path) -> Result<Self, FolderError> {
        let record = read_json::<RunRecord>(&path.join("run.json")).map_err(|error| FolderError::Unreadable {
            path: path.to_owned(),
            reason: match error {
                ReadError::Missing => "it has no run.json".into(),
                ReadError::Bad(reason) => reason,
            },
        })?;
        let lock = lock(path)?;
        let mut traces = open_traces(path).map_err(|source| FolderError::Io {
            path: path.to_owned(),
            source,
        })?;
        heal(&mut traces).map_err(|source| FolderError::Io {
            path: path.to_owned(),
            source,
        })?;
        Ok(RunFolder {
            path: path.to_owned(),
            record,
            traces,
            torn: false,
            _lock: lock,
        })
    }

    /// Whether everything is done and summarised: then nothing needs to be read or computed again.
    pub fn is_finished(&self) -> bool {
        self.record.status == RunStatus::Complete
            && self.record.traces_bytes.is_some()
            && self.record.traces_bytes == self.traces_size().ok()
            && ["summary.json", "verdicts.jsonl", "predictions.json"]
                .iter()
                .all(|name| self.path.join(name).is_file())
    }

    pub(super) fn traces_size(&self) -> std::io::Result<u64> {
        Ok(self.traces.metadata()?.len())
    }

    /// Takes the traces of examples that ended with a model error out, so that they are asked again.
    fn drop_model_errors(&mut self) -> Result<(), FolderError> {
        #[derive(Deserialize)]
        struct Ended {
            outcome: Outcome,
        }
        let path = self.path.join("traces.jsonl");
        let mut kept = NewFile::create(&path).map_err(|error| self.io(error))?;
        let mut dropped = 0;
        let file = File::open(&path).map_err(|error| self.io(error))?;
        for (index, line) in BufReader::new(file).lines().enumerate() {
            let line = line.map_err(|error| self.io(error))?;
            let Ended { outcome } = serde_json::from_str(&line)
                .map_err(|error| self.unreadable(format!("traces.jsonl, line {}: {error}", index + 1)))?;
            if outcome == Outcome::ModelError {
                dropped += 1;
            } else {
                kept.write_all(line.as_bytes())
                    .and_then(|()| kept.write_all(b"\n"))
                    .map_err(|error| self.io(error))?;
            }
        }
        if dropped > 0 {
            kept.finish().map_err(|error| self.io(error))?;
            self.traces = open_traces(&self.path).map_err(|error| self.io(error))?;
        } else {
            kept.discard();
        }
        Ok(())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends an example's trace, whole or not at all.
    ///
    /// # Errors
    /// Where it cannot be written (disk full).
    pub fn append(&mut self, trace: &Trace) -> Result<(), FolderError> {
        if self.torn {
            return Err(self.io(std::io::Error::other("an earlier trace could not be written")));
        }
        let mut line = serde_json::to_vec(trace).map_err(|error| self.io(error.into()))?;
        line.push(b'\n');
        self.traces.write_all(&line).map_err(|error| {
            self.torn = true;
            self.io(error)
        })
    }

    /// Writes `run.json` with a new status.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn set_status(&mut self, status: RunStatus) -> Result<(), FolderError> {
        self.record.status = status;
        self.record.updated = jiff::Timestamp::now().to_string();
        write_json(&self.path.join("run.json"), &self.record).map_err(|error| self.io(error))
    }

    /// The examples, in the selection's order.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn for_each_example(&self, visit: impl FnMut(ExampleRecord)) -> Result<(), FolderError> {
        self.for_each_line("examples.jsonl", visit)
    }

    /// Calls `visit` with each trace, or with the part of it that `T` is interested in; of several traces of one example
    /// the first counts.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn for_each_trace<T: DeserializeOwned + Identified>(
        &self,
        mut visit: impl FnMut(T),
    ) -> Result<(), FolderError> {
        let mut seen = HashSet::new();
        self.for_each_line("traces.jsonl", |trace: T| {
            if !seen.contains(trace.id()) {
                seen.insert(trace.id().to_owned());
                visit(trace);
            }
        })
    }

    fn for_each_line<T: DeserializeOwned>(&self, name: &str, mut visit: impl FnMut(T)) -> Result<(), FolderError> {
        let file = File::open(self.path.join(name)).map_err(|error| self.io(error))?;
        let mut lines = BufReader::with_capacity(256 << 10, file);
        let mut line = Vec::new();
        let mut number = 0;
        while lines.read_until(b'\n', &mut line).map_err(|error| self.io(error))? > 0 {
            number += 1;
            if line.last() == Some(&b'\n') {
                line.pop();
            }
            let value = serde_json::from_slice(&line)
                .map_err(|error| self.unreadable(format!("{name}, line {number}: {error}")))?;
            visit(value);
            line.clear();
        }
        Ok(())
    }

    fn traced(&self) -> Result<HashSet<String>, FolderError> {
        #[derive(Deserialize)]
        struct Id {
            id: String,
        }
        let mut ids = HashSet::new();
        self.for_each_line("traces.jsonl", |Id { id }| {
            ids.insert(id);
        })?;
        Ok(ids)
    }

    fn io(&self, source: std::io::Error) -> FolderError {
        FolderError::Io {
            path: self.path.clone(),
            source,
        }
    }

    fn unreadable(&self, reason: String) -> FolderError {
        FolderError::Unreadable {
            path: self.path.clone(),
            reason,
        }
    }
}

/// The ids that have a trace in a folder of this run, with `errors` to be retried those that need no other; none where the
/// folder is not there, or of another run. Takes no lock.
pub fn traced_ids(path: &Path, identity: &str, errors: Errors) -> BTreeSet<String> {
    let mut ids = BTreeSet::new();
    visit_traces(path, identity, |trace| {
        if errors == Errors::Keep || trace.outcome != Outcome::ModelError {
            ids.insert(trace.id);
        }
    });
    ids
}

/// The id of a folder of this run; none where it is not there, or of another run.
pub fn folder_id(path: &Path, identity: &str) -> Option<String> {
    let record = read_json::<RunRecord>(&path.join("run.json")).ok()?;
    (record.identity == identity).then_some(record.id)
}

/// What calls of a run used: those that brought an answer, and those that were billed all the same.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spent {
    pub answered: Amount,
    pub wasted: Amount,
}

/// What a folder of this run has spent so far: its calls that were not cache hits.
pub fn spent_in(path: &Path, identity: &str) -> Spent {
    let mut spent = Spent::default();
    // A finished run may be long, and its summary knows.
    if let Ok(record) = read_json::<RunRecord>(&path.join("run.json"))
        && record.status == RunStatus::Complete
        && record.identity == identity
        && let Ok(summary) = read_json::<super::Summary>(&path.join("summary.json"))
    {
        spent.answered = Amount {
            calls: summary.usage.calls - summary.effort.cache_hits,
            tokens: summary.effort.tokens,
            cost: summary.effort.spent,
        };
        return spent;
    }
    visit_traces(path, identity, |trace| {
        for stage in &trace.stages {
            if let Some(completion) = stage.completion.as_ref().filter(|completion| !completion.cached) {
                spent.answered += Amount::of(completion);
            }
            if let Some(failure) = stage.failure.as_ref().filter(|failure| !failure.usage.is_unknown()) {
                spent.wasted += Amount {
                    calls: 1,
                    tokens: failure.usage.total().unwrap_or(0),
                    cost: failure.cost.unwrap_or_default(),
                };
            }
        }
    });
    spent
}

/// As far as they can be read: a torn last line is no trace yet.
fn visit_traces(path: &Path, identity: &str, mut visit: impl FnMut(Trace)) {
    let of_this_run = read_json::<RunRecord>(&path.join("run.json")).is_ok_and(|record| record.identity == identity);
    let Some(file) = of_this_run
        .then(|| File::open(path.join("traces.jsonl")).ok())
        .flatten()
    else {
        return;
    };
    for line in BufReader::new(file).lines().map_while(Result::ok) {
        if let Ok(trace) = serde_json::from_str(&line) {
            visit(trace);
        }
    }
}

/// Cuts off a last line that a crash left torn.
fn heal(file: &mut File) -> std::io::Result<()> {
    let length = file.seek(SeekFrom::End(0))?;
    let mut end = length;
    let mut block = vec![0_u8; 64 << 10];
    let mut last = [0_u8; 1];
    if length == 0 {
        return Ok(());
    }
    file.seek(SeekFrom::Start(length - 1))?;
    file.read_exact(&mut last)?;
    if last[0] == b'\n' {
        return Ok(());
    }
    while end > 0 {
        let start = end.saturating_sub(block.len() as u64);
        #[expect(clippy::cast_possible_truncation, reason = "at most one block")]
        let part = &mut block[..(end - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(part)?;
        if let Some(newline) = part.iter().rposition(|&byte| byte == b'\n') {
            return file.set_len(start + newline as u64 + 1);
        }
        end = start;
    }
    file.set_len(0)
}

enum ReadError {
    Missing,
    Bad(String),
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ReadError> {
    match std::fs::read(path) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map_err(|error| ReadError::Bad(format!("{}: {error}", path.display())))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(ReadError::Missing),
        Err(error) => Err(ReadError::Bad(error.to_string())),
    }
}

/// A file that takes another's place when it is whole, so that a reader, or a crash, never sees half of it.
pub(super) struct NewFile {
    out: std::io::BufWriter<File>,
    temporary: PathBuf,
    path: PathBuf,
}

impl NewFile {
    pub(super) fn create(path: &Path) -> std::io::Result<Self> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        let temporary = path.with_file_name(name);
        Ok(NewFile {
            out: std::io::BufWriter::with_capacity(64 << 10, File::create(&temporary)?),
            temporary,
            path: path.to_owned(),
        })
    }

    fn discard(self) {
        let _ = std::fs::remove_file(self.temporary);
    }

    pub(super) fn finish(self) -> std::io::Result<()> {
        let file = self.out.into_inner().map_err(std::io::IntoInnerError::into_error)?;
        file.sync_all()?;
        std::fs::rename(self.temporary, self.path)
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

pub(super) fn write_json(path: &Path, value: &impl Serialize) -> std::io::Result<()> {
    let mut file = NewFile::create(path)?;
    serde_json::to_writer_pretty(&mut file, value)?;
    file.write_all(b"\n")?;
    file.finish()
}

pub(super) fn write_lines<T: Serialize>(path: &Path, lines: impl IntoIterator<Item = T>) -> std::io::Result<()> {
    let mut file = NewFile::create(path)?;
    for line in lines {
        serde_json::to_writer(&mut file, &line)?;
        file.write_all(b"\n")?;
    }
    file.finish()
}

fn open_traces(folder: &Path) -> std::io::Result<File> {
    OpenOptions::new()
        .create(true)
        .read(true)
        .append(true)
        .open(folder.join("traces.jsonl"))
}

/// Held as long as the file is open, and released with the process, however that ends.
fn lock(folder: &Path) -> Result<File, FolderError> {
    let io = |source| FolderError::Io {
        path: folder.to_owned(),
        source,
    };
    let lock = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(folder.join("lock"))
        .map_err(io)?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(std::fs::TryLockError::WouldBlock) => Err(FolderError::Locked {
            path: folder.to_owned(),
        }),
        Err(std::fs::TryLockError::Error(error)) => Err(io(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_last_line_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("traces.jsonl");
        let long = "x".repeat(200_000);
        for (before, after) in [
            (String::new(), String::new()),
            ("{\"a\":1}\n".into(), "{\"a\":1}\n".into()),
            ("{\"a\":1}\n{\"b\"".into(), "{\"a\":1}\n".into()),
            ("{\"a\"".into(), String::new()),
            (format!("1\n{long}"), "1\n".into()),
        ] {
            std::fs::write(&path, &before).unwrap();
            let mut file = OpenOptions::new().read(true).append(true).open(&path).unwrap();
            heal(&mut file).unwrap();
            drop(file);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), after);
        }
    }
}
