//! What can go wrong between a program and the daemon.

use std::path::PathBuf;

use crate::options::ServerTrust;
use crate::wire::{CodecError, ErrorClass, ErrorCode, HeaderError, HelloError, VERSION_MAJOR, WireError};

/// Why a call failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers at the socket, or not in time.
    #[error(
        "the daemon does not answer at {socket} ({reason}; {attempts} attempts in {waited_ms} ms): is rocmforged running? \
         `systemctl status rocmforged.socket rocmforged.service` tells; --socket or ROCMFORGE_SOCKET names another socket"
    )]
    Unavailable {
        /// The socket.
        socket: PathBuf,
        /// The last attempt's error.
        reason: String,
        /// How many there were.
        attempts: u32,
        /// How long they took.
        waited_ms: u64,
    },
    /// A path that no socket can have.
    #[error("the socket's path has {bytes} bytes, 1 to {max} are possible: {socket}")]
    SocketPath {
        /// The path.
        socket: PathBuf,
        /// Its size.
        bytes: usize,
        /// The kernel's limit.
        max: usize,
    },
    /// The socket may not be used.
    #[error("no permission to use {socket}: join its group, usually `rocmforge-users`, and log in again")]
    PermissionDenied {
        /// The socket.
        socket: PathBuf,
    },
    /// Someone serves the socket who should not.
    #[error(
        "{socket} is served by {}, not by {trusted}: nothing was asked of it; trust it with --server-uid if it is right",
        uid.map_or("an unknown process outside this container".to_owned(), |uid| format!("uid {uid}"))
    )]
    UntrustedServer {
        /// The socket.
        socket: PathBuf,
        /// Its uid, where the kernel tells.
        uid: Option<u32>,
        /// Who may serve.
        trusted: ServerTrust,
    },
    /// No common version.
    #[error(
        "the daemon speaks protocol {}, this client version {VERSION_MAJOR}: update {}",
        versions(*server_min, *server_max),
        if *server_max < VERSION_MAJOR { "the daemon" } else { "this client" }
    )]
    UnsupportedVersion {
        /// The daemon's lowest.
        server_min: u16,
        /// The daemon's highest.
        server_max: u16,
    },
    /// The daemon turned the connection down in its hello.
    #[error("the daemon refused the connection: {} ({code})", name_of(*code))]
    Refused {
        /// An [`ErrorCode`] as a number.
        code: u16,
        /// Not before this many milliseconds, for codes of the capacity class.
        retry_after_ms: u32,
    },
    /// The request breaks a limit and was not sent.
    #[error(transparent)]
    Request(#[from] CodecError),
    /// More requests at once than the connection allows.
    #[error("{max} requests are open on this connection already: wait for one, or open another connection")]
    TooManyStreams {
        /// How many it allows.
        max: u32,
    },
    /// No answer in time.
    #[error("no answer within {waited_ms} ms")]
    Timeout {
        /// How long was waited.
        waited_ms: u64,
    },
    /// The connection ended.
    #[error("the connection to the daemon ended: {reason}")]
    Disconnected {
        /// How.
        reason: String,
    },
    /// The other side broke the protocol.
    #[error("the daemon broke the protocol: {0}")]
    Protocol(#[from] ProtocolError),
    /// The daemon answered with an error.
    #[error("{0}")]
    Server(WireError),
    /// A model file could not be opened by the client.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// How the other side broke the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// Its hello is none.
    #[error(transparent)]
    Hello(#[from] HelloError),
    /// A header or checksum is wrong.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// A payload is not what its op says.
    #[error(transparent)]
    Payload(CodecError),
    /// A frame of a kind that the stream does not expect.
    #[error("unexpected op {op:#06x} on stream {stream}")]
    UnexpectedOp {
        /// Which stream.
        stream: u32,
        /// Its op.
        op: u16,
    },
    /// A frame for a stream that is not open.
    #[error("a frame for stream {stream}, which is not open")]
    UnknownStream {
        /// Which stream.
        stream: u32,
    },
    /// An item without credit.
    #[error("an item on stream {stream} without credit")]
    NoCredit {
        /// Which stream.
        stream: u32,
    },
    /// Descriptors came with a frame.
    #[error("{n_fds} file descriptors with a frame of the server")]
    Descriptors {
        /// How many.
        n_fds: u8,
    },
}

impl ClientError {
    /// The code's name for people and scripts: that of the wire where there is one.
    pub fn code_name(&self) -> &'static str {
        match self {
            Self::Unavailable { .. } => "Unavailable",
            Self::SocketPath { .. } => ErrorCode::InvalidArgument.name(),
            Self::PermissionDenied { .. } => "PermissionDenied",
            Self::UntrustedServer { .. } => "UntrustedServer",
            Self::UnsupportedVersion { .. } => ErrorCode::UnsupportedMajor.name(),
            Self::Refused { code, .. } => name_of(*code),
            Self::Request(error) => error.code().name(),
            Self::TooManyStreams { .. } => ErrorCode::TooManyStreams.name(),
            Self::Timeout { .. } => "Timeout",
            Self::Disconnected { .. } => "Disconnected",
            Self::Protocol(_) => "Protocol",
            Self::Server(error) => error.code_name(),
            Self::File { .. } => "File",
        }
    }

    /// The [`ErrorCode`] as a number: the daemon's, or the one it would have sent for what the client found first.
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

    /// True where the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Server(error) => error.retryable,
            // Of a code that this version does not know, its class tells.
            Self::Refused { code, .. } => ErrorCode::from_u16(*code)
                .map_or(ErrorClass::of(*code) == Some(ErrorClass::Capacity), ErrorCode::retryable),
            Self::Unavailable { .. } | Self::Disconnected { .. } => true,
            _ => false,
        }
    }

    /// Where it is retryable: not before this many milliseconds.
    pub fn retry_after_ms(&self) -> u32 {
        match self {
            Self::Server(WireError { retry_after_ms, .. }) | Self::Refused { retry_after_ms, .. } => {
                *retry_after_ms
            }
            _ => 0,
        }
    }

    /// True where the daemon cannot be reached or is going away, so that a new connection may help.
    pub fn is_unreachable(&self) -> bool {
        const GOING: [u16; 2] = [ErrorCode::ServerDraining as u16, ErrorCode::Unavailable as u16];
        match self {
            Self::Unavailable { .. } | Self::Disconnected { .. } => true,
            Self::Refused { code, .. } => ErrorClass::of(*code) == Some(ErrorClass::Capacity),
            Self::Server(error) => GOING.contains(&error.code),
            _ => false,
        }
    }
}

fn versions(min: u16, max: u16) -> String {
    if min == max { format!("version {min}") } else { format!("versions {min} to {max}") }
}

fn name_of(code: u16) -> &'static str {
    ErrorCode::from_u16(code).map_or("Unknown", ErrorCode::name)
}
