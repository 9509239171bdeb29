//! How long servers ask to wait, and what they say of their limits: in sentences, in JSON, in headers.

use std::time::Duration;

/// How long a sentence in lower case asks to wait.
pub(super) fn wait_in_words(said: &str) -> Option<Duration> {
    [
        "again in ",
        "retry in ",
        "retry after ",
        "retrying in ",
        "wait for ",
        "wait ",
        "resets in ",
        "reset in ",
    ]
    .iter()
    .find_map(|lead| {
        said.match_indices(lead)
            .find_map(|(at, _)| leading_duration(&said[at + lead.len()..]).map(|(wait, _)| wait))
    })
}

/// A span of time as headers and servers write it: `6m0s`, `20ms`, `1.5s`, `2h3m`, `6 minutes`, or bare seconds.
pub fn duration_words(text: &str) -> Option<Duration> {
    let (wait, rest) = leading_duration(text)?;
    rest.trim().is_empty().then_some(wait)
}

/// The span of time that a text begins with, and the rest.
fn leading_duration(text: &str) -> Option<(Duration, &str)> {
    let mut rest = text.trim_start();
    let mut total = None::<f64>;
    while let Some((number, after)) = leading_number(rest) {
        let after_space = after.trim_start();
        let unit_end = after_space
            .find(|letter: char| !letter.is_alphabetic())
            .unwrap_or(after_space.len());
        let (unit, after_unit) = after_space.split_at(unit_end);
        match unit_seconds(unit) {
            Some(unit) => {
                total = Some(total.unwrap_or_default() + number * unit);
                rest = after_unit;
            }
            // A number alone is seconds; behind units it belongs to the next sentence.
            None if total.is_none() => {
                total = Some(number);
                rest = after;
                break;
            }
            None => break,
        }
        // "1m 30s", but not "20s. 3 more".
        let next = rest.trim_start();
        if next.starts_with(|letter: char| letter.is_ascii_digit()) {
            rest = next;
        }
    }
    Some((seconds(total?)?, rest))
}

fn leading_number(text: &str) -> Option<(f64, &str)> {
    let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
    let whole = digits(text);
    let fraction = text[whole..].strip_prefix('.').map_or(0, digits);
    // A point without digits behind it ends the sentence.
    let end = if fraction > 0 { whole + 1 + fraction } else { whole };
    let (number, rest) = text.split_at(end);
    (whole > 0)
        .then(|| number.parse().ok().map(|number| (number, rest)))
        .flatten()
}

fn unit_seconds(unit: &str) -> Option<f64> {
    Some(match unit.to_lowercase().as_str() {
        "ns" => 1e-9,
        "us" | "µs" | "μs" => 1e-6,
        "ms" | "millisecond" | "milliseconds" => 1e-3,
        "s" | "sec" | "secs" | "second" | "seconds" => 1.0,
        "m" | "min" | "mins" | "minute" | "minutes" => 60.0,
        "h" | "hr" | "hrs" | "hour" | "hours" => 3600.0,
        "d" | "day" | "days" => 86400.0,
        _ => return None,
    })
}

/// Seconds as a span; none for what is no length of time, and never so long that adding to it could overflow.
pub(super) fn seconds(number: f64) -> Option<Duration> {
    (number.is_finite() && number >= 0.0).then(|| Duration::from_secs_f64(number.min(1e9)))
}

/// `Retry-After` as seconds or as an HTTP date, from `now`.
pub fn retry_after(value: &str, now: jiff::Timestamp) -> Option<Duration> {
    let value = value.trim();
    if let Ok(number) = value.parse::<f64>() {
        return seconds(number);
    }
    match jiff::fmt::rfc2822::parse(value) {
        Ok(date) => Some(until(date.timestamp(), now)),
        Err(_) => duration_words(value),
    }
}

/// What the headers of an answer say of the limits.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RateHint {
    pub remaining_requests: Option<u64>,
    pub reset_requests: Option<Duration>,
    pub remaining_tokens: Option<u64>,
    pub reset_tokens: Option<Duration>,
    pub retry_after: Option<Duration>,
}

/// Names of (what remains, when it is whole again); the first pair of which anything is there counts.
const REQUEST_HEADERS: &[(&str, &str)] = &[
    ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    (
        "anthropic-ratelimit-requests-remaining",
        "anthropic-ratelimit-requests-reset",
    ),
    // OpenRouter.
    ("x-ratelimit-remaining", "x-ratelimit-reset"),
];
const TOKEN_HEADERS: &[(&str, &str)] = &[
    ("x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
    (
        "anthropic-ratelimit-tokens-remaining",
        "anthropic-ratelimit-tokens-reset",
    ),
    (
        "anthropic-ratelimit-input-tokens-remaining",
        "anthropic-ratelimit-input-tokens-reset",
    ),
    // Cerebras, Mistral.
    ("x-ratelimit-remaining-tokens-minute", "x-ratelimit-reset-tokens-minute"),
];

/// The limits that an answer's headers tell of; `header` looks a name in lower case up.
pub fn rate_hint<'a>(header: impl Fn(&str) -> Option<&'a str>, now: jiff::Timestamp) -> RateHint {
    let pair = |names: &[(&str, &str)]| {
        names
            .iter()
            .map(|(remaining, reset)| {
                (
                    header(remaining).and_then(count),
                    header(reset).and_then(|value| span(value, now)),
                )
            })
            .find(|found| *found != (None, None))
            .unwrap_or_default()
    };
    let (remaining_requests, reset_requests) = pair(REQUEST_HEADERS);
    let (remaining_tokens, reset_tokens) = pair(TOKEN_HEADERS);
    let milliseconds = header("retry-after-ms").and_then(|value| value.trim().parse::<f64>().ok());
    RateHint {
        remaining_requests,
        reset_requests,
        remaining_tokens,
        reset_tokens,
        retry_after: milliseconds
            .and_then(|milliseconds| seconds(milliseconds / 1000.0))
            .or_else(|| header("retry-after").and_then(|value| retry_after(value, now))),
    }
}

/// A count, which some servers give as a fraction or below zero.
fn count(value: &str) -> Option<u64> {
    let value = value.trim();
    value.parse().ok().or_else(|| {
        let number = value.parse::<f64>().ok().filter(|number| number.is_finite())?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the range is clamped"
        )]
        Some(number.clamp(0.0, 9e15) as u64)
    })
}

/// Until a limit is whole again: a span, an RFC 3339 time, or a Unix time in seconds or milliseconds.
fn span(value: &str, now: jiff::Timestamp) -> Option<Duration> {
    let value = value.trim();
    if let Ok(time) = value.parse::<jiff::Timestamp>() {
        return Some(until(time, now));
    }
    let Ok(number) = value.parse::<i64>() else {
        return duration_words(value);
    };
    // No limit lasts thirty years, so a number so large is a point in time.
    let time = match number {
        1_000_000_000_000.. => jiff::Timestamp::from_millisecond(number).ok()?,
        1_000_000_000.. => jiff::Timestamp::from_second(number).ok()?,
        _ => return duration_words(value),
    };
    Some(until(time, now))
}

fn until(time: jiff::Timestamp, now: jiff::Timestamp) -> Duration {
    Duration::try_from(time.duration_since(now)).unwrap_or(Duration::ZERO)
}
