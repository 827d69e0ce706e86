//! Two daemons, a gateway before each, and a router before both: a published one with the configuration that packages bring.
//!
//! Clients ask all the time. One side is killed or stopped, and comes back. No request may be lost that had not begun to answer, and
//! an answer that had begun ends whole or with a visible error.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::common;
use crate::door::{CHATTY, ENDLESS, small_rig};
use crate::http::Connection;
use crate::rig::{PATIENCE, Rig};

/// Arguments for this test binary as a gateway, one a line.
const ARGUMENTS: &str = "ROCMFORGE_TEST_GATEWAY";

/// The key that clients send. Only some routers ask for one.
pub const KEY: &str = "sk-this-test-alone-has-this-key";

/// Clients that ask all the time.
const CLIENTS: usize = 8;

/// Answers that have begun when the accident happens. A router that looks at open requests gives each gateway half of them.
const BEGUN: usize = 4;

/// Not a test by itself: this binary again, as the gateway's program.
#[test]
fn as_a_program() {
    if let Ok(arguments) = std::env::var(ARGUMENTS) {
        let arguments = std::iter::once("rocmforge-gateway").chain(arguments.lines());
        let code = rocmforge_gateway::main(arguments.map(Into::into));
        assert_eq!(format!("{code:?}"), format!("{:?}", std::process::ExitCode::SUCCESS));
        std::process::exit(0);
    }
}

/// Waits until it is true.
#[track_caller]
fn until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < end, "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// An address that nobody uses now.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// A machine: a daemon, and the gateway before it.
pub struct Site {
    rig: Rig,
    gateway: Option<Child>,
    pub address: String,
}

impl Site {
    fn open() -> Self {
        let mut site = Self { rig: small_rig(""), gateway: None, address: free_address() };
        site.run_gateway();
        site
    }

    fn run_gateway(&mut self) {
        let log = File::options().create(true).append(true).open(self.log()).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "routers::as_a_program", "--nocapture"]);
        let socket = self.rig.socket();
        // Answers that run when it is stopped may take as long as the test does.
        let arguments = ["--drain-s", "60", "--listen", &self.address, "--socket", socket.to_str().unwrap()];
        command.env(ARGUMENTS, arguments.join("\n")).env_remove("LISTEN_FDS").stdout(Stdio::null());
        self.gateway = Some(command.stderr(log).spawn().unwrap());
        until("the gateway serves", || self.status("/health") == Some(200));
    }

    fn log(&self) -> PathBuf {
        self.rig.dir.path().join("gateway.log")
    }

    fn get(&self, path: &str) -> Option<(u16, String)> {
        let reply = exchange(&self.address, &format!("GET {path} HTTP/1.1\r\nHost: localhost"), "").ok()?;
        Some((reply.status?, reply.body))
    }

    fn status(&self, path: &str) -> Option<u16> {
        self.get(path).map(|(status, _)| status)
    }

    /// Requests that its gateway has answered since its start.
    fn answered(&self) -> u64 {
        let line = "rocmforge_gateway_requests_total{api=\"openai\",status=\"200\"} ";
        let page = self.get("/metrics").map(|(_, page)| page).unwrap_or_default();
        page.lines().find_map(|found| found.strip_prefix(line)?.parse().ok()).unwrap_or(0)
    }

    fn gateway(&self) -> &Child {
        self.gateway.as_ref().expect("the gateway is not started")
    }

    fn gateway_ended(&mut self) -> Option<i32> {
        let mut child = self.gateway.take().expect("the gateway is not started");
        until("the gateway ends", || child.try_wait().unwrap().is_some());
        child.wait().unwrap().code()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(mut child) = self.gateway.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("log of the gateway:\n{}", std::fs::read_to_string(self.log()).unwrap_or_default());
        }
    }
}

/// A response as its bytes came.
#[derive(Debug)]
struct Reply {
    /// `None` if the connection ended before.
    status: Option<u16>,
    body: String,
    /// Whether the body came to its end.
    complete: bool,
}

/// Sends a request, and reads until the connection ends.
fn exchange(address: &str, head: &str, body: &str) -> std::io::Result<Reply> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "{head}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len())?;
    let mut bytes = Vec::new();
    // A reset is an end, too: the bytes before it count.
    let _ = stream.read_to_end(&mut bytes);
    Ok(reply(&bytes))
}

