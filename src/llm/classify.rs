//! What a failed call means: one table from a server's status, codes and words to an error class, and from the class to what
//! to do about it.

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
    /// The server does not know a parameter; the client goes on without it.
    UnsupportedParameter,
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
    /// One call after the other fails: the server is down.
    Outage,
    /// The budget allows no further call.
    Budget,
    /// Only the cache may answer, and it has no answer.
    NotCached,
    /// The user wants to stop.
    Interrupted,
    /// Something on this machine prevents calls (a cache that cannot be written).
    Stopped,
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
    /// Name in traces and reports, and what follows.
    fn row(self) -> (&'static str, Action) {
        use Action::{FailCall, FailRun, Retry};
        match self {
            ErrorClass::RateLimited => ("rate_limited", Retry),
            ErrorClass::Server => ("server", Retry),
            ErrorClass::Connection => ("connection", Retry),
            ErrorClass::Timeout => ("timeout", Retry),
            ErrorClass::BadAnswer => ("bad_answer", Retry),
            ErrorClass::UnsupportedParameter => ("unsupported_parameter", Retry),
            ErrorClass::BadRequest => ("bad_request", FailCall),
            ErrorClass::ContextLength => ("context_length", FailCall),
            ErrorClass::ContentFilter => ("content_filter", FailCall),
            ErrorClass::Unauthorized => ("unauthorized", FailRun),
            ErrorClass::ModelNotFound => ("model_not_found", FailRun),
            ErrorClass::WrongAddress => ("wrong_address", FailRun),
            ErrorClass::QuotaExhausted => ("quota_exhausted", FailRun),
            ErrorClass::Unreachable => ("unreachable", FailRun),
            ErrorClass::Outage => ("outage", FailRun),
            ErrorClass::Budget => ("budget", FailRun),
            ErrorClass::NotCached => ("not_cached", FailRun),
            ErrorClass::Interrupted => ("interrupted", FailRun),
            ErrorClass::Stopped => ("stopped", FailRun),
        }
    }

    pub fn action(self) -> Action {
        self.row().1
    }

    /// As traces and reports name it.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// Whether it may be gone when the same is asked later.
    pub fn passes(self) -> bool {
        self.action() == Action::Retry || matches!(self, ErrorClass::Outage | ErrorClass::Unreachable)
    }
}

/// What a non-2xx answer means.
#[derive(Debug, Clone, PartialEq)]
pub struct Classified {
    pub class: ErrorClass,
    /// The server's own words, on one line.
    pub words: String,
    /// How long the body asks to wait.
    pub wait: Option<Duration>,
    /// The parameter that the words are about.
    pub parameter: Option<String>,
}

/// Which statuses a row is for.
#[derive(Debug, Clone, Copy)]
enum On {
    Any,
    These(&'static [u16]),
    From(u16),
    Between(u16, u16),
}

impl On {
    fn holds(self, status: u16) -> bool {
        match self {
            On::Any => true,
            On::These(statuses) => statuses.contains(&status),
            On::From(first) => status >= first,
            On::Between(first, last) => (first..=last).contains(&status),
        }
    }
}

/// A row of the table: an answer fits where its status does, and one of the codes is among its codes or one of the phrases
/// in its text. A row without codes and phrases fits by status alone.
struct Row {
    on: On,
    /// Exact, in lower case: `error.code`, `error.type`, `error.status`, reasons in `error.details`.
    codes: &'static [&'static str],
    /// Anywhere in the body, in lower case.
    phrases: &'static [&'static str],
    class: ErrorClass,
}

const fn row(on: On, codes: &'static [&'static str], phrases: &'static [&'static str], class: ErrorClass) -> Row {
    Row {
        on,
        codes,
        phrases,
        class,
    }
}

