//! Faults of servers at random, but reproducible: which request meets which fault is a pure function of a seed, the request
//! and how often it was asked before, whatever the order in which requests come. So a test can tell beforehand how each
//! call must end ([`FaultPlan::expected`]), and compare.
//!
//! In: a seed, a share of faults, weights. Out: a closure for the fault server, and predictions.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value as Json, json};

use super::server::{Digest, Reply};

/// What may go wrong with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// 429 without a word on when to come back.
    TooMany,
    /// 429 with `Retry-After` in seconds.
    TooManyWithRetryAfter,
    /// 429 with `Retry-After` as a date.
    TooManyWithDate,
    /// 502 with a proxy's page.
    BadGateway,
    /// 500 in OpenAI's words.
    InternalError,
    /// 503 in plain text.
    Unavailable,
    /// 529, as some providers say that they have too much to do.
    Overloaded529,
    /// Nothing comes; the client must give up by itself.
    Hang,
    Reset,
    Close,
    CutBody,
    BadJson,
    HtmlWith200,
    EmptyChoices,
    NullContent,
    /// A good answer without token counts.
    MissingUsage,
    /// A good answer that ended for a reason nobody knows.
    UnknownFinishReason,
    /// A good answer, a few bytes at a time.
    SlowDrip,
    /// The prompt is too long, in the words of one of several servers.
    ContextLength,
    /// Refused, or answered without text.
    ContentFilter,
    /// Half of the answer, ended by its length.
    Truncated,
}

