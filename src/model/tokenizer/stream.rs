//! Decodes an answer's bytes to text during generation.

/// Turns a stream of token bytes into text that never ends inside a UTF-8 character.
///
/// The joined output equals `String::from_utf8_lossy` of all bytes, however they were cut. A leading space of the first
/// token stays: the answer continues the prompt, as in llama.cpp's server.
#[derive(Debug, Default)]
pub struct StreamDecoder {
    /// An incomplete character; at most 3 bytes between calls.
    pending: Vec<u8>,
}

impl StreamDecoder {
    /// A decoder at the start of an answer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a token's bytes and returns the text that is now complete (may be empty).
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.pending.len());
        let mut rest = self.pending.as_slice();
        loop {
            let error = match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, tail) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            rest = tail;
            let Some(invalid) = error.error_len() else { break };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = &rest[invalid..];
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
        text
    }

    /// Returns the rest: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stream(chunks: &[Vec<u8>]) -> String {
        let mut decoder = StreamDecoder::new();
        let mut text: String = chunks.iter().map(|chunk| decoder.push(chunk)).collect();
        text.push_str(&decoder.finish());
        text
    }

    #[test]
    fn a_character_is_given_when_its_last_byte_is_there() {
        let mut decoder = StreamDecoder::new();
        let pushed: Vec<_> = "é€😀".bytes().map(|byte| decoder.push(&[byte])).collect();
        assert_eq!(pushed, ["", "é", "", "", "€", "", "", "", "😀"]);
        assert_eq!(decoder.finish(), "");
    }

    #[test]
    fn an_unfinished_character_at_the_end_becomes_one_replacement() {
        let mut decoder = StreamDecoder::new();
        assert_eq!(decoder.push(b"a\xf0\x9f\x98"), "a");
        assert_eq!(decoder.finish(), "\u{fffd}");
        assert_eq!(decoder.finish(), "");
    }

    /// Bytes that are often UTF-8 or almost UTF-8.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            any::<char>().prop_map(|c| {
                let mut b = c.to_string().into_bytes();
                b.pop();
                b
            }),
            prop::collection::vec(any::<u8>(), 0..4),
            prop::collection::vec(0x80..=0xffu8, 0..4),
        ];
        prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn chunks_make_no_difference(bytes in bytes(), cuts in prop::collection::vec(0..100usize, 0..12)) {
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let chunks: Vec<_> = cuts.windows(2).map(|pair| bytes[pair[0]..pair[1]].to_vec()).collect();
            prop_assert_eq!(stream(&chunks), String::from_utf8_lossy(&bytes));
        }
    }
}
