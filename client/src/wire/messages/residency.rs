//! Messages about models' weights on a device: bringing them, sending them away, and what is to be expected.

use serde::{Deserialize, Serialize};

use super::Ext;
use crate::wire::validate::{
    Validate, Violation, any, extensions, limits, list, nested, numbers, text, validate,
};

/// Which of a model's weights to bring to the device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preload {
    /// All.
    #[default]
    All,
    /// The embedding, the head and the first layer.
    Critical,
    /// The embedding and so many first layers; all layers where there are fewer.
    First(u32),
    /// These layers, counted from 0; at most [`limits::LAYERS_MAX`].
    Layers(Vec<u32>),
}

/// Brings a model's weights to the device, without a request for tokens that needs them; maps it where that is needed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadToDeviceRequest {
    /// Its name.
    pub model: String,
    /// Which of them.
    pub what: Preload,
    /// Extensions.
    pub ext: Ext,
}

/// How far such a load is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadToDeviceItem {
    /// Tensors that are there.
    pub tensors: u32,
    /// Tensors asked for.
    pub tensors_total: u32,
    /// Bytes that those there take of the device; 0 where weights are read in place.
    pub device_bytes: u64,
    /// Bytes that all asked for take of it.
    pub device_bytes_total: u64,
    /// Bytes a second since the request came; 0 before there is one.
    pub bytes_per_second: u64,
    /// Extensions.
    pub ext: Ext,
}

/// All weights asked for are there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadToDeviceEnd {
    /// Tensors, those among them that were there before.
    pub tensors: u32,
    /// Bytes that they take of the device; 0 where weights are read in place.
    pub device_bytes: u64,
    /// Microseconds it took.
    pub elapsed_us: u64,
    /// Extensions.
    pub ext: Ext,
}

/// Sends weights away from the device; what is needed is brought again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearCacheRequest {
    /// Whose.
    pub scope: CacheScope,
    /// Extensions.
    pub ext: Ext,
}

/// Whose weights are sent away.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CacheScope {
    /// Those of all models that are not pinned.
    #[default]
    All,
    /// Those of one model, by name, pinned or not.
    Model(String),
}

/// What left.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearCacheReply {
    /// Parts of models: embedding, layers, head.
    pub parts: u64,
    /// Bytes of the device's memory.
    pub device_bytes: u64,
    /// Extensions.
    pub ext: Ext,
}

/// What is wanted of a model's place on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Its weights leave only when they are told to.
    pub pinned: bool,
    /// Weights of models of a lower priority leave first.
    pub priority: u8,
    /// The embedding and so many first layers stay when others need room.
    pub layers_min: u32,
    /// Weights leave after the model was idle for so many seconds; 0: not for that.
    pub idle_s: u32,
}

/// Changes what is wanted for a model, which counts until it is unloaded; maps it where that is needed. What is `None` stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetRulesRequest {
    /// Its name.
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

/// What is wanted from now on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetRulesReply {
    /// All of it.
    pub rules: Rules,
    /// The request pinned it, and its file is to be locked in the machine's memory too; `Show` tells how far that is.
    pub host_pinned: bool,
    /// Why not, where the request pinned it.
    pub host_reason: String,
    /// Extensions.
    pub ext: Ext,
}

/// Asks to be told what happens to weights and models from now on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubscribeRequest {
    /// Extensions.
    pub ext: Ext,
}

/// What happened. The first one comes at once: what happens after it is told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubscribeItem {
    /// Events that are not told, because the client had no credit for too long.
    pub missed: u64,
    /// Those that are, in order; at most [`limits::EVENTS_MAX`].
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

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventEntry {
    /// What.
    pub kind: EventKind,
    /// Number of the model in `ResidencyReply`; 0 where it is about none.
    pub id: u64,
    /// Its name; empty where it is another user's.
    pub model: String,
    /// Of `Loaded` and `Evicted`: which part in the order of use, 0 for the embedding.
    pub part: u32,
    /// How many parts the model has; 0 where that is not known.
    pub parts: u32,
    /// Of `Loaded` and `Evicted`: its bytes on the device.
    pub device_bytes: u64,
    /// Of `DeviceLost` and `ModelPoisoned`: why.
    pub text: String,
    /// Extensions.
    pub ext: Ext,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventKind {
    /// The last tensor asked for of a part arrived.
    Loaded,
    /// A part left the device.
    Evicted,
    /// The device was lost.
    DeviceLost,
    /// A model was mapped.
    ModelMapped,
    /// It is mapped no more.
    ModelUnmapped,
    /// Its file lost bytes or changed while it was mapped.
    ModelPoisoned,
}

/// Asks what serving a model would take. Nothing is loaded; the model is mapped where that is needed to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanRequest {
    /// Its name.
    pub model: String,
    /// Tokens of the one sequence asked about, prompt and answer; 0: the longest allowed.
    pub context_tokens: u32,
    /// Extensions.
    pub ext: Ext,
}

