//! Values as the engines return them, with Python's equality: the official evaluators compare Python tuples.

use serde::{Serialize, Serializer};

/// One cell of a result.
#[derive(Debug, Clone)]
pub enum Value {
    Null,
    Integer(i64),
    Real(f64),
    Text(String),
    Blob(Vec<u8>),
}

impl Value {
    /// Bytes that stand for the value in comparisons: two values are equal (as Python compares what `sqlite3` returns)
    /// exactly when these are. Integers and reals that denote one number share their bytes; a number never equals a text.
    pub fn write_key(&self, out: &mut Vec<u8>) {
        match self {
            Value::Null => out.push(0),
            Value::Integer(number) => {
                out.push(1);
                out.extend_from_slice(&number.to_le_bytes());
            }
            Value::Real(number) => match exact_integer(*number) {
                Some(integer) => Value::Integer(integer).write_key(out),
                None => {
                    out.push(2);
                    out.extend_from_slice(&number.to_bits().to_le_bytes());
                }
            },
            Value::Text(text) => write_bytes(3, text.as_bytes(), out),
            Value::Blob(bytes) => write_bytes(4, bytes, out),
        }
    }

    /// Bytes of the content, for the size cap.
    pub fn size(&self) -> usize {
        match self {
            Value::Null => 1,
            Value::Integer(_) | Value::Real(_) => 8,
            Value::Text(text) => text.len(),
            Value::Blob(bytes) => bytes.len(),
        }
    }
}

fn write_bytes(tag: u8, bytes: &[u8], out: &mut Vec<u8>) {
    out.push(tag);
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// The integer that a real denotes, if it is one and fits; `-0.0` is 0.
fn exact_integer(number: f64) -> Option<i64> {
    const TWO_TO_63: f64 = 9_223_372_036_854_775_808.0;
    let whole = number.fract() == 0.0 && (-TWO_TO_63..TWO_TO_63).contains(&number);
    #[expect(clippy::cast_possible_truncation, reason = "checked to be whole and in range")]
    whole.then_some(number as i64)
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        let (mut left, mut right) = (Vec::new(), Vec::new());
        self.write_key(&mut left);
        other.write_key(&mut right);
        left == right
    }
}

impl Serialize for Value {
    /// JSON's own types; a blob as `{"blob": "hex"}`.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Value::Null => serializer.serialize_none(),
            Value::Integer(number) => serializer.serialize_i64(*number),
            Value::Real(number) => serializer.serialize_f64(*number),
            Value::Text(text) => serializer.serialize_str(text),
            Value::Blob(bytes) => {
                use serde::ser::SerializeMap;
                let mut map = serializer.serialize_map(Some(1))?;
                map.serialize_entry("blob", &hex(bytes))?;
                map.end()
            }
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equality_is_pythons() {
        assert_eq!(Value::Integer(1), Value::Real(1.0));
        assert_eq!(Value::Integer(0), Value::Real(-0.0));
        assert_eq!(Value::Null, Value::Null);
        assert_eq!(Value::Real(f64::INFINITY), Value::Real(f64::INFINITY));
        assert_ne!(
            Value::Integer(9_007_199_254_740_993),
            Value::Real(9_007_199_254_740_992.0)
        );
        assert_ne!(Value::Integer(i64::MAX), Value::Real(9_223_372_036_854_775_807.0));
        assert_ne!(Value::Integer(1), Value::Text("1".into()));
        assert_ne!(Value::Text("1".into()), Value::Blob(b"1".to_vec()));
        assert_ne!(Value::Null, Value::Integer(0));
        assert_ne!(Value::Null, Value::Text(String::new()));
        assert_ne!(Value::Text("a ".into()), Value::Text("a".into()));
    }

    #[test]
    fn keys_of_rows_do_not_run_into_each_other() {
        let key = |row: &[Value]| {
            let mut out = Vec::new();
            row.iter().for_each(|value| value.write_key(&mut out));
            out
        };
        let text = |text: &str| Value::Text(text.into());
        assert_ne!(key(&[text("ab"), text("c")]), key(&[text("a"), text("bc")]));
        assert_ne!(
            key(&[Value::Null, Value::Integer(0)]),
            key(&[Value::Integer(0), Value::Null])
        );
    }
}
