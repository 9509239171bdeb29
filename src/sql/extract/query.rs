//! Where a query begins and ends in a text that may hold sentences too.

use super::super::text::{Piece, Pieces};
use super::prose::{is_prose_line, is_prose_paragraph, is_spoken_of, line_of};

/// Words a query can begin with. Writing ones are found too: the executor refuses them with a reason of its own.
pub const STARTS: &[&str] = &[
    "SELECT", "WITH", "VALUES", "EXPLAIN", "INSERT", "UPDATE", "DELETE", "REPLACE", "CREATE", "DROP", "ALTER",
    "PRAGMA", "ATTACH", "VACUUM",
];

/// Words that something must follow.
#[rustfmt::skip]
const OPEN_WORDS: &[&str] = &[
    "SELECT", "DISTINCT", "ALL", "FROM", "WHERE", "AND", "OR", "NOT", "ON", "BY", "HAVING", "LIMIT", "OFFSET", "JOIN",
    "LEFT", "RIGHT", "INNER", "OUTER", "CROSS", "FULL", "NATURAL", "UNION", "INTERSECT", "EXCEPT", "AS", "IN", "BETWEEN",
    "LIKE", "GLOB", "REGEXP", "MATCH", "IS", "CASE", "WHEN", "THEN", "ELSE", "GROUP", "ORDER", "WITH", "RECURSIVE", "USING",
    "OVER", "PARTITION", "VALUES", "SET", "INTO", "INSERT", "UPDATE", "DELETE", "EXISTS", "INDEXED", "COLLATE", "ESCAPE",
    "WINDOW", "REPLACE", "CREATE", "TABLE", "EXPLAIN", "QUERY", "PLAN", "FILTER", "NULLS",
];
/// Signs that something must follow.
const OPEN_SIGNS: &str = ",(=<>+-*/%|&!~.";

const CUT: &str = "text after the query was cut";

/// Where a query begins: a starting word that is no part of a longer word and of no sentence, the first at a line's
/// beginning if there is one.
pub fn query_start(text: &str) -> Option<usize> {
    let mut inside: Option<(usize, &str)> = None;
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
        if !begins_statement(&text[at + start.len()..], start) || *start == "SELECT" && is_spoken_of(text, at) {
            continue;
        }
        let line = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let before = &text[line..at];
        if before.chars().all(|letter| letter.is_whitespace() || letter == '(') {
            let opened = before.find('(').map_or(at, |bracket| line + bracket);
            let whole = inside.filter(|&(earlier, word)| reaches(&text[earlier..opened], word));
            return Some(whole.map_or(opened, |(earlier, _)| earlier));
        }
        match inside {
            None => inside = Some((at, start)),
            Some((earlier, "SELECT")) if is_doubtful(text, earlier, at) => inside = Some((at, start)),
            Some(_) => {}
        }
    }
    inside.map(|(at, _)| at)
}

/// Whether a query that began inside a line goes on to the next line that begins like a query: an open bracket, a set
/// operation or `AS` at the end, or a beginning that a `SELECT` belongs to. Else the earlier word was prose ("select the
/// rows like this:").
fn reaches(between: &str, start: &str) -> bool {
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
            ";" if piece == Piece::Semicolon => return false,
            _ => {}
        }
    }
    open > 0
        || matches!(start, "WITH" | "INSERT" | "EXPLAIN" | "CREATE" | "REPLACE")
        || ["UNION", "ALL", "INTERSECT", "EXCEPT", "AS"]
            .iter()
            .any(|last| word.eq_ignore_ascii_case(last))
}

