use super::{CallError, Completion, Request};
pub fn call_span(_: &Request) -> tracing::Span { tracing::Span::none() }
pub fn record(_: &tracing::Span, _: &Result<Completion, CallError>) {}
