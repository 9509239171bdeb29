//! The project file `dinsql.yaml`: providers and folders.
//!
//! In: the file's bytes. Out: [`ProjectSettings`], or every mistake with its place. Keys of servers never stand in the file: it names
//! the environment variable or the file that holds one, and a key that was written here all the same is blotted out of
//! every message. Whether the folders exist is not looked at.

use std::path::PathBuf;
use std::sync::Arc;

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::check::{Checker, suggest};
use super::keys;
use super::prices::{Price, best_match, read_price};
use super::secrets::{blot_out_keys, is_key_name, without_secrets};
use super::yaml::{self, Entry, Node, ScalarKind, Source, Value};
use crate::diagnostic::Diagnostics;

/// The built-in model's provider; its settings are not the project's.
const EMBEDDED: &str = "embedded";

/// A call that failed this often will not be saved by one more attempt.
const MOST_ATTEMPTS: u32 = 20;

/// What `dinsql.yaml` says; everything may be absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProjectSettings {
    /// By name, in file order.
    pub providers: IndexMap<String, ProviderSettings>,
    pub default_provider: Option<String>,
    /// Folders of manifests and datasets.
    pub datasets: Vec<PathBuf>,
    /// Folder of the templates.
    pub prompts: Option<PathBuf>,
    /// Folder of the pipeline files.
    pub pipelines: Option<PathBuf>,
    /// Folder of the run folders.
    pub runs: Option<PathBuf>,
    /// The completion cache.
    pub cache: Option<PathBuf>,
    /// The price file; the shipped prices where absent.
    pub prices: Option<PathBuf>,
    /// USD: a run whose estimate is above this asks first, on a terminal.
    pub confirm_above: Option<f64>,
}

/// A server that speaks `OpenAI`'s protocol, and its limits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProviderSettings {
    /// As in `https://api.example.com/v1`.
    pub base_url: String,
    /// Environment variable that holds the key.
    #[serde(default)]
    pub api_key_env: Option<String>,
    /// File whose first line is the key.
    #[serde(default)]
    pub api_key_file: Option<PathBuf>,
    /// Sent with each request.
    #[serde(default)]
    pub headers: IndexMap<String, String>,
    /// The model of pipelines that name none.
    #[serde(default)]
    pub model: Option<String>,
    /// Calls in flight at most.
    #[serde(default)]
    pub concurrency: Option<usize>,
    #[serde(default)]
    pub requests_per_minute: Option<u32>,
    /// Of prompts and completions together.
    #[serde(default)]
    pub tokens_per_minute: Option<u32>,
    /// Seconds for one attempt of one call.
    #[serde(default)]
    pub timeout: Option<f64>,
    /// Seconds for all attempts of one call and the waits between them.
    #[serde(default)]
    pub total_timeout: Option<f64>,
    /// Attempts of one call at most.
    #[serde(default)]
    pub attempts: Option<u32>,
    /// Tokens that a prompt and its completion may have together.
    #[serde(default)]
    pub context: Option<u32>,
    /// From names that pipelines use to the server's.
    #[serde(default)]
    pub models: IndexMap<String, String>,
    /// By the model's name, in pipelines or at the server; they win over the price file.
    #[serde(default)]
    pub prices: IndexMap<String, Price>,
    /// Whether `response_format` is sent to this server; it is where absent.
    #[serde(default)]
    pub structured_output: Option<bool>,
}

impl ProviderSettings {
    /// The server's name of a model that a pipeline names.
    pub fn server_name<'a>(&'a self, model: &'a str) -> &'a str {
        self.models.get(model).map_or(model, String::as_str)
    }

    /// The project's own price of a model; names may be patterns as in a price file.
    pub fn price(&self, model: &str) -> Option<Price> {
        best_match(self.prices.iter().map(|(name, price)| (name.as_str(), *price)), model)
    }
}

/// Reads and validates a project file. An empty file is fine: it says nothing.
pub fn load_project(file_name: &str, bytes: &[u8]) -> Result<ProjectSettings, Diagnostics> {
    let text = yaml::decode(file_name, bytes)?;
    let shown: Arc<str> = Arc::from(without_secrets(&text));
    let mut mistakes = Vec::new();
    let parsed = yaml::parse(file_name, &text, &shown, &mut mistakes);
    let mut checker = Checker::new(Source {
        name: file_name.to_owned(),
        text: shown,
    });
    checker.add(mistakes);
    match parsed {
        Ok(root) => {
            let settings = project(&mut checker, &root);
            let shown = blot_out_keys(checker.shown(), &root);
            checker.show_instead(&shown);
            checker.finish(settings)
        }
        Err(diagnostic) if diagnostic.code == "yaml::empty" => Ok(ProjectSettings::default()),
        Err(diagnostic) => {
            checker.add([*diagnostic]);
            checker.finish(None)
        }
    }
}

