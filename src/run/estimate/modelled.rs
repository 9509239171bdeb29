//! What a model would answer, where no run has recorded it: in the shape of the template's worked examples, about the
//! gold query.

use std::collections::HashMap;
use std::sync::OnceLock;

use indexmap::IndexMap;
use regex::Regex;

use super::Outputs;
use crate::config::pipeline::{DefaultValue, ExtractKind, Stage};
use crate::dataset::Example;
use crate::pipeline::OutputValue;
use crate::pipeline::extract::extract;
use crate::prompt::{Message, Role, Tokenizer};
use crate::sql::text::is_keyword;

/// Answers hold somewhat more than they should: fences, chatter, a query longer than need be.
const CHATTER: f64 = 1.2;
/// Tokens of a query where nothing is known of it, and of a line of reasoning.
const SOME_QUERY: f64 = 40.0;
const SOME_LINE: f64 = 24.0;

/// A template's worked examples: what it shows as answers to the questions before the last.
#[derive(Debug, Default)]
pub struct Worked {
    answers: Vec<WorkedAnswer>,
}

#[derive(Debug)]
struct WorkedAnswer {
    tokens: f64,
    /// Of these, those of the query that it ends in.
    query: Option<f64>,
    outputs: Outputs,
}

impl Worked {
    /// Reads a rendered prompt's worked answers as the stage would read a model's.
    pub fn read(stage: &Stage, messages: &[Message], tokenizer: &Tokenizer) -> Worked {
        let before_last = &messages[..messages.len().saturating_sub(1)];
        let answers = before_last
            .iter()
            .filter(|message| message.role == Role::Assistant)
            .map(|message| {
                let mut outputs = IndexMap::new();
                let mut query = None;
                for (name, extractor) in &stage.extract {
                    let extracted = extract(extractor, &message.content, &|text| text.to_owned());
                    let Some(value) = extracted.value else { continue };
                    if extractor.kind == ExtractKind::Sql {
                        query = Some(tokenizer.count_text(&value.as_text()) as f64);
                    }
                    outputs.insert(name.clone(), value);
                }
                WorkedAnswer {
                    tokens: tokenizer.count_text(&message.content) as f64,
                    query,
                    outputs,
                }
            })
            .collect();
        Worked { answers }
    }

