//! `dinsql ask`: one question to one database, for trying.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;

use super::arguments::AskArguments;
use super::exit::{Exit, Failure};
use super::output::{printable, printable_lines, table};
use super::providers::{Control, Providers};
use super::settings::{Settings, executor};
use crate::dataset::{DatabaseRef, Dialect, Example};
use crate::engine::{Value, open_trusted};
use crate::pipeline::{ExampleRun, Resources, StageError, Trace};
use crate::schema::SchemaCache;

/// Asks, runs the answer, prints both.
pub async fn ask(arguments: AskArguments, settings: &Settings) -> Result<Exit, Failure> {
    let database = find_database(&arguments, settings)?;
    open_trusted(&database.path).map_err(Failure::usage)?;
    let pipeline = settings.pipeline(&arguments.pipeline, &arguments.set)?;
    let providers = Providers::set_up(
        &arguments.model,
        settings,
        std::slice::from_ref(&pipeline),
        &Control::default(),
    )?;
    let example = Example {
        id: "question".into(),
        position: 0,
        question: arguments.question.clone(),
        evidence: arguments.evidence.clone(),
        database: database.id.clone(),
        gold: Vec::new(),
        language: arguments.lang.clone(),
        difficulty: None,
        fields: BTreeMap::new(),
    };
    let path = database.path.clone();
    let resources = Resources {
        pipeline,
        prompts: settings.prompts(),
        schemas: Arc::new(SchemaCache::default()),
        router: Arc::clone(&providers.router),
        dialect: Dialect::Sqlite,
        databases: BTreeMap::from([(database.id.clone(), database)]),
        repeat: 0,
        run: String::new(),
    };
    let mut run = ExampleRun::new(Arc::new(example));
    let mut failure = None;
    for index in 0..resources.pipeline.stages.len() {
        if let Err(error) = run.run_stage(&resources, index).await {
            failure = Some(error);
            break;
        }
    }
    let trace = run.finish(&resources.pipeline);
    drop(resources);
    providers.shut_down().await;
    if let Some(error) = failure {
        let exit = if matches!(error, StageError::Call { .. }) {
            Exit::Stopped
        } else {
            Exit::Usage
        };
        return Err(Failure::new(exit, error));
    }
    show(&arguments, &trace, path).await
}

async fn show(arguments: &AskArguments, trace: &Trace, database: PathBuf) -> Result<Exit, Failure> {
    let Some(sql) = &trace.prediction else {
        let reason = trace.error.clone().unwrap_or_default();
        if arguments.json {
            say!(
                "{}",
                json!({ "sql": null, "outcome": trace.outcome, "error": reason, "stages": trace.stages })
            );
            return Ok(Exit::Failed);
        }
        let answer = trace
            .stages
            .last()
            .and_then(|stage| stage.completion.as_ref())
            .map(|completion| completion.text.clone());
        let failure = Failure::message(Exit::Failed, format!("no query: {reason}"));
        return Err(match answer {
            Some(answer) => failure.hint(format!("the model said: {}", printable(&answer))),
            None => failure,
        });
    };
    let executed = executor(&arguments.execution)?.run(database, sql.clone()).await;
    if arguments.json {
        let (columns, rows, error) = match &executed {
            Ok(result) => (
                json!(result.columns),
                json!(result.rows.iter().take(arguments.rows).collect::<Vec<_>>()),
                None,
            ),
            Err(error) => (json!(null), json!(null), Some(error.to_string())),
        };
        say!(
            "{}",
            json!({ "sql": sql, "outcome": trace.outcome, "columns": columns, "rows": rows, "error": error, "stages": trace.stages })
        );
        return Ok(if error.is_some() { Exit::Failed } else { Exit::Fine });
    }
    say!("{}", printable_lines(sql));
    match executed {
        Ok(result) => {
            let header: Vec<&str> = result.columns.iter().map(String::as_str).collect();
            let rows: Vec<Vec<String>> = result
                .rows
                .iter()
                .take(arguments.rows)
                .map(|row| row.iter().map(cell).collect())
                .collect();
            let shown = rows.len();
            say!("{}", table(&header, rows));
            if result.rows.len() > shown {
                say!("{shown} of {} rows", result.rows.len());
            }
            Ok(Exit::Fine)
        }
        Err(error) => Err(Failure::message(
            Exit::Failed,
            format!("the query does not run: {error}"),
        )),
    }
}

fn find_database(arguments: &AskArguments, settings: &Settings) -> Result<DatabaseRef, Failure> {
    let path = Path::new(&arguments.db);
    let Some(data) = &arguments.data else {
        let id = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_file() {
            let descriptions = path
                .parent()
                .map(|folder| folder.join("database_description"))
                .filter(|folder| folder.is_dir());
            return Ok(DatabaseRef {
                id,
                path: path.to_owned(),
                descriptions,
            });
        }
        return Err(
            Failure::message(Exit::Usage, format!("no database file {}", path.display()))
                .hint("to name a database of a dataset, give --data as well"),
        );
    };
    let source = settings.source(data)?;
    let dataset = settings.load(&source, Some(&arguments.lang), None)?;
    dataset.databases.get(&arguments.db).cloned().ok_or_else(|| {
        let known: Vec<&str> = dataset.databases.keys().map(String::as_str).collect();
        Failure::message(
            Exit::Usage,
            format!(
                "dataset `{data}` has no database `{}` (there are: {})",
                arguments.db,
                known.join(", ")
            ),
        )
    })
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => "NULL".into(),
        Value::Integer(number) => number.to_string(),
        Value::Real(number) => number.to_string(),
        Value::Text(text) => {
            let shown: String = text.chars().take(80).collect();
            if shown.len() < text.len() {
                format!("{shown}…")
            } else {
                shown
            }
        }
        Value::Blob(bytes) => format!("<blob of {} bytes>", bytes.len()),
    }
}
