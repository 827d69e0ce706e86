//! Limits of single fields, checked after decoding and before encoding.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::ErrorCode;
use super::messages::{
    EXT_CRITICAL, EXT_END_EMBEDDING, EXT_GENERATE_CHAT, EXT_GENERATE_DOCUMENT, EXT_GENERATE_EMBEDDING,
    EXT_GENERATE_FORM, EXT_GENERATE_PENALTIES, EXT_GENERATE_SAMPLERS, EXT_GENERATE_SCORES,
    EXT_GENERATE_SESSION, EXT_OF_USER, Ext,
};

/// Most bytes of texts and most elements of lists. The frame's own limit applies too.
pub mod limits {
    /// Bytes of a model's name.
    pub const NAME_BYTES_MAX: usize = 255;
    /// Short texts: types, devices, states, versions, keys.
    pub const LABEL_BYTES_MAX: usize = 255;
    /// Bytes of prompts and of tokenizer input and output: a frame, less 4 KiB for all other fields.
    pub const TEXT_BYTES_MAX: usize = (1 << 20) - 4096;
    /// Token ids in one message: a frame, less 4 KiB for all other fields.
    pub const IDS_MAX: usize = TEXT_BYTES_MAX / 4;
    /// Bytes echoed by `Ping`.
    pub const PING_BYTES_MAX: usize = 256;
    /// Texts that end an answer.
    pub const STOP_TEXTS_MAX: usize = 16;
    /// Bytes of one such text.
    pub const STOP_TEXT_BYTES_MAX: usize = 256;
    /// Most likely tokens reported with each token.
    pub const TOP_LOGPROBS_MAX: usize = 20;
    /// Messages of a chat.
    pub const CHAT_MESSAGES_MAX: usize = 1024;
    /// Bytes of a chat message's role.
    pub const ROLE_BYTES_MAX: usize = 64;
    /// Models in one list.
    pub const MODELS_MAX: usize = 4096;
    /// Sequences in one list.
    pub const SEQUENCES_MAX: usize = 8192;
    /// Sessions in one list, and of one user; this many with the longest names fit the smallest frame.
    pub const SESSIONS_MAX: usize = 64;
    /// Users in one list; the limits of this many fit the smallest frame.
    pub const USERS_MAX: usize = 1024;
    /// Devices in one list.
    pub const DEVICES_MAX: usize = 64;
    /// Checks in one list; this many with the longest texts, and the devices, fit a frame.
    pub const CHECKS_MAX: usize = 96;
    /// Ops in one list.
    pub const OPS_MAX: usize = 1024;
    /// Metadata values, tensors or tensor types in one message.
    pub const ENTRIES_MAX: usize = 16384;
    /// Bytes of a metadata key; GGUF allows 65,535, longer keys are cut.
    pub const KEY_BYTES_MAX: usize = 1024;
    /// Bytes of a metadata value as text, or of a reason.
    pub const VALUE_BYTES_MAX: usize = 4096;
    /// Dimensions of a tensor.
    pub const DIMS_MAX: usize = 4;
    /// End-of-generation tokens of a model.
    pub const END_TOKENS_MAX: usize = 256;
    /// Layers in one list.
    pub const LAYERS_MAX: usize = 1024;
    /// Parts of a model, one letter each.
    pub const PARTS_MAX: usize = 1024;
    /// Events in one item; this many with the longest texts fit the smallest frame.
    pub const EVENTS_MAX: usize = 64;
    /// Bytes of an error's message.
    pub const ERROR_BYTES_MAX: usize = 512;
    /// Named values of an error.
    pub const DETAILS_MAX: usize = 16;
    /// Extensions of a message.
    pub const EXT_MAX: usize = 16;
    /// Bytes of one extension.
    pub const EXT_BYTES_MAX: usize = 4096;
    /// Bytes of an embedding: those of the widest model, 131,072 numbers.
    pub const EMBEDDING_BYTES_MAX: usize = 4 << 17;
    /// Bytes of the extension with an answer's form, the first of which says its kind.
    pub const FORM_BYTES_MAX: usize = 64 << 10;
    /// Bytes of the extension with a chat's tools, fields and variables.
    pub const CHAT_EXTRAS_BYTES_MAX: usize = 512 << 10;
    /// Bytes of the extension with a document.
    pub const DOCUMENT_BYTES_MAX: usize = 512 << 10;
    /// Tools of a chat.
    pub const TOOLS_MAX: usize = 128;
    /// Biases of a request; this many fit an extension.
    pub const BIASES_MAX: usize = 500;
    /// Last tokens that penalties count.
    pub const PENALTY_TOKENS_MAX: u32 = 4096;
    /// Drafted tokens of a request in one step.
    pub const DRAFTS_MAX: u8 = 32;
    /// Texts that no repetition reaches across.
    pub const BREAKERS_MAX: usize = 16;
    /// Bytes of one of them.
    pub const BREAKER_BYTES_MAX: usize = 64;
}

/// Critical extensions that this version understands, each with its message.
const EXT_KNOWN: [(&str, u16); 10] = [
    ("GenerateRequest", EXT_GENERATE_SESSION),
    ("GenerateRequest", EXT_GENERATE_FORM),
    ("GenerateRequest", EXT_GENERATE_PENALTIES),
    ("GenerateRequest", EXT_GENERATE_CHAT),
    ("GenerateRequest", EXT_GENERATE_SAMPLERS),
    ("GenerateRequest", EXT_GENERATE_SCORES),
    ("GenerateRequest", EXT_GENERATE_EMBEDDING),
    ("GenerateRequest", EXT_GENERATE_DOCUMENT),
    ("ListRequest", EXT_OF_USER),
    ("UnloadRequest", EXT_OF_USER),
];

