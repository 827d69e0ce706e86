//! Messages about models' weights on a device: loads, evictions, plans, rules and events.

use serde::{Deserialize, Serialize};

use super::{Ext, number};
use crate::wire::validate::{
    Validate, Violation, any, extensions, limits, list, nested, numbers, text, validate,
};

/// Which of a model's weights to load to the device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preload {
    /// All weights.
    #[default]
    All,
    /// The embedding, the head and the first layer.
    Critical,
    /// The embedding and this many first layers; all layers if there are fewer.
    First(u32),
    /// These layers, counted from 0; at most [`limits::LAYERS_MAX`].
    Layers(Vec<u32>),
}

/// Loads a model's weights to the device before a generation needs them; maps the model if needed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadToDeviceRequest {
    /// The model's name.
    pub model: String,
    /// Which weights.
    pub what: Preload,
    /// Extensions.
    pub ext: Ext,
}

/// Progress of a load to the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadToDeviceItem {
    /// Requested tensors that are resident.
    pub tensors: u32,
    /// Requested tensors.
    pub tensors_total: u32,
    /// Device bytes of the resident ones; 0 if weights are read in place.
    pub device_bytes: u64,
    /// Device bytes of all requested tensors.
    pub device_bytes_total: u64,
    /// Bytes per second since the request arrived; 0 if no rate is known yet.
    pub bytes_per_second: u64,
    /// Extensions.
    pub ext: Ext,
}

/// All requested weights are resident.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadToDeviceEnd {
    /// Requested tensors, including those that were already resident.
    pub tensors: u32,
    /// Their device bytes; 0 if weights are read in place.
    pub device_bytes: u64,
    /// Time of the request in microseconds.
    pub elapsed_us: u64,
    /// Extensions.
    pub ext: Ext,
}

/// Evicts weights from the device; requests load what they need again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearCacheRequest {
    /// The model or models whose weights to evict.
    pub scope: CacheScope,
    /// Extensions.
    pub ext: Ext,
}

/// The model or models whose weights to evict.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CacheScope {
    /// Those of all models that are not pinned.
    #[default]
    All,
    /// Those of one model, by name, pinned or not.
    Model(String),
}

/// The evicted parts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearCacheReply {
    /// Evicted parts of models: embedding, layers, head.
    pub parts: u64,
    /// Freed bytes of device memory.
    pub device_bytes: u64,
    /// Extensions.
    pub ext: Ext,
}

/// When a model's weights may be evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Its weights are evicted only on request.
    pub pinned: bool,
    /// Weights of models with a lower priority are evicted first.
    pub priority: u8,
    /// The embedding and this many first layers stay when other models need memory.
    pub layers_min: u32,
    /// Weights are evicted after the model was idle for this many seconds; 0: never.
    pub idle_s: u32,
}

/// Changes a model's rules until it is unloaded; maps the model if needed. A field that is `None` keeps its value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetRulesRequest {
    /// The model's name.
    pub model: String,
    /// See [`Rules::pinned`].
    pub pinned: Option<bool>,
    /// See [`Rules::priority`].
    pub priority: Option<u8>,
    /// See [`Rules::layers_min`].
    pub layers_min: Option<u32>,
    /// See [`Rules::idle_s`].
    pub idle_s: Option<u32>,
    /// Extensions.
    pub ext: Ext,
}

/// The rules in force now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetRulesReply {
    /// All rules of the model.
    pub rules: Rules,
    /// The request pinned the model, and its file is being locked in host memory too; `Show` reports the progress.
    pub host_pinned: bool,
    /// Why the file is not locked, if the request pinned the model.
    pub host_reason: String,
    /// Extensions.
    pub ext: Ext,
}

/// Subscribes to events of weights and models.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubscribeRequest {
    /// Extensions.
    pub ext: Ext,
}

/// Events. The first item comes at once; every later event is reported or counted as missed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubscribeItem {
    /// Events dropped because the client had no credit for too long.
    pub missed: u64,
    /// The events in order; at most [`limits::EVENTS_MAX`].
    pub events: Vec<EventEntry>,
    /// Extensions.
    pub ext: Ext,
}

