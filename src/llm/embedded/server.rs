//! The managed local server: llama.cpp as a child process that speaks the OpenAI protocol on a loopback port.
//!
//! In: a model file and where things may be kept. Out: a base URL and the key that only this process knows. The server
//! is a `llama-server` where there is one, else the launcher in the private Python environment; either runs under
//! [`super::guard`], so that it ends with dinsql. Its log is a file whose last lines explain a failure.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::net::TcpListener;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use secrecy::{ExposeSecret as _, SecretString};
use tokio::process::{Child, Command};

use super::interpreter;
use super::pull::hexadecimal;
use super::python::{self, PythonError};

const LAUNCHER: &str = include_str!("launcher.py");
/// Where both servers look for the key: unlike arguments, no process list shows the environment to other users.
const KEY_VARIABLE: &str = "LLAMA_API_KEY";
/// MiB of prompts that left their slot, kept to be re-used: about 80,000 tokens of the default model.
const PROMPT_CACHE_MIB: u32 = 1024;
/// A model of some gigabytes from a slow disk takes a while.
const START_TIMEOUT: Duration = Duration::from_mins(5);
/// Ports tried, each free when it was chosen.
const PORTS: u32 = 5;
/// For the guard to end the server, its own grace included.
const STOP_TIMEOUT: Duration = Duration::from_secs(6);

/// What to run and where.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    pub model_file: PathBuf,
    /// The name that answers carry.
    pub model_name: String,
    /// Tokens of prompt and completion together that one call may take.
    pub context_per_slot: u32,
    /// Calls worked on at once.
    pub slots: u32,
    /// Threads that compute; as many as [`default_threads`] says where absent.
    pub threads: Option<u32>,
    /// A `llama-server`; where absent the one in the search path, if there is one.
    pub server_binary: Option<PathBuf>,
    /// The Python to make the private environment from, instead of `python3`.
    pub python: Option<PathBuf>,
    pub cache_dir: PathBuf,
    /// A program that answers the command [`super::guard::SUBCOMMAND`]: dinsql itself.
    pub guard_executable: PathBuf,
    /// Overwritten.
    pub log_file: PathBuf,
}

impl ServerConfig {
    /// Two calls worked on together are faster by a quarter, but each then rounds differently, depending on its
    /// company: with four, 2 of 10 answers at temperature 0 changed. See `docs/embedded-model.md`.
    pub const DEFAULT_SLOTS: u32 = 1;
    /// Tokens; 200 MB of memory a slot with the default model.
    pub const DEFAULT_CONTEXT: u32 = 16_384;

    /// The usual settings for a model file.
    #[must_use]
    pub fn new(model_file: PathBuf, model_name: &str, cache_dir: &Path, guard: PathBuf, log_file: PathBuf) -> Self {
        Self {
            model_file,
            model_name: model_name.to_owned(),
            context_per_slot: Self::DEFAULT_CONTEXT,
            slots: Self::DEFAULT_SLOTS,
            threads: None,
            server_binary: None,
            python: None,
            cache_dir: cache_dir.to_owned(),
            guard_executable: guard,
            log_file,
        }
    }
}

/// What takes time while a server starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerEvent {
    /// Making the private Python environment, once per machine.
    PreparingPython,
    /// The server runs and reads the model.
    Loading {
        engine: String,
    },
    Ready {
        seconds: u64,
    },
}

