//! Exit codes, and failures on their way to the terminal.

use std::io::IsTerminal;

use crate::diagnostic::Diagnostics;

/// Exit codes, as documented in the README.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Fine = 0,
    Failed = 1,
    /// Wrong usage, or a file that is not valid.
    Usage = 2,
    /// Finished, but some examples had a model error.
    ModelErrors = 3,
    /// Stopped by something no further call would survive; the same command goes on from there.
    Stopped = 4,
    /// Ctrl+C; the same command goes on from there.
    Interrupted = 130,
}

/// Why a command ended badly.
#[derive(Debug)]
pub struct Failure {
    pub exit: Exit,
    error: anyhow::Error,
    hints: Vec<String>,
}

impl Failure {
    pub fn new(exit: Exit, error: impl Into<anyhow::Error>) -> Self {
        Failure {
            exit,
            error: error.into(),
            hints: Vec::new(),
        }
    }

    /// Wrong usage or an invalid file.
    pub fn usage(error: impl Into<anyhow::Error>) -> Self {
        Failure::new(Exit::Usage, error)
    }

    pub fn message(exit: Exit, message: impl Into<String>) -> Self {
        Failure::new(exit, anyhow::Error::msg(message.into()))
    }

    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// Writes the failure to standard error.
    pub fn print(&self) {
        let diagnostics = self.error.chain().find_map(|error| {
            error
                .downcast_ref::<Diagnostics>()
                .or_else(|| error.downcast_ref::<Box<Diagnostics>>().map(AsRef::as_ref))
        });
        if let Some(diagnostics) = diagnostics {
            let color = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            eprint!("{}", diagnostics.render(color, 110));
        } else {
            let mut chain: Vec<String> = Vec::new();
            for error in self.error.chain() {
                let text = error.to_string();
                // Some errors repeat their source in their own text.
                if !chain.iter().any(|earlier| earlier.contains(&text)) {
                    chain.push(text);
                }
            }
            eprintln!("error: {}", chain.join(": "));
        }
        for hint in &self.hints {
            eprintln!("hint: {hint}");
        }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        let invalid = error.chain().any(|error| {
            error.is::<Diagnostics>() || error.is::<Box<Diagnostics>>() || error.is::<crate::dataset::DatasetError>()
        });
        Failure::new(if invalid { Exit::Usage } else { Exit::Failed }, error)
    }
}
