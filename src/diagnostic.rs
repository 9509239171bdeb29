//! Mistakes in files, shown where they are.
//!
//! In: a message, the text it is about and a byte range of that text, from any room that reads files people write (pipelines,
//! templates, manifests). Out: plain lines (`file:line:column: message`) or a drawing with the text underlined.
//! It knows nothing of YAML or of what a file means, and it is the only user of miette.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use miette::{GraphicalReportHandler, GraphicalTheme, LabeledSpan, MietteError, MietteSpanContents, SourceCode};
use miette::{SourceSpan, SpanContents};

/// One mistake, with its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// A stable name for the class of mistake, as in `config::unknown_key`.
    pub code: &'static str,
    /// A lowercase fragment; the offending literal in backticks.
    pub message: String,
    /// As the user named it.
    pub file: String,
    pub text: Arc<str>,
    /// Bytes of [`text`](Self::text) that are wrong.
    pub span: Range<usize>,
    /// Stands beside the underlined text.
    pub label: String,
    pub help: Option<String>,
    /// Further places in the same text that belong to the mistake, each with its own label.
    pub also: Vec<(Range<usize>, String)>,
}

impl Diagnostic {
    /// A mistake without help; add that with [`with_help`](Self::with_help).
    pub fn new(
        code: &'static str,
        file: &str,
        text: Arc<str>,
        span: Range<usize>,
        message: impl Into<String>,
        label: impl Into<String>,
    ) -> Diagnostic {
        let span = clamp(&text, span);
        Diagnostic {
            code,
            message: message.into(),
            file: file.to_owned(),
            text,
            span,
            label: label.into(),
            help: None,
            also: Vec::new(),
        }
    }

    #[must_use]
    pub fn with_help(mut self, help: impl Into<String>) -> Diagnostic {
        self.help = Some(help.into());
        self
    }

    /// Points at a second place of the same text.
    #[must_use]
    pub fn with_place(mut self, span: Range<usize>, label: impl Into<String>) -> Diagnostic {
        self.also.push((clamp(&self.text, span), label.into()));
        self
    }

    /// 1-based line and column (in characters) of the start.
    pub fn position(&self) -> (usize, usize) {
        line_and_column(&self.text, self.span.start)
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (line, column) = self.position();
        write!(f, "{}:{line}:{column}: {}", visible(&self.file), visible(&self.message))?;
        if let Some(help) = &self.help {
            write!(f, "\n  help: {}", visible(help))?;
        }
        Ok(())
    }
}

/// All mistakes found in one go; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostics(Vec<Diagnostic>);

impl Diagnostics {
    /// `None` where nothing is wrong. Identical mistakes (an anchor's content, met through each alias) are kept once.
    pub fn from_vec(mistakes: Vec<Diagnostic>) -> Option<Diagnostics> {
        let mut kept: Vec<Diagnostic> = Vec::with_capacity(mistakes.len());
        for mistake in mistakes {
            if !kept.contains(&mistake) {
                kept.push(mistake);
            }
        }
        (!kept.is_empty()).then_some(Diagnostics(kept))
    }

    pub fn iter(&self) -> std::slice::Iter<'_, Diagnostic> {
        self.0.iter()
    }

    pub fn as_slice(&self) -> &[Diagnostic] {
        &self.0
    }

    /// Adds the mistakes of another file.
    pub fn extend(&mut self, others: Diagnostics) {
        self.0.extend(others.0);
    }

    /// Each mistake drawn with its text underlined, for a terminal of this width.
    pub fn render(&self, color: bool, width: usize) -> String {
        let theme = if color {
            GraphicalTheme::unicode()
        } else {
            GraphicalTheme::unicode_nocolor()
        };
        let handler = GraphicalReportHandler::new_themed(theme)
            .with_width(width.max(40))
            .with_links(false)
            .with_context_lines(1)
            .with_wrap_lines(false)
            .without_syntax_highlighting();
        let mut rendered = String::new();
        for diagnostic in &self.0 {
            let start = rendered.len();
            if handler
                .render_report(&mut rendered, &Drawing::new(diagnostic, width.max(40)))
                .is_err()
            {
                // A drawing that fails must not hide the mistake.
                rendered.truncate(start);
                rendered.push_str(&diagnostic.to_string());
                rendered.push('\n');
            }
            rendered.push('\n');
        }
        // miette fills some lines with spaces up to the width.
        let mut trimmed: String = rendered.lines().flat_map(|line| [line.trim_end(), "\n"]).collect();
        while trimmed.ends_with("\n\n") {
            trimmed.pop();
        }
        trimmed
    }
}

impl From<Diagnostic> for Diagnostics {
    fn from(diagnostic: Diagnostic) -> Self {
        Diagnostics(vec![diagnostic])
    }
}

impl From<Box<Diagnostic>> for Diagnostics {
    fn from(diagnostic: Box<Diagnostic>) -> Self {
        Diagnostics(vec![*diagnostic])
    }
}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, diagnostic) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{diagnostic}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Diagnostics {}

