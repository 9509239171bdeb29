//! Finding a dataset: by a manifest's name, a manifest's path, or a folder in a benchmark's own layout.
//!
//! In: what the user gave as `--data`, and the folders where manifests lie. Out: [`Source`]; a folder becomes a manifest
//! as if someone had written it, so that the rest of this room knows manifests only.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use super::Dialect;
use super::error::{DatasetError, nearest};
use super::load::{Format, format};
use super::manifest::{Fields, Manifest, Variant};
use super::text;

/// A dataset that was found, not yet read.
#[derive(Debug, Clone)]
pub struct Source {
    pub manifest: Manifest,
    /// What the manifest's paths are relative to.
    pub root: PathBuf,
    /// The manifest's file; none for a folder in a known layout.
    pub file: Option<PathBuf>,
}

impl Source {
    #[must_use]
    pub fn name(&self) -> &str {
        &self.manifest.name
    }

    /// Reads the manifest at `path`.
    pub fn from_manifest(path: &Path) -> Result<Source, DatasetError> {
        let manifest = Manifest::parse(&text::read(path)?, path)?;
        let root = path.parent().map(Path::to_owned).unwrap_or_default();
        Ok(Source {
            manifest,
            root,
            file: Some(path.to_owned()),
        })
    }

    /// The folder as BIRD or Spider lays it out, or none.
    #[must_use]
    pub fn from_folder(folder: &Path) -> Option<Source> {
        let manifest = LAYOUTS.iter().find_map(|layout| layout.manifest(folder))?;
        Some(Source {
            manifest,
            root: folder.to_owned(),
            file: None,
        })
    }
}

/// Manifests by name: those in `folders` (earlier ones win), then `shipped` ones.
#[must_use]
pub fn list(folders: &[PathBuf], shipped: &[(String, PathBuf)]) -> BTreeMap<String, PathBuf> {
    let mut found = BTreeMap::new();
    for folder in folders {
        let Ok(entries) = std::fs::read_dir(folder) else {
            continue;
        };
        let mut paths: Vec<PathBuf> = entries
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .collect();
        paths.sort();
        for path in paths.into_iter().filter(|path| is_manifest(path) && path.is_file()) {
            if let Some(stem) = path.file_stem() {
                found.entry(stem.to_string_lossy().into_owned()).or_insert(path);
            }
        }
    }
    for (name, path) in shipped {
        found.entry(name.clone()).or_insert_with(|| path.clone());
    }
    found
}

fn is_manifest(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "yaml" || extension == "yml")
}

/// Finds what `data` names: a manifest in `folders` or among `shipped`, a manifest's path, or a folder.
pub fn resolve(data: &str, folders: &[PathBuf], shipped: &[(String, PathBuf)]) -> Result<Source, DatasetError> {
    let manifests = list(folders, shipped);
    if let Some(path) = manifests.get(data) {
        return Source::from_manifest(path);
    }
    let path = Path::new(data);
    if path.is_file() || (is_manifest(path) && data.contains(['/', '\\'])) {
        return Source::from_manifest(path);
    }
    if path.is_dir()
        && let Some(source) = Source::from_folder(path)
    {
        return Ok(source);
    }
    let mut looked = Vec::new();
    if !data.contains(['/', '\\']) {
        looked.extend(
            folders
                .iter()
                .map(|folder| format!("`{}`", folder.join(format!("{data}.yaml")).display())),
        );
    }
    if path.is_dir() {
        for layout in LAYOUTS {
            looked.push(format!(
                "`{data}/{}` with `{}/` ({})",
                layout.splits[0].questions, layout.splits[0].databases, layout.title
            ));
        }
    } else {
        looked.push(format!("a manifest or folder `{data}`"));
    }
    let names: Vec<String> = manifests.into_keys().collect();
    let nearest = nearest(data, names.iter().map(String::as_str));
    Err(DatasetError::NotFound {
        data: data.to_owned(),
        looked,
        names,
        nearest,
    })
}

/// A benchmark's folder: which files make which split. The first split that is there is the folder's own.
struct Layout {
    title: &'static str,
    format: &'static str,
    splits: &'static [LayoutSplit],
}

struct LayoutSplit {
    name: &'static str,
    questions: &'static str,
    databases: &'static str,
    tables: &'static str,
    dialect: Dialect,
}

const fn split(
    name: &'static str,
    questions: &'static str,
    databases: &'static str,
    tables: &'static str,
) -> LayoutSplit {
    LayoutSplit {
        name,
        questions,
        databases,
        tables,
        dialect: Dialect::Sqlite,
    }
}

