//! One file over HTTP, continued where it broke off.

use std::time::Duration;

use reqwest::header::{CONTENT_RANGE, RANGE};
use reqwest::{Client, Response, StatusCode};
use tokio::fs::File;
use tokio::io::AsyncWriteExt as _;

use super::pull::{FetchError, Target, length};

/// Short: behind many firewalls the hub never answers, and other sources wait.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Between two pieces of the body.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Breaks in a row, without a byte between them, before the source is given up.
const BREAKS: u32 = 3;

/// Appends what is missing of `url`'s body to the partial file.
pub(super) async fn fetch(url: &str, target: &Target<'_>) -> Result<(), FetchError> {
    let client = client()?;
    let mut breaks = 0;
    loop {
        let before = length(target.part);
        match continue_from(&client, url, before, target).await {
            Ok(()) => return Ok(()),
            Err(Break::Final(error)) => return Err(error),
            Err(Break::Again(reason)) => {
                breaks = if length(target.part) > before { 1 } else { breaks + 1 };
                if breaks >= BREAKS {
                    return Err(FetchError::Source(reason));
                }
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_millis(500) * breaks) => {}
                    () = target.until_cancelled() => return Err(FetchError::Cancelled),
                }
            }
        }
    }
}

/// How an attempt ended short of the whole file.
enum Break {
    Again(String),
    Final(FetchError),
}

impl From<std::io::Error> for Break {
    fn from(error: std::io::Error) -> Self {
        Break::Final(error.into())
    }
}

fn client() -> Result<Client, FetchError> {
    super::server::ensure_tls_provider();
    Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        .user_agent(concat!("dinsql/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| FetchError::Source(chain(&error)))
}

async fn continue_from(client: &Client, url: &str, offset: u64, target: &Target<'_>) -> Result<(), Break> {
    let mut request = client.get(url);
    if offset > 0 {
        request = request.header(RANGE, format!("bytes={offset}-"));
    }
    let mut response = tokio::select! {
        // A host that cannot be reached now will not be in a second: no second attempt.
        answer = request.send() => answer.map_err(|error| Break::Final(FetchError::Source(chain(&error))))?,
        () = target.until_cancelled() => return Err(Break::Final(FetchError::Cancelled)),
    };
    let start = start_of(&response, offset, target.size).map_err(|reason| Break::Final(FetchError::Source(reason)))?;
    let mut file = File::options()
        .create(true)
        .truncate(start == 0)
        .append(start > 0)
        .write(true)
        .open(target.part)
        .await?;
    let mut done = start;
    loop {
        let piece = tokio::select! {
            piece = response.chunk() => piece,
            () = target.until_cancelled() => {
                file.flush().await?;
                return Err(Break::Final(FetchError::Cancelled));
            }
        };
        match piece {
            Ok(Some(bytes)) if done + bytes.len() as u64 > target.size => {
                file.flush().await?;
                let reason = format!("sends more than the expected {} bytes", target.size);
                return Err(Break::Final(FetchError::Source(reason)));
            }
            Ok(Some(bytes)) => {
                file.write_all(&bytes).await?;
                done += bytes.len() as u64;
                target.report(done);
            }
            ended => {
                file.flush().await?;
                return match ended {
                    Err(error) => Err(Break::Again(chain(&error))),
                    Ok(_) if done < target.size => Err(Break::Again(format!("ended after {done} bytes"))),
                    Ok(_) => Ok(()),
                };
            }
        }
    }
}

/// Where the body starts in the file, by what the server says; refuses what cannot be the file.
fn start_of(response: &Response, offset: u64, size: u64) -> Result<u64, String> {
    let refuse_length = |found: u64| format!("offers a file of {found} bytes, expected {size}");
    match response.status() {
        StatusCode::OK => match response.content_length() {
            Some(found) if found != size => Err(refuse_length(found)),
            // A server without ranges sends all of it again.
            _ => Ok(0),
        },
        StatusCode::PARTIAL_CONTENT => {
            let header = response
                .headers()
                .get(CONTENT_RANGE)
                .and_then(|value| value.to_str().ok())
                .unwrap_or_default();
            let (range, total) = header
                .strip_prefix("bytes ")
                .and_then(|rest| rest.split_once('/'))
                .unwrap_or_default();
            if let Ok(found) = total.parse::<u64>()
                && found != size
            {
                return Err(refuse_length(found));
            }
            match range.split_once('-').and_then(|(first, _)| first.parse::<u64>().ok()) {
                Some(first) if first == offset => Ok(offset),
                _ => Err(format!("answers a request for byte {offset} with the range `{header}`")),
            }
        }
        status => Err(format!("answers `{status}`")),
    }
}

/// An error with its causes: the outer text alone ("error sending request") tells a user nothing.
fn chain(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}