/// Why there is no local server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("no model file at `{path}`", path = path.display())]
    NoModelFile { path: PathBuf },
    #[error("`{binary}` does not run: {detail}", binary = binary.display())]
    Binary { binary: PathBuf, detail: String },
    #[error(
        "no local model server here: there is no `llama-server`, and a private Python environment could not be made\n  \
         other ways: `--llama-server FILE`, or `--base-url` with Ollama or any OpenAI-compatible server"
    )]
    NoEngine { source: PythonError },
    #[error("the local model server ended while starting ({how}){hint}\n{tail}")]
    Ended {
        how: String,
        hint: &'static str,
        tail: String,
    },
    #[error("the local model server did not answer within {seconds} s\n{tail}")]
    Silent { seconds: u64, tail: String },
    #[error("no free port for the local model server on 127.0.0.1")]
    NoPort { source: io::Error },
    #[error("the system gives no random numbers for the server's key")]
    Random(#[from] getrandom::Error),
    #[error("cannot talk to the local model server")]
    Client(#[from] reqwest::Error),
    #[error("cannot run or write `{path}`", path = path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// A running server; it ends with this value.
#[derive(Debug)]
pub struct ManagedServer {
    base_url: String,
    api_key: SecretString,
    engine: String,
    log_file: PathBuf,
    /// Holds the pipe that keeps the server alive: dropping it is enough to end both.
    guard: Mutex<Child>,
}

/// Which program serves, with its first arguments.
struct Engine {
    name: String,
    program: PathBuf,
    kind: EngineKind,
}

enum EngineKind {
    LlamaServer,
    Launcher { script: PathBuf, packages: Option<PathBuf> },
}

impl ManagedServer {
    /// Starts a server and waits until it answers.
    ///
    /// # Errors
    /// See [`ServerError`]; nothing is left running.
    pub async fn start(
        config: &ServerConfig,
        progress: &(dyn Fn(ServerEvent) + Send + Sync),
    ) -> Result<Self, ServerError> {
        if !config.model_file.is_file() {
            return Err(ServerError::NoModelFile {
                path: config.model_file.clone(),
            });
        }
        let engine = choose_engine(config, progress).await?;
        if let Some(folder) = config.log_file.parent() {
            fs::create_dir_all(folder).map_err(io_at(folder))?;
        }
        progress(ServerEvent::Loading {
            engine: engine.name.clone(),
        });
        let started = Instant::now();
        let mut port_tries = 0;
        loop {
            port_tries += 1;
            let mut server = Self::spawn(config, &engine)?;
            match server.wait_until_ready(&config.model_name).await {
                Ok(()) => {
                    progress(ServerEvent::Ready {
                        seconds: started.elapsed().as_secs(),
                    });
                    return Ok(server);
                }
                // Another program took the port between our look and the server's.
                Err(ServerError::Ended { tail, .. }) if is_port_taken(&tail) && port_tries < PORTS => {}
                Err(error) => {
                    server.stop().await;
                    return Err(error);
                }
            }
        }
    }

    /// Where to send calls, `http://127.0.0.1:PORT/v1`.
    #[must_use]
    pub fn base_url(&self) -> &str {
        &self.base_url
    }

    /// The key that calls need.
    #[must_use]
    pub fn api_key(&self) -> &SecretString {
        &self.api_key
    }

    /// The program that serves, for people.
    #[must_use]
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// The last `lines` lines of the server's log.
    #[must_use]
    pub fn log_tail(&self, lines: usize) -> String {
        log_tail(&self.log_file, lines)
    }

    /// Ends the server and waits until it is gone.
    pub async fn stop(self) {
        let mut guard = self.guard.into_inner().unwrap_or_else(PoisonError::into_inner);
        drop(guard.stdin.take());
        if tokio::time::timeout(STOP_TIMEOUT, guard.wait()).await.is_err() {
            let _ = guard.kill().await;
        }
    }

    /// Whether it has ended by itself (the system was short of memory, it crashed): it does not come back.
    pub fn has_ended(&self) -> bool {
        let mut guard = self.guard.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(guard.try_wait(), Ok(Some(_)))
    }

    fn spawn(config: &ServerConfig, engine: &Engine) -> Result<Self, ServerError> {
        let port = free_port().map_err(|source| ServerError::NoPort { source })?;
        let api_key = random_key()?;
        let threads = config.threads.unwrap_or_else(default_threads);
        let log = File::create(&config.log_file).map_err(io_at(&config.log_file))?;
        let log_too = log.try_clone().map_err(io_at(&config.log_file))?;
        let mut command = Command::new(&config.guard_executable);
        command
            .args([super::guard::SUBCOMMAND, "--"])
            .arg(&engine.program)
            .args(engine.arguments(config, port, threads));
        command.env(KEY_VARIABLE, api_key.expose_secret());
        // Threads that wait by spinning starve whatever else runs on the machine, the executor first of all.
        command
            .env("GOMP_SPINCOUNT", "0")
            .env("OMP_WAIT_POLICY", "passive")
            .env("OMP_NUM_THREADS", threads.to_string());
        // By variables, since a `llama-server` older than these options refuses them as arguments.
        command
            .env("LLAMA_ARG_CACHE_RAM", PROMPT_CACHE_MIB.to_string())
            .env("LLAMA_ARG_FIT", "off");
        // In a group of its own: the terminal's Ctrl+C reaches dinsql, which decides.
        command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(log)
            .stderr(log_too);
        let guard = command.spawn().map_err(io_at(&config.guard_executable))?;
        Ok(Self {
            base_url: format!("http://127.0.0.1:{port}/v1"),
            api_key,
            engine: engine.name.clone(),
            log_file: config.log_file.clone(),
            guard: Mutex::new(guard),
        })
    }

    async fn wait_until_ready(&mut self, model_name: &str) -> Result<(), ServerError> {
        ensure_tls_provider();
        // Never through the user's proxy.
        let client = reqwest::Client::builder()
            .no_proxy()
            .timeout(Duration::from_secs(5))
            .build()?;
        let deadline = Instant::now() + START_TIMEOUT;
        let mut pause = Duration::from_millis(25);
        while Instant::now() < deadline {
            let guard = self.guard.get_mut().unwrap_or_else(PoisonError::into_inner);
            if let Some(status) = guard.try_wait().map_err(io_at(&self.log_file))? {
                return Err(self.ended(status.code()));
            }
            if self.answers(&client, model_name).await {
                return Ok(());
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(400));
        }
        Err(ServerError::Silent {
            seconds: START_TIMEOUT.as_secs(),
            tail: self.log_tail(8),
        })
    }

    /// Whether the model is loaded, and it is our server that says so: it knows the key, and the model's name.
    async fn answers(&self, client: &reqwest::Client, model_name: &str) -> bool {
        let health = format!("{}/health", self.base_url.trim_end_matches("/v1"));
        match client.get(health).send().await {
            Ok(answer) if answer.status().is_success() => {}
            _ => return false,
        }
        let models = client
            .get(format!("{}/models", self.base_url))
            .bearer_auth(self.api_key.expose_secret());
        match models.send().await {
            Ok(answer) if answer.status().is_success() => answer
                .text()
                .await
                .is_ok_and(|body| body.contains(model_name) || model_name.is_empty()),
            _ => false,
        }
    }

    fn ended(&self, code: Option<i32>) -> ServerError {
        let tail = self.log_tail(12);
        let how = match code {
            Some(code @ 129..=159) => format!("signal {}", code - 128),
            Some(code) => format!("exit code {code}"),
            None => "its guard was ended".to_owned(),
        };
        ServerError::Ended {
            how,
            hint: hint(code, &tail),
            tail,
        }
    }
}

impl Engine {
    fn arguments(&self, config: &ServerConfig, port: u16, threads: u32) -> Vec<OsString> {
        let mut arguments = Vec::new();
        let mut add = |flag: &str, value: &dyn AsRef<std::ffi::OsStr>| {
            arguments.extend([OsString::from(flag), value.as_ref().to_owned()]);
        };
        let slots = config.slots.max(1);
        match &self.kind {
            EngineKind::LlamaServer => {
                add("--host", &"127.0.0.1");
                add("--ctx-size", &config.context_per_slot.saturating_mul(slots).to_string());
                add("--parallel", &slots.to_string());
            }
            EngineKind::Launcher { script, packages } => {
                // Isolated: neither the working folder nor the user's PYTHON variables change what is imported.
                add("-I", script);
                if let Some(packages) = packages {
                    add("--packages", packages);
                }
                add("--context-per-slot", &config.context_per_slot.to_string());
                add("--slots", &slots.to_string());
                add("--cache-ram", &PROMPT_CACHE_MIB.to_string());
            }
        }
        add("--model", &config.model_file);
        add("--alias", &config.model_name);
        add("--port", &port.to_string());
        add("--threads", &threads.to_string());
        arguments
    }
}

async fn choose_engine(
    config: &ServerConfig,
    progress: &(dyn Fn(ServerEvent) + Send + Sync),
) -> Result<Engine, ServerError> {
    let binary = config
        .server_binary
        .clone()
        .unwrap_or_else(|| PathBuf::from("llama-server"));
    let mut command = Command::new(&binary);
    command.arg("--version");
    let detail = match interpreter::run(command).await {
        Ok(outcome) if outcome.status.success() => {
            let name = format!("llama.cpp (`{}`)", binary.display());
            return Ok(Engine {
                name,
                program: binary,
                kind: EngineKind::LlamaServer,
            });
        }
        Ok(outcome) => format!("{} {}", outcome.status, outcome.tail()),
        Err(error) => error.to_string(),
    };
    if config.server_binary.is_some() {
        return Err(ServerError::Binary { binary, detail });
    }
    let environment = python::ensure(&config.cache_dir, config.python.as_deref(), &|| {
        progress(ServerEvent::PreparingPython);
    })
    .await
    .map_err(|source| ServerError::NoEngine { source })?;
    let script = write_launcher(&config.cache_dir)?;
    let kind = EngineKind::Launcher {
        script,
        packages: environment.packages,
    };
    Ok(Engine {
        name: "llama.cpp (xllamacpp)".to_owned(),
        program: environment.interpreter,
        kind,
    })
}

/// The launcher as a file, under a name that changes with its content: versions of dinsql can share a cache folder.
fn write_launcher(cache_dir: &Path) -> Result<PathBuf, ServerError> {
    let folder = cache_dir.join("python");
    let digest = blake3::hash(LAUNCHER.as_bytes()).to_hex();
    let path = folder.join(format!("launcher-{}.py", &digest[..12]));
    if fs::read(&path).is_ok_and(|bytes| bytes == LAUNCHER.as_bytes()) {
        return Ok(path);
    }
    fs::create_dir_all(&folder).map_err(io_at(&folder))?;
    let unfinished = folder.join(format!("launcher-{}.{}", &digest[..12], std::process::id()));
    fs::write(&unfinished, LAUNCHER).map_err(io_at(&unfinished))?;
    fs::rename(&unfinished, &path).map_err(io_at(&path))?;
    Ok(path)
}

/// One thread a physical core (hyper-threads only get in each other's way), within what this process may use.
#[must_use]
pub fn default_threads() -> u32 {
    let allowed = std::thread::available_parallelism().map_or(1, NonZero::get);
    let physical = fs::read_to_string("/proc/cpuinfo").map_or(0, |text| physical_cores(&text));
    let threads = if physical == 0 { allowed } else { allowed.min(physical) };
    u32::try_from(threads).unwrap_or(1)
}

/// Distinct pairs of processor and core in Linux's list; 0 where it does not name them.
fn physical_cores(cpuinfo: &str) -> usize {
    let value = |block: &str, key: &str| {
        let line = block
            .lines()
            .find(|line| line.split(':').next().is_some_and(|name| name.trim() == key))?;
        line.split(':').nth(1).map(|text| text.trim().to_owned())
    };
    let cores = cpuinfo
        .split("\n\n")
        .filter_map(|block| Some((value(block, "physical id")?, value(block, "core id")?)));
    cores.collect::<std::collections::HashSet<_>>().len()
}

/// Makes sure that HTTP clients can be built: the crate's TLS comes without a default provider.
pub(super) fn ensure_tls_provider() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Another thread may be first; then theirs serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

fn random_key() -> Result<SecretString, getrandom::Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(SecretString::from(hexadecimal(&bytes)))
}

fn is_port_taken(log: &str) -> bool {
    let log = log.to_lowercase();
    log.contains("couldn't bind") || log.contains("address already in use")
}

fn hint(code: Option<i32>, log: &str) -> &'static str {
    if code == Some(132) {
        "; this processor lacks an instruction it was built for: use a `llama-server` built here, or `--base-url`"
    } else if code == Some(137) {
        "; the system ended it, most likely for want of memory: try fewer slots or a smaller model"
    } else if log.contains("failed to allocate") || log.contains("unable to allocate") {
        "; too little memory: try fewer slots or a smaller model"
    } else if log.contains("error loading model") || log.contains("failed to load model") {
        "; the model file is damaged or of a kind this server does not know"
    } else {
        ""
    }
}

