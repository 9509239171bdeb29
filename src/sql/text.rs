//! The outer shape of SQL text: quoted parts, comments, the first statement, quoting of names.

/// What stands at a place of a SQL text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// `'…'`, `"…"`, `` `…` `` or `[…]`.
    Quoted,
    /// `-- …` to the line's end, or `/* … */`.
    Comment,
    /// `;`
    Semicolon,
    /// White space.
    Space,
    /// Anything else, one character.
    Other,
}

/// Walks a text piece by piece; positions are bytes. An unclosed quote or comment reaches to the end.
#[derive(Debug, Clone)]
pub struct Pieces<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Pieces<'a> {
    pub fn new(text: &'a str) -> Self {
        Pieces { text, at: 0 }
    }
}

impl Iterator for Pieces<'_> {
    type Item = (usize, usize, Piece);

    fn next(&mut self) -> Option<Self::Item> {
        let start = self.at;
        let rest = &self.text[start..];
        let first = rest.chars().next()?;
        let (length, piece) = match first {
            '\'' | '"' | '`' => (quoted_length(rest, first), Piece::Quoted),
            '[' => (rest.find(']').map_or(rest.len(), |end| end + 1), Piece::Quoted),
            '-' if rest.starts_with("--") => (rest.find('\n').map_or(rest.len(), |end| end + 1), Piece::Comment),
            '/' if rest.starts_with("/*") => (rest[2..].find("*/").map_or(rest.len(), |end| end + 4), Piece::Comment),
            ';' => (1, Piece::Semicolon),
            other if other.is_whitespace() => (other.len_utf8(), Piece::Space),
            other => (other.len_utf8(), Piece::Other),
        };
        self.at = start + length;
        Some((start, self.at, piece))
    }
}

/// Bytes of a quoted part, closing quote included; a doubled quote stands for itself.
fn quoted_length(text: &str, quote: char) -> usize {
    let mut at = 1;
    while let Some(found) = text[at..].find(quote) {
        at += found + 1;
        if text[at..].starts_with(quote) {
            at += 1;
        } else {
            return at;
        }
    }
    text.len()
}

/// A text cut after its first statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatementSplit<'a> {
    /// Nothing but comments and white space follow; the statement is without its `;`.
    One(&'a str),
    /// Something else follows, at this byte.
    More { statement: &'a str, rest_at: usize },
}

/// Cuts after the first statement, by the rule of Python's `sqlite3`: white space and comments may follow the `;`,
/// anything else, even a second `;`, is another statement. A text that begins with `;` is an empty statement.
pub fn split_first_statement(sql: &str) -> StatementSplit<'_> {
    let mut pieces = Pieces::new(sql);
    let Some((end, after)) = pieces
        .by_ref()
        .find_map(|(start, end, piece)| (piece == Piece::Semicolon).then_some((start, end)))
    else {
        return StatementSplit::One(sql);
    };
    let statement = &sql[..end];
    let rest = pieces.find(|(_, _, piece)| !matches!(piece, Piece::Space | Piece::Comment));
    match rest {
        None => StatementSplit::One(statement),
        Some((rest_at, ..)) => {
            debug_assert!(rest_at >= after);
            StatementSplit::More { statement, rest_at }
        }
    }
}

/// A name in double quotes where it needs them: not plain ASCII lower/upper/digits/underscore, or a keyword.
pub fn quote_if_needed(name: &str) -> String {
    let plain = name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
        && name
            .chars()
            .all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
    if plain && !is_keyword(name) {
        name.to_owned()
    } else {
        quote_identifier(name)
    }
}

