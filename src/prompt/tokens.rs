//! Token counts, with the vocabulary that fits a model best: exact for OpenAI's, an estimate for all others.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, PoisonError};

use tiktoken_rs::CoreBPE;
use tiktoken_rs::tokenizer::{Tokenizer as OpenAi, get_tokenizer};

use super::Message;

/// Tokens that chat formats add around a message, about.
const PER_MESSAGE: usize = 4;
/// Pieces of text whose counts are kept: schemas and worked examples come again in every prompt.
const KEPT_COUNTS: usize = 1 << 16;

/// Tokens of a text, by OpenAI's `o200k_base` vocabulary.
pub fn count_text(text: &str) -> usize {
    tiktoken_rs::o200k_base_singleton().encode_ordinary(text).len()
}

/// Tokens of a prompt, with what the chat format adds, by OpenAI's `o200k_base` vocabulary.
pub fn count(messages: &[Message]) -> usize {
    messages
        .iter()
        .map(|message| count_text(&message.content) + PER_MESSAGE)
        .sum()
}

/// Counts tokens as a model does, as far as that is known.
#[derive(Debug)]
pub struct Tokenizer {
    model: String,
    vocabulary: Vocabulary,
    chat: Chat,
    hasher: RandomState,
    counts: Mutex<HashMap<u64, usize>>,
}

/// A vocabulary and the way it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Vocabulary {
    /// A model of OpenAI's, with its own vocabulary.
    OpenAi(OpenAi),
    /// Another's model, about as `o200k_base` counts.
    About,
    /// Llama 3: `cl100k_base` with 28,000 further tokens.
    Llama,
    /// Qwen: `cl100k_base` with further merges for languages beside English, and every digit alone.
    Qwen,
}

/// What the chat format adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chat {
    per_message: usize,
    /// The beginning of the prompt, and of the answer that is awaited.
    per_prompt: usize,
}

impl Tokenizer {
    /// The counter for a model, by its name alone: `gpt-4o`, `qwen2.5-coder-0.5b-instruct`, `meta-llama/Llama-3.1-8B`.
    pub fn for_model(name: &str) -> Tokenizer {
        let lower = name.to_lowercase();
        // Routers and hubs put the maker before the name.
        let bare = lower.rsplit('/').next().unwrap_or(&lower);
        let (vocabulary, chat) = if let Some(own) = get_tokenizer(bare) {
            // <|start|>role … <|end|>, and the opened answer (OpenAI's cookbook, "how to count tokens").
            (
                Vocabulary::OpenAi(own),
                Chat {
                    per_message: 3 + 1,
                    per_prompt: 3,
                },
            )
        } else if ["qwen", "qwq", "qvq"].iter().any(|family| lower.contains(family)) {
            // <|im_start|>role⏎ … <|im_end|>⏎, and <|im_start|>assistant⏎.
            (
                Vocabulary::Qwen,
                Chat {
                    per_message: 5,
                    per_prompt: 3,
                },
            )
        } else if is_llama_3(&lower) {
            // <|start_header_id|>role<|end_header_id|>⏎⏎ … <|eot_id|>, the opened answer, and <|begin_of_text|>.
            (
                Vocabulary::Llama,
                Chat {
                    per_message: 5,
                    per_prompt: 5,
                },
            )
        } else {
            (
                Vocabulary::About,
                Chat {
                    per_message: PER_MESSAGE,
                    per_prompt: 3,
                },
            )
        };
        Tokenizer {
            model: name.to_owned(),
            vocabulary,
            chat,
            hasher: RandomState::new(),
            counts: Mutex::new(HashMap::new()),
        }
    }

    /// The model whose tokens these are.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Whether the vocabulary is the model's own.
    pub fn is_exact(&self) -> bool {
        matches!(self.vocabulary, Vocabulary::OpenAi(_))
    }

    /// The vocabulary's name, for people.
    pub fn vocabulary(&self) -> &'static str {
        match self.vocabulary {
            Vocabulary::OpenAi(OpenAi::O200kBase) | Vocabulary::About => "o200k_base",
            Vocabulary::OpenAi(OpenAi::O200kHarmony) => "o200k_harmony",
            Vocabulary::OpenAi(OpenAi::Cl100kBase) | Vocabulary::Llama => "cl100k_base",
            Vocabulary::OpenAi(OpenAi::P50kBase | OpenAi::P50kEdit) => "p50k_base",
            Vocabulary::OpenAi(OpenAi::R50kBase | OpenAi::Gpt2) => "r50k_base",
            Vocabulary::Qwen => "cl100k_base with single digits",
        }
    }

    /// By how much a count may be off, as a share.
    pub fn uncertainty(&self) -> f64 {
        match self.vocabulary {
            Vocabulary::OpenAi(_) => 0.0,
            // Against a server's counts over English, Turkish and German prompts: at most 2.4 % for any one of them.
            Vocabulary::Qwen => 0.03,
            Vocabulary::Llama => 0.08,
            Vocabulary::About => 0.2,
        }
    }

    /// Tokens of a text.
    pub fn count_text(&self, text: &str) -> usize {
        let mut total = 0;
        let mut kept = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        for piece in pieces(text) {
            let key = self.hasher.hash_one(piece);
            total += match kept.get(&key) {
                Some(&count) => count,
                None => {
                    if kept.len() >= KEPT_COUNTS {
                        kept.clear();
                    }
                    let count = self.count_piece(piece);
                    kept.insert(key, count);
                    count
                }
            };
        }
        total
    }

    /// Tokens of a prompt, with what the chat format adds.
    pub fn count(&self, messages: &[Message]) -> usize {
        let texts: usize = messages
            .iter()
            .map(|message| self.count_text(&message.content) + self.chat.per_message)
            .sum();
        texts + self.chat.per_prompt
    }

    fn count_piece(&self, text: &str) -> usize {
        match self.vocabulary {
            Vocabulary::OpenAi(own) => tokens(own_vocabulary(own), text),
            Vocabulary::About => tokens(tiktoken_rs::o200k_base_singleton(), text),
            Vocabulary::Llama => between(text),
            Vocabulary::Qwen => between(text) + split_digits(text),
        }
    }
}

