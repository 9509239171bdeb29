//! Whole pipeline files: what loads, and where each class of mistake is reported.

use proptest::prelude::*;

use super::*;

const GOOD: &str = include_str!("../../tests/fixtures/pipelines/design-example.yaml");

struct Templates;

impl TemplateNames for Templates {
    fn languages_of(&self, template: &str) -> Vec<String> {
        if self.all().iter().any(|name| name == template) {
            vec!["en".into()]
        } else {
            Vec::new()
        }
    }

    fn all(&self) -> Vec<String> {
        [
            "schema-linking",
            "classification",
            "easy",
            "non-nested",
            "nested",
            "self-correction",
        ]
        .iter()
        .map(|name| format!("din-sql/{name}"))
        .collect()
    }
}

fn load(text: &str, set: &[&str]) -> Result<Pipeline, String> {
    let overrides: Vec<Override> = set
        .iter()
        .map(|text| Override::parse(text).expect("an override"))
        .collect();
    load_pipeline("p.yaml", text.as_bytes(), &overrides, &Templates).map_err(|found| found.to_string())
}

/// The mistakes of the good file after one replacement.
fn mistakes(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "{from}");
    load(&GOOD.replacen(from, to, 1), &[]).expect_err(to)
}

#[test]
fn the_design_example_loads_and_survives_yaml() {
    let pipeline = load(GOOD, &[]).expect("valid");
    assert_eq!(pipeline.answer.to_string(), "self_correction.sql");
    assert_eq!(pipeline.templates().len(), 6);
    let label = &pipeline.stages[1].extract["label"];
    assert_eq!(label.after.as_deref(), Some("Label:"));
    assert_eq!(label.default, Some(DefaultValue::Text("NESTED".into())));
    let yaml = to_yaml(&pipeline).expect("serialisable");
    assert_eq!(serde_yaml::from_str::<Pipeline>(&yaml).expect("readable"), pipeline);
    let json = serde_json::to_string(&pipeline).expect("serialisable");
    assert_eq!(serde_json::from_str::<Pipeline>(&json).expect("readable"), pipeline);
}

