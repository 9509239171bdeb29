//! Any OpenAI-compatible server, through async-openai with an HTTP service of our own: the library's keeps neither status
//! nor headers of failed answers, and has a retry loop where we have ours.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::OpenAIError;
use async_openai::middleware::HttpRequestFactory;
use futures::future::BoxFuture;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::classify::{Classified, ErrorClass, classify};
use super::waits::{RateHint, rate_hint};
use super::{CallError, Completion, Model, Request, Usage, Usd};

/// How to reach a server.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// For messages: the provider's name.
    pub name: String,
    /// Up to and with `/v1`.
    pub base_url: String,
    pub key: Option<SecretString>,
    pub headers: Vec<(String, String)>,
    /// For one attempt, where the request does not say.
    pub timeout: Duration,
    pub connect_timeout: Duration,
    /// Whether the server is on this machine, where no proxy leads.
    pub local: bool,
    /// Whether the server is asked to keep answers to a JSON Schema.
    pub structured_output: bool,
}

impl Endpoint {
    pub fn new(name: &str, base_url: &str, key: Option<SecretString>) -> Self {
        Endpoint {
            name: name.to_owned(),
            base_url: base_url.trim_end_matches('/').to_owned(),
            key,
            headers: Vec::new(),
            timeout: Duration::from_mins(2),
            connect_timeout: Duration::from_secs(10),
            local: false,
            structured_output: true,
        }
    }
}

/// A server could not be set up: a malformed address or header.
#[derive(Debug, thiserror::Error)]
#[error("provider `{provider}`: {reason}")]
pub struct EndpointError {
    pub provider: String,
    pub reason: String,
}

/// Told of every answer that says something about the server's limits.
pub type OnRate = Arc<dyn Fn(&RateHint) + Send + Sync>;

/// One attempt at an OpenAI-compatible server.
pub struct OpenAiModel {
    client: Client<OpenAIConfig>,
    http: reqwest::Client,
    endpoint: Endpoint,
    /// Parameters that a model's server has refused to know, by model.
    unsupported: Mutex<HashMap<String, BTreeSet<String>>>,
}

/// Parameters that the answer does not hang on, or that have another name: where a server does not know one, the call goes
/// on without it, and says so. (A refused temperature or seed would change the experiment.)
const DISPENSABLE: &[&str] = &["max_tokens", "response_format", "logprobs", "n"];

impl OpenAiModel {
    /// # Errors
    /// Where the address or a header is malformed.
    pub fn new(endpoint: Endpoint) -> Result<Self, EndpointError> {
        OpenAiModel::watched(endpoint, None)
    }

