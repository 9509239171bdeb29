//! The one retry loop, around whatever makes a single attempt: bounded in attempts and in total waiting, jittered, and
//! with a limit on attempts in flight. A place in flight is never held while waiting.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{Action, CallError, Completion, ErrorClass, Model, Request};

/// Caps of the retry loop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetryPolicy {
    pub attempts: u32,
    /// The first wait; doubled each time.
    pub first_wait: Duration,
    pub longest_wait: Duration,
    /// All waits of a call together.
    pub total_wait: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        RetryPolicy {
            attempts: 5,
            first_wait: Duration::from_millis(500),
            longest_wait: Duration::from_mins(1),
            total_wait: Duration::from_mins(3),
        }
    }
}

/// Tries again what may work again.
pub struct RetryingModel {
    inner: Arc<dyn Model>,
    policy: RetryPolicy,
    in_flight: Semaphore,
    answered: AtomicBool,
    /// What ended the run: nothing is sent after it.
    ended: OnceLock<CallError>,
    /// Between the starts of two attempts, and when the next may start.
    pace: Option<(Duration, Mutex<Instant>)>,
}

impl RetryingModel {
    pub fn new(inner: Arc<dyn Model>, policy: RetryPolicy, concurrency: usize) -> Self {
        RetryingModel {
            inner,
            policy,
            in_flight: Semaphore::new(concurrency.max(1)),
            answered: AtomicBool::new(false),
            ended: OnceLock::new(),
            pace: None,
        }
    }

    /// Starts at most so many attempts a minute, evenly spread.
    #[must_use]
    pub fn with_rate(mut self, requests_per_minute: Option<u32>) -> Self {
        self.pace = requests_per_minute
            .filter(|&rate| rate > 0)
            .map(|rate| (Duration::from_mins(1) / rate, Mutex::new(Instant::now())));
        self
    }

    /// Waits for this attempt's turn.
    async fn turn(&self) {
        let Some((gap, next)) = &self.pace else { return };
        let at = {
            let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
            let at = (*next).max(Instant::now());
            *next = at + *gap;
            at
        };
        tokio::time::sleep_until(at).await;
    }

    async fn run(&self, request: &Request) -> Result<Completion, CallError> {
        let mut waited = Duration::ZERO;
        let mut attempt = 1;
        loop {
            self.turn().await;
            let error = {
                let _place = self.in_flight.acquire().await;
                if let Some(error) = self.ended.get() {
                    return Err(CallError {
                        attempts: attempt - 1,
                        ..error.clone()
                    });
                }
                match self.inner.complete(request).await {
                    Ok(completion) => {
                        self.answered.store(true, Ordering::Relaxed);
                        return Ok(Completion {
                            attempts: attempt,
                            ..completion
                        });
                    }
                    Err(error) => error,
                }
            };
            if error.status.is_some() {
                self.answered.store(true, Ordering::Relaxed);
            }
            let wait = self.wait(attempt, error.retry_after);
            if error.class.action() != Action::Retry
                || attempt >= self.policy.attempts
                || waited + wait > self.policy.total_wait
            {
                return Err(self.give_up(error, attempt));
            }
            tracing::debug!(
                attempt,
                wait_ms = wait.as_millis(),
                class = error.class.name(),
                "call failed, trying again"
            );
            tokio::time::sleep(wait).await;
            waited += wait;
            attempt += 1;
        }
    }

    fn give_up(&self, error: CallError, attempts: u32) -> CallError {
        let class = if error.class == ErrorClass::Connection && !self.answered.load(Ordering::Relaxed) {
            ErrorClass::Unreachable
        } else {
            error.class
        };
        let message = if attempts > 1 {
            format!("{} (after {attempts} attempts)", error.message)
        } else {
            error.message
        };
        let error = CallError {
            class,
            message,
            attempts,
            ..error
        };
        if class.action() == Action::FailRun {
            let _ = self.ended.set(error.clone());
        }
        error
    }

