//! What the tests through the real binary share: a server, a folder with a small dataset, and answers that are right.

#![allow(dead_code, reason = "each test file is a crate of its own and needs a part of this")]

pub mod faults;
pub mod server;

use std::collections::HashMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use regex::Regex;
use serde_json::{Value as Json, json};
use tempfile::TempDir;

pub use server::{Reply, Server, last_user_message};

/// Long enough for a machine that is busy with other things; nothing that works comes near it.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// An example whose right answer the oracle knows.
#[derive(Debug, Clone)]
pub struct Known {
    pub id: String,
    pub database: &'static str,
    pub question: String,
    pub gold: String,
    pub difficulty: &'static str,
}

/// The tiny dataset: two databases, three degrees of difficulty, parallel in English and Turkish.
/// Id, database, difficulty, English, Turkish, gold.
const TINY: &[[&str; 6]] = &[
    [
        "c1",
        "cafe",
        "simple",
        "How many drinks are on the menu?",
        "Menüde kaç içecek var?",
        "SELECT COUNT(*) FROM drink",
    ],
    [
        "c2",
        "cafe",
        "moderate",
        "Which drinks were sold on 2024-05-01?",
        "2024-05-01 günü hangi içecekler satıldı?",
        "SELECT DISTINCT drink.name FROM sale JOIN drink ON sale.drink_id = drink.id WHERE sale.day = '2024-05-01'",
    ],
    [
        "c3",
        "cafe",
        "challenging",
        "Which drinks cost more than the average drink?",
        "Hangi içecekler ortalamadan daha pahalı?",
        "SELECT name FROM drink WHERE price_cents > (SELECT AVG(price_cents) FROM drink)",
    ],
    [
        "v1",
        "valley",
        "simple",
        "What is the name of the longest river?",
        "En uzun nehrin adı nedir?",
        "SELECT name FROM river ORDER BY length_km DESC LIMIT 1",
    ],
    [
        "v2",
        "valley",
        "moderate",
        "How many towns lie on each river?",
        "Her nehrin kıyısında kaç şehir var?",
        "SELECT river.name, COUNT(*) FROM river JOIN town ON town.river_id = river.id GROUP BY river.id",
    ],
    [
        "v3",
        "valley",
        "challenging",
        "Which rivers have no town?",
        "Hangi nehirlerin kıyısında şehir yok?",
        "SELECT name FROM river WHERE id NOT IN (SELECT river_id FROM town)",
    ],
];

const CAFE: &str = "
    CREATE TABLE drink (id INTEGER PRIMARY KEY, name TEXT NOT NULL, price_cents INTEGER, kind TEXT);
    CREATE TABLE sale (id INTEGER PRIMARY KEY, drink_id INTEGER REFERENCES drink(id), day TEXT, amount INTEGER);
    INSERT INTO drink VALUES (1, 'Espresso', 250, 'coffee'), (2, 'Ayran', 300, 'yoghurt'), (3, 'Çay', 200, 'tea'),
        (4, 'Chai latte', 480, 'tea');
    INSERT INTO sale VALUES (1, 1, '2024-05-01', 2), (2, 3, '2024-05-01', 1), (3, 4, '2024-05-02', 1), (4, 1, '2024-05-01', 1);
";
const VALLEY: &str = "
    CREATE TABLE river (id INTEGER PRIMARY KEY, name TEXT NOT NULL, length_km REAL);
    CREATE TABLE town (id INTEGER PRIMARY KEY, name TEXT NOT NULL, river_id INTEGER REFERENCES river(id), population INTEGER);
    INSERT INTO river VALUES (1, 'Ova', 41.5), (2, 'Göksu', 260), (3, 'Lind', 12);
    INSERT INTO town VALUES (1, 'Altdorf', 1, 9000), (2, 'Silifke', 2, 120000), (3, 'Mut', 2, 63000);
";

