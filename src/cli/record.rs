//! What a run is: all that decides its result, in one digest, and what is kept beside it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::arguments::Shard;
use super::exit::{Exit, Failure};
use super::providers::Providers;
use crate::config::Pipeline;
use crate::dataset::{self, Dataset, Example};
use crate::engine::sqlite_version;
use crate::prompt::{Prompts, template_digest};
use crate::run::{DatabaseRecord, Digests, FORMAT, RunRecord, RunStatus, ShardRecord, TemplateRecord};

/// A run that is about to be made.
pub struct Planned {
    pub pipeline: Pipeline,
    pub language: String,
    pub dataset: std::sync::Arc<Dataset>,
    pub data: String,
    pub repeat: u32,
    pub shard: Option<Shard>,
}

impl Planned {
    /// The examples of this part of the run, all of them where it is not divided.
    pub fn examples(&self) -> std::borrow::Cow<'_, [Example]> {
        match self.shard {
            None => std::borrow::Cow::Borrowed(&self.dataset.examples),
            Some(shard) => self
                .dataset
                .examples
                .iter()
                .filter(|example| shard.holds(&example.id))
                .cloned()
                .collect(),
        }
    }
}

impl Shard {
    /// By the id alone, so that every machine divides alike, whatever it selects.
    fn holds(self, id: &str) -> bool {
        let digest = blake3::hash(id.as_bytes());
        let mut first = [0_u8; 8];
        first.copy_from_slice(&digest.as_bytes()[..8]);
        u64::from_le_bytes(first) % u64::from(self.of) == u64::from(self.index - 1)
    }
}

/// Environment variables that stand for flags; what they say is recorded as flags, so that a run can go on elsewhere.
const FLAGS: &[(&str, &str)] = &[
    ("DINSQL_CONFIG", "--config"),
    ("DINSQL_PROMPTS_DIR", "--prompts-dir"),
    ("DINSQL_PIPELINES_DIR", "--pipelines-dir"),
    ("DINSQL_DATASETS_DIR", "--datasets-dir"),
    ("DINSQL_RUNS_DIR", "--runs-dir"),
    ("DINSQL_CACHE", "--cache"),
    ("DINSQL_CACHE_MODE", "--cache-mode"),
    ("DINSQL_PROVIDER", "--provider"),
    ("DINSQL_MODEL", "--model"),
    ("OPENAI_BASE_URL", "--base-url"),
    ("DINSQL_API_KEY_FILE", "--api-key-file"),
    ("DINSQL_MODEL_FILE", "--model-file"),
    ("DINSQL_LLAMA_SERVER", "--llama-server"),
    ("DINSQL_CONCURRENCY", "--concurrency"),
];

/// The command line, and what the environment adds to it.
pub fn effective_arguments() -> Vec<String> {
    let mut arguments: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    let given = |arguments: &[String], flag: &str| {
        arguments.iter().any(|argument| {
            argument == flag
                || argument.strip_prefix(flag).is_some_and(|rest| rest.starts_with('='))
                || flag == "--model" && argument.starts_with("-m")
        })
    };
    for (variable, flag) in FLAGS {
        if let Ok(value) = std::env::var(variable)
            && !value.is_empty()
            && !given(&arguments, flag)
        {
            arguments.push(format!("{flag}={value}"));
        }
    }
    arguments
}

/// The record of a planned run.
pub fn record(planned: &Planned, providers: &Providers, prompts: &Prompts) -> Result<RunRecord, Failure> {
    let dataset = &planned.dataset;
    let templates = templates(planned, prompts)?;
    let databases = databases(dataset)?;
    let mut models = Vec::new();
    let mut prices = BTreeMap::new();
    for spec in planned.pipeline.models() {
        let route = providers.router.route(&spec).map_err(Failure::usage)?;
        if let Some(price) = providers.price(&spec, &route.model_name) {
            prices.insert(route.model_name.clone(), price);
        }
        models.push(format!("{} {}", route.provider.identity, route.model_name));
    }
    let first = providers
        .router
        .route(&planned.pipeline.model)
        .map_err(Failure::usage)?;
    let hash = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
    let selection = |examples: &[Example]| -> Result<String, Failure> {
        let ids: Vec<&str> = examples.iter().map(|example| example.id.as_str()).collect();
        Ok(hash(&serde_json::to_string(&ids)?))
    };
    let mut digests = Digests {
        pipeline: hash(&serde_json::to_string(&planned.pipeline)?),
        templates: template_digest(
            templates
                .iter()
                .map(|template| (template.name.as_str(), template.text.as_str())),
        ),
        dataset: dataset.digest.clone(),
        selection: selection(&dataset.examples)?,
    };
    let mut database_digests: Vec<&str> = databases.values().map(|database| database.digest.as_str()).collect();
    // Only where there are any, so that runs over databases without descriptions keep the identity they had.
    let descriptions = if planned.pipeline.schema.descriptions {
        description_digest(dataset)?
    } else {
        None
    };
    database_digests.extend(descriptions.as_deref());
    let identify = |digests: &Digests| -> Result<String, Failure> {
        Ok(hash(&serde_json::to_string(&json!([
            FORMAT,
            digests,
            database_digests,
            models,
            planned.language,
            dataset.split,
            planned.repeat
        ]))?))
    };
    let whole = identify(&digests)?;
    let mut identity = whole.clone();
    let mut n = dataset.examples.len();
    let shard = match planned.shard {
        None => None,
        Some(shard) => {
            let examples = planned.examples();
            let record = ShardRecord {
                index: shard.index,
                of: shard.of,
                identity: whole.clone(),
                n,
                selection: digests.selection.clone(),
            };
            digests.selection = selection(&examples)?;
            n = examples.len();
            identity = hash(&format!("{whole} part {} of {}", shard.index, shard.of));
            Some(record)
        }
    };
    let now = jiff::Timestamp::now().to_string();
    let mut id = [0_u8; 8];
    let _ = getrandom::fill(&mut id);
    Ok(RunRecord {
        format: FORMAT,
        id: id.iter().map(|byte| format!("{byte:02x}")).collect(),
        identity,
        status: RunStatus::Running,
        stopped: None,
        dinsql: env!("CARGO_PKG_VERSION").into(),
        sqlite: sqlite_version().into(),
        started: now.clone(),
        updated: now,
        arguments: effective_arguments(),
        directory: std::env::current_dir().unwrap_or_default(),
        data: planned.data.clone(),
        split: dataset.split.clone(),
        language: planned.language.clone(),
        dialect: dataset.dialect,
        repeat: planned.repeat,
        n,
        shard,
        provider: first.provider.identity.clone(),
        model: first.model_name,
        served_models: Vec::new(),
        pipeline: planned.pipeline.clone(),
        templates,
        digests,
        databases,
        prices,
        traces_bytes: None,
    })
}

