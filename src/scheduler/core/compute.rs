//! Runs a step and delivers its results.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Core;
use crate::backend::{BackendError, Sampled};
use crate::cache::Lookups;
use crate::lock;
use crate::scheduler::handle::Shared;
use crate::scheduler::masks::{Masked, SLOW, WAIT_ALONE};
use crate::scheduler::schedule::Schedule;
use crate::scheduler::schedule::{StepPlan, Work};
use crate::scheduler::step::{self, Ran, StepArrays, StepDevice};
use crate::scheduler::{Event, JobError, SequenceId, StopReason};
use crate::tensor::MapError;

/// If the first step of a model's turn loads weights, the model keeps its turn for this many times that step's
/// duration. Models that share the room of one model then spend a fifth of the time on loads.
const TURN_KEPT: u32 = 4;
/// Longest time to keep a turn, because other models wait.
const TURN_KEPT_MAX: Duration = Duration::from_secs(2);

/// Result of sampling one token of a sequence.
type Drawn = Result<Sampled, BackendError>;

/// A step runs at least this long before it makes way for others.
const SLICE: Duration = Duration::from_millis(20);

/// State of a suspended step.
pub(super) struct Paused {
    arrays: StepArrays,
    /// The part that runs next.
    part: u32,
    /// Computing time so far.
    time: Duration,
    /// Weights that it asked for.
    lookups: Lookups,
    /// Since when it waits for pages of weights, and how long it has waited before.
    waits: Option<Instant>,
    waited: Duration,
}

/// How a stretch of a step ended.
enum Stretch {
    /// The step is done: sampled tokens, rows for embeddings, and the time that it waited for weights.
    Done(Vec<Drawn>, Vec<f32>, Duration),
    /// It made way for others before this part.
    Suspended(u32),
    /// It waits for pages before this part, or inside it.
    Waits(u32),
    /// Its model's file does not answer.
    Unreadable(MapError),
}

impl Core {
    pub(super) fn step(&mut self, step: StepPlan) {
        let kept = if step.resumed { self.paused.remove(&(step.model, step.beside)) } else { None };
        let mut paused = kept.unwrap_or_else(|| Paused::new(&mut self.arrays));
        let Some(hosted) = self.device.models.get(step.model) else { return };
        let model = Arc::clone(&hosted.model);
        if let Err(error) = model.files.check_unchanged() {
            return self.fail_model(step.model, error);
        }
        if step.switched {
            self.release_values_but(step.model);
        }
        let (begun, before, switched) = (lock::now(), self.device.residency.counters(), step.switched);
        paused.waited += paused.waits.take().map_or(Duration::ZERO, |since| begun - since);
        self.in_step = Some(step);
        let result = self.compute(&mut paused);
        let lookups = self.device.residency.counters().since(&before);
        if switched {
            // Other models that need the same room wait until the loads have paid off.
            let pays = lookups.loads > 0 && self.device.backend.parts_ahead() > 0;
            let now = lock::now();
            self.schedule.keep_turn(pays.then(|| now + (TURN_KEPT * (now - begun)).min(TURN_KEPT_MAX)));
        }
        let Some(step) = self.in_step.take() else { return };
        if !matches!(result, Ok(Stretch::Suspended(_) | Stretch::Waits(_))) {
            self.leave_values(&step);
        }
        let now = lock::now();
        let time = now - begun;
        for (uid, part) in self.schedule.charge(&step, time + self.paging.take_spent(step.model)) {
            self.rates.add(uid, part, now);
        }
        paused.time += time;
        paused.lookups += lookups;
        if let Ok(Stretch::Suspended(part) | Stretch::Waits(part)) = result {
            paused.part = part;
            paused.waits = matches!(result, Ok(Stretch::Waits(_))).then(lock::now);
            self.schedule.suspend(step.clone(), time);
            self.paused.insert((step.model, step.beside), paused);
            return;
        }
        tracing::trace!(
            model = step.model.0,
            rows = step.rows(),
            drafted = step.drafts(),
            decoding = step.work.iter().filter(|work| work.decode).count(),
            time = ?paused.time,
            goal = ?step.goal,
            lookups = ?paused.lookups,
            "ran a step"
        );
        if result.is_ok() && paused.lookups.loads == 0 {
            self.schedule.observe(&step, paused.time);
        }
        self.arrays = paused.arrays;
        if let Err(error) = model.files.check_poison().and_then(|()| model.files.check_unchanged()) {
            return self.fail_model(step.model, error); // the step may have read wrong bytes: discard all its tokens
        }
        match result {
            Ok(Stretch::Done(sampled, rows, load)) => {
                self.device.step_over(step.model);
                self.deliver(&step, sampled, &rows, load + paused.waited, paused.lookups)
            }
            Ok(Stretch::Unreadable(error)) => self.fail_model(step.model, error),
            Ok(Stretch::Suspended(_) | Stretch::Waits(_)) | Err(BackendError::GivenUp) => {} // the next turn reads the reason from the inbox
            // The next turn tries again, as long as something can be freed.
            Err(error) if error.is_out_of_memory() => self.out_of_memory(&step, &error),
            Err(error @ BackendError::DeviceLost { .. }) => self.replace_device(&error),
            Err(error) => {
                tracing::warn!(model = step.model.0, %error, "a step failed");
                for work in &step.work {
                    self.fail(work.id, JobError::Backend(error.clone()));
                }
            }
        }
    }