/// How a command ended.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    pub fn from(output: &std::process::Output) -> Self {
        Ran {
            code: output.status.code(),
            out: String::from_utf8(output.stdout.clone()).expect("UTF-8 on standard output"),
            err: String::from_utf8(output.stderr.clone()).expect("UTF-8 on standard error"),
        }
    }

    /// The one JSON object on standard output.
    #[track_caller]
    pub fn json(&self) -> Json {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }

    /// Fails the test unless the command ended so.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }
}

/// A folder of its own for a test, with a small dataset, which commands run in.
pub struct Workspace {
    folder: TempDir,
}

impl Workspace {
    /// With the dataset `tiny` in `datasets/`.
    pub fn new() -> Self {
        let workspace = Workspace {
            folder: tempfile::tempdir().expect("a temporary folder"),
        };
        workspace.database("datasets/tiny/databases/cafe/cafe.sqlite", CAFE);
        workspace.database("datasets/tiny/databases/valley/valley.sqlite", VALLEY);
        workspace.write("datasets/tiny/en.jsonl", questions_file(&tiny("en")));
        workspace.write("datasets/tiny/tr.jsonl", questions_file(&tiny("tr")));
        workspace.write(
            "datasets/tiny.yaml",
            "name: tiny\n\
             description: A café and a valley\n\
             format: jsonl\n\
             databases: tiny/databases\n\
             fields: { id: id, question: question, gold: gold, database: db, difficulty: difficulty }\n\
             languages:\n\
             \x20 en: { questions: tiny/en.jsonl }\n\
             \x20 tr: { questions: tiny/tr.jsonl }\n",
        );
        workspace
    }

    /// Adds the dataset `many`: numbered English questions, each with an answer of its own.
    pub fn many(&self, count: usize) -> Vec<Known> {
        let mut sql = "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT);".to_owned();
        let mut known = Vec::new();
        for number in 0..count {
            let _ = write!(sql, "INSERT INTO item VALUES ({number}, 'item number {number}');");
            known.push(Known {
                id: format!("q{number:03}"),
                database: "stock",
                question: format!("What is the name of item {number}?"),
                gold: format!("SELECT name FROM item WHERE id = {number}"),
                difficulty: if number % 3 == 0 { "moderate" } else { "simple" },
            });
        }
        self.database("datasets/many/databases/stock/stock.sqlite", &sql);
        self.dataset("many", &known);
        known
    }

    /// Adds an English dataset of these examples; its databases lie in `datasets/NAME/databases`.
    pub fn dataset(&self, name: &str, known: &[Known]) {
        self.write(&format!("datasets/{name}/questions.jsonl"), questions_file(known));
        self.write(
            &format!("datasets/{name}.yaml"),
            format!(
                "name: {name}\nformat: jsonl\nlanguage: en\nquestions: {name}/questions.jsonl\ndatabases: {name}/databases\n\
                 fields: {{ id: id, question: question, gold: gold, database: db, difficulty: difficulty }}\n"
            ),
        );
    }

