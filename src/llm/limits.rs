//! How many calls a provider gets at once, and how often: a window that adapts (additive increase, multiplicative
//! decrease, never below 1, never above its ceiling) under caps for requests and tokens a minute.
//!
//! In: what a call will probably use, and how it went. Out: a [`Place`]. While a call waits for its turn or before it tries
//! again it holds no place.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

use super::waits::RateHint;

/// Caps of a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caps {
    /// Calls in flight at most.
    pub concurrency: usize,
    pub requests_per_minute: Option<u32>,
    pub tokens_per_minute: Option<u32>,
}

/// How a call went, as far as the window cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Answered: the server may be able to do more.
    Fine,
    /// The server said that it is asked too much.
    TooMuch,
    /// Failed for another reason, which says nothing about load.
    Unclear,
}

/// After the server said that it is asked too much, this share of the calls goes on.
const DECREASE: f64 = 0.7;

/// The limits of one provider.
#[derive(Debug)]
pub struct Limiter {
    places: Semaphore,
    ceiling: usize,
    window: Mutex<Window>,
    /// Calls wait for their turn one behind the other: the first waits for the clock, the others for the first.
    gate: tokio::sync::Mutex<()>,
    turns: Mutex<Turns>,
    /// Whether there is anything that calls must wait for beside a place.
    paced: AtomicBool,
    always_paced: bool,
    /// For the longest pause that a server's header can ask for.
    longest_pause: Duration,
}

#[derive(Debug)]
struct Window {
    limit: f64,
    /// Whole places there are, free or taken.
    allowed: usize,
    /// Places that are taken back as soon as a call gives one back.
    debt: usize,
    /// Counts the decreases: a call that began before the last one says nothing new.
    era: u64,
}

#[derive(Debug)]
struct Turns {
    /// Between two requests, and when the next may start.
    request: Option<(Duration, Instant)>,
    tokens: Option<Bucket>,
    /// As the server asked.
    paused_until: Option<Instant>,
}

/// Tokens that may be used now; refilled evenly, full after a minute.
#[derive(Debug)]
struct Bucket {
    capacity: f64,
    level: f64,
    at: Instant,
}

impl Bucket {
    fn refill(&mut self, now: Instant) {
        let seconds = now.saturating_duration_since(self.at).as_secs_f64();
        self.level = (self.level + seconds * self.capacity / 60.0).min(self.capacity);
        self.at = now;
    }

    /// Until so many tokens may be used; a call larger than the bucket waits for a full one.
    fn wait(&mut self, now: Instant, tokens: u64) -> Duration {
        self.refill(now);
        let missing = (tokens as f64).min(self.capacity) - self.level;
        // The millisecond more is for the clock's rounding.
        if missing > 0.0 {
            Duration::from_secs_f64(missing * 60.0 / self.capacity) + Duration::from_millis(1)
        } else {
            Duration::ZERO
        }
    }
}

impl Limiter {
    /// `longest_pause` caps what a server's headers can ask for.
    pub fn new(caps: Caps, longest_pause: Duration) -> Self {
        let ceiling = caps.concurrency.clamp(1, Semaphore::MAX_PERMITS);
        let now = Instant::now();
        let request = caps
            .requests_per_minute
            .filter(|&rate| rate > 0)
            .map(|rate| (Duration::from_mins(1) / rate, now));
        let tokens = caps.tokens_per_minute.filter(|&rate| rate > 0).map(|rate| Bucket {
            capacity: f64::from(rate),
            level: f64::from(rate),
            at: now,
        });
        let always_paced = request.is_some() || tokens.is_some();
        Limiter {
            places: Semaphore::new(ceiling),
            ceiling,
            window: Mutex::new(Window {
                limit: ceiling as f64,
                allowed: ceiling,
                debt: 0,
                era: 0,
            }),
            gate: tokio::sync::Mutex::default(),
            turns: Mutex::new(Turns {
                request,
                tokens,
                paused_until: None,
            }),
            paced: AtomicBool::new(always_paced),
            always_paced,
            longest_pause,
        }
    }

