//! An OpenAI-compatible server that answers as a test tells it to: with completions, with faults of servers, or not at all.
//!
//! In: a closure from a request's body and number to a [`Reply`]. Out: an address, and afterwards every request that came,
//! with what became of it: the server counts whole completions, since those are what a provider sends a bill for.
//! One thread, plain HTTP/1.1 with connections that stay open, nothing parsed that is not needed: it must never be what a
//! test waits for.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

/// What the server does with a request.
#[derive(Debug, Clone)]
pub enum Reply {
    /// A completion that ended by itself, with usage and the model that was asked for; in the shape that `n`, `logprobs`
    /// and `response_format` ask for.
    Text(String),
    /// The same with a text of its own for each of the `n` choices, from the first again where there are too few.
    Texts(Vec<String>),
    /// A completion in all its parts; absent ones are left out of the answer.
    Completion {
        text: Option<String>,
        finish_reason: Option<String>,
        usage: Option<Json>,
        model: Option<String>,
    },
    /// Any JSON with status 200.
    Json(Json),
    /// Any status, headers and body.
    Status {
        status: u16,
        headers: Vec<(String, String)>,
        body: String,
    },
    /// The connection stays open, and nothing comes.
    Hang,
    /// The connection ends before anything was said.
    Close,
    /// The connection is torn down (RST) before anything was said.
    Reset,
    /// A completion ends in the middle of its body.
    CutBody,
    /// Something else, but the connection ends in the middle of its body.
    Cut(Box<Reply>),
    /// Something else, a few bytes at a time with a pause before each.
    Drip { pause: Duration, reply: Box<Reply> },
    /// Something else, later.
    Slow(Duration, Box<Reply>),
}

impl Reply {
    pub fn text(text: impl Into<String>) -> Self {
        Reply::Text(text.into())
    }

