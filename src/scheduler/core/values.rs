//! Gives the host memory of steps' values back once other models compute, or nobody does.
//!
//! A backend keeps the values of a model's last step for the next one. Those of a prompt in a model of 8B take 64 MiB, and those of
//! an encoder's text up to 1 GiB. That is too much to keep for each model that was used once.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::Core;
use crate::lock;
use crate::model::ModelId;
use crate::scheduler::schedule::StepPlan;

/// Values that take less are kept until the model rests: a few steps of answers.
const SMALL_BYTES: u64 = 4 << 20;

/// A model rests that had no step for so long.
const REST: Duration = Duration::from_secs(1);

/// Values that models' last steps left.
#[derive(Debug, Default)]
pub(super) struct Kept(BTreeMap<ModelId, Left>);

#[derive(Clone, Copy, Debug)]
struct Left {
    /// Bytes of the widest step since the last release.
    bytes: u64,
    /// The end of the last step.
    since: Instant,
}

impl Kept {
    /// A step is over, and its values still take memory. Returns the bytes of its model's.
    fn left(&mut self, step: &StepPlan, now: Instant) -> u64 {
        let left = self.0.entry(step.model).or_insert(Left { bytes: 0, since: now });
        *left = Left { bytes: left.bytes.max(step.bytes), since: now };
        left.bytes
    }
}

impl Core {
    /// At the end of a step. Where another model's step may be next, its users pay for the release, not that one's.
    pub(super) fn leave_values(&mut self, step: &StepPlan) {
        let bytes = self.values.left(step, lock::now());
        if bytes >= SMALL_BYTES && self.schedule.others_wait(step.model) {
            self.release_values(|id, _| id == step.model);
        }
    }

    /// Before a step of a model: releases values that others left, except small ones.
    pub(super) fn release_values_but(&mut self, model: ModelId) {
        self.release_values(|id, left| id != model && left.bytes >= SMALL_BYTES);
    }

    /// Releases the values of models that rest.
    pub(super) fn release_old_values(&mut self, now: Instant) {
        self.release_values(|_, left| now.saturating_duration_since(left.since) >= REST);
    }

    fn release_values(&mut self, of: impl Fn(ModelId, Left) -> bool) {
        let suspended = |id: ModelId| self.paused.keys().any(|(of, _)| *of == id);
        let gone: Vec<ModelId> = self
            .values
            .0
            .iter()
            .filter(|(id, left)| of(**id, **left) && !suspended(**id))
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            self.values.0.remove(&id);
            if let Some(slot) = self.device.models.get(id).and_then(|hosted| hosted.slot) {
                self.device.backend.release_values(slot);
            }
        }
    }
}
