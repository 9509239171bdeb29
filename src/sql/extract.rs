//! Finds the SQL in a model's answer: code fences, prose before and after, reasoning blocks, chat marks, a second
//! statement. What was cut is told in [`Found::notes`]; the query itself is handed on byte for byte.

use super::text::{Piece, Pieces};

/// A query found in an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub sql: String,
    /// What had to be cut to find it, for the trace.
    pub notes: Vec<&'static str>,
}

/// Marks of chat templates that weak models write into their answers.
const CHAT_MARKS: &[&str] = &[
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end|>",
    "<|assistant|>",
    "</s>",
    "<end_of_turn>",
];

/// Words a query can begin with. Writing ones are found too: the executor refuses them with a reason of its own.
const STARTS: &[&str] = &[
    "SELECT", "WITH", "VALUES", "EXPLAIN", "INSERT", "UPDATE", "DELETE", "REPLACE", "CREATE", "DROP", "ALTER",
    "PRAGMA", "ATTACH", "VACUUM",
];

/// Which of several marked places counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occurrence {
    First,
    Last,
}

/// The answer without its reasoning block and chat marks.
pub fn clean_answer(answer: &str) -> (&str, Vec<&'static str>) {
    let mut notes = Vec::new();
    let mut text = answer;
    if let Some(end) = text.rfind("</think>") {
        text = &text[end + "</think>".len()..];
        notes.push("a reasoning block was cut");
    } else if text.trim_start().starts_with("<think>") {
        text = "";
        notes.push("the answer ends inside its reasoning block");
    }
    if let Some(cut) = CHAT_MARKS
        .iter()
        .filter_map(|mark| text.find(mark))
        .filter(|&at| !text[..at].trim().is_empty())
        .min()
    {
        text = &text[..cut];
        notes.push("text from a chat mark on was cut");
    }
    (text, notes)
}

/// What follows a marker (`SQL:`), at the first or last place where the marker stands. A marker is found in any case,
/// not inside a longer word (`Revised_SQL:` does not hold the marker `SQL:`); where it stands at the beginning of some
/// line, places inside sentences do not count.
pub fn after_marker<'a>(text: &'a str, marker: &str, take: Occurrence) -> Option<&'a str> {
    let places = marker_places(text, marker);
    let (at_line_start, elsewhere): (Vec<usize>, Vec<usize>) =
        places.into_iter().partition(|&at| begins_line(text, at));
    let places = if at_line_start.is_empty() {
        elsewhere
    } else {
        at_line_start
    };
    let at = match take {
        Occurrence::First => places.first(),
        Occurrence::Last => places.last(),
    }?;
    let rest = &text[at + marker.len()..];
    // `**SQL:** SELECT` and `"SQL:" …`: the marker's own closing decoration is no part of what follows.
    Some(rest.strip_prefix("**").unwrap_or(rest))
}

fn marker_places(text: &str, marker: &str) -> Vec<usize> {
    let bytes = text.as_bytes();
    let wanted = marker.as_bytes();
    if wanted.is_empty() || wanted.len() > bytes.len() {
        return Vec::new();
    }
    let word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let marker_begins_word = marker.chars().next().is_some_and(word);
    (0..=bytes.len() - wanted.len())
        .filter(|&at| {
            bytes[at..at + wanted.len()].eq_ignore_ascii_case(wanted)
                && text.is_char_boundary(at)
                && text.is_char_boundary(at + wanted.len())
                && !(marker_begins_word && text[..at].chars().next_back().is_some_and(word))
        })
        .collect()
}

fn begins_line(text: &str, at: usize) -> bool {
    let line = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
    text[line..at]
        .chars()
        .all(|letter| letter.is_whitespace() || "*#->`\"".contains(letter))
}

/// The query in a text, or `None` where there is none.
pub fn extract_sql(answer: &str, marker: Option<&str>, take: Occurrence) -> Option<Found> {
    let (cleaned, mut notes) = clean_answer(answer);
    let scope = match marker {
        Some(marker) => after_marker(cleaned, marker, take)?,
        None => cleaned,
    };
    let mut text = scope;
    if let Some(fenced) = fenced_query(scope, take, marker.is_some()) {
        text = fenced;
        notes.push("a code fence was removed");
    }
    let text = unwrap_quotes(text.trim());
    let start = query_start(text)?;
    if !text[..start].trim().is_empty() {
        notes.push("text before the query was cut");
    }
    let (end, reason) = query_end(&text[start..]);
    if let Some(reason) = reason {
        notes.push(reason);
    }
    let sql = text[start..start + end].trim();
    (!sql.is_empty()).then(|| Found {
        sql: sql.to_owned(),
        notes,
    })
}

