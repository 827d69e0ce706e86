//! Suspended steps: short steps beside a suspended one of the same model, and the bytes of all steps in flight.
//!
//! A step of a user alone may take seconds on a CPU. A newcomer on the same model does not wait for it: the step is suspended, and
//! the newcomer's short steps run meanwhile. Between users their accounts say whose turn it is. Of one user, the suspended step and
//! the steps beside it get equal time. A newcomer that needs longer than the rest of the step waits for that: short steps read the
//! weights more often.
//!
//! The suspended step still writes the pages of its sequences. So nobody takes pages from these meanwhile. Where one of them has
//! ended or was parked, its pages are free for others. Then no step begins before the suspended one has ended.

use std::collections::BTreeSet;
use std::time::Duration;

use super::compose::{QUANTUM, QUANTUM_WHOLE, row_limit};
use super::{Schedule, StepPlan, Turns, Work};
use crate::model::ModelId;
use crate::scheduler::sequence::{Request, Sequence};

impl StepPlan {
    /// A step that begins.
    pub(super) fn of(model: ModelId, work: Vec<Work>, switched: bool, goal: Option<Duration>) -> Self {
        let turns = Turns::default();
        Self { model, work, switched, resumed: false, goal, beside: false, turns, bytes: 0 }
    }
}

impl<A> Schedule<A> {
    /// Decides whether a step that the leader begins runs beside the suspended one of the model, and notes which sequences it
    /// leaves out. False also without a suspended step.
    pub(super) fn set_aside(&mut self, leader: u32, model: ModelId) -> bool {
        self.aside.clear();
        let step = self.suspended.get(&model).filter(|_| !self.suspended_beside.contains_key(&model));
        let Some(step) = step else { return false };
        let of_leader = |s: &&Sequence<A>| s.request.uid == leader && s.request.model == model;
        let comes = self.running.iter().filter(of_leader).any(|s| self.goes_beside(step, step.turns.own, s));
        let leads = step.work.iter().any(|work| work.uid == leader);
        if comes && (!leads || step.turns.beside <= step.turns.own) {
            self.aside = step.work.iter().map(|work| work.id).collect();
        }
        !self.aside.is_empty()
    }

    /// True if a step may take rows of this sequence: it takes part, and is in no suspended step of its model.
    pub(super) fn joins(&self, sequence: &Sequence<A>) -> bool {
        self.takes_part(sequence) && !self.aside.contains(&sequence.request.id)
    }

    /// True if a short step is to take rows of an admitted sequence while this step of its model is suspended. `spent`: the step's
    /// time so far.
    pub(super) fn goes_beside(&self, step: &StepPlan, spent: Duration, sequence: &Sequence<A>) -> bool {
        let Request { id, model, whole, .. } = sequence.request;
        let in_progress = if self.has_suspended(model, false) { 0 } else { step.bytes };
        self.limits.suspends
            && !self.waits.contains(&model)
            && self.takes_part(sequence)
            && !step.has(id)
            && step.work.iter().all(|work| self.is_live(work))
            && (!whole || sequence.pending() <= self.short_rows(model))
            && self.has_room(sequence, in_progress)
            && !self.is_computed_by(&step.work, sequence)
            && self.is_spared_much(step, spent, sequence)
    }

    /// True if the rest of a step takes longer than the rows that a sequence lacks, and long enough to be noticed. Any pause of an
    /// answer is noticed.
    fn is_spared_much(&self, step: &StepPlan, spent: Duration, sequence: &Sequence<A>) -> bool {
        let Some(e) = self.costs.get(&step.model).and_then(super::Cost::estimate) else { return true };
        let (time, spent) = (|rows: u32| e.fixed + e.row * f64::from(rows), spent.as_secs_f64());
        // A step that takes longer than expected may take as long again.
        let left = Some(time(step.rows()) - spent).filter(|left| *left > 0.0).unwrap_or(spent);
        let noticed = if sequence.decodes() { 0.0 } else { QUANTUM_WHOLE.as_secs_f64() };
        left > time(sequence.pending()).max(noticed)
    }

