//! Descriptors where none belong, of the wrong kind, or too many: the daemon leaves none open.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;

use rocmforge_client::Connection;
use rocmforge_client::wire::{
    self, ErrorCode, Flags, GenerateRequest, LoadRequest, ModelState, Op, PAYLOAD_BYTES_MAX, PingRequest,
    encode_frame, encode_frame_with_descriptors,
};
use rustix::fs::{Mode, OFlags};

use crate::raw::{Raw, header};
use crate::rig::{Answer, Rig, TINY, answer, code, refusal, story};

/// Number of wrong descriptors that one client passes.
const TRIES: usize = 10_000;

fn null() -> File {
    File::open("/dev/null").unwrap()
}

fn ping(n_fds: u8) -> Vec<u8> {
    encode_frame_with_descriptors(1, Op::Ping, Flags::NONE, PAYLOAD_BYTES_MAX, n_fds, &PingRequest::default())
        .unwrap()
}

fn load(n_fds: u8, by_descriptor: bool) -> Vec<u8> {
    let request = LoadRequest { name: "x".into(), by_descriptor, request_id: 0, ext: vec![] };
    encode_frame_with_descriptors(1, Op::Load, Flags::NONE, PAYLOAD_BYTES_MAX, n_fds, &request).unwrap()
}

