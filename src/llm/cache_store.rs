//! Looking after a completion cache: what is in it, making it smaller, carrying it to another machine.
//!
//! Export and import use a JSON object a line: `{"key": "<64 hex digits>", "stored_at": …, "provider": …, "model": …,
//! "completion": {…}}`. Keys are digests of requests; the requests themselves are not in the cache.

use std::io::{BufRead, Write};
use std::path::Path;

use rusqlite::{Connection, OptionalExtension};
use serde::{Deserialize, Serialize};

use super::Completion;
use super::budget::Amount;
use super::cache::{CacheError, open_to_read, open_to_write};
use super::usage::Usd;

/// What a part of the cache holds.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ModelStats {
    /// Absent for completions of versions that did not note it.
    pub provider: Option<String>,
    pub model: Option<String>,
    pub completions: u64,
    /// Of the stored answers.
    pub bytes: u64,
    /// First and last time of storing, RFC 3339.
    pub oldest: String,
    pub newest: String,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    /// Of those whose cost is known.
    pub cost: Usd,
    pub without_cost: u64,
}

/// Statistics by provider and model, largest first.
///
/// # Errors
/// Where the file is not there or cannot be read.
pub fn stats(path: &Path) -> Result<Vec<ModelStats>, CacheError> {
    let connection = open_to_read(path)?;
    let read = || -> rusqlite::Result<Vec<ModelStats>> {
        let mut statement = connection.prepare(
            "SELECT provider, model, count(*), sum(length(CAST(completion AS BLOB))), min(stored_at), max(stored_at),
                    coalesce(sum(json_extract(completion, '$.usage.prompt')), 0),
                    coalesce(sum(json_extract(completion, '$.usage.completion')), 0),
                    coalesce(sum(json_extract(completion, '$.cost')), 0.0),
                    count(*) - count(json_extract(completion, '$.cost'))
             FROM completions WHERE json_valid(completion) GROUP BY provider, model ORDER BY 3 DESC, 1, 2",
        )?;
        let rows = statement.query_map([], |row| {
            Ok(ModelStats {
                provider: row.get(0)?,
                model: row.get(1)?,
                completions: count(row, 2)?,
                bytes: count(row, 3)?,
                oldest: row.get(4)?,
                newest: row.get(5)?,
                prompt_tokens: count(row, 6)?,
                completion_tokens: count(row, 7)?,
                cost: Usd::from_dollars(row.get(8)?).unwrap_or_default(),
                without_cost: count(row, 9)?,
            })
        })?;
        rows.collect()
    };
    read().map_err(|cause| error(path, &cause))
}

fn count(row: &rusqlite::Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(u64::try_from(row.get::<_, i64>(column)?).unwrap_or(0))
}

/// What the calls of a run (by its folder's id) have used, as far as their answers are stored: also of examples that are
/// under way and in no trace yet.
///
/// # Errors
/// Where the file cannot be read.
pub fn spent_by(path: &Path, run: &str) -> Result<Amount, CacheError> {
    if !path.exists() || run.is_empty() {
        return Ok(Amount::default());
    }
    let connection = open_to_read(path)?;
    let read = || {
        connection.query_row(
            "SELECT count(*), coalesce(sum(coalesce(json_extract(completion, '$.usage.prompt'), 0)
                                         + coalesce(json_extract(completion, '$.usage.completion'), 0)), 0),
                    coalesce(sum(CAST(round(json_extract(completion, '$.cost') * 1e9) AS INTEGER)), 0)
             FROM completions WHERE origin >= ?1 || '/' AND origin < ?1 || '0' AND json_valid(completion)",
            [run],
            |row| {
                Ok(Amount {
                    calls: count(row, 0)?,
                    tokens: count(row, 1)?,
                    cost: Usd(count(row, 2)?),
                })
            },
        )
    };
    read().map_err(|cause| error(path, &cause))
}

/// What to take out of a cache; all conditions together.
#[derive(Debug, Clone, Default)]
pub struct Prune {
    /// Stored before this moment, RFC 3339.
    pub before: Option<String>,
    pub model: Option<String>,
    pub provider: Option<String>,
    /// Only count.
    pub dry_run: bool,
}

/// How many completions were (or would be) taken out, and the file's size in bytes before and after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Pruned {
    pub completions: u64,
    pub bytes_before: u64,
    pub bytes_after: u64,
}

