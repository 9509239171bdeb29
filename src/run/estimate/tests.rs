use std::path::Path;

use super::*;
use crate::config::load_pipeline;
use crate::dataset::{self, LoadOptions};
use crate::engine::build_database;
use crate::pipeline::{Router, Trace};
use crate::prompt::{Prompts, Role, TemplateStore};

const EMBEDDED: &str = "qwen2.5-coder-0.5b-instruct";

/// The sample data in one language, with the databases built in a folder.
fn sample(pipeline: &str, language: &str, folder: &Path) -> (Resources, Vec<Arc<Example>>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = root.join(format!("pipelines/{pipeline}.yaml"));
    let pipeline = load_pipeline(
        "pipeline.yaml",
        &std::fs::read(file).unwrap(),
        &[],
        &TemplateStore::Embedded,
    )
    .unwrap();
    let source = dataset::resolve("sample", &[root.join("datasets")], &[]).unwrap();
    let options = LoadOptions {
        language: Some(language.into()),
        split: None,
    };
    let mut data = dataset::load(&source, &options).unwrap();
    for database in data.databases.values_mut() {
        database.path = build_database(&database.path.with_extension("sql"), folder).unwrap();
    }
    let resources = Resources {
        pipeline,
        prompts: Arc::new(Prompts::new(TemplateStore::Embedded)),
        schemas: Arc::default(),
        router: Arc::new(Router {
            providers: std::collections::BTreeMap::new(),
            default: String::new(),
            overrides: ModelSpec::default(),
        }),
        dialect: data.dialect,
        databases: data.databases,
        repeat: 0,
        run: String::new(),
    };
    (resources, data.examples.into_iter().map(Arc::new).collect())
}

/// Prompt tokens of the examples s012 and s036, as llama.cpp's server counted them for the embedded model.
const REAL: [(&str, &str, u64); 6] = [
    ("zero-shot", "en", 1_574),
    ("zero-shot", "tr", 1_973),
    ("zero-shot", "de", 1_804),
    ("din-sql", "en", 8_880),
    ("din-sql", "tr", 11_674),
    ("din-sql", "de", 10_539),
];

#[test]
fn estimates_are_near_what_the_embedded_model_counted() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = Tokenizer::for_model(EMBEDDED);
    for (pipeline, language, real) in REAL {
        let (resources, examples) = sample(pipeline, language, folder.path());
        let two: Vec<_> = examples
            .into_iter()
            .filter(|example| matches!(example.id.as_str(), "s012" | "s036"))
            .collect();
        let found = estimate(&resources, &two, &Recorded::default(), &tokenizer).unwrap();
        let prompt: Range = found.stages.iter().map(|stage| stage.prompt_tokens).sum();
        let completion: Range = found.stages.iter().map(|stage| stage.completion_tokens).sum();
        let off = prompt.likely as f64 / real as f64 - 1.0;
        let allowed = if pipeline == "zero-shot" { 0.10 } else { 0.15 };
        assert!(off.abs() < allowed, "{pipeline} {language}: {prompt:?}, really {real}");
        assert!(
            (prompt.low..=prompt.high).contains(&real),
            "{pipeline} {language}: {prompt:?}, really {real}"
        );
        assert_eq!(found.basis, Basis::Modelled);
        assert!(completion.likely > 0 && completion.likely < completion.high);
    }
}

fn write_run(folder: &Path, resources: &Resources, traces: &[Trace], examples: &[Arc<Example>]) {
    std::fs::create_dir_all(folder).unwrap();
    let run = serde_json::json!({
        "model": EMBEDDED, "language": "en", "pipeline": { "name": resources.pipeline.name }, "unknown": 1
    });
    std::fs::write(folder.join("run.json"), run.to_string()).unwrap();
    let lines = |values: Vec<serde_json::Value>| values.iter().map(|value| format!("{value}\n")).collect::<String>();
    let known = examples.iter().map(|example| {
        serde_json::json!({ "id": example.id, "position": 0, "db": example.database, "question": example.question, "gold": [] })
    });
    std::fs::write(folder.join("examples.jsonl"), lines(known.collect())).unwrap();
    let traced = traces.iter().map(|trace| serde_json::to_value(trace).unwrap());
    // The last line is torn, and one is not ours.
    let text = lines(traced.collect()) + "{\"id\": 3}\n{\"id\": \"s0";
    std::fs::write(folder.join("traces.jsonl"), text).unwrap();
}

/// A trace of one example, all of whose labels are EASY and whose server counts a tenth more than the tokenizer.
fn trace(resources: &Resources, example: &Arc<Example>, tokenizer: &Tokenizer) -> Trace {
    let mut run = ExampleRun::new(Arc::clone(example));
    let mut stages = Vec::new();
    for (index, stage) in resources.pipeline.stages.iter().enumerate() {
        let template = run.choose(resources, index).unwrap().0.to_owned();
        let messages = run.render(resources, index, &template).unwrap();
        let outputs = modelled::outputs(example, stage, None, &[], Some(("label", "EASY")));
        run.supply(&stage.name, outputs.clone());
        let counted = tokenizer.count(&messages) * 11 / 10;
        stages.push(serde_json::json!({
            "stage": stage.name, "template": template, "messages": messages, "outputs": outputs,
            "completion": { "text": "", "latency_ms": 1, "usage": { "prompt": counted, "completion": 30 } }
        }));
    }
    let trace =
        serde_json::json!({ "id": example.id, "db": example.database, "outcome": "answered", "stages": stages });
    serde_json::from_value(trace).unwrap()
}