impl<'a> IntoIterator for &'a Diagnostics {
    type Item = &'a Diagnostic;
    type IntoIter = std::slice::Iter<'a, Diagnostic>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// 1-based line and column of a byte offset; the column counts characters.
pub fn line_and_column(text: &str, offset: usize) -> (usize, usize) {
    let before = &text[..floor_boundary(text, offset)];
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    // A byte order mark takes no column.
    let column = before[line_start..]
        .chars()
        .filter(|&character| character != '\u{feff}')
        .count();
    (before.matches('\n').count() + 1, column + 1)
}

/// Byte offset of the character with this index; the text's length where there are fewer.
pub fn byte_of_char(text: &str, index: usize) -> usize {
    text.char_indices().nth(index).map_or(text.len(), |(byte, _)| byte)
}

/// Byte offsets of all characters of a text, for many look-ups.
#[derive(Debug)]
pub struct CharOffsets(Vec<usize>);

impl CharOffsets {
    pub fn new(text: &str) -> CharOffsets {
        let mut offsets: Vec<usize> = text.char_indices().map(|(byte, _)| byte).collect();
        offsets.push(text.len());
        CharOffsets(offsets)
    }

    /// Byte offset of a character; the text's length where there are fewer.
    pub fn byte(&self, index: usize) -> usize {
        self.0.get(index).or(self.0.last()).copied().unwrap_or(0)
    }
}

/// The candidate that `word` is most likely a misspelling of, if any is near enough to be no nonsense.
pub fn did_you_mean<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Longer words than this are no typing mistakes, and the distance is quadratic.
    if word.is_empty() || word.len() > 200 {
        return None;
    }
    let folded = word.to_lowercase().replace('_', "-");
    let mut best: Option<(f64, &str)> = None;
    for candidate in candidates {
        let other = candidate.to_lowercase().replace('_', "-");
        let longest = folded.chars().count().max(other.chars().count());
        let distance = strsim::damerau_levenshtein(&folded, &other);
        let similarity = strsim::jaro_winkler(&folded, &other);
        // A third of the letters may differ; one edit is allowed in short words of at least two letters.
        let near = (distance * 3 <= longest && similarity >= 0.75) || (distance == 1 && longest > 1 && longest <= 3);
        let abbreviated = folded.chars().count() >= 3 && other.starts_with(&folded);
        if !near && !abbreviated {
            continue;
        }
        let score = similarity - distance as f64 / longest.max(1) as f64;
        if best.is_none_or(|(top, _)| score > top) {
            best = Some((score, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

fn floor_boundary(text: &str, offset: usize) -> usize {
    let mut offset = offset.min(text.len());
    while !text.is_char_boundary(offset) {
        offset -= 1;
    }
    offset
}

fn clamp(text: &str, span: Range<usize>) -> Range<usize> {
    let start = floor_boundary(text, span.start);
    start..floor_boundary(text, span.end).max(start)
}

/// Whether a terminal would act on this character, or reorder the line by it.
fn is_unsafe(character: char) -> bool {
    (character.is_control() && !matches!(character, '\n' | '\t'))
        || matches!(character, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// For one line of output: nothing that a terminal acts on, no line breaks.
fn visible(text: &str) -> String {
    text.chars()
        .map(|character| match character {
            '\n' | '\t' => ' ',
            other if is_unsafe(other) => '\u{fffd}',
            other => other,
        })
        .collect()
}

/// Lines broken at spaces only: miette's own wrapping would also break names at their `-` and `/`.
fn wrapped(text: &str, width: usize) -> String {
    let mut lines = String::with_capacity(text.len() + 8);
    let mut column = 0;
    for word in text.split(' ') {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > width {
            lines.push('\n');
            column = 0;
        } else if column > 0 {
            lines.push(' ');
            column += 1;
        }
        lines.push_str(word);
        column += length;
    }
    lines
}

/// The same number of bytes, so that spans still fit, without characters that a terminal acts on.
fn visible_source(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match (character, character.len_utf8()) {
            ('\r', _) => shown.push(' '),
            // The three-byte no-width space keeps a byte order mark out of the columns.
            ('\u{feff}', _) => shown.push('\u{200b}'),
            (other, _) if !is_unsafe(other) => shown.push(other),
            (_, 3) => shown.push('\u{fffd}'),
            (_, length) => shown.extend(std::iter::repeat_n('?', length)),
        }
    }
    shown
}

/// The text with its name; columns in characters, where miette's own count bytes.
#[derive(Debug)]
struct NamedText {
    name: String,
    text: String,
}

impl SourceCode for NamedText {
    fn read_span<'a>(
        &'a self,
        span: &SourceSpan,
        context_lines_before: usize,
        context_lines_after: usize,
    ) -> Result<Box<dyn SpanContents<'a> + 'a>, MietteError> {
        let contents = self.text.read_span(span, context_lines_before, context_lines_after)?;
        let column = match contents.column() {
            0 => 0,
            _ => line_and_column(&self.text, contents.span().offset()).1 - 1,
        };
        Ok(Box::new(MietteSpanContents::new_named(
            self.name.clone(),
            contents.data(),
            *contents.span(),
            contents.line(),
            column,
            contents.line_count(),
        )))
    }
}

/// A diagnostic in the shape that miette draws.
#[derive(Debug)]
struct Drawing {
    message: String,
    code: &'static str,
    help: Option<String>,
    source: NamedText,
    labels: Vec<LabeledSpan>,
}

impl Drawing {
    fn new(diagnostic: &Diagnostic, width: usize) -> Drawing {
        let mut text = visible_source(&diagnostic.text);
        if text.is_empty() {
            // miette draws no snippet, and so no place, for an empty text.
            text.push('\n');
        }
        // A mistake's first line is enough to find it.
        let first_line = |span: &Range<usize>| {
            let line_end = text[span.start..]
                .find('\n')
                .map_or(text.len(), |length| span.start + length);
            let end = span.end.min(line_end);
            (span.start, text[span.start..end].trim_end().len())
        };
        let mut labels = vec![LabeledSpan::new_primary_with_span(
            Some(visible(&diagnostic.label)),
            first_line(&diagnostic.span),
        )];
        for (span, label) in &diagnostic.also {
            labels.push(LabeledSpan::new_with_span(Some(visible(label)), first_line(span)));
        }
        Drawing {
            message: wrapped(&visible(&diagnostic.message), width.saturating_sub(4)),
            code: diagnostic.code,
            help: diagnostic
                .help
                .as_deref()
                .map(|help| wrapped(&visible(help), width.saturating_sub(8))),
            source: NamedText {
                name: visible(&diagnostic.file),
                text,
            },
            labels,
        }
    }
}

impl fmt::Display for Drawing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Drawing {}

impl miette::Diagnostic for Drawing {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Some(Box::new(self.code))
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.help.as_ref().map(|help| Box::new(help) as Box<dyn fmt::Display>)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        Some(&self.source)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        Some(Box::new(self.labels.iter().cloned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diagnostic(text: &str, span: Range<usize>) -> Diagnostic {
        Diagnostic::new(
            "test::wrong",
            "a.yaml",
            Arc::from(text),
            span,
            "unknown key `nmae`",
            "not a key here",
        )
        .with_help("did you mean `name`?")
    }

    #[test]
    fn columns_count_characters() {
        let text = "şehir: 1\nğü: nmae\n";
        let start = text.find("nmae").unwrap_or(0);
        assert_eq!(diagnostic(text, start..start + 4).position(), (2, 5));
        let rendered = Diagnostics::from(diagnostic(text, start..start + 4)).render(false, 80);
        assert!(rendered.contains("a.yaml:2:5"), "{rendered}");
        assert!(
            rendered.contains("unknown key `nmae`") && rendered.contains("did you mean `name`?"),
            "{rendered}"
        );
        assert!(rendered.contains("──"), "{rendered}");
        assert!(!rendered.contains('\u{1b}'), "{rendered}");
    }

    #[test]
    fn every_place_can_be_drawn() {
        for text in ["", "\n", "a", "a\n", "a: \u{1b}[31m\r\nb\u{202e}: 1\n", "\u{feff}a: 1"] {
            for start in 0..=text.len() + 1 {
                let rendered = Diagnostics::from(diagnostic(text, start..start + 3)).render(false, 80);
                assert!(
                    rendered.contains("a.yaml:") && !rendered.contains('\u{1b}'),
                    "{text:?} {start}: {rendered}"
                );
            }
        }
    }

    #[test]
    fn far_places_are_both_named() {
        let text = format!("name: a\n{}name: b\n", "# filler\n".repeat(20));
        let second = text.rfind("name").unwrap_or(0);
        let rendered =
            Diagnostics::from(diagnostic(&text, second..second + 4).with_place(0..4, "first here")).render(false, 80);
        assert!(
            rendered.contains("a.yaml:22:1") && rendered.contains("first here"),
            "{rendered}"
        );
    }

    #[test]
    fn suggestions_are_near_or_absent() {
        let keys = ["temperature", "top_p", "max_tokens", "seed", "stop", "name"];
        assert_eq!(did_you_mean("temprature", keys), Some("temperature"));
        assert_eq!(did_you_mean("max-tokens", keys), Some("max_tokens"));
        assert_eq!(did_you_mean("temp", keys), Some("temperature"));
        assert_eq!(did_you_mean("Name", keys), Some("name"));
        assert_eq!(did_you_mean("colour", keys), None);
        assert_eq!(did_you_mean("", keys), None);
        assert_eq!(did_you_mean("x", ["y"]), None);
    }

    #[test]
    fn plain_text_is_one_line_each_with_help() {
        let both = Diagnostics::from_vec(vec![diagnostic("nmae: 1", 0..4), diagnostic("nmae: 1", 0..4)]);
        let plain = both.map(|found| found.to_string());
        assert_eq!(
            plain.as_deref(),
            Some("a.yaml:1:1: unknown key `nmae`\n  help: did you mean `name`?")
        );
    }
}
