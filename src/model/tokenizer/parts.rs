//! A file's vocabulary, as taken from the metadata; [`super::Tokenizer::new`] checks it.
//!
//! Keys and defaults: ggml `docs/gguf.md`, "Tokenizer", and llama.cpp `src/llama-vocab.cpp`, which defaults missing
//! keys.

use super::TokenizerError;
use crate::model::gguf::{Gguf, Strings};

/// The algorithm that turns text into tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Byte-level byte-pair encoding (`gpt2`).
    BytePair,
    /// SentencePiece merging by score (`llama`).
    SentencePiece,
    /// WordPiece (`bert`).
    WordPiece,
    /// Unigram by score (`t5`).
    Unigram,
}

/// Ids of the special tokens in the metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// `bos_token_id`.
    pub bos: Option<u32>,
    /// `eos_token_id`.
    pub eos: Option<u32>,
    /// `unknown_token_id`.
    pub unknown: Option<u32>,
    /// `cls_token_id`: begins each text of an encoder.
    pub cls: Option<u32>,
    /// `seperator_token_id`, so written: ends each text of an encoder.
    pub separator: Option<u32>,
    /// `eot_token_id`: end of turn.
    pub eot: Option<u32>,
    /// `eom_token_id`: end of message.
    pub eom: Option<u32>,
    /// `fim_pad_token_id`.
    pub fim_pad: Option<u32>,
    /// `fim_rep_token_id`.
    pub fim_rep: Option<u32>,
    /// `fim_sep_token_id`.
    pub fim_sep: Option<u32>,
}

/// A vocabulary as stored in the file, unchecked.
#[derive(Clone, Debug)]
pub struct VocabParts<'a> {
    /// `tokenizer.ggml.model`.
    pub algorithm: Algorithm,
    /// `tokenizer.ggml.pre`; only byte-pair vocabularies use it.
    pub pre: Option<&'a str>,
    /// `general.name`: llama.cpp uses it to recognise files whose special tokens swallow the spaces after them.
    pub model_name: Option<&'a str>,
    /// `tokenizer.ggml.tokens`.
    pub tokens: &'a Strings,
    /// `tokenizer.ggml.scores`: required by SentencePiece and Unigram.
    pub scores: Option<&'a [f32]>,
    /// `tokenizer.ggml.token_type`: all normal when absent.
    pub types: Option<&'a [i32]>,
    /// `tokenizer.ggml.merges`: required by byte-pair encoding.
    pub merges: Option<&'a Strings>,
    /// Ids of special tokens.
    pub special: SpecialIds,
    /// `tokenizer.ggml.add_bos_token`; `None` takes the algorithm's default.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.precompiled_charsmap`; only Unigram uses it.
    pub charsmap: Option<&'a [u8]>,
    /// `tokenizer.ggml.remove_extra_whitespaces`; only Unigram uses it.
    pub merges_spaces: Option<bool>,
}

impl<'a> VocabParts<'a> {
    /// Parts with tokens only; everything else is absent.
    pub fn new(algorithm: Algorithm, tokens: &'a Strings) -> Self {
        Self {
            algorithm,
            pre: None,
            model_name: None,
            tokens,
            scores: None,
            types: None,
            merges: None,
            special: SpecialIds::default(),
            add_bos: None,
            add_eos: None,
            add_space_prefix: None,
            charsmap: None,
            merges_spaces: None,
        }
    }

    /// Reads the parts from a header.
    ///
    /// # Errors
    /// [`TokenizerError::Metadata`] for a missing key or a wrong type, [`TokenizerError::Kind`].
    pub fn from_gguf(gguf: &'a Gguf) -> Result<Self, TokenizerError> {
        let algorithm = match gguf.required::<&str>("tokenizer.ggml.model")? {
            "gpt2" => Algorithm::BytePair,
            "llama" => Algorithm::SentencePiece,
            "bert" => Algorithm::WordPiece,
            "t5" => Algorithm::Unigram,
            other => return Err(TokenizerError::Kind(super::error::excerpt(other))),
        };
        let (scores, merges) = match algorithm {
            Algorithm::BytePair => (None, Some(gguf.required("tokenizer.ggml.merges")?)),
            Algorithm::SentencePiece | Algorithm::Unigram => {
                (Some(gguf.required("tokenizer.ggml.scores")?), None)
            }
            Algorithm::WordPiece => (None, None),
        };
        Ok(Self {
            algorithm,
            pre: gguf.optional("tokenizer.ggml.pre")?,
            model_name: gguf.optional("general.name")?,
            tokens: gguf.required("tokenizer.ggml.tokens")?,
            scores,
            types: gguf.optional("tokenizer.ggml.token_type")?,
            merges,
            special: SpecialIds {
                bos: gguf.optional(BOS)?,
                eos: gguf.optional(EOS)?,
                unknown: gguf.optional(UNKNOWN)?,
                cls: gguf.optional(CLS)?,
                separator: gguf.optional(SEPARATOR)?,
                eot: gguf.optional(EOT)?,
                eom: gguf.optional(EOM)?,
                fim_pad: gguf.optional(FIM_PAD)?,
                fim_rep: gguf.optional(FIM_REP)?,
                fim_sep: gguf.optional(FIM_SEP)?,
            },
            add_bos: gguf.optional(ADD_BOS)?,
            add_eos: gguf.optional(ADD_EOS)?,
            add_space_prefix: gguf.optional("tokenizer.ggml.add_space_prefix")?,
            charsmap: gguf.optional("tokenizer.ggml.precompiled_charsmap")?,
            merges_spaces: gguf.optional("tokenizer.ggml.remove_extra_whitespaces")?,
        })
    }
}

impl SpecialIds {
    /// The ids with their metadata keys.
    pub(super) fn with_keys(&self) -> [(&'static str, Option<u32>); 10] {
        [
            (BOS, self.bos),
            (EOS, self.eos),
            (UNKNOWN, self.unknown),
            (CLS, self.cls),
            (SEPARATOR, self.separator),
            (EOT, self.eot),
            (EOM, self.eom),
            (FIM_PAD, self.fim_pad),
            (FIM_REP, self.fim_rep),
            (FIM_SEP, self.fim_sep),
        ]
    }
}

pub(super) const BOS: &str = "tokenizer.ggml.bos_token_id";
pub(super) const EOS: &str = "tokenizer.ggml.eos_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
pub(super) const CLS: &str = "tokenizer.ggml.cls_token_id";
pub(super) const SEPARATOR: &str = "tokenizer.ggml.seperator_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
const FIM_PAD: &str = "tokenizer.ggml.fim_pad_token_id";
const FIM_REP: &str = "tokenizer.ggml.fim_rep_token_id";
const FIM_SEP: &str = "tokenizer.ggml.fim_sep_token_id";
pub(super) const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
pub(super) const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