#[test]
fn earlier_runs_replace_guesses_and_correct_counts() {
    let folder = tempfile::tempdir().unwrap();
    let (resources, examples) = sample("din-sql", "en", folder.path());
    let examples = &examples[..6];
    let tokenizer = Tokenizer::for_model(EMBEDDED);
    let traces: Vec<Trace> = examples
        .iter()
        .map(|example| trace(&resources, example, &tokenizer))
        .collect();
    let runs = folder.path().join("runs");
    write_run(&runs.join("one"), &resources, &traces, examples);
    std::fs::create_dir_all(runs.join("foreign")).unwrap();
    std::fs::write(runs.join("foreign/run.json"), "{}").unwrap();
    let folders = ["one", "foreign", "missing"].map(|name| runs.join(name));
    let recorded = Recorded::read(&folders, &resources.pipeline);
    let found = estimate(&resources, examples, &recorded, &tokenizer).unwrap();
    assert_eq!(found.basis, Basis::Recorded { runs: 1, examples: 6 });
    assert!(found.corrected);
    let real: u64 = traces
        .iter()
        .flat_map(|trace| &trace.stages)
        .filter_map(|stage| stage.completion.as_ref()?.usage.prompt)
        .sum();
    let prompt: Range = found.stages.iter().map(|stage| stage.prompt_tokens).sum();
    assert!(prompt.likely.abs_diff(real) <= real / 100, "{prompt:?}, really {real}");
    for stage in &found.stages {
        assert_eq!(
            stage.calls,
            Range {
                low: 6,
                likely: 6,
                high: 6
            }
        );
        assert_eq!(stage.completion_tokens.likely, 180, "{stage:?}");
    }
    // Another model counts in its own way.
    let other = estimate(&resources, examples, &recorded, &Tokenizer::for_model("gpt-4o")).unwrap();
    assert!(!other.corrected);
    assert!(other.stages[0].completion_tokens.high > found.stages[0].completion_tokens.high);
}

#[test]
fn a_sample_is_even() {
    let folder = tempfile::tempdir().unwrap();
    let (_, examples) = sample("zero-shot", "en", folder.path());
    let chosen = even_sample(&examples, 30);
    assert_eq!(chosen.len(), 30);
    let share = |of: Vec<&Arc<Example>>, database: &str| {
        let there = of.iter().filter(|example| example.database == database).count();
        there as f64 / of.len() as f64
    };
    for database in ["countries", "cantons", "elements"] {
        let whole = share(examples.iter().collect(), database);
        assert!((share(chosen.clone(), database) - whole).abs() < 0.05, "{database}");
    }
    assert_eq!(even_sample(&examples, 500).len(), examples.len());
}

#[test]
fn worked_answers_give_labels_their_outputs() {
    let folder = tempfile::tempdir().unwrap();
    let (resources, examples) = sample("din-sql", "en", folder.path());
    let stage = &resources.pipeline.stages[1];
    let mut run = ExampleRun::new(Arc::clone(&examples[0]));
    let links = modelled::outputs(&examples[0], &resources.pipeline.stages[0], None, &[], None);
    run.supply("schema_linking", links);
    let messages = run.render(&resources, 1, "din-sql/classification").unwrap();
    assert_eq!(
        messages
            .iter()
            .filter(|message| message.role == Role::Assistant)
            .count(),
        3
    );
    let worked = Worked::read(stage, &messages, &Tokenizer::for_model(EMBEDDED));
    let questions = |label: &str| {
        let outputs = modelled::outputs(&examples[0], stage, Some(&worked), &[], Some(("label", label)));
        assert_eq!(outputs["label"].as_text(), label);
        texts(&outputs["sub_questions"]).len()
    };
    assert_eq!(questions("NESTED"), 1);
    assert_eq!(questions("EASY"), 0);
}

#[test]
fn later_stages_are_not_certain_to_be_reached() {
    let folder = tempfile::tempdir().unwrap();
    let (resources, examples) = sample("din-sql", "en", folder.path());
    let tokenizer = Tokenizer::for_model(EMBEDDED);
    let found = estimate(&resources, &examples[..10], &Recorded::default(), &tokenizer).unwrap();
    // Only the query has no default: where it is missing, the last stage is not asked.
    let least: Vec<u64> = found.stages.iter().map(|stage| stage.calls.low).collect();
    assert_eq!(least, [10, 10, 10, 8]);
    assert!(
        found
            .stages
            .iter()
            .all(|stage| stage.calls.likely == 10 && stage.calls.high == 10)
    );
}

#[test]
fn few_or_unfamiliar_questions_widen_the_range() {
    let folder = tempfile::tempdir().unwrap();
    let (resources, examples) = sample("din-sql", "en", folder.path());
    let tokenizer = Tokenizer::for_model(EMBEDDED);
    let traces: Vec<Trace> = examples[..6]
        .iter()
        .map(|example| trace(&resources, example, &tokenizer))
        .collect();
    let run = folder.path().join("run");
    write_run(&run, &resources, &traces, &examples[..6]);
    let recorded = Recorded::read(&[run], &resources.pipeline);
    // All answers were equally long, so that only the question makes a difference.
    let highest = |example: &Arc<Example>| {
        let found = estimate(&resources, std::slice::from_ref(example), &recorded, &tokenizer).unwrap();
        assert_eq!(found.stages[0].completion_tokens.likely, 30);
        found.stages[0].completion_tokens.high
    };
    assert_eq!(highest(&examples[0]), 33);
    assert_eq!(highest(&examples[20]), 38);
}
