//! What a call used and what it cost; and a forecast of both from the calls before it.

use std::collections::HashMap;
use std::iter::Sum;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Request;

/// Tokens of a call as the server counts them; what it does not say is unknown, not 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<u64>,
    /// Of the prompt's tokens, those the server had computed before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_prompt: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion: Option<u64>,
    /// Of the completion's tokens, those that were thought and not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<u64>,
    /// What the server says that the call cost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Usd>,
}

impl std::ops::AddAssign for Usage {
    /// What either tells is told of the sum.
    fn add_assign(&mut self, other: Usage) {
        fn add<T: std::ops::Add<Output = T>>(one: Option<T>, other: Option<T>) -> Option<T> {
            match (one, other) {
                (Some(one), Some(other)) => Some(one + other),
                (one, other) => one.or(other),
            }
        }
        self.prompt = add(self.prompt, other.prompt);
        self.cached_prompt = add(self.cached_prompt, other.cached_prompt);
        self.completion = add(self.completion, other.completion);
        self.reasoning = add(self.reasoning, other.reasoning);
        self.cost = add(self.cost, other.cost);
    }
}

impl Usage {
    /// Whether nothing is known.
    pub fn is_unknown(&self) -> bool {
        *self == Usage::default()
    }

    /// Prompt and completion together, where the server told either.
    pub fn total(&self) -> Option<u64> {
        match (self.prompt, self.completion) {
            (None, None) => None,
            (prompt, completion) => Some(prompt.unwrap_or(0) + completion.unwrap_or(0)),
        }
    }
}

/// An amount of money, in billionths of a US dollar, so that sums do not depend on their order. Written as dollars.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Usd(pub u64);

const PER_DOLLAR: f64 = 1e9;

impl Usd {
    /// Rounded to a billionth; negative amounts and such that are no number are none.
    pub fn from_dollars(dollars: f64) -> Option<Self> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the range is checked"
        )]
        (dollars.is_finite() && (0.0..1e9).contains(&dollars)).then(|| Usd((dollars * PER_DOLLAR).round() as u64))
    }

    pub fn dollars(self) -> f64 {
        self.0 as f64 / PER_DOLLAR
    }
}

impl std::ops::Add for Usd {
    type Output = Usd;

    fn add(self, other: Usd) -> Usd {
        Usd(self.0.saturating_add(other.0))
    }
}

impl std::ops::AddAssign for Usd {
    fn add_assign(&mut self, other: Usd) {
        *self = *self + other;
    }
}

impl Sum for Usd {
    fn sum<I: Iterator<Item = Usd>>(amounts: I) -> Usd {
        amounts.fold(Usd(0), |sum, amount| sum + amount)
    }
}

impl std::fmt::Display for Usd {
    /// `$0.0042`, with as many digits as small amounts need.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dollars = self.dollars();
        let digits = if dollars == 0.0 || dollars >= 1.0 {
            2
        } else if dollars >= 0.01 {
            4
        } else {
            6
        };
        write!(f, "${dollars:.digits$}")
    }
}

impl Serialize for Usd {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.dollars())
    }
}

impl<'de> Deserialize<'de> for Usd {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let dollars = f64::deserialize(deserializer)?;
        Usd::from_dollars(dollars).ok_or_else(|| serde::de::Error::custom(format!("`{dollars}` is no amount of money")))
    }
}

/// A model's prices, in US dollars per million tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    pub input: f64,
    /// For prompt tokens that the server had computed before; as `input` where the provider gives no discount.
    pub cached_input: Option<f64>,
    pub output: f64,
}

impl Rates {
    /// The cost of so many tokens.
    pub fn of(&self, prompt: u64, cached_prompt: u64, completion: u64) -> Usd {
        let cached = cached_prompt.min(prompt);
        let dollars = ((prompt - cached) as f64 * self.input
            + cached as f64 * self.cached_input.unwrap_or(self.input)
            + completion as f64 * self.output)
            / 1e6;
        Usd::from_dollars(dollars).unwrap_or(Usd(u64::MAX))
    }

    /// The cost of a call, where its tokens are known.
    pub fn cost(&self, usage: &Usage) -> Option<Usd> {
        Some(self.of(usage.prompt?, usage.cached_prompt.unwrap_or(0), usage.completion?))
    }
}

/// What calls will use, learnt from those before: tokens a byte of prompt, and how long answers are, by model.
#[derive(Debug, Default)]
pub struct Forecast(Mutex<HashMap<String, Seen>>);