/// The first row that fits decides.
const TABLE: &[Row] = &[
    // Quotas that a minute's wait does not bring back: OpenAI's account, OpenRouter's and DeepSeek's credits, Gemini's and
    // Groq's allowances for a day. Before the rates, since all come as 429 too. That a plan or billing is mentioned says
    // nothing: OpenAI and Gemini do so for the limit of a minute as well.
    row(On::These(&[402]), &[], &[], ErrorClass::QuotaExhausted),
    row(
        On::These(&[400, 403, 429]),
        &[
            "insufficient_quota",
            "billing_hard_limit_reached",
            "billing_not_active",
            "access_terminated",
            "insufficient_balance",
        ],
        &[
            "insufficient_quota",
            "credit balance is too low",
            "insufficient credits",
            "insufficient balance",
            "out of credits",
            "perday",
            "per day",
            "tokens per day",
            "requests per day",
            "(tpd)",
            "(rpd)",
            "daily limit",
            "daily quota",
            "free-models-per-day",
        ],
        ErrorClass::QuotaExhausted,
    ),
    // Groq answers 413 to a request that is larger than the tokens of a whole minute: no wait makes it smaller.
    row(On::These(&[413]), &[], &[], ErrorClass::ContextLength),
    row(On::These(&[429]), &[], &[], ErrorClass::RateLimited),
    // Too long a prompt, in the words of OpenAI, Azure, vLLM (old and new), llama.cpp, Gemini, Ollama, Anthropic, Mistral,
    // Groq, TGI, Bedrock; llama.cpp and gateways say it with 500.
    row(
        On::These(&[400, 404, 422, 500, 503]),
        &[
            "context_length_exceeded",
            "exceed_context_size_error",
            "context_window_exceeded",
            "string_above_max_length",
        ],
        &[
            "context length",
            "context_length",
            "maximum context",
            "context window",
            "context size",
            "exceed_context",
            "too many tokens",
            "prompt is too long",
            "input is too long",
            "maximum model length",
            "prompt too long",
            "exceeds the maximum number of tokens",
            "input token count",
            "max_new_tokens` must be",
            "too large for model",
            "reduce the length of the messages",
            "longer than the maximum",
            "input length and `max_tokens` exceed",
        ],
        ErrorClass::ContextLength,
    ),
    // A prompt or answer that a filter refuses; the next example may pass. Before 403, which OpenRouter uses for it.
    row(
        On::These(&[400, 403, 422, 451]),
        &[
            "content_filter",
            "content_policy_violation",
            "responsibleaipolicyviolation",
            "data_inspection_failed",
            "moderation",
        ],
        &[
            "content management policy",
            "content policy",
            "responsibleai",
            "usage policies",
            "requires moderation",
            "was flagged",
            "input flagged",
            "violating our usage policy",
            "blocked by safety",
            "safety settings",
            "inappropriate content",
        ],
        ErrorClass::ContentFilter,
    ),
    // Google's compatible endpoint answers 400 to a wrong key.
    row(
        On::These(&[400]),
        &["api_key_invalid", "invalid_api_key"],
        &[
            "api key not valid",
            "invalid api key",
            "incorrect api key",
            "api key expired",
            "missing api key",
        ],
        ErrorClass::Unauthorized,
    ),
    row(On::These(&[401, 403, 407]), &[], &[], ErrorClass::Unauthorized),
    // A parameter that the server does not know. The value of one that it knows (a temperature that a model does not allow)
    // is another matter: to leave it out would change the experiment.
    row(
        On::These(&[400, 422, 501]),
        &["unsupported_parameter", "unknown_parameter"],
        &[
            "unsupported parameter",
            "unknown parameter",
            "unrecognized request argument",
            "unknown name",
            "extra inputs are not permitted",
            "extra fields not permitted",
            "is not supported with this model. use",
            "response_format is not supported",
            "does not support response_format",
            "'response_format' of type 'json_schema' is not supported",
            "response format `json_schema`",
            "response_format type is unavailable",
            "does not support structured output",
            "json_schema is not supported",
            "logprobs is not supported",
            "logprobs are not supported",
            "does not support logprobs",
            "does not return logprobs",
            "multiple candidates is not enabled",
            "only n = 1 is supported",
            "n > 1 is not supported",
            "only one completion choice is allowed",
            "'n' must be at most 1",
            "is not supported by this model",
        ],
        ErrorClass::UnsupportedParameter,
    ),
    // No such model: OpenAI, vLLM, Ollama, Gemini, Azure; OpenRouter and LM Studio say it with 400, some gateways with 5xx.
    row(
        On::Any,
        &[
            "model_not_found",
            "deploymentnotfound",
            "model_not_available",
            "unknown_model",
        ],
        &[
            "model not found",
            "unknown model",
            "invalid model name",
            "not a valid model id",
            "no such model",
            "try pulling it first",
            "is not found for api version",
            "no endpoints found for",
        ],
        ErrorClass::ModelNotFound,
    ),
    row(
        On::These(&[400, 404]),
        &[],
        &[
            "model `",
            "model '",
            "model \"",
            "models/",
            "the model",
            "no model",
            "model does not exist",
        ],
        // For 400 see `is_about_absence`.
        ErrorClass::ModelNotFound,
    ),
    row(On::These(&[404, 405]), &[], &[], ErrorClass::WrongAddress),
    row(On::Between(300, 399), &[], &[], ErrorClass::WrongAddress),
    row(On::These(&[408, 409, 425, 499]), &[], &[], ErrorClass::Server),
    row(On::From(500), &[], &[], ErrorClass::Server),
    row(On::Any, &[], &[], ErrorClass::BadRequest),
];

/// A wait up to this is one for a rate, whatever else the words say; beyond it a quota is used up for now.
const SHORT_WAIT: Duration = Duration::from_mins(2);

