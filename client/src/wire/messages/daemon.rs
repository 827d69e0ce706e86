//! Messages about the connection and the daemon itself.

use serde::{Deserialize, Serialize};

use super::{Ext, number};
use crate::wire::validate::{
    Validate, Violation, any, extensions, limits, list, nested, numbers, text, validate,
};

/// Stops the stream's request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancel {
    /// Extensions.
    pub ext: Ext,
}

/// Lets the server send more items on the stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credit {
    /// Items, added to the stream's remaining credit.
    pub items: u32,
    /// Extensions.
    pub ext: Ext,
}

/// Asks for an echo.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PingRequest {
    /// Bytes to echo, at most [`limits::PING_BYTES_MAX`].
    pub payload: Vec<u8>,
    /// Extensions.
    pub ext: Ext,
}

/// The echo.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PingReply {
    /// The request's payload.
    pub payload: Vec<u8>,
    /// Extensions.
    pub ext: Ext,
}

/// Asks for the daemon's version, requests and limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InfoRequest {
    /// Extensions.
    pub ext: Ext,
}

/// The daemon's version, requests and limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InfoReply {
    /// Version of the daemon.
    pub version: String,
    /// The requests that it knows.
    pub ops: Vec<OpInfo>,
    /// Its limits.
    pub limits: Limits,
    /// Extensions.
    pub ext: Ext,
}

/// Key of [`InfoReply`]'s `ext`: the users that the client may act for, as the first uid and their number, both u32.
pub const EXT_INFO_SUBORDINATES: u16 = 1;

/// Uids of users that another user may act for, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subordinates {
    /// The uid of the user of number 0.
    pub first: u32,
    /// How many they are.
    pub count: u32,
}

impl InfoReply {
    /// The users that the client may act for, as [`ClientHello::acting_as`](crate::wire::ClientHello::acting_as) numbers them.
    pub fn subordinates(&self) -> Option<Subordinates> {
        let (_, bytes) = self.ext.iter().find(|(key, _)| *key == EXT_INFO_SUBORDINATES)?;
        let (first, count) = bytes.as_slice().split_first_chunk::<4>()?;
        let number = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
        let all = Subordinates { first: number(first), count: number(count.try_into().ok()?) };
        Some(all).filter(|all| all.count > 0)
    }

    /// Encodes the users that the client may act for.
    pub fn subordinates_ext(all: Option<Subordinates>) -> Ext {
        let bytes = |all: Subordinates| [all.first.to_le_bytes(), all.count.to_le_bytes()].concat();
        all.map(|all| (EXT_INFO_SUBORDINATES, bytes(all))).into_iter().collect()
    }
}

/// A request that the daemon knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpInfo {
    /// The op's number.
    pub op: u16,
    /// The op's name.
    pub name: String,
}

/// Limits of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of the largest payload.
    pub frame_bytes_max: u32,
    /// Most open streams of a connection.
    pub streams_max: u32,
    /// Most descriptors of a frame.
    pub fds_max: u32,
    /// Items that may be sent before the first grant.
    pub initial_credit: u32,
    /// Largest context of a sequence, in tokens.
    pub context_tokens_max: u32,
    /// Most stop texts of a request.
    pub stop_texts_max: u32,
    /// Most bytes of a stop text.
    pub stop_text_bytes_max: u32,
    /// Largest `top_logprobs` of a request.
    pub top_logprobs_max: u32,
    /// Extensions.
    pub ext: Ext,
}

/// Asks for the running and waiting requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PsRequest {
    /// Only requests with an id above this one; 0: from the first.
    pub after: u64,
    /// Extensions.
    pub ext: Ext,
}

/// Running and waiting requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PsReply {
    /// By rising id, so oldest first; as many as fit.
    pub sequences: Vec<SequenceEntry>,
    /// There are more: ask again with the last id.
    pub more: bool,
    /// Extensions.
    pub ext: Ext,
}

