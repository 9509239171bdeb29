//! Tells sentences from SQL, in English, Turkish and German, by what SQL never holds: a word before a colon, two plain
//! words behind a complete expression, an article behind a keyword.

use super::super::text::{Piece, Pieces, is_keyword};

/// Keywords that a later line of a query can begin with.
#[rustfmt::skip]
const CLAUSES: &[&str] = &[
    "FROM", "WHERE", "GROUP", "ORDER", "HAVING", "LIMIT", "OFFSET", "UNION", "INTERSECT", "EXCEPT", "JOIN", "LEFT", "RIGHT",
    "INNER", "OUTER", "CROSS", "FULL", "NATURAL", "ON", "AND", "OR", "SELECT", "WINDOW", "CASE", "WHEN", "ELSE", "END", "AS",
    "THEN", "USING", "NOT", "IN", "BETWEEN", "IS", "LIKE", "GLOB", "REGEXP", "MATCH", "ESCAPE", "COLLATE", "ASC", "DESC",
    "NULLS", "OVER", "FILTER", "PARTITION", "ROWS", "RANGE", "BY", "SET", "VALUES", "RETURNING", "ISNULL", "NOTNULL",
];

/// Articles and pronouns: no names of columns or tables when another plain word follows.
#[rustfmt::skip]
const DETERMINERS: &[&str] = &[
    "the", "this", "these", "those", "that", "our", "your", "its", "each", "both", "we", "you", "it", "here", "there",
    "der", "die", "das", "dem", "den", "des", "dieser", "diese", "dieses", "diesem", "diesen", "dies", "wir", "man", "hier",
    "ein", "eine", "einen", "einem", "bu", "şu", "burada",
];

/// Further words that follow the verb or noun "select" in a sentence.
#[rustfmt::skip]
const SPOKEN: &[&str] = &[
    "an", "only", "which", "what", "query", "queries", "statement", "statements", "clause", "keyword", "command", "rows",
    "records", "every", "all", "and", "or", "of", "from", "for", "to", "with", "is", "one", "them", "alle", "nur", "und",
    "mit", "für", "abfrage", "anweisung", "befehl", "ifadesi", "sorgusu", "komutu", "deyimi", "cümlesi", "ile", "kullanarak",
    "için", "ve",
];

/// The longest label in words: `Explanation of the query above:`.
const LABEL_WORDS: usize = 6;

/// The line that begins here, without its end.
pub fn line_of(text: &str, at: usize) -> &str {
    text[at..].lines().next().unwrap_or_default()
}

/// Whether a `select` is a word of a sentence ("we select the name from …", "the SELECT clause").
pub fn is_spoken_of(text: &str, at: usize) -> bool {
    let rest = &text[at + "SELECT".len()..];
    let before = text[..at].chars().next_back();
    match rest.chars().next() {
        None | Some('-' | '.' | '!' | '?' | ',' | ':' | ';' | ')' | '’') => return true,
        Some('`') if before == Some('`') => return true,
        Some('\'') if before == Some(' ') => return true,
        _ => {}
    }
    let mut rest = rest.trim_start();
    if rest.starts_with("...") || rest.starts_with('…') {
        return true;
    }
    for prefix in ["all", "distinct"] {
        if let Some((word, after)) = leading_word(rest)
            && word.eq_ignore_ascii_case(prefix)
        {
            rest = after.trim_start();
        }
    }
    let Some((word, after)) = leading_word(rest) else {
        return false;
    };
    let lower = word.to_lowercase();
    let spoken = DETERMINERS.contains(&lower.as_str()) || SPOKEN.contains(&lower.as_str());
    if spoken && !is_column(after) {
        return true;
    }
    // "… from the table": no table is called like an article with another name behind it.
    let line = line_of(rest, 0);
    words_of(line)
        .windows(3)
        .find(|words| words[0].eq_ignore_ascii_case("FROM"))
        .is_some_and(|words| is_determiner(words[1]) && is_other_word(words[2]))
}

/// Whether what follows a word says that the word is a column's name.
fn is_column(after: &str) -> bool {
    let rest = after.trim_start();
    let next = leading_word(rest).map(|(word, _)| word.to_ascii_uppercase());
    match next.as_deref() {
        Some("FROM" | "AS") => true,
        Some(_) => false,
        None => {
            rest.starts_with([',', '(', '=', '<', '>', '+', '-', '*', '/', '|', '%'])
                || rest.starts_with('.') && !rest[1..].starts_with(char::is_whitespace) && rest.len() > 1
        }
    }
}

