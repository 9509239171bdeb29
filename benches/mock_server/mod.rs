//! A server that speaks just enough HTTP/1.1 and OpenAI to measure a client: one thread, connections kept alive, an answer
//! computed from the request, a latency if wished, and counts of what came in.
//!
//! It runs in a process of its own, so that it can have its own core: the benchmark starts itself again
//! ([`MockServer::start`]), and the copy calls [`serve`], says its port on standard output, ends when its standard input
//! closes (so it never outlives the benchmark), and says last what traffic it saw.

#![allow(dead_code, reason = "each benchmark is a crate of its own and needs a part of this")]

use std::io::{self, BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::process::{Child, ChildStdout, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use crate::measure::on_core;

/// Tells the copy of the benchmark that it is the server, and its latency in milliseconds.
const LATENCY_VARIABLE: &str = "DINSQL_BENCH_SERVER_LATENCY_MS";

/// From a request's body to the text of the completion.
pub type Answer = fn(&[u8]) -> String;

/// What a server saw.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Traffic {
    pub requests: usize,
    /// Of requests that were whole; without latency each is answered before the next is read.
    pub max_in_flight: usize,
    /// From the first request to the last answer.
    pub seconds: f64,
    /// Of these, the seconds in which the server had its core, where the system tells: near `seconds`, the server was the
    /// bottleneck and the figures say little about the client.
    pub busy_seconds: Option<f64>,
}

impl Traffic {
    /// Share of the time in which the server worked, for a table.
    pub fn busy(&self) -> String {
        self.busy_seconds.map_or_else(
            || "unknown".into(),
            |busy| format!("{:.0} %", busy / self.seconds.max(f64::EPSILON) * 100.0),
        )
    }
}

/// A running server, seen from the benchmark.
pub struct MockServer {
    child: Child,
    said: BufReader<ChildStdout>,
    pub base_url: String,
}

impl MockServer {
    /// Starts a server that waits so long before each answer.
    pub fn start(latency: Duration, core: Option<usize>) -> io::Result<Self> {
        let mut child = on_core(std::env::current_exe()?, core)
            .env(LATENCY_VARIABLE, latency.as_millis().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut said = BufReader::new(stdout);
        let port = next_line(&mut said)?;
        Ok(MockServer {
            child,
            said,
            base_url: format!("http://{}:{port}/v1", Ipv4Addr::LOCALHOST),
        })
    }

    /// Ends the server and tells what it saw.
    pub fn end(mut self) -> io::Result<Traffic> {
        drop(self.child.stdin.take());
        let traffic = serde_json::from_str(&next_line(&mut self.said)?)?;
        self.child.wait()?;
        Ok(traffic)
    }
}

fn next_line(said: &mut BufReader<ChildStdout>) -> io::Result<String> {
    let mut line = String::new();
    said.read_line(&mut line)?;
    Ok(line.trim().to_owned())
}

/// The latency to serve with, where this process is the server.
pub fn asked_to_serve() -> Option<Duration> {
    let milliseconds = std::env::var(LATENCY_VARIABLE).ok()?.parse().ok()?;
    Some(Duration::from_millis(milliseconds))
}

/// Serves until standard input closes.
pub fn serve(latency: Duration, answer: Answer) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let counts = Arc::new(Mutex::new(Counts::default()));
    runtime.block_on(async {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        println!("{}", listener.local_addr()?.port());
        let (close, closed) = oneshot::channel::<()>();
        thread::spawn(move || {
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            let _ = close.send(());
        });
        tokio::select! {
            result = accept(&listener, latency, answer, &counts) => result,
            _ = closed => Ok(()),
        }
    })?;
    let traffic = counts.lock().unwrap_or_else(PoisonError::into_inner).traffic();
    // A benchmark that failed no longer listens.
    let _ = writeln!(io::stdout(), "{}", serde_json::to_string(&traffic)?);
    Ok(())
}

#[derive(Default)]
struct Counts {
    requests: usize,
    in_flight: usize,
    max_in_flight: usize,
    first: Option<(Instant, Option<f64>)>,
    last: Option<Instant>,
}

impl Counts {
    fn arrived(&mut self) {
        self.requests += 1;
        self.in_flight += 1;
        self.max_in_flight = self.max_in_flight.max(self.in_flight);
        self.first.get_or_insert_with(|| (Instant::now(), busy_seconds()));
    }

    fn answered(&mut self) {
        self.in_flight -= 1;
        self.last = Some(Instant::now());
    }

    /// Called on the main thread, once nothing comes in any more: waiting costs no processor time.
    fn traffic(&self) -> Traffic {
        let (seconds, busy_seconds) = match (self.first, self.last) {
            (Some((first, busy_before)), Some(last)) => (
                (last - first).as_secs_f64(),
                busy_before.zip(busy_seconds()).map(|(before, after)| after - before),
            ),
            _ => (0.0, None),
        };
        Traffic {
            requests: self.requests,
            max_in_flight: self.max_in_flight,
            seconds,
            busy_seconds,
        }
    }
}

/// Time that the main thread, which does all the serving, has had a core.
fn busy_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/schedstat").ok()?;
    let nanoseconds: u64 = text.split(' ').next()?.parse().ok()?;
    Some(nanoseconds as f64 / 1e9)
}