/// The class of a non-2xx answer, and what else its body says.
pub fn classify(status: u16, body: &str) -> Classified {
    let json: Option<Json> = serde_json::from_str(body).ok();
    let error = json.as_ref().map(innermost);
    let words = server_words(json.as_ref(), body);
    let lower = body.to_lowercase();
    let codes = error.map(codes_of).unwrap_or_default();
    let wait = error.and_then(retry_delay).or_else(|| wait_in_words(&words));
    let class = TABLE
        .iter()
        .find(|row| {
            let named = row.codes.is_empty() && row.phrases.is_empty()
                || row.codes.iter().any(|code| codes.iter().any(|found| found == code))
                || row.phrases.iter().any(|phrase| lower.contains(phrase));
            row.on.holds(status) && named && is_meant(row, status, &lower, &codes, wait)
        })
        .map_or(ErrorClass::BadRequest, |row| row.class);
    Classified {
        class,
        parameter: (class == ErrorClass::UnsupportedParameter)
            .then(|| parameter_of(error, &lower))
            .flatten(),
        words,
        wait,
    }
}

/// What the table alone cannot say.
fn is_meant(row: &Row, status: u16, lower: &str, codes: &[String], wait: Option<Duration>) -> bool {
    match row.class {
        ErrorClass::QuotaExhausted if status == 429 => {
            let by_code = codes.iter().any(|code| row.codes.contains(&code.as_str()));
            let for_a_day = ["perday", "per day", "(tpd)", "(rpd)", "daily", "per-day"]
                .iter()
                .any(|word| lower.contains(word));
            // The limit of a minute, told with the words of a quota.
            let for_a_minute = ["per minute", "perminute", "(rpm)", "(tpm)", "per second", "per-min"]
                .iter()
                .any(|word| lower.contains(word))
                || wait.is_some_and(|wait| wait <= SHORT_WAIT);
            by_code && !codes.iter().any(|code| code == "rate_limit_exceeded") || for_a_day || !for_a_minute
        }
        ErrorClass::ModelNotFound if status == 400 && row.codes.is_empty() => [
            "does not exist",
            "not found",
            "unknown",
            "not available",
            "invalid model",
        ]
        .iter()
        .any(|word| lower.contains(word)),
        ErrorClass::ModelNotFound if status == 503 => !lower.contains("loading"),
        ErrorClass::UnsupportedParameter => {
            // "Unsupported value: 'temperature' does not support 0 with this model."
            !lower.contains("unsupported value")
        }
        _ => true,
    }
}

/// The object that describes the error, inside `{error: {…}}`, a list, or the whole.
fn innermost(json: &Json) -> &Json {
    match json {
        Json::Array(items) => items.first().map_or(json, innermost),
        Json::Object(fields) => match fields.get("error") {
            Some(error @ (Json::Object(_) | Json::Array(_))) => innermost(error),
            _ => json,
        },
        _ => json,
    }
}

fn codes_of(error: &Json) -> Vec<String> {
    let mut codes = Vec::new();
    let mut add = |value: &Json| {
        if let Some(code) = value.as_str() {
            codes.push(code.to_lowercase());
        }
    };
    for key in ["code", "type", "status", "reason"] {
        add(&error[key]);
    }
    add(&error["innererror"]["code"]);
    for detail in error["details"].as_array().into_iter().flatten() {
        add(&detail["reason"]);
    }
    codes
}

/// Gemini's `details: [{"@type": "…RetryInfo", "retryDelay": "34s"}]`.
fn retry_delay(error: &Json) -> Option<Duration> {
    error["details"]
        .as_array()
        .into_iter()
        .flatten()
        .find_map(|detail| detail["retryDelay"].as_str())
        .and_then(duration_words)
}

/// "try again in 7m12.5s", "retry after 12 seconds", "in 6 minutes".
fn wait_in_words(words: &str) -> Option<Duration> {
    let lower = words.to_lowercase();
    let after = [
        "try again in ",
        "retry in ",
        "retry after ",
        "try again after ",
        "wait ",
    ]
    .iter()
    .find_map(|phrase| lower.find(phrase).map(|at| &lower[at + phrase.len()..]))?;
    let mut words = after.split_whitespace();
    let first = words.next()?.trim_end_matches(['.', ',', ';']);
    if let Ok(number) = first.parse::<f64>() {
        let unit = words.next().unwrap_or("seconds");
        let seconds = match unit.trim_end_matches(['.', ',', ';']) {
            "ms" | "millisecond" | "milliseconds" => number / 1000.0,
            "minute" | "minutes" | "min" => number * 60.0,
            "hour" | "hours" => number * 3600.0,
            _ => number,
        };
        return Duration::try_from_secs_f64(seconds).ok();
    }
    duration_words(first)
}

