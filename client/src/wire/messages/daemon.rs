//! Messages about the connection and the daemon itself.

use serde::{Deserialize, Serialize};

use super::Ext;
use crate::wire::validate::{any, extensions, limits, list, nested, numbers, text, validate};

/// Stops the stream's request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancel {
    /// Extensions.
    pub ext: Ext,
}

/// The client can take this many more items on the stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credit {
    /// Added to what the stream has left.
    pub items: u32,
    /// Extensions.
    pub ext: Ext,
}

/// Asks for an echo.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PingRequest {
    /// Echoed; at most [`limits::PING_BYTES_MAX`] bytes.
    pub payload: Vec<u8>,
    /// Extensions.
    pub ext: Ext,
}

/// The echo.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PingReply {
    /// The request's.
    pub payload: Vec<u8>,
    /// Extensions.
    pub ext: Ext,
}

/// Asks what the daemon speaks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InfoRequest {
    /// Extensions.
    pub ext: Ext,
}

/// What the daemon speaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InfoReply {
    /// Of the daemon.
    pub version: String,
    /// Requests it knows.
    pub ops: Vec<OpInfo>,
    /// What it allows.
    pub limits: Limits,
    /// Extensions.
    pub ext: Ext,
}

/// A request the daemon knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpInfo {
    /// Its number.
    pub op: u16,
    /// Its name.
    pub name: String,
}

/// What the daemon allows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Largest payload.
    pub frame_bytes_max: u32,
    /// Open streams of a connection.
    pub streams_max: u32,
    /// Descriptors of a frame.
    pub fds_max: u32,
    /// Items before the first grant.
    pub initial_credit: u32,
    /// Largest context of a sequence, in tokens.
    pub context_tokens_max: u32,
    /// Stop texts of a request.
    pub stop_texts_max: u32,
    /// Bytes of a stop text.
    pub stop_text_bytes_max: u32,
    /// `top_logprobs` of a request.
    pub top_logprobs_max: u32,
    /// Extensions.
    pub ext: Ext,
}

/// Asks which requests run or wait.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PsRequest {
    /// Only those with an id above this one; 0: from the first on.
    pub after: u64,
    /// Extensions.
    pub ext: Ext,
}

/// Requests that run or wait.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PsReply {
    /// Oldest first, which is by id, rising; as many as fit.
    pub sequences: Vec<SequenceEntry>,
    /// There are more: to be asked for after the last one's id.
    pub more: bool,
    /// Extensions.
    pub ext: Ext,
}

/// A request that runs or waits. Prompts and texts are never shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceEntry {
    /// Unique while the daemon runs.
    pub id: u64,
    /// Who asked.
    pub uid: u32,
    /// Model's name.
    pub model: String,
    /// Where it is.
    pub state: SequenceState,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// How many of them are computed.
    pub prefilled_tokens: u32,
    /// Tokens generated.
    pub generated_tokens: u32,
    /// Most tokens it may generate.
    pub max_tokens: u32,
    /// KV pages it holds.
    pub kv_pages: u32,
    /// Milliseconds since it arrived.
    pub age_ms: u64,
    /// Place in the queue from 1; 0 once admitted.
    pub queue_position: u32,
    /// Extensions.
    pub ext: Ext,
}

/// Where a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SequenceState {
    /// Waits for room.
    Queued,
    /// Its prompt is being computed.
    Prefill,
    /// Generates.
    Decode,
    /// Waits for its client's credit.
    Stalled,
}

/// Asks how the daemon is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusRequest {
    /// Extensions.
    pub ext: Ext,
}

/// How the daemon is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusReply {
    /// Of the daemon.
    pub version: String,
    /// Milliseconds since its start.
    pub uptime_ms: u64,
    /// Its process id, as it sees it.
    pub pid: u32,
    /// It takes no new work.
    pub draining: bool,
    /// Open connections.
    pub connections: u32,
    /// Models mapped.
    pub models_mapped: u32,
    /// Its devices.
    pub devices: Vec<DeviceStatus>,
    /// Resident memory that is no file's, in bytes.
    pub rss_anon_bytes: u64,
    /// Resident memory of mapped files, in bytes.
    pub rss_file_bytes: u64,
    /// What is done about the machine's memory.
    pub host: HostStatus,
    /// Extensions.
    pub ext: Ext,
}

