//! Reads named outputs from a completion: SQL, lists, labels, text, patterns, JSON; and joins a completion with the
//! beginning of the answer that the prompt gave.

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::config::pipeline::{DefaultValue, ExtractKind, Extractor, Take};
use crate::sql::extract::{
    Occurrence, after_marker, begins_with_query, clean_answer, extract_sql, first_fence, holds_query, is_label,
    is_prose, split_reasoning, without_invented_turns,
};

/// The value of a stage's output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum OutputValue {
    Text(String),
    List(Vec<String>),
    Json(Json),
}

impl OutputValue {
    /// As text: lists joined by `, `, JSON as JSON.
    pub fn as_text(&self) -> String {
        match self {
            OutputValue::Text(text) => text.clone(),
            OutputValue::List(items) => items.join(", "),
            OutputValue::Json(json) => json.to_string(),
        }
    }
}

/// What came of one extractor.
#[derive(Debug, Clone, PartialEq)]
pub struct Extracted {
    /// `None` where nothing was found and there is no default.
    pub value: Option<OutputValue>,
    pub used_default: bool,
    pub notes: Vec<String>,
}

/// Reads one output. `fill` resolves `{{ stage.output }}` in a default.
pub fn extract(extractor: &Extractor, answer: &str, fill: &dyn Fn(&str) -> String) -> Extracted {
    let mut notes = Vec::new();
    let mut way = Some(extractor);
    while let Some(extractor) = way {
        let mut told = Vec::new();
        if let Some(found) = find(extractor, answer, &mut told) {
            notes.extend(told);
            return Extracted {
                value: Some(found),
                used_default: false,
                notes,
            };
        }
        way = extractor.fallback.as_deref();
        // What a way that found nothing cut is of no use where another one reads the answer anew.
        notes = match way {
            Some(_) => vec!["not found as declared, read by the fallback".to_owned()],
            None => told,
        };
    }
    let value = extractor.default.as_ref().map(|default| match default {
        DefaultValue::Text(text) => OutputValue::Text(fill(text)),
        DefaultValue::List(items) => OutputValue::List(items.iter().map(|item| fill(item)).collect()),
    });
    Extracted {
        used_default: value.is_some(),
        value,
        notes,
    }
}

fn find(extractor: &Extractor, answer: &str, notes: &mut Vec<String>) -> Option<OutputValue> {
    let take = match extractor.take {
        Take::First => Occurrence::First,
        Take::Last => Occurrence::Last,
    };
    let marker = extractor.after.as_deref();
    if extractor.kind == ExtractKind::Sql {
        let found = extract_sql(answer, marker, take)?;
        notes.extend(found.notes.into_iter().map(str::to_owned));
        return Some(OutputValue::Text(found.sql));
    }
    let (cleaned, cut) = clean_answer(answer);
    notes.extend(cut.into_iter().map(str::to_owned));
    let scope = match marker {
        Some(marker) => {
            let (text, cut) = without_invented_turns(cleaned, Some(marker), |answer| !answer.trim().is_empty());
            notes.extend(cut.then(|| "turns that the model invented were cut".to_owned()));
            after_marker(text, marker, take)?
        }
        None => cleaned,
    };
    match &extractor.kind {
        ExtractKind::Sql => None,
        ExtractKind::List => read_list(scope).map(OutputValue::List),
        ExtractKind::Label { one_of } => read_label(scope, one_of, marker.is_some(), take).map(OutputValue::Text),
        ExtractKind::Text => {
            let text = scope.trim();
            (!text.is_empty()).then(|| OutputValue::Text(text.to_owned()))
        }
        ExtractKind::Regex { pattern } => {
            // Validated when the pipeline was read.
            let regex = regex::Regex::new(pattern).ok()?;
            let captures = match take {
                Occurrence::First => regex.captures_iter(scope).next(),
                Occurrence::Last => regex.captures_iter(scope).last(),
            }?;
            captures
                .get(1)
                .or_else(|| captures.get(0))
                .map(|found| OutputValue::Text(found.as_str().to_owned()))
        }
        ExtractKind::Json { pointer } => Some(match read_json(scope, pointer.as_deref(), take)? {
            Json::String(text) => OutputValue::Text(text),
            other => OutputValue::Json(other),
        }),
    }
}

