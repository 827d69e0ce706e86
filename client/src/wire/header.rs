//! The 16 bytes before each payload. They do not use bincode, so they can outlive it.

use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{ErrorCode, Op};

/// Bytes of a [`FrameHeader`].
pub const HEADER_BYTES: usize = 16;

/// Most file descriptors of one frame; the kernel would carry 253.
pub const FDS_MAX: u8 = 4;

/// The header as it is on the wire, little endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Layout {
    len: U32,
    stream: U32,
    op: U16,
    flags: u8,
    n_fds: u8,
    crc_or_zero: U32,
}

/// Flag bits of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags(u8);

impl Flags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// More frames follow on this stream; a frame from the server without it ends the stream.
    pub const MORE: Self = Self(1);
    /// The header's last field is a checksum.
    pub const CRC: Self = Self(2);
    /// All flags that this version knows.
    const KNOWN: Self = Self::MORE.with(Self::CRC);

    /// The flags of these bits, or `None` if an unknown bit is set.
    pub const fn from_bits(bits: u8) -> Option<Self> {
        if Self::KNOWN.contains(Self(bits)) { Some(Self(bits)) } else { None }
    }

    /// The bits as sent on the wire.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// True if every flag of `other` is set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These flags without those of `other`.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Flags of both.
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The header before each payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Bytes of the payload; the header is not counted.
    pub len: u32,
    /// The request's stream: odd and chosen by the client; 0 is the connection itself.
    pub stream: u32,
    /// An [`Op`] as a number, because an unknown op fails only its own request.
    pub op: u16,
    /// See [`Flags`].
    pub flags: Flags,
    /// File descriptors that come with the header's first byte.
    pub n_fds: u8,
    /// With [`Flags::CRC`]: CRC-32 (IEEE) of the header's first 12 bytes and the payload; else 0.
    pub crc_or_zero: u32,
}

/// Why 16 bytes are not a valid header, or a payload does not match its header. The connection closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The frame is longer than this connection allows.
    #[error("a frame of {len} bytes, but this connection allows {max}")]
    TooLong {
        /// Announced payload, in bytes.
        len: u32,
        /// Allowed payload, in bytes.
        max: u32,
    },
    /// The frame has an unknown flag.
    #[error("frame flags {bits:#04x}: only MORE (0x01) and CRC (0x02) are known")]
    UnknownFlags {
        /// All flag bits of the frame.
        bits: u8,
    },
    /// The frame announces more than [`FDS_MAX`] descriptors.
    #[error("a frame with {n_fds} file descriptors, but at most {FDS_MAX} are allowed")]
    TooManyDescriptors {
        /// Announced number of descriptors.
        n_fds: u8,
    },
    /// The checksum field is set without its flag.
    #[error("checksum field {crc:#010x} without the CRC flag: it must be 0")]
    StrayChecksum {
        /// Value of the field.
        crc: u32,
    },
    /// The payload does not match its checksum.
    #[error("checksum {got:#010x}, but the header says {want:#010x}")]
    BadChecksum {
        /// Checksum of the received bytes.
        got: u32,
        /// Checksum in the header.
        want: u32,
    },
}

impl HeaderError {
    /// The error's number on the wire.
    pub const fn code(&self) -> ErrorCode {
        match self {
            Self::TooLong { .. } => ErrorCode::FrameTooLong,
            Self::UnknownFlags { .. } | Self::StrayChecksum { .. } => ErrorCode::BadFrame,
            Self::TooManyDescriptors { .. } => ErrorCode::BadDescriptors,
            Self::BadChecksum { .. } => ErrorCode::BadChecksum,
        }
    }
}

impl FrameHeader {
    /// Reads a header; the payload may have up to `len_max` bytes. Allocates nothing.
    ///
    /// # Errors
    /// [`HeaderError`]: the rest of the stream cannot be trusted, so the connection closes.
    pub fn parse(bytes: &[u8; HEADER_BYTES], len_max: u32) -> Result<Self, HeaderError> {
        let layout: Layout = zerocopy::transmute!(*bytes);
        let len = layout.len.get();
        if len > len_max {
            return Err(HeaderError::TooLong { len, max: len_max });
        }
        let flags = Flags::from_bits(layout.flags).ok_or(HeaderError::UnknownFlags { bits: layout.flags })?;
        if layout.n_fds > FDS_MAX {
            return Err(HeaderError::TooManyDescriptors { n_fds: layout.n_fds });
        }
        let crc = layout.crc_or_zero.get();
        if crc != 0 && !flags.contains(Flags::CRC) {
            return Err(HeaderError::StrayChecksum { crc });
        }
        Ok(Self {
            len,
            stream: layout.stream.get(),
            op: layout.op.get(),
            flags,
            n_fds: layout.n_fds,
            crc_or_zero: crc,
        })
    }

    /// The header's bytes; nothing is checked.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        zerocopy::transmute!(Layout {
            len: U32::new(self.len),
            stream: U32::new(self.stream),
            op: U16::new(self.op),
            flags: self.flags.bits(),
            n_fds: self.n_fds,
            crc_or_zero: U32::new(self.crc_or_zero),
        })
    }

    /// The op, if this version knows it.
    pub fn known_op(&self) -> Option<Op> {
        Op::from_u16(self.op)
    }

    /// CRC-32 of the header's first 12 bytes and `payload`.
    pub fn checksum(&self, payload: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&self.to_bytes()[..HEADER_BYTES - size_of::<U32>()]);
        hasher.update(payload);
        hasher.finalize()
    }

    /// Compares `payload` with the checksum, if the header has one.
    ///
    /// # Errors
    /// [`HeaderError::BadChecksum`].
    pub fn check_payload(&self, payload: &[u8]) -> Result<(), HeaderError> {
        if !self.flags.contains(Flags::CRC) {
            return Ok(());
        }
        match self.checksum(payload) {
            got if got == self.crc_or_zero => Ok(()),
            got => Err(HeaderError::BadChecksum { got, want: self.crc_or_zero }),
        }
    }
}
