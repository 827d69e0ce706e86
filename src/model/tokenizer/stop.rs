//! Stop texts: an answer ends before the first one, however tokens cut it.

/// Finds stop texts in a stream of text pieces.
///
/// The hit is the stop text that completes first; of several with the same end, the one that begins first. The matcher
/// holds back only text that may still begin a stop text. Time: one comparison per byte and stop text, amortised (one
/// Knuth-Morris-Pratt automaton each).
#[derive(Debug, Default)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// Text held back: the longest end of the pushed text that is a prefix of a stop text.
    held: String,
    hit: Option<usize>,
}

/// The text to send after a pushed piece.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopOutput {
    /// Text that is not part of a stop text; may be empty.
    pub text: String,
    /// Index of the stop text found. The answer is over, and further text is ignored.
    pub hit: Option<usize>,
}

#[derive(Debug)]
struct Stop {
    /// Index in the caller's list.
    index: usize,
    text: Box<[u8]>,
    /// For each prefix length: the longest shorter prefix that is also its suffix.
    shorter: Box<[usize]>,
    /// Bytes of the stop text that the text so far ends with.
    matched: usize,
}

impl StopMatcher {
    /// A matcher at the start of an answer. Empty stop texts never match.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Self {
        let stops = stops.iter().enumerate().map(|(index, stop)| (index, stop.as_ref()));
        let stops = stops.filter(|(_, stop)| !stop.is_empty()).map(|(index, stop)| Stop::new(index, stop));
        Self { stops: stops.collect(), held: String::new(), hit: None }
    }

    /// Adds a piece of text and returns the text to send now.
    pub fn push(&mut self, piece: &str) -> StopOutput {
        if self.hit.is_some() {
            return StopOutput { text: String::new(), hit: self.hit };
        }
        let before = self.held.len();
        self.held.push_str(piece);
        for (at, &byte) in self.held.as_bytes().iter().enumerate().skip(before) {
            let mut found: Option<(usize, usize)> = None;
            for stop in &mut self.stops {
                if stop.step(byte) && found.is_none_or(|(bytes, _)| stop.text.len() > bytes) {
                    found = Some((stop.text.len(), stop.index));
                }
            }
            if let Some((bytes, index)) = found {
                self.hit = Some(index);
                // `held` contains the whole stop text, because all its prefixes were held back.
                self.held.truncate(at + 1 - bytes);
                return StopOutput { text: std::mem::take(&mut self.held), hit: self.hit };
            }
        }
        // The longest match begins at the first byte of its stop text, which is a character boundary.
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - keep);
        StopOutput { text: std::mem::replace(&mut self.held, held), hit: None }
    }

    /// Returns the text held back, for an answer that ends otherwise.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

impl Stop {
    fn new(index: usize, text: &str) -> Self {
        let text: Box<[u8]> = text.as_bytes().into();
        let mut shorter = vec![0; text.len()];
        let mut length = 0;
        for at in 1..text.len() {
            while length > 0 && text[at] != text[length] {
                length = shorter[length - 1];
            }
            length += usize::from(text[at] == text[length]);
            shorter[at] = length;
        }
        Self { index, text, shorter: shorter.into(), matched: 0 }
    }

    /// Consumes a byte; true when the whole stop text matches.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.text.get(self.matched) != Some(&byte) {
            self.matched = self.shorter[self.matched - 1];
        }
        self.matched += usize::from(self.text[self.matched] == byte);
        self.matched == self.text.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn beginnings_are_held_back_and_given_when_they_are_none() {
        let mut matcher = StopMatcher::new(&["\n\nUser:", "###"]);
        let mut push = |piece: &str| {
            let output = matcher.push(piece);
            (output.text, output.hit)
        };
        assert_eq!(push("Hello\n"), ("Hello".into(), None));
        assert_eq!(push("\nUs"), (String::new(), None));
        assert_eq!(push("ed"), ("\n\nUsed".into(), None));
        assert_eq!(push(" #"), (" ".into(), None));
        assert_eq!(push("##!"), (String::new(), Some(1)));
        assert_eq!(push("more"), (String::new(), Some(1)));
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn text_held_back_comes_at_the_end() {
        let mut matcher = StopMatcher::new(&["STOP"]);
        assert_eq!(matcher.push("x ST"), StopOutput { text: "x ".into(), hit: None });
        assert_eq!(matcher.finish(), "ST");
    }

    #[test]
    fn empty_stop_texts_are_never_found() {
        let mut matcher = StopMatcher::new(&["", "é"]);
        assert_eq!(matcher.push("a"), StopOutput { text: "a".into(), hit: None });
        assert_eq!(matcher.push("bé"), StopOutput { text: "b".into(), hit: Some(1) });
    }

    /// A naive implementation: for each end of the text so far, looks for a stop text before it.
    fn naive(text: &str, stops: &[String]) -> (String, Option<usize>) {
        for (end, _) in text.char_indices().skip(1).chain([(text.len(), ' ')]) {
            let ends = |stop: &String| !stop.is_empty() && text[..end].ends_with(stop.as_str());
            let found = stops.iter().enumerate().filter(|(_, stop)| ends(stop));
            // The longest match; of equal ones the first.
            if let Some((index, stop)) = found.rev().max_by_key(|(_, stop)| stop.len()) {
                return (text[..end - stop.len()].to_owned(), Some(index));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(
            text in "[abé]{0,40}",
            stops in prop::collection::vec("[abé]{0,5}", 0..4),
            cuts in prop::collection::vec(0..40usize, 0..10),
        ) {
            let mut cuts: Vec<_> = cuts.into_iter().filter(|&cut| text.is_char_boundary(cut)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let mut matcher = StopMatcher::new(&stops);
            let (mut sent, mut pushed, mut hit) = (String::new(), 0, None);
            for pair in cuts.windows(2) {
                let output = matcher.push(&text[pair[0]..pair[1]]);
                sent.push_str(&output.text);
                pushed = pair[1];
                hit = hit.or(output.hit);
                if hit.is_some() {
                    break;
                }
                // The matcher holds back exactly the longest end of the text that may become a stop text.
                let due = (sent.len()..=pushed).find(|&from| {
                    text.is_char_boundary(from) && (from == pushed
                        || stops.iter().any(|stop| stop.starts_with(&text[from..pushed])))
                });
                prop_assert_eq!(due, Some(sent.len()));
            }
            sent.push_str(&matcher.finish());
            let (expected, expected_hit) = naive(&text, &stops);
            prop_assert_eq!(&sent, &expected[..expected.len().min(sent.len())]);
            prop_assert_eq!(sent.len(), expected.len());
            prop_assert_eq!(hit, expected_hit);
            prop_assert!(hit.is_some() || pushed == text.len());
        }
    }
}