    /// Computes a stretch of `in_step`.
    fn compute(&mut self, paused: &mut Paused) -> Result<Stretch, BackendError> {
        let nothing = Ok(Stretch::Done(Vec::new(), Vec::new(), Duration::ZERO));
        let Some(step) = &self.in_step else { return nothing };
        let Some(hosted) = self.device.models.get(step.model) else { return nothing };
        let (model, facts) = (Arc::clone(&hosted.model), self.shared.facts());
        self.device.residency.used(step.model);
        let slot = self.device.open(&model, &facts, &self.schedule)?;
        let in_place = self.device.backend.reads_in_place();
        if in_place && !step.resumed && self.paging.begin(&model) {
            self.device.residency.forget_handles(step.model); // so that the step names its experts once more
        }
        if !step.resumed {
            self.device.make_way_for(step.model, &facts, &mut self.schedule);
            paused.fill(step, &self.schedule);
            self.device.copy_pages(slot, step, &mut self.schedule)?;
        }
        if in_place {
            self.masks.start(); // the step computes on this thread
        }
        let (shared, schedule, begun) = (&self.shared, &self.schedule, lock::now());
        // A GPU computes for milliseconds, in which masks come. Before, their threads slow its launches down.
        let masks = &mut self.masks;
        let mut launched = || masks.start();
        let given_up = || is_given_up(shared, schedule, step);
        let is_due = || {
            let time = lock::now() - begun;
            time >= SLICE && (schedule.is_due(step, time) || shared.inbox.lock().pending())
        };
        let device = StepDevice {
            backend: self.device.backend.as_mut(),
            residency: &mut self.device.residency,
            model: step.model,
            beside: step.beside,
            parts: model.plan.program.part_count(),
            slot,
            heartbeat: &shared.heartbeat,
            paging: in_place.then_some((&mut self.paging, &model)),
            given_up: &given_up,
            launched: &mut launched,
            is_due: &is_due,
        };
        let sequences = || step.work.iter().map(|work| work.id.0).collect::<Vec<_>>();
        let span = tracing::debug_span!("step", model = step.model.0, sequences = ?sequences());
        let ran =
            span.in_scope(|| step::run(device, &mut paused.arrays, step.resumed.then_some(paused.part)));
        let result = ran.and_then(|ran| match ran {
            Ran::Done(drawn, rows) => Ok(Stretch::Done(drawn, rows, self.device.backend.load_wait()?)),
            Ran::Suspended(part) => Ok(Stretch::Suspended(part)),
            Ran::Waits(part) => Ok(Stretch::Waits(part)),
            Ran::Unreadable(error) => Ok(Stretch::Unreadable(error)),
        });
        if result.is_err() {
            self.device.residency.forget_handles(step.model); // a load in flight may fail yet
        }
        result
    }

    /// Lets steps wait for pages that are being read, and fails requests of models whose disk does not answer.
    pub(super) fn look_at_pages(&mut self) {
        let schedule = &self.schedule;
        let waiting = self.paging.waiting(|id| schedule.has_model(id));
        for (id, error) in self.paging.silent(&waiting) {
            tracing::warn!(model = id.0, %error, "requests of the model fail");
            self.fail_model(id, error);
        }
        self.schedule.set_waiting(waiting);
    }

    /// Gives the memory of freed KV pages back, except where a suspended step may still write them.
    pub(super) fn release_freed(&mut self) {
        self.schedule.drop_unwanted();
        self.paused.retain(|(model, beside), _| self.schedule.has_suspended(*model, *beside));
        self.device.release_freed(&mut self.schedule);
    }