async fn accept(
    listener: &TcpListener,
    latency: Duration,
    answer: Answer,
    counts: &Arc<Mutex<Counts>>,
) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        let counts = Arc::clone(counts);
        // A broken connection is the client's affair: its run fails, and says so.
        tokio::spawn(async move {
            let _ = converse(stream, latency, answer, &counts).await;
        });
    }
}

/// Answers the requests of one connection, one after the other.
async fn converse(mut stream: TcpStream, latency: Duration, answer: Answer, counts: &Mutex<Counts>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let count = |change: fn(&mut Counts)| change(&mut counts.lock().unwrap_or_else(PoisonError::into_inner));
    let mut received = Vec::with_capacity(16 << 10);
    loop {
        let (head, end) = loop {
            if let Some((head, body)) = sizes(&received)
                && received.len() >= head + body
            {
                break (head, head + body);
            }
            if stream.read_buf(&mut received).await? == 0 {
                return Ok(());
            }
        };
        let response = if received.starts_with(b"POST ") {
            count(Counts::arrived);
            let response = response("200 OK", &completion(&answer(&received[head..end])));
            if !latency.is_zero() {
                tokio::time::sleep(spread(latency, &received[head..end])).await;
            }
            count(Counts::answered);
            response
        } else {
            response("404 Not Found", "{}")
        };
        received.drain(..end);
        stream.write_all(response.as_bytes()).await?;
    }
}

/// A quarter more or less than the latency, as the request has it: 200 ms become 150 to 250.
fn spread(latency: Duration, body: &[u8]) -> Duration {
    let digest = blake3::hash(body);
    let share = f64::from(digest.as_bytes()[0]) / 255.0;
    latency.mul_f64(0.75 + 0.5 * share)
}

/// Bytes of a request's head and body, once the head is there.
fn sizes(received: &[u8]) -> Option<(usize, usize)> {
    const BLANK_LINE: &[u8] = b"\r\n\r\n";
    let head = received
        .windows(BLANK_LINE.len())
        .position(|window| window == BLANK_LINE)?
        + BLANK_LINE.len();
    let body = String::from_utf8_lossy(&received[..head])
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or_default();
    Some((head, body))
}

fn completion(text: &str) -> String {
    json!({
        "id": "mock",
        "object": "chat.completion",
        "created": 0,
        "model": "mock",
        "choices": [{
            "index": 0,
            "message": { "role": "assistant", "content": text },
            "finish_reason": "stop",
        }],
        "usage": { "prompt_tokens": 500, "completion_tokens": 20, "total_tokens": 520 },
    })
    .to_string()
}

fn response(status: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}
