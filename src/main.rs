//! The `dinsql` command. Everything is in the library; see `dinsql::cli`.

use std::process::ExitCode;

/// Many small texts are made and dropped for each example, which the system's allocator is slow at.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    dinsql::cli::main()
}