    /// As [`OpenAiModel::new`], with somebody who is told of the server's limits.
    ///
    /// # Errors
    /// Where the address or a header is malformed.
    pub fn watched(endpoint: Endpoint, on_rate: Option<OnRate>) -> Result<Self, EndpointError> {
        let fail = |reason: String| EndpointError {
            provider: endpoint.name.clone(),
            reason,
        };
        let url = reqwest::Url::parse(&endpoint.base_url)
            .map_err(|error| fail(format!("`{}` is not an address: {error}", endpoint.base_url)))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(fail(format!("`{}` is not an http(s) address", endpoint.base_url)));
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(fail(
                "the address may not have a part after `?` or `#`; give a key by the environment or a file".into(),
            ));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(fail(
                "give the key by the environment or a file, not inside the address".into(),
            ));
        }
        let mut http = reqwest::Client::builder()
            .connect_timeout(endpoint.connect_timeout)
            // A key must not follow a redirect to somewhere else.
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("dinsql/", env!("CARGO_PKG_VERSION")));
        if endpoint.local {
            http = http.no_proxy();
        }
        let http = http.build().map_err(|error| fail(error.to_string()))?;
        let key = endpoint.key.as_ref().map_or("", |key| key.expose_secret());
        let mut config = OpenAIConfig::new().with_api_base(&endpoint.base_url).with_api_key(key);
        for (name, value) in &endpoint.headers {
            let header = reqwest::header::HeaderName::from_bytes(name.as_bytes())
                .map_err(|error| fail(format!("header `{name}`: {error}")))?;
            config = config
                .with_header(header, value.clone())
                .map_err(|error| fail(format!("header `{name}`: {error}")))?;
        }
        let service = Transport {
            http: http.clone(),
            timeout: endpoint.timeout,
            on_rate,
        };
        let client = Client::build(http.clone(), config).with_http_service(service);
        Ok(OpenAiModel {
            client,
            http,
            endpoint,
            unsupported: Mutex::default(),
        })
    }

    /// Model ids that the server lists.
    ///
    /// # Errors
    /// As a call's.
    pub async fn list(&self) -> Result<Vec<String>, CallError> {
        let ids = self
            .describe_models()
            .await?
            .into_iter()
            .filter_map(|model| model["id"].as_str().map(str::to_owned));
        Ok(ids.collect())
    }

    /// What the server says of its models, as it says it.
    ///
    /// # Errors
    /// As a call's.
    pub async fn describe_models(&self) -> Result<Vec<Json>, CallError> {
        let mut request = self
            .http
            .get(format!("{}/models", self.endpoint.base_url))
            .timeout(self.endpoint.timeout);
        if let Some(key) = &self.endpoint.key {
            request = request.bearer_auth(key.expose_secret());
        }
        for (name, value) in &self.endpoint.headers {
            request = request.header(name, value);
        }
        let response = request
            .send()
            .await
            .map_err(|error| self.from_http(&error, self.endpoint.timeout))?;
        let status = response.status().as_u16();
        let body = response
            .text()
            .await
            .map_err(|error| self.from_http(&error, self.endpoint.timeout))?;
        if !(200..300).contains(&status) {
            return Err(self.refused(
                &Refusal {
                    status,
                    retry_after: None,
                    body,
                },
                None,
            ));
        }
        let json: Json = serde_json::from_str(&body).map_err(|error| {
            self.error(
                ErrorClass::BadAnswer,
                format!("the list of models is not JSON: {error}"),
            )
        })?;
        Ok(json["data"].as_array().cloned().unwrap_or_default())
    }

    async fn attempt(&self, request: &Request) -> Result<Completion, CallError> {
        let started = Instant::now();
        let limit = request.timeout.unwrap_or(self.endpoint.timeout);
        let unsupported = self.lock().get(&request.model).cloned().unwrap_or_default();
        let (body, not_sent) = body(request, &unsupported, self.endpoint.structured_output);
        let chat = self.client.chat();
        let answer = chat.create_byot::<_, Answer>(body);
        // The body is read after the service has returned, so the limit is set around both.
        let answer = match tokio::time::timeout(limit, answer).await {
            Ok(answer) => answer.map_err(|error| self.from_library(error, request, limit))?,
            Err(_) => return Err(self.timed_out(limit)),
        };
        let latency_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let completion = self.completion(answer, request)?;
        Ok(Completion {
            not_sent,
            latency_ms,
            ..completion
        })
    }

    fn completion(&self, answer: Answer, request: &Request) -> Result<Completion, CallError> {
        if let Some(error) = answer.error.filter(|error| !error.is_null()) {
            // Some gateways answer 200 with an error inside.
            let status = error["code"]
                .as_u64()
                .and_then(|code| u16::try_from(code).ok())
                .unwrap_or(500);
            let body = json!({ "error": error }).to_string();
            return Err(self.refused(
                &Refusal {
                    status,
                    retry_after: None,
                    body,
                },
                Some(request),
            ));
        }
        let mut choices = answer.choices.into_iter().flatten();
        let Some(choice) = choices.next() else {
            return Err(self.error(
                ErrorClass::BadAnswer,
                format!("model `{}` answered without any choice", request.model),
            ));
        };
        let alternatives = choices
            .map(|choice| choice.message.and_then(|message| message.content))
            .map(|content| content.map(Content::into_text).unwrap_or_default())
            .collect();
        let logprobs = choice
            .logprobs
            .filter(|logprobs| request.logprobs && !logprobs.is_null());
        let finish_reason = choice.finish_reason;
        let text = choice
            .message
            .and_then(|message| message.content)
            .map(Content::into_text)
            .unwrap_or_default();
        if text.trim().is_empty() {
            let why = finish_reason.as_deref().unwrap_or("none given");
            let (class, hint) = match why {
                "content_filter" | "SAFETY" | "safety" => (ErrorClass::ContentFilter, ""),
                "length" | "MAX_TOKENS" | "max_tokens" => (
                    ErrorClass::BadRequest,
                    "; all of max_tokens went into reasoning: raise it",
                ),
                _ => (ErrorClass::BadAnswer, ""),
            };
            let message = format!(
                "model `{}` answered without text (finish reason: {why}){hint}",
                request.model
            );
            // It is billed all the same.
            return Err(CallError {
                usage: Box::new(answer.usage.as_ref().map(usage).unwrap_or_default()),
                ..self.error(class, message)
            });
        }
        Ok(Completion {
            alternatives,
            finish_reason,
            usage: answer.usage.as_ref().map(usage).unwrap_or_default(),
            logprobs,
            served_model: answer.model,
            fingerprint: answer.system_fingerprint,
            ..Completion::new(text)
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, BTreeSet<String>>> {
        self.unsupported.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a parameter that the server does not know, so that the next attempt goes without; says whether that is new.
    fn do_without(&self, model: &str, parameter: &str) -> bool {
        DISPENSABLE.contains(&parameter)
            && self
                .lock()
                .entry(model.to_owned())
                .or_default()
                .insert(parameter.to_owned())
    }

    fn from_library(&self, error: OpenAIError, request: &Request, limit: Duration) -> CallError {
        match error {
            OpenAIError::Boxed(boxed) => match boxed.downcast::<Refusal>() {
                Ok(refusal) => self.refused(&refusal, Some(request)),
                Err(other) => match other.downcast::<reqwest::Error>() {
                    Ok(error) => self.from_http(&error, limit),
                    Err(other) => self.error(ErrorClass::Connection, other.to_string()),
                },
            },
            OpenAIError::Reqwest(error) => self.from_http(&error, limit),
            OpenAIError::JSONDeserialize(error, _) => self.error(
                ErrorClass::BadAnswer,
                format!("model `{}` gave no valid completion: {error}", request.model),
            ),
            other => self.error(ErrorClass::BadRequest, other.to_string()),
        }
    }

    fn from_http(&self, error: &reqwest::Error, limit: Duration) -> CallError {
        if error.is_timeout() && !error.is_connect() {
            return self.timed_out(limit);
        }
        // The innermost cause says most ("connection refused"); the address is named once, by us.
        let mut cause: &dyn std::error::Error = error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        self.error(
            ErrorClass::Connection,
            format!("no answer from {}: {cause}", self.endpoint.base_url),
        )
    }

    fn timed_out(&self, limit: Duration) -> CallError {
        self.error(
            ErrorClass::Timeout,
            format!(
                "no answer from {} within {} s",
                self.endpoint.base_url,
                limit.as_secs_f64()
            ),
        )
    }

    fn refused(&self, refusal: &Refusal, request: Option<&Request>) -> CallError {
        let Classified {
            mut class,
            words,
            wait,
            parameter,
        } = classify(refusal.status, &self.redact(&refusal.body), refusal.retry_after);
        if class == ErrorClass::UnsupportedParameter {
            let parameter = parameter.as_deref().unwrap_or_default();
            // Calls in flight may all learn it at once: each of them may try again without it.
            let known = request.is_some_and(|request| {
                self.do_without(&request.model, parameter);
                DISPENSABLE.contains(&parameter) && is_asked_for(request, parameter)
            });
            if !known {
                class = ErrorClass::BadRequest;
            }
        }
        // The sentence goes on.
        let words = words.trim_end_matches('.');
        let model = request.map_or_else(String::new, |request| format!("model `{}` ", request.model));
        let status = refusal.status;
        let hint = match class {
            ErrorClass::Unauthorized => "; check the API key",
            ErrorClass::ModelNotFound => "; `dinsql model list` shows what the server has",
            ErrorClass::WrongAddress => "; is the base URL right? It usually ends in /v1",
            _ => "",
        };
        let at = if class == ErrorClass::WrongAddress {
            format!(" at {}", self.endpoint.base_url)
        } else {
            String::new()
        };
        CallError {
            class,
            message: self.redact(&format!("{model}refused the request{at} ({status}): {words}{hint}")),
            status: Some(status),
            retry_after: refusal.retry_after.or(wait),
            attempts: 1,
            ..CallError::new(class, String::new())
        }
    }

    fn error(&self, class: ErrorClass, message: String) -> CallError {
        CallError {
            attempts: 1,
            ..CallError::new(class, self.redact(&message))
        }
    }

    /// Servers may repeat the key, or a header's value, in their message.
    fn redact(&self, text: &str) -> String {
        let key = self.endpoint.key.as_ref().map(ExposeSecret::expose_secret);
        let mut text = match key {
            Some(key) if key.len() >= 4 => text.replace(key, "[key]"),
            _ => text.to_owned(),
        };
        for (name, value) in &self.endpoint.headers {
            if value.len() >= 12 {
                text = text.replace(value.as_str(), &format!("[{name}]"));
            }
        }
        text
    }
}

impl Model for OpenAiModel {
    fn complete<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Completion, CallError>> {
        Box::pin(self.attempt(request))
    }
}

fn is_asked_for(request: &Request, parameter: &str) -> bool {
    match parameter {
        "max_tokens" => request.max_tokens.is_some(),
        "response_format" => request.response_format.is_some(),
        "logprobs" => request.logprobs,
        "n" => request.n.is_some(),
        _ => false,
    }
}

/// The request's body, and the parameters that are not in it although they were asked for.
fn body(request: &Request, unsupported: &BTreeSet<String>, structured_output: bool) -> (Json, Vec<String>) {
    let mut body = json!({ "model": request.model, "messages": request.messages, "stream": false });
    let mut not_sent = Vec::new();
    let mut set = |name: &str, value: Option<Json>| {
        if let Some(value) = value {
            // Newer models of OpenAI have another name for the same thing.
            if name == "max_tokens" && unsupported.contains(name) {
                body["max_completion_tokens"] = value;
            } else if unsupported.contains(name) || name == "response_format" && !structured_output {
                not_sent.push(name.to_owned());
            } else {
                body[name] = value;
            }
        }
    };
    set("temperature", request.temperature.map(Json::from));
    set("top_p", request.top_p.map(Json::from));
    set("max_tokens", request.max_tokens.map(Json::from));
    set("seed", request.seed.map(Json::from));
    set(
        "stop",
        (!request.stop.is_empty()).then(|| Json::from(request.stop.clone())),
    );
    set("n", request.n.map(Json::from));
    set("logprobs", request.logprobs.then(|| Json::from(true)));
    set(
        "response_format",
        request.response_format.as_ref().map(|format| {
            json!({
                "type": "json_schema",
                "json_schema": { "name": format.name, "schema": format.schema, "strict": true },
            })
        }),
    );
    (body, not_sent)
}

/// Reads token counts as leniently as can be: numbers may be fractions, and details may be missing or null.
fn usage(json: &Json) -> Usage {
    let count = |value: &Json| {
        value.as_u64().or_else(|| {
            let number = value.as_f64()?;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "the range is checked"
            )]
            (0.0..9e15).contains(&number).then(|| number.round() as u64)
        })
    };
    // OpenAI's names, then Anthropic's and DeepSeek's.
    let first = |names: &[&str]| names.iter().find_map(|name| json.pointer(name).and_then(count));
    Usage {
        prompt: first(&["/prompt_tokens", "/input_tokens"]),
        cached_prompt: first(&[
            "/prompt_tokens_details/cached_tokens",
            "/input_tokens_details/cached_tokens",
            "/prompt_cache_hit_tokens",
        ]),
        completion: first(&["/completion_tokens", "/output_tokens"]),
        reasoning: first(&[
            "/completion_tokens_details/reasoning_tokens",
            "/output_tokens_details/reasoning_tokens",
        ]),
        cost: json["cost"].as_f64().and_then(Usd::from_dollars),
    }
}

/// A non-2xx answer, whole.
#[derive(Debug)]
struct Refusal {
    status: u16,
    retry_after: Option<Duration>,
    body: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "status {}", self.status)
    }
}

