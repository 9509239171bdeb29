//! An OpenAI-compatible server that answers as a test tells it to: with completions, with faults of servers, or not at all.
//!
//! In: a closure from a request's body and number to a [`Reply`]. Out: an address, and afterwards every request that came.
//! One thread, plain HTTP/1.1 with connections that stay open, nothing parsed that is not needed: it must never be what a
//! test waits for.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value as Json, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

/// What the server does with a request.
#[derive(Debug, Clone)]
pub enum Reply {
    /// A completion that ended by itself, with usage and the model that was asked for.
    Text(String),
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
    /// The answer ends in the middle of its body.
    CutBody,
    /// Something else, later.
    Slow(Duration, Box<Reply>),
}

impl Reply {
    pub fn text(text: impl Into<String>) -> Self {
        Reply::Text(text.into())
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
}

/// A request for a completion, as it came.
#[derive(Debug, Clone)]
pub struct Received {
    pub body: Json,
    pub authorization: Option<String>,
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

struct Shared {
    behaviour: Box<Behaviour>,
    received: Mutex<Vec<Received>>,
    models: Vec<String>,
}

impl Shared {
    fn received(&self) -> MutexGuard<'_, Vec<Received>> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// Starts on a free port. `behaviour` gets a request's body and its number, from 0.
    pub fn start(behaviour: impl Fn(&Json, usize) -> Reply + Send + Sync + 'static) -> Self {
        let shared = Arc::new(Shared {
            behaviour: Box::new(behaviour),
            received: Mutex::new(Vec::new()),
            models: vec!["tester".into(), "tester-large".into()],
        });
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
        self.shared.received().clone()
    }

    /// How many requests for completions came so far.
    pub fn count(&self) -> usize {
        self.shared.received().len()
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

async fn serve(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(32 << 10);
    while let Some(request) = read_request(&mut stream, &mut buffer).await? {
        let mut reply = if request.is_post && request.path.ends_with("/chat/completions") {
            let body: Json = serde_json::from_slice(&request.body)?;
            let number = {
                let mut received = shared.received();
                received.push(Received {
                    body: body.clone(),
                    authorization: request.authorization,
                });
                received.len() - 1
            };
            match (shared.behaviour)(&body, number) {
                Reply::Text(text) => Reply::Json(whole_completion(&body, &text)),
                Reply::Slow(wait, inner) => match *inner {
                    Reply::Text(text) => Reply::Slow(wait, Box::new(Reply::Json(whole_completion(&body, &text)))),
                    other => Reply::Slow(wait, Box::new(other)),
                },
                other => other,
            }
        } else if request.path.ends_with("/models") {
            let models: Vec<Json> = shared
                .models
                .iter()
                .map(|id| json!({ "id": id, "object": "model", "created": 0, "owned_by": "test" }))
                .collect();
            Reply::Json(json!({ "object": "list", "data": models }))
        } else {
            Reply::plain(404, "text/plain", "not found")
        };
        while let Reply::Slow(wait, inner) = reply {
            tokio::time::sleep(wait).await;
            reply = *inner;
        }
        if !answer(&mut stream, reply).await? {
            return stream.shutdown().await;
        }
    }
    Ok(())
}

struct Request {
    is_post: bool,
    path: String,
    authorization: Option<String>,
    body: Vec<u8>,
}

/// The next request of a connection; none where the client has closed it.
async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<Option<Request>> {
    let head = loop {
        if let Some(end) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break end;
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    };
    let text = String::from_utf8_lossy(&buffer[..head]).into_owned();
    let mut lines = text.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut length = 0_usize;
    let mut authorization = None;
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().map_err(io::Error::other)?;
        } else if name.eq_ignore_ascii_case("authorization") {
            authorization = Some(value.trim().to_owned());
        }
    }
    let end = head + 4 + length;
    while buffer.len() < end {
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
    let body = buffer[head + 4..end].to_vec();
    buffer.drain(..end);
    Ok(Some(Request {
        is_post: method == "POST",
        path: path.to_owned(),
        authorization,
        body,
    }))
}

/// Answers; says whether the connection goes on.
async fn answer(stream: &mut TcpStream, reply: Reply) -> io::Result<bool> {
    match reply {
        Reply::Text(text) => send_json(stream, &whole_completion(&json!({}), &text)).await,
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
            send_json(stream, &body).await
        }
        Reply::Json(body) => send_json(stream, &body).await,
        Reply::Status { status, headers, body } => send(stream, status, &headers, &body).await,
        Reply::Hang => std::future::pending().await,
        Reply::Close => Ok(false),
        Reply::CutBody => {
            let body = whole_completion(&json!({}), "SELECT 1").to_string();
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            stream.write_all(head.as_bytes()).await?;
            stream.write_all(&body.as_bytes()[..body.len() / 2]).await?;
            Ok(false)
        }
        Reply::Slow(..) => unreachable!("waited for above"),
    }
}

async fn send_json(stream: &mut TcpStream, body: &Json) -> io::Result<bool> {
    let headers = [("content-type".to_owned(), "application/json".to_owned())];
    send(stream, 200, &headers, &body.to_string()).await
}

async fn send(stream: &mut TcpStream, status: u16, headers: &[(String, String)], body: &str) -> io::Result<bool> {
    let mut bytes = format!("HTTP/1.1 {status} Status\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        bytes.push_str(&format!("{name}: {value}\r\n"));
    }
    bytes.push_str("\r\n");
    bytes.push_str(body);
    stream.write_all(bytes.as_bytes()).await?;
    Ok(true)
}

/// A completion as OpenAI's server gives it, with token counts that depend on the texts alone.
fn whole_completion(request: &Json, text: &str) -> Json {
    let prompt: usize = request["messages"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|message| message["content"].as_str())
        .map(|content| content.len().div_ceil(4))
        .sum();
    let completion = text.len().div_ceil(4);
    json!({
        "id": "chatcmpl-test",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"].as_str().unwrap_or("tester"),
        "system_fingerprint": "fp_test",
        "choices": [{
            "index": 0,
            "message": { "role": "assistant", "content": text },
            "finish_reason": "stop",
        }],
        "usage": { "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion },
    })
}
