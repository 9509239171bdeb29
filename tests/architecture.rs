//! The rooms of the library import each other along these arrows only (see `src/lib.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Room → rooms it may import. `cli` may import all; nothing may import `cli`.
const ARROWS: &[(&str, &[&str])] = &[
    ("diagnostic", &[]),
    ("language", &[]),
    ("outcome", &[]),
    ("stats", &[]),
    ("sql", &[]),
    ("config", &["diagnostic"]),
    ("dataset", &["diagnostic", "language"]),
    ("engine", &["dataset", "sql"]),
    ("schema", &["config", "dataset", "engine", "sql"]),
    ("prompt", &["config", "diagnostic"]),
    ("llm", &["prompt"]),
    (
        "pipeline",
        &[
            "config", "dataset", "engine", "llm", "outcome", "prompt", "schema", "sql",
        ],
    ),
    ("metric", &["engine", "outcome"]),
    (
        "run",
        &[
            "config", "dataset", "engine", "llm", "metric", "outcome", "pipeline", "prompt", "sql", "stats",
        ],
    ),
    ("report", &["llm", "metric", "outcome", "run", "stats"]),
];

fn rust_files(path: &Path, found: &mut Vec<std::path::PathBuf>) {
    if path.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            rust_files(&entry.unwrap().path(), found);
        }
    } else if path.extension().is_some_and(|extension| extension == "rs") {
        found.push(path.to_owned());
    }
}

#[test]
fn rooms_import_along_the_arrows() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    let mut files = Vec::new();
    rust_files(&source, &mut files);
    let mut rooms = BTreeSet::new();
    let mut wrong = Vec::new();
    for file in files {
        let relative = file.strip_prefix(&source).unwrap();
        let room = relative
            .iter()
            .next()
            .unwrap()
            .to_string_lossy()
            .trim_end_matches(".rs")
            .to_owned();
        if matches!(room.as_str(), "main" | "lib" | "cli") {
            continue;
        }
        let may = allowed
            .get(room.as_str())
            .unwrap_or_else(|| panic!("the room `{room}` is not in the list of arrows"));
        for (number, line) in std::fs::read_to_string(&file).unwrap().lines().enumerate() {
            for part in line
                .split("crate::")
                .skip(1)
                .filter(|_| !line.trim_start().starts_with("//"))
            {
                let to: String = part
                    .chars()
                    .take_while(|letter| letter.is_alphanumeric() || *letter == '_')
                    .collect();
                // A list of imports would hide rooms from this test.
                let hidden = part.starts_with('{');
                if hidden || to != room && !to.is_empty() && !may.contains(&to.as_str()) {
                    wrong.push(format!("{}:{}: {room} → {to}", relative.display(), number + 1));
                }
            }
        }
        rooms.insert(room);
    }
    assert!(
        wrong.is_empty(),
        "arrows that are not in the list:\n{}",
        wrong.join("\n")
    );
    assert_eq!(rooms.len(), ARROWS.len(), "the list names rooms that are gone");
}
