//! The first message of each side: fixed layouts without bincode, the same in every version of the protocol.

use std::str;

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{ErrorCode, INITIAL_CREDIT, PAYLOAD_BYTES_MAX, STREAMS_MAX};

/// First bytes of both hellos.
pub const MAGIC: [u8; 4] = *b"RFG1";

/// The only major version so far.
pub const VERSION_MAJOR: u16 = 1;

/// Highest minor version of [`VERSION_MAJOR`].
pub const VERSION_MINOR: u16 = 0;

/// Feature: the server sets [`super::Flags::CRC`] on each of its frames. A client may set it on its own at any time.
pub const FEATURE_CHECKSUM: u64 = 1;

/// Feature: the connection acts for another user, one of those that the daemon's configuration gives the client's. Bits 32 to
/// 63 of the features then are the number of that user among them, from 0. See [`ClientHello::acting_as`].
pub const FEATURE_ACTS: u64 = 2;

/// All feature bits that this version understands.
pub const FEATURES_KNOWN: u64 = FEATURE_CHECKSUM | FEATURE_ACTS;

/// Place of the number of [`FEATURE_ACTS`].
const NUMBER_AT: u32 = 32;

/// The bits of `features` that this version understands: a number only beside the bit that asks for it.
const fn known(features: u64) -> u64 {
    let number = if features & FEATURE_ACTS == 0 { 0 } else { !0 << NUMBER_AT };
    FEATURES_KNOWN | number
}

/// The number of [`FEATURE_ACTS`], if these features have it.
const fn number(features: u64) -> Option<u32> {
    // The shift leaves 32 bits.
    if features & FEATURE_ACTS == 0 { None } else { Some((features >> NUMBER_AT) as u32) }
}

/// Smallest frame limit a client may ask for: an error with all its details fits.
pub const PAYLOAD_BYTES_MIN: u32 = 1 << 16;

/// Bytes of a [`ClientHello`].
pub const CLIENT_HELLO_BYTES: usize = 88;

/// Bytes of a [`ServerHello`].
pub const SERVER_HELLO_BYTES: usize = 80;

/// Bytes of a client's name.
pub const CLIENT_NAME_BYTES_MAX: usize = 64;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ClientLayout {
    magic: [u8; 4],
    min_major: U16,
    max_major: U16,
    minor: U16,
    name_len: U16,
    max_frame: U32,
    features: U64,
    name: [u8; CLIENT_NAME_BYTES_MAX],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ServerLayout {
    magic: [u8; 4],
    status: U16,
    major: U16,
    minor: U16,
    min_major: U16,
    max_major: U16,
    max_minor: U16,
    features: U64,
    features_unknown: U64,
    max_frame: U32,
    max_streams: U32,
    initial_credit: U32,
    retry_after_ms: U32,
    server_id: [u8; 16],
    boot_id: [u8; 16],
}

/// The client's first message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientHello {
    /// Lowest major version of the client.
    pub min_major: u16,
    /// Highest major version of the client.
    pub max_major: u16,
    /// Highest minor version of `max_major`.
    pub minor: u16,
    /// Largest payload that the client accepts, in bytes.
    pub max_frame: u32,
    /// Requested feature bits.
    pub features: u64,
    /// The client's name for the log; at most [`CLIENT_NAME_BYTES_MAX`] bytes, no control characters.
    pub name: String,
}

/// The server's first message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerHello {
    /// 0, or the [`ErrorCode`] with which the server now closes the connection.
    pub status: u16,
    /// The version in force; 0 if refused.
    pub major: u16,
    /// Its minor version.
    pub minor: u16,
    /// Lowest major version of the server.
    pub min_major: u16,
    /// Highest major version of the server.
    pub max_major: u16,
    /// Highest minor version of `max_major`.
    pub max_minor: u16,
    /// Feature bits in force.
    pub features: u64,
    /// Feature bits that the client asked for but the server does not know.
    pub features_unknown: u64,
    /// Limits in force.
    pub limits: HelloLimits,
    /// If `status` is of the capacity class: wait at least this many milliseconds before the next attempt.
    pub retry_after_ms: u32,
    /// Random, made at each start of the daemon: the same daemon process has the same id.
    pub server_id: [u8; 16],
    /// The kernel's boot id.
    pub boot_id: [u8; 16],
}

