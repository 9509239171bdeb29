//! Tables and numbers for people.

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};

/// Writes a line to standard output.
pub fn write_line(line: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    let written = out.write_fmt(line).and_then(|()| out.write_all(b"\n"));
    if let Err(error) = written {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        eprintln!("error: cannot write the results: {error}");
        std::process::exit(1);
    }
}

/// A table that fits the terminal; numbers stand right.
pub fn table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Dynamic);
    if let Some(width) = width() {
        table.set_width(width);
    }
    table.set_header(header);
    for row in rows {
        table.add_row(row.into_iter().map(|text| {
            let numeric =
                text.starts_with(|first: char| first.is_ascii_digit() || matches!(first, '+' | '−' | '-' | '–' | '<'));
            Cell::new(printable(&text)).set_alignment(if numeric {
                CellAlignment::Right
            } else {
                CellAlignment::Left
            })
        }));
    }
    table.to_string()
}

fn width() -> Option<u16> {
    use std::io::IsTerminal;
    // A pipe has no width: lines stay whole.
    if std::io::stdout().is_terminal() {
        None
    } else {
        Some(160)
    }
}

/// Data and model output may hold anything: control characters and marks that turn the line around are shown, not obeyed.
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|letter| match letter {
            '\n' | '\t' => ' ',
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => '\u{fffd}',
            other if other.is_control() => '\u{fffd}',
            other => other,
        })
        .collect()
}

/// As [`printable`], keeping line breaks and tabs.
pub fn printable_lines(text: &str) -> String {
    text.split_inclusive('\n')
        .map(|line| match line.strip_suffix('\n') {
            Some(line) => format!("{}\n", printable(line)),
            None => printable(line),
        })
        .collect()
}

/// A share in percent with one decimal.
pub fn percent(share: f64) -> String {
    format!("{:.1}", share * 100.0)
}

/// `12,345`
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `1 example`, `2 examples`
pub fn count(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", thousands(number as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(999), "999");
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(count(1, "example"), "1 example");
        assert_eq!(percent(2.0 / 3.0), "66.7");
    }

    #[test]
    fn control_characters_are_shown_not_obeyed() {
        assert_eq!(
            printable("a\u{1b}[31mb\rc\u{202e}d\0"),
            "a\u{fffd}[31mb\u{fffd}c\u{fffd}d\u{fffd}"
        );
        assert_eq!(printable_lines("a\n\u{7}b\n"), "a\n\u{fffd}b\n");
    }
}
