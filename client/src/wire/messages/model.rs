//! Messages about models and their tokenizers.

use serde::{Deserialize, Serialize};

use super::Ext;
use crate::wire::validate::{any, extensions, limits, list, nested, numbers, text, validate};

/// Asks for the models that the daemon knows by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListRequest {
    /// Only models with a name after this one; empty: from the first.
    pub after: String,
    /// Extensions.
    pub ext: Ext,
}

/// The models that the daemon knows by name and the client may see.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListReply {
    /// By rising name; as many as fit.
    pub models: Vec<ModelSummary>,
    /// There are more: ask again with the last name.
    pub more: bool,
    /// Extensions.
    pub ext: Ext,
}

/// A model known by name. Fields that need a mapping are empty or 0 before the first one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSummary {
    /// The model's name.
    pub name: String,
    /// The model's state.
    pub state: ModelState,
    /// Size of the file in bytes.
    pub file_bytes: u64,
    /// `general.architecture`.
    pub architecture: String,
    /// Running and waiting requests.
    pub sequences: u32,
    /// Why `state` is `Poisoned` or `Unusable`.
    pub reason: String,
    /// Extensions.
    pub ext: Ext,
}

/// State of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelState {
    /// Known by name; nothing has been read.
    Registered,
    /// Serves requests.
    Mapped,
    /// Refuses new requests; unmapped when its running requests end.
    Draining,
    /// Its file lost bytes or changed while mapped.
    Poisoned,
    /// The daemon tried it, and it cannot be served.
    Unusable,
}

/// Asks about one model; the daemon maps it if that is needed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShowRequest {
    /// The model's name.
    pub model: String,
    /// Also metadata and tensors, as many as fit a reply.
    pub full: bool,
    /// With `full`: skip this many metadata values, which the client already has.
    pub skip_metadata: u32,
    /// With `full`: skip this many tensors, which the client already has.
    pub skip_tensors: u32,
    /// Extensions.
    pub ext: Ext,
}

/// Describes one model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShowReply {
    /// Name, state and size.
    pub summary: ModelSummary,
    /// GGUF version of the file.
    pub gguf_version: u32,
    /// Number of weights.
    pub parameters: u64,
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Context it was trained for, in tokens.
    pub context_length: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Number of layers.
    pub layers: u32,
    /// Number of attention heads.
    pub heads: u32,
    /// Number of heads of keys and values.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Width of the feed-forward network.
    pub ffn: u32,
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// Kind of tokenizer.
    pub tokenizer: String,
    /// The file has a chat template of at most 256 KiB.
    pub chat_template: bool,
    /// End-of-generation token ids.
    pub end_of_generation: Vec<u32>,
    /// Tensor types, with the number of tensors of each.
    pub types: Vec<TypeCount>,
    /// Metadata values in the file.
    pub metadata_total: u32,
    /// Tensors in the file.
    pub tensors_total: u32,
    /// With `full`: in file order, after the skipped ones; ask again for the rest.
    pub metadata: Vec<MetadataEntry>,
    /// With `full`: in file order, after the skipped ones; ask again for the rest.
    pub tensors: Vec<TensorEntry>,
    /// Its files in host memory.
    pub host: HostMemory,
    /// Extensions.
    pub ext: Ext,
}

/// A model's files in host memory, as the kernel counts them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostMemory {
    /// The wanted residency.
    pub wanted: Residency,
    /// How far that is.
    pub state: PagesState,
    /// Length of the mappings in bytes.
    pub mapped_bytes: u64,
    /// Bytes of the mappings that are resident, in whole pages.
    pub resident_bytes: u64,
    /// Resident bytes that are locked.
    pub locked_bytes: u64,
    /// Bytes read ahead so far.
    pub read_bytes: u64,
    /// Bytes of the files in the page cache; `None` if the kernel does not tell the daemon.
    pub cached_bytes: Option<u64>,
    /// Why `state` is `Refused` or `Failed`.
    pub reason: String,
    /// Extensions.
    pub ext: Ext,
}

/// How much of a model's files is to stay in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Residency {
    /// The kernel decides.
    #[default]
    None,
    /// All of it is read ahead; the kernel may evict it.
    Populate,
    /// All of it is read ahead and locked.
    Lock,
}

/// State of a model's pages in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PagesState {
    /// The kernel loads and evicts them.
    #[default]
    AsTheyCome,
    /// They are being read ahead.
    Coming,
    /// All were read ahead, and are locked if the residency is `Lock`.
    Here,
    /// They were resident, until the daemon gave them back because memory was short.
    GivenBack,
    /// The lock was refused; the model is served all the same.
    Refused,
    /// The file could not be read.
    Failed,
}

/// Key of [`ShowReply`]'s `ext`: how many experts the layers have and use, as text.
pub const EXT_SHOW_EXPERTS: u16 = 1;

/// Key of [`ShowReply`]'s `ext`: how positions past the trained context are scaled into it, as text.
pub const EXT_SHOW_POSITIONS: u16 = 2;

/// Key of [`ShowReply`]'s `ext`: that and why the model is a copy of its file in memory, as text.
pub const EXT_SHOW_COPY: u16 = 3;

/// Key of [`ShowReply`]'s `ext`: what an encoder computes in place of answers, as text.
pub const EXT_SHOW_ENCODER: u16 = 6;

