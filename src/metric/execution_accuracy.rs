//! BIRD's execution accuracy, `ex`: 1 where the sets of rows are equal.
//!
//! Source: BIRD `evaluation.py`, `execute_model`: `set(predicted_rows) == set(gold_rows)` over Python tuples. Row order and
//! duplicates are ignored; column order and width count; column names do not. Two empty results are equal.

use std::collections::HashSet;

use crate::engine::Value;

/// Bytes of a digest: of so many, two rows that differ share one with a chance of 2⁻¹²⁸.
const DIGEST_BYTES: usize = 16;

/// The distinct rows of a result, ready to be compared. Kept as digests, so that a wide result takes no more than a
/// narrow one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowSet {
    rows: HashSet<[u8; DIGEST_BYTES]>,
}

impl RowSet {
    pub fn new(rows: &[Vec<Value>]) -> Self {
        let mut builder = RowSetBuilder::default();
        for row in rows {
            builder.add(row);
        }
        builder.finish()
    }

    /// Bytes held, about.
    pub fn size(&self) -> usize {
        self.rows.capacity() * (DIGEST_BYTES + 1)
    }
}

/// Takes rows as they are fetched.
#[derive(Debug, Default)]
pub struct RowSetBuilder {
    rows: HashSet<[u8; DIGEST_BYTES]>,
    /// The key of the row at hand; kept for its memory.
    key: Vec<u8>,
}

impl RowSetBuilder {
    /// Says whether the row is new.
    pub fn add(&mut self, row: &[Value]) -> bool {
        self.key.clear();
        for value in row {
            value.write_key(&mut self.key);
        }
        let mut digest = [0; DIGEST_BYTES];
        digest.copy_from_slice(&blake3::hash(&self.key).as_bytes()[..DIGEST_BYTES]);
        self.rows.insert(digest)
    }

    pub fn finish(self) -> RowSet {
        RowSet { rows: self.rows }
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
