//! Soft F1, `soft_f1`: how much of each row is right, rows paired by their place.
//!
//! Source: BIRD mini-dev `evaluation_f1.py`, its quirks included: a predicted value counts as matched where it occurs anywhere
//! in the gold row; all counts of a row are divided by the gold row's width; a row without a partner counts as 1 whatever
//! its width.

use std::collections::HashSet;

use crate::engine::Value;

/// From 0 to 1. Both results without their duplicate rows, first occurrences in order.
pub fn soft_f1(predicted: &[Vec<Value>], gold: &[Vec<Value>]) -> f64 {
    if predicted.is_empty() && gold.is_empty() {
        return 1.0;
    }
    let (mut matched, mut only_predicted, mut only_gold) = (0.0, 0.0, 0.0);
    for (place, gold_row) in gold.iter().enumerate() {
        let Some(row) = predicted.get(place) else {
            only_gold += 1.0;
            continue;
        };
        let width = gold_row.len() as f64;
        let within = count_within(row, gold_row) as f64;
        matched += within / width;
        only_predicted += (row.len() as f64 - within) / width;
        only_gold += (width - count_within(gold_row, row) as f64) / width;
    }
    only_predicted += predicted.len().saturating_sub(gold.len()) as f64;
    let share = |part: f64, other: f64| if part + other > 0.0 { part / (part + other) } else { 0.0 };
    let (precision, recall) = (share(matched, only_predicted), share(matched, only_gold));
    if precision + recall > 0.0 {
        2.0 * precision * recall / (precision + recall)
    } else {
        0.0
    }
}

/// How many values of the one row occur in the other.
fn count_within(row: &[Value], other: &[Value]) -> usize {
    let key = |value: &Value| {
        let mut key = Vec::new();
        value.write_key(&mut key);
        key
    };
    let known: HashSet<Vec<u8>> = other.iter().map(key).collect();
    row.iter().filter(|value| known.contains(&key(value))).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rows(numbers: &[&[i64]]) -> Vec<Vec<Value>> {
        numbers
            .iter()
            .map(|row| row.iter().map(|&number| Value::Integer(number)).collect())
            .collect()
    }

    #[test]
    fn by_hand() {
        for (predicted, gold, expected) in [
            (&[][..], &[][..], 1.0),
            (&[&[1, 2][..]], &[&[1, 2][..]], 1.0),
            // The order of columns does not count.
            (&[&[2, 1]], &[&[1, 2]], 1.0),
            (&[], &[&[1]], 0.0),
            (&[&[1]], &[], 0.0),
            // Half of the row: precision 1, recall ½.
            (&[&[1]], &[&[1, 2]], 2.0 / 3.0),
            // One column too many, divided by the gold row's width: precision ½, recall 1.
            (&[&[1, 9]], &[&[1]], 2.0 / 3.0),
            // One of two rows: recall ½.
            (&[&[1]], &[&[1], &[2]], 2.0 / 3.0),
            // Rows are paired by place.
            (&[&[2], &[1]], &[&[1], &[2]], 0.0),
        ] {
            let found = soft_f1(&rows(predicted), &rows(gold));
            assert!((found - expected).abs() < 1e-12, "{predicted:?} {gold:?}: {found}");
        }
    }

    proptest! {
        #[test]
        fn between_0_and_1_and_1_for_itself(
            left in prop::collection::vec(prop::collection::vec(0_i64..4, 2), 0..6),
            right in prop::collection::vec(prop::collection::vec(0_i64..4, 3), 0..6),
        ) {
            let rows = |numbers: &[Vec<i64>]| -> Vec<Vec<Value>> {
                numbers.iter().map(|row| row.iter().map(|&number| Value::Integer(number)).collect()).collect()
            };
            let (left, right) = (rows(&left), rows(&right));
            prop_assert!((0.0..=1.0).contains(&soft_f1(&left, &right)));
            prop_assert!((soft_f1(&left, &left) - 1.0).abs() < 1e-12);
        }
    }
}