#[test]
fn each_mistake_is_at_its_place() {
    for (from, to, expected) in [
        (
            "max_tokens: 2000",
            "max_token: 2000",
            "p.yaml:3:74: unknown key `max_token` in `model`\n  help: did you mean `max_tokens`?",
        ),
        (
            "temperature: 0",
            "temperature: warm",
            "p.yaml:3:71: expected a number for `temperature`, found text `warm`",
        ),
        (
            "temperature: 0",
            "temperature: 2.1",
            "p.yaml:3:71: `temperature` is out of range: `2.1`",
        ),
        ("max_tokens: 2000", "max_tokens: 0", "`max_tokens` is out of range: `0`"),
        (
            "answer: self_correction.sql\n",
            "",
            "p.yaml:1:1: the pipeline has no `answer`",
        ),
        (
            "name: schema_linking",
            "name: Schema-Linking",
            "help: a name is a lowercase letter, then lowercase letters, digits and `_`, as in `schema_linking`",
        ),
        (
            "name: schema_linking",
            "name: question",
            "p.yaml:6:11: a stage can't be named `question`",
        ),
        (
            "name: self_correction",
            "name: classification",
            "p.yaml:21:11: there are two stages `classification`",
        ),
        (
            "    prompt: din-sql/self-correction\n",
            "",
            "p.yaml:21:5: the stage `self_correction` has neither `prompt` nor `switch`",
        ),
        (
            "    switch: c",
            "    prompt: din-sql/easy\n    switch: c",
            "p.yaml:16:5: the stage `generation` has both `prompt` and `switch`",
        ),
        (
            "switch: classification.label",
            "switch: classification.lable",
            "did you mean `classification.label`?",
        ),
        (
            "switch: classification.label",
            "switch: self_correction.sql",
            "p.yaml:15:13: `switch` reads `self_correction.sql`, but the stage `self_correction` comes later",
        ),
        (
            "switch: classification.label",
            "switch: schema_linking.links",
            "which is a list and no label",
        ),
        (
            "NON-NESTED: {",
            "NON-NESTD: {",
            "p.yaml:18:7: `NON-NESTD` is none of the labels of `classification.label`\n  help: did you mean `NON-NESTED`?",
        ),
        (
            "      NON-NESTED: { prompt: din-sql/non-nested }\n",
            "",
            "p.yaml:16:5: no case for the label `NON-NESTED`",
        ),
        (
            "prompt: din-sql/non-nested",
            "prompt: din-sql/nonnested",
            "p.yaml:18:29: there is no template `din-sql/nonnested`\n  help: did you mean `din-sql/non-nested`?",
        ),
        (
            "answer: self_correction.sql",
            "answer: gen.sql",
            "did you mean `generation.sql`? outputs that can be read here: `schema_linking.links`, `classification.label`",
        ),
        (
            "answer: self_correction.sql",
            "answer: classification.label",
            "`answer` reads `classification.label`, which is a label, expected SQL",
        ),
        (
            "{{ generation.sql }}",
            "{{ self_correction.sql }}",
            "p.yaml:23:63: `default` reads `self_correction.sql`, an output of this stage itself",
        ),
        (
            "\"{{ generation.sql }}\"",
            "{{ generation.sql }}",
            "p.yaml:23:59: `{{` opens a YAML mapping here",
        ),
        (
            "{ sql_after: \"SQL:\" }",
            "{ regex: '(SELECT' }",
            "p.yaml:20:30: the pattern is not valid: unclosed group",
        ),
        (
            "extract: { sql: { sql_after: \"SQL:\" } }",
            "extract: {}",
            "p.yaml:20:14: `extract` is empty",
        ),
        ("default: NESTED", "default: NESTD", "did you mean `NESTED`?"),
        (
            "schema: {",
            "name: other\nschema: {",
            "p.yaml:4:1: the key `name` is given twice",
        ),
    ] {
        let found = mistakes(from, to);
        assert!(found.contains(expected), "for {to}\nexpected {expected}\nfound {found}");
    }
}

#[test]
fn mistakes_come_alone_and_all_together() {
    // One mistake brings no second one about.
    for (from, to) in [
        ("NON-NESTED: {", "NON-NESTD: {"),
        ("{ sql_after: \"SQL:\" }", "{ sql_afer: \"SQL:\" }"),
        ("name: din-sql", "nmae: din-sql"),
        (
            "    prompt: din-sql/classification",
            "    promt: din-sql/classification",
        ),
        ("name: schema_linking", "name: Schema-Linking"),
        ("one_of: [EASY, NON-NESTED, NESTED]", "one_of: [EASY, easy]"),
    ] {
        let found = mistakes(from, to);
        assert_eq!(found.matches("p.yaml:").count(), 1, "{found}");
    }
    let several = include_str!("../../tests/fixtures/pipelines/bad-several.yaml");
    let found = load(several, &[]).expect_err("mistakes");
    let lines: Vec<&str> = found.lines().filter(|line| line.starts_with("p.yaml")).collect();
    assert_eq!(lines.len(), 7, "{found}");
}

/// The last stage's `extract` of the good file, with a response format before it.
fn structured(format: &str, sql: &str) -> String {
    let from = "    extract: { sql: { sql_after: \"Revised_SQL:\", default: \"{{ generation.sql }}\" } }\n";
    assert!(GOOD.contains(from));
    GOOD.replacen(
        from,
        &format!("    response_format: {format}\n    extract: {{ sql: {sql} }}\n"),
        1,
    )
}

const FORM: &str = "{ schema: { type: object, properties: { sql: { type: string, maxLength: 1000 } }, required: [sql], additionalProperties: false } }";

