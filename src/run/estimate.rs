//! What a run will use, before its first call: calls and tokens of each stage, as ranges.
//!
//! In: what the run draws on, its examples, what earlier runs recorded, a token counter. Out: a [`RunEstimate`]. Prompts are
//! really rendered; what models would have answered in earlier stages comes from recorded runs, else from the gold
//! queries and the templates' worked examples. Knows nothing of prices.

mod modelled;
mod recorded;

use std::collections::HashMap;
use std::sync::Arc;

use indexmap::IndexMap;

use self::modelled::Worked;
pub use self::recorded::Recorded;
use crate::config::pipeline::{ModelSpec, Stage, StageKind};
use crate::dataset::Example;
use crate::pipeline::{ExampleRun, OutputValue, Resources, StageError};
use crate::prompt::{Message, Tokenizer};

/// Examples that are looked at, at most; of more, an even sample of every database's is, and scaled up.
const LOOKED_AT: usize = 5_000;
/// What is left of a counter's uncertainty after it was corrected by a server's counts, as a share.
const CORRECTED: f64 = 0.01;
/// Share of examples that come to a stage at least, where an earlier answer may lack what it needs and no run tells.
const REACHED_AT_LEAST: f64 = 0.8;
/// Where nothing says how long an answer may be.
const LONGEST_ANSWER: f64 = 2048.0;

/// A number that is not known yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Range {
    pub low: u64,
    pub likely: u64,
    pub high: u64,
}

impl std::ops::Add for Range {
    type Output = Range;

    fn add(self, other: Range) -> Range {
        Range {
            low: self.low.saturating_add(other.low),
            likely: self.likely.saturating_add(other.likely),
            high: self.high.saturating_add(other.high),
        }
    }
}

impl std::iter::Sum for Range {
    fn sum<I: Iterator<Item = Range>>(ranges: I) -> Range {
        ranges.fold(Range::default(), |sum, range| sum + range)
    }
}

/// What one stage will use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageEstimate {
    pub stage: String,
    pub calls: Range,
    pub prompt_tokens: Range,
    pub completion_tokens: Range,
}

/// Where the outputs of earlier stages and the lengths of answers come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// Earlier runs of the pipeline: how many, and how many examples they answered.
    Recorded { runs: usize, examples: usize },
    /// Gold queries and worked examples.
    Modelled,
}

/// What a run will use. Answers that the completion cache has already and retries are not reckoned with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunEstimate {
    /// Examples of the run.
    pub n: usize,
    /// Of these, how many were looked at.
    pub counted: usize,
    pub stages: Vec<StageEstimate>,
    /// The vocabulary that tokens were counted with.
    pub tokenizer: &'static str,
    /// Whether it is the model's own.
    pub exact_tokenizer: bool,
    /// Whether counts were corrected by what a server counted in earlier runs.
    pub corrected: bool,
    pub basis: Basis,
}

/// The named outputs of a stage.
type Outputs = IndexMap<String, OutputValue>;

/// A sum of ranges, not yet rounded.
#[derive(Debug, Clone, Copy, Default)]
struct Span {
    low: f64,
    likely: f64,
    high: f64,
}

impl Span {
    fn add(&mut self, other: Span) {
        self.low += other.low;
        self.likely += other.likely;
        self.high += other.high;
    }

    /// The mean of cases and the ends of all.
    fn over_cases(cases: &[(f64, Span)]) -> Span {
        let weights: f64 = cases.iter().map(|(weight, _)| weight).sum();
        if cases.is_empty() || weights <= 0.0 {
            return Span::default();
        }
        Span {
            low: cases.iter().map(|(_, span)| span.low).fold(f64::INFINITY, f64::min),
            likely: cases.iter().map(|(weight, span)| weight * span.likely).sum::<f64>() / weights,
            high: cases.iter().map(|(_, span)| span.high).fold(0.0, f64::max),
        }
    }

