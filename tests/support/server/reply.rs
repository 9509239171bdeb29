//! Replies of the server, and the bytes that they become.
//!
//! In: a [`Reply`] and the body of the request it answers. Out: a [`Delivery`]. Nothing is sent here.

use std::time::Duration;

use serde_json::{Value as Json, json};

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
        let message =
            json!({ "role": "assistant", "content": "", "reasoning_content": "Let me think about the tables." });
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
        Reply::plain(
            200,
            "application/json",
            r#"{"id":"chatcmpl-test","choices":[{"index":0,"mess"#,
        )
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

/// What happens to the connection after an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Next,
    Close,
    Reset,
    Hang,
}

/// A reply in bytes.
pub struct Delivery {
    pub wait: Duration,
    /// Before each few bytes.
    pub pause: Option<Duration>,
    pub bytes: Vec<u8>,
    /// Where the body begins.
    body_at: usize,
    pub end: End,
    pub is_completion: bool,
}

impl Delivery {
    pub fn of(reply: Reply, request: &Json) -> Self {
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

    pub fn is_whole(&self) -> bool {
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

/// A text as a server would give it that keeps to a JSON Schema: it stands in the string `sql`, or else in the first string.
/// A text that is an object already stays as it is.
fn in_format(text: &str, format: &Json) -> String {
    if format["type"] != "json_schema" || serde_json::from_str::<Json>(text).is_ok_and(|json| json.is_object()) {
        return text.to_owned();
    }
    let mut value = filled(&format["json_schema"]["schema"]);
    if let Some(fields) = value.as_object_mut() {
        let place = if fields.contains_key("sql") {
            fields.get_mut("sql")
        } else {
            fields.values_mut().find(|value| value.is_string())
        };
        if let Some(place) = place {
            *place = text.into();
        }
    }
    value.to_string()
}

/// The emptiest value that a schema allows.
fn filled(schema: &Json) -> Json {
    if let Some(value) = schema["enum"].get(0) {
        return value.clone();
    }
    match schema["type"].as_str() {
        Some("string") => "".into(),
        Some("array") => json!([]),
        Some("integer" | "number") => 0.into(),
        Some("boolean") => false.into(),
        Some("null") => Json::Null,
        _ => {
            let properties = schema["properties"].as_object().into_iter().flatten();
            Json::Object(
                properties
                    .map(|(name, schema)| (name.clone(), filled(schema)))
                    .collect(),
            )
        }
    }
}

/// A token a word, each nearly sure.
fn logprobs(text: &str) -> Vec<Json> {
    text.split_inclusive(' ')
        .map(|token| json!({ "token": token, "logprob": -0.05, "bytes": token.as_bytes(), "top_logprobs": [] }))
        .collect()
}
