//! Text to tokens and back: byte-level BPE and SentencePiece vocabularies of GGUF files.
//!
//! Tokens are those of llama.cpp, with one difference on purpose: text never becomes a token that the file calls a control
//! token by merging (with llama.cpp it can), only through [`EncodeOptions::parse_special`]. Like llama.cpp this reads text
//! as it is: where a model's own tokenizer brings text to Unicode's NFC first (Qwen), that is left to the caller. Characters
//! younger than the Unicode tables of another engine may be cut in other places.

use super::gguf::Gguf;

mod alphabet;
mod bpe;
mod error;
mod parts;
mod pretokenizer;
mod sentencepiece;
mod shared;
mod special;
mod stop;
mod stream;
mod unicode;
mod vocab;

pub use error::TokenizerError;
pub use parts::{Algorithm, SpecialIds, VocabParts};
pub use shared::{SharedTokenizer, Tokenizers};
pub use stop::{StopMatcher, StopOutput};
pub use stream::StreamDecoder;
pub use vocab::TokenKind;

use pretokenizer::PreTokenizer;
use special::{Fragment, SpecialMatcher};
use vocab::{TextIndex, Vocab};

/// Longest text that is split and merged at once, in bytes; longer ones are cut, which no real text reaches. Three times
/// this is below 2^32, the places of symbols.
const TEXT_BYTES_MAX: usize = 1 << 30;

/// How to read a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Add the beginning- and end-of-sequence tokens that the file asks for.
    pub add_special: bool,
    /// Recognise special tokens written out in the text (`<|im_start|>`): for rendered templates, not for prompts. A
    /// rendered template holds what users wrote, so in a chat their markup counts too, as in llama.cpp.
    pub parse_special: bool,
}

/// A vocabulary. About 40 bytes a token.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    merging: Merging,
    special: SpecialMatcher,
    end_of_generation: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    /// SentencePiece: a space is put before a text, and taken off again by [`Self::decode`].
    space_prefix: bool,
}

#[derive(Debug)]
enum Merging {
    BytePair(Box<bpe::BytePair>),
    SentencePiece(Box<sentencepiece::SentencePiece>),
}

impl Tokenizer {
    /// Builds the tokenizer of a file.
    ///
    /// # Errors
    /// [`TokenizerError`].
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TokenizerError> {
        Self::new(&VocabParts::from_gguf(gguf)?)
    }

    /// Checks a vocabulary and builds its tables. About 40 ms for 150,000 tokens and merges.
    ///
    /// # Errors
    /// [`TokenizerError`].
    pub fn new(parts: &VocabParts<'_>) -> Result<Self, TokenizerError> {
        let mut vocab = Vocab::new(parts)?;
        let ids = special_ids(parts, vocab.len())?;
        let index = TextIndex::new(&vocab)?;
        let end_of_generation = special::settle_kinds(&mut vocab, &index, &ids);
        vocab.fill_pieces(parts.algorithm)?;
        let special = SpecialMatcher::new(&vocab, parts)?;
        let (merging, add_bos) = match parts.algorithm {
            Algorithm::BytePair => {
                let pre = PreTokenizer::named(parts.pre)?;
                let merges =
                    parts.merges.ok_or_else(|| missing("tokenizer.ggml.merges", "an array of strings"))?;
                let bpe = bpe::BytePair::new(&vocab, index, merges, pre)?;
                (Merging::BytePair(Box::new(bpe)), pre.add_bos)
            }
            Algorithm::SentencePiece => {
                let scores =
                    parts.scores.ok_or_else(|| missing("tokenizer.ggml.scores", "an array of f32"))?;
                let model = sentencepiece::SentencePiece::new(&vocab, index, scores, ids.unknown)?;
                (Merging::SentencePiece(Box::new(model)), true)
            }
        };
        let space_prefix =
            parts.algorithm == Algorithm::SentencePiece && parts.add_space_prefix.unwrap_or(true);
        let (add_bos, add_eos) = (parts.add_bos.unwrap_or(add_bos), parts.add_eos.unwrap_or(false));
        for (adds, id, flag, key) in
            [(add_bos, ids.bos, parts::ADD_BOS, parts::BOS), (add_eos, ids.eos, parts::ADD_EOS, parts::EOS)]
        {
            if adds && id.is_none() {
                return Err(TokenizerError::SpecialMissing { flag, key });
            }
        }
        let (bos, eos) = (ids.bos, ids.eos);
        Ok(Self { vocab, merging, special, end_of_generation, bos, eos, add_bos, add_eos, space_prefix })
    }