/// Limits of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloLimits {
    /// Largest payload in either direction, in bytes.
    pub max_frame: u32,
    /// Most open streams.
    pub max_streams: u32,
    /// Items that the server may send on a stream before the client grants credit.
    pub initial_credit: u32,
}

impl Default for HelloLimits {
    fn default() -> Self {
        Self { max_frame: PAYLOAD_BYTES_MAX, max_streams: STREAMS_MAX, initial_credit: INITIAL_CREDIT }
    }
}

/// Why bytes are not a valid hello.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The first bytes are not [`MAGIC`].
    #[error("the other side does not speak this protocol: its first bytes are {found:02x?}, not \"RFG1\"")]
    NotProtocol {
        /// The peer's first bytes.
        found: [u8; 4],
    },
    /// The name is too long, not text, or not padded with zeros.
    #[error(
        "the client's name is not text of at most {CLIENT_NAME_BYTES_MAX} bytes, without control characters and padded with zeros"
    )]
    BadName,
    /// The version range ends before it begins.
    #[error("the version range {min_major} to {max_major} ends before it begins")]
    BadRange {
        /// Lowest major version.
        min_major: u16,
        /// Highest major version.
        max_major: u16,
    },
}

impl HelloError {
    /// The error's number on the wire.
    pub const fn code(&self) -> ErrorCode {
        ErrorCode::NotProtocol
    }
}

impl ClientHello {
    /// A hello of this version. `name` is cut to fit, and its control characters are removed.
    pub fn new(name: &str) -> Self {
        let name: String = name.chars().filter(|c| !c.is_control()).collect();
        Self {
            min_major: VERSION_MAJOR,
            max_major: VERSION_MAJOR,
            minor: VERSION_MINOR,
            max_frame: PAYLOAD_BYTES_MAX,
            features: 0,
            name: super::cut_text(&name, CLIENT_NAME_BYTES_MAX).to_owned(),
        }
    }

    /// The same hello, to act for the user of this number among those that the client's may act for.
    #[must_use]
    pub fn acting_as(mut self, user: u32) -> Self {
        let others = self.features & u64::from(u32::MAX);
        self.features = others | FEATURE_ACTS | u64::from(user) << NUMBER_AT;
        self
    }

    /// The number of the user that the connection acts for, if it acts.
    pub fn acts_as(&self) -> Option<u32> {
        number(self.features)
    }

    /// Reads a client's hello.
    ///
    /// # Errors
    /// [`HelloError`]: answer with [`ServerOffer::refuse`] and close.
    pub fn parse(bytes: &[u8; CLIENT_HELLO_BYTES]) -> Result<Self, HelloError> {
        let layout: ClientLayout = zerocopy::transmute!(*bytes);
        if layout.magic != MAGIC {
            return Err(HelloError::NotProtocol { found: layout.magic });
        }
        let (name, padding) =
            layout.name.split_at_checked(layout.name_len.get().into()).ok_or(HelloError::BadName)?;
        let name = str::from_utf8(name).map_err(|_| HelloError::BadName)?;
        if name.chars().any(char::is_control) || padding.iter().any(|byte| *byte != 0) {
            return Err(HelloError::BadName);
        }
        let (min_major, max_major) = (layout.min_major.get(), layout.max_major.get());
        if min_major > max_major {
            return Err(HelloError::BadRange { min_major, max_major });
        }
        Ok(Self {
            min_major,
            max_major,
            minor: layout.minor.get(),
            max_frame: layout.max_frame.get(),
            features: layout.features.get(),
            name: name.to_owned(),
        })
    }

    /// Encodes the hello.
    ///
    /// # Errors
    /// [`HelloError::BadName`] if the name is longer than [`CLIENT_NAME_BYTES_MAX`].
    pub fn to_bytes(&self) -> Result<[u8; CLIENT_HELLO_BYTES], HelloError> {
        let mut name = [0; CLIENT_NAME_BYTES_MAX];
        name.get_mut(..self.name.len()).ok_or(HelloError::BadName)?.copy_from_slice(self.name.as_bytes());
        let name_len = u16::try_from(self.name.len()).map_err(|_| HelloError::BadName)?;
        Ok(zerocopy::transmute!(ClientLayout {
            magic: MAGIC,
            min_major: U16::new(self.min_major),
            max_major: U16::new(self.max_major),
            minor: U16::new(self.minor),
            name_len: U16::new(name_len),
            max_frame: U32::new(self.max_frame),
            features: U64::new(self.features),
            name,
        }))
    }
}

