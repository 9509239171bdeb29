//! What can go wrong in this room, in words that name the file, the record and the remedy.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

/// Problems of one file that an error shows; the rest is counted.
pub const SHOWN_PROBLEMS: usize = 20;

/// Something wrong with one record, or with a file as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// For programs, as in `duplicate_id`.
    pub code: &'static str,
    /// Line or position; empty where the whole file is meant.
    pub place: String,
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.place.is_empty() {
            f.write_str(&self.message)
        } else {
            write!(f, "{}: {}", self.place, self.message)
        }
    }
}

/// Why a dataset could not be found, read or selected from.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    #[error("cannot read `{}`", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{}{}: {message}", path.display(), Location(*line, *column))]
    Manifest {
        path: PathBuf,
        line: Option<usize>,
        column: Option<usize>,
        message: String,
    },
    #[error("no dataset `{data}`{}; looked for {}; manifests found: {}", hint(nearest.as_deref()), looked.join(", "), or_none(names))]
    NotFound {
        data: String,
        looked: Vec<String>,
        names: Vec<String>,
        nearest: Option<String>,
    },
    #[error("`{}` has {total} problem{}{}", path.display(), if *total == 1 { "" } else { "s" }, Listed(problems, *total))]
    Malformed {
        path: PathBuf,
        problems: Vec<Problem>,
        total: usize,
    },
    #[error("`{}` {reason}", path.display())]
    Empty { path: PathBuf, reason: String },
    #[error("no language `{language}` in dataset `{dataset}`; it has {}", or_none(present))]
    UnknownLanguage {
        dataset: String,
        language: String,
        present: Vec<String>,
    },
    #[error("no split `{split}` in dataset `{dataset}`; it has {}", or_none(present))]
    UnknownSplit {
        dataset: String,
        split: String,
        present: Vec<String>,
    },
    #[error("no {kind} `{name}` in the dataset{}", hint(nearest.as_deref()))]
    UnknownName {
        kind: &'static str,
        name: String,
        nearest: Option<String>,
    },
    #[error("`{text}` is no condition; expected `field=value` or `field!=value`")]
    Condition { text: String },
    #[error("no example is left after {filter}{detail}")]
    EmptySelection { filter: String, detail: String },
}

struct Location(Option<usize>, Option<usize>);

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0, self.1) {
            (Some(line), Some(column)) => write!(f, ":{line}:{column}"),
            (Some(line), None) => write!(f, ":{line}"),
            _ => Ok(()),
        }
    }
}

struct Listed<'a>(&'a [Problem], usize);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in self.0 {
            write!(f, "\n  {problem}")?;
        }
        match self.1.saturating_sub(self.0.len()) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}

/// `; did you mean …?`, or nothing.
pub(super) fn hint(nearest: Option<&str>) -> String {
    nearest
        .map(|name| format!("; did you mean `{name}`?"))
        .unwrap_or_default()
}

/// Names in backticks, or `none`.
pub(super) fn or_none(names: &[String]) -> String {
    if names.is_empty() {
        "none".to_owned()
    } else {
        quoted(names)
    }
}

/// At most 12 names in backticks, the rest counted.
pub(super) fn quoted<S: AsRef<str>>(names: &[S]) -> String {
    let shown: Vec<String> = names
        .iter()
        .take(12)
        .map(|name| format!("`{}`", name.as_ref()))
        .collect();
    let more = names.len().saturating_sub(shown.len());
    if more == 0 {
        shown.join(", ")
    } else {
        format!("{} and {more} more", shown.join(", "))
    }
}

/// The candidate that looks most like `name`, if any is near enough to be what was meant.
pub(super) fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let wanted = name.to_lowercase();
    let reach = (wanted.chars().count() / 3).max(1);
    candidates
        .into_iter()
        .map(|candidate| {
            (
                strsim::damerau_levenshtein(&wanted, &candidate.to_lowercase()),
                candidate,
            )
        })
        .filter(|(distance, _)| *distance <= reach)
        .min()
        .map(|(_, candidate)| candidate.to_owned())
}