    /// What the server asked for, capped; else a random part of a doubling wait, so that many calls do not return at once.
    fn wait(&self, attempt: u32, asked: Option<Duration>) -> Duration {
        if let Some(asked) = asked {
            return asked.min(self.policy.longest_wait);
        }
        let full = self
            .policy
            .first_wait
            .saturating_mul(1 << (attempt - 1).min(16))
            .min(self.policy.longest_wait);
        let mut bytes = [0_u8; 4];
        let _ = getrandom::fill(&mut bytes);
        let share = f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX);
        full.mul_f64(0.2 + 0.8 * share)
    }
}

impl Model for RetryingModel {
    fn complete<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Completion, CallError>> {
        Box::pin(self.run(request))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    struct Failing {
        class: ErrorClass,
        status: Option<u16>,
        calls: AtomicU32,
        succeed_at: u32,
        retry_after: Option<Duration>,
    }

    impl Model for Failing {
        fn complete<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Completion, CallError>> {
            let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
            let answer = if call == self.succeed_at {
                Ok(Completion {
                    text: "SELECT 1".into(),
                    finish_reason: None,
                    usage: super::super::Usage::default(),
                    served_model: None,
                    fingerprint: None,
                    latency_ms: 1,
                    attempts: 1,
                    cached: false,
                })
            } else {
                Err(CallError {
                    class: self.class,
                    message: "no".into(),
                    status: self.status,
                    retry_after: self.retry_after,
                    attempts: 1,
                })
            };
            Box::pin(async { answer })
        }
    }

    /// The default caps, with milliseconds for seconds.
    const POLICY: RetryPolicy = RetryPolicy {
        attempts: 5,
        first_wait: Duration::from_micros(500),
        longest_wait: Duration::from_millis(60),
        total_wait: Duration::from_millis(180),
    };

    async fn call(
        class: ErrorClass,
        status: Option<u16>,
        succeed_at: u32,
        retry_after: Option<Duration>,
    ) -> (Result<Completion, CallError>, u32) {
        let calls = AtomicU32::new(0);
        let inner = Arc::new(Failing {
            class,
            status,
            calls,
            succeed_at,
            retry_after,
        });
        let model = RetryingModel::new(inner.clone(), POLICY, 1);
        let result = model.run(&super::super::tests::request()).await;
        (result, inner.calls.load(Ordering::Relaxed))
    }

    #[tokio::test]
    async fn attempts_are_bounded_and_counted() {
        let (result, calls) = call(ErrorClass::Server, Some(503), 0, None).await;
        let error = result.unwrap_err();
        assert_eq!((error.attempts, calls, error.class), (5, 5, ErrorClass::Server));
        assert_eq!(
            call(ErrorClass::Server, Some(503), 3, None).await.0.unwrap().attempts,
            3
        );
    }

    #[tokio::test]
    async fn what_cannot_work_is_not_tried_again() {
        for class in [
            ErrorClass::ContextLength,
            ErrorClass::Unauthorized,
            ErrorClass::QuotaExhausted,
            ErrorClass::BadRequest,
        ] {
            assert_eq!(call(class, Some(400), 0, None).await.1, 1, "{class:?}");
        }
    }

    /// A wait is capped, and so is the sum: with 60 ms a wait and 180 ms in all, three waits are possible.
    #[tokio::test]
    async fn a_server_that_asks_for_a_day_does_not_get_it() {
        let (_, calls) = call(ErrorClass::RateLimited, Some(429), 0, Some(Duration::from_hours(24))).await;
        assert!((2..=4).contains(&calls), "{calls}");
    }

    #[tokio::test]
    async fn an_address_where_nothing_ever_answered_ends_the_run() {
        let (result, _) = call(ErrorClass::Connection, None, 0, None).await;
        assert_eq!(result.unwrap_err().class, ErrorClass::Unreachable);
    }
}
