//! Templates and what they render to: messages with roles.
//!
//! In: templates by language and name (`din-sql/easy` in `prompts/tr/`), variables. Out: [`Message`]s, exactly as they
//! are sent. Undefined variables are errors, nothing is escaped, and data is never rendered again: a question may hold
//! `{{`. Which language is meant is the caller's word; there is no fall back to another one.

mod environment;
mod lint;
mod store;
pub mod tokens;

pub use environment::{PromptError, Prompts};
pub use lint::{LintReport, Problem, lint};
pub use store::{TemplateStore, template_digest};
pub use tokens::Tokenizer;

use serde::{Deserialize, Serialize};

/// Who a message is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    System,
    User,
    Assistant,
}

impl Role {
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// One message of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Message {
    pub role: Role,
    pub content: String,
}

/// Variables that every template may use; stages add theirs under their names.
pub const VARIABLES: &[&str] = &["question", "evidence", "schema", "dialect", "language", "example"];
/// Calls that open a message.
pub const ROLES: &[&str] = &["system", "user", "assistant"];
