//! Predicts what serving a model would take from the device: the memory it needs, the memory that is free, and which
//! models would be evicted.

use std::sync::Arc;

use super::EngineHandle;
use crate::model::{Model, ModelId};

/// How a model would be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// All of its weights stay on the device.
    Whole,
    /// Its weights exceed the room for them: some stay, and each step loads the rest again.
    Streamed {
        /// Bytes that stay on the device.
        resident_bytes: u64,
        /// Bytes that each step loads.
        streamed_bytes: u64,
    },
    /// The device cannot serve it.
    No {
        /// Bytes that are missing.
        missing_bytes: u64,
    },
}

/// Weights that would be evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaving {
    /// The model that owns them.
    pub model: ModelId,
    /// The name under which the model was first mapped.
    pub name: String,
    /// Bytes that the eviction frees.
    pub bytes: u64,
}

/// A device's memory, and a model's need of it. All sizes are bytes of device memory; 0 where weights are read in
/// place.
#[derive(Clone, Debug, PartialEq)]
pub struct ResidencyPlan {
    /// All weights.
    pub weight_bytes: u64,
    /// Weights that are resident.
    pub resident_bytes: u64,
    /// KV pages and recurrent states of one sequence with the given number of positions.
    pub kv_bytes: u64,
    /// Activations that are not allocated yet.
    pub scratch_bytes: u64,
    /// Memory that is free now, or that cached KV pages have, which leave first.
    pub available_bytes: u64,
    /// Most memory that the engine may use.
    pub budget_bytes: u64,
    /// Memory that other programs use.
    pub others_bytes: u64,
    /// How the device would serve the model.
    pub fit: Fit,
    /// Evictions that would make room, in order.
    pub leaving: Vec<Leaving>,
    /// Seconds to load the missing weights, at the rate of the loads so far; `None` before the first load.
    pub load_seconds: Option<f64>,
    /// Sequences that wait for admission now.
    pub queued: u32,
}

impl EngineHandle {
    /// Predicts what serving `model` with one sequence of `positions` tokens would take. Changes nothing; the answer is
    /// as of the last snapshot.
    pub fn plan(&self, model: &Arc<Model>, positions: u32) -> ResidencyPlan {
        let (facts, snapshot) = (self.facts(), self.snapshot());
        let (program, memory) = (&model.plan.program, snapshot.memory);
        let part_bytes =
            |part| program.part_tensors(part).map(|(_, tensor)| facts.weight_bytes(&tensor.lazy)).sum();
        // The embedding stays in the file: a step reads only rows of it.
        let parts: Vec<u64> = (1..program.part_count()).map(part_bytes).collect();
        let own = snapshot.models.iter().find(|other| other.model == model.id);
        let weight_bytes: u64 = parts.iter().sum();
        let resident_bytes = own.map_or(0, |own| own.weight_bytes).min(weight_bytes);
        let kv_bytes = facts.sequence_bytes(program, positions);
        let open = own.is_some_and(|own| own.scratch_bytes > 0);
        let scratch_bytes = if open { 0 } else { facts.scratch_bytes(program) };
        let in_place = memory.budget == 0;
        let cached_bytes = snapshot.kv_cached_bytes;
        let available_bytes =
            if in_place { u64::MAX } else { memory.available().saturating_add(cached_bytes) };
        let load_bytes = weight_bytes - resident_bytes;
        let mut missing =
            load_bytes.saturating_add(kv_bytes).saturating_add(scratch_bytes).saturating_sub(available_bytes);
        let mut others: Vec<_> =
            snapshot.models.iter().filter(|m| m.eviction_place > 0 && m.model != model.id).collect();
        others.sort_by_key(|other| other.eviction_place);
        let mut leaving = Vec::new();
        for other in others {
            let bytes = other.weight_bytes.min(missing);
            if bytes > 0 {
                missing -= bytes;
                leaving.push(Leaving { model: other.model, name: other.name.clone(), bytes });
            }
        }
        // Streaming needs room for the current layer, the one before it, and one in flight.
        let least: u64 = parts.iter().copied().max().unwrap_or(0).saturating_mul(3);
        let fit = match missing {
            0 => Fit::Whole,
            _ if weight_bytes.saturating_sub(missing) >= least => {
                Fit::Streamed { resident_bytes: weight_bytes - missing, streamed_bytes: missing }
            }
            _ => Fit::No { missing_bytes: missing },
        };
        let rate = snapshot.device.upload_rates.iter().find(|rate| rate.in_use && rate.bytes > 0);
        ResidencyPlan {
            weight_bytes,
            resident_bytes,
            kv_bytes: if in_place { 0 } else { kv_bytes },
            scratch_bytes,
            available_bytes: if in_place { 0 } else { available_bytes },
            budget_bytes: memory.budget,
            others_bytes: memory.others(),
            fit,
            leaving,
            load_seconds: rate.map(|rate| load_bytes as f64 / rate.bytes_per_second().max(1.0)),
            queued: snapshot.running_and_queued().1 as u32,
        }
    }
}
