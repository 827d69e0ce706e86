//! Messages about models and their tokenizers.

use serde::{Deserialize, Serialize};

use super::Ext;
use crate::wire::validate::{any, extensions, limits, list, nested, numbers, text, validate};

/// Asks for the models known by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListRequest {
    /// Only those with a name after this one; empty: from the first on.
    pub after: String,
    /// Extensions.
    pub ext: Ext,
}

/// The models known by name to the caller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListReply {
    /// By name, rising; as many as fit.
    pub models: Vec<ModelSummary>,
    /// There are more: to be asked for after the last one's name.
    pub more: bool,
    /// Extensions.
    pub ext: Ext,
}

/// A model known by name. What is known only once it is mapped is empty or 0 before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSummary {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub state: ModelState,
    /// Size of its file.
    pub file_bytes: u64,
    /// `general.architecture`.
    pub architecture: String,
    /// Requests running or waiting.
    pub sequences: u32,
    /// Why, when `state` is `Poisoned` or `Unusable`.
    pub reason: String,
    /// Extensions.
    pub ext: Ext,
}

/// Where a model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelState {
    /// Known by name; nothing is read.
    Registered,
    /// Serves requests.
    Mapped,
    /// Takes no new requests; goes when those that run end.
    Draining,
    /// Its file failed while mapped.
    Poisoned,
    /// It was tried and cannot be served.
    Unusable,
}

/// Asks about one model; maps it where that is needed to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShowRequest {
    /// Its name.
    pub model: String,
    /// Also metadata and tensors, as many as fit a reply.
    pub full: bool,
    /// With `full`: leave out this many metadata values, which came before.
    pub skip_metadata: u32,
    /// With `full`: leave out this many tensors, which came before.
    pub skip_tensors: u32,
    /// Extensions.
    pub ext: Ext,
}

/// About one model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShowReply {
    /// In short.
    pub summary: ModelSummary,
    /// Of the file.
    pub gguf_version: u32,
    /// Weights, counted.
    pub parameters: u64,
    /// Weights, in bytes.
    pub weight_bytes: u64,
    /// Context it was trained for, in tokens.
    pub context_length: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Layers.
    pub layers: u32,
    /// Attention heads.
    pub heads: u32,
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Width of the feed-forward network.
    pub ffn: u32,
    /// Tokens.
    pub vocab: u32,
    /// Kind of tokenizer.
    pub tokenizer: String,
    /// The file has a chat template.
    pub chat_template: bool,
    /// Tokens that end an answer.
    pub end_of_generation: Vec<u32>,
    /// Tensor types and how many tensors have each.
    pub types: Vec<TypeCount>,
    /// Metadata values in the file.
    pub metadata_total: u32,
    /// Tensors in the file.
    pub tensors_total: u32,
    /// With `full`: in file order, after those left out; ask again for the rest.
    pub metadata: Vec<MetadataEntry>,
    /// With `full`: in file order, after those left out; ask again for the rest.
    pub tensors: Vec<TensorEntry>,
    /// Its files in the machine's memory.
    pub host: HostMemory,
    /// Extensions.
    pub ext: Ext,
}

/// A model's files in the machine's memory, as the kernel counts them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostMemory {
    /// What is to be kept there.
    pub wanted: Residency,
    /// How that went.
    pub state: PagesState,
    /// Length of the mappings.
    pub mapped_bytes: u64,
    /// Of it, what is in the daemon's memory, in whole pages.
    pub resident_bytes: u64,
    /// Of that, what is locked.
    pub locked_bytes: u64,
    /// Bytes read ahead so far.
    pub read_bytes: u64,
    /// What of the files is in the page cache; `None` where the kernel does not tell the daemon the truth.
    pub cached_bytes: Option<u64>,
    /// Why, when `state` is `Refused` or `Failed`.
    pub reason: String,
    /// Extensions.
    pub ext: Ext,
}

/// What of a model's files is to be kept in the machine's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Residency {
    /// What the kernel keeps.
    #[default]
    None,
    /// All of it is read ahead; the kernel may take it back.
    Populate,
    /// All of it is read ahead and locked.
    Lock,
}

/// Where a model's pages are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PagesState {
    /// The kernel brings and takes them.
    #[default]
    AsTheyCome,
    /// They are being read ahead.
    Coming,
    /// All were read ahead, and are locked if that was wanted.
    Here,
    /// They were, until memory was short.
    GivenBack,
    /// They may not be locked; the model is served all the same.
    Refused,
    /// The file could not be read.
    Failed,
}

/// Key of [`ShowReply`]'s `ext`: how many experts its layers have and use, as text.
pub const EXT_SHOW_EXPERTS: u16 = 1;

/// Key of [`ShowReply`]'s `ext`: how positions past the trained context are brought into it, as text.
pub const EXT_SHOW_POSITIONS: u16 = 2;

impl ShowReply {
    /// Experts of its layers, in words; `None` for a model without, and from a daemon that does not say.
    pub fn experts(&self) -> Option<&str> {
        self.text(EXT_SHOW_EXPERTS)
    }

    /// Scaling of its rotary positions, in words; `None` where there is none.
    pub fn positions(&self) -> Option<&str> {
        self.text(EXT_SHOW_POSITIONS)
    }

    fn text(&self, key: u16) -> Option<&str> {
        let (_, bytes) = self.ext.iter().find(|(found, _)| *found == key)?;
        std::str::from_utf8(bytes).ok()
    }
}

/// How many tensors have a type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TypeCount {
    /// The type.
    pub dtype: String,
    /// Tensors.
    pub tensors: u32,
    /// Their bytes.
    pub bytes: u64,
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetadataEntry {
    /// Its key.
    pub key: String,
    /// Its type; of arrays also the elements' type and count.
    pub kind: String,
    /// As text; arrays and long values are cut short and say so.
    pub value: String,
}