/// A name in double quotes.
pub fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Whether SQLite reserves the word (its documentation's keyword list), so that it needs quotes as a name.
pub fn is_keyword(word: &str) -> bool {
    let upper = word.to_ascii_uppercase();
    KEYWORDS.binary_search(&upper.as_str()).is_ok()
}

#[rustfmt::skip]
const KEYWORDS: &[&str] = &[
    "ABORT", "ACTION", "ADD", "AFTER", "ALL", "ALTER", "ALWAYS", "ANALYZE", "AND", "AS", "ASC", "ATTACH", "AUTOINCREMENT",
    "BEFORE", "BEGIN", "BETWEEN", "BY", "CASCADE", "CASE", "CAST", "CHECK", "COLLATE", "COLUMN", "COMMIT", "CONFLICT",
    "CONSTRAINT", "CREATE", "CROSS", "CURRENT", "CURRENT_DATE", "CURRENT_TIME", "CURRENT_TIMESTAMP", "DATABASE", "DEFAULT",
    "DEFERRABLE", "DEFERRED", "DELETE", "DESC", "DETACH", "DISTINCT", "DO", "DROP", "EACH", "ELSE", "END", "ESCAPE",
    "EXCEPT", "EXCLUDE", "EXCLUSIVE", "EXISTS", "EXPLAIN", "FAIL", "FILTER", "FIRST", "FOLLOWING", "FOR", "FOREIGN", "FROM",
    "FULL", "GENERATED", "GLOB", "GROUP", "GROUPS", "HAVING", "IF", "IGNORE", "IMMEDIATE", "IN", "INDEX", "INDEXED",
    "INITIALLY", "INNER", "INSERT", "INSTEAD", "INTERSECT", "INTO", "IS", "ISNULL", "JOIN", "KEY", "LAST", "LEFT", "LIKE",
    "LIMIT", "MATCH", "MATERIALIZED", "NATURAL", "NO", "NOT", "NOTHING", "NOTNULL", "NULL", "NULLS", "OF", "OFFSET", "ON",
    "OR", "ORDER", "OTHERS", "OUTER", "OVER", "PARTITION", "PLAN", "PRAGMA", "PRECEDING", "PRIMARY", "QUERY", "RAISE",
    "RANGE", "RECURSIVE", "REFERENCES", "REGEXP", "REINDEX", "RELEASE", "RENAME", "REPLACE", "RESTRICT", "RETURNING",
    "RIGHT", "ROLLBACK", "ROW", "ROWS", "SAVEPOINT", "SELECT", "SET", "TABLE", "TEMP", "TEMPORARY", "THEN", "TIES", "TO",
    "TRANSACTION", "TRIGGER", "UNBOUNDED", "UNION", "UNIQUE", "UPDATE", "USING", "VACUUM", "VALUES", "VIEW", "VIRTUAL",
    "WHEN", "WHERE", "WINDOW", "WITH", "WITHOUT",
];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keywords_are_sorted_for_the_search() {
        assert!(KEYWORDS.is_sorted());
        assert!(is_keyword("alter") && is_keyword("Order") && !is_keyword("name"));
        assert_eq!(quote_if_needed("alter"), "\"alter\"");
        assert_eq!(quote_if_needed("şarkıcı"), "\"şarkıcı\"");
        assert_eq!(quote_if_needed("County Name"), "\"County Name\"");
        assert_eq!(quote_if_needed("a_1"), "a_1");
    }

    #[test]
    fn statements_end_where_python_ends_them() {
        assert_eq!(
            split_first_statement("SELECT ';' -- ;\n, 1"),
            StatementSplit::One("SELECT ';' -- ;\n, 1")
        );
        assert_eq!(
            split_first_statement("SELECT 1; -- x; y"),
            StatementSplit::One("SELECT 1")
        );
        assert_eq!(
            split_first_statement("SELECT [a;b] ;/* ; */"),
            StatementSplit::One("SELECT [a;b] ")
        );
        let StatementSplit::More { statement, rest_at } = split_first_statement("SELECT 1; ;") else {
            panic!()
        };
        assert_eq!((statement, rest_at), ("SELECT 1", 10));
    }

    proptest! {
        #[test]
        fn pieces_cover_any_text(text in "[a-z;'\"`\\[\\]/*\\- \nşİ]{0,40}") {
            let mut at = 0;
            for (start, end, _) in Pieces::new(&text) {
                prop_assert_eq!(start, at);
                prop_assert!(end > start);
                at = end;
            }
            prop_assert_eq!(at, text.len());
        }

        #[test]
        fn quoted_names_are_one_piece(name in "\\PC{0,20}") {
            let quoted = quote_identifier(&name);
            let pieces: Vec<_> = Pieces::new(&quoted).collect();
            prop_assert_eq!(pieces, vec![(0, quoted.len(), Piece::Quoted)]);
        }
    }
}
