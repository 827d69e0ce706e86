//! Errors between a program and the daemon.

use std::path::PathBuf;

use crate::options::ServerTrust;
use crate::wire::{CodecError, ErrorClass, ErrorCode, HeaderError, HelloError, VERSION_MAJOR, WireError};

/// Why a call failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon answers at the socket, or not in time.
    #[error(
        "the daemon does not answer at {socket} ({reason}; {attempts} attempts in {waited_ms} ms): is rocmforged running? \
         `systemctl status rocmforged.socket rocmforged.service` shows its state; to use another socket, set --socket or ROCMFORGE_SOCKET"
    )]
    Unavailable {
        /// The socket's path.
        socket: PathBuf,
        /// Error of the last attempt.
        reason: String,
        /// Number of attempts.
        attempts: u32,
        /// Time of all attempts, in milliseconds.
        waited_ms: u64,
    },
    /// The path is empty or too long for a socket.
    #[error("the socket's path has {bytes} bytes, but 1 to {max} are allowed: {socket}")]
    SocketPath {
        /// The path.
        socket: PathBuf,
        /// Its length in bytes.
        bytes: usize,
        /// The kernel's limit in bytes.
        max: usize,
    },
    /// The user may not connect to the socket.
    #[error("no permission to use {socket}: join its group, usually `rocmforge-users`, and log in again")]
    PermissionDenied {
        /// The socket's path.
        socket: PathBuf,
    },
    /// The server's uid is not trusted.
    #[error(
        "{socket} is served by {}, not by {trusted}: no request was sent; if it is the right daemon, trust it with --server-uid",
        uid.map_or("an unknown process outside this container".to_owned(), |uid| format!("uid {uid}"))
    )]
    UntrustedServer {
        /// The socket's path.
        socket: PathBuf,
        /// The server's uid; `None` if the kernel does not report it.
        uid: Option<u32>,
        /// The uids that are trusted.
        trusted: ServerTrust,
    },
    /// Client and daemon share no major version.
    #[error(
        "the daemon speaks protocol {}, this client version {VERSION_MAJOR}: update {}",
        versions(*server_min, *server_max),
        if *server_max < VERSION_MAJOR { "the daemon" } else { "this client" }
    )]
    UnsupportedVersion {
        /// The daemon's lowest major version.
        server_min: u16,
        /// The daemon's highest major version.
        server_max: u16,
    },
    /// The daemon refused the connection in its hello.
    #[error("the daemon refused the connection: {} ({code}){}", name_of(*code), hint_of(*code))]
    Refused {
        /// An [`ErrorCode`] as a number.
        code: u16,
        /// For codes of the capacity class: wait at least this many milliseconds before the next attempt.
        retry_after_ms: u32,
    },
    /// The daemon is an older one, which counts no connection for another user than the one that connects.
    #[error("the daemon lets no user act for another one: no request was sent; update it")]
    CannotAct,
    /// The request breaks a limit and was not sent.
    #[error(transparent)]
    Request(#[from] CodecError),
    /// The connection allows no more open requests.
    #[error("{max} requests are already open on this connection: wait for one, or open another connection")]
    TooManyStreams {
        /// Most open requests that the connection allows.
        max: u32,
    },
    /// No answer arrived in time.
    #[error("no answer within {waited_ms} ms")]
    Timeout {
        /// Time waited, in milliseconds.
        waited_ms: u64,
    },
    /// The daemon sent nothing, and did not answer a ping.
    #[error(
        "the daemon has not answered for {} s, not even a ping: it hangs or is stopped; \
         `systemctl status rocmforged.service` shows its state",
        waited_ms / 1000
    )]
    Silent {
        /// Time without a frame, in milliseconds.
        waited_ms: u64,
    },
    /// The connection ended.
    #[error("the connection to the daemon ended: {reason}")]
    Disconnected {
        /// Why it ended.
        reason: String,
    },
    /// The daemon broke the protocol.
    #[error("the daemon broke the protocol: {0}")]
    Protocol(#[from] ProtocolError),
    /// The daemon answered with an error.
    #[error("{0}")]
    Server(WireError),
    /// A model file could not be opened by the client.
    #[error("{path}: {reason}")]
    File {
        /// The file's path.
        path: PathBuf,
        /// Why it could not be opened.
        reason: String,
    },
}

