//! Gives the rows of a step their pages, and takes pages from sequences when none is left.
//!
//! A user that has as many bytes as one may hold takes them from its own sequences.
//! Cached pages go first (`kv`), and then those of draft models (`drafters`). Then the youngest sequence of the user that holds
//! most gives its pages up. It is parked, and goes on later where it was, from its tokens. Its pages are cached until others need
//! them, so that it seldom computes all of them again. Of a user, those of the lowest priority give theirs up first. The oldest of
//! the highest keeps its pages from all others of that user, so some sequence always ends.

use std::cmp::Reverse;
use std::time::Instant;

use super::{Schedule, StepPlan, Work};
use crate::backend::KV_PAGE_TOKENS;
use crate::scheduler::SequenceId;
use crate::scheduler::sequence::{Request, Sequence};

/// Most rows of a step that tell log-probabilities, for one sequence: with twenty alternatives each, they fit the smallest frame.
const SCORED_ROWS_MAX: u32 = 256;

impl<A> Schedule<A> {
    /// Plans at most so many rows of an admitted sequence, and takes pages for them. Sequences that give their pages up
    /// leave `work`. `None` if this one does.
    pub(super) fn plan_rows(
        &mut self,
        id: SequenceId,
        most: u32,
        work: &mut Vec<Work>,
        now: Instant,
    ) -> Option<Work> {
        loop {
            let Request { uid, connection, model, page_bytes, state_bytes, .. } = self.get(id)?.request;
            let scored_most = self.scored_rows(work);
            let sequence = self.running.iter_mut().find(|s| s.request.id == id)?;
            let mut rows = sequence.pending().min(most);
            if let Some(split) = sequence.kv.split.filter(|split| *split > sequence.computed) {
                rows = rows.min(split - sequence.computed);
            }
            let mut scores = 0;
            if sequence.unscored() > 0 {
                // Rows that were told before, and then was parked, need no logits. The last row of the prompt samples, alone.
                let told = sequence.scored.saturating_sub(sequence.computed);
                let untold = sequence.unscored().min(scored_most);
                rows = rows.min(told.saturating_add(untold));
                scores = rows.saturating_sub(told);
            }
            let (needs_page, needs_state) = (sequence.needs_page(rows), sequence.needs_state());
            if !needs_page && !needs_state {
                sequence.served = self.steps;
                return Some(Work {
                    id,
                    uid,
                    connection,
                    restarts: sequence.restarts,
                    start: sequence.computed,
                    rows,
                    samples: rows == sequence.pending() && sequence.request.embeds.is_none(),
                    scores,
                    embeds: sequence.embeds(rows),
                    drafts: 0,
                    decode: sequence.decodes(),
                });
            }
            let more_bytes = if needs_page { page_bytes } else { state_bytes };
            let full = self.is_full(uid, more_bytes);
            let taken = match (full, needs_page) {
                (true, _) => None,
                (false, true) => self.kv.take(model, uid),
                (false, false) => self.kv.take_state(model, uid),
            };
            if taken.is_none() && !self.aside.is_empty() {
                return None; // the suspended step still writes the pages that others would give up
            }
            if taken.is_none() && self.release_drafters(full.then_some(uid)) {
                continue;
            }
            let sequence = self.running.iter_mut().find(|s| s.request.id == id)?;
            if let Some(taken) = taken {
                if needs_page {
                    sequence.kv.pages.push(taken);
                } else {
                    sequence.kv.spare = Some(taken);
                }
            } else if sequence.kv.copied.is_some() && sequence.is_recurrent() {
                // Its state is that after the page to copy.
                self.kv.release(model, uid, &mut sequence.kv);
                sequence.computed = 0;
            } else if sequence.kv.copied.is_some() {
                // The page to copy is one more than its tokens need: it computes these instead.
                self.kv.copied(model, uid, &mut sequence.kv);
                sequence.computed -= sequence.computed % KV_PAGE_TOKENS as u32;
            } else {
                let bounded = self.kv.room_bytes() < self.kv.budget_bytes;
                let victim = match self.next_preempted(uid, full, now) {
                    Some(victim) if victim == id && bounded && !full && self.is_alone(id) => {
                        // Alone it takes the room of its model's weights, page by page: parked, it would find no more.
                        self.kv.set_room(Some(self.kv.used_bytes().saturating_add(more_bytes)));
                        continue;
                    }
                    Some(victim) => victim,
                    None if bounded => {
                        self.kv.set_room(None); // nobody has pages, so the device may have memory for some
                        continue;
                    }
                    // Privileged users have all pages. It waits in the queue, and others lead the next step.
                    None => id,
                };
                self.park(victim, now)?;
                self.preempted += 1;
                work.retain(|planned| planned.id != victim);
            }
        }
    }

