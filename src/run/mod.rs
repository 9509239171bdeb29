//! Runs: one pipeline over one split in one language, in a folder that holds everything needed to score it again.
//!
//! In: resources, selected examples, a folder. Out: traces appended as examples end, and at the end what is computed from the
//! folder alone: predictions, verdicts, the summary. A run that was stopped goes on where it ended.

mod estimate;
mod folder;
mod merge;
mod scheduler;
mod summary;

pub use estimate::{Basis, Range, Recorded, RunEstimate, StageEstimate, estimate};
pub use folder::{
    DatabaseRecord, Digests, Errors, ExampleRecord, FORMAT, FolderError, RunFolder, RunRecord, RunStatus, ShardRecord,
    Spent, TemplateRecord, folder_id, spent_in, traced_ids,
};
pub use merge::merge;
pub use scheduler::{Event, Order, RunEnd, Work, execute};
pub use summary::{
    Effort, FinishError, Group, MetricSummary, StageEffort, StageSummary, Summary, finish, score_items, summarise,
    write_verdicts,
};
