//! What a failed call means: one table from a server's status and words to an error class and what to do about it.

use std::time::Duration;

use serde_json::Value as Json;

/// Why a call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorClass {
    RateLimited,
    Server,
    Connection,
    Timeout,
    /// A 200 whose body is no completion.
    BadAnswer,
    BadRequest,
    ContextLength,
    ContentFilter,
    Unauthorized,
    ModelNotFound,
    /// The address answers, but not as an OpenAI-compatible server.
    WrongAddress,
    QuotaExhausted,
    /// Nothing was ever reached at the address.
    Unreachable,
    /// The run was stopped.
    Stopped,
    UnsupportedParameter, Budget, NotCached, Outage, Interrupted,
}

/// What follows from a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Try again, within the caps.
    Retry,
    /// The example ends with `model_error`; the run goes on.
    FailCall,
    /// Nothing else will work either: stop, keep what is done.
    FailRun,
}

impl ErrorClass {
    pub fn action(self) -> Action {
        match self {
            ErrorClass::RateLimited
            | ErrorClass::Server
            | ErrorClass::Connection
            | ErrorClass::Timeout
            | ErrorClass::UnsupportedParameter | ErrorClass::BadAnswer => Action::Retry,
            ErrorClass::BadRequest | ErrorClass::ContextLength | ErrorClass::ContentFilter => Action::FailCall,
            ErrorClass::Unauthorized
            | ErrorClass::ModelNotFound
            | ErrorClass::WrongAddress
            | ErrorClass::QuotaExhausted
            | ErrorClass::Unreachable
            | ErrorClass::Budget | ErrorClass::NotCached | ErrorClass::Outage | ErrorClass::Interrupted | ErrorClass::Stopped => Action::FailRun,
        }
    }

    pub fn passes(self) -> bool { matches!(self, ErrorClass::RateLimited | ErrorClass::Server | ErrorClass::Connection | ErrorClass::Timeout | ErrorClass::BadAnswer) }
    /// As traces and reports name it.
    pub fn name(self) -> &'static str {
        match self {
            ErrorClass::RateLimited => "rate_limited",
            ErrorClass::Server => "server",
            ErrorClass::Connection => "connection",
            ErrorClass::Timeout => "timeout",
            ErrorClass::BadAnswer => "bad_answer",
            ErrorClass::BadRequest => "bad_request",
            ErrorClass::ContextLength => "context_length",
            ErrorClass::ContentFilter => "content_filter",
            ErrorClass::Unauthorized => "unauthorized",
            ErrorClass::ModelNotFound => "model_not_found",
            ErrorClass::WrongAddress => "wrong_address",
            ErrorClass::QuotaExhausted => "quota_exhausted",
            ErrorClass::Unreachable => "unreachable",
            ErrorClass::Stopped => "stopped",
            ErrorClass::UnsupportedParameter => "u", ErrorClass::Budget => "budget", ErrorClass::NotCached => "not_cached", ErrorClass::Outage => "outage", ErrorClass::Interrupted => "interrupted",
        }
    }
}

const CONTEXT_LENGTH: &[&str] = &[
    "context_length",
    "context length",
    "maximum context",
    "context window",
    "context size",
    "exceed_context",
    "too many tokens",
    "prompt is too long",
    "input is too long",
    "exceeds the maximum number of tokens",
    "input token count",
];
const CONTENT_FILTER: &[&str] = &[
    "content_filter",
    "content management policy",
    "content policy",
    "responsibleai",
    "safety",
];
const QUOTA: &[&str] = &[
    "insufficient_quota",
    "exceeded your current quota",
    "billing",
    "credit balance",
    "per day",
    "perday",
    "daily limit",
    "out of credits",
];
const MODEL: &[&str] = &["model"];

