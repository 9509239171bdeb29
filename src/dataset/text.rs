//! Reading text files whole, with the place of what is not text.

use std::path::Path;

use unicode_normalization::{UnicodeNormalization, is_nfc};

use super::error::{DatasetError, Problem};

/// The file as UTF-8 without its byte-order mark.
pub(super) fn read(path: &Path) -> Result<String, DatasetError> {
    let bytes = std::fs::read(path).map_err(|source| DatasetError::Read {
        path: path.to_owned(),
        source,
    })?;
    decode(bytes).map_err(|problem| DatasetError::Malformed {
        path: path.to_owned(),
        problems: vec![problem],
        total: 1,
    })
}

fn decode(bytes: Vec<u8>) -> Result<String, Problem> {
    let fault = |offset: usize, bytes: &[u8], message: String| {
        let before = &bytes[..offset];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        let column = offset - before.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1) + 1;
        Problem {
            code: "not_text",
            place: format!("line {line} byte {column}"),
            message,
        }
    };
    if bytes.starts_with(&[0xFF, 0xFE]) || bytes.starts_with(&[0xFE, 0xFF]) {
        return Err(fault(0, &bytes, "the file is UTF-16; save it as UTF-8".to_owned()));
    }
    if let Some(offset) = bytes.iter().position(|byte| *byte == 0) {
        return Err(fault(offset, &bytes, "a null byte; is this a text file?".to_owned()));
    }
    match String::from_utf8(bytes) {
        Ok(mut text) => {
            if text.starts_with('\u{feff}') {
                text.drain(..'\u{feff}'.len_utf8());
            }
            Ok(text)
        }
        Err(error) => {
            let offset = error.utf8_error().valid_up_to();
            let bytes = error.as_bytes();
            let message = format!("byte 0x{:02x} is not UTF-8", bytes[offset]);
            Err(fault(offset, bytes, message))
        }
    }
}

/// The text in NFC.
pub(super) fn nfc(text: &str) -> String {
    if is_nfc(text) {
        text.to_owned()
    } else {
        text.nfc().collect()
    }
}

/// The text in NFD, for finding files that a system stored decomposed.
pub(super) fn nfd(text: &str) -> String {
    text.nfd().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_place_of_what_is_not_text() {
        assert_eq!(
            decode(b"ab\ncd\xE9f".to_vec()).unwrap_err().to_string(),
            "line 2 byte 3: byte 0xe9 is not UTF-8"
        );
        assert_eq!(
            decode(b"ab\n\0".to_vec()).unwrap_err().to_string(),
            "line 2 byte 1: a null byte; is this a text file?"
        );
        assert!(
            decode(vec![0xFF, 0xFE, b'a', 0])
                .unwrap_err()
                .message
                .contains("UTF-16")
        );
        assert_eq!(decode(b"\xEF\xBB\xBFa".to_vec()).unwrap(), "a");
    }
}
