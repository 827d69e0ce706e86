//! Turns an answer's tokens into text: only whole characters, and nothing of a stop text.

use crate::model::tokenizer::{StopMatcher, StreamDecoder};

#[derive(Debug)]
pub(super) struct AnswerText {
    decoder: StreamDecoder,
    stops: StopMatcher,
    stopped: bool,
}

impl AnswerText {
    pub fn new(stops: &[String]) -> Self {
        Self { decoder: StreamDecoder::new(), stops: StopMatcher::new(stops), stopped: false }
    }

    /// Adds a token's bytes; returns the text that no later token can change.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        let text = self.decoder.push(bytes);
        self.pass(&text)
    }

    /// True after a stop text: the answer ends before it.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Returns the text held back so far, at the answer's end: the beginning of a possible stop text, and U+FFFD for an
    /// unfinished character. Empty after a stop text.
    pub fn finish(&mut self) -> String {
        let rest = self.decoder.finish();
        let mut text = self.pass(&rest);
        text.push_str(&self.stops.finish());
        text
    }

    fn pass(&mut self, text: &str) -> String {
        let out = self.stops.push(text);
        self.stopped |= out.hit.is_some();
        out.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_text_in_pieces_ends_the_answer_before_it() {
        let mut answer = AnswerText::new(&["END".into()]);
        assert_eq!((answer.push(b"so E"), answer.push(b"N")), ("so ".into(), String::new()));
        assert!(!answer.stopped());
        assert_eq!(answer.push(b"D more"), "");
        assert!(answer.stopped());
        assert_eq!(answer.finish(), "");
    }

    #[test]
    fn bytes_held_back_come_at_the_end() {
        let mut answer = AnswerText::new(&["END".into()]);
        assert_eq!(answer.push(b"caf\xc3\xa9 EN"), "café ");
        assert_eq!(answer.push(b"\xf0\x9f"), "");
        assert_eq!(answer.finish(), "EN\u{fffd}");
    }
}
