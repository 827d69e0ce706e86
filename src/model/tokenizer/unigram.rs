//! Unigram (`t5`): of all ways to cut a text into tokens, the one with the greatest sum of scores.
//!
//! Text is normalised by the file's own map of characters (`charsmap.rs` beside this file). Its spaces become [`SPACE_MARK`].
//! Scores are added in f64, as in llama.cpp and Hugging Face's `tokenizers`.

use std::ops::Range;

use super::TokenizerError;
use super::charsmap::CharsMap;
use super::parts::VocabParts;
use super::vocab::{SPACE_MARK, TokenKind, Vocab};

/// Longest token in bytes that is looked for: the time for each byte of a text grows with it. Real ones stay below 100.
const PIECE_BYTES_MAX: usize = 512;

/// Longer runs of characters without a space are cut. No real text has one; the time and memory for each byte are bounded.
const WORD_BYTES_MAX: usize = 64 << 10;

/// A character without a token counts as so much less likely than the least likely token.
const UNKNOWN_PENALTY: f64 = 10.0;

/// Cutting of a Unigram vocabulary.
#[derive(Debug)]
pub(super) struct Unigram {
    /// The tokens that text may become, in the order of their texts.
    sorted: Vec<u32>,
    scores: Vec<f32>,
    charsmap: CharsMap,
    /// The token of characters without one; without it they are left out.
    unknown: Option<u32>,
    unknown_score: f64,
    /// Runs of spaces become one; those at both ends go.
    merges_spaces: bool,
    /// No token has a space after another character, so each word is cut by itself.
    by_word: bool,
}

/// The best way to reach a place in the text.
#[derive(Clone, Copy)]
struct Best {
    score: f64,
    /// The last token, [`UNKNOWN`] for a character without one, and where it begins.
    token: u32,
    from: u32,
}

/// No token.
const UNKNOWN: u32 = u32::MAX;

/// Buffers, and whether the last character had no token: of neighbouring ones, the first alone gives the unknown token.
struct Cut {
    best: Vec<Best>,
    tokens: Vec<u32>,
    after_unknown: bool,
}

impl Unigram {
    /// `scores` holds one score per token, none NaN.
    ///
    /// # Errors
    /// [`TokenizerError::CharsMap`] for a map that is none.
    pub fn new(
        vocab: &Vocab,
        scores: &[f32],
        parts: &VocabParts<'_>,
        unknown: Option<u32>,
    ) -> Result<Self, TokenizerError> {
        let text = |id: &u32| vocab.text(*id).unwrap_or_default();
        let usable =
            |id: &u32| vocab.is_mergeable(*id) && !text(id).is_empty() && text(id).len() <= PIECE_BYTES_MAX;
        let mut sorted: Vec<u32> = (0..vocab.len() as u32).filter(usable).collect();
        sorted.sort_unstable_by(|one, other| text(one).cmp(text(other)));
        let crosses = |id: &u32| text(id).trim_start_matches(SPACE_MARK).contains(SPACE_MARK);
        let by_word = !sorted.iter().any(crosses);
        let normal = scores.iter().zip(0..).filter(|(_, id)| vocab.kind(*id) == Some(TokenKind::Normal));
        let least = normal.map(|(score, _)| f64::from(*score)).fold(f64::INFINITY, f64::min);
        Ok(Self {
            sorted,
            scores: scores.to_vec(),
            charsmap: CharsMap::new(parts.charsmap.unwrap_or_default())?,
            unknown,
            unknown_score: if least.is_finite() { least - UNKNOWN_PENALTY } else { -UNKNOWN_PENALTY },
            merges_spaces: parts.merges_spaces.unwrap_or(false),
            by_word,
        })
    }

    /// Appends the tokens of `text`, with a space before it where `space_prefix`. Time: that of the text, times the length of
    /// the longest token that it begins.
    pub fn encode(&self, vocab: &Vocab, text: &str, space_prefix: bool, ids: &mut Vec<u32>) {
        let written = self.normalised(text, space_prefix);
        let mut cut = Cut { best: Vec::new(), tokens: Vec::new(), after_unknown: false };
        let (mut start, mut before) = (0, SPACE_MARK);
        for (at, character) in written.char_indices() {
            let word = self.by_word && character == SPACE_MARK && before != SPACE_MARK;
            if word || at - start >= WORD_BYTES_MAX {
                self.cut(vocab, &written[start..at], &mut cut, ids);
                start = at;
            }
            before = character;
        }
        self.cut(vocab, &written[start..], &mut cut, ids);
    }