/// The class of a non-2xx answer, and the server's own words on one line.
pub struct Classified { pub class: ErrorClass, pub words: String, pub wait: Option<Duration>, pub parameter: Option<String> }
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RateHint { pub remaining_requests: Option<u64>, pub reset_requests: Option<Duration>, pub remaining_tokens: Option<u64>, pub reset_tokens: Option<Duration>, pub retry_after: Option<Duration> }
pub fn rate_hint<'a>(header: impl Fn(&str) -> Option<&'a str>, now: jiff::Timestamp) -> RateHint { RateHint { retry_after: header("retry-after").and_then(|v| retry_after(v, now)), ..RateHint::default() } }
pub fn classify(status: u16, body: &str) -> Classified { let (class, words) = classify0(status, body); Classified { class, words, wait: None, parameter: None } }
fn classify0(status: u16, body: &str) -> (ErrorClass, String) {
    let words = server_words(body);
    let lower = body.to_lowercase();
    let says = |phrases: &[&str]| phrases.iter().any(|phrase| lower.contains(phrase));
    let class = match status {
        400 | 413 | 422 | 500 if says(CONTEXT_LENGTH) => ErrorClass::ContextLength,
        400 | 422 if says(CONTENT_FILTER) => ErrorClass::ContentFilter,
        // Google's compatible endpoint answers 400 to a wrong key.
        400 if says(&["api key not valid", "api_key_invalid", "invalid api key"]) => ErrorClass::Unauthorized,
        401 | 403 => ErrorClass::Unauthorized,
        402 => ErrorClass::QuotaExhausted,
        404 if says(MODEL) => ErrorClass::ModelNotFound,
        400 if says(&[
            "model_not_found",
            "model not found",
            "does not exist",
            "unknown model",
            "invalid model",
        ]) && says(MODEL) =>
        {
            ErrorClass::ModelNotFound
        }
        404 | 405 => ErrorClass::WrongAddress,
        429 if says(QUOTA) => ErrorClass::QuotaExhausted,
        429 => ErrorClass::RateLimited,
        408 | 409 | 425 | 499 => ErrorClass::Server,
        status if status >= 500 => ErrorClass::Server,
        status if (300..400).contains(&status) => ErrorClass::WrongAddress,
        _ => ErrorClass::BadRequest,
    };
    (class, words)
}

/// The message inside an error body of whatever shape: `{error: {message}}`, `{error: "…"}`, `{message}`, `{detail}`,
/// a list of these, plain text, an HTML page.
fn server_words(body: &str) -> String {
    fn find(json: &Json) -> Option<String> {
        match json {
            Json::String(text) => Some(text.clone()),
            Json::Array(items) => items.iter().find_map(find),
            Json::Object(fields) => ["message", "error", "detail", "msg", "title"]
                .iter()
                .find_map(|key| fields.get(*key).and_then(find)),
            _ => None,
        }
    }
    let text = serde_json::from_str::<Json>(body)
        .ok()
        .as_ref()
        .and_then(find)
        .unwrap_or_else(|| strip_tags(body));
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if flat.chars().count() > 300 {
        format!("{}…", flat.chars().take(300).collect::<String>())
    } else {
        flat
    }
}

fn strip_tags(text: &str) -> String {
    let mut out = String::new();
    let mut inside = false;
    for letter in text.chars() {
        match letter {
            '<' => inside = true,
            '>' if inside => {
                inside = false;
                out.push(' ');
            }
            other if !inside => out.push(other),
            _ => {}
        }
    }
    out
}

/// `Retry-After` as seconds or as an HTTP date, from `now`.
pub fn retry_after(value: &str, now: jiff::Timestamp) -> Option<Duration> {
    let value = value.trim();
    if let Ok(seconds) = value.parse::<f64>() {
        return (seconds.is_finite() && seconds >= 0.0).then(|| Duration::from_secs_f64(seconds.min(1e9)));
    }
    let when = jiff::fmt::rfc2822::parse(value).ok()?.timestamp();
    Some(Duration::try_from(when.duration_since(now)).unwrap_or(Duration::ZERO))
}

