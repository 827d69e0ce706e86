//! Every payload of the protocol: bincode over serde types. `PROTOCOL.md` describes each byte.
//!
//! Rules (each has a test): no usize, no floats below 32 bits, no maps, no recursion, no elements of size zero, no serde
//! attributes that bincode cannot keep; every request and reply ends in `ext`; enum variants are only appended.

use serde::{Deserialize, Serialize};

/// Room to grow: `(key, bytes)` pairs at the end of every message. A key with [`EXT_CRITICAL`] set that is not known
/// fails the request; other unknown keys are ignored.
pub type Ext = Vec<(u16, Vec<u8>)>;

/// High bit of an extension key: must be understood.
pub const EXT_CRITICAL: u16 = 0x8000;

/// What a frame carries. Numbers are stable; requests below 0x8000, replies above.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Op {
    /// Client: stop the stream's request. Empty payload; no reply of its own: the stream ends with its `Error` or `End`.
    Cancel = 1,
    /// Client: [`Credit`].
    Credit = 2,
    Ping = 16,
    Info = 17,
    List = 18,
    Show = 19,
    Load = 20,
    Unload = 21,
    Ps = 22,
    Status = 23,
    Tokenize = 24,
    Detokenize = 25,
    Generate = 26,
    /// Client: [`FailRequest`], answered by an error of the asked code.
    Fail = 27,
    /// Server: the whole answer; its type is that of the request's op.
    Reply = 0x8000,
    /// Server: [`GenerateItem`], one of several; takes one credit.
    Item = 0x8001,
    /// Server: [`GenerateEnd`], after the items.
    End = 0x8002,
    /// Server: [`WireError`]; ends the stream, or on stream 0 the connection.
    Error = 0x8003,
}

/// `Credit`: the client can take this many more items on the stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Credit { pub items: u32, pub ext: Ext }

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PingRequest { /// Echoed; at most 256 bytes.
    pub payload: Vec<u8>, pub ext: Ext }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PingReply { pub payload: Vec<u8>, pub ext: Ext }

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InfoRequest { pub ext: Ext }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InfoReply { pub version: String, pub ops: Vec<OpInfo>, pub limits: Limits, pub ext: Ext }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpInfo { pub op: u16, pub name: String }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    pub frame_bytes_max: u32, pub streams_max: u32, pub fds_max: u32, pub initial_credit: u32,
    /// Largest context of a sequence, in tokens.
    pub context_tokens_max: u32,
    pub stop_texts_max: u32, pub stop_text_bytes_max: u32, pub top_logprobs_max: u32 , pub ext: Ext
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ListRequest { pub ext: Ext }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ListReply { pub models: Vec<ModelSummary>, pub ext: Ext }
/// A model known by name. Fields known only once it is mapped are empty or 0 before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSummary {
    pub name: String, pub state: ModelState, pub file_bytes: u64,
    pub architecture: String,
    /// Requests running or waiting.
    pub sequences: u32,
    /// Why, when `state` is `Poisoned` or `Unusable`.
    pub reason: String, pub ext: Ext,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelState { Registered, Mapped, Draining, Poisoned, Unusable }

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShowRequest { pub model: String, /// Also every metadata value and tensor, else only the summary fields.
    pub full: bool, pub ext: Ext }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShowReply {
    pub summary: ModelSummary, pub gguf_version: u32, pub parameters: u64, pub weight_bytes: u64, pub context_length: u32,
    pub hidden: u32, pub layers: u32, pub heads: u32, pub kv_heads: u32, pub head_dim: u32, pub ffn: u32, pub vocab: u32,
    pub tokenizer: String, pub chat_template: bool, pub end_of_generation: Vec<u32>,
    /// Tensor types and how many tensors have each.
    pub types: Vec<TypeCount>,
    /// With `full`: key, value as text (arrays and long values cut short and said so).
    pub metadata: Vec<MetadataEntry>,
    /// With `full`.
    pub tensors: Vec<TensorEntry>, pub ext: Ext,
}
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TypeCount { pub dtype: String, pub tensors: u32, pub bytes: u64 }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetadataEntry { pub key: String, pub kind: String, pub value: String }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorEntry { pub name: String, pub dtype: String, pub dims: Vec<u64>, pub offset_bytes: u64, pub bytes: u64 }