/// `[a, "b, c", f(d, e)]`, over several lines if need be; without brackets, the rest of the line.
/// Commas inside quotes and brackets do not separate. An empty pair of brackets is an empty list.
fn read_list(text: &str) -> Option<Vec<String>> {
    let trimmed = text.trim_start();
    let trimmed = trimmed
        .strip_prefix("```json")
        .or_else(|| trimmed.strip_prefix("```"))
        .unwrap_or(trimmed)
        .trim_start();
    let (body, bracketed) = match trimmed.strip_prefix('[') {
        Some(body) => (body, true),
        None => (trimmed.lines().next()?, false),
    };
    let mut items = Vec::new();
    let mut item = String::new();
    let mut depth = 0_usize;
    let mut quote: Option<char> = None;
    let mut closed = false;
    let mut previous = ' ';
    let mut letters = body.chars().peekable();
    while let Some(letter) = letters.next() {
        match quote {
            Some(open) => {
                item.push(letter);
                if letter == open && previous != '\\' {
                    quote = None;
                }
            }
            None => match letter {
                // An apostrophe inside a word (`Côte d'Ivoire`) opens nothing.
                '"' | '\'' | '`' if !previous.is_alphanumeric() => {
                    quote = Some(letter);
                    item.push(letter);
                }
                '[' | '(' | '{' => {
                    depth += 1;
                    item.push(letter);
                }
                ']' if depth == 0 && bracketed => {
                    closed = true;
                    break;
                }
                ']' | ')' | '}' => {
                    depth = depth.saturating_sub(1);
                    item.push(letter);
                }
                ',' if depth == 0 => {
                    items.push(std::mem::take(&mut item));
                }
                '\n' if bracketed && letters.peek() == Some(&'\n') => break,
                other => item.push(other),
            },
        }
        previous = letter;
    }
    items.push(item);
    let items: Vec<String> = items
        .iter()
        .map(|item| unquote(item))
        .filter(|item| !item.is_empty())
        .collect();
    (closed || !items.is_empty()).then_some(items)
}

fn unquote(text: &str) -> String {
    let text = text.trim();
    for quote in ['"', '\'', '`'] {
        let inner = text.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
        if let Some(inner) = inner
            && !inner.replace(&format!("\\{quote}"), "").contains(quote)
        {
            return inner
                .replace(&format!("\\{quote}"), &quote.to_string())
                .trim()
                .to_owned();
        }
    }
    text.to_owned()
}

/// The label as it is spelled in `one_of`; the first word where that is empty.
fn read_label(text: &str, one_of: &[String], marked: bool, take: Occurrence) -> Option<String> {
    if one_of.is_empty() {
        let word = text.trim_start_matches(|letter: char| !letter.is_alphanumeric());
        let word: String = word
            .chars()
            .take_while(|letter| letter.is_alphanumeric() || matches!(letter, '-' | '_'))
            .collect();
        return (!word.is_empty()).then_some(word);
    }
    // After a marker the label is on that line or the next; a whole answer may name it anywhere.
    let scope: String = if marked {
        text.trim_start().lines().take(1).collect()
    } else {
        text.to_owned()
    };
    let upper = scope.to_uppercase();
    let part = |letter: char| letter.is_alphanumeric() || matches!(letter, '-' | '_');
    let mut hits: Vec<(usize, usize, &String)> = Vec::new();
    for label in one_of {
        let wanted = label.to_uppercase();
        for (at, _) in upper.match_indices(&wanted) {
            let before = upper[..at].chars().next_back().is_some_and(part);
            let after = upper[at + wanted.len()..].chars().next().is_some_and(part);
            if !before && !after {
                hits.push((at, wanted.len(), label));
            }
        }
    }
    // At one place the longest label counts: `NON-NESTED` is not `NESTED`.
    hits.sort_by_key(|&(at, length, _)| (at, std::cmp::Reverse(length)));
    let take = if marked { Occurrence::First } else { take };
    match take {
        Occurrence::First => hits.first(),
        Occurrence::Last => hits.last(),
    }
    .map(|(_, _, label)| (*label).clone())
}

/// A JSON value in a text, fences and prose around it notwithstanding: the part that `pointer` selects, in an object or
/// array that has it; without a pointer an object if there is one, else an array (prose has brackets too: `[1]`).
fn read_json(text: &str, pointer: Option<&str>, take: Occurrence) -> Option<Json> {
    let mut found: Vec<Json> = Vec::new();
    let mut at = 0;
    while let Some(open) = text[at..].find(['{', '[']) {
        let start = at + open;
        let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Json>();
        match values.next() {
            Some(Ok(value)) => {
                at = start + values.byte_offset();
                found.push(value);
            }
            _ => at = start + 1,
        }
    }
    if found.is_empty() {
        found.extend(serde_json::from_str::<Json>(text.trim()).ok());
    }
    if let Some(pointer) = pointer {
        found = found.iter().filter_map(|json| json.pointer(pointer)).cloned().collect();
    } else if found.iter().any(Json::is_object) {
        found.retain(Json::is_object);
    }
    found.retain(|json| !json.is_null());
    match take {
        Occurrence::First => found.into_iter().next(),
        Occurrence::Last => found.pop(),
    }
}