fn project(checker: &mut Checker, root: &Node) -> Option<ProjectSettings> {
    if !checker.known_keys(root, "the project file", keys::PROJECT) {
        return None;
    }
    let Value::Mapping(entries) = &root.value else {
        return None;
    };
    let mut settings = ProjectSettings::default();
    for Entry { key, value, .. } in entries {
        let name = format!("`{key}`");
        match key.as_str() {
            "providers" => settings.providers = providers(checker, value),
            "default_provider" => settings.default_provider = checker.text(value, &name),
            "datasets" => settings.datasets = folders(checker, value),
            "prompts" => settings.prompts = path(checker, value, &name),
            "pipelines" => settings.pipelines = path(checker, value, &name),
            "runs" => settings.runs = path(checker, value, &name),
            "cache" => settings.cache = path(checker, value, &name),
            "prices" => settings.prices = path(checker, value, &name),
            "confirm_above" => settings.confirm_above = checker.number(value, &name, 0.0..=1e9),
            _ => {}
        }
    }
    if let (Some(default), Some(entry)) = (&settings.default_provider, root.get("default_provider")) {
        let mut names: Vec<&str> = match root.get("providers").map(|providers| &providers.value.value) {
            Some(Value::Mapping(entries)) => entries.iter().map(|entry| entry.key.as_str()).collect(),
            _ => Vec::new(),
        };
        names.push(EMBEDDED);
        if !names.contains(&default.as_str()) {
            let help = suggest(default, names, "providers");
            checker
                .report(
                    "project::unknown_provider",
                    &entry.value.place,
                    format!("there is no provider `{default}`"),
                    "not under `providers`",
                )
                .help(help);
        }
    }
    Some(settings)
}

fn providers(checker: &mut Checker, node: &Node) -> IndexMap<String, ProviderSettings> {
    let Value::Mapping(entries) = &node.value else {
        checker
            .wrong_type(node, "a mapping of providers", "`providers`")
            .help("as in `providers: { local: { base_url: http://127.0.0.1:8080/v1 } }`");
        return IndexMap::new();
    };
    let mut providers = IndexMap::new();
    for entry in entries {
        if entry.key == EMBEDDED {
            checker
                .report(
                    "project::reserved_provider",
                    &entry.key_place,
                    format!("a provider can't be named `{EMBEDDED}`"),
                    "the built-in model's name",
                )
                .help("give your server another name, and set `default_provider` to it");
            continue;
        }
        if let Some(provider) = provider(checker, entry) {
            providers.insert(entry.key.clone(), provider);
        }
    }
    providers
}