/// A running or waiting request. Prompts and answers are never shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceEntry {
    /// Unique while the daemon runs; neighbours in time are none in number.
    pub id: u64,
    /// Uid of the client.
    pub uid: u32,
    /// The model's name.
    pub model: String,
    /// The request's state.
    pub state: SequenceState,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens that are computed.
    pub prefilled_tokens: u32,
    /// Tokens generated so far.
    pub generated_tokens: u32,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// KV pages that it holds.
    pub kv_pages: u32,
    /// Milliseconds since it arrived.
    pub age_ms: u64,
    /// Place in the queue from 1; 0 once admitted.
    pub queue_position: u32,
    /// Extensions.
    pub ext: Ext,
}

/// State of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SequenceState {
    /// Waits for admission.
    Queued,
    /// Computes its prompt.
    Prefill,
    /// Generates tokens.
    Decode,
    /// Waits for its client's credit.
    Stalled,
    /// Its prompt is being tokenised or rendered; its counts are 0.
    Preparing,
}

/// Cancels requests for tokens, waiting or running: the client's own, or for an administrator anybody's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RequestScope {
    /// The request of this id.
    Id(u64),
    /// All requests of this uid.
    Uid(u32),
}

/// Cancels requests of any connection. Each ends with `Cancelled`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CancelRequestsRequest {
    /// The requests to cancel.
    pub scope: RequestScope,
    /// Extensions.
    pub ext: Ext,
}

/// The cancelled requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CancelRequestsReply {
    /// Number of requests cancelled.
    pub cancelled: u32,
    /// Extensions.
    pub ext: Ext,
}

/// Key of [`SequenceEntry`]'s `ext`: device time charged for the request in microseconds, as a little-endian u64.
pub const EXT_DEVICE_TIME: u16 = 1;

/// Key of [`SequenceEntry`]'s `ext`: prompt tokens whose keys and values were there already, as a little-endian u64;
/// absent for none.
pub const EXT_SEQUENCE_REUSED: u16 = 2;

impl SequenceEntry {
    /// Device time charged for the request in microseconds; `None` if the daemon does not say.
    pub fn device_time_us(&self) -> Option<u64> {
        number(&self.ext, EXT_DEVICE_TIME)
    }

    /// Prompt tokens whose keys and values were there already; 0 if the daemon does not say.
    pub fn reused_tokens(&self) -> u64 {
        number(&self.ext, EXT_SEQUENCE_REUSED).unwrap_or(0)
    }
}

/// Asks for the daemon's state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusRequest {
    /// Extensions.
    pub ext: Ext,
}

/// The daemon's state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusReply {
    /// Version of the daemon.
    pub version: String,
    /// Milliseconds since its start.
    pub uptime_ms: u64,
    /// Its process id, as it sees it.
    pub pid: u32,
    /// The daemon refuses new work.
    pub draining: bool,
    /// Open connections.
    pub connections: u32,
    /// Number of mapped models.
    pub models_mapped: u32,
    /// The devices.
    pub devices: Vec<DeviceStatus>,
    /// Resident memory without files, in bytes.
    pub rss_anon_bytes: u64,
    /// Resident memory of mapped files, in bytes.
    pub rss_file_bytes: u64,
    /// State of locks and memory pressure.
    pub host: HostStatus,
    /// Extensions.
    pub ext: Ext,
}

/// The daemon's locks of model files, and the memory pressure it sees.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    /// Bytes of model files that are locked, or will be once they are read.
    pub locked_bytes: u64,
    /// Most bytes to lock, by the configuration; `RLIMIT_MEMLOCK` applies too.
    pub lock_bytes_max: u64,
    /// Models whose lock was refused.
    pub locks_refused: u32,
    /// Why one of them was refused; empty if none was.
    pub reason: String,
    /// The source of memory pressure notices; empty if there is none.
    pub pressure: String,
    /// Number of memory pressure notices.
    pub pressure_events: u64,
    /// Extensions.
    pub ext: Ext,
}

