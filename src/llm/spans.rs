//! What observers see of a call: one span for the whole of it, cache, waiting and retries included, named as the
//! conventions of OpenTelemetry for generative AI name things.
//!
//! In: a [`Request`] and what came of it. Out: fields of a span. Prompts, answers, keys and servers' words are never among
//! them. The names are listed in `docs/observability.md`.

use std::sync::Arc;

use futures::future::BoxFuture;
use tracing::Instrument;
use tracing::field::Empty;

use super::{CallError, Completion, Model, Request};

/// Puts every call into a span of its own; the outermost piece of the call path.
pub struct TracedModel {
    inner: Arc<dyn Model>,
}

impl TracedModel {
    pub fn new(inner: Arc<dyn Model>) -> Self {
        TracedModel { inner }
    }
}

impl Model for TracedModel {
    fn complete<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Completion, CallError>> {
        let span = call_span(request);
        let call = self.inner.complete(request);
        if span.is_disabled() {
            return call;
        }
        Box::pin(async move {
            let result = call.instrument(span.clone()).await;
            record(&span, &result);
            result
        })
    }
}

/// A span for a call that is about to be made, under the current one. Costs nothing where nobody looks.
pub fn call_span(request: &Request) -> tracing::Span {
    // Numbers are `i64`, since the bridge to OpenTelemetry makes text of unsigned ones.
    let span = tracing::info_span!(
        "call",
        otel.name = Empty,
        otel.kind = "client",
        otel.status_code = Empty,
        gen_ai.operation.name = "chat",
        gen_ai.provider.name = provider_name(&request.provider),
        gen_ai.request.model = request.model.as_str(),
        gen_ai.request.temperature = request.temperature,
        gen_ai.request.top_p = request.top_p,
        gen_ai.request.max_tokens = request.max_tokens.map(i64::from),
        gen_ai.request.seed = request.seed,
        gen_ai.request.choice.count = request.n.filter(|count| *count != 1).map(i64::from),
        gen_ai.output.type = request.response_format.as_ref().map(|_| "json"),
        gen_ai.response.model = Empty,
        gen_ai.response.finish_reasons = Empty,
        gen_ai.usage.input_tokens = Empty,
        gen_ai.usage.output_tokens = Empty,
        gen_ai.usage.cache_read.input_tokens = Empty,
        gen_ai.usage.reasoning.output_tokens = Empty,
        server.address = Empty,
        server.port = Empty,
        error.type = Empty,
        http.response.status_code = Empty,
        dinsql.cached = Empty,
        dinsql.attempts = Empty,
        dinsql.latency_ms = Empty,
        dinsql.cost_usd = Empty,
    );
    if span.is_disabled() {
        return span;
    }
    span.record("otel.name", format!("chat {}", request.model));
    if let Some((address, port)) = server(&request.provider) {
        span.record("server.address", address);
        span.record("server.port", port);
    }
    span
}

/// Adds what came of a call to its span.
pub fn record(span: &tracing::Span, result: &Result<Completion, CallError>) {
    if span.is_disabled() {
        return;
    }
    match result {
        Ok(completion) => record_completion(span, completion),
        Err(error) => {
            span.record("otel.status_code", "ERROR");
            span.record("error.type", error.class.name());
            span.record("http.response.status_code", error.status.map(i64::from));
            span.record("dinsql.attempts", i64::from(error.attempts));
        }
    }
}

fn record_completion(span: &tracing::Span, completion: &Completion) {
    let usage = &completion.usage;
    for (field, count) in [
        ("gen_ai.usage.input_tokens", usage.prompt),
        ("gen_ai.usage.output_tokens", usage.completion),
        ("gen_ai.usage.cache_read.input_tokens", usage.cached_prompt),
        ("gen_ai.usage.reasoning.output_tokens", usage.reasoning),
    ] {
        span.record(field, count.map(number));
    }
    span.record("gen_ai.response.model", completion.served_model.as_deref());
    // A list by the conventions, which a field cannot be: the form of a JSON list is made one on the way out.
    if let Some(reason) = &completion.finish_reason {
        span.record(
            "gen_ai.response.finish_reasons",
            serde_json::json!([reason]).to_string(),
        );
    }
    span.record("dinsql.cached", completion.cached);
    span.record("dinsql.attempts", i64::from(completion.attempts));
    span.record("dinsql.latency_ms", number(completion.latency_ms));
    span.record("dinsql.cost_usd", completion.cost.map(super::Usd::dollars));
}

