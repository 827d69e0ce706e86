//! Runs a step and delivers its results.

use std::sync::Arc;
use std::time::Duration;

use super::Core;
use crate::backend::{BackendError, Sampled};
use crate::lock;
use crate::scheduler::schedule::StepPlan;
use crate::scheduler::step::{self, StepDevice};
use crate::scheduler::{Event, JobError};

/// If the first step of a model's turn loads weights, the model keeps its turn for this many times that step's
/// duration. Models that share the room of one model then spend a fifth of the time on loads.
const TURN_KEPT: u32 = 4;
/// Longest time to keep a turn, because other models wait.
const TURN_KEPT_MAX: Duration = Duration::from_secs(2);

/// Result of sampling one token of a sequence.
type Drawn = Result<Sampled, BackendError>;

impl Core {
    pub(super) fn step(&mut self, step: StepPlan) {
        let Some(hosted) = self.device.models.get(step.model) else { return };
        let model = Arc::clone(&hosted.model);
        if let Err(error) = model.files.check_unchanged() {
            return self.fail_model(step.model, error);
        }
        let (begun, loads, switched) = (lock::now(), self.device.residency.counters().loads, step.switched);
        self.in_step = Some(step);
        let result = self.compute();
        if switched {
            // Other models that need the same room wait until the loads have paid off.
            let loaded =
                self.device.residency.counters().loads > loads && self.device.backend.parts_ahead() > 0;
            let now = lock::now();
            self.schedule.keep_turn(loaded.then(|| now + (TURN_KEPT * (now - begun)).min(TURN_KEPT_MAX)));
        }
        let Some(step) = self.in_step.take() else { return };
        if let Err(error) = model.files.check_poison().and_then(|()| model.files.check_unchanged()) {
            return self.fail_model(step.model, error); // the step may have read wrong bytes: discard all its tokens
        }
        match result {
            Ok((sampled, load)) => self.deliver(&step, sampled, load),
            Err(BackendError::GivenUp) => {} // the next turn reads the reason from the inbox
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

    /// Computes `in_step`. The returned time is how long the step waited for weights.
    fn compute(&mut self) -> Result<(Vec<Drawn>, Duration), BackendError> {
        let nothing = Ok((Vec::new(), Duration::ZERO));
        let Some(step) = &self.in_step else { return nothing };
        let Some(hosted) = self.device.models.get(step.model) else { return nothing };
        let (model, facts) = (Arc::clone(&hosted.model), self.shared.facts());
        self.device.residency.used(step.model);
        let slot = self.device.open(&model, &facts, &self.schedule)?;
        let stride = step.work.iter().map(|w| self.schedule.pages(w.id).len()).max().unwrap_or(0);
        self.arrays.clear(stride);
        for work in &step.work {
            if let Some(sequence) = self.schedule.get(work.id) {
                let sample = || sequence.sample_row();
                self.arrays.push(work, &sequence.tokens, &sequence.pages, sample);
            }
        }
        let (shared, schedule) = (&self.shared, &self.schedule);
        let given_up = || {
            let inbox = shared.inbox.lock();
            let unwanted = |id| inbox.cancels.contains(&id) || schedule.get(id).is_none_or(|s| s.is_deaf());
            inbox.stop || step.work.iter().all(|work| unwanted(work.id))
        };
        let device = StepDevice {
            backend: self.device.backend.as_mut(),
            residency: &mut self.device.residency,
            model: step.model,
            parts: model.plan.program.part_count(),
            slot,
            heartbeat: &shared.heartbeat,
            given_up: &given_up,
        };
        let drawn = step::run(device, &self.arrays);
        let result = drawn.and_then(|drawn| Ok((drawn, self.device.backend.load_wait()?)));
        if result.is_err() {
            self.device.residency.forget_handles(step.model); // a load in flight may fail yet
        }
        result
    }

    fn deliver(&mut self, step: &StepPlan, sampled: Vec<Drawn>, load: Duration) {
        let now = lock::now();
        self.counters.load_waits += u64::from(!load.is_zero());
        self.counters.load_wait += load;
        self.counters.steps += 1;
        self.counters.step_sequences += step.work.len() as u64;
        let mut sampled = sampled.into_iter();
        for work in &step.work {
            let rows = u64::from(work.rows);
            self.counters.rows += rows;
            *(if work.decode { &mut self.counters.decode_rows } else { &mut self.counters.prefill_rows }) +=
                rows;
            let drawn = if work.samples { sampled.next() } else { None };
            let Some(sequence) = self.schedule.get_mut(work.id) else { continue };
            sequence.add_load(load);
            let token = match drawn {
                None => {
                    sequence.advance(work.rows, None, now);
                    continue;
                }
                Some(Ok(token)) => token,
                Some(Err(error)) => {
                    tracing::warn!(model = step.model.0, %error, "no token could be sampled");
                    self.fail(work.id, JobError::Backend(error));
                    continue;
                }
            };
            sequence.advance(work.rows, Some(token.id), now);
            let (batch, reason) = sequence.accept(token, now);
            let heard = sequence.send(Event::Tokens(batch));
            if let Some(reason) = reason {
                let done = Event::Done(sequence.outcome(reason));
                self.end(work.id, done);
            } else if !heard {
                self.fail(work.id, JobError::Cancelled);
            }
        }
    }

    /// Handles a step that ran out of memory: frees something for the next turn to try again, or fails the step's
    /// requests.
    fn out_of_memory(&mut self, step: &StepPlan, error: &BackendError) {
        match self.device.make_room_for_step(step.model, &mut self.schedule) {
            Ok(true) => {}
            Ok(false) => {
                let error = self.device.no_room(step.model, error);
                tracing::warn!(model = step.model.0, %error, "a step failed: the device has no room for it");
                for work in &step.work {
                    self.fail(work.id, error.clone());
                }
            }
            Err(lost) => self.replace_device(&lost),
        }
    }
}
