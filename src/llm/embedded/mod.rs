//! The embedded default model: a small open model that answers without an account or a network once it is here.
//!
//! Three steps, each of use alone: [`pull`] brings the model file into the user's cache folder, [`python`] makes a
//! private Python environment with a prebuilt llama.cpp where no `llama-server` is installed, and [`server`] runs
//! either of them as a child process that speaks the OpenAI protocol on a loopback port. [`guard`] is the small
//! process between dinsql and that server, which ends it whatever happens to dinsql.
//!
//! In: folders, a model's name or file. Out: a path, a base URL with its key, and events for whoever shows progress.
//! This room knows nothing of prompts or pipelines: to the rest of dinsql the server is one more provider.

pub mod guard;
mod hub;
mod interpreter;
pub mod manifest;
mod parts;
pub mod pull;
pub mod python;
pub mod server;

pub use manifest::{Catalog, ModelEntry, Source, default_models_dir};
pub use pull::{CancelFlag, ModelState, PullError, PullEvent, PullOptions, pull};
pub use server::{ManagedServer, ServerConfig, ServerError, ServerEvent};
