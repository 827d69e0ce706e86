//! Text to tokens and back: byte-level BPE, SentencePiece, Unigram and WordPiece vocabularies of GGUF files.
//!
//! Tokens match llama.cpp, with one deliberate difference. Merging never turns text into a token that the file calls a
//! control token, as it can in llama.cpp. Only [`EncodeOptions::parse_special`] does. Like llama.cpp, this reads text
//! as it is. Where a model's own tokenizer normalises text to Unicode NFC first (Qwen), the caller must do that.
//! Characters newer than another engine's Unicode tables may be cut elsewhere.

use super::gguf::Gguf;

mod alphabet;
mod bpe;
mod charsmap;
mod error;
mod marks;
mod parts;
mod pretokenizer;
#[cfg(test)]
mod random_texts;
mod sentencepiece;
mod shared;
mod special;
mod stop;
mod stream;
mod unicode;
mod unigram;
mod vocab;
mod wordpiece;

pub use error::TokenizerError;
pub use parts::{Algorithm, SpecialIds, VocabParts};
pub use shared::{SharedTokenizer, Tokenizers};
pub use stop::{StopMatcher, StopOutput};
pub use stream::StreamDecoder;
pub use vocab::TokenKind;

use pretokenizer::PreTokenizer;
use special::{Fragment, SpecialMatcher};
use vocab::{TextIndex, Vocab};

/// Longest text that is split and merged at once, in bytes. Longer texts are cut; no real text is that long. Three
/// times this is below 2^32, so symbol positions fit in u32.
const TEXT_BYTES_MAX: usize = 1 << 30;

/// Options for encoding a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Add the beginning- and end-of-sequence tokens that the file asks for.
    pub add_special: bool,
    /// Recognise special tokens written out in the text (`<|im_start|>`): for rendered templates, not for prompts. A
    /// rendered template contains users' text, so in a chat their markup counts too, as in llama.cpp.
    pub parse_special: bool,
}

/// A tokenizer for one vocabulary. Takes about 40 bytes a token.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    merging: Merging,
    special: SpecialMatcher,
    end_of_generation: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    separator: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    /// SentencePiece: encoding prepends a space, and [`Self::decode`] removes it. WordPiece: the first token begins with one.
    space_prefix: bool,
}

