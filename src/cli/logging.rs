//! Where what happens is told: the terminal, a file of JSON lines, and an OpenTelemetry collector.
//!
//! In: the options that every command has. Out: a guard that brings the last lines and spans out when it goes. Only this
//! program's own events and spans leave it by file and collector, and these never hold keys, prompts or answers; the names
//! are listed in `docs/observability.md`.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use tracing::{Level, Metadata};
use tracing_subscriber::filter::{EnvFilter, LevelFilter, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::Registry;
use tracing_subscriber::util::SubscriberInitExt;

use super::arguments::Global;
use super::exit::Failure;
#[cfg(feature = "otel")]
use super::otel;

/// One of the places.
pub type BoxedLayer = Box<dyn Layer<Registry> + Send + Sync>;

/// What this program's own events and spans are told apart by.
pub const OWN_TARGET: &str = "dinsql";

/// Lines wait this long at most.
const WRITE_EVERY: Duration = Duration::from_millis(200);
/// Whoever adds to so much writes it.
const PENDING_AT_MOST: usize = 4 << 20;

/// Brings out what is still to be told when it is dropped.
#[must_use = "what is told last is lost where the guard is gone"]
#[derive(Default)]
pub struct LoggingGuard {
    // Dropped in this order: a collector that fails is told to the file.
    #[cfg(feature = "otel")]
    traces: Option<otel::Traces>,
    file: Option<WritingThread>,
}

/// Starts to tell what happens, as the options say.
///
/// # Errors
/// A filter that is none, a file that cannot be written, an address that is none, or a collector for a build without the
/// feature `otel`.
pub fn start(global: &Global) -> Result<LoggingGuard, Failure> {
    let mut guard = LoggingGuard::default();
    let mut layers = vec![terminal(&global.log)?];
    if let Some(path) = &global.log_file {
        let file = LogFile::open(path)?;
        layers.push(file.layer(file_level(&global.log)));
        guard.file = Some(WritingThread::start(file)?);
    }
    #[cfg(feature = "otel")]
    if let Some((layer, traces)) = otel::start(global.otlp_endpoint.as_deref())? {
        layers.push(layer);
        guard.traces = Some(traces);
    }
    #[cfg(not(feature = "otel"))]
    if global.otlp_endpoint.is_some() {
        return Err(Failure::usage(anyhow::anyhow!(
            "`--otlp-endpoint` needs the feature `otel`, which this build does not have"
        ))
        .hint("cargo install --path . --features otel"));
    }
    // Fails where the process logs already, which is as good.
    let _ = tracing_subscriber::registry().with(layers).try_init();
    Ok(guard)
}

/// Standard error, by the filter.
fn terminal(filter: &str) -> Result<BoxedLayer, Failure> {
    let mut filter = EnvFilter::try_new(filter)
        .with_context(|| format!("`{filter}` is no log filter"))
        .map_err(|error| {
            Failure::usage(error).hint("a level (`info`, `debug`), or levels by target (`dinsql=debug`)")
        })?;
    // The client library writes whole error bodies, which may hold prompts, at error level.
    if let Ok(silence) = "async_openai=off".parse() {
        filter = filter.add_directive(silence);
    }
    Ok(tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .with_filter(filter)
        .boxed())
}

/// The file has more than the terminal by default, and not less than it.
fn file_level(filter: &str) -> LevelFilter {
    let says_more = filter
        .parse::<Targets>()
        .is_ok_and(|targets| targets.would_enable(OWN_TARGET, &Level::DEBUG));
    if says_more {
        LevelFilter::DEBUG
    } else {
        LevelFilter::INFO
    }
}

/// A file of whole lines. They are written from a thread of their own, so that nothing waits for the disk; warnings are
/// written at once.
#[derive(Clone)]
struct LogFile(Arc<Lines>);

struct Lines {
    path: PathBuf,
    pending: Mutex<Vec<u8>>,
    file: Mutex<Sink>,
}

struct Sink {
    file: File,
    trouble: Option<io::Error>,
}

impl LogFile {
    fn open(path: &Path) -> Result<Self, Failure> {
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("cannot write the log file `{}`", path.display()))
            .map_err(Failure::usage)?;
        Ok(LogFile(Arc::new(Lines {
            path: path.to_owned(),
            pending: Mutex::default(),
            file: Mutex::new(Sink { file, trouble: None }),
        })))
    }

    fn layer(&self, level: LevelFilter) -> BoxedLayer {
        tracing_subscriber::fmt::layer()
            .json()
            .flatten_event(true)
            .with_current_span(true)
            .with_span_list(true)
            .with_span_events(FmtSpan::CLOSE)
            .with_writer(self.clone())
            .with_filter(Targets::new().with_target(OWN_TARGET, level))
            .boxed()
    }

    fn pending(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what is there. After a failure nothing more is written: a log with holes would mislead.
    fn write_out(&self) {
        // The file first: who comes second must not overtake with later lines.
        let mut sink = self.0.file.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = std::mem::take(&mut *self.pending());
        if lines.is_empty() || sink.trouble.is_some() {
            return;
        }
        if let Err(error) = sink.file.write_all(&lines) {
            sink.trouble = Some(error);
        }
    }

    fn trouble(&self) -> Option<String> {
        let sink = self.0.file.lock().unwrap_or_else(PoisonError::into_inner);
        sink.trouble.as_ref().map(ToString::to_string)
    }
}

/// Takes one line, which the formatter writes in one piece.
struct Line {
    file: LogFile,
    at_once: bool,
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let waiting = {
            let mut pending = self.file.pending();
            pending.extend_from_slice(bytes);
            pending.len()
        };
        if self.at_once || waiting > PENDING_AT_MOST {
            self.file.write_out();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for LogFile {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line {
            file: self.clone(),
            at_once: false,
        }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Line {
        Line {
            at_once: *metadata.level() <= Level::WARN,
            ..self.make_writer()
        }
    }
}

/// Writes the file's lines every now and then, and the last ones when it is dropped.
struct WritingThread {
    file: LogFile,
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl WritingThread {
    fn start(file: LogFile) -> Result<Self, Failure> {
        let (stop, stopped) = mpsc::channel::<()>();
        let lines = file.clone();
        let thread = std::thread::Builder::new()
            .name("log file".into())
            .spawn(move || {
                while matches!(stopped.recv_timeout(WRITE_EVERY), Err(RecvTimeoutError::Timeout)) {
                    lines.write_out();
                }
            })
            .context("cannot start the thread of the log file")?;
        Ok(WritingThread {
            file,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for WritingThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.file.write_out();
        if let Some(trouble) = self.file.trouble() {
            tracing::warn!("the log file {} is not whole: {trouble}", self.file.0.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value as Json;

    use super::*;

    fn lines(path: &Path) -> Vec<Json> {
        std::fs::read_to_string(path)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    #[test]
    fn spans_are_off_where_only_warnings_are_shown() {
        let layers = vec![terminal("warn").unwrap()];
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layers), || {
            assert!(tracing::info_span!("run").is_disabled());
        });
    }

    #[test]
    fn a_line_has_its_spans_and_each_span_a_line_at_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let file = LogFile::open(&path).unwrap();
        let layers = vec![terminal("off").unwrap(), file.layer(file_level("off"))];
        let thread = WritingThread::start(file).unwrap();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layers), || {
            let run = tracing::info_span!("run", pipeline = "p", late = tracing::field::Empty).entered();
            tracing::info_span!("example", id = "q1").in_scope(|| tracing::info!(count = 2, "something"));
            tracing::debug!("too small a thing");
            tracing::info!(target: "elsewhere", "a secret of a library");
            run.record("late", 7);
        });
        drop(thread);
        let lines = lines(&path);
        let messages: Vec<&str> = lines.iter().map(|line| line["message"].as_str().unwrap()).collect();
        assert_eq!(messages, ["something", "close", "close"]);
        assert_eq!(lines[0]["count"], 2);
        assert_eq!(lines[0]["spans"][0]["pipeline"], "p");
        assert_eq!(lines[0]["spans"][1]["id"], "q1");
        assert_eq!(lines[1]["span"]["id"], "q1");
        assert_eq!(lines[1]["spans"][0]["pipeline"], "p");
        assert_eq!(
            (&lines[2]["span"]["name"], &lines[2]["span"]["late"]),
            (&"run".into(), &7.into())
        );
        assert!(lines[2]["time.busy"].is_string());
    }

    #[test]
    fn warnings_are_written_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let file = LogFile::open(&path).unwrap();
        let layers = vec![file.layer(LevelFilter::INFO)];
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layers), || {
            tracing::info!("first");
            assert!(lines(&path).is_empty());
            tracing::warn!("second");
            assert_eq!(lines(&path).len(), 2);
        });
    }

    #[test]
    fn the_file_says_more_where_the_terminal_does() {
        for filter in [
            "debug",
            "trace",
            "dinsql=debug",
            "warn,dinsql=trace",
            "info,dinsql::llm=off,dinsql=debug",
        ] {
            assert_eq!(file_level(filter), LevelFilter::DEBUG, "{filter}");
        }
        for filter in ["warn", "info", "off", "hyper=debug", "[run{pipeline=p}]=debug"] {
            assert_eq!(file_level(filter), LevelFilter::INFO, "{filter}");
        }
    }

    #[test]
    fn a_filter_that_is_none_is_said() {
        assert!(terminal("dinsql=loud").is_err());
        assert!(LogFile::open(Path::new("/")).is_err());
    }
}
