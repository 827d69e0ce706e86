//! The checked tokens of a vocabulary: their texts, kinds and bytes.

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

use super::TokenizerError;
use super::alphabet;
use super::error::excerpt;
use super::parts::{Algorithm, VocabParts};
use crate::model::gguf::Strings;

/// SentencePiece writes a space as U+2581 in the texts of its tokens. Files with WordPiece have it before each token that begins a
/// word.
pub(super) const SPACE_MARK: char = '\u{2581}';

/// Most tokens of a vocabulary: eight times the largest in use.
pub(super) const TOKENS_MAX: usize = 1 << 21;

/// Longest text of a token in bytes. Real ones stay below 300.
pub(super) const TOKEN_BYTES_MAX: usize = 64 << 10;

/// Kind of a token (`tokenizer.ggml.token_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Type 0: never made from text, and stands for no text.
    Undefined,
    /// Text.
    Normal,
    /// Stands for text that the vocabulary cannot represent.
    Unknown,
    /// Not text: never made from a user's text, shown only on request.
    Control,
    /// Text that is matched before anything is split.
    UserDefined,
    /// Reserved; stands for no text.
    Unused,
    /// One byte, `<0x00>` to `<0xFF>`.
    Byte,
}

/// Texts, kinds and bytes of all tokens.
#[derive(Debug)]
pub(super) struct Vocab {
    texts: Strings,
    kinds: Vec<TokenKind>,
    /// Per token: true when text may become it, by the file's kinds.
    mergeable: Vec<bool>,
    /// The concatenated bytes of all tokens.
    pieces: Vec<u8>,
    /// End of each token's bytes in `pieces`; at most 2^28, the header limit.
    ends: Vec<u32>,
}

impl Vocab {
    /// Checks counts, lengths and types. Kinds may change until [`Self::fill_pieces`].
    pub fn new(parts: &VocabParts<'_>) -> Result<Self, TokenizerError> {
        let count = parts.tokens.len();
        if count == 0 || count > TOKENS_MAX {
            return Err(TokenizerError::TokenCount { count, limit: TOKENS_MAX });
        }
        check_length("tokenizer.ggml.scores", parts.scores.map(<[f32]>::len), count)?;
        check_length("tokenizer.ggml.token_type", parts.types.map(<[i32]>::len), count)?;
        for (id, text) in (0..).zip(parts.tokens.iter()) {
            if text.len() > TOKEN_BYTES_MAX {
                return Err(TokenizerError::TokenTooLong { id, bytes: text.len(), limit: TOKEN_BYTES_MAX });
            }
        }
        if let Some(id) = parts.scores.into_iter().flatten().position(|score| score.is_nan()) {
            return Err(TokenizerError::ScoreNan { id: id as u32 });
        }
        let kinds = match parts.types {
            Some(types) => {
                (0..).zip(types).map(|(id, &kind)| token_kind(id, kind)).collect::<Result<_, _>>()?
            }
            None => vec![TokenKind::Normal; count],
        };
        let mergeable = kinds
            .iter()
            .map(|kind| !matches!(kind, TokenKind::Control | TokenKind::Unknown | TokenKind::Byte))
            .collect();
        Ok(Self { texts: parts.tokens.clone(), kinds, mergeable, pieces: Vec::new(), ends: Vec::new() })
    }

