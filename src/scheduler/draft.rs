//! Drafts: tokens that may follow a sequence's last one, found in its own text or computed by a draft model.
//!
//! If the last tokens were in the text before, those that followed them may follow again. A step computes them as further rows
//! of the sequence, with logits for each. The tokens drawn from these logits are the answer's, as long as each is the drafted
//! one. So the answer is the same as without drafts, and a step may give several tokens. Pure.

/// Most last tokens that are looked for, and the fewest that count. One token alone recurs everywhere.
const LONGEST: usize = 4;
const SHORTEST: usize = 2;

/// So many last tokens are looked at, in some 60 us.
const LOOKED_AT: usize = 1 << 16;

/// The draft of one sequence, and the counts of its drafts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Draft {
    /// Most tokens at once; 0 for a sequence without drafts.
    longest: u32,
    /// Most tokens of the next draft.
    next: u32,
    /// The tokens that may follow the last one.
    ids: Vec<u32>,
    /// So many are to come from a draft model.
    asked: u32,
    /// Tokens that steps computed for drafts.
    drafted: u32,
    /// Those of them that became the answer's.
    accepted: u32,
}

impl Draft {
    /// For a sequence that drafts at most so many tokens at once.
    pub fn new(most: u32) -> Self {
        Self { longest: most, next: most, ..Self::default() }
    }

    /// The tokens that may follow the last one.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Tokens that steps computed for drafts, and those of them that became the answer's.
    pub fn counts(&self) -> (u32, u32) {
        (self.drafted, self.accepted)
    }

    /// Forgets the tokens that may follow.
    pub fn clear(&mut self) {
        self.ids.clear();
        self.asked = 0;
    }

    /// Asks a draft model for the tokens that may follow, at most `room`.
    pub fn ask(&mut self, room: u32) {
        self.ids.clear();
        self.asked = self.next.min(room);
    }

    /// Adds a token that a draft model drew.
    pub fn push(&mut self, id: u32) {
        self.ids.push(id);
    }

    /// Tokens that the next step may compute: those that are there, or those that a draft model is asked for.
    pub fn most(&self) -> u32 {
        match self.ids.len() as u32 {
            0 => self.asked,
            drafted => drafted,
        }
    }

    /// Looks for the tokens that may follow `tokens`, at most `room`.
    pub fn look(&mut self, tokens: &[u32], room: u32) {
        self.ids.clear();
        if self.longest > 0 {
            continuation(tokens, self.next.min(room) as usize, &mut self.ids);
        }
    }

    /// Records that of a draft of so many tokens the first `accepted` became the answer's. The next draft has at most one more than
    /// twice as many: a draft that is refused costs the time of its rows.
    pub fn tell(&mut self, drafted: u32, accepted: u32) {
        if drafted > 0 {
            self.drafted = self.drafted.saturating_add(drafted);
            self.accepted = self.accepted.saturating_add(accepted);
            self.next = accepted.saturating_mul(2).saturating_add(1).min(self.longest);
        }
    }
}

/// Appends at most `most` tokens that may follow `tokens`. They are those behind the latest of the longest earlier occurrences of
/// the last tokens. Where they reach the end of the text, they go on with themselves, as a text that repeats does.
fn continuation(tokens: &[u32], most: usize, ids: &mut Vec<u32>) {
    let looked = &tokens[tokens.len().saturating_sub(LOOKED_AT)..];
    let Some((&last, before)) = looked.split_last() else { return };
    if most == 0 {
        return;
    }
    let (mut longest, mut follows) = (SHORTEST - 1, 0);
    for (at, &token) in before.iter().enumerate().rev() {
        if token != last {
            continue;
        }
        let equal = before[..at].iter().rev().zip(before.iter().rev()).take(LONGEST - 1);
        let length = 1 + equal.take_while(|(a, b)| a == b).count();
        if length > longest {
            (longest, follows) = (length, at + 1);
        }
        if longest == LONGEST {
            break;
        }
    }
    if longest >= SHORTEST {
        let known = &looked[follows..];
        ids.extend(known.iter().cycle().take(most));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafted(text: &str, most: usize) -> String {
        let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
        let mut ids = Vec::new();
        continuation(&tokens, most, &mut ids);
        ids.into_iter().map(|id| char::from(id as u8)).collect()
    }

    /// The definition, written plainly: every length and place is tried.
    fn expected(text: &str, most: usize) -> String {
        let bytes = text.as_bytes();
        for length in [4, 3, 2] {
            let Some(from) = bytes.len().checked_sub(length) else { continue };
            for at in (0..from).rev() {
                if bytes[at..at + length] == bytes[from..] {
                    let behind = &text[at + length..];
                    return behind.repeat(most).chars().take(most).collect();
                }
            }
        }
        String::new()
    }

    #[test]
    fn a_draft_goes_on_as_the_latest_longest_occurrence_did() {
        assert_eq!(drafted("the cat sat. the c", 4), "at s");
        assert_eq!(drafted("abcX abcY bcZ abc", 2), "Y ", "the latest of the longest");
        assert_eq!(drafted("dabcX abcY bc", 1), "Y");
        assert_eq!(drafted("aXbYa", 3), "", "one token is too few");
        assert_eq!(drafted("xyxy", 5), "xyxyx", "it goes on with itself");
        assert_eq!(drafted("aaa", 4), "aaaa");
        assert_eq!([drafted("", 3), drafted("a", 3), drafted("abab", 0)], ["", "", ""]);
    }

    #[test]
    fn drafts_are_those_of_the_definition() {
        let mut state = 1u64;
        for length in 0..400usize {
            let text: String = (0..length % 40)
                .map(|_| {
                    state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                    char::from(b'a' + (state >> 60) as u8 % 3)
                })
                .collect();
            for most in [1, 3, 9] {
                assert_eq!(drafted(&text, most), expected(&text, most), "{text:?}");
            }
        }
    }

    #[test]
    fn drafts_get_shorter_when_they_are_refused_and_longer_when_they_are_not() {
        let text: Vec<u32> = (0..100).chain(0..20).collect();
        let mut draft = Draft::new(16);
        let mut lengths = Vec::new();
        for accepted in [16, 0, 1, 3, 6, 13, 16, 2] {
            draft.look(&text, u32::MAX);
            lengths.push(draft.ids().len() as u32);
            draft.tell(*lengths.last().unwrap(), accepted);
        }
        assert_eq!(lengths, [16, 16, 1, 3, 7, 13, 16, 16]);
        assert_eq!(draft.counts(), (88, 57));
        draft.look(&text, 3);
        assert_eq!(draft.ids(), [20, 21, 22], "the room that is left");
        draft.tell(0, 0);
        draft.look(&text, u32::MAX);
        assert_eq!(draft.ids(), [20, 21, 22, 23, 24], "a step without a draft changes nothing");
        let mut none = Draft::new(0);
        none.look(&text, u32::MAX);
        assert!(none.ids().is_empty());
    }
}
