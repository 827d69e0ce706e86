//! What the engine shows of itself.

use std::sync::Arc;

use super::{Core, Room};
use crate::model::ModelId;
use crate::scheduler::{Counters, EngineSnapshot, ModelResidency, SequenceSnapshot};

impl Core {
    /// Publishes a snapshot.
    pub(super) fn publish(&mut self) {
        self.published = crate::lock::now();
        self.tell_events();
        let sequences: Vec<_> = self
            .policy
            .views()
            .filter_map(|view| {
                let sequence = self.sequences.get(&view.id)?;
                Some(SequenceSnapshot {
                    id: view.id,
                    uid: sequence.job.uid,
                    model: view.model,
                    state: view.state,
                    prompt_tokens: sequence.prompt_tokens(),
                    prefilled_tokens: view.computed.min(sequence.prompt_tokens()),
                    generated_tokens: sequence.generated_tokens(),
                    max_tokens: sequence.answer_tokens(),
                    kv_pages: view.kv_pages,
                    arrived: sequence.job.arrived,
                    queue_position: view.queue_position,
                })
            })
            .collect();
        let (kv_pages_used, kv_pages_max) = self.policy.page_counts();
        let slots = self.rooms.values().filter_map(|r| r.slot);
        let loaded = self.residency.counters();
        let snapshot = EngineSnapshot {
            counters: Counters {
                tensors_loaded: loaded.loads,
                tensor_hits: loaded.hits,
                load_bytes: loaded.load_bytes,
                evictions: loaded.evictions,
                evicted_bytes: loaded.evicted_bytes,
                ..self.counters
            },
            kv_pages_used,
            kv_pages_max,
            kv_bytes: slots.map(|slot| self.backend.kv_bytes(slot)).sum(),
            kv_reserved_bytes: self.policy.reserved_bytes(),
            kv_budget_bytes: self.policy.limits().kv_budget_bytes,
            device_bytes: self.residency.device_bytes(),
            device: self.backend.counters(),
            memory: self.backend.memory(),
            models: self.residencies(),
            sequences,
        };
        let queued = self.policy.queued_count();
        let mut inbox = self.shared.inbox.lock();
        inbox.queued = queued + inbox.jobs.len();
        *self.shared.published.lock() = Arc::new(snapshot);
    }

    /// What each model has on the device.
    fn residencies(&self) -> Vec<ModelResidency> {
        let (facts, order) = (self.shared.facts(), self.residency.order(None));
        let residency = |(id, room): (&ModelId, &Room)| ModelResidency {
            model: *id,
            name: room.model.name.clone(),
            parts: self.residency.part_states(*id),
            weight_bytes: self.residency.held(*id).map(|(_, held)| held.bytes).sum(),
            kv_bytes: room.slot.map_or(0, |slot| self.backend.kv_bytes(slot)),
            scratch_bytes: room.slot.map_or(0, |_| facts.scratch_bytes(&room.model.plan.program)),
            rules: self.residency.rules(*id),
            idle_since: room.idle_since,
            eviction_place: order.iter().zip(1..).find(|(other, _)| *other == id).map_or(0, |(_, n)| n),
            loading: self.loading(*id),
        };
        self.rooms.iter().map(residency).collect()
    }
}
