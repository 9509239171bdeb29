//! What models cost: the shipped price list, and price files of one's own (`prices:` in `dinsql.yaml`).
//!
//! In: a price file's bytes. Out: [`PriceFile`], or every mistake with its place; for a model's name, the entry that fits it
//! best. A model without an entry has no price: nothing here guesses one. How many tokens were used is not looked at.

use std::collections::HashMap;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use super::check::{Checker, misspells};
use super::keys;
use super::yaml::{self, Entry, Node, Place, Source, Value};
use crate::diagnostic::Diagnostics;

/// The format is explained in the file itself, which is also a template for one's own.
const SHIPPED: &str = include_str!("prices.yaml");

/// USD for a million tokens; a higher price is a slip of the keyboard.
const HIGHEST: f64 = 100_000.0;

/// Lists of other programs give prices for one token; no provider's price for a million is this low.
const LOWEST: f64 = 0.0001;

/// USD per million tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    pub input: f64,
    /// Prompt tokens that the server had in its cache; as `input` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_input: Option<f64>,
    /// Completion tokens, those of reasoning among them.
    pub output: f64,
}

/// The price of one model, or of all models that a pattern fits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PriceEntry {
    /// A name as the server gives it; `*` stands for any text, also for none.
    pub model: String,
    pub price: Price,
    /// Where the price was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// `YYYY-MM-DD`: the day for which the source states it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
}

/// A validated price file; an entry with several names is several entries here.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PriceFile {
    /// `YYYY-MM-DD`.
    pub updated: String,
    pub entries: Vec<PriceEntry>,
}

impl PriceFile {
    /// The entry of this very name, else the one whose pattern fits with the most letters of its own.
    pub fn find(&self, model: &str) -> Option<&PriceEntry> {
        best_match(self.entries.iter().map(|entry| (entry.model.as_str(), entry)), model)
    }
}

