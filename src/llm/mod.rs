//! Models: one call path to any OpenAI-compatible server, and the embedded default.
//!
//! In: a [`Request`] (messages and every sampling parameter). Out: a [`Completion`] or a classified [`CallError`]. A call
//! goes from piece to piece, each a [`Model`] around the next: the cache ([`cached`]), the budget and the meter ([`budget`]),
//! the one retry loop ([`retry`]) under the provider's limits ([`limits`]), the client ([`openai`]). What servers' odd answers
//! mean is one table ([`classify`]). This room knows nothing of stages, SQL or scores.

pub mod budget;
pub mod cache;
pub mod cache_store;
pub mod cached;
pub mod classify;
pub mod embedded;
mod error_body;
pub mod limits;
pub mod openai;
pub mod retry;
pub mod spans;
mod stop;
pub mod usage;
pub mod waits;

use std::time::Duration;

use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::prompt::Message;

pub use classify::{Action, ErrorClass};
pub use stop::StopSignal;
pub use usage::{Usage, Usd};

/// Everything that decides what a model answers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Request {
    /// Who is asked: the provider's name and address, or the embedded model's file digest. Part of the cache key.
    pub provider: String,
    pub model: String,
    pub messages: Vec<Message>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// Completion tokens at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<i64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Which of several independent repeats of a run this is.
    pub repeat: u32,
    /// Which of several samples of one stage this is.
    pub sample: u32,
    /// Completions in one answer; one where absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n: Option<u32>,
    /// Whether the tokens' log probabilities are wanted.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub logprobs: bool,
    /// The JSON Schema that the answer is to follow, where the server can see to that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_format: Option<ResponseFormat>,
    /// For one attempt; no part of the key.
    #[serde(skip)]
    pub timeout: Option<Duration>,
    /// Which call of which run this is, so that an interrupted run knows what it has bought itself; no part of the key.
    #[serde(skip)]
    pub origin: String,
}

/// A JSON Schema with a name.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ResponseFormat {
    pub name: String,
    pub schema: Json,
}

/// Version of the key's derivation; a change makes every stored completion unreachable, so it's pinned by a test.
const KEY_VERSION: &str = "dinsql completion key 1";
const OWN_KEY_VERSION: &str = "dinsql completion of one call 1";

impl Request {
    /// With nothing said but whom and what to ask.
    pub fn new(provider: &str, model: &str, messages: Vec<Message>) -> Self {
        Request {
            provider: provider.to_owned(),
            model: model.to_owned(),
            messages,
            temperature: None,
            top_p: None,
            max_tokens: None,
            seed: None,
            stop: Vec::new(),
            repeat: 0,
            sample: 0,
            n: None,
            logprobs: false,
            response_format: None,
            timeout: None,
            origin: String::new(),
        }
    }

    /// BLAKE3 of the canonical request.
    pub fn key(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key(KEY_VERSION);
        {
            // Fields are written in declaration order, so equal requests have equal bytes. The serialiser writes in many
            // small pieces, which a hasher takes slowly one by one.
            let mut gathered = std::io::BufWriter::with_capacity(512, &mut hasher);
            let _ = serde_json::to_writer(&mut gathered, self);
        }
        *hasher.finalize().as_bytes()
    }

    /// A key that only this call of this run has; none where the call has no origin.
    fn own_key(&self, key: &[u8; 32]) -> Option<[u8; 32]> {
        if self.origin.is_empty() {
            return None;
        }
        let mut hasher = blake3::Hasher::new_derive_key(OWN_KEY_VERSION);
        hasher.update(key).update(self.origin.as_bytes());
        Some(*hasher.finalize().as_bytes())
    }

    /// Bytes of all messages.
    pub fn prompt_bytes(&self) -> u64 {
        self.messages.iter().map(|message| message.content.len() as u64).sum()
    }
}

/// A model's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    pub text: String,
    /// The other completions, where several were asked for in one request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alternatives: Vec<String>,
    /// `stop`, `length`, …, as the server said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<String>,
    #[serde(default)]
    pub usage: Usage,
    /// Of attempts before this one whose answers could not be used, and are billed all the same.
    #[serde(default, skip_serializing_if = "Usage::is_unknown")]
    pub wasted: Usage,
    /// As the server told, else by the price list, with what was wasted; absent where neither knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Usd>,
    /// As the server gave them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Json>,
    /// The model id that the server returned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served_model: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// Parameters that the server does not know and that were therefore not sent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_sent: Vec<String>,
    /// Of the successful attempt.
    pub latency_ms: u64,
    /// Requests sent for it; 0 where it came from the cache.
    #[serde(default)]
    pub attempts: u32,
    /// Whether it came from the completion cache.
    #[serde(default)]
    pub cached: bool,
}

impl Completion {
    /// An answer of which nothing is known but its text.
    pub fn new(text: impl Into<String>) -> Self {
        Completion {
            text: text.into(),
            alternatives: Vec::new(),
            finish_reason: None,
            usage: Usage::default(),
            wasted: Usage::default(),
            cost: None,
            logprobs: None,
            served_model: None,
            fingerprint: None,
            not_sent: Vec::new(),
            latency_ms: 0,
            attempts: 1,
            cached: false,
        }
    }

