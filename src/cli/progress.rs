//! The progress of a run, on standard error: a bar on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::output::{percent, thousands};
use crate::metric::Outcome;
use crate::run::Event;

/// Between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
struct Counts {
    done: u64,
    right: u64,
    errors: u64,
    calls: u64,
    hits: u64,
    tokens: u64,
    last_line: Option<Instant>,
}

/// Shows one run.
pub struct Progress {
    bar: ProgressBar,
    label: String,
    total: u64,
    started: Instant,
    terminal: bool,
    counts: Mutex<Counts>,
}

impl Progress {
    /// `label` names the run; `total` is how many examples are left to do.
    pub fn new(label: String, total: u64) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let target = if terminal {
            ProgressDrawTarget::stderr_with_hz(8)
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        let style = ProgressStyle::with_template("{prefix} {bar:24.cyan/dim} {pos}/{len} {msg} {elapsed_precise}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style.progress_chars("━━─"));
        bar.set_prefix(label.clone());
        bar.enable_steady_tick(Duration::from_millis(500));
        if !terminal {
            eprintln!(
                "{label}: {} to do",
                super::output::count(usize::try_from(total).unwrap_or(usize::MAX), "example")
            );
        }
        Progress {
            bar,
            label,
            total,
            started: Instant::now(),
            terminal,
            counts: Mutex::default(),
        }
    }

    pub fn on_event(&self, event: &Event) {
        let mut counts = self.counts.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match event {
            Event::Called { cached, usage, .. } => {
                counts.calls += 1;
                counts.hits += u64::from(*cached);
                if !cached {
                    counts.tokens += usage.prompt.unwrap_or(0) + usage.completion.unwrap_or(0);
                }
            }
            Event::Ended { outcome, right, .. } => {
                counts.done += 1;
                counts.right += u64::from(*right);
                counts.errors += u64::from(*outcome == Outcome::ModelError);
                self.bar.set_position(counts.done);
            }
        }
        let message = self.message(&counts);
        if self.terminal {
            self.bar.set_message(message);
        } else if counts.last_line.unwrap_or(self.started).elapsed() >= LINE_EVERY {
            counts.last_line = Some(Instant::now());
            eprintln!("{}: {}/{} {message}", self.label, counts.done, self.total);
        }
    }

    fn message(&self, counts: &Counts) -> String {
        use std::fmt::Write;
        let seconds = self.started.elapsed().as_secs_f64().max(0.001);
        let mut text = String::new();
        if counts.done > 0 {
            let share = counts.right as f64 / counts.done as f64;
            let _ = write!(text, "· {} right ({} %) ", counts.right, percent(share));
        }
        let rate = counts.calls as f64 / seconds;
        let _ = write!(
            text,
            "· {} calls ({rate:.1}/s, {} cached) · {} tokens",
            thousands(counts.calls),
            thousands(counts.hits),
            thousands(counts.tokens)
        );
        if counts.errors > 0 {
            let _ = write!(text, " · {} model errors", counts.errors);
        }
        if counts.done > 0 && counts.done < self.total {
            let left = seconds / counts.done as f64 * (self.total - counts.done) as f64;
            let _ = write!(text, " · about {} left", duration(left));
        }
        text
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// `45 s`, `3 min`, `2.5 h`
pub fn duration(seconds: f64) -> String {
    if seconds < 90.0 {
        format!("{seconds:.0} s")
    } else if seconds < 90.0 * 60.0 {
        format!("{:.0} min", seconds / 60.0)
    } else {
        format!("{:.1} h", seconds / 3600.0)
    }
}
