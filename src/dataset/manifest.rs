//! The manifest: what a dataset's YAML file says, with its defaults and its overrides by language and split.
//!
//! In: a manifest's text. Out: [`Manifest`], and for one language and split the [`Variant`] that holds. Finding manifests
//! and folders is `source`'s work.

use std::path::{Path, PathBuf};

use indexmap::IndexMap;
use serde::{Deserialize, Deserializer};

use super::Dialect;
use super::error::{DatasetError, hint, nearest};
use super::load::Format;

/// A dataset's YAML file. Paths are relative to its folder.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The file's name where absent.
    #[serde(default)]
    pub name: String,
    #[serde(default)]
    pub description: String,
    /// Where the data comes from, for people.
    #[serde(default)]
    pub source: String,
    #[serde(default)]
    pub license: String,
    pub format: Format,
    #[serde(default)]
    pub dialect: Option<Dialect>,
    /// Language of every record that does not name its own. Where absent, the data declares none.
    #[serde(default)]
    pub language: Option<String>,
    /// Name of the split that the manifest's own keys describe.
    #[serde(default = "default_split")]
    pub split: String,
    #[serde(default)]
    pub questions: Option<PathBuf>,
    #[serde(default)]
    pub databases: Option<PathBuf>,
    #[serde(default)]
    pub database_file: Option<String>,
    #[serde(default)]
    pub descriptions: Option<String>,
    #[serde(default)]
    pub tables: Option<PathBuf>,
    #[serde(default)]
    pub fields: Fields,
    #[serde(default, rename = "where")]
    pub conditions: IndexMap<String, Wanted>,
    /// Parallel data in other languages: what differs.
    #[serde(default)]
    pub languages: IndexMap<String, Variant>,
    /// Further splits: what differs.
    #[serde(default)]
    pub splits: IndexMap<String, Variant>,
    /// Metrics that fit the data.
    #[serde(default = "default_metrics")]
    pub metrics: Vec<String>,
}

/// What a language or split says differently; absent keys are inherited.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Variant {
    pub questions: Option<PathBuf>,
    pub databases: Option<PathBuf>,
    /// Path of a database in the databases folder; `{db}` stands for its id.
    pub database_file: Option<String>,
    /// Folder of a database's column descriptions in the databases folder; `{db}` stands for its id.
    pub descriptions: Option<String>,
    pub tables: Option<PathBuf>,
    pub dialect: Option<Dialect>,
    pub fields: Fields,
    #[serde(rename = "where")]
    pub conditions: IndexMap<String, Wanted>,
    /// Within a split only.
    pub languages: IndexMap<String, Variant>,
}

/// Which column or key of a record holds what; dots lead into nested JSON objects.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Fields {
    pub id: Option<String>,
    pub question: Option<String>,
    pub evidence: Option<String>,
    pub gold: Option<String>,
    pub golds: Option<String>,
    pub database: Option<String>,
    pub language: Option<String>,
    pub difficulty: Option<String>,
}

impl Fields {
    /// `self` where it says something, else `base`.
    #[must_use]
    pub fn over(&self, base: &Fields) -> Fields {
        let pick = |own: &Option<String>, inherited: &Option<String>| own.clone().or_else(|| inherited.clone());
        Fields {
            id: pick(&self.id, &base.id),
            question: pick(&self.question, &base.question),
            evidence: pick(&self.evidence, &base.evidence),
            gold: pick(&self.gold, &base.gold),
            golds: pick(&self.golds, &base.golds),
            database: pick(&self.database, &base.database),
            language: pick(&self.language, &base.language),
            difficulty: pick(&self.difficulty, &base.difficulty),
        }
    }
}

impl Variant {
    /// `self` where it says something, else `base`; fields and conditions key by key.
    #[must_use]
    pub fn over(&self, base: &Variant) -> Variant {
        let mut conditions = base.conditions.clone();
        conditions.extend(self.conditions.clone());
        Variant {
            questions: self.questions.clone().or_else(|| base.questions.clone()),
            databases: self.databases.clone().or_else(|| base.databases.clone()),
            database_file: self.database_file.clone().or_else(|| base.database_file.clone()),
            descriptions: self.descriptions.clone().or_else(|| base.descriptions.clone()),
            tables: self.tables.clone().or_else(|| base.tables.clone()),
            dialect: self.dialect.or(base.dialect),
            fields: self.fields.over(&base.fields),
            conditions,
            languages: IndexMap::new(),
        }
    }
}

/// The values of a field that let a record in: one, or any of several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted(pub Vec<String>);

impl<'de> Deserialize<'de> for Wanted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected text, a number, true or false, or a list of these")]
        enum Value {
            Flag(bool),
            Integer(i64),
            Real(f64),
            Text(String),
            Several(Vec<Wanted>),
        }
        Ok(Wanted(match Value::deserialize(deserializer)? {
            Value::Flag(flag) => vec![flag.to_string()],
            Value::Integer(number) => vec![number.to_string()],
            Value::Real(number) => vec![number.to_string()],
            Value::Text(text) => vec![text],
            Value::Several(several) => several.into_iter().flat_map(|wanted| wanted.0).collect(),
        }))
    }
}

