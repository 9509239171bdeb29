//! Spans to an OpenTelemetry collector, by OTLP over HTTP.
//!
//! In: an address, from the option or the standard variables. Out: a layer for the log and a guard that brings the last spans
//! out. A collector that is slow, silent or gone costs a warning and its spans, never time or the run. Everything happens on
//! the exporter's own threads.

use std::error::Error;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, anyhow};
use futures::future::BoxFuture;
use opentelemetry::trace::TracerProvider;
use opentelemetry::{Array, Key, KeyValue, StringValue, Value};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, SpanExporter as OtlpExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, SdkTracerProvider, Span, SpanData, SpanExporter, SpanProcessor,
};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::Layer;

use super::exit::Failure;
use super::logging::{BoxedLayer, OWN_TARGET};

const TRACES_PATH: &str = "v1/traces";
/// What the end of a command may wait for a collector.
const LAST_WAIT: Duration = Duration::from_secs(5);
/// The standard's own limit for one request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Spans that may wait; the standard's 2,048 are gone in a tenth of a second where the cache answers.
const QUEUE: usize = 16_384;
const QUEUE_VARIABLE: &str = "OTEL_BSP_MAX_QUEUE_SIZE";
/// A list by the conventions, but fields of spans hold no lists.
const LISTS: [&str; 1] = ["gen_ai.response.finish_reasons"];

/// Brings the last spans out when it is dropped.
pub struct Traces {
    provider: SdkTracerProvider,
    health: Arc<Health>,
}

/// A layer that sends spans, where an address is given or the environment names one.
pub fn start(address: Option<&str>) -> Result<Option<(BoxedLayer, Traces)>, Failure> {
    if address.is_none() && !environment_wants_it() {
        return Ok(None);
    }
    let health = Arc::new(Health::default());
    // The first to be installed stays, so this does no harm where there is one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = OtlpExporter::builder()
        .with_http()
        .with_http_client(Client::new(Arc::clone(&health))?);
    if !environment_wants_json() {
        builder = builder.with_protocol(Protocol::HttpBinary);
    }
    if let Some(address) = address {
        builder = builder.with_endpoint(traces_address(address)?);
    }
    let exporter = builder.build().context("cannot send traces").map_err(Failure::usage)?;
    let exporter = Watched {
        inner: exporter,
        health: Arc::clone(&health),
    };
    let mut batches = BatchConfigBuilder::default();
    if variable(QUEUE_VARIABLE).is_none() {
        batches = batches.with_max_queue_size(QUEUE);
    }
    let batches = BatchSpanProcessor::builder(exporter)
        .with_batch_config(batches.build())
        .build();
    let provider = SdkTracerProvider::builder()
        .with_resource(resource())
        .with_span_processor(Counted {
            inner: batches,
            health: Arc::clone(&health),
        })
        .build();
    let layer = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer(OWN_TARGET))
        .with_location(false)
        .with_threads(false)
        .with_tracked_inactivity(false)
        .with_target(false)
        .with_filter(Targets::new().with_target(OWN_TARGET, LevelFilter::INFO))
        .boxed();
    Ok(Some((layer, Traces { provider, health })))
}

/// A variable that says something, since by the standard an empty one says nothing.
fn variable(name: &str) -> Option<String> {
    let value = std::env::var(name).ok()?;
    let value = value.trim();
    (!value.is_empty()).then(|| value.to_owned())
}

/// Whether the standard variables name a collector, and none of them switches traces off.
fn environment_wants_it() -> bool {
    let is = |name: &str, word: &str| variable(name).is_some_and(|value| value.eq_ignore_ascii_case(word));
    let named = variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").or_else(|| variable("OTEL_EXPORTER_OTLP_ENDPOINT"));
    named.is_some() && !is("OTEL_SDK_DISABLED", "true") && !is("OTEL_TRACES_EXPORTER", "none")
}

/// The standard's default is the binary form, which every collector takes; the exporter's own is JSON where it is built in.
fn environment_wants_json() -> bool {
    variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        .or_else(|| variable("OTEL_EXPORTER_OTLP_PROTOCOL"))
        .is_some_and(|protocol| protocol == "http/json")
}