fn provider(checker: &mut Checker, entry: &Entry) -> Option<ProviderSettings> {
    let what = format!("the provider `{}`", entry.key);
    let Value::Mapping(entries) = &entry.value.value else {
        checker
            .wrong_type(&entry.value, "a mapping", &what)
            .help("as in `{ base_url: http://127.0.0.1:8080/v1 }`");
        return None;
    };
    let mut settings = ProviderSettings {
        base_url: String::new(),
        api_key_env: None,
        api_key_file: None,
        headers: IndexMap::new(),
        model: None,
        concurrency: None,
        requests_per_minute: None,
        tokens_per_minute: None,
        timeout: None,
        total_timeout: None,
        attempts: None,
        context: None,
        models: IndexMap::new(),
        prices: IndexMap::new(),
        structured_output: None,
    };
    for Entry { key, key_place, value } in entries {
        let name = format!("`{key}`");
        match key.as_str() {
            "base_url" => settings.base_url = base_url(checker, value).unwrap_or_default(),
            "api_key_env" => settings.api_key_env = variable_name(checker, value),
            "api_key_file" => settings.api_key_file = path(checker, value, &name),
            "headers" => settings.headers = headers(checker, value),
            "model" => settings.model = checker.text(value, &name),
            "concurrency" => settings.concurrency = checker.count(value, &name, 1..=10_000).map(|n| n as usize),
            "requests_per_minute" => settings.requests_per_minute = checker.count(value, &name, 1..=u32::MAX),
            "tokens_per_minute" => settings.tokens_per_minute = checker.count(value, &name, 1..=u32::MAX),
            "timeout" => settings.timeout = checker.seconds(value, &name),
            "total_timeout" => settings.total_timeout = checker.seconds(value, &name),
            "attempts" => settings.attempts = checker.count(value, &name, 1..=MOST_ATTEMPTS),
            "models" => settings.models = models(checker, value),
            "prices" => settings.prices = prices(checker, value),
            "structured_output" => settings.structured_output = checker.boolean(value, &name),
            "context" => settings.context = checker.count(value, &name, 1..=u32::MAX),
            other if is_key_name(other) => {
                checker
                    .report(
                        "project::literal_key",
                        key_place,
                        format!("`{other}`: keys are not kept in this file"),
                        "remove this line",
                    )
                    .help(
                        "name the environment variable that holds the key, `api_key_env: OPENAI_API_KEY`, or a file, \
                         `api_key_file: PATH`; if this file was shared, have the key replaced",
                    );
            }
            other => {
                checker
                    .report(
                        "config::unknown_key",
                        key_place,
                        format!("unknown key `{other}` in {what}"),
                        "not a key here",
                    )
                    .help(suggest(other, keys::PROVIDER.iter().copied(), "keys"));
            }
        }
    }
    if entry.value.get("base_url").is_none() {
        let help = "as in `base_url: http://127.0.0.1:8080/v1`";
        checker.missing(&entry.value, &entry.key_place, "base_url", &what, keys::PROVIDER, help);
    }
    if let (Some(variable), Some(file)) = (entry.value.get("api_key_env"), entry.value.get("api_key_file")) {
        checker
            .report(
                "project::two_keys",
                &file.key_place,
                format!("{what} has both `api_key_env` and `api_key_file`"),
                "only one of the two",
            )
            .also(&variable.key_place, "and this");
    }
    if let (Some(total), Some(once)) = (settings.total_timeout, settings.timeout)
        && total < once
        && let (Some(total), Some(once)) = (entry.value.get("total_timeout"), entry.value.get("timeout"))
    {
        checker
            .report(
                "project::timeouts",
                &total.value.place,
                "`total_timeout` is shorter than `timeout`",
                "no attempt could last as long as it may",
            )
            .also(&once.value.place, "for one attempt")
            .help("`timeout` is for one attempt of a call, `total_timeout` for all of them and the waits between");
    }
    Some(settings)
}

/// Aliases: names that pipelines use → the server's names.
fn models(checker: &mut Checker, node: &Node) -> IndexMap<String, String> {
    let Value::Mapping(entries) = &node.value else {
        checker
            .wrong_type(node, "a mapping from names to the server's names", "`models`")
            .help("as in `models: { small: qwen2.5-coder-7b-instruct-q4_k_m }`");
        return IndexMap::new();
    };
    entries
        .iter()
        .filter_map(|Entry { key, value, .. }| {
            let name = checker.text(value, &format!("the model `{key}`"))?;
            Some((key.clone(), name))
        })
        .collect()
}

fn prices(checker: &mut Checker, node: &Node) -> IndexMap<String, Price> {
    let Value::Mapping(entries) = &node.value else {
        checker
            .wrong_type(node, "a mapping from models to prices", "`prices`")
            .help("as in `prices: { my-model: { input: 0.5, output: 1.5 } }`, in USD per million tokens");
        return IndexMap::new();
    };
    entries
        .iter()
        .filter_map(|Entry { key, key_place, value }| {
            let price = read_price(checker, value, key_place, &format!("the price of `{key}`"))?;
            Some((key.clone(), price))
        })
        .collect()
}

fn base_url(checker: &mut Checker, node: &Node) -> Option<String> {
    let url = checker.text(node, "`base_url`")?;
    if let Some(at) = url.find(['?', '#']) {
        // What follows may be a key: it is not repeated.
        let part = if url[at..].starts_with('?') {
            "a query"
        } else {
            "a fragment"
        };
        checker
            .report(
                "project::bad_url",
                &node.place,
                format!("`base_url` holds {part}"),
                "the address is recorded with each run, a secret in it would be too",
            )
            .help("leave out the `?` or `#` and all after it; name the key by `api_key_env` or `api_key_file`");
        return None;
    }
    let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    let host = rest.map(|rest| rest.split('/').next().unwrap_or_default());
    match host {
        Some(host) if host.contains('@') => {
            // The text holds a password: it is not repeated.
            checker
                .report(
                    "project::bad_url",
                    &node.place,
                    "`base_url` holds a user name or password",
                    "a secret",
                )
                .help("leave out what stands before the `@`; name the key by `api_key_env` or `api_key_file`");
            None
        }
        Some(host) if !host.is_empty() && !url.contains(char::is_whitespace) => {
            Some(url.trim_end_matches('/').to_owned())
        }
        _ => {
            checker
                .report(
                    "project::bad_url",
                    &node.place,
                    format!("`{url}` is no address of a server"),
                    "not a URL",
                )
                .help("as in `https://api.example.com/v1` or `http://127.0.0.1:8080/v1`");
            None
        }
    }
}

