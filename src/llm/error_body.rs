//! What the body of a refusal says, whatever its shape: objects in objects, lists, FastAPI's `detail`, gateways that wrap each
//! other's answers, plain text, HTML pages.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value as Json;

use super::waits::{duration_words, seconds, wait_in_words};

/// The code of a body that no API wrote: an HTML page, or nothing. The words on a page say nothing.
pub(super) const PAGE: &str = "(page)";
/// The code of a wait that no run should sit out.
pub(super) const LONG_WAIT: &str = "(long wait)";
/// From here on a wait is a spent quota; Azure and OpenAI ask for a day and more with an ordinary 429.
pub(super) const LONGEST_WAIT: Duration = Duration::from_hours(1);

/// Parameters that we send or a server may confuse with ours, the longer of two alike first.
pub(super) const PARAMETERS: &[&str] = &[
    "max_completion_tokens",
    "max_tokens",
    "response_format",
    "logprobs",
    "seed",
    "stop",
    "n",
    "temperature",
    "top_p",
];
/// What a body says, gathered from whatever shape it has. Only fields that servers fill are read, so that a prompt echoed
/// in the body (`input`, `flagged_input`, `failed_generation`) cannot be taken for the server's words.
#[derive(Default)]
pub(super) struct Signs {
    /// In lower case.
    pub codes: BTreeSet<String>,
    /// All sentences, in lower case.
    pub said: String,
    /// The sentence for people.
    pub words: String,
    pub parameter: Option<String>,
    pub wait: Option<Duration>,
    /// An HTTP status given as a number inside.
    pub status: Option<u16>,
}

/// JSON within JSON strings within JSON, as gateways wrap each other's answers.
const DEEPEST: usize = 8;
/// Bodies longer than this are not parsed; only their beginning is read.
const LONGEST_BODY: usize = 1 << 20;

impl Signs {
    pub fn read(body: &str) -> Signs {
        let mut signs = Signs::default();
        let body = body.trim();
        // One event of a stream.
        let body = body.strip_prefix("data:").map_or(body, str::trim);
        let json = (body.len() <= LONGEST_BODY)
            .then(|| embedded(body))
            .flatten()
            // A lone string or number is text.
            .or_else(|| serde_json::from_str(body).ok().filter(Json::is_string));
        match json {
            Some(json) => {
                signs.gather(&json, 0);
                signs.words = sentence(&json, 0).unwrap_or_else(|| beginning(body, 1200).to_owned());
            }
            None if body.starts_with('<') || body.is_empty() => {
                signs.codes.insert(PAGE.to_owned());
                signs.words = page_words(beginning(body, 1 << 16));
            }
            None => {
                let text = beginning(body, 1 << 16);
                signs.say(text);
                text.clone_into(&mut signs.words);
            }
        }
        signs.wait = signs.wait.or_else(|| wait_in_words(&signs.said));
        signs.parameter = signs.parameter.take().or_else(|| parameter_in_words(&signs.said));
        if signs.wait.is_some_and(|wait| wait > LONGEST_WAIT) {
            signs.codes.insert(LONG_WAIT.to_owned());
        }
        signs
    }

    fn say(&mut self, text: &str) {
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        self.said.push_str(&words.to_lowercase());
        self.said.push('\n');
    }

    fn gather(&mut self, json: &Json, depth: usize) {
        if depth > DEEPEST {
            return;
        }
        match json {
            Json::String(text) => match embedded(text) {
                Some(inner) => self.gather(&inner, depth + 1),
                None => self.say(text),
            },
            Json::Array(items) => items.iter().for_each(|item| self.gather(item, depth + 1)),
            Json::Object(fields) => fields.iter().for_each(|(key, value)| self.field(key, value, depth)),
            _ => {}
        }
    }

    fn field(&mut self, key: &str, value: &Json, depth: usize) {
        match key {
            "code" | "type" | "status" | "reason" | "statusCode" | "error_code" | "error_type" => match value {
                Json::String(code) => {
                    self.codes.insert(code.to_lowercase());
                }
                // An old Hugging Face server counts in `code`; what is no status of a failure is no status.
                Json::Number(number) => {
                    let status = number.as_u64().and_then(|number| u16::try_from(number).ok());
                    self.status = self.status.or(status.filter(|status| (400..600).contains(status)));
                }
                _ => {}
            },
            // `response_format.type` is about `response_format`; `messages` is no parameter that could be left out.
            "param" => {
                self.parameter = self
                    .parameter
                    .take()
                    .or_else(|| value.as_str().and_then(parameter_name));
            }
            // FastAPI: `["body", "seed"]`.
            "loc" => {
                let names = value.as_array().into_iter().flatten().filter_map(Json::as_str);
                let name = names.filter(|name| *name != "body").find_map(parameter_name);
                self.parameter = self.parameter.take().or(name);
            }
            "retryDelay" => self.wait = self.wait.or_else(|| value.as_str().and_then(duration_words)),
            "retry_after" | "retry_after_seconds" | "retryAfter" => {
                let seconds = value.as_f64().and_then(seconds);
                self.wait = self
                    .wait
                    .or_else(|| seconds.or_else(|| value.as_str().and_then(duration_words)));
            }
            "message" | "msg" | "detail" | "details" | "title" | "error" | "errors" | "innererror" | "metadata"
            | "raw" | "reasons" | "violations" | "quotaId" | "quotaMetric" | "description" | "error_description"
            | "error_message" | "errorMessage" => self.gather(value, depth + 1),
            _ => {}
        }
    }
}