/// How the daemon broke the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// The first bytes are not a valid hello.
    #[error(transparent)]
    Hello(#[from] HelloError),
    /// A header or checksum is wrong.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// A payload is not the message of its op.
    #[error(transparent)]
    Payload(CodecError),
    /// The stream does not expect a frame of this op.
    #[error("unexpected op {op:#06x} on stream {stream}")]
    UnexpectedOp {
        /// The frame's stream.
        stream: u32,
        /// The frame's op.
        op: u16,
    },
    /// A frame for a stream that is not open.
    #[error("a frame for stream {stream}, which is not open")]
    UnknownStream {
        /// The frame's stream.
        stream: u32,
    },
    /// An item arrived on a stream without credit.
    #[error("an item on stream {stream} without credit")]
    NoCredit {
        /// The frame's stream.
        stream: u32,
    },
    /// A reply has texts of tokens, and does not tell where each ends.
    #[error("a reply does not tell where the texts of its tokens end")]
    NoTextEnds,
    /// A message lacks what the request asks for.
    #[error("{message} lacks {what}")]
    Lacks {
        /// The message.
        message: &'static str,
        /// The missing part.
        what: &'static str,
    },
    /// The limits in the daemon's hello are not those of a daemon.
    #[error("its hello has {field} {value}, but {min} to {max} are allowed")]
    HelloLimit {
        /// The hello's field.
        field: &'static str,
        /// Its value.
        value: u32,
        /// Smallest value allowed.
        min: u32,
        /// Largest value allowed.
        max: u32,
    },
    /// More frames wait to be taken than any correct daemon sends.
    #[error("{bytes} bytes of unread frames, but at most {max} are kept")]
    TooMuchUnread {
        /// Size of the unread frames.
        bytes: usize,
        /// Largest size kept.
        max: usize,
    },
    /// A list that is sent in parts does not end.
    #[error("a list of more than {max} parts")]
    TooManyParts {
        /// Most parts that are taken.
        max: u32,
    },
    /// An answer that is kept whole does not end.
    #[error("an answer of more than {max} bytes")]
    AnswerTooLong {
        /// Most bytes that are kept.
        max: usize,
    },
    /// The daemon sent file descriptors with a frame.
    #[error("{n_fds} file descriptors with a frame of the server")]
    Descriptors {
        /// Number of descriptors.
        n_fds: u8,
    },
}

impl ClientError {
    /// The error's name for people and scripts; the wire's name where it has one.
    pub fn code_name(&self) -> &'static str {
        match self {
            Self::Unavailable { .. } => "Unavailable",
            Self::SocketPath { .. } => ErrorCode::InvalidArgument.name(),
            Self::PermissionDenied { .. } => "PermissionDenied",
            Self::UntrustedServer { .. } => "UntrustedServer",
            Self::UnsupportedVersion { .. } => ErrorCode::UnsupportedMajor.name(),
            Self::Refused { code, .. } => name_of(*code),
            Self::CannotAct => "CannotAct",
            Self::Request(error) => error.code().name(),
            Self::TooManyStreams { .. } => ErrorCode::TooManyStreams.name(),
            Self::Timeout { .. } => "Timeout",
            Self::Silent { .. } => "Silent",
            Self::Disconnected { .. } => "Disconnected",
            Self::Protocol(_) => "Protocol",
            Self::Server(error) => error.code_name(),
            Self::File { .. } => "File",
        }
    }

    /// The [`ErrorCode`] as a number: the daemon's, or the equal one for an error that the client found first.
    pub fn code(&self) -> Option<u16> {
        let code = match self {
            Self::Refused { code, .. } => return Some(*code),
            Self::Server(error) => return Some(error.code),
            Self::Unavailable { .. } => ErrorCode::Unavailable,
            Self::SocketPath { .. } => ErrorCode::InvalidArgument,
            Self::UnsupportedVersion { .. } => ErrorCode::UnsupportedMajor,
            Self::Request(error) => error.code(),
            Self::TooManyStreams { .. } => ErrorCode::TooManyStreams,
            _ => return None,
        };
        Some(code as u16)
    }

    /// True if the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Server(error) => error.retryable,
            // The class decides for a code that this version does not know.
            Self::Refused { code, .. } => ErrorCode::from_u16(*code)
                .map_or(ErrorClass::of(*code) == Some(ErrorClass::Capacity), ErrorCode::retryable),
            Self::Unavailable { .. } | Self::Disconnected { .. } | Self::Silent { .. } => true,
            _ => false,
        }
    }

    /// For a retryable error: wait at least this many milliseconds.
    pub fn retry_after_ms(&self) -> u32 {
        match self {
            Self::Server(WireError { retry_after_ms, .. }) | Self::Refused { retry_after_ms, .. } => {
                *retry_after_ms
            }
            _ => 0,
        }
    }

    /// True if the daemon cannot be reached or is stopping, so that a new connection may help.
    pub fn is_unreachable(&self) -> bool {
        const GOING: [u16; 2] = [ErrorCode::ServerDraining as u16, ErrorCode::Unavailable as u16];
        match self {
            Self::Unavailable { .. } | Self::Disconnected { .. } | Self::Silent { .. } => true,
            Self::Refused { code, .. } => ErrorClass::of(*code) == Some(ErrorClass::Capacity),
            Self::Server(error) => GOING.contains(&error.code),
            _ => false,
        }
    }

    /// True if the same request may succeed on a new connection. Not for a daemon that says it cannot start: a person has to act.
    pub(crate) fn is_worth_repeating(&self) -> bool {
        self.is_unreachable() && !matches!(self, Self::Server(error) if !error.retryable)
    }
}

fn versions(min: u16, max: u16) -> String {
    if min == max { format!("version {min}") } else { format!("versions {min} to {max}") }
}

fn name_of(code: u16) -> &'static str {
    ErrorCode::from_u16(code).map_or("Unknown", ErrorCode::name)
}

/// Advice on a refusal whose name gives none.
fn hint_of(code: u16) -> &'static str {
    match ErrorCode::from_u16(code) {
        Some(ErrorCode::Forbidden) => {
            ": it does not act for that user; `policy.subordinates` of the daemon's configuration says who may, and its log why not"
        }
        _ => "",
    }
}
