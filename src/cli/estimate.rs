//! `dinsql run --estimate`: what runs will use and cost, as tables and as JSON; and the question before a dear run.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value as Json, json};

use super::arguments::RunArguments;
use super::exit::{Exit, Failure};
use super::output::{count, table, thousands};
use super::plan::{Ready, resources};
use super::providers::Providers;
use super::settings::Settings;
use crate::config::Price;
use crate::llm::Usd;
use crate::prompt::{Prompts, Tokenizer};
use crate::run::{Basis, Errors, Range, Recorded, RunEstimate, StageEstimate, traced_ids};
use crate::schema::SchemaCache;

/// Dollars above which a run on a terminal asks first, where dinsql.yaml does not say.
const CONFIRM_ABOVE: f64 = 1.0;
const UNKNOWN: &str = "price unknown";

/// A cost that is not known yet, for all prompt tokens at their full price.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CostRange {
    low: Usd,
    likely: Usd,
    high: Usd,
}

impl CostRange {
    fn of(stage: &StageEstimate, price: &Price) -> Option<CostRange> {
        let cost = |prompt: u64, completion: u64| {
            Usd::from_dollars((prompt as f64 * price.input + completion as f64 * price.output) / 1e6)
        };
        let (prompt, completion) = (&stage.prompt_tokens, &stage.completion_tokens);
        Some(CostRange {
            low: cost(prompt.low, completion.low)?,
            likely: cost(prompt.likely, completion.likely)?,
            high: cost(prompt.high, completion.high)?,
        })
    }

    fn add(self, other: CostRange) -> CostRange {
        CostRange {
            low: self.low + other.low,
            likely: self.likely + other.likely,
            high: self.high + other.high,
        }
    }
}

/// Each stage's cost; `None` where its price is unknown.
fn stage_costs(estimate: &RunEstimate, prices: &[Option<Price>]) -> Vec<Option<CostRange>> {
    let prices = prices.iter().copied().chain(std::iter::repeat(None));
    estimate
        .stages
        .iter()
        .zip(prices)
        .map(|(stage, price)| CostRange::of(stage, &price?))
        .collect()
}

/// A sum with an unknown part is unknown.
fn sum(costs: impl IntoIterator<Item = Option<CostRange>>) -> Option<CostRange> {
    costs.into_iter().reduce(|sum, cost| Some(sum?.add(cost?))).flatten()
}

fn all_costs(estimates: &[Estimated]) -> Vec<Option<CostRange>> {
    estimates
        .iter()
        .flat_map(|(_, estimate, prices)| stage_costs(estimate, prices))
        .collect()
}

fn total(stages: &[StageEstimate]) -> StageEstimate {
    StageEstimate {
        stage: "all".into(),
        calls: stages.iter().map(|stage| stage.calls).sum(),
        prompt_tokens: stages.iter().map(|stage| stage.prompt_tokens).sum(),
        completion_tokens: stages.iter().map(|stage| stage.completion_tokens).sum(),
    }
}

/// What all runs together will probably cost; `None` where a price is unknown.
pub fn likely_cost(estimates: &[Estimated]) -> Option<Usd> {
    sum(all_costs(estimates)).map(|cost| cost.likely)
}

/// Writes a table for each run, and what all of them make together.
pub fn show(estimates: &[Estimated]) {
    for (label, estimate, prices) in estimates {
        say!("{label}: {}", count(estimate.n, "example"));
        let costs = stage_costs(estimate, prices);
        let mut rows: Vec<Vec<String>> = estimate
            .stages
            .iter()
            .zip(&costs)
            .map(|(stage, cost)| row(stage, *cost))
            .collect();
        if rows.len() > 1 {
            rows.push(row(&total(&estimate.stages), sum(costs)));
        }
        say!(
            "{}",
            table(&["stage", "calls", "prompt tokens", "completion tokens", "cost"], rows)
        );
        for line in notes(estimate) {
            say!("{line}");
        }
        say!("");
    }
    if estimates.len() > 1 {
        let stages: Vec<StageEstimate> = estimates
            .iter()
            .flat_map(|(_, estimate, _)| estimate.stages.iter().cloned())
            .collect();
        let all = total(&stages);
        say!(
            "{} together: {} calls, {} prompt tokens, {} completion tokens, {}",
            count(estimates.len(), "run"),
            range_text(all.calls),
            range_text(all.prompt_tokens),
            range_text(all.completion_tokens),
            cost_text(sum(all_costs(estimates)))
        );
    }
    say!("not reckoned with: answers that the completion cache has already, retries, discounts for cached prompts");
}

