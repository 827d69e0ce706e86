//! Every limit at its edge: the last value that is taken, and the first that is not.

use rocmforge_client::wire::*;

use crate::common::{Largest, Smallest, filled};

#[test]
fn a_payload_may_be_as_long_as_agreed() {
    // A whole message and nothing but zeros after it: read to the end of the message, so the length was allowed.
    let longest = vec![0; PAYLOAD_BYTES_MAX as usize];
    assert!(matches!(decode::<PingRequest>(&longest), Err(CodecError::TrailingBytes { .. })));
    let ping = PingRequest { payload: vec![0; 100], ext: vec![] };
    assert_eq!(encode_frame(1, Op::Ping, Flags::NONE, 116, &ping).unwrap().len(), HEADER_BYTES + 116);
    assert!(encode_frame(1, Op::Ping, Flags::NONE, 115, &ping).is_err());
}

#[test]
fn a_header_may_say_as_much_as_agreed() {
    let header =
        FrameHeader { len: 7, stream: 3, op: 16, flags: Flags::NONE, n_fds: FDS_MAX, crc_or_zero: 0 };
    assert_eq!(FrameHeader::parse(&header.to_bytes(), 7), Ok(header));
    assert_eq!(FrameHeader::parse(&header.to_bytes(), 6), Err(HeaderError::TooLong { len: 7, max: 6 }));
    let more = FrameHeader { n_fds: FDS_MAX + 1, ..header };
    let refused = HeaderError::TooManyDescriptors { n_fds: FDS_MAX + 1 };
    assert_eq!(FrameHeader::parse(&more.to_bytes(), 7), Err(refused));
    let stray = FrameHeader { crc_or_zero: 1, ..header };
    assert_eq!(FrameHeader::parse(&stray.to_bytes(), 7), Err(HeaderError::StrayChecksum { crc: 1 }));
    assert_eq!((header.known_op(), FrameHeader { op: 9, ..header }.known_op()), (Some(Op::Ping), None));
}

#[test]
fn flags_are_bits_of_their_own() {
    let both = Flags::MORE.with(Flags::CRC);
    assert_eq!((Flags::NONE.bits(), Flags::MORE.bits(), Flags::CRC.bits(), both.bits()), (0, 1, 2, 3));
    for bits in 0..=u8::MAX {
        assert_eq!(Flags::from_bits(bits).map(Flags::bits), (bits <= 3).then_some(bits));
    }
    assert_eq!((both.with(Flags::CRC), both.without(Flags::CRC)), (both, Flags::MORE));
    assert_eq!(
        (Flags::MORE.without(Flags::CRC), Flags::MORE.without(Flags::MORE)),
        (Flags::MORE, Flags::NONE)
    );
    assert!(both.contains(Flags::MORE) && both.contains(both) && Flags::MORE.contains(Flags::NONE));
    assert!(!Flags::MORE.contains(both) && !Flags::MORE.contains(Flags::CRC));
}

#[test]
fn only_items_are_followed_by_more() {
    let ping = PingRequest { payload: vec![], ext: vec![] };
    let flags = |op, flags| {
        let frame = encode_frame(1, op, flags, PAYLOAD_BYTES_MAX, &ping).unwrap();
        FrameHeader::parse(frame.first_chunk().unwrap(), PAYLOAD_BYTES_MAX).unwrap().flags
    };
    assert_eq!(flags(Op::Item, Flags::NONE), Flags::MORE);
    assert_eq!(flags(Op::Reply, Flags::MORE), Flags::NONE);
    assert_eq!(flags(Op::End, Flags::MORE.with(Flags::CRC)), Flags::CRC);
    let frame = encode_frame_with_descriptors(5, Op::Load, Flags::NONE, PAYLOAD_BYTES_MAX, 2, &ping).unwrap();
    let header = FrameHeader::parse(frame.first_chunk().unwrap(), PAYLOAD_BYTES_MAX).unwrap();
    assert_eq!((header.stream, header.known_op(), header.n_fds), (5, Some(Op::Load), 2));
}

#[test]
fn what_refuses_a_frame_has_its_own_code() {
    let code = |error: HeaderError| error.code();
    assert_eq!(code(HeaderError::TooLong { len: 2, max: 1 }), ErrorCode::FrameTooLong);
    assert_eq!(code(HeaderError::UnknownFlags { bits: 4 }), ErrorCode::BadFrame);
    assert_eq!(code(HeaderError::StrayChecksum { crc: 1 }), ErrorCode::BadFrame);
    assert_eq!(code(HeaderError::TooManyDescriptors { n_fds: 5 }), ErrorCode::BadDescriptors);
    assert_eq!(code(HeaderError::BadChecksum { got: 1, want: 2 }), ErrorCode::BadChecksum);
    let unknown = ClientMessage::decode(9, &[]).unwrap_err();
    assert_eq!((unknown.code(), unknown), (ErrorCode::UnknownOp, CodecError::UnknownOp { op: 9 }));
    assert_eq!(reply_of(Op::Cancel, &[]).unwrap_err().code(), ErrorCode::UnknownOp);
    assert_eq!(CodecError::TooLong { bytes: 2, max: 1 }.code(), ErrorCode::LimitExceeded);
}

