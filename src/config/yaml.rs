//! YAML text as a tree in which every key and value knows its place.
//!
//! In: the bytes of a file. Out: [`Node`]s with byte spans, or one diagnostic that says why the text is no YAML (or YAML of a kind
//! that configuration files have no use for: several documents, merge keys, custom tags). It knows no key's meaning.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use saphyr_parser::{Event, Parser, ScalarStyle, Span, Tag};

use super::syntax;
use crate::diagnostic::{CharOffsets, Diagnostic};

/// A configuration file is written by hand: more than this is the wrong file.
const MOST_BYTES: usize = 4 << 20;
const DEEPEST: usize = 64;
/// Nodes that aliases may add by copying, so that no small file grows without end.
const MOST_COPIED: usize = 10_000;

/// A named text that places refer to: the file, or a `--set` argument.
#[derive(Debug, Clone)]
pub struct Source {
    pub name: String,
    pub text: Arc<str>,
}

/// Bytes of one of the sources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Index into the list of sources; 0 is the file.
    pub source: usize,
    pub span: Range<usize>,
}

#[derive(Debug, Clone)]
pub struct Node {
    pub place: Place,
    pub value: Value,
}

#[derive(Debug, Clone)]
pub enum Value {
    Scalar(Scalar),
    Sequence(Vec<Node>),
    Mapping(Vec<Entry>),
}

#[derive(Debug, Clone)]
pub struct Entry {
    pub key: String,
    pub key_place: Place,
    pub value: Node,
}

/// A scalar's text, and whether it was quoted (or a block, or tagged `!!str`) and so can only be text.
#[derive(Debug, Clone)]
pub struct Scalar {
    pub text: String,
    pub quoted: bool,
}

/// What a scalar is by YAML 1.2's core schema.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ScalarKind {
    Nothing,
    Boolean(bool),
    Integer(i64),
    Number(f64),
    Text,
}

impl Scalar {
    pub fn kind(&self) -> ScalarKind {
        if self.quoted {
            return ScalarKind::Text;
        }
        match self.text.as_str() {
            "" | "~" | "null" | "Null" | "NULL" => return ScalarKind::Nothing,
            "true" | "True" | "TRUE" => return ScalarKind::Boolean(true),
            "false" | "False" | "FALSE" => return ScalarKind::Boolean(false),
            _ => {}
        }
        if let Ok(integer) = self.text.parse::<i64>() {
            return ScalarKind::Integer(integer);
        }
        // Rust also reads `inf` and `nan`, which are words in YAML.
        let numeric = self
            .text
            .starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first))
            && self.text.contains(|character: char| character.is_ascii_digit());
        match self.text.parse::<f64>() {
            Ok(number) if numeric => ScalarKind::Number(number),
            _ => ScalarKind::Text,
        }
    }
}

impl Node {
    pub fn get(&self, key: &str) -> Option<&Entry> {
        match &self.value {
            Value::Mapping(entries) => entries.iter().find(|entry| entry.key == key),
            _ => None,
        }
    }

    fn size(&self) -> usize {
        1 + match &self.value {
            Value::Scalar(_) => 0,
            Value::Sequence(items) => items.iter().map(Node::size).sum(),
            Value::Mapping(entries) => entries.iter().map(|entry| entry.value.size() + 1).sum(),
        }
    }
}