    /// A completion that ended for such a reason, with plausible usage; a text is optional.
    pub fn finished(text: Option<&str>, reason: &str) -> Self {
        Reply::Completion {
            text: text.map(str::to_owned),
            finish_reason: Some(reason.into()),
            usage: Some(json!({ "prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105 })),
            model: Some("tester".into()),
        }
    }

    /// A completion whose tokens nobody counted.
    pub fn without_usage(text: &str) -> Self {
        Reply::Completion {
            text: Some(text.into()),
            finish_reason: Some("stop".into()),
            usage: None,
            model: Some("tester".into()),
        }
    }

    /// A completion without any choice.
    pub fn empty_choices() -> Self {
        Reply::Json(json!({ "id": "chatcmpl-test", "object": "chat.completion", "created": 0, "choices": [] }))
    }

    /// A completion whose whole budget of tokens went into reasoning.
    pub fn reasoning_only() -> Self {
        let message = json!({ "role": "assistant", "content": "", "reasoning_content": "Let me think about the tables." });
        Reply::Json(json!({
            "id": "chatcmpl-test",
            "object": "chat.completion",
            "created": 0,
            "model": "tester",
            "choices": [{ "index": 0, "message": message, "finish_reason": "length" }],
            "usage": {
                "prompt_tokens": 100,
                "completion_tokens": 64,
                "total_tokens": 164,
                "completion_tokens_details": { "reasoning_tokens": 64 },
            },
        }))
    }

    /// Status 200 and JSON that breaks off, in a body that is as long as it says.
    pub fn bad_json() -> Self {
        Reply::plain(200, "application/json", r#"{"id":"chatcmpl-test","choices":[{"index":0,"mess"#)
    }

    /// Status 200 and the page of something that stands in between.
    pub fn page() -> Self {
        Reply::plain(200, "text/html", "<html><body>Welcome to the proxy</body></html>")
    }

    /// Status 200 and an error inside, as some gateways have it.
    pub fn error_inside(code: u16, message: &str) -> Self {
        Reply::Json(json!({ "error": { "code": code, "message": message } }))
    }

    /// A status with a JSON body.
    pub fn status(status: u16, body: Json) -> Self {
        Reply::Status {
            status,
            headers: vec![("content-type".into(), "application/json".into())],
            body: body.to_string(),
        }
    }

    /// A status with a body that is no JSON.
    pub fn plain(status: u16, content_type: &str, body: &str) -> Self {
        Reply::Status {
            status,
            headers: vec![("content-type".into(), content_type.into())],
            body: body.into(),
        }
    }

    /// The error body of OpenAI's servers.
    pub fn error(status: u16, code: &str, message: &str) -> Self {
        Reply::status(
            status,
            json!({ "error": { "message": message, "type": "invalid_request_error", "param": null, "code": code } }),
        )
    }

    /// The same reply with one more header, where it is a reply of [`Reply::Status`].
    #[must_use]
    pub fn with_header(mut self, name: &str, value: impl Into<String>) -> Self {
        if let Reply::Status { headers, .. } = &mut self {
            headers.push((name.into(), value.into()));
        }
        self
    }
}

/// Tells requests' bodies apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    pub fn of(body: &Json) -> Self {
        Digest(*blake3::hash(body.to_string().as_bytes()).as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A request for a completion, as it came, and what became of it.
#[derive(Debug, Clone)]
pub struct Received {
    /// Null where the server keeps digests only.
    pub body: Json,
    pub digest: Digest,
    pub authorization: Option<String>,
    /// By their names in lower case; none where the server keeps digests only.
    pub headers: BTreeMap<String, String>,
    pub arrived: Instant,
    /// When the answer was out, if one went out whole.
    pub answered: Option<Instant>,
    /// Whether a whole completion with text was sent: what a provider would send a bill for.
    pub completed: bool,
}

impl Received {
    /// Content of the last message of the user.
    pub fn question(&self) -> &str {
        last_user_message(&self.body)
    }
}

/// Content of the last message of the user in a request's body.
pub fn last_user_message(body: &Json) -> &str {
    body["messages"]
        .as_array()
        .into_iter()
        .flatten()
        .rev()
        .find(|message| message["role"] == "user")
        .and_then(|message| message["content"].as_str())
        .unwrap_or_default()
}

type Behaviour = dyn Fn(&Json, usize) -> Reply + Send + Sync;

/// What is kept of one body, however often it came.
struct Asked {
    completed: usize,
    /// The body, or the end of the question where only digests are kept.
    name: String,
}

#[derive(Default)]
struct Ledger {
    received: Vec<Received>,
    by_body: HashMap<Digest, Asked>,
    in_flight: usize,
    most_in_flight: usize,
}

struct Shared {
    behaviour: Box<Behaviour>,
    ledger: Mutex<Ledger>,
    models: Vec<Json>,
    digests_only: bool,
}

impl Shared {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a request and gives its number; it is in flight until the guard is dropped.
    fn arrived(&self, request: &Request, body: &Json) -> (usize, InFlight<'_>) {
        let digest = Digest::of(body);
        let name = || {
            if self.digests_only {
                let question = last_user_message(body);
                let start = question.char_indices().rev().nth(NAME_LENGTH).map_or(0, |(at, _)| at);
                format!("{digest} …{}", &question[start..])
            } else {
                body.to_string()
            }
        };
        let received = Received {
            body: if self.digests_only { Json::Null } else { body.clone() },
            digest,
            authorization: request.headers.get("authorization").cloned(),
            headers: if self.digests_only {
                BTreeMap::new()
            } else {
                request.headers.clone()
            },
            arrived: Instant::now(),
            answered: None,
            completed: false,
        };
        let mut ledger = self.ledger();
        ledger.by_body.entry(digest).or_insert_with(|| Asked {
            completed: 0,
            name: name(),
        });
        ledger.received.push(received);
        ledger.in_flight += 1;
        ledger.most_in_flight = ledger.most_in_flight.max(ledger.in_flight);
        (ledger.received.len() - 1, InFlight(self))
    }

    /// Notes that an answer went out whole.
    fn answered(&self, number: usize, is_completion: bool) {
        let ledger = &mut *self.ledger();
        let received = &mut ledger.received[number];
        received.answered = Some(Instant::now());
        received.completed = is_completion;
        if is_completion && let Some(asked) = ledger.by_body.get_mut(&received.digest) {
            asked.completed += 1;
        }
    }
}

/// Letters of a question that name a body of which only the digest is kept.
const NAME_LENGTH: usize = 80;

/// A request that is being answered, also where its connection breaks.
struct InFlight<'a>(&'a Shared);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.ledger().in_flight -= 1;
    }
}

/// A server to be.
#[derive(Default)]
pub struct Builder {
    models: Vec<Json>,
    digests_only: bool,
}

impl Builder {
    /// Lists a model, with whatever the server says of it beside its id (such as `{"max_model_len": 8192}`), instead of
    /// the usual two.
    #[must_use]
    pub fn model(mut self, id: &str, more: Json) -> Self {
        let mut model = json!({ "id": id, "object": "model", "created": 0, "owned_by": "test" });
        for (name, value) in more.as_object().into_iter().flatten() {
            model[name] = value.clone();
        }
        self.models.push(model);
        self
    }

    /// Keeps digests and counts instead of bodies and headers, for tests with many requests.
    #[must_use]
    pub fn digests_only(mut self) -> Self {
        self.digests_only = true;
        self
    }

    /// Starts on a free port. `behaviour` gets a request's body and its number, from 0.
    pub fn start(self, behaviour: impl Fn(&Json, usize) -> Reply + Send + Sync + 'static) -> Server {
        let usual = |builder: Builder| builder.model("tester", Json::Null).model("tester-large", Json::Null);
        let Builder { models, digests_only } = if self.models.is_empty() { usual(self) } else { self };
        Server::run(Shared {
            behaviour: Box::new(behaviour),
            ledger: Mutex::default(),
            models,
            digests_only,
        })
    }
}

/// A running server; it ends when it is dropped.
pub struct Server {
    /// Up to and with `/v1`.
    pub url: String,
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts on a free port with the usual models. `behaviour` gets a request's body and its number, from 0.
    pub fn start(behaviour: impl Fn(&Json, usize) -> Reply + Send + Sync + 'static) -> Self {
        Server::builder().start(behaviour)
    }

    pub fn builder() -> Builder {
        Builder::default()
    }

    fn run(shared: Shared) -> Self {
        let shared = Arc::new(shared);
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        listener.set_nonblocking(true).expect("a listener for tokio");
        let url = format!("http://{}/v1", listener.local_addr().expect("an address"));
        let (stop, stopped) = oneshot::channel();
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).expect("a listener");
                tokio::select! {
                    () = accept(listener, of_thread) => {}
                    _ = stopped => {}
                }
            });
            // Connections that hang end with the runtime.
            runtime.shutdown_background();
        });
        Server {
            url,
            shared,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// All requests for completions so far, in the order in which they came.
    pub fn received(&self) -> Vec<Received> {
        self.shared.ledger().received.clone()
    }

    /// How many requests for completions came so far.
    pub fn count(&self) -> usize {
        self.shared.ledger().received.len()
    }

    /// How many different bodies came so far.
    pub fn different(&self) -> usize {
        self.shared.ledger().by_body.len()
    }

    /// How many whole completions were sent so far.
    pub fn completed(&self) -> usize {
        self.shared.ledger().by_body.values().map(|asked| asked.completed).sum()
    }

    /// How many requests were in the server at once, at most.
    pub fn most_in_flight(&self) -> usize {
        self.shared.ledger().most_in_flight
    }

    /// Bodies for which more than one whole completion was sent (where only digests are kept: the digest, and the end of
    /// the question), in a fixed order.
    pub fn paid_twice(&self) -> Vec<String> {
        self.paid_more_than(1)
    }

    /// Bodies for which more whole completions were sent than this: repeats and samples may ask the same several times.
    pub fn paid_more_than(&self, times: usize) -> Vec<String> {
        let ledger = self.shared.ledger();
        let mut bodies: Vec<String> = ledger
            .by_body
            .values()
            .filter(|asked| asked.completed > times)
            .map(|asked| asked.name.clone())
            .collect();
        bodies.sort_unstable();
        bodies
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            // A client that goes away in the middle is no fault of the server.
            let _ = serve(stream, &shared).await;
        });
    }
}

