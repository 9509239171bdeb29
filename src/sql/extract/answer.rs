//! The parts of an answer: reasoning, chat marks, what follows a marker, turns that the model invented.

use super::Occurrence;

/// Marks of chat templates that weak models write into their answers.
const CHAT_MARKS: &[&str] = &[
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|start_header_id|>",
    "<|end|>",
    "<|assistant|>",
    "<|user|>",
    "</s>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[/INST]",
    "[INST]",
];

/// What opens and closes a reasoning block.
const REASONING: &[(&str, &str)] = &[("<think>", "</think>"), ("<thinking>", "</thinking>")];

/// What a line begins with where a model goes on with the next question instead of ending its answer.
const TURNS: &[&str] = &[
    "question",
    "q",
    "soru",
    "frage",
    "user",
    "human",
    "kullanıcı",
    "benutzer",
    "instruction",
];

/// Splits off the reasoning: what stands before the answer, and the answer, empty where the reasoning never ends.
pub fn split_reasoning(text: &str) -> (&str, &str) {
    let closed = REASONING
        .iter()
        .filter_map(|&(open, close)| text.rfind(close).map(|at| (at, open, at + close.len())))
        .max();
    if let Some((at, open, end)) = closed {
        // A block at the end: the answer came first.
        if text[end..].trim().is_empty()
            && let Some(opened) = text[..at].rfind(open)
            && !split_reasoning(&text[..opened]).1.trim().is_empty()
        {
            return split_reasoning(&text[..opened]);
        }
        let rest = &text[end..];
        return (&text[..end], unclosed_reasoning(rest).map_or(rest, |at| &rest[..at]));
    }
    match unclosed_reasoning(text) {
        Some(at) if text[..at].trim().is_empty() => (text, ""),
        Some(at) => ("", &text[..at]),
        None => ("", text),
    }
}

fn unclosed_reasoning(text: &str) -> Option<usize> {
    REASONING.iter().filter_map(|(open, _)| text.find(open)).min()
}

/// The answer without its reasoning block and chat marks.
pub fn clean_answer(answer: &str) -> (&str, Vec<&'static str>) {
    let mut notes = Vec::new();
    let (_, mut text) = split_reasoning(answer);
    if text.len() < answer.len() {
        notes.push(if text.trim().is_empty() {
            "the answer ends inside its reasoning block"
        } else {
            "a reasoning block was cut"
        });
    }
    while let Some(rest) = CHAT_MARKS.iter().find_map(|mark| text.trim_start().strip_prefix(mark)) {
        text = rest;
    }
    if let Some(cut) = CHAT_MARKS.iter().filter_map(|mark| text.find(mark)).min() {
        text = &text[..cut];
        notes.push("text from a chat mark on was cut");
    }
    (text, notes)
}

/// What follows a marker (`SQL:`), at the first or last place where the marker stands. A marker is found in any case
/// and emphasis (`**SQL:**`, `SQL**:`, `### SQL:`), not inside a longer word (`Revised_SQL:` does not hold the marker
/// `SQL:`); where it stands at the beginning of some line, places inside sentences do not count.
pub fn after_marker<'a>(text: &'a str, marker: &str, take: Occurrence) -> Option<&'a str> {
    let places = marker_places(text, marker);
    let (_, end) = match take {
        Occurrence::First => places.first(),
        Occurrence::Last => places.last(),
    }?;
    Some(&text[*end..])
}

/// Cuts at the first turn that the model invented after its first answer: a line `Question: …` behind something that
/// `is_answer` accepts. With a marker the answer is what follows it.
pub fn without_invented_turns<'a>(text: &'a str, marker: Option<&str>, is_answer: fn(&str) -> bool) -> (&'a str, bool) {
    let begins: Vec<usize> = match marker {
        Some(marker) => marker_places(text, marker).into_iter().map(|(_, end)| end).collect(),
        None => vec![0],
    };
    let mut line_at = 0;
    for line in text.split_inclusive('\n') {
        let answered = || begins.iter().any(|&at| at < line_at && is_answer(&text[at..line_at]));
        if is_turn(line) && answered() {
            return (&text[..line_at], true);
        }
        line_at += line.len();
    }
    (text, false)
}

fn is_turn(line: &str) -> bool {
    let heading = line.trim_start().starts_with("##");
    let line = line.trim_start_matches(|letter: char| letter.is_whitespace() || "*#>_".contains(letter));
    let length = line.find(|letter: char| !letter.is_alphabetic()).unwrap_or(line.len());
    let rest = line[length..].trim_start_matches(['*', '_', ' ']);
    let ends = rest.starts_with(':') || heading && rest.trim().is_empty();
    ends && TURNS.contains(&line[..length].to_lowercase().as_str())
}

/// Where the marker stands, as begin and end of the marker with its emphasis.
fn marker_places(text: &str, marker: &str) -> Vec<(usize, usize)> {
    let marker = marker.trim();
    let (word, colon) = match marker.strip_suffix(':') {
        Some(word) if !word.is_empty() => (word, true),
        _ => (marker, false),
    };
    if word.is_empty() {
        return Vec::new();
    }
    let bytes = text.as_bytes();
    let begins_word = word.chars().next().is_some_and(char::is_alphanumeric);
    let mut places = Vec::new();
    for at in 0..(bytes.len() + 1).saturating_sub(word.len()) {
        let end = at + word.len();
        if !bytes[at..end].eq_ignore_ascii_case(word.as_bytes())
            || !text.is_char_boundary(at)
            || !text.is_char_boundary(end)
        {
            continue;
        }
        // `__SQL:__` is emphasis, `Revised_SQL:` is another marker.
        let before = text[..at].trim_end_matches('_').chars().next_back();
        if begins_word && before.is_some_and(char::is_alphanumeric) {
            continue;
        }
        let rest = &text[end..];
        let after = if colon {
            let Some(after) = rest.trim_start_matches(['*', '_', '`', ' ']).strip_prefix(':') else {
                continue;
            };
            after
        } else {
            rest
        };
        // The marker's own closing emphasis is no part of what follows.
        let after = ["**", "__"]
            .iter()
            .find_map(|emphasis| after.strip_prefix(emphasis))
            .or_else(|| after.strip_prefix('*').filter(|_| text[..at].ends_with('*')))
            .or_else(|| after.strip_prefix('_').filter(|_| text[..at].ends_with('_')))
            .or_else(|| after.strip_prefix('`').filter(|_| text[..at].ends_with('`')))
            .unwrap_or(after);
        places.push((at, text.len() - after.len()));
    }
    if places.iter().any(|&(at, _)| begins_line(text, at)) {
        places.retain(|&(at, _)| begins_line(text, at));
    }
    places
}

fn begins_line(text: &str, at: usize) -> bool {
    let line = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
    text[line..at]
        .chars()
        .all(|letter| letter.is_whitespace() || "*#->`\"_".contains(letter))
}
