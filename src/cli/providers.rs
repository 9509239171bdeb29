//! Who is asked: from flags, environment and project file to a router over providers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretString;

use super::arguments::{CacheChoice, ModelArguments};
use super::embedded::{self, LazyServer};
use super::exit::{Exit, Failure};
use super::settings::{Prices, Settings};
use crate::config::{ModelSpec, Pipeline, Price, ProviderSettings};
use crate::diagnostic::did_you_mean;
use crate::llm::budget::{Budget, MeteredModel, RateCard};
use crate::llm::cache::{Cache, CacheMode};
use crate::llm::cached::CachedModel;
use crate::llm::limits::{Caps, Limiter};
use crate::llm::openai::{Endpoint, OnRate, OpenAiModel};
use crate::llm::retry::{RetryPolicy, RetryingModel, Waiting};
use crate::llm::spans::TracedModel;
use crate::llm::usage::{Forecast, Rates};
use crate::llm::{Model, StopSignal};
use crate::pipeline::{Provider, Router};

const OPENAI: &str = "openai";
const OPENAI_URL: &str = "https://api.openai.com/v1";
pub const EMBEDDED: &str = "embedded";
const KEY_VARIABLE: &str = "OPENAI_API_KEY";
const DEFAULT_CONCURRENCY: usize = 16;

/// What a command and its providers share.
#[derive(Clone, Default)]
pub struct Control {
    pub stop: StopSignal,
    pub budget: Arc<Budget>,
    pub waiting: Waiting,
}

/// The providers of a command, ready to be asked.
pub struct Providers {
    pub router: Arc<Router>,
    /// Calls in flight at most, at the default provider.
    pub concurrency: usize,
    /// Whether the default provider is the embedded model.
    pub embedded: bool,
    /// The default provider's limits.
    pub limiter: Arc<Limiter>,
    prices: BTreeMap<String, RateCard>,
    server: Option<Arc<LazyServer>>,
}

