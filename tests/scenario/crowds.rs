//! Many clients at once: idle ones, short visits, half requests, and clients that do not read. The others are served.
//!
//! `ROCMFORGE_LONG=1` makes storms of 30 s and a hundred pings per client; the printed figures then describe a release
//! build.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rocmforge_client::wire::{
    self, ClientHello, ErrorCode, Flags, Op, PAYLOAD_BYTES_MAX, SERVER_HELLO_BYTES, ServerHello,
    TokenizeRequest,
};
use rocmforge_client::{Client, Connection, Options, ServerTrust};

use crate::child;
use crate::common;
use crate::raw::{Raw, header};
use crate::rig::{PATIENCE, Rig, TINY, anonymous, answer, code, collect, story};

const CLIENTS: usize = 1000;

/// Limit of the daemon's memory per idle connection.
const IDLE_BYTES_MAX: u64 = 64 << 10;

/// Raises this process's descriptor limit to that of the daemons that it starts.
fn raise_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let hard = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard }).unwrap();
}

#[test]
fn a_thousand_clients_are_answered_and_cost_little() {
    raise_descriptors();
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n");
    rig.assert_serves();
    rig.eventually("only this connection is open", |status| status.connections == 1);
    let before = anonymous(&rig);
    let mut clients: Vec<Raw> = (0..CLIENTS).map(|_| Raw::connect(&rig)).collect();
    rig.eventually("all clients are connected", |status| status.connections == CLIENTS as u32 + 1);
    let each = anonymous(&rig).saturating_sub(before) / CLIENTS as u64;
    println!("{each} bytes per idle connection");
    assert!(each <= IDLE_BYTES_MAX, "{each} bytes per idle connection");
    let pings = if common::is_long() { 100 } else { 10 };
    let begun = Instant::now();
    for n in 0..pings {
        clients.iter_mut().for_each(|raw| raw.ping(2 * n + 1));
        for raw in &mut clients {
            let (header, _) = raw.receive();
            assert_eq!((header.stream, header.known_op()), (2 * n + 1, Some(Op::Reply)));
        }
    }
    let rate = f64::from(pings) * CLIENTS as f64 / begun.elapsed().as_secs_f64();
    println!("{rate:.0} pings per second from {CLIENTS} clients");
    drop(clients);
    rig.eventually("the clients are disconnected", |status| status.connections == 1);
    rig.assert_serves();
}

/// Clients connect, ask and disconnect as fast as they can: each is answered, or refused with a reason.
#[test]
fn a_storm_of_connections_is_answered_or_told_why_not() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n[limits]\nconnections = 64\n");
    let (stop, served, refused) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..80 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let count = if one_visit(&rig) { &served } else { &refused };
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        std::thread::sleep(Duration::from_secs(if common::is_long() { 30 } else { 1 }));
        stop.store(true, Ordering::Relaxed);
    });
    let (served, refused) = (served.into_inner(), refused.into_inner());
    let rate = (served + refused) as f64 / begun.elapsed().as_secs_f64();
    println!("{served} served, {refused} refused, {rate:.0} connections per second");
    assert!(served > 0);
    rig.eventually("the clients are disconnected", |status| status.connections == 1);
    rig.assert_serves();
}

/// True if the ping was answered, false if the hello gave a refusal. Panics on anything else.
fn one_visit(rig: &Rig) -> bool {
    let mut raw = Raw::silent(rig);
    // If the daemon refuses before it reads, this write may meet a closed connection.
    let _ = raw.0.write_all(&ClientHello::new("storm").to_bytes().unwrap());
    match raw.hello().status {
        0 => {
            raw.ping(1);
            assert_eq!(raw.receive().0.known_op(), Some(Op::Reply));
            true
        }
        status => {
            assert!([ErrorCode::Quota as u16, ErrorCode::Busy as u16].contains(&status), "{status}");
            false
        }
    }
}

/// The point at which a client stops.
#[derive(Clone, Copy, Debug)]
enum Halfway {
    Silent,
    HalfHello,
    HalfHeader,
    HalfClosed,
    ByteByByte,
}

const KINDS: [Halfway; 5] =
    [Halfway::Silent, Halfway::HalfHello, Halfway::HalfHeader, Halfway::HalfClosed, Halfway::ByteByByte];

