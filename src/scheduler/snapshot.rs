//! State that an engine reports, for `ps`, `status` and metrics.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::SequenceId;
use super::residency::ResidencyRules;
use crate::backend::{DeviceCounters, DeviceMemoryUse};
use crate::model::ModelId;

/// State of an engine at one instant.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineSnapshot {
    /// Live sequences: admitted ones in order of admission, then waiting ones in order of arrival.
    pub sequences: Vec<SequenceSnapshot>,
    /// Counts since the engine started.
    pub counters: Counters,
    /// KV pages of live sequences.
    pub kv_pages_used: u64,
    /// KV pages of known prefixes that no live sequence has. They go when others need their bytes.
    pub kv_pages_cached: u64,
    /// Bytes of `kv_budget_bytes` that these take.
    pub kv_cached_bytes: u64,
    /// Recurrent states of live sequences.
    pub states_used: u64,
    /// Those of known prefixes that no live sequence has.
    pub states_cached: u64,
    /// Bytes of `kv_cached_bytes` that these take.
    pub states_cached_bytes: u64,
    /// Bytes of host memory that pages and recurrent states of parked sequences take.
    pub kv_swapped_bytes: u64,
    /// Bytes of `kv_budget_bytes` that live sequences have, each page and recurrent state counted once.
    pub kv_held_bytes: u64,
    /// KV pages in the pools of all open models.
    pub kv_pages_max: u64,
    /// Device bytes of the KV pages in use and of those cached.
    pub kv_bytes: u64,
    /// Bytes of `kv_budget_bytes` that live sequences have or are to have soon.
    pub kv_claimed_bytes: u64,
    /// Most bytes of KV cache for all models together.
    pub kv_budget_bytes: u64,
    /// Bytes of device copies of weights; 0 where they are read in place.
    pub device_bytes: u64,
    /// The device's own counters.
    pub device: DeviceCounters,
    /// The device's memory by use.
    pub memory: DeviceMemoryUse,
    /// Device time of each user in microseconds a second, over about the last ten seconds.
    pub user_rates: BTreeMap<u32, u64>,
    /// Models hosted on the device, by id.
    pub models: Vec<ModelResidency>,
}

impl EngineSnapshot {
    /// Numbers of admitted and of waiting sequences.
    pub fn running_and_queued(&self) -> (usize, usize) {
        let queued = self.sequences.iter().filter(|s| s.state == SequenceState::Queued).count();
        (self.sequences.len() - queued, queued)
    }
}

/// Counts since the engine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Steps run.
    pub steps: u64,
    /// Rows in all steps: `decode_rows + prefill_rows`.
    pub rows: u64,
    /// Rows that continued an answer.
    pub decode_rows: u64,
    /// Rows of prompts.
    pub prefill_rows: u64,
    /// Prompt tokens that no step computed, because their keys and values were there.
    pub reused_tokens: u64,
    /// Tokens that steps computed for drafts.
    pub drafted_tokens: u64,
    /// Those of them that became an answer's. The others are in no count of rows.
    pub accepted_tokens: u64,
    /// Sum of the sequences in each step. Divided by `steps`: mean sequences per step.
    pub step_sequences: u64,
    /// Sequences that ended with an answer.
    pub sequences_done: u64,
    /// Sequences that ended with an error.
    pub sequences_failed: u64,
    /// Sequences that their client cancelled, or whose client disconnected.
    pub sequences_cancelled: u64,
    /// Times that a sequence gave its place or its KV pages up for another.
    pub sequences_parked: u64,
    /// KV pages of known prefixes that went because others needed their bytes.
    pub kv_pages_evicted: u64,
    /// KV pages and recurrent states of parked sequences that were copied to host memory.
    pub kv_pages_swapped_out: u64,
    /// Those that were copied back.
    pub kv_pages_swapped_in: u64,
    /// Loads begun, of one tensor each.
    pub tensors_loaded: u64,
    /// Requests for tensors that were already resident or in flight.
    pub tensor_hits: u64,
    /// Device bytes that these loads took.
    pub load_bytes: u64,
    /// Parts of models evicted for room, by an idle rule or by request.
    pub evictions: u64,
    /// Device bytes that these evictions freed.
    pub evicted_bytes: u64,
    /// Steps that waited for weights.
    pub load_waits: u64,
    /// Total time that steps waited for weights.
    pub load_wait: Duration,
}

