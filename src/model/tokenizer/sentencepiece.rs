//! SentencePiece: characters merge where the result is a token, highest score first.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::TokenizerError;
use super::vocab::{SPACE_MARK, TextIndex, TokenKind, Vocab, byte_of_token};

/// No symbol.
const NONE: u32 = u32::MAX;

/// Merging of a SentencePiece vocabulary.
#[derive(Debug)]
pub(super) struct SentencePiece {
    index: TextIndex,
    scores: Vec<f32>,
    /// Length of the longest token in bytes; longer texts are not looked up.
    token_bytes_max: usize,
    /// The token of each byte, for characters without a token.
    byte_tokens: [Option<u32>; 256],
    unknown: Option<u32>,
}

impl SentencePiece {
    /// `scores` holds one score per token, none NaN.
    pub fn new(
        vocab: &Vocab,
        index: TextIndex,
        scores: &[f32],
        unknown: Option<u32>,
    ) -> Result<Self, TokenizerError> {
        let mut byte_tokens = [None; 256];
        for (second, text) in (0..).zip(vocab.texts()) {
            if vocab.kind(second) != Some(TokenKind::Byte) {
                continue;
            }
            let byte = byte_of_token(second, text)?;
            if let Some(first) = byte_tokens[byte as usize].replace(second) {
                return Err(TokenizerError::DuplicateByte { first, second, byte });
            }
        }
        let token_bytes_max = vocab.texts().map(str::len).max().unwrap_or(0);
        Ok(Self { index, scores: scores.to_vec(), token_bytes_max, byte_tokens, unknown })
    }

    /// Appends the tokens of `text`, with a space before it where `space_prefix`. Time: `n log n` in the text.
    pub fn encode(&self, vocab: &Vocab, text: &str, space_prefix: bool, ids: &mut Vec<u32>) {
        let mut written = String::with_capacity(text.len() + text.len() / 2 + 3);
        let prefix = if space_prefix { " " } else { "" };
        for part in [prefix, text] {
            for character in part.chars() {
                written.push(if character == ' ' { SPACE_MARK } else { character });
            }
        }
        let mut merging =
            Merging { vocab, model: self, text: &written, symbols: Vec::new(), queue: BinaryHeap::new() };
        merging.run();
        for symbol in &merging.symbols {
            if symbol.bytes > 0 {
                self.push_tokens(vocab, symbol.text(&written), ids);
            }
        }
    }

    /// Appends the symbol's token. Without one, appends its bytes' tokens; a byte without a token gives the unknown
    /// token, if any.
    fn push_tokens(&self, vocab: &Vocab, symbol: &str, ids: &mut Vec<u32>) {
        match self.index.get_mergeable(vocab, symbol) {
            Some(id) => ids.push(id),
            None => {
                let tokens = symbol.bytes().map(|byte| self.byte_tokens[byte as usize].or(self.unknown));
                ids.extend(tokens.flatten());
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Symbol {
    start: u32,
    /// 0 after a merge into the previous symbol.
    bytes: u32,
    previous: u32,
    next: u32,
}

impl Symbol {
    fn text(self, all: &str) -> &str {
        &all[self.start as usize..][..self.bytes as usize]
    }
}

struct Merging<'a> {
    vocab: &'a Vocab,
    model: &'a SentencePiece,
    /// At most three times TEXT_BYTES_MAX, so positions fit in u32.
    text: &'a str,
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Candidate>,
}

impl Merging<'_> {
    fn run(&mut self) {
        for (at, (start, character)) in (0..).zip(self.text.char_indices()) {
            let (start, bytes) = (start as u32, character.len_utf8() as u32);
            let previous = if at == 0 { NONE } else { at - 1 };
            self.symbols.push(Symbol { start, bytes, previous, next: at + 1 });
        }
        if let Some(last) = self.symbols.last_mut() {
            last.next = NONE;
        }
        for right in 1..self.symbols.len() as u32 {
            self.offer(right - 1, right);
        }
        while let Some(candidate) = self.queue.pop() {
            self.merge(candidate);
        }
    }

    /// Queues the merge of two neighbours if they form a token.
    fn offer(&mut self, left: u32, right: u32) {
        if left == NONE || right == NONE {
            return;
        }
        let start = self.symbols[left as usize];
        let bytes = start.bytes + self.symbols[right as usize].bytes;
        if bytes as usize > self.model.token_bytes_max {
            return;
        }
        let text = Symbol { bytes, ..start }.text(self.text);
        if let Some(id) = self.model.index.get_mergeable(self.vocab, text) {
            self.queue.push(Candidate { score: self.model.scores[id as usize], left, right, bytes });
        }
    }

    /// Makes a queued merge, unless one of its symbols has changed since.
    fn merge(&mut self, Candidate { left, right, bytes, .. }: Candidate) {
        let (a, b) = (self.symbols[left as usize], self.symbols[right as usize]);
        if a.bytes == 0 || b.bytes == 0 || a.bytes + b.bytes != bytes {
            return;
        }
        self.symbols[left as usize] = Symbol { bytes, next: b.next, ..a };
        self.symbols[right as usize].bytes = 0;
        if b.next != NONE {
            self.symbols[b.next as usize].previous = left;
        }
        self.offer(a.previous, left);
        self.offer(left, b.next);
    }
}

/// A candidate merge. Order: highest score first, of equal scores the leftmost.
struct Candidate {
    score: f32,
    left: u32,
    right: u32,
    bytes: u32,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        // Scores are never NaN. 0.0 and -0.0 must be equal, so total_cmp is not used.
        let by_score = self.score.partial_cmp(&other.score).unwrap_or(Ordering::Equal);
        by_score.then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}
