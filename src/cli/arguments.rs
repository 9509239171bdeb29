//! What may be typed: clap types only.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::dataset::{Condition, Selection};

/// Compare Text-to-SQL prompting strategies across languages.
#[derive(Debug, Parser)]
#[command(name = "dinsql", version, propagate_version = true, max_term_width = 110)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Args)]
pub struct Global {
    /// Project file with providers and folders
    #[arg(
        long,
        global = true,
        env = "DINSQL_CONFIG",
        value_name = "FILE",
        help_heading = "Places"
    )]
    pub config: Option<PathBuf>,
    /// Folder of templates, one folder a language [default: ./prompts, else those shipped]
    #[arg(
        long,
        global = true,
        env = "DINSQL_PROMPTS_DIR",
        value_name = "DIR",
        help_heading = "Places"
    )]
    pub prompts_dir: Option<PathBuf>,
    /// Folder of pipeline files [default: ./pipelines, else those shipped]
    #[arg(
        long,
        global = true,
        env = "DINSQL_PIPELINES_DIR",
        value_name = "DIR",
        help_heading = "Places"
    )]
    pub pipelines_dir: Option<PathBuf>,
    /// Folder of dataset manifests, may be given several times [default: ./datasets, then those shipped]
    #[arg(
        long,
        global = true,
        env = "DINSQL_DATASETS_DIR",
        value_name = "DIR",
        value_delimiter = ':',
        help_heading = "Places"
    )]
    pub datasets_dir: Vec<PathBuf>,
    /// Folder of run folders [default: ./runs]
    #[arg(
        long,
        global = true,
        env = "DINSQL_RUNS_DIR",
        value_name = "DIR",
        help_heading = "Places"
    )]
    pub runs_dir: Option<PathBuf>,
    /// Folder of the completion cache, models and built databases [default: the user's cache folder]
    #[arg(
        long,
        global = true,
        env = "DINSQL_CACHE",
        value_name = "DIR",
        help_heading = "Places"
    )]
    pub cache: Option<PathBuf>,
    /// Log filter, as in `debug` or `dinsql=debug`
    #[arg(
        long,
        global = true,
        env = "DINSQL_LOG",
        value_name = "FILTER",
        default_value = "warn",
        help_heading = "Places"
    )]
    pub log: String,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run pipelines over a dataset, score them, and compare them
    Run(RunArguments),
    /// Score predictions made elsewhere
    Score(ScoreArguments),
    /// Ask one question of one database
    Ask(AskArguments),
    /// Look at templates
    Prompt {
        #[command(subcommand)]
        command: PromptCommand,
    },
    /// Look at datasets
    Dataset {
        #[command(subcommand)]
        command: DatasetCommand,
    },
    /// Look at models, fetch the embedded one
    Model {
        #[command(subcommand)]
        command: ModelCommand,
    },
    /// Print a completion script for a shell
    Completions { shell: clap_complete::Shell },
}

/// Who is asked.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArguments {
    /// A provider of dinsql.yaml, `openai`, or `embedded`
    #[arg(long, env = "DINSQL_PROVIDER", value_name = "NAME")]
    pub provider: Option<String>,
    /// Model name at the provider; an embedded model's name with the embedded provider
    #[arg(long, short, env = "DINSQL_MODEL", value_name = "NAME")]
    pub model: Option<String>,
    /// Address of an OpenAI-compatible server, usually ending in /v1
    #[arg(long, env = "OPENAI_BASE_URL", value_name = "URL")]
    pub base_url: Option<String>,
    /// File that holds the API key (else the environment's OPENAI_API_KEY)
    #[arg(long, env = "DINSQL_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// A GGUF file for the embedded server, instead of the default model
    #[arg(long, env = "DINSQL_MODEL_FILE", value_name = "FILE")]
    pub model_file: Option<PathBuf>,
    /// llama.cpp's server for the embedded model [default: from PATH, else a private Python environment]
    #[arg(long, env = "DINSQL_LLAMA_SERVER", value_name = "FILE")]
    pub llama_server: Option<PathBuf>,
    /// Calls in flight at most
    #[arg(long, env = "DINSQL_CONCURRENCY", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub concurrency: Option<u32>,
    /// Neither read nor write the completion cache
    #[arg(long)]
    pub no_cache: bool,
}

/// Which examples.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Examples")]
pub struct SelectionArguments {
    /// Split of the dataset
    #[arg(long, value_name = "NAME")]
    pub split: Option<String>,
    /// Only these ids
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    pub ids: Vec<String>,
    /// Only examples of these databases
    #[arg(long, value_name = "DB", value_delimiter = ',')]
    pub db: Vec<String>,
    /// Only examples with this value, as in `difficulty=simple` or `difficulty!=simple`
    #[arg(long = "where", value_name = "FIELD=VALUE")]
    pub conditions: Vec<Condition>,
    /// So many at random, the same ones in every language
    #[arg(long, value_name = "N")]
    pub sample: Option<usize>,
    /// Seed of the sample
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Leave out the first ones
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub offset: usize,
    /// At most so many
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
}

impl SelectionArguments {
    pub fn selection(&self) -> Selection {
        Selection {
            ids: (!self.ids.is_empty()).then(|| self.ids.clone()),
            databases: self.db.clone(),
            conditions: self.conditions.clone(),
            offset: self.offset,
            limit: self.limit,
            sample: self.sample,
            seed: self.seed,
        }
    }
}