fn row(stage: &StageEstimate, cost: Option<CostRange>) -> Vec<String> {
    vec![
        stage.stage.clone(),
        range_text(stage.calls),
        range_text(stage.prompt_tokens),
        range_text(stage.completion_tokens),
        cost_text(cost),
    ]
}

/// `1,200 (900–2,000)`; the number alone where there is no doubt.
fn range_text(range: Range) -> String {
    if range.low == range.high {
        return thousands(range.likely);
    }
    let [low, likely, high] = [range.low, range.likely, range.high].map(thousands);
    format!("{likely} ({low}–{high})")
}

fn cost_text(cost: Option<CostRange>) -> String {
    match cost {
        None => UNKNOWN.to_owned(),
        Some(cost) if cost.low == cost.high => cost.likely.to_string(),
        Some(cost) => format!("{} ({}–{})", cost.likely, cost.low, cost.high),
    }
}

/// How far the numbers can be trusted.
fn notes(estimate: &RunEstimate) -> Vec<String> {
    let mut notes = Vec::new();
    let mut counted = format!("tokens counted with {}", estimate.tokenizer);
    if !estimate.exact_tokenizer {
        counted.push_str(" (an estimate for this model)");
    }
    if estimate.corrected {
        counted.push_str(", corrected by what the server counted in earlier runs");
    }
    notes.push(counted);
    notes.push(match estimate.basis {
        Basis::Recorded { runs, examples } => format!(
            "answers as in {} of this pipeline ({})",
            count(runs, "earlier run"),
            count(examples, "example")
        ),
        Basis::Modelled => {
            "answers modelled on the gold queries and the templates' worked examples: no earlier run of this pipeline"
                .to_owned()
        }
    });
    if estimate.counted < estimate.n {
        notes.push(format!(
            "from {} of {}, scaled up",
            thousands(estimate.counted as u64),
            count(estimate.n, "example")
        ));
    }
    notes
}

/// The estimates for programs; unknown costs are `null`.
pub fn json(estimates: &[Estimated]) -> Json {
    let runs: Vec<Json> = estimates
        .iter()
        .map(|(label, estimate, prices)| {
            let costs = stage_costs(estimate, prices);
            let stages: Vec<Json> = estimate
                .stages
                .iter()
                .zip(&costs)
                .map(|(stage, cost)| stage_json(stage, *cost))
                .collect();
            let basis = match estimate.basis {
                Basis::Recorded { runs, examples } => json!({ "kind": "recorded", "runs": runs, "examples": examples }),
                Basis::Modelled => json!({ "kind": "modelled" }),
            };
            json!({
                "run": label,
                "n": estimate.n,
                "counted": estimate.counted,
                "tokenizer": estimate.tokenizer,
                "exact_tokenizer": estimate.exact_tokenizer,
                "corrected": estimate.corrected,
                "basis": basis,
                "stages": stages,
                "total": stage_json(&total(&estimate.stages), sum(costs)),
            })
        })
        .collect();
    json!({ "estimates": runs, "cost": cost_json(sum(all_costs(estimates))) })
}

fn stage_json(stage: &StageEstimate, cost: Option<CostRange>) -> Json {
    let range = |range: Range| json!({ "low": range.low, "likely": range.likely, "high": range.high });
    json!({
        "stage": stage.stage,
        "calls": range(stage.calls),
        "prompt_tokens": range(stage.prompt_tokens),
        "completion_tokens": range(stage.completion_tokens),
        "cost": cost_json(cost),
    })
}

fn cost_json(cost: Option<CostRange>) -> Json {
    cost.map_or(
        Json::Null,
        |cost| json!({ "low": cost.low, "likely": cost.likely, "high": cost.high }),
    )
}

/// A run's name, what it will use, and the price of each stage's model, where it is known.
pub type Estimated = (String, RunEstimate, Vec<Option<Price>>);

