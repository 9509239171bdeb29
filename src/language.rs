//! Languages: their codes, names and casing rules.
//!
//! In: a language code, as in `prompts/<code>/`. Out: its [`Language`], which lower-cases text by the language's rules
//! and makes matching keys. To add a language, add one entry to [`LANGUAGES`]. Knows nothing of prompts and datasets.

use unicode_normalization::UnicodeNormalization;
use unicode_normalization::char::is_combining_mark;

/// How a language changes case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Casing {
    /// Unicode's default mapping.
    Default,
    /// Dotted and dotless i are two letters: I is the capital of ı, İ of i.
    Turkic,
}

/// A language that questions or prompts may be written in.
#[derive(Debug, PartialEq, Eq)]
pub struct Language {
    /// ISO 639-1 code.
    pub code: &'static str,
    /// English name.
    pub name: &'static str,
    pub native_name: &'static str,
    pub casing: Casing,
}

const fn language(code: &'static str, name: &'static str, native_name: &'static str) -> Language {
    Language {
        code,
        name,
        native_name,
        casing: Casing::Default,
    }
}

/// Every known language.
pub const LANGUAGES: &[Language] = &[
    language("en", "English", "English"),
    Language {
        casing: Casing::Turkic,
        ..language("tr", "Turkish", "Türkçe")
    },
    language("de", "German", "Deutsch"),
    language("fr", "French", "français"),
    language("it", "Italian", "italiano"),
    language("es", "Spanish", "español"),
    language("pt", "Portuguese", "português"),
    language("nl", "Dutch", "Nederlands"),
    language("pl", "Polish", "polski"),
    language("ru", "Russian", "русский"),
    language("vi", "Vietnamese", "Tiếng Việt"),
    language("zh", "Chinese", "中文"),
    language("ja", "Japanese", "日本語"),
    Language {
        casing: Casing::Turkic,
        ..language("az", "Azerbaijani", "azərbaycanca")
    },
];

/// The language with this code; the code's case does not matter.
#[must_use]
pub fn find(code: &str) -> Option<&'static Language> {
    LANGUAGES
        .iter()
        .find(|language| language.code.eq_ignore_ascii_case(code))
}

impl Language {
    /// Lower case by this language's rules, in NFC. `İ` becomes `i` in every language: Unicode's default gives `i` and a
    /// combining dot, which then equals no `i` anywhere.
    #[must_use]
    pub fn lower(&self, text: &str) -> String {
        // NFC first, so that `I` + U+0307 is one letter before `I` is looked at.
        let mapped: String = text
            .nfc()
            .map(|letter| match (letter, self.casing) {
                ('İ', _) => 'i',
                ('I', Casing::Turkic) => 'ı',
                _ => letter,
            })
            .collect();
        // Accents above and a dot that no precomposed letter took in (`i̇`) stay as written otherwise.
        mapped.to_lowercase().replace("i\u{307}", "i").nfc().collect()
    }

    /// A key under which words match whatever their case and diacritics: `ş` like `s`, `ı` and `İ` like `i`, `ß` like
    /// `ss`. For comparing only, since it is no word of the language.
    #[must_use]
    pub fn fold(&self, text: &str) -> String {
        let mut key = String::with_capacity(text.len());
        for letter in self.lower(text).nfkd().filter(|letter| !is_combining_mark(*letter)) {
            match letter {
                'ß' => key.push_str("ss"),
                'æ' => key.push_str("ae"),
                'œ' => key.push_str("oe"),
                'þ' => key.push_str("th"),
                'ı' => key.push('i'),
                'ø' => key.push('o'),
                'ł' => key.push('l'),
                'đ' | 'ð' => key.push('d'),
                'ς' => key.push('σ'),
                _ => key.push(letter),
            }
        }
        key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(code: &str) -> &'static Language {
        find(code).expect("a registered language")
    }

    #[test]
    fn turkish_has_two_letters_i() {
        let turkish = known("tr");
        assert_eq!(turkish.lower("ISPARTA İZMİR"), "ısparta izmir");
        // Decomposed capital: one letter, no dot left over.
        assert_eq!(turkish.lower("I\u{307}ZMI\u{307}R"), "izmir");
        assert_eq!(turkish.lower("ÇĞÖŞÜ"), "çğöşü");
        assert_eq!(known("en").lower("TITLE"), "title");
    }

    #[test]
    fn no_language_leaves_a_combining_dot() {
        for language in LANGUAGES {
            let lower = language.lower("İl");
            assert_eq!(lower, "il", "{}", language.code);
            assert_eq!(lower.chars().count(), 2);
        }
    }

    #[test]
    fn normal_forms_are_one_text() {
        let decomposed: String = "Şehir Ülke Ağrı".nfd().collect();
        for language in LANGUAGES {
            assert_eq!(language.lower(&decomposed), language.lower("Şehir Ülke Ağrı"));
            assert_eq!(language.fold(&decomposed), language.fold("Şehir Ülke Ağrı"));
        }
    }

    #[test]
    fn keys_match_what_people_type() {
        let turkish = known("tr");
        assert_eq!(turkish.fold("ŞARKICI"), turkish.fold("sarkici"));
        assert_eq!(turkish.fold("İstanbul"), turkish.fold("istanbul"));
        let german = known("de");
        assert_eq!(german.fold("STRASSE"), german.fold("Straße"));
        assert_eq!(german.fold("STRAẞE"), german.fold("strasse"));
        assert_eq!(german.fold("Sänger"), german.fold("SANGER"));
        assert_ne!(german.fold("Mutter"), german.fold("Futter"));
    }

    #[test]
    fn codes_are_unique_and_found_in_any_case() {
        for language in LANGUAGES {
            assert_eq!(known(&language.code.to_uppercase()), language);
            assert_eq!(LANGUAGES.iter().filter(|other| other.code == language.code).count(), 1);
        }
        assert_eq!(find("xx"), None);
    }
}