/// The content of the fence that holds a query. With a marker the text belongs to that marker, so its first fence is
/// meant; in a whole answer the last (or first) fence with a query is.
fn fenced_query(text: &str, take: Occurrence, marked: bool) -> Option<&str> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(open) = text[at..].find("```") {
        // A query that began before the fence opened is the answer; the fence is something else.
        let content_at = at + open + 3;
        let rest = &text[content_at..];
        let info = rest
            .chars()
            .take_while(|letter| letter.is_ascii_alphanumeric() || "+-_.".contains(*letter))
            .count();
        let info_text = &rest[..info];
        // `​```SELECT …`: no language, the query follows at once.
        let body_at = if STARTS.iter().any(|word| info_text.eq_ignore_ascii_case(word)) {
            0
        } else {
            info
        };
        let body = &rest[body_at..];
        let length = body.find("```").unwrap_or(body.len());
        let content = &body[..length];
        if query_start(content).is_some() {
            found.push(content);
        }
        at = (content_at + body_at + length + 3).min(text.len());
        if !text.is_char_boundary(at) {
            break;
        }
    }
    if marked {
        let before = text.split("```").next().unwrap_or_default();
        return if query_start(before).is_some() {
            None
        } else {
            found.first().copied()
        };
    }
    match take {
        Occurrence::First => found.first().copied(),
        Occurrence::Last => found.last().copied(),
    }
}

/// Takes off quotes or backticks that stand around the whole text.
fn unwrap_quotes(text: &str) -> &str {
    for quote in ['`', '"', '\''] {
        let inner = text
            .strip_prefix(quote)
            .and_then(|rest| rest.trim_end().strip_suffix(quote));
        if let Some(inner) = inner
            && query_start(inner) == Some(0)
            && !inner.contains(quote)
        {
            return inner;
        }
    }
    text
}

/// Where a query begins: a starting word that is no part of a longer word, the first at a line's beginning if there is one.
fn query_start(text: &str) -> Option<usize> {
    let mut anywhere = None;
    let bytes = text.as_bytes();
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80;
    for at in 0..bytes.len() {
        if at > 0 && word(bytes[at - 1]) {
            continue;
        }
        let Some(start) = STARTS.iter().find(|start| {
            bytes.len() >= at + start.len()
                && bytes[at..at + start.len()].eq_ignore_ascii_case(start.as_bytes())
                && bytes.get(at + start.len()).is_none_or(|&next| !word(next))
        }) else {
            continue;
        };
        if begins_statement(&text[at + start.len()..], start) {
            let line = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
            if text[line..at]
                .trim_matches(|letter: char| letter.is_whitespace() || letter == '(')
                .is_empty()
            {
                let opened = text[line..at].find('(').map_or(at, |bracket| line + bracket);
                return Some(
                    anywhere
                        .filter(|&earlier| reaches(&text[earlier..opened]))
                        .unwrap_or(opened),
                );
            }
            anywhere.get_or_insert(at);
        }
    }
    anywhere
}

/// Whether a query that began inside a line goes on to the next line that begins like a query: an open bracket, or a set
/// operation or `AS` at the end. Else the earlier word was prose ("select the rows like this:").
fn reaches(between: &str) -> bool {
    let (mut open, mut word) = (0_i32, String::new());
    for (start, end, piece) in Pieces::new(between) {
        match &between[start..end] {
            "(" => open += 1,
            ")" => open -= 1,
            letter if piece == Piece::Other && letter.chars().all(char::is_alphanumeric) => {
                if between[..start].chars().next_back().is_none_or(char::is_whitespace) {
                    word.clear();
                }
                word.push_str(letter);
            }
            _ => {}
        }
    }
    open > 0
        || ["UNION", "ALL", "INTERSECT", "EXCEPT", "AS"]
            .iter()
            .any(|last| word.eq_ignore_ascii_case(last))
}

/// Whether what follows a starting word looks like SQL and not like a sentence ("with the tables …", "update: …").
fn begins_statement(rest: &str, word: &str) -> bool {
    let mut words = rest.split_whitespace();
    let next = words.next().unwrap_or_default();
    let follows = |expected: &[&str]| expected.iter().any(|wanted| next.eq_ignore_ascii_case(wanted));
    match word {
        "SELECT" => !rest.trim_start().starts_with([':', ')']) && !rest.trim().is_empty(),
        "WITH" => {
            follows(&["RECURSIVE"])
                || words.next().is_some_and(|second| {
                    second.get(..2).is_some_and(|start| start.eq_ignore_ascii_case("AS")) && second.len() <= 4
                        || second.starts_with("AS(")
                })
                || next.contains('(')
        }
        "VALUES" => rest.trim_start().starts_with('('),
        "EXPLAIN" => follows(&["QUERY", "SELECT"]),
        "INSERT" => follows(&["INTO", "OR"]),
        "UPDATE" => words.next().is_some_and(|second| second.eq_ignore_ascii_case("SET")),
        "DELETE" => follows(&["FROM"]),
        "REPLACE" => follows(&["INTO"]),
        "CREATE" | "DROP" | "ALTER" => follows(&["TABLE", "VIEW", "INDEX", "TEMP", "TEMPORARY", "TRIGGER", "UNIQUE"]),
        "PRAGMA" | "ATTACH" | "VACUUM" => true,
        _ => false,
    }
}

