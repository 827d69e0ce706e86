//! Lets draft models compute the tokens that a step checks.
//!
//! Each round is a step of the draft model. It computes the tokens of the sequences that it does not know, and draws one more of each.
//! It draws with the settings and the random number of the answer's own token at that place. A failure costs the drafts, not the
//! answer.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::Core;
use super::compute::is_given_up;
use crate::backend::{BackendError, Sampled};
use crate::lock;
use crate::model::{Model, ModelId};
use crate::scheduler::SequenceId;
use crate::scheduler::schedule::{Schedule, StepPlan, Work};
use crate::scheduler::step::{self, Ran, StepArrays, StepDevice};

/// How one round of drafting ended.
enum Round {
    /// A token of each row that samples.
    Drawn(Vec<Result<Sampled, BackendError>>),
    /// Nothing this time: weights are still being read, or nobody wants the answers any more.
    None,
    /// The draft model is of no use, for this reason.
    Failed(String),
    /// The device has no room for it.
    NoRoom,
    /// The device is lost.
    Lost(BackendError),
}

impl Core {
    /// Computes the drafts of a step before it begins, and takes rows out of it for which there is none. False if the device was
    /// lost, and with it the step.
    pub(super) fn draft(&mut self, step: &mut StepPlan) -> bool {
        if step.resumed || step.drafts() == 0 {
            return true;
        }
        for model in self.schedule.draft_models(step) {
            match self.draft_with(model, step) {
                Round::Lost(error) => {
                    self.replace_device(&error);
                    return false;
                }
                Round::Failed(why) => {
                    tracing::warn!(model = model.0, why, "requests go on without their draft model");
                    self.drop_drafters(model);
                }
                Round::NoRoom => self.drop_drafters_for_room(model),
                Round::Drawn(_) | Round::None => {}
            }
        }
        self.schedule.cut_drafts(step);
        true
    }

    /// Takes a draft model from all sequences that have it.
    pub(super) fn drop_drafters(&mut self, model: ModelId) {
        for _ in 0..self.schedule.drop_drafters(model) {
            self.device.models.ended(model, lock::now());
        }
        self.release_freed();
    }

    /// Takes the draft models of a step's sequences from all that have these.
    pub(super) fn drop_drafters_of(&mut self, step: &StepPlan) {
        let drafter = |id| Some(self.schedule.get(id)?.drafter.as_ref()?.model);
        let models: BTreeSet<ModelId> = step.work.iter().filter_map(|work| drafter(work.id)).collect();
        models.into_iter().for_each(|model| self.drop_drafters_for_room(model));
    }

    /// Takes a draft model from all sequences because memory is short, which any user's requests may bring about again and again.
    fn drop_drafters_for_room(&mut self, model: ModelId) {
        tracing::debug!(model = model.0, "requests go on without their draft model: the device has no room");
        self.drop_drafters(model);
    }

    /// Rounds of one draft model, until no sequence of the step wants more of it. Returns the last one.
    fn draft_with(&mut self, id: ModelId, step: &StepPlan) -> Round {
        let Some(model) = self.device.models.get(id).map(|hosted| Arc::clone(&hosted.model)) else {
            return Round::Failed("it was unloaded".to_owned());
        };
        if let Err(error) = model.files.check_unchanged() {
            return Round::Failed(error.to_string());
        }
        let mut done = BTreeSet::new();
        while let Some(round) = self.schedule.plan_drafting(step, id, &mut done, lock::now()) {
            let drawn = match self.draft_round(&model, round.clone()) {
                Round::Drawn(drawn) => drawn,
                ended => return ended,
            };
            self.take_drafted(&round, drawn, &model, &mut done);
        }
        // A file that lost bytes gives wrong drafts, which are refused, and must not give any more.
        match model.files.check_poison() {
            Ok(()) => Round::None,
            Err(error) => Round::Failed(error.to_string()),
        }
    }