/// One device and its engine. Counters start with the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// `cpu`, or a kind of GPU.
    pub kind: String,
    /// Product name of the device.
    pub device: String,
    /// Instruction set that the kernels use.
    pub isa: String,
    /// Compute threads; 0 on a GPU.
    pub threads: u32,
    /// Type of activations in matrix products.
    pub activations: String,
    /// Type of the KV cache.
    pub kv_type: String,
    /// Admitted sequences.
    pub sequences_running: u32,
    /// Waiting sequences.
    pub sequences_queued: u32,
    /// KV pages in use.
    pub kv_pages_used: u32,
    /// Most KV pages.
    pub kv_pages_max: u32,
    /// Current bytes of the KV cache.
    pub kv_bytes: u64,
    /// Steps run.
    pub steps: u64,
    /// Rows computed in all steps.
    pub rows: u64,
    /// Rows that generated tokens.
    pub decode_rows: u64,
    /// Rows of prompts.
    pub prefill_rows: u64,
    /// Sequences that ended without an error.
    pub sequences_done: u64,
    /// Sequences that ended with an error.
    pub sequences_failed: u64,
    /// Sequences that were cancelled, or whose client disconnected.
    pub sequences_cancelled: u64,
    /// Tensors loaded to the device.
    pub tensors_loaded: u64,
    /// Tensors that a step asked for and that were already resident.
    pub tensor_hits: u64,
    /// Bytes of weights on the device; 0 if it computes on the mapping.
    pub device_bytes: u64,
    /// Sum over all steps of the sequences in the step.
    pub step_sequences: u64,
    /// Extensions.
    pub ext: Ext,
}

/// Key of the extension with [notes](DeviceStatus::notes): UTF-8, lines of a name, a tab and a value.
const NOTES_KEY: u16 = 1;

/// Names and values in an extension.
fn notes_of(ext: &Ext) -> Vec<(&str, &str)> {
    let notes = ext.iter().find(|(key, _)| *key == NOTES_KEY);
    let text = notes.and_then(|(_, bytes)| std::str::from_utf8(bytes).ok()).unwrap_or_default();
    text.lines().filter_map(|line| line.split_once('\t')).collect()
}

/// Encodes notes into an extension, as many as fit.
fn notes_ext<'a>(notes: impl Iterator<Item = (&'a str, String)>) -> Ext {
    let mut text = String::new();
    for (name, value) in notes {
        let line = format!("{name}\t{}\n", value.replace(['\n', '\t'], " "));
        if text.len() + line.len() > limits::EXT_BYTES_MAX {
            break;
        }
        text.push_str(&line);
    }
    if text.is_empty() { Ext::new() } else { vec![(NOTES_KEY, text.into_bytes())] }
}

/// Keys of [`DeviceStatus`]'s `ext`, each with a little-endian u64; absent for 0. Prompt tokens that no step computed,
/// because their keys and values were there.
pub const EXT_DEVICE_REUSED: u16 = 2;
/// Bytes of cached KV pages: of known prefixes that no request has now.
pub const EXT_DEVICE_CACHED: u16 = 3;
/// Cached KV pages that went because others needed their bytes.
pub const EXT_DEVICE_PAGES_EVICTED: u16 = 4;
/// Tokens that steps computed for drafts.
pub const EXT_DEVICE_DRAFTED: u16 = 5;
/// Those of them that became an answer's.
pub const EXT_DEVICE_ACCEPTED: u16 = 6;
/// Recurrent states of requests.
pub const EXT_DEVICE_STATES: u16 = 7;
/// Cached recurrent states: of known prefixes that no request has now.
pub const EXT_DEVICE_STATES_CACHED: u16 = 8;
/// Bytes of these.
pub const EXT_DEVICE_STATES_CACHED_BYTES: u16 = 9;

/// Most bytes of the KV cache, for all models together.
pub const EXT_DEVICE_KV_BUDGET: u16 = 10;
/// Bytes of these that requests have in pages and recurrent states, each counted once.
pub const EXT_DEVICE_KV_HELD: u16 = 11;
/// Tokens of a KV page.
pub const EXT_DEVICE_PAGE_TOKENS: u16 = 12;