/// The JSON object or list that a string holds, where it holds one.
fn embedded(text: &str) -> Option<Json> {
    let text = text.trim();
    text.starts_with(['{', '['])
        .then(|| serde_json::from_str(text).ok())
        .flatten()
}

/// The message inside an error body of whatever shape: `{error: {message}}`, `{error: "…"}`, `{message}`, `{detail}`, a
/// list of these. A gateway's empty phrase is followed by what it got from the server behind it.
fn sentence(json: &Json, depth: usize) -> Option<String> {
    if depth > DEEPEST {
        return None;
    }
    let find = |json: &Json| sentence(json, depth + 1);
    match json {
        Json::String(text) => match embedded(text) {
            Some(inner) => find(&inner),
            None => (!text.trim().is_empty()).then(|| text.clone()),
        },
        Json::Array(items) => items.iter().find_map(find),
        Json::Object(fields) => {
            let keys = [
                "message",
                "error",
                "detail",
                "msg",
                "error_message",
                "errors",
                "title",
                "description",
            ];
            let words = keys.iter().find_map(|key| fields.get(*key).and_then(find));
            let behind = fields
                .get("metadata")
                .and_then(|metadata| metadata.get("raw"))
                .and_then(find);
            match (words, behind) {
                (Some(words), Some(behind)) => Some(format!("{words}: {behind}")),
                (words, behind) => words.or(behind),
            }
        }
        _ => None,
    }
}

/// At most 300 letters and an ellipsis, without breaks and control characters.
pub(super) fn one_line(text: &str) -> String {
    let text = beginning(text, 1 << 16).replace(char::is_control, " ");
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match flat.char_indices().nth(300) {
        Some((end, _)) => format!("{}…", &flat[..end]),
        None => flat,
    }
}

/// At most `bytes` of a text, cut between letters.
fn beginning(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

/// The title of an HTML page, or else its text.
fn page_words(page: &str) -> String {
    let lower = page.to_ascii_lowercase();
    let title = lower.find("<title>").and_then(|start| {
        let start = start + "<title>".len();
        let end = start + lower[start..].find("</title>")?;
        Some(page[start..end].trim()).filter(|title| !title.is_empty())
    });
    title.map_or_else(|| strip_tags(page), str::to_owned)
}

fn strip_tags(text: &str) -> String {
    let mut out = String::new();
    let mut inside = false;
    for letter in text.chars() {
        match letter {
            '<' => inside = true,
            '>' if inside => {
                inside = false;
                out.push(' ');
            }
            other if !inside => out.push(other),
            _ => {}
        }
    }
    out
}

/// A parameter as requests name it, from a server's path to it; none for parts of a request that are no parameters.
fn parameter_name(path: &str) -> Option<String> {
    let name = path.split(['.', '[']).next().unwrap_or_default().trim();
    match name {
        "" | "messages" | "prompt" | "model" | "input" | "body" | "contents" => None,
        "top_logprobs" => Some("logprobs".to_owned()),
        other => Some(other.to_owned()),
    }
}

/// The first parameter that a sentence in lower case names.
fn parameter_in_words(said: &str) -> Option<String> {
    // Spellings of one letter and of several words come first: a plain search would find them anywhere, or nowhere.
    const SPELLINGS: &[(&str, &str)] = &[
        ("'n'", "n"),
        ("`n`", "n"),
        ("\"n\"", "n"),
        ("parameter n ", "n"),
        ("n value", "n"),
        ("n = 1", "n"),
        ("n=1", "n"),
        ("n > 1", "n"),
        ("one completion choice", "n"),
        ("multiple candidates", "n"),
        ("top_logprobs", "logprobs"),
        ("json_schema", "response_format"),
        ("json schema", "response_format"),
        ("json mode", "response_format"),
        ("response format", "response_format"),
        ("structured output", "response_format"),
        ("guided decoding", "response_format"),
    ];
    let words = |name: &'static &'static str| {
        // "stop" is a common word: it counts where it is quoted.
        let is_plain = |at: usize| {
            let around = (said[..at].chars().next_back(), said[at + name.len()..].chars().next());
            let part = |letter: char| letter.is_alphanumeric() || letter == '_';
            let quoted = matches!(around, (Some('\'' | '`' | '"'), Some('\'' | '`' | '"')));
            !around.0.is_some_and(part) && !around.1.is_some_and(part) && (quoted || *name != "stop")
        };
        let at = said.match_indices(*name).map(|(at, _)| at).find(|at| is_plain(*at))?;
        Some((at, *name))
    };
    let spelt = SPELLINGS
        .iter()
        .filter_map(|(spelling, name)| Some((said.find(spelling)?, *name)));
    let plain = PARAMETERS.iter().filter(|name| name.len() > 1).filter_map(words);
    spelt
        .chain(plain)
        .min_by_key(|(at, _)| *at)
        .map(|(_, name)| name.to_owned())
}
