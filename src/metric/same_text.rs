//! Whether two SQL texts must have the same rows because they are the same text.

/// Words of what may give other rows at its next run. Also found inside of other words (`snow`), which costs a run.
const CHANGING: [&str; 5] = ["random", "now", "current_", "changes", "last_insert_rowid"];

/// Date functions that mean this moment where nothing is said of the time, as they stand without white space.
const CLOCKS: [&str; 6] = ["date()", "time()", "julianday()", "unixepoch()", "subsec", "strftime("];

/// Whether both are one text, apart from white space around it and one `;` at its end.
pub fn is_same_text(left: &str, right: &str) -> bool {
    trim(left) == trim(right)
}

/// White space as SQLite knows it: a no-break space is none.
fn trim(sql: &str) -> &str {
    let sql = sql.trim_ascii();
    sql.strip_suffix(';').unwrap_or(sql).trim_ascii()
}

/// Whether a query has the same rows each time it runs on the same file, as far as its text tells: `false` where in doubt.
pub fn is_repeatable(sql: &str) -> bool {
    let text: String = sql
        .chars()
        // A function's name may be quoted, too.
        .filter(|letter| !letter.is_whitespace() && !matches!(letter, '"' | '`' | '[' | ']'))
        .map(|letter| letter.to_ascii_lowercase())
        .collect();
    // A comment may stand between a function's name and its brackets.
    let plain = !text.contains("/*") && !text.contains("--");
    let steady = |word: &&str| {
        text.match_indices(*word)
            .all(|(at, word)| word == "strftime(" && names_a_time(&text[at + word.len()..]))
    };
    plain && CHANGING.iter().all(steady) && CLOCKS.iter().all(steady)
}

/// Whether `strftime`'s arguments, which the text begins with, go on after the format.
fn names_a_time(arguments: &str) -> bool {
    arguments
        .find([',', ')'])
        .is_some_and(|at| arguments[at..].starts_with(','))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_around_and_one_semicolon_do_not_count() {
        assert!(is_same_text("SELECT 1", "\n SELECT 1 ;\r\n"));
        for other in [
            "SELECT 1;;",
            "select 1",
            "SELECT  1",
            "SELECT 1\u{a0}",
            "SELECT 1; SELECT 2",
            "",
        ] {
            assert!(!is_same_text("SELECT 1", other), "{other:?}");
        }
    }

    #[test]
    fn what_may_change_is_run_again() {
        for steady in [
            "SELECT name FROM item WHERE date(born) > '1990-01-01'",
            "SELECT strftime('%Y', born) FROM item",
        ] {
            assert!(is_repeatable(steady), "{steady}");
        }
        for changing in [
            "SELECT RANDOM ()",
            "SELECT hex(randomblob(4))",
            "SELECT date('Now')",
            "SELECT current_timestamp",
            "SELECT changes()",
            "SELECT last_insert_rowid()",
            "SELECT datetime( )",
            "SELECT strftime('%Y')",
            "SELECT strftime('%Y', born), strftime('%J') FROM item",
            "SELECT unixepoch('subsec')",
            "SELECT time/* */()",
            "SELECT \"time\"()",
            "SELECT [date] ()",
        ] {
            assert!(!is_repeatable(changing), "{changing}");
        }
    }
}
