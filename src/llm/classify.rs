//! What a failed call means: one table from a server's status, codes and words to an error class.
//!
//! In: the status and the body of a refusal. Out: a class, the server's words on one line,
//! how long it asks to wait, which parameter it does not know. It knows no client, no retry and no clock.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::error_body::{LONG_WAIT, LONGEST_WAIT, PAGE, PARAMETERS, Signs, one_line};

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
    /// The server does not know a parameter; the client can ask again without it.
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
    /// Too many calls in a row failed for good.
    Outage,
    /// The run's own budget is spent.
    Budget,
    /// Only recorded answers were allowed, and there is none.
    NotCached,
    /// The user asked to stop.
    Interrupted,
    /// A fault on this machine, such as a cache that cannot be written.
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
    /// What to do about it.
    pub fn action(self) -> Action {
        self.meaning().1
    }

    /// As traces and reports name it.
    pub fn name(self) -> &'static str {
        self.meaning().0
    }

    /// Whether it may be gone later, so that the same call is worth another run.
    pub fn passes(self) -> bool {
        matches!(
            self,
            ErrorClass::RateLimited
                | ErrorClass::Server
                | ErrorClass::Connection
                | ErrorClass::Timeout
                | ErrorClass::BadAnswer
                | ErrorClass::Outage
                | ErrorClass::Unreachable
        )
    }

    fn meaning(self) -> (&'static str, Action) {
        match self {
            ErrorClass::RateLimited => ("rate_limited", Action::Retry),
            ErrorClass::Server => ("server", Action::Retry),
            ErrorClass::Connection => ("connection", Action::Retry),
            ErrorClass::Timeout => ("timeout", Action::Retry),
            ErrorClass::BadAnswer => ("bad_answer", Action::Retry),
            ErrorClass::UnsupportedParameter => ("unsupported_parameter", Action::Retry),
            ErrorClass::BadRequest => ("bad_request", Action::FailCall),
            ErrorClass::ContextLength => ("context_length", Action::FailCall),
            ErrorClass::ContentFilter => ("content_filter", Action::FailCall),
            ErrorClass::Unauthorized => ("unauthorized", Action::FailRun),
            ErrorClass::ModelNotFound => ("model_not_found", Action::FailRun),
            ErrorClass::WrongAddress => ("wrong_address", Action::FailRun),
            ErrorClass::QuotaExhausted => ("quota_exhausted", Action::FailRun),
            ErrorClass::Unreachable => ("unreachable", Action::FailRun),
            ErrorClass::Outage => ("outage", Action::FailRun),
            ErrorClass::Budget => ("budget", Action::FailRun),
            ErrorClass::NotCached => ("not_cached", Action::FailRun),
            ErrorClass::Interrupted => ("interrupted", Action::FailRun),
            ErrorClass::Stopped => ("stopped", Action::FailRun),
        }
    }
}

/// What a refusal means.
#[derive(Debug, Clone, PartialEq)]
pub struct Classified {
    pub class: ErrorClass,
    /// The server's own words, on one line of at most 301 letters.
    pub words: String,
    /// How long the body asks to wait.
    pub wait: Option<Duration>,
    /// The parameter refused, as requests name it; only with [`ErrorClass::UnsupportedParameter`].
    pub parameter: Option<String>,
}

/// One line of the table. It holds where the status is among `statuses` and, unless both lists are empty, one of `codes`
/// was given or one of `phrases` said; and, unless `about` is empty, one of those parameters is what the server means.
struct Row {
    statuses: &'static [RangeInclusive<u16>],
    /// Whose answer it is.
    #[expect(dead_code, reason = "for whoever reads the table")]
    from: &'static str,
    /// Whole codes in lower case: `error.code`, `error.type`, `error.status`, a detail's `reason`.
    codes: &'static [&'static str],
    /// Parts of the server's sentences in lower case.
    phrases: &'static [&'static str],
    about: &'static [&'static str],
    class: ErrorClass,
}

/// Another value of these is another experiment: a refused value is never adapted.
const SAMPLING: &[&str] = &["temperature", "top_p"];
const ANY: &[&str] = &[];

