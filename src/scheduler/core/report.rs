//! Publishes the engine's state.

use std::sync::Arc;

use super::Core;
use crate::model::ModelId;
use crate::scheduler::life::Hosted;
use crate::scheduler::{Counters, EngineSnapshot, ModelResidency, SequenceSnapshot};

impl Core {
    /// Publishes a snapshot.
    pub(super) fn publish(&mut self) {
        self.published = crate::lock::now();
        self.tell_events();
        let sequences = self.schedule.views().map(|view| {
            let sequence = view.sequence;
            let (prompt_tokens, job) = (sequence.request.prompt_tokens, &sequence.answer.job);
            SequenceSnapshot {
                id: sequence.request.id,
                uid: job.uid,
                model: sequence.request.model,
                state: view.state,
                prompt_tokens,
                prefilled_tokens: sequence.computed.min(prompt_tokens),
                generated_tokens: sequence.generated_tokens(),
                max_tokens: sequence.answer_tokens(),
                kv_pages: sequence.kv.pages.len() as u32,
                states: sequence.states() as u32,
                kv_bytes: sequence.held_bytes(),
                reused_tokens: sequence.reused.unwrap_or(0),
                device_time: sequence.device_time,
                arrived: job.arrived,
                queue_position: view.queue_position,
            }
        });
        let sequences = sequences.collect();
        let pages = self.schedule.page_sums();
        self.counters.kv_pages_evicted += self.schedule.take_evicted_pages();
        let slots = self.device.models.iter().filter_map(|(_, hosted)| hosted.slot);
        let loaded = self.device.residency.counters();
        let snapshot = EngineSnapshot {
            counters: Counters {
                tensors_loaded: loaded.loads,
                tensor_hits: loaded.hits,
                load_bytes: loaded.load_bytes,
                evictions: loaded.evictions,
                evicted_bytes: loaded.evicted_bytes,
                kv_pages_swapped_out: self.device.host.pages_out,
                kv_pages_swapped_in: self.device.host.pages_in,
                ..self.counters
            },
            kv_pages_used: pages.used,
            kv_pages_cached: pages.cached,
            kv_held_bytes: self.schedule.kv().held_bytes(),
            kv_pages_max: pages.size,
            kv_bytes: slots.map(|slot| self.device.backend.kv_bytes(slot)).sum(),
            kv_cached_bytes: pages.cached_bytes,
            states_used: pages.states.used,
            states_cached: pages.states.cached,
            states_cached_bytes: pages.states.cached_bytes,
            kv_swapped_bytes: self.device.host.held_bytes(),
            kv_claimed_bytes: self.schedule.claimed_bytes(),
            kv_budget_bytes: self.schedule.limits().kv_budget_bytes,
            device_bytes: self.device.residency.device_bytes(),
            device: self.device.backend.counters(),
            memory: self.device.backend.memory(),
            user_rates: self.rates.at(self.published),
            models: self.residencies(),
            sequences,
        };
        *self.shared.published.lock() = Arc::new(snapshot);
    }

    /// Each model's share of the device.
    fn residencies(&self) -> Vec<ModelResidency> {
        let order = self.device.residency.order(None);
        let backend = self.device.backend.as_ref();
        let residency = |(id, hosted): (ModelId, &Hosted)| {
            let states = self.schedule.kv().states_of(id);
            ModelResidency {
                model: id,
                name: hosted.model.name.clone(),
                parts: self.device.residency.part_states(id),
                weight_bytes: self.device.residency.held(id).map(|(_, held)| held.bytes).sum(),
                kv_bytes: hosted.slot.map_or(0, |slot| backend.kv_bytes(slot)),
                kv_pages_max: self.schedule.kv().pages_max(id),
                kv_cached_bytes: self.schedule.cached_bytes(id),
                states_cached: states.cached,
                states_cached_bytes: states.cached_bytes,
                scratch_bytes: hosted.slot.map_or(0, |slot| backend.open_bytes(slot)),
                rules: self.device.residency.rules(id),
                idle_since: hosted.life.idle_since(),
                eviction_place: order.iter().zip(1..).find(|(other, _)| **other == id).map_or(0, |(_, n)| n),
                loading: self.device.loads.progress(id),
            }
        };
        self.device.models.iter().map(residency).collect()
    }
}