/// What serving a model would take of its device. Bytes are of the device's memory; zeros where weights are read in place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanReply {
    /// Number of the device in `ResidencyReply`.
    pub device: u32,
    /// Tokens of the sequence that was planned for.
    pub context_tokens: u32,
    /// All weights.
    pub weight_bytes: u64,
    /// Those that are there.
    pub resident_bytes: u64,
    /// KV pages of the sequence.
    pub kv_bytes: u64,
    /// Activations that are not there yet.
    pub scratch_bytes: u64,
    /// What could be taken now.
    pub available_bytes: u64,
    /// Most that all may take together; 0 where weights are read in place.
    pub budget_bytes: u64,
    /// What other programs have.
    pub others_bytes: u64,
    /// How it would be served.
    pub fit: Fit,
    /// What would leave for it, the first to leave first; as many as fit.
    pub leaving: Vec<LeavingEntry>,
    /// Bytes of all that would leave.
    pub leaving_bytes: u64,
    /// Milliseconds to bring what is not there, by the rate of the loads so far; `None` before there were any.
    pub load_ms: Option<u64>,
    /// Sequences that wait now.
    pub queued: u32,
    /// Extensions.
    pub ext: Ext,
}

/// How a model would be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fit {
    /// All of its weights stay on the device.
    Whole,
    /// Its weights are larger than the room for them.
    Streamed(StreamedFit),
    /// Not at all: so many bytes are missing.
    No(u64),
}

/// Weights larger than the room for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamedFit {
    /// Bytes that stay.
    pub resident_bytes: u64,
    /// Bytes that come again with every step.
    pub step_bytes: u64,
}

/// A model's weights that would leave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeavingEntry {
    /// Number of the model in `ResidencyReply`.
    pub id: u64,
    /// Its name; empty where it is another user's.
    pub model: String,
    /// Bytes of them.
    pub device_bytes: u64,
}

/// Asks who has the devices' memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidencyRequest {
    /// Only models with a number above this one; 0: from the first on.
    pub after: u64,
    /// Extensions.
    pub ext: Ext,
}

/// Who has the devices' memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidencyReply {
    /// Every device.
    pub devices: Vec<DeviceMemory>,
    /// Models that have a place on one, by number, rising; as many as fit.
    pub models: Vec<ResidencyEntry>,
    /// There are more: to be asked for after the last one's number.
    pub more: bool,
    /// Extensions.
    pub ext: Ext,
}

/// A device's memory, by owner, in bytes; all zeros where weights are read in place. Counters run since the daemon's start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// `cpu`, or a kind of GPU.
    pub kind: String,
    /// Product name.
    pub device: String,
    /// Weights.
    pub weight_bytes: u64,
    /// KV pages.
    pub kv_bytes: u64,
    /// Activations and step arrays.
    pub scratch_bytes: u64,
    /// Where uploads lie before they are laid out.
    pub staging_bytes: u64,
    /// Recorded graphs.
    pub graph_bytes: u64,
    /// Taken from the driver: all of the above, and what is kept for the next who asks.
    pub taken_bytes: u64,
    /// Most that may be taken.
    pub budget_bytes: u64,
    /// What could be taken now.
    pub available_bytes: u64,
    /// Of the whole device.
    pub total_bytes: u64,
    /// Free on the whole device.
    pub free_bytes: u64,
    /// What other programs have.
    pub others_bytes: u64,
    /// Sequences admitted.
    pub sequences_running: u32,
    /// Sequences waiting.
    pub sequences_queued: u32,
    /// Rows that generated.
    pub decode_rows: u64,
    /// Rows of prompts.
    pub prefill_rows: u64,
    /// Tensors brought.
    pub loads: u64,
    /// Tensors asked for that were there.
    pub hits: u64,
    /// Bytes of the device's memory that were filled with weights.
    pub load_bytes: u64,
    /// Parts of models that left.
    pub evictions: u64,
    /// Bytes that they gave back.
    pub evicted_bytes: u64,
    /// Steps that waited for weights.
    pub load_waits: u64,
    /// How long, in all, in microseconds.
    pub load_wait_us: u64,
    /// Bytes a second of the loads so far; 0 before there were any.
    pub bytes_per_second: u64,
    /// Extensions.
    pub ext: Ext,
}

/// What a model has on a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidencyEntry {
    /// Its number, unique while the daemon runs.
    pub id: u64,
    /// Number of the device in the reply.
    pub device: u32,
    /// Its name; empty where it is another user's.
    pub model: String,
    /// One letter for each part in the order of use (embedding, layers, head): [`PART_ABSENT`], [`PART_LOADING`],
    /// [`PART_PARTIAL`] or [`PART_RESIDENT`].
    pub parts: String,
    /// Bytes of its weights.
    pub weight_bytes: u64,
    /// Bytes of its KV pages.
    pub kv_bytes: u64,
    /// Bytes of its activations.
    pub scratch_bytes: u64,
    /// What is wanted for it.
    pub rules: Rules,
    /// Sequences that run or wait.
    pub sequences: u32,
    /// Milliseconds since its last sequence ended; `None` while it has some.
    pub idle_ms: Option<u64>,
    /// Its place among those that make room, 1 for the first; 0 for one that is pinned.
    pub eviction_place: u32,
    /// How far the request is that brings its weights, whoever asked; of several the one that brings most.
    pub loading: Option<LoadingProgress>,
    /// Extensions.
    pub ext: Ext,
}

/// How far a load is that somebody asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadingProgress {
    /// Tensors that are there.
    pub tensors: u32,
    /// Tensors asked for.
    pub tensors_total: u32,
    /// Bytes that those there take of the device.
    pub device_bytes: u64,
    /// Bytes that all asked for take of it.
    pub device_bytes_total: u64,
}

/// Nothing of a part is there.
pub const PART_ABSENT: char = '.';
/// It is on its way.
pub const PART_LOADING: char = '>';
/// Some of its tensors are there, as of a layer whose other experts no token was sent to.
pub const PART_PARTIAL: char = '-';
/// All of it is there, or is read in place.
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
