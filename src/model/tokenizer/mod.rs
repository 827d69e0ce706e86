//! Text to tokens and back: byte-level BPE and SentencePiece vocabularies of GGUF files.

use super::gguf::Gguf;

/// Why a vocabulary cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A vocabulary kind we do not know.
    #[error(
        "tokenizer model {0:?} is not supported; supported: gpt2 (byte-level BPE), llama (SentencePiece)"
    )]
    Kind(String),
}

/// How to read a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Add the beginning- and end-of-sequence tokens that the file asks for.
    pub add_special: bool,
    /// Recognise special tokens written out in the text (`<|im_start|>`): for rendered templates, never for raw user text.
    pub parse_special: bool,
}

/// A vocabulary.
#[derive(Debug)]
pub struct Tokenizer {}

impl Tokenizer {
    /// Builds the tokenizer of a file.
    ///
    /// # Errors
    /// [`TokenizerError`].
    pub fn from_gguf(_gguf: &Gguf) -> Result<Self, TokenizerError> {
        Err(TokenizerError::Kind(String::new()))
    }

    /// Number of tokens.
    pub fn vocab_size(&self) -> usize {
        0
    }

    /// Token ids of `text`.
    pub fn encode(&self, _text: &str, _options: EncodeOptions) -> Vec<u32> {
        Vec::new()
    }

    /// The bytes that a token stands for in running text; `None` for an id outside the vocabulary. Control tokens give
    /// no bytes unless `show_special`.
    pub fn token_bytes(&self, _id: u32, _show_special: bool) -> Option<&[u8]> {
        None
    }

    /// The text of `ids`; bytes that are no UTF-8 become U+FFFD. As llama.cpp's detokenize (a leading space that
    /// SentencePiece put there is removed). `None` when an id is outside the vocabulary.
    pub fn decode(&self, _ids: &[u32], _show_special: bool) -> Option<String> {
        None
    }

    /// True when the model says by this token that its answer is over (eos, eot, eom and all the file's names for them).
    pub fn is_end_of_generation(&self, _id: u32) -> bool {
        false
    }

    /// Beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        None
    }

    /// End-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        None
    }
}

/// Turns a stream of generated tokens into text that never ends inside a UTF-8 character.
#[derive(Debug, Default)]
pub struct StreamDecoder {
    pending: Vec<u8>,
}

impl StreamDecoder {
    /// A decoder at the start of an answer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a token's bytes; returns the text that is complete by now (may be empty).
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        String::new()
    }

    /// What is left at the end: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        String::new()
    }
}
