//! DRY: a penalty for tokens that would go on with a repetition, by its length.
//!
//! A token is penalised if the text's last tokens were there before and that token followed them. The penalty grows with the
//! number of these last tokens. It is the sampler of that name in text-generation-webui and llama.cpp. Sequence breakers are
//! texts that no repetition reaches across. Here they are looked for in the text of the tokens. llama.cpp looks for the tokens
//! that hold them. That finds the same places, unless a breaker was written with unusual tokens.

use std::collections::BTreeMap;

/// The settings of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Dry {
    /// The penalty of a repetition of `allowed_length` tokens; 0 for none.
    pub multiplier: f32,
    /// The penalty grows by this factor with each further token; at least 1.
    pub base: f32,
    /// Shorter repetitions are not penalised.
    pub allowed_length: u32,
    /// So many last tokens are looked at.
    pub last: u32,
    /// Repetitions do not reach across these; none is empty.
    pub breakers: Vec<String>,
}

/// Largest penalty. Logits are far below, and a logit less this is finite.
const LESS_MAX: f64 = 1e30;

impl Dry {
    /// Finds what to subtract from the logits of tokens after `tokens`. `bytes_of` gives tokens' texts. Costs time by the number of
    /// tokens that are looked at and, up to the last breaker, by their bytes for each breaker.
    pub fn less<'a>(&self, tokens: &[u32], bytes_of: impl Fn(u32) -> &'a [u8]) -> BTreeMap<u32, f32> {
        let mut less = BTreeMap::new();
        let looked = &tokens[tokens.len().saturating_sub(self.last as usize)..];
        let allowed = self.allowed_length as usize;
        if self.multiplier == 0.0 || looked.len() <= allowed {
            return less;
        }
        let longest = self.unbroken(looked, bytes_of);
        if longest < allowed {
            return less;
        }
        for (end, length) in repetitions(looked) {
            let length = length.min(longest);
            if length < allowed {
                continue;
            }
            let power = f64::from(self.base).powf((length - allowed) as f64);
            let penalty = (f64::from(self.multiplier) * power).min(LESS_MAX) as f32;
            let entry: &mut f32 = less.entry(looked[end]).or_insert(penalty);
            *entry = entry.max(penalty);
        }
        less
    }

    /// The number of last tokens behind the breaker that begins last.
    fn unbroken<'a>(&self, looked: &[u32], bytes_of: impl Fn(u32) -> &'a [u8]) -> usize {
        // From the end of the text: reversed bytes, and how many of them each number of last tokens has.
        let (mut reversed, mut ends): (Vec<u8>, Vec<usize>) = (Vec::new(), vec![0]);
        for &id in looked.iter().rev() {
            let before = reversed.len();
            reversed.extend(bytes_of(id).iter().rev());
            ends.push(reversed.len());
            // A breaker that begins in this token ends in these reversed bytes. The one that reaches furthest counts.
            let found = self.breakers.iter().filter_map(|breaker| {
                let breaker = breaker.as_bytes();
                (before + 1..=reversed.len()).find_map(|end| {
                    let at = end.checked_sub(breaker.len())?;
                    reversed[at..end].iter().eq(breaker.iter().rev()).then_some(at)
                })
            });
            if let Some(bytes) = found.min() {
                return ends.partition_point(|end| *end <= bytes).saturating_sub(1);
            }
        }
        looked.len()
    }
}

/// For each place but the first: how many tokens before it equal the last tokens of all. Computed from the end by the
/// Z-algorithm (Gusfield 1997), in time by the number of tokens.
fn repetitions(tokens: &[u32]) -> impl Iterator<Item = (usize, usize)> {
    let count = tokens.len();
    let reversed = |at: usize| tokens[count - 1 - at];
    let mut lengths = vec![0usize; count];
    let (mut left, mut right) = (0, 0);
    for at in 1..count {
        let mut length = if at < right { lengths[at - left].min(right - at) } else { 0 };
        while at + length < count && reversed(length) == reversed(at + length) {
            length += 1;
        }
        lengths[at] = length;
        if at + length > right {
            (left, right) = (at, at + length);
        }
    }
    (1..count).map(move |at| (count - at, lengths[at]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyz";

    fn letter(id: u32) -> &'static [u8] {
        let at = id as usize % 26;
        &LETTERS[at..=at]
    }

    fn ids(text: &str) -> Vec<u32> {
        text.bytes().map(|byte| u32::from(byte - b'a')).collect()
    }

    fn dry(breakers: &[&str]) -> Dry {
        let breakers = breakers.iter().map(|text| (*text).to_owned()).collect();
        Dry { multiplier: 0.5, base: 2.0, allowed_length: 2, last: 100, breakers }
    }

    fn less(dry: &Dry, text: &str) -> Vec<(char, f32)> {
        let name = |(id, less): (u32, f32)| (char::from(letter(id)[0]), less);
        dry.less(&ids(text), letter).into_iter().map(name).collect()
    }

    #[test]
    fn a_token_that_would_go_on_with_a_repetition_is_less_likely() {
        assert_eq!(less(&dry(&[]), "xabcyabc"), [('y', 1.0)]);
        assert_eq!(less(&dry(&[]), "xabczqbcdabc"), [('d', 0.5), ('z', 1.0)], "the longest counts");
        assert_eq!(less(&dry(&[]), "abab"), [('a', 0.5)]);
        assert_eq!(less(&dry(&[]), "aaaa"), [('a', 1.0)]);
        assert_eq!(less(&dry(&[]), "abcdef"), []);
        assert_eq!(less(&Dry { last: 6, ..dry(&[]) }, "xabcyabc"), [('y', 0.5)]);
        assert_eq!(less(&Dry { last: 4, ..dry(&[]) }, "xabcyabc"), []);
        assert_eq!(less(&Dry { multiplier: 0.0, ..dry(&[]) }, "aaaa"), []);
        let steep = Dry { base: 100.0, multiplier: 100.0, last: 4096, ..dry(&[]) };
        let most = steep.less(&vec![7; 4096], letter)[&7];
        assert!(most.is_finite() && most > 1e29);
    }

    #[test]
    fn repetitions_do_not_reach_across_breakers() {
        assert_eq!(less(&dry(&["a"]), "xabcyabc"), [('y', 0.5)]);
        assert_eq!(less(&dry(&["b"]), "xabcyabc"), []);
        assert_eq!(less(&dry(&["ab"]), "xabcyabc"), []);
        assert_eq!(less(&dry(&["ya"]), "xabcyabc"), [('y', 0.5)]);
        assert_eq!(less(&dry(&["nothing"]), "xabcyabc"), [('y', 1.0)]);
        // A token with several letters: the breaker inside breaks at the token's end.
        let words = |id: u32| [&b"one"[..], b" two", b"; and", b" more"][id as usize];
        let found = dry(&[";"]).less(&[3, 0, 1, 2, 0, 1, 2, 0, 1], words);
        assert_eq!(found, BTreeMap::from([(2, 0.5)]));
        let across = dry(&["two;"]).less(&[3, 0, 1, 2, 0, 1, 2, 0, 1], words);
        assert_eq!(across, BTreeMap::from([(2, 0.5)]));
    }
}