/// Key of [`StatusReply`]'s `ext`: number of lost threads, as a u32; absent for none.
pub const EXT_STATUS_LOST_THREADS: u16 = 2;

impl StatusReply {
    /// Threads that wait for a file system whose server does not answer.
    pub fn lost_threads(&self) -> u32 {
        let found = self.ext.iter().find(|(key, _)| *key == EXT_STATUS_LOST_THREADS);
        found.and_then(|(_, bytes)| Some(u32::from_le_bytes(bytes.as_slice().try_into().ok()?))).unwrap_or(0)
    }

    /// More facts about the daemon, as names and values. `you may` has the rights that the policy gives the client.
    /// `kept` is the state that survives a restart. `copies` are models that are copies of their files in memory.
    /// `lost threads` names file systems that do not answer.
    pub fn notes(&self) -> Vec<(&str, &str)> {
        notes_of(&self.ext)
    }

    /// Encodes notes into an extension, as many as fit.
    pub fn notes_ext<'a>(notes: impl Iterator<Item = (&'a str, String)>) -> Ext {
        notes_ext(notes)
    }
}

impl DeviceStatus {
    /// Prompt tokens that no step computed, because their keys and values were there.
    pub fn reused_tokens(&self) -> u64 {
        number(&self.ext, EXT_DEVICE_REUSED).unwrap_or(0)
    }

    /// Tokens that steps computed for drafts; `decode_rows` has those that became an answer's, [`DeviceStatus::accepted_tokens`].
    pub fn drafted_tokens(&self) -> u64 {
        number(&self.ext, EXT_DEVICE_DRAFTED).unwrap_or(0)
    }

    /// Drafted tokens that became an answer's.
    pub fn accepted_tokens(&self) -> u64 {
        number(&self.ext, EXT_DEVICE_ACCEPTED).unwrap_or(0)
    }

    /// Bytes of cached KV pages and recurrent states; `kv_bytes` includes them, `kv_pages_used` does not.
    pub fn kv_cached_bytes(&self) -> u64 {
        number(&self.ext, EXT_DEVICE_CACHED).unwrap_or(0)
    }

    /// Recurrent states that requests have, some of them together; `kv_bytes` includes theirs.
    pub fn states_used(&self) -> u64 {
        number(&self.ext, EXT_DEVICE_STATES).unwrap_or(0)
    }

    /// Cached recurrent states, which no request has.
    pub fn states_cached(&self) -> u64 {
        number(&self.ext, EXT_DEVICE_STATES_CACHED).unwrap_or(0)
    }

    /// Bytes of cached recurrent states; [`DeviceStatus::kv_cached_bytes`] includes them.
    pub fn states_cached_bytes(&self) -> u64 {
        number(&self.ext, EXT_DEVICE_STATES_CACHED_BYTES).unwrap_or(0)
    }

    /// Most bytes of the KV cache, for all models together; 0 if the daemon does not say.
    pub fn kv_budget_bytes(&self) -> u64 {
        number(&self.ext, EXT_DEVICE_KV_BUDGET).unwrap_or(0)
    }

    /// Bytes of these that requests have, each counted once. Known prefixes that no request has are not among them.
    pub fn kv_held_bytes(&self) -> u64 {
        number(&self.ext, EXT_DEVICE_KV_HELD).unwrap_or(0)
    }

    /// Tokens of a KV page; 0 if the daemon does not say.
    pub fn page_tokens(&self) -> u64 {
        number(&self.ext, EXT_DEVICE_PAGE_TOKENS).unwrap_or(0)
    }

    /// Cached KV pages that went because others needed their bytes.
    pub fn kv_pages_evicted(&self) -> u64 {
        number(&self.ext, EXT_DEVICE_PAGES_EVICTED).unwrap_or(0)
    }

    /// More facts about the device, as names and values: driver, memory, why it and no other device was chosen.
    pub fn notes(&self) -> Vec<(&str, &str)> {
        notes_of(&self.ext)
    }

