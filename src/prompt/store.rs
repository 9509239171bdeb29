//! Where templates come from: a folder, or those carried in the binary.

use std::collections::BTreeMap;
use std::path::PathBuf;

use include_dir::{Dir, include_dir};

use crate::config::TemplateNames;

static EMBEDDED: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/prompts");
const EXTENSION: &str = "jinja";

/// Templates by language and name. One source only: a template that a folder lacks is missing, not taken from elsewhere.
#[derive(Debug, Clone)]
pub enum TemplateStore {
    /// `<folder>/<language>/<name>.jinja`.
    Folder(PathBuf),
    /// The shipped templates.
    Embedded,
}

impl TemplateStore {
    /// The template's source text and the name of its file.
    pub fn read(&self, language: &str, name: &str) -> Option<(String, String)> {
        if [language, name]
            .iter()
            .any(|part| part.is_empty() || part.split('/').any(|step| matches!(step, "" | "." | "..")))
        {
            return None;
        }
        match self {
            TemplateStore::Folder(folder) => {
                let path = folder.join(language).join(format!("{name}.{EXTENSION}"));
                let text = std::fs::read_to_string(&path).ok()?;
                Some((text, path.display().to_string()))
            }
            TemplateStore::Embedded => {
                let path = format!("{language}/{name}.{EXTENSION}");
                let text = EMBEDDED.get_file(&path)?.contents_utf8()?;
                Some((text.to_owned(), format!("prompts/{path}")))
            }
        }
    }

    /// Languages with their templates' names (partials, whose last part begins with `_`, included), sorted.
    pub fn list(&self) -> BTreeMap<String, Vec<String>> {
        let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
        match self {
            TemplateStore::Folder(folder) => {
                let mut open = vec![folder.clone()];
                while let Some(next) = open.pop() {
                    for entry in std::fs::read_dir(next).into_iter().flatten().flatten() {
                        let path = entry.path();
                        if path.is_dir() {
                            open.push(path);
                        } else if let Ok(relative) = path.strip_prefix(folder) {
                            add(&relative.to_string_lossy().replace('\\', "/"), &mut found);
                        }
                    }
                }
            }
            TemplateStore::Embedded => {
                let mut open = vec![&EMBEDDED];
                while let Some(next) = open.pop() {
                    open.extend(next.dirs());
                    next.files()
                        .for_each(|file| add(&file.path().to_string_lossy().replace('\\', "/"), &mut found));
                }
            }
        }
        for names in found.values_mut() {
            names.sort();
        }
        found
    }

    /// Where the templates are, for messages.
    pub fn place(&self) -> String {
        match self {
            TemplateStore::Folder(folder) => folder.display().to_string(),
            TemplateStore::Embedded => "the shipped prompts".into(),
        }
    }
}

fn add(path: &str, found: &mut BTreeMap<String, Vec<String>>) {
    if let Some((language, rest)) = path.split_once('/')
        && let Some(name) = rest.strip_suffix(&format!(".{EXTENSION}"))
    {
        found.entry(language.to_owned()).or_default().push(name.to_owned());
    }
}

impl TemplateNames for TemplateStore {
    fn languages_of(&self, template: &str) -> Vec<String> {
        self.list()
            .into_iter()
            .filter(|(_, names)| names.iter().any(|name| name == template))
            .map(|(language, _)| language)
            .collect()
    }

    fn all(&self) -> Vec<String> {
        let mut names: Vec<String> = self.list().into_values().flatten().collect();
        names.retain(|name| !name.rsplit('/').next().unwrap_or_default().starts_with('_'));
        names.sort();
        names.dedup();
        names
    }
}

/// BLAKE3 (hex) over templates' names and texts.
pub fn template_digest<'a>(texts: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut hasher = blake3::Hasher::new();
    for (name, text) in texts {
        for part in [name, text] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
    }
    hasher.finalize().to_hex().to_string()
}