/// Of named things, the one whose name or pattern fits `model` best; the first among equals.
pub(super) fn best_match<'n, T>(candidates: impl IntoIterator<Item = (&'n str, T)>, model: &str) -> Option<T> {
    let mut best: Option<(usize, T)> = None;
    for (pattern, candidate) in candidates {
        if pattern == model {
            return Some(candidate);
        }
        let letters = pattern.chars().filter(|&letter| letter != '*').count();
        if fits(pattern, model) && best.as_ref().is_none_or(|(most, _)| letters > *most) {
            best = Some((letters, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// Whether the whole text is the pattern with each `*` replaced by some text.
fn fits(pattern: &str, text: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(mut text) = text.strip_prefix(start) else {
        return false;
    };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let end = parts.pop().unwrap_or_default();
    // Taking each part where it first comes leaves the most for the others.
    for part in parts {
        let Some(at) = text.find(part) else { return false };
        text = &text[at + part.len()..];
    }
    text.ends_with(end)
}

/// The price list that comes with the program. It ages: its entries carry their dates.
pub fn shipped_prices() -> PriceFile {
    static FILE: LazyLock<PriceFile> =
        LazyLock::new(|| load_prices("prices.yaml", SHIPPED.as_bytes()).unwrap_or_default());
    FILE.clone()
}

/// Reads and validates a price file.
pub fn load_prices(file_name: &str, bytes: &[u8]) -> Result<PriceFile, Diagnostics> {
    let text = yaml::decode(file_name, bytes)?;
    let mut checker = Checker::new(Source {
        name: file_name.to_owned(),
        text: text.clone(),
    });
    let mut mistakes = Vec::new();
    let parsed = yaml::parse(file_name, &text, &text, &mut mistakes);
    checker.add(mistakes);
    let file = match parsed {
        Ok(root) => price_file(&mut checker, &root),
        Err(diagnostic) => {
            checker.add([*diagnostic]);
            None
        }
    };
    checker.finish(file)
}

fn price_file(checker: &mut Checker, root: &Node) -> Option<PriceFile> {
    const WHAT: &str = "the price file";
    if !checker.known_keys(root, WHAT, keys::PRICE_FILE) {
        return None;
    }
    let mut required = |key: &str, help: &str| {
        let entry = root.get(key);
        if entry.is_none() {
            checker.missing(root, &root.place, key, WHAT, keys::PRICE_FILE, help);
        }
        entry
    };
    let updated = required(
        "updated",
        "say when the prices were last looked up, as in `updated: 2026-12-01`",
    );
    let prices = required(
        "prices",
        "as in `prices: [{ model: my-model, input: 0.5, output: 1.5 }]`, in USD per million tokens",
    );
    let updated = updated.and_then(|entry| date(checker, &entry.value, "`updated`"));
    let Value::Sequence(items) = &prices?.value.value else {
        checker
            .wrong_type(&prices?.value, "a list of prices", "`prices`")
            .help("each price starts with `- model: …`");
        return None;
    };
    let mut entries = Vec::new();
    let mut seen: HashMap<String, Place> = HashMap::new();
    for item in items {
        price_entries(checker, item, &mut seen, &mut entries);
    }
    Some(PriceFile {
        updated: updated?,
        entries,
    })
}

/// One item of the list: an entry for each of its names.
fn price_entries(checker: &mut Checker, node: &Node, seen: &mut HashMap<String, Place>, entries: &mut Vec<PriceEntry>) {
    if !checker.known_keys(node, "a price", keys::PRICE_ENTRY) {
        return;
    }
    let names = names(checker, node);
    for (name, place) in &names {
        if let Some(first) = seen.insert(name.clone(), place.clone()) {
            checker
                .report(
                    "prices::duplicate",
                    place,
                    format!("`{name}` has two prices"),
                    "priced again here",
                )
                .also(&first, "first priced here")
                .help("remove one of the two");
        }
    }
    let what = match names.first() {
        Some((name, _)) => format!("the price of `{name}`"),
        None => "this price".to_owned(),
    };
    let price = price_of(checker, node, &what, keys::PRICE_ENTRY);
    let source = node
        .get("source")
        .and_then(|entry| checker.text(&entry.value, "`source`"));
    let date = node.get("date").and_then(|entry| date(checker, &entry.value, "`date`"));
    let Some(price) = price else { return };
    entries.extend(names.into_iter().map(|(model, _)| PriceEntry {
        model,
        price,
        source: source.clone(),
        date: date.clone(),
    }));
}

/// What `model` or `names` says; none where that is a mistake.
fn names(checker: &mut Checker, node: &Node) -> Vec<(String, Place)> {
    const HELP: &str = "as in `model: gpt-4o-mini` or `names: [gpt-4o-mini, gpt-4o-mini-*]`";
    match (node.get("model"), node.get("names")) {
        (None, None) if misspells(node, keys::PRICE_ENTRY, |key| matches!(key, "model" | "names")) => Vec::new(),
        (None, None) => {
            checker
                .report(
                    "config::missing_key",
                    &node.place,
                    "this price has no `model`",
                    "whose price?",
                )
                .help(HELP);
            Vec::new()
        }
        (Some(model), Some(names)) => {
            checker
                .report(
                    "prices::two_names",
                    &names.key_place,
                    "this price has both `model` and `names`",
                    "only one of the two",
                )
                .also(&model.key_place, "and this")
                .help("put all names into `names`");
            Vec::new()
        }
        (Some(Entry { value, .. }), None) => checker
            .text(value, "`model`")
            .map(|name| (name, value.place.clone()))
            .into_iter()
            .collect(),
        (None, Some(Entry { value, .. })) => match &value.value {
            Value::Sequence(items) if items.is_empty() => {
                checker
                    .report(
                        "config::empty",
                        &value.place,
                        "`names` is empty",
                        "expected at least one name",
                    )
                    .help(HELP);
                Vec::new()
            }
            Value::Sequence(items) => items
                .iter()
                .filter_map(|item| Some((checker.text(item, "an item of `names`")?, item.place.clone())))
                .collect(),
            _ => {
                checker.wrong_type(value, "a list of names", "`names`").help(HELP);
                Vec::new()
            }
        },
    }
}

/// A price that stands alone, as under a provider's `prices`.
pub(super) fn read_price(checker: &mut Checker, node: &Node, place: &Place, what: &str) -> Option<Price> {
    if !matches!(node.value, Value::Mapping(_)) {
        checker
            .wrong_type(node, "a mapping", what)
            .help("as in `{ input: 0.5, output: 1.5 }`, in USD per million tokens");
        return None;
    }
    checker.known_keys(node, what, keys::PRICE);
    let node = Node {
        // What is missing is missing at the model's name.
        place: place.clone(),
        value: node.value.clone(),
    };
    price_of(checker, &node, what, keys::PRICE)
}

fn price_of(checker: &mut Checker, node: &Node, what: &str, keys: &[&str]) -> Option<Price> {
    let mut amount = |key: &str, required: bool| {
        let Some(entry) = node.get(key) else {
            if required {
                let help = format!("add `{key}: …`, in USD per million tokens");
                checker.missing(node, &node.place, key, what, keys, &help);
            }
            return None;
        };
        let amount = checker.number(&entry.value, &format!("`{key}`"), 0.0..=HIGHEST)?;
        if amount > 0.0 && amount < LOWEST {
            checker
                .report(
                    "prices::per_token",
                    &entry.value.place,
                    format!("`{key}` looks like the price of one token"),
                    "expected USD per million tokens",
                )
                .help(format!("if it is one, write `{key}: {}`", round(amount * 1e6)));
            return None;
        }
        Some(amount)
    };
    let (input, cached_input, output) = (
        amount("input", true),
        amount("cached_input", false),
        amount("output", true),
    );
    Some(Price {
        input: input?,
        cached_input,
        output: output?,
    })
}

/// Without the noise of binary fractions.
fn round(amount: f64) -> f64 {
    (amount * 1e6).round() / 1e6
}

/// A day of the calendar, as it is written.
fn date(checker: &mut Checker, node: &Node, key: &str) -> Option<String> {
    let text = checker.word(node, key)?;
    if is_date(&text) {
        return Some(text);
    }
    checker
        .report(
            "prices::bad_date",
            &node.place,
            format!("{key} is no date: `{text}`"),
            "expected a day of the calendar",
        )
        .help(format!(
            "year, month and day, as in {}: 2026-12-01",
            key.trim_matches('`')
        ));
    None
}

fn is_date(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let [year, month, day] = parts.as_slice() else {
        return false;
    };
    let number = |part: &str, digits: usize| {
        let plain = part.len() == digits && part.bytes().all(|byte| byte.is_ascii_digit());
        plain.then(|| part.parse::<u32>().ok()).flatten()
    };
    let (Some(year), Some(month), Some(day)) = (number(year, 4), number(month, 2), number(day, 2)) else {
        return false;
    };
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        1 | 3 | 5 | 7 | 8 | 10 | 12 => 31,
        4 | 6 | 9 | 11 => 30,
        2 if leap => 29,
        2 => 28,
        _ => 0,
    };
    (1..=days).contains(&day)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_shipped_file_is_valid_and_says_where_its_prices_are_from() {
        let file = load_prices("prices.yaml", SHIPPED.as_bytes()).unwrap_or_else(|found| panic!("{found}"));
        assert_eq!(file, shipped_prices());
        assert!(file.entries.len() > 10);
        for entry in &file.entries {
            let source = entry.source.as_deref().unwrap_or_default();
            assert!(source.starts_with("https://"), "{}", entry.model);
            assert!(
                entry.date.as_ref().is_none_or(|date| *date <= file.updated),
                "{}",
                entry.model
            );
            let Price {
                input,
                cached_input,
                output,
            } = entry.price;
            assert!(
                cached_input.is_none_or(|cached| cached < input) && input < output,
                "{}",
                entry.model
            );
        }
        let mini = file.find("gpt-4o-mini-2024-07-18").expect("a dated name");
        assert_eq!((mini.price.input, mini.price.output), (0.15, 0.6));
        // Other models whose names start alike are not taken for these.
        assert_eq!(file.find("gpt-4o-mini-audio-preview"), None);
        assert_eq!(file.find("qwen2.5-coder-0.5b"), None);
    }

    #[test]
    fn the_exact_name_wins_then_the_longest_pattern() {
        let text = "updated: 2026-12-01\nprices:\n  - { model: '*', input: 1, output: 1 }\n  \
                    - { names: [gpt-4o-*, '*mini*'], input: 2, output: 2 }\n  \
                    - { model: gpt-4o-mini-*, input: 3, output: 3, cached_input: 0.5 }\n  \
                    - { model: gpt-4o-mini-2024, input: 4, output: 4 }\n";
        let file = load_prices("p.yaml", text.as_bytes()).unwrap_or_else(|found| panic!("{found}"));
        for (model, input) in [
            ("gpt-4o-mini-2024", 4.0),
            ("gpt-4o-mini-2025", 3.0),
            ("gpt-4o-2024", 2.0),
            ("a-mini-b", 2.0),
            ("gpt-4o", 1.0),
        ] {
            assert_eq!(file.find(model).map(|entry| entry.price.input), Some(input), "{model}");
        }
        assert_eq!(file.entries.len(), 5);
        assert_eq!(PriceFile::default().find("gpt-4o"), None);
    }

    #[test]
    fn mistakes_are_reported_together() {
        let text = "updated: 2026-02-30\nprices:\n  - { model: a, inptu: 1, output: 2 }\n  - { model: b, input: -1, output: 2 }\n  \
                    - { model: c, input: 1 }\n  - { input: 1, output: 2 }\n  - { names: [d, a], input: 0.0000025, output: 2 }\n  \
                    - { model: e, names: [f], input: 1, output: two, date: 2026 }\n";
        let found = load_prices("p.yaml", text.as_bytes())
            .expect_err("mistakes")
            .to_string();
        for part in [
            "1:10: `updated` is no date: `2026-02-30`",
            "3:17: unknown key `inptu` in a price\n  help: did you mean `input`?",
            "4:24: `input` is out of range: `-1`",
            "5:5: the price of `c` has no `output`",
            "6:5: this price has no `model`",
            "7:18: `a` has two prices",
            "7:29: `input` looks like the price of one token\n  help: if it is one, write `input: 2.5`",
            "8:17: this price has both `model` and `names`",
            "8:47: expected a number for `output`, found text `two`",
            "8:58: `date` is no date: `2026`",
        ] {
            assert!(found.contains(part), "{part} in\n{found}");
        }
        assert_eq!(found.matches("p.yaml:").count(), 10, "{found}");
        let found = load_prices("p.yaml", b"prices: { a: 1 }\n")
            .expect_err("mistakes")
            .to_string();
        assert!(found.contains("1:1: the price file has no `updated`"), "{found}");
        assert!(
            found.contains("1:9: expected a list of prices for `prices`, found a mapping"),
            "{found}"
        );
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(text in "(updated|prices|model|names|input|[-:{}\\[\\],* \n0-9.a]){0,60}") {
            let _ = load_prices("p.yaml", text.as_bytes());
        }

        /// A pattern fits what it was made from, and nothing that lacks one of its parts.
        #[test]
        fn patterns_fit_their_texts(parts in proptest::collection::vec("[ab]{0,3}", 1..5), fill in "[abc]{0,4}") {
            let (pattern, text) = (parts.join("*"), parts.join(&fill));
            prop_assert!(fits(&pattern, &text));
            prop_assert!(!fits(&(pattern + "*d"), &text));
        }
    }
}
