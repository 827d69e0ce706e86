//! Every limit at its edge: the last accepted value and the first refused one.

use rocmforge_client::wire::*;

use crate::common::{Largest, Smallest, filled};

#[test]
fn a_payload_may_be_as_long_as_agreed() {
    // A whole message followed only by zeros: the decoder reached its end, so it accepted the length.
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
fn each_refusal_of_a_frame_has_its_own_code() {
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
    // The first line has 4096 bytes in total, with its tab and its newline.
    let long = |bytes: usize| [("k", "v".repeat(bytes)), ("z", "last".to_owned())];
    for (bytes, kept) in [(limits::EXT_BYTES_MAX - 3, 1), (limits::EXT_BYTES_MAX - 2, 0), (10, 2)] {
        let ext = DeviceStatus::notes_ext(long(bytes).into_iter());
        let device: DeviceStatus = DeviceStatus { ext, ..filled(&mut Largest) };
        assert_eq!(device.notes().len(), kept, "{bytes}");
        assert!(device.validate().is_ok());
    }
    let show = |positions: &[u8]| ShowReply {
        ext: vec![(EXT_SHOW_EXPERTS, b"8 experts".into()), (EXT_SHOW_POSITIONS, positions.into())],
        ..filled(&mut Smallest)
    };
    let named = show(b"linear by 4");
    assert_eq!((named.experts(), named.positions()), (Some("8 experts"), Some("linear by 4")));
    assert_eq!(show(b"\xff").positions(), None);
}

#[test]
fn a_payload_over_the_limit_is_refused_before_decoding() {
    let error = decode::<PingRequest>(&vec![0; PAYLOAD_BYTES_MAX as usize + 1]).unwrap_err();
    assert_eq!(error, CodecError::TooLong { bytes: PAYLOAD_BYTES_MAX as usize + 1, max: PAYLOAD_BYTES_MAX });
}

#[test]
fn extensions_that_must_be_understood_fail_and_others_pass() {
    let with = |ext| encode_unchecked(&Cancel { ext });
    assert!(decode::<Cancel>(&with(vec![(5, vec![1]), (6, vec![])])).is_ok());
    let error = decode::<Cancel>(&with(vec![(EXT_CRITICAL | 5, vec![1])])).unwrap_err();
    assert_eq!(error.code(), ErrorCode::UnknownExtension);
    let error = decode::<Cancel>(&with(vec![(5, vec![1]), (5, vec![])])).unwrap_err();
    assert_eq!(error.code(), ErrorCode::BadPayload);
    let error = decode::<Cancel>(&with(vec![(5, vec![0; limits::EXT_BYTES_MAX + 1])])).unwrap_err();
    assert_eq!(error.code(), ErrorCode::LimitExceeded);
    let nested = ModelSummary { ext: vec![(EXT_CRITICAL, vec![])], ..filled(&mut Smallest) };
    let list = ListReply { models: vec![nested], more: false, ext: vec![] };
    assert!(matches!(encode(&list), Err(CodecError::Field(Violation::UnknownExtension { .. }))));
}

#[test]
fn the_session_of_a_request_is_understood_in_no_other_message() {
    let request = |name: &str| GenerateRequest::new("m", Prompt::Ids(vec![1])).with_session(name);
    let bytes = encode(&request("old").with_session("été")).unwrap();
    assert_eq!(decode::<GenerateRequest>(&bytes).unwrap().session(), Ok(Some("été")));
    assert_eq!(GenerateRequest::new("m", Prompt::Ids(vec![])).session(), Ok(None));
    let error = decode::<Cancel>(&encode_unchecked(&Cancel { ext: request("s").ext })).unwrap_err();
    assert_eq!(error.code(), ErrorCode::UnknownExtension);
    for name in ["", "\t", "\u{7f}", &"n".repeat(limits::LABEL_BYTES_MAX + 1)] {
        assert_eq!(request(name).session(), Err(BadSessionName), "{name:?}");
    }
    let not_text = GenerateRequest { ext: vec![(EXT_GENERATE_SESSION, vec![0xff])], ..request("s") };
    assert_eq!(not_text.session(), Err(BadSessionName));
}

/// `Cancel` by hand, without the checks of [`encode`].
fn encode_unchecked(cancel: &Cancel) -> Vec<u8> {
    let mut bytes = (cancel.ext.len() as u64).to_le_bytes().to_vec();
    for (key, value) in &cancel.ext {
        bytes.extend(key.to_le_bytes());
        bytes.extend((value.len() as u64).to_le_bytes());
        bytes.extend(value);
    }
    bytes
}

#[test]
fn each_field_has_its_own_limit() {
    let long = |bytes| "x".repeat(bytes);
    let generate = || GenerateRequest::new("m", Prompt::Text("p".into()));
    let check = |request: GenerateRequest, field: &str| match encode(&request) {
        Err(CodecError::Field(Violation::TooLong { field: found, .. })) => assert_eq!(found, field),
        other => panic!("{field}: {other:?}"),
    };
    check(GenerateRequest { model: long(256), ..generate() }, "model");
    check(GenerateRequest { stop: vec![long(257)], ..generate() }, "stop");
    check(GenerateRequest { stop: vec![long(1); 17], ..generate() }, "stop");
    check(GenerateRequest { prompt: Prompt::Text(long(limits::TEXT_BYTES_MAX + 1)), ..generate() }, "Text");
    check(GenerateRequest { prompt: Prompt::Ids(vec![0; limits::IDS_MAX + 1]), ..generate() }, "Ids");
    let role = ChatMessage { role: long(65), content: String::new() };
    check(GenerateRequest { prompt: Prompt::Chat(vec![role]), ..generate() }, "role");
    let largest = GenerateRequest {
        prompt: Prompt::Text(long(limits::TEXT_BYTES_MAX)),
        model: long(limits::NAME_BYTES_MAX),
        ..generate()
    };
    assert!(encode(&largest).is_ok(), "the largest text fits a frame");
}

#[test]
fn errors_are_cut_to_fit() {
    let mut error = WireError::new(ErrorCode::Internal, &"é".repeat(400));
    for number in 0..20 {
        error = error.with_detail(&"k".repeat(300), "v".repeat(5000 + number));
    }
    assert_eq!(error.message.len(), limits::ERROR_BYTES_MAX);
    assert!(encode(&error).unwrap().len() <= PAYLOAD_BYTES_MAX as usize);
    assert_eq!(cut_text("aé", 2), "a");
    assert_eq!(cut_text("é", 1), "");
}

#[test]
fn versions_are_agreed_on_or_refused_by_name() {
    let offer = ServerOffer { minor: 3, ..ServerOffer::default() };
    let hello =
        |min_major, max_major, minor| ClientHello { min_major, max_major, minor, ..ClientHello::new("t") };
    let agreed = |hello: &ClientHello| {
        let answer = offer.answer(hello);
        (answer.status, answer.major, answer.minor)
    };
    assert_eq!(agreed(&hello(1, 1, 9)), (0, 1, 3), "a later minor: the server's");
    assert_eq!(agreed(&hello(1, 1, 2)), (0, 1, 2), "an earlier minor: the client's");
    assert_eq!(agreed(&hello(0, 7, 5)), (0, 1, 0), "the minor of another major says nothing");
    assert_eq!(agreed(&hello(2, 7, 0)), (ErrorCode::UnsupportedMajor as u16, 0, 0));
    assert_eq!(agreed(&hello(0, 0, 0)), (ErrorCode::UnsupportedMajor as u16, 0, 0));
    let answer = offer.answer(&ClientHello { features: FEATURE_CHECKSUM | 1 << 9, ..hello(1, 1, 0) });
    assert_eq!((answer.features, answer.features_unknown), (FEATURE_CHECKSUM, 1 << 9));
    let acting = offer.answer(&hello(1, 1, 0).acting_as(7));
    assert_eq!(
        (acting.features, acting.features_unknown, acting.acts_as()),
        (FEATURE_ACTS | 7 << 32, 0, Some(7))
    );
    let number = offer.answer(&ClientHello { features: 7 << 32, ..hello(1, 1, 0) });
    assert_eq!((number.features, number.features_unknown, number.acts_as()), (0, 7 << 32, None));
    let both = ClientHello { features: FEATURE_CHECKSUM | 1 << 9, ..hello(1, 1, 0) }
        .acting_as(7)
        .acting_as(u32::MAX);
    assert_eq!(both.features, FEATURE_CHECKSUM | FEATURE_ACTS | 1 << 9 | u64::from(u32::MAX) << 32);
    let small = ClientHello { max_frame: PAYLOAD_BYTES_MIN, ..hello(1, 1, 0) };
    assert_eq!(offer.answer(&small).limits.max_frame, PAYLOAD_BYTES_MIN);
    let smaller = ClientHello { max_frame: PAYLOAD_BYTES_MIN - 1, ..small };
    assert_eq!(offer.answer(&smaller).status, ErrorCode::LimitExceeded as u16);
}

#[test]
fn a_hello_with_a_bad_name_or_range_is_refused() {
    let good = ClientHello::new("näme").to_bytes().unwrap();
    assert_eq!(ClientHello::parse(&good).unwrap().name, "näme");
    let changed = |at: usize, byte: u8| {
        let mut bytes = good;
        bytes[at] = byte;
        ClientHello::parse(&bytes).unwrap_err()
    };
    assert!(matches!(changed(0, b'X'), HelloError::NotProtocol { .. }));
    assert_eq!(changed(4, 2), HelloError::BadRange { min_major: 2, max_major: 1 });
    assert_eq!(changed(10, 65), HelloError::BadName, "longer than the field");
    assert_eq!(changed(11, 0xff), HelloError::BadName, "much longer");
    assert_eq!(changed(10, 2), HelloError::BadName, "ends inside a character");
    assert_eq!(changed(24, 0x1b), HelloError::BadName, "a control character");
    assert_eq!(changed(87, 1), HelloError::BadName, "not zeros after it");
    assert_eq!(ClientHello::new(&"\u{7}é".repeat(50)).name, "é".repeat(32));
}

#[test]
fn every_field_of_a_header_is_checked() {
    let good = encode_frame(1, Op::Ping, Flags::CRC, PAYLOAD_BYTES_MAX, &PingRequest::default()).unwrap();
    let (header, payload) = good.split_first_chunk::<HEADER_BYTES>().unwrap();
    let parse = |at: usize, byte: u8| {
        let mut bytes = *header;
        bytes[at] = byte;
        FrameHeader::parse(&bytes, PAYLOAD_BYTES_MAX)
    };
    assert_eq!(parse(0, header[0]).unwrap().check_payload(payload), Ok(()));
    assert_eq!(parse(10, 4), Err(HeaderError::UnknownFlags { bits: 4 }));
    assert_eq!(parse(11, 5), Err(HeaderError::TooManyDescriptors { n_fds: 5 }));
    assert!(matches!(parse(10, 0), Err(HeaderError::StrayChecksum { .. })));
    for at in [4, 8, 11, 12] {
        let changed = parse(at, header[at] ^ 1).unwrap();
        assert!(matches!(changed.check_payload(payload), Err(HeaderError::BadChecksum { .. })), "byte {at}");
    }
    assert!(FrameHeader::parse(header, payload.len() as u32 - 1).is_err(), "over the agreed limit");
}

#[test]
fn bytes_that_are_no_message_are_refused_in_the_protocols_words() {
    let told = |error: CodecError| match error {
        CodecError::Malformed { reason, .. } => reason,
        other => panic!("{other}"),
    };
    let cut_short = told(decode::<PingRequest>(b"abc").unwrap_err());
    assert_eq!(cut_short, "the payload ends before the message does");
    let count = told(decode::<LoadRequest>(&[0xff; 8]).unwrap_err());
    assert_eq!(count, "a count that reaches past the payload");
    // A name of one byte, then the rest.
    let after_name = |name: u8, rest: &[u8]| [&[1, 0, 0, 0, 0, 0, 0, 0, name], rest].concat();
    let bool = told(decode::<LoadRequest>(&after_name(b'm', &[2])).unwrap_err());
    assert_eq!(bool, "a bool or optional field that begins with 2");
    let pinned = told(decode::<SetRulesRequest>(&after_name(b'm', &[2])).unwrap_err());
    assert_eq!(pinned, "an unknown variant 2");
    let text = told(decode::<LoadRequest>(&after_name(0xff, &[1])).unwrap_err());
    assert_eq!(text, "a string that is not UTF-8");
    let prompt = told(decode::<GenerateRequest>(&after_name(b'm', &[3, 0, 0, 0])).unwrap_err());
    assert!(prompt.starts_with("an unknown variant"), "{prompt}");
}

#[test]
fn bytes_after_the_message_are_refused() {
    let error = decode::<PingReply>(&[0; 17]).unwrap_err();
    assert_eq!(error, CodecError::TrailingBytes { message: "PingReply", used_bytes: 16, payload_bytes: 17 });
}

#[test]
fn limits_are_as_many_bytes_as_they_say() {
    let sizes =
        [limits::TEXT_BYTES_MAX, limits::IDS_MAX, PAYLOAD_BYTES_MIN as usize, PAYLOAD_BYTES_MAX as usize];
    assert_eq!(sizes, [1_044_480, 261_120, 65_536, 1_048_576]);
    for code in ErrorCode::ALL {
        assert_eq!(code.retryable(), matches!(*code as u16, 107 | 300..=303 | 501), "{}", code.name());
    }
}

/// Each variant of a request has its own limit, too.
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
