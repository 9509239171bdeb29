//! SQL as text: where a statement ends, what a model's answer holds, how a name is quoted.
//!
//! The engine's own `prepare` stays the judge of what is valid; nothing here rejects a query.

pub mod extract;
pub mod parse;
pub mod text;
