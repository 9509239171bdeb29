//! The one retry loop, around whatever makes a single attempt: bounded in attempts, in waiting and in time, jittered, and
//! under the provider's limits. A place in flight is never held while waiting, and a wish to stop wakes whoever waits.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::time::Instant;

use super::limits::{Caps, Limiter, Load};
use super::usage::{Forecast, Usage};
use super::{Action, CallError, Completion, ErrorClass, Model, Request, StopSignal};

/// Caps of the retry loop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetryPolicy {
    pub attempts: u32,
    /// Attempts where every one was refused for being too many: such a refusal costs nothing and passes.
    pub attempts_when_limited: u32,
    /// The first wait; doubled each time.
    pub first_wait: Duration,
    pub longest_wait: Duration,
    /// All waits of a call together.
    pub total_wait: Duration,
    /// Attempts and waits of a call together, from its first attempt.
    pub total_time: Option<Duration>,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        RetryPolicy {
            attempts: 5,
            attempts_when_limited: 10,
            first_wait: Duration::from_millis(500),
            longest_wait: Duration::from_mins(1),
            total_wait: Duration::from_mins(5),
            total_time: None,
        }
    }
}

/// So many calls in a row that failed after all their attempts, without an answer between them, are an outage.
const OUTAGE: u32 = 10;
/// Times that a request is changed because the server refused a parameter.
const ADAPTATIONS: u32 = 3;

/// Calls that wait before they try again, for whoever shows the progress.
#[derive(Debug, Clone, Default)]
pub struct Waiting(Arc<Mutex<WaitingCalls>>);

#[derive(Debug, Default)]
struct WaitingCalls {
    next_number: u64,
    calls: BTreeMap<u64, (Instant, ErrorClass)>,
}

/// What [`Waiting`] says at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextTry {
    pub calls: usize,
    /// Until the first of them tries again.
    pub after: Duration,
    /// Why that one waits.
    pub class: ErrorClass,
}

impl Waiting {
    pub fn next_try(&self) -> Option<NextTry> {
        let waiting = self.lock();
        let (until, class) = waiting.calls.values().min_by_key(|(until, _)| *until)?;
        Some(NextTry {
            calls: waiting.calls.len(),
            after: until.saturating_duration_since(Instant::now()),
            class: *class,
        })
    }

    fn add(&self, until: Instant, class: ErrorClass) -> WaitingCall<'_> {
        let mut waiting = self.lock();
        let number = waiting.next_number;
        waiting.next_number += 1;
        waiting.calls.insert(number, (until, class));
        WaitingCall { all: self, number }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, WaitingCalls> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct WaitingCall<'a> {
    all: &'a Waiting,
    number: u64,
}

impl Drop for WaitingCall<'_> {
    fn drop(&mut self) {
        self.all.lock().calls.remove(&self.number);
    }
}

/// Tries again what may work again, under the provider's limits.
pub struct RetryingModel {
    inner: Arc<dyn Model>,
    policy: RetryPolicy,
    limiter: Arc<Limiter>,
    forecast: Arc<Forecast>,
    stop: StopSignal,
    waiting: Waiting,
    answered: AtomicBool,
    succeeded: AtomicBool,
    failures_in_a_row: AtomicU32,
    /// What ended the run: nothing is sent after it.
    ended: OnceLock<CallError>,
}

impl RetryingModel {
    pub fn new(inner: Arc<dyn Model>, policy: RetryPolicy, limiter: Arc<Limiter>) -> Self {
        RetryingModel {
            inner,
            policy,
            limiter,
            forecast: Arc::default(),
            stop: StopSignal::default(),
            waiting: Waiting::default(),
            answered: AtomicBool::new(false),
            succeeded: AtomicBool::new(false),
            failures_in_a_row: AtomicU32::new(0),
            ended: OnceLock::new(),
        }
    }

    /// With as many calls in flight at most, and no other limit.
    pub fn with_concurrency(inner: Arc<dyn Model>, policy: RetryPolicy, concurrency: usize) -> Self {
        let caps = Caps {
            concurrency,
            requests_per_minute: None,
            tokens_per_minute: None,
        };
        let limiter = Limiter::new(caps, policy.longest_wait);
        RetryingModel::new(inner, policy, Arc::new(limiter))
    }

