//! An OpenAI-compatible server that answers as a test tells it to: with completions, with faults of servers, or not at all.
//!
//! In: a closure from a request's body and number to a [`Reply`]. Out: an address, and afterwards every request that came,
//! with what became of it: the server counts whole completions, since those are what a provider sends a bill for.
//! One thread, plain HTTP/1.1 with connections that stay open, nothing parsed that is not needed: it must never be what a
//! test waits for.

mod reply;

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

pub use reply::Reply;
use reply::{Delivery, End};

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

    fn arrived(&self, request: &Request, body: &Json) -> Visit<'_> {
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
        Visit {
            shared: self,
            number: ledger.received.len() - 1,
            in_flight: true,
        }
    }
}

/// Letters of a question that name a body of which only the digest is kept.
const NAME_LENGTH: usize = 80;

/// A request that is being answered; it is in flight until its answer goes out, or its connection ends.
struct Visit<'a> {
    shared: &'a Shared,
    number: usize,
    in_flight: bool,
}

impl Visit<'_> {
    /// The last bytes are about to go out.
    fn answered(&mut self, delivery: &Delivery) {
        self.leave();
        if delivery.is_whole() {
            self.settle(Some(Instant::now()), delivery.is_completion);
        }
    }

    /// They did not arrive.
    fn withdraw(&mut self) {
        self.settle(None, false);
    }

    fn settle(&self, answered: Option<Instant>, completed: bool) {
        let ledger = &mut *self.shared.ledger();
        let received = &mut ledger.received[self.number];
        received.answered = answered;
        let was_completed = std::mem::replace(&mut received.completed, completed);
        if let Some(asked) = ledger.by_body.get_mut(&received.digest) {
            asked.completed = asked.completed + usize::from(completed) - usize::from(was_completed);
        }
    }

    fn leave(&mut self) {
        if std::mem::take(&mut self.in_flight) {
            self.shared.ledger().in_flight -= 1;
        }
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.leave();
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
            let mut visit = shared.arrived(&request, &body);
            let delivery = Delivery::of((shared.behaviour)(&body, visit.number), &body);
            let sent = connection.send(&delivery, || visit.answered(&delivery)).await;
            if sent.is_err() {
                visit.withdraw();
            }
            sent?;
            if delivery.end == End::Hang {
                return connection.until_gone().await;
            }
            delivery.end
        } else {
            let reply = if request.path.ends_with("/models") {
                Reply::Json(json!({ "object": "list", "data": shared.models }))
            } else {
                Reply::plain(404, "text/plain", "not found")
            };
            let delivery = Delivery::of(reply, &Json::Null);
            connection.send(&delivery, || {}).await?;
            delivery.end
        };
        match end {
            End::Next => {}
            End::Reset => return connection.stream.set_zero_linger(),
            End::Close | End::Hang => return connection.stream.shutdown().await,
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

    /// Sends an answer; `before_last` is called before its last bytes leave, since the client may act on them at once.
    async fn send(&mut self, delivery: &Delivery, before_last: impl FnOnce()) -> io::Result<()> {
        self.wait(delivery.wait).await?;
        let length = if delivery.pause.is_some() {
            DRIP
        } else {
            delivery.bytes.len()
        };
        let mut before_last = Some(before_last);
        let mut parts = delivery.bytes.chunks(length.max(1)).peekable();
        while let Some(part) = parts.next() {
            self.wait(delivery.pause.unwrap_or_default()).await?;
            if parts.peek().is_none()
                && let Some(note) = before_last.take()
            {
                note();
            }
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