    /// Makes a SQLite file.
    pub fn database(&self, path: &str, sql: &str) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        let _ = std::fs::remove_file(&path);
        let connection = rusqlite::Connection::open(&path).expect("a database");
        connection
            .execute_batch(&format!("BEGIN; {sql} COMMIT;"))
            .expect("valid SQL");
    }

    pub fn root(&self) -> &Path {
        self.folder.path()
    }

    pub fn path(&self, relative: &str) -> PathBuf {
        self.folder.path().join(relative)
    }

    pub fn write(&self, path: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        std::fs::write(&path, content).expect("a file");
        path
    }

    pub fn read(&self, path: &str) -> String {
        read(&self.path(path))
    }

    /// The binary, in this folder, with nothing of the surroundings but PATH.
    pub fn command(&self) -> std::process::Command {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_dinsql"));
        command
            .current_dir(self.root())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.path("home"))
            .env("DINSQL_TEST_RETRY_MS", "1")
            .env("DINSQL_RUNS_DIR", "runs")
            .env("DINSQL_CACHE", "cache");
        command
    }

    pub fn dinsql(&self) -> assert_cmd::Command {
        let mut command = assert_cmd::Command::from_std(self.command());
        command.timeout(PATIENCE);
        command
    }

    /// Runs a command to its end.
    #[track_caller]
    pub fn call(&self, arguments: &[&str]) -> Ran {
        Ran::from(&self.dinsql().args(arguments).output().expect("the binary runs"))
    }

    /// `dinsql run` against a server.
    #[track_caller]
    pub fn run(&self, server: &Server, arguments: &[&str]) -> Ran {
        self.call(&[&["run"], arguments, &at(server)[..]].concat())
    }

    /// `dinsql run` in the background.
    pub fn start(&self, server: &Server, arguments: &[&str]) -> Background {
        Background::spawn(self.command().args([&["run"], arguments, &at(server)[..]].concat()))
    }

    /// The one run folder whose name begins so.
    #[track_caller]
    pub fn run_folder(&self, start: &str) -> PathBuf {
        run_folder(&self.path("runs"), start)
    }

    /// Text without what differs from machine to machine and from day to day.
    pub fn redact(&self, text: &str) -> String {
        let mut text = text.to_owned();
        let canonical = self.root().canonicalize().unwrap_or_else(|_| self.root().to_owned());
        for (place, name) in [
            (self.root(), "[temp]"),
            (canonical.as_path(), "[temp]"),
            (Path::new(env!("CARGO_MANIFEST_DIR")), "[repo]"),
        ] {
            text = text.replace(&*place.to_string_lossy(), name);
        }
        for (pattern, replacement) in [
            (r"127\.0\.0\.1:\d+", "127.0.0.1:[port]"),
            (r"\.[0-9a-f]{8}\b", ".[identity]"),
            (r"\b[0-9a-f]{12,64}\b", "[digest]"),
            (r" in \d+(\.\d+)? (ms|s|min|h)\b( \d+ s)?", " in [time]"),
            (r"\b\d+(\.\d+)? completion tokens/s", "[speed] completion tokens/s"),
            (
                r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)",
                "[timestamp]",
            ),
        ] {
            text = Regex::new(pattern)
                .expect("a valid pattern")
                .replace_all(&text, replacement)
                .into_owned();
        }
        text.replace(concat!("dinsql ", env!("CARGO_PKG_VERSION")), "dinsql [version]")
    }

    /// An exit code and what was said on standard error, for a snapshot.
    pub fn complaint(&self, ran: &Ran) -> String {
        let code = ran.code.map_or_else(|| "none".to_owned(), |code| code.to_string());
        format!("exit code {code}\n{}", self.redact(&ran.err))
    }
}

/// A process that is killed where a test forgets it.
pub struct Background(Option<Child>);

