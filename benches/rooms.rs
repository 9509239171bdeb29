//! What single steps of an example cost inside dinsql: rendering, the request's key, finding the SQL, comparing rows, the
//! completion cache. Measured by criterion; see README.md.

use std::fmt::Write;
use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use futures::future::join_all;
use minijinja::context;

use dinsql::engine::Value;
use dinsql::llm::cache::Cache;
use dinsql::llm::{Completion, Request, Usage};
use dinsql::metric::{RowSet, execution_accuracy};
use dinsql::prompt::{Message, Prompts, Role, TemplateStore};
use dinsql::sql::extract::{Occurrence, extract_sql};

/// Bytes of a prompt with a middling schema.
const PROMPT: usize = 5_000;
/// Calls that wait for the cache together in a run of usual concurrency.
const TOGETHER: usize = 64;

/// `CREATE TABLE` statements of at least so many bytes.
fn schema(bytes: usize) -> String {
    let mut text = String::new();
    let mut number = 0;
    while text.len() < bytes {
        number += 1;
        let _ = writeln!(
            text,
            "CREATE TABLE table_{number} (\n  id INTEGER PRIMARY KEY,\n  name TEXT NOT NULL,\n  \
             opened_on TEXT, -- day in ISO 8601\n  parent_id INTEGER REFERENCES table_1 (id)\n);"
        );
    }
    text
}

fn request() -> Request {
    let message = |role, content: String| Message { role, content };
    let messages = vec![
        message(
            Role::System,
            "You write one SQLite query that answers the question.".into(),
        ),
        message(Role::User, schema(PROMPT)),
    ];
    Request {
        temperature: Some(0.0),
        max_tokens: Some(300),
        ..Request::new("bench", "mock", messages)
    }
}

fn completion() -> Completion {
    Completion {
        finish_reason: Some("stop".into()),
        usage: Usage {
            prompt: Some(1_500),
            completion: Some(20),
            ..Usage::default()
        },
        served_model: Some("mock".into()),
        latency_ms: 200,
        ..Completion::new("```sql\nSELECT name FROM table_1 WHERE id = 7\n```")
    }
}

fn prompts(criterion: &mut Criterion) {
    let prompts = Prompts::new(TemplateStore::Embedded);
    let schema = schema(PROMPT);
    criterion.bench_function("prompt: render din-sql/nested", |bencher| {
        bencher.iter(|| {
            let variables = context! {
                question => "Which tables were opened after the average one?",
                evidence => "opened after refers to opened_on",
                schema => schema.as_str(),
                dialect => "SQLite",
                language => "en",
                example => context! { id => "1", database => "bench", difficulty => "challenging" },
                schema_linking => context! { links => ["table_1.opened_on", "table_1.id = table_2.parent_id"] },
                classification => context! { label => "NESTED", sub_questions => ["When was the average one opened?"] },
            };
            prompts
                .render("en", "din-sql/nested", black_box(variables))
                .expect("the shipped template renders")
        });
    });
}

fn keys(criterion: &mut Criterion) {
    let request = request();
    criterion.bench_function("llm: key of a 5 KB request", |bencher| {
        bencher.iter(|| black_box(&request).key());
    });
}

fn extraction(criterion: &mut Criterion) {
    let mut reasoning = String::new();
    while reasoning.len() < 1_500 {
        reasoning.push_str("The question asks for names, so table_1 is joined with table_2 on parent_id.\n");
    }
    let mut conditions = String::from("id > 0");
    while conditions.len() < 400 {
        conditions.push_str("\n  AND name <> 'it''s; no' -- not this one");
    }
    let answer = format!("{reasoning}\n```sql\nSELECT name FROM table_1\nWHERE {conditions};\n```\nThis is the query.");
    criterion.bench_function("sql: extract from a fenced 2 KB answer", |bencher| {
        bencher.iter(|| extract_sql(black_box(&answer), None, Occurrence::Last).expect("the answer holds a query"));
    });
}

fn rows(criterion: &mut Criterion) {
    let rows: Vec<Vec<Value>> = (0..10_000_i64)
        .map(|number| {
            vec![
                Value::Integer(number),
                Value::Real(number as f64 / 3.0),
                Value::Text(format!("name {number}")),
            ]
        })
        .collect();
    let reversed: Vec<Vec<Value>> = rows.iter().rev().cloned().collect();
    criterion.bench_function("metric: row set of 10,000 rows", |bencher| {
        bencher.iter(|| RowSet::new(black_box(&rows)));
    });
    let (gold, predicted) = (RowSet::new(&rows), RowSet::new(&reversed));
    criterion.bench_function("metric: ex of two sets of 10,000 rows", |bencher| {
        bencher.iter(|| execution_accuracy(black_box(&predicted), black_box(&gold)));
    });
}

fn cache(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let cache = Cache::open(&folder.path().join("completions.sqlite")).expect("a new cache");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("a runtime without drivers");
    let completion = completion();
    let request = request();
    let known = request.key();
    runtime
        .block_on(cache.put(known, &request, &completion))
        .expect("the cache can be written");
    criterion.bench_function("cache: get, hit", |bencher| {
        bencher.iter(|| cache.get(black_box(&known)).expect("the cache can be read"));
    });
    let mut unused = 0_u64;
    let mut new_key = || {
        unused += 1;
        *blake3::hash(&unused.to_le_bytes()).as_bytes()
    };
    criterion.bench_function("cache: put, alone", |bencher| {
        bencher.iter_batched(
            &mut new_key,
            |key| {
                runtime
                    .block_on(cache.put(key, &request, &completion))
                    .expect("the cache can be written");
            },
            BatchSize::SmallInput,
        );
    });
    criterion.bench_function("cache: put, 64 together", |bencher| {
        bencher.iter_batched(
            || (0..TOGETHER).map(|_| new_key()).collect::<Vec<_>>(),
            |keys| {
                for stored in runtime.block_on(join_all(
                    keys.into_iter().map(|key| cache.put(key, &request, &completion)),
                )) {
                    stored.expect("the cache can be written");
                }
            },
            BatchSize::SmallInput,
        );
    });
}

criterion_group!(rooms, prompts, keys, extraction, rows, cache);
criterion_main!(rooms);
