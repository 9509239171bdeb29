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
    assert_eq!(
        after("SQL: SELECT 1\n\nRevised_SQL: SELECT 2", "Revised_SQL:"),
        "SELECT 2"
    );
    let first = extract_sql("SQL: SELECT 1\nSQL: SELECT 2", Some("SQL:"), Occurrence::First).unwrap();
    assert_eq!(first.sql.lines().next(), Some("SELECT 1"));
}

/// Each answer ends in, or holds, the same query.
const QUERY: &str =
    "SELECT name\nFROM `a b` AS t\nWHERE note = 'x; Note: y'\n  AND age > 2 -- This query is long\nORDER BY name";

#[test]
fn a_closing_fence_ends_a_query_that_the_prompt_began() {
    for end in [
        "\n```",
        "\n```\nThis query lists names.",
        "```",
        ";\n```\n\nMore.",
        "\n```\nOr:\n```sql\nSELECT 2\n```",
    ] {
        assert_eq!(whole(&format!("{QUERY}{end}")), QUERY, "{end:?}");
        assert_eq!(after(&format!("SQL: {QUERY}{end}"), "SQL:"), QUERY, "{end:?}");
    }
    assert_eq!(
        whole("SELECT a FROM t WHERE b = 'it\n```"),
        "SELECT a FROM t WHERE b = 'it"
    );
}

#[test]
fn inline_code_is_taken_without_its_backticks() {
    for (answer, sql) in [
        ("The query `SELECT a FROM t` returns `a` of t.", "SELECT a FROM t"),
        (
            "Use `SELECT COUNT(`a`), t.`b` FROM `t`;` here.",
            "SELECT COUNT(`a`), t.`b` FROM `t`",
        ),
        ("Use ``SELECT `a` FROM t`` here.", "SELECT `a` FROM t"),
        (
            "So `SELECT a FROM t WHERE t.`a` = `b`` is it.",
            "SELECT a FROM t WHERE t.`a` = `b`",
        ),
        ("Sorgu: `SELECT ad FROM şarkıcı`.", "SELECT ad FROM şarkıcı"),
        ("The `SELECT` clause first. **SELECT a FROM t**", "SELECT a FROM t"),
        ("<sql>SELECT a FROM t</sql>", "SELECT a FROM t"),
        ("~~~sql\nSELECT a FROM t\n~~~\nThat is it.", "SELECT a FROM t"),
    ] {
        assert_eq!(whole(answer), sql, "{answer:?}");
    }
}

#[test]
fn the_word_select_in_a_sentence_begins_no_query() {
    for before in [
        "So we must select the name from the table. The query is: ",
        "First select all rows of the table, then filter. ",
        "We use a SELECT statement: ",
        "Select the name from the table.\n",
        "We select name and age from singer. So: ",
        "Wir müssen mit SELECT die Namen holen: ",
        "Bunun için SELECT ifadesi gerekir. Sorgu: ",
        "With the table t we select its names: ",
        "Use SELECT ... FROM: ",
    ] {
        assert_eq!(
            whole(&format!("{before}SELECT name FROM t WHERE a = 1")),
            "SELECT name FROM t WHERE a = 1",
            "{before:?}"
        );
        let marked = format!("SQL: {before}SELECT name FROM t");
        assert_eq!(after(&marked, "SQL:"), "SELECT name FROM t", "{before:?}");
    }
    assert_eq!(whole("I would select the rows first."), "");
    for sql in [
        "SELECT query FROM log",
        "select the, one FROM t",
        "select all a FROM t",
        "SELECT which.a FROM which",
        "SELECT a FROM the WHERE b",
    ] {
        assert_eq!(whole(sql), sql);
    }
    let lower = "select a from t\nwhere b in (select b from u)\nunion\nselect c from v";
    assert_eq!(whole(&format!("It is: {lower}")), lower);
    assert_eq!(
        whole("It is: WITH x AS (SELECT 1)\nSELECT * FROM x"),
        "WITH x AS (SELECT 1)\nSELECT * FROM x"
    );
}