/// Takes completions out and gives the space back.
///
/// # Errors
/// Where the file is not there or cannot be written.
pub fn prune(path: &Path, what: &Prune) -> Result<Pruned, CacheError> {
    // Not `open_to_write`, which would make a file where there is none.
    drop(open_to_read(path)?);
    let size = || std::fs::metadata(path).map_or(0, |file| file.len());
    let bytes_before = size();
    let connection = open_to_write(path)?;
    let work = || -> rusqlite::Result<u64> {
        let condition = "(?1 IS NULL OR stored_at < ?1) AND (?2 IS NULL OR model = ?2) \
                         AND (?3 IS NULL OR provider = ?3 OR substr(provider, 1, length(?3) + 1) = ?3 || ' ')";
        let values = (&what.before, &what.model, &what.provider);
        if what.dry_run {
            return connection.query_row(
                &format!("SELECT count(*) FROM completions WHERE {condition}"),
                values,
                |row| count(row, 0),
            );
        }
        let count = connection.execute(&format!("DELETE FROM completions WHERE {condition}"), values)?;
        if count > 0 {
            connection.execute_batch("VACUUM; PRAGMA wal_checkpoint(TRUNCATE)")?;
        }
        Ok(count as u64)
    };
    let completions = work().map_err(|cause| error(path, &cause))?;
    drop(connection);
    Ok(Pruned {
        completions,
        bytes_before,
        bytes_after: size(),
    })
}

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    key: String,
    stored_at: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    provider: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    completion: Completion,
}

/// Why an export or import failed.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("line {line}: {reason}; nothing was imported")]
    Line { line: usize, reason: String },
}

/// Writes all completions, ordered by key; returns how many.
///
/// # Errors
/// Where the cache cannot be read or `out` not written.
pub fn export(path: &Path, out: &mut dyn Write) -> Result<u64, TransferError> {
    let connection = open_to_read(path)?;
    let fail = |cause: &rusqlite::Error| error(path, cause);
    let mut statement = connection
        .prepare("SELECT key, stored_at, provider, model, completion FROM completions ORDER BY key")
        .map_err(|cause| fail(&cause))?;
    let mut rows = statement.query([]).map_err(|cause| fail(&cause))?;
    let mut count = 0;
    while let Some(row) = rows.next().map_err(|cause| fail(&cause))? {
        let Some(line) = line(row).map_err(|cause| fail(&cause))? else {
            tracing::warn!("a damaged completion is left out");
            continue;
        };
        serde_json::to_writer(&mut *out, &line).map_err(std::io::Error::from)?;
        out.write_all(b"\n")?;
        count += 1;
    }
    out.flush()?;
    Ok(count)
}

/// None where the completion is damaged.
fn line(row: &rusqlite::Row<'_>) -> rusqlite::Result<Option<Line>> {
    let key: Vec<u8> = row.get(0)?;
    let text: String = row.get(4)?;
    let Ok(completion) = serde_json::from_str(&text) else {
        return Ok(None);
    };
    Ok(Some(Line {
        key: key.iter().map(|byte| format!("{byte:02x}")).collect(),
        stored_at: row.get(1)?,
        provider: row.get(2)?,
        model: row.get(3)?,
        completion,
    }))
}

/// What an import did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Imported {
    pub added: u64,
    /// Already there; what is there stays.
    pub known: u64,
}

/// Reads what [`export`] wrote, all of it or nothing.
///
/// # Errors
/// Where a line is malformed, or the cache cannot be written.
pub fn import(path: &Path, lines: &mut dyn BufRead) -> Result<Imported, TransferError> {
    let mut connection = open_to_write(path)?;
    let fail = |cause: &rusqlite::Error| error(path, cause);
    let change = connection
        .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
        .map_err(|cause| fail(&cause))?;
    let mut imported = Imported::default();
    for (index, line) in lines.lines().enumerate() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let malformed = |reason: String| TransferError::Line {
            line: index + 1,
            reason,
        };
        let line: Line = serde_json::from_str(&line).map_err(|cause| malformed(cause.to_string()))?;
        let key = blake3::Hash::from_hex(&line.key)
            .map_err(|_| malformed(format!("`{}` is not a key of 64 hex digits", line.key)))?;
        if line.stored_at.parse::<jiff::Timestamp>().is_err() {
            return Err(malformed(format!("`{}` is not a time", line.stored_at)));
        }
        if insert(&change, key.as_bytes(), &line).map_err(|cause| fail(&cause))? {
            imported.added += 1;
        } else {
            imported.known += 1;
        }
    }
    change.commit().map_err(|cause| fail(&cause))?;
    Ok(imported)
}

