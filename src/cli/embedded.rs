//! The embedded model as a provider: its server starts with the first call that the cache does not answer.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::OnceCell;

use super::exit::{Exit, Failure};
use crate::llm::embedded::{
    CancelFlag, Catalog, ManagedServer, ModelEntry, PullEvent, PullOptions, ServerConfig, ServerEvent,
    default_models_dir, pull,
};
use crate::llm::openai::{Endpoint, OpenAiModel};
use crate::llm::{CallError, Completion, ErrorClass, Model, Request};

/// Which model the embedded server is to run.
#[derive(Debug, Clone)]
pub enum Choice {
    Catalogued(&'static ModelEntry),
    File { path: PathBuf, digest: String },
}

impl Choice {
    pub fn name(&self) -> String {
        match self {
            Choice::Catalogued(entry) => entry.name.clone(),
            Choice::File { path, .. } => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        }
    }

    /// What its answers are cached under.
    pub fn identity(&self) -> String {
        match self {
            Choice::Catalogued(entry) => format!("embedded sha256:{}", entry.sha256),
            Choice::File { digest, .. } => format!("embedded blake3:{digest}"),
        }
    }
}

/// A model that starts its server when it is first asked.
pub struct LazyServer {
    choice: Choice,
    cache: PathBuf,
    llama_server: Option<PathBuf>,
    pub slots: u32,
    started: OnceCell<Result<Started, String>>,
}

struct Started {
    server: ManagedServer,
    model: OpenAiModel,
}

/// A call to the local server may wait for others and for a long prompt.
const CALL_TIMEOUT: Duration = Duration::from_mins(15);

impl LazyServer {
    pub fn new(choice: Choice, cache: &Path, llama_server: Option<PathBuf>, slots: Option<u32>) -> Self {
        LazyServer {
            choice,
            cache: cache.to_owned(),
            llama_server,
            slots: slots.unwrap_or(ServerConfig::DEFAULT_SLOTS),
            started: OnceCell::new(),
        }
    }

    async fn start(&self) -> Result<Started, String> {
        let file = match &self.choice {
            Choice::Catalogued(entry) => fetch(entry, &self.cache).await?,
            Choice::File { path, .. } => path.clone(),
        };
        let guard =
            std::env::current_exe().map_err(|error| format!("cannot find the dinsql program itself: {error}"))?;
        let log = log_file(&self.cache);
        let mut config = ServerConfig::new(file, &self.choice.name(), &self.cache, guard, log);
        config.slots = self.slots;
        config.server_binary.clone_from(&self.llama_server);
        let server = ManagedServer::start(&config, &|event| match event {
            ServerEvent::PreparingPython => {
                eprintln!("making a private Python environment for the local model server (once)");
            }
            ServerEvent::Loading { engine } => eprintln!("starting the local model server ({engine})"),
            ServerEvent::Ready { seconds } => tracing::info!(seconds, "the local model server answers"),
        })
        .await
        .map_err(|error| chain(&error))?;
        let mut endpoint = Endpoint::new("embedded", server.base_url(), Some(server.api_key().clone()));
        endpoint.timeout = CALL_TIMEOUT;
        endpoint.local = true;
        let model = OpenAiModel::new(endpoint).map_err(|error| error.to_string())?;
        Ok(Started { server, model })
    }

    async fn ask(&self, request: &Request) -> Result<Completion, CallError> {
        match self.started.get_or_init(|| self.start()).await {
            Ok(started) => started.model.complete(request).await.map_err(|error| {
                if error.class == ErrorClass::Connection {
                    let tail = started.server.log_tail(5);
                    CallError {
                        // A server of ours that has ended does not come back.
                        class: if started.server.has_ended() {
                            ErrorClass::Unreachable
                        } else {
                            error.class
                        },
                        message: format!("{}; the server's log ends:\n{tail}", error.message),
                        ..error
                    }
                } else {
                    error
                }
            }),
            Err(reason) => Err(CallError::new(
                ErrorClass::Unreachable,
                format!("the embedded model does not start: {reason}"),
            )),
        }
    }
}

impl Model for LazyServer {
    fn complete<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Completion, CallError>> {
        Box::pin(self.ask(request))
    }
}

/// Ends the server, if one was started.
pub async fn stop(server: Arc<LazyServer>) {
    // Calls hold clones of the handle only while they run.
    if let Some(server) = Arc::into_inner(server)
        && let Some(Ok(started)) = server.started.into_inner()
    {
        started.server.stop().await;
        // Of use only where something went wrong, and then the message has quoted it.
        let _ = std::fs::remove_file(log_file(&server.cache));
    }
}

fn log_file(cache: &Path) -> PathBuf {
    cache.join("logs").join(format!("server-{}.log", std::process::id()))
}

/// Fetches a catalogued model with a progress bar.
pub async fn fetch(entry: &'static ModelEntry, cache: &Path) -> Result<PathBuf, String> {
    fetch_with(entry, cache, false).await
}

/// As [`fetch`]; `verify` reads the whole file again.
pub async fn fetch_with(entry: &'static ModelEntry, cache: &Path, verify: bool) -> Result<PathBuf, String> {
    let bar = ProgressBar::new(entry.size);
    let style = ProgressStyle::with_template("{prefix} {bar:24.cyan/dim} {bytes}/{total_bytes} {bytes_per_sec} {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style.progress_chars("━━─"));
    bar.set_prefix(entry.name.clone());
    let cancel = CancelFlag::default();
    let on_event = |event: PullEvent| match event {
        PullEvent::Waiting => eprintln!("another process is fetching {}; waiting for it", entry.name),
        PullEvent::Source { label } => {
            eprintln!("fetching {} ({} MB) from {label}", entry.name, entry.size / 1_000_000);
        }
        PullEvent::Progress { done, .. } => bar.set_position(done),
        PullEvent::Verifying { done, .. } => {
            bar.set_message("verifying");
            bar.set_position(done);
        }
        PullEvent::FellThrough { label, reason } => eprintln!("{label}: {reason}"),
    };
    let options = PullOptions {
        verify,
        cancel: cancel.clone(),
        ..PullOptions::default()
    };
    let models = default_models_dir(cache);
    let work = pull(entry, &models, options, &on_event);
    tokio::pin!(work);
    let result = loop {
        tokio::select! {
            result = &mut work => break result,
            _ = tokio::signal::ctrl_c() => cancel.store(true, std::sync::atomic::Ordering::SeqCst),
        }
    };
    bar.finish_and_clear();
    result.map_err(|error| chain(&error))
}

/// The model that the arguments mean.
pub fn choose(name: Option<&str>, file: Option<&Path>) -> Result<Choice, Failure> {
    if let Some(path) = file {
        let digest = crate::dataset::file_digest(path)
            .map_err(|error| Failure::message(Exit::Usage, format!("--model-file {}: {error}", path.display())))?;
        return Ok(Choice::File {
            path: path.to_owned(),
            digest,
        });
    }
    let catalog = Catalog::builtin();
    let Some(name) = name else {
        return Ok(Choice::Catalogued(catalog.default_model()));
    };
    catalog.get(name).map(Choice::Catalogued).ok_or_else(|| {
        let known: Vec<&str> = catalog.models().iter().map(|entry| entry.name.as_str()).collect();
        Failure::message(
            Exit::Usage,
            format!("no embedded model `{name}` (there are: {})", known.join(", ")),
        )
        .hint("for another server's model give --base-url, a provider of dinsql.yaml, or set OPENAI_API_KEY")
    })
}

/// An error with its causes, each said once.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let words = inner.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        source = inner.source();
    }
    text
}