    /// Rows of a model in a short step. The text of an encoder is not cut.
    fn short_rows(&self, model: ModelId) -> u32 {
        let cost = self.costs.get(&model);
        let tried = cost.map_or(0, |cost| cost.rows_tried(QUANTUM.as_secs_f64()));
        tried.min(row_limit(cost.and_then(super::Cost::estimate), true, true))
    }

    /// Keeps a step that stopped after this much more time, between two parts, on the CPU also inside one;
    /// [`Schedule::next_step`] returns it again.
    pub fn suspend(&mut self, mut step: StepPlan, time: Duration) {
        step.turns.own = step.turns.own.saturating_add(time);
        let suspended = if step.beside { &mut self.suspended_beside } else { &mut self.suspended };
        suspended.insert(step.model, step);
    }

    /// True if a step of the model is suspended: it may still write pages that its sequences have lost.
    pub fn is_suspended(&self, model: ModelId) -> bool {
        self.suspended.contains_key(&model) || self.suspended_beside.contains_key(&model)
    }

    /// All suspended steps.
    fn all_suspended(&self) -> impl Iterator<Item = &StepPlan> {
        self.suspended.values().chain(self.suspended_beside.values())
    }

    /// Models with a suspended step.
    pub(super) fn suspended_models(&self) -> BTreeSet<ModelId> {
        self.all_suspended().map(|step| step.model).collect()
    }

    /// True if a step of the model is suspended that began beside another one, or that did not.
    pub fn has_suspended(&self, model: ModelId, beside: bool) -> bool {
        let steps = if beside { &self.suspended_beside } else { &self.suspended };
        steps.contains_key(&model)
    }

    /// Drops suspended steps of which all sequences have ended or restarted.
    pub fn drop_unwanted(&mut self) {
        let unwanted = |step: &StepPlan| !step.work.iter().any(|work| self.is_live(work));
        let gone: Vec<(ModelId, bool)> = self
            .all_suspended()
            .filter(|step| unwanted(step))
            .map(|step| (step.model, step.beside))
            .collect();
        for (model, beside) in gone {
            if beside {
                self.suspended_beside.remove(&model)
            } else {
                self.suspended.remove(&model)
            };
        }
    }

    /// True if the sequence has neither ended nor restarted since the step was planned.
    fn is_live(&self, work: &Work) -> bool {
        self.get(work.id).is_some_and(|s| s.restarts == work.restarts)
    }

    /// True if a sequence of another model could run.
    pub fn others_wait(&self, model: ModelId) -> bool {
        self.running.iter().any(|s| s.request.model != model && self.can_run(s))
    }

    /// Bytes that the values of one more step may take, beside suspended steps and `others`.
    pub(super) fn room_for_values(&self, others: u64) -> u64 {
        let taken = self.all_suspended().map(|step| step.bytes).fold(others, u64::saturating_add);
        self.limits.values_bytes.saturating_sub(taken)
    }

    /// True if a step has room for values of this sequence: for one row, or for the whole text of an encoder.
    pub(super) fn has_room(&self, sequence: &Sequence<A>, others: u64) -> bool {
        let Request { whole, row_bytes, .. } = sequence.request;
        !whole || row_bytes.saturating_mul(sequence.pending().into()) <= self.room_for_values(others)
    }

    /// Bytes that the values of a step take.
    pub(super) fn bytes_of(&self, model: ModelId, work: &[Work]) -> u64 {
        let row_bytes =
            self.running.iter().find(|s| s.request.model == model).map_or(0, |s| s.request.row_bytes);
        let rows: u64 = work.iter().map(|work| u64::from(work.rows)).sum();
        rows.saturating_mul(row_bytes)
    }
}