    /// Computes the bytes of every token from its final kind.
    pub fn fill_pieces(&mut self, algorithm: Algorithm) -> Result<(), TokenizerError> {
        self.ends.reserve_exact(self.len());
        for (id, text) in (0..).zip(self.texts.iter()) {
            match self.kinds[id as usize] {
                TokenKind::Undefined | TokenKind::Unused => {}
                TokenKind::Byte => self.pieces.push(byte_of_token(id, text)?),
                TokenKind::Normal => push_normal(&mut self.pieces, text, algorithm),
                TokenKind::Unknown | TokenKind::Control | TokenKind::UserDefined => {
                    self.pieces.extend_from_slice(text.as_bytes());
                }
            }
            self.ends.push(self.pieces.len() as u32);
        }
        self.pieces.shrink_to_fit();
        Ok(())
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// A token's text as in the file.
    pub fn text(&self, id: u32) -> Option<&str> {
        self.texts.get(id as usize)
    }

    /// All texts in id order.
    pub fn texts(&self) -> impl ExactSizeIterator<Item = &str> + Clone {
        self.texts.iter()
    }

    /// A token's kind.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// Changes a token's kind. Call before [`Self::fill_pieces`].
    pub fn set_kind(&mut self, id: u32, kind: TokenKind) {
        if let Some(slot) = self.kinds.get_mut(id as usize) {
            *slot = kind;
        }
    }

    /// The bytes a token stands for.
    pub fn piece(&self, id: u32) -> Option<&[u8]> {
        let end = *self.ends.get(id as usize)? as usize;
        let start = match (id as usize).checked_sub(1) {
            Some(before) => *self.ends.get(before)? as usize,
            None => 0,
        };
        self.pieces.get(start..end)
    }

    /// True for tokens that text may become by splitting and merging: all but the file's control, unknown and byte
    /// tokens. No user's text is read as a command to the model this way. Tokens that are control tokens by name only
    /// stay mergeable: `</s>` is HTML to Qwen.
    pub fn is_mergeable(&self, id: u32) -> bool {
        self.mergeable.get(id as usize).copied().unwrap_or(false)
    }
}

/// Finds tokens by their text.
#[derive(Debug)]
pub(super) struct TextIndex {
    table: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl TextIndex {
    /// An index of all tokens with a text. Empty texts (padding) are accepted but not indexed.
    pub fn new(vocab: &Vocab) -> Result<Self, TokenizerError> {
        let mut index =
            Self { table: HashTable::with_capacity(vocab.len()), hasher: DefaultHashBuilder::default() };
        for (second, text) in (0..).zip(vocab.texts()) {
            if text.is_empty() {
                continue;
            }
            if let Some(first) = index.get(vocab, text) {
                return Err(TokenizerError::DuplicateToken { first, second, text: excerpt(text) });
            }
            let hasher = &index.hasher;
            index.table.insert_unique(hasher.hash_one(text), second, |&id| {
                hasher.hash_one(vocab.text(id).unwrap_or_default())
            });
        }
        Ok(index)
    }

    /// The token with this text, of any kind.
    pub fn get(&self, vocab: &Vocab, text: &str) -> Option<u32> {
        self.table.find(self.hasher.hash_one(text), |&id| vocab.text(id) == Some(text)).copied()
    }

    /// The token with this text, if it is mergeable.
    pub fn get_mergeable(&self, vocab: &Vocab, text: &str) -> Option<u32> {
        self.get(vocab, text).filter(|&id| vocab.is_mergeable(id))
    }
}

/// The byte of a byte token: exactly `<0x`, two hexadecimal digits, `>`.
pub(super) fn byte_of_token(id: u32, text: &str) -> Result<u8, TokenizerError> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    if let [b'<', b'0', b'x', high, low, b'>'] = *text.as_bytes()
        && let (Some(high), Some(low)) = (digit(high), digit(low))
    {
        return Ok((high * 16 + low) as u8);
    }
    Err(TokenizerError::ByteToken { id, text: excerpt(text) })
}

fn check_length(key: &'static str, found: Option<usize>, tokens: usize) -> Result<(), TokenizerError> {
    match found {
        Some(found) if found != tokens => Err(TokenizerError::ArrayLength { key, found, tokens }),
        _ => Ok(()),
    }
}

fn token_kind(id: u32, kind: i32) -> Result<TokenKind, TokenizerError> {
    Ok(match kind {
        0 => TokenKind::Undefined,
        1 => TokenKind::Normal,
        2 => TokenKind::Unknown,
        3 => TokenKind::Control,
        4 => TokenKind::UserDefined,
        5 => TokenKind::Unused,
        6 => TokenKind::Byte,
        found => return Err(TokenizerError::TokenType { id, found }),
    })
}

fn push_normal(pieces: &mut Vec<u8>, text: &str, algorithm: Algorithm) {
    let mut utf8 = [0; 4];
    for character in text.chars() {
        let byte = match algorithm {
            // Some files hold added tokens with plain text (emoji in command-r) among the byte-level ones.
            Algorithm::BytePair => alphabet::byte_of_char(character),
            Algorithm::SentencePiece | Algorithm::WordPiece | Algorithm::Unigram => {
                (character == SPACE_MARK).then_some(b' ')
            }
        };
        match byte {
            Some(byte) => pieces.push(byte),
            None => pieces.extend_from_slice(character.encode_utf8(&mut utf8).as_bytes()),
        }
    }
}
