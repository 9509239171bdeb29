//! Models: one call path to any OpenAI-compatible server, and the embedded default.
//!
//! In: a [`Request`] (messages and every sampling parameter). Out: a [`Completion`] or a classified [`CallError`]. Around
//! the client, each on its own: the cache ([`cache`]), the one retry loop ([`retry`]), the mapping of servers' odd
//! answers to error classes ([`classify`]). This room knows nothing of stages, SQL or scores.

pub mod cache;
pub mod classify;
pub mod embedded;
pub mod openai;
pub mod retry;

use std::time::Duration;

use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};

use crate::prompt::Message;

pub use classify::{Action, ErrorClass};

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
    /// For one attempt; no part of the key.
    #[serde(skip)]
    pub timeout: Option<Duration>,
}

/// Version of the key's derivation; a change makes every stored completion unreachable, so it's pinned by a test.
const KEY_VERSION: &str = "dinsql completion key 1";

impl Request {
    /// BLAKE3 of the canonical request.
    pub fn key(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key(KEY_VERSION);
        // Fields are written in declaration order, so equal requests have equal bytes.
        let _ = serde_json::to_writer(&mut hasher, self);
        *hasher.finalize().as_bytes()
    }
}

/// Tokens of a call as the server counts them; what it does not say is unknown, not 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<u64>,
    /// Of the prompt's tokens, those the server had computed before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_prompt: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<u64>,
}

/// A model's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    pub text: String,
    /// `stop`, `length`, …, as the server said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<String>,
    #[serde(default)]
    pub usage: Usage,
    /// The model id that the server returned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served_model: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// Of the successful attempt.
    pub latency_ms: u64,
    /// Requests sent for it; 0 where it came from the cache.
    #[serde(default)]
    pub attempts: u32,
    /// Whether it came from the completion cache.
    #[serde(default)]
    pub cached: bool,
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
        Request {
            provider: "test".into(),
            model: "m".into(),
            messages: vec![Message {
                role: Role::User,
                content: "Şehirler?".into(),
            }],
            temperature: Some(0.0),
            top_p: None,
            max_tokens: Some(10),
            seed: None,
            stop: Vec::new(),
            repeat: 0,
            sample: 0,
            timeout: None,
        }
    }

    /// A changed key silently re-buys everything that users have stored.
    #[test]
    fn the_key_of_a_known_request_is_pinned() {
        let hex: String = request().key().iter().map(|byte| format!("{byte:02x}")).collect();
        insta::assert_snapshot!(hex, @"f7e61a964100935cf7017a3371c682e4e7635392140be1bd2e3f5558157aeda8");
    }

    #[test]
    fn every_parameter_is_in_the_key_but_the_timeout() {
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
        ];
        for other in &changed {
            assert_ne!(other.key(), base.key(), "{other:?}");
        }
        assert_eq!(
            Request {
                timeout: Some(Duration::from_secs(1)),
                ..base.clone()
            }
            .key(),
            base.key()
        );
    }
}