    /// Number of tokens.
    pub fn vocab_size(&self) -> usize {
        self.vocab.len()
    }

    /// The metadata's name of how this vocabulary makes tokens: `gpt2` or `llama`.
    pub fn kind(&self) -> &'static str {
        match self.merging {
            Merging::BytePair(_) => "gpt2",
            Merging::SentencePiece(_) => "llama",
        }
    }

    /// Token ids of `text`. About 10 MB/s; `n log n` on hostile text.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 4 + 2);
        if options.add_special && self.add_bos {
            ids.extend(self.bos);
        }
        // A text after a token begins like the first one.
        let mut at_start = true;
        self.special.fragments(text, options.parse_special, |fragment| match fragment {
            Fragment::Token(id) => {
                ids.push(id);
                at_start = true;
            }
            Fragment::Text(mut text) => {
                while !text.is_empty() {
                    let (part, rest) = text.split_at(error::floor_char_boundary(text, TEXT_BYTES_MAX));
                    self.encode_part(part, at_start, &mut ids);
                    (text, at_start) = (rest, false);
                }
            }
        });
        if options.add_special && self.add_eos {
            ids.extend(self.eos);
        }
        ids
    }

    fn encode_part(&self, text: &str, at_start: bool, ids: &mut Vec<u32>) {
        match &self.merging {
            Merging::BytePair(bpe) => bpe.encode(&self.vocab, text, ids),
            Merging::SentencePiece(model) => {
                model.encode(&self.vocab, text, self.space_prefix && at_start, ids);
            }
        }
    }

    /// The bytes that a token stands for in running text; `None` for an id outside the vocabulary. Control tokens (and
    /// the unknown token) give no bytes unless `show_special`.
    pub fn token_bytes(&self, id: u32, show_special: bool) -> Option<&[u8]> {
        let piece = self.vocab.piece(id)?;
        let hidden = matches!(self.vocab.kind(id), Some(TokenKind::Control | TokenKind::Unknown));
        Some(if hidden && !show_special { &[] } else { piece })
    }

    /// The text of `ids`; bytes that are no UTF-8 become U+FFFD. The space that SentencePiece put before a text is
    /// removed, so that `decode(encode(text))` is `text`. `None` when an id is outside the vocabulary.
    ///
    /// Spaces before punctuation stay, which llama.cpp's detokenize removes for some vocabularies: streamed and decoded
    /// text are the same here.
    pub fn decode(&self, ids: &[u32], show_special: bool) -> Option<String> {
        let mut bytes = Vec::with_capacity(ids.len().saturating_mul(4));
        let mut space_due = self.space_prefix;
        for &id in ids {
            let piece = self.token_bytes(id, show_special)?;
            let control = matches!(self.vocab.kind(id), Some(TokenKind::Control | TokenKind::Unknown));
            if space_due && !control {
                space_due = false;
                bytes.extend_from_slice(piece.strip_prefix(b" ").unwrap_or(piece));
            } else {
                bytes.extend_from_slice(piece);
            }
        }
        Some(match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        })
    }

    /// A token's text as the file has it (`Ġhello`, `▁hello`, `<0x0A>`); `None` for an id outside the vocabulary.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.vocab.text(id)
    }

    /// What a token is for; `None` for an id outside the vocabulary.
    pub fn token_kind(&self, id: u32) -> Option<TokenKind> {
        self.vocab.kind(id)
    }

    /// True when the model says by this token that its answer is over (eos, eot, eom and all the file's names for them).
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.end_of_generation.binary_search(&id).is_ok()
    }

    /// All tokens that end an answer, ascending.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.end_of_generation
    }

    /// Beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// End-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }
}

/// The ids of the metadata, checked; for SentencePiece, files may leave out the usual ones.
fn special_ids(parts: &VocabParts<'_>, tokens: usize) -> Result<SpecialIds, TokenizerError> {
    for (key, id) in parts.special.with_keys() {
        match id {
            Some(id) if id as usize >= tokens => {
                return Err(TokenizerError::SpecialOutOfRange { key, id, tokens });
            }
            _ => {}
        }
    }
    let mut ids = parts.special;
    if parts.algorithm == Algorithm::SentencePiece {
        let usual = |id: u32| Some(id).filter(|&id| (id as usize) < tokens);
        ids.unknown = ids.unknown.or(usual(0));
        ids.bos = ids.bos.or(usual(1));
        ids.eos = ids.eos.or(usual(2));
    }
    Ok(ids)
}

fn missing(key: &str, expected: &'static str) -> TokenizerError {
    super::gguf::GgufError::MissingKey { key: key.into(), expected }.into()
}

#[cfg(test)]
mod tests;
