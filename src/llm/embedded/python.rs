//! A private Python environment with a prebuilt llama.cpp server, for machines without a `llama-server`.
//!
//! In: dinsql's cache folder. Out: an interpreter that can import `xllamacpp`. It is made once, in a temporary folder
//! that gets its real name when everything in it works, from the one wheel whose version and hashes are pinned in
//! `requirements.txt`.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use tokio::process::Command;

use super::interpreter::{self, Interpreter, InterpreterError};

const REQUIREMENTS: &str = include_str!("requirements.txt");

/// A Python that can import the server's package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PythonEnvironment {
    pub interpreter: PathBuf,
    /// Folder to import from, where there is no virtual environment.
    pub packages: Option<PathBuf>,
}

/// Why there is no such environment.
#[derive(Debug, thiserror::Error)]
pub enum PythonError {
    #[error(transparent)]
    Interpreter(#[from] InterpreterError),
    #[error(
        "`{program}` has neither `venv` nor `pip`; on Debian or Ubuntu: `apt-get install python3-venv python3-pip`",
        program = program.display()
    )]
    NoPip { program: PathBuf },
    #[error("pip could not install the local server: {detail}")]
    Install { detail: String },
    #[error(
        "the local server's package does not load on this machine: {detail}{}",
        import_hint(detail)
    )]
    Import { detail: String },
    #[error("cannot read or write `{path}`", path = path.display())]
    Io { path: PathBuf, source: io::Error },
}

fn import_hint(detail: &str) -> &'static str {
    if detail.contains("libgomp") {
        "; on Debian or Ubuntu: `apt-get install libgomp1`"
    } else if detail.contains("libstdc++") {
        "; on Debian or Ubuntu: `apt-get install libstdc++6`"
    } else if detail.contains("SIGILL") {
        "; its processor lacks an instruction, a `llama-server` built here would work"
    } else {
        ""
    }
}

/// The environment in `cache_dir`, made first if it is not there; `making` is called before that takes its time.
///
/// # Errors
/// See [`PythonError`].
pub async fn ensure(
    cache_dir: &Path,
    preferred: Option<&Path>,
    making: &(dyn Fn() + Send + Sync),
) -> Result<PythonEnvironment, PythonError> {
    let python = interpreter::find(preferred).await?;
    let parent = cache_dir.join("python");
    let folder = parent.join(key(&python));
    if let Some(environment) = usable(&folder, &python).await {
        return Ok(environment);
    }
    fs::create_dir_all(&parent).map_err(io_at(&parent))?;
    let _lock = lock(folder.with_extension("lock")).await?;
    // Another process may have made it while this one waited.
    if let Some(environment) = usable(&folder, &python).await {
        return Ok(environment);
    }
    making();
    let workshop = folder.with_extension("new");
    let made = make(&workshop, &folder, &python).await;
    let _ = fs::remove_dir_all(&workshop);
    made?;
    Ok(environment_in(&folder, &python))
}

/// Another package, another Python: another folder.
fn key(python: &Interpreter) -> String {
    let (major, minor) = python.version;
    let digest = blake3::hash(REQUIREMENTS.as_bytes()).to_hex();
    format!(
        "server-{}-{}-python{major}-{minor}",
        &digest[..12],
        std::env::consts::ARCH
    )
}

fn environment_in(folder: &Path, python: &Interpreter) -> PythonEnvironment {
    let packages = folder.join("packages");
    if packages.is_dir() {
        PythonEnvironment {
            interpreter: python.program.clone(),
            packages: Some(packages),
        }
    } else {
        PythonEnvironment {
            interpreter: folder.join("bin").join("python"),
            packages: None,
        }
    }
}

/// The environment in `folder` if it still works: the Python it was made from may be gone.
async fn usable(folder: &Path, python: &Interpreter) -> Option<PythonEnvironment> {
    let environment = folder.is_dir().then(|| environment_in(folder, python))?;
    imports(&environment).await.is_ok().then_some(environment)
}

async fn imports(environment: &PythonEnvironment) -> Result<(), String> {
    let mut command = Command::new(&environment.interpreter);
    command.args(["-I", "-c", "import sys; sys.path[:0] = sys.argv[1:]; import xllamacpp"]);
    command.args(&environment.packages);
    let outcome = interpreter::run(command).await.map_err(|error| error.to_string())?;
    if outcome.status.success() {
        Ok(())
    } else {
        Err(format!("{}{}", outcome.tail(), signal(outcome.status)))
    }
}

fn signal(status: ExitStatus) -> &'static str {
    use std::os::unix::process::ExitStatusExt as _;
    match status.signal() {
        // An illegal instruction is the one way prebuilt code fails on an older processor.
        Some(4) => "SIGILL",
        Some(_) => "ended by a signal",
        None => "",
    }
}

async fn make(workshop: &Path, folder: &Path, python: &Interpreter) -> Result<(), PythonError> {
    let _ = fs::remove_dir_all(workshop);
    let mut venv = Command::new(&python.program);
    venv.args(["-m", "venv"]).arg(workshop);
    let has_venv = interpreter::run(venv)
        .await
        .is_ok_and(|outcome| outcome.status.success());

    let mut install = if has_venv {
        let own = Interpreter {
            program: workshop.join("bin").join("python"),
            version: python.version,
        };
        own.pip("install")
    } else {
        // Debian's Python without its venv package: pip into a folder of our own does as well.
        let _ = fs::remove_dir_all(workshop);
        if !python.has_pip().await {
            return Err(PythonError::NoPip {
                program: python.program.clone(),
            });
        }
        let mut install = python.pip("install");
        install.arg("--target").arg(workshop.join("packages"));
        install
    };
    fs::create_dir_all(workshop).map_err(io_at(workshop))?;
    let requirements = workshop.join("requirements.txt");
    fs::write(&requirements, REQUIREMENTS).map_err(io_at(&requirements))?;
    install
        .args(["--no-user", "--no-deps", "--require-hashes", "--requirement"])
        .arg(&requirements);
    let outcome = interpreter::run(install).await.map_err(io_at(&python.program))?;
    if !outcome.status.success() {
        return Err(PythonError::Install { detail: outcome.tail() });
    }
    imports(&environment_in(workshop, python))
        .await
        .map_err(|detail| PythonError::Import { detail })?;
    if folder.exists() {
        fs::remove_dir_all(folder).map_err(io_at(folder))?;
    }
    fs::rename(workshop, folder).map_err(io_at(folder))
}

/// Held until the file is dropped. Asked for again and again, since a thread that waits for it could not be interrupted.
async fn lock(path: PathBuf) -> Result<File, PythonError> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(io_at(&path))?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(io_at(&path)(error)),
            Err(TryLockError::WouldBlock) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    }
}

fn io_at(path: &Path) -> impl Fn(io::Error) -> PythonError {
    let path = path.to_owned();
    move |source| PythonError::Io {
        path: path.clone(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_package_is_pinned_by_hash() {
        let pinned = REQUIREMENTS
            .lines()
            .filter(|line| !line.starts_with('#'))
            .collect::<Vec<_>>()
            .join(" ");
        assert_eq!(pinned.matches("==").count(), 1);
        let hashes: Vec<&str> = pinned.split("--hash=sha256:").skip(1).collect();
        assert!(hashes.len() >= 4 && hashes.iter().all(|hash| hash.trim_end_matches([' ', '\\']).len() == 64));
    }

    #[tokio::test]
    async fn a_python_that_is_not_there_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = ensure(folder.path(), Some(Path::new("/nowhere/python3")), &|| ())
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`/nowhere/python3`") && error.contains("apt-get install python3"),
            "{error}"
        );
    }
}