    fn rounded(self, low: f64, likely: f64, high: f64) -> Range {
        Range {
            low: whole((self.low * low).floor()),
            likely: whole((self.likely * likely).round()),
            high: whole((self.high * high).ceil()),
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "negative numbers become 0, such beyond all bounds the greatest"
)]
fn whole(number: f64) -> u64 {
    number as u64
}

/// What a run over these examples will use.
///
/// # Errors
/// Where a database cannot be read or a template fails.
pub fn estimate(
    resources: &Resources,
    examples: &[Arc<Example>],
    recorded: &Recorded,
    tokenizer: &Tokenizer,
) -> Result<RunEstimate, StageError> {
    let all_stages = &resources.pipeline.stages;
    let sample = even_sample(examples, LOOKED_AT);
    let mut estimator = Estimator {
        resources,
        recorded,
        tokenizer,
        worked: HashMap::new(),
        examples: examples.len(),
        prompts: vec![Span::default(); all_stages.len()],
        completions: vec![Span::default(); all_stages.len()],
    };
    for example in &sample {
        estimator.walk(example)?;
    }
    let language = examples.first().map_or("", |example| example.language.as_str());
    let correction = recorded.correction(tokenizer.model(), language);
    let factor = correction.unwrap_or(1.0);
    let uncertainty = match correction {
        Some(_) => tokenizer.uncertainty().min(CORRECTED),
        None => tokenizer.uncertainty(),
    };
    let scale = examples.len() as f64 / sample.len().max(1) as f64;
    let stages = all_stages
        .iter()
        .enumerate()
        .map(|(index, stage)| {
            // Examples whose earlier stages failed do not come here.
            let reached = recorded.reached(&stage.name).unwrap_or(1.0);
            let low = match recorded.reached(&stage.name) {
                Some(reached) if reached < 1.0 => 0.9 * reached,
                None if all_stages[..index].iter().any(may_end) => REACHED_AT_LEAST,
                _ => 1.0,
            };
            let all = examples.len() as f64;
            let calls = Span {
                low: all,
                likely: all,
                high: all,
            };
            StageEstimate {
                stage: stage.name.clone(),
                calls: calls.rounded(low, reached, 1.0),
                prompt_tokens: estimator.prompts[index].rounded(
                    scale * factor * low * (1.0 - uncertainty),
                    scale * factor * reached,
                    scale * factor * (1.0 + uncertainty),
                ),
                completion_tokens: estimator.completions[index].rounded(scale * low, scale * reached, scale),
            }
        })
        .collect();
    Ok(RunEstimate {
        n: examples.len(),
        counted: sample.len(),
        stages,
        tokenizer: tokenizer.vocabulary(),
        exact_tokenizer: tokenizer.is_exact(),
        corrected: correction.is_some(),
        basis: recorded.basis(),
    })
}

/// Whether an answer without what the stage looks for ends the example.
fn may_end(stage: &Stage) -> bool {
    stage.extract.values().any(|extractor| extractor.default.is_none())
}

/// At most so many, in even steps through the databases, so that each has its share.
fn even_sample(examples: &[Arc<Example>], most: usize) -> Vec<&Arc<Example>> {
    let mut all: Vec<&Arc<Example>> = examples.iter().collect();
    if all.len() <= most {
        return all;
    }
    all.sort_by(|one, other| one.database.cmp(&other.database));
    (0..most).map(|step| all[step * all.len() / most]).collect()
}

struct Estimator<'a> {
    resources: &'a Resources,
    recorded: &'a Recorded,
    tokenizer: &'a Tokenizer,
    /// By language and template.
    worked: HashMap<(String, String), Arc<Worked>>,
    /// Of the run.
    examples: usize,
    prompts: Vec<Span>,
    completions: Vec<Span>,
}

/// An example between stages.
struct Walk {
    run: ExampleRun,
    /// Outputs that were modelled, not recorded: their texts, and their tokens.
    guesses: Vec<(String, f64)>,
}

/// One way in which a stage may go.
struct Way {
    weight: f64,
    template: String,
    spec: ModelSpec,
    messages: Vec<Message>,
}

