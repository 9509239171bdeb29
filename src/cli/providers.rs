//! Who is asked: from flags, environment and project file to a router over providers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretString;

use super::arguments::ModelArguments;
use super::embedded::{self, LazyServer};
use super::exit::{Exit, Failure};
use super::settings::Settings;
use crate::config::{ModelSpec, Pipeline, ProviderSettings};
use crate::diagnostic::did_you_mean;
use crate::llm::Model;
use crate::llm::cache::{Cache, CachedModel};
use crate::llm::openai::{Endpoint, OpenAiModel};
use crate::llm::retry::{RetryPolicy, RetryingModel};
use crate::pipeline::{Provider, Router};

const OPENAI: &str = "openai";
const OPENAI_URL: &str = "https://api.openai.com/v1";
pub const EMBEDDED: &str = "embedded";
const KEY_VARIABLE: &str = "OPENAI_API_KEY";
const DEFAULT_CONCURRENCY: usize = 16;

/// The providers of a command, ready to be asked.
pub struct Providers {
    pub router: Arc<Router>,
    /// Calls in flight at most, at the default provider.
    pub concurrency: usize,
    /// Whether the default provider is the embedded model.
    pub embedded: bool,
    server: Option<Arc<LazyServer>>,
}

impl Providers {
    /// Sets up the default provider, and those that the pipelines name.
    pub fn set_up(arguments: &ModelArguments, settings: &Settings, pipelines: &[Pipeline]) -> Result<Self, Failure> {
        let default = default_provider(arguments, settings)?;
        let mut names = vec![default.clone()];
        for pipeline in pipelines {
            let specs = std::iter::once(&pipeline.model).chain(pipeline.stages.iter().map(|stage| &stage.model));
            names.extend(
                specs
                    .filter_map(|spec| spec.provider.clone())
                    .filter(|name| name != "default"),
            );
        }
        names.sort();
        names.dedup();
        let cache = if arguments.no_cache {
            None
        } else {
            Some(Cache::open(&settings.cache.join("completions.sqlite"))?)
        };
        let mut providers = BTreeMap::new();
        let mut server = None;
        let mut concurrency = DEFAULT_CONCURRENCY;
        for name in names {
            let is_default = name == default;
            let asked = arguments.concurrency.map(|count| count as usize);
            let rate = settings
                .project
                .providers
                .get(&name)
                .and_then(|provider| provider.requests_per_minute);
            let (identity, model, defaults, fixed_model, at_once): (String, Arc<dyn Model>, ModelSpec, bool, usize) =
                if name == EMBEDDED {
                    let wanted = if is_default { arguments.model.as_deref() } else { None };
                    let choice = embedded::choose(wanted, arguments.model_file.as_deref())?;
                    let spec = ModelSpec {
                        name: Some(choice.name()),
                        ..ModelSpec::default()
                    };
                    if is_default && arguments.provider.is_none() && arguments.model_file.is_none() {
                        eprintln!(
                            "no API key: using the embedded model {} (others: --base-url, dinsql.yaml, or {KEY_VARIABLE})",
                            choice.name()
                        );
                    }
                    let identity = choice.identity();
                    let lazy = Arc::new(LazyServer::new(
                        choice,
                        &settings.cache,
                        arguments.llama_server.clone(),
                        arguments.concurrency,
                    ));
                    let slots = lazy.slots as usize;
                    server = Some(Arc::clone(&lazy));
                    (identity, lazy, spec, true, slots)
                } else {
                    let (endpoint, provider) = endpoint(&name, arguments, settings, is_default)?;
                    let identity = format!("{} {}", endpoint.name, endpoint.base_url);
                    let spec = ModelSpec {
                        name: provider.and_then(|provider| provider.model.clone()),
                        ..ModelSpec::default()
                    };
                    let at_once = asked
                        .or_else(|| provider.and_then(|provider| provider.concurrency))
                        .unwrap_or(DEFAULT_CONCURRENCY);
                    let model = OpenAiModel::new(endpoint).map_err(Failure::usage)?;
                    (identity, Arc::new(model), spec, false, at_once)
                };
            if is_default {
                concurrency = at_once;
            }
            let mut model: Arc<dyn Model> =
                Arc::new(RetryingModel::new(model, retry_policy(), at_once).with_rate(rate));
            if let Some(cache) = &cache {
                model = Arc::new(CachedModel::new(model, cache.clone()));
            }
            providers.insert(
                name,
                Provider {
                    identity,
                    model,
                    defaults,
                    fixed_model,
                },
            );
        }
        let overrides = ModelSpec {
            name: arguments.model.clone(),
            // A provider on the command line is meant for every stage.
            provider: arguments.provider.as_ref().map(|_| default.clone()),
            ..ModelSpec::default()
        };
        let embedded = default == EMBEDDED;
        Ok(Providers {
            router: Arc::new(Router {
                providers,
                default,
                overrides,
                repeat: 0,
            }),
            concurrency,
            embedded,
            server,
        })
    }

    /// Ends what was started.
    pub async fn shut_down(self) {
        drop(self.router);
        if let Some(server) = self.server {
            embedded::stop(server).await;
        }
    }
}

