//! The process between dinsql and its local server: it ends the server, whatever happens to dinsql.
//!
//! dinsql starts itself a second time with the hidden command [`SUBCOMMAND`] and holds the write end of this process's
//! standard input. When that closes, because dinsql stopped the server or because dinsql is gone, even by `kill -9`,
//! the server is asked to end and soon after made to. A server with a request in flight can outlive a polite request
//! by minutes, and nobody would be left to notice.

use std::ffi::OsString;
use std::io::Read as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// The hidden command that runs [`run`].
pub const SUBCOMMAND: &str = "internal-guard";

/// From the polite request to the end.
const GRACE: Duration = Duration::from_secs(3);

/// Exit codes of the guard itself, as shells use them.
const CANNOT_RUN: i32 = 127;
const BROKEN: i32 = 125;

/// Runs the program in `arguments` (after an optional `--`) until it ends or standard input closes; gives the exit
/// code for this process: the program's own, or 128 and its signal.
#[must_use]
pub fn run(arguments: &[OsString]) -> i32 {
    let arguments = match arguments {
        [first, rest @ ..] if first == "--" => rest,
        all => all,
    };
    let Some((program, arguments)) = arguments.split_first() else {
        return BROKEN;
    };
    // On a thread of its own, so that it does not matter whether the caller is inside a runtime.
    let guarding = std::thread::scope(|scope| scope.spawn(|| guard(program, arguments)).join());
    guarding.unwrap_or(BROKEN)
}

fn guard(program: &OsString, arguments: &[OsString]) -> i32 {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return BROKEN;
    };
    runtime.block_on(async {
        // Before the server starts: from here on no signal ends this process without it.
        let (Ok(mut terminate), Ok(_interrupt), Ok(_hangup)) = (
            signal(SignalKind::terminate()),
            signal(SignalKind::interrupt()),
            signal(SignalKind::hangup()),
        ) else {
            return BROKEN;
        };
        let mut command = Command::new(program);
        // Its standard input closes when this process dies, a last sign to end for a server that looks.
        let Ok(mut server) = command.args(arguments).stdin(Stdio::piped()).spawn() else {
            return CANNOT_RUN;
        };
        // Taken out, since waiting for the server would close it.
        let _sign_of_life = server.stdin.take();
        let closed = closed_input();
        tokio::select! {
            ended = server.wait() => return ended.map_or(BROKEN, code),
            _ = closed => {}
            _ = terminate.recv() => {}
        }
        end(&mut server).await
    })
}

/// Resolves when standard input closes.
fn closed_input() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 256];
        let mut input = std::io::stdin();
        loop {
            match input.read(&mut buffer) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        drop(sender);
    });
    receiver
}

async fn end(server: &mut Child) -> i32 {
    // The id is this server's until it is waited for: it cannot have passed to another process.
    if let Some(pid) = server
        .id()
        .and_then(|id| i32::try_from(id).ok())
        .and_then(Pid::from_raw)
    {
        let _ = kill_process(pid, Signal::TERM);
    }
    if let Ok(ended) = tokio::time::timeout(GRACE, server.wait()).await {
        return ended.map_or(BROKEN, code);
    }
    let _ = server.start_kill();
    server.wait().await.map_or(BROKEN, code)
}

fn code(status: ExitStatus) -> i32 {
    status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal))
        .unwrap_or(BROKEN)
}
