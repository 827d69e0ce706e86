//! Errors as sent on the wire: stable numbers, and messages for people.

use serde::{Deserialize, Serialize};

use super::Message;
use super::messages::{DetailEntry, Ext};
use super::validate::{any, extensions, limits, list, text, validate};

/// Why a request, or on stream 0 the connection, failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireError {
    /// [`ErrorCode`] as a number; an unknown number is read by its class (hundreds).
    pub code: u16,
    /// The same request may succeed later.
    pub retryable: bool,
    /// If `retryable`: wait at least this many milliseconds.
    pub retry_after_ms: u32,
    /// The event, with the numbers, and what to do; at most [`limits::ERROR_BYTES_MAX`] bytes.
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
    /// An error with its code's usual `retryable`; a text over the limit is cut.
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

    /// Adds a named value. A text over the limit is cut; from [`limits::DETAILS_MAX`] values on, it is dropped.
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

    /// Sets the time to wait before the next attempt, and sets `retryable`.
    #[must_use]
    pub fn with_retry_after_ms(mut self, retry_after_ms: u32) -> Self {
        self.retryable = true;
        self.retry_after_ms = retry_after_ms;
        self
    }

    /// The code, if this version knows it.
    pub fn known_code(&self) -> Option<ErrorCode> {
        ErrorCode::from_u16(self.code)
    }

    /// The code's class, for unknown codes too.
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

/// The longest prefix of `text` that has at most `bytes_max` bytes and ends at a character boundary.
pub fn cut_text(text: &str, bytes_max: usize) -> &str {
    let ends = text.char_indices().map(|(start, c)| start + c.len_utf8());
    let end = ends.take_while(|end| *end <= bytes_max).last().unwrap_or(0);
    &text[..end]
}

/// The kind of an error: its code's hundreds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// 1xx: the bytes break the protocol; the connection closes.
    Protocol,
    /// 2xx: the request is at fault, or was cancelled.
    Request,
    /// 3xx: too many requests or not enough room now.
    Capacity,
    /// 4xx: the model cannot be served.
    Model,
    /// 5xx: the device failed or is full.
    Device,
    /// 9xx: a fault of the daemon.
    Internal,
}

impl ErrorClass {
    /// Class of a code, including unknown codes.
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

    /// The class's name in error texts.
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
        /// Error numbers, stable forever; [`ErrorClass`] gives the meaning of the hundreds.
        #[repr(u16)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorCode { $($(#[doc = $doc])+ $name = $number,)+ }

        impl ErrorCode {
            /// Every code.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// The code of a number, if this version knows it.
            pub const fn from_u16(number: u16) -> Option<Self> {
                match number { $($number => Some(Self::$name),)+ _ => None }
            }

            /// The code's name in `PROTOCOL.md`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)+ }
            }
        }
    };
}

error_codes! {
    /// The first bytes are not a hello of this protocol.
    NotProtocol = 100,
    /// No common major version.
    UnsupportedMajor = 101,
    /// A frame is longer than agreed.
    FrameTooLong = 102,
    /// A header has unknown flags or a checksum without its flag, or a `Cancel` or `Credit` is malformed.
    BadFrame = 103,
    /// A stream id is even, used before, or not open.
    BadStream = 104,
    /// More streams are open than agreed.
    TooManyStreams = 105,
    /// Descriptors are missing, unexpected, too many, or cut off by the kernel.
    BadDescriptors = 106,
    /// No hello arrived in time.
    HandshakeTimeout = 107,
    /// A frame was not finished in time.
    FrameTimeout = 108,
    /// The client does not read, and too much output waits for it.
    OutputOverflow = 109,
    /// The payload does not match its checksum.
    BadChecksum = 110,
    /// This peer may not connect.
    PeerRefused = 111,
    /// The op is unknown.
    UnknownOp = 200,
    /// The payload is not the op's message.
    BadPayload = 201,
    /// A field or an answer is larger than allowed.
    LimitExceeded = 202,
    /// A critical extension is unknown.
    UnknownExtension = 203,
    /// A value is out of its range.
    InvalidArgument = 204,
    /// The prompt does not fit the context.
    PromptTooLong = 205,
    /// A token id is outside the vocabulary.
    TokenOutOfRange = 206,
    /// The prompt has no tokens.
    EmptyPrompt = 207,
    /// The model's file has no chat template.
    NoChatTemplate = 208,
    /// The chat template cannot render these messages, or is longer than 256 KiB.
    TemplateFailed = 209,
    /// The client cancelled the request.
    Cancelled = 210,
    /// The request's `timeout_ms` passed.
    DeadlineExceeded = 211,
    /// This uid is not allowed to do that.
    Forbidden = 212,
    /// The client granted no credit for too long.
    SlowReader = 213,
    /// Too many requests wait, or the daemon is short of descriptors or memory for the moment.
    Busy = 300,
    /// The uid's quota is used up.
    Quota = 301,
    /// The daemon is stopping.
    ServerDraining = 302,
    /// The daemon cannot serve now.
    Unavailable = 303,
    /// The request can never fit the budget.
    DoesNotFit = 304,
    /// No model has that name.
    ModelNotFound = 400,
    /// The file is damaged, or lost bytes while mapped.
    ModelCorrupt = 401,
    /// The file was replaced while mapped.
    ModelChanged = 402,
    /// The architecture, tensor type or tokenizer is not supported.
    ModelUnsupported = 403,
    /// The file is not a GGUF file.
    NotAModelFile = 404,
    /// The device failed.
    DeviceFailed = 500,
    /// The device has no memory left.
    OutOfMemory = 501,
    /// A fault in the daemon.
    Internal = 900,
}

impl ErrorCode {
    /// The code's class.
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