/// The bytes as text, or a diagnostic that says what they are instead.
pub fn decode(file: &str, bytes: &[u8]) -> Result<Arc<str>, Box<Diagnostic>> {
    let refuse = |text: &str, span: Range<usize>, message: String, label: &str, help: &str| {
        Err(Box::new(
            Diagnostic::new("yaml::encoding", file, Arc::from(text), span, message, label).with_help(help),
        ))
    };
    if bytes.len() > MOST_BYTES {
        let message = format!("the file has {} bytes, at most {MOST_BYTES} are read", bytes.len());
        return refuse(
            "",
            0..0,
            message,
            "too large",
            "this looks like data, not like a configuration file",
        );
    }
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        let message = "the file is in UTF-16 (byte order mark at byte offset 0), expected UTF-8".to_owned();
        return refuse("", 0..0, message, "not UTF-8", "save the file in the encoding UTF-8");
    }
    if let Some(offset) = bytes.iter().position(|&byte| byte == 0) {
        let message = format!("this is a binary file: null byte at byte offset {offset}");
        return refuse(
            "",
            0..0,
            message,
            "not a text file",
            "expected a YAML file, which is text in UTF-8",
        );
    }
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(Arc::from(text)),
        Err(error) => {
            let offset = error.valid_up_to();
            let message = format!("not UTF-8: byte 0x{:02X} at byte offset {offset}", bytes[offset]);
            let mut shown = String::from_utf8_lossy(&bytes[..offset]).into_owned();
            let controls = shown.chars().filter(|c| c.is_control() && !c.is_whitespace()).count();
            if controls > 0 {
                let message = format!(
                    "this is a binary file: byte 0x{:02X} at byte offset {offset}",
                    bytes[offset]
                );
                return refuse(
                    "",
                    0..0,
                    message,
                    "not a text file",
                    "expected a YAML file, which is text in UTF-8",
                );
            }
            shown.push('\u{fffd}');
            let end = shown.len();
            refuse(
                &shown,
                offset..end,
                message,
                "not a character",
                "save the file in the encoding UTF-8",
            )
        }
    }
}

/// Reads a file's text into a tree. Duplicate keys do not stop it; they are added to `mistakes`.
///
/// `shown` is what diagnostics display: `text`, or a copy of the same length with secrets blotted out.
pub fn parse(
    file: &str,
    text: &str,
    shown: &Arc<str>,
    mistakes: &mut Vec<Diagnostic>,
) -> Result<Node, Box<Diagnostic>> {
    let mut builder = Builder {
        file,
        text,
        shown,
        offsets: CharOffsets::new(text),
        open: Vec::new(),
        root: None,
        anchors: HashMap::new(),
        copied: 0,
        mistakes,
    };
    let mut documents = 0;
    for event in Parser::new_from_str(text) {
        let (event, span) =
            event.map_err(|error| Box::new(syntax::explain(&error, file, text, shown, &builder.offsets)))?;
        if let Event::DocumentStart(_) = event {
            documents += 1;
            if documents > 1 {
                let place = builder.bytes(&span);
                return Err(Box::new(
                    builder
                        .refuse(
                            "yaml::documents",
                            place,
                            "a second YAML document starts here",
                            "one document a file",
                        )
                        .with_help("remove the `---`, or put what follows it into a file of its own"),
                ));
            }
        }
        builder.take(event, &span)?;
    }
    match builder.root.take() {
        Some(Node {
            value: Value::Scalar(scalar),
            ..
        }) if scalar.kind() == ScalarKind::Nothing => Err(Box::new(builder.empty())),
        Some(root) => Ok(root),
        None => Err(Box::new(builder.empty())),
    }
}

/// A sequence or mapping whose end has not come yet.
struct Open {
    span: Range<usize>,
    anchor: usize,
    content: Content,
}

enum Content {
    Sequence(Vec<Node>),
    Mapping {
        entries: Vec<Entry>,
        seen: HashMap<String, usize>,
        key: Option<(String, Range<usize>)>,
    },
}

struct Builder<'a> {
    file: &'a str,
    text: &'a str,
    shown: &'a Arc<str>,
    offsets: CharOffsets,
    open: Vec<Open>,
    root: Option<Node>,
    anchors: HashMap<usize, Node>,
    copied: usize,
    mistakes: &'a mut Vec<Diagnostic>,
}

