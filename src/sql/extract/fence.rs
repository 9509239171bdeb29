//! Code fences and inline code.

use super::super::text::Pieces;
use super::query::{STARTS, query_start};

/// A fenced part of a text.
#[derive(Debug, Clone, Copy)]
pub struct Fence<'a> {
    /// Where the opening fence stands.
    pub at: usize,
    /// Whether a language stands behind the opening fence, or a query.
    pub named: bool,
    pub content: &'a str,
    pub closed: bool,
}

/// The fences of a text, in order. An unclosed one reaches to the end.
pub fn fences(text: &str) -> Vec<Fence<'_>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some((open, mark, width)) = next_fence(text, at) {
        let rest = &text[open + width..];
        let info = rest
            .find(|letter: char| !letter.is_ascii_alphanumeric() && !"+-_.".contains(letter))
            .unwrap_or(rest.len());
        // A query may follow at once, without a language.
        let query = STARTS.iter().any(|word| rest[..info].eq_ignore_ascii_case(word));
        let body_at = open + width + if query { 0 } else { info };
        let body = &text[body_at..];
        let length = body.find(mark);
        let content = &body[..length.unwrap_or(body.len())];
        found.push(Fence {
            at: open,
            named: info > 0,
            content,
            closed: length.is_some(),
        });
        at = match length {
            Some(length) => {
                let close = body_at + length;
                text.len()
                    - text[close..]
                        .trim_start_matches(mark.chars().next().unwrap_or('`'))
                        .len()
            }
            None => text.len(),
        };
    }
    found
}

/// The next opening fence: its place, its mark and how wide it is. Tildes count at the beginning of a line only.
fn next_fence(text: &str, from: usize) -> Option<(usize, &'static str, usize)> {
    let ticks = text[from..].find("```").map(|at| (from + at, "```"));
    let tildes = text[from..]
        .match_indices("~~~")
        .map(|(at, _)| from + at)
        .find(|&at| text[..at].trim().is_empty() || text[..at].trim_end_matches([' ', '\t']).ends_with('\n'))
        .map(|at| (at, "~~~"));
    let (at, mark) = [ticks, tildes].into_iter().flatten().min()?;
    let sign = mark.chars().next()?;
    let rest = &text[at..];
    Some((at, mark, rest.len() - rest.trim_start_matches(sign).len()))
}

/// The fences that hold a query.
pub fn query_fences(text: &str) -> Vec<Fence<'_>> {
    let mut found = fences(text);
    found.retain(|fence| query_start(fence.content).is_some());
    found
}

/// Where inline code ends that begins with a query: the backtick that closes it, and not one that opens a name, which
/// stands behind a space, a bracket, a dot or an operator.
pub fn inline_end(query: &str, doubled: bool) -> Option<usize> {
    if doubled {
        return query.find("``");
    }
    let mut at = 0;
    while let Some((_, length, _)) = Pieces::new(&query[at..]).next() {
        if !query[at..].starts_with('`') {
            at += length;
            continue;
        }
        let before = query[..at].chars().next_back()?;
        if !before.is_whitespace() && !"(,.=<>+-/|".contains(before) {
            return Some(at);
        }
        // A name, which ends at the next backtick: a doubled one closes the name and the code.
        at += 2 + query[at + 1..].find('`')?;
    }
    None
}