#[test]
fn response_formats_and_fallbacks_load() {
    let text = structured(
        FORM,
        "{ json: whole_answer, pointer: /sql, fallback: { sql_after: \"SQL:\", take: first }, default: \"{{ generation.sql }}\" }",
    );
    let pipeline = load(&text, &["generation.n=3", "model.logprobs=true"]).expect("valid");
    let stage = pipeline.stage("self_correction").expect("there");
    let format = stage.response_format.as_ref().expect("a format");
    assert_eq!(format.name, "self_correction");
    assert_eq!(format.schema["properties"]["sql"]["maxLength"], 1000);
    assert_eq!(format.schema["additionalProperties"], false);
    let fallback = stage.extract["sql"].fallback.as_ref().expect("a fallback");
    assert_eq!((&fallback.kind, fallback.take), (&ExtractKind::Sql, Take::First));
    let generation = &pipeline.stage("generation").expect("there").model;
    let effective = generation.over(&pipeline.model);
    assert_eq!((effective.n, effective.logprobs), (Some(3), Some(true)));
    let yaml = to_yaml(&pipeline).expect("serialisable");
    assert_eq!(serde_yaml::from_str::<Pipeline>(&yaml).expect("readable"), pipeline);

    // A fallback label takes the labels of the output.
    let text = GOOD.replacen(
        "default: NESTED }",
        "default: NESTED, fallback: { label: whole_answer } }",
        1,
    );
    let pipeline = load(&text, &[]).expect("valid");
    let label = &pipeline.stages[1].extract["label"];
    assert_eq!(
        label.fallback.as_ref().map(|fallback| &fallback.kind),
        Some(&label.kind)
    );

    let text = structured(FORM, "{ json: whole_answer, pointer: /sql }");
    let set = "self_correction.response_format.name=corrected-sql";
    let pipeline = load(&text, &[set]).expect("valid");
    assert_eq!(
        pipeline.stages[3]
            .response_format
            .as_ref()
            .map(|format| format.name.as_str()),
        Some("corrected-sql")
    );
}

/// Recorded runs are found by the digest of this text: what a pipeline doesn't use must not show in it.
#[test]
fn absent_keys_leave_no_mark_in_the_recorded_form() {
    let recorded = to_yaml(&load(GOOD, &[]).expect("valid")).expect("serialisable");
    for key in ["n:", "logprobs", "response_format", "fallback"] {
        assert!(
            !recorded.lines().any(|line| line.trim_start().starts_with(key)),
            "{key} in\n{recorded}"
        );
    }
}

