//! The `dinsql` command. Everything is in the library; see `dinsql::cli`.

use std::process::ExitCode;

fn main() -> ExitCode {
    dinsql::cli::main()
}