/// One model's share of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelResidency {
    /// The model.
    pub model: ModelId,
    /// The name under which the model was first mapped.
    pub name: String,
    /// State of each part in order of use: embedding, layers, head.
    pub parts: Vec<PartState>,
    /// Device bytes of its weights.
    pub weight_bytes: u64,
    /// Device bytes of its KV pages.
    pub kv_bytes: u64,
    /// Most KV pages that it can have; 0 while it is not open.
    pub kv_pages_max: u64,
    /// Bytes of KV pages and recurrent states of known prefixes that no live sequence has.
    pub kv_cached_bytes: u64,
    /// Number of these states.
    pub states_cached: u64,
    /// Their bytes.
    pub states_cached_bytes: u64,
    /// Device bytes of its activations.
    pub scratch_bytes: u64,
    /// Rules in force for its weights.
    pub rules: ResidencyRules,
    /// The instant since which it has no sequence; `None` while it has any.
    pub idle_since: Option<Instant>,
    /// Position in the order of eviction, from 1; 0 for a pinned model.
    pub eviction_place: u32,
    /// Progress of the client request that still has the most bytes of this model to load.
    pub loading: Option<LoadingProgress>,
}

/// Progress of a requested load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadingProgress {
    /// Tensors that are resident.
    pub tensors: usize,
    /// Tensors of the request.
    pub tensors_total: usize,
    /// Device bytes of the resident tensors.
    pub bytes: u64,
    /// Device bytes of all tensors of the request.
    pub bytes_total: u64,
}

impl ModelResidency {
    /// Device bytes of its weights, KV pages and activations.
    pub fn bytes(&self) -> u64 {
        self.weight_bytes + self.kv_bytes + self.scratch_bytes
    }
}

/// How much of a part is resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartState {
    /// No tensor.
    Absent,
    /// Some tensors are in flight.
    Loading,
    /// Only some tensors, such as a layer whose other experts no row has chosen.
    Partial,
    /// All tensors, or read in place.
    Resident,
}

/// An event on a device, for watchers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// All requested tensors of a part became resident.
    Loaded {
        /// The model.
        model: ModelId,
        /// Number of the part in its plan.
        part: u32,
        /// Device bytes of the part.
        bytes: u64,
    },
    /// A part was evicted.
    Evicted {
        /// The model.
        model: ModelId,
        /// Number of the part in its plan.
        part: u32,
        /// Device bytes that this freed.
        bytes: u64,
    },
    /// The device was lost.
    DeviceLost {
        /// The cause, and the device on which the engine continues.
        text: String,
    },
}

/// One live sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceSnapshot {
    /// Number of the sequence.
    pub id: SequenceId,
    /// User id that is charged for it.
    pub uid: u32,
    /// The model that it runs.
    pub model: ModelId,
    /// Current state of the sequence.
    pub state: SequenceState,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens in the KV cache.
    pub prefilled_tokens: u32,
    /// Prompt tokens that were there before its first step.
    pub reused_tokens: u32,
    /// Tokens generated.
    pub generated_tokens: u32,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// KV pages in use.
    pub kv_pages: u32,
    /// Recurrent states in use.
    pub states: u32,
    /// Bytes of its pages and recurrent states, those of a shared page too.
    pub kv_bytes: u64,
    /// Device time charged for it.
    pub device_time: Duration,
    /// When it arrived.
    pub arrived: Instant,
    /// Position in the queue, from 1; 0 once admitted.
    pub queue_position: u32,
}

/// State of a live sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceState {
    /// Waits for admission.
    Queued,
    /// Computes its prompt.
    Prefill,
    /// Generates tokens.
    Decode,
    /// Admitted, without credit.
    Stalled,
}
