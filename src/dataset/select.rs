//! Choosing examples: by id, database and field, a seeded sample, a window.
//!
//! In: examples in file order and a [`Selection`]. Out: those chosen, still in file order. Sampling looks at seed and id
//! only, so that parallel splits (the same ids in other languages) give the same questions.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::str::FromStr;

use super::Example;
use super::error::{DatasetError, hint, nearest, quoted};
use super::text::nfc;

/// Which examples to take. Filters come first, then the sample, then offset and limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    pub ids: Option<Vec<String>>,
    /// Any of these; all where empty.
    pub databases: Vec<String>,
    /// All of these must hold.
    pub conditions: Vec<Condition>,
    pub offset: usize,
    pub limit: Option<usize>,
    /// So many at random.
    pub sample: Option<usize>,
    pub seed: u64,
}

/// `key=value` or `key!=value`. Keys are `id`, `database`, `difficulty`, `language`, or a further field of the records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    pub key: String,
    pub value: String,
    /// Whether the value is to differ.
    pub negated: bool,
}

impl FromStr for Condition {
    type Err = DatasetError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fault = || DatasetError::Condition { text: text.to_owned() };
        let (left, value) = text.split_once('=').ok_or_else(fault)?;
        let (key, negated) = left.strip_suffix('!').map_or((left, false), |key| (key, true));
        let (key, value) = (key.trim(), value.trim());
        if key.is_empty() {
            return Err(fault());
        }
        Ok(Condition {
            key: key.to_owned(),
            value: nfc(value),
            negated,
        })
    }
}

impl Condition {
    fn value_of<'a>(&self, example: &'a Example) -> Option<&'a str> {
        match self.key.as_str() {
            "id" => Some(&example.id),
            "database" => Some(&example.database),
            "language" => Some(&example.language),
            "difficulty" => example.difficulty.as_deref(),
            key => example.fields.get(key).map(String::as_str),
        }
    }

    fn holds(&self, example: &Example) -> bool {
        self.value_of(example).is_some_and(|value| nfc(value) == self.value) != self.negated
    }

    fn text(&self) -> String {
        format!("`{}{}{}`", self.key, if self.negated { "!=" } else { "=" }, self.value)
    }
}

impl Selection {
    /// The chosen examples, in file order. A name that the dataset does not hold and an empty result are errors.
    pub fn apply(&self, mut examples: Vec<Example>) -> Result<Vec<Example>, DatasetError> {
        self.check_names(&examples)?;
        if let Some(ids) = &self.ids {
            let wanted: HashSet<&str> = ids.iter().map(String::as_str).collect();
            examples.retain(|example| wanted.contains(example.id.as_str()));
            not_empty(&examples, || ("the choice of ids".to_owned(), String::new()))?;
        }
        if !self.databases.is_empty() {
            let wanted: HashSet<String> = self.databases.iter().map(|id| nfc(id)).collect();
            let before = databases_of(&examples);
            examples.retain(|example| wanted.contains(&nfc(&example.database)));
            not_empty(&examples, || {
                (
                    format!("the choice of database {}", quoted(&self.databases)),
                    format!("; left were {}", quoted(&before)),
                )
            })?;
        }
        for condition in &self.conditions {
            let mut values: BTreeMap<String, usize> = BTreeMap::new();
            for value in examples.iter().filter_map(|example| condition.value_of(example)) {
                *values.entry(value.to_owned()).or_default() += 1;
            }
            examples.retain(|example| condition.holds(example));
            not_empty(&examples, || {
                (
                    format!("the condition {}", condition.text()),
                    value_advice(condition, &values),
                )
            })?;
        }
        if let Some(sample) = self.sample {
            self.draw(&mut examples, sample);
            not_empty(&examples, || ("a sample of 0".to_owned(), String::new()))?;
        }
        let left = examples.len();
        examples.drain(..self.offset.min(left));
        not_empty(&examples, || {
            (format!("offset {}", self.offset), format!("; there were {left}"))
        })?;
        if let Some(limit) = self.limit {
            examples.truncate(limit);
            not_empty(&examples, || (format!("limit {limit}"), String::new()))?;
        }
        Ok(examples)
    }

    /// Keeps the `sample` examples with the smallest digests of seed and id.
    fn draw(&self, examples: &mut Vec<Example>, sample: usize) {
        if sample >= examples.len() {
            return;
        }
        let key = |example: &Example| {
            let mut hasher = blake3::Hasher::new();
            hasher.update(&self.seed.to_le_bytes());
            hasher.update(example.id.as_bytes());
            *hasher.finalize().as_bytes()
        };
        let mut order: Vec<([u8; 32], usize)> = examples.iter().map(key).zip(0..).collect();
        order.sort_unstable();
        let kept: HashSet<usize> = order.into_iter().take(sample).map(|(_, index)| index).collect();
        let mut index = 0;
        examples.retain(|_| {
            index += 1;
            kept.contains(&(index - 1))
        });
    }