async fn serve(stream: TcpStream, shared: &Shared) -> io::Result<()> {
    let mut connection = Connection {
        stream,
        buffer: Vec::with_capacity(16 << 10),
    };
    while let Some(request) = connection.read_request().await? {
        let end = if request.is_post && request.path.ends_with("/chat/completions") {
            let body: Json = serde_json::from_slice(&request.body)?;
            let (number, _in_flight) = shared.arrived(&request, &body);
            let delivery = Delivery::of((shared.behaviour)(&body, number), &body);
            connection.send(&delivery).await?;
            if delivery.is_whole() {
                shared.answered(number, delivery.is_completion);
            }
            delivery.end
        } else {
            let reply = if request.path.ends_with("/models") {
                Reply::Json(json!({ "object": "list", "data": shared.models }))
            } else {
                Reply::plain(404, "text/plain", "not found")
            };
            let delivery = Delivery::of(reply, &Json::Null);
            connection.send(&delivery).await?;
            delivery.end
        };
        match end {
            End::Next => {}
            End::Close => return connection.stream.shutdown().await,
            End::Reset => return connection.stream.set_zero_linger(),
            End::Hang => return connection.until_gone().await,
        }
    }
    Ok(())
}

struct Request {
    is_post: bool,
    path: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

struct Connection {
    stream: TcpStream,
    /// Bytes that came and were not used yet.
    buffer: Vec<u8>,
}

impl Connection {
    /// The next request; none where the client has closed the connection.
    async fn read_request(&mut self) -> io::Result<Option<Request>> {
        let head = loop {
            if let Some(end) = self.buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                break end;
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        };
        let text = String::from_utf8_lossy(&self.buffer[..head]).into_owned();
        let mut lines = text.split("\r\n");
        let mut words = lines.next().unwrap_or_default().split(' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let headers: BTreeMap<String, String> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        let length: usize = match headers.get("content-length") {
            Some(length) => length.parse().map_err(io::Error::other)?,
            None => 0,
        };
        let end = head + 4 + length;
        while self.buffer.len() < end {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
        let body = self.buffer[head + 4..end].to_vec();
        self.buffer.drain(..end);
        Ok(Some(Request {
            is_post: method == "POST",
            path: path.to_owned(),
            headers,
            body,
        }))
    }

    async fn send(&mut self, delivery: &Delivery) -> io::Result<()> {
        self.wait(delivery.wait).await?;
        let Some(pause) = delivery.pause else {
            return self.stream.write_all(&delivery.bytes).await;
        };
        for part in delivery.bytes.chunks(DRIP) {
            self.wait(pause).await?;
            self.stream.write_all(part).await?;
        }
        Ok(())
    }

    /// Waits, but fails as soon as the client has gone: an answer that nobody waits for was not given.
    async fn wait(&mut self, wait: Duration) -> io::Result<()> {
        if wait.is_zero() {
            return Ok(());
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => Ok(()),
            gone = self.until_gone() => gone.and(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    /// Keeps what comes meanwhile.
    async fn until_gone(&mut self) -> io::Result<()> {
        while self.stream.read_buf(&mut self.buffer).await? > 0 {}
        Ok(())
    }
}

/// Bytes of an answer that go out at once where it drips.
const DRIP: usize = 32;

/// What happens to the connection after an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Next,
    Close,
    Reset,
    Hang,
}

/// A reply in bytes.
struct Delivery {
    wait: Duration,
    /// Before each few bytes.
    pause: Option<Duration>,
    bytes: Vec<u8>,
    /// Where the body begins.
    body_at: usize,
    end: End,
    is_completion: bool,
}

impl Delivery {
    fn of(reply: Reply, request: &Json) -> Self {
        match reply {
            Reply::Text(text) => Delivery::json(&whole_completion(request, &[text])),
            Reply::Texts(texts) => Delivery::json(&whole_completion(request, &texts)),
            Reply::Completion {
                text,
                finish_reason,
                usage,
                model,
            } => {
                let mut choice = json!({ "index": 0, "message": { "role": "assistant", "content": text } });
                if let Some(reason) = finish_reason {
                    choice["finish_reason"] = reason.into();
                }
                let mut body =
                    json!({ "id": "chatcmpl-test", "object": "chat.completion", "created": 0, "choices": [choice] });
                if let Some(usage) = usage {
                    body["usage"] = usage;
                }
                if let Some(model) = model {
                    body["model"] = model.into();
                }
                Delivery::json(&body)
            }
            Reply::Json(body) => Delivery::json(&body),
            Reply::Status { status, headers, body } => Delivery::status(status, &headers, &body),
            Reply::Hang => Delivery::nothing(End::Hang),
            Reply::Close => Delivery::nothing(End::Close),
            Reply::Reset => Delivery::nothing(End::Reset),
            Reply::CutBody => Delivery::of(Reply::Cut(Box::new(Reply::text("SELECT 1"))), request),
            Reply::Cut(reply) => {
                let mut delivery = Delivery::of(*reply, request);
                let body = delivery.bytes.len() - delivery.body_at;
                delivery.bytes.truncate(delivery.body_at + body / 2);
                delivery.is_completion = false;
                if delivery.end == End::Next {
                    delivery.end = End::Close;
                }
                delivery
            }
            Reply::Drip { pause, reply } => Delivery {
                pause: Some(pause),
                ..Delivery::of(*reply, request)
            },
            Reply::Slow(wait, reply) => {
                let delivery = Delivery::of(*reply, request);
                Delivery {
                    wait: wait + delivery.wait,
                    ..delivery
                }
            }
        }
    }

    fn nothing(end: End) -> Self {
        Delivery {
            wait: Duration::ZERO,
            pause: None,
            bytes: Vec::new(),
            body_at: 0,
            end,
            is_completion: false,
        }
    }

    fn json(body: &Json) -> Self {
        let headers = [("content-type".to_owned(), "application/json".to_owned())];
        Delivery {
            is_completion: has_text(body),
            ..Delivery::status(200, &headers, &body.to_string())
        }
    }

    fn status(status: u16, headers: &[(String, String)], body: &str) -> Self {
        let mut head = format!("HTTP/1.1 {status} Status\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        Delivery {
            body_at: head.len(),
            bytes: [head.as_bytes(), body.as_bytes()].concat(),
            is_completion: status == 200 && serde_json::from_str(body).is_ok_and(|body| has_text(&body)),
            ..Delivery::nothing(End::Next)
        }
    }

    fn is_whole(&self) -> bool {
        self.end == End::Next
    }
}

/// Whether a body is a completion with text that a client can use.
fn has_text(body: &Json) -> bool {
    let content = &body["choices"][0]["message"]["content"];
    match content {
        Json::String(text) => !text.trim().is_empty(),
        Json::Array(parts) => !parts.is_empty(),
        _ => false,
    }
}

/// A completion as OpenAI's server gives it, with token counts that depend on the texts alone.
fn whole_completion(request: &Json, texts: &[String]) -> Json {
    let prompt: usize = request["messages"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|message| message["content"].as_str())
        .map(|content| content.len().div_ceil(4))
        .sum();
    let wanted = request["n"].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(1);
    let mut completion = 0;
    let choices: Vec<Json> = texts
        .iter()
        .cycle()
        .take(wanted)
        .enumerate()
        .map(|(index, text)| {
            let text = in_format(text, &request["response_format"]);
            completion += text.len().div_ceil(4);
            let mut choice = json!({
                "index": index,
                "message": { "role": "assistant", "content": text },
                "finish_reason": "stop",
            });
            if request["logprobs"] == true {
                choice["logprobs"] = json!({ "content": logprobs(&text) });
            }
            choice
        })
        .collect();
    json!({
        "id": "chatcmpl-test",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"].as_str().unwrap_or("tester"),
        "system_fingerprint": "fp_test",
        "choices": choices,
        "usage": { "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion },
    })
}

/// A text as a server would give it that keeps to a JSON Schema: the first string that the schema wants is the text. A text
/// that is an object already stays as it is.
fn in_format(text: &str, format: &Json) -> String {
    if format["type"] != "json_schema" || serde_json::from_str::<Json>(text).is_ok_and(|json| json.is_object()) {
        return text.to_owned();
    }
    let mut text = Some(text);
    filled(&format["json_schema"]["schema"], &mut text).to_string()
}

fn filled(schema: &Json, text: &mut Option<&str>) -> Json {
    if let Some(value) = schema["enum"].get(0) {
        return value.clone();
    }
    match schema["type"].as_str() {
        Some("string") => text.take().unwrap_or_default().into(),
        Some("array") => json!([]),
        Some("integer" | "number") => 0.into(),
        Some("boolean") => false.into(),
        Some("null") => Json::Null,
        _ => {
            let properties = schema["properties"].as_object().into_iter().flatten();
            let fields = properties.map(|(name, schema)| (name.clone(), filled(schema, text)));
            Json::Object(fields.collect())
        }
    }
}

/// A token a word, each nearly sure.
fn logprobs(text: &str) -> Vec<Json> {
    text.split_inclusive(' ')
        .map(|token| json!({ "token": token, "logprob": -0.05, "bytes": token.as_bytes(), "top_logprobs": [] }))
        .collect()
}