/// Maps a model: by name, or the file whose descriptor comes with the frame (then `name` is the name to give it).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadRequest { pub name: String, /// The frame carries one file descriptor.
    pub by_descriptor: bool, /// Client-chosen number: a repeat of it does nothing twice.
    pub request_id: u128, pub ext: Ext }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadReply { pub summary: ModelSummary, /// False when it was mapped already.
    pub mapped_now: bool, pub elapsed_us: u64, pub ext: Ext }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UnloadRequest { pub name: String, pub request_id: u128, pub ext: Ext }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UnloadReply { /// False when it was not mapped.
    pub was_mapped: bool, /// Requests that still run on it; it goes when they end.
    pub draining_sequences: u32, pub ext: Ext }

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PsRequest { pub ext: Ext }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PsReply { pub sequences: Vec<SequenceEntry>, pub ext: Ext }
/// A request that runs or waits. Prompts and texts are never shown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SequenceEntry {
    pub id: u64, pub uid: u32, pub model: String, pub state: SequenceState, pub prompt_tokens: u32, pub prefilled_tokens: u32,
    pub generated_tokens: u32, pub max_tokens: u32, pub kv_pages: u32, pub age_ms: u64, /// Place in the queue from 1; 0 once admitted.
    pub queue_position: u32, pub ext: Ext,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SequenceState { Queued, Prefill, Decode, Stalled }

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatusRequest { pub ext: Ext }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatusReply {
    pub version: String, pub uptime_ms: u64, pub pid: u32, pub draining: bool, pub connections: u32, pub models_mapped: u32,
    pub devices: Vec<DeviceStatus>,
    /// Rss of the daemon's memory that is no file's, in bytes.
    pub rss_anon_bytes: u64,
    /// Rss of mapped files, in bytes.
    pub rss_file_bytes: u64, pub ext: Ext,
}
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceStatus {
    pub kind: String, pub device: String, pub isa: String, pub threads: u32, pub activations: String, pub kv_type: String,
    pub sequences_running: u32, pub sequences_queued: u32, pub kv_pages_used: u32, pub kv_pages_max: u32, pub kv_bytes: u64,
    /// Counters since start.
    pub steps: u64, pub rows: u64, pub decode_rows: u64, pub prefill_rows: u64, pub sequences_done: u64, pub sequences_failed: u64,
    pub tensors_loaded: u64, pub tensor_hits: u64, pub device_bytes: u64, /// Sequence-steps: sum over steps of sequences in the step.
    pub step_sequences: u64, pub ext: Ext,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenizeRequest { pub model: String, pub text: String, pub add_special: bool, pub parse_special: bool, pub ext: Ext }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenizeReply { pub ids: Vec<u32>, pub ext: Ext }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DetokenizeRequest { pub model: String, pub ids: Vec<u32>, pub show_special: bool, pub ext: Ext }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DetokenizeReply { pub text: String, pub ext: Ext }

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    pub model: String, pub prompt: Prompt,
    /// 0: to the end of the context.
    pub max_tokens: u32,
    pub sampling: SamplingOptions,
    pub stop: Vec<String>,
    /// Go on past end-of-generation tokens.
    pub ignore_eog: bool,
    /// Fails after this many ms, queue time counted; 0: no deadline.
    pub timeout_ms: u32,
    pub request_id: u128, pub ext: Ext,
}
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Prompt {
    /// Text as it is; beginning-of-sequence is added where the file asks for it; special tokens are not recognised in it.
    Text(String),
    /// Token ids as they are; nothing is added.
    Ids(Vec<u32>),
    /// Messages, put through the model's chat template with the generation prompt added.
    Chat(Vec<ChatMessage>),
}
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage { pub role: String, pub content: String }
/// Ranges are checked: temperature 0..=100, top_p and min_p 0..=1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingOptions {
    /// 0 is greedy.
    pub temperature: f32, /// 0 keeps all.
    pub top_k: u32, /// 1 keeps all.
    pub top_p: f32, /// 0 drops none.
    pub min_p: f32,
    /// None: a random one, told in `GenerateEnd`.
    pub seed: Option<u64>,
    /// 0..=20.
    pub top_logprobs: u32,
}
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateItem {
    pub ids: Vec<u32>, /// Ends on a character's end.
    pub text: String, /// Empty without `top_logprobs`.
    pub logprobs: Vec<TokenLogprob>,
    /// The prompt's ids, in the first item only.
    pub prompt_ids: Vec<u32>, pub ext: Ext,
}
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob { pub logprob: f32, pub top: Vec<TopToken> }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopToken { pub id: u32, pub logprob: f32 }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateEnd {
    pub stop_reason: StopReason, /// Text not sent in an item.
    pub text: String, pub usage: Usage, pub timings: Timings, pub seed: u64, pub ext: Ext,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason { EndOfGeneration, MaxTokens, ContextFull, StopText }
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Usage { pub prompt_tokens: u32, pub generated_tokens: u32 }
/// In microseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timings { pub queue_us: u64, pub load_us: u64, pub prefill_us: u64, pub decode_us: u64 }

/// A request that only fails, with the code asked for: lets a client test its error paths.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FailRequest { pub code: u16, pub ext: Ext }

/// Why a request, or on stream 0 the connection, failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WireError {
    /// [`ErrorCode`] as a number; unknown numbers are to be taken by their class (hundreds).
    pub code: u16,
    pub retryable: bool,
    /// When `retryable`: not before this.
    pub retry_after_ms: u32,
    /// What happened, with the numbers, and what to do; at most 512 bytes.
    pub message: String,
    /// Named values, at most 16.
    pub detail: Vec<DetailEntry>, pub ext: Ext,
}
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DetailEntry { pub key: String, pub value: String }

/// Error numbers, stable forever. 1xx protocol (the connection closes), 2xx request, 3xx capacity, 4xx model, 5xx device,
/// 9xx internal.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum ErrorCode {
    NotProtocol = 100, UnsupportedMajor = 101, FrameTooLong = 102, BadFrame = 103, BadStream = 104, TooManyStreams = 105,
    BadDescriptors = 106, HandshakeTimeout = 107, FrameTimeout = 108, OutputOverflow = 109, BadChecksum = 110,
    PeerRefused = 111,
    UnknownOp = 200, BadPayload = 201, LimitExceeded = 202, UnknownExtension = 203, InvalidArgument = 204,
    PromptTooLong = 205, TokenOutOfRange = 206, EmptyPrompt = 207, NoChatTemplate = 208, TemplateFailed = 209,
    Cancelled = 210, DeadlineExceeded = 211, Forbidden = 212, SlowReader = 213,
    Busy = 300, Quota = 301, ServerDraining = 302, Unavailable = 303, DoesNotFit = 304,
    ModelNotFound = 400, ModelCorrupt = 401, ModelChanged = 402, ModelUnsupported = 403, NotAModelFile = 404,
    DeviceFailed = 500, OutOfMemory = 501,
    Internal = 900,
}