fn halfway(rig: &Rig, kind: Halfway) -> UnixStream {
    let hello = ClientHello::new("half").to_bytes().unwrap();
    match kind {
        Halfway::Silent => Raw::silent(rig).0,
        Halfway::HalfHello | Halfway::ByteByByte => {
            let mut raw = Raw::silent(rig);
            raw.write(&hello[..20]);
            raw.0
        }
        Halfway::HalfHeader => {
            let mut raw = Raw::connect(rig);
            raw.write(&header(100, 1, Op::Ping as u16, 0, 0)[..8]);
            raw.0
        }
        Halfway::HalfClosed => {
            let mut raw = Raw::connect(rig);
            raw.write(&header(100, 1, Op::Ping as u16, 0, 0));
            raw.0.shutdown(Shutdown::Write).unwrap();
            raw.0
        }
    }
}

#[test]
fn five_hundred_half_open_clients_are_sent_away_and_others_are_served() {
    raise_descriptors();
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n");
    let client = rig.client();
    let pings = |count: usize| {
        let mut times: Vec<Duration> = (0..count)
            .map(|_| {
                let begun = Instant::now();
                client.ping(b"").unwrap();
                begun.elapsed()
            })
            .collect();
        times.sort();
        (times[count / 2], times[count * 99 / 100])
    };
    let quiet = pings(500);
    let mut halves: Vec<(Halfway, UnixStream)> =
        (0..500).map(|n| KINDS[n % KINDS.len()]).map(|kind| (kind, halfway(&rig, kind))).collect();
    let crowded = pings(500);
    println!(
        "a ping takes {quiet:?} alone, {crowded:?} among {} stalled clients (median, 99th percentile)",
        halves.len()
    );
    rig.assert_serves();
    // An occasional byte does not extend the deadline: it covers the whole hello.
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        for (_, stream) in halves.iter_mut().filter(|(kind, _)| matches!(kind, Halfway::ByteByByte)) {
            let _ = stream.write_all(&[0]);
        }
        client.ping(b"").unwrap();
        std::thread::sleep(Duration::from_millis(500));
    }
    for (kind, mut stream) in halves {
        let mut said = Vec::new();
        match stream.read_to_end(&mut said) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{kind:?}: {error}"),
        }
        if matches!(kind, Halfway::Silent | Halfway::HalfHello | Halfway::ByteByByte) {
            let hello = ServerHello::parse(said[..SERVER_HELLO_BYTES].try_into().unwrap()).unwrap();
            let told = [ErrorCode::HandshakeTimeout as u16, ErrorCode::NotProtocol as u16];
            assert!(told.contains(&hello.status), "{kind:?}: {}", hello.status);
        }
    }
    rig.eventually("the stalled clients are disconnected", |status| status.connections <= 2);
    rig.assert_serves();
}

