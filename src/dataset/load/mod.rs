//! Reading questions files: a file a format, and one path from records to examples.
//!
//! In: a [`Source`](super::Source), a split and a language. Out: a [`Dataset`](super::Dataset), or every problem of the
//! file at once. To add a format, add its file and its entry in [`FORMATS`].

mod bird;
mod csv;
mod examples;
mod json;
mod jsonl;
mod record;
mod role;
mod spider;

use std::fmt;
use std::path::Path;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer};

use super::error::{hint, nearest, quoted};
use super::manifest::Fields;

pub use examples::{Languages, LoadOptions, languages_available, load};
pub(super) use examples::{Loaded, read_examples};
use record::Item;

/// A way in which questions are written in a file.
pub struct FormatEntry {
    pub name: &'static str,
    pub description: &'static str,
    /// Hands each record of the text, or what is wrong with it, to the sink, in file order.
    pub(super) read: fn(text: &str, sink: &mut dyn FnMut(Item)),
    /// Which fields hold what, where the manifest does not say.
    pub(super) fields: fn() -> Fields,
    /// Databases folder, where the manifest names none.
    pub(super) databases: &'static str,
    /// Difficulty classes that lie beside the questions file, by id.
    pub(super) beside: Option<fn(questions: &Path) -> Option<spider::Hardness>>,
}

/// Every format.
pub const FORMATS: &[FormatEntry] = &[
    bird::FORMAT,
    spider::FORMAT,
    json::FORMAT,
    jsonl::FORMAT,
    csv::FORMAT,
    csv::TAB_FORMAT,
];

/// The format with this name.
#[must_use]
pub fn format(name: &str) -> Option<&'static FormatEntry> {
    FORMATS.iter().find(|format| format.name == name)
}

/// A format as a manifest names it.
#[derive(Clone, Copy)]
pub struct Format(pub &'static FormatEntry);

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name)
    }
}

impl<'de> Deserialize<'de> for Format {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // A visitor rather than `String` first: only its errors get the parser's line and column.
        struct Named;
        impl Visitor<'_> for Named {
            type Value = Format;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a format")
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Format, E> {
                format(name).map(Format).ok_or_else(|| {
                    let names: Vec<&str> = FORMATS.iter().map(|format| format.name).collect();
                    let advice = match nearest(name, names.iter().copied()) {
                        Some(near) => hint(Some(&near)),
                        None => format!("; valid are {}", quoted(&names)),
                    };
                    E::custom(format_args!("unknown format `{name}`{advice}"))
                })
            }
        }
        deserializer.deserialize_str(Named)
    }
}

/// Field names of the general formats.
fn plain_fields() -> Fields {
    let named = |name: &str| Some(name.to_owned());
    Fields {
        id: named("id"),
        question: named("question"),
        evidence: named("evidence"),
        gold: named("gold"),
        golds: named("golds"),
        database: named("database"),
        difficulty: named("difficulty"),
        language: None,
    }
}