    /// Tokens of an answer, probably.
    pub fn answer(&self, stage: &Stage, example: &Example, tokenizer: &Tokenizer) -> f64 {
        let gold = example.gold.first().map(|gold| tokenizer.count_text(gold) as f64);
        let mean = |values: &[f64]| (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
        let tokens = mean(&self.answers.iter().map(|answer| answer.tokens).collect::<Vec<_>>());
        let query = mean(
            &self
                .answers
                .iter()
                .filter_map(|answer| answer.query)
                .collect::<Vec<_>>(),
        );
        let writes_sql = stage
            .extract
            .values()
            .any(|extractor| extractor.kind == ExtractKind::Sql);
        match (tokens, query, gold) {
            // Sub-queries and the like grow with the query.
            (Some(tokens), Some(query), Some(gold)) => gold * (tokens / query.max(1.0)).max(1.0) * CHATTER,
            (Some(tokens), _, _) => tokens,
            (None, _, gold) if writes_sql => gold.unwrap_or(SOME_QUERY) * CHATTER + 4.0,
            _ => {
                let outputs = outputs(example, stage, None, &[], None);
                let said: usize = outputs
                    .values()
                    .map(|output| tokenizer.count_text(&output.as_text()))
                    .sum();
                said as f64 * CHATTER + SOME_LINE
            }
        }
    }
}

/// What a stage would find: the gold query, its columns, else what a typical answer of earlier runs or of the worked
/// examples holds; only answers with the given label, where one is.
pub fn outputs(
    example: &Example,
    stage: &Stage,
    worked: Option<&Worked>,
    recorded: &[Outputs],
    label: Option<(&str, &str)>,
) -> Outputs {
    let has_label = |outputs: &&Outputs| {
        label.is_none_or(|(name, wanted)| outputs.get(name).is_some_and(|value| value.as_text() == wanted))
    };
    let recorded: Vec<&Outputs> = recorded.iter().filter(has_label).collect();
    let typical = middle(recorded).or_else(|| {
        let shown = worked.map(|worked| worked.answers.as_slice()).unwrap_or_default();
        middle(shown.iter().map(|answer| &answer.outputs).filter(has_label).collect())
    });
    stage
        .extract
        .iter()
        .map(|(name, extractor)| {
            let shown = typical.and_then(|outputs| outputs.get(name));
            let gold = example.gold.first();
            let value = match (&extractor.kind, label, gold, shown) {
                (ExtractKind::Label { .. }, Some((wanted, label)), _, _) if name == wanted => {
                    OutputValue::Text(label.to_owned())
                }
                (ExtractKind::Sql, _, Some(gold), _) => OutputValue::Text(gold.clone()),
                (ExtractKind::List, _, Some(gold), Some(OutputValue::List(items))) if name_columns(items) => {
                    OutputValue::List(columns(gold))
                }
                (_, _, _, Some(shown)) => shown.clone(),
                (kind, _, _, None) => match (&extractor.default, kind) {
                    (Some(DefaultValue::List(items)), _) => OutputValue::List(items.clone()),
                    (_, ExtractKind::List) => OutputValue::List(Vec::new()),
                    (_, ExtractKind::Label { one_of }) => {
                        OutputValue::Text(one_of.first().cloned().unwrap_or_default())
                    }
                    (_, ExtractKind::Json { .. }) => OutputValue::Json(serde_json::Value::Null),
                    // A default may name other outputs; empty stands for it as well.
                    _ => OutputValue::Text(String::new()),
                },
            };
            (name.clone(), value)
        })
        .collect()
}

/// The one of middle length.
fn middle(mut all: Vec<&Outputs>) -> Option<&Outputs> {
    all.sort_by_key(|outputs| outputs.values().map(|output| output.as_text().len()).sum::<usize>());
    (!all.is_empty()).then(|| all[all.len() / 2])
}

fn name_columns(items: &[String]) -> bool {
    let is_name = |part: &str| !part.is_empty() && part.chars().all(|letter| letter.is_alphanumeric() || letter == '_');
    items.iter().any(|item| {
        item.split_once('.')
            .is_some_and(|(table, column)| is_name(table) && is_name(column))
    })
}

/// A query's parts, as schema links name them: `table.column`, values, and `table.column = table.column` of joins.
fn columns(sql: &str) -> Vec<String> {
    static PART: OnceLock<Option<Regex>> = OnceLock::new();
    let part = PART.get_or_init(|| {
        Regex::new(r#"'(?:[^']|'')*'|[`"\[]?[\p{L}_][\p{L}\p{N}_]*[`"\]]?|[0-9]+(?:\.[0-9]+)?|[.=(]"#).ok()
    });
    let Some(part) = part else { return Vec::new() };
    let parts: Vec<&str> = part
        .find_iter(sql)
        .map(|found| found.as_str().trim_matches(['`', '"', '[', ']']))
        .collect();
    let at = |index: usize| parts.get(index).copied().unwrap_or_default();
    let is_name =
        |word: &str| word.starts_with(|letter: char| letter.is_alphabetic() || letter == '_') && !is_keyword(word);
    let mut tables: HashMap<&str, &str> = HashMap::new();
    let mut first_table = "";
    let mut own_names: Vec<&str> = Vec::new();
    for (index, word) in parts.iter().enumerate() {
        if word.eq_ignore_ascii_case("from") || word.eq_ignore_ascii_case("join") {
            let table = at(index + 1);
            if !is_name(table) {
                continue;
            }
            if first_table.is_empty() {
                first_table = table;
            }
            let alias = if at(index + 2).eq_ignore_ascii_case("as") {
                at(index + 3)
            } else {
                at(index + 2)
            };
            tables.insert(table, table);
            if is_name(alias) {
                tables.insert(alias, table);
            }
        } else if word.eq_ignore_ascii_case("as") {
            own_names.push(at(index + 1));
        }
    }
    let mut links: Vec<String> = Vec::new();
    let mut add = |link: String| {
        if !links.contains(&link) {
            links.push(link);
        }
    };
    let full = |index: usize| -> Option<String> {
        let (table, column) = (at(index), at(index + 2));
        (at(index + 1) == "." && tables.contains_key(table)).then(|| format!("{}.{column}", tables[table]))
    };
    let mut index = 0;
    while index < parts.len() {
        let word = parts[index];
        let step = if let Some(column) = full(index) {
            match (at(index + 3) == "=").then(|| full(index + 4)).flatten() {
                Some(other) => {
                    add(format!("{column} = {other}"));
                    7
                }
                None => {
                    add(column);
                    3
                }
            }
        } else {
            if word.len() > 1 && word.starts_with('\'') {
                add(word.trim_matches('\'').to_owned());
            } else if word.starts_with(|first: char| first.is_ascii_digit()) {
                add(word.to_owned());
            } else if is_name(word) && at(index + 1) != "(" && !tables.contains_key(word) && !own_names.contains(&word)
            {
                add(if first_table.is_empty() {
                    word.to_owned()
                } else {
                    format!("{first_table}.{word}")
                });
            }
            1
        };
        index += step;
    }
    links
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_names_its_schema_links() {
        assert_eq!(
            columns(
                "SELECT DISTINCT T1.member FROM loan AS T1 JOIN book AS T2 ON T1.book_id = T2.id WHERE T2.title = 'Low Tide' LIMIT 3"
            ),
            ["loan.member", "loan.book_id = book.id", "book.title", "Low Tide", "3"]
        );
        assert_eq!(
            columns("SELECT COUNT(*) AS n, city FROM author GROUP BY city ORDER BY n DESC"),
            ["author.city"]
        );
        assert_eq!(columns("SELECT"), [] as [&str; 0]);
        // Not SQL, and no reason to fail.
        assert_eq!(columns("from . = 'x"), ["x"]);
    }
}