#[test]
fn prose_behind_a_query_is_no_part_of_it() {
    for prose in [
        "Explanation: it lists names",
        "**Explanation:** it lists names",
        "Explanation:",
        "This query lists names",
        "This is the query",
        "Note: names are unique; ages are not",
        "Açıklama: adları listeler",
        "Bu sorgu adları listeler",
        "Erklärung: nennt Namen",
        "Diese Abfrage nennt Namen",
        "In this query, we list names",
        "Here's the result",
        "It's done",
        "- the first column is the name",
        "1. The name is taken",
        "### Notes",
        "---\nmore",
        "(Note that names are unique)",
        "Hope this helps!",
        "Revised_SQL: SELECT 2",
        "→ names",
    ] {
        assert_eq!(whole(&format!("{QUERY}\n{prose}")), QUERY, "{prose:?}");
        assert_eq!(whole(&format!("{QUERY}\n\n{prose}")), QUERY, "{prose:?}");
    }
    assert_eq!(whole("SELECT a FROM t."), "SELECT a FROM t");
    assert_eq!(whole("SELECT a FROM t. It returns a."), "SELECT a FROM t");
}

#[test]
fn later_lines_of_a_query_stay() {
    for sql in [
        QUERY,
        "SELECT\n  first name_one,\n  second\n  FROM\n  singer s\n  LEFT JOIN\n  concert c\n  ON c.id = s.id\n  AND s.x = 1\nLIMIT\n  5",
        "SELECT a,\n\n  b\nFROM t",
        "SELECT CASE\nWHEN a THEN 'Note: x'\nELSE\n'y'\nEND\ntotal,\nb\nFROM t",
        "SELECT a FROM t WHERE b IN (\n  SELECT b FROM u\n)\n-- Explanation: kept\nUNION\nSELECT c FROM v",
        "SELECT COUNT(*)\ntotal FROM t\nAS\nthe_alias",
        "SELECT a || ': '\n|| b FROM t\nWHERE a =\n'This query'\nOR\n\"The name\" = 1",
        "SELECT * FROM singer\ns JOIN concert\nc ON s.id = c.id\nIN (1, 2)",
        "WITH a AS (\n  SELECT 1\n),\nb AS (\n  SELECT 2\n)\nSELECT * FROM a, b",
        "SELECT COUNT(a)\n\n* 100\n\n/\n\n(SELECT 2) FROM t",
        "SELECT 1. + 2.\nFROM t /* This\nquery */\nORDER BY 1",
    ] {
        assert_eq!(whole(sql), sql);
        assert_eq!(whole(&format!("{sql}\n```\nThat is all.")), sql);
    }
}

#[test]
fn a_missing_marker_is_told() {
    let note =
        |answer: &str| extract_sql(answer, Some("SQL:"), Occurrence::Last).map(|found| (found.sql, found.notes[0]));
    let fence = "the marker was not found, the answer's only SQL fence was read";
    let all = "the marker was not found, the whole answer was read as a query";
    assert_eq!(
        note("**SQL Query:**\n```sql\nSELECT 1\n```\nIt is 1."),
        Some(("SELECT 1".into(), fence))
    );
    assert_eq!(note("SELECT 1;"), Some(("SELECT 1".into(), all)));
    assert_eq!(note("```sql\nSELECT 1\n```\n```sql\nSELECT 2\n```"), None);
    assert_eq!(note("SELECT 1; SELECT 2"), None);
    assert_eq!(note("The query is SELECT 1"), None);
    for marker in [
        "**SQL:**",
        "**SQL**:",
        "### SQL:",
        "__SQL:__",
        "*SQL*:",
        "`SQL:`",
        "> **sql :**",
    ] {
        let found = extract_sql(&format!("Words.\n{marker} SELECT 1"), Some("SQL:"), Occurrence::Last).unwrap();
        assert_eq!((found.sql.as_str(), found.notes.len()), ("SELECT 1", 0), "{marker}");
    }
}

