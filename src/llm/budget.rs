//! Caps on what the runs of a command may spend, calls in flight counted by what they are expected to use; and the meter
//! that gives each call its cost.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::BoxFuture;
use tokio::sync::Notify;

use super::usage::{Forecast, Rates, Usage, Usd};
use super::{CallError, Completion, ErrorClass, Model, Request, StopSignal};

/// What calls used together. Money that nobody knows counts as none, so a cap on cost needs known prices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    pub calls: u64,
    /// Of prompts and completions.
    pub tokens: u64,
    pub cost: Usd,
}

impl std::ops::AddAssign for Amount {
    fn add_assign(&mut self, other: Amount) {
        self.calls += other.calls;
        self.tokens += other.tokens;
        self.cost += other.cost;
    }
}

impl Amount {
    /// What a finished call used, as far as the server told.
    pub fn of(completion: &Completion) -> Self {
        Amount {
            calls: 1,
            tokens: completion.usage.total().unwrap_or(0) + completion.wasted.total().unwrap_or(0),
            cost: completion.cost.unwrap_or_default(),
        }
    }

    /// The larger of each.
    #[must_use]
    pub fn max(self, other: Amount) -> Amount {
        Amount {
            calls: self.calls.max(other.calls),
            tokens: self.tokens.max(other.tokens),
            cost: self.cost.max(other.cost),
        }
    }

    fn minus(self, other: Amount) -> Amount {
        Amount {
            calls: self.calls.saturating_sub(other.calls),
            tokens: self.tokens.saturating_sub(other.tokens),
            cost: Usd(self.cost.0.saturating_sub(other.cost.0)),
        }
    }
}

/// What may be spent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SpendingCaps {
    pub cost: Option<Usd>,
    pub calls: Option<u64>,
    pub tokens: Option<u64>,
}

impl SpendingCaps {
    pub fn is_none(&self) -> bool {
        *self == SpendingCaps::default()
    }

    /// Why a call does not fit, in words.
    fn exceeded(&self, spent: Amount, call: Amount) -> Option<String> {
        if let Some(cap) = self.cost.filter(|&cap| spent.cost + call.cost > cap) {
            return Some(format!(
                "{} of {cap} is spent, and the next call may cost {}",
                spent.cost, call.cost
            ));
        }
        if let Some(cap) = self.tokens.filter(|&cap| spent.tokens + call.tokens > cap) {
            return Some(format!(
                "{} of {cap} tokens are used, and the next call may use {}",
                spent.tokens, call.tokens
            ));
        }
        self.calls
            .filter(|&cap| spent.calls + call.calls > cap)
            .map(|cap| format!("{} of {cap} calls are made", spent.calls))
    }
}

/// The budget of a command, shared by its providers.
#[derive(Debug, Default)]
pub struct Budget {
    caps: SpendingCaps,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    spent: Amount,
    in_flight: Amount,
    /// Why nothing more is begun.
    ended: Option<String>,
}

impl Budget {
    pub fn new(caps: SpendingCaps) -> Self {
        Budget {
            caps,
            ..Budget::default()
        }
    }

    pub fn caps(&self) -> SpendingCaps {
        self.caps
    }

    /// Counts what was spent before, by an earlier part of the same runs.
    pub fn add(&self, amount: Amount) {
        self.lock().spent += amount;
    }

    pub fn spent(&self) -> Amount {
        self.lock().spent
    }

    /// Ends the budget whatever is left of it (time is up).
    pub fn end(&self, reason: &str) {
        self.lock().ended.get_or_insert_with(|| reason.to_owned());
        self.changed.notify_waiters();
    }

    /// Why the budget has ended, where it has.
    pub fn ended(&self) -> Option<String> {
        self.lock().ended.clone()
    }

    /// Sets aside what a call may use. Where it fits only if calls in flight use less than was set aside for them, it waits
    /// for them.
    async fn reserve(&self, call: Amount) -> Result<Reservation<'_>, String> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            {
                let mut state = self.lock();
                if let Some(reason) = &state.ended {
                    return Err(reason.clone());
                }
                let mut all = state.spent;
                all += state.in_flight;
                if self.caps.exceeded(all, call).is_none() {
                    state.in_flight += call;
                    return Ok(Reservation { budget: self, call });
                }
                if let Some(reason) = self.caps.exceeded(state.spent, call)
                    && state.in_flight == Amount::default()
                {
                    state.ended = Some(reason.clone());
                    return Err(reason);
                }
            }
            changed.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is set aside for a call in flight; free again when dropped.