    /// Waits for this call's turn and a place; `tokens` is what it will probably use. Safe to cancel.
    pub async fn acquire(&self, tokens: u64) -> Place<'_> {
        if !self.paced.load(Ordering::Relaxed) {
            let place = self.place(tokens).await;
            // While it waited for the place, the server may have asked for a pause.
            if !self.paced.load(Ordering::Relaxed) {
                return place;
            }
        }
        let _first = self.gate.lock().await;
        loop {
            self.turn(tokens).await;
            let place = self.place(tokens).await;
            if self.until_turn(tokens).is_zero() {
                self.take_turn(tokens);
                return place;
            }
        }
    }

    async fn turn(&self, tokens: u64) {
        loop {
            let wait = self.until_turn(tokens);
            if wait.is_zero() {
                return;
            }
            tokio::time::sleep(wait).await;
        }
    }

    fn until_turn(&self, tokens: u64) -> Duration {
        let now = Instant::now();
        let mut turns = lock(&self.turns);
        if turns.paused_until.is_some_and(|until| until <= now) {
            turns.paused_until = None;
            self.paced.store(self.always_paced, Ordering::Relaxed);
        }
        let pause = turns.paused_until.map_or(Duration::ZERO, |until| until - now);
        let request = turns
            .request
            .map_or(Duration::ZERO, |(_, next)| next.saturating_duration_since(now));
        let bucket = turns
            .tokens
            .as_mut()
            .map_or(Duration::ZERO, |bucket| bucket.wait(now, tokens));
        pause.max(request).max(bucket)
    }

    fn take_turn(&self, tokens: u64) {
        let now = Instant::now();
        let mut turns = lock(&self.turns);
        if let Some((gap, next)) = &mut turns.request {
            *next = (*next).max(now) + *gap;
        }
        if let Some(bucket) = &mut turns.tokens {
            bucket.refill(now);
            bucket.level -= tokens as f64;
        }
    }

    async fn place(&self, tokens: u64) -> Place<'_> {
        // The semaphore is never closed.
        let permit = self.places.acquire().await.ok();
        Place {
            limiter: self,
            permit,
            era: lock(&self.window).era,
            tokens,
        }
    }

    /// Heeds what a server says of its limits in an answer's headers.
    pub fn heed(&self, hint: &RateHint) {
        let exhausted = |remaining: Option<u64>, reset: Option<Duration>| reset.filter(|_| remaining == Some(0));
        let pause = [
            hint.retry_after,
            exhausted(hint.remaining_requests, hint.reset_requests),
            exhausted(hint.remaining_tokens, hint.reset_tokens),
        ]
        .into_iter()
        .flatten()
        .max()
        .unwrap_or_default();
        self.pause(pause);
    }

    /// Begins no call for a while.
    pub fn pause(&self, pause: Duration) {
        let pause = pause.min(self.longest_pause);
        if pause.is_zero() {
            return;
        }
        let until = Instant::now() + pause;
        let mut turns = lock(&self.turns);
        turns.paused_until = Some(turns.paused_until.map_or(until, |known| known.max(until)));
        self.paced.store(true, Ordering::Relaxed);
    }

    /// Calls that may be in flight now.
    pub fn allowed(&self) -> usize {
        lock(&self.window).allowed
    }

    pub fn ceiling(&self) -> usize {
        self.ceiling
    }

    fn adapt(&self, load: Load, era: u64) {
        // With every place open and all well there is nothing to do.
        let mut window = lock(&self.window);
        match load {
            Load::Unclear => {}
            Load::Fine => {
                if window.allowed >= self.ceiling {
                    return;
                }
                window.limit = (window.limit + 1.0 / window.limit).min(self.ceiling as f64);
                while window.allowed < whole(window.limit) {
                    window.allowed += 1;
                    if window.debt > 0 {
                        window.debt -= 1;
                    } else {
                        self.places.add_permits(1);
                    }
                }
            }
            Load::TooMuch => {
                if era != window.era {
                    return;
                }
                window.era += 1;
                window.limit = (window.limit * DECREASE).max(1.0);
                let less = window.allowed - whole(window.limit);
                window.allowed -= less;
                window.debt += less - self.places.forget_permits(less);
            }
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "between 1 and the ceiling"
)]
fn whole(limit: f64) -> usize {
    // Sums of fractions may end a hair below the whole number that they mean.
    ((limit + 1e-9).floor() as usize).max(1)
}

/// A call's place in flight, given back when it is dropped.
#[derive(Debug)]
pub struct Place<'a> {
    limiter: &'a Limiter,
    permit: Option<SemaphorePermit<'a>>,
    era: u64,
    tokens: u64,
}

