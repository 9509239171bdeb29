//! What earlier runs of a pipeline tell: outputs by example, lengths of answers, labels, and what servers really counted.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use indexmap::IndexMap;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::{Basis, Outputs, Span};
use crate::config::pipeline::{ExtractKind, Pipeline};
use crate::dataset::Example;
use crate::llm::Usage;
use crate::pipeline::OutputValue;
use crate::prompt::{Message, Tokenizer};

/// Traces that are read, at most, those of the newest runs first: enough to learn from, little enough to hold.
const MOST_TRACES: usize = 20_000;
/// Traces of a run whose prompts are counted, to compare with the server's count.
const COUNTED_TRACES: usize = 100;
/// Outputs of a stage that are kept as typical.
const KEPT_SAMPLES: usize = 64;
/// Calls from which a server's way of counting is known.
const ENOUGH_CALLS: u64 = 4;
/// A count further off than this was not made of the prompt.
const PLAUSIBLE: std::ops::Range<f64> = 0.5..2.0;

/// What earlier runs of a pipeline tell of the next one.
#[derive(Debug, Default)]
pub struct Recorded {
    runs: usize,
    traces: usize,
    /// By example, then by stage.
    outputs: HashMap<u64, HashMap<String, Outputs>>,
    stages: HashMap<String, StageRecord>,
    /// Real and counted prompt tokens, by model and language.
    counts: HashMap<(String, String), Counts>,
}

#[derive(Debug, Default)]
struct StageRecord {
    calls: u64,
    /// By model and template.
    answers: BTreeMap<(String, String), Lengths>,
    samples: Vec<Outputs>,
    /// By output and label.
    labels: HashMap<(String, String), u64>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Lengths {
    n: f64,
    sum: f64,
    squares: f64,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    calls: u64,
    real: f64,
    counted: f64,
}

/// `run.json`, as far as it is needed.
#[derive(Deserialize)]
struct RunLine {
    model: String,
    language: String,
    #[serde(default)]
    updated: String,
    pipeline: PipelineLine,
}

#[derive(Deserialize)]
struct PipelineLine {
    name: String,
}

/// A line of `examples.jsonl`.
#[derive(Deserialize)]
struct ExampleLine {
    id: String,
    db: String,
    question: String,
}

/// A line of `traces.jsonl`, with its messages or without.
#[derive(Deserialize)]
#[serde(bound(deserialize = "M: DeserializeOwned + Default"))]
struct TraceLine<M> {
    id: String,
    #[serde(default)]
    stages: Vec<StageLine<M>>,
}

#[derive(Deserialize)]
#[serde(bound(deserialize = "M: DeserializeOwned + Default"))]
struct StageLine<M> {
    stage: String,
    #[serde(default)]
    template: String,
    #[serde(default)]
    messages: M,
    #[serde(default)]
    completion: Option<CompletionLine>,
    #[serde(default)]
    outputs: Outputs,
}

#[derive(Deserialize)]
struct CompletionLine {
    #[serde(default)]
    usage: Usage,
    #[serde(default)]
    alternatives: Vec<IgnoredAny>,
}

impl Recorded {
    /// Reads the runs of a pipeline among some folders, the newest first. Whatever cannot be read teaches nothing.
    pub fn read(folders: &[PathBuf], pipeline: &Pipeline) -> Recorded {
        let mut found: Vec<(RunLine, &PathBuf)> = folders
            .iter()
            .filter_map(|folder| {
                let bytes = std::fs::read(folder.join("run.json")).ok()?;
                let run: RunLine = serde_json::from_slice(&bytes).ok()?;
                (run.pipeline.name == pipeline.name).then_some((run, folder))
            })
            .collect();
        found.sort_by(|(one, _), (other, _)| other.updated.cmp(&one.updated));
        let mut recorded = Recorded::default();
        for (run, folder) in found {
            if recorded.traces >= MOST_TRACES {
                break;
            }
            recorded.read_run(&run, folder, pipeline);
        }
        recorded
    }