/// The last `lines` lines of a log, of which at most the last 64 KiB are read.
fn log_tail(path: &Path, lines: usize) -> String {
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(path) {
        let start = file
            .metadata()
            .map_or(0, |metadata| metadata.len().saturating_sub(64 << 10));
        // What cannot be read is an empty tail: this only decorates an error.
        let _ = file
            .seek(SeekFrom::Start(start))
            .and_then(|_| file.read_to_end(&mut bytes));
    }
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

fn io_at(path: &Path) -> impl Fn(io::Error) -> ServerError {
    let path = path.to_owned();
    move |source| ServerError::Io {
        path: path.clone(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> ServerConfig {
        let path = PathBuf::from;
        ServerConfig::new(
            path("m.gguf"),
            "tiny",
            Path::new("cache"),
            path("dinsql"),
            path("server.log"),
        )
    }

    #[test]
    fn both_engines_get_the_same_settings_and_never_the_key() {
        let launcher = EngineKind::Launcher {
            script: PathBuf::from("launcher.py"),
            packages: None,
        };
        for (kind, context) in [
            (EngineKind::LlamaServer, "--ctx-size 32768"),
            (launcher, "--context-per-slot 16384"),
        ] {
            let engine = Engine {
                name: String::new(),
                program: PathBuf::new(),
                kind,
            };
            let arguments = engine.arguments(&ServerConfig { slots: 2, ..config() }, 4711, 2);
            let text: Vec<&str> = arguments.iter().filter_map(|argument| argument.to_str()).collect();
            let text = text.join(" ");
            assert!(
                text.contains("--model m.gguf --alias tiny --port 4711 --threads 2"),
                "{text}"
            );
            assert!(text.contains(context) && !text.contains("key"), "{text}");
        }
    }

    #[test]
    fn hyper_threads_are_counted_once() {
        let thread =
            |processor: u32, core: u32| format!("processor\t: 0\nphysical id\t: {processor}\ncore id\t\t: {core}\n\n");
        let text: String = [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0)]
            .map(|(processor, core)| thread(processor, core))
            .concat();
        assert_eq!(physical_cores(&text), 3);
        assert_eq!(physical_cores("processor\t: 0\nBogoMIPS\t: 50.00\n"), 0);
        assert!(default_threads() >= 1);
    }

    #[tokio::test]
    async fn a_missing_model_file_or_server_is_named() {
        let error = ManagedServer::start(&config(), &|_| ()).await.unwrap_err();
        assert_eq!(error.to_string(), "no model file at `m.gguf`");

        let folder = tempfile::tempdir().unwrap();
        let model_file = folder.path().join("m.gguf");
        fs::write(&model_file, "x").unwrap();
        let server_binary = Some(folder.path().join("llama-server"));
        let error = ManagedServer::start(
            &ServerConfig {
                model_file,
                server_binary,
                ..config()
            },
            &|_| (),
        )
        .await;
        assert!(error.unwrap_err().to_string().contains("llama-server` does not run"));
    }

    #[test]
    fn keys_are_random_and_tails_short() {
        let (one, two) = (random_key().unwrap(), random_key().unwrap());
        assert_eq!(one.expose_secret().len(), 32);
        assert_ne!(one.expose_secret(), two.expose_secret());
        assert!(!format!("{one:?}").contains(one.expose_secret()));

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        fs::write(&path, b"a\nb\n\nc \xff\n").unwrap();
        assert_eq!(log_tail(&path, 2), "b\nc \u{fffd}");
        assert_eq!(log_tail(Path::new("/nowhere"), 2), "");
    }
}
