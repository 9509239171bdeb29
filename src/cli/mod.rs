//! The command line: arguments in, library calls, printing out. Only this room prints, reads the environment and decides
//! exit codes; one file a command.

/// Prints a line of results to standard output. A reader that has gone away (`| head`) ends the program quietly.
macro_rules! say {
    ($($arguments:tt)*) => {
        $crate::cli::output::write_line(format_args!($($arguments)*))
    };
}

mod arguments;
mod ask;
mod cache;
mod dataset;
mod embedded;
mod estimate;
mod exit;
mod logging;
mod model;
#[cfg(feature = "otel")]
mod otel;
mod output;
mod plan;
mod progress;
mod prompt;
mod providers;
mod record;
mod run;
mod runs;
mod score;
mod settings;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use arguments::{Cli, Command};
use exit::{Exit, Failure};

use crate::llm::embedded::guard;

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    // The process between dinsql and a managed server: it must not start anything else.
    if arguments.get(1).is_some_and(|command| command == guard::SUBCOMMAND) {
        return ExitCode::from(u8::try_from(guard::run(&arguments[2..])).unwrap_or(1));
    }
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { Exit::Usage } else { Exit::Fine } as u8);
        }
    };
    // Ignored where another library has installed one already; any will do.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let _logging = match logging::start(&cli.global) {
        Ok(guard) => guard,
        Err(failure) => {
            failure.print();
            return ExitCode::from(failure.exit as u8);
        }
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start: {error}");
            return ExitCode::from(Exit::Failed as u8);
        }
    };
    let result = runtime.block_on(dispatch(cli));
    // A query that is still running on a thread must not hold up the end.
    runtime.shutdown_timeout(std::time::Duration::from_millis(100));
    match result {
        Ok(exit) => ExitCode::from(exit as u8),
        Err(failure) => {
            failure.print();
            ExitCode::from(failure.exit as u8)
        }
    }
}

async fn dispatch(cli: Cli) -> Result<Exit, Failure> {
    let settings = || settings::Settings::resolve(&cli.global);
    match cli.command {
        Command::Run(arguments) => run::run(arguments, &cli.global).await,
        Command::Score(arguments) => score::score(arguments, &settings()?).await,
        Command::Ask(arguments) => ask::ask(arguments, &settings()?).await,
        Command::Prompt { command } => prompt::prompt(command, &settings()?),
        Command::Dataset { command } => dataset::dataset(command, &settings()?),
        Command::Model { command } => model::model(command, &settings()?).await,
        Command::Cache { command } => cache::cache(command, &settings()?),
        Command::Runs { command } => runs::runs(command, &settings()?).await,
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "dinsql", &mut std::io::stdout());
            Ok(Exit::Fine)
        }
    }
}
