//! Errors as they cross the wire: numbers that stay, texts that help.

use serde::{Deserialize, Serialize};

use super::Message;
use super::messages::{DetailEntry, Ext};
use super::validate::{any, extensions, limits, list, text, validate};

/// Why a request, or on stream 0 the connection, failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireError {
    /// [`ErrorCode`] as a number; unknown numbers are to be taken by their class (hundreds).
    pub code: u16,
    /// The same request may succeed later.
    pub retryable: bool,
    /// When `retryable`: not before this many milliseconds.
    pub retry_after_ms: u32,
    /// What happened, with the numbers, and what to do; at most [`limits::ERROR_BYTES_MAX`] bytes.
    pub message: String,
    /// Named values, at most [`limits::DETAILS_MAX`].
    pub detail: Vec<DetailEntry>,
    /// Extensions.
    pub ext: Ext,
}

impl std::fmt::Display for WireError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} {})", self.message, self.code_name(), self.code)
    }
}

impl Message for WireError {
    const NAME: &'static str = "WireError";
}

validate!(WireError {
    code: any,
    retryable: any,
    retry_after_ms: any,
    message: text(limits::ERROR_BYTES_MAX),
    detail: list(limits::DETAILS_MAX),
    ext: extensions,
});

impl WireError {
    /// An error with its code's usual `retryable`; a text that is too long is cut.
    pub fn new(code: ErrorCode, message: &str) -> Self {
        Self {
            code: code as u16,
            retryable: code.retryable(),
            retry_after_ms: 0,
            message: cut_text(message, limits::ERROR_BYTES_MAX).to_owned(),
            detail: Vec::new(),
            ext: Ext::new(),
        }
    }

    /// Adds a named value; cut where too long, left out where there are [`limits::DETAILS_MAX`] already.
    #[must_use]
    pub fn with_detail(mut self, key: &str, value: impl std::fmt::Display) -> Self {
        if self.detail.len() < limits::DETAILS_MAX {
            let value = value.to_string();
            self.detail.push(DetailEntry {
                key: cut_text(key, limits::LABEL_BYTES_MAX).to_owned(),
                value: cut_text(&value, limits::VALUE_BYTES_MAX).to_owned(),
            });
        }
        self
    }

    /// Sets the time to wait before trying again, and with it `retryable`.
    #[must_use]
    pub fn with_retry_after_ms(mut self, retry_after_ms: u32) -> Self {
        self.retryable = true;
        self.retry_after_ms = retry_after_ms;
        self
    }

    /// The code, where this version knows it.
    pub fn known_code(&self) -> Option<ErrorCode> {
        ErrorCode::from_u16(self.code)
    }

    /// The code's class, also of unknown codes.
    pub fn class(&self) -> Option<ErrorClass> {
        ErrorClass::of(self.code)
    }

    /// The code's name, or for unknown codes its class.
    pub fn code_name(&self) -> &'static str {
        match (self.known_code(), self.class()) {
            (Some(code), _) => code.name(),
            (None, Some(class)) => class.name(),
            (None, None) => "Unknown",
        }
    }
}

/// The longest start of `text` that has at most `bytes_max` bytes and ends on a character's end.
pub fn cut_text(text: &str, bytes_max: usize) -> &str {
    let ends = text.char_indices().map(|(start, c)| start + c.len_utf8());
    let end = ends.take_while(|end| *end <= bytes_max).last().unwrap_or(0);
    &text[..end]
}

/// What a code is about: its hundreds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// 1xx: the bytes break the protocol; the connection closes.
    Protocol,
    /// 2xx: the request is at fault, or was taken back.
    Request,
    /// 3xx: not now, or not this much.
    Capacity,
    /// 4xx: the model.
    Model,
    /// 5xx: the device.
    Device,
    /// 9xx: a fault of the daemon.
    Internal,
}

impl ErrorClass {
    /// Class of a code, known or not.
    pub const fn of(code: u16) -> Option<Self> {
        match code / 100 {
            1 => Some(Self::Protocol),
            2 => Some(Self::Request),
            3 => Some(Self::Capacity),
            4 => Some(Self::Model),
            5 => Some(Self::Device),
            9 => Some(Self::Internal),
            _ => None,
        }
    }

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Protocol => "Protocol",
            Self::Request => "Request",
            Self::Capacity => "Capacity",
            Self::Model => "Model",
            Self::Device => "Device",
            Self::Internal => "Internal",
        }
    }
}