impl Builder<'_> {
    fn bytes(&self, span: &Span) -> Range<usize> {
        let start = self.offsets.byte(span.start.index());
        let end = self.offsets.byte(span.end.index()).max(start);
        // The parser's spans of blocks and quoted scalars run on over the white space after them.
        let length = self.text.get(start..end).map_or(0, |text| text.trim_end().len());
        start..start + length
    }

    fn refuse(
        &self,
        code: &'static str,
        span: Range<usize>,
        message: impl Into<String>,
        label: impl Into<String>,
    ) -> Diagnostic {
        Diagnostic::new(code, self.file, Arc::clone(self.shown), span, message, label)
    }

    fn empty(&self) -> Diagnostic {
        self.refuse(
            "yaml::empty",
            0..0,
            "the file is empty",
            "nothing but white space and comments",
        )
    }

    fn take(&mut self, event: Event<'_>, span: &Span) -> Result<(), Box<Diagnostic>> {
        let place = self.bytes(span);
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let tagged_text = self.check_tag(tag.as_deref(), &place)?;
                let quoted = style != ScalarStyle::Plain || tagged_text;
                // The parser lets the span of an absent value cover whatever comes next.
                let end = match style {
                    ScalarStyle::Plain if text.is_empty() => place.start,
                    ScalarStyle::SingleQuoted => place.start + quoted_length(&self.text[place.clone()], '\''),
                    ScalarStyle::DoubleQuoted => place.start + quoted_length(&self.text[place.clone()], '"'),
                    _ => place.end,
                };
                let place = place.start..end;
                let node = node(
                    place,
                    Value::Scalar(Scalar {
                        text: text.into_owned(),
                        quoted,
                    }),
                );
                self.add(node, anchor)
            }
            Event::SequenceStart(anchor, tag) => {
                self.check_tag(tag.as_deref(), &place)?;
                self.start(place, anchor, Content::Sequence(Vec::new()))
            }
            Event::MappingStart(anchor, tag) => {
                self.check_tag(tag.as_deref(), &place)?;
                let content = Content::Mapping {
                    entries: Vec::new(),
                    seen: HashMap::new(),
                    key: None,
                };
                self.start(place, anchor, content)
            }
            Event::SequenceEnd | Event::MappingEnd => self.end(&place),
            Event::Alias(anchor) => {
                let Some(node) = self.anchors.get(&anchor) else {
                    return Err(Box::new(self.refuse(
                        "yaml::alias",
                        place,
                        "this alias stands for something that holds it",
                        "endless",
                    )));
                };
                self.copied += node.size();
                if self.copied > MOST_COPIED {
                    let message = format!("aliases of this file copy more than {MOST_COPIED} values");
                    return Err(Box::new(self.refuse("yaml::alias", place, message, "one too many")));
                }
                let node = node.clone();
                self.add(node, 0)
            }
            _ => Ok(()),
        }
    }

    /// Whether the tag makes a scalar text; an error for tags beyond YAML's own.
    fn check_tag(&self, tag: Option<&Tag>, place: &Range<usize>) -> Result<bool, Box<Diagnostic>> {
        match tag {
            None => Ok(false),
            Some(tag) if tag.is_yaml_core_schema() => Ok(tag.suffix == "str"),
            Some(tag) => Err(Box::new(
                self.refuse(
                    "yaml::tag",
                    place.clone(),
                    format!("the tag `{tag}` has no meaning here"),
                    "unknown tag",
                )
                .with_help("quote a text that starts with `!`"),
            )),
        }
    }

    fn start(&mut self, span: Range<usize>, anchor: usize, content: Content) -> Result<(), Box<Diagnostic>> {
        if let Some(Open {
            content: Content::Mapping { key: None, .. },
            ..
        }) = self.open.last()
        {
            return Err(Box::new(self.not_a_key(span)));
        }
        if self.open.len() >= DEEPEST {
            let message = format!("values lie deeper than {DEEPEST} levels");
            return Err(Box::new(self.refuse("yaml::depth", span, message, "one too deep")));
        }
        self.open.push(Open { span, anchor, content });
        Ok(())
    }

    fn not_a_key(&self, span: Range<usize>) -> Diagnostic {
        let before = self.text.get(..span.start).unwrap_or_default();
        if before.ends_with('{') && self.text[span.start..].starts_with('{') {
            return self
                .refuse(
                    "yaml::key",
                    before.len() - 1..span.end,
                    "`{{` opens a YAML mapping here",
                    "not quoted",
                )
                .with_help("put text that holds `{{ … }}` in quotes: \"{{ … }}\"");
        }
        self.refuse("yaml::key", span, "a list or mapping can't be a key", "expected a name")
    }

    fn end(&mut self, closing: &Range<usize>) -> Result<(), Box<Diagnostic>> {
        let Some(Open { span, anchor, content }) = self.open.pop() else {
            return Ok(());
        };
        let (value, last) = match content {
            Content::Sequence(items) => {
                let last = items.last().map(|item| item.place.span.end);
                (Value::Sequence(items), last)
            }
            Content::Mapping { entries, .. } => {
                let last = entries
                    .last()
                    .map(|entry| entry.value.place.span.end.max(entry.key_place.span.end));
                (Value::Mapping(entries), last)
            }
        };
        // Flow collections end at their bracket, block ones with their last value.
        let end = if closing.is_empty() {
            last.unwrap_or(span.end)
        } else {
            closing.end
        };
        let node = node(span.start..end.max(span.end), value);
        self.add(node, anchor)
    }

    fn add(&mut self, node: Node, anchor: usize) -> Result<(), Box<Diagnostic>> {
        if anchor != 0 {
            self.anchors.insert(anchor, node.clone());
        }
        match self.open.last_mut().map(|open| &mut open.content) {
            None => self.root = Some(node),
            Some(Content::Sequence(items)) => items.push(node),
            Some(Content::Mapping { key, entries, seen }) => match key.take() {
                Some((name, span)) => {
                    let key_place = Place { source: 0, span };
                    match seen.get(&name).and_then(|&index| entries.get(index)) {
                        Some(first) => {
                            let duplicate = duplicate_key(self.file, self.shown, &name, &first.key_place, &key_place);
                            self.mistakes.push(duplicate);
                        }
                        None => {
                            seen.insert(name.clone(), entries.len());
                            entries.push(Entry {
                                key: name,
                                key_place,
                                value: node,
                            });
                        }
                    }
                }
                None => {
                    let span = node.place.span.clone();
                    match node.value {
                        Value::Scalar(scalar) if scalar.text == "<<" && !scalar.quoted => {
                            return Err(Box::new(
                                self.refuse(
                                    "yaml::merge",
                                    span,
                                    "merge keys (`<<`) are not supported",
                                    "not a key here",
                                )
                                .with_help("write the keys out, or use an alias (`key: *name`) for a whole value"),
                            ));
                        }
                        Value::Scalar(scalar) if scalar.kind() == ScalarKind::Nothing => {
                            return Err(Box::new(self.refuse(
                                "yaml::key",
                                span,
                                "a key is missing here",
                                "expected a name",
                            )));
                        }
                        Value::Scalar(scalar) => *key = Some((scalar.text, span)),
                        _ => return Err(Box::new(self.not_a_key(span))),
                    }
                }
            },
        }
        Ok(())
    }
}

