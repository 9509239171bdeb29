//! The progress of a run, on standard error: a bar on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::output::{percent, thousands};
use super::providers::Control;
use crate::llm::Usd;
use crate::llm::limits::Limiter;
use crate::llm::retry::Waiting;
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
    cost: Usd,
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
    waiting: Waiting,
    limiter: Arc<Limiter>,
}

impl Progress {
    /// `label` names the run; `total` is how many examples are left to do. The line also tells which calls wait to try
    /// again, and how many may be in flight.
    pub fn new(label: String, total: u64, control: &Control, limiter: &Arc<Limiter>) -> Self {
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
            waiting: control.waiting.clone(),
            limiter: Arc::clone(limiter),
        }
    }

    /// Does the work, and tells how it stands meanwhile also where nothing happens for a while.
    pub async fn beside<F: Future>(&self, work: F) -> F::Output {
        tokio::pin!(work);
        let mut ticks = tokio::time::interval(Duration::from_secs(1));
        loop {
            tokio::select! {
                done = &mut work => return done,
                _ = ticks.tick() => self.show(&mut self.lock()),
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub fn on_event(&self, event: &Event) {
        let mut counts = self.lock();
        match event {
            Event::Called {
                cached, usage, cost, ..
            } => {
                counts.calls += 1;
                counts.hits += u64::from(*cached);
                if !cached {
                    counts.tokens += usage.total().unwrap_or(0);
                    counts.cost += cost.unwrap_or_default();
                }
            }
            Event::Ended { outcome, right, .. } => {
                counts.done += 1;
                counts.right += u64::from(*right);
                counts.errors += u64::from(*outcome == Outcome::ModelError);
                self.bar.set_position(counts.done);
            }
        }
        if !self.terminal {
            self.show(&mut counts);
        }
    }

    /// On a terminal the bar; elsewhere a line now and then.
    fn show(&self, counts: &mut Counts) {
        if self.terminal {
            self.bar.set_message(self.message(counts));
        } else if counts.last_line.unwrap_or(self.started).elapsed() >= LINE_EVERY {
            counts.last_line = Some(Instant::now());
            eprintln!(
                "{}: {}/{} {}",
                self.label,
                counts.done,
                self.total,
                self.message(counts)
            );
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
        if counts.cost > Usd(0) {
            let _ = write!(text, " · {}", counts.cost);
        }
        if counts.errors > 0 {
            let _ = write!(text, " · {} model errors", counts.errors);
        }
        let (allowed, ceiling) = (self.limiter.allowed(), self.limiter.ceiling());
        if allowed < ceiling {
            let _ = write!(text, " · slowed to {allowed} of {ceiling} at once");
        }
        if let Some(next) = self.waiting.next_try() {
            let _ = write!(
                text,
                " · {} waiting ({}), next try in {} s",
                super::output::count(next.calls, "call"),
                next.class.name(),
                next.after.as_secs_f64().ceil()
            );
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
