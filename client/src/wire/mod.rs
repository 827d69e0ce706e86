//! The protocol without I/O: fixed headers, hellos, payload codec, messages.
//!
//! A connection starts with one [`ClientHello`] and one [`ServerHello`], each with a fixed layout. Frames follow: a
//! [`FrameHeader`] of 16 bytes and a payload of [`FrameHeader::len`] bytes, which [`decode`] turns into a message.

mod codec;
mod error;
mod header;
mod hello;
mod messages;
mod op;
mod validate;

pub use codec::{CodecError, PAYLOAD_BYTES_MAX, decode, encode, encode_frame, encode_frame_with_descriptors};
pub use error::{ErrorClass, ErrorCode, WireError, cut_text};
pub use header::{FDS_MAX, Flags, FrameHeader, HEADER_BYTES, HeaderError};
pub use hello::{
    CLIENT_HELLO_BYTES, CLIENT_NAME_BYTES_MAX, ClientHello, FEATURE_ACTS, FEATURE_CHECKSUM, FEATURES_KNOWN,
    HelloError, HelloLimits, MAGIC, PAYLOAD_BYTES_MIN, SERVER_HELLO_BYTES, ServerHello, ServerOffer,
    VERSION_MAJOR, VERSION_MINOR,
};
pub use messages::*;
pub use op::{Call, ClientMessage, Op, reply_of};
pub use validate::{Message, Validate, Violation, limits};

/// Items that a server may send on a new stream before the client grants more.
pub const INITIAL_CREDIT: u32 = 32;

/// Most open streams of a client on one connection.
pub const STREAMS_MAX: u32 = 64;

/// For fuzzers: parses `bytes` as a client's hello, a server's hello, and a frame of every message type.
#[doc(hidden)]
pub fn fuzz_frame(bytes: &[u8]) {
    if let Some((hello, _)) = bytes.split_first_chunk() {
        let _ = ClientHello::parse(hello).map(|hello| ServerOffer::default().answer(&hello));
    }
    if let Some((hello, _)) = bytes.split_first_chunk() {
        let _ = ServerHello::parse(hello);
    }
    let Some((header, rest)) = bytes.split_first_chunk() else { return };
    let Ok(header) = FrameHeader::parse(header, PAYLOAD_BYTES_MAX) else { return };
    let payload = &rest[..rest.len().min(header.len as usize)];
    let _ = header.check_payload(payload);
    let _ = ClientMessage::decode(header.op, payload);
    op::fuzz_every_message(payload);
}