const fn mini(name: &'static str, questions: &'static str, dialect: Dialect) -> LayoutSplit {
    LayoutSplit {
        dialect,
        ..split(name, questions, "dev_databases", "dev_tables.json")
    }
}

const LAYOUTS: &[Layout] = &[
    Layout {
        title: "BIRD's layout",
        format: "bird",
        splits: &[
            split("dev", "dev.json", "dev_databases", "dev_tables.json"),
            split("train", "train.json", "train_databases", "train_tables.json"),
            mini("mini_dev_sqlite", "mini_dev_sqlite.json", Dialect::Sqlite),
            mini("mini_dev_mysql", "mini_dev_mysql.json", Dialect::Mysql),
            mini("mini_dev_postgresql", "mini_dev_postgresql.json", Dialect::Postgresql),
        ],
    },
    Layout {
        title: "Spider's layout",
        format: "spider",
        splits: &[
            split("dev", "dev.json", "database", "tables.json"),
            split("train", "train.json", "database", "tables.json"),
            split("train", "train_spider.json", "database", "tables.json"),
            split("test", "test.json", "test_database", "test_tables.json"),
        ],
    },
];

impl Layout {
    fn manifest(&self, folder: &Path) -> Option<Manifest> {
        let mut splits: IndexMap<String, Variant> = IndexMap::new();
        for split in self.splits {
            if splits.contains_key(split.name)
                || !folder.join(split.questions).is_file()
                || !folder.join(split.databases).is_dir()
            {
                continue;
            }
            let variant = Variant {
                questions: Some(split.questions.into()),
                databases: Some(split.databases.into()),
                tables: Some(PathBuf::from(split.tables)).filter(|tables| folder.join(tables).is_file()),
                dialect: Some(split.dialect),
                ..Variant::default()
            };
            splits.insert(split.name.to_owned(), variant);
        }
        let own = splits.keys().next()?.clone();
        // `..` and `.` have no name of their own.
        let name = folder.file_name().map(ToOwned::to_owned).or_else(|| {
            folder
                .canonicalize()
                .ok()
                .and_then(|folder| folder.file_name().map(ToOwned::to_owned))
        });
        Some(Manifest {
            name: name.map_or_else(|| self.format.to_owned(), |name| name.to_string_lossy().into_owned()),
            description: format!("folder in {}", self.title),
            source: String::new(),
            license: String::new(),
            format: Format(format(self.format)?),
            dialect: None,
            language: None,
            questions: None,
            databases: None,
            database_file: None,
            descriptions: None,
            tables: None,
            fields: Fields::default(),
            conditions: IndexMap::new(),
            languages: IndexMap::new(),
            split: own,
            splits,
            metrics: vec!["ex".to_owned()],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_known_by_their_layout() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert!(Source::from_folder(folder.path()).is_none());
        std::fs::write(at("train.json"), "[]").unwrap();
        std::fs::write(at("tables.json"), "[]").unwrap();
        std::fs::create_dir(at("database")).unwrap();
        let spider = Source::from_folder(folder.path()).unwrap();
        assert_eq!(
            (spider.manifest.format.0.name, spider.manifest.split.as_str()),
            ("spider", "train")
        );
        std::fs::write(at("dev.json"), "[]").unwrap();
        std::fs::create_dir(at("dev_databases")).unwrap();
        let bird = Source::from_folder(folder.path()).unwrap();
        assert_eq!(
            (bird.manifest.format.0.name, bird.manifest.split.as_str()),
            ("bird", "dev")
        );
    }

    #[test]
    fn manifests_are_found_by_name_and_path_and_missed_with_advice() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("provinces.yaml");
        std::fs::write(&path, "format: json\nquestions: q.json\n").unwrap();
        let folders = [folder.path().to_owned()];
        assert_eq!(
            resolve("provinces", &folders, &[]).unwrap().file.as_deref(),
            Some(path.as_path())
        );
        assert_eq!(resolve(path.to_str().unwrap(), &[], &[]).unwrap().name(), "provinces");
        assert_eq!(
            resolve("shipped", &[], &[("shipped".to_owned(), path.clone())])
                .unwrap()
                .name(),
            "provinces"
        );
        let message = resolve("provinzes", &folders, &[]).unwrap_err().to_string();
        assert!(message.contains("did you mean `provinces`?"), "{message}");
        assert!(message.contains("provinzes.yaml"), "{message}");
        let message = resolve(folder.path().to_str().unwrap(), &[], &[])
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("dev_databases/` (BIRD's layout)") && message.contains("found: none"),
            "{message}"
        );
    }
}
