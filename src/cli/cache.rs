//! `dinsql cache`: what is in the completion cache, and looking after it.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::Path;

use serde_json::json;

use super::arguments::CacheCommand;
use super::exit::{Exit, Failure};
use super::output::{count, table, thousands};
use super::settings::Settings;
use crate::llm::Usd;
use crate::llm::cache_store::{Prune, export, import, prune, stats};

/// The `cache` commands.
pub fn cache(command: CacheCommand, settings: &Settings) -> Result<Exit, Failure> {
    let path = settings.completions();
    match command {
        CacheCommand::Stats { json } => show(&path, json)?,
        CacheCommand::Prune {
            older_than,
            model,
            provider,
            all,
            dry_run,
            json,
        } => {
            if !all && older_than.is_none() && model.is_none() && provider.is_none() {
                return Err(
                    Failure::message(Exit::Usage, "nothing says which completions are to go")
                        .hint("give --older-than, --model or --provider, or --all; --dry-run only counts them"),
                );
            }
            let before = older_than.map(|age| {
                let age = jiff::SignedDuration::try_from(age).unwrap_or(jiff::SignedDuration::MAX);
                // Older than time itself is nothing.
                jiff::Timestamp::now()
                    .checked_sub(age)
                    .map_or_else(|_| String::new(), |time| time.to_string())
            });
            let what = Prune {
                before,
                model,
                provider,
                dry_run,
            };
            let pruned = prune(&path, &what)?;
            if json {
                say!("{}", serde_json::to_string(&pruned)?);
            } else if dry_run {
                say!("{} would go", completions(pruned.completions));
            } else {
                say!(
                    "{} taken out; the file has {} KB now, {} KB before",
                    completions(pruned.completions),
                    thousands(pruned.bytes_after / 1000),
                    thousands(pruned.bytes_before / 1000)
                );
            }
        }
        CacheCommand::Export { file } => {
            let fail = |error: std::io::Error| {
                Failure::message(Exit::Failed, format!("cannot write {}: {error}", file.display()))
            };
            let mut out: Box<dyn Write> = if file == Path::new("-") {
                Box::new(std::io::stdout().lock())
            } else {
                Box::new(BufWriter::new(File::create(&file).map_err(fail)?))
            };
            let written = export(&path, &mut *out)?;
            eprintln!("{} written", completions(written));
        }
        CacheCommand::Import { file } => {
            let imported = if file == Path::new("-") {
                import(&path, &mut std::io::stdin().lock())
            } else {
                let from = File::open(&file).map_err(|error| {
                    Failure::message(Exit::Usage, format!("cannot read {}: {error}", file.display()))
                })?;
                import(&path, &mut BufReader::new(from))
            };
            let imported =
                imported.map_err(|error| Failure::message(Exit::Failed, format!("{}: {error}", file.display())))?;
            say!(
                "{} added, {} there already",
                completions(imported.added),
                thousands(imported.known)
            );
        }
    }
    Ok(Exit::Fine)
}

fn completions(number: u64) -> String {
    count(usize::try_from(number).unwrap_or(usize::MAX), "completion")
}

fn show(path: &Path, as_json: bool) -> Result<(), Failure> {
    if !path.exists() {
        // A new user has none, which is no mistake.
        if as_json {
            say!(
                "{}",
                json!({ "path": path, "completions": 0, "file_bytes": 0, "models": [] })
            );
        } else {
            say!("{}: no completions yet", path.display());
        }
        return Ok(());
    }
    let models = stats(path)?;
    let file_bytes = std::fs::metadata(path).map_or(0, |file| file.len());
    let total: u64 = models.iter().map(|model| model.completions).sum();
    if as_json {
        say!(
            "{}",
            json!({ "path": path, "completions": total, "file_bytes": file_bytes, "models": models })
        );
        return Ok(());
    }
    let unknown = || "unknown".to_owned();
    let rows = models
        .iter()
        .map(|part| {
            let cost = match (part.cost, part.without_cost) {
                (Usd(0), without) if without > 0 => unknown(),
                (cost, 0) => cost.to_string(),
                (cost, without) => format!("{cost} + {without} unknown"),
            };
            vec![
                part.model.clone().unwrap_or_else(unknown),
                part.provider.as_deref().map_or_else(unknown, short),
                thousands(part.completions),
                thousands(part.bytes / 1000),
                thousands(part.prompt_tokens),
                thousands(part.completion_tokens),
                cost,
                format!("{} – {}", date(&part.oldest), date(&part.newest)),
            ]
        })
        .collect();
    say!(
        "{}",
        table(
            &[
                "model",
                "provider",
                "completions",
                "KB",
                "prompt tokens",
                "completion tokens",
                "cost",
                "stored"
            ],
            rows
        )
    );
    say!(
        "{}: {}, {} KB",
        path.display(),
        completions(total),
        thousands(file_bytes / 1000)
    );
    Ok(())
}

/// A provider's identity with its digest, where it has one, cut to what tells it from others.
fn short(provider: &str) -> String {
    match provider.split_once(':') {
        Some((kind, digest)) if digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            format!("{kind}:{}…", &digest[..12])
        }
        _ => provider.to_owned(),
    }
}

fn date(time: &str) -> &str {
    time.get(..10).unwrap_or(time)
}