const fn row(
    statuses: &'static [RangeInclusive<u16>],
    from: &'static str,
    codes: &'static [&'static str],
    phrases: &'static [&'static str],
    class: ErrorClass,
) -> Row {
    Row {
        statuses,
        from,
        codes,
        phrases,
        about: ANY,
        class,
    }
}

const CLIENT: RangeInclusive<u16> = 400..=499;
const SERVER: RangeInclusive<u16> = 500..=599;

/// The first row that holds decides, so order is meaning: what is certain (codes) before what is likely (words), what is
/// permanent before what passes, and each status's plain meaning last.
#[rustfmt::skip]
const TABLE: &[Row] = &[
    // 1. The prompt does not fit. First, since servers say it under nearly every status, 500 included, and since their
    // sentences name parameters (`max_tokens`) and limits (TPM) that later rows look for.
    row(
        &[CLIENT, SERVER], "OpenAI, llama.cpp, Groq",
        &[
            "context_length_exceeded", "exceed_context_size_error", "model_context_window_exceeded",
            "string_above_max_length", "request_too_large",
        ],
        &[],
        ErrorClass::ContextLength,
    ),
    row(
        &[400..=400, 404..=404, 413..=413, 422..=422, SERVER],
        "OpenAI, Azure, vLLM, llama.cpp, Gemini, Ollama, Anthropic, Mistral, Groq, TGI, Bedrock, LM Studio, DashScope",
        &[],
        &[
            "context length", "context_length", "context window", "context size", "maximum context", "max context",
            "context the overflows", "context overflow", "maximum model length", "max_model_len",
            "maximum number of tokens allowed", "max_new_tokens` must be", "`inputs` must have less than",
            "reduce the length of the", "prompt is too long", "prompt too long", "input is too long",
            "input is too large", "too large for model", "too many tokens", "range of input length",
        ],
        ErrorClass::ContextLength,
    ),
    // One request that is larger than a minute's allowance never gets through, although it comes as a rate limit.
    row(
        &[413..=413, 429..=429], "OpenAI, Groq",
        &[],
        &[
            "request too large", "tokens must be reduced", "reduce your message size",
        ],
        ErrorClass::ContextLength,
    ),
    // 2. One prompt that the provider does not want. A locked account reads alike ("flagged for …") and ends the run.
    row(
        &[401..=401, 403..=403], "OpenAI, Anthropic",
        &["account_deactivated", "organization_deactivated"],
        &[
            "account has been", "organization has been", "account is not active", "deactivated", "suspended",
        ],
        ErrorClass::Unauthorized,
    ),
    row(
        &[CLIENT, SERVER], "OpenAI, Azure, Gemini, DashScope",
        &[
            "content_filter", "content_policy_violation", "responsibleaipolicyviolation", "moderation_blocked",
            "prohibited_content", "data_inspection_failed", "datainspectionfailed",
        ],
        &[],
        ErrorClass::ContentFilter,
    ),
    row(
        &[400..=400, 403..=403, 422..=422, 451..=451], "Azure, OpenAI, OpenRouter, DeepSeek, Mistral",
        &[],
        &[
            "content management policy", "content policy", "content filter", "usage polic", "flagged", "moderation",
            "safety", "prohibited content", "inappropriate content", "content exists risk",
        ],
        ErrorClass::ContentFilter,
    ),
    // 3. Money and quotas, by code: some come with 400, 403 or 500.
    row(
        &[CLIENT, SERVER], "OpenAI, Moonshot, DashScope, one-api, xAI",
        &[
            "insufficient_quota", "insufficient_user_quota", "insufficient_balance", "insufficient_credits",
            "billing_hard_limit_reached", "billing_not_active", "exceeded_current_quota_error", "payment_required",
            "arrearage", "personal-team-blocked:spending-limit",
        ],
        &[],
        ErrorClass::QuotaExhausted,
    ),
    // 4. Rates. A day's limit that is spent is told apart from a minute's by the quota's own name, whatever wait is given
    // (Gemini adds a delay of seconds to both; Groq's day is a sliding one).
    row(
        &[403..=403, 429..=429], "Gemini, Groq, OpenRouter, Azure",
        &[LONG_WAIT],
        &[
            "perday", "(tpd)", "(rpd)", "on tokens per day", "on requests per day", "free-models-per-day",
            "limit_rpd",
            // Gemini: this account never has any of it.
            "limit: 0,",
        ],
        ErrorClass::QuotaExhausted,
    ),
    // Then the minute: such answers add advice on plans, billing and daily limits, which means nothing.
    row(
        &[429..=429], "OpenAI, Groq, Gemini, OpenRouter, Azure, xAI",
        &[],
        &[
            "per minute", "per-minute", "perminute", "per_minute", "per min", "per-min", "per second", "persecond",
            "(tpm)", "(rpm)", "limit_rpm",
        ],
        ErrorClass::RateLimited,
    ),
    row(
        &[403..=403, 429..=429], "Cerebras, Cloudflare, GitHub Models, OpenRouter keys",
        &[],
        &[
            "per day", "daily limit", "daily quota", "daily request", "daily token", "daily free", "86400s",
            "weekly limit", "monthly limit", "key limit exceeded",
        ],
        ErrorClass::QuotaExhausted,
    ),
    row(
        &[429..=429], "OpenAI, Azure, Gemini, Mistral",
        &[
            "rate_limit_exceeded", "rate_limit_error", "rate_limited", "too_many_requests",
        ],
        &["try again in", "retry after", "retry in"],
        ErrorClass::RateLimited,
    ),
    // Neither "billing" nor "exceeded your current quota" is among these: Gemini says both of a minute's limit.
    row(
        &[400..=400, 402..=403, 412..=412, 429..=429],
        "Anthropic, OpenRouter, DeepSeek, xAI, Hugging Face, Fireworks",
        &[],
        &[
            "insufficient credit", "insufficient balance", "insufficient funds", "insufficient quota",
            "credit balance is too low", "out of credits", "have any credits", "used all available credits",
            "requires more credits", "included credits", "spending limit", "hard limit",
        ],
        ErrorClass::QuotaExhausted,
    ),
    row(&[429..=429], "everyone", &[], &[], ErrorClass::RateLimited),
    row(&[402..=402], "everyone", &[], &[], ErrorClass::QuotaExhausted),
    // 5. The model. A server that is still loading one is asked again; the others say so even with 403 or 500.
    row(
        &[SERVER], "llama.cpp, TGI, Hugging Face",
        &[],
        &[
            "loading model", "model not loaded", "currently loading", "model is loading",
        ],
        ErrorClass::Server,
    ),
    row(
        &[CLIENT, SERVER], "OpenAI, Azure, Groq, Together, Mistral, Hugging Face",
        &[
            "model_not_found", "modelnotfound", "deploymentnotfound", "model_not_available", "model_not_supported",
            "model_decommissioned", "dedicated_endpoint_not_running", "invalid_model", "unknown_model",
        ],
        &[],
        ErrorClass::ModelNotFound,
    ),
    // OpenAI names the path, in which the word "models" may stand.
    row(
        &[404..=404], "OpenAI, Go and Python servers",
        &[PAGE],
        &[
            "invalid url", "unknown url", "unknown request url", "page not found", "file not found", "no route",
        ],
        ErrorClass::WrongAddress,
    ),
    row(
        &[404..=404, 410..=410], "Ollama, vLLM, Gemini, Anthropic, OpenRouter, Azure",
        &[],
        &["model", "deployment", "no endpoints found", "no allowed providers"],
        ErrorClass::ModelNotFound,
    ),
    row(
        &[400..=400, 422..=422], "DeepSeek, OpenRouter, Mistral, Gemini, LiteLLM, LM Studio",
        &[],
        &[
            "model not found", "model not exist", "model does not exist", "not a valid model", "invalid model",
            "unknown model", "model name format", "no models loaded",
        ],
        ErrorClass::ModelNotFound,
    ),
    // 6. Keys and permissions. xAI and Gemini answer 400 to a wrong key, and Gemini to a wrong country.
    row(
        &[400..=400, 403..=403], "Gemini, xAI, OpenAI",
        &[
            "api_key_invalid", "invalid_api_key", "unsupported_country_region_territory", "permission_denied",
        ],
        &[
            "api key not valid", "invalid api key", "incorrect api key", "api key expired", "api key not found",
            "location is not supported", "country, region",
        ],
        ErrorClass::Unauthorized,
    ),
    row(&[401..=401, 407..=407], "everyone", &[], &[], ErrorClass::Unauthorized),
    // Whatever it says: nothing that is forbidden once will be allowed next. (Where other calls are, see `retry`.)
    row(&[403..=403], "everyone; proxies and firewalls answer with a page", &[], &[], ErrorClass::Unauthorized),
    // 7. Parameters. A schema at fault is the experiment's, and leaving it out would hide that.
    row(
        &[400..=400, 422..=422], "OpenAI",
        &["invalid_json_schema"],
        &["invalid schema"],
        ErrorClass::BadRequest,
    ),
    Row {
        statuses: &[400..=400, 422..=422],
        from: "OpenAI's reasoning models",
        codes: &["unsupported_value"],
        phrases: &["unsupported value", "only the default", "with this model. only"],
        about: SAMPLING,
        class: ErrorClass::BadRequest,
    },
    row(
        &[400..=400, 422..=422], "OpenAI",
        &["unsupported_parameter", "unknown_parameter"],
        &["unsupported parameter"],
        ErrorClass::UnsupportedParameter,
    ),
    Row {
        statuses: &[400..=400, 404..=404, 415..=415, 422..=422, 501..=501],
        from: "Mistral, Gemini, Groq, DeepSeek, LM Studio, llama.cpp, vLLM",
        codes: &["extra_forbidden", "unsupported_value"],
        phrases: &[
            "not supported", "unsupported", "does not support", "doesn't support", "is supported", "unknown name",
            "unknown parameter", "unknown field", "unrecognized", "extra inputs are not permitted", "not permitted",
            "not enabled", "not available", "unavailable", "not implemented", "number must be at most 1",
            "only one completion choice", "must be 'json_schema'",
        ],
        about: PARAMETERS,
        class: ErrorClass::UnsupportedParameter,
    },
    // 8. What each status says by itself.
    row(&[200..=299], "gateways", &[], &[], ErrorClass::BadAnswer),
    row(
        &[300..=399, 404..=405, 410..=410], "everyone",
        &[],
        &[],
        ErrorClass::WrongAddress,
    ),
    row(&[413..=413], "everyone", &[], &[], ErrorClass::ContextLength),
    row(
        &[CLIENT], "Anthropic, Mistral, Groq (498): overload in client's clothes",
        &[
            "overloaded_error", "engine_overloaded", "capacity_exceeded", "server_error",
        ],
        &["overloaded", "capacity exceeded"],
        ErrorClass::Server,
    ),
    row(
        &[408..=409, 424..=425, 498..=499, 500..=u16::MAX],
        "everyone; 424 a model's worker failed, 529 Anthropic is overloaded",
        &[],
        &[],
        ErrorClass::Server,
    ),
];

