//! `dinsql model`: embedded models and servers' models, tried and fetched.

use serde::Serialize;
use serde_json::{Value as Json, json};

use super::arguments::{ModelArguments, ModelCommand};
use super::embedded;
use super::exit::{Exit, Failure};
use super::output::{printable, table, thousands};
use super::providers::{Control, Providers, remote};
use super::settings::Settings;
use crate::config::ModelSpec;
use crate::llm::embedded::{Catalog, ModelState, default_models_dir};
use crate::llm::{CallError, Completion, Request, ResponseFormat};
use crate::pipeline::Call;
use crate::prompt::{Message, Role};

/// The `model` commands.
pub async fn model(command: ModelCommand, settings: &Settings) -> Result<Exit, Failure> {
    match command {
        ModelCommand::List { model, json } => list(&model, settings, json).await,
        ModelCommand::Test { model, json } => test(&model, settings, json).await,
        ModelCommand::Pull { name } => pull(name.as_deref(), settings).await,
    }
}

async fn list(arguments: &ModelArguments, settings: &Settings, as_json: bool) -> Result<Exit, Failure> {
    if let Some((model, _)) = remote(arguments, settings)? {
        let names = model.list().await.map_err(stopped)?;
        if as_json {
            say!("{}", json!({ "models": names }));
        } else {
            for name in &names {
                say!("{}", printable(name));
            }
        }
        return Ok(Exit::Fine);
    }
    let catalog = Catalog::builtin();
    let models = default_models_dir(&settings.cache);
    let default = catalog.default_model().name.clone();
    let mut rows = Vec::new();
    let mut entries: Vec<Json> = Vec::new();
    for entry in catalog.models() {
        let state = match ModelState::of(entry, &models) {
            ModelState::Absent => "not fetched".to_owned(),
            ModelState::Partial(bytes) => format!("{} of {} MB fetched", bytes / 1_000_000, entry.size / 1_000_000),
            ModelState::Unverified => "fetched, not verified".into(),
            ModelState::Verified => "ready".into(),
        };
        let name = if entry.name == default {
            format!("{} (default)", entry.name)
        } else {
            entry.name.clone()
        };
        entries.push(json!({ "name": entry.name, "default": entry.name == default, "bytes": entry.size, "license": entry.license, "state": state, "description": entry.description }));
        rows.push(vec![
            name,
            format!("{} MB", thousands(entry.size / 1_000_000)),
            entry.license.clone(),
            state,
            entry.description.clone(),
        ]);
    }
    if as_json {
        say!("{}", json!({ "models": entries }));
    } else {
        say!("{}", table(&["embedded model", "size", "licence", "state", ""], rows));
    }
    Ok(Exit::Fine)
}

/// What the test found out, for each ability that a server may or may not have.
#[derive(Debug, Default, Serialize)]
struct Abilities {
    /// Whether it counts tokens.
    usage: bool,
    /// Whether it takes a seed without complaint. Whether it heeds it can only be seen from many answers.
    seed: bool,
    /// Whether it gives several completions in one answer.
    n: bool,
    /// Whether its answers keep to a JSON Schema.
    response_format: bool,
    logprobs: bool,
    /// Tokens of prompt and completion together, where it tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<u64>,
}

/// Keys under which servers tell the context length in their list of models: vLLM, OpenRouter, llama.cpp, Mistral, others.
const CONTEXT: &[&str] = &[
    "/max_model_len",
    "/context_length",
    "/context_window",
    "/max_context_length",
    "/meta/n_ctx",
    "/meta/n_ctx_train",
];

