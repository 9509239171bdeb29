//! `dinsql runs`: looking after run folders.

use serde_json::json;

use super::arguments::RunsCommand;
use super::exit::{Exit, Failure};
use super::record::folder_name;
use super::run::{print_results, run_json};
use super::settings::Settings;
use crate::report::RunResult;
use crate::run::merge;

/// The `runs` commands.
pub async fn runs(command: RunsCommand, settings: &Settings) -> Result<Exit, Failure> {
    let RunsCommand::Merge { parts, json } = command;
    let (folder, summary, verdicts) = merge(&parts, &settings.runs, folder_name).await?;
    let results = [RunResult {
        folder,
        summary,
        verdicts,
    }];
    if json {
        say!(
            "{}",
            json!({ "runs": results.iter().map(run_json).collect::<Vec<_>>() })
        );
    } else {
        print_results(&results);
    }
    Ok(Exit::Fine)
}
