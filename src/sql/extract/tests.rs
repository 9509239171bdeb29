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