fn default_split() -> String {
    "dev".to_owned()
}

fn default_metrics() -> Vec<String> {
    vec!["ex".to_owned()]
}

impl Manifest {
    /// Reads a manifest's text; `path` is for its name and for messages.
    pub fn parse(text: &str, path: &Path) -> Result<Manifest, DatasetError> {
        let fault = |line, column, message| DatasetError::Manifest {
            path: path.to_owned(),
            line,
            column,
            message,
        };
        if text
            .lines()
            .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
        {
            return Err(fault(
                None,
                None,
                "the manifest is empty; `format` and `questions` are required".to_owned(),
            ));
        }
        let mut manifest: Manifest = serde_yaml::from_str(text).map_err(|error| {
            let location = error.location();
            fault(
                location.as_ref().map(serde_yaml::Location::line),
                location.as_ref().map(serde_yaml::Location::column),
                reworded(&error),
            )
        })?;
        if manifest.name.is_empty() {
            manifest.name = path
                .file_stem()
                .map(|stem| stem.to_string_lossy().into_owned())
                .unwrap_or_default();
        }
        manifest.validate().map_err(|message| fault(None, None, message))?;
        Ok(manifest)
    }

    fn validate(&self) -> Result<(), String> {
        let by_language = || {
            self.languages
                .iter()
                .chain(self.splits.values().flat_map(|split| &split.languages))
                .map(|(code, variant)| (code.as_str(), variant))
        };
        for code in by_language().map(|(code, _)| code).chain(self.language.as_deref()) {
            let well_formed = code.split('-').all(|part| {
                !part.is_empty() && part.len() <= 8 && part.bytes().all(|byte| byte.is_ascii_alphanumeric())
            });
            if !well_formed {
                return Err(format!("`{code}` is no language code; expected one like `en` or `tr`"));
            }
        }
        if by_language().any(|(_, variant)| !variant.languages.is_empty()) {
            return Err("`languages` within a language; it belongs to the manifest or to a split".to_owned());
        }
        if self.fields.language.is_some() && by_language().next().is_some() {
            return Err(
                "`fields.language` and `languages` exclude each other: either each record names its language \
                        or each language has its own questions"
                    .to_owned(),
            );
        }
        let base = self.base();
        let variants = std::iter::once(&base)
            .chain(self.splits.values())
            .chain(by_language().map(|(_, variant)| variant));
        for variant in variants {
            if let Some(pattern) = variant
                .database_file
                .as_deref()
                .filter(|pattern| !pattern.contains("{db}"))
            {
                return Err(format!("`database_file` has no `{{db}}` in `{pattern}`"));
            }
        }
        for split in self.split_names() {
            for language in self.language_codes(&split) {
                if self.variant(&split, Some(&language)).questions.is_none() {
                    return Err(format!("no `questions` for split `{split}` in language `{language}`"));
                }
            }
            if self.language_codes(&split).is_empty() && self.variant(&split, None).questions.is_none() {
                return Err(format!("no `questions` for split `{split}`"));
            }
        }
        Ok(())
    }

    fn base(&self) -> Variant {
        Variant {
            questions: self.questions.clone(),
            databases: self.databases.clone(),
            database_file: self.database_file.clone(),
            descriptions: self.descriptions.clone(),
            tables: self.tables.clone(),
            dialect: self.dialect,
            fields: self.fields.clone(),
            conditions: self.conditions.clone(),
            languages: IndexMap::new(),
        }
    }

    /// The manifest's own split, then the others.
    #[must_use]
    pub fn split_names(&self) -> Vec<String> {
        let others = self.splits.keys().filter(|name| **name != self.split).cloned();
        std::iter::once(self.split.clone()).chain(others).collect()
    }

    /// Languages that the manifest declares for a split, the default one first; empty where it declares none or where each
    /// record names its own.
    #[must_use]
    pub fn language_codes(&self, split: &str) -> Vec<String> {
        if self.fields.language.is_some() {
            return Vec::new();
        }
        let mut codes = Vec::new();
        let own = self.splits.get(split);
        let declared = !self.languages.is_empty() || own.is_some_and(|split| !split.languages.is_empty());
        let own_questions = self.questions.is_some() || own.is_some_and(|split| split.questions.is_some());
        match &self.language {
            Some(language) if own_questions || !declared => codes.push(language.clone()),
            // With `languages`, what the manifest itself describes is English unless it says otherwise.
            None if declared && own_questions => codes.push("en".to_owned()),
            _ => {}
        }
        for code in self
            .languages
            .keys()
            .chain(own.into_iter().flat_map(|split| split.languages.keys()))
        {
            if !codes.contains(code) {
                codes.push(code.clone());
            }
        }
        codes
    }