fn variable_name(checker: &mut Checker, node: &Node) -> Option<String> {
    let name = checker.text(node, "`api_key_env`")?;
    let is_name =
        name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !name.starts_with(|c: char| c.is_ascii_digit());
    if is_name {
        return Some(name);
    }
    // It may be the key itself, so it is not repeated.
    checker
        .report(
            "project::bad_variable",
            &node.place,
            "`api_key_env` is not the name of an environment variable",
            "expected letters, digits and `_`",
        )
        .help("give the variable's name, not the key: `api_key_env: OPENAI_API_KEY`");
    None
}

fn headers(checker: &mut Checker, node: &Node) -> IndexMap<String, String> {
    let Value::Mapping(entries) = &node.value else {
        checker.wrong_type(node, "a mapping from names to texts", "`headers`");
        return IndexMap::new();
    };
    let mut headers = IndexMap::new();
    for Entry { key, key_place, value } in entries {
        let is_token = !key.is_empty()
            && key
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c));
        if !is_token {
            checker.report(
                "project::bad_header",
                key_place,
                format!("`{key}` is no name for a header"),
                "not a name",
            );
            continue;
        }
        if key.eq_ignore_ascii_case("authorization") || is_key_name(key) {
            checker
                .report(
                    "project::literal_key",
                    key_place,
                    format!("the header `{key}`: keys are not kept in this file"),
                    "remove this line",
                )
                .help("name the key by `api_key_env` or `api_key_file`; it is sent as `Authorization: Bearer …`");
            continue;
        }
        if let Some(text) = checker.word(value, &format!("the header `{key}`")) {
            if text.chars().any(char::is_control) {
                let message = format!("the header `{key}` holds a line break or control character");
                checker.report("project::bad_header", &value.place, message, "not one line of text");
            } else {
                headers.insert(key.clone(), text);
            }
        }
    }
    headers
}

fn path(checker: &mut Checker, node: &Node, key: &str) -> Option<PathBuf> {
    checker.text(node, key).map(PathBuf::from)
}

