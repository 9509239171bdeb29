//! How long `dinsql score` takes for 1,000 real predictions on BIRD's superhero database. Prints figures; see README.md.
//!
//! The predictions are read in place from the benchmark data beside the checkout; without it there is nothing to measure.

#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

mod measure;

use std::collections::HashMap;
use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use measure::{Figure, Measured, dinsql, is_asked_for, measure, print_table, two_cores};

const DATABASE: &str = "superhero";
const PREDICTIONS: usize = 1_000;
/// The first time reads the database from disk, the others from the system's cache.
const REPEATS: usize = 3;

fn main() -> io::Result<()> {
    if !is_asked_for() {
        println!("scoring: measured by `cargo bench` only");
        return Ok(());
    }
    let bird = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/bird");
    if !bird.is_dir() {
        println!("scoring: skipped: ../shared is absent");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let task = Task::write(&bird.canonicalize()?, folder.path())?;
    let mut figures = vec![Figure::new("predictions", task.predictions.to_string(), "1,000")];
    for (name, core) in [("all cores", None), ("one core", two_cores().map(|(core, _)| core))] {
        if name == "one core" && core.is_none() {
            continue;
        }
        let runs: Vec<Measured> = (0..REPEATS).map(|_| task.score(folder.path(), core)).collect();
        let seconds: Vec<String> = runs.iter().map(|run| format!("{:.2}", run.seconds)).collect();
        figures.push(Figure::new(name, format!("{} s", seconds.join(", ")), "under 2 s"));
        if let Some(largest) = runs.iter().max_by_key(|run| run.peak_bytes) {
            figures.push(Figure::new("  peak memory", largest.peak(), ""));
        }
        if let Some(fastest) = runs.iter().min_by(|one, other| one.seconds.total_cmp(&other.seconds)) {
            figures.push(Figure::new("  fastest", fastest.rate(task.predictions), ""));
        }
    }
    print_table(
        "scoring: `dinsql score` on BIRD's superhero database, process start to exit",
        &figures,
    );
    Ok(())
}

/// One data set with an example for each prediction, since one `score` takes one prediction an example.
struct Task {
    manifest: PathBuf,
    predictions_file: PathBuf,
    predictions: usize,
}

impl Task {
    fn write(bird: &Path, folder: &Path) -> io::Result<Task> {
        let gold = HashMap::from([
            ("dev", gold(&bird.join("dev.json"))?),
            ("sqlite", gold(&bird.join("mini_dev_sqlite.json"))?),
        ]);
        let (mut questions, mut predictions, mut count) = (String::new(), String::new(), 0);
        for file in ["predictions.jsonl", "mini_dev_recorded_ex.jsonl"] {
            let text = std::fs::read_to_string(bird.join("predictions").join(file))?;
            for line in text.lines() {
                let record: Json = serde_json::from_str(line)?;
                let found = record["dataset"].as_str().and_then(|dataset| gold.get(dataset));
                let (Some(gold), Some(id), Some(sql)) =
                    (found, record["question_id"].as_i64(), record["predicted_sql"].as_str())
                else {
                    continue;
                };
                let Some(gold) = gold
                    .get(&id)
                    .filter(|_| record["db_id"] == DATABASE && count < PREDICTIONS)
                else {
                    continue;
                };
                let question = json!({
                    "id": count.to_string(),
                    "db": DATABASE,
                    "question": format!("question {id}, prediction {count}"),
                    "gold": gold,
                });
                let _ = writeln!(questions, "{question}");
                let _ = writeln!(predictions, "{}", json!({ "id": count.to_string(), "sql": sql }));
                count += 1;
            }
        }
        let task = Task {
            manifest: folder.join("superhero.yaml"),
            predictions_file: folder.join("predictions.jsonl"),
            predictions: count,
        };
        std::fs::write(folder.join("questions.jsonl"), questions)?;
        std::fs::write(&task.predictions_file, predictions)?;
        let databases = serde_json::to_string(&bird.join("dev_databases"))?;
        std::fs::write(
            &task.manifest,
            format!(
                "format: jsonl\n\
                 language: en\n\
                 questions: questions.jsonl\n\
                 databases: {databases}\n\
                 fields: {{ id: id, database: db, question: question, gold: gold }}\n"
            ),
        )?;
        Ok(task)
    }

    fn score(&self, folder: &Path, core: Option<usize>) -> Measured {
        let mut command = dinsql(folder, core);
        command.args(["score", "--json", "--data"]).arg(&self.manifest);
        command.arg("--predictions").arg(&self.predictions_file);
        command.arg("--cache").arg(folder.join("cache"));
        let measured = measure(&mut command);
        let summary: Json = serde_json::from_slice(&measured.stdout).unwrap_or_default();
        assert_eq!(summary["n"].as_u64(), Some(self.predictions as u64), "{summary}");
        assert_eq!(summary["missing_predictions"].as_u64(), Some(0), "{summary}");
        measured
    }
}

/// The database's gold queries by question.
fn gold(path: &Path) -> io::Result<HashMap<i64, String>> {
    let questions: Vec<Json> = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    Ok(questions
        .iter()
        .filter(|question| question["db_id"] == DATABASE)
        .filter_map(|question| Some((question["question_id"].as_i64()?, question["SQL"].as_str()?.to_owned())))
        .collect())
}