/// Joins the beginning of an answer that the prompt gave (`SELECT`) with what the model wrote: a continuation, the same
/// beginning once more, or an answer that begins anew. Reasoning stays in front.
pub fn continue_from(beginning: &str, answer: &str) -> String {
    let (reasoning, rest) = split_reasoning(answer);
    if rest.trim().is_empty() {
        return if answer.trim().is_empty() {
            beginning.to_owned()
        } else {
            answer.to_owned()
        };
    }
    format!("{reasoning}{}", join(beginning, rest))
}

fn join(beginning: &str, rest: &str) -> String {
    let given = beginning.trim();
    let said = rest.trim_start();
    if given.is_empty() || same_beginning(given, said) {
        return rest.to_owned();
    }
    // `SQL: SELECT`, and the model repeats the last words only. The longest repetition counts.
    let repeated = given.char_indices().map(|(at, _)| at).find(|&at| {
        let letter = |letter: char| letter.is_alphanumeric() || letter == '_';
        let word_begins = given[at..].starts_with(letter) && !given[..at].ends_with(letter);
        (word_begins || &given[at..] == "[") && same_beginning(&given[at..], said)
    });
    if let Some(at) = repeated {
        return format!("{}{said}", &given[..at]);
    }
    if ends_with_select(given) || holds_query(given) {
        if is_answer_of_its_own(said) {
            return rest.to_owned();
        }
        // A fence around the continuation.
        if let Some((before, content)) = first_fence(said)
            && before.trim().is_empty()
            && !given.contains("```")
        {
            return glue(beginning, content.trim_start());
        }
    }
    glue(beginning, rest)
}

/// Whether an answer does not go on with the `SELECT` that was given but holds a whole query of its own.
fn is_answer_of_its_own(said: &str) -> bool {
    let undecorated = said.trim_start_matches(['*', '#', '`', ' ']);
    // A bracket may open a sub-query, which goes on with the given word.
    if !said.starts_with('(') && begins_with_query(undecorated) {
        return true;
    }
    if let Some((before, content)) = first_fence(said)
        && begins_with_query(content)
        && (before.trim().is_empty() || is_announcement(before))
    {
        return true;
    }
    let line = said.lines().next().unwrap_or_default();
    is_prose(line) && (is_announcement(line) || is_label(line)) && holds_query(said)
}

/// Whether a text ends like a sentence, as no line of SQL does.
fn is_announcement(text: &str) -> bool {
    text.trim_end().ends_with([':', '.', '!', '?'])
}

fn ends_with_select(text: &str) -> bool {
    text.split_whitespace()
        .next_back()
        .is_some_and(|word| word.eq_ignore_ascii_case("SELECT"))
}

/// Whether `text` begins like `beginning`, in any case, and does not go on with the same word.
fn same_beginning(beginning: &str, text: &str) -> bool {
    let mut letters = text.chars();
    let same = beginning.chars().all(|wanted| {
        letters
            .next()
            .is_some_and(|letter| letter == wanted || letter.to_lowercase().eq(wanted.to_lowercase()))
    });
    let word = |letter: char| letter.is_alphanumeric() || letter == '_';
    same && !(beginning.ends_with(word) && letters.next().is_some_and(word))
}