#[test]
fn mistakes_in_response_formats_and_fallbacks() {
    const JSON: &str = "{ json: whole_answer, pointer: /sql }";
    for (format, sql, expected) in [
        (
            FORM,
            "{ sql_after: \"SQL:\" }",
            "p.yaml:23:5: the stage `self_correction` asks for JSON, but none of its outputs reads JSON\n  help: add an extractor \
             as in `sql: { json: whole_answer, pointer: /sql, fallback: { sql_after: \"SQL:\" } }`",
        ),
        (
            FORM,
            "{ json: whole_answer, pointer: /sqll }",
            "p.yaml:24:52: the `schema` of the stage `self_correction` has no `sqll`\n  help: did you mean `sql`?",
        ),
        ("{ name: x }", JSON, "p.yaml:23:5: `response_format` has no `schema`"),
        (
            "{ shema: {} }",
            JSON,
            "p.yaml:23:24: unknown key `shema` in `response_format`\n  help: did you mean `schema`?",
        ),
        (
            "json",
            JSON,
            "p.yaml:23:22: expected a mapping for `response_format`, found text `json`",
        ),
        (
            "{ schema: [a] }",
            JSON,
            "p.yaml:23:32: expected a mapping (a JSON Schema) for `schema`, found a list",
        ),
        (
            "{ name: my form, schema: {} }",
            JSON,
            "p.yaml:23:30: `my form` is no name for a response format\n  help: letters, digits, `_` and `-`, at most 64, as in `my_form`",
        ),
        (
            "{ schema: {} }",
            "{ json: whole_answer }",
            "`answer` reads `self_correction.sql`, which is a JSON value, expected SQL\n  help: say which part of the value is the SQL",
        ),
        (
            FORM,
            "{ json: whole_answer, pointer: /sql, fallback: { sql: whole_answer, default: a } }",
            "p.yaml:24:89: the fallback of `sql` has a `default` of its own\n  help: put it beside `fallback`",
        ),
        (
            FORM,
            "{ json: whole_answer, pointer: /sql, fallback: { sql: whole_answer, fallback: { sql: whole_answer } } }",
            "p.yaml:24:89: the fallback of `sql` has a `fallback` of its own\n  help: one fallback is all there is",
        ),
        (
            FORM,
            "{ json: whole_answer, pointer: /sql, fallback: SQL }",
            "p.yaml:24:68: expected a mapping for the fallback of `sql`, found text `SQL`",
        ),
        (
            FORM,
            "{ json: whole_answer, pointer: /sql, fallback: { sql_afer: x } }",
            "p.yaml:24:70: unknown key `sql_afer` in the fallback of `sql`\n  help: did you mean `sql_after`?",
        ),
        (
            FORM,
            "{ json: whole_answer, pointer: /sql, fallback: {} }",
            "p.yaml:24:58: the fallback of `sql` says not how it is read",
        ),
    ] {
        let found = load(&structured(format, sql), &[]).expect_err(expected);
        assert!(found.contains(expected), "expected {expected}\nfound {found}");
        assert_eq!(found.matches("p.yaml:").count(), 1, "{found}");
    }
    for (from, to, expected) in [
        (
            "default: NESTED }",
            "fallback: { text: whole_answer } }",
            "p.yaml:12:85: the fallback of `label` gives another kind of value than `label`",
        ),
        (
            "default: NESTED }",
            "fallback: { label: whole_answer, one_of: [EASY, HARD] } }",
            "gives another kind of value than `label`",
        ),
        ("max_tokens: 2000", "n: 0", "`n` is out of range: `0`"),
        ("max_tokens: 2000", "n: 33", "`n` is out of range: `33`"),
        (
            "max_tokens: 2000",
            "logprobs: 5",
            "expected `true` or `false` for `logprobs`, found number `5`",
        ),
        (
            "stages:",
            "response_format: {}\nstages:",
            "unknown key `response_format` in the pipeline",
        ),
    ] {
        let found = load(&GOOD.replacen(from, to, 1), &[]).expect_err(expected);
        assert!(found.contains(expected), "expected {expected}\nfound {found}");
    }
}

#[test]
fn overrides_change_the_pipeline_before_it_is_checked() {
    let pipeline = load(
        GOOD,
        &[
            "generation.temperature=0.5",
            "generation.model.seed=7",
            "generation.cases.EASY.max_tokens=300",
            "schema_linking.extract.links.list_after=Links:",
            "self_correction.prompt=din-sql/easy",
            "model.name=\"12\"",
            "schema.format=compact",
            "answer=generation.sql",
        ],
    )
    .expect("valid");
    let generation = pipeline.stage("generation").expect("there");
    assert_eq!(
        (generation.model.temperature, generation.model.seed),
        (Some(0.5), Some(7))
    );
    assert!(matches!(&generation.kind, StageKind::Switch { cases, .. } if cases["EASY"].model.max_tokens == Some(300)));
    assert_eq!(pipeline.stages[0].extract["links"].after.as_deref(), Some("Links:"));
    assert_eq!(pipeline.model.name.as_deref(), Some("12"));
    assert_eq!(pipeline.schema.format, SchemaFormat::Compact);
    assert_eq!(pipeline.answer.to_string(), "generation.sql");
}