/// Where the query ends, and what was cut after it.
fn query_end(text: &str) -> (usize, Option<&'static str>) {
    let mut newline_at = None;
    let mut blank_lines: Vec<usize> = Vec::new();
    for (start, end, piece) in Pieces::new(text) {
        match piece {
            Piece::Semicolon => {
                let rest = &text[end..];
                let cut = Pieces::new(rest).any(|(_, _, piece)| !matches!(piece, Piece::Space | Piece::Comment));
                if let Some(&blank) = blank_lines.iter().find(|&&blank| is_prose(&text[blank..start])) {
                    return (blank, Some("text after the query was cut"));
                }
                let reason = if !cut {
                    None
                } else if query_start(rest).is_some() {
                    Some("a second statement was cut")
                } else {
                    Some("text after the query was cut")
                };
                return (start, reason);
            }
            Piece::Space if text[start..end].starts_with('\n') => {
                if let Some(blank) = newline_at.replace(start) {
                    blank_lines.push(blank);
                }
            }
            Piece::Space => {}
            Piece::Other if text[start..].starts_with("```") => return (start, Some("text after the query was cut")),
            _ => newline_at = None,
        }
    }
    match blank_lines.iter().find(|&&blank| is_prose(&text[blank..])) {
        Some(&blank) => (blank, Some("text after the query was cut")),
        None => (text.len(), None),
    }
}

