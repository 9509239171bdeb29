//! The run folder: written as the run goes, healed and read again.

use std::collections::{BTreeMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::pipeline::Pipeline;
use crate::dataset::{Dialect, Example};
use crate::pipeline::Trace;

/// Version of the folder's files; see docs/run-folder.md.
pub const FORMAT: u32 = 1;

/// `run.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    pub format: u32,
    /// BLAKE3 over all that decides the run's result; a folder is resumed only by the same run.
    pub identity: String,
    pub status: RunStatus,
    pub dinsql: String,
    pub sqlite: String,
    pub started: String,
    pub updated: String,
    /// The command line, without secrets.
    pub arguments: Vec<String>,
    pub data: String,
    pub split: String,
    pub language: String,
    pub dialect: Dialect,
    pub repeat: u32,
    /// Size of the selection: what every score is divided by.
    pub n: usize,
    pub provider: String,
    pub model: String,
    /// Model ids that the server returned.
    #[serde(default)]
    pub served_models: Vec<String>,
    pub pipeline: Pipeline,
    pub templates: Vec<TemplateRecord>,
    pub digests: Digests,
    pub databases: BTreeMap<String, DatabaseRecord>,
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
}

/// An open run folder, locked against other processes.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    pub record: RunRecord,
    traces: File,
    _lock: File,
}

impl RunFolder {
    /// Opens a run's folder, making it where it is not there. Returns the ids of examples that have a trace.
    ///
    /// # Errors
    /// See [`FolderError`].
    pub fn open(path: &Path, record: RunRecord, examples: &[Example]) -> Result<(Self, Vec<String>), FolderError> {
        let io = |source| FolderError::Io {
            path: path.to_owned(),
            source,
        };
        std::fs::create_dir_all(path).map_err(io)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path.join("lock"))
            .map_err(io)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => return Err(FolderError::Locked { path: path.to_owned() }),
            Err(std::fs::TryLockError::Error(error)) => return Err(io(error)),
        }
        let record = match read_json::<RunRecord>(&path.join("run.json")) {
            Ok(found) if found.identity == record.identity => RunRecord {
                dinsql: record.dinsql,
                sqlite: record.sqlite,
                databases: record.databases,
                ..found
            },
            Ok(_) => return Err(FolderError::OtherRun { path: path.to_owned() }),
            Err(ReadError::Missing) => {
                let lines: Vec<ExampleRecord> = examples.iter().map(ExampleRecord::from).collect();
                write_lines(&path.join("examples.jsonl"), &lines).map_err(io)?;
                record
            }
            Err(ReadError::Bad(reason)) => {
                return Err(FolderError::Unreadable {
                    path: path.to_owned(),
                    reason,
                });
            }
        };
        let mut traces = OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .open(path.join("traces.jsonl"))
            .map_err(io)?;
        heal(&mut traces).map_err(io)?;
        let mut folder = RunFolder {
            path: path.to_owned(),
            record,
            traces,
            _lock: lock,
        };
        let done = folder.traced()?.into_iter().collect();
        folder.set_status(RunStatus::Running)?;
        Ok((folder, done))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends an example's trace, whole or not at all.
    ///
    /// # Errors
    /// Where it cannot be written (disk full).
    pub fn append(&mut self, trace: &Trace) -> Result<(), FolderError> {
        let mut line = serde_json::to_vec(trace).map_err(|error| self.io(error.into()))?;
        line.push(b'\n');
        self.traces.write_all(&line).map_err(|error| self.io(error))
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
    pub fn examples(&self) -> Result<Vec<ExampleRecord>, FolderError> {
        let path = self.path.join("examples.jsonl");
        let file = File::open(&path).map_err(|error| self.io(error))?;
        let mut examples = Vec::new();
        for line in BufReader::new(file).lines() {
            let line = line.map_err(|error| self.io(error))?;
            let example =
                serde_json::from_str(&line).map_err(|error| self.unreadable(format!("examples.jsonl: {error}")))?;
            examples.push(example);
        }
        Ok(examples)
    }

    /// Calls `visit` with each trace; of several traces of one example the first counts.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn for_each_trace(&self, mut visit: impl FnMut(Trace)) -> Result<(), FolderError> {
        let file = File::open(self.path.join("traces.jsonl")).map_err(|error| self.io(error))?;
        let mut seen = HashSet::new();
        for (index, line) in BufReader::new(file).lines().enumerate() {
            let line = line.map_err(|error| self.io(error))?;
            let trace: Trace = serde_json::from_str(&line)
                .map_err(|error| self.unreadable(format!("traces.jsonl, line {}: {error}", index + 1)))?;
            if seen.insert(trace.id.clone()) {
                visit(trace);
            }
        }
        Ok(())
    }

    fn traced(&self) -> Result<HashSet<String>, FolderError> {
        #[derive(Deserialize)]
        struct Id {
            id: String,
        }
        let file = File::open(self.path.join("traces.jsonl")).map_err(|error| self.io(error))?;
        let mut ids = HashSet::new();
        for (index, line) in BufReader::new(file).lines().enumerate() {
            let line = line.map_err(|error| self.io(error))?;
            let Id { id } = serde_json::from_str(&line)
                .map_err(|error| self.unreadable(format!("traces.jsonl, line {}: {error}", index + 1)))?;
            ids.insert(id);
        }
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

/// Writes a file so that a reader, or a crash, never sees half of it.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let temporary = path.with_file_name(name);
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(temporary, path)
}

pub(super) fn write_json(path: &Path, value: &impl Serialize) -> std::io::Result<()> {
    let mut bytes = serde_json::to_vec_pretty(value)?;
    bytes.push(b'\n');
    write_whole(path, &bytes)
}

pub(super) fn write_lines<T: Serialize>(path: &Path, lines: &[T]) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    for line in lines {
        serde_json::to_writer(&mut bytes, line)?;
        bytes.push(b'\n');
    }
    write_whole(path, &bytes)
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