impl ShowReply {
    /// The results of an encoder, in words: `embeddings`, or also relevance. `None` for a model that gives answers.
    pub fn encoder(&self) -> Option<&str> {
        self.text(EXT_SHOW_ENCODER)
    }

    /// Experts of the layers, in words; `None` for a model without experts, or if the daemon does not say.
    pub fn experts(&self) -> Option<&str> {
        self.text(EXT_SHOW_EXPERTS)
    }

    /// Scaling of the rotary positions, in words; `None` without scaling.
    pub fn positions(&self) -> Option<&str> {
        self.text(EXT_SHOW_POSITIONS)
    }

    /// Why the model is a copy of its file in memory, in words; `None` if its file is mapped.
    pub fn copy(&self) -> Option<&str> {
        self.text(EXT_SHOW_COPY)
    }

    fn text(&self, key: u16) -> Option<&str> {
        let (_, bytes) = self.ext.iter().find(|(found, _)| *found == key)?;
        std::str::from_utf8(bytes).ok()
    }
}

/// The tensors of one type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TypeCount {
    /// Name of the type.
    pub dtype: String,
    /// Number of tensors.
    pub tensors: u32,
    /// Their bytes.
    pub bytes: u64,
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetadataEntry {
    /// Its key.
    pub key: String,
    /// Type of the value; for arrays also the elements' type and count.
    pub kind: String,
    /// The value as text; arrays and long values are shortened and marked as such.
    pub value: String,
}

/// A tensor of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// Name of the tensor's type.
    pub dtype: String,
    /// Dimensions in GGUF order: the contiguous one first.
    pub dims: Vec<u64>,
    /// Offset in the file, in bytes.
    pub offset_bytes: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// Maps a model: a known name, or the file whose descriptor comes with the frame. In that case `name` is the name to
/// give it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadRequest {
    /// The model's name.
    pub name: String,
    /// The frame carries one file descriptor.
    pub by_descriptor: bool,
    /// Number chosen by the client: a repeat with the same number changes nothing.
    pub request_id: u128,
    /// Extensions.
    pub ext: Ext,
}

/// The model is mapped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadReply {
    /// Name, state and size.
    pub summary: ModelSummary,
    /// False if it was already mapped.
    pub mapped_now: bool,
    /// Time of the request in microseconds.
    pub elapsed_us: u64,
    /// Extensions.
    pub ext: Ext,
}

/// Unmaps a model once its requests end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnloadRequest {
    /// The model's name.
    pub name: String,
    /// Number chosen by the client: a repeat with the same number changes nothing.
    pub request_id: u128,
    /// Extensions.
    pub ext: Ext,
}

/// The model is draining or unmapped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnloadReply {
    /// False if it was not mapped.
    pub was_mapped: bool,
    /// Requests that still run on it; it is unmapped when they end.
    pub draining_sequences: u32,
    /// Extensions.
    pub ext: Ext,
}

/// Tokenizes a text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizeRequest {
    /// The model's name.
    pub model: String,
    /// The text.
    pub text: String,
    /// Add beginning and end of sequence if the model's file asks for them.
    pub add_special: bool,
    /// Read the spelling of a special token as that token.
    pub parse_special: bool,
    /// Extensions.
    pub ext: Ext,
}

/// The tokens of a text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizeReply {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Extensions.
    pub ext: Ext,
}

/// Key of [`DetokenizeRequest`]'s `ext`: each token's text is wanted for itself. Its bytes mean nothing.
pub const EXT_DETOKENIZE_EACH: u16 = 1;

/// Key of [`DetokenizeReply`]'s `ext`: the end of each token's text in bytes, a u32 each.
pub const EXT_TEXT_ENDS: u16 = 1;

/// Most tokens whose texts are wanted for themselves: their ends fit an extension.
pub const EACH_TOKENS_MAX: usize = limits::EXT_BYTES_MAX / 4;

impl DetokenizeRequest {
    /// The texts of at most [`EACH_TOKENS_MAX`] tokens, each for itself: a part of a character shows as U+FFFD.
    pub fn each(model: &str, ids: Vec<u32>) -> Self {
        let ext = vec![(EXT_DETOKENIZE_EACH, Vec::new())];
        Self { model: model.to_owned(), ids, show_special: true, ext }
    }

    /// Whether each token's text is wanted for itself.
    pub fn is_each(&self) -> bool {
        self.ext.iter().any(|(key, _)| *key == EXT_DETOKENIZE_EACH)
    }
}

impl DetokenizeReply {
    /// The texts of the tokens; `None` from a daemon that does not tell where they end.
    pub fn each(&self) -> Option<Vec<&str>> {
        let (_, ends) = self.ext.iter().find(|(key, _)| *key == EXT_TEXT_ENDS)?;
        let (ends, []) = ends.as_chunks::<4>() else { return None };
        let mut begin = 0;
        let text = |end: &[u8; 4]| {
            let end = u32::from_le_bytes(*end) as usize;
            let text = self.text.get(begin..end)?;
            begin = end;
            Some(text)
        };
        ends.iter().map(text).collect()
    }
}

/// Asks for the text of tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetokenizeRequest {
    /// The model's name.
    pub model: String,
    /// Token ids.
    pub ids: Vec<u32>,
    /// Print special tokens by their spelling; otherwise omit them.
    pub show_special: bool,
    /// Extensions.
    pub ext: Ext,
}

/// The text of tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetokenizeReply {
    /// The text; bytes that are not UTF-8 become U+FFFD.
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
