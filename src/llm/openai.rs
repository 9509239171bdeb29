//! Any OpenAI-compatible server, through async-openai with an HTTP service of our own: the library's keeps neither status
//! nor headers of failed answers, and has a retry loop where we have ours.

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

use super::classify::{ErrorClass, classify, retry_after};
use super::{CallError, Completion, Model, Request, Usage};

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

/// One attempt at an OpenAI-compatible server.
pub struct OpenAiModel {
    client: Client<OpenAIConfig>,
    http: reqwest::Client,
    endpoint: Endpoint,
}

impl OpenAiModel {
    /// # Errors
    /// Where the address or a header is malformed.
    pub fn new(endpoint: Endpoint) -> Result<Self, EndpointError> {
        let fail = |reason: String| EndpointError {
            provider: endpoint.name.clone(),
            reason,
        };
        let url = reqwest::Url::parse(&endpoint.base_url)
            .map_err(|error| fail(format!("`{}` is not an address: {error}", endpoint.base_url)))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(fail(format!("`{}` is not an http(s) address", endpoint.base_url)));
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
        };
        let client = Client::build(http.clone(), config).with_http_service(service);
        Ok(OpenAiModel { client, http, endpoint })
    }

    /// Model ids that the server lists.
    ///
    /// # Errors
    /// As a call's.
    pub async fn list(&self) -> Result<Vec<String>, CallError> {
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
        let ids = json["data"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|model| model["id"].as_str().map(str::to_owned));
        Ok(ids.collect())
    }

    async fn attempt(&self, request: &Request) -> Result<Completion, CallError> {
        let started = Instant::now();
        let limit = request.timeout.unwrap_or(self.endpoint.timeout);
        let chat = self.client.chat();
        let answer = chat.create_byot::<_, Answer>(body(request));
        // The body is read after the service has returned, so the limit is set around both.
        let answer = match tokio::time::timeout(limit, answer).await {
            Ok(answer) => answer.map_err(|error| self.from_library(error, request, limit))?,
            Err(_) => return Err(self.timed_out(limit)),
        };
        let latency_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.completion(answer, request, latency_ms)
    }

    fn completion(&self, answer: Answer, request: &Request, latency_ms: u64) -> Result<Completion, CallError> {
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
        let Some(choice) = answer.choices.into_iter().flatten().next() else {
            return Err(self.error(
                ErrorClass::BadAnswer,
                format!("model `{}` answered without any choice", request.model),
            ));
        };
        let finish_reason = choice.finish_reason;
        let text = choice
            .message
            .and_then(|message| message.content)
            .map(Content::into_text)
            .unwrap_or_default();
        if text.trim().is_empty() {
            let why = finish_reason.as_deref().unwrap_or("none given");
            let (class, hint) = match why {
                "content_filter" => (ErrorClass::ContentFilter, ""),
                "length" => (
                    ErrorClass::BadRequest,
                    "; all of max_tokens went into reasoning: raise it",
                ),
                _ => (ErrorClass::BadAnswer, ""),
            };
            return Err(self.error(
                class,
                format!(
                    "model `{}` answered without text (finish reason: {why}){hint}",
                    request.model
                ),
            ));
        }
        let usage = answer.usage.unwrap_or_default();
        Ok(Completion {
            text,
            finish_reason,
            usage: Usage {
                prompt: usage.prompt_tokens,
                cached_prompt: usage.prompt_tokens_details.and_then(|details| details.cached_tokens),
                completion: usage.completion_tokens,
                reasoning: usage
                    .completion_tokens_details
                    .and_then(|details| details.reasoning_tokens),
            },
            served_model: answer.model,
            fingerprint: answer.system_fingerprint,
            latency_ms,
            attempts: 1,
            cached: false,
        })
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
        let (class, words) = classify(refusal.status, &refusal.body);
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
            retry_after: refusal.retry_after,
            attempts: 1,
        }
    }

    fn error(&self, class: ErrorClass, message: String) -> CallError {
        CallError {
            class,
            message: self.redact(&message),
            status: None,
            retry_after: None,
            attempts: 1,
        }
    }

    /// Servers may repeat the key in their message.
    fn redact(&self, text: &str) -> String {
        match &self.endpoint.key {
            Some(key) if key.expose_secret().len() >= 4 => text.replace(key.expose_secret(), "[key]"),
            _ => text.to_owned(),
        }
    }
}

impl Model for OpenAiModel {
    fn complete<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Completion, CallError>> {
        Box::pin(self.attempt(request))
    }
}

fn body(request: &Request) -> Json {
    let mut body = json!({ "model": request.model, "messages": request.messages, "stream": false });
    let mut set = |name: &str, value: Option<Json>| {
        if let Some(value) = value {
            body[name] = value;
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
    body
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
        let (http, timeout) = (self.http.clone(), self.timeout);
        Box::pin(async move {
            let mut request = factory.build().await?;
            // An outer limit around the whole attempt is usually shorter; this one ends a connection nobody waits for.
            request
                .timeout_mut()
                .get_or_insert(timeout.max(Duration::from_mins(10)));
            let mut response = http.execute(request).await.map_err(OpenAIError::Reqwest)?;
            if response.status().is_success() {
                return Ok(response);
            }
            let status = response.status().as_u16();
            let wait = response
                .headers()
                .get(reqwest::header::RETRY_AFTER)
                .and_then(|value| value.to_str().ok())
                .and_then(|value| retry_after(value, jiff::Timestamp::now()));
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
    usage: Option<RawUsage>,
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

#[derive(Debug, Default, Deserialize)]
struct RawUsage {
    #[serde(default)]
    prompt_tokens: Option<u64>,
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    prompt_tokens_details: Option<PromptDetails>,
    #[serde(default)]
    completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Debug, Default, Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
struct CompletionDetails {
    #[serde(default)]
    reasoning_tokens: Option<u64>,
}