fn reply(bytes: &[u8]) -> Reply {
    let cut = bytes.windows(4).position(|window| window == b"\r\n\r\n");
    let Some(cut) = cut else { return Reply { status: None, body: String::new(), complete: false } };
    let head = String::from_utf8_lossy(&bytes[..cut]).to_ascii_lowercase();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let rest = &bytes[cut + 4..];
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
    let (body, complete) = match length {
        Some(length) => (rest.to_vec(), rest.len() == length),
        None => dechunked(rest),
    };
    Reply { status, body: String::from_utf8_lossy(&body).into_owned(), complete }
}

/// The content of chunks, and whether the last, empty one came.
fn dechunked(mut rest: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    loop {
        let line = rest.windows(2).position(|window| window == b"\r\n");
        let size =
            line.and_then(|line| usize::from_str_radix(std::str::from_utf8(&rest[..line]).ok()?, 16).ok());
        let (Some(line), Some(size)) = (line, size) else { return (body, false) };
        if size == 0 {
            return (body, true);
        }
        let chunk = &rest[line + 2..];
        if chunk.len() < size + 2 {
            body.extend(&chunk[..chunk.len().min(size)]);
            return (body, false);
        }
        body.extend(&chunk[..size]);
        rest = &chunk[size + 2..];
    }
}

/// How a request ended.
#[derive(Debug, PartialEq)]
pub enum Outcome {
    /// The whole answer.
    Whole(String),
    /// It had begun, and its end says that it is none.
    Broken,
    /// No byte of an answer, or an end that looks like a whole answer's.
    Lost(String),
}

fn outcome(reply: std::io::Result<Reply>, stream: bool) -> Outcome {
    let reply = match reply {
        Ok(reply) => reply,
        Err(error) => return Outcome::Lost(error.to_string()),
    };
    if reply.status != Some(200) {
        return Outcome::Lost(format!("{reply:?}"));
    }
    if !reply.complete {
        return Outcome::Broken;
    }
    if !stream {
        let answer: Value = serde_json::from_str(&reply.body).unwrap_or_default();
        let text = answer["choices"][0]["message"]["content"].as_str();
        return text.map_or(Outcome::Lost(reply.body.clone()), |text| Outcome::Whole(text.to_owned()));
    }
    let events: Vec<&str> =
        reply.body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    let values: Vec<Value> = events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
    let failed = values.iter().any(|value| !value["error"].is_null());
    match (failed, events.last() == Some(&"[DONE]")) {
        (true, _) => Outcome::Broken,
        (false, true) => {
            let pieces = values.iter().filter_map(|value| value["choices"][0]["delta"]["content"].as_str());
            Outcome::Whole(pieces.collect())
        }
        (false, false) => Outcome::Lost(format!("an end without a word: {}", reply.body)),
    }
}