fn insert(connection: &Connection, key: &[u8; 32], line: &Line) -> rusqlite::Result<bool> {
    let known: Option<i64> = connection
        .prepare_cached("SELECT 1 FROM completions WHERE key = ?1")?
        .query_row([key.as_slice()], |row| row.get(0))
        .optional()?;
    if known.is_some() {
        return Ok(false);
    }
    let completion = serde_json::to_string(&line.completion)
        .map_err(|cause| rusqlite::Error::ToSqlConversionFailure(Box::new(cause)))?;
    connection
        .prepare_cached(
            "INSERT INTO completions (key, completion, stored_at, provider, model) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?
        .execute((key.as_slice(), completion, &line.stored_at, &line.provider, &line.model))?;
    Ok(true)
}

fn error(path: &Path, cause: &rusqlite::Error) -> CacheError {
    CacheError {
        path: path.to_owned(),
        reason: cause.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cache::Cache;
    use super::super::tests::{completion, request};
    use super::super::usage::Usage;
    use super::*;

    async fn filled(folder: &tempfile::TempDir) -> std::path::PathBuf {
        let path = folder.path().join("completions.sqlite");
        let cache = Cache::open(&path).unwrap();
        for (number, model) in [(1, "small"), (2, "small"), (3, "large")] {
            let mut request = request();
            request.model = model.into();
            let completion = Completion {
                usage: Usage {
                    prompt: Some(100),
                    completion: Some(10),
                    ..Usage::default()
                },
                cost: (number != 2).then_some(Usd(1_000_000)),
                ..completion("SELECT 'ş'")
            };
            cache.put([number; 32], &request, &completion).await.unwrap();
        }
        path
    }

    #[tokio::test]
    async fn statistics_by_model() {
        let folder = tempfile::tempdir().unwrap();
        let path = filled(&folder).await;
        let stats = stats(&path).unwrap();
        assert_eq!(stats.len(), 2);
        let small = &stats[0];
        assert_eq!(
            (
                small.model.as_deref(),
                small.completions,
                small.prompt_tokens,
                small.completion_tokens
            ),
            (Some("small"), 2, 200, 20)
        );
        assert_eq!((small.cost, small.without_cost), (Usd(1_000_000), 1));
        assert!(super::stats(&folder.path().join("absent")).is_err());
    }

    #[tokio::test]
    async fn what_a_run_has_spent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("completions.sqlite");
        let cache = Cache::open(&path).unwrap();
        for (number, origin) in [(1, "a1/q1/s"), (2, "a1/q2/s"), (3, "a10/q1/s"), (4, "")] {
            let mut request = request();
            request.origin = origin.into();
            let completion = Completion {
                usage: Usage {
                    prompt: Some(7),
                    ..Usage::default()
                },
                cost: Some(Usd(3)),
                ..completion("x")
            };
            cache.put([number; 32], &request, &completion).await.unwrap();
        }
        let spent = spent_by(&path, "a1").unwrap();
        assert_eq!(
            spent,
            Amount {
                calls: 2,
                tokens: 14,
                cost: Usd(6)
            }
        );
        assert_eq!(spent_by(&path, "").unwrap(), Amount::default());
    }

    #[tokio::test]
    async fn what_is_exported_can_be_imported_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        let path = filled(&folder).await;
        let mut lines = Vec::new();
        assert_eq!(export(&path, &mut lines).unwrap(), 3);
        let other = folder.path().join("other.sqlite");
        let imported = import(&other, &mut lines.as_slice()).unwrap();
        assert_eq!(imported, Imported { added: 3, known: 0 });
        assert_eq!(
            import(&other, &mut lines.as_slice()).unwrap(),
            Imported { added: 0, known: 3 }
        );
        let hit = Cache::open(&other).unwrap().get(&[3; 32]).unwrap().unwrap();
        assert_eq!(hit.completion.text, "SELECT 'ş'");
        let mut again = Vec::new();
        export(&other, &mut again).unwrap();
        assert_eq!(lines, again);

        lines.extend_from_slice(b"{\"key\": 3}\n");
        let third = folder.path().join("third.sqlite");
        let refusal = import(&third, &mut lines.as_slice()).unwrap_err();
        assert!(refusal.to_string().starts_with("line 4: "), "{refusal}");
        assert!(stats(&third).unwrap().is_empty(), "all or nothing");
    }

    #[tokio::test]
    async fn pruning_by_model_and_age() {
        let folder = tempfile::tempdir().unwrap();
        let path = filled(&folder).await;
        let small = Prune {
            model: Some("small".into()),
            ..Prune::default()
        };
        let dry = Prune {
            dry_run: true,
            ..small.clone()
        };
        assert_eq!(prune(&path, &dry).unwrap().completions, 2);
        assert_eq!(prune(&path, &small).unwrap().completions, 2);
        let old = Prune {
            before: Some("2020-01-01T00:00:00Z".into()),
            ..Prune::default()
        };
        assert_eq!(prune(&path, &old).unwrap().completions, 0);
        let all = prune(&path, &Prune::default()).unwrap();
        assert_eq!(all.completions, 1);
        assert!(prune(&folder.path().join("absent"), &small).is_err());
    }
}