impl Estimator<'_> {
    /// Takes an example through all stages.
    fn walk(&mut self, example: &Arc<Example>) -> Result<(), StageError> {
        let resources = self.resources;
        let mut walk = Walk {
            run: ExampleRun::new(Arc::clone(example)),
            guesses: Vec::new(),
        };
        for (index, stage) in resources.pipeline.stages.iter().enumerate() {
            let ways = self.ways(&mut walk, index)?;
            let (mut prompts, mut completions) = (Vec::new(), Vec::new());
            for way in &ways {
                let worked = self.worked(&example.language, stage, way);
                prompts.push((way.weight, self.prompt(&walk, &way.messages)));
                completions.push((way.weight, self.completion(example, stage, way, &worked)));
            }
            self.prompts[index].add(Span::over_cases(&prompts));
            self.completions[index].add(Span::over_cases(&completions));
            if index + 1 == resources.pipeline.stages.len() {
                break;
            }
            let outputs = match self.recorded.outputs(example, &stage.name) {
                Some(known) => known.clone(),
                None => {
                    let template = ways.last().map_or("", |way| way.template.as_str());
                    let outputs = self.guess(example, stage, template, None);
                    walk.guesses.extend(outputs.values().flat_map(texts).map(|text| {
                        let tokens = self.tokenizer.count_text(&text) as f64;
                        (text, tokens)
                    }));
                    outputs
                }
            };
            walk.run.supply(&stage.name, outputs);
        }
        Ok(())
    }

    /// The prompts that a stage may send: one, or one for each case where the label is not known.
    fn ways(&self, walk: &mut Walk, index: usize) -> Result<Vec<Way>, StageError> {
        let resources = self.resources;
        let stage = &resources.pipeline.stages[index];
        let example = Arc::clone(walk.run.example());
        let StageKind::Switch { on, cases } = &stage.kind else {
            return Ok(self.way(walk, index, 1.0)?.into_iter().collect());
        };
        let known = self.recorded.outputs(&example, &on.stage).is_some_and(|outputs| {
            outputs
                .get(&on.output)
                .is_some_and(|label| cases.contains_key(&label.as_text()))
        });
        if known {
            return Ok(self.way(walk, index, 1.0)?.into_iter().collect());
        }
        let shares = self
            .recorded
            .labels(&on.stage, &on.output)
            .filter(|shares| shares.keys().any(|label| cases.contains_key(label)));
        let mut ways = Vec::new();
        for label in cases.keys() {
            let weight = match &shares {
                Some(shares) => shares.get(label).copied().unwrap_or(0.0),
                None => 1.0,
            };
            if weight <= 0.0 {
                continue;
            }
            if let Some(asked) = resources.pipeline.stage(&on.stage)
                && let StageKind::Prompt { template } = &asked.kind
            {
                let outputs = self.guess(&example, asked, template, Some((&on.output, label)));
                walk.run.supply(&asked.name, outputs);
            }
            ways.extend(self.way(walk, index, weight)?);
        }
        Ok(ways)
    }

    /// What a stage would send now; nothing where its label has no case.
    fn way(&self, walk: &Walk, index: usize, weight: f64) -> Result<Option<Way>, StageError> {
        let Ok((template, spec)) = walk.run.choose(self.resources, index) else {
            return Ok(None);
        };
        let messages = walk.run.render(self.resources, index, template)?;
        // Defaults of the provider count too, where there is one.
        let spec = match self.resources.router.route(&spec) {
            Ok(route) => route.spec,
            Err(_) => spec,
        };
        Ok(Some(Way {
            weight,
            template: template.to_owned(),
            spec,
            messages,
        }))
    }

    /// Tokens of a prompt: what was guessed of it may be half as long, or twice.
    fn prompt(&self, walk: &Walk, messages: &[Message]) -> Span {
        let likely = self.tokenizer.count(messages) as f64;
        let last = messages.last().map_or("", |message| message.content.as_str());
        let guessed: f64 = walk
            .guesses
            .iter()
            .filter(|(text, _)| last.contains(text.as_str()))
            .map(|(_, tokens)| tokens)
            .sum();
        Span {
            low: likely - guessed / 2.0,
            likely,
            high: likely + guessed,
        }
    }

    /// Tokens of the answers to one prompt.
    fn completion(&self, example: &Example, stage: &Stage, way: &Way, worked: &Worked) -> Span {
        let cap = way.spec.max_tokens.map_or(LONGEST_ANSWER, f64::from);
        let familiar = self.recorded.outputs(example, &stage.name).is_some();
        let answer = self.recorded.answer(
            self.tokenizer.model(),
            &stage.name,
            &way.template,
            self.examples,
            familiar,
        );
        let one = match answer {
            Some(answer) => answer,
            None => {
                let likely = worked.answer(stage, example, self.tokenizer).min(cap);
                // Small models leave joins out and write half a gold query, or less.
                Span {
                    low: likely / 4.0,
                    likely,
                    high: cap.max(likely),
                }
            }
        };
        let answers = f64::from(way.spec.n.unwrap_or(1).max(1));
        Span {
            low: one.low.min(cap) * answers,
            likely: one.likely.min(cap) * answers,
            high: one.high.min(cap) * answers,
        }
    }

    /// What a stage would have found; with the label, where that is given.
    fn guess(&self, example: &Example, stage: &Stage, template: &str, label: Option<(&str, &str)>) -> Outputs {
        let key = (example.language.clone(), template.to_owned());
        let worked = self.worked.get(&key).map(Arc::as_ref);
        modelled::outputs(example, stage, worked, self.recorded.samples(&stage.name), label)
    }

    fn worked(&mut self, language: &str, stage: &Stage, way: &Way) -> Arc<Worked> {
        let key = (language.to_owned(), way.template.clone());
        let worked = self
            .worked
            .entry(key)
            .or_insert_with(|| Arc::new(Worked::read(stage, &way.messages, self.tokenizer)));
        Arc::clone(worked)
    }
}

/// The texts that a template would show of an output.
fn texts(output: &OutputValue) -> Vec<String> {
    match output {
        OutputValue::List(items) => items.clone(),
        other => Some(other.as_text())
            .filter(|text| !text.is_empty())
            .into_iter()
            .collect(),
    }
}

#[cfg(test)]
mod tests;
