//! When the query that runs must end, seen from its thread and from others.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// What deadlines count from.
static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// When the query that runs must end, for all that look at it: nanoseconds after [`ORIGIN`], 0 while none runs.
#[derive(Debug, Clone, Default)]
pub struct Deadline(Arc<AtomicU64>);

impl Deadline {
    pub fn set(&self, time: Duration) {
        let end = ORIGIN.elapsed().saturating_add(time);
        self.0.store(nanoseconds(end).max(1), Ordering::Relaxed);
    }

    pub fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Whether the query should have ended, and be it `grace` later.
    pub fn is_past(&self, grace: Duration) -> bool {
        let end = self.0.load(Ordering::Relaxed);
        end != 0 && nanoseconds(ORIGIN.elapsed()) > end.saturating_add(nanoseconds(grace))
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