impl std::error::Error for Refusal {}

/// Sends once, and keeps what a failed answer said.
#[derive(Clone)]
struct Transport {
    http: reqwest::Client,
    timeout: Duration,
    on_rate: Option<OnRate>,
}

/// Longest error body that is read.
const MAX_ERROR_BODY: usize = 64 << 10;

impl tower::Service<HttpRequestFactory> for Transport {
    type Response = reqwest::Response;
    type Error = OpenAIError;
    type Future = BoxFuture<'static, Result<reqwest::Response, OpenAIError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, factory: HttpRequestFactory) -> Self::Future {
        let (http, timeout, on_rate) = (self.http.clone(), self.timeout, self.on_rate.clone());
        Box::pin(async move {
            let mut request = factory.build().await?;
            // An outer limit around the whole attempt is usually shorter; this one ends a connection nobody waits for.
            request
                .timeout_mut()
                .get_or_insert(timeout.max(Duration::from_hours(24)));
            let mut response = http.execute(request).await.map_err(OpenAIError::Reqwest)?;
            let headers = response.headers();
            let hint = rate_hint(
                |name| headers.get(name).and_then(|value| value.to_str().ok()),
                jiff::Timestamp::now(),
            );
            let is_fine = response.status().is_success();
            // What a refusal asks for is the retry loop's affair, which knows whether it is about the rate.
            if is_fine && let Some(on_rate) = &on_rate {
                on_rate(&hint);
            }
            if is_fine {
                return Ok(response);
            }
            let status = response.status().as_u16();
            let wait = hint.retry_after;
            let mut bytes = Vec::new();
            while let Ok(Some(chunk)) = response.chunk().await {
                bytes.extend_from_slice(&chunk);
                if bytes.len() > MAX_ERROR_BODY {
                    bytes.truncate(MAX_ERROR_BODY);
                    break;
                }
            }
            let body = String::from_utf8_lossy(&bytes).into_owned();
            Err(OpenAIError::Boxed(Box::new(Refusal {
                status,
                retry_after: wait,
                body,
            })))
        })
    }
}

