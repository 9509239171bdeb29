//! Runs: one pipeline over one split in one language, in a folder that holds everything needed to score it again.
//!
//! In: resources, selected examples, a folder. Out: traces appended as examples end, and at the end what is computed from the
//! folder alone: predictions, verdicts, the summary. A run that was stopped goes on where it ended.

mod folder;
mod scheduler;
mod summary;

pub use folder::{
    DatabaseRecord, Digests, ExampleRecord, FORMAT, FolderError, RunFolder, RunRecord, RunStatus, TemplateRecord,
};
pub use scheduler::{Event, Order, RunEnd, StopSignal, execute};
pub use summary::{Group, MetricSummary, StageSummary, Summary, finish, score_items, summarise, write_verdicts};