fn templates(planned: &Planned, prompts: &Prompts) -> Result<Vec<TemplateRecord>, Failure> {
    let mut templates: Vec<TemplateRecord> = Vec::new();
    for (_, template) in planned.pipeline.templates() {
        for name in prompts.parts(&planned.language, template)? {
            if templates.iter().all(|known| known.name != name) {
                let (text, file) = prompts.source(&planned.language, &name)?;
                templates.push(TemplateRecord { name, file, text });
            }
        }
    }
    templates.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(templates)
}

fn databases(dataset: &Dataset) -> Result<BTreeMap<String, DatabaseRecord>, Failure> {
    let mut databases = BTreeMap::new();
    for example in &dataset.examples {
        if !databases.contains_key(&example.database)
            && let Some(database) = dataset.databases.get(&example.database)
        {
            let digest =
                dataset::database_digest(&database.path).map_err(|error| unreadable(&database.path, &error))?;
            databases.insert(
                example.database.clone(),
                DatabaseRecord {
                    path: database.path.clone(),
                    digest,
                },
            );
        }
    }
    Ok(databases)
}

/// Of the description files of all databases in the selection; they are part of the prompts.
fn description_digest(dataset: &Dataset) -> Result<Option<String>, Failure> {
    let mut folders: BTreeMap<&str, &Path> = BTreeMap::new();
    for example in &dataset.examples {
        if let Some(folder) = dataset
            .databases
            .get(&example.database)
            .and_then(|database| database.descriptions.as_deref())
        {
            folders.insert(&example.database, folder);
        }
    }
    let mut hasher = blake3::Hasher::new();
    let mut any = false;
    for (database, folder) in folders {
        let entries = std::fs::read_dir(folder).map_err(|error| unreadable(folder, &error))?;
        let mut files: Vec<PathBuf> = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| {
                path.extension()
                    .is_some_and(|extension| extension.eq_ignore_ascii_case("csv"))
            })
            .collect();
        files.sort();
        for file in files {
            let bytes = std::fs::read(&file).map_err(|error| unreadable(&file, &error))?;
            hasher.update(database.as_bytes());
            hasher.update(file.file_name().unwrap_or_default().as_encoded_bytes());
            hasher.update(blake3::hash(&bytes).as_bytes());
            any = true;
        }
    }
    Ok(any.then(|| format!("descriptions {}", hasher.finalize().to_hex())))
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::message(Exit::Failed, format!("cannot read {}: {error}", path.display()))
}

/// `din-sql.sample.tr.1f2e3d4c`, and with a repeat and a part `din-sql.sample.tr.r2.part1of4.1f2e3d4c`
pub fn folder_name(record: &RunRecord) -> PathBuf {
    let plain = |text: &str| -> String {
        text.chars()
            .map(|letter| {
                if letter.is_alphanumeric() || matches!(letter, '-' | '_') {
                    letter
                } else {
                    '-'
                }
            })
            .collect()
    };
    let repeat = if record.repeat > 0 {
        format!(".r{}", record.repeat + 1)
    } else {
        String::new()
    };
    let part = record
        .shard
        .as_ref()
        .map(|shard| format!(".part{}of{}", shard.index, shard.of))
        .unwrap_or_default();
    format!(
        "{}.{}.{}{repeat}{part}.{}",
        plain(&record.pipeline.name),
        plain(&record.data),
        plain(&record.language),
        &record.identity[..8]
    )
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_is_in_exactly_one_part() {
        let mut sizes = [0; 4];
        for number in 0..1000 {
            let id = format!("q{number}");
            let parts: Vec<u32> = (1..=4).filter(|&index| Shard { index, of: 4 }.holds(&id)).collect();
            assert_eq!(parts.len(), 1);
            sizes[parts[0] as usize - 1] += 1;
        }
        assert!(sizes.iter().all(|size| (200..300).contains(size)), "{sizes:?}");
    }
}