/// What a client can make of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// There is an answer, perhaps a strange one.
    Answer,
    /// Another attempt may work. By its name as an error class.
    Passing(&'static str),
    /// No attempt ever works. By its name as an error class.
    Permanent(&'static str),
}

impl Fault {
    /// What follows for the call.
    pub fn effect(self) -> Effect {
        match self {
            Fault::TooMany | Fault::TooManyWithRetryAfter | Fault::TooManyWithDate => Effect::Passing("rate_limited"),
            Fault::BadGateway | Fault::InternalError | Fault::Unavailable | Fault::Overloaded529 => {
                Effect::Passing("server")
            }
            Fault::Hang => Effect::Passing("timeout"),
            Fault::Reset | Fault::Close | Fault::CutBody => Effect::Passing("connection"),
            Fault::BadJson | Fault::HtmlWith200 | Fault::EmptyChoices | Fault::NullContent => {
                Effect::Passing("bad_answer")
            }
            Fault::MissingUsage | Fault::UnknownFinishReason | Fault::SlowDrip | Fault::Truncated => Effect::Answer,
            Fault::ContextLength => Effect::Permanent("context_length"),
            Fault::ContentFilter => Effect::Permanent("content_filter"),
        }
    }

    fn is_permanent(self) -> bool {
        matches!(self.effect(), Effect::Permanent(_))
    }

    /// The reply instead of a good one. `wording` chooses among several ways of saying the same.
    fn reply(self, good: Reply, plan: &FaultPlan, wording: u64) -> Reply {
        match self {
            Fault::TooMany => Reply::error(429, "rate_limit_exceeded", "Rate limit reached for requests"),
            Fault::TooManyWithRetryAfter => Reply::plain(429, "text/plain", "slow down")
                .with_header("retry-after", plan.retry_after.as_secs_f64().to_string()),
            Fault::TooManyWithDate => {
                Reply::plain(429, "text/plain", "slow down").with_header("retry-after", http_date(plan.retry_after))
            }
            Fault::BadGateway => Reply::plain(
                502,
                "text/html",
                "<html><head><title>502 Bad Gateway</title></head><body><center><h1>502 Bad Gateway</h1></center></body></html>",
            ),
            Fault::InternalError => Reply::status(
                500,
                json!({ "error": {
                    "message": "The server had an error while processing your request. Sorry about that!",
                    "type": "server_error",
                    "param": null,
                    "code": null,
                } }),
            ),
            Fault::Unavailable => {
                Reply::plain(503, "text/plain", "upstream connect error or disconnect before headers")
            }
            Fault::Overloaded529 => Reply::status(
                529,
                json!({ "type": "error", "error": { "type": "overloaded_error", "message": "Overloaded" } }),
            ),
            Fault::Hang => Reply::Hang,
            Fault::Reset => Reply::Reset,
            Fault::Close => Reply::Close,
            Fault::CutBody => Reply::Cut(Box::new(good)),
            Fault::BadJson => Reply::bad_json(),
            Fault::HtmlWith200 => Reply::page(),
            Fault::EmptyChoices => Reply::empty_choices(),
            Fault::NullContent => Reply::finished(None, "stop"),
            Fault::MissingUsage => good_text(good, Reply::without_usage),
            Fault::UnknownFinishReason => good_text(good, |text| Reply::finished(Some(text), "because")),
            Fault::SlowDrip => Reply::Drip {
                pause: plan.drip,
                reply: Box::new(good),
            },
            Fault::ContextLength => chosen(CONTEXT_LENGTH, wording)(),
            Fault::ContentFilter => chosen(CONTENT_FILTER, wording)(),
            Fault::Truncated => good_text(good, |text| {
                let half = text.chars().count().div_ceil(2);
                let text: String = text.chars().take(half).collect();
                Reply::finished(Some(&text), "length")
            }),
        }
    }
}

/// Replies that are not a plain text stay as they are.
fn good_text(good: Reply, change: impl Fn(&str) -> Reply) -> Reply {
    match good {
        Reply::Text(text) => change(&text),
        Reply::Slow(wait, inner) => Reply::Slow(wait, Box::new(good_text(*inner, change))),
        other => other,
    }
}

/// OpenAI, vLLM, llama.cpp's server, Google's compatible endpoint.
const CONTEXT_LENGTH: &[fn() -> Reply] = &[
    || {
        Reply::error(
            400,
            "context_length_exceeded",
            "This model's maximum context length is 8192 tokens. However, your messages resulted in 9120 tokens.",
        )
    },
    || {
        Reply::status(
            400,
            json!({
                "object": "error",
                "message": "This model's maximum context length is 8192 tokens. However, you requested 9120 tokens.",
                "type": "BadRequestError",
                "param": null,
                "code": 400,
            }),
        )
    },
    || {
        Reply::status(
            400,
            json!({ "error": {
                "code": 400,
                "message": "the request exceeds the available context size, try increasing it",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 9120,
                "n_ctx": 8192,
            } }),
        )
    },
    || {
        Reply::status(
            400,
            json!([{ "error": {
                "code": 400,
                "message": "The input token count (9120) exceeds the maximum number of tokens allowed (8192).",
                "status": "INVALID_ARGUMENT",
            } }]),
        )
    },
];

/// Azure refuses, OpenAI answers without text.
const CONTENT_FILTER: &[fn() -> Reply] = &[
    || {
        Reply::status(
            400,
            json!({ "error": {
                "message": "The response was filtered due to the prompt triggering Azure OpenAI's content management policy.",
                "type": null,
                "param": "prompt",
                "code": "content_filter",
                "status": 400,
                "innererror": { "code": "ResponsibleAIPolicyViolation" },
            } }),
        )
    },
    || Reply::finished(None, "content_filter"),
];

fn chosen<T>(list: &[T], wording: u64) -> &T {
    &list[usize::try_from(wording % list.len() as u64).unwrap_or_default()]
}

/// A date so long from now, in whole seconds as HTTP has it: the next second may be meant, or the one that is over.
fn http_date(from_now: Duration) -> String {
    let when = jiff::Timestamp::now() + from_now;
    jiff::fmt::rfc2822::DateTimePrinter::new()
        .timestamp_to_rfc9110_string(&when)
        .expect("a date after year 0")
}

/// How a call must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// With text, at this attempt (from 1), perhaps with a fault that leaves the text, or half of it.
    Answered { attempts: u32, fault: Option<Fault> },
    /// With an error of this class, after so many attempts.
    Failed { class: &'static str, attempts: u32 },
}

impl Ending {
    /// Requests that the server must have seen for it.
    pub fn attempts(self) -> u32 {
        match self {
            Ending::Answered { attempts, .. } | Ending::Failed { attempts, .. } => attempts,
        }
    }

    /// Whether the whole of the good answer arrives.
    pub fn is_good(self) -> bool {
        matches!(self, Ending::Answered { fault, .. } if fault != Some(Fault::Truncated))
    }

    /// The error class; none where there is an answer.
    pub fn class(self) -> Option<&'static str> {
        match self {
            Ending::Answered { .. } => None,
            Ending::Failed { class, .. } => Some(class),
        }
    }
}

