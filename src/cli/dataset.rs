//! `dinsql dataset`: what there is, and whether it is sound.

use serde_json::{Value as Json, json};

use super::arguments::DatasetCommand;
use super::exit::{Exit, Failure};
use super::output::{count, printable, table, thousands};
use super::settings::Settings;
use crate::dataset::{self, LoadOptions, Severity, Source};
use crate::engine::SqliteProbe;

/// The `dataset` commands.
pub fn dataset(command: DatasetCommand, settings: &Settings) -> Result<Exit, Failure> {
    match command {
        DatasetCommand::List { json } => list(settings, json),
        DatasetCommand::Check {
            data,
            lang,
            split,
            json,
        } => check(settings, &data, LoadOptions { language: lang, split }, json),
    }
}

fn list(settings: &Settings, as_json: bool) -> Result<Exit, Failure> {
    let manifests = dataset::list(settings.dataset_folders(), &settings.shipped_datasets()?);
    let mut rows = Vec::new();
    let mut entries: Vec<Json> = Vec::new();
    for (name, path) in manifests {
        match Source::from_manifest(&path) {
            Ok(source) => {
                let languages = match dataset::languages_available(&source, None) {
                    Ok(dataset::Languages::Declared(codes) | dataset::Languages::PerRecord(codes)) => codes.join(", "),
                    Ok(dataset::Languages::Undeclared) => String::new(),
                    Err(error) => error.to_string(),
                };
                entries.push(json!({ "name": name, "path": path, "languages": languages, "description": source.manifest.description }));
                rows.push(vec![name, languages, printable(&source.manifest.description)]);
            }
            Err(error) => {
                entries.push(json!({ "name": name, "path": path, "error": error.to_string() }));
                rows.push(vec![name, String::new(), format!("not readable: {error}")]);
            }
        }
    }
    if as_json {
        say!("{}", json!({ "datasets": entries }));
    } else {
        say!("{}", table(&["dataset", "languages", "description"], rows));
        say!("--data also takes a manifest's path, or a folder in BIRD's or Spider's layout");
    }
    Ok(Exit::Fine)
}

fn check(settings: &Settings, data: &str, options: LoadOptions, as_json: bool) -> Result<Exit, Failure> {
    let source = settings.source(data)?;
    let report = dataset::check(
        &source,
        &options,
        &BuiltProbe {
            probe: SqliteProbe::default(),
            settings,
        },
    );
    let exit = if report.errors > 0 { Exit::Failed } else { Exit::Fine };
    if as_json {
        say!("{}", serde_json::to_string(&report)?);
        return Ok(exit);
    }
    for language in &report.languages {
        let difficulties: Vec<String> = language
            .difficulties
            .iter()
            .map(|(name, count)| format!("{count} {name}"))
            .collect();
        say!(
            "{} {} ({}): {}, {} with gold{}",
            report.name,
            report.split,
            language.language,
            count(language.examples, "example"),
            thousands(language.with_gold as u64),
            if difficulties.is_empty() {
                String::new()
            } else {
                format!(" ({})", difficulties.join(", "))
            }
        );
        let rows = language
            .databases
            .iter()
            .map(|database| {
                let number = |value: Option<u64>| value.map_or_else(|| "–".to_owned(), thousands);
                vec![
                    database.id.clone(),
                    database.examples.to_string(),
                    number(database.tables.map(|tables| tables as u64)),
                    number(database.rows),
                    number(database.size_bytes.map(|size| size.div_ceil(1024))),
                    database
                        .digest
                        .as_deref()
                        .map_or_else(|| "–".to_owned(), |digest| digest.chars().take(12).collect()),
                ]
            })
            .collect();
        say!(
            "{}",
            table(&["database", "examples", "tables", "rows", "KiB", "digest"], rows)
        );
    }
    for problem in &report.problems {
        let severity = if problem.severity == Severity::Error {
            "error"
        } else {
            "warning"
        };
        say!(
            "{severity} [{}] {}: {}",
            problem.code,
            printable(&problem.place),
            printable(&problem.message)
        );
    }
    say!(
        "{}, {}",
        count(report.errors, "error"),
        count(report.warnings, "warning")
    );
    Ok(exit)
}

/// The probe, for databases that are checked in as a text and built when they are needed.
struct BuiltProbe<'a> {
    probe: SqliteProbe,
    settings: &'a Settings,
}

impl dataset::DatabaseProbe for BuiltProbe<'_> {
    fn locate(&self, path: &std::path::Path) -> std::path::PathBuf {
        let text = path.with_extension("sql");
        if path.exists() || !text.is_file() {
            return path.to_owned();
        }
        // Where it cannot be built, the check names the database that is missing.
        crate::engine::build_database(&text, &self.settings.cache.join("databases")).unwrap_or_else(|_| path.to_owned())
    }

    fn open_and_check(&self, path: &std::path::Path) -> Result<dataset::ProbeInfo, String> {
        self.probe.open_and_check(path)
    }

    fn prepare(&self, path: &std::path::Path, sql: &str) -> Result<(), String> {
        self.probe.prepare(path, sql)
    }
}
