//! Ends sequences, and frees what they held.

use std::sync::Arc;
use std::time::Instant;

use super::{Core, IDLE_WAKE};
use crate::lock;
use crate::model::ModelId;
use crate::scheduler::{Event, JobError, SequenceId};
use crate::tensor::MapError;

impl Core {
    pub(super) fn fail(&mut self, id: SequenceId, error: JobError) {
        self.end(id, Event::Failed(error));
    }

    pub(super) fn fail_all(&mut self, error: impl Fn() -> JobError) {
        for id in self.schedule.ids(|_| true) {
            self.fail(id, error());
        }
    }

    /// Fails all sequences of a model whose file can no longer be trusted, and unloads the model from the device.
    pub(super) fn fail_model(&mut self, id: ModelId, error: MapError) {
        tracing::debug!(model = id.0, %error, "the model's file can no longer be trusted: its requests fail");
        let error = Arc::new(error);
        for sequence in self.schedule.ids(|sequence| sequence.request.model == id) {
            self.fail(sequence, JobError::Model(Arc::clone(&error)));
        }
        self.drop_drafters(id);
        // A load that continued would belong to a model that is not hosted.
        self.fail_loads(Some(id), &|| JobError::Model(Arc::clone(&error)));
        self.device.models.unloaded(id);
        self.device.remove_left(&mut self.schedule);
    }

    /// Removes a sequence, and frees its pages that are of no use to later ones. [`Core::send_ended`] sends its last event.
    pub(super) fn end(&mut self, id: SequenceId, event: Event) {
        let Some(sequence) = self.schedule.remove(id) else { return };
        match event {
            Event::Done(_) => self.counters.sequences_done += 1,
            Event::Failed(JobError::Cancelled) => self.counters.sequences_cancelled += 1,
            _ => self.counters.sequences_failed += 1,
        }
        self.counters.reused_tokens += u64::from(sequence.reused.unwrap_or(0));
        let drafting = sequence.drafter.as_ref().map(|drafter| drafter.model);
        let models = [Some(sequence.request.model), drafting];
        self.ended.push((sequence, event)); // before the device is touched: a panic there must not swallow the event
        models.into_iter().flatten().for_each(|model| self.device.models.ended(model, lock::now()));
        self.release_freed();
    }

    /// Publishes a snapshot without the sequences that ended, then sends their last events.
    pub(super) fn send_ended(&mut self) {
        let ended = std::mem::take(&mut self.ended);
        self.device.remove_left(&mut self.schedule);
        {
            let mut inbox = self.shared.inbox.lock();
            for id in ended.iter().map(|(sequence, _)| sequence.request.id) {
                inbox.live.remove(&id);
                inbox.cancels.remove(&id);
                inbox.credits.remove(&id);
            }
        }
        self.publish();
        for (sequence, event) in ended {
            sequence.send(event);
        }
    }

    /// Frees activations and KV pools of models idle for long, evicts weights by their idle rules, and clears failed
    /// loads.
    pub(super) fn housekeep(&mut self, now: Instant) {
        if now.saturating_duration_since(self.housekept) < IDLE_WAKE.min(self.options.idle_release) {
            return;
        }
        self.housekept = now;
        self.device.clear_strays();
        self.release_old_values(now);
        self.expire_idle(now);
        if self.schedule.is_empty() && self.device.loads.is_empty() {
            self.device.backend.trim();
        }
        for id in self.device.models.open_and_idle_for(self.options.idle_release, now) {
            self.device.close(id, &mut self.schedule);
        }
    }
}
