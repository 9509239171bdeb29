//! dinsql compares Text-to-SQL prompting strategies across languages.
//!
//! Data flows one way:
//!
//! ```text
//! config → dataset → (schema, prompt) → pipeline → llm / engine → run folder → metric → stats → report
//! ```
//!
//! - [`config`]: pipeline and project files: types, validation, mistakes with file, line and column
//! - [`dataset`]: examples, databases and descriptions, whatever layout they come in
//! - [`language`]: languages and their rules of letters
//! - [`schema`]: a database's tables and their renderings for prompts
//! - [`prompt`]: templates by language, roles, lint, token counts
//! - [`llm`]: one call path to any OpenAI-compatible model, and the embedded default
//! - [`pipeline`]: stages, how they hand over, extractors
//! - [`sql`]: SQL as text: finding it in answers, where it ends, quoting
//! - [`engine`]: the shared executor: read-only, bounded, typed
//! - [`outcome`]: how an example ended
//! - [`metric`]: verdicts; [`stats`]: intervals and tests
//! - [`run`]: run folders, the scheduler, resume, summaries
//! - [`report`]: tables for terminals
//! - [`diagnostic`]: how mistakes in files are shown
//!
//! ```
//! use dinsql::engine::Value;
//! use dinsql::metric::{RowSet, execution_accuracy};
//!
//! let gold = RowSet::new(&[vec![Value::Integer(1)], vec![Value::Integer(2)]]);
//! let predicted = RowSet::new(&[vec![Value::Real(2.0)], vec![Value::Integer(1)], vec![Value::Integer(1)]]);
//! assert_eq!(execution_accuracy(&predicted, &gold), 1.0);
//! ```

#[expect(clippy::print_stderr, clippy::exit, reason = "the one room that talks to people")]
pub mod cli;
pub mod config;
pub mod dataset;
pub mod diagnostic;
pub mod engine;
pub mod language;
pub mod llm;
pub mod metric;
pub mod outcome;
pub mod pipeline;
pub mod prompt;
pub mod report;
pub mod run;
pub mod schema;
pub mod sql;
pub mod stats;
