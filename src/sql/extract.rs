//! Finds the SQL in a model's answer: code fences, prose before and after, reasoning blocks, chat marks, a second
//! statement, turns that the model invented. What was cut is told in [`Found::notes`]; the query itself is handed on
//! byte for byte.

mod answer;
mod fence;
mod prose;
mod query;
#[cfg(test)]
mod tests;

pub use answer::{after_marker, clean_answer, split_reasoning, without_invented_turns};

use super::text::{Piece, Pieces};
use fence::{Fence, fences, inline_end, query_fences};
use query::{query_end, query_start};

const SECOND: &str = "a second statement was cut";

/// A query found in an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub sql: String,
    /// What had to be cut to find it, for the trace.
    pub notes: Vec<&'static str>,
}

/// Which of several marked places counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occurrence {
    First,
    Last,
}

/// The query in a text, or `None` where there is none. Where the marker does not stand in the answer, its only SQL fence
/// counts, or the whole answer where that is one query; a note says so.
pub fn extract_sql(answer: &str, marker: Option<&str>, take: Occurrence) -> Option<Found> {
    let (cleaned, mut notes) = clean_answer(answer);
    let holds_query = |text: &str| query_start(text).is_some();
    let (text, cut) = without_invented_turns(cleaned, marker, holds_query);
    if cut {
        notes.push("turns that the model invented were cut");
    }
    let Some(marker) = marker else {
        return read(text, unmarked_fence(text, take), notes);
    };
    if let Some(scope) = after_marker(text, marker, take) {
        return read(scope, marked_fence(scope), notes);
    }
    // A later turn's answer, without the marker, is none: what is wanted is looked for before it.
    let (text, _) = without_invented_turns(text, None, holds_query);
    match query_fences(text)[..] {
        [fence] => {
            notes.push("the marker was not found, the answer's only SQL fence was read");
            read(text, Some(fence), notes)
        }
        [] => {
            let body = unwrap_quotes(text.trim());
            let found = read(body, None, Vec::new())
                .filter(|found| body.starts_with(found.sql.as_str()) && !found.notes.contains(&SECOND))?;
            notes.push("the marker was not found, the whole answer was read as a query");
            notes.extend(found.notes);
            Some(Found { sql: found.sql, notes })
        }
        _ => None,
    }
}

/// Whether a text begins with a query, white space, comments and opening brackets aside.
pub fn begins_with_query(text: &str) -> bool {
    let start = Pieces::new(text).find(|(_, _, piece)| !matches!(piece, Piece::Space | Piece::Comment));
    start.is_some_and(|(start, ..)| query_start(&text[start..]) == Some(0))
}

/// Whether a query begins somewhere in a text: at the beginning of a line, or inside one.
pub fn holds_query(text: &str) -> bool {
    query_start(text).is_some()
}

/// The content of the text's first fence, and what stands before it.
pub fn first_fence(text: &str) -> Option<(&str, &str)> {
    fences(text).first().map(|fence| (&text[..fence.at], fence.content))
}

/// Whether a line begins with a label: `SQL:`, `**Query:** …`.
pub fn is_label(line: &str) -> bool {
    prose::is_label(line)
}

/// Whether a line that follows nothing unfinished is words and not SQL.
pub fn is_prose(line: &str) -> bool {
    prose::is_prose_line(line, false)
}

/// Reads the query in a fence, or in the text where there is none.
fn read(scope: &str, fence: Option<Fence<'_>>, mut notes: Vec<&'static str>) -> Option<Found> {
    let mut text = scope;
    if let Some(fence) = fence {
        text = fence.content;
        notes.push("a code fence was removed");
    }
    let text = unwrap_quotes(text.trim());
    let start = query_start(text)?;
    let (before, mut query) = text.split_at(start);
    let ticks = before.len() - before.trim_end_matches('`').len();
    if !before.trim().is_empty() {
        notes.push("text before the query was cut");
    }
    let mut inline = false;
    if matches!(ticks, 1 | 2)
        && let Some(end) = inline_end(query, ticks == 2)
    {
        inline = !query[end..].trim_matches('`').trim().is_empty();
        query = &query[..end];
    }
    let (end, reason) = query_end(query);
    notes.extend(reason.or(inline.then_some("text after the query was cut")));
    let sql = query[..end].trim();
    (!sql.is_empty()).then(|| Found {
        sql: sql.to_owned(),
        notes,
    })
}

/// The fence that follows a marker, unless the query itself does.
fn marked_fence(scope: &str) -> Option<Fence<'_>> {
    let fence = query_fences(scope).into_iter().next()?;
    query_start(&scope[..fence.at]).is_none().then_some(fence)
}

/// The last (or first) fence with a query in a whole answer.
fn unmarked_fence(text: &str, take: Occurrence) -> Option<Fence<'_>> {
    let all = fences(text);
    // A text that begins with the query and goes on with a closing fence: its opening one stood in the prompt.
    if let Some(first) = all.first() {
        let odd = all.last().is_some_and(|last| !last.closed);
        let begins = begins_with_query(&text[..first.at]);
        if begins && (odd && !first.named || take == Occurrence::First) {
            return None;
        }
    }
    let mut holding = query_fences(text).into_iter();
    match take {
        Occurrence::First => holding.next(),
        Occurrence::Last => holding.next_back(),
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
