//! Bytes that break the framing rules: a typed error on stream 0, then the daemon closes that connection and no other.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use rocmforge_client::wire::{
    Cancel, ClientHello, Credit, ErrorCode, FEATURE_CHECKSUM, Flags, FrameHeader, Op, PAYLOAD_BYTES_MAX,
    PAYLOAD_BYTES_MIN, PingRequest, ShowReply, ShowRequest, TokenizeRequest, WireError, decode, encode_frame,
};

use crate::forge::{Value, tiny_llama};
use crate::raw::{Raw, header};
use crate::rig::{PATIENCE, Rig, TINY, anonymous, story};

/// Sends `bytes` after the hello; the connection must end with `code`.
#[track_caller]
fn assert_fatal(rig: &mut Rig, bytes: &[u8], code: ErrorCode) {
    let mut raw = Raw::connect(rig);
    raw.write(bytes);
    let (stream, error) = raw.error();
    assert_eq!((stream, error.code), (0, code as u16), "{error:?}");
    raw.assert_closed();
    rig.assert_serves();
}

#[test]
fn frames_that_break_the_rules_close_their_connection() {
    let mut rig = Rig::start();
    let ping = Op::Ping as u16;
    assert_fatal(&mut rig, &header(u32::MAX, 1, ping, 0, 0), ErrorCode::FrameTooLong);
    assert_fatal(&mut rig, &header((1 << 20) + 1, 1, ping, 0, 0), ErrorCode::FrameTooLong);
    assert_fatal(&mut rig, &header(0, 1, ping, 0x80, 0), ErrorCode::BadFrame);
    assert_fatal(&mut rig, &header(0, 1, ping, 1, 0), ErrorCode::BadFrame); // only the server may set MORE
    assert_fatal(&mut rig, &header(0, 2, ping, 0, 0), ErrorCode::BadStream);
    assert_fatal(&mut rig, &header(0, 0, ping, 0, 0), ErrorCode::BadStream);
    assert_fatal(&mut rig, &header(0, 7, Op::Cancel as u16, 0, 0), ErrorCode::BadStream);
    assert_fatal(&mut rig, &header(0, 1, ping, 0, 5), ErrorCode::BadDescriptors);
    assert_fatal(&mut rig, &header(0, 1, ping, 0, 1), ErrorCode::BadDescriptors); // none was passed
    // A stream-control frame with a bad payload has no stream to fail.
    let mut ping_and_credit =
        encode_frame(1, Op::Ping, Flags::NONE, 1 << 20, &PingRequest::default()).unwrap();
    ping_and_credit.extend(header(3, 1, Op::Credit as u16, 0, 0));
    ping_and_credit.extend(b"abc");
    let mut raw = Raw::connect(&rig);
    raw.write(&ping_and_credit);
    let error = std::iter::repeat_with(|| raw.receive()).find(|(header, _)| header.stream == 0).unwrap().1;
    let error: WireError = decode(&error).unwrap();
    assert_eq!(error.code, ErrorCode::BadFrame as u16, "{error:?}");
}

/// Before and after the hello: the daemon closes at the first header and reads no more.
#[test]
fn a_gigabyte_of_zeros_is_not_read() {
    let mut rig = Rig::start();
    rig.assert_serves();
    let before = anonymous(&rig);
    let zeros = vec![0; 1 << 20];
    for mut raw in [Raw::silent(&rig), Raw::connect(&rig)] {
        let written = (0..1024).take_while(|_| raw.0.write_all(&zeros).is_ok()).count();
        assert!(written <= 1, "the daemon read {written} MiB");
    }
    rig.eventually("the clients are disconnected", |status| status.connections == 1);
    let more = anonymous(&rig).saturating_sub(before);
    assert!(more <= 1 << 20, "the daemon's memory grew by {more} bytes");
    rig.assert_serves();
}

#[test]
fn a_stream_is_used_once() {
    let mut rig = Rig::start();
    let mut raw = Raw::connect(&rig);
    raw.ping(5);
    assert_eq!(raw.receive().0.stream, 5);
    // Credit for an ended stream comes too late and is ignored.
    raw.send(5, Op::Credit, &Credit { items: 1, ext: vec![] });
    // A cancel for a skipped id is ignored too: no request can have that id any more.
    raw.send(1, Op::Cancel, &Cancel { ext: vec![] });
    raw.ping(3);
    let (stream, error) = raw.error();
    assert_eq!((stream, error.code), (0, ErrorCode::BadStream as u16));
    raw.assert_closed();
    rig.assert_serves();
}

