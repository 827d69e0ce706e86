//! Target `message`: each message of the protocol, past its header.

use rocmforge_client::wire::{
    ClientMessage, EXT_GENERATE_FORM, EXT_GENERATE_PENALTIES, EXT_GENERATE_SAMPLERS, FrameHeader,
    GenerateEnd, GenerateItem, GenerateRequest, HEADER_BYTES, Message, Op, PAYLOAD_BYTES_MAX, WireError,
    decode, encode, reply_of,
};

use crate::allocations::peak_of;

/// The first byte chooses the message type of the rest. For any input: no panic, heap within the codec's bound, and
/// accepted input encodes to the same bytes again.
pub fn message(data: &[u8], plant: bool) {
    let Some((&which, payload)) = data.split_first() else { return };
    let op = Op::ALL[usize::from(which) % Op::ALL.len()];
    // Also covers each op that a reply may answer: the stream's number stands for it.
    let header = frame(op, u32::from(which) / Op::ALL.len() as u32, payload.len());
    let ((), peak) = peak_of(|| payload_of(&header, payload));
    let most = (4 << 20) + 16 * payload.len() + 4096;
    assert!(peak <= most, "{peak} bytes of heap for a {} of {}", op.name(), payload.len());
    // An accepted request with a number that no seed contains.
    if plant
        && let Ok(ClientMessage::Generate(request)) = ClientMessage::decode(op as u16, payload)
        && request.max_tokens > 0xffff
    {
        crate::planted(b"ROCm");
    }
}

fn frame(op: Op, stream: u32, len: usize) -> FrameHeader {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&(len as u32).to_le_bytes());
    bytes[4..8].copy_from_slice(&stream.to_le_bytes());
    bytes[8..10].copy_from_slice(&(op as u16).to_le_bytes());
    FrameHeader::parse(&bytes, PAYLOAD_BYTES_MAX).expect("a header without flags is a header")
}

/// Decodes a frame's payload by its header.
pub(crate) fn payload_of(header: &FrameHeader, payload: &[u8]) {
    match header.known_op() {
        Some(Op::Item) => same_bytes::<GenerateItem>(payload),
        Some(Op::End) => same_bytes::<GenerateEnd>(payload),
        Some(Op::Error) => same_bytes::<WireError>(payload),
        // A reply's frame does not contain the request's op; the stream's number stands for it.
        Some(Op::Reply) => {
            let op = Op::ALL[header.stream as usize % Op::ALL.len()];
            let _ = reply_of(op, payload);
        }
        _ => match ClientMessage::decode(header.op, payload) {
            Ok(message) => {
                assert_eq!(message.op() as u16, header.op);
                if let ClientMessage::Generate(request) = &message {
                    extensions_again(request);
                }
                written_again(&message, payload);
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        },
    }
}

fn same_bytes<T: Message>(payload: &[u8]) {
    if let Ok(message) = decode::<T>(payload) {
        assert_eq!(encode(&message).as_deref(), Ok(payload), "{}", T::NAME);
    }
}

/// Extensions of a request that are read have the same bytes again.
fn extensions_again(request: &GenerateRequest) {
    let bytes = |key| request.ext.iter().find(|(of, _)| *of == key).map(|(_, bytes)| bytes.clone());
    if let Ok(Some(form)) = request.form() {
        assert_eq!(Some(form.bytes()), bytes(EXT_GENERATE_FORM));
    }
    if let Ok(Some(penalties)) = request.penalties() {
        assert_eq!(Some(penalties.bytes()), bytes(EXT_GENERATE_PENALTIES));
    }
    if let Ok(Some(samplers)) = request.samplers() {
        assert_eq!(Some(samplers.bytes()), bytes(EXT_GENERATE_SAMPLERS));
    }
}

fn written_again(message: &ClientMessage, payload: &[u8]) {
    use ClientMessage as M;
    let bytes = match message {
        M::Cancel(m) => encode(m),
        M::Credit(m) => encode(m),
        M::Ping(m) => encode(m),
        M::Info(m) => encode(m),
        M::List(m) => encode(m),
        M::Show(m) => encode(m),
        M::Load(m) => encode(m),
        M::Unload(m) => encode(m),
        M::Ps(m) => encode(m),
        M::CancelRequests(m) => encode(m),
        M::LimitUser(m) => encode(m),
        M::Users(m) => encode(m),
        M::Sessions(m) => encode(m),
        M::ForgetSession(m) => encode(m),
        M::Status(m) => encode(m),
        M::Tokenize(m) => encode(m),
        M::Detokenize(m) => encode(m),
        M::Doctor(m) => encode(m),
        M::Generate(m) => encode(m),
        M::LoadToDevice(m) => encode(m),
        M::ClearCache(m) => encode(m),
        M::Plan(m) => encode(m),
        M::Residency(m) => encode(m),
        M::SetRules(m) => encode(m),
        M::Subscribe(m) => encode(m),
        M::Fail(m) => encode(m),
    };
    assert_eq!(bytes.as_deref(), Ok(payload), "{:?}", message.op());
}
