//! Lets one sequence compute what others begin with too.
//!
//! Sequences that wait together may have prompts that begin alike, as several answers to one prompt do. One of them computes these
//! tokens, and the others take its pages afterwards. A sequence with a recurrent state needs the state after the pages too. So
//! a step of the one that computes ends after the whole pages that it shares with others, and its state there is kept. All of
//! them may read it, because a step writes another place than it reads.

use std::cmp::Reverse;

use super::{Schedule, Work};
use crate::backend::KV_PAGE_TOKENS;
use crate::scheduler::sequence::{Request, Sequence};

/// A sequence waits for another one that computes at least this part of the tokens that it lacks.
const SHARED_PART: f64 = 0.25;
/// Least rows of all others together for which a step ends early: the further step costs a read of the weights.
const SPARED_LEAST: usize = 4 * KV_PAGE_TOKENS;

impl<A> Schedule<A> {
    /// True if a sequence of the same user, model and known prefix computes much of a sequence's prompt in this step. The
    /// sequence then takes those pages afterwards. It waits only while the other one gets rows, so some always goes on.
    pub(super) fn is_computed_by(&self, work: &[Work], sequence: &Sequence<A>) -> bool {
        let Request { uid, model, .. } = sequence.request;
        if !sequence.fresh || !self.kv.reuses() || sequence.needs_rows() {
            return false;
        }
        if sequence.is_recurrent() {
            return self.is_brought_a_state(work, sequence);
        }
        let known = |s: &Sequence<A>| s.kv.known_tokens();
        // The last known token is computed in any case.
        let mine = sequence.tokens.split_last().map_or(&[][..], |(_, before)| before);
        let mine = mine.get(known(sequence)..).unwrap_or_default();
        let least = (mine.len() as f64 * SHARED_PART).ceil() as usize;
        let prefills = work.iter().filter(|w| !w.decode && w.uid == uid && w.id != sequence.request.id);
        let others = prefills.filter_map(|w| self.running.iter().find(|s| s.request.id == w.id));
        others.filter(|s| s.request.model == model && s.kv.is_beside(&sequence.kv)).any(|other| {
            let theirs = other.tokens.get(known(other)..).unwrap_or_default();
            let shared = mine.iter().zip(theirs).take_while(|(a, b)| a == b).count();
            // Less than a page is known to others when the whole prompt is computed.
            shared >= least.max(1) && (shared >= KV_PAGE_TOKENS || shared == mine.len())
        })
    }

    /// The same for a sequence with a recurrent state: it waits for another one's state.
    fn is_brought_a_state(&self, work: &[Work], sequence: &Sequence<A>) -> bool {
        let Request { id, uid, model, .. } = sequence.request;
        let prefills = work.iter().filter(|w| !w.decode && w.uid == uid && w.id != id);
        let others = prefills.filter_map(|w| self.running.iter().find(|s| s.request.id == w.id));
        others.filter(|s| s.request.model == model).any(|other| {
            let end = other.kv.split.filter(|end| *end > other.computed).unwrap_or(0);
            end > 0 && shared_pages(other, sequence).is_some_and(|(shared, _)| end as usize <= shared)
        })
    }

    /// Has the steps of an admitted sequence end where others may go on from its recurrent state, if that spares them enough.
    pub(super) fn split_for_others(&mut self, at: usize) {
        let sequence = &self.running[at];
        let Request { id, uid, model, .. } = sequence.request;
        let splits = sequence.kv.split.is_some_and(|end| end > sequence.computed);
        if !sequence.is_recurrent() || splits || sequence.pending() < 2 || !self.kv.reuses() {
            return;
        }
        let others = self.running.iter().filter(|s| {
            s.request.id != id && (s.request.uid, s.request.model) == (uid, model) && self.takes_part(s)
        });
        let fresh = others.filter(|s| s.fresh && !s.needs_rows());
        // Those that were told to come have all but the last token in common with it.
        let coming = sequence.reusable().len() / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
        let coming = std::iter::repeat_n((coming, computed(sequence)), sequence.request.alike as usize);
        let mut shared: Vec<(usize, usize)> = fresh
            .filter_map(|s| shared_pages(sequence, s))
            .chain(coming)
            .filter(|(end, _)| *end > computed(sequence))
            .collect();
        shared.sort_unstable_by_key(|(end, _)| Reverse(*end));
        // Those that share more than `end` may go on there too.
        let spared = (1..).zip(&shared).map(|(count, (end, _))| {
            let rows = shared.iter().take(count).map(|(_, known)| end.saturating_sub(*known));
            (rows.sum::<usize>(), *end)
        });
        if let Some((_, end)) = spared.max().filter(|(rows, _)| *rows >= SPARED_LEAST) {
            self.running[at].kv.split = Some(end as u32); // at most as many as it has tokens
        }
    }
}

fn computed<A>(sequence: &Sequence<A>) -> usize {
    sequence.computed as usize
}

/// Tokens of the whole pages that one's known tokens share with those that another one lacks, if that is much of them. Also
/// how many tokens the other one has computed.
fn shared_pages<A>(one: &Sequence<A>, other: &Sequence<A>) -> Option<(usize, usize)> {
    let (lacks, known) = (other.reusable(), computed(other));
    let shared = one.tokens.iter().zip(lacks).take_while(|(a, b)| a == b).count();
    let shared = shared - shared % KV_PAGE_TOKENS;
    let least = (lacks.len().saturating_sub(known) as f64 * SHARED_PART).ceil() as usize;
    (shared >= known.saturating_add(least.max(1))).then_some((shared, known))
}
