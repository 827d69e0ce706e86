//! What an engine tells about itself, for `ps`, `status` and metrics.

use std::time::Instant;

use super::SequenceId;
use crate::backend::DeviceCounters;
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
    /// Sequences that ended without, cancelled ones among them.
    pub sequences_failed: u64,
    /// Tensors brought to the device.
    pub tensors_loaded: u64,
    /// Tensors asked for that were there.
    pub tensor_hits: u64,
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