/// What the daemon does about the machine's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    /// Bytes of models' files that are locked, or will be once they are read.
    pub locked_bytes: u64,
    /// Most bytes that may be, by the configuration; `RLIMIT_MEMLOCK` holds besides.
    pub lock_bytes_max: u64,
    /// Models that are to be locked and are not.
    pub locks_refused: u32,
    /// Why one of them is not; empty where there is none.
    pub reason: String,
    /// What tells the daemon that memory is short; empty where nothing does.
    pub pressure: String,
    /// How often it did.
    pub pressure_events: u64,
    /// Extensions.
    pub ext: Ext,
}

/// One device and its engine. Counters run since the daemon's start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// `cpu`, or a kind of GPU.
    pub kind: String,
    /// Product name.
    pub device: String,
    /// Instruction set in use.
    pub isa: String,
    /// Compute threads; 0 on a GPU.
    pub threads: u32,
    /// Type of activations in matrix products.
    pub activations: String,
    /// Type of the KV cache.
    pub kv_type: String,
    /// Sequences admitted.
    pub sequences_running: u32,
    /// Sequences waiting.
    pub sequences_queued: u32,
    /// KV pages in use.
    pub kv_pages_used: u32,
    /// KV pages there may be.
    pub kv_pages_max: u32,
    /// Bytes of the KV cache now.
    pub kv_bytes: u64,
    /// Steps run.
    pub steps: u64,
    /// Rows computed in them.
    pub rows: u64,
    /// Rows that generated.
    pub decode_rows: u64,
    /// Rows of prompts.
    pub prefill_rows: u64,
    /// Sequences that ended well.
    pub sequences_done: u64,
    /// Sequences that ended with an error.
    pub sequences_failed: u64,
    /// Sequences that were taken back, or that nobody read any more.
    pub sequences_cancelled: u64,
    /// Tensors brought to the device.
    pub tensors_loaded: u64,
    /// Tensors found there.
    pub tensor_hits: u64,
    /// Bytes of weights on the device; 0 where it computes on the mapping.
    pub device_bytes: u64,
    /// Sum over steps of the sequences in the step.
    pub step_sequences: u64,
    /// Extensions.
    pub ext: Ext,
}

/// Key of the extension with [notes](DeviceStatus::notes): UTF-8, lines of a name, a tab and a value.
const NOTES_KEY: u16 = 1;

/// Names and values of an extension.
fn notes_of(ext: &Ext) -> Vec<(&str, &str)> {
    let notes = ext.iter().find(|(key, _)| *key == NOTES_KEY);
    let text = notes.and_then(|(_, bytes)| std::str::from_utf8(bytes).ok()).unwrap_or_default();
    text.lines().filter_map(|line| line.split_once('\t')).collect()
}

/// The extension for these notes, as many as fit it.
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

impl StatusReply {
    /// What else is to be known of the daemon, as names and values: `you may`, what the policy allows who asks; `kept`, what
    /// outlives a restart.
    pub fn notes(&self) -> Vec<(&str, &str)> {
        notes_of(&self.ext)
    }

    /// The extension for these notes, as many as fit it.
    pub fn notes_ext<'a>(notes: impl Iterator<Item = (&'a str, String)>) -> Ext {
        notes_ext(notes)
    }
}

impl DeviceStatus {
    /// What else is to be known of the device, as names and values: driver, memory, why it is no other device.
    pub fn notes(&self) -> Vec<(&str, &str)> {
        notes_of(&self.ext)
    }

    /// The extension for these notes, as many as fit it.
    pub fn notes_ext<'a>(notes: impl Iterator<Item = (&'a str, String)>) -> Ext {
        notes_ext(notes)
    }
}

/// A request that only fails, with the code asked for: lets a client test its error paths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailRequest {
    /// A [`crate::wire::ErrorCode`]; others are answered with `InvalidArgument`.
    pub code: u16,
    /// Extensions.
    pub ext: Ext,
}

/// A named value of an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetailEntry {
    /// Name.
    pub key: String,
    /// Value as text.
    pub value: String,
}

validate!(Cancel { ext: extensions });
validate!(Credit { items: any, ext: extensions });
validate!(PingRequest { payload: numbers(limits::PING_BYTES_MAX), ext: extensions });
validate!(PingReply { payload: numbers(limits::PING_BYTES_MAX), ext: extensions });
validate!(InfoRequest { ext: extensions });
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