    /// Most rows of a prompt in a step, beside those planned, that tell log-probabilities. A step has logits for as many rows as
    /// sequences may run, and each of them may want one.
    fn scored_rows(&self, work: &[Work]) -> u32 {
        let scored: u32 = work.iter().map(|work| work.scores.saturating_sub(1)).sum();
        let others = u32::try_from(self.running.len()).unwrap_or(u32::MAX).saturating_sub(1);
        self.limits.sequences_max.saturating_sub(others).saturating_sub(scored).clamp(1, SCORED_ROWS_MAX)
    }

    /// True if no other sequence has pages.
    fn is_alone(&self, id: SequenceId) -> bool {
        self.running.iter().all(|s| s.request.id == id || s.kv.pages.is_empty() && s.kv.copied.is_none())
    }

    /// True if a user holds as much as one may. Alone, one page always may be held.
    pub(super) fn is_full(&self, uid: u32, page_bytes: u64) -> bool {
        let more = self.kv.held_by(uid).saturating_add(page_bytes);
        let holds =
            |s: &Sequence<A>| s.request.uid == uid && (!s.kv.pages.is_empty() || s.kv.copied.is_some());
        more > self.limits.kv_user_bytes && self.running.iter().any(holds)
    }

    /// Parks the sequence that is to give its pages up for a step. It waits until another one ends: the device has memory for
    /// pages of `device_bytes` alone. False if only one has pages.
    pub fn park_for_memory(&mut self, step: &StepPlan, device_bytes: u64, now: Instant) -> bool {
        let holders = self.running.iter().filter(|s| !s.kv.pages.is_empty()).count();
        let Some(uid) = step.work.first().map(|work| work.uid).filter(|_| holders > 1) else { return false };
        let Some(victim) = self.next_preempted(uid, false, now) else { return false };
        self.kv.set_room(Some(device_bytes));
        self.preempted += u64::from(self.park(victim, now).is_some());
        true
    }

    /// The sequence that gives its pages up for a user's: one without credit for long, or the youngest of the user that
    /// holds most. Privileged users give none up for others. With `own`, one of the user itself.
    fn next_preempted(&self, uid: u32, own: bool, now: Instant) -> Option<SequenceId> {
        let held = self.held();
        let may_give = |of: u32| of == uid || self.is_privileged(uid) || !self.is_privileged(of);
        let holders = self.running.iter().filter(|s| {
            let has = !s.kv.pages.is_empty() || s.kv.copied.is_some();
            has && may_give(s.request.uid) && (!own || s.request.uid == uid)
        });
        let bytes = |uid: u32| held.get(&uid).map_or(0, |held| held.bytes);
        let holders: Vec<&Sequence<A>> = holders.collect();
        let place = |s: &&Sequence<A>| (s.gives_way(now), bytes(s.request.uid), s.request.uid, s.arrival);
        let last = *holders.iter().max_by_key(|s| place(s))?;
        // Priorities say which of its user's, not which user's.
        let of_user = holders.into_iter().filter(|s| s.request.uid == last.request.uid);
        let victim = of_user.max_by_key(|s| (s.gives_way(now), Reverse(s.request.priority), s.arrival));
        victim.map(|s| s.request.id)
    }
}
