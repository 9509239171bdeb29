//! `dinsql model`: embedded models and servers' models, tried and fetched.

use serde_json::{Value as Json, json};

use super::arguments::{ModelArguments, ModelCommand};
use super::embedded;
use super::exit::{Exit, Failure};
use super::output::{printable, table, thousands};
use super::providers::{Providers, remote};
use super::settings::Settings;
use crate::config::ModelSpec;
use crate::llm::CallError;
use crate::llm::embedded::{Catalog, ModelState, default_models_dir};
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

async fn test(arguments: &ModelArguments, settings: &Settings, as_json: bool) -> Result<Exit, Failure> {
    // A call that the cache answers would test nothing.
    let arguments = ModelArguments {
        no_cache: true,
        ..arguments.clone()
    };
    let providers = Providers::set_up(&arguments, settings, &[])?;
    let spec = ModelSpec {
        temperature: Some(0.0),
        max_tokens: Some(32),
        ..ModelSpec::default()
    };
    let result = async {
        let route = providers.router.route(&spec).map_err(Failure::usage)?;
        let question = "Write one SQL query that returns the number 42. Answer with the query only.";
        let request = route.request(vec![Message {
            role: Role::User,
            content: question.into(),
        }]);
        let answer = route.provider.model.complete(&request).await.map_err(stopped)?;
        Ok::<_, Failure>((route.provider.identity.clone(), route.model_name.clone(), answer))
    }
    .await;
    providers.shut_down().await;
    let (provider, name, answer) = result?;
    if as_json {
        say!("{}", json!({ "provider": provider, "model": name, "answer": answer }));
        return Ok(Exit::Fine);
    }
    let known = |tokens: Option<u64>| tokens.map_or_else(|| "unknown".to_owned(), thousands);
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
        vec!["latency".into(), format!("{} ms", answer.latency_ms)],
    ];
    say!("{}", table(&["model test", ""], rows));
    Ok(Exit::Fine)
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
