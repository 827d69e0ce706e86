//! What an engine tells about itself, for `ps`, `status` and metrics.

use std::time::{Duration, Instant};

use super::SequenceId;
use super::residency::ResidencyRules;
use crate::backend::{DeviceCounters, DeviceMemoryUse};
use crate::model::ModelId;

/// An engine at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineSnapshot {
    /// Live sequences: admitted ones in order of admission, then waiting ones in order of arrival.
    pub sequences: Vec<SequenceSnapshot>,
    /// Sums since start.
    pub counters: Counters,
    /// KV pages in use, of all models.
    pub kv_pages_used: u64,
    /// KV pages that the pools of all open models hold together.
    pub kv_pages_max: u64,
    /// Bytes that used KV pages take on the device.
    pub kv_bytes: u64,
    /// Bytes that admitted sequences have reserved of `kv_budget_bytes`.
    pub kv_reserved_bytes: u64,
    /// KV cache of all models together.
    pub kv_budget_bytes: u64,
    /// Bytes of device copies of weights; 0 where they are read in place.
    pub device_bytes: u64,
    /// What the device says it did.
    pub device: DeviceCounters,
    /// Who has how much of the device's memory.
    pub memory: DeviceMemoryUse,
    /// Models that have a place on the device, by number.
    pub models: Vec<ModelResidency>,
}

impl EngineSnapshot {
    /// Live sequences of a model.
    pub fn sequences_of(&self, model: ModelId) -> usize {
        self.sequences.iter().filter(|s| s.model == model).count()
    }

    /// Admitted and waiting sequences.
    pub fn running_and_queued(&self) -> (usize, usize) {
        let queued = self.sequences.iter().filter(|s| s.state == SequenceState::Queued).count();
        (self.sequences.len() - queued, queued)
    }
}

/// Sums since the engine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Steps run.
    pub steps: u64,
    /// Rows in all steps: `decode_rows + prefill_rows`.
    pub rows: u64,
    /// Rows that continued an answer.
    pub decode_rows: u64,
    /// Rows that took in a prompt.
    pub prefill_rows: u64,
    /// Sequences in a step, summed over steps: divided by `steps`, how many share one.
    pub step_sequences: u64,
    /// Sequences that ended with an answer.
    pub sequences_done: u64,
    /// Sequences that ended with an error.
    pub sequences_failed: u64,
    /// Sequences that were taken back, or that nobody read any more.
    pub sequences_cancelled: u64,
    /// Tensors brought to the device.
    pub tensors_loaded: u64,
    /// Tensors asked for that were there.
    pub tensor_hits: u64,
    /// Bytes of device memory that were filled with weights.
    pub load_bytes: u64,
    /// Parts of models that left to make room, or because they were told to.
    pub evictions: u64,
    /// Bytes that they gave back.
    pub evicted_bytes: u64,
    /// Steps that waited for weights.
    pub load_waits: u64,
    /// How long, in all.
    pub load_wait: Duration,
}

/// What a model has on a device.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelResidency {
    /// Which.
    pub model: ModelId,
    /// The name it was first mapped under.
    pub name: String,
    /// The parts of its plan in the order of use: embedding, layers, head.
    pub parts: Vec<PartState>,
    /// Bytes of its weights.
    pub weight_bytes: u64,
    /// Bytes of its KV pages.
    pub kv_bytes: u64,
    /// Bytes of its activations.
    pub scratch_bytes: u64,
    /// What is wanted for it.
    pub rules: ResidencyRules,
    /// Since when it has no sequence.
    pub idle_since: Option<Instant>,
    /// Its place among those that make room, 1 for the first; 0 for one that is pinned.
    pub eviction_place: u32,
    /// How far the request is that brings its weights; of several the one that brings most.
    pub loading: Option<LoadingProgress>,
}

/// How far a load is that was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadingProgress {
    /// Tensors that are there.
    pub tensors: usize,
    /// Tensors in all.
    pub tensors_total: usize,
    /// Bytes that those there take of the device.
    pub bytes: u64,
    /// Bytes that all of them will take of it.
    pub bytes_total: u64,
}

impl ModelResidency {
    /// All of its bytes.
    pub fn bytes(&self) -> u64 {
        self.weight_bytes + self.kv_bytes + self.scratch_bytes
    }
}

/// How much of a part is on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartState {
    /// Nothing.
    Absent,
    /// On its way.
    Loading,
    /// Some of its tensors, as of a layer whose other experts no row was sent to.
    Partial,
    /// All of it, or read in place.
    Resident,
}

/// What happened on a device, for who watches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// The last tensor asked for of a part arrived.
    Loaded {
        /// Which model.
        model: ModelId,
        /// Number of the part in its plan.
        part: u32,
        /// Bytes that it takes.
        bytes: u64,
    },
    /// A part left.
    Evicted {
        /// Which model.
        model: ModelId,
        /// Number of the part in its plan.
        part: u32,
        /// Bytes that it took.
        bytes: u64,
    },
    /// The device was lost, and what came of it.
    DeviceLost {
        /// Why, and on what it goes on.
        text: String,
    },
}

/// One live sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceSnapshot {
    /// Its number.
    pub id: SequenceId,
    /// Who pays.
    pub uid: u32,
    /// What runs.
    pub model: ModelId,
    /// Where it is in its life.
    pub state: SequenceState,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens in the KV cache.
    pub prefilled_tokens: u32,
    /// Tokens generated.
    pub generated_tokens: u32,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// KV pages in use.
    pub kv_pages: u32,
    /// When it arrived.
    pub arrived: Instant,
    /// Place in the queue from 1; 0 once admitted.
    pub queue_position: u32,
}

/// Where a live sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceState {
    /// Waits for admission.
    Queued,
    /// Its prompt is being taken in.
    Prefill,
    /// It generates.
    Decode,
    /// It has no credit.
    Stalled,
}