    fn deliver(
        &mut self,
        step: &StepPlan,
        sampled: Vec<Drawn>,
        mut last_rows: &[f32],
        load: Duration,
        lookups: Lookups,
    ) {
        let now = lock::now();
        self.counters.load_waits += u64::from(!load.is_zero());
        self.counters.load_wait += load;
        self.counters.steps += 1;
        self.counters.step_sequences += step.work.len() as u64;
        let mut sampled = (0..).zip(sampled);
        let embedded: u32 = step.work.iter().map(|work| work.embeds).sum();
        let width = last_rows.len() / embedded.max(1) as usize;
        for work in &step.work {
            let rows = u64::from(work.rows - work.drafts);
            self.counters.drafted_tokens += u64::from(work.drafts);
            self.counters.rows += rows;
            *(if work.decode { &mut self.counters.decode_rows } else { &mut self.counters.prefill_rows }) +=
                rows;
            // All are taken, also behind one that failed: those of the next sequence follow.
            let scores: Vec<Drawn> =
                sampled.by_ref().take(work.scores as usize).map(|(_, drawn)| drawn).collect();
            let scores: Result<Vec<Sampled>, _> = scores.into_iter().collect();
            let (mine, others) = last_rows.split_at_checked(work.embeds as usize * width).unwrap_or_default();
            last_rows = others;
            let own = if work.samples { sampled.next() } else { None };
            let (place, drawn) = own.unzip();
            let behind: Vec<(usize, Drawn)> = sampled.by_ref().take(work.drafts as usize).collect();
            // A missed row counts for nothing: its sequence computes it again.
            let missed = place.is_some_and(|place| self.arrays.is_missed(place));
            if missed || work.samples && self.ended_by_constraint(work.id) {
                continue;
            }
            let (scores, token) = match scores.and_then(|scores| Ok((scores, drawn.transpose()?))) {
                Ok(drawn) => drawn,
                Err(error) => {
                    // The session logs it, within the user's bound: a passed model of NaNs fails each request.
                    tracing::debug!(model = step.model.0, %error, "no token could be sampled");
                    if self.schedule.get(work.id).is_some_and(|s| s.restarts == work.restarts) {
                        self.fail(work.id, JobError::Backend(error));
                    }
                    continue;
                }
            };
            let id = token.as_ref().map(|token| token.id);
            // Without a sequence it ended, or lost its pages to another one.
            let Some(sequence) = self.schedule.advance(work, id, now) else { continue };
            sequence.add_load(load, lookups);
            sequence.embed(mine);
            match sequence.embedded(now) {
                None => {}
                Some(Ok(outcome)) => {
                    self.end(work.id, Event::Done(outcome));
                    continue;
                }
                Some(Err(error)) => {
                    self.fail(work.id, JobError::Backend(error));
                    continue;
                }
            }
            if !scores.is_empty() && !sequence.send(Event::Tokens(sequence.told(scores))) {
                self.fail(work.id, JobError::Cancelled);
                continue;
            }
            if let Some(token) = token {
                self.take_tokens(work, token, behind, now);
            }
        }
        self.release_freed(); // pages that others have with the same tokens, and those of refused drafts
    }