impl Place<'_> {
    /// Gives the place back, and tells how the call went and what it really used.
    pub fn end(self, load: Load, used: Option<u64>) {
        self.limiter.adapt(load, self.era);
        if let Some(used) = used
            && self.limiter.always_paced
            && let Some(bucket) = &mut lock(&self.limiter.turns).tokens
        {
            bucket.level = (bucket.level + self.tokens as f64 - used as f64).min(bucket.capacity);
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let Some(permit) = self.permit.take() else { return };
        let mut window = lock(&self.limiter.window);
        if window.debt > 0 {
            window.debt -= 1;
            permit.forget();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use proptest::prelude::*;

    use super::*;

    fn caps(concurrency: usize) -> Caps {
        Caps {
            concurrency,
            requests_per_minute: None,
            tokens_per_minute: None,
        }
    }

    fn limiter(caps: Caps) -> Arc<Limiter> {
        Arc::new(Limiter::new(caps, Duration::from_mins(1)))
    }

    /// One more in flight, until it is dropped.
    struct Counted(Arc<AtomicUsize>);

    impl Counted {
        fn new(in_flight: &Arc<AtomicUsize>, most: &AtomicUsize) -> Self {
            let now = in_flight.fetch_add(1, Ordering::SeqCst) + 1;
            most.fetch_max(now, Ordering::SeqCst);
            Counted(Arc::clone(in_flight))
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Time that passes by itself while everyone waits.
    fn simulated<F: Future>(work: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap()
            .block_on(work)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever happens to calls, also when they are dropped half-way: all get their turn, the ceiling holds, and with
        /// answers that are fine again all places come back.
        #[test]
        fn no_deadlock_never_over_the_ceiling_and_it_recovers(
            ceiling in 1_usize..40,
            calls in proptest::collection::vec((0_u8..4, 1_u64..50), 1..200),
        ) {
            simulated(async {
                let limiter = limiter(caps(ceiling));
                let in_flight = Arc::new(AtomicUsize::new(0));
                let most = Arc::new(AtomicUsize::new(0));
                let mut tasks = Vec::new();
                for (kind, milliseconds) in calls {
                    let (limiter, in_flight, most) = (limiter.clone(), in_flight.clone(), most.clone());
                    tasks.push(tokio::spawn(async move {
                        let work = async {
                            let place = limiter.acquire(1).await;
                            let counted = Counted::new(&in_flight, &most);
                            tokio::time::sleep(Duration::from_millis(milliseconds)).await;
                            drop(counted);
                            match kind {
                                0 => place.end(Load::Fine, None),
                                1 => place.end(Load::TooMuch, None),
                                2 => place.end(Load::Unclear, None),
                                _ => drop(place),
                            }
                        };
                        if kind == 3 {
                            // Whoever waits may give up.
                            let _ = tokio::time::timeout(Duration::from_millis(20), work).await;
                        } else {
                            work.await;
                        }
                    }));
                }
                for task in tasks {
                    task.await.unwrap();
                }
                prop_assert!(most.load(Ordering::SeqCst) <= ceiling);
                prop_assert!((1..=ceiling).contains(&limiter.allowed()));
                for _ in 0..=ceiling * ceiling + ceiling {
                    limiter.acquire(1).await.end(Load::Fine, None);
                }
                prop_assert_eq!(limiter.allowed(), ceiling);
                // All of them can be had at once.
                let mut places = Vec::new();
                for _ in 0..ceiling {
                    places.push(limiter.acquire(1).await);
                }
                prop_assert_eq!(limiter.places.available_permits(), 0);
                Ok(())
            })?;
        }
    }

    #[test]
    fn it_never_falls_below_one() {
        simulated(async {
            let limiter = limiter(caps(512));
            for _ in 0..100 {
                limiter.acquire(1).await.end(Load::TooMuch, None);
            }
            assert_eq!(limiter.allowed(), 1);
            limiter.acquire(1).await.end(Load::Fine, None);
        });
    }

    #[test]
    fn all_512_are_in_flight_where_512_are_allowed() {
        simulated(async {
            let limiter = limiter(caps(512));
            let mut places = Vec::new();
            for _ in 0..512 {
                places.push(limiter.acquire(1).await);
            }
            assert_eq!(limiter.places.available_permits(), 0);
            // One wave of refusals is one decrease.
            for place in places {
                place.end(Load::TooMuch, None);
            }
            assert_eq!(limiter.allowed(), 358);
        });
    }

    #[test]
    fn requests_are_spread_over_the_minute() {
        simulated(async {
            let limiter = limiter(Caps {
                requests_per_minute: Some(60),
                ..caps(64)
            });
            let started = Instant::now();
            let tasks: Vec<_> = (0..10)
                .map(|_| {
                    let limiter = limiter.clone();
                    tokio::spawn(async move {
                        let place = limiter.acquire(1).await;
                        let at = started.elapsed();
                        tokio::time::sleep(Duration::from_secs(5)).await;
                        place.end(Load::Fine, None);
                        at
                    })
                })
                .collect();
            let mut starts = Vec::new();
            for task in tasks {
                starts.push(task.await.unwrap());
            }
            for (index, start) in starts.iter().enumerate() {
                let seconds = start.as_secs_f64();
                assert!((seconds - index as f64).abs() < 0.1, "{starts:?}");
            }
        });
    }

    #[test]
    fn tokens_are_settled_with_what_was_really_used() {
        simulated(async {
            let limiter = limiter(Caps {
                tokens_per_minute: Some(6000),
                ..caps(8)
            });
            let started = Instant::now();
            limiter.acquire(6000).await.end(Load::Fine, Some(1000));
            // 5000 came back.
            limiter.acquire(5000).await.end(Load::Fine, Some(5000));
            assert!(started.elapsed() < Duration::from_secs(1));
            // Now it is empty: 100 tokens a second.
            limiter.acquire(1000).await.end(Load::Fine, Some(1000));
            let waited = started.elapsed().as_secs_f64();
            assert!((9.9..11.0).contains(&waited), "{waited}");
            // A call that is larger than the bucket is not stuck for ever.
            limiter.acquire(50_000).await.end(Load::Fine, None);
        });
    }

    #[test]
    fn what_a_server_asks_for_is_heeded_and_capped() {
        simulated(async {
            let limiter = limiter(caps(4));
            let started = Instant::now();
            limiter.heed(&RateHint {
                remaining_requests: Some(0),
                reset_requests: Some(Duration::from_secs(7)),
                ..RateHint::default()
            });
            limiter.acquire(1).await.end(Load::Fine, None);
            assert_eq!(started.elapsed().as_secs(), 7);
            limiter.heed(&RateHint {
                remaining_requests: Some(3),
                reset_requests: Some(Duration::from_secs(7)),
                ..RateHint::default()
            });
            limiter.acquire(1).await.end(Load::Fine, None);
            assert_eq!(started.elapsed().as_secs(), 7, "there are some left");
            limiter.heed(&RateHint {
                retry_after: Some(Duration::from_hours(24)),
                ..RateHint::default()
            });
            limiter.acquire(1).await.end(Load::Fine, None);
            assert_eq!(started.elapsed().as_secs(), 67, "a day is a minute here");
        });
    }

    /// Also those that were waiting for a place when the pause began.
    #[test]
    fn a_pause_holds_everyone_back() {
        simulated(async {
            let limiter = limiter(caps(1));
            let started = Instant::now();
            let first = limiter.acquire(1).await;
            let others: Vec<_> = (0..5)
                .map(|_| {
                    let limiter = limiter.clone();
                    tokio::spawn(async move {
                        limiter.acquire(1).await.end(Load::Fine, None);
                        started.elapsed().as_secs()
                    })
                })
                .collect();
            tokio::time::sleep(Duration::from_secs(1)).await;
            limiter.pause(Duration::from_secs(30));
            first.end(Load::TooMuch, None);
            for other in others {
                assert_eq!(other.await.unwrap(), 31);
            }
        });
    }

    /// Waiting for the clock leaves the places to others.
    #[test]
    fn no_place_is_held_while_waiting() {
        simulated(async {
            let limiter = limiter(Caps {
                requests_per_minute: Some(1),
                ..caps(1)
            });
            limiter.acquire(1).await.end(Load::Fine, None);
            let waiting = {
                let limiter = limiter.clone();
                tokio::spawn(async move {
                    limiter.acquire(1).await.end(Load::Fine, None);
                })
            };
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(limiter.places.available_permits(), 1);
            waiting.await.unwrap();
        });
    }
}
