//! BLAKE3 digests (hex) of examples, datasets and files: what says that two runs saw the same data.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::SystemTime;

use super::{Dialect, Example};

/// Length before content, so that no two lists of parts run together into the same bytes.
fn part(hasher: &mut blake3::Hasher, text: &str) {
    hasher.update(&(text.len() as u64).to_le_bytes());
    hasher.update(text.as_bytes());
}

/// Digest of what an example asks and expects. Its position and its further fields don't count: neither changes a prompt
/// or a verdict.
#[must_use]
pub fn example_digest(example: &Example) -> String {
    hash_example(example).to_hex().to_string()
}

fn hash_example(example: &Example) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    part(&mut hasher, "example 1");
    for text in [
        &example.id,
        &example.question,
        &example.evidence,
        &example.database,
        &example.language,
    ] {
        part(&mut hasher, text);
    }
    part(&mut hasher, example.difficulty.as_deref().unwrap_or_default());
    hasher.update(&(example.gold.len() as u64).to_le_bytes());
    for gold in &example.gold {
        part(&mut hasher, gold);
    }
    hasher.finalize()
}

/// Digest of a dataset: its dialect and its examples in order.
#[must_use]
pub fn dataset_digest(dialect: Dialect, examples: &[Example]) -> String {
    let mut hasher = blake3::Hasher::new();
    part(&mut hasher, "dataset 1");
    part(&mut hasher, dialect.name());
    for example in examples {
        hasher.update(hash_example(example).as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// Digest of a file's bytes, read in pieces.
pub fn file_digest(path: &Path) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path)?)?;
    Ok(hasher.finalize().to_hex().to_string())
}

struct Known {
    size: u64,
    modified: SystemTime,
    digest: String,
}

static KNOWN: LazyLock<Mutex<HashMap<PathBuf, Known>>> = LazyLock::new(Mutex::default);

/// Digest of a database file; computed once in a process for each state (size and time of change) of the file. Rows that
/// are still in a write-ahead log count too.
pub fn database_digest(path: &Path) -> io::Result<String> {
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    let log = PathBuf::from(log);
    if log.metadata().is_ok_and(|metadata| metadata.len() > 0) {
        let mut hasher = blake3::Hasher::new();
        hasher
            .update_reader(File::open(path)?)?
            .update_reader(File::open(log)?)?;
        return Ok(hasher.finalize().to_hex().to_string());
    }
    let metadata = path.metadata()?;
    let (size, modified) = (metadata.len(), metadata.modified()?);
    let lock = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = lock()
        .get(path)
        .filter(|known| known.size == size && known.modified == modified)
    {
        return Ok(known.digest.clone());
    }
    let digest = file_digest(path)?;
    lock().insert(
        path.to_owned(),
        Known {
            size,
            modified,
            digest: digest.clone(),
        },
    );
    Ok(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Example {
        Example {
            id: "7".into(),
            position: 0,
            question: "How many?".into(),
            evidence: String::new(),
            database: "d".into(),
            gold: vec!["SELECT 1".into()],
            language: "en".into(),
            difficulty: None,
            fields: Default::default(),
        }
    }

    #[test]
    fn every_part_that_matters_changes_the_digest() {
        let base = example();
        let digest = example_digest(&base);
        assert_eq!(
            digest,
            example_digest(&Example {
                position: 3,
                ..base.clone()
            })
        );
        for changed in [
            Example {
                id: "8".into(),
                ..base.clone()
            },
            Example {
                question: "How much?".into(),
                ..base.clone()
            },
            // The same bytes, parted elsewhere.
            Example {
                question: "How many".into(),
                evidence: "?".into(),
                ..base.clone()
            },
            Example {
                gold: vec![],
                ..base.clone()
            },
            Example {
                language: "de".into(),
                ..base.clone()
            },
        ] {
            assert_ne!(digest, example_digest(&changed));
        }
        let two = [base.clone(), Example { id: "8".into(), ..base }];
        assert_ne!(
            dataset_digest(Dialect::Sqlite, &two),
            dataset_digest(Dialect::Sqlite, &two[..1])
        );
        assert_ne!(
            dataset_digest(Dialect::Sqlite, &two),
            dataset_digest(Dialect::Mysql, &two)
        );
    }

    #[test]
    fn a_changed_database_gets_a_new_digest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sqlite");
        std::fs::write(&path, "one").unwrap();
        let first = database_digest(&path).unwrap();
        assert_eq!(first, file_digest(&path).unwrap());
        assert_eq!(first, database_digest(&path).unwrap());
        std::fs::write(&path, "three").unwrap();
        assert_ne!(first, database_digest(&path).unwrap());
        std::fs::write(folder.path().join("a.sqlite-wal"), "log").unwrap();
        assert_ne!(file_digest(&path).unwrap(), database_digest(&path).unwrap());
    }
}