impl ServerHello {
    /// The number of the user that the connection acts for, if the server lets it act.
    pub fn acts_as(&self) -> Option<u32> {
        number(self.features)
    }

    /// Reads a server's hello, accepted or refused.
    ///
    /// # Errors
    /// [`HelloError::NotProtocol`].
    pub fn parse(bytes: &[u8; SERVER_HELLO_BYTES]) -> Result<Self, HelloError> {
        let layout: ServerLayout = zerocopy::transmute!(*bytes);
        if layout.magic != MAGIC {
            return Err(HelloError::NotProtocol { found: layout.magic });
        }
        Ok(Self {
            status: layout.status.get(),
            major: layout.major.get(),
            minor: layout.minor.get(),
            min_major: layout.min_major.get(),
            max_major: layout.max_major.get(),
            max_minor: layout.max_minor.get(),
            features: layout.features.get(),
            features_unknown: layout.features_unknown.get(),
            limits: HelloLimits {
                max_frame: layout.max_frame.get(),
                max_streams: layout.max_streams.get(),
                initial_credit: layout.initial_credit.get(),
            },
            retry_after_ms: layout.retry_after_ms.get(),
            server_id: layout.server_id,
            boot_id: layout.boot_id,
        })
    }

    /// Encodes the hello.
    pub fn to_bytes(&self) -> [u8; SERVER_HELLO_BYTES] {
        zerocopy::transmute!(ServerLayout {
            magic: MAGIC,
            status: U16::new(self.status),
            major: U16::new(self.major),
            minor: U16::new(self.minor),
            min_major: U16::new(self.min_major),
            max_major: U16::new(self.max_major),
            max_minor: U16::new(self.max_minor),
            features: U64::new(self.features),
            features_unknown: U64::new(self.features_unknown),
            max_frame: U32::new(self.limits.max_frame),
            max_streams: U32::new(self.limits.max_streams),
            initial_credit: U32::new(self.limits.initial_credit),
            retry_after_ms: U32::new(self.retry_after_ms),
            server_id: self.server_id,
            boot_id: self.boot_id,
        })
    }
}

/// The versions and limits that a server offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerOffer {
    /// Highest minor version of [`VERSION_MAJOR`].
    pub minor: u16,
    /// Limits of each connection.
    pub limits: HelloLimits,
    /// Random, made at each start of the daemon.
    pub server_id: [u8; 16],
    /// The kernel's boot id.
    pub boot_id: [u8; 16],
}

impl Default for ServerOffer {
    fn default() -> Self {
        Self { minor: VERSION_MINOR, limits: HelloLimits::default(), server_id: [0; 16], boot_id: [0; 16] }
    }
}

impl ServerOffer {
    /// The answer to `hello`: accepted if `status` is 0; otherwise send it and close. A server that lets nobody act for others
    /// refuses [`ClientHello::acts_as`] before.
    pub fn answer(&self, hello: &ClientHello) -> ServerHello {
        if !(hello.min_major..=hello.max_major).contains(&VERSION_MAJOR) {
            return self.refuse(ErrorCode::UnsupportedMajor, 0);
        }
        if hello.max_frame < PAYLOAD_BYTES_MIN {
            return self.refuse(ErrorCode::LimitExceeded, 0);
        }
        // `minor` belongs to `max_major`. The client states no minor of a lower major, so 0 is safe.
        let minor = if hello.max_major == VERSION_MAJOR { hello.minor.min(self.minor) } else { 0 };
        ServerHello {
            status: 0,
            major: VERSION_MAJOR,
            minor,
            features: hello.features & known(hello.features),
            features_unknown: hello.features & !known(hello.features),
            limits: HelloLimits { max_frame: self.limits.max_frame.min(hello.max_frame), ..self.limits },
            ..self.refuse(ErrorCode::Internal, 0)
        }
    }

    /// A refusal; the connection closes after it. `retry_after_ms` matters for codes of the capacity class.
    pub fn refuse(&self, code: ErrorCode, retry_after_ms: u32) -> ServerHello {
        ServerHello {
            status: code as u16,
            major: 0,
            minor: 0,
            min_major: VERSION_MAJOR,
            max_major: VERSION_MAJOR,
            max_minor: self.minor,
            features: 0,
            features_unknown: 0,
            limits: self.limits,
            retry_after_ms,
            server_id: self.server_id,
            boot_id: self.boot_id,
        }
    }
}