/// Sets a space between two parts where neither has one and no bracket or quote opens.
fn glue(beginning: &str, rest: &str) -> String {
    if rest.starts_with(char::is_whitespace) {
        return format!("{}{rest}", beginning.trim_end());
    }
    let tight = beginning.ends_with(|letter: char| letter.is_whitespace() || "([{\"'`".contains(letter));
    format!("{beginning}{}{rest}", if tight { "" } else { " " })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list(text: &str) -> Option<Vec<String>> {
        read_list(text)
    }

    #[test]
    fn lists() {
        let strings = |items: &[&str]| Some(items.iter().map(|&item| item.to_owned()).collect::<Vec<_>>());
        assert_eq!(
            list(" [a.b, c.d = e.f, 'x, y', \"say \\\"hi\\\"\", f(g, h)] rest"),
            strings(&["a.b", "c.d = e.f", "x, y", "say \"hi\"", "f(g, h)"])
        );
        assert_eq!(
            list("[\"Which, of these?\",\n \"b\"]\nmore"),
            strings(&["Which, of these?", "b"])
        );
        assert_eq!(list("[]"), strings(&[]));
        assert_eq!(list("[ ]"), strings(&[]));
        assert_eq!(list("a, b\nc"), strings(&["a", "b"]));
        assert_eq!(list("[Côte d'Ivoire, x]"), strings(&["Côte d'Ivoire", "x"]));
        assert_eq!(list("[a, b"), strings(&["a", "b"]));
        assert_eq!(list(""), None);
    }

    #[test]
    fn labels() {
        let classes: Vec<String> = ["EASY", "NON-NESTED", "NESTED"]
            .iter()
            .map(|&label| label.to_owned())
            .collect();
        let label = |text: &str| read_label(text, &classes, true, Occurrence::Last);
        assert_eq!(label(" \"NON-NESTED\""), Some("NON-NESTED".into()));
        assert_eq!(label(" nested."), Some("NESTED".into()));
        assert_eq!(label("\n**Easy**\nNESTED"), Some("EASY".into()));
        assert_eq!(label(" HARD"), None);
        assert_eq!(label(" UNNESTED"), None);
        assert_eq!(
            read_label("first EASY, no: NESTED", &classes, false, Occurrence::Last),
            Some("NESTED".into())
        );
        assert_eq!(read_label(" Yes, so", &[], true, Occurrence::Last), Some("Yes".into()));
    }

    #[test]
    fn a_default_is_flagged() {
        let extractor = Extractor {
            kind: ExtractKind::Sql,
            after: Some("Revised_SQL:".into()),
            take: Take::Last,
            default: Some(DefaultValue::Text("{{ generation.sql }}".into())),
            optional: false,
            fallback: None,
        };
        let fill = |text: &str| text.replace("{{ generation.sql }}", "SELECT 7");
        let extracted = extract(&extractor, "I see no fault.", &fill);
        assert_eq!(extracted.value, Some(OutputValue::Text("SELECT 7".into())));
        assert!(extracted.used_default);
        let extracted = extract(&extractor, "Revised_SQL: SELECT 8", &fill);
        assert_eq!(extracted.value, Some(OutputValue::Text("SELECT 8".into())));
        assert!(!extracted.used_default);
    }

    #[test]
    fn json_and_patterns() {
        let json = |text: &str, take| read_json(text, None, take).map(|json| json.to_string());
        assert_eq!(
            json("```json\n{\"a\": [1]}\n``` and {\"b\": 2} {", Occurrence::First),
            Some("{\"a\":[1]}".into())
        );
        assert_eq!(
            json("{\"a\": 1} then {\"b\": 2}", Occurrence::Last),
            Some("{\"b\":2}".into())
        );
        assert_eq!(json("none", Occurrence::Last), None);
        let extractor = Extractor {
            kind: ExtractKind::Regex {
                pattern: "answer is (\\w+)".into(),
            },
            after: None,
            take: Take::Last,
            default: None,
            optional: false,
            fallback: None,
        };
        let extracted = extract(&extractor, "answer is a, no: answer is b", &|text| text.to_owned());
        assert_eq!(extracted.value, Some(OutputValue::Text("b".into())));
    }

    #[test]
    fn the_fallback_reads_what_the_first_way_does_not_find() {
        let json = ExtractKind::Json {
            pointer: Some("/sql".into()),
        };
        let sql = extractor(ExtractKind::Sql, Some("SQL:"));
        let both = Extractor {
            default: Some(DefaultValue::Text("SELECT 0".into())),
            fallback: Some(Box::new(sql)),
            ..extractor(json, None)
        };
        let read = |answer: &str| {
            let extracted = extract(&both, answer, &|text| text.to_owned());
            let text = extracted.value.map(|value| value.as_text()).unwrap_or_default();
            (text, extracted.used_default, extracted.notes.join("; "))
        };
        let note = "not found as declared, read by the fallback";
        assert_eq!(
            read("As in [1]:\n```json\n{\"sql\": \"SELECT 1\"}\n```\nSee [2]."),
            ("SELECT 1".into(), false, String::new())
        );
        assert_eq!(
            read("{\"a\": 1}\nSQL: SELECT 2"),
            ("SELECT 2".into(), false, note.into())
        );
        assert_eq!(read("{\"sql\": null}").0, "SELECT 0");
        assert!(read("nothing").1);
    }

    #[test]
    fn invented_turns_give_no_labels() {
        let label = ExtractKind::Label {
            one_of: vec!["EASY".into(), "NESTED".into()],
        };
        let extracted = extract(
            &extractor(label, Some("Label:")),
            "Label: EASY\n\nQuestion: another?\nLabel: NESTED",
            &|text| text.to_owned(),
        );
        assert_eq!(extracted.value, Some(OutputValue::Text("EASY".into())));
        assert_eq!(extracted.notes, ["turns that the model invented were cut"]);
    }

    #[test]
    fn answers_go_on_from_a_given_beginning() {
        let sql = |beginning: &str, answer: &str| {
            let whole = continue_from(beginning, answer);
            extract_sql(&whole, None, Occurrence::Last).map_or(whole, |found| found.sql)
        };
        let query = "SELECT name FROM şarkıcı WHERE id IN (\nSELECT id FROM t)";
        let tail = &query["SELECT".len()..];
        for answer in [
            tail.to_owned(),
            tail.trim_start().to_owned(),
            query.to_owned(),
            query.replacen("SELECT", "\nselect", 1).replacen("select", "SELECT", 1),
            format!("{tail};"),
            format!("{tail}\n```\nThis query finds them."),
            format!("{tail}\nExplanation: it finds them."),
            format!("{tail}\n\nQuestion: How many?\nSQL: SELECT COUNT(*) FROM t"),
            format!("```sql\n{query}\n```"),
            format!("```sql\n{}\n```\nDone.", tail.trim_start()),
            format!("```sql\n-- names\n{query}\n```"),
            format!("SQL: {query}"),
            format!("**SQL:** {query}"),
            format!("Here is the query:\n{query}"),
            format!("İşte sorgu:\n\n```sql\n{query}\n```"),
            format!("<think>SELECT or WITH?</think>{tail}"),
            format!("<think>SELECT or WITH?</think>\n\n{query}"),
        ] {
            assert_eq!(sql("SELECT", &answer), query, "{answer:?}");
            assert_eq!(sql("SELECT ", &answer), query, "{answer:?}");
        }
        let with = "WITH x AS (SELECT 1) SELECT * FROM x";
        assert_eq!(sql("SELECT", with), with);
        assert_eq!(sql("SELECT", "selected FROM t"), "SELECT selected FROM t");
        assert_eq!(sql("SELECT", "* FROM t"), "SELECT * FROM t");
        assert_eq!(sql("SELECT", "(SELECT 1) + 2"), "SELECT (SELECT 1) + 2");
        assert_eq!(sql("SELECT", "<think>never ended"), "<think>never ended");
        assert_eq!(continue_from("SQL: SELECT", "SELECT a"), "SQL: SELECT a");
        assert_eq!(continue_from("Bağlantılar: [", "a.ş]"), "Bağlantılar: [a.ş]");
        assert_eq!(continue_from("Schema_links: [", "[a]"), "Schema_links: [a]");
        assert_eq!(continue_from("Düşünelim.", "Şimdi"), "Düşünelim. Şimdi");
        assert_eq!(continue_from("SELECT", "ş"), "SELECT ş");
        assert_eq!(continue_from("SELECT", ""), "SELECT");
    }

    fn extractor(kind: ExtractKind, after: Option<&str>) -> Extractor {
        Extractor {
            kind,
            after: after.map(str::to_owned),
            take: Take::Last,
            default: None,
            optional: false,
            fallback: None,
        }
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "\\PC{0,120}") {
            let _ = read_list(&text);
            let _ = read_json(&text, Some("/a"), Occurrence::Last);
            let _ = continue_from("SELECT", &text);
            let _ = continue_from(&text, "şİ```");
            let _ = read_label(&text, &["İYİ".to_owned(), "ß".to_owned()], false, Occurrence::Last);
        }

        #[test]
        fn quoted_items_come_back(items in prop::collection::vec("[a-z,\\[\\] ]{1,10}[a-z]", 0..5)) {
            let text = format!("[{}]", items.iter().map(|item| format!("\"{item}\"")).collect::<Vec<_>>().join(", "));
            let expected: Vec<String> = items.iter().map(|item| item.trim().to_owned()).collect();
            prop_assert_eq!(read_list(&text), Some(expected));
        }
    }
}