/// Which requests meet which faults.
#[derive(Debug, Clone)]
pub struct FaultPlan {
    pub seed: u64,
    /// Of requests that meet a fault, 0 to 1.
    pub share: f64,
    /// How often each fault comes, relative to the others.
    pub kinds: Vec<(Fault, u32)>,
    /// What a server asks for that says when to come back.
    pub retry_after: Duration,
    /// Between the parts of an answer that drips.
    pub drip: Duration,
    /// Each answer comes so late, with such a spread to both sides.
    pub latency: Option<(Duration, Duration)>,
}

impl FaultPlan {
    /// Only these faults, by weight.
    pub fn new(seed: u64, share: f64, kinds: Vec<(Fault, u32)>) -> Self {
        FaultPlan {
            seed,
            share,
            kinds,
            retry_after: Duration::from_millis(20),
            drip: Duration::from_millis(1),
            latency: None,
        }
    }

    /// Every fault. Those that take a client's timeout, or the rest of a second, are rare.
    pub fn mixed(seed: u64, share: f64) -> Self {
        FaultPlan::new(
            seed,
            share,
            vec![
                (Fault::TooMany, 10),
                (Fault::TooManyWithRetryAfter, 6),
                (Fault::TooManyWithDate, 1),
                (Fault::BadGateway, 8),
                (Fault::InternalError, 8),
                (Fault::Unavailable, 8),
                (Fault::Overloaded529, 4),
                (Fault::Hang, 1),
                (Fault::Reset, 6),
                (Fault::Close, 6),
                (Fault::CutBody, 6),
                (Fault::BadJson, 5),
                (Fault::HtmlWith200, 5),
                (Fault::EmptyChoices, 5),
                (Fault::NullContent, 5),
                (Fault::MissingUsage, 5),
                (Fault::UnknownFinishReason, 4),
                (Fault::SlowDrip, 3),
                (Fault::ContextLength, 4),
                (Fault::ContentFilter, 4),
                (Fault::Truncated, 4),
            ],
        )
    }

    #[must_use]
    pub fn with_latency(mut self, base: Duration, spread: Duration) -> Self {
        self.latency = Some((base, spread));
        self
    }

    /// Without these faults; the others come more often, so that the share stays.
    #[must_use]
    pub fn without(mut self, faults: &[Fault]) -> Self {
        self.kinds.retain(|(fault, _)| !faults.contains(fault));
        self
    }

    /// The fault that a request meets which was asked `before` times before. One that is permanent belongs to the body and
    /// comes every time; the others are drawn anew. In all, the first time, [`FaultPlan::share`] of bodies meet one.
    pub fn fault(&self, body: Digest, before: u32) -> Option<Fault> {
        let (permanent, passing): (Vec<_>, Vec<_>) = self.kinds.iter().partition(|(fault, _)| fault.is_permanent());
        let (of_permanent, of_passing) = (sum(&permanent), sum(&passing));
        if of_permanent + of_passing == 0.0 {
            return None;
        }
        let permanent_share = self.share * of_permanent / (of_permanent + of_passing);
        let mut random = self.random("permanent", body, 0);
        if random.share() < permanent_share {
            return draw(&permanent, &mut random);
        }
        let mut random = self.random("passing", body, before);
        let passing_share = (self.share - permanent_share) / (1.0 - permanent_share).max(f64::EPSILON);
        (random.share() < passing_share)
            .then(|| draw(&passing, &mut random))
            .flatten()
    }