fn node(span: Range<usize>, value: Value) -> Node {
    Node {
        place: Place { source: 0, span },
        value,
    }
}

/// Bytes up to the closing quote: the parser's span also covers a comment after it.
fn quoted_length(written: &str, quote: char) -> usize {
    let Some(open) = written.find(quote) else {
        return written.len();
    };
    let mut characters = written[open + 1..].char_indices().peekable();
    while let Some((at, character)) = characters.next() {
        if character == '\\' && quote == '"' {
            characters.next();
        } else if character == quote {
            let doubled = quote == '\'' && characters.next_if(|&(_, next)| next == quote).is_some();
            if !doubled {
                return open + 1 + at + 1;
            }
        }
    }
    written.len()
}

fn duplicate_key(file: &str, shown: &Arc<str>, key: &str, first: &Place, second: &Place) -> Diagnostic {
    Diagnostic::new(
        "yaml::duplicate_key",
        file,
        Arc::clone(shown),
        second.span.clone(),
        format!("the key `{key}` is given twice"),
        "given again here",
    )
    .with_place(first.span.clone(), "first given here")
    .with_help("remove one of the two")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(text: &str) -> Result<Node, Box<Diagnostic>> {
        let mut mistakes = Vec::new();
        let node = parse("t.yaml", text, &Arc::from(text), &mut mistakes)?;
        mistakes
            .into_iter()
            .next()
            .map_or(Ok(node), |first| Err(Box::new(first)))
    }

    fn mistake(text: &str) -> (usize, usize, String) {
        let found = tree(text).expect_err(text);
        let (line, column) = found.position();
        (line, column, found.message)
    }

    #[test]
    fn spans_are_the_written_text() {
        let text = "\u{feff}ş: \"x\" # c\r\nb: [1, { ç: 2 } ]\r\n";
        let root = tree(text).expect("valid");
        let first = root.get("ş").expect("first");
        assert_eq!(&text[first.key_place.span.clone()], "ş");
        assert_eq!(&text[first.value.place.span.clone()], "\"x\"");
        let second = root.get("b").expect("second");
        assert_eq!(&text[second.value.place.span.clone()], "[1, { ç: 2 } ]");
    }

    #[test]
    fn tabs_are_named() {
        for text in ["a:\n\tb: c\n", "a:\n  b: c\n\td: e\n"] {
            let (_, column, message) = mistake(text);
            assert!(message.contains("tab") && column == 1, "{message}");
        }
    }

    #[test]
    fn mistakes_have_places() {
        assert_eq!(
            mistake("a: 1\nb: 2\na: 3\n"),
            (3, 1, "the key `a` is given twice".into())
        );
        assert_eq!(mistake("a: b: c\n"), (1, 5, "a `:` makes no key here".into()));
        assert_eq!(
            mistake("a: 1\n---\nb: 2\n"),
            (2, 1, "a second YAML document starts here".into())
        );
        assert_eq!(mistake("a: {{ b.c }}\n").2, "`{{` opens a YAML mapping here");
        assert_eq!(
            mistake("a: &x 1\nb: { <<: *x }\n"),
            (2, 6, "merge keys (`<<`) are not supported".into())
        );
        assert_eq!(mistake("# only\n").2, "the file is empty");
        assert_eq!(
            mistake("a: &x [*x]\n").2,
            "this alias stands for something that holds it"
        );
        assert!(
            mistake(&format!("{}1{}", "[".repeat(70), "]".repeat(70)))
                .2
                .contains("64 levels")
        );
    }

    #[test]
    fn aliases_are_copies_within_a_budget() {
        let root = tree("a: &x [1, 2]\nb: *x\n").expect("valid");
        assert!(matches!(&root.get("b").expect("b").value.value, Value::Sequence(items) if items.len() == 2));
        let mut bomb = String::from("l0: &l0 [x, x, x, x, x, x, x, x, x]\n");
        for level in 1..9 {
            let copies = vec![format!("*l{}", level - 1); 9].join(", ");
            bomb.push_str(&format!("l{level}: &l{level} [{copies}]\n"));
        }
        assert!(mistake(&bomb).2.contains("10000 values"));
    }

    #[test]
    fn bytes_that_are_no_text_are_refused() {
        let latin = decode("t", b"name: Z\xfcrich\n").expect_err("not UTF-8");
        assert_eq!(latin.message, "not UTF-8: byte 0xFC at byte offset 7");
        assert_eq!(latin.position(), (1, 8));
        assert!(
            decode("t", b"\x7fELF\x00")
                .expect_err("binary")
                .message
                .contains("binary file: null byte at byte offset 4")
        );
    }
}