#[test]
fn descriptors_that_do_not_belong_close_the_connection_and_are_closed() {
    let mut rig = Rig::start();
    rig.assert_serves();
    rig.eventually("only this connection is open", |status| status.connections == 1);
    let before = rig.descriptors();
    let file = null();
    let one = [file.as_fd()];
    let many: Vec<BorrowedFd<'_>> = vec![file.as_fd(); 253];
    // Each case has a frame; its header states the number of descriptors rightly or wrongly.
    let cases: [(Vec<u8>, &[BorrowedFd<'_>]); 7] = [
        (ping(1), &one),
        (ping(0), &one),
        (ping(0), &many),
        (ping(4), &many),
        (load(1, false), &one),
        (load(2, true), &one),
        (load(1, true), &many[..4]),
    ];
    for _ in 0..20 {
        for (frame, fds) in &cases {
            let mut raw = Raw::connect(&rig);
            raw.send_with(frame, fds);
            let error = std::iter::repeat_with(|| raw.error()).find(|(stream, _)| *stream == 0).unwrap().1;
            assert_eq!(error.code, ErrorCode::BadDescriptors as u16, "{error:?}");
            raw.assert_closed();
        }
        // With a byte of the payload instead of the frame's first byte.
        let mut raw = Raw::connect(&rig);
        raw.write(&header(8, 1, Op::Ping as u16, 0, 0));
        raw.send_with(&[0; 8], &one);
        assert_eq!(raw.error().1.code, ErrorCode::BadDescriptors as u16);
    }
    let mut raw = Raw::connect(&rig);
    raw.write(&load(0, true));
    let error = std::iter::repeat_with(|| raw.error()).find(|(stream, _)| *stream == 0).unwrap().1;
    assert_eq!(error.code, ErrorCode::BadDescriptors as u16, "a missing descriptor gave another error");
    raw.assert_closed();
    rig.eventually("only this connection is open", |status| status.connections == 1);
    // Allows for this test's own status connections, which open and close.
    rig.assert_descriptors(before + 1);
    rig.assert_serves();
}

#[test]
fn descriptors_belong_to_their_frame_among_others_in_one_write() {
    let rig = Rig::start();
    let file = null();
    let one = [file.as_fd()];
    let pings = |streams: std::ops::Range<u32>| -> Vec<u8> {
        let ping = PingRequest { payload: vec![7; 3], ext: vec![] };
        let streams = streams.step_by(2);
        let frames =
            streams.map(|n| encode_frame(n, Op::Ping, Flags::NONE, PAYLOAD_BYTES_MAX, &ping).unwrap());
        frames.flatten().collect()
    };
    let load_on = |stream: u32| {
        let request = LoadRequest { name: "x".into(), by_descriptor: true, request_id: 0, ext: vec![] };
        encode_frame_with_descriptors(stream, Op::Load, Flags::NONE, PAYLOAD_BYTES_MAX, 1, &request).unwrap()
    };
    // The load fails by what the descriptor is: it arrived.
    let expect_load = |raw: &mut Raw, stream: u32| {
        let (of, error) = raw.error();
        assert_eq!(of, stream, "{error:?}");
        assert_ne!(error.code, ErrorCode::BadDescriptors as u16, "{error:?}");
    };
    let mut raw = Raw::connect(&rig);
    // More pings than one read takes, then a load between pings in one message.
    raw.write(&pings(1..1001));
    raw.send_with(&[load_on(1001), pings(1003..1007)].concat(), &one);
    let mut answered = Vec::new();
    for _ in 0..503 {
        let (header, _) = raw.receive();
        answered.push(header.stream);
    }
    answered.sort_unstable();
    assert_eq!(answered, (1..1007).step_by(2).collect::<Vec<u32>>());
    // A header in two pieces, the descriptor with the first.
    let frame = load_on(1007);
    raw.send_with(&frame[..5], &one);
    std::thread::sleep(std::time::Duration::from_millis(20));
    raw.write(&[&frame[5..], &pings(1009..1011)].concat());
    let streams = [raw.receive().0.stream, raw.receive().0.stream];
    assert!(streams == [1007, 1009] || streams == [1009, 1007], "{streams:?}");
    let mut raw = Raw::connect(&rig);
    raw.send_with(&load_on(1), &one);
    expect_load(&mut raw, 1);
    // Two frames that announce one each, and one came.
    let mut raw = Raw::connect(&rig);
    raw.send_with(&[load_on(1), load_on(3)].concat(), &one);
    let error = std::iter::repeat_with(|| raw.error()).find(|(stream, _)| *stream == 0).unwrap().1;
    assert_eq!(error.code, ErrorCode::BadDescriptors as u16);
    // A header in two pieces that announces none, the descriptor with the first.
    let mut raw = Raw::connect(&rig);
    let frame = pings(1..3);
    raw.send_with(&frame[..5], &one);
    std::thread::sleep(std::time::Duration::from_millis(20));
    raw.write(&frame[5..]);
    assert_eq!(raw.error().1.code, ErrorCode::BadDescriptors as u16);
}

#[test]
fn a_daemon_without_descriptors_says_so_and_keeps_its_names() {
    let mut rig = Rig::start_with_few_descriptors();
    std::fs::copy(rig.model(TINY), rig.model("other")).unwrap();
    let connection = Connection::connect(&rig.options()).unwrap();
    let mut raw = Raw::connect(&rig);
    let list = || connection.call(&wire::ListRequest::default()).unwrap().models;
    let before = list();
    assert_eq!(before.len(), 2);
    let held = rig.take_all_descriptors();

    assert_eq!(list(), before);
    let load_other = LoadRequest { name: "other".into(), by_descriptor: false, request_id: 0, ext: vec![] };
    let assert_busy = |error: &wire::WireError| {
        let told = (error.code, error.retryable, error.retry_after_ms > 0);
        assert_eq!(told, (ErrorCode::Busy as u16, true, true), "{error:?}");
        assert!(error.message.contains("descriptors"), "{}", error.message);
    };
    assert_busy(&refusal(connection.call(&load_other)));
    assert_eq!(list(), before, "a shortage of descriptors changed the list of models");
    let file = File::open(rig.model("other")).unwrap();
    raw.send_with(&load(1, true), &[file.as_fd()]);
    let (stream, error) = raw.error();
    assert_eq!(stream, 1, "the error is not of the request's stream");
    assert_busy(&error);
    let request = GenerateRequest { model: "other".into(), ..story(4) };
    assert_busy(&refusal(connection.generate(&request).unwrap().next_item()));
    assert!(connection.call(&wire::StatusRequest::default()).unwrap().rss_anon_bytes > 0);
    // An unexpected descriptor is still the client's fault, even if the kernel dropped it.
    let mut liar = raw;
    liar.send_with(&header(0, 3, Op::List as u16, 0, 0), &[file.as_fd()]);
    let (stream, error) = liar.error();
    assert_eq!((stream, error.code), (0, ErrorCode::BadDescriptors as u16), "{error:?}");
    liar.assert_closed();

    drop(held);
    rig.assert_serves();
    assert!(rig.client().load("other").unwrap().mapped_now);
}

/// Held connections leave descriptors for all else, and one too many is told so instead of waiting for a descriptor.
#[test]
fn connections_take_half_of_the_descriptors() {
    let rig = Rig::start_with_descriptors(256);
    let quick = std::time::Duration::from_millis(500);
    let options = rocmforge_client::Options { connect_timeout: quick, ..rig.options() };
    let mut held = Vec::new();
    let refused = loop {
        match Connection::connect(&options) {
            Ok(connection) => held.push(connection),
            Err(error) => break error,
        }
        assert!(held.len() <= 256, "nobody was refused");
    };
    assert!(matches!(refused, rocmforge_client::ClientError::Refused { .. }), "{refused}");
    // Half of the 256 for all, and half of that for one user. The one that asked whether it serves may still be open.
    assert!((63..=64).contains(&held.len()), "{} connections", held.len());
    let log = rig.log_text();
    assert!(log.contains("limits.connections is lowered") && !log.contains("cannot be accepted"), "{log}");
    // A model can still be opened and mapped for those who are connected.
    let mut story = held[0].generate(&story(4)).unwrap();
    while story.next_item().unwrap().is_some() {}
    assert!(story.end().is_some());
}

#[test]
fn loads_that_wait_take_a_share_of_the_descriptors() {
    const LOADS: u32 = 60;
    /// A quarter of 256 descriptors for all requests, half of it for one user.
    const SHARE: u32 = 32;
    let mut rig = Rig::idle();
    let notices = rig.dir.path().join("notify");
    let manager = UnixDatagram::bind(&notices).unwrap();
    let mut command = rig.command_with_descriptors(256);
    rig.spawn(command.env("NOTIFY_SOCKET", &notices));
    rig.assert_serves();
    // A load of a passed file ends when the service manager has taken its file. This one takes no more notices until the
    // test says so, so no load ends. 16 of them have the user's turns to block a thread, and the others wait.
    let filler = UnixDatagram::unbound().unwrap();
    filler.set_nonblocking(true).unwrap();
    while filler.send_to(b"STATUS=", &notices).is_ok() {}
    let mut loader = Raw::connect(&rig);
    let before = rig.descriptors();
    let file = File::open(rig.model(TINY)).unwrap();
    for number in 0..LOADS {
        let name = format!("m{number}");
        let request = LoadRequest { name, by_descriptor: true, request_id: 0, ext: vec![] };
        let (stream, max) = (2 * number + 1, PAYLOAD_BYTES_MAX);
        let frame = encode_frame_with_descriptors(stream, Op::Load, Flags::NONE, max, 1, &request).unwrap();
        loader.send_with(&frame, &[file.as_fd()]);
    }
    for number in SHARE..LOADS {
        let (stream, error) = loader.error();
        assert_eq!((stream, error.code), (2 * number + 1, ErrorCode::Quota as u16), "{error:?}");
        assert!(error.message.starts_with("too many descriptors wait in requests"), "{}", error.message);
    }
    // Refused ones are closed by other threads, a moment later.
    rig.assert_descriptors(before + SHARE as usize + 2);
    // The thread ends with the test's process.
    std::thread::spawn(move || while manager.recv(&mut [0; 64]).is_ok() {});
    for _ in 0..SHARE {
        assert_eq!(loader.receive().0.known_op(), Some(Op::Reply));
    }
    drop(loader);
    rig.assert_serves();
    assert!(rig.client().load_file(&rig.model(TINY), Some("m1")).is_ok(), "the share is free again");
}

#[test]
fn only_a_regular_file_opened_for_reading_is_taken() {
    let mut rig = Rig::start();
    let client = rig.client();
    let open = |flags| -> OwnedFd { rustix::fs::open(rig.model(TINY), flags, Mode::empty()).unwrap() };
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
    let bad: Vec<OwnedFd> = vec![
        null().into(),
        File::open(rig.dir.path()).unwrap().into(),
        pipe,
        socket.into(),
        open(OFlags::PATH),
        open(OFlags::RDWR),
        open(OFlags::WRONLY),
    ];
    client.ping(b"").unwrap(); // opens the connection, which is one of the daemon's descriptors
    let before = rig.descriptors();
    for fd in bad.iter().cycle().take(TRIES) {
        assert_eq!(code(client.load_descriptor(fd.as_fd(), "x")), ErrorCode::NotAModelFile as u16);
    }
    rig.assert_descriptors(before);
    assert_eq!(
        code(client.load_descriptor(open(OFlags::RDONLY).as_fd(), "a\nb")),
        ErrorCode::InvalidArgument as u16
    );
    rig.assert_serves();
}

#[test]
fn a_passed_file_answers_under_its_name_and_is_the_same_mapping() {
    let mut rig = Rig::start();
    let client = rig.client();
    let by_name: Answer = answer(&client, &story(16)).unwrap();
    let loaded = client.load_file(&rig.model(TINY), Some("mine")).unwrap();
    assert_eq!(
        (loaded.mapped_now, loaded.summary.state),
        (false, ModelState::Mapped),
        "a file that is already mapped was mapped again"
    );
    let request = GenerateRequest { model: "mine".into(), ..story(16) };
    assert_eq!(answer(&client, &request).unwrap(), by_name);
    assert_eq!(client.status().unwrap().models_mapped, 1);
    assert!(client.unload("mine").unwrap().was_mapped);
    assert_eq!(code(answer(&client, &request)), ErrorCode::ModelNotFound as u16);
    rig.assert_serves();
}
