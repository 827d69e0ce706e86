//! Connections that ask nothing, and those with a request under way, where there are few places. No daemon is needed.

#![allow(clippy::unwrap_used, clippy::panic)] // tests fail by panicking

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use rocmforge_client::Options;
use rocmforge_gateway::{Gateway, Listener, Settings, Tokens, serve};
use tokio::runtime::Runtime;

/// Time in which most clients are answered, whatever others do.
const SOON: Duration = Duration::from_secs(1);

/// Time for events that a slow machine delays.
const PATIENCE: Duration = Duration::from_secs(30);

const PLACES: usize = 8;

/// A gateway for a daemon that is not there.
struct Door {
    address: String,
    _runtime: Runtime,
    dir: tempfile::TempDir,
}

impl Door {
    fn open(settings: Settings, tokens: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tokens");
        std::fs::write(&file, tokens).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let tokens = (!tokens.is_empty()).then(|| Tokens::read(&file).unwrap());
        let options = Options {
            socket: dir.path().join("api.sock"),
            absent_timeout: Duration::ZERO,
            ..Options::default()
        };
        let runtime = Runtime::new().unwrap();
        let address = "127.0.0.1:0".parse().unwrap();
        let listener = runtime.block_on(async { Listener::open(&address, tokens).unwrap() });
        let address = listener.address().trim_start_matches("http://").to_owned();
        runtime.spawn(serve(Gateway::new(options, settings), listener, std::future::pending()));
        Self { address, _runtime: runtime, dir }
    }

    fn connect(&self) -> Connection {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Connection(stream)
    }

    /// Connections that send this and no more.
    fn crowd(&self, count: usize, sends: &str) -> Vec<Connection> {
        let one = |_| {
            let mut connection = self.connect();
            connection.send(sends);
            connection
        };
        (0..count).map(one).collect()
    }

    /// A daemon that takes connections and answers nothing, until this drops.
    fn silent_daemon(&self) -> UnixListener {
        UnixListener::bind(self.dir.path().join("api.sock")).unwrap()
    }

    /// A request whose head was read and whose body has one byte to come.
    fn under_way(&self, token: &str) -> Connection {
        let mut connection = self.connect();
        connection.send(&begun(token));
        let answer = connection.until("\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 100"), "{answer}");
        connection.send("{");
        connection
    }

    #[track_caller]
    fn answers_soon(&self) {
        let answered = |_| {
            let since = Instant::now();
            let mut connection = self.connect();
            connection.send(LIVEZ);
            let answer = connection.until("\"ok\"}");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            since.elapsed()
        };
        let mut times: Vec<_> = (0..10).map(answered).collect();
        times.sort();
        assert!(times[5] < SOON, "{times:?}");
    }
}

const LIVEZ: &str = "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";

fn begun(token: &str) -> String {
    format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {token}\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    )
}

struct Connection(TcpStream);

impl Connection {
    fn send(&mut self, text: &str) {
        // The gateway may have closed it; the test then looks at what comes.
        let _ = self.0.write_all(text.as_bytes());
    }

    /// Reads until the text ends so, or the connection ends.
    #[track_caller]
    fn until(&mut self, end: &str) -> String {
        let (mut text, mut byte) = (String::new(), [0]);
        while !text.ends_with(end) {
            match self.0.read(&mut byte) {
                Ok(1) => text.push(char::from(byte[0])),
                Ok(_) => break,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                Err(error) => panic!("{error} after {text}"),
            }
        }
        text
    }

    /// The time until the gateway closes it.
    #[track_caller]
    fn end(mut self, since: Instant) -> Duration {
        assert_eq!(self.until("nothing"), "");
        since.elapsed()
    }
}

fn few() -> Settings {
    Settings { connections: PLACES, ..Settings::default() }
}

#[test]
fn clients_that_ask_nothing_keep_nobody_out() {
    let door = Door::open(few(), "");
    let mut asks = door.under_way("");
    for sends in ["", "\r\n", "GET /livez HTTP/1.1\r\nHost: localhost\r\nX: aaaaaaaa", LIVEZ] {
        let _crowd = door.crowd(10 * PLACES, sends);
        door.answers_soon();
    }
    asks.send("}");
    let answer = asks.until("\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 400"), "a request under way was cut: {answer}");
}

