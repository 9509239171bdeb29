use std::path::PathBuf;
use std::sync::Arc;
use crate::config::pipeline::Pipeline;
use crate::dataset::Example;
use crate::pipeline::{Resources, StageError};
pub struct Range { pub low: u64, pub likely: u64, pub high: u64 }
pub struct StageEstimate { pub stage: String, pub calls: Range, pub prompt_tokens: Range, pub completion_tokens: Range }
pub enum Basis { Modelled }
pub struct RunEstimate { pub n: usize, pub stages: Vec<StageEstimate>, pub exact_tokenizer: bool, pub basis: Basis }
pub struct Recorded;
impl Recorded { pub fn read(_: &[PathBuf], _: &Pipeline) -> Self { Recorded } }
pub fn estimate(_: &Resources, _: &[Arc<Example>], _: &Recorded, _: &crate::prompt::Tokenizer) -> Result<RunEstimate, StageError> { Ok(RunEstimate { n: 0, stages: Vec::new(), exact_tokenizer: false, basis: Basis::Modelled }) }