    fn read_run(&mut self, run: &RunLine, folder: &Path, pipeline: &Pipeline) {
        let Ok(file) = File::open(folder.join("traces.jsonl")) else {
            return;
        };
        let examples = example_keys(folder, &run.language);
        let tokenizer = Tokenizer::for_model(&run.model);
        let counts_key = (run.model.clone(), run.language.clone());
        let mut lines = BufReader::new(file);
        let mut line = Vec::new();
        let mut read = 0;
        while self.traces < MOST_TRACES {
            line.clear();
            if !matches!(lines.read_until(b'\n', &mut line), Ok(length) if length > 0) {
                break;
            }
            let trace = if read < COUNTED_TRACES {
                let Ok(trace) = serde_json::from_slice::<TraceLine<Vec<Message>>>(&line) else {
                    continue;
                };
                let counts = self.counts.entry(counts_key.clone()).or_default();
                for stage in &trace.stages {
                    counts.add(stage, &tokenizer);
                }
                trace.without_messages()
            } else {
                let Ok(trace) = serde_json::from_slice::<TraceLine<IgnoredAny>>(&line) else {
                    continue;
                };
                trace
            };
            if self.learn(trace, run, &examples, pipeline) {
                read += 1;
                self.traces += 1;
            }
        }
        self.runs += usize::from(read > 0);
    }

    /// Whether the trace was one of this pipeline's.
    fn learn(
        &mut self,
        trace: TraceLine<IgnoredAny>,
        run: &RunLine,
        examples: &HashMap<String, u64>,
        pipeline: &Pipeline,
    ) -> bool {
        let templates = pipeline.templates();
        let mut known = false;
        for stage in trace.stages {
            let Some(form) = pipeline.stage(&stage.stage) else {
                continue;
            };
            if !templates.contains(&(stage.stage.as_str(), stage.template.as_str())) {
                continue;
            }
            known = true;
            let record = self.stages.entry(stage.stage.clone()).or_default();
            record.calls += 1;
            let Some(completion) = stage.completion else { continue };
            if let Some(tokens) = completion.usage.completion {
                let one = tokens as f64 / (completion.alternatives.len() + 1) as f64;
                let lengths = record.answers.entry((run.model.clone(), stage.template)).or_default();
                lengths.n += 1.0;
                lengths.sum += one;
                lengths.squares += one * one;
            }
            // A pipeline whose stage has other outputs by now would miss them.
            if !form.extract.keys().all(|name| stage.outputs.contains_key(name)) {
                continue;
            }
            for (name, extractor) in &form.extract {
                if let (ExtractKind::Label { .. }, OutputValue::Text(label)) = (&extractor.kind, &stage.outputs[name]) {
                    *record.labels.entry((name.clone(), label.clone())).or_default() += 1;
                }
            }
            if record.samples.len() < KEPT_SAMPLES {
                record.samples.push(stage.outputs.clone());
            }
            if let Some(&key) = examples.get(&trace.id) {
                let outputs = self.outputs.entry(key).or_default();
                outputs.entry(stage.stage).or_insert(stage.outputs);
            }
        }
        known
    }

    pub(super) fn basis(&self) -> Basis {
        if self.runs == 0 {
            return Basis::Modelled;
        }
        Basis::Recorded {
            runs: self.runs,
            examples: self.traces,
        }
    }

    /// What a stage found for this very question.
    pub(super) fn outputs(&self, example: &Example, stage: &str) -> Option<&Outputs> {
        let key = question_key(&example.language, &example.database, &example.question);
        self.outputs.get(&key)?.get(stage)
    }

    /// Typical outputs of a stage.
    pub(super) fn samples(&self, stage: &str) -> &[Outputs] {
        self.stages
            .get(stage)
            .map(|record| record.samples.as_slice())
            .unwrap_or_default()
    }