/// A tensor of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: String,
    /// Its dimensions in GGUF order: the contiguous one first.
    pub dims: Vec<u64>,
    /// Where it starts in the file.
    pub offset_bytes: u64,
    /// Its size.
    pub bytes: u64,
}

/// Maps a model: by name, or the file whose descriptor comes with the frame (then `name` is the name to give it).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadRequest {
    /// Its name.
    pub name: String,
    /// The frame carries one file descriptor.
    pub by_descriptor: bool,
    /// Client-chosen number: a repeat of it does nothing twice.
    pub request_id: u128,
    /// Extensions.
    pub ext: Ext,
}

/// The model is mapped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadReply {
    /// In short.
    pub summary: ModelSummary,
    /// False when it was mapped already.
    pub mapped_now: bool,
    /// Microseconds it took.
    pub elapsed_us: u64,
    /// Extensions.
    pub ext: Ext,
}

/// Unmaps a model once its requests end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnloadRequest {
    /// Its name.
    pub name: String,
    /// Client-chosen number: a repeat of it does nothing twice.
    pub request_id: u128,
    /// Extensions.
    pub ext: Ext,
}

/// The model goes, or is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnloadReply {
    /// False when it was not mapped.
    pub was_mapped: bool,
    /// Requests that still run on it; it goes when they end.
    pub draining_sequences: u32,
    /// Extensions.
    pub ext: Ext,
}

/// Asks for a text's tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizeRequest {
    /// Model's name.
    pub model: String,
    /// The text.
    pub text: String,
    /// Add what the file asks for: beginning and end of sequence.
    pub add_special: bool,
    /// Take the spelling of a special token for the token.
    pub parse_special: bool,
    /// Extensions.
    pub ext: Ext,
}

/// A text's tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizeReply {
    /// Their ids.
    pub ids: Vec<u32>,
    /// Extensions.
    pub ext: Ext,
}

/// Asks for the text of tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetokenizeRequest {
    /// Model's name.
    pub model: String,
    /// The tokens.
    pub ids: Vec<u32>,
    /// Spell special tokens out, else leave them away.
    pub show_special: bool,
    /// Extensions.
    pub ext: Ext,
}

/// The text of tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetokenizeReply {
    /// The text; bytes that are no UTF-8 become U+FFFD.
    pub text: String,
    /// Extensions.
    pub ext: Ext,
}

validate!(ListRequest { after: text(limits::NAME_BYTES_MAX), ext: extensions });
validate!(ListReply { models: list(limits::MODELS_MAX), more: any, ext: extensions });
validate!(ModelSummary {
    name: text(limits::NAME_BYTES_MAX),
    state: any,
    file_bytes: any,
    architecture: text(limits::LABEL_BYTES_MAX),
    sequences: any,
    reason: text(limits::VALUE_BYTES_MAX),
    ext: extensions,
});
validate!(ShowRequest {
    model: text(limits::NAME_BYTES_MAX),
    full: any,
    skip_metadata: any,
    skip_tensors: any,
    ext: extensions,
});
validate!(ShowReply {
    summary: nested,
    gguf_version: any,
    parameters: any,
    weight_bytes: any,
    context_length: any,
    hidden: any,
    layers: any,
    heads: any,
    kv_heads: any,
    head_dim: any,
    ffn: any,
    vocab: any,
    tokenizer: text(limits::LABEL_BYTES_MAX),
    chat_template: any,
    end_of_generation: numbers(limits::END_TOKENS_MAX),
    types: list(limits::ENTRIES_MAX),
    metadata_total: any,
    tensors_total: any,
    metadata: list(limits::ENTRIES_MAX),
    tensors: list(limits::ENTRIES_MAX),
    host: nested,
    ext: extensions,
});
validate!(HostMemory {
    wanted: any,
    state: any,
    mapped_bytes: any,
    resident_bytes: any,
    locked_bytes: any,
    read_bytes: any,
    cached_bytes: any,
    reason: text(limits::VALUE_BYTES_MAX),
    ext: extensions,
});
validate!(TypeCount { dtype: text(limits::LABEL_BYTES_MAX), tensors: any, bytes: any });
validate!(MetadataEntry {
    key: text(limits::KEY_BYTES_MAX),
    kind: text(limits::LABEL_BYTES_MAX),
    value: text(limits::VALUE_BYTES_MAX),
});
validate!(TensorEntry {
    name: text(limits::LABEL_BYTES_MAX),
    dtype: text(limits::LABEL_BYTES_MAX),
    dims: numbers(limits::DIMS_MAX),
    offset_bytes: any,
    bytes: any,
});
validate!(LoadRequest {
    name: text(limits::NAME_BYTES_MAX),
    by_descriptor: any,
    request_id: any,
    ext: extensions,
});
validate!(LoadReply { summary: nested, mapped_now: any, elapsed_us: any, ext: extensions });
validate!(UnloadRequest { name: text(limits::NAME_BYTES_MAX), request_id: any, ext: extensions });
validate!(UnloadReply { was_mapped: any, draining_sequences: any, ext: extensions });
validate!(TokenizeRequest {
    model: text(limits::NAME_BYTES_MAX),
    text: text(limits::TEXT_BYTES_MAX),
    add_special: any,
    parse_special: any,
    ext: extensions,
});
validate!(TokenizeReply { ids: numbers(limits::IDS_MAX), ext: extensions });
validate!(DetokenizeRequest {
    model: text(limits::NAME_BYTES_MAX),
    ids: numbers(limits::IDS_MAX),
    show_special: any,
    ext: extensions,
});
validate!(DetokenizeReply { text: text(limits::TEXT_BYTES_MAX), ext: extensions });