struct Reservation<'a> {
    budget: &'a Budget,
    call: Amount,
}

impl Reservation<'_> {
    fn settle(self, used: Amount) {
        self.budget.lock().spent += used;
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        state.in_flight = state.in_flight.minus(self.call);
        drop(state);
        self.budget.changed.notify_waiters();
    }
}

/// The prices of models, where they are known.
pub type RateCard = Arc<dyn Fn(&str) -> Option<Rates> + Send + Sync>;

/// Gives each call its cost and keeps to the budget.
pub struct MeteredModel {
    inner: Arc<dyn Model>,
    rates: RateCard,
    budget: Arc<Budget>,
    forecast: Arc<Forecast>,
    stop: StopSignal,
}

impl MeteredModel {
    /// `forecast` is the one that the calls below teach.
    pub fn new(
        inner: Arc<dyn Model>,
        rates: RateCard,
        budget: Arc<Budget>,
        forecast: Arc<Forecast>,
        stop: StopSignal,
    ) -> Self {
        MeteredModel {
            inner,
            rates,
            budget,
            forecast,
            stop,
        }
    }

    async fn run(&self, request: &Request) -> Result<Completion, CallError> {
        let rates = (self.rates)(&request.model);
        if self.budget.caps.is_none() {
            if let Some(reason) = self.budget.ended() {
                return Err(CallError::new(ErrorClass::Budget, reason));
            }
            return priced(self.inner.complete(request).await, rates);
        }
        let expected = self.forecast.expect(request);
        let call = Amount {
            calls: 1,
            tokens: expected.prompt + expected.completion,
            cost: rates.map_or(Usd(0), |rates| rates.of(expected.prompt, 0, expected.completion)),
        };
        let reservation = tokio::select! {
            reserved = self.budget.reserve(call) => {
                reserved.map_err(|reason| CallError::new(ErrorClass::Budget, reason))?
            }
            () = self.stop.stopped() => return Err(CallError::interrupted(0)),
        };
        let answer = priced(self.inner.complete(request).await, rates);
        match &answer {
            // What the server does not tell counts as expected.
            Ok(completion) => reservation.settle(Amount {
                calls: 1,
                tokens: completion.usage.total().unwrap_or(call.tokens) + completion.wasted.total().unwrap_or(0),
                cost: completion.cost.unwrap_or(call.cost),
            }),
            // Answered and billed, though of no use.
            Err(error) if !error.usage.is_unknown() => reservation.settle(Amount {
                calls: 1,
                tokens: error.usage.total().unwrap_or(0),
                cost: error.cost.unwrap_or_default(),
            }),
            Err(_) => {}
        }
        answer
    }
}

/// Adds the cost; the server's word on it beats our prices.
fn priced(answer: Result<Completion, CallError>, rates: Option<Rates>) -> Result<Completion, CallError> {
    let of = |usage: &Usage| usage.cost.or_else(|| rates.and_then(|rates| rates.cost(usage)));
    match answer {
        Ok(completion) => {
            let wasted = of(&completion.wasted).unwrap_or_default();
            let cost = of(&completion.usage).map(|cost| cost + wasted);
            Ok(Completion { cost, ..completion })
        }
        Err(error) => {
            let cost = of(&error.usage);
            Err(CallError { cost, ..error })
        }
    }
}