impl Row {
    fn holds(&self, status: u16, signs: &Signs) -> bool {
        let any_signs = self.codes.is_empty() && self.phrases.is_empty();
        self.statuses.iter().any(|range| range.contains(&status))
            && (any_signs
                || self.codes.iter().any(|code| signs.codes.contains(*code))
                || self.phrases.iter().any(|phrase| signs.said.contains(phrase)))
            && (self.about.is_empty()
                || signs
                    .parameter
                    .as_deref()
                    .is_some_and(|name| self.about.contains(&name)))
            && (self.class != ErrorClass::UnsupportedParameter || signs.parameter.is_some())
    }
}

/// The class of an answer that is no completion, from its status and body.
///
/// `asked` is the wait that the answer's headers ask for.
pub fn classify(status: u16, body: &str, asked: Option<Duration>) -> Classified {
    let mut signs = Signs::read(body);
    if asked.is_some_and(|wait| wait > LONGEST_WAIT) {
        signs.codes.insert(LONG_WAIT.to_owned());
    }
    // Gateways wrap a refusal into a 200; its own status stands inside.
    let status = signs.status.filter(|_| status < 300).unwrap_or(status);
    let class = TABLE
        .iter()
        .find(|row| row.holds(status, &signs))
        .map_or(ErrorClass::BadRequest, |row| row.class);
    Classified {
        class,
        words: one_line(&signs.words),
        wait: signs.wait,
        parameter: signs.parameter.filter(|_| class == ErrorClass::UnsupportedParameter),
    }
}

#[cfg(test)]
#[path = "classify_tests.rs"]
mod tests;
