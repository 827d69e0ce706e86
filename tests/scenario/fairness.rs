//! Users who take all they can get, under uids of their own, which only root can give; and what others notice.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use rocmforge_client::wire::{
    ErrorCode, GenerateRequest, RequestScope, ResidencyEntry, SequenceState, TokenizeRequest,
};
use rocmforge_client::{Client, Connection, Options, ServerTrust};

use crate::child;
use crate::common;
use crate::raw::Raw;
use crate::rig::{Rig, TINY, answer, code, story};

const GREEDY: u32 = 54_321;
const INNOCENT: u32 = 54_322;
/// More than the places of [`CONFIG`].
const REQUESTS: usize = 24;
const CONFIG: &str = "[device]\nbackend = 'cpu'\n[limits]\nrunning = 8\n";
/// Far above any answer's time here. Before users shared the device, one waited for as long as the greedy user wished.
const SOON: Duration = Duration::from_secs(5);

/// An administrator's connection is taken within this time, whatever others do.
const ADMITTED: Duration = Duration::from_secs(1);

fn options(socket: std::path::PathBuf) -> Options {
    Options { socket, trust: ServerTrust::Anyone, ..Options::default() }
}

fn rig() -> Option<Rig> {
    for_all_users(CONFIG)
}

/// A daemon that every user may connect to, with a configuration of this text.
pub fn for_all_users(config: &str) -> Option<Rig> {
    if !rustix::process::geteuid().is_root() {
        common::skip("only root can act as several users");
        return None;
    }
    let rig = Rig::start_with(config);
    for (path, mode) in [(rig.dir.path(), 0o755), (&rig.socket(), 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    Some(rig)
}

fn start(rig: &Rig, test: &str, uid: u32) -> child::Process {
    let mut child = child::Process::start_as(test, &rig.socket(), "", |command| {
        command.uid(uid).gid(uid);
    });
    child.go();
    child
}

/// Asks for long answers and takes no token of them: each stalls when its credit is used up.
#[test]
fn holds_places_without_credit() {
    let Some((socket, _)) = child::inside() else { return };
    let connection = Connection::connect(&options(socket)).unwrap();
    let held: Vec<_> = (0..REQUESTS).map(|_| connection.generate(&story(400)).unwrap()).collect();
    println!("\nDONE {}", held.len());
    std::thread::sleep(Duration::from_secs(600)); // until the test ends this process
}

/// Asks for answers one after another, without an end, on as many connections as there are places.
#[test]
fn keeps_all_places_busy() {
    let Some((socket, _)) = child::inside() else { return };
    std::thread::scope(|scope| {
        for n in 0..REQUESTS {
            let client = Client::new(options(socket.clone()));
            scope.spawn(move || {
                for _ in 0.. {
                    let _ = answer(&client, &GenerateRequest { ignore_eog: true, ..story(400) });
                }
            });
            if n == 0 {
                println!("\nDONE");
            }
        }
    });
}

/// Sends texts of about 1 MB to tokenize, without an end, on as many connections as there are places.
#[test]
fn sends_long_texts() {
    let Some((socket, _)) = child::inside() else { return };
    let request = TokenizeRequest {
        model: TINY.into(),
        text: "a b ".repeat(200_000),
        add_special: false,
        parse_special: false,
        ext: vec![],
    };
    std::thread::scope(|scope| {
        for _ in 0..REQUESTS {
            let client = Client::new(options(socket.clone()));
            let request = &request;
            scope.spawn(move || {
                for _ in 0.. {
                    let _ = client.tokenize(request);
                }
            });
        }
        println!("\nDONE");
    });
}

/// Asks ten times for a short answer, and tells how many came and how long the slowest took. Then tries to cancel the
/// greedy user's requests.
#[test]
fn asks_for_little() {
    let Some((socket, _)) = child::inside() else { return };
    let client = Client::new(options(socket));
    let mut slowest = Duration::ZERO;
    for _ in 0..10 {
        let begun = Instant::now();
        answer(&client, &story(8)).unwrap();
        slowest = slowest.max(begun.elapsed());
    }
    assert_eq!(code(client.cancel_requests(RequestScope::Uid(GREEDY))), ErrorCode::Forbidden as u16);
    println!("\nDONE {}", slowest.as_millis());
}

/// Exact counters would tell how long other users' prompts and answers are, and when they are there.
#[test]
fn counters_of_others_are_coarse() {
    let Some((socket, _)) = child::inside() else { return };
    let client = Client::new(options(socket));
    let mut status = client.status().unwrap();
    let memory = [status.rss_anon_bytes, status.rss_file_bytes];
    assert!(
        status.connections.is_multiple_of(64) && memory.iter().all(|bytes| bytes % (64 << 20) == 0),
        "{status:?}"
    );
    let device = status.devices.remove(0);
    let sequences = [device.sequences_running, device.sequences_queued];
    assert!(
        sequences == [0; 2] && device.sequences_done.is_multiple_of(1024),
        "it has no request now: {device:?}"
    );
    let models = client.list().unwrap().models;
    assert!(models.iter().all(|model| model.sequences == 0), "{models:?}");
    let residency = client.residency().unwrap();
    let told = |model: &ResidencyEntry| (model.model.clone(), model.sequences, model.idle_ms, model.loading);
    let told: Vec<_> = residency.models.iter().map(told).collect();
    assert_eq!(told, [(TINY.to_owned(), 0, None, None)], "another user's model is not shown");
    let memory = &residency.devices[0];
    let counts = [memory.evictions, memory.load_waits, memory.loads];
    assert!(counts.iter().all(|count| count.is_multiple_of(1024)), "{memory:?}");
    assert!(
        memory.load_bytes.is_multiple_of(64 << 30) && memory.load_wait_us.is_multiple_of(900_000_000),
        "{memory:?}"
    );
    assert!(client.show(TINY, false).unwrap().host.resident_bytes.is_multiple_of(64 << 20));
    assert_eq!(client.plan(TINY, 16).unwrap().queued, 0);
    assert!(status.notes().iter().all(|(name, _)| *name == "you may"), "{:?}", status.notes());
    let (rows, pages) = ([device.rows, device.decode_rows, device.prefill_rows], device.kv_pages_used);
    assert!(rows.iter().all(|rows| rows % 1024 == 0) && pages % 64 == 0, "{device:?}");
    println!("\nDONE");
}

/// Sees what its own user holds, and nothing of others.
#[test]
fn sees_only_its_own_holdings() {
    let Some((socket, _)) = child::inside() else { return };
    let users = Client::new(options(socket)).users().unwrap().users;
    assert!(
        matches!(&users[..], [own] if (own.uid, own.connections, own.sequences) == (INNOCENT, 1, 0)),
        "{users:?}"
    );
    assert_eq!((users[0].sessions(), users[0].session_bytes()), (0, 0), "those of others do not count");
    println!("\nDONE");
}

#[test]
fn an_administrator_sees_what_each_user_holds() {
    let Some(mut rig) = rig() else { return };
    let client = rig.client();
    client.load_file(&rig.model(TINY), Some("mine")).unwrap();
    answer(&client, &story(4).with_session("s")).unwrap();
    let session = client.sessions().unwrap().sessions.remove(0);
    let mut greedy = start(&rig, "fairness::holds_places_without_credit", GREEDY);
    greedy.line("DONE");
    rig.eventually("all places are taken, with pages", |status| status.devices[0].kv_pages_used >= 8);
    let users = client.users().unwrap().users;
    let of = |uid| users.iter().find(|user| user.uid == uid).unwrap_or_else(|| panic!("{users:?}"));
    let (own, greedy_user) = (of(0), of(GREEDY));
    assert!(users.is_sorted_by_key(|user| user.uid), "{users:?}");
    assert_eq!((own.passed_models, own.sequences, own.kv_pages), (1, 0, 0));
    assert_eq!((own.sessions(), own.session_bytes()), (1, session.bytes));
    assert_eq!((greedy_user.sessions(), greedy_user.session_bytes()), (0, 0));
    assert!(own.header_bytes > 0 && own.connections > 0, "{own:?}");
    let requests = REQUESTS as u64;
    assert_eq!((greedy_user.connections, greedy_user.sequences), (1, requests), "{greedy_user:?}");
    assert_eq!((greedy_user.requests, greedy_user.passed_models), (requests, 0), "{greedy_user:?}");
    assert!(greedy_user.kv_pages >= 8 && greedy_user.device_us_per_s > 0, "{greedy_user:?}");
    start(&rig, "fairness::sees_only_its_own_holdings", INNOCENT).line("DONE");
    drop(greedy);
    rig.eventually("nothing is left of it", |_| {
        client.users().unwrap().users.iter().all(|user| user.uid != GREEDY || user.connections == 0)
    });
    rig.assert_serves();
}

/// Connects and leaves, as fast as it can.
#[test]
fn connects_without_end() {
    let Some((socket, _)) = child::inside() else { return };
    std::thread::scope(|scope| {
        for _ in 0..REQUESTS {
            scope.spawn(|| {
                for _ in 0.. {
                    drop(UnixStream::connect(&socket));
                }
            });
        }
        println!("\nDONE");
    });
}

/// Connects fifty times, and tells how long the slowest took until a frame was answered.
#[test]
fn connects_now_and_then() {
    let Some((socket, _)) = child::inside() else { return };
    let mut slowest = Duration::ZERO;
    for _ in 0..50 {
        let begun = Instant::now();
        Client::new(options(socket.clone())).ping(b"").unwrap();
        slowest = slowest.max(begun.elapsed());
    }
    println!("\nDONE {}", slowest.as_millis());
}

#[test]
fn a_user_that_connects_without_end_delays_nobody() {
    let Some(mut rig) = rig() else { return };
    let mut greedy = start(&rig, "fairness::connects_without_end", GREEDY);
    greedy.line("DONE");
    let told = format!("the user connects too fast uid={GREEDY} ");
    let begun = Instant::now();
    while !rig.log_text().contains(&told) {
        assert!(begun.elapsed() < SOON, "{}", rig.log_text());
    }
    let slowest: u64 =
        start(&rig, "fairness::connects_now_and_then", INNOCENT).line("DONE ").parse().unwrap();
    assert!(Duration::from_millis(slowest) < SOON, "an innocent user waited for {slowest} ms");
    for _ in 0..100 {
        let begun = Instant::now();
        drop(Raw::connect(&rig));
        assert!(begun.elapsed() < ADMITTED, "an administrator waits for {:?}", begun.elapsed());
    }
    drop(greedy);
    // More than an ordinary user may: a thousand at once, and 500 a second. Each is answered.
    let begun = Instant::now();
    for _ in 0..3000 {
        drop(Raw::connect(&rig));
    }
    assert!(begun.elapsed() < 4 * SOON, "an administrator waits for {:?}", begun.elapsed());
    rig.assert_serves();
}

fn others_are_served_beside(test: &str) {
    let Some(mut rig) = rig() else { return };
    let client = rig.client();
    client.load(TINY).unwrap();
    let private = rig.dir.path().join("private.gguf");
    std::fs::copy(rig.model(TINY), &private).unwrap();
    client.load_file(&private, None).unwrap();
    answer(&client, &GenerateRequest { model: "private".into(), ..story(8) }).unwrap();
    assert_eq!(client.residency().unwrap().models.len(), 1, "the administrator sees its own");
    let mut greedy = start(&rig, test, GREEDY);
    greedy.line("DONE");
    rig.eventually("all places are taken", |status| {
        status.devices[0].sequences_running + status.devices[0].sequences_queued >= 8
    });
    let slowest: u64 = start(&rig, "fairness::asks_for_little", INNOCENT).line("DONE ").parse().unwrap();
    assert!(Duration::from_millis(slowest) < SOON, "an innocent user waited for {slowest} ms");
    start(&rig, "fairness::counters_of_others_are_coarse", INNOCENT).line("DONE");
    let begun = Instant::now();
    answer(&client, &story(8)).unwrap();
    assert!(begun.elapsed() < SOON, "root waited for {:?}", begun.elapsed());

    let listed = client.ps().unwrap().sequences;
    let of_greedy = || listed.iter().filter(|s| s.uid == GREEDY);
    assert!(of_greedy().count() >= 8, "{listed:?}");
    assert!(of_greedy().any(|s| s.device_time_us().is_some_and(|us| us > 0)), "its cost is shown");
    let one = of_greedy().find(|s| s.state != SequenceState::Queued).expect("one is admitted");
    // It may have ended by itself meanwhile.
    match client.cancel_requests(RequestScope::Id(one.id)) {
        Ok(reply) => assert_eq!(reply.cancelled, 1),
        Err(error) => assert_eq!(error.code(), Some(ErrorCode::InvalidArgument as u16), "{error}"),
    }
    let cancelled = client.cancel_requests(RequestScope::Uid(GREEDY)).unwrap().cancelled;
    assert!(cancelled >= 1, "{cancelled}");
    assert_eq!(code(client.cancel_requests(RequestScope::Id(u64::MAX))), ErrorCode::InvalidArgument as u16);
    drop(greedy);
    rig.eventually("nothing is left of it", |status| {
        status.devices[0].sequences_running + status.devices[0].sequences_queued == 0
    });
    rig.assert_idle();
    rig.assert_serves();
}

#[test]
fn places_held_without_credit_keep_nobody_out() {
    others_are_served_beside("fairness::holds_places_without_credit");
}

#[test]
fn a_user_who_asks_without_end_keeps_nobody_out() {
    others_are_served_beside("fairness::keeps_all_places_busy");
}

/// Niceness of each thread that works on texts in the background: field 19 of its `stat`.
fn text_threads(pid: u32) -> Vec<i32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let stats = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("stat")).ok());
    let nice = |stat: &str| stat.split_once(" (text) ")?.1.split(' ').nth(16)?.parse().ok();
    stats.filter_map(|stat| nice(&stat)).collect()
}