    /// Whether the model came to an end by itself. An answer that was cut or filtered may come out better next time.
    pub fn is_whole(&self) -> bool {
        let reason = self.finish_reason.as_deref().unwrap_or_default().to_ascii_lowercase();
        !matches!(
            reason.as_str(),
            "length"
                | "max_tokens"
                | "model_length"
                | "max_output_tokens"
                | "content_filter"
                | "safety"
                | "recitation"
                | "blocklist"
                | "prohibited_content"
                | "spii"
                | "error"
                | "abort"
                | "cancelled"
                | "insufficient_system_resource"
                | "load"
        )
    }

    /// Whether it ended because it may not be longer.
    pub fn is_cut(&self) -> bool {
        is_cut(self.finish_reason.as_deref())
    }
}

/// Whether this is the end of an answer that may not be longer.
pub fn is_cut(finish_reason: Option<&str>) -> bool {
    let reason = finish_reason.unwrap_or_default();
    ["length", "max_tokens", "model_length", "max_output_tokens"]
        .iter()
        .any(|known| reason.eq_ignore_ascii_case(known))
}

/// A call without a usable answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct CallError {
    pub class: ErrorClass,
    /// For the person who must fix it: model, status, the server's words.
    pub message: String,
    pub status: Option<u16>,
    /// As the server asked.
    pub retry_after: Option<Duration>,
    /// Requests sent.
    pub attempts: u32,
    /// Of answers that could not be used, and are billed all the same.
    pub usage: Box<Usage>,
    pub cost: Option<Usd>,
}

impl CallError {
    /// Without an answer from the server, and without a request.
    pub fn new(class: ErrorClass, message: String) -> Self {
        CallError {
            class,
            message,
            status: None,
            retry_after: None,
            attempts: 0,
            usage: Box::default(),
            cost: None,
        }
    }

    /// The user wants to stop.
    pub fn interrupted(attempts: u32) -> Self {
        CallError {
            attempts,
            ..CallError::new(ErrorClass::Interrupted, "interrupted".into())
        }
    }
}

/// Something that completes prompts.
pub trait Model: Send + Sync {
    /// Asks for one completion.
    fn complete<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Completion, CallError>>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::Role;

    pub(crate) fn request() -> Request {
        let question = Message {
            role: Role::User,
            content: "Şehirler?".into(),
        };
        Request {
            temperature: Some(0.0),
            max_tokens: Some(10),
            ..Request::new("test", "m", vec![question])
        }
    }

    pub(crate) fn completion(text: &str) -> Completion {
        Completion {
            finish_reason: Some("stop".into()),
            ..Completion::new(text)
        }
    }

    #[test]
    fn an_answer_with_an_unknown_end_is_whole() {
        let ended = |reason: Option<&str>| Completion {
            finish_reason: reason.map(str::to_owned),
            ..completion("x")
        };
        for reason in [
            None,
            Some("stop"),
            Some("STOP"),
            Some("eos_token"),
            Some("tool_calls"),
            Some("new word"),
        ] {
            assert!(ended(reason).is_whole(), "{reason:?}");
        }
        for reason in ["length", "MAX_TOKENS", "content_filter", "SAFETY"] {
            assert!(!ended(Some(reason)).is_whole(), "{reason}");
        }
    }

    /// A changed key silently re-buys everything that users have stored.
    #[test]
    fn the_key_of_a_known_request_is_pinned() {
        let hex: String = request().key().iter().map(|byte| format!("{byte:02x}")).collect();
        insta::assert_snapshot!(hex, @"f7e61a964100935cf7017a3371c682e4e7635392140be1bd2e3f5558157aeda8");
    }

    #[test]
    fn every_parameter_is_in_the_key_but_timeout_and_origin() {
        let base = request();
        let changed = [
            Request {
                provider: "other".into(),
                ..base.clone()
            },
            Request {
                model: "n".into(),
                ..base.clone()
            },
            Request {
                messages: vec![Message {
                    role: Role::System,
                    content: "Şehirler?".into(),
                }],
                ..base.clone()
            },
            Request {
                temperature: Some(0.5),
                ..base.clone()
            },
            Request {
                top_p: Some(1.0),
                ..base.clone()
            },
            Request {
                max_tokens: None,
                ..base.clone()
            },
            Request {
                seed: Some(0),
                ..base.clone()
            },
            Request {
                stop: vec![";".into()],
                ..base.clone()
            },
            Request {
                repeat: 1,
                ..base.clone()
            },
            Request {
                sample: 1,
                ..base.clone()
            },
            Request {
                n: Some(2),
                ..base.clone()
            },
            Request {
                logprobs: true,
                ..base.clone()
            },
            Request {
                response_format: Some(ResponseFormat {
                    name: "answer".into(),
                    schema: serde_json::json!({ "type": "object" }),
                }),
                ..base.clone()
            },
        ];
        for other in &changed {
            assert_ne!(other.key(), base.key(), "{other:?}");
        }
        assert_eq!(
            Request {
                timeout: Some(Duration::from_secs(1)),
                origin: "run/q1".into(),
                ..base.clone()
            }
            .key(),
            base.key()
        );
    }
}
