//! The models that an engine hosts, and the life of each on its device.
//!
//! `Idle -> Serving -> Idle` as sequences arrive and end. An unloaded model is `Leaving` until its last sequence has
//! ended; the engine then removes it from the device. Its activations and KV pool are open or closed independently of
//! that. Its first step opens them; a long idle time, a memory shortage or a panic closes them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::ModelSlot;
use crate::model::{Model, ModelId};

/// A model's state. The counts include admitted and waiting sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// No sequence since this instant.
    Idle(Instant),
    /// This many sequences, at least 1.
    Serving(usize),
    /// Unloaded, with this many sequences still live.
    Leaving(usize),
}

impl Life {
    /// A sequence arrived.
    fn begun(self) -> Self {
        match self {
            Self::Idle(_) => Self::Serving(1),
            Self::Serving(count) => Self::Serving(count + 1),
            Self::Leaving(count) => Self::Leaving(count + 1),
        }
    }

    /// A sequence ended.
    fn ended(self, now: Instant) -> Self {
        match self {
            Self::Idle(since) => Self::Idle(since),
            Self::Serving(0 | 1) => Self::Idle(now),
            Self::Serving(count) => Self::Serving(count - 1),
            Self::Leaving(count) => Self::Leaving(count.saturating_sub(1)),
        }
    }

    /// The model was unloaded, or its file can no longer be trusted.
    fn unloaded(self) -> Self {
        match self {
            Self::Idle(_) => Self::Leaving(0),
            Self::Serving(count) | Self::Leaving(count) => Self::Leaving(count),
        }
    }

    /// Weights were loaded for the model, so its idle time starts again.
    fn used(self, now: Instant) -> Self {
        if let Self::Idle(_) = self { Self::Idle(now) } else { self }
    }

    /// The instant since which the model has no sequence; `None` while it has any.
    pub fn idle_since(self) -> Option<Instant> {
        if let Self::Idle(since) = self { Some(since) } else { None }
    }
}

/// A model on a device.
#[derive(Debug)]
pub(super) struct Hosted {
    pub model: Arc<Model>,
    pub life: Life,
    /// Handle of its activations and KV pool while they are open.
    pub slot: Option<ModelSlot>,
}

/// All models of one device, by id.
#[derive(Debug, Default)]
pub(super) struct HostedModels(BTreeMap<ModelId, Hosted>);

impl HostedModels {
    /// Adds a model as idle. A model that is already hosted keeps its state.
    pub fn enter(&mut self, model: &Arc<Model>, now: Instant) {
        let hosted = || Hosted { model: Arc::clone(model), life: Life::Idle(now), slot: None };
        self.0.entry(model.id).or_insert_with(hosted);
    }

    pub fn get(&self, id: ModelId) -> Option<&Hosted> {
        self.0.get(&id)
    }

    fn change(&mut self, id: ModelId, change: impl FnOnce(Life) -> Life) {
        if let Some(hosted) = self.0.get_mut(&id) {
            hosted.life = change(hosted.life);
        }
    }

    /// A sequence of a hosted model arrived.
    pub fn begun(&mut self, id: ModelId) {
        self.change(id, Life::begun);
    }

    /// A sequence ended.
    pub fn ended(&mut self, id: ModelId, now: Instant) {
        self.change(id, |life| life.ended(now));
    }

    /// Removes the model, at once or after its last sequence.
    pub fn unloaded(&mut self, id: ModelId) {
        self.change(id, Life::unloaded);
    }

    /// Weights were loaded for it.
    pub fn used(&mut self, id: ModelId, now: Instant) {
        self.change(id, |life| life.used(now));
    }

    /// Records that a model's activations and KV pool are open.
    pub fn opened(&mut self, id: ModelId, slot: ModelSlot) {
        if let Some(hosted) = self.0.get_mut(&id) {
            hosted.slot = Some(slot);
        }
    }

    /// Takes a model's slot so that the caller can close it in the backend.
    pub fn take_slot(&mut self, id: ModelId) -> Option<ModelSlot> {
        self.0.get_mut(&id)?.slot.take()
    }

    /// Takes out one unloaded model that has no sequence left.
    pub fn take_left(&mut self) -> Option<Hosted> {
        let id = *self.0.iter().find(|(_, hosted)| hosted.life == Life::Leaving(0))?.0;
        self.0.remove(&id)
    }

    /// Open models that have been idle for at least `idle`.
    pub fn open_and_idle_for(&self, idle: Duration, now: Instant) -> Vec<ModelId> {
        let long = |since| now.saturating_duration_since(since) >= idle;
        let found = self
            .0
            .iter()
            .filter(|(_, hosted)| hosted.slot.is_some() && hosted.life.idle_since().is_some_and(long));
        found.map(|(id, _)| *id).collect()
    }

    /// The open model that has been idle longest, except `but`.
    pub fn open_and_idle_longest(&self, but: Option<ModelId>) -> Option<ModelId> {
        let open = self.0.iter().filter(|(id, hosted)| Some(**id) != but && hosted.slot.is_some());
        let oldest = open.filter_map(|(id, hosted)| Some((hosted.life.idle_since()?, *id))).min();
        oldest.map(|(_, id)| id)
    }

    /// All models, by id.
    pub fn iter(&self) -> impl Iterator<Item = (ModelId, &Hosted)> {
        self.0.iter().map(|(id, hosted)| (*id, hosted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies every event to every state. Events that do not concern a state leave it unchanged.
    #[test]
    fn a_model_lives_as_its_sequences_and_its_owner_say() {
        let (then, now) = (Instant::now(), Instant::now() + Duration::from_secs(1));
        let table = [
            // state, begun, ended, unloaded, used
            (Life::Idle(then), Life::Serving(1), Life::Idle(then), Life::Leaving(0), Life::Idle(now)),
            (Life::Serving(1), Life::Serving(2), Life::Idle(now), Life::Leaving(1), Life::Serving(1)),
            (Life::Serving(3), Life::Serving(4), Life::Serving(2), Life::Leaving(3), Life::Serving(3)),
            (Life::Leaving(2), Life::Leaving(3), Life::Leaving(1), Life::Leaving(2), Life::Leaving(2)),
            (Life::Leaving(0), Life::Leaving(1), Life::Leaving(0), Life::Leaving(0), Life::Leaving(0)),
        ];
        for (life, begun, ended, unloaded, used) in table {
            assert_eq!(life.begun(), begun, "{life:?}: a sequence arrives");
            assert_eq!(life.ended(now), ended, "{life:?}: a sequence ends");
            assert_eq!(life.unloaded(), unloaded, "{life:?}: the model is unloaded");
            assert_eq!(life.used(now), used, "{life:?}: weights are loaded for it");
        }
    }
}
