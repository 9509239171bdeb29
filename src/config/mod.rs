//! Configuration files: pipelines (`pipelines/*.yaml`) and the project file (`dinsql.yaml`).
//!
//! In: a file's name and bytes, `--set` arguments, the names of the templates there are. Out: plain validated types, or all
//! mistakes of the file at once, each with file, line, column and advice. This room opens no file and knows no model, database
//! or dataset.
//!
//! `yaml` reads text into a tree with places (`syntax` says why it can't); `overrides` writes `--set` values into it; `validate` (with `extract`,
//! `response_format` and `references`) makes a [`Pipeline`] of it, `project` makes [`ProjectSettings`] (`secrets` keeps keys out of its messages), `prices` reads what models cost; `check` is what both share; `schema` is the same
//! form as JSON Schema, for editors.

mod check;
mod extract;
pub mod keys;
pub mod overrides;
pub mod pipeline;
pub mod prices;
pub mod project;
mod references;
mod response_format;
pub mod schema;
mod secrets;
mod syntax;
pub mod validate;
mod yaml;

pub use overrides::{Override, OverrideError};
pub use pipeline::*;
pub use prices::{Price, PriceEntry, PriceFile, load_prices, shipped_prices};
pub use project::{ProjectSettings, ProviderSettings, load_project};
pub use schema::pipeline_schema;
pub use validate::{TemplateNames, load_pipeline, to_yaml};

#[cfg(test)]
mod tests;