/// Whether a `select` inside a line is rather the verb of a sentence, which ends before a `SELECT … FROM` in capitals.
fn is_doubtful(text: &str, earlier: usize, later: usize) -> bool {
    let between = &text[earlier..later];
    let sentence_ends = between
        .char_indices()
        .any(|(at, letter)| ".!?:".contains(letter) && between[at + 1..].starts_with(char::is_whitespace));
    !between.starts_with("SELECT")
        && text[later..].starts_with("SELECT")
        && text[later..].split_whitespace().any(|word| word == "FROM")
        && sentence_ends
        && !reaches(between, "SELECT")
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
                    second.get(..2).is_some_and(|start| start.eq_ignore_ascii_case("AS"))
                        && (second.len() <= 4 || second[2..].starts_with('('))
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

/// Where the query ends that the text begins with, and what was cut after it: at `;`, a code fence, a tag, or a line of
/// prose.
pub fn query_end(text: &str) -> (usize, Option<&'static str>) {
    let mut state = State::default();
    for (start, end, piece) in Pieces::new(text) {
        let inside = &text[start..end];
        if state.line_begins
            && piece != Piece::Space
            && (is_prose_line(line_of(text, start), state.is_open(text))
                || state.blank_line && !state.is_open(text) && is_prose_paragraph(&text[start..]))
        {
            return (start, Some(CUT));
        }
        match piece {
            Piece::Semicolon => return (start, after_semicolon(&text[end..])),
            Piece::Space => {
                if inside == "\n" {
                    state.blank_line |= state.line_begins;
                    state.line_begins = true;
                }
                continue;
            }
            Piece::Comment => {
                if let Some(fence) = inside.find("```") {
                    return (start + fence, Some(CUT));
                }
                // Its newline is a part of it.
                state.line_begins = inside.ends_with('\n');
                continue;
            }
            // A fence is no empty name in backticks; and one at a line's beginning ends an unclosed literal too.
            Piece::Quoted if inside.starts_with("```") => return (start, Some(CUT)),
            Piece::Quoted => {
                if let Some(fence) = inside.find("\n```") {
                    return (start + fence, Some(CUT));
                }
            }
            Piece::Other => {
                if ends_query(text, start) {
                    return (start, Some(CUT));
                }
                match inside {
                    "(" => state.brackets += 1,
                    ")" => state.brackets -= 1,
                    _ => {}
                }
            }
        }
        state.line_begins = false;
        state.blank_line = false;
        state.last = Some((end, piece));
    }
    (text.len(), None)
}

/// What is known of the query so far.
#[derive(Default)]
struct State {
    brackets: i32,
    line_begins: bool,
    blank_line: bool,
    /// Where the last piece ends that is neither space nor comment.
    last: Option<(usize, Piece)>,
}

impl State {
    /// Whether more must follow: an open bracket, or a comma, operator or keyword at the end.
    fn is_open(&self, text: &str) -> bool {
        match self.last {
            None => true,
            Some(_) if self.brackets > 0 => true,
            Some((_, Piece::Quoted)) => false,
            Some((end, _)) => {
                let before = &text[..end];
                let word_at = before
                    .rfind(|letter: char| !letter.is_alphanumeric() && letter != '_')
                    .map_or(0, |at| at + before[at..].chars().next().map_or(1, char::len_utf8));
                let word = &before[word_at..];
                if word.is_empty() {
                    before.ends_with(|sign| OPEN_SIGNS.contains(sign))
                } else {
                    OPEN_WORDS.iter().any(|open| open.eq_ignore_ascii_case(word))
                }
            }
        }
    }
}

/// Whether at this sign something begins that is in no SQL: bold text, a closing tag, a chat mark, a full stop.
fn ends_query(text: &str, at: usize) -> bool {
    let rest = &text[at..];
    let letter_at = |place: usize| rest[place..].starts_with(|letter: char| letter.is_alphabetic());
    if rest.starts_with("**") {
        return true;
    }
    if rest.starts_with("</") || rest.starts_with("<|") {
        return letter_at(2);
    }
    // `1.` is a number.
    if rest.starts_with('.') && !text[..at].ends_with(|before: char| before.is_ascii_digit()) {
        let after = &rest[1..];
        let words = after.trim_start_matches([' ', '\t']);
        return after.trim().is_empty() || words.len() < after.len() && words.starts_with(char::is_uppercase);
    }
    false
}

fn after_semicolon(rest: &str) -> Option<&'static str> {
    let cut = Pieces::new(rest).any(|(_, _, piece)| !matches!(piece, Piece::Space | Piece::Comment));
    if !cut {
        None
    } else if query_start(rest).is_some() {
        Some(super::SECOND)
    } else {
        Some(CUT)
    }
}
