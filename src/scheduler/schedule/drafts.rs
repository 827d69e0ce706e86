//! Offers drafted tokens to the rows of a step, and takes back what was refused.
//!
//! Drafts get rows that a step has left, and pages that nobody gives up for them. A step is crowded if it has rows of prompts,
//! or if its rows take more time than its weights. A crowded step gets no drafts: a refused row would then cost as much as another
//! sequence's token. Where several sequences decode, drafts make their step at most [`MIXED`] times as long. Where several users
//! do, only rows count that cost next to nothing ([`FREE_PART`]).

use std::collections::BTreeMap;
use std::time::Instant;

use super::compose::{FREE_PART, MIXED, row_limit, share_rows};
use super::{Schedule, StepPlan, Work};
use crate::backend::KV_PAGE_TOKENS;
use crate::model::ModelId;
use crate::scheduler::SequenceId;
use crate::scheduler::costs::Estimate;
use crate::scheduler::sequence::Sequence;

/// A step of more sequences is crowded while nobody knows what a row costs.
const UNMEASURED_ROWS: u32 = 4;

impl<A> Schedule<A> {
    /// Adds rows of drafts to those that a step has.
    pub(super) fn add_drafts(&mut self, model: ModelId, work: &mut [Work], now: Instant) {
        let drafts: BTreeMap<u32, u32> = (0u32..)
            .zip(&*work)
            .filter_map(|(at, work)| Some((at, self.get(work.id)?)))
            .map(|(at, sequence)| (at, sequence.draft.most().min(self.drafted_most(sequence))))
            .filter(|(_, drafted)| *drafted > 0)
            .collect();
        if drafts.is_empty() || work.iter().any(|work| !work.decode) {
            return;
        }
        let rows: u32 = work.iter().map(|work| work.rows).sum();
        let several_users = work.iter().any(|other| other.uid != work[0].uid);
        let estimate = self.costs.get(&model).and_then(super::Cost::estimate);
        let contended = self.contended.is_some_and(|until| now < until);
        // A step has logits for as many rows as sequences may run.
        let limit = row_limit(estimate, contended, self.limits.suspends);
        let most = self.limits.sequences_max.min(self.rows_max_of(model)).min(limit);
        let limit = rows_left(estimate, rows, several_users).min(most.saturating_sub(rows));
        for (at, rows) in share_rows(drafts, limit) {
            if let Some(work) = work.get_mut(at as usize) {
                let drafts = self.pages_for_draft(work.id, rows);
                work.drafts = drafts;
                work.rows += drafts;
            }
        }
    }

    /// Takes the pages that are free for so many drafted rows. Returns for how many of them the sequence has pages now.
    fn pages_for_draft(&mut self, id: SequenceId, rows: u32) -> u32 {
        let Some(at) = self.running.iter().position(|s| s.request.id == id) else { return 0 };
        let (model, uid) = (self.running[at].request.model, self.running[at].request.uid);
        while self.running[at].needs_page(1 + rows) {
            let full = self.is_full(uid, self.running[at].request.page_bytes);
            let page = if full { None } else { self.kv.take(model, uid) };
            let Some(page) = page else { break };
            self.running[at].kv.pages.push(page);
        }
        let Sequence { kv, computed, .. } = &self.running[at];
        let room = (kv.pages.len() * KV_PAGE_TOKENS) as u32;
        room.saturating_sub(*computed).saturating_sub(1).min(rows)
    }

    /// After the tokens of a step: gives back the pages of refused ones, and looks for the next draft.
    pub fn draft_next(&mut self, work: &Work) {
        let Some(sequence) = self.running.iter_mut().find(|s| s.request.id == work.id) else { return };
        // One token is drawn in any case.
        let known = work.start.saturating_add(work.rows - work.drafts).saturating_add(1);
        sequence.draft.tell(work.drafts, sequence.token_count().saturating_sub(known));
        if work.drafts > 0 {
            let (model, uid) = (sequence.request.model, sequence.request.uid);
            self.kv.shorten(model, uid, sequence.computed, &mut sequence.kv);
        }
        sequence.look_ahead();
    }
}

impl StepPlan {
    /// Rows of drafts.
    pub fn drafts(&self) -> u32 {
        self.work.iter().map(|work| work.drafts).sum()
    }
}

/// Rows that drafts may add to a step of so many rows of answers.
fn rows_left(estimate: Option<Estimate>, rows: u32, several_users: bool) -> u32 {
    let Some(e) = estimate.filter(|e| e.certain) else {
        return if several_users || rows > UNMEASURED_ROWS { 0 } else { u32::MAX };
    };
    let of_rows = e.row * f64::from(rows);
    match rows {
        _ if of_rows > e.fixed => 0,
        _ if several_users => e.rows_within(FREE_PART * e.fixed),
        1 => u32::MAX,
        _ => e.rows_within((MIXED - 1.0) * (e.fixed + of_rows)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crowded_step_has_no_room_for_drafts() {
        let cpu = Some(Estimate { fixed: 0.008, row: 0.0015, certain: true });
        let alone = [1, 2, 5, 6, 40].map(|rows| rows_left(cpu, rows, false));
        assert_eq!(alone, [u32::MAX, 7, 10, 0, 0], "rows of 1.5 ms, weights of 8 ms");
        assert_eq!([1, 5, 6].map(|rows| rows_left(cpu, rows, true)), [0, 0, 0]);
        let gpu = Some(Estimate { fixed: 0.008, row: 0.0001, certain: true });
        assert_eq!(
            [2, 80, 81].map(|rows| rows_left(gpu, rows, true)),
            [10, 10, 0],
            "an eighth of the weights"
        );
        let same = Some(Estimate { fixed: 0.0, row: 0.004, certain: false });
        assert_eq!([None, same].map(|e| rows_left(e, 4, false)), [u32::MAX; 2]);
        assert_eq!([None, same].map(|e| rows_left(e, 5, false)), [0; 2]);
        assert_eq!([None, same].map(|e| rows_left(e, 4, true)), [0; 2]);
    }
}