/// The address of traces at a collector, which is given with or without their path.
fn traces_address(address: &str) -> Result<String, Failure> {
    let invalid = |reason: String| {
        Failure::usage(anyhow!(
            "`--otlp-endpoint`: `{address}` is no address of a collector: {reason}"
        ))
    };
    let mut url = reqwest::Url::parse(address).map_err(|error| invalid(error.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err(invalid("it must begin with http:// or https://".into()));
    }
    let path = url.path().trim_end_matches('/').to_owned();
    if !path.ends_with(TRACES_PATH) {
        url.set_path(&format!("{path}/{TRACES_PATH}"));
    }
    Ok(url.into())
}

/// Who sends: `dinsql`, unless the environment gives another name.
fn resource() -> Resource {
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let given = Resource::builder().with_attribute(version.clone()).build();
    let named = given
        .get(&Key::from_static_str("service.name"))
        .is_some_and(|name| !name.as_str().starts_with("unknown_service"));
    if named {
        return given;
    }
    Resource::builder()
        .with_service_name(OWN_TARGET)
        .with_attribute(version)
        .build()
}

impl Drop for Traces {
    fn drop(&mut self) {
        let _ = self.provider.shutdown_with_timeout(LAST_WAIT);
        let ended = self.health.ended.load(Ordering::SeqCst);
        let lost = ended.saturating_sub(self.health.delivered.load(Ordering::SeqCst));
        if lost > 0 {
            self.health
                .warn(format_args!("{lost} of {ended} spans did not reach the collector"));
        }
    }
}

/// How the collector does.
#[derive(Debug, Default)]
struct Health {
    ended: AtomicU64,
    delivered: AtomicU64,
    warned: AtomicBool,
    /// Of the last request without an answer; the exporter only says that there was one.
    network: Mutex<Option<String>>,
}

impl Health {
    fn network(&self) -> Option<String> {
        self.network.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Keeps the reason at the end of the chain, which names no address with a key in it.
    fn note_network(&self, error: &HttpError) {
        let mut reason: &dyn Error = error.as_ref();
        while let Some(source) = reason.source() {
            reason = source;
        }
        *self.network.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.to_string());
    }

    /// One warning is enough.
    fn warn(&self, what: impl fmt::Display) {
        if !self.warned.swap(true, Ordering::SeqCst) {
            tracing::warn!("traces are not complete: {what}");
        }
    }
}

/// Counts the spans that end.
#[derive(Debug)]
struct Counted {
    inner: BatchSpanProcessor,
    health: Arc<Health>,
}

impl SpanProcessor for Counted {
    fn on_start(&self, span: &mut Span, context: &opentelemetry::Context) {
        self.inner.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        self.health.ended.fetch_add(1, Ordering::Relaxed);
        self.inner.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

/// Counts the spans that arrive, tells of the first that do not, and makes lists of what are lists by the conventions.
#[derive(Debug)]
struct Watched {
    inner: OtlpExporter,
    health: Arc<Health>,
}

impl SpanExporter for Watched {
    async fn export(&self, mut batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len() as u64;
        for attribute in batch.iter_mut().flat_map(|span| &mut span.attributes) {
            if LISTS.contains(&attribute.key.as_str())
                && let Ok(items) = serde_json::from_str::<Vec<String>>(&attribute.value.as_str())
            {
                let items = items.into_iter().map(StringValue::from).collect();
                attribute.value = Value::Array(Array::String(items));
            }
        }
        let result = self.inner.export(batch).await;
        match &result {
            Ok(()) => {
                self.health.delivered.fetch_add(count, Ordering::SeqCst);
            }
            Err(error) => match self.health.network() {
                Some(network) => self
                    .health
                    .warn(format_args!("the collector does not answer: {network}")),
                None => self.health.warn(error),
            },
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

/// The program's own HTTP client for the exporter, whose other choices bring a second one. It has a runtime of its own: the
/// exporter's thread knows of none, and the last spans go out when the program's runtime is gone.
#[derive(Debug)]
struct Client {
    http: reqwest::Client,
    runtime: tokio::runtime::Runtime,
    health: Arc<Health>,
}

impl Client {
    fn new(health: Arc<Health>) -> Result<Self, Failure> {
        let http = reqwest::Client::builder()
            .timeout(timeout())
            .build()
            .context("cannot make a client for traces")?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("traces")
            .enable_all()
            .build()
            .context("cannot make a runtime for traces")?;
        Ok(Client { http, runtime, health })
    }

    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let request: reqwest::Request = request.try_into()?;
        let answer = self.http.execute(request).await.map_err(reqwest::Error::without_url)?;
        let mut response = Response::builder().status(answer.status());
        if let Some(headers) = response.headers_mut() {
            headers.clone_from(answer.headers());
        }
        Ok(response.body(answer.bytes().await?)?)
    }
}

/// For one request, in milliseconds, as the standard variables say.
fn timeout() -> Duration {
    ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"]
        .iter()
        .find_map(|name| variable(name)?.parse().ok())
        .map_or(TIMEOUT, Duration::from_millis)
}

impl HttpClient for Client {
    // As the trait's macro would write it.
    fn send_bytes<'life0, 'async_trait>(
        &'life0 self,
        request: Request<Bytes>,
    ) -> BoxFuture<'async_trait, Result<Response<Bytes>, HttpError>>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        // The exporter's thread is there to wait.
        Box::pin(async move {
            let answer = self.runtime.block_on(self.send(request));
            if let Err(error) = &answer {
                self.health.note_network(error);
            }
            answer
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_have_the_path_or_not() {
        for (given, wanted) in [
            ("http://localhost:4318", "http://localhost:4318/v1/traces"),
            ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
            ("http://localhost:4318/v1/traces", "http://localhost:4318/v1/traces"),
            ("https://a.example/otlp/", "https://a.example/otlp/v1/traces"),
        ] {
            assert_eq!(traces_address(given).unwrap(), wanted);
        }
        for given in ["", "localhost:4318", "ftp://a.example", "collector"] {
            assert!(traces_address(given).is_err(), "{given}");
        }
    }
}