    /// How a call with this body must end, if nobody asked for the same before and there are so many attempts at most.
    /// (Where no request of a run was ever answered, clients may call `connection` something worse.)
    pub fn expected(&self, body: &Json, attempts: u32) -> Ending {
        self.expected_after(Digest::of(body), 0, attempts)
    }

    /// How it must end if the body was asked `before` times before.
    pub fn expected_after(&self, body: Digest, before: u32, attempts: u32) -> Ending {
        let mut class = "stopped";
        for attempt in 1..=attempts {
            let fault = self.fault(body, before + attempt - 1);
            match fault.map_or(Effect::Answer, Fault::effect) {
                Effect::Answer => {
                    return Ending::Answered {
                        attempts: attempt,
                        fault,
                    };
                }
                Effect::Passing(name) => class = name,
                Effect::Permanent(class) => {
                    return Ending::Failed {
                        class,
                        attempts: attempt,
                    };
                }
            }
        }
        Ending::Failed { class, attempts }
    }

    /// What the server does where a good reply is known.
    pub fn reply(&self, body: Digest, before: u32, good: Reply) -> Reply {
        let reply = match self.fault(body, before) {
            Some(fault) => fault.reply(good, self, self.random("wording", body, 0).next()),
            None => good,
        };
        match self.latency {
            Some((base, spread)) => {
                let wait = jitter(base, spread, &mut self.random("latency", body, before));
                Reply::Slow(wait, Box::new(reply))
            }
            None => reply,
        }
    }

    fn random(&self, purpose: &str, body: Digest, before: u32) -> Random {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.seed.to_le_bytes());
        hasher.update(&body.0);
        hasher.update(&before.to_le_bytes());
        hasher.update(purpose.as_bytes());
        let mut bytes = [0; 8];
        hasher.finalize_xof().fill(&mut bytes);
        Random(u64::from_le_bytes(bytes))
    }
}

fn sum(kinds: &[&(Fault, u32)]) -> f64 {
    kinds.iter().map(|(_, weight)| f64::from(*weight)).sum()
}

/// One fault by weight.
fn draw(kinds: &[&(Fault, u32)], random: &mut Random) -> Option<Fault> {
    let mut left = random.share() * sum(kinds);
    kinds
        .iter()
        .find(|(_, weight)| {
            left -= f64::from(*weight);
            left < 0.0
        })
        .map(|(fault, _)| *fault)
}

/// A behaviour with faults around one without.
pub fn with_faults(
    plan: FaultPlan,
    answer: impl Fn(&Json, usize) -> Reply + Send + Sync + 'static,
) -> impl Fn(&Json, usize) -> Reply + Send + Sync + 'static {
    let asked = Mutex::new(HashMap::<Digest, u32>::new());
    move |body, number| {
        let digest = Digest::of(body);
        let before = {
            let mut asked = asked.lock().unwrap_or_else(PoisonError::into_inner);
            let times = asked.entry(digest).or_default();
            *times += 1;
            *times - 1
        };
        plan.reply(digest, before, answer(body, number))
    }
}

/// Random numbers that are the same on every machine (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// From 0 up to, but without 1.
    pub fn share(&mut self) -> f64 {
        // The upper 53 bits fit a double exactly.
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A latency of `base`, up to `spread` shorter or longer.
pub fn jitter(base: Duration, spread: Duration, random: &mut Random) -> Duration {
    (base + spread.mul_f64(2.0 * random.share())).saturating_sub(spread)
}