#[derive(Debug, Default, Clone, Copy)]
struct Seen {
    bytes: u64,
    tokens: u64,
    longest: u64,
}

/// Where nothing has been seen yet: bytes of prompt a token, erring towards more tokens, and tokens of an answer.
const BYTES_A_TOKEN: u64 = 3;
const UNBOUNDED_ANSWER: u64 = 2048;

/// Tokens that a call will probably use at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    pub prompt: u64,
    pub completion: u64,
}

impl Forecast {
    pub fn expect(&self, request: &Request) -> Expected {
        let bytes = request.prompt_bytes();
        let seen = self.lock().get(&request.model).copied().unwrap_or_default();
        let like_those_before = (bytes * seen.tokens).checked_div(seen.bytes);
        // A little more than the mean, since texts differ.
        let prompt = like_those_before.map_or(bytes / BYTES_A_TOKEN, |tokens| tokens * 21 / 20) + 16;
        let cap = request.max_tokens.map(u64::from);
        let completion = match (seen.longest, cap) {
            (0, cap) => cap.unwrap_or(UNBOUNDED_ANSWER),
            (longest, Some(cap)) => longest.min(cap),
            (longest, None) => longest,
        };
        Expected {
            prompt,
            completion: completion * u64::from(request.n.unwrap_or(1)),
        }
    }

    pub fn learn(&self, request: &Request, usage: &Usage) {
        let mut all = self.lock();
        if !all.contains_key(&request.model) {
            all.insert(request.model.clone(), Seen::default());
        }
        let Some(seen) = all.get_mut(&request.model) else {
            return;
        };
        if let Some(tokens) = usage.prompt.filter(|&tokens| tokens > 0) {
            seen.bytes += request.prompt_bytes();
            seen.tokens += tokens;
        }
        if let Some(tokens) = usage.completion {
            seen.longest = seen.longest.max(tokens / u64::from(request.n.unwrap_or(1)));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Seen>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::request;
    use super::*;

    #[test]
    fn cached_prompt_tokens_have_their_own_price() {
        let rates = Rates {
            input: 0.15,
            cached_input: Some(0.075),
            output: 0.6,
        };
        let usage = Usage {
            prompt: Some(1000),
            cached_prompt: Some(400),
            completion: Some(100),
            ..Usage::default()
        };
        // 600 × 0.15 + 400 × 0.075 + 100 × 0.6, in millionths of a dollar
        assert_eq!(rates.cost(&usage), Some(Usd(180_000)));
        assert_eq!(
            Rates {
                cached_input: None,
                ..rates
            }
            .cost(&usage),
            Some(Usd(210_000))
        );
    }

    #[test]
    fn an_unknown_count_is_an_unknown_cost() {
        let rates = Rates {
            input: 1.0,
            cached_input: None,
            output: 1.0,
        };
        let usage = Usage {
            prompt: Some(10),
            ..Usage::default()
        };
        assert_eq!(rates.cost(&usage), None);
        assert_eq!(usage.total(), Some(10));
        assert_eq!(Usage::default().total(), None);
    }

    #[test]
    fn money_is_written_as_dollars_and_read_again() {
        for amount in [0, 1, 999, 37_500, 1_234_567_891, 4_000_000_000_000] {
            let text = serde_json::to_string(&Usd(amount)).unwrap();
            assert_eq!(serde_json::from_str::<Usd>(&text).unwrap(), Usd(amount), "{text}");
        }
        assert!(serde_json::from_str::<Usd>("-1").is_err());
        assert_eq!(Usd(4_200_000).to_string(), "$0.004200");
        assert_eq!(Usd(1_500_000_000).to_string(), "$1.50");
        assert_eq!(Usd::from_dollars(f64::NAN), None);
    }

    #[test]
    fn a_forecast_learns_from_what_was_used() {
        let forecast = Forecast::default();
        let mut call = request();
        call.messages[0].content = "x".repeat(3000);
        call.max_tokens = Some(500);
        assert_eq!(
            forecast.expect(&call),
            Expected {
                prompt: 1016,
                completion: 500
            }
        );
        let usage = Usage {
            prompt: Some(750),
            completion: Some(40),
            ..Usage::default()
        };
        forecast.learn(&call, &usage);
        let expected = forecast.expect(&call);
        assert!((750..=820).contains(&expected.prompt), "{expected:?}");
        assert_eq!(expected.completion, 40);
        // Another model's answers may be longer.
        call.model = "other".into();
        assert_eq!(forecast.expect(&call).completion, 500);
    }
}
