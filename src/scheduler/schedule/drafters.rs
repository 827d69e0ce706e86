//! Plans the rows that draft models compute for a step, and keeps their pages.
//!
//! Before a step of a sequence's own model, its draft model computes one token after the other. Sequences of the step with the same
//! draft model are computed together. It first computes the text that it does not know, a chunk before each step. Its pages are those
//! that nobody else needs: they go before any sequence waits, or gives its own up.

use std::collections::BTreeSet;
use std::time::Instant;

use super::compose::row_limit;
use super::{Schedule, StepPlan, Work};
use crate::backend::KV_PAGE_TOKENS;
use crate::model::ModelId;
use crate::scheduler::SequenceId;
use crate::scheduler::costs::Estimate;
use crate::scheduler::drafter::Drafter;
use crate::scheduler::sequence::{Request, Sequence};

/// Most rows of a draft model's step while nobody knows what a row costs. Such a step makes way for nobody.
const UNMEASURED_ROWS: u32 = 32;

/// A draft may take as long as the step that checks it, so that it never costs more than half of the answers' rate.
const DRAFT_PART: f64 = 1.0;

impl<A> Schedule<A> {
    /// The draft models that have tokens to draft for a step.
    pub fn draft_models(&self, step: &StepPlan) -> BTreeSet<ModelId> {
        let drafted = step.work.iter().filter(|work| work.drafts > 0).filter_map(|work| self.get(work.id));
        drafted.filter_map(|sequence| Some(sequence.drafter.as_ref()?.model)).collect()
    }

    /// Most tokens that a draft model should draft for a sequence, in the time of one step of both.
    pub(super) fn drafted_most(&self, sequence: &Sequence<A>) -> u32 {
        let Some(drafter) = &sequence.drafter else { return u32::MAX };
        if !self.queue.is_empty() {
            return 0; // others wait for places and pages
        }
        let estimate = |model| self.costs.get(&model).and_then(super::Cost::estimate);
        tokens_worth(estimate(sequence.request.model), estimate(drafter.model))
    }

    /// Plans the next rows of a draft model for a step. They are those that it has not computed, of each sequence that still wants
    /// drafted tokens. Sequences with nothing more to draft in this step go to `done`. `None` if that are all.
    pub fn plan_drafting(
        &mut self,
        step: &StepPlan,
        model: ModelId,
        done: &mut BTreeSet<SequenceId>,
        now: Instant,
    ) -> Option<StepPlan> {
        let estimate = self.costs.get(&model).and_then(super::Cost::estimate);
        let contended = self.contended.is_some_and(|until| now < until);
        let certain = estimate.is_some_and(|estimate| estimate.certain);
        let limit = row_limit(estimate, contended, false).min(self.limits.rows_max);
        let mut left = if certain { limit } else { limit.min(UNMEASURED_ROWS) };
        let mut work = Vec::new();
        for of in &step.work {
            let drafting = of.drafts > 0 && !done.contains(&of.id);
            let rows = if drafting { self.rows_to_draft(of, model, left) } else { None };
            let Some(planned) = rows else {
                done.insert(of.id);
                continue;
            };
            left -= planned.rows;
            if !planned.samples {
                done.insert(of.id); // the rest of its text is computed before later steps
            }
            work.push(planned);
        }
        (!work.is_empty()).then_some(StepPlan::of(model, work, false, None))
    }

    /// The rows of one sequence, with pages for them; `None` if there are no more to draft, or no pages.
    fn rows_to_draft(&mut self, of: &Work, model: ModelId, most: u32) -> Option<Work> {
        let at = self.running.iter().position(|s| s.request.id == of.id && s.restarts == of.restarts)?;
        self.attach_drafter(at);
        let sequence = &self.running[at];
        let drafted = sequence.draft.ids().len() as u32;
        let drafter = sequence.drafter.as_ref().filter(|drafter| drafter.model == model)?;
        let known = sequence.token_count().saturating_add(drafted);
        if drafted >= of.drafts || known > drafter.positions {
            return None;
        }
        let start = drafter.computed;
        let pending = known.saturating_sub(start);
        let rows = self.pages_for_drafter(at, pending.min(most));
        let Request { id, uid, connection, .. } = self.running[at].request;
        let samples = rows == pending;
        (rows > 0).then_some(Work {
            id,
            uid,
            connection,
            restarts: of.restarts,
            start,
            rows,
            samples,
            scores: 0,
            embeds: 0,
            drafts: 0,
            decode: rows == 1,
        })
    }

    /// Takes what the user's tree of the draft model has of a text of which it has computed nothing.
    fn attach_drafter(&mut self, at: usize) {
        let Sequence { request: Request { uid, .. }, tokens, drafter: Some(drafter), .. } =
            &mut self.running[at]
        else {
            return;
        };
        if drafter.computed > 0 || !drafter.kv.pages.is_empty() {
            return;
        }
        let known = tokens.len().saturating_sub(1).min(drafter.positions as usize);
        drafter.computed = self.kv.attach(drafter.model, *uid, &tokens[..known], &mut drafter.kv);
        if drafter.kv.copied.is_some() {
            // It computes the first tokens of that page instead of copying them.
            self.kv.copied(drafter.model, *uid, &mut drafter.kv);
            drafter.computed -= drafter.computed % KV_PAGE_TOKENS as u32;
        }
    }