/// A payload of the protocol.
pub trait Message: Serialize + DeserializeOwned + Validate {
    /// The message's name in `PROTOCOL.md`.
    const NAME: &'static str;
}

/// Checks that the decoder cannot do: each text and list against its own limit, and critical extensions.
pub trait Validate {
    /// # Errors
    /// The first [`Violation`], in field order.
    fn validate(&self) -> Result<(), Violation>;
}

/// A field that breaks its limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A text or list is too long.
    #[error("{message}.{field}: {size} {unit}, but at most {max} are allowed")]
    TooLong {
        /// Name of the message.
        message: &'static str,
        /// Name of the field.
        field: &'static str,
        /// Size of the field.
        size: usize,
        /// Unit of the size.
        unit: &'static str,
        /// Largest size allowed.
        max: usize,
    },
    /// A critical extension is unknown to this version.
    #[error(
        "{message}.ext: extension {key:#06x} is required but unknown here: use an older form of the request"
    )]
    UnknownExtension {
        /// Name of the message.
        message: &'static str,
        /// The extension's key.
        key: u16,
    },
    /// An extension occurs twice.
    #[error("{message}.ext: extension {key:#06x} occurs twice")]
    RepeatedExtension {
        /// Name of the message.
        message: &'static str,
        /// The extension's key.
        key: u16,
    },
}

impl Violation {
    /// The error's number on the wire.
    pub const fn code(&self) -> ErrorCode {
        match self {
            Self::TooLong { .. } => ErrorCode::LimitExceeded,
            Self::UnknownExtension { .. } => ErrorCode::UnknownExtension,
            Self::RepeatedExtension { .. } => ErrorCode::BadPayload,
        }
    }
}

/// Message and field of a rule, for its error.
pub(super) type Place = (&'static str, &'static str);

fn within(size: usize, unit: &'static str, max: usize, (message, field): Place) -> Result<(), Violation> {
    if size <= max { Ok(()) } else { Err(Violation::TooLong { message, field, size, unit, max }) }
}

/// A field of fixed size: nothing to check. `Copy` keeps texts and lists out.
pub(super) fn any<T: Copy>(_: &T, _: Place) -> Result<(), Violation> {
    Ok(())
}

pub(super) fn text(max: usize) -> impl Fn(&String, Place) -> Result<(), Violation> {
    move |text, place| within(text.len(), "bytes", max, place)
}

pub(super) fn texts(count: usize, max: usize) -> impl Fn(&Vec<String>, Place) -> Result<(), Violation> {
    move |texts, place| {
        within(texts.len(), "texts", count, place)?;
        texts.iter().try_for_each(|text| within(text.len(), "bytes", max, place))
    }
}

/// A list of numbers or bytes.
pub(super) fn numbers<T: Copy>(max: usize) -> impl Fn(&Vec<T>, Place) -> Result<(), Violation> {
    move |numbers, place| within(numbers.len(), "numbers", max, place)
}

/// A list of structures; each element is checked too.
pub(super) fn list<T: Validate>(max: usize) -> impl Fn(&Vec<T>, Place) -> Result<(), Violation> {
    move |list, place| {
        within(list.len(), "entries", max, place)?;
        list.iter().try_for_each(Validate::validate)
    }
}

pub(super) fn nested<T: Validate>(value: &T, _: Place) -> Result<(), Violation> {
    value.validate()
}

pub(super) fn extensions(ext: &Ext, place: Place) -> Result<(), Violation> {
    within(ext.len(), "extensions", limits::EXT_MAX, place)?;
    for (index, (key, bytes)) in ext.iter().enumerate() {
        let max = match (place.0, *key) {
            ("GenerateRequest", EXT_GENERATE_FORM) => limits::FORM_BYTES_MAX,
            ("GenerateRequest", EXT_GENERATE_CHAT) => limits::CHAT_EXTRAS_BYTES_MAX,
            ("GenerateRequest", EXT_GENERATE_DOCUMENT) => limits::DOCUMENT_BYTES_MAX,
            ("GenerateEnd", EXT_END_EMBEDDING) => limits::EMBEDDING_BYTES_MAX,
            _ => limits::EXT_BYTES_MAX,
        };
        within(bytes.len(), "bytes", max, place)?;
        if key & EXT_CRITICAL != 0 && !EXT_KNOWN.contains(&(place.0, *key)) {
            return Err(Violation::UnknownExtension { message: place.0, key: *key });
        }
        if ext.iter().take(index).any(|(earlier, _)| earlier == key) {
            return Err(Violation::RepeatedExtension { message: place.0, key: *key });
        }
    }
    Ok(())
}

/// Implements [`Validate`]: one rule for every field. A missing field does not compile.
macro_rules! validate {
    ($type:ident { $($field:ident: $rule:expr),* $(,)? }) => {
        impl $crate::wire::Validate for $type {
            fn validate(&self) -> Result<(), $crate::wire::Violation> {
                let Self { $($field: _),* } = self;
                $( ($rule)(&self.$field, (stringify!($type), stringify!($field)))?; )*
                Ok(())
            }
        }
    };
}
pub(super) use validate;