impl Providers {
    /// Sets up the default provider, and those that the pipelines name.
    pub fn set_up(
        arguments: &ModelArguments,
        settings: &Settings,
        pipelines: &[Pipeline],
        control: &Control,
    ) -> Result<Self, Failure> {
        let default = default_provider(arguments, settings)?;
        let mut names = vec![default.clone()];
        for pipeline in pipelines {
            let models = pipeline.models().into_iter().chain([pipeline.model.clone()]);
            names.extend(models.filter_map(|spec| spec.provider).filter(|name| name != "default"));
        }
        names.sort();
        names.dedup();
        let cache = open_cache(arguments.cache_choice(), settings)?;
        let prices = settings.prices()?;
        let policy = retry_policy();
        let mut providers = BTreeMap::new();
        let mut rate_cards = BTreeMap::new();
        let mut server = None;
        let mut of_default = None;
        for name in names {
            let is_default = name == default;
            let configured = settings.project.providers.get(&name);
            let at_once = arguments
                .concurrency
                .map(|count| count as usize)
                .or_else(|| configured.and_then(|provider| provider.concurrency))
                .unwrap_or(DEFAULT_CONCURRENCY);
            let caps = |concurrency: usize| Caps {
                concurrency,
                requests_per_minute: configured.and_then(|provider| provider.requests_per_minute),
                tokens_per_minute: configured.and_then(|provider| provider.tokens_per_minute),
            };
            let policy = RetryPolicy {
                attempts: configured
                    .and_then(|provider| provider.attempts)
                    .unwrap_or(policy.attempts),
                total_time: configured
                    .and_then(|provider| provider.total_timeout)
                    .map(Duration::from_secs_f64),
                ..policy
            };
            let (identity, client, defaults, limiter): (String, Arc<dyn Model>, ModelSpec, Arc<Limiter>) = if name
                == EMBEDDED
            {
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
                let limiter = Arc::new(Limiter::new(caps(lazy.slots as usize), policy.longest_wait));
                server = Some(Arc::clone(&lazy));
                (identity, lazy, spec, limiter)
            } else {
                let (endpoint, provider) = endpoint(&name, arguments, settings, is_default)?;
                let identity = format!("{} {}", endpoint.name, endpoint.base_url);
                let spec = ModelSpec {
                    name: provider.and_then(|provider| provider.model.clone()),
                    ..ModelSpec::default()
                };
                let limiter = Arc::new(Limiter::new(caps(at_once), policy.longest_wait));
                let watcher = Arc::clone(&limiter);
                let on_rate: OnRate = Arc::new(move |hint| watcher.heed(hint));
                let model = OpenAiModel::watched(endpoint, Some(on_rate)).map_err(Failure::usage)?;
                (identity, Arc::new(model), spec, limiter)
            };
            let forecast = Arc::new(Forecast::default());
            let rates = rate_card(&name, configured, &prices);
            let retrying = RetryingModel::new(client, policy, Arc::clone(&limiter)).connected(
                control.stop.clone(),
                control.waiting.clone(),
                Arc::clone(&forecast),
            );
            let mut model: Arc<dyn Model> = Arc::new(MeteredModel::new(
                Arc::new(retrying),
                Arc::clone(&rates),
                Arc::clone(&control.budget),
                forecast,
                control.stop.clone(),
            ));
            if let Some((cache, mode)) = &cache {
                model = Arc::new(CachedModel::new(model, cache.clone(), *mode));
            }
            model = Arc::new(TracedModel::new(model));
            if is_default {
                of_default = Some(limiter);
            }
            rate_cards.insert(name.clone(), rates);
            providers.insert(
                name.clone(),
                Provider {
                    identity,
                    model,
                    defaults,
                    fixed_model: name == EMBEDDED,
                    aliases: configured
                        .map(|provider| provider.models.clone().into_iter().collect())
                        .unwrap_or_default(),
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
        let limiter = of_default.ok_or_else(|| Failure::message(Exit::Failed, "no provider"))?;
        Ok(Providers {
            router: Arc::new(Router {
                providers,
                default,
                overrides,
            }),
            concurrency: limiter.ceiling(),
            embedded,
            limiter,
            prices: rate_cards,
            server,
        })
    }

    /// What a model at a provider costs, where that is known.
    pub fn price(&self, spec: &ModelSpec, model: &str) -> Option<Price> {
        let spec = self.router.overrides.over(spec);
        let name = match spec.provider.as_deref() {
            None | Some("default") => self.router.default.as_str(),
            Some(name) => name,
        };
        let rates = self.prices.get(name)?(model)?;
        Some(Price {
            input: rates.input,
            cached_input: rates.cached_input,
            output: rates.output,
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

fn open_cache(choice: CacheChoice, settings: &Settings) -> Result<Option<(Cache, CacheMode)>, Failure> {
    let path = settings.completions();
    Ok(match choice {
        CacheChoice::Off => None,
        CacheChoice::On => Some((Cache::open(&path)?, CacheMode::On)),
        CacheChoice::Refresh => Some((Cache::open(&path)?, CacheMode::Refresh)),
        CacheChoice::ReadOnly => Some((Cache::open_to_read(&path)?, CacheMode::ReadOnly)),
    })
}

/// A provider's own prices beat the price lists. The embedded model costs nothing.
fn rate_card(name: &str, configured: Option<&ProviderSettings>, prices: &Prices) -> RateCard {
    if name == EMBEDDED {
        return Arc::new(|_| {
            Some(Rates {
                input: 0.0,
                cached_input: None,
                output: 0.0,
            })
        });
    }
    let own: BTreeMap<String, Price> = configured
        .map(|provider| {
            let mut own: BTreeMap<String, Price> = provider
                .prices
                .iter()
                .map(|(model, price)| (model.clone(), *price))
                .collect();
            for (alias, model) in &provider.models {
                if let Some(price) = provider.prices.get(alias) {
                    own.entry(model.clone()).or_insert(*price);
                }
            }
            own
        })
        .unwrap_or_default();
    let prices = prices.clone();
    let known: std::sync::Mutex<BTreeMap<String, Option<Rates>>> = std::sync::Mutex::default();
    Arc::new(move |model| {
        let mut known = known.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(rates) = known.get(model) {
            return *rates;
        }
        let rates = own
            .get(model)
            .copied()
            .or_else(|| prices.find(model))
            .map(|price| Rates {
                input: price.input,
                cached_input: price.cached_input,
                output: price.output,
            });
        known.insert(model.to_owned(), rates);
        rates
    })
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
        endpoint.structured_output = provider.structured_output.unwrap_or(true);
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
