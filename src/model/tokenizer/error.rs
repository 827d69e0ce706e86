//! Why a vocabulary cannot be used.

use crate::model::gguf::GgufError;

/// Why a vocabulary cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A metadata value is missing or of another type.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// A vocabulary kind we do not know.
    #[error(
        "tokenizer model {0:?} is not supported; supported: gpt2 (byte-level BPE), llama (SentencePiece)"
    )]
    Kind(String),
    /// A way to split text before merging that we do not know; guessing would give wrong tokens without a word.
    #[error("pre-tokenizer {name:?} is not supported; supported: {supported}")]
    PreTokenizer {
        /// What the file asks for.
        name: String,
        /// Names we know.
        supported: String,
    },
    /// No tokens, or more than we take.
    #[error("the vocabulary has {count} tokens; it must have 1 to {limit}")]
    TokenCount {
        /// Tokens in the file.
        count: usize,
        /// The most we take.
        limit: usize,
    },
    /// An array with one element a token has another length.
    #[error("{key} has {found} elements for {tokens} tokens")]
    ArrayLength {
        /// Metadata key.
        key: &'static str,
        /// Its elements.
        found: usize,
        /// Tokens in the file.
        tokens: usize,
    },
    /// A token's text is too long.
    #[error("token {id} has {bytes} bytes of text; the limit is {limit} bytes")]
    TokenTooLong {
        /// The token.
        id: u32,
        /// Its bytes.
        bytes: usize,
        /// The most we take.
        limit: usize,
    },
    /// Two tokens have the same text: which one a text means is not defined.
    #[error("tokens {first} and {second} have the same text {text:?}")]
    DuplicateToken {
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
        /// Their text, at most 64 bytes of it.
        text: String,
    },
    /// A score that cannot be ordered.
    #[error("the score of token {id} is not a number")]
    ScoreNan {
        /// The token.
        id: u32,
    },
    /// A token type outside the format's list.
    #[error("token {id} has type {found}; types are 0 to 6")]
    TokenType {
        /// The token.
        id: u32,
        /// Its type.
        found: i32,
    },
    /// A byte token whose text is not `<0x00>` to `<0xFF>`.
    #[error("token {id} stands for a byte, but its text is {text:?}, not <0x00> to <0xFF>")]
    ByteToken {
        /// The token.
        id: u32,
        /// Its text, at most 64 bytes of it.
        text: String,
    },
    /// Two tokens stand for one byte.
    #[error("tokens {first} and {second} both stand for byte {byte}")]
    DuplicateByte {
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
        /// The byte.
        byte: u8,
    },
    /// A merge that is not two texts with a space between.
    #[error("merge {rank} is {text:?}, not two token texts with a space between")]
    MergeSyntax {
        /// Its place in the list.
        rank: usize,
        /// Its text, at most 64 bytes of it.
        text: String,
    },
    /// A merge of or into a text that is no token.
    #[error("merge {rank} needs a token {text:?}, which the vocabulary does not have")]
    MergeToken {
        /// Its place in the list.
        rank: usize,
        /// The text that is no token, at most 64 bytes of it.
        text: String,
    },
    /// A special token outside the vocabulary.
    #[error("{key} is {id}, but the vocabulary has {tokens} tokens")]
    SpecialOutOfRange {
        /// Metadata key.
        key: &'static str,
        /// What the file says.
        id: u32,
        /// Tokens in the file.
        tokens: usize,
    },
    /// The file asks for a special token around each text, but names none.
    #[error("{flag} is true, but the file has no {key}")]
    SpecialMissing {
        /// The flag.
        flag: &'static str,
        /// The key that should name the token.
        key: &'static str,
    },
    /// Special tokens are matched by an automaton whose size grows with their texts.
    #[error("the special tokens have {bytes} bytes of text in all; the limit is {limit} bytes")]
    SpecialText {
        /// Bytes in all.
        bytes: usize,
        /// The most we take.
        limit: usize,
    },
}

/// The first 64 bytes of `text`, for an error.
pub(super) fn excerpt(text: &str) -> String {
    text[..floor_char_boundary(text, 64)].to_owned()
}

/// The end of the last character of `text` that ends within `limit` bytes.
pub(super) fn floor_char_boundary(text: &str, limit: usize) -> usize {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    end
}