    /// Heeds the wish to stop, tells who waits, and shares what is known of calls' sizes.
    #[must_use]
    pub fn connected(mut self, stop: StopSignal, waiting: Waiting, forecast: Arc<Forecast>) -> Self {
        self.stop = stop;
        self.waiting = waiting;
        self.forecast = forecast;
        self
    }

    async fn run(&self, request: &Request) -> Result<Completion, CallError> {
        let mut progress = Progress::default();
        loop {
            let error = match self.attempt(request, &mut progress).await? {
                Ok(completion) => return Ok(completion),
                Err(error) => error,
            };
            let Some(wait) = self.next_wait(&error, &mut progress) else {
                return Err(self.give_up(error, &progress));
            };
            tracing::debug!(
                attempt = progress.attempts,
                wait_ms = wait.as_millis(),
                class = error.class.name(),
                "call failed, trying again"
            );
            if wait.is_zero() {
                continue;
            }
            let _shown = self.waiting.add(Instant::now() + wait, error.class);
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.stop.stopped() => return Err(CallError::interrupted(progress.attempts)),
            }
            progress.waited += wait;
        }
    }

    /// One attempt. The outer error is for attempts that were not made.
    async fn attempt(
        &self,
        request: &Request,
        progress: &mut Progress,
    ) -> Result<Result<Completion, CallError>, CallError> {
        let expected = self.forecast.expect(request);
        let started = progress.started;
        let deadline = self
            .policy
            .total_time
            .zip(started)
            .map(|(total, started)| started + total);
        let too_late = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let place = tokio::select! {
            biased;
            () = self.stop.stopped() => return Err(CallError::interrupted(progress.attempts)),
            () = too_late => return Ok(Err(self.out_of_time())),
            place = self.limiter.acquire(expected.prompt + expected.completion) => place,
        };
        if self.stop.is_stopped() {
            return Err(CallError::interrupted(progress.attempts));
        }
        if let Some(error) = self.ended.get() {
            return Err(CallError {
                attempts: progress.attempts,
                ..error.clone()
            });
        }
        progress.attempts += 1;
        let started = *progress.started.get_or_insert_with(Instant::now);
        let answer = match self.policy.total_time {
            None => self.inner.complete(request).await,
            Some(total) => {
                let until = started + total;
                match tokio::time::timeout_at(until, self.inner.complete(request)).await {
                    Ok(answer) => answer,
                    Err(_) => Err(self.out_of_time()),
                }
            }
        };
        match answer {
            Ok(completion) => {
                self.answered.store(true, Ordering::Relaxed);
                self.failures_in_a_row.store(0, Ordering::Relaxed);
                self.forecast.learn(request, &completion.usage);
                place.end(Load::Fine, completion.usage.total());
                self.succeeded.store(true, Ordering::Relaxed);
                Ok(Ok(Completion {
                    attempts: progress.attempts,
                    wasted: progress.wasted,
                    ..completion
                }))
            }
            Err(error) => {
                if error.status.is_some() {
                    self.answered.store(true, Ordering::Relaxed);
                }
                let refused = error.class == ErrorClass::RateLimited;
                // Servers fail for many reasons; only some say that they have too much to do.
                let load = if refused || error.status == Some(529) || error.retry_after.is_some() {
                    Load::TooMuch
                } else {
                    Load::Unclear
                };
                progress.wasted += *error.usage;
                // What was refused has used nothing.
                let used = error.usage.total().or(error.status.map(|_| 0));
                place.end(load, used);
                if refused && let Some(asked) = error.retry_after {
                    self.limiter.pause(asked.min(self.policy.longest_wait));
                }
                progress.only_limited &= refused;
                Ok(Err(error))
            }
        }
    }

    /// How long to wait before the next attempt; none where there is to be none.
    fn next_wait(&self, error: &CallError, progress: &mut Progress) -> Option<Duration> {
        if error.class == ErrorClass::UnsupportedParameter {
            progress.adaptations += 1;
            return (progress.adaptations <= ADAPTATIONS).then_some(Duration::ZERO);
        }
        let attempts = if progress.only_limited {
            self.policy.attempts_when_limited.max(self.policy.attempts)
        } else {
            self.policy.attempts
        };
        if error.class.action() != Action::Retry || progress.attempts >= attempts + progress.adaptations {
            return None;
        }
        let wait = self.wait(progress.attempts - progress.adaptations, error.retry_after);
        let in_time = self
            .policy
            .total_time
            .is_none_or(|total| progress.started.is_none_or(|started| started.elapsed() + wait < total));
        (in_time && progress.waited + wait <= self.policy.total_wait).then_some(wait)
    }

    fn out_of_time(&self) -> CallError {
        let seconds = self.policy.total_time.unwrap_or_default().as_secs_f64();
        CallError::new(ErrorClass::Timeout, format!("no answer within {seconds} s in all"))
    }

    fn give_up(&self, error: CallError, progress: &Progress) -> CallError {
        let attempts = progress.attempts;
        let mut class = error.class;
        let mut message = if attempts > 1 {
            format!("{} (after {attempts} attempts)", error.message)
        } else {
            error.message
        };
        // A gateway may forbid one prompt (SQL in it looks like an attack); where every call is forbidden, that is an outage.
        let forbidden =
            class == ErrorClass::Unauthorized && error.status == Some(403) && self.succeeded.load(Ordering::Relaxed);
        if class == ErrorClass::UnsupportedParameter {
            class = ErrorClass::BadRequest;
        } else if class == ErrorClass::Connection && !self.answered.load(Ordering::Relaxed) {
            class = ErrorClass::Unreachable;
        } else if forbidden
            || matches!(
                class,
                ErrorClass::RateLimited | ErrorClass::Server | ErrorClass::Connection | ErrorClass::Timeout
            )
        {
            if forbidden {
                class = ErrorClass::BadRequest;
            }
            let failures = self.failures_in_a_row.fetch_add(1, Ordering::Relaxed) + 1;
            if failures >= OUTAGE {
                message = format!("{failures} calls in a row failed for good, the last one so: {message}");
                class = ErrorClass::Outage;
            }
        }
        let error = CallError {
            class,
            message,
            attempts,
            usage: Box::new(progress.wasted),
            ..error
        };
        if class.action() == Action::FailRun {
            let _ = self.ended.set(error.clone());
        }
        error
    }

    /// What the server asked for, capped, or a random part of a doubling wait, so that many calls do not return at once:
    /// the longer of the two.
    fn wait(&self, attempt: u32, asked: Option<Duration>) -> Duration {
        let full = self
            .policy
            .first_wait
            .saturating_mul(1 << (attempt.max(1) - 1).min(16))
            .min(self.policy.longest_wait);
        // Full jitter, but never so little that a retry is no wait at all; nor is one where the server's clock is behind.
        let own = full.mul_f64(0.05 + 0.95 * random_share());
        asked.unwrap_or_default().min(self.policy.longest_wait).max(own)
    }
}

/// What has been tried for a call.
#[derive(Debug)]
struct Progress {
    attempts: u32,
    adaptations: u32,
    waited: Duration,
    started: Option<Instant>,
    only_limited: bool,
    /// Of answers that could not be used.
    wasted: Usage,
}

impl Default for Progress {
    fn default() -> Self {
        Progress {
            attempts: 0,
            adaptations: 0,
            waited: Duration::ZERO,
            started: None,
            only_limited: true,
            wasted: Usage::default(),
        }
    }
}

fn random_share() -> f64 {
    let mut bytes = [0_u8; 4];
    let _ = getrandom::fill(&mut bytes);
    f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX)
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
                Ok(super::super::tests::completion("SELECT 1"))
            } else {
                Err(CallError {
                    class: self.class,
                    message: "no".into(),
                    status: self.status,
                    retry_after: self.retry_after,
                    attempts: 1,
                    ..CallError::new(self.class, String::new())
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
        attempts_when_limited: 10,
        total_time: None,
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
        let model = RetryingModel::with_concurrency(inner.clone(), POLICY, 1);
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