async fn test(arguments: &ModelArguments, settings: &Settings, as_json: bool) -> Result<Exit, Failure> {
    // A call that the cache answers would test nothing.
    let arguments = ModelArguments {
        no_cache: true,
        ..arguments.clone()
    };
    let providers = Providers::set_up(&arguments, settings, &[], &Control::default())?;
    let result = ask_and_probe(&providers).await;
    let context = match remote(&arguments, settings)? {
        // Only told where the server has a list of models; where not, nobody is the worse for it.
        Some((client, _)) => client.describe_models().await.ok(),
        None => None,
    };
    providers.shut_down().await;
    let (provider, name, answer, mut abilities) = result?;
    abilities.context = context.and_then(|models| {
        let served = answer.served_model.as_deref();
        let model = models
            .iter()
            .find(|model| model["id"] == name.as_str() || model["id"].as_str() == served)?;
        CONTEXT
            .iter()
            .find_map(|pointer| model.pointer(pointer).and_then(Json::as_u64))
    });
    if as_json {
        say!(
            "{}",
            json!({ "provider": provider, "model": name, "answer": answer, "abilities": abilities })
        );
        return Ok(Exit::Fine);
    }
    let known = |tokens: Option<u64>| tokens.map_or_else(|| "unknown".to_owned(), thousands);
    let yes = |able: bool| if able { "yes" } else { "no" }.to_owned();
    let rows = vec![
        vec!["provider".into(), provider],
        vec!["model asked".into(), name],
        vec![
            "model that answered".into(),
            answer.served_model.unwrap_or_else(|| "not told".into()),
        ],
        vec!["answer".into(), answer.text],
        vec![
            "finish reason".into(),
            answer.finish_reason.unwrap_or_else(|| "not told".into()),
        ],
        vec!["prompt tokens".into(), known(answer.usage.prompt)],
        vec!["completion tokens".into(), known(answer.usage.completion)],
        vec![
            "cost".into(),
            answer.cost.map_or_else(|| "unknown".into(), |cost| cost.to_string()),
        ],
        vec!["latency".into(), format!("{} ms", answer.latency_ms)],
        vec!["counts tokens".into(), yes(abilities.usage)],
        vec!["takes a seed".into(), yes(abilities.seed)],
        vec!["several completions at once (n)".into(), yes(abilities.n)],
        vec!["JSON Schema (response_format)".into(), yes(abilities.response_format)],
        vec!["log probabilities".into(), yes(abilities.logprobs)],
        vec![
            "context length".into(),
            abilities
                .context
                .map_or_else(|| "not told".into(), |tokens| format!("{} tokens", thousands(tokens))),
        ],
    ];
    say!("{}", table(&["model test", ""], rows));
    Ok(Exit::Fine)
}

/// One plain call, and one with everything that servers may not know; where that one fails, a call for each.
async fn ask_and_probe(providers: &Providers) -> Result<(String, String, Completion, Abilities), Failure> {
    let spec = ModelSpec {
        temperature: Some(0.0),
        max_tokens: Some(48),
        ..ModelSpec::default()
    };
    let route = providers.router.route(&spec).map_err(Failure::usage)?;
    let ask = |content: &str| {
        let message = Message {
            role: Role::User,
            content: content.into(),
        };
        route.request(vec![message], Call::default())
    };
    let plain = ask("Write one SQL query that returns the number 42. Answer with the query only.");
    let model = &route.provider.model;
    let answer = model.complete(&plain).await.map_err(stopped)?;
    let mut abilities = Abilities {
        usage: answer.usage.total().is_some(),
        ..Abilities::default()
    };
    let question = ask("Write one SQL query that returns the number 42, as JSON: {\"sql\": \"…\"}");
    let format = ResponseFormat {
        name: "answer".into(),
        schema: json!({
            "type": "object",
            "properties": { "sql": { "type": "string" } },
            "required": ["sql"],
            "additionalProperties": false,
        }),
    };
    let everything = Request {
        seed: Some(1),
        n: Some(2),
        logprobs: true,
        response_format: Some(format.clone()),
        ..question.clone()
    };
    if let Ok(probed) = model.complete(&everything).await {
        abilities.seed = true;
        note(&mut abilities, &probed);
    } else {
        for probe in [
            Request {
                seed: Some(1),
                ..question.clone()
            },
            Request {
                n: Some(2),
                ..question.clone()
            },
            Request {
                logprobs: true,
                ..question.clone()
            },
            Request {
                response_format: Some(format),
                ..question.clone()
            },
        ] {
            if let Ok(probed) = model.complete(&probe).await {
                abilities.seed |= probe.seed.is_some();
                note(&mut abilities, &probed);
            }
        }
    }
    Ok((
        route.provider.identity.clone(),
        route.model_name.clone(),
        answer,
        abilities,
    ))
}

/// What an answer shows its server to be able to do.
fn note(abilities: &mut Abilities, answer: &Completion) {
    abilities.n |= !answer.alternatives.is_empty();
    abilities.logprobs |= answer.logprobs.is_some();
    let is_object = serde_json::from_str::<Json>(&answer.text).is_ok_and(|json| json["sql"].is_string());
    abilities.response_format |= is_object && !answer.not_sent.iter().any(|name| name == "response_format");
}

async fn pull(name: Option<&str>, settings: &Settings) -> Result<Exit, Failure> {
    let catalog = Catalog::builtin();
    let entry = match name {
        None => catalog.default_model(),
        Some(name) => catalog.get(name).ok_or_else(|| {
            let known: Vec<&str> = catalog.models().iter().map(|entry| entry.name.as_str()).collect();
            Failure::message(
                Exit::Usage,
                format!("no embedded model `{name}` (there are: {})", known.join(", ")),
            )
        })?,
    };
    let path = embedded::fetch_with(entry, &settings.cache, true)
        .await
        .map_err(|reason| Failure::message(Exit::Failed, reason))?;
    say!("{}", path.display());
    say!(
        "sha256 {} ({} bytes): as published",
        entry.sha256,
        thousands(entry.size)
    );
    Ok(Exit::Fine)
}

fn stopped(error: CallError) -> Failure {
    Failure::new(Exit::Stopped, error)
}