fn own_vocabulary(vocabulary: OpenAi) -> &'static CoreBPE {
    match vocabulary {
        OpenAi::O200kHarmony => tiktoken_rs::o200k_harmony_singleton(),
        OpenAi::O200kBase => tiktoken_rs::o200k_base_singleton(),
        OpenAi::Cl100kBase => tiktoken_rs::cl100k_base_singleton(),
        OpenAi::P50kBase => tiktoken_rs::p50k_base_singleton(),
        OpenAi::P50kEdit => tiktoken_rs::p50k_edit_singleton(),
        OpenAi::R50kBase | OpenAi::Gpt2 => tiktoken_rs::r50k_base_singleton(),
    }
}

fn tokens(vocabulary: &CoreBPE, text: &str) -> usize {
    vocabulary.encode_ordinary(text).len()
}

fn is_llama_3(name: &str) -> bool {
    ["llama-3", "llama3", "llama_3"]
        .iter()
        .any(|family| name.contains(family))
}

/// `cl100k_base`, and for text with letters beyond Latin-1 half-way to `o200k_base`: the vocabularies that descend
/// from the first have learnt more of such languages, yet not as much as the second.
fn between(text: &str) -> usize {
    let first = tokens(tiktoken_rs::cl100k_base_singleton(), text);
    if text.chars().any(|letter| letter > '\u{ff}' && letter.is_alphabetic()) {
        let second = tokens(tiktoken_rs::o200k_base_singleton(), text);
        (first + second).div_ceil(2)
    } else {
        first
    }
}

/// What numbers cost more where each digit is a token, and not each three of them.
fn split_digits(text: &str) -> usize {
    let mut more = 0;
    let mut digits = 0usize;
    for letter in text.chars().chain(std::iter::once(' ')) {
        if letter.is_numeric() {
            digits += 1;
        } else {
            more += digits - digits.div_ceil(3);
            digits = 0;
        }
    }
    more
}

/// A text in pieces that no token spans: after the line breaks before something that cannot belong to them.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let mut from = 0;
        let end = loop {
            let Some(at) = rest[from..].find('\n') else {
                break rest.len();
            };
            from += at + 1;
            // White space joins with the line break; so does a slash after a sign, in the newer vocabularies.
            if !rest[from..].starts_with(|next: char| next.is_whitespace() || next == '/') {
                break from;
            }
        };
        let (piece, after) = rest.split_at(end);
        rest = after;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Role;
    use super::*;

    fn user(text: &str) -> Message {
        Message {
            role: Role::User,
            content: text.into(),
        }
    }

    #[test]
    fn models_have_their_vocabularies() {
        let vocabulary = |name: &str| Tokenizer::for_model(name).vocabulary;
        assert_eq!(vocabulary("gpt-4o-mini"), Vocabulary::OpenAi(OpenAi::O200kBase));
        assert_eq!(vocabulary("openai/gpt-4"), Vocabulary::OpenAi(OpenAi::Cl100kBase));
        assert_eq!(vocabulary("qwen2.5-coder-0.5b-instruct"), Vocabulary::Qwen);
        assert_eq!(vocabulary("Qwen/Qwen2.5-Coder-7B-Instruct"), Vocabulary::Qwen);
        assert_eq!(vocabulary("meta-llama/Llama-3.1-8B-Instruct"), Vocabulary::Llama);
        assert_eq!(vocabulary("gemini-2.5-flash"), Vocabulary::About);
        assert_eq!(vocabulary("llama-2-7b"), Vocabulary::About);
        assert!(Tokenizer::for_model("gpt-4.1").is_exact());
        assert!(!Tokenizer::for_model("mistral-small").is_exact());
    }

    #[test]
    fn qwen_counts_every_digit() {
        let qwen = Tokenizer::for_model("qwen2.5-coder");
        assert_eq!(qwen.count_text("12345678"), 8);
        assert_eq!(qwen.count_text("in 1999"), 6);
        // <|im_start|>user⏎hello<|im_end|>⏎<|im_start|>assistant⏎
        assert_eq!(qwen.count(&[user("hello")]), 9);
        assert_eq!(Tokenizer::for_model("gpt-4o").count(&[user("hello")]), 8);
    }

    #[test]
    fn turkish_letters_cost_less_than_in_cl100k() {
        let qwen = Tokenizer::for_model("qwen2.5-coder");
        let text = "Yüzölçümü en büyük olan ülkenin başkenti ve para birimi nedir?";
        let first = tokens(tiktoken_rs::cl100k_base_singleton(), text);
        let second = tokens(tiktoken_rs::o200k_base_singleton(), text);
        assert!((second..first).contains(&qwen.count_text(text)));
    }

    proptest! {
        #[test]
        fn pieces_count_as_the_whole(text in "([a-zA-ZäşI0-9 ;,.'/()\\t\\r]{0,6}\n{0,2}){0,12}") {
            for model in ["gpt-4o", "gpt-4"] {
                let tokenizer = Tokenizer::for_model(model);
                let Vocabulary::OpenAi(own) = tokenizer.vocabulary else { unreachable!() };
                let whole = tokens(own_vocabulary(own), &text);
                prop_assert_eq!(tokenizer.count_text(&text), whole, "{:?}", text);
                prop_assert_eq!(tokenizer.count_text(&text), whole, "from what was kept");
            }
        }
    }
}