#[test]
fn one_that_does_not_read_leaves_fifteen_others_their_answers() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n");
    let alone = answer(&rig.client(), &story(60)).unwrap();
    let mut slow = Raw::connect(&rig);
    for n in 0..8 {
        slow.send(2 * n + 1, Op::Generate, &story(400));
    }
    rig.eventually("the request waits for credit", |_| {
        let sequences = rig.client().ps().unwrap().sequences;
        sequences.iter().filter(|s| s.state == wire::SequenceState::Stalled).count() == 8
    });
    let before = rig.client().status().unwrap().devices[0].steps;
    let connections: Vec<_> = (0..15).map(|_| Connection::connect(&rig.options()).unwrap()).collect();
    let mut others: Vec<_> = connections.iter().map(|c| c.generate(&story(60)).unwrap()).collect();
    let begun = Instant::now();
    let answers: Vec<_> = std::thread::scope(|scope| {
        let readers: Vec<_> = others.iter_mut().map(|one| scope.spawn(|| collect(one).unwrap())).collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    assert!(answers.iter().all(|answer| *answer == alone));
    let steps = rig.client().status().unwrap().devices[0].steps - before;
    println!("15 answers of 60 tokens in {steps} steps, {:?}", begun.elapsed());
    // Alone, each answer takes 60 steps and its prompt. Together they share steps, even beside a stalled client.
    assert!(steps <= 15 * 62, "{steps} steps");
    drop(slow);
    rig.assert_idle();
    rig.assert_serves();
}

const STRANGER: u32 = 54_322;

/// The second user's process of [`quotas_are_of_a_uid`].
#[test]
fn a_second_user() {
    let Some((socket, _)) = child::inside() else { return };
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    let text = answer(&client, &story(8)).unwrap().text;
    println!("\nDONE {text}");
}

#[test]
fn quotas_are_of_a_uid() {
    if !rustix::process::geteuid().is_root() {
        return common::skip("only root can act as two users");
    }
    let mut rig = Rig::start_with(
        "[device]\nbackend = 'cpu'\n[limits]\nrequests_per_uid = 3\nconnections_per_uid = 6\n",
    );
    for (path, mode) in [(rig.dir.path(), 0o755), (&rig.socket(), 0o666)] {
        fs_mode(path, mode);
    }
    let connection = Connection::connect(&rig.options()).unwrap();
    let _held: Vec<_> = (0..3).map(|_| connection.generate(&story(400)).unwrap()).collect();
    rig.eventually("all three sequences run", |status| status.devices[0].sequences_running == 3);
    let refused = Connection::connect(&rig.options()).unwrap();
    assert_eq!(code(collect(&mut refused.generate(&story(4)).unwrap())), ErrorCode::Quota as u16);
    let mut more = Vec::new();
    let full = loop {
        assert!(more.len() < 10, "the connection limit does not hold");
        let mut raw = Raw::silent(&rig);
        let _ = raw.0.write_all(&ClientHello::new("more").to_bytes().unwrap());
        match raw.hello().status {
            0 => more.push(raw),
            status => break status,
        }
    };
    assert_eq!(full, ErrorCode::Quota as u16);
    let mut other = child::Process::start_as("crowds::a_second_user", &rig.socket(), "", |command| {
        command.uid(STRANGER).gid(STRANGER);
    });
    other.go();
    assert_eq!(
        other.line("DONE "),
        ", there was a little girl",
        "another uid was refused although its quota is free"
    );
    drop((more, refused));
    drop(_held);
    drop(connection);
    let until = Instant::now() + PATIENCE;
    while rig.client().status().is_err() {
        assert!(Instant::now() < until);
    }
    rig.assert_idle();
    rig.assert_serves();
}

/// A user's process of [`unfinished_frames_take_one_users_share`].
#[test]
fn a_user_with_a_long_text() {
    let Some((socket, _)) = child::inside() else { return };
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    println!("\nDONE {}", client.tokenize(&long_text(400_000)).unwrap().ids.len());
}

fn long_text(bytes: usize) -> TokenizeRequest {
    TokenizeRequest {
        model: TINY.into(),
        text: "a long story ".repeat(bytes / 13),
        add_special: true,
        parse_special: false,
        ext: vec![],
    }
}

/// Connections that sent all but the last byte of `frame`, as far as the daemon reads.
fn unfinished(rig: &Rig, count: usize, frame: &[u8]) -> Vec<Raw> {
    let sends = &frame[..frame.len() - 1];
    let begin = |_| {
        let raw = Raw::connect(rig);
        raw.0.set_nonblocking(true).unwrap();
        raw
    };
    let mut all: Vec<(Raw, usize)> = (0..count).map(begin).map(|raw| (raw, 0)).collect();
    for _ in 0..40 {
        for (raw, sent) in &mut all {
            while let Ok(bytes @ 1..) = raw.0.write(&sends[*sent..]) {
                *sent += bytes;
            }
        }
        std::thread::sleep(Duration::from_millis(25));
    }
    all.into_iter().map(|(raw, _)| raw).inspect(|raw| raw.0.set_nonblocking(false).unwrap()).collect()
}

#[test]
fn unfinished_frames_take_one_users_share() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n[limits]\nrequest_mib = 32\n");
    rig.assert_serves();
    let before = anonymous(&rig);
    let frame = [header(1 << 20, 1, Op::Tokenize as u16, 0, 0), vec![0; 1 << 20]].concat();
    let halves = unfinished(&rig, 200, &frame);
    let taken = anonymous(&rig).saturating_sub(before);
    println!("200 unfinished frames of 1 MiB take {} MiB", taken >> 20);
    assert!(taken < 32 << 20, "{taken}");
    rig.assert_serves(); // a short request needs no room
    if rustix::process::geteuid().is_root() {
        for (path, mode) in [(rig.dir.path(), 0o755), (&rig.socket(), 0o666)] {
            fs_mode(path, mode);
        }
        let mut other =
            child::Process::start_as("crowds::a_user_with_a_long_text", &rig.socket(), "", |command| {
                command.uid(STRANGER).gid(STRANGER);
            });
        other.go();
        assert!(other.line("DONE ").parse::<usize>().unwrap() > 10_000);
    }
    let mut codes = std::collections::BTreeMap::new();
    for mut raw in halves {
        let (stream, error) = raw.error();
        assert_eq!(stream, 0, "{error:?}");
        if error.code == ErrorCode::Quota as u16 {
            assert!(error.message.contains("this user's share is used up"), "{}", error.message);
        }
        *codes.entry(error.code).or_insert(0) += 1;
        raw.assert_closed();
    }
    println!("{codes:?}");
    let [quota, timeout] = [ErrorCode::Quota, ErrorCode::FrameTimeout].map(|code| codes[&(code as u16)]);
    assert_eq!(quota + timeout, 200, "{codes:?}");
    assert!(timeout >= 16 && quota >= 100, "{codes:?}");
    rig.assert_serves();
}