#[test]
fn mistakes_in_overrides_show_the_argument() {
    for (set, expected) in [
        (
            "generation.temperature=abc",
            "--set:1:24: expected a number for `temperature`, found text `abc`",
        ),
        (
            "generatoin.temperature=1",
            "--set:1:1: there is no stage `generatoin` to set\n  help: did you mean `generation`?",
        ),
        (
            "generation.temprature=1",
            "--set:1:12: unknown key `temprature` for the stage `generation`\n  help: did you mean `temperature`?",
        ),
        ("model.temprature=1", "--set:1:7: unknown key `temprature` in `model`"),
        ("generation=1", "`generation` is a stage, which of its keys?"),
        ("generation.name=x", "a stage can't be renamed"),
        (
            "schema_linking.prompt=din-sql/schema-linkin",
            "did you mean `din-sql/schema-linking`?",
        ),
        ("model.seed=", "expected a whole number for `seed`, found nothing"),
        ("schema_linking.prompt.x=1", "what holds it is no mapping"),
    ] {
        let found = load(GOOD, &[set]).expect_err(set);
        assert!(
            found.contains(expected),
            "for {set}\nexpected {expected}\nfound {found}"
        );
    }
    assert!(Override::parse("model.temperature").is_err());
    assert!(Override::parse("=1").is_err());
    assert!(Override::parse("model.stop=[a").is_err());
}

#[test]
fn every_bad_fixture_is_refused_with_its_place() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/pipelines");
    let mut bad = 0;
    for entry in std::fs::read_dir(folder).expect("fixtures") {
        let path = entry.expect("readable").path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default()
            .to_owned();
        if !name.starts_with("bad-") {
            continue;
        }
        bad += 1;
        let bytes = std::fs::read(&path).expect("readable");
        let found = load_pipeline(&name, &bytes, &[], &Templates).expect_err(&name);
        let rendered = found.render(false, 100);
        for diagnostic in &found {
            let (line, column) = diagnostic.position();
            assert!(rendered.contains(&format!("{name}:{line}:{column}")), "{rendered}");
            assert_eq!(
                found.iter().filter(|other| *other == diagnostic).count(),
                1,
                "{rendered}"
            );
        }
    }
    assert!(bad > 30, "{bad}");
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Err(found) = load_pipeline("p.yaml", &bytes, &[], &Templates) {
            prop_assert!(found.render(false, 80).contains("p.yaml"));
        }
        let _ = load_project("dinsql.yaml", &bytes);
    }

    #[test]
    fn no_yaml_like_text_makes_it_panic(text in "[a-c:{}\\[\\],&*!|>'\"\\-?#%@\\\\ \t\r\nş\u{feff}]{0,60}") {
        if let Err(found) = load_pipeline("p.yaml", text.as_bytes(), &[], &Templates) {
            prop_assert!(found.render(false, 80).contains("p.yaml"));
        }
        let _ = load_project("dinsql.yaml", text.as_bytes());
    }

    /// A damaged copy of a good file is refused or read, whatever the damage.
    #[test]
    fn no_damage_makes_it_panic(start in 0usize..1300, length in 0usize..40, new in "[ -~\t\nşİ]{0,12}") {
        let characters: Vec<char> = GOOD.chars().collect();
        let start = start.min(characters.len());
        let end = (start + length).min(characters.len());
        let text: String = characters[..start].iter().copied().chain(new.chars()).chain(characters[end..].iter().copied()).collect();
        if let Err(found) = load_pipeline("p.yaml", text.as_bytes(), &[], &Templates) {
            prop_assert!(found.render(false, 80).contains("p.yaml:"));
        }
    }

    #[test]
    fn no_override_makes_it_panic(text in "(generation|model|schema|x|name)(\\.(cases|EASY|model|seed|extract|sql)){0,4}=[ -~]{0,12}") {
        if let Ok(change) = Override::parse(&text) {
            let _ = load_pipeline("p.yaml", GOOD.as_bytes(), &[change], &Templates);
        }
    }
}