    /// How often each label was given.
    pub(super) fn labels(&self, stage: &str, output: &str) -> Option<IndexMap<String, f64>> {
        let record = self.stages.get(stage)?;
        let shares: IndexMap<String, f64> = record
            .labels
            .iter()
            .filter(|((name, _), _)| name == output)
            .map(|((_, label), &times)| (label.clone(), times as f64))
            .collect();
        (!shares.is_empty()).then_some(shares)
    }

    /// The share of examples that come to a stage.
    pub(super) fn reached(&self, stage: &str) -> Option<f64> {
        let calls = self.stages.get(stage)?.calls;
        (self.traces > 0).then(|| (calls as f64 / self.traces as f64).min(1.0))
    }

    /// Tokens of an answer in a run over so many examples: by the same model, else by all others, which may be far
    /// from it. A familiar question is one that a run has answered.
    pub(super) fn answer(
        &self,
        model: &str,
        stage: &str,
        template: &str,
        examples: usize,
        familiar: bool,
    ) -> Option<Span> {
        let record = self.stages.get(stage)?;
        if let Some(own) = record.answers.get(&(model.to_owned(), template.to_owned())) {
            return own.span(examples, familiar, 1.0);
        }
        let mut all = Lengths::default();
        for ((_, of), lengths) in &record.answers {
            if of == template {
                all.n += lengths.n;
                all.sum += lengths.sum;
                all.squares += lengths.squares;
            }
        }
        all.span(examples, familiar, 2.0)
    }

    /// What counts are to be multiplied with to be the server's.
    pub(super) fn correction(&self, model: &str, language: &str) -> Option<f64> {
        let counts = self.counts.get(&(model.to_owned(), language.to_owned()))?;
        let ratio = counts.real / counts.counted.max(1.0);
        (counts.calls >= ENOUGH_CALLS && PLAUSIBLE.contains(&ratio)).then_some(ratio)
    }
}

impl Lengths {
    /// The mean of the next run, within two deviations; wider by a factor where the model is another.
    fn span(&self, examples: usize, familiar: bool, wider: f64) -> Option<Span> {
        if self.n < 1.0 {
            return None;
        }
        let mean = self.sum / self.n;
        let deviation = (self.squares / self.n - mean * mean).max(0.0).sqrt();
        // The mean of few answers says little, and few answers may be far from it; other questions are of another kind.
        let chance = 2.0 * deviation * (1.0 / self.n + 1.0 / examples.max(1) as f64).sqrt();
        let margin = chance + mean * if familiar { 0.1 } else { 0.25 };
        Some(Span {
            low: (mean - margin).max(1.0).min(mean) / wider,
            likely: mean,
            high: (mean + margin) * wider,
        })
    }
}

impl Counts {
    fn add(&mut self, stage: &StageLine<Vec<Message>>, tokenizer: &Tokenizer) {
        let real = stage.completion.as_ref().and_then(|completion| completion.usage.prompt);
        if let Some(real) = real
            && !stage.messages.is_empty()
        {
            self.calls += 1;
            self.real += real as f64;
            self.counted += tokenizer.count(&stage.messages) as f64;
        }
    }
}

impl TraceLine<Vec<Message>> {
    fn without_messages(self) -> TraceLine<IgnoredAny> {
        let stages = self.stages.into_iter().map(|stage| StageLine {
            stage: stage.stage,
            template: stage.template,
            messages: IgnoredAny,
            completion: stage.completion,
            outputs: stage.outputs,
        });
        TraceLine {
            id: self.id,
            stages: stages.collect(),
        }
    }
}

/// A question is the same in whatever dataset it stands.
fn question_key(language: &str, database: &str, question: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    (language, database, question).hash(&mut hasher);
    hasher.finish()
}

/// By id, the questions of a run.
fn example_keys(folder: &Path, language: &str) -> HashMap<String, u64> {
    let Ok(file) = File::open(folder.join("examples.jsonl")) else {
        return HashMap::new();
    };
    BufReader::new(file)
        .lines()
        .map_while(Result::ok)
        .filter_map(|line| serde_json::from_str::<ExampleLine>(&line).ok())
        .map(|line| (line.id, question_key(language, &line.db, &line.question)))
        .collect()
}