#[test]
fn more_streams_than_agreed_close_the_connection_and_end_its_requests() {
    let mut rig = Rig::start();
    let mut raw = Raw::connect(&rig);
    for n in 0..65 {
        raw.send(2 * n + 1, Op::Generate, &story(500));
    }
    loop {
        let (header, payload) = raw.receive();
        if header.stream == 0 {
            let error: WireError = decode(&payload).unwrap();
            assert_eq!(error.code, ErrorCode::TooManyStreams as u16);
            break;
        }
    }
    drop(raw);
    rig.assert_idle();
    rig.assert_serves();
}

#[test]
fn a_client_that_closes_its_writing_side_gets_what_is_ready() {
    let mut rig = Rig::start();
    let mut raw = Raw::connect(&rig);
    raw.send(1, Op::Generate, &story(500));
    raw.ping(3);
    raw.0.shutdown(Shutdown::Write).unwrap();
    let mut bytes = Vec::new();
    raw.0.read_to_end(&mut bytes).unwrap();
    let (mut rest, mut ended) = (bytes.as_slice(), Vec::new());
    while let Some((first, after)) = rest.split_first_chunk() {
        let header = FrameHeader::parse(first, PAYLOAD_BYTES_MAX).unwrap();
        if !header.flags.contains(Flags::MORE) {
            ended.push(header.stream);
        }
        rest = &after[header.len as usize..];
    }
    assert_eq!(ended, [3], "the story ends without a last frame");
    rig.assert_idle();
    rig.assert_serves();
}

#[test]
fn half_a_frame_and_a_hang_up_harm_nobody() {
    let mut rig = Rig::start();
    for bytes in [3, 10, 16, 40] {
        let mut raw = Raw::connect(&rig);
        let mut frame = header(100, 1, Op::Ping as u16, 0, 0);
        frame.resize(116, 0);
        raw.write(&frame[..bytes]);
    }
    let mut raw = Raw::silent(&rig);
    raw.write(b"RFG1");
    drop(raw);
    rig.assert_serves();
    rig.eventually("the connections are closed", |status| status.connections <= 2);
}

#[test]
fn other_protocols_and_versions_are_told_what_this_is() {
    let mut rig = Rig::start();
    let mut raw = Raw::silent(&rig);
    raw.write(&[b'G'; 88]);
    assert_eq!(raw.hello().status, ErrorCode::NotProtocol as u16);
    raw.assert_closed();
    // Clients that send fewer bytes than a hello and wait for an answer.
    for words in [&b"GET / HTTP/1.0\r\n\r\n"[..], b"RF\n"] {
        let mut raw = Raw::silent(&rig);
        raw.write(words);
        assert_eq!(
            raw.hello().status,
            ErrorCode::NotProtocol as u16,
            "the refusal is not NotProtocol at once"
        );
        raw.assert_closed();
    }

    let mut raw = Raw::silent(&rig);
    let future = ClientHello { min_major: 2, max_major: 9, ..ClientHello::new("future") };
    raw.write(&future.to_bytes().unwrap());
    let hello = raw.hello();
    assert_eq!(hello.status, ErrorCode::UnsupportedMajor as u16);
    assert_eq!((hello.min_major, hello.max_major), (1, 1));
    raw.assert_closed();
    rig.assert_serves();
}

#[test]
fn silent_and_half_finished_clients_are_sent_away() {
    let mut rig = Rig::start();
    let mut silent = Raw::silent(&rig);
    let mut halfway = Raw::connect(&rig);
    halfway.write(&header(100, 1, Op::Ping as u16, 0, 0));
    rig.assert_serves();
    assert_eq!(silent.hello().status, ErrorCode::HandshakeTimeout as u16);
    silent.assert_closed();
    let (stream, error) = halfway.error();
    assert_eq!((stream, error.code), (0, ErrorCode::FrameTimeout as u16));
    halfway.assert_closed();
    rig.assert_serves();
}