/// Declares the codes once: enum, number -> code, names, list.
macro_rules! error_codes {
    ($($(#[doc = $doc:literal])+ $name:ident = $number:literal,)+) => {
        /// Error numbers, stable forever; [`ErrorClass`] says what the hundreds mean.
        #[repr(u16)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorCode { $($(#[doc = $doc])+ $name = $number,)+ }

        impl ErrorCode {
            /// Every code.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// The code of a number.
            pub const fn from_u16(number: u16) -> Option<Self> {
                match number { $($number => Some(Self::$name),)+ _ => None }
            }

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)+ }
            }
        }
    };
}

error_codes! {
    /// The first bytes are no hello of this protocol.
    NotProtocol = 100,
    /// No common major version.
    UnsupportedMajor = 101,
    /// A frame longer than agreed.
    FrameTooLong = 102,
    /// A header with unknown flags or a stray checksum.
    BadFrame = 103,
    /// A stream id that is even, used before, or not open.
    BadStream = 104,
    /// More open streams than agreed.
    TooManyStreams = 105,
    /// Descriptors missing, unexpected, too many, or cut off by the kernel.
    BadDescriptors = 106,
    /// No hello in time.
    HandshakeTimeout = 107,
    /// A frame was begun and not finished in time.
    FrameTimeout = 108,
    /// The client does not read and too much waits for it.
    OutputOverflow = 109,
    /// The payload is not the one that was sent.
    BadChecksum = 110,
    /// This peer may not connect.
    PeerRefused = 111,
    /// The op is not known.
    UnknownOp = 200,
    /// The payload is not the op's message.
    BadPayload = 201,
    /// A field or an answer is larger than allowed.
    LimitExceeded = 202,
    /// An extension that must be understood is not known.
    UnknownExtension = 203,
    /// A value out of its range.
    InvalidArgument = 204,
    /// The prompt does not fit the context.
    PromptTooLong = 205,
    /// A token id outside the vocabulary.
    TokenOutOfRange = 206,
    /// A prompt without tokens.
    EmptyPrompt = 207,
    /// The model's file has no chat template.
    NoChatTemplate = 208,
    /// The chat template cannot render these messages.
    TemplateFailed = 209,
    /// Taken back by the client.
    Cancelled = 210,
    /// Its `timeout_ms` passed.
    DeadlineExceeded = 211,
    /// Not allowed to this uid.
    Forbidden = 212,
    /// The client granted no credit for too long.
    SlowReader = 213,
    /// Too many requests wait.
    Busy = 300,
    /// The uid's share is used up.
    Quota = 301,
    /// The daemon is stopping.
    ServerDraining = 302,
    /// The daemon cannot serve now.
    Unavailable = 303,
    /// It can never fit the budget as asked.
    DoesNotFit = 304,
    /// No model of that name.
    ModelNotFound = 400,
    /// The file is damaged, or lost bytes while mapped.
    ModelCorrupt = 401,
    /// The file was replaced while mapped.
    ModelChanged = 402,
    /// An architecture, tensor type or tokenizer that is not supported.
    ModelUnsupported = 403,
    /// Not a GGUF file.
    NotAModelFile = 404,
    /// The device failed.
    DeviceFailed = 500,
    /// The device has no memory left.
    OutOfMemory = 501,
    /// A fault of the daemon.
    Internal = 900,
}

impl ErrorCode {
    /// Its class.
    pub const fn class(self) -> ErrorClass {
        match ErrorClass::of(self as u16) {
            Some(class) => class,
            None => ErrorClass::Internal,
        }
    }

    /// Whether the same request may succeed later, unless the error itself says otherwise.
    pub const fn retryable(self) -> bool {
        matches!(
            self,
            Self::HandshakeTimeout
                | Self::Busy
                | Self::Quota
                | Self::ServerDraining
                | Self::Unavailable
                | Self::OutOfMemory
        )
    }
}