fn number(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// The provider's name, without the address or digest that stands behind it in the identity.
fn provider_name(identity: &str) -> &str {
    identity.split_whitespace().next().unwrap_or(identity)
}

/// Host and port of a provider that has an address.
fn server(identity: &str) -> Option<(String, Option<i64>)> {
    let (_, address) = identity.split_once(' ')?;
    let url = reqwest::Url::parse(address).ok()?;
    let host = url.host_str()?.to_owned();
    Some((host, url.port_or_known_default().map(i64::from)))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;
    use crate::llm::ErrorClass;
    use crate::prompt::{Message, Role};

    struct Scripted(Result<Completion, CallError>);

    impl Model for Scripted {
        fn complete<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Completion, CallError>> {
            Box::pin(async { self.0.clone() })
        }
    }

    fn request() -> Request {
        let question = Message {
            role: Role::User,
            content: "a secret question".into(),
        };
        Request {
            temperature: Some(0.5),
            ..Request::new(
                "mock http://user:pass@models.example:8080/v1?key=hidden",
                "m-1",
                vec![question],
            )
        }
    }

    /// What the JSON form of the log says when the call's span ends.
    fn log_of(result: Result<Completion, CallError>) -> String {
        let written = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&written);
        let layer = tracing_subscriber::fmt::layer()
            .json()
            .with_span_events(tracing_subscriber::fmt::format::FmtSpan::CLOSE)
            .with_writer(move || Sink(Arc::clone(&sink)));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let _ = futures::executor::block_on(TracedModel::new(Arc::new(Scripted(result))).complete(&request()));
        });
        String::from_utf8(written.lock().unwrap().clone()).unwrap()
    }

    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_call_is_told_without_its_words() {
        let mut completion = Completion::new("a secret answer");
        completion.finish_reason = Some("stop".into());
        completion.usage.prompt = Some(12);
        let log = log_of(Ok(completion));
        let line: serde_json::Value = serde_json::from_str(&log).unwrap();
        let span = &line["span"];
        let expected: [(&str, serde_json::Value); 9] = [
            ("name", "call".into()),
            ("otel.name", "chat m-1".into()),
            ("gen_ai.provider.name", "mock".into()),
            ("gen_ai.request.temperature", 0.5.into()),
            ("gen_ai.usage.input_tokens", 12.into()),
            ("gen_ai.response.finish_reasons", "[\"stop\"]".into()),
            ("server.address", "models.example".into()),
            ("server.port", 8080.into()),
            ("dinsql.cached", false.into()),
        ];
        for (field, value) in expected {
            assert_eq!(span[field], value, "{field} in {line:#}");
        }
        assert!(
            span.get("gen_ai.usage.output_tokens").is_none(),
            "what is unknown is absent: {line:#}"
        );
        for word in ["secret", "pass", "hidden"] {
            assert!(!log.contains(word), "{log}");
        }
    }

    #[test]
    fn a_failed_call_has_its_class_but_not_the_servers_words() {
        let log = log_of(Err(CallError {
            status: Some(429),
            attempts: 3,
            ..CallError::new(ErrorClass::RateLimited, "too many of: a secret question".into())
        }));
        let line: serde_json::Value = serde_json::from_str(&log).unwrap();
        assert_eq!(line["span"]["error.type"], "rate_limited");
        assert_eq!(line["span"]["http.response.status_code"], 429);
        assert_eq!(line["span"]["dinsql.attempts"], 3);
        assert!(!log.contains("secret"), "{log}");
    }
}