#[test]
fn an_error_has_a_class_even_where_its_number_is_not_known() {
    let classes = [
        (1, ErrorClass::Protocol, "Protocol"),
        (2, ErrorClass::Request, "Request"),
        (3, ErrorClass::Capacity, "Capacity"),
        (4, ErrorClass::Model, "Model"),
        (5, ErrorClass::Device, "Device"),
        (9, ErrorClass::Internal, "Internal"),
    ];
    for (hundreds, class, name) in classes {
        for code in [hundreds * 100, hundreds * 100 + 99] {
            assert_eq!(ErrorClass::of(code), Some(class));
        }
        let unknown = WireError { code: hundreds * 100 + 98, ..WireError::new(ErrorCode::Internal, "why") };
        assert_eq!((unknown.known_code(), unknown.class()), (None, Some(class)));
        assert_eq!((unknown.code_name(), class.name()), (name, name));
        assert_eq!(unknown.to_string(), format!("why ({name} {}98)", hundreds));
    }
    for code in [0, 99, 600, 899, 1000, u16::MAX] {
        assert_eq!(ErrorClass::of(code), None);
        let error = WireError { code, ..WireError::new(ErrorCode::Internal, "why") };
        assert_eq!(error.code_name(), "Unknown");
    }
    for code in ErrorCode::ALL {
        let error = WireError::new(*code, "why");
        assert_eq!((error.known_code(), error.code_name()), (Some(*code), code.name()));
        assert_eq!(Some(code.class()), ErrorClass::of(*code as u16));
    }
}

#[test]
fn an_error_keeps_sixteen_details_and_says_when_to_try_again() {
    let mut error = WireError::new(ErrorCode::ModelNotFound, "no such model");
    assert_eq!((error.retryable, error.retry_after_ms), (false, 0));
    for number in 0..limits::DETAILS_MAX + 3 {
        error = error.with_detail("number", number);
        assert_eq!(error.detail.len(), (number + 1).min(limits::DETAILS_MAX));
    }
    assert_eq!((error.detail[15].key.as_str(), error.detail[15].value.as_str()), ("number", "15"));
    let error = error.with_retry_after_ms(250);
    assert_eq!((error.retryable, error.retry_after_ms), (true, 250));
    assert_eq!((cut_text("aé", 3), cut_text("aé", 4), cut_text("", 0)), ("aé", "aé", ""));
}

#[test]
fn a_hello_names_what_it_asks_for() {
    let hello = ClientHello::new("t").to_bytes().unwrap();
    let named = ClientHello { name: "n".repeat(CLIENT_NAME_BYTES_MAX), ..ClientHello::new("t") };
    assert_eq!(ClientHello::parse(&named.to_bytes().unwrap()).unwrap(), named, "as long as may be");
    let longer = ClientHello { name: "n".repeat(CLIENT_NAME_BYTES_MAX + 1), ..named };
    assert_eq!(longer.to_bytes(), Err(HelloError::BadName));
    assert_eq!(HelloError::BadName.code(), ErrorCode::NotProtocol);
    let range = HelloError::BadRange { min_major: 2, max_major: 1 };
    assert_eq!(range.code(), ErrorCode::NotProtocol);
    let mut other = hello;
    other[3] ^= 1;
    assert_eq!(ClientHello::parse(&other).unwrap_err().code(), ErrorCode::NotProtocol);
    let refusal = ServerOffer::default().refuse(ErrorCode::Busy, 40);
    assert_eq!((refusal.status, refusal.major, refusal.retry_after_ms), (ErrorCode::Busy as u16, 0, 40));
    let mut bytes = refusal.to_bytes();
    assert_eq!(ServerHello::parse(&bytes).unwrap(), refusal);
    bytes[0] ^= 1;
    assert!(matches!(ServerHello::parse(&bytes), Err(HelloError::NotProtocol { .. })));
}

#[test]
fn notes_are_lines_that_fit_an_extension() {
    let notes = [("you may", "load\tand\npin".to_owned()), ("kept", "all".to_owned())];
    let status: StatusReply =
        StatusReply { ext: StatusReply::notes_ext(notes.into_iter()), ..filled(&mut Smallest) };
    assert_eq!(status.notes(), [("you may", "load and pin"), ("kept", "all")]);
    assert!(StatusReply::notes_ext([].into_iter()).is_empty());
    // Of the first line 4096 bytes in all, with its tab and its end.
    let long = |bytes: usize| [("k", "v".repeat(bytes)), ("z", "last".to_owned())];
    for (bytes, kept) in [(limits::EXT_BYTES_MAX - 3, 1), (limits::EXT_BYTES_MAX - 2, 0), (10, 2)] {
        let ext = DeviceStatus::notes_ext(long(bytes).into_iter());
        let device: DeviceStatus = DeviceStatus { ext, ..filled(&mut Largest) };
        assert_eq!(device.notes().len(), kept, "{bytes}");
        assert!(device.validate().is_ok());
    }
    let show: ShowReply = ShowReply {
        ext: vec![(EXT_SHOW_EXPERTS, b"8 experts".into()), (EXT_SHOW_POSITIONS, vec![0xff])],
        ..filled(&mut Smallest)
    };
    assert_eq!((show.experts(), show.positions()), (Some("8 experts"), None));
}

/// Each choice of a request has its own limit, too.
#[test]
fn choices_are_within_their_limits() {
    let to_device = |what| LoadToDeviceRequest { model: "m".into(), what, ext: vec![] };
    assert!(encode(&to_device(Preload::Layers(vec![0; limits::LAYERS_MAX]))).is_ok());
    let error = encode(&to_device(Preload::Layers(vec![0; limits::LAYERS_MAX + 1]))).unwrap_err();
    assert!(matches!(error, CodecError::Field(Violation::TooLong { field: "Layers", .. })), "{error}");
    let clear = |name: String| ClearCacheRequest { scope: CacheScope::Model(name), ext: vec![] };
    assert!(encode(&clear("m".repeat(limits::NAME_BYTES_MAX))).is_ok());
    assert_eq!(
        encode(&clear("m".repeat(limits::NAME_BYTES_MAX + 1))).unwrap_err().code(),
        ErrorCode::LimitExceeded
    );
}