/// The daemon is stopping.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubscribeEnd {
    /// Extensions.
    pub ext: Ext,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventEntry {
    /// Kind of the event.
    pub kind: EventKind,
    /// The model's number in `ResidencyReply`; 0 if the event is not about a model.
    pub id: u64,
    /// The model's name; empty if it is another user's.
    pub model: String,
    /// For `Loaded` and `Evicted`: the part, in the order of use; 0 is the embedding.
    pub part: u32,
    /// Number of the model's parts; 0 if unknown.
    pub parts: u32,
    /// For `Loaded` and `Evicted`: bytes of the part on the device.
    pub device_bytes: u64,
    /// For `DeviceLost` and `ModelPoisoned`: the reason.
    pub text: String,
    /// Extensions.
    pub ext: Ext,
}

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventKind {
    /// The last requested tensor of a part became resident.
    Loaded,
    /// A part was evicted.
    Evicted,
    /// The device was lost.
    DeviceLost,
    /// A model was mapped.
    ModelMapped,
    /// A model was unmapped.
    ModelUnmapped,
    /// A model's file lost bytes or changed while it was mapped.
    ModelPoisoned,
}

/// Asks how much memory serving a model needs. No weights are loaded; the model is mapped if needed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanRequest {
    /// The model's name.
    pub model: String,
    /// Tokens of one sequence, prompt and answer together; 0: the longest allowed.
    pub context_tokens: u32,
    /// Extensions.
    pub ext: Ext,
}

/// Memory that serving a model needs. Bytes are of device memory; all are 0 if weights are read in place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanReply {
    /// The device's number in `ResidencyReply`.
    pub device: u32,
    /// Tokens of the planned sequence.
    pub context_tokens: u32,
    /// Bytes of all weights.
    pub weight_bytes: u64,
    /// Bytes of the resident weights.
    pub resident_bytes: u64,
    /// Bytes of the sequence's KV pages.
    pub kv_bytes: u64,
    /// Bytes of activations not yet allocated.
    pub scratch_bytes: u64,
    /// Bytes that are available without an eviction of weights, with those of cached KV pages.
    pub available_bytes: u64,
    /// Most bytes that the daemon may take; 0 if weights are read in place.
    pub budget_bytes: u64,
    /// Bytes that other programs use.
    pub others_bytes: u64,
    /// Whether it fits.
    pub fit: Fit,
    /// The models to evict for it, in the order of eviction; as many as fit.
    pub leaving: Vec<LeavingEntry>,
    /// Bytes of all evictions.
    pub leaving_bytes: u64,
    /// Milliseconds to load the missing weights, at the rate of the loads so far; `None` before the first load.
    pub load_ms: Option<u64>,
    /// Sequences that wait now.
    pub queued: u32,
    /// Extensions.
    pub ext: Ext,
}

/// Whether a model fits on its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fit {
    /// All weights stay on the device.
    Whole,
    /// The weights are larger than the room for them, so some are loaded again for every step.
    Streamed(StreamedFit),
    /// It does not fit: this many bytes are missing.
    No(u64),
}

/// Split of weights that are larger than the room for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamedFit {
    /// Bytes that stay resident.
    pub resident_bytes: u64,
    /// Bytes that are loaded again for every step.
    pub step_bytes: u64,
}

/// A model to evict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeavingEntry {
    /// The model's number in `ResidencyReply`.
    pub id: u64,
    /// The model's name; empty if it is another user's.
    pub model: String,
    /// Bytes to evict.
    pub device_bytes: u64,
}

/// Asks for the use of the devices' memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidencyRequest {
    /// Only models with a number above this one; 0: from the first.
    pub after: u64,
    /// Extensions.
    pub ext: Ext,
}

/// The use of the devices' memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidencyReply {
    /// All devices.
    pub devices: Vec<DeviceMemory>,
    /// Models that have memory on a device, by rising number; as many as fit.
    pub models: Vec<ResidencyEntry>,
    /// There are more: ask again with the last number.
    pub more: bool,
    /// Extensions.
    pub ext: Ext,
}