#[test]
fn long_texts_slow_nobody_down() {
    let Some(mut rig) = rig() else { return };
    rig.client().load(TINY).unwrap();
    let mut greedy = start(&rig, "fairness::sends_long_texts", GREEDY);
    greedy.line("DONE");
    let begun = Instant::now();
    while text_threads(rig.pid()).is_empty() {
        assert!(begun.elapsed() < SOON, "{}", rig.log_text());
    }
    let mut innocent = start(&rig, "fairness::asks_for_little", INNOCENT);
    let looks = (0..100).map(|_| {
        std::thread::sleep(Duration::from_millis(10));
        text_threads(rig.pid())
    });
    let looks: Vec<_> = looks.collect();
    // A thread passes its turn on just before it ends.
    assert!(
        looks.iter().all(|threads| threads.len() <= 2),
        "one user works on one text at a time: {looks:?}"
    );
    let lowered = rustix::process::getpriority_process(None).unwrap().max(10);
    assert!(looks.iter().flatten().any(|nice| *nice == lowered), "{looks:?}");
    let slowest: u64 = innocent.line("DONE ").parse().unwrap();
    assert!(Duration::from_millis(slowest) < SOON, "an innocent user waited for {slowest} ms");
    drop(greedy);
    rig.assert_idle();
    rig.assert_serves();
}