#[test]
fn invented_turns_are_cut() {
    for turn in [
        "Question: How many?",
        "Q: How many?",
        "### Question\nHow many?",
        "**Soru:** Kaç?",
        "Frage: Wie viele?",
    ] {
        for gap in ["\n", "\n\n", ";\n\n"] {
            let answer =
                format!("SQL: SELECT 0\nQ. that is:\nSQL: SELECT 1{gap}{turn}\nSQL: SELECT 2\n\n{turn}\nSQL: SELECT 3");
            assert_eq!(after(&answer, "SQL:"), "SELECT 1", "{turn:?}");
            assert_eq!(
                whole(&format!("SELECT 1{gap}{turn}\n```sql\nSELECT 2\n```")),
                "SELECT 1",
                "{turn:?}"
            );
        }
        assert_eq!(
            after(&format!("{turn}\nSQL: SELECT 1"), "SQL:"),
            "SELECT 1",
            "the question repeated first"
        );
    }
}

#[test]
fn reasoning_and_chat_marks() {
    for answer in [
        "<think>a</think>SELECT 1<think>b</think>",
        "SELECT 1\n<think>SELECT 2",
        "<|im_start|>\nSELECT 1<|im_end|>",
        "<thinking>SELECT 2</thinking>\nSELECT 1<end_of_turn>\n<start_of_turn>user",
    ] {
        assert_eq!(whole(answer), "SELECT 1", "{answer:?}");
    }
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

    /// Text made of what the rules look at.
    #[test]
    fn any_mixture_is_survived(
        parts in prop::collection::vec(
            prop::sample::select(vec![
                "SELECT", "select", " ", "\n", "```", "`", "~~~", "'", "\"", "[", "(", ")", ";", ":", "SQL:", "**", "ş", "İ",
                "Question:", "<think>", "</think>", "</s>", "WITH", "AS", "FROM", "the", "--", "/*", "*/", "…", ".", "：", "1",
            ]),
            0..40,
        )
    ) {
        let answer = parts.concat();
        for take in [Occurrence::First, Occurrence::Last] {
            let _ = extract_sql(&answer, None, take);
            let _ = extract_sql(&answer, Some("SQL:"), take);
        }
    }

    /// A query is found whole in whatever is put around it.
    #[test]
    fn wrapped_queries_come_back(
        column in "[a-zşığüöç]{1,8}_",
        literal in "[a-z;:#\\- \"]{0,12}",
        rest in prop::sample::select(vec!["", "\nORDER BY\n  a DESC", " AND y IN (\n  SELECT y FROM u\n)", "\nUNION\nSELECT `b c` FROM v"]),
        fence in prop::sample::select(vec!["", "```sql\n", "```\n", "```SQLite\n", "~~~sql\n"]),
        before in prop::sample::select(vec!["", "Here you go:\n", "Elbette!\n\n", "SQL şöyle:\n", "We select the rows.\n", "<think>SELECT 0</think>"]),
        end in prop::sample::select(vec!["", ";", " ; ", "; -- done"]),
        behind in prop::sample::select(vec!["", "\nThis query lists it.", "\n\nAçıklama: budur.", "\nQuestion: b?\nSQL: SELECT 0", "<|im_end|>"]),
    ) {
        let sql = format!("SELECT {column} FROM t WHERE x = '{literal}'{rest}");
        let close = match fence { "" => "", "~~~sql\n" => "\n~~~\nThat is all.", _ => "\n```\nThat is all." };
        let body = format!("{fence}{sql}{end}{close}{behind}");
        prop_assert_eq!(&whole(&format!("{before}{body}")), &sql);
        for marker in ["SQL: ", "**SQL:** ", "### SQL:\n"] {
            prop_assert_eq!(&after(&format!("{before}{marker}{body}"), "SQL:"), &sql);
        }
    }
}