#[test]
fn a_newcomer_waits_where_all_have_requests_under_way() {
    // Nothing tells that a head was read, and a newcomer takes the place of one that was not. A slow machine gets more time.
    let reads = [0, 10, 100, 1_000, 10_000].map(Duration::from_millis);
    assert!(reads.into_iter().any(a_newcomer_waits), "newcomers found a place");
}

/// Whether a newcomer waits if the gateway has this much time to read the requests before.
fn a_newcomer_waits(read: Duration) -> bool {
    let door = Door::open(few(), "");
    let daemon = door.silent_daemon();
    let asking = door.crowd(PLACES, "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n");
    // They have their places: it is the gateway's one connection to the daemon, which all of them wait for.
    let (held, _) = daemon.accept().unwrap();
    std::thread::sleep(read);
    let mut newcomer = door.connect();
    newcomer.send(LIVEZ);
    newcomer.0.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    if newcomer.0.read(&mut [0]).is_ok() {
        return false;
    }
    newcomer.0.set_read_timeout(Some(PATIENCE)).unwrap();
    // An answer makes its connection one that waits.
    drop((held, daemon));
    assert!(newcomer.until("\"ok\"}").starts_with("HTTP/1.1 200"));
    for mut connection in asking {
        let answer = connection.until("\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    }
    true
}

#[test]
fn bodies_that_never_come_keep_nobody_out() {
    let door = Door::open(few(), "");
    let daemon = door.silent_daemon();
    let mut whole = door.connect();
    whole.send("GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let (held, _) = daemon.accept().unwrap();
    let mut bodies: Vec<_> = (1..PLACES).map(|_| door.under_way("")).collect();
    door.answers_soon();
    // It took the place of the first of them. The others are whole once their ends come.
    assert_eq!(bodies[0].until("nothing"), "");
    bodies[PLACES - 2].send("}");
    assert!(bodies[PLACES - 2].until("\r\n\r\n").starts_with("HTTP/1.1 400"));
    drop((held, daemon));
    assert!(whole.until("\r\n\r\n").starts_with("HTTP/1.1 503"), "a whole request was cut");
}

#[test]
fn a_head_has_its_time_and_a_rest_between_requests_another() {
    let (head, idle) = (Duration::from_millis(300), Duration::from_secs(4));
    let door = Door::open(Settings { head, idle, ..few() }, "");
    let since = Instant::now();
    let silent = door.connect();
    let mut slow = door.connect();
    let mut rests = door.connect();
    rests.send(LIVEZ);
    rests.until("\"ok\"}");
    let rest = Instant::now();
    // A byte now and then makes no head.
    slow.send("GET /livez HTTP/1.1\r\nX: ");
    let mut sender = slow.0.try_clone().unwrap();
    let drips = std::thread::spawn(move || {
        while sender.write_all(b"a").is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    for connection in [silent, slow] {
        let after = connection.end(since);
        assert!(after >= head && after < idle, "{after:?}");
    }
    drips.join().unwrap();
    // A further request is answered, and the rest begins again.
    assert!(rest.elapsed() < idle, "the machine is too slow for this test");
    rests.send(LIVEZ);
    assert!(rests.until("\"ok\"}").starts_with("HTTP/1.1 200"));
    let after = rests.end(Instant::now());
    assert!(after >= idle - Duration::from_millis(100), "{after:?}");
}

#[test]
fn a_tokens_requests_leave_places_for_anothers() {
    let (one, two) = ("0123456789abcdef", "fedcba9876543210");
    let door = Door::open(few(), &format!("{one}\n{two}\n"));
    let mut asking: Vec<_> = (0..PLACES / 2).map(|_| door.under_way(one)).collect();
    let mut refused = door.connect();
    refused.send(&begun(one));
    let answer = refused.until("try again");
    assert!(answer.starts_with("HTTP/1.1 429") && answer.contains("retry-after: 1"), "{answer}");
    assert!(answer.contains("the token on line 1 has 4 requests under way"), "{answer}");
    asking.push(door.under_way(two));
    asking.push(door.under_way(two));
    // Once they are answered, there are as many as before.
    for mut connection in asking.drain(..) {
        connection.send("}");
        connection.until("\r\n\r\n");
    }
    asking.extend((0..PLACES / 2).map(|_| door.under_way(one)));
    assert_eq!(asking.len(), PLACES / 2);
    // A single token has all places.
    let door = Door::open(few(), one);
    let all: Vec<_> = (0..PLACES).map(|_| door.under_way(one)).collect();
    assert_eq!(all.len(), PLACES);
}