fn folders(checker: &mut Checker, node: &Node) -> Vec<PathBuf> {
    match &node.value {
        Value::Sequence(items) => items
            .iter()
            .filter_map(|item| path(checker, item, "an item of `datasets`"))
            .collect(),
        Value::Scalar(scalar) if scalar.kind() == ScalarKind::Text => {
            path(checker, node, "`datasets`").into_iter().collect()
        }
        _ => {
            checker
                .wrong_type(node, "a list of folders", "`datasets`")
                .help("as in `datasets: [datasets, ../data]`");
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_file_loads() {
        let text = "providers:\n  local:\n    base_url: http://127.0.0.1:8080/v1/\n    api_key_env: LOCAL_KEY\n    \
                    headers: { X-Team: 7 }\n    concurrency: 4\n    timeout: 30\ndefault_provider: local\ndatasets: [a, b]\n";
        let settings = load_project("dinsql.yaml", text.as_bytes()).expect("valid");
        let local = &settings.providers["local"];
        assert_eq!(local.base_url, "http://127.0.0.1:8080/v1");
        assert_eq!(local.headers["X-Team"], "7");
        assert_eq!(settings.datasets.len(), 2);
        assert_eq!(
            load_project("dinsql.yaml", b"# nothing\n").expect("empty is fine"),
            ProjectSettings::default()
        );
    }

    #[test]
    fn literal_keys_are_refused_and_never_shown() {
        let secret = "s3cr3t-value";
        let layouts = [
            format!("providers:\n  a: {{ base_url: http://h/v1, api_key: {secret} }}\n"),
            format!("providers:\n  a:\n    base_url: http://h/v1\n    api_key: |\n      {secret}\n"),
            format!("providers:\n  a:\n    base_url: http://h/v1\n    \"apiKey\":\n      {secret}\n"),
            format!("providers:\n  a:\n    base_url: http://h/v1\n    headers: {{ Authorization: Bearer {secret} }}\n"),
            format!("providers:\n  a:\n    base_url: http://user:{secret}@h/v1\n"),
            format!("providers:\n  a:\n    base_url: http://h/v1\n    api_key_env: {secret}\n"),
            format!("providers:\n  a:\n    api_key: {secret}: x\n"),
            format!("providers:\n  a: {{ base_url: 'http://h/v1?key={secret}' }}\n"),
            format!("providers:\n  a: {{ base_url: h/v1#{secret}, timeout: 0 }}\n"),
            format!("providers:\n  a:\n    base_url: \"http://h/v1\\x3f{secret}\"\n"),
            format!("providers:\n  a:\n    base_url: >-\n      http://h/v1?\n      {secret}\n"),
            format!("providers:\n  a:\n    base_url: http://h/v1?key={secret}: x\n"),
        ];
        for text in layouts {
            let found = load_project("dinsql.yaml", text.as_bytes()).expect_err("refused");
            let shown = format!("{}{found}{found:?}", found.render(false, 100));
            assert!(!shown.contains(secret), "{shown}");
        }
    }

    #[test]
    fn limits_aliases_and_prices_load() {
        let text = "prices: my-prices.yaml\nconfirm_above: 2.5\nproviders:\n  a:\n    base_url: http://h/v1\n    tokens_per_minute: 90000\n    \
                    timeout: 60\n    total_timeout: 600\n    attempts: 6\n    structured_output: false\n    models: { small: qwen-7b }\n    \
                    prices:\n      qwen-*: { input: 0.1, output: 0.2 }\n      qwen-7b: { input: 0.5, cached_input: 0, output: 1 }\n";
        let settings = load_project("dinsql.yaml", text.as_bytes()).unwrap_or_else(|found| panic!("{found}"));
        assert_eq!(
            (settings.prices, settings.confirm_above),
            (Some("my-prices.yaml".into()), Some(2.5))
        );
        let a = &settings.providers["a"];
        assert_eq!(
            (a.tokens_per_minute, a.attempts, a.total_timeout),
            (Some(90_000), Some(6), Some(600.0))
        );
        assert_eq!(
            (a.structured_output, a.server_name("small"), a.server_name("b")),
            (Some(false), "qwen-7b", "b")
        );
        assert_eq!(a.price("qwen-7b").map(|price| price.cached_input), Some(Some(0.0)));
        assert_eq!(
            (a.price("qwen-14b").map(|price| price.output), a.price("b")),
            (Some(0.2), None)
        );
    }

    #[test]
    fn mistakes_in_limits_aliases_and_prices() {
        for (line, expected) in [
            ("attempts: 0", "3:37: `attempts` is out of range: `0`"),
            (
                "timeout: 60, total_timeout: 30",
                "3:55: `total_timeout` is shorter than `timeout`",
            ),
            ("models: [a]", "expected a mapping from names to the server's names"),
            ("models: { a: 7 }", "expected text for the model `a`, found number `7`"),
            (
                "prices: { m: 1 }",
                "3:40: expected a mapping for the price of `m`, found number `1`",
            ),
            ("prices: { m: { input: 1 } }", "3:37: the price of `m` has no `output`"),
            (
                "prices: { m: { inptu: 1, output: 2 } }",
                "3:42: unknown key `inptu` in the price of `m`\n  help: did you mean `input`?",
            ),
            (
                "prices: { m: { input: -1, output: 2 } }",
                "`input` is out of range: `-1`",
            ),
            (
                "structured_output: maybe",
                "expected `true` or `false` for `structured_output`",
            ),
        ] {
            let text = format!("providers:\n  a:\n    {{ base_url: http://h, {line} }}\n");
            let found = load_project("dinsql.yaml", text.as_bytes())
                .expect_err(line)
                .to_string();
            assert!(found.contains(expected), "{expected} in\n{found}");
            assert_eq!(found.matches("dinsql.yaml:").count(), 1, "{found}");
        }
        let found =
            load_project("dinsql.yaml", b"providers: { a: { base_url: 'http://h/v1?x' } }\n").expect_err("refused");
        assert!(found.to_string().contains("1:29: `base_url` holds a query"), "{found}");
    }

    #[test]
    fn mistakes_are_reported_together() {
        let text = "providers:\n  embedded: { base_url: http://h }\n  a: { base_ulr: http://h }\n  b: { base_url: nowhere, timeout: 0 }\n  c: { model: m }\n\
                    default_provider: d\nprompt: x\n";
        let found = load_project("dinsql.yaml", text.as_bytes())
            .expect_err("mistakes")
            .to_string();
        for part in [
            "2:3: a provider can't be named `embedded`",
            "3:8: unknown key `base_ulr`",
            "did you mean `base_url`?",
            "4:18: `nowhere` is no address",
            "5:3: the provider `c` has no `base_url`",
            "6:19: there is no provider `d`",
            "7:1: unknown key `prompt`",
        ] {
            assert!(found.contains(part), "{part} in\n{found}");
        }
    }
}