    /// Takes free pages for so many more rows of a sequence's draft model. Returns how many rows have pages.
    fn pages_for_drafter(&mut self, at: usize, rows: u32) -> u32 {
        let uid = self.running[at].request.uid;
        let page_bytes = self.running[at].drafter.as_ref().map_or(0, |drafter| drafter.page_bytes);
        loop {
            let full = self.is_full(uid, page_bytes);
            let Some(drafter) = &mut self.running[at].drafter else { return 0 };
            let room = (drafter.kv.pages.len() * KV_PAGE_TOKENS) as u32;
            let room = room.saturating_sub(drafter.computed);
            if room >= rows {
                return rows;
            }
            let page = if full { None } else { self.kv.take(drafter.model, uid) };
            let Some(page) = page else { return room };
            drafter.kv.pages.push(page);
        }
    }

    /// Records rows that a draft model computed, and the token that it drew. False if the sequence wants no more in this step.
    pub fn drafted(&mut self, work: &Work, drawn: Option<u32>) -> bool {
        let live = |s: &&mut Sequence<A>| s.request.id == work.id && s.restarts == work.restarts;
        let Some(sequence) = self.running.iter_mut().find(live) else { return false };
        let Some(drafter) = &mut sequence.drafter else { return false };
        drafter.computed = work.start.saturating_add(work.rows);
        let vocab = drafter.vocab;
        // An id that the sequence's model does not know cannot be its answer's. Nor can one that its own draft model cannot read.
        let Some(id) = drawn.filter(|id| *id < vocab) else { return false };
        sequence.draft.push(id);
        true
    }

    /// Takes the rows out of a step whose tokens were not drafted, with their pages.
    pub fn cut_drafts(&mut self, step: &mut StepPlan) {
        for work in &mut step.work {
            let Some(sequence) = self.running.iter_mut().find(|s| s.request.id == work.id) else { continue };
            let more = work.drafts.saturating_sub(sequence.draft.ids().len() as u32);
            if more == 0 {
                continue;
            }
            (work.drafts, work.rows) = (work.drafts - more, work.rows - more);
            let Request { model, uid, .. } = sequence.request;
            self.kv.shorten(model, uid, sequence.computed.saturating_add(work.rows), &mut sequence.kv);
        }
    }

    /// Gives back the pages that draft models have of all sequences, or of those of one user. True if there were any. Those with known
    /// text are cached.
    pub fn release_drafters(&mut self, of: Option<u32>) -> bool {
        let has = |s: &Sequence<A>| s.drafter.as_ref().is_some_and(|drafter| !drafter.kv.pages.is_empty());
        let wanted = |s: &Sequence<A>| of.is_none_or(|uid| s.request.uid == uid) && has(s);
        let holders: Vec<usize> = (0..self.running.len()).filter(|at| wanted(&self.running[*at])).collect();
        holders.iter().for_each(|at| self.release_drafter(*at));
        !holders.is_empty()
    }

    /// Gives back the pages that a draft model has of an admitted sequence. Those of the text itself go to the user's tree.
    pub(super) fn release_drafter(&mut self, at: usize) {
        let sequence = &mut self.running[at];
        let (uid, tokens) = (sequence.request.uid, sequence.token_count());
        let Some(drafter) = &mut sequence.drafter else { return };
        drafter.cut(tokens);
        let Drafter { model, kv, computed, .. } = drafter;
        let known = sequence.tokens.get(..*computed as usize).unwrap_or_default();
        self.kv.keep(*model, uid, known, true, kv);
        self.kv.release(*model, uid, kv);
        *computed = 0;
    }

    /// Takes the draft model from all sequences that have this one. Returns how many that were.
    pub fn drop_drafters(&mut self, model: ModelId) -> usize {
        let mut count = 0;
        for sequence in self.running.iter_mut().chain(&mut self.queue) {
            if let Some(mut drafter) = sequence.drafter.take_if(|drafter| drafter.model == model) {
                self.kv.release(model, sequence.request.uid, &mut drafter.kv);
                sequence.draft.clear();
                count += 1;
            }
        }
        count
    }
}

/// So many tokens of a draft model take as long as a step of the sequence's own model; any number while that is not known.
fn tokens_worth(own: Option<Estimate>, drafter: Option<Estimate>) -> u32 {
    let (Some(own), Some(drafter)) = (own, drafter) else { return u32::MAX };
    let step = |e: Estimate| e.fixed + e.row;
    (DRAFT_PART * step(own) / step(drafter).max(1e-9)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_takes_no_longer_than_the_step_that_checks_it() {
        let of = |fixed, row| Some(Estimate { fixed, row, certain: true });
        assert_eq!(tokens_worth(of(0.012, 0.001), of(0.001, 0.000_3)), 10);
        assert_eq!(tokens_worth(of(0.002, 0.000_1), of(0.002, 0.000_1)), 1);
        assert_eq!(tokens_worth(of(0.002, 0.000_1), of(0.004, 0.000_1)), 0, "it is no smaller");
        assert_eq!([tokens_worth(None, of(1.0, 1.0)), tokens_worth(of(1.0, 1.0), None)], [u32::MAX; 2]);
    }
}
