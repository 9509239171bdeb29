//! Runs the real binary as a user would, and measures it from outside: wall time, peak memory, what it printed.
//!
//! In: a command. Out: [`Measured`], and tables of figures. Times are printed, never asserted: they depend on the machine.
//! A benchmark that measures itself asks for its own [`processor_seconds`].

#![allow(dead_code, reason = "each benchmark is a crate of its own and needs a part of this")]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How often the peak of memory is read. The kernel keeps the peak, so only growth in a process's last moments is missed.
const POLL: Duration = Duration::from_millis(5);

/// Whether `cargo bench` runs this program; `cargo test --benches` starts it too, and must not wait for figures.
pub fn is_asked_for() -> bool {
    std::env::args().any(|argument| argument == "--bench")
}

/// Two cores that this process may use, where `taskset` is there to pin to them.
pub fn two_cores() -> Option<(usize, usize)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let allowed = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = allowed.trim().split(',').flat_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let bounds = first.parse::<usize>().ok().zip(last.parse::<usize>().ok());
        bounds.into_iter().flat_map(|(first, last)| first..=last)
    });
    let pair = (cores.next()?, cores.next()?);
    let found = Command::new("taskset")
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    found.is_ok_and(|status| status.success()).then_some(pair)
}

/// A program, on one core where one is given.
pub fn on_core(program: impl AsRef<OsStr>, core: Option<usize>) -> Command {
    let Some(core) = core else {
        return Command::new(program);
    };
    let mut command = Command::new("taskset");
    command.arg("-c").arg(core.to_string()).arg(program);
    command
}

/// The binary in an empty home, without any setting of the person who runs the benchmark.
pub fn dinsql(home: &Path, core: Option<usize>) -> Command {
    let mut command = on_core(env!("CARGO_BIN_EXE_dinsql"), core);
    command.env_clear().env("HOME", home).current_dir(home);
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    command
}

/// What a command took and gave.
pub struct Measured {
    pub seconds: f64,
    /// Peak of resident memory, where the system tells.
    pub peak_bytes: Option<u64>,
    pub stdout: Vec<u8>,
}

impl Measured {
    /// The peak in millions of bytes, for a table.
    pub fn peak(&self) -> String {
        self.peak_bytes
            .map_or_else(|| "unknown".into(), |bytes| format!("{:.1} MB", bytes as f64 / 1e6))
    }

    /// So many things in the time, for a table.
    pub fn rate(&self, things: usize) -> String {
        format!("{:.0} /s", things as f64 / self.seconds)
    }
}

/// Runs a command to its end.
///
/// # Panics
/// Where it cannot start or fails: figures of a failed command would mean nothing.
pub fn measure(command: &mut Command) -> Measured {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let started = Instant::now();
    let child = command
        .spawn()
        .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    let status = PathBuf::from(format!("/proc/{}/status", child.id()));
    let watcher = thread::spawn(move || {
        let mut peak = None;
        // An ended process has no memory to report, which ends the watch too.
        while let Some(bytes) = peak_memory(&status) {
            peak = peak.max(Some(bytes));
            thread::sleep(POLL);
        }
        peak
    });
    let output = child
        .wait_with_output()
        .unwrap_or_else(|error| panic!("lost {command:?}: {error}"));
    let seconds = started.elapsed().as_secs_f64();
    assert!(
        output.status.success(),
        "{command:?} ended with {}:\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Measured {
        seconds,
        peak_bytes: watcher.join().ok().flatten(),
        stdout: output.stdout,
    }
}

/// Processor time that this process has had so far, its own and the system's for it, without its children's; where the
/// system tells.
pub fn processor_seconds() -> Option<f64> {
    /// Linux counts in hundredths here, on every architecture.
    const TICKS_PER_SECOND: f64 = 100.0;
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The program's name in parentheses comes first, and may hold anything.
    let (_, fields) = text.rsplit_once(") ")?;
    let mut times = fields.split(' ').skip(11).map_while(|field| field.parse::<u64>().ok());
    let (own, of_system) = (times.next()?, times.next()?);
    Some((own + of_system) as f64 / TICKS_PER_SECOND)
}

fn peak_memory(status: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(status).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// One line of a table: what was measured, the figure, what is wanted of it (empty where nothing is).
pub struct Figure {
    pub what: String,
    pub value: String,
    pub wanted: &'static str,
}

impl Figure {
    pub fn new(what: impl Into<String>, figure: impl Into<String>, wanted: &'static str) -> Self {
        Figure {
            what: what.into(),
            value: figure.into(),
            wanted,
        }
    }
}

/// Prints figures under each other.
pub fn print_table(title: &str, figures: &[Figure]) {
    let width = |cell: fn(&Figure) -> &str| {
        figures
            .iter()
            .map(|figure| cell(figure).chars().count())
            .max()
            .unwrap_or_default()
    };
    let (what_width, figure_width) = (width(|figure| &figure.what), width(|figure| &figure.value));
    println!("\n{title}");
    for Figure {
        what,
        value: figure,
        wanted,
    } in figures
    {
        let line = format!("  {what:<what_width$}  {figure:>figure_width$}  {wanted}");
        println!("{}", line.trim_end());
    }
}