impl Model for MeteredModel {
    fn complete<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Completion, CallError>> {
        Box::pin(self.run(request))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{completion, request};
    use super::*;

    /// Every answer uses 100 tokens.
    struct Even;

    impl Model for Even {
        fn complete<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Completion, CallError>> {
            Box::pin(async {
                tokio::time::sleep(Duration::from_millis(10)).await;
                Ok(Completion {
                    usage: Usage {
                        prompt: Some(90),
                        completion: Some(10),
                        ..Usage::default()
                    },
                    ..completion("SELECT 1")
                })
            })
        }
    }

    fn metered(caps: SpendingCaps, rates: Option<Rates>) -> (MeteredModel, Arc<Budget>) {
        let budget = Arc::new(Budget::new(caps));
        let forecast = Arc::new(Forecast::default());
        let model = MeteredModel::new(
            Arc::new(Even),
            Arc::new(move |_| rates),
            budget.clone(),
            forecast,
            StopSignal::default(),
        );
        (model, budget)
    }

    const ONE_DOLLAR_A_TOKEN: Rates = Rates {
        input: 1e6,
        cached_input: None,
        output: 1e6,
    };

    #[tokio::test(start_paused = true)]
    async fn many_calls_at_once_stay_under_the_cap_and_come_close() {
        let caps = SpendingCaps {
            tokens: Some(1050),
            ..SpendingCaps::default()
        };
        let (model, budget) = metered(caps, None);
        let mut request = request();
        request.messages[0].content = "x".repeat(270);
        let calls: Vec<_> = (0..40).map(|_| model.complete(&request)).collect();
        let results = futures::future::join_all(calls).await;
        let answered = results.iter().filter(|result| result.is_ok()).count();
        // A call is expected to use 116 tokens and uses 100: after the ninth there is room for one more, not for two.
        assert!((9..=10).contains(&answered), "{answered}");
        assert!((900..=1050).contains(&budget.spent().tokens));
        let refused = results.into_iter().find_map(Result::err).unwrap();
        assert_eq!(refused.class, ErrorClass::Budget);
        assert!(
            refused.message.contains("of 1050 tokens are used"),
            "{}",
            refused.message
        );
        assert!(budget.ended().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_earlier_part_spent_counts() {
        let caps = SpendingCaps {
            calls: Some(3),
            ..SpendingCaps::default()
        };
        let (model, budget) = metered(caps, None);
        budget.add(Amount {
            calls: 2,
            ..Amount::default()
        });
        let request = request();
        model.complete(&request).await.unwrap();
        let error = model.complete(&request).await.unwrap_err();
        assert_eq!(error.message, "3 of 3 calls are made");
    }

    #[tokio::test(start_paused = true)]
    async fn the_cost_is_the_servers_else_ours_else_unknown() {
        let (model, _) = metered(SpendingCaps::default(), Some(ONE_DOLLAR_A_TOKEN));
        let request = request();
        assert_eq!(model.complete(&request).await.unwrap().cost, Usd::from_dollars(100.0));
        let (model, _) = metered(SpendingCaps::default(), None);
        assert_eq!(model.complete(&request).await.unwrap().cost, None);
        let told = Completion {
            usage: Usage {
                prompt: Some(1),
                completion: Some(1),
                cost: Usd::from_dollars(0.5),
                ..Usage::default()
            },
            ..completion("x")
        };
        let cost = |answer: Result<Completion, CallError>| answer.unwrap().cost;
        assert_eq!(
            cost(priced(Ok(told.clone()), Some(ONE_DOLLAR_A_TOKEN))),
            Usd::from_dollars(0.5)
        );
        let second = Completion {
            wasted: told.usage,
            ..told
        };
        assert_eq!(
            cost(priced(Ok(second), Some(ONE_DOLLAR_A_TOKEN))),
            Usd::from_dollars(1.0)
        );
    }

    /// An answer without text is billed like any other.
    #[tokio::test(start_paused = true)]
    async fn what_cannot_be_used_is_counted_all_the_same() {
        struct Silent;
        impl Model for Silent {
            fn complete<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Completion, CallError>> {
                Box::pin(async {
                    let usage = Usage {
                        prompt: Some(90),
                        completion: Some(10),
                        ..Usage::default()
                    };
                    Err(CallError {
                        usage: Box::new(usage),
                        ..CallError::new(ErrorClass::BadRequest, "no text".into())
                    })
                })
            }
        }
        let caps = SpendingCaps {
            calls: Some(3),
            ..SpendingCaps::default()
        };
        let (mut model, budget) = metered(caps, Some(ONE_DOLLAR_A_TOKEN));
        model.inner = Arc::new(Silent);
        let request = request();
        for _ in 0..3 {
            let error = model.complete(&request).await.unwrap_err();
            assert_eq!(
                (error.class, error.cost),
                (ErrorClass::BadRequest, Usd::from_dollars(100.0))
            );
        }
        assert_eq!(model.complete(&request).await.unwrap_err().class, ErrorClass::Budget);
        assert_eq!(budget.spent().tokens, 300);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_fails_gives_back_what_was_set_aside() {
        let budget = Budget::new(SpendingCaps {
            tokens: Some(100),
            ..SpendingCaps::default()
        });
        let call = Amount {
            calls: 1,
            tokens: 80,
            cost: Usd(0),
        };
        let first = budget.reserve(call).await.ok().unwrap();
        // The second waits, since the first may use less than expected.
        let second = budget.reserve(call);
        tokio::pin!(second);
        assert!(futures::poll!(&mut second).is_pending());
        drop(first);
        second.await.ok().unwrap().settle(call);
        assert_eq!(budget.spent().tokens, 80);
        assert!(budget.reserve(call).await.is_err());
    }
}