/// Whether a line after the query's first is prose. `open`: the query so far cannot be complete.
pub fn is_prose_line(line: &str, open: bool) -> bool {
    let line = line.trim();
    if is_label(line) || ["#", "---", "~~~"].iter().any(|mark| line.starts_with(mark)) {
        return true;
    }
    let digits = line.trim_start_matches(|letter: char| letter.is_ascii_digit());
    if digits.len() < line.len()
        && digits
            .strip_prefix(". ")
            .is_some_and(|rest| rest.starts_with(char::is_alphabetic))
    {
        return true;
    }
    if open || line.starts_with("--") || line.starts_with("/*") {
        return false;
    }
    let bullet = ["- ", "* ", "> "].iter().find_map(|bullet| line.strip_prefix(bullet));
    let rest = bullet.unwrap_or(line).trim_start_matches(['(', '*', '_']);
    match rest.chars().next() {
        Some(first) if first.is_alphabetic() => is_sentence(rest),
        Some(first) => !first.is_ascii() && !first.is_alphanumeric(),
        None => false,
    }
}

/// `Explanation: …`, `**Açıklama:** …`, `### Result:`: SQL holds no word before a colon and a space.
pub fn is_label(line: &str) -> bool {
    let line = line.strip_prefix("- ").unwrap_or(line);
    let line = line.trim_start_matches(|letter: char| letter.is_whitespace() || "*#>_".contains(letter));
    let Some((colon, width)) = line
        .char_indices()
        .find(|(_, letter)| matches!(letter, ':' | '：'))
        .map(|(at, letter)| (at, letter.len_utf8()))
    else {
        return false;
    };
    let (name, after) = (&line[..colon], &line[colon + width..]);
    name.starts_with(char::is_alphabetic)
        && name.char_indices().all(|(at, letter)| match letter {
            // An apostrophe stands inside a word; elsewhere it opens a literal.
            '\'' | '’' => name[..at].ends_with(char::is_alphabetic),
            _ => letter.is_alphanumeric() || " \t_-()/*".contains(letter),
        })
        && name.split_whitespace().count() <= LABEL_WORDS
        && (after.is_empty() || after.starts_with(|letter: char| letter.is_whitespace() || "*_`".contains(letter)))
}

/// Whether a line that begins with a word is a sentence, given that a complete expression stands before it.
pub fn is_sentence(line: &str) -> bool {
    let Some((first, rest)) = leading_word(line) else {
        return false;
    };
    let mut letters = rest.chars();
    match letters.next() {
        // `It's`, `Here’s`
        Some('\'' | '’') => {
            return letters.next().is_some_and(char::is_alphabetic) && !first.eq_ignore_ascii_case("x");
        }
        Some('.' | '!' | '?' | '…') => return letters.next().is_none_or(char::is_whitespace),
        Some(letter) if letter.is_whitespace() => {}
        _ => return false,
    }
    let words = words_of(line);
    let Some(second) = words.get(1).filter(|second| !second.is_empty()) else {
        return false;
    };
    let third = words.get(2);
    if is_clause(first) {
        return is_determiner(second) && third.is_some_and(|third| is_other_word(third));
    }
    is_determiner(first) && !is_clause_of_from(second)
        || !is_keyword(second)
        || is_determiner(second)
        || third.is_some_and(|third| is_determiner(third))
}

/// Keywords that follow a table's or column's new name.
fn is_clause_of_from(word: &str) -> bool {
    !word.eq_ignore_ascii_case("IS") && !word.eq_ignore_ascii_case("IN") && is_clause(word)
}

fn is_clause(word: &str) -> bool {
    CLAUSES.iter().any(|clause| clause.eq_ignore_ascii_case(word))
}

/// Whether it is a word, and none that goes on with a query.
fn is_other_word(word: &str) -> bool {
    !word.is_empty() && !is_clause(word)
}

/// Whether a paragraph after a blank line is words and not the query's next clause.
pub fn is_prose_paragraph(paragraph: &str) -> bool {
    let mut rest = paragraph.trim_start();
    while let Some((_, end, Piece::Comment)) = Pieces::new(rest).next() {
        rest = rest[end..].trim_start();
    }
    let line = line_of(rest, 0);
    if let Some(item) = line.strip_prefix("- ").or_else(|| line.strip_prefix("* ")) {
        return !item.starts_with(|first: char| first.is_ascii_digit() || first == '(');
    }
    let word = leading_word(rest).map_or("", |(word, _)| word);
    match rest.chars().next() {
        None => false,
        Some(first) => !"(),=<>+-*/|%&!~;".contains(first) && !is_clause(word),
    }
}

fn is_determiner(word: &str) -> bool {
    DETERMINERS.contains(&word.to_lowercase().as_str())
}

/// The word at the beginning, and the rest.
fn leading_word(text: &str) -> Option<(&str, &str)> {
    let end = text
        .find(|letter: char| !letter.is_alphanumeric() && letter != '_')
        .unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

/// The words at the beginning of a line that nothing but spaces separates: `T1.a = b` has none, `name of` has two.
/// Words that hold other signs end the list.
fn words_of(line: &str) -> Vec<&str> {
    line.split_whitespace()
        .map(|word| word.trim_end_matches(['.', ',', '!', '?', ';']))
        .map(|word| {
            let plain = word
                .chars()
                .all(|letter| letter.is_alphanumeric() || "_-'’".contains(letter));
            if plain { word } else { "" }
        })
        .collect()
}