/// A completion as leniently as can be read: servers leave fields out, add some, and invent finish reasons.
#[derive(Debug, Deserialize)]
struct Answer {
    #[serde(default)]
    choices: Option<Vec<Choice>>,
    #[serde(default)]
    usage: Option<Json>,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    system_fingerprint: Option<String>,
    #[serde(default)]
    error: Option<Json>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(default)]
    message: Option<RawMessage>,
    #[serde(default)]
    finish_reason: Option<String>,
    #[serde(default)]
    logprobs: Option<Json>,
}

#[derive(Debug, Deserialize)]
struct RawMessage {
    #[serde(default)]
    content: Option<Content>,
}

/// Text, or a list of parts with text.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Json>),
}

impl Content {
    fn into_text(self) -> String {
        match self {
            Content::Text(text) => text,
            Content::Parts(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::request;
    use super::*;

    #[test]
    fn token_counts_in_the_forms_that_servers_give() {
        for (json, expected) in [
            (json!({}), Usage::default()),
            (json!(null), Usage::default()),
            (
                json!({ "prompt_tokens": 12.0, "completion_tokens": -1, "prompt_tokens_details": null }),
                Usage {
                    prompt: Some(12),
                    ..Usage::default()
                },
            ),
            (
                json!({
                    "prompt_tokens": 10, "completion_tokens": 5, "cost": 0.000_25,
                    "prompt_tokens_details": { "cached_tokens": 8 },
                    "completion_tokens_details": { "reasoning_tokens": 3 },
                }),
                Usage {
                    prompt: Some(10),
                    cached_prompt: Some(8),
                    completion: Some(5),
                    reasoning: Some(3),
                    cost: Some(Usd(250_000)),
                },
            ),
            (
                json!({ "prompt_tokens": 10, "completion_tokens": 5, "prompt_cache_hit_tokens": 4 }),
                Usage {
                    prompt: Some(10),
                    cached_prompt: Some(4),
                    completion: Some(5),
                    ..Usage::default()
                },
            ),
        ] {
            assert_eq!(usage(&json), expected, "{json}");
        }
    }

    #[test]
    fn what_a_server_does_not_know_is_left_out_and_named() {
        let mut request = request();
        request.n = Some(3);
        request.logprobs = true;
        let (whole, not_sent) = body(&request, &BTreeSet::new(), true);
        assert_eq!(
            (&whole["n"], &whole["logprobs"], &whole["max_tokens"]),
            (&json!(3), &json!(true), &json!(10))
        );
        assert!(not_sent.is_empty());
        let unsupported = ["n", "max_tokens"].map(str::to_owned).into();
        let (less, not_sent) = body(&request, &unsupported, true);
        assert!(less.get("n").is_none() && less.get("max_tokens").is_none());
        assert_eq!(less["max_completion_tokens"], 10, "only the name is another");
        assert_eq!(not_sent, ["n"]);
    }
}
