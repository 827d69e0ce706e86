//! Bytes that break the framing rules: a typed error on stream 0, then the connection closes, and only it.

use std::io::Write;

use rocmforge_client::wire::{ClientHello, Credit, ErrorCode, Op, PingRequest};

use crate::raw::{Raw, header};
use crate::rig::{Rig, story};

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
    assert_fatal(&mut rig, &header(0, 1, ping, 1, 0), ErrorCode::BadFrame); // MORE is the server's
    assert_fatal(&mut rig, &header(0, 2, ping, 0, 0), ErrorCode::BadStream);
    assert_fatal(&mut rig, &header(0, 0, ping, 0, 0), ErrorCode::BadStream);
    assert_fatal(&mut rig, &header(0, 7, Op::Cancel as u16, 0, 0), ErrorCode::BadStream);
    assert_fatal(&mut rig, &header(0, 1, ping, 0, 5), ErrorCode::BadDescriptors);
    assert_fatal(&mut rig, &header(0, 1, ping, 0, 1), ErrorCode::BadDescriptors); // none came
}

#[test]
fn a_stream_is_used_once() {
    let mut rig = Rig::start();
    let mut raw = Raw::connect(&rig);
    raw.ping(5);
    assert_eq!(raw.receive().0.stream, 5);
    // Credit for a stream that has ended comes too late and means nothing.
    raw.send(5, Op::Credit, &Credit { items: 1, ext: vec![] });
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
            let error: rocmforge_client::wire::WireError = rocmforge_client::wire::decode(&payload).unwrap();
            assert_eq!(error.code, ErrorCode::TooManyStreams as u16);
            break;
        }
    }
    drop(raw);
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
    rig.eventually("the connections are gone", |status| status.connections <= 2);
}

#[test]
fn other_protocols_and_versions_are_told_what_this_is() {
    let mut rig = Rig::start();
    let mut raw = Raw::silent(&rig);
    raw.write(&[b'G'; 88]);
    assert_eq!(raw.hello().status, ErrorCode::NotProtocol as u16);
    raw.assert_closed();

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
fn who_says_nothing_is_sent_away_and_who_stops_halfway_too() {
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
fn who_does_not_read_is_dropped_and_others_are_served() {
    let mut rig = Rig::start();
    let mut raw = Raw::connect(&rig);
    let ping = PingRequest { payload: vec![7; 256], ext: vec![] };
    let mut stream = 1;
    // 1 MiB in the daemon and what the kernel holds, then the connection ends.
    let error = loop {
        let frame = rocmforge_client::wire::encode_frame(
            stream,
            Op::Ping,
            rocmforge_client::wire::Flags::NONE,
            1 << 20,
            &ping,
        );
        match raw.0.write_all(&frame.unwrap()) {
            Ok(()) => stream += 2,
            Err(error) => break error,
        }
        assert!(stream < 200_000, "never dropped");
    };
    assert!(
        matches!(error.kind(), std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset),
        "{error}"
    );
    rig.assert_serves();
    assert!(rig.log_text().contains("does not read"), "the log says so");
}