/// Whether a paragraph after a blank line is words and not the query's next clause.
fn is_prose(paragraph: &str) -> bool {
    const CLAUSES: &[&str] = &[
        "FROM",
        "WHERE",
        "GROUP",
        "ORDER",
        "HAVING",
        "LIMIT",
        "OFFSET",
        "UNION",
        "INTERSECT",
        "EXCEPT",
        "JOIN",
        "LEFT",
        "RIGHT",
        "INNER",
        "CROSS",
        "FULL",
        "NATURAL",
        "ON",
        "AND",
        "OR",
        "SELECT",
        "WINDOW",
        "CASE",
        "WHEN",
        "ELSE",
        "END",
        "AS",
        "THEN",
        "USING",
        "NOT",
        "IN",
        "BETWEEN",
        "IS",
    ];
    let mut rest = paragraph.trim_start();
    while let Some((_, end, Piece::Comment)) = Pieces::new(rest).next() {
        rest = rest[end..].trim_start();
    }
    let word: String = rest
        .chars()
        .take_while(|letter| letter.is_alphanumeric() || *letter == '_')
        .collect();
    match rest.chars().next() {
        None | Some('(' | ')' | ',' | '=' | '<' | '>' | '+' | '|' | ';') => false,
        _ => !CLAUSES.iter().any(|clause| clause.eq_ignore_ascii_case(&word)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn whole(answer: &str) -> String {
        extract_sql(answer, None, Occurrence::Last)
            .map(|found| found.sql)
            .unwrap_or_default()
    }

    fn after(answer: &str, marker: &str) -> String {
        extract_sql(answer, Some(marker), Occurrence::Last)
            .map(|found| found.sql)
            .unwrap_or_default()
    }

    #[test]
    fn answers_of_every_shape() {
        for (answer, sql) in [
            ("SELECT 1", "SELECT 1"),
            (
                "  select a\nfrom t -- note\nwhere b = 1 ;  ",
                "select a\nfrom t -- note\nwhere b = 1",
            ),
            ("```sql\nSELECT 1;\n```", "SELECT 1"),
            ("```\nSELECT 1\n```\nThis selects one.", "SELECT 1"),
            ("```SELECT 1```", "SELECT 1"),
            ("~~~ no\n```sqlite\nSELECT 'a;b' ; -- c\n```", "SELECT 'a;b'"),
            (
                "First:\n```sql\nSELECT 1\n```\nbetter:\n```sql\nSELECT 2\n```",
                "SELECT 2",
            ),
            ("```sql\nSELECT 1\n```\n```json\n{\"a\": 1}\n```", "SELECT 1"),
            ("```sql\nSELECT 1", "SELECT 1"),
            ("Here is the query: SELECT a FROM t;", "SELECT a FROM t"),
            (
                "It is: SELECT a FROM t WHERE b IN (\nSELECT b FROM u)",
                "SELECT a FROM t WHERE b IN (\nSELECT b FROM u)",
            ),
            (
                "It is: SELECT a FROM t UNION\nSELECT b FROM u",
                "SELECT a FROM t UNION\nSELECT b FROM u",
            ),
            (
                "You can select the rows with this query:\nSELECT a FROM t\n\nIt returns a.",
                "SELECT a FROM t",
            ),
            ("SELECT a\n\nFROM t\n\nWHERE b", "SELECT a\n\nFROM t\n\nWHERE b"),
            ("SELECT a FROM t<|im_end|>\nSELECT b", "SELECT a FROM t"),
            ("<think>SELECT wrong</think>SELECT a FROM t", "SELECT a FROM t"),
            ("<think>SELECT never ended", ""),
            ("SELECT a FROM t; SELECT b FROM t;", "SELECT a FROM t"),
            ("SELECT '--x', \"a;b\", '#' FROM t", "SELECT '--x', \"a;b\", '#' FROM t"),
            ("`SELECT a FROM t`", "SELECT a FROM t"),
            ("SELECT `a b` FROM `t`", "SELECT `a b` FROM `t`"),
            (
                "WITH x AS (SELECT 1) SELECT * FROM x",
                "WITH x AS (SELECT 1) SELECT * FROM x",
            ),
            ("(SELECT 1) UNION SELECT 2", "(SELECT 1) UNION SELECT 2"),
            ("DROP TABLE t", "DROP TABLE t"),
            ("I cannot answer that.", ""),
            ("", ""),
            (
                "Bu sorgu işe yarar:\nSELECT ad FROM şarkıcı WHERE yaş > 20;\nAçıklama: …",
                "SELECT ad FROM şarkıcı WHERE yaş > 20",
            ),
        ] {
            assert_eq!(whole(answer), sql, "{answer:?}");
        }
    }

    #[test]
    fn markers() {
        assert_eq!(after("Reasoning about SQL: words.\nSQL: SELECT 1", "SQL:"), "SELECT 1");
        assert_eq!(after("SQL: SELECT 1\nSQL: SELECT 2", "SQL:"), "SELECT 2");
        assert_eq!(after("**SQL:**\n```sql\nSELECT 1;\n```\nDone", "SQL:"), "SELECT 1");
        assert_eq!(after("sql: SELECT 1", "SQL:"), "SELECT 1");
        assert_eq!(after("Revised_SQL: SELECT 1", "SQL:"), "");
        assert_eq!(after("SELECT 1", "SQL:"), "");
        assert_eq!(
            after("SQL: SELECT 1\n\nRevised_SQL: SELECT 2", "Revised_SQL:"),
            "SELECT 2"
        );
        let first = extract_sql("SQL: SELECT 1\nSQL: SELECT 2", Some("SQL:"), Occurrence::First).unwrap();
        assert_eq!(first.sql.lines().next(), Some("SELECT 1"));
    }

    #[test]
    fn what_was_cut_is_told() {
        let found = extract_sql("Sure!\n```sql\nSELECT 1; SELECT 2\n```", None, Occurrence::Last).unwrap();
        assert_eq!(found.notes, ["a code fence was removed", "a second statement was cut"]);
        assert!(
            extract_sql("SELECT 1", None, Occurrence::Last)
                .unwrap()
                .notes
                .is_empty()
        );
    }

    proptest! {
        #[test]
        fn any_answer_is_survived(answer in "\\PC{0,200}", marker in "[A-Za-z_:]{0,6}") {
            let _ = extract_sql(&answer, None, Occurrence::Last);
            let _ = extract_sql(&answer, Some(&marker), Occurrence::First);
        }

        /// A query is found whole in whatever is put around it.
        #[test]
        fn wrapped_queries_come_back(
            column in "[a-zşığüöç]{1,8}",
            literal in "[a-z;#\\- \"]{0,12}",
            fence in prop::sample::select(vec!["", "```sql\n", "```\n", "```SQLite\n"]),
            before in prop::sample::select(vec!["", "Here you go:\n", "Elbette!\n\n", "SQL şöyle:\n"]),
            end in prop::sample::select(vec!["", ";", " ; ", "; -- done"]),
        ) {
            let sql = format!("SELECT {column} FROM t WHERE x = '{literal}'");
            let close = if fence.is_empty() { "" } else { "\n```\nThat is all." };
            prop_assert_eq!(whole(&format!("{before}{fence}{sql}{end}{close}")), sql);
        }
    }
}
