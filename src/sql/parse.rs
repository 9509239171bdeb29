//! The one door to sqlparser: SQL text to a syntax tree.
//!
//! The engine's `prepare` decides what is valid; a tree is for looking at a query. About 2 % of what models write, and a few
//! shapes that SQLite accepts (`x ISNULL`, `NOT GLOB`), have none.

use sqlparser::ast::Statement;
use sqlparser::dialect::SQLiteDialect;
use sqlparser::parser::Parser;

/// Why a text has no tree, in the parser's words, which name line and column.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseProblem(String);

/// The statements of a text, by SQLite's grammar as sqlparser knows it. Deep nesting is an error, never a crash.
///
/// # Errors
/// Where the parser does not follow.
pub fn parse(sql: &str) -> Result<Vec<Statement>, ParseProblem> {
    let mut parser = Parser::new(&SQLiteDialect {})
        .try_with_sql(sql)
        .map_err(|error| problem(&error))?;
    parser.parse_statements().map_err(|error| problem(&error))
}

fn problem(error: &sqlparser::parser::ParserError) -> ParseProblem {
    let text = error.to_string();
    ParseProblem(text.strip_prefix("sql parser error: ").unwrap_or(&text).to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn queries_of_sqlite_have_a_tree() {
        for sql in [
            "SELECT `County Name`, [x y], \"şarkıcı\" FROM frpm WHERE a GLOB 'x*' LIMIT 1, 2",
            "WITH a AS (SELECT 1) SELECT iif(1 > 0, 'ä', NULL), CAST(x AS REAL) FROM a EXCEPT SELECT 2, 3",
            "SELECT strftime('%Y', d), row_number() OVER (PARTITION BY a ORDER BY b) FROM t",
        ] {
            assert_eq!(parse(sql).unwrap().len(), 1, "{sql}");
        }
    }

    #[test]
    fn a_problem_names_its_place() {
        let problem = parse("SELECT a FROM t WHERE (b = 1").unwrap_err().to_string();
        assert!(
            problem.contains("Expected") && !problem.contains("sql parser error"),
            "{problem}"
        );
        assert!(parse("SELECT a FROM t WHERE ORDER BY").is_err());
        assert!(parse(&format!("SELECT {}1{}", "(".repeat(5000), ")".repeat(5000))).is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "\\PC{0,100}") {
            let _ = parse(&text);
        }
    }
}
