use super::run::Estimated;
use crate::llm::Usd;
pub fn show(_: &[Estimated]) {}
pub fn json(_: &[Estimated]) -> serde_json::Value { serde_json::Value::Null }
pub fn likely_cost(_: &[Estimated]) -> Option<Usd> { None }