/// What each run will use. Examples that have a trace already are left out.
pub fn estimate_all(
    ready: &[Ready],
    settings: &Settings,
    prompts: &Arc<Prompts>,
    providers: &Providers,
    arguments: &RunArguments,
) -> Result<Vec<Estimated>, Failure> {
    let schemas = Arc::new(SchemaCache::default());
    let folders = run_folders(&settings.runs);
    let mut records: BTreeMap<&str, Recorded> = BTreeMap::new();
    let mut estimates = Vec::new();
    for run in ready {
        let pipeline = &run.planned.pipeline;
        let recorded = records
            .entry(&pipeline.name)
            .or_insert_with(|| Recorded::read(&folders, pipeline));
        let errors = if arguments.retry_errors {
            Errors::Retry
        } else {
            Errors::Keep
        };
        let done = traced_ids(&run.path, &run.record.identity, errors);
        let examples: Vec<_> = run
            .planned
            .examples()
            .iter()
            .filter(|example| !done.contains(&example.id))
            .cloned()
            .map(Arc::new)
            .collect();
        let resources = resources(run, prompts, &schemas, providers);
        let tokenizer = Tokenizer::for_model(&run.record.model);
        let estimate = crate::run::estimate(&resources, &examples, recorded, &tokenizer)
            .map_err(|error| Failure::new(Exit::Failed, error))?;
        let mut prices = Vec::new();
        for stage in &pipeline.stages {
            let spec = stage.model.over(&pipeline.model);
            let route = providers.router.route(&spec).map_err(Failure::usage)?;
            prices.push(providers.price(&spec, &route.model_name));
        }
        estimates.push((run.label.clone(), estimate, prices));
    }
    Ok(estimates)
}

fn run_folders(runs: &Path) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(runs)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.join("run.json").is_file())
        .collect();
    folders.sort();
    folders
}

/// Asks on a terminal before much money is spent.
pub fn confirm(
    ready: &[Ready],
    arguments: &RunArguments,
    settings: &Settings,
    prompts: &Arc<Prompts>,
    providers: &Providers,
) -> Result<(), Failure> {
    let on_terminal = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if arguments.yes || arguments.json || providers.embedded || !on_terminal {
        return Ok(());
    }
    let estimates = estimate_all(ready, settings, prompts, providers, arguments)?;
    let Some(likely) = likely_cost(&estimates) else {
        return Ok(());
    };
    let threshold = settings.project.confirm_above.unwrap_or(CONFIRM_ABOVE);
    if likely.dollars() <= threshold {
        return Ok(());
    }
    eprint!("this will cost about {likely} (--estimate tells more); go on? [y/N] ");
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    if matches!(
        answer.trim().to_lowercase().as_str(),
        "y" | "yes" | "j" | "ja" | "e" | "evet"
    ) {
        return Ok(());
    }
    Err(Failure::message(Exit::Interrupted, "nothing was started").hint(
        "--yes starts without asking; --max-cost sets a limit; `confirm_above` in dinsql.yaml sets the threshold",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(low: u64, likely: u64, high: u64) -> Range {
        Range { low, likely, high }
    }

    fn estimated(prices: [Option<Price>; 2]) -> Estimated {
        let stage = |name: &str| StageEstimate {
            stage: name.into(),
            calls: range(10, 10, 10),
            prompt_tokens: range(9_000, 10_000, 11_000),
            completion_tokens: range(100, 200, 3_000),
        };
        let estimate = RunEstimate {
            n: 10,
            counted: 10,
            stages: vec![stage("classification"), stage("generation")],
            tokenizer: "o200k_base",
            exact_tokenizer: false,
            corrected: false,
            basis: Basis::Modelled,
        };
        ("din-sql en".into(), estimate, prices.to_vec())
    }

    const PRICE: Price = Price {
        input: 1.0,
        cached_input: None,
        output: 10.0,
    };

    #[test]
    fn a_price_makes_a_range_of_costs() {
        let all = [estimated([Some(PRICE), Some(PRICE)])];
        // Twice 10,000 × $1 + 200 × $10, a million tokens each.
        assert_eq!(likely_cost(&all), Usd::from_dollars(0.024));
        let shown = json(&all);
        assert_eq!(shown["estimates"][0]["stages"][0]["cost"]["high"], json!(0.041));
        assert_eq!(shown["estimates"][0]["total"]["calls"]["likely"], json!(20));
    }

    #[test]
    fn an_unknown_price_is_not_nothing() {
        let all = [estimated([Some(PRICE), None])];
        assert_eq!(likely_cost(&all), None);
        let shown = json(&all);
        assert!(shown["estimates"][0]["stages"][0]["cost"].is_object());
        assert_eq!(shown["estimates"][0]["stages"][1]["cost"], Json::Null);
        assert_eq!(shown["estimates"][0]["total"]["cost"], Json::Null);
        assert_eq!(cost_text(None), UNKNOWN);
    }

    #[test]
    fn ranges_for_people() {
        assert_eq!(range_text(range(5, 5, 5)), "5");
        assert_eq!(range_text(range(900, 1_200, 2_000)), "1,200 (900–2,000)");
        assert!(notes(&estimated([None, None]).1)[0].contains("an estimate for this model"));
    }
}