    fn check_names(&self, examples: &[Example]) -> Result<(), DatasetError> {
        let unknown = |kind, name: &str, nearest| DatasetError::UnknownName {
            kind,
            name: name.to_owned(),
            nearest,
        };
        if let Some(ids) = &self.ids {
            let present: HashSet<&str> = examples.iter().map(|example| example.id.as_str()).collect();
            if let Some(id) = ids.iter().find(|id| !present.contains(id.as_str())) {
                let near = nearest(id, examples.iter().map(|example| example.id.as_str()));
                return Err(unknown("id", id, near));
            }
        }
        let databases = databases_of(examples);
        for id in &self.databases {
            if !databases.iter().any(|present| nfc(present) == nfc(id)) {
                return Err(unknown(
                    "database",
                    id,
                    nearest(id, databases.iter().map(String::as_str)),
                ));
            }
        }
        for condition in &self.conditions {
            let mut keys: BTreeSet<&str> = ["id", "database", "language", "difficulty"].into();
            if keys.contains(condition.key.as_str()) {
                continue;
            }
            keys.extend(
                examples
                    .iter()
                    .flat_map(|example| example.fields.keys().map(String::as_str)),
            );
            if !keys.contains(condition.key.as_str()) {
                return Err(unknown("field", &condition.key, nearest(&condition.key, keys)));
            }
        }
        Ok(())
    }
}

fn databases_of(examples: &[Example]) -> Vec<String> {
    examples
        .iter()
        .map(|example| example.database.clone())
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect()
}

/// Which values there are, as far as that helps.
fn value_advice(condition: &Condition, values: &BTreeMap<String, usize>) -> String {
    if values.is_empty() {
        return format!("; no example has a `{}`", condition.key);
    }
    match nearest(&condition.value, values.keys().map(String::as_str)).filter(|_| !condition.negated) {
        Some(near) if near != condition.value => hint(Some(&near)),
        _ => {
            let counted: Vec<String> = values.keys().cloned().collect();
            format!("; `{}` is one of {}", condition.key, quoted(&counted))
        }
    }
}

fn not_empty(examples: &[Example], why: impl FnOnce() -> (String, String)) -> Result<(), DatasetError> {
    if !examples.is_empty() {
        return Ok(());
    }
    let (filter, detail) = why();
    Err(DatasetError::EmptySelection { filter, detail })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn examples(language: &str) -> Vec<Example> {
        (0..40)
            .map(|position| Example {
                id: format!("q{position}"),
                position,
                question: format!("{language} {position}"),
                evidence: String::new(),
                database: if position % 2 == 0 { "müze" } else { "okul" }.to_owned(),
                gold: vec![],
                language: language.to_owned(),
                difficulty: Some(if position < 10 { "simple" } else { "challenging" }.to_owned()),
                fields: BTreeMap::from([("exec".to_owned(), "same".to_owned())]),
            })
            .collect()
    }

    fn ids(examples: &[Example]) -> Vec<&str> {
        examples.iter().map(|example| example.id.as_str()).collect()
    }

    #[test]
    fn samples_are_the_same_in_every_language_and_version() {
        let selection = Selection {
            sample: Some(5),
            seed: 42,
            ..Selection::default()
        };
        let english = selection.apply(examples("en")).unwrap();
        let mut backwards = examples("tr");
        backwards.reverse();
        let mut turkish = selection.apply(backwards).unwrap();
        turkish.reverse();
        assert_eq!(ids(&english), ids(&turkish));
        // Published runs rest on this draw: it may never change.
        assert_eq!(ids(&english), DRAWN);
        let positions: Vec<usize> = english.iter().map(|example| example.position).collect();
        assert!(positions.is_sorted());
        let other = Selection {
            seed: 43,
            ..selection.clone()
        }
        .apply(examples("en"))
        .unwrap();
        assert_ne!(ids(&english), ids(&other));
        // A larger sample holds the smaller one.
        let more = Selection {
            sample: Some(9),
            ..selection
        }
        .apply(examples("en"))
        .unwrap();
        assert!(ids(&english).iter().all(|id| ids(&more).contains(id)));
    }

    const DRAWN: [&str; 5] = ["q3", "q10", "q21", "q28", "q30"];

    #[test]
    fn filters_come_before_sample_offset_and_limit() {
        let selection = Selection {
            databases: vec!["mu\u{308}ze".to_owned()],
            conditions: vec!["difficulty=simple".parse().unwrap(), "id!=q4".parse().unwrap()],
            offset: 1,
            limit: Some(2),
            ..Selection::default()
        };
        assert_eq!(ids(&selection.apply(examples("en")).unwrap()), ["q2", "q6"]);
        let chosen = Selection {
            ids: Some(vec!["q7".into(), "q1".into()]),
            ..Selection::default()
        };
        assert_eq!(ids(&chosen.apply(examples("en")).unwrap()), ["q1", "q7"]);
    }

    #[test]
    fn unknown_names_and_empty_results_say_what_and_why() {
        let message = |selection: Selection| selection.apply(examples("en")).unwrap_err().to_string();
        let base = Selection::default;
        assert_eq!(
            message(Selection {
                databases: vec!["okull".into()],
                ..base()
            }),
            "no database `okull` in the dataset; did you mean `okul`?"
        );
        assert!(
            message(Selection {
                ids: Some(vec!["x7".into()]),
                ..base()
            })
            .starts_with("no id `x7`")
        );
        let condition = |text: &str| Selection {
            conditions: vec![text.parse().unwrap()],
            ..base()
        };
        assert!(message(condition("exce=same")).contains("no field `exce` in the dataset; did you mean `exec`?"));
        assert_eq!(
            message(condition("difficulty=simpel")),
            "no example is left after the condition `difficulty=simpel`; did you mean `simple`?"
        );
        assert!(message(condition("exec!=same")).contains("`exec` is one of `same`"));
        assert_eq!(
            message(Selection { offset: 40, ..base() }),
            "no example is left after offset 40; there were 40"
        );
        assert!("difficulty".parse::<Condition>().is_err());
        assert!("=x".parse::<Condition>().is_err());
    }
}