/// A device's memory in bytes, by use; all 0 if weights are read in place. Counters start with the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// `cpu`, or a kind of GPU.
    pub kind: String,
    /// Product name of the device.
    pub device: String,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes of KV pages.
    pub kv_bytes: u64,
    /// Bytes of activations and step arrays.
    pub scratch_bytes: u64,
    /// Bytes of uploads that are not yet in their final layout.
    pub staging_bytes: u64,
    /// Bytes of recorded graphs.
    pub graph_bytes: u64,
    /// Bytes taken from the driver: all of the above, and memory kept for the next allocation.
    pub taken_bytes: u64,
    /// Most bytes that the daemon may take.
    pub budget_bytes: u64,
    /// Bytes that are available now.
    pub available_bytes: u64,
    /// Memory of the whole device.
    pub total_bytes: u64,
    /// Free memory of the whole device.
    pub free_bytes: u64,
    /// Bytes that other programs use.
    pub others_bytes: u64,
    /// Admitted sequences.
    pub sequences_running: u32,
    /// Waiting sequences.
    pub sequences_queued: u32,
    /// Rows that generated tokens.
    pub decode_rows: u64,
    /// Rows of prompts.
    pub prefill_rows: u64,
    /// Tensors loaded.
    pub loads: u64,
    /// Tensors that a step asked for and that were already resident.
    pub hits: u64,
    /// Device bytes filled with weights.
    pub load_bytes: u64,
    /// Evicted parts of models.
    pub evictions: u64,
    /// Bytes freed by evictions.
    pub evicted_bytes: u64,
    /// Steps that waited for weights.
    pub load_waits: u64,
    /// Sum of these waits, in microseconds.
    pub load_wait_us: u64,
    /// Bytes per second of the loads so far; 0 before the first load.
    pub bytes_per_second: u64,
    /// Extensions.
    pub ext: Ext,
}

/// A model's memory on a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidencyEntry {
    /// The model's number, unique while the daemon runs.
    pub id: u64,
    /// The device's number in the reply.
    pub device: u32,
    /// The model's name; empty if it is another user's.
    pub model: String,
    /// One letter for each part in the order of use (embedding, layers, head): [`PART_ABSENT`], [`PART_LOADING`],
    /// [`PART_PARTIAL`] or [`PART_RESIDENT`].
    pub parts: String,
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes of KV pages.
    pub kv_bytes: u64,
    /// Bytes of activations.
    pub scratch_bytes: u64,
    /// The model's rules.
    pub rules: Rules,
    /// Running and waiting sequences.
    pub sequences: u32,
    /// Milliseconds since its last sequence ended; `None` while it has any.
    pub idle_ms: Option<u64>,
    /// Place in the eviction order, 1 for the first; 0 if pinned.
    pub eviction_place: u32,
    /// Progress of a load of its weights, whichever client asked; of several, the one with the most bytes to load.
    pub loading: Option<LoadingProgress>,
    /// Extensions.
    pub ext: Ext,
}

/// Key of [`ResidencyEntry`]'s `ext`: bytes of the model's cached KV pages, as a little-endian u64; absent for none.
pub const EXT_MODEL_CACHED: u16 = 1;

/// Key of [`ResidencyEntry`]'s `ext`: number of the model's cached recurrent states, as a little-endian u64; absent for none.
pub const EXT_MODEL_STATES_CACHED: u16 = 2;

/// Key of [`ResidencyEntry`]'s `ext`: their bytes, as a little-endian u64; absent for none.
pub const EXT_MODEL_STATES_CACHED_BYTES: u16 = 3;

impl ResidencyEntry {
    /// Bytes of KV pages and recurrent states of known prefixes that no request has now; `kv_bytes` includes them.
    pub fn kv_cached_bytes(&self) -> u64 {
        number(&self.ext, EXT_MODEL_CACHED).unwrap_or(0)
    }

    /// Recurrent states of known prefixes that no request has now.
    pub fn states_cached(&self) -> u64 {
        number(&self.ext, EXT_MODEL_STATES_CACHED).unwrap_or(0)
    }

    /// Their bytes; [`ResidencyEntry::kv_cached_bytes`] includes them.
    pub fn states_cached_bytes(&self) -> u64 {
        number(&self.ext, EXT_MODEL_STATES_CACHED_BYTES).unwrap_or(0)
    }
}

/// Progress of a requested load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadingProgress {
    /// Requested tensors that are resident.
    pub tensors: u32,
    /// Requested tensors.
    pub tensors_total: u32,
    /// Device bytes of the resident ones.
    pub device_bytes: u64,
    /// Device bytes of all requested tensors.
    pub device_bytes_total: u64,
}