/// How SQL runs.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Execution of SQL")]
pub struct ExecutionArguments {
    /// Seconds for a prediction and its gold query together
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub sql_timeout: f64,
    /// Threads that run SQL
    #[arg(long, value_name = "N")]
    pub sql_threads: Option<usize>,
}

#[derive(Debug, Args)]
pub struct RunArguments {
    /// Pipelines: names, or paths of files; the first is the baseline of the comparison
    #[arg(required_unless_present = "resume", value_name = "PIPELINE")]
    pub pipelines: Vec<String>,
    /// Dataset: a manifest's name or path, or a folder in BIRD's or Spider's layout
    #[arg(long, short, value_name = "DATA", required_unless_present = "resume")]
    pub data: Option<String>,
    /// Languages, as in `en,tr,de` [default: the dataset's]
    #[arg(long, value_name = "CODE", value_delimiter = ',')]
    pub lang: Vec<String>,
    /// Change a pipeline's setting, as in `generation.max_tokens=200` or `schema.sample_rows=0`
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Go on with an interrupted run (the same command as before does so too)
    #[arg(long, value_name = "DIR", conflicts_with_all = ["pipelines", "data"])]
    pub resume: Option<PathBuf>,
    /// Run examples without gold SQL too; they count as `gold_error`
    #[arg(long)]
    pub allow_missing_gold: bool,
    #[command(flatten)]
    pub selection: SelectionArguments,
    #[command(flatten)]
    pub model: ModelArguments,
    #[command(flatten)]
    pub execution: ExecutionArguments,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ScoreArguments {
    /// Dataset: a manifest's name or path, or a folder in BIRD's or Spider's layout
    #[arg(long, short, value_name = "DATA")]
    pub data: String,
    /// Predictions: BIRD's JSON object, one SQL a line, or JSONL with `id` and `sql`
    #[arg(long, short, value_name = "FILE")]
    pub predictions: PathBuf,
    /// Metrics
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "ex")]
    pub metrics: Vec<String>,
    /// Language of the dataset
    #[arg(long, value_name = "CODE")]
    pub lang: Option<String>,
    /// Write a verdict an example to this file
    #[arg(long, value_name = "FILE")]
    pub verdicts: Option<PathBuf>,
    #[command(flatten)]
    pub selection: SelectionArguments,
    #[command(flatten)]
    pub execution: ExecutionArguments,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct AskArguments {
    /// The question
    pub question: String,
    /// A SQLite file, or a database of --data
    #[arg(long, value_name = "FILE|DB")]
    pub db: String,
    /// Dataset whose database is meant
    #[arg(long, short, value_name = "DATA")]
    pub data: Option<String>,
    /// Pipeline
    #[arg(long, short, value_name = "PIPELINE", default_value = "zero-shot")]
    pub pipeline: String,
    /// Language of the question and of the templates
    #[arg(long, value_name = "CODE", default_value = "en")]
    pub lang: String,
    /// What the question alone does not say
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub evidence: String,
    /// Change a pipeline's setting
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Rows shown
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub rows: usize,
    #[command(flatten)]
    pub model: ModelArguments,
    #[command(flatten)]
    pub execution: ExecutionArguments,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
pub enum PromptCommand {
    /// List the templates and their languages
    List {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Print exactly the messages that would be sent for an example
    Render(RenderArguments),
    /// Check a pipeline's templates: do they parse, is each variable filled, do the languages agree, do they fit?
    Lint(LintArguments),
}

#[derive(Debug, Args)]
pub struct RenderArguments {
    /// Pipeline: a name, or a path of a file
    pub pipeline: String,
    /// Dataset
    #[arg(long, short, value_name = "DATA")]
    pub data: String,
    /// The example's id
    #[arg(long, value_name = "ID")]
    pub example: String,
    /// Language
    #[arg(long, value_name = "CODE")]
    pub lang: Option<String>,
    /// Split of the dataset
    #[arg(long, value_name = "NAME")]
    pub split: Option<String>,
    /// Only this stage
    #[arg(long, value_name = "STAGE")]
    pub stage: Option<String>,
    /// Run folder whose recorded outputs fill later stages; placeholders else
    #[arg(long, value_name = "DIR")]
    pub run: Option<PathBuf>,
    /// Change a pipeline's setting
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct LintArguments {
    /// Pipelines: names, or paths of files; all where none is given
    pub pipelines: Vec<String>,
    /// Languages [default: all there are]
    #[arg(long, value_name = "CODE", value_delimiter = ',')]
    pub lang: Vec<String>,
    /// Dataset whose longest schemas are rendered to check the size
    #[arg(long, short, value_name = "DATA")]
    pub data: Option<String>,
    /// Tokens that prompt and completion may have together [default: the default provider's `context`, else 8192]
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
pub enum DatasetCommand {
    /// List the manifests there are
    List {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Look for everything that is missing, malformed, duplicated or unreadable
    Check {
        /// Dataset
        data: String,
        /// Language
        #[arg(long, value_name = "CODE")]
        lang: Option<String>,
        /// Split
        #[arg(long, value_name = "NAME")]
        split: Option<String>,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// List the embedded models, or what a server has
    List {
        #[command(flatten)]
        model: ModelArguments,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Make one small call
    Test {
        #[command(flatten)]
        model: ModelArguments,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Fetch an embedded model and verify it
    Pull {
        /// Name, as `model list` shows it [default: the default model]
        name: Option<String>,
    },
}
