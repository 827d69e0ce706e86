//! Converts between messages and payload bytes. No other file knows how payloads are encoded.
//!
//! The layout is bincode 1.x's default (little endian, fixed-width integers), through serde. The crate bincode itself
//! does not limit `encode`, accepts trailing bytes, and trusts lengths up to its limit. [`encode`] and [`decode`] close
//! these three holes.

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use bincode::error::DecodeError;

use super::header::{Flags, FrameHeader, HEADER_BYTES};
use super::{ErrorCode, Message, Op, Violation};

/// Most bytes of a payload. Larger data is passed as a file descriptor.
pub const PAYLOAD_BYTES_MAX: u32 = LIMIT as u32;

const LIMIT: usize = 1 << 20;

/// Limits how much one length inside a payload can make the decoder allocate.
const CONFIGURATION: Configuration<LittleEndian, Fixint, Limit<LIMIT>> =
    bincode::config::legacy().with_limit::<LIMIT>();

/// Why a payload is not sent or not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The payload does not fit a frame.
    #[error("the payload has {bytes} bytes, but a frame holds at most {max}: split it or pass it as a file")]
    TooLong {
        /// Size of the payload in bytes.
        bytes: usize,
        /// The limit in bytes.
        max: u32,
    },
    /// The bytes are not a message of this type.
    #[error("{message}: {reason}")]
    Malformed {
        /// Name of the message.
        message: &'static str,
        /// The fault of the bytes.
        reason: String,
    },
    /// The message ends before the payload does.
    #[error("{message}: {} bytes after its end", payload_bytes.saturating_sub(*used_bytes))]
    TrailingBytes {
        /// Name of the message.
        message: &'static str,
        /// Bytes of the message.
        used_bytes: usize,
        /// Bytes of the payload.
        payload_bytes: usize,
    },
    /// This version has no request with this op.
    #[error("op {op}: not a request of this protocol version")]
    UnknownOp {
        /// The op's number.
        op: u16,
    },
    /// A field breaks its own limit, or a critical extension is unknown.
    #[error(transparent)]
    Field(#[from] Violation),
}

impl CodecError {
    /// The error's number on the wire.
    pub const fn code(&self) -> ErrorCode {
        match self {
            Self::Malformed { .. } | Self::TrailingBytes { .. } => ErrorCode::BadPayload,
            Self::UnknownOp { .. } => ErrorCode::UnknownOp,
            Self::TooLong { .. } => ErrorCode::LimitExceeded,
            Self::Field(violation) => violation.code(),
        }
    }
}

/// Encodes `message`, after checking its fields' limits and its size.
///
/// # Errors
/// [`CodecError::Field`] and [`CodecError::TooLong`]: a message that the peer must refuse is not sent.
pub fn encode<T: Message>(message: &T) -> Result<Vec<u8>, CodecError> {
    let mut bytes = Vec::new();
    encode_after(&mut bytes, message, PAYLOAD_BYTES_MAX)?;
    Ok(bytes)
}

/// Decodes the message in `payload`: it must fill the payload, and each field must keep its limit.
///
/// Allocates at most 10 times the payload's size: entries of 10 bytes take 32, in a growing list. Each false length
/// adds 1 MiB, one per level of nested lists.
///
/// # Errors
/// [`CodecError`]; the frame itself was within bounds, so the connection can go on.
pub fn decode<T: Message>(payload: &[u8]) -> Result<T, CodecError> {
    if payload.len() > LIMIT {
        return Err(CodecError::TooLong { bytes: payload.len(), max: PAYLOAD_BYTES_MAX });
    }
    let (message, used_bytes): (T, usize) = bincode::serde::decode_from_slice(payload, CONFIGURATION)
        .map_err(|error| CodecError::Malformed { message: T::NAME, reason: reason(&error) })?;
    if used_bytes != payload.len() {
        return Err(CodecError::TrailingBytes { message: T::NAME, used_bytes, payload_bytes: payload.len() });
    }
    message.validate()?;
    Ok(message)
}

