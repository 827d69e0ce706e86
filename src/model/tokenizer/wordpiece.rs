//! WordPiece (`bert`): a word is cut from left to right into the longest pieces that are tokens.
//!
//! Text is cleaned, split and cut as by the models' own tokenizer (`BertNormalizer`, `BertPreTokenizer` and `WordPiece` of
//! Hugging Face's `tokenizers`). Files state neither case nor accents: as in llama.cpp, letters become small and accents
//! go. A file's tokens begin a word after [`SPACE_MARK`] and continue it without a mark.

use unicode_normalization::UnicodeNormalization;
use unicode_properties::{GeneralCategory, GeneralCategoryGroup, UnicodeGeneralCategory};

use super::error::floor_char_boundary;
use super::vocab::{SPACE_MARK, TextIndex, Vocab};

/// A word of more characters is unknown as a whole.
const WORD_CHARS_MAX: usize = 100;

/// Cutting of a WordPiece vocabulary.
#[derive(Debug)]
pub(super) struct WordPiece {
    index: TextIndex,
    /// Length of the longest token in bytes; longer texts are not looked up.
    token_bytes_max: usize,
    unknown: Option<u32>,
}

impl WordPiece {
    /// `unknown` is the token of words that cannot be cut into tokens; without it they are left out.
    pub fn new(vocab: &Vocab, index: TextIndex, unknown: Option<u32>) -> Self {
        let token_bytes_max = vocab.texts().map(str::len).max().unwrap_or(0);
        Self { index, token_bytes_max, unknown }
    }

    /// Appends the tokens of `text`. Time: that of the text, times the length of the longest token.
    pub fn encode(&self, vocab: &Vocab, text: &str, ids: &mut Vec<u32>) {
        let mut word = Word::default();
        for character in normalised(text) {
            match separation(character) {
                Separation::None => word.push(character),
                Separation::Space => self.end(vocab, &mut word, ids),
                Separation::Alone => {
                    self.end(vocab, &mut word, ids);
                    word.push(character);
                    self.end(vocab, &mut word, ids);
                }
            }
        }
        self.end(vocab, &mut word, ids);
    }

    /// Appends the tokens of a word, if there is one, and begins the next.
    fn end(&self, vocab: &Vocab, word: &mut Word, ids: &mut Vec<u32>) {
        if word.chars > 0 {
            let known = ids.len();
            if word.chars > WORD_CHARS_MAX || !self.cut(vocab, &word.text, ids) {
                ids.truncate(known);
                ids.extend(self.unknown);
            }
        }
        word.text.clear();
        word.chars = 0;
    }

    /// Appends the longest tokens one after the other; false where none fits.
    fn cut(&self, vocab: &Vocab, word: &str, ids: &mut Vec<u32>) -> bool {
        let mark = SPACE_MARK.len_utf8();
        // The first has more than the mark, which may be a piece too.
        let (mut rest, mut least, mut most) = (word, mark + 1, self.token_bytes_max);
        while !rest.is_empty() {
            let mut end = floor_char_boundary(rest, most);
            let id = loop {
                if end < least {
                    return false;
                }
                match self.index.get_mergeable(vocab, &rest[..end]) {
                    Some(id) => break id,
                    None => end = floor_char_boundary(rest, end - 1),
                }
            };
            ids.push(id);
            (rest, least) = (&rest[end..], 1);
            // A mark of the text itself continues the word alone: longer tokens with a mark begin words.
            most = if rest.starts_with(SPACE_MARK) { mark } else { self.token_bytes_max };
        }
        true
    }
}

/// A word, after its mark.
#[derive(Default)]
struct Word {
    text: String,
    /// Characters without the mark.
    chars: usize,
}

impl Word {
    fn push(&mut self, character: char) {
        if self.chars == 0 {
            self.text.push(SPACE_MARK);
        }
        // Longer ones are unknown, whatever they are.
        if self.chars <= WORD_CHARS_MAX {
            self.text.push(character);
        }
        self.chars += 1;
    }
}

/// A character's effect on the word before it.
enum Separation {
    /// It continues it.
    None,
    /// It ends it.
    Space,
    /// It ends it, and is a word of its own.
    Alone,
}

fn separation(character: char) -> Separation {
    let is_punctuation = character.is_ascii_punctuation()
        || !character.is_ascii() && character.general_category_group() == GeneralCategoryGroup::Punctuation;
    match character {
        _ if character.is_whitespace() => Separation::Space,
        _ if is_punctuation => Separation::Alone,
        _ => Separation::None,
    }
}

/// The text without control characters and accents, in small letters, with spaces around ideographs.
fn normalised(text: &str) -> impl Iterator<Item = char> {
    let cleaned = text.chars().filter(|c| !is_dropped(*c));
    let spaced = cleaned.flat_map(|c| {
        let space = is_ideograph(c).then_some(' ');
        space.into_iter().chain([c]).chain(space)
    });
    let bare = spaced.nfd().filter(|c| c.general_category() != GeneralCategory::NonspacingMark);
    bare.flat_map(char::to_lowercase)
}

/// Control and format characters, and those without a meaning of their own.
fn is_dropped(character: char) -> bool {
    match character {
        '\t' | '\n' | '\r' | ' '..='~' => false,
        '\u{fffd}' => true,
        _ => matches!(
            character.general_category(),
            GeneralCategory::Control | GeneralCategory::Format | GeneralCategory::PrivateUse
        ),
    }
}