    /// Appends the tokens of a word.
    fn cut(&self, vocab: &Vocab, word: &str, cut: &mut Cut, ids: &mut Vec<u32>) {
        let best = &mut cut.best;
        best.clear();
        best.resize(word.len() + 1, Best { score: f64::NEG_INFINITY, token: UNKNOWN, from: 0 });
        best[0].score = 0.0;
        for (start, character) in word.char_indices() {
            let (here, end) = (best[start].score, start + character.len_utf8());
            let mut offer = |at: usize, score: f64, token: u32| {
                if let Some(slot) = best.get_mut(at).filter(|slot| here + score > slot.score) {
                    *slot = Best { score: here + score, token, from: start as u32 }; // below WORD_BYTES_MAX
                }
            };
            let mut known = false;
            self.each_beginning(vocab, &word[start..], |id, bytes| {
                known |= start + bytes == end;
                offer(start + bytes, self.score(vocab, id), id);
            });
            if !known {
                offer(end, self.unknown_score, UNKNOWN);
            }
        }
        cut.tokens.clear();
        let mut at = word.len();
        while at > 0 {
            cut.tokens.push(cut.best[at].token);
            at = cut.best[at].from as usize;
        }
        for token in cut.tokens.iter().rev().copied() {
            match token {
                UNKNOWN if cut.after_unknown => {}
                UNKNOWN => ids.extend(self.unknown),
                id => ids.push(id),
            }
            cut.after_unknown = token == UNKNOWN;
        }
    }

    /// The score of a token; those of the user are never worse than others.
    fn score(&self, vocab: &Vocab, id: u32) -> f64 {
        match vocab.kind(id) {
            Some(TokenKind::UserDefined) => 0.0,
            _ => self.scores.get(id as usize).map_or(0.0, |score| f64::from(*score)),
        }
    }

    /// Calls `each` with the tokens that `text` begins with, and their lengths in bytes.
    fn each_beginning(&self, vocab: &Vocab, text: &str, mut each: impl FnMut(u32, usize)) {
        let text = text.as_bytes();
        let bytes = |id: &u32| vocab.text(*id).unwrap_or_default().as_bytes();
        let mut within: Range<usize> = 0..self.sorted.len();
        for (at, byte) in text.iter().enumerate() {
            let tokens = &self.sorted[within.clone()];
            // All of these begin with the bytes before `at`; the shortest is first.
            let below = tokens.partition_point(|id| bytes(id).get(at) < Some(byte));
            let upto = below + tokens[below..].partition_point(|id| bytes(id).get(at) == Some(byte));
            within = within.start + below..within.start + upto;
            let Some(first) = self.sorted.get(within.start).filter(|_| !within.is_empty()) else { return };
            if bytes(first).len() == at + 1 {
                each(*first, at + 1);
            }
        }
    }

    /// The text as tokens write it.
    fn normalised(&self, text: &str, space_prefix: bool) -> String {
        let mut written = String::with_capacity(text.len() + text.len() / 2 + 3);
        // A space is due before the next character that is none.
        let (mut due, mut begun) = (space_prefix, false);
        self.charsmap.map(text, |character| match character {
            ' ' if self.merges_spaces => due |= begun,
            ' ' => written.push(SPACE_MARK),
            _ => {
                if std::mem::take(&mut due) {
                    written.push(SPACE_MARK);
                }
                written.push(character);
                begun = true;
            }
        });
        if self.merges_spaces {
            // Also marks that the text itself ends with, as in SentencePiece.
            written.truncate(written.trim_end_matches(SPACE_MARK).len());
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::gguf::Strings;
    use crate::model::tokenizer::random_texts::{self, SEED};
    use crate::model::tokenizer::{Algorithm, EncodeOptions, Tokenizer};

    const RAW: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };

    #[derive(serde::Deserialize)]
    struct Kept {
        alphabet: Vec<String>,
        pieces: Vec<String>,
        scores: Vec<f32>,
        kinds: Vec<i32>,
        /// As hexadecimal digits.
        charsmap: String,
        /// Of all texts.
        tokens: usize,
        /// One for every ten texts.
        hashes: String,
    }

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    }

    #[test]
    fn tokens_of_random_texts_are_those_of_another_engine() {
        let kept: Kept =
            serde_json::from_str(include_str!("../../../tests/reference/expected/unigrams.json")).unwrap();
        let strings: Strings = kept.pieces.iter().map(String::as_str).collect();
        let charsmap = bytes(&kept.charsmap);
        let mut parts = VocabParts::new(Algorithm::Unigram, &strings);
        parts.scores = Some(&kept.scores);
        parts.types = Some(&kept.kinds);
        parts.charsmap = Some(&charsmap);
        parts.merges_spaces = Some(true);
        parts.special.eos = Some(2);
        let tokenizer = Tokenizer::new(&parts).unwrap();
        let mut count = 0;
        random_texts::check(&kept.alphabet, &kept.hashes, "Unigram", |text| {
            let ids = tokenizer.encode(text, RAW);
            count += ids.len();
            ids.into_iter().chain([u32::MAX]).collect()
        });
        assert_eq!(count, kept.tokens);
    }

