//! BIRD's execution accuracy, `ex`: 1 where the sets of rows are equal.
//!
//! Source: BIRD `evaluation.py`, `execute_model`: `set(predicted_rows) == set(gold_rows)` over Python tuples. Row order and
//! duplicates are ignored; column order and width count; column names do not. Two empty results are equal.

use std::collections::HashSet;

use crate::engine::Value;

/// The distinct rows of a result, ready to be compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowSet {
    rows: HashSet<Box<[u8]>>,
}

impl RowSet {
    pub fn new(rows: &[Vec<Value>]) -> Self {
        let mut key = Vec::new();
        let rows = rows
            .iter()
            .map(|row| {
                key.clear();
                for value in row {
                    value.write_key(&mut key);
                }
                key.as_slice().into()
            })
            .collect();
        RowSet { rows }
    }

    /// Bytes held, about.
    pub fn size(&self) -> usize {
        self.rows.iter().map(|row| row.len() + 32).sum()
    }
}

/// 1 or 0.
pub fn execution_accuracy(predicted: &RowSet, gold: &RowSet) -> f64 {
    if predicted == gold { 1.0 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn value() -> impl Strategy<Value = Value> {
        prop_oneof![
            Just(Value::Null),
            (-3_i64..3).prop_map(Value::Integer),
            (-3_i64..3).prop_map(|number| Value::Real(number as f64 / 2.0)),
            "[ab]{0,2}".prop_map(Value::Text),
            prop::collection::vec(0_u8..2, 0..2).prop_map(Value::Blob),
        ]
    }

    fn rows() -> impl Strategy<Value = Vec<Vec<Value>>> {
        prop::collection::vec(prop::collection::vec(value(), 2), 0..6)
    }

    fn ex(left: &[Vec<Value>], right: &[Vec<Value>]) -> f64 {
        execution_accuracy(&RowSet::new(left), &RowSet::new(right))
    }

    proptest! {
        #[test]
        fn row_order_and_duplicates_do_not_count(rows in rows(), extra in 0_usize..6) {
            let mut other = rows.clone();
            other.reverse();
            if let Some(row) = rows.get(extra) {
                other.push(row.clone());
            }
            prop_assert_eq!(ex(&rows, &other), 1.0);
        }

        #[test]
        fn symmetric_and_agrees_with_python_sets(left in rows(), right in rows()) {
            let within = |a: &[Vec<Value>], b: &[Vec<Value>]| a.iter().all(|row| b.contains(row));
            let expected = if within(&left, &right) && within(&right, &left) { 1.0 } else { 0.0 };
            prop_assert_eq!(ex(&left, &right), expected);
            prop_assert_eq!(ex(&right, &left), expected);
        }
    }

    #[test]
    fn columns_count_by_place() {
        let (one, two) = (Value::Integer(1), Value::Integer(2));
        assert_eq!(
            ex(&[vec![one.clone(), two.clone()]], &[vec![two.clone(), one.clone()]]),
            0.0
        );
        assert_eq!(ex(&[vec![one.clone()]], &[vec![one.clone(), one.clone()]]), 0.0);
        assert_eq!(
            ex(
                &[vec![one.clone(), two.clone()], vec![two.clone(), one.clone()]],
                &[vec![one.clone(), one.clone()], vec![two.clone(), two]]
            ),
            0.0
        );
        assert_eq!(ex(&[], &[]), 1.0);
        assert_eq!(ex(&[vec![one]], &[vec![Value::Real(1.0)]]), 1.0);
    }
}