/// Tests make waits short; a person never needs to.
fn retry_policy() -> RetryPolicy {
    let milliseconds = std::env::var("DINSQL_TEST_RETRY_MS")
        .ok()
        .and_then(|text| text.parse().ok());
    match milliseconds {
        Some(first) => RetryPolicy {
            first_wait: Duration::from_millis(first),
            longest_wait: Duration::from_millis(first * 4),
            ..RetryPolicy::default()
        },
        None => RetryPolicy::default(),
    }
}

/// Which provider answers where a pipeline does not say.
fn default_provider(arguments: &ModelArguments, settings: &Settings) -> Result<String, Failure> {
    let known: Vec<&str> = settings
        .project
        .providers
        .keys()
        .map(String::as_str)
        .chain([OPENAI, EMBEDDED])
        .collect();
    let check = |name: &str| {
        if known.contains(&name) {
            return Ok(name.to_owned());
        }
        let failure = Failure::message(
            Exit::Usage,
            format!("no provider `{name}` (there are: {})", known.join(", ")),
        );
        Err(match did_you_mean(name, known.iter().copied()) {
            Some(near) => failure.hint(format!("did you mean `{near}`?")),
            None => failure.hint("providers are described in dinsql.yaml"),
        })
    };
    if let Some(name) = &arguments.provider {
        return check(name);
    }
    if arguments.model_file.is_some() || arguments.llama_server.is_some() {
        return Ok(EMBEDDED.into());
    }
    if arguments.base_url.is_some() || arguments.api_key_file.is_some() {
        return Ok(OPENAI.into());
    }
    if let Some(name) = &settings.project.default_provider {
        return check(name);
    }
    Ok(if environment_key(KEY_VARIABLE).is_some() {
        OPENAI
    } else {
        EMBEDDED
    }
    .into())
}

fn endpoint<'a>(
    name: &str,
    arguments: &ModelArguments,
    settings: &'a Settings,
    is_default: bool,
) -> Result<(Endpoint, Option<&'a ProviderSettings>), Failure> {
    let configured = settings.project.providers.get(name);
    if configured.is_none() && name != OPENAI {
        return Err(Failure::message(
            Exit::Usage,
            format!("a pipeline names the provider `{name}`, which dinsql.yaml does not describe"),
        ));
    }
    let base_url = match (&arguments.base_url, configured) {
        (Some(url), _) if is_default => url.clone(),
        (_, Some(provider)) => provider.base_url.clone(),
        (Some(url), None) => url.clone(),
        (None, None) => OPENAI_URL.into(),
    };
    let key = match (&arguments.api_key_file, configured) {
        (Some(file), _) if is_default => Some(key_from_file(file)?),
        (
            _,
            Some(ProviderSettings {
                api_key_file: Some(file),
                ..
            }),
        ) => Some(key_from_file(&settings.root.join(file))?),
        (
            _,
            Some(ProviderSettings {
                api_key_env: Some(variable),
                ..
            }),
        ) => Some(environment_key(variable).ok_or_else(|| {
            Failure::message(
                Exit::Usage,
                format!("provider `{name}` takes its key from the environment variable {variable}, which is not set"),
            )
        })?),
        (_, Some(_)) => None,
        (_, None) => environment_key(KEY_VARIABLE),
    };
    if key.is_none() && base_url == OPENAI_URL {
        return Err(
            Failure::message(Exit::Usage, format!("no API key for {OPENAI_URL}")).hint(format!(
                "set {KEY_VARIABLE}, or give --api-key-file FILE; --provider {EMBEDDED} needs none"
            )),
        );
    }
    let mut endpoint = Endpoint::new(name, &base_url, key);
    if let Some(provider) = configured {
        endpoint.headers = provider
            .headers
            .iter()
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        if let Some(seconds) = provider.timeout {
            endpoint.timeout = Duration::from_secs_f64(seconds);
        }
    }
    Ok((endpoint, configured))
}

/// Only for listing and testing: the client of the default provider, where it is no embedded one.
pub fn remote(
    arguments: &ModelArguments,
    settings: &Settings,
) -> Result<Option<(OpenAiModel, Option<String>)>, Failure> {
    let name = default_provider(arguments, settings)?;
    if name == EMBEDDED {
        return Ok(None);
    }
    let (endpoint, provider) = endpoint(&name, arguments, settings, true)?;
    let model = arguments
        .model
        .clone()
        .or_else(|| provider.and_then(|provider| provider.model.clone()));
    Ok(Some((OpenAiModel::new(endpoint).map_err(Failure::usage)?, model)))
}

fn environment_key(variable: &str) -> Option<SecretString> {
    std::env::var(variable)
        .ok()
        .map(|key| key.trim().to_owned())
        .filter(|key| !key.is_empty())
        .map(SecretString::from)
}

fn key_from_file(path: &std::path::Path) -> Result<SecretString, Failure> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        Failure::message(
            Exit::Usage,
            format!("cannot read the API key file {}: {error}", path.display()),
        )
    })?;
    match text.lines().map(str::trim).find(|line| !line.is_empty()) {
        Some(key) => Ok(SecretString::from(key)),
        None => Err(Failure::message(
            Exit::Usage,
            format!("the API key file {} is empty", path.display()),
        )),
    }
}