    /// A tokenizer of these pieces and scores, after `<unk>`, `<s>` and `</s>`.
    fn tokenizer(
        pieces: &[(&str, f32)],
        charsmap: &[u8],
        change: impl FnOnce(&mut VocabParts<'_>),
    ) -> Result<Tokenizer, TokenizerError> {
        let marks = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)];
        let all: Vec<(&str, f32)> = marks.into_iter().chain(pieces.iter().copied()).collect();
        let strings: Strings = all.iter().map(|(piece, _)| *piece).collect();
        let scores: Vec<f32> = all.iter().map(|(_, score)| *score).collect();
        let kinds: Vec<i32> = [2, 3, 3].into_iter().chain(pieces.iter().map(|_| 1)).collect();
        let mut parts = VocabParts::new(Algorithm::Unigram, &strings);
        parts.scores = Some(&scores);
        parts.types = Some(&kinds);
        parts.charsmap = Some(charsmap);
        (parts.special.bos, parts.special.eos) = (Some(1), Some(2));
        parts.special.separator = Some(2);
        change(&mut parts);
        Tokenizer::new(&parts)
    }

    #[test]
    fn the_greatest_sum_wins_and_unknown_characters_are_one_token() {
        let pieces = [("▁", -4.0), ("▁a", -2.0), ("b", -2.0), ("▁ab", -5.0), ("c", -2.0), ("bc", -1.0)];
        let tokenizer = tokenizer(&pieces, &[], |parts| parts.add_bos = Some(true)).unwrap();
        let ids = |text| tokenizer.encode(text, RAW);
        assert_eq!((ids("ab"), ids("abc"), ids("c")), (vec![4, 5], vec![4, 8], vec![3, 7]));
        assert_eq!(ids("a天空b 天"), [4, 0, 5, 3, 0]);
        assert_eq!(ids("a  b "), [4, 3, 3, 5, 3]);
        assert_eq!(tokenizer.encode("a", EncodeOptions { add_special: true, ..RAW }), [1, 4, 2]);
        assert_eq!(tokenizer.encode_pair("a", "b"), [1, 4, 2, 2, 3, 5, 2]);
        assert_eq!(
            (tokenizer.kind(), tokenizer.decode(&[1, 4, 8, 2], false).unwrap()),
            ("t5", "abc".to_owned())
        );
        assert!(ids("").is_empty());
        let long = "天".repeat(50_000);
        assert_eq!(ids(&long), [3, 0], "also where a long word is cut");
    }

    #[test]
    fn spaces_are_merged_if_the_file_says_so() {
        let pieces = [("▁", -4.0), ("▁a", -2.0), ("b", -2.0)];
        let merging = |prefix| {
            tokenizer(&pieces, &[], |parts| {
                (parts.merges_spaces, parts.add_space_prefix) = (Some(true), Some(prefix))
            })
        };
        let (with, without) = (merging(true).unwrap(), merging(false).unwrap());
        for text in ["a b", "  a   b  "] {
            assert_eq!(with.encode(text, RAW), [4, 3, 5], "{text:?}");
        }
        assert_eq!((with.encode("b", RAW), without.encode(" b", RAW)), (vec![3, 5], vec![5]));
        assert!(with.encode("   ", RAW).is_empty());
    }

    #[test]
    fn tokens_across_words_are_found_too() {
        let pieces = [("▁a", -2.0), ("▁b", -2.0), ("▁a▁b", -1.0)];
        let tokenizer = tokenizer(&pieces, &[], |_| ()).unwrap();
        assert_eq!((tokenizer.encode("a b", RAW), tokenizer.encode("b a", RAW)), (vec![5], vec![4, 3]));
    }

    #[test]
    fn a_map_of_other_bytes_is_refused_or_replaces_nothing() {
        let pieces = [("▁a", -2.0), ("b", -2.0)];
        let of = |map: &[u8]| tokenizer(&pieces, map, |_| ());
        for map in [&[1u8][..], &[4, 0, 0, 0], &[3, 0, 0, 0, 1, 2, 3], &[255; 8]] {
            let error = of(map).unwrap_err().to_string();
            assert!(error.contains("precompiled_charsmap has"), "{error}");
        }
        let mut random = SEED;
        for length in (0..400).map(|number| number * 4) {
            let mut map: Vec<u8> = (length as u32).to_le_bytes().to_vec();
            map.extend((0..length + 50).map(|_| {
                random = random_texts::next(random);
                // Small numbers lead somewhere.
                if random & 3 == 0 { (random >> 32) as u8 } else { (random >> 40) as u8 & 7 }
            }));
            let tokenizer = of(&map).unwrap();
            tokenizer.encode("ab \u{1}\u{2}\u{3}\u{4}天 ab\0", RAW);
        }
    }
}
