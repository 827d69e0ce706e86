//! Target `frame_header`: the bytes of a connection, as daemon and client read them.

use rocmforge_client::wire::{
    CLIENT_HELLO_BYTES, ClientHello, FrameHeader, HEADER_BYTES, PAYLOAD_BYTES_MAX, SERVER_HELLO_BYTES,
    ServerHello, ServerOffer,
};

use crate::allocations::peak_of;
use crate::message::payload_of;

/// Reads `data` as a hello and as a header with its payload. For any input: no panic, heap within the codec's bound,
/// and accepted input encodes to the same bytes again.
pub fn frame_header(data: &[u8], plant: bool) {
    if let Some(bytes) = data.first_chunk::<CLIENT_HELLO_BYTES>()
        && let Ok(hello) = ClientHello::parse(bytes)
    {
        assert_eq!(hello.to_bytes().as_ref(), Ok(bytes));
        let answer = ServerOffer::default().answer(&hello);
        assert_eq!(ServerHello::parse(&answer.to_bytes()).as_ref(), Ok(&answer));
    }
    if let Some(bytes) = data.first_chunk::<SERVER_HELLO_BYTES>()
        && let Ok(hello) = ServerHello::parse(bytes)
    {
        assert_eq!(&hello.to_bytes(), bytes);
    }
    let Some((bytes, rest)) = data.split_first_chunk::<HEADER_BYTES>() else { return };
    let header = match FrameHeader::parse(bytes, PAYLOAD_BYTES_MAX) {
        Ok(header) => header,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    assert_eq!(&header.to_bytes(), bytes);
    // A payload that ends early is used as far as it goes: otherwise most inputs would fuzz nothing.
    let payload = &rest[..rest.len().min(header.len as usize)];
    let _ = header.check_payload(payload);

    let ((), peak) = peak_of(|| payload_of(&header, payload));
    // A false length allocates up to 1 MiB before its first element is missing; lists nest up to four deep. Data that
    // exists is held twice: once as a message and once encoded again.
    let most = (4 << 20) + 16 * payload.len() + 4096;
    assert!(peak <= most, "{peak} bytes of heap for a payload of {}", payload.len());

    if plant && header.known_op().is_some() {
        crate::planted(&header.stream.to_le_bytes());
    }
}