/// A chat at temperature 0, so that all daemons give the same answer.
fn chat(model: &str, stream: bool, max_tokens: u32) -> Value {
    let messages = json!([{"role": "user", "content": "ab"}]);
    json!({"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens, "stream": stream})
}

/// The head of a request for a chat, without its last headers.
fn head() -> String {
    let form = "Content-Type: application/json";
    format!("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n{form}")
}

fn ask(address: &str, body: &Value, stream: bool) -> Outcome {
    outcome(exchange(address, &head(), &body.to_string()), stream)
}

/// A router before two sites.
pub struct Routed {
    sites: [Site; 2],
    address: String,
    router: Child,
    /// The router's names of a model that answers soon, and of one that answers for long.
    models: [&'static str; 2],
    log: PathBuf,
    _dir: tempfile::TempDir,
}

impl Drop for Routed {
    fn drop(&mut self) {
        let _ = self.router.kill();
        let _ = self.router.wait();
        if std::thread::panicking() {
            eprintln!("log of the router:\n{}", std::fs::read_to_string(&self.log).unwrap_or_default());
        }
    }
}

impl Routed {
    /// Starts a router with the packages' configuration of that name. Each pair of `changes` is a text of it and its replacement.
    /// `command` gets the file and the address at which it shall listen.
    pub fn start(
        configuration: &str,
        models: [&'static str; 2],
        changes: impl FnOnce(&[Site; 2], &str) -> Vec<(String, String)>,
        command: impl FnOnce(&Path, &str) -> Command,
    ) -> Self {
        let sites = [Site::open(), Site::open()];
        let (dir, address) = (tempfile::tempdir().unwrap(), free_address());
        let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd/routers").join(configuration);
        let mut text = std::fs::read_to_string(kept).unwrap();
        for (from, to) in changes(&sites, &address) {
            assert!(text.contains(&from), "{configuration} has no {from}");
            text = text.replace(&from, &to);
        }
        let file = dir.path().join(configuration);
        std::fs::write(&file, text).unwrap();
        let log = dir.path().join("log");
        let mut command = command(&file, &address);
        let to = File::create(&log).unwrap();
        command.stdin(Stdio::null()).stdout(to.try_clone().unwrap()).stderr(to);
        let router = command.spawn().unwrap();
        let routed = Self { sites, address, router, models, log, _dir: dir };
        let first = chat(models[0], false, 8);
        until("the router answers", || matches!(ask(&routed.address, &first, false), Outcome::Whole(_)));
        routed
    }

    /// Begins an answer that does not end before its client reads on.
    fn begin(&self) -> Connection {
        let mut body = chat(self.models[1], true, 2000);
        body["logprobs"] = json!(true);
        body["top_logprobs"] = json!(20);
        let body = body.to_string();
        let mut connection = Connection::open(&self.address);
        let length = body.len();
        connection
            .send(&format!("{}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}", head()));
        assert_eq!(connection.head().expect("a head").status, 200);
        connection.chunk().expect("a first event");
        connection
    }

    /// Has clients ask while `accident` happens to the first site and `recover` brings it back. Returns the outcomes of answers that
    /// had begun before.
    fn under_load(
        &mut self,
        accident: impl FnOnce(&mut Site),
        recover: impl FnOnce(&mut Site),
    ) -> Vec<Outcome> {
        let begun: Vec<Connection> = (0..BEGUN).map(|_| self.begin()).collect();
        let expected = match ask(&self.sites[1].address, &chat(CHATTY, false, 8), false) {
            Outcome::Whole(text) => text,
            other => panic!("the second gateway alone: {other:?}"),
        };
        let stop = AtomicBool::new(false);
        let (address, model, sites) = (&self.address, self.models[0], &mut self.sites);
        let client = |number: usize| {
            let mut outcomes = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let stream = (number + outcomes.len()).is_multiple_of(2);
                outcomes.push(ask(address, &chat(model, stream, 8), stream));
            }
            outcomes
        };
        let (outcomes, begun) = std::thread::scope(|scope| {
            let client = &client;
            let clients: Vec<_> = (0..CLIENTS).map(|number| scope.spawn(move || client(number))).collect();
            // Clients must end also if an assertion here fails.
            let ended = Ended(&stop);
            let [first, second] = sites;
            let more = |site: &Site, than: u64| until("a site answers more", || site.answered() >= than);
            more(first, 10);
            accident(first);
            more(second, second.answered() + 30);
            let begun = begun.into_iter().map(finish).collect::<Vec<_>>();
            recover(first);
            more(first, first.answered() + 10);
            drop(ended);
            let outcomes: Vec<Outcome> =
                clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
            (outcomes, begun)
        });
        let lost: Vec<&Outcome> = outcomes.iter().filter(|one| matches!(one, Outcome::Lost(_))).collect();
        assert!(lost.is_empty(), "{} of {} requests are lost: {lost:?}", lost.len(), outcomes.len());
        let whole = outcomes.iter().filter(|one| **one == Outcome::Whole(expected.clone())).count();
        let broken = outcomes.iter().filter(|one| **one == Outcome::Broken).count();
        assert_eq!(whole + broken, outcomes.len(), "some answers are others': {outcomes:?}");
        // Each client has at most one answer that had begun.
        assert!(broken <= CLIENTS, "{broken} of {} answers broke", outcomes.len());
        println!("{whole} whole, {broken} broken; begun before: {}", begun.len());
        begun
    }
}

/// Stops the clients when it is dropped.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reads the rest of an answer that has begun.
fn finish(connection: Connection) -> Outcome {
    let (rest, complete) = dechunked(&connection.rest());
    let body = String::from_utf8_lossy(&rest).into_owned();
    outcome(Ok(Reply { status: Some(200), body, complete }), true)
}

fn is_whole(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Whole(text) if !text.is_empty())
}

/// Asserts that each of the answers is whole, or ended with an error.
#[track_caller]
pub fn assert_none_lost(begun: &[Outcome]) {
    assert!(begun.iter().all(|one| is_whole(one) || *one == Outcome::Broken), "{begun:?}");
}

/// Asserts that some of the answers were on the first site and broke, and that all others are whole.
#[track_caller]
fn assert_some_broke(begun: &[Outcome]) {
    let whole = begun.iter().filter(|one| is_whole(one)).count();
    let broken = begun.iter().filter(|one| **one == Outcome::Broken).count();
    assert_eq!(whole + broken, begun.len(), "{begun:?}");
    assert!(whole > 0 && broken > 0, "{whole} whole, {broken} broken");
}

impl Routed {
    /// The daemon of the first site is killed, and started again.
    pub fn a_daemon_is_killed(&mut self) -> Vec<Outcome> {
        self.under_load(
            |site| {
                site.rig.signal(Signal::KILL);
                site.rig.ended();
                until("its health is told", || site.status("/health") == Some(503));
                assert_eq!(site.status("/livez"), Some(200));
            },
            |site| site.rig.run(),
        )
    }

    /// As [`Routed::a_daemon_is_killed`], of the gateway.
    fn a_gateway_is_killed(&mut self) -> Vec<Outcome> {
        self.under_load(
            |site| {
                signal(site.gateway(), Signal::KILL);
                site.gateway_ended();
            },
            Site::run_gateway,
        )
    }

    /// The gateway of the first site is stopped by the book, and started again.
    fn a_gateway_is_stopped(&mut self) -> Vec<Outcome> {
        self.under_load(
            |site| signal(site.gateway(), Signal::TERM),
            |site| {
                assert_eq!(site.gateway_ended(), Some(0));
                site.run_gateway();
            },
        )
    }

    /// The daemon of the first site is stopped by the book, and started again.
    fn a_daemon_is_stopped(&mut self) -> Vec<Outcome> {
        self.under_load(
            |site| site.rig.signal(Signal::TERM),
            |site| {
                assert!(site.rig.ended().success());
                site.rig.run();
            },
        )
    }
}

/// HAProxy before two sites; `None` after saying that it is missing.
fn haproxy() -> Option<Routed> {
    let programs = ["haproxy", "/usr/sbin/haproxy"];
    let works =
        |program: &&str| Command::new(program).arg("-v").output().is_ok_and(|out| out.status.success());
    let Some(program) = programs.into_iter().find(works) else {
        common::skip("haproxy is missing; Debian's package of that name has it");
        return None;
    };
    let changes = |sites: &[Site; 2], address: &str| {
        let changes = [
            ("bind 127.0.0.1:8080", format!("bind {address}")),
            ("server one 127.0.0.1:11435", format!("server one {}", sites[0].address)),
            ("server two 127.0.0.2:11435", format!("server two {}", sites[1].address)),
        ];
        changes.map(|(from, to)| (from.to_owned(), to)).to_vec()
    };
    let routed = Routed::start("haproxy.cfg", [CHATTY, ENDLESS], changes, |file, _| {
        let checked = Command::new(program).arg("-c").arg("-f").arg(file).output().unwrap();
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
        let mut command = Command::new(program);
        command.arg("-db").arg("-f").arg(file);
        command
    });
    Some(routed)
}

#[test]
fn haproxy_loses_no_request_when_a_daemon_is_killed() {
    let Some(mut routed) = haproxy() else { return };
    assert_some_broke(&routed.a_daemon_is_killed());
}

#[test]
fn haproxy_loses_no_request_when_a_gateway_is_killed() {
    let Some(mut routed) = haproxy() else { return };
    assert_some_broke(&routed.a_gateway_is_killed());
}

#[test]
fn haproxy_loses_no_request_when_a_gateway_is_stopped() {
    let Some(mut routed) = haproxy() else { return };
    let begun = routed.a_gateway_is_stopped();
    assert!(begun.iter().all(is_whole), "{begun:?}");
}

#[test]
fn haproxy_loses_no_request_when_a_daemon_is_stopped() {
    let Some(mut routed) = haproxy() else { return };
    // Answers that its `limits.drain_s` cuts off say so.
    assert_none_lost(&routed.a_daemon_is_stopped());
}
