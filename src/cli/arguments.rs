//! What may be typed: clap types only.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

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
    /// Write what happens to this file too, a JSON object a line
    #[arg(
        long,
        global = true,
        env = "DINSQL_LOG_FILE",
        value_name = "FILE",
        help_heading = "Places"
    )]
    pub log_file: Option<PathBuf>,
    /// Send traces to this OpenTelemetry collector (OTLP over HTTP; a build with the feature `otel`)
    #[arg(long, global = true, value_name = "URL", help_heading = "Places")]
    pub otlp_endpoint: Option<String>,
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
    /// Look after the completion cache
    Cache {
        #[command(subcommand)]
        command: CacheCommand,
    },
    /// Look after run folders
    Runs {
        #[command(subcommand)]
        command: RunsCommand,
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
    /// How the completion cache is used
    #[arg(long, env = "DINSQL_CACHE_MODE", value_name = "MODE", value_enum, default_value_t = CacheChoice::On)]
    pub cache_mode: CacheChoice,
    /// Neither read nor write the completion cache; the same as --cache-mode off
    #[arg(long)]
    pub no_cache: bool,
}

impl ModelArguments {
    pub fn cache_choice(&self) -> CacheChoice {
        if self.no_cache {
            CacheChoice::Off
        } else {
            self.cache_mode
        }
    }
}

/// Use of the completion cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum CacheChoice {
    /// Use what is there, store what is new
    #[default]
    On,
    /// Neither read nor write
    Off,
    /// Use what is there and ask nothing: a replay
    ReadOnly,
    /// Ask everything again, and store it in place of what is there
    Refresh,
}

/// What a command may spend, its earlier interrupted parts included.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Budget")]
#[expect(clippy::struct_field_names, reason = "the names of the options")]
pub struct BudgetArguments {
    /// Stop before more than this is spent
    #[arg(long, value_name = "USD", allow_negative_numbers = true)]
    pub max_cost: Option<f64>,
    /// Stop before more calls are made; answers from the cache do not count
    #[arg(long, value_name = "N")]
    pub max_calls: Option<u64>,
    /// Stop before more tokens are used, of prompts and completions together
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u64>,
    /// Stop after this time, as in `90s`, `30min`, `2h`; counted from the command's start
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub max_time: Option<Duration>,
}

fn time(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let digits = text
        .find(|letter: char| !(letter.is_ascii_digit() || letter == '.'))
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim() {
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err("expected a time as in `90s`, `30min` or `2h`".into()),
    };
    let seconds: f64 = number
        .parse()
        .map_err(|_| "expected a time as in `90s`, `30min` or `2h`".to_owned())?;
    Duration::try_from_secs_f64(seconds * factor).map_err(|error| error.to_string())
}

/// A part of the examples: `index` of `of`, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    pub index: u32,
    pub of: u32,
}

fn shard(text: &str) -> Result<Shard, String> {
    let parts = text.split_once('/').and_then(|(index, of)| {
        Some(Shard {
            index: index.parse().ok()?,
            of: of.parse().ok()?,
        })
    });
    parts
        .filter(|shard| shard.index >= 1 && shard.index <= shard.of)
        .ok_or_else(|| "expected a part and how many there are, as in `1/4`".into())
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
    /// Ask again about examples that ended with a model error
    #[arg(long)]
    pub retry_errors: bool,
    /// So many independent runs, for the spread of a score
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeat: u32,
    /// Only this part of the examples, as in `2/4`; `dinsql runs merge` puts the parts together
    #[arg(long, value_name = "I/N", value_parser = shard)]
    pub shard: Option<Shard>,
    /// Print calls, tokens and cost that are to be expected, and ask nothing
    #[arg(long)]
    pub estimate: bool,
    /// Start without asking, whatever the estimate says
    #[arg(long, short)]
    pub yes: bool,
    #[command(flatten)]
    pub budget: BudgetArguments,
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

#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// What is in the cache, by provider and model
    Stats {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Take completions out: those that fit every condition given
    Prune {
        /// Stored longer ago, as in `30d`, `12h`
        #[arg(long, value_name = "AGE", value_parser = age)]
        older_than: Option<Duration>,
        /// Of this model
        #[arg(long, value_name = "NAME")]
        model: Option<String>,
        /// Of this provider
        #[arg(long, value_name = "NAME")]
        provider: Option<String>,
        /// All of them
        #[arg(long, conflicts_with_all = ["older_than", "model", "provider"])]
        all: bool,
        /// Only say how many
        #[arg(long)]
        dry_run: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Write all completions to a file, a JSON object a line
    Export {
        /// The file; `-` is standard output
        file: PathBuf,
    },
    /// Add the completions that `export` wrote; what is there already stays
    Import {
        /// The file; `-` is standard input
        file: PathBuf,
    },
}

fn age(text: &str) -> Result<Duration, String> {
    match text.trim().strip_suffix('d') {
        Some(days) => {
            let days: f64 = days
                .trim()
                .parse()
                .map_err(|_| "expected an age as in `30d` or `12h`".to_owned())?;
            Duration::try_from_secs_f64(days * 86_400.0).map_err(|error| error.to_string())
        }
        None => time(text).map_err(|_| "expected an age as in `30d` or `12h`".into()),
    }
}

#[derive(Debug, Subcommand)]
pub enum RunsCommand {
    /// Make one run of the parts that `run --shard` made, on one machine or several
    Merge {
        /// The parts' run folders
        #[arg(required = true, value_name = "DIR")]
        parts: Vec<PathBuf>,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_parts() {
        assert_eq!(time("90"), Ok(Duration::from_secs(90)));
        assert_eq!(time("1.5 h"), Ok(Duration::from_mins(90)));
        assert!(time("soon").is_err() && time("-1s").is_err() && time("").is_err());
        assert_eq!(age("2d"), Ok(Duration::from_hours(48)));
        assert!(age("d").is_err());
        assert_eq!(shard("2/4"), Ok(Shard { index: 2, of: 4 }));
        for wrong in ["0/4", "5/4", "1", "a/b", "1/0", ""] {
            assert!(shard(wrong).is_err(), "{wrong}");
        }
    }
}