    /// Encodes notes into an extension, as many as fit.
    pub fn notes_ext<'a>(notes: impl Iterator<Item = (&'a str, String)>) -> Ext {
        notes_ext(notes)
    }
}

/// A request that always fails with the given code, so that a client can test its error paths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailRequest {
    /// A [`crate::wire::ErrorCode`]; for any other number the daemon answers `InvalidArgument`.
    pub code: u16,
    /// Extensions.
    pub ext: Ext,
}

/// A named value of an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetailEntry {
    /// Name of the value.
    pub key: String,
    /// Value as text.
    pub value: String,
}

validate!(Cancel { ext: extensions });
validate!(Credit { items: any, ext: extensions });
validate!(PingRequest { payload: numbers(limits::PING_BYTES_MAX), ext: extensions });
validate!(PingReply { payload: numbers(limits::PING_BYTES_MAX), ext: extensions });
validate!(InfoRequest { ext: extensions });
impl Validate for RequestScope {
    fn validate(&self) -> Result<(), Violation> {
        Ok(())
    }
}

validate!(CancelRequestsRequest { scope: nested, ext: extensions });
validate!(CancelRequestsReply { cancelled: any, ext: extensions });
validate!(InfoReply {
    version: text(limits::LABEL_BYTES_MAX),
    ops: list(limits::OPS_MAX),
    limits: nested,
    ext: extensions,
});
validate!(OpInfo { op: any, name: text(limits::LABEL_BYTES_MAX) });
validate!(Limits {
    frame_bytes_max: any,
    streams_max: any,
    fds_max: any,
    initial_credit: any,
    context_tokens_max: any,
    stop_texts_max: any,
    stop_text_bytes_max: any,
    top_logprobs_max: any,
    ext: extensions,
});
validate!(PsRequest { after: any, ext: extensions });
validate!(PsReply { sequences: list(limits::SEQUENCES_MAX), more: any, ext: extensions });
validate!(SequenceEntry {
    id: any,
    uid: any,
    model: text(limits::NAME_BYTES_MAX),
    state: any,
    prompt_tokens: any,
    prefilled_tokens: any,
    generated_tokens: any,
    max_tokens: any,
    kv_pages: any,
    age_ms: any,
    queue_position: any,
    ext: extensions,
});
validate!(StatusRequest { ext: extensions });
validate!(StatusReply {
    version: text(limits::LABEL_BYTES_MAX),
    uptime_ms: any,
    pid: any,
    draining: any,
    connections: any,
    models_mapped: any,
    devices: list(limits::DEVICES_MAX),
    rss_anon_bytes: any,
    rss_file_bytes: any,
    host: nested,
    ext: extensions,
});
validate!(HostStatus {
    locked_bytes: any,
    lock_bytes_max: any,
    locks_refused: any,
    reason: text(limits::VALUE_BYTES_MAX),
    pressure: text(limits::LABEL_BYTES_MAX),
    pressure_events: any,
    ext: extensions,
});
validate!(DeviceStatus {
    kind: text(limits::LABEL_BYTES_MAX),
    device: text(limits::LABEL_BYTES_MAX),
    isa: text(limits::LABEL_BYTES_MAX),
    threads: any,
    activations: text(limits::LABEL_BYTES_MAX),
    kv_type: text(limits::LABEL_BYTES_MAX),
    sequences_running: any,
    sequences_queued: any,
    kv_pages_used: any,
    kv_pages_max: any,
    kv_bytes: any,
    steps: any,
    rows: any,
    decode_rows: any,
    prefill_rows: any,
    sequences_done: any,
    sequences_failed: any,
    sequences_cancelled: any,
    tensors_loaded: any,
    tensor_hits: any,
    device_bytes: any,
    step_sequences: any,
    ext: extensions,
});
validate!(FailRequest { code: any, ext: extensions });
validate!(DetailEntry { key: text(limits::LABEL_BYTES_MAX), value: text(limits::VALUE_BYTES_MAX) });