#[test]
fn a_client_that_does_not_read_is_dropped_and_others_are_served() {
    let mut rig = Rig::start();
    let mut raw = Raw::connect(&rig);
    let ping = PingRequest { payload: vec![7; 256], ext: vec![] };
    let mut stream = 1;
    // The daemon keeps 1 MiB and the kernel some more; then the connection ends.
    let error = loop {
        let frame = encode_frame(stream, Op::Ping, Flags::NONE, 1 << 20, &ping);
        match raw.0.write_all(&frame.unwrap()) {
            Ok(()) => stream += 2,
            Err(error) => break error,
        }
        assert!(stream < 200_000, "the client was never disconnected");
    };
    assert!(
        matches!(error.kind(), std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset),
        "{error}"
    );
    rig.assert_serves();
    assert!(rig.log_text().contains("does not read"), "the log does not say that the client does not read");
}

#[test]
fn large_answers_asked_for_at_once_wait_for_who_reads() {
    let mut rig = Rig::start();
    let mut raw = Raw::connect(&rig);
    let request = TokenizeRequest {
        model: TINY.into(),
        text: "q7".repeat(100_000),
        add_special: false,
        parse_special: false,
        ext: vec![],
    };
    for stream in [1, 3, 5, 7] {
        raw.send(stream, Op::Tokenize, &request);
    }
    raw.ping(9);
    let mut replies = Vec::new();
    let mut bytes = 0;
    while replies.len() < 5 {
        let (header, _) = raw.receive();
        assert_eq!(header.known_op(), Some(Op::Reply), "{header:?}");
        if replies.is_empty() {
            std::thread::sleep(Duration::from_millis(500)); // makes the other answers wait
        }
        bytes += header.len;
        replies.push(header.stream);
    }
    replies.sort_unstable();
    assert_eq!(replies, [1, 3, 5, 7, 9]);
    assert!(bytes > 3 << 20 >> 1, "the replies fit the daemon's buffer: {bytes} bytes");
    rig.assert_serves();
}

#[test]
fn the_last_words_to_who_does_not_read_have_a_checksum_where_agreed() {
    let rig = Rig::start();
    let hello = ClientHello { features: FEATURE_CHECKSUM, ..ClientHello::new("crc") };
    let mut raw = Raw::connect_as(&rig, &hello);
    let mut writer = raw.0.try_clone().unwrap();
    let pings = std::thread::spawn(move || {
        let ping = PingRequest { payload: vec![7; 256], ext: vec![] };
        let frame = |stream| encode_frame(stream, Op::Ping, Flags::NONE, 1 << 20, &ping).unwrap();
        (0..200_000).any(|n| writer.write_all(&frame(2 * n + 1)).is_err())
    });
    let until = Instant::now() + PATIENCE;
    while !rig.log_text().contains("does not read") {
        assert!(Instant::now() < until, "the client was never disconnected");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Reads from here on.
    let last = loop {
        let (header, payload) = raw.receive();
        assert!(header.flags.contains(Flags::CRC), "{header:?}");
        header.check_payload(&payload).unwrap();
        if header.stream == 0 {
            break decode::<WireError>(&payload).unwrap();
        }
    };
    assert_eq!(last.code, ErrorCode::OutputOverflow as u16);
    drop(raw);
    assert!(pings.join().unwrap(), "no ping failed although the daemon closed the connection");
}

#[test]
fn a_description_fits_the_frames_that_were_agreed() {
    let rig = Rig::start();
    let mut model = tiny_llama(3);
    for n in 0..200 {
        model = model.set(&format!("test.text.{n}"), Value::string(&"x".repeat(900)));
    }
    std::fs::write(rig.model("wordy"), model.build().bytes).unwrap();
    let hello = ClientHello { max_frame: PAYLOAD_BYTES_MIN, ..ClientHello::new("small") };
    let mut raw = Raw::connect_as(&rig, &hello);
    let mut request =
        ShowRequest { model: "wordy".into(), full: true, skip_metadata: 0, skip_tensors: 0, ext: vec![] };
    for stream in (1..).step_by(2) {
        raw.send(stream, Op::Show, &request);
        let (header, payload) = raw.receive();
        assert_eq!(header.known_op(), Some(Op::Reply), "{header:?}");
        let reply: ShowReply = decode(&payload).unwrap();
        assert!(!reply.metadata.is_empty() || !reply.tensors.is_empty(), "a reply made no progress");
        request.skip_metadata += reply.metadata.len() as u32;
        request.skip_tensors += reply.tensors.len() as u32;
        if (request.skip_metadata, request.skip_tensors) == (reply.metadata_total, reply.tensors_total) {
            assert!(stream >= 5, "the model fits two frames");
            return;
        }
    }
}