/// Describes a decoding error in the words of `PROTOCOL.md`; the decoder's own messages name its Rust types.
fn reason(error: &DecodeError) -> String {
    match error {
        DecodeError::UnexpectedEnd { .. } => "the payload ends before the message does".to_owned(),
        DecodeError::LimitExceeded | DecodeError::OutsideUsizeRange(_) => {
            "a count that reaches past the payload".to_owned()
        }
        DecodeError::InvalidBooleanValue(byte) => format!("a bool or optional field that begins with {byte}"),
        DecodeError::UnexpectedVariant { found, .. } => format!("an unknown variant {found}"),
        DecodeError::Utf8 { .. } => "a string that is not UTF-8".to_owned(),
        // The other errors are variant numbers that serde rejects.
        _ => "an unknown variant, or another value that its field cannot have".to_owned(),
    }
}

/// Encodes a whole frame, header and payload; `len_max` is the limit agreed in the hellos.
///
/// [`Flags::MORE`] is set for [`Op::Item`] and cleared for every other op: only items are followed by more frames.
///
/// # Errors
/// As [`encode`].
pub fn encode_frame<T: Message>(
    stream: u32,
    op: Op,
    flags: Flags,
    len_max: u32,
    message: &T,
) -> Result<Vec<u8>, CodecError> {
    encode_frame_with_descriptors(stream, op, flags, len_max, 0, message)
}

/// As [`encode_frame`], for a frame with `n_fds` file descriptors; the caller sends them with its first byte.
///
/// # Errors
/// As [`encode`].
pub fn encode_frame_with_descriptors<T: Message>(
    stream: u32,
    op: Op,
    flags: Flags,
    len_max: u32,
    n_fds: u8,
    message: &T,
) -> Result<Vec<u8>, CodecError> {
    let mut frame = vec![0; HEADER_BYTES];
    let len = encode_after(&mut frame, message, len_max.min(PAYLOAD_BYTES_MAX))?;
    let flags = flags.without(Flags::MORE).with(if op == Op::Item { Flags::MORE } else { Flags::NONE });
    let mut header = FrameHeader { len, stream, op: op as u16, flags, n_fds, crc_or_zero: 0 };
    if flags.contains(Flags::CRC) {
        header.crc_or_zero = header.checksum(&frame[HEADER_BYTES..]);
    }
    frame[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
    Ok(frame)
}

/// Appends the payload and returns its size. The size is checked here, because bincode's limit does not apply to
/// encoding.
fn encode_after<T: Message>(bytes: &mut Vec<u8>, message: &T, len_max: u32) -> Result<u32, CodecError> {
    message.validate()?;
    let before = bytes.len();
    bincode::serde::encode_into_std_write(message, bytes, CONFIGURATION)
        .map_err(|error| CodecError::Malformed { message: T::NAME, reason: error.to_string() })?;
    let len = bytes.len() - before;
    match u32::try_from(len) {
        Ok(len) if len <= len_max => Ok(len),
        _ => Err(CodecError::TooLong { bytes: len, max: len_max }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{PingRequest, limits};

    #[test]
    fn a_frame_is_its_header_then_its_payload() {
        let ping = PingRequest { payload: vec![7, 9], ext: vec![] };
        let frame = encode_frame(3, Op::Ping, Flags::CRC, PAYLOAD_BYTES_MAX, &ping).unwrap();
        let (header, payload) = frame.split_first_chunk().unwrap();
        let header = FrameHeader::parse(header, PAYLOAD_BYTES_MAX).unwrap();
        assert_eq!((header.len, header.stream, header.known_op()), (18, 3, Some(Op::Ping)));
        assert_eq!(payload, [2, 0, 0, 0, 0, 0, 0, 0, 7, 9, 0, 0, 0, 0, 0, 0, 0, 0]);
        header.check_payload(payload).unwrap();
        assert_eq!(decode::<PingRequest>(payload).unwrap(), ping);
    }

    #[test]
    fn a_list_over_its_own_limit_is_refused_both_ways() {
        let ping = PingRequest { payload: vec![0; limits::PING_BYTES_MAX + 1], ext: vec![] };
        assert_eq!(encode(&ping).unwrap_err().code(), ErrorCode::LimitExceeded);
        let bytes = bincode::serde::encode_to_vec(&ping, CONFIGURATION).unwrap();
        assert_eq!(decode::<PingRequest>(&bytes).unwrap_err().code(), ErrorCode::LimitExceeded);
    }

    #[test]
    fn a_message_larger_than_agreed_is_not_sent() {
        let ping = PingRequest { payload: vec![0; 100], ext: vec![] };
        let error = encode_frame(1, Op::Ping, Flags::NONE, 99, &ping).unwrap_err();
        assert_eq!(error, CodecError::TooLong { bytes: 116, max: 99 });
    }
}