    fn take_drafted(
        &mut self,
        round: &StepPlan,
        drawn: Vec<Result<Sampled, BackendError>>,
        model: &Model,
        done: &mut BTreeSet<SequenceId>,
    ) {
        let mut drawn = drawn.into_iter();
        for work in &round.work {
            let token = if work.samples { drawn.next().and_then(Result::ok) } else { None };
            let id = token.map(|token| token.id);
            // Nothing follows the end of an answer.
            let ends = id.is_some_and(|id| model.tokenizer.is_end_of_generation(id));
            if !self.schedule.drafted(work, id) || ends {
                done.insert(work.id);
            }
        }
    }

    /// One step of a draft model. Its time is charged to the users of its rows.
    fn draft_round(&mut self, model: &Arc<Model>, round: StepPlan) -> Round {
        let (begun, before) = (lock::now(), self.device.residency.counters());
        self.in_step = Some(round);
        let ran = self.run_round(model);
        let Some(round) = self.in_step.take() else { return Round::None };
        let now = lock::now();
        let time = now - begun;
        for (uid, part) in self.schedule.charge(&round, time + self.paging.take_spent(model.id)) {
            self.rates.add(uid, part, now);
        }
        let lookups = self.device.residency.counters().since(&before);
        for work in &round.work {
            if let Some(sequence) = self.schedule.get_mut(work.id) {
                sequence.add_load(Duration::ZERO, lookups);
            }
        }
        if ran.is_err() {
            self.device.residency.forget_handles(model.id); // a load in flight may fail yet
        }
        match ran {
            Ok(Ran::Done(drawn, _)) => {
                if lookups.loads == 0 {
                    self.schedule.observe(&round, time);
                }
                self.device.step_over(model.id);
                Round::Drawn(drawn)
            }
            Ok(Ran::Suspended(_) | Ran::Waits(_)) | Err(BackendError::GivenUp) => Round::None,
            Ok(Ran::Unreadable(error)) => Round::Failed(error.to_string()),
            Err(error @ BackendError::DeviceLost { .. }) => Round::Lost(error),
            Err(error) if error.is_out_of_memory() => Round::NoRoom,
            Err(error) => Round::Failed(error.to_string()),
        }
    }

    /// Computes the rows of `in_step`.
    fn run_round(&mut self, model: &Arc<Model>) -> Result<Ran, BackendError> {
        let nothing = Ok(Ran::Done(Vec::new(), Vec::new()));
        let (facts, Some(round)) = (self.shared.facts(), &self.in_step) else { return nothing };
        self.device.residency.used(model.id);
        let slot = self.device.open(model, &facts, &self.schedule)?;
        let in_place = self.device.backend.reads_in_place();
        if in_place && self.paging.begin(model) {
            self.device.residency.forget_handles(model.id); // so that the step names its experts once more
        }
        self.device.make_way_for(model.id, &facts, &mut self.schedule);
        fill(&mut self.arrays, round, &self.schedule);
        let (shared, schedule) = (&self.shared, &self.schedule);
        let given_up = || is_given_up(shared, schedule, round);
        let device = StepDevice {
            backend: self.device.backend.as_mut(),
            residency: &mut self.device.residency,
            beside: false,
            model: model.id,
            parts: model.plan.program.part_count(),
            slot,
            heartbeat: &shared.heartbeat,
            paging: in_place.then_some((&mut self.paging, model)),
            given_up: &given_up,
            launched: &mut || {},
            is_due: &|| false,
        };
        let span = tracing::debug_span!("draft", model = model.id.0, rows = round.rows());
        span.in_scope(|| step::run(device, &mut self.arrays, None))
    }
}

fn fill(arrays: &mut StepArrays, round: &StepPlan, schedule: &Schedule) {
    let drafting = || {
        let of = |work: &Work| {
            let sequence = schedule.get(work.id)?;
            Some((*work, sequence, &*sequence.drafter.as_ref()?.kv.pages))
        };
        round.work.iter().filter_map(of)
    };
    arrays.clear(drafting().map(|(.., pages)| pages.len()).max().unwrap_or(0));
    for (work, sequence, pages) in drafting() {
        let tokens = sequence.tokens_from(work.start).take(work.rows as usize);
        arrays.push_drafting(work.start, tokens, pages, work.samples.then(|| sequence.draft_row()));
    }
}