#[derive(Debug)]
enum Merging {
    BytePair(Box<bpe::BytePair>),
    SentencePiece(Box<sentencepiece::SentencePiece>),
    WordPiece(Box<wordpiece::WordPiece>),
    Unigram(Box<unigram::Unigram>),
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
        let index = TextIndex::new(&vocab)?;
        let ids = special_ids(parts, &vocab, &index)?;
        let end_of_generation = special::mark_known_tokens(&mut vocab, &index, &ids);
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
            Algorithm::Unigram => {
                let scores =
                    parts.scores.ok_or_else(|| missing("tokenizer.ggml.scores", "an array of f32"))?;
                let model = unigram::Unigram::new(&vocab, scores, parts, ids.unknown)?;
                (Merging::Unigram(Box::new(model)), false)
            }
            Algorithm::WordPiece => {
                let model = wordpiece::WordPiece::new(&vocab, index, ids.unknown);
                (Merging::WordPiece(Box::new(model)), true)
            }
        };
        let space_prefix = match parts.algorithm {
            Algorithm::BytePair => false,
            Algorithm::SentencePiece | Algorithm::Unigram => parts.add_space_prefix.unwrap_or(true),
            Algorithm::WordPiece => true,
        };
        // Texts of WordPiece always stand between both.
        let framed = parts.algorithm == Algorithm::WordPiece;
        let add_bos = framed || parts.add_bos.unwrap_or(add_bos);
        let add_eos = framed || parts.add_eos.unwrap_or(parts.algorithm == Algorithm::Unigram);
        for (adds, id, flag, key) in
            [(add_bos, ids.bos, parts::ADD_BOS, parts::BOS), (add_eos, ids.eos, parts::ADD_EOS, parts::EOS)]
        {
            if adds && id.is_none() {
                return Err(TokenizerError::SpecialMissing { flag, key });
            }
        }
        Ok(Self {
            vocab,
            merging,
            special,
            end_of_generation,
            bos: ids.bos,
            eos: ids.eos,
            separator: ids.separator,
            add_bos,
            add_eos,
            space_prefix,
        })
    }

    /// Number of tokens.
    pub fn vocab_size(&self) -> usize {
        self.vocab.len()
    }

    /// The metadata's name of the algorithm: `gpt2`, `llama`, `bert` or `t5`.
    pub fn kind(&self) -> &'static str {
        match self.merging {
            Merging::BytePair(_) => "gpt2",
            Merging::SentencePiece(_) => "llama",
            Merging::WordPiece(_) => "bert",
            Merging::Unigram(_) => "t5",
        }
    }

    /// Token ids of `text`. About 10 MB/s; `n log n` on hostile text.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 4 + 2);
        if options.add_special && self.add_bos {
            ids.extend(self.bos);
        }
        // Text after a special token begins like the first text.
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

    /// Token ids of two texts that a model compares: the beginning, the first text, the end and the separator, the second text
    /// and the end. WordPiece, and ModernBERT with its `[SEP]`, have one separator between them.
    pub fn encode_pair(&self, first: &str, second: &str) -> Vec<u32> {
        let plain = EncodeOptions { add_special: false, parse_special: false };
        let (bos, eos) = (self.bos.filter(|_| self.add_bos), self.eos.filter(|_| self.add_eos));
        let is_bert = matches!(self.merging, Merging::WordPiece(_))
            || eos.is_some_and(|eos| self.token_bytes(eos, true) == Some(b"[SEP]"));
        let between = self.separator.filter(|_| !is_bert);
        let mut ids: Vec<u32> = bos.into_iter().collect();
        ids.extend(self.encode(first, plain));
        ids.extend(eos.into_iter().chain(between));
        ids.extend(self.encode(second, plain));
        ids.extend(eos);
        ids
    }

    fn encode_part(&self, text: &str, at_start: bool, ids: &mut Vec<u32>) {
        match &self.merging {
            Merging::BytePair(bpe) => bpe.encode(&self.vocab, text, ids),
            Merging::SentencePiece(model) => {
                model.encode(&self.vocab, text, self.space_prefix && at_start, ids);
            }
            Merging::WordPiece(model) => model.encode(&self.vocab, text, ids),
            Merging::Unigram(model) => {
                model.encode(&self.vocab, text, self.space_prefix && at_start, ids);
            }
        }
    }

    /// The bytes that a token stands for in running text; `None` for an id outside the vocabulary. Control tokens and
    /// the unknown token give no bytes unless `show_special`.
    pub fn token_bytes(&self, id: u32, show_special: bool) -> Option<&[u8]> {
        let piece = self.vocab.piece(id)?;
        let hidden = matches!(self.vocab.kind(id), Some(TokenKind::Control | TokenKind::Unknown));
        Some(if hidden && !show_special { &[] } else { piece })
    }

    /// The text of `ids`. Invalid UTF-8 becomes U+FFFD. Removes the space that SentencePiece prepends, so that
    /// `decode(encode(text))` is `text`. `None` when an id is outside the vocabulary.
    ///
    /// Keeps spaces before punctuation, which llama.cpp's detokenize removes for some vocabularies. Streamed and
    /// decoded text are therefore the same.
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

    /// A token's text as in the file (`Ġhello`, `▁hello`, `<0x0A>`); `None` for an id outside the vocabulary.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.vocab.text(id)
    }

    /// A token's kind; `None` for an id outside the vocabulary.
    pub fn token_kind(&self, id: u32) -> Option<TokenKind> {
        self.vocab.kind(id)
    }

    /// True when this token ends the answer (eos, eot, eom and all the file's names for them).
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.end_of_generation.binary_search(&id).is_ok()
    }

    /// All tokens that end an answer, ascending.
    pub fn end_of_generation(&self) -> &[u32] {
        &self.end_of_generation
    }

    /// Id of the beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Id of the end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }
}

/// The checked ids of the metadata. SentencePiece files may omit the usual ids, and WordPiece files those of usual names; they are
/// filled in. The class and separator tokens of a WordPiece file begin and end its texts.
fn special_ids(
    parts: &VocabParts<'_>,
    vocab: &Vocab,
    index: &TextIndex,
) -> Result<SpecialIds, TokenizerError> {
    let tokens = vocab.len();
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
    let named = |name| index.get(vocab, name);
    if parts.algorithm == Algorithm::Unigram {
        ids.unknown = ids.unknown.or(named("<unk>"));
    }
    if parts.algorithm == Algorithm::WordPiece {
        ids.unknown = ids.unknown.or(named("[UNK]"));
        ids.bos = ids.cls.or(ids.bos).or(named("[CLS]"));
        ids.eos = ids.separator.or(ids.eos).or(named("[SEP]"));
    }
    Ok(ids)
}

fn missing(key: &str, expected: &'static str) -> TokenizerError {
    super::gguf::GgufError::MissingKey { key: key.into(), expected }.into()
}

#[cfg(test)]
mod tests;