/// `34s`, `1.5s`, `850ms`, `6m0s`, `2h3m`, or a bare number of seconds.
pub fn duration_words(text: &str) -> Option<Duration> {
    let mut rest = text.trim();
    let mut seconds = 0.0;
    let mut any = false;
    while !rest.is_empty() {
        let digits = rest
            .find(|letter: char| !(letter.is_ascii_digit() || letter == '.'))
            .unwrap_or(rest.len());
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let letters = rest
            .find(|letter: char| !letter.is_ascii_alphabetic())
            .unwrap_or(rest.len());
        seconds += number
            * match &rest[..letters] {
                "" | "s" => 1.0,
                "ms" => 0.001,
                "us" | "ns" => 0.0,
                "m" => 60.0,
                "h" => 3600.0,
                "d" => 86_400.0,
                _ => return None,
            };
        rest = &rest[letters..];
        any = true;
    }
    any.then(|| Duration::try_from_secs_f64(seconds).ok()).flatten()
}

/// The parameter that is not known: as the server names it, or the one of ours that its words mention.
fn parameter_of(error: Option<&Json>, lower: &str) -> Option<String> {
    let named = error
        .and_then(|error| error["param"].as_str())
        .map(|name| name.split('.').next().unwrap_or(name).to_owned());
    named.filter(|name| !name.is_empty()).or_else(|| {
        [
            ("max_tokens", &["max_tokens"][..]),
            (
                "response_format",
                &["response_format", "response format", "json_schema", "structured output"],
            ),
            ("logprobs", &["logprobs"]),
            (
                "n",
                &[
                    "'n'",
                    "`n`",
                    "\"n\"",
                    "n =",
                    "n >",
                    "multiple candidates",
                    "completion choice",
                ],
            ),
            ("seed", &["seed"]),
        ]
        .into_iter()
        .find(|(_, words)| words.iter().any(|word| lower.contains(word)))
        .map(|(name, _)| name.to_owned())
    })
}

/// The message inside an error body of whatever shape: `{error: {message}}`, `{error: "…"}`, `{message}`, `{detail}`,
/// a list of these, plain text, an HTML page.
fn server_words(json: Option<&Json>, body: &str) -> String {
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
    let text = json.and_then(find).unwrap_or_else(|| strip_tags(body));
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
    Some(until(when, now))
}

fn until(when: jiff::Timestamp, now: jiff::Timestamp) -> Duration {
    Duration::try_from(when.duration_since(now)).unwrap_or(Duration::ZERO)
}

/// What an answer's headers say of the server's limits.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RateHint {
    pub remaining_requests: Option<u64>,
    /// Until there are requests again.
    pub reset_requests: Option<Duration>,
    pub remaining_tokens: Option<u64>,
    pub reset_tokens: Option<Duration>,
    pub retry_after: Option<Duration>,
}

/// Reads the headers of OpenAI and those who do as it does, of Anthropic, and of OpenRouter.
pub fn rate_hint<'a>(header: impl Fn(&str) -> Option<&'a str>, now: jiff::Timestamp) -> RateHint {
    let count = |names: &[&str]| {
        names
            .iter()
            .find_map(|name| header(name))
            .and_then(|value| value.trim().parse().ok())
    };
    let reset = |names: &[&str]| {
        let value = names.iter().find_map(|name| header(name))?.trim();
        // A moment in RFC 3339, milliseconds since 1970, or a time to wait.
        if let Ok(when) = value.parse::<jiff::Timestamp>() {
            return Some(until(when, now));
        }
        match value.parse::<i64>() {
            Ok(milliseconds) if milliseconds > 1_000_000_000_000 => {
                let when = jiff::Timestamp::from_millisecond(milliseconds).ok()?;
                Some(until(when, now))
            }
            _ => duration_words(value),
        }
    };
    let milliseconds = header("retry-after-ms").and_then(|value| value.trim().parse::<f64>().ok());
    RateHint {
        remaining_requests: count(&[
            "x-ratelimit-remaining-requests",
            "anthropic-ratelimit-requests-remaining",
            "x-ratelimit-remaining",
        ]),
        reset_requests: reset(&[
            "x-ratelimit-reset-requests",
            "anthropic-ratelimit-requests-reset",
            "x-ratelimit-reset",
        ]),
        remaining_tokens: count(&["x-ratelimit-remaining-tokens", "anthropic-ratelimit-tokens-remaining"]),
        reset_tokens: reset(&["x-ratelimit-reset-tokens", "anthropic-ratelimit-tokens-reset"]),
        retry_after: milliseconds
            .and_then(|milliseconds| Duration::try_from_secs_f64(milliseconds / 1000.0).ok())
            .or_else(|| header("retry-after").and_then(|value| retry_after(value, now))),
    }
}

#[cfg(test)]
#[path = "classify_tests.rs"]
mod tests;