/// The blocks of ideographs that BERT separates. Of extension E the first 256 are not, as in Hugging Face's list.
fn is_ideograph(character: char) -> bool {
    matches!(
        u32::from(character),
        0x3400..=0x4dbf
            | 0x4e00..=0x9fff
            | 0xf900..=0xfaff
            | 0x20000..=0x2a6df
            | 0x2a700..=0x2b73f
            | 0x2b740..=0x2b81f
            | 0x2b920..=0x2ceaf
            | 0x2f800..=0x2fa1f
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::gguf::Strings;
    use crate::model::tokenizer::{
        Algorithm, EncodeOptions, SpecialIds, Tokenizer, TokenizerError, VocabParts, random_texts,
    };

    const RAW: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };

    #[derive(serde::Deserialize)]
    struct Kept {
        alphabet: Vec<String>,
        vocabulary: Vec<String>,
        /// Of all texts.
        tokens: usize,
        /// One for every ten texts.
        hashes: String,
    }

    /// A tokenizer of these tokens, whose texts are those of Hugging Face's files.
    fn tokenizer(tokens: &[&str]) -> Result<Tokenizer, TokenizerError> {
        let special = |token: &str| token.starts_with('[') && token.ends_with(']');
        let written = |token: &&str| match token.strip_prefix("##") {
            Some(inside) => inside.to_owned(),
            None if special(token) => (*token).to_owned(),
            None => format!("{SPACE_MARK}{token}"),
        };
        let texts: Vec<String> = tokens.iter().map(written).collect();
        let strings: Strings = texts.iter().map(String::as_str).collect();
        let types: Vec<i32> = tokens.iter().map(|token| if special(token) { 3 } else { 1 }).collect();
        let mut parts = VocabParts::new(Algorithm::WordPiece, &strings);
        parts.types = Some(&types);
        Tokenizer::new(&parts)
    }

    #[test]
    fn tokens_of_random_texts_are_those_of_another_engine() {
        let kept: Kept =
            serde_json::from_str(include_str!("../../../tests/reference/expected/pieces.json")).unwrap();
        let tokens: Vec<&str> = kept.vocabulary.iter().map(String::as_str).collect();
        let tokenizer = tokenizer(&tokens).unwrap();
        let mut count = 0;
        random_texts::check(&kept.alphabet, &kept.hashes, "WordPiece", |text| {
            let ids = tokenizer.encode(text, RAW);
            count += ids.len();
            ids.into_iter().chain([u32::MAX]).collect()
        });
        assert_eq!(count, kept.tokens);
    }

    #[test]
    fn texts_stand_between_two_marks_and_come_back_in_small_letters() {
        let words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##aff", "##able", "a", "##b", "!", "天"];
        let tokenizer = tokenizer(&words).unwrap();
        let id = |word: &str| words.iter().position(|token| *token == word).unwrap() as u32;
        let ids = tokenizer.encode("UNaff\u{301}able a天! xa", EncodeOptions { add_special: true, ..RAW });
        let want = ["[CLS]", "un", "##aff", "##able", "a", "天", "!", "[UNK]", "[SEP]"].map(id);
        assert_eq!(ids, want);
        assert_eq!(tokenizer.decode(&ids[1..7], false).unwrap(), "unaffable a 天 !");
        assert_eq!((tokenizer.kind(), tokenizer.bos(), tokenizer.eos()), ("bert", Some(2), Some(3)));
        assert!(tokenizer.encode("", RAW).is_empty() && tokenizer.encode(" \u{301}\u{ad}", RAW).is_empty());
        // Marks in a text are words like others, unless they are parsed.
        assert!(!tokenizer.encode("[SEP]", RAW).contains(&3));
        assert_eq!(tokenizer.encode("a[SEP]a", EncodeOptions { parse_special: true, ..RAW }), [7, 3, 7]);
        let word = |length: usize| tokenizer.encode(&"a".repeat(length), RAW);
        assert_eq!(tokenizer.encode(&format!("a{}", "b".repeat(99)), RAW).len(), 100);
        assert_eq!((word(101), tokenizer.encode(&format!("a{}", "b".repeat(100)), RAW)), (vec![1], vec![1]));
    }

    #[test]
    fn marks_are_those_of_the_file_or_have_the_usual_names() {
        let strings: Strings = ["<s>", "</s>", "<unk>", "\u{2581}a"].into_iter().collect();
        let mut parts = VocabParts::new(Algorithm::WordPiece, &strings);
        let error = Tokenizer::new(&parts).unwrap_err().to_string();
        assert!(error.contains("tokenizer.ggml.bos_token_id"), "{error}");
        parts.special =
            SpecialIds { cls: Some(0), separator: Some(1), unknown: Some(2), ..SpecialIds::default() };
        let ids = Tokenizer::new(&parts).unwrap().encode("a b", EncodeOptions { add_special: true, ..RAW });
        assert_eq!(ids, [0, 3, 2, 1]);
        parts.special.separator = Some(4);
        let error = Tokenizer::new(&parts).unwrap_err().to_string();
        assert!(error.contains("seperator_token_id is 4"), "{error}");
    }
}