    /// Takes the token drawn after a sequence's last known one. While drafted tokens were right, it takes those drawn `behind` them
    /// too: alone, each would have been drawn from the same logits. They come with their places in the step.
    fn take_tokens(&mut self, work: &Work, token: Sampled, behind: Vec<(usize, Drawn)>, now: Instant) {
        let Some(sequence) = self.schedule.get_mut(work.id) else { return };
        let (mut ids, mut failed) = (vec![token.id], None);
        let (mut batch, mut reason) = sequence.accept(token, now);
        for (drafted, (place, drawn)) in (0..).zip(behind) {
            if reason.is_some() || !self.arrays.is_drawn_by_form(place) || !sequence.take_drafted(drafted) {
                break;
            }
            match drawn {
                Ok(token) => {
                    ids.push(token.id);
                    sequence.tokens.push(token.id);
                    let (more, why) = sequence.accept(token, now);
                    batch.append(more);
                    reason = why;
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        let accepted = ids.len() as u64 - 1; // at most the rows of a step
        self.counters.accepted_tokens += accepted;
        self.counters.rows += accepted;
        self.counters.decode_rows += accepted;
        let heard = sequence.send(Event::Tokens(batch));
        if let Some(error) = failed {
            tracing::debug!(model = sequence.request.model.0, %error, "no token could be sampled");
            return self.fail(work.id, JobError::Backend(error));
        }
        let masking = sequence.answer.masking.clone();
        self.schedule.draft_next(work);
        let Some(sequence) = self.schedule.get_mut(work.id) else { return };
        if let Some(masking) = masking {
            match reason {
                // The last token that the request allows may complete the answer.
                Some(StopReason::MaxTokens | StopReason::ContextFull) => {
                    if self.masks.completes(&masking, &ids) {
                        reason = Some(StopReason::EndOfGeneration);
                    }
                }
                Some(_) => {}
                None => self.masks.compute(&masking, &ids, sequence.draft.ids()),
            }
        }
        if let Some(reason) = reason {
            let done = Event::Done(sequence.outcome(reason));
            self.end(work.id, done);
        } else if !heard {
            self.fail(work.id, JobError::Cancelled);
        } else if let Some(kept) = sequence.shifts() {
            self.schedule.shift(work.id, kept);
        }
    }

    /// Ends a sequence whose constraint is complete or has failed; true if it did.
    fn ended_by_constraint(&mut self, id: SequenceId) -> bool {
        let Some(sequence) = self.schedule.get_mut(id) else { return false };
        let event = match sequence.answer.masking.as_ref().and_then(|masking| masking.known()) {
            Some(Masked::Complete) => Event::Done(sequence.outcome(StopReason::EndOfGeneration)),
            Some(Masked::Failed(error)) => Event::Failed(error.into()),
            Some(Masked::Tokens(_) | Masked::Cut) | None => return false,
        };
        self.end(id, event);
        true
    }

    /// Ends sequences whose constraints are complete, before a step computes rows for them.
    pub(super) fn end_complete(&mut self) {
        if !self.masks.is_used() {
            return;
        }
        for id in self.schedule.ids(|sequence| sequence.answer.masking.is_some()) {
            self.ended_by_constraint(id);
        }
    }

    /// Keeps sequences with slow constraints out of others' steps until their masks are there.
    pub(super) fn look_at_masks(&mut self, now: Instant) {
        if !self.masks.is_used() {
            return;
        }
        let masked = self
            .schedule
            .views()
            .filter_map(|view| Some((view.sequence.request.id, view.sequence.answer.masking.as_deref()?)));
        let late = self.masks.late(masked, now);
        self.schedule.set_late(late);
    }

    /// Handles a step that ran out of memory: frees something for the next turn to try again, or fails the step's
    /// requests.
    fn out_of_memory(&mut self, step: &StepPlan, error: &BackendError) {
        // The next turn's draft would take the room that is made now.
        self.drop_drafters_of(step);
        match self.device.make_room_for_step(step, error, &mut self.schedule) {
            Ok(true) => {}
            Ok(false) => {
                let error = self.device.no_room(step.model, error);
                tracing::warn!(model = step.model.0, %error, "a step failed: the device has no room for it");
                self.device.step_over(step.model);
                for work in &step.work {
                    self.fail(work.id, error.clone());
                }
            }
            Err(lost) => self.replace_device(&lost),
        }
    }
}

/// True if the engine stops, or no client wants the step any more.
pub(super) fn is_given_up(shared: &Shared, schedule: &Schedule, step: &StepPlan) -> bool {
    let inbox = shared.inbox.lock();
    let unwanted = |id| inbox.cancels.contains(&id) || schedule.get(id).is_none_or(|s| s.is_deaf());
    inbox.stop || step.work.iter().all(|work| unwanted(work.id))
}

impl Paused {
    /// A step that has not begun; reuses the arrays of the last one.
    fn new(arrays: &mut StepArrays) -> Self {
        Self {
            arrays: std::mem::take(arrays),
            part: 0,
            time: Duration::ZERO,
            lookups: Lookups::default(),
            waits: None,
            waited: Duration::ZERO,
        }
    }

    fn fill(&mut self, step: &StepPlan, schedule: &Schedule) {
        let stride = step.work.iter().map(|w| schedule.pages(w.id).len()).max().unwrap_or(0);
        self.arrays.clear(stride);
        let several = step.work.iter().any(|work| work.uid != step.work[0].uid);
        self.arrays.patience = if several { SLOW } else { WAIT_ALONE };
        for work in &step.work {
            if let Some(sequence) = schedule.get(work.id) {
                let sample = |drafted| (sequence.sample_row(drafted), sequence.answer.masking.clone());
                let score = |row| sequence.score_row(row);
                let tokens = (&*sequence.tokens, sequence.draft.ids());
                let kept = (&*sequence.kv.pages, sequence.recurrent_place());
                self.arrays.push(work, tokens, kept, sample, score);
            }
        }
    }
}