#[test]
fn memory_of_long_requests_goes_back_to_the_system() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n");
    rig.assert_serves();
    let before = anonymous(&rig);
    // Of an absent model: what is measured is the requests' memory, not the tokeniser's work.
    let request = TokenizeRequest { model: "absent".into(), ..long_text(1_000_000) };
    let frame = wire::encode_frame(1, Op::Tokenize, Flags::NONE, PAYLOAD_BYTES_MAX, &request).unwrap();
    let mut clients = unfinished(&rig, 100, &frame);
    let most = anonymous(&rig).saturating_sub(before) >> 20;
    for raw in &mut clients {
        raw.write(&frame[frame.len() - 1..]);
    }
    for raw in &mut clients {
        assert_eq!(raw.error().1.code, ErrorCode::ModelNotFound as u16);
    }
    let kept = anonymous(&rig).saturating_sub(before) >> 20;
    let begun = Instant::now();
    let after = loop {
        let after = anonymous(&rig).saturating_sub(before);
        if after <= 32 << 20 || begun.elapsed() > Duration::from_secs(10) {
            break after;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    println!(
        "100 texts of 1 MB: {most} MiB, {kept} MiB when answered, {} MiB after {:?}",
        after >> 20,
        begun.elapsed()
    );
    assert!(after <= 32 << 20, "{after}");
    rig.assert_serves();
}

const GREEDY: [u32; 2] = [54_323, 54_324];

/// A greedy user's process of [`idle_connections_shut_nobody_out`]: connects until refused and holds what it got.
#[test]
fn a_greedy_user() {
    let Some((socket, _)) = child::inside() else { return };
    let mut held = Vec::new();
    let status = loop {
        let mut stream = UnixStream::connect(&socket).unwrap();
        let _ = stream.write_all(&ClientHello::new("greedy").to_bytes().unwrap());
        let mut bytes = [0; SERVER_HELLO_BYTES];
        stream.read_exact(&mut bytes).unwrap();
        match ServerHello::parse(&bytes).unwrap().status {
            0 => held.push(stream),
            status => break status,
        }
    };
    println!("\nDONE {} {status}", held.len());
    std::thread::sleep(PATIENCE * 10); // the test ends this process
}

#[test]
fn idle_connections_shut_nobody_out() {
    if !rustix::process::geteuid().is_root() {
        return common::skip("only root can act as several users");
    }
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'\n[limits]\nconnections = 64\n");
    for (path, mode) in [(rig.dir.path(), 0o755), (&rig.socket(), 0o666)] {
        fs_mode(path, mode);
    }
    let socket = rig.socket();
    let greedy = |uid: u32| {
        let mut process = child::Process::start_as("crowds::a_greedy_user", &socket, "", |command| {
            command.uid(uid).gid(uid);
        });
        process.go();
        let held = process.line("DONE ");
        (process, held)
    };
    let [quota, busy] = [ErrorCode::Quota as u16, ErrorCode::Busy as u16];
    let (first, second) = (greedy(GREEDY[0]), greedy(GREEDY[1]));
    // The first has its part of 60. The second has less than a third, because the first has more.
    assert_eq!([&first.1, &second.1], [&format!("30 {quota}"), &format!("15 {busy}")]);
    let mut other = child::Process::start_as("crowds::a_second_user", &rig.socket(), "", |command| {
        command.uid(STRANGER).gid(STRANGER);
    });
    other.go();
    assert_eq!(other.line("DONE "), ", there was a little girl", "a third user is shut out");
    rig.assert_serves();
    let log = rig.log_text();
    for uid in GREEDY {
        let lines =
            log.lines().filter(|line| line.contains(&format!("uid={uid}")) && line.contains("refused"));
        assert_eq!(lines.count(), 1, "{log}");
    }
    // Two more users leave a little; then idle connections of the first make room for a newcomer.
    let more: Vec<_> = (54_330..54_336).map(greedy).collect();
    std::thread::sleep(Duration::from_secs(6));
    let mut newcomer = child::Process::start_as("crowds::a_second_user", &rig.socket(), "", |command| {
        command.uid(STRANGER).gid(STRANGER);
    });
    newcomer.go();
    assert_eq!(newcomer.line("DONE "), ", there was a little girl", "idle connections shut a newcomer out");
    drop((first, second, more));
    rig.eventually("the greedy users are disconnected", |status| status.connections == 1);
    rig.assert_serves();
}

fn fs_mode(path: &std::path::Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}