impl Background {
    /// Starts a command with its output kept.
    pub fn spawn(command: &mut std::process::Command) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        Background(Some(child))
    }

    pub fn id(&self) -> u32 {
        self.0.as_ref().expect("a running process").id()
    }

    /// SIGKILL: nothing can be tidied up.
    pub fn kill(mut self) {
        let mut child = self.0.take().expect("a running process");
        child.kill().expect("it can be killed");
        child.wait().expect("it ends");
    }

    /// Waits for the end.
    #[track_caller]
    pub fn end(mut self) -> Ran {
        let mut child = self.0.take().expect("a running process");
        let until = Instant::now() + PATIENCE;
        while child.try_wait().expect("its status").is_none() {
            if Instant::now() > until {
                let _ = child.kill();
                panic!("the process did not end");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ran::from(&child.wait_with_output().expect("its output"))
    }

    pub fn is_running(&mut self) -> bool {
        let child = self.0.as_mut().expect("a running process");
        child.try_wait().expect("its status").is_none()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Polls until something holds.
#[track_caller]
pub fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Arguments that send a command to a server.
pub fn at(server: &Server) -> [&str; 4] {
    ["--base-url", &server.url, "--model", "tester"]
}

/// The examples of the tiny dataset in a language.
pub fn tiny(language: &str) -> Vec<Known> {
    TINY.iter()
        .map(|[id, database, difficulty, english, turkish, gold]| Known {
            id: (*id).into(),
            database,
            question: (*if language == "tr" { turkish } else { english }).into(),
            gold: (*gold).into(),
            difficulty,
        })
        .collect()
}

/// The tiny dataset's examples in both languages.
pub fn both() -> Vec<Known> {
    [tiny("en"), tiny("tr")].concat()
}

fn questions_file(known: &[Known]) -> String {
    known.iter().fold(String::new(), |mut text, example| {
        let record = json!({
            "id": example.id,
            "db": example.database,
            "question": example.question,
            "gold": example.gold,
            "difficulty": example.difficulty,
        });
        let _ = writeln!(text, "{record}");
        text
    })
}

/// Right answers, in the form in which each stage of the shipped pipelines wants them: what the system message asks for
/// decides.
pub fn oracle(known: &[Known]) -> impl Fn(&Json, usize) -> Reply + Send + Sync + 'static {
    let by_question: HashMap<String, Known> = known
        .iter()
        .map(|known| (known.question.clone(), known.clone()))
        .collect();
    move |body, _| match find(&by_question, last_user_message(body)) {
        Some(known) => Reply::Text(right_answer(body, known)),
        None => Reply::error(
            400,
            "unknown_question",
            &format!("the oracle does not know this: {}", last_user_message(body)),
        ),
    }
}

/// The oracle's answer to a request about an example.
pub fn right_answer(body: &Json, known: &Known) -> String {
    let system = body["messages"][0]["content"].as_str().unwrap_or_default();
    let gold = &known.gold;
    if system.contains("Revised_SQL:") {
        return format!("Revised_SQL: {gold}");
    }
    if system.contains("Schema_links:") {
        return format!("The tables are plain to see.\nSchema_links: [{}.id]", known.database);
    }
    if system.contains("Label:") {
        let label = match known.difficulty {
            "simple" => "EASY",
            "moderate" => "NON-NESTED",
            _ => "NESTED",
        };
        let sub_questions = if label == "NESTED" {
            "\nsub_questions: [\"What must be known first?\"]"
        } else {
            ""
        };
        return format!("It is clear.\nLabel: \"{label}\"{sub_questions}");
    }
    if system.contains("SQL:") {
        return format!("Some reasoning.\nSQL: {gold}");
    }
    gold.clone()
}

/// The question stands on a line of its own, after a word such as `Question:`.
fn find<'a>(known: &'a HashMap<String, Known>, message: &str) -> Option<&'a Known> {
    let by_line = message.lines().rev().find_map(|line| {
        known
            .get(line)
            .or_else(|| known.get(line.split_once(": ").map_or("", |(_, question)| question)))
    });
    by_line.or_else(|| known.values().find(|known| message.contains(&known.question)))
}

#[track_caller]
pub fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[track_caller]
pub fn read_json(path: &Path) -> Json {
    serde_json::from_str(&read(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A JSON value a line.
#[track_caller]
pub fn read_lines(path: &Path) -> Vec<Json> {
    read(path)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{}: {error}: {line}", path.display())))
        .collect()
}

/// A field of each line.
#[track_caller]
pub fn column(path: &Path, field: &str) -> Vec<String> {
    read_lines(path)
        .iter()
        .map(|line| line[field].as_str().unwrap_or_default().to_owned())
        .collect()
}

/// The one folder whose name begins so.
#[track_caller]
pub fn run_folder(runs: &Path, start: &str) -> PathBuf {
    let mut found: Vec<PathBuf> = std::fs::read_dir(runs)
        .unwrap_or_else(|error| panic!("{}: {error}", runs.display()))
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(start))
        })
        .collect();
    assert_eq!(found.len(), 1, "folders of {start} in {}: {found:?}", runs.display());
    found.remove(0)
}

/// Every file below a folder.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                open.push(path);
            } else {
                found.push(path);
            }
        }
    }
    found
}
