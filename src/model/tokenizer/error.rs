//! Errors of building a tokenizer.

use crate::model::gguf::GgufError;

/// Why a vocabulary cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A metadata value is missing or of another type.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// The vocabulary kind is not supported.
    #[error(
        "tokenizer model {0:?} is not supported; supported: gpt2 (byte-level BPE), llama (SentencePiece), bert (WordPiece), t5 (Unigram)"
    )]
    Kind(String),
    /// The pre-tokenizer is not supported. Guessing one would silently give wrong tokens.
    #[error("pre-tokenizer {name:?} is not supported; supported: {supported}")]
    PreTokenizer {
        /// Name in the file.
        name: String,
        /// Supported names.
        supported: String,
    },
    /// The vocabulary has no tokens, or more than the limit.
    #[error("the vocabulary has {count} tokens; it must have 1 to {limit}")]
    TokenCount {
        /// Tokens in the file.
        count: usize,
        /// Limit.
        limit: usize,
    },
    /// An array with one element per token has the wrong length.
    #[error("{key} has {found} elements for {tokens} tokens")]
    ArrayLength {
        /// Metadata key.
        key: &'static str,
        /// Elements in the file.
        found: usize,
        /// Tokens in the file.
        tokens: usize,
    },
    /// The map of characters is cut off.
    #[error("tokenizer.ggml.precompiled_charsmap has {bytes} bytes, and its array reaches past them")]
    CharsMap {
        /// Bytes of the map.
        bytes: usize,
    },
    /// A token's text is too long.
    #[error("token {id} has {bytes} bytes of text; the limit is {limit} bytes")]
    TokenTooLong {
        /// Id of the token.
        id: u32,
        /// Length of its text in bytes.
        bytes: usize,
        /// Limit.
        limit: usize,
    },
    /// Two tokens have the same text, so encoding it would be ambiguous.
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
        /// Id of the token.
        id: u32,
    },
    /// A token type outside the format's list.
    #[error("token {id} has type {found}; types are 0 to 6")]
    TokenType {
        /// Id of the token.
        id: u32,
        /// Type in the file.
        found: i32,
    },
    /// A byte token whose text is not `<0x00>` to `<0xFF>`.
    #[error("token {id} stands for a byte, but its text is {text:?}, not <0x00> to <0xFF>")]
    ByteToken {
        /// Id of the token.
        id: u32,
        /// Its text, at most 64 bytes of it.
        text: String,
    },
    /// Two tokens stand for the same byte.
    #[error("tokens {first} and {second} both stand for byte {byte}")]
    DuplicateByte {
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
        /// The byte.
        byte: u8,
    },
    /// A merge is not two texts with a space between.
    #[error("merge {rank} is {text:?}, not two token texts with a space between")]
    MergeSyntax {
        /// Index in the list of merges.
        rank: usize,
        /// Its text, at most 64 bytes of it.
        text: String,
    },
    /// A merge uses a text that is not a token.
    #[error("merge {rank} needs a token {text:?}, which the vocabulary does not have")]
    MergeToken {
        /// Index in the list of merges.
        rank: usize,
        /// The text that is not a token, at most 64 bytes of it.
        text: String,
    },
    /// The id of a special token is outside the vocabulary.
    #[error("{key} is {id}, but the vocabulary has {tokens} tokens")]
    SpecialOutOfRange {
        /// Metadata key.
        key: &'static str,
        /// Id in the file.
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
    /// The special tokens are too long in total: the matching automaton grows with their texts.
    #[error("the special tokens have {bytes} bytes of text in all; the limit is {limit} bytes")]
    SpecialText {
        /// Total bytes.
        bytes: usize,
        /// Limit.
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