    /// What holds for a split and a declared language.
    #[must_use]
    pub fn variant(&self, split: &str, language: Option<&str>) -> Variant {
        let mut variant = self.base();
        let mut layers = Vec::new();
        layers.extend(language.and_then(|language| self.languages.get(language)));
        if let Some(own) = self.splits.get(split) {
            layers.push(own);
            layers.extend(language.and_then(|language| own.languages.get(language)));
        }
        for layer in layers {
            variant = layer.over(&variant);
        }
        variant
    }
}

/// The parser's message without its place, and with the nearest valid key for an unknown one.
fn reworded(error: &serde_yaml::Error) -> String {
    let text = error.to_string();
    let text = text
        .rsplit_once(" at line ")
        .map_or(text.as_str(), |(message, _)| message);
    let Some((before, rest)) = text.split_once("unknown field `") else {
        return text.to_owned();
    };
    let Some((key, expected)) = rest.split_once('`') else {
        return text.to_owned();
    };
    let valid: Vec<&str> = expected.split('`').skip(1).step_by(2).collect();
    let place = before.trim_end_matches(": ").trim();
    let place = if place.is_empty() {
        String::new()
    } else {
        format!(" in `{place}`")
    };
    match nearest(key, valid.iter().copied()) {
        Some(name) => format!("unknown key `{key}`{place}{}", hint(Some(&name))),
        None => format!("unknown key `{key}`{place}; valid are {}", valid.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Manifest, DatasetError> {
        Manifest::parse(text, Path::new("datasets/sample.yaml"))
    }

    fn message(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn defaults_fill_a_short_manifest() {
        let manifest = parse("format: json\nquestions: q.json\n").unwrap();
        assert_eq!((manifest.name.as_str(), manifest.split.as_str()), ("sample", "dev"));
        assert_eq!(manifest.metrics, ["ex"]);
        assert!(manifest.language_codes("dev").is_empty());
    }

    #[test]
    fn mistakes_have_a_place_and_a_suggestion() {
        let unknown = message("format: json\nqestions: q.json\n");
        assert!(
            unknown.starts_with("datasets/sample.yaml:2:1: unknown key `qestions`"),
            "{unknown}"
        );
        assert!(unknown.ends_with("did you mean `questions`?"), "{unknown}");
        let nested = message("format: json\nquestions: q\nlanguages:\n  tr:\n    feilds: {}\n");
        assert!(
            nested.contains("`feilds` in `languages.tr`; did you mean `fields`?"),
            "{nested}"
        );
        assert!(message("format: parquet\nquestions: q\n").contains("unknown format `parquet`; valid are `bird`"));
        assert!(message("questions: q\nformat: jsn\n").starts_with("datasets/sample.yaml:2:9: "));
        assert!(message("format: jsn\nquestions: q\n").contains("did you mean `json`?"));
        assert!(message("# nothing\n").contains("empty"));
        assert!(message("format: json\n\tquestions: q\n").contains("sample.yaml:2:"));
        assert!(message("format: json\nformat: csv\n").contains("duplicate"));
        assert!(message("format: json\n").contains("no `questions` for split `dev`"));
        assert!(message("format: json\nquestions: q\ndatabase_file: a.sqlite\n").contains("no `{db}`"));
        let both = "format: json\nquestions: q\nfields: {language: l}\nlanguages: {tr: {questions: t}}\n";
        assert!(message(both).contains("exclude each other"));
    }

    #[test]
    fn overrides_go_from_manifest_to_language_to_split() {
        let manifest = parse(
            "format: jsonl\nquestions: en.jsonl\nlanguage: en\ndatabases: db\nfields: {question: q, gold: sql}\n\
             where: {ok: true, n: [1, 2]}\nlanguages:\n  tr: {questions: tr.jsonl, fields: {question: soru}, where: {ok: same}}\n\
             splits:\n  train:\n    questions: train.jsonl\n    languages: {tr: {questions: train_tr.jsonl}}\n",
        )
        .unwrap();
        assert_eq!(manifest.language_codes("dev"), ["en", "tr"]);
        assert_eq!(manifest.split_names(), ["dev", "train"]);
        let turkish = manifest.variant("train", Some("tr"));
        assert_eq!(turkish.questions.as_deref(), Some(Path::new("train_tr.jsonl")));
        assert_eq!(turkish.databases.as_deref(), Some(Path::new("db")));
        assert_eq!(turkish.fields.question.as_deref(), Some("soru"));
        assert_eq!(turkish.fields.gold.as_deref(), Some("sql"));
        assert_eq!(turkish.conditions["ok"].0, ["same"]);
        assert_eq!(turkish.conditions["n"].0, ["1", "2"]);
        assert_eq!(manifest.variant("dev", Some("en")).conditions["ok"].0, ["true"]);
    }
}
