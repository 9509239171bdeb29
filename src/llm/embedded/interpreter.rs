//! Finding the user's Python and running it.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use tokio::process::Command;

/// The oldest Python that the server's wheel installs on.
const OLDEST: (u32, u32) = (3, 10);

/// A Python that runs.
#[derive(Debug, Clone)]
pub(super) struct Interpreter {
    pub program: PathBuf,
    /// Major and minor.
    pub version: (u32, u32),
}

/// Why there is no usable Python.
#[derive(Debug, thiserror::Error)]
pub enum InterpreterError {
    #[error("no Python here (tried {tried}); on Debian or Ubuntu: `apt-get install python3 python3-venv python3-pip`")]
    Missing { tried: String },
    #[error("`{program}` is Python {major}.{minor}; at least 3.10 is needed", program = program.display())]
    TooOld { program: PathBuf, major: u32, minor: u32 },
}

/// The Python to use: the preferred one, or what `python3` or `python` means to the user.
pub(super) async fn find(preferred: Option<&Path>) -> Result<Interpreter, InterpreterError> {
    let candidates = match preferred {
        Some(program) => vec![program.to_owned()],
        None => vec![PathBuf::from("python3"), PathBuf::from("python")],
    };
    let mut too_old = None;
    for program in &candidates {
        let mut command = Command::new(program);
        command.args(["-c", "import sys; print(*sys.version_info[:2])"]);
        let Ok(outcome) = run(command).await else { continue };
        let mut numbers = outcome.text.split_whitespace().map(str::parse);
        let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
            continue;
        };
        if (major, minor) >= OLDEST {
            return Ok(Interpreter {
                program: program.clone(),
                version: (major, minor),
            });
        }
        too_old.get_or_insert(InterpreterError::TooOld {
            program: program.clone(),
            major,
            minor,
        });
    }
    let tried = candidates
        .iter()
        .map(|program| format!("`{}`", program.display()))
        .collect::<Vec<_>>()
        .join(", ");
    Err(too_old.unwrap_or(InterpreterError::Missing { tried }))
}

impl Interpreter {
    /// Whether `python -m pip` works.
    pub(super) async fn has_pip(&self) -> bool {
        let mut command = Command::new(&self.program);
        command.args(["-m", "pip", "--version"]);
        run(command).await.is_ok_and(|outcome| outcome.status.success())
    }

    /// `python -m pip ACTION` with the user's own settings, without questions and without a second copy in pip's cache.
    pub(super) fn pip(&self, action: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.args([
            "-m",
            "pip",
            action,
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
            "--no-cache-dir",
        ]);
        // Never an archive of sources: building one would run code that no hash covers.
        command.args(["--progress-bar", "off", "--only-binary", ":all:"]);
        command
    }
}

/// How a helper program ended and what it wrote, both streams together.
pub(super) struct Outcome {
    pub status: ExitStatus,
    pub text: String,
}

impl Outcome {
    /// The last lines, for an error message.
    pub(super) fn tail(&self) -> String {
        tail(&self.text)
    }
}

/// Runs a helper program to its end; it dies with the future.
pub(super) async fn run(mut command: Command) -> std::io::Result<Outcome> {
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
    let text = [output.stdout, output.stderr].concat();
    Ok(Outcome {
        status: output.status,
        text: String::from_utf8_lossy(&text).into_owned(),
    })
}

/// The last non-empty lines of a program's output on one line, at most 600 characters.
pub(super) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let joined = lines[lines.len().saturating_sub(4)..].join("; ");
    let surplus = joined.chars().count().saturating_sub(600);
    joined
        .chars()
        .skip(surplus)
        .filter(|character| !character.is_control())
        .collect()
}
