//! The wish that a run stop: what is under way ends, nothing new begins, and whoever waits is woken.

use std::sync::Arc;

use tokio::sync::watch;

/// Asks a run to stop; clones share the wish.
#[derive(Debug, Clone)]
pub struct StopSignal(Arc<watch::Sender<bool>>);

impl Default for StopSignal {
    fn default() -> Self {
        StopSignal(Arc::new(watch::Sender::new(false)))
    }
}

impl StopSignal {
    pub fn stop(&self) {
        self.0.send_replace(true);
    }

    pub fn is_stopped(&self) -> bool {
        *self.0.borrow()
    }

    /// Returns when the wish is made.
    pub async fn stopped(&self) {
        // The sender lives as long as `self`, so that waiting cannot fail.
        let _ = self.0.subscribe().wait_for(|&stopped| stopped).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waiters_of_every_clone_are_woken() {
        let signal = StopSignal::default();
        let other = signal.clone();
        let waiter = tokio::spawn(async move { other.stopped().await });
        tokio::task::yield_now().await;
        assert!(!signal.is_stopped());
        signal.stop();
        waiter.await.unwrap();
        // Also for those who come later.
        signal.stopped().await;
    }
}
