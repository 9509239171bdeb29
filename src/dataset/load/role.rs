//! Which field holds a part of an example, and where that field was missing.

use serde_json::Value;

use super::record::{Place, Values, lookup};

/// What a part of an example needs of its field.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// In every record.
    Always,
    /// In every record, or in none.
    AllOrNone,
    /// In one record at least, since the manifest names it.
    Somewhere,
    Never,
}

/// A field that holds a part of an example, and where it was missing.
pub(super) struct Role {
    pub part: &'static str,
    pub key: Option<String>,
    pub need: Need,
    pub seen: usize,
    pub missing: Vec<(usize, Place)>,
}

impl Role {
    pub fn new(
        part: &'static str,
        named: Option<&String>,
        default: Option<&String>,
        by_default: Need,
        if_named: Need,
    ) -> Role {
        let need = if named.is_some() { if_named } else { by_default };
        Role {
            part,
            key: named.or(default).cloned(),
            need,
            seen: 0,
            missing: Vec::new(),
        }
    }

    pub fn value<'a>(&mut self, values: &'a Values, position: usize, place: Place) -> Option<&'a Value> {
        let value = lookup(values, self.key.as_deref()?);
        match value {
            Some(_) => self.seen += 1,
            None => self.missing.push((position, place)),
        }
        value.filter(|value| !value.is_null())
    }
}