/// No tensor of a part is resident.
pub const PART_ABSENT: char = '.';
/// The part is being loaded.
pub const PART_LOADING: char = '>';
/// Some tensors of the part are resident, for example in a layer with experts that no token was routed to.
pub const PART_PARTIAL: char = '-';
/// The whole part is resident, or is read in place.
pub const PART_RESIDENT: char = '#';

impl Validate for Preload {
    fn validate(&self) -> Result<(), Violation> {
        match self {
            Self::All | Self::Critical | Self::First(_) => Ok(()),
            Self::Layers(layers) => numbers(limits::LAYERS_MAX)(layers, ("Preload", "Layers")),
        }
    }
}

impl Validate for CacheScope {
    fn validate(&self) -> Result<(), Violation> {
        match self {
            Self::All => Ok(()),
            Self::Model(model) => text(limits::NAME_BYTES_MAX)(model, ("CacheScope", "Model")),
        }
    }
}

validate!(LoadToDeviceRequest { model: text(limits::NAME_BYTES_MAX), what: nested, ext: extensions });
validate!(LoadToDeviceItem {
    tensors: any,
    tensors_total: any,
    device_bytes: any,
    device_bytes_total: any,
    bytes_per_second: any,
    ext: extensions,
});
validate!(LoadToDeviceEnd { tensors: any, device_bytes: any, elapsed_us: any, ext: extensions });
validate!(ClearCacheRequest { scope: nested, ext: extensions });
validate!(ClearCacheReply { parts: any, device_bytes: any, ext: extensions });
validate!(SetRulesRequest {
    model: text(limits::NAME_BYTES_MAX),
    pinned: any,
    priority: any,
    layers_min: any,
    idle_s: any,
    ext: extensions,
});
validate!(SetRulesReply {
    rules: any,
    host_pinned: any,
    host_reason: text(limits::VALUE_BYTES_MAX),
    ext: extensions,
});
validate!(SubscribeRequest { ext: extensions });
validate!(SubscribeItem { missed: any, events: list(limits::EVENTS_MAX), ext: extensions });
validate!(SubscribeEnd { ext: extensions });
validate!(EventEntry {
    kind: any,
    id: any,
    model: text(limits::NAME_BYTES_MAX),
    part: any,
    parts: any,
    device_bytes: any,
    text: text(limits::ERROR_BYTES_MAX),
    ext: extensions,
});
validate!(PlanRequest { model: text(limits::NAME_BYTES_MAX), context_tokens: any, ext: extensions });
validate!(PlanReply {
    device: any,
    context_tokens: any,
    weight_bytes: any,
    resident_bytes: any,
    kv_bytes: any,
    scratch_bytes: any,
    available_bytes: any,
    budget_bytes: any,
    others_bytes: any,
    fit: any,
    leaving: list(limits::MODELS_MAX),
    leaving_bytes: any,
    load_ms: any,
    queued: any,
    ext: extensions,
});
validate!(LeavingEntry { id: any, model: text(limits::NAME_BYTES_MAX), device_bytes: any });
validate!(ResidencyRequest { after: any, ext: extensions });
validate!(ResidencyReply {
    devices: list(limits::DEVICES_MAX),
    models: list(limits::MODELS_MAX),
    more: any,
    ext: extensions,
});
validate!(DeviceMemory {
    kind: text(limits::LABEL_BYTES_MAX),
    device: text(limits::LABEL_BYTES_MAX),
    weight_bytes: any,
    kv_bytes: any,
    scratch_bytes: any,
    staging_bytes: any,
    graph_bytes: any,
    taken_bytes: any,
    budget_bytes: any,
    available_bytes: any,
    total_bytes: any,
    free_bytes: any,
    others_bytes: any,
    sequences_running: any,
    sequences_queued: any,
    decode_rows: any,
    prefill_rows: any,
    loads: any,
    hits: any,
    load_bytes: any,
    evictions: any,
    evicted_bytes: any,
    load_waits: any,
    load_wait_us: any,
    bytes_per_second: any,
    ext: extensions,
});
validate!(ResidencyEntry {
    id: any,
    device: any,
    model: text(limits::NAME_BYTES_MAX),
    parts: text(limits::PARTS_MAX),
    weight_bytes: any,
    kv_bytes: any,
    scratch_bytes: any,
    rules: any,
    sequences: any,
    idle_ms: any,
    eviction_place: any,
    loading: any,
    ext: extensions,
});
