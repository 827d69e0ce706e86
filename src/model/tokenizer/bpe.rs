//! Byte-level byte-pair encoding: bytes of a word become tokens, and neighbours merge, lowest rank first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::TokenizerError;
use super::alphabet;
use super::error::excerpt;
use super::pretokenizer::PreTokenizer;
use super::vocab::{TextIndex, Vocab};
use crate::model::gguf::Strings;

/// No symbol: a byte without a token, or a symbol consumed by a merge.
const NONE: u32 = u32::MAX;

/// Merging of a byte-level vocabulary.
#[derive(Debug)]
pub(super) struct BytePair {
    pre: PreTokenizer,
    merges: Merges,
    /// The token of each byte, or [`NONE`]. Few vocabularies have all 256. Bytes without a token are skipped, as in
    /// llama.cpp and the Python tokenizers.
    byte_tokens: [u32; 256],
    /// Kept only for vocabularies that take whole words.
    index: Option<TextIndex>,
}

impl BytePair {
    pub fn new(
        vocab: &Vocab,
        index: TextIndex,
        merges: &Strings,
        pre: PreTokenizer,
    ) -> Result<Self, TokenizerError> {
        let mut byte_tokens = [NONE; 256];
        let mut utf8 = [0; 4];
        for (byte, token) in (0..=255).zip(&mut byte_tokens) {
            let text = alphabet::char_of_byte(byte).encode_utf8(&mut utf8);
            *token = index.get_mergeable(vocab, text).unwrap_or(NONE);
        }
        let merges = Merges::new(vocab, &index, merges)?;
        let index = pre.whole_words.then_some(index);
        Ok(Self { pre, merges, byte_tokens, index })
    }

    /// Appends the tokens of `text`. Time is `n log n` in the longest word; a hostile text can be one word.
    pub fn encode(&self, vocab: &Vocab, text: &str, ids: &mut Vec<u32>) {
        let mut word = Word::default();
        let mut written = String::new();
        self.pre.words(text, &mut |piece| {
            if let Some(index) = &self.index {
                written.clear();
                written.extend(piece.bytes().map(alphabet::char_of_byte));
                if let Some(id) = index.get_mergeable(vocab, &written) {
                    return ids.push(id);
                }
            }
            word.encode(self, piece.as_bytes(), ids);
        });
    }
}

/// The merges, by rank.
#[derive(Debug)]
struct Merges {
    by_rank: Vec<Merge>,
    /// Ranks by pair.
    table: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

#[derive(Clone, Copy, Debug)]
struct Merge {
    left: u32,
    right: u32,
    merged: u32,
}

impl Merges {
    /// Checks that every merge joins two tokens into a token, as vocabulary trainers do. Of repeated pairs the first
    /// counts.
    fn new(vocab: &Vocab, index: &TextIndex, merges: &Strings) -> Result<Self, TokenizerError> {
        let mut all = Self {
            by_rank: Vec::with_capacity(merges.len()),
            table: HashTable::with_capacity(merges.len()),
            hasher: DefaultHashBuilder::default(),
        };
        let mut joined = String::new();
        // Trainers number tokens in the order of the merges that make them. The next id is nearly always right, and
        // needs no look-up.
        let mut next = 0;
        for (rank, text) in merges.iter().enumerate() {
            let syntax = || TokenizerError::MergeSyntax { rank, text: excerpt(text) };
            // The separating space is not the first character: a token may begin with a space.
            let after_first = text.chars().next().map_or(0, char::len_utf8);
            let space = text[after_first..].find(' ').ok_or_else(syntax)? + after_first;
            let (left, right) = (&text[..space], &text[space + 1..]);
            if right.is_empty() {
                return Err(syntax());
            }
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            let token = |text: &str| {
                let id = index.get(vocab, text);
                id.ok_or_else(|| TokenizerError::MergeToken { rank, text: excerpt(text) })
            };
            let (left, right) = (token(left)?, token(right)?);
            let merged = if vocab.text(next) == Some(&joined) { next } else { token(&joined)? };
            all.push(Merge { left, right, merged }, vocab);
            next = merged.saturating_add(1);
        }
        Ok(all)
    }

    fn push(&mut self, merge: Merge, vocab: &Vocab) {
        let rank = self.by_rank.len() as u32;
        self.by_rank.push(merge);
        // A merge into a control token keeps its rank, but text may not use it.
        if self.rank(merge.left, merge.right).is_some() || !vocab.is_mergeable(merge.merged) {
            return;
        }
        let (hasher, by_rank) = (&self.hasher, &self.by_rank);
        self.table.insert_unique(hasher.hash_one((merge.left, merge.right)), rank, |&rank| {
            let merge = by_rank[rank as usize];
            hasher.hash_one((merge.left, merge.right))
        });
    }

    fn rank(&self, left: u32, right: u32) -> Option<u32> {
        let same = |&rank: &u32| {
            let merge = self.by_rank[rank as usize];
            merge.left == left && merge.right == right
        };
        self.table.find(self.hasher.hash_one((left, right)), same).copied()
    }
}

/// The symbols of one word while they merge; kept between words for its buffers.
#[derive(Default)]
struct Word {
    symbols: Vec<Symbol>,
    /// Candidate merges, lowest first: rank, then index of the left symbol.
    queue: BinaryHeap<Reverse<(u32, u32)>>,
}

#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    previous: u32,
    next: u32,
}

impl Word {
    fn encode(&mut self, bpe: &BytePair, word: &[u8], ids: &mut Vec<u32>) {
        self.start(bpe, word);
        while let Some(Reverse((rank, left))) = self.queue.pop() {
            self.merge(&bpe.merges, rank, left);
        }
        ids.extend(self.symbols.iter().map(|symbol| symbol.id).filter(|&id| id != NONE));
    }

    fn start(&mut self, bpe: &BytePair, word: &[u8]) {
        // Pieces are at most TEXT_BYTES_MAX long, so places fit in u32.
        let last = word.len() as u32 - 1;
        self.symbols.clear();
        self.symbols.extend((0..).zip(word).map(|(at, &byte)| Symbol {
            id: bpe.byte_tokens[byte as usize],
            previous: if at == 0 { NONE } else { at - 1 },
            next: if at == last { NONE } else { at + 1 },
        }));
        for left in 0..last {
            self.offer(&bpe.merges, left, left + 1);
        }
    }

    /// Queues the merge of two neighbours, if there is one.
    fn offer(&mut self, merges: &Merges, left: u32, right: u32) {
        let (a, b) = (self.symbols[left as usize].id, self.symbols[right as usize].id);
        if a != NONE
            && b != NONE
            && let Some(rank) = merges.rank(a, b)
        {
            self.queue.push(Reverse((rank, left)));
        }
    }

    /// Makes a queued merge, unless one of its symbols has changed since.
    fn merge(&mut self, merges: &Merges, rank: u32, left: u32) {
        let merge = merges.by_rank[rank as usize];
        let Symbol { id, previous, next: right } = self.symbols[left as usize];
        if id != merge.left || right == NONE || self.symbols[right as usize].id != merge.right {
            return;
        }
        let next = self.symbols[right as usize].next;
        self.symbols[left as usize] = Symbol { id: merge.merged, previous, next };
        self.symbols[right as usize].id = NONE;
        if next != NONE {
            self.symbols[next as usize].previous = left;
            self.offer(merges, left, next);
        }
        if previous != NONE {
            self.offer(merges, previous, left);
        }
    }
}
