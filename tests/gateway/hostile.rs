//! Clients that hang up, read slowly, send broken or large bodies, or come from elsewhere.

use std::io::Read;
use std::os::unix::net::UnixStream;

use rocmforge_client::wire::SequenceState;
use rocmforge_gateway::{Address, Gateway, Listener, Settings, Tokens, serve};
use rustix::process::Signal;
use serde_json::json;

use crate::door::{CHATTY, Door, ENDLESS};
use crate::rig::{PATIENCE, Rig, TINY};

#[test]
fn a_client_that_hangs_up_cancels_its_request() {
    for stream in [true, false] {
        let door = Door::open();
        let messages = json!([{"role": "user", "content": "ab"}]);
        let body = json!({"model": ENDLESS, "messages": messages, "temperature": 0, "stream": stream});
        let mut connection = door.connect();
        connection.post("/v1/chat/completions", &body.to_string());
        let client = door.rig.client();
        let until = std::time::Instant::now() + PATIENCE;
        // It waits for credit soon after its beginning, because nobody reads it.
        let begun = [SequenceState::Decode, SequenceState::Stalled];
        while client.ps().unwrap().sequences.first().is_none_or(|one| !begun.contains(&one.state)) {
            assert!(std::time::Instant::now() < until, "the answer never begins");
        }
        // The head comes with the first token: a daemon stopped before it sends none, and the gateway says 503.
        if stream {
            assert_eq!(connection.head().unwrap().status, 200);
            connection.chunk().expect("a first event");
            door.await_metric("rocmforge_gateway_streams_open 1");
        }
        door.rig.signal(Signal::STOP);
        drop(connection);
        // The gateway knows of the end before the daemon goes on.
        door.await_metric("rocmforge_gateway_streams_open 0");
        door.await_metric("rocmforge_gateway_connections_open 1");
        door.rig.signal(Signal::CONT);
        let status = door.rig.eventually("the request is gone", |status| {
            let device = &status.devices[0];
            device.sequences_cancelled + device.sequences_done + device.sequences_failed > 0
        });
        let device = &status.devices[0];
        assert_eq!((device.sequences_cancelled, device.sequences_done), (1, 0), "stream: {stream}");
        assert_eq!(client.ps().unwrap().sequences, []);
    }
}

#[test]
fn a_slow_reader_holds_nobody_and_its_answer_waits_in_the_daemon() {
    let door = Door::open();
    let mut slow = door.connect();
    let body = json!({
        "model": CHATTY, "messages": [{"role": "user", "content": "ab"}], "temperature": 0, "stream": true,
        "logprobs": true, "top_logprobs": 20,
    });
    slow.post("/v1/chat/completions", &body.to_string());
    let until = std::time::Instant::now() + PATIENCE;
    let client = door.rig.client();
    loop {
        let sequences = client.ps().unwrap().sequences;
        if sequences.first().is_some_and(|one| one.state == SequenceState::Stalled) {
            break;
        }
        assert!(std::time::Instant::now() < until, "the answer never waits: {sequences:?}");
    }
    let fast = json!({"model": TINY, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8});
    for _ in 0..20 {
        let whole = door.post("/v1/completions", &fast).json();
        assert_eq!(whole["choices"][0]["text"], ", there was a little girl");
    }
    // Reading goes on where it stopped, and nothing is lost.
    let whole = slow.response().unwrap();
    let events = whole.events();
    let mut direct = body.clone();
    direct["stream"] = json!(false);
    let direct = door.post("/v1/chat/completions", &direct).json();
    let text: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(direct["choices"][0]["message"]["content"], text.as_str());
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[test]
fn a_stream_keeps_its_place_whoever_connects_and_asks_nothing() {
    let settings = Settings { connections: 4, ..Settings::default() };
    let door = Door::open_with("127.0.0.1:0", None, settings);
    // More than fits into the buffers on its way: it is under way until it is read.
    let body = json!({
        "model": CHATTY, "messages": [{"role": "user", "content": "ab"}], "temperature": 0, "stream": true,
        "logprobs": true, "top_logprobs": 20,
    });
    let mut stream = door.connect();
    stream.post("/v1/chat/completions", &body.to_string());
    door.await_metric("rocmforge_gateway_streams_open 1");
    let body = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{";
    for sends in ["", "GET /livez HTTP/1.1\r\nX: aaaa", body] {
        let idle = |_| {
            let mut connection = door.connect();
            connection.send(sends);
            connection
        };
        let _crowd: Vec<_> = (0..64).map(idle).collect();
        assert_eq!(door.get("/livez").status, 200);
    }
    let events = stream.response().unwrap().events();
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[test]
fn bodies_are_bounded_and_must_be_json() {
    let settings = Settings { body_bytes: 1 << 20, ..Settings::default() };
    let door = Door::open_with("127.0.0.1:0", None, settings);
    let mut connection = door.connect();
    connection.post("/v1/completions", &"x".repeat((1 << 20) + 1));
    let response = connection.response().unwrap();
    assert_eq!((response.status, response.header("connection")), (413, Some("close")));
    // A body that is announced too large is refused before it is sent.
    let mut connection = door.connect();
    connection
        .send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n{");
    assert_eq!(connection.response().unwrap().status, 413);
    for broken in ["", "{", "[]", "{\"model\": \"a\"", "{\"model\": \"\\ud800\"}", "\u{0}", &"[".repeat(9999)]
    {
        let mut connection = door.connect();
        connection.post("/v1/completions", broken);
        let response = connection.response().unwrap();
        assert_eq!(
            (response.status, &response.json()["error"]["type"]),
            (400, &json!("invalid_request_error"))
        );
        // The connection goes on: the body was read whole.
        connection.get("/health");
        assert_eq!(connection.response().unwrap().status, 200, "{broken}");
    }
}

#[test]
fn large_bodies_that_never_come_keep_small_ones_from_nothing() {
    let settings = Settings { body_bytes: 4 << 20, ..Settings::default() };
    let door = Door::open_with("127.0.0.1:0", None, settings);
    // Together they announce all bytes that are read at once, and more.
    let announce = |_| {
        let mut connection = door.connect();
        connection
            .send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4194304\r\n\r\n{");
        connection
    };
    let stuck: Vec<_> = (0..20).map(announce).collect();
    door.await_metric("rocmforge_gateway_connections_open 21");
    let ask = json!({"model": TINY, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8});
    for _ in 0..8 {
        let whole = door.post("/v1/completions", &ask).json();
        assert_eq!(whole["choices"][0]["text"], ", there was a little girl");
    }
    // Their end makes room for a large one.
    let whole = std::thread::scope(|scope| {
        let mut large = door.connect();
        // It is read when there is room, so sending it takes until then.
        let response = scope.spawn(move || {
            large.post("/v1/completions", &format!("{ask}{}", " ".repeat(4_000_000)));
            large.response().unwrap().json()
        });
        drop(stuck);
        response.join().unwrap()
    });
    assert_eq!(whole["choices"][0]["text"], ", there was a little girl");
}

#[test]
fn a_body_in_chunks_is_taken_up_to_the_limit() {
    let settings = Settings { body_bytes: 1 << 20, ..Settings::default() };
    let door = Door::open_with("127.0.0.1:0", None, settings);
    let ask = |body: &str, chunk: usize| {
        let mut connection = door.connect();
        connection
            .send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n");
        for part in body.as_bytes().chunks(chunk) {
            connection.send(&format!("{:x}\r\n{}\r\n", part.len(), std::str::from_utf8(part).unwrap()));
        }
        connection.send("0\r\nX-Trailer: 1\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let response = connection.response().unwrap();
        assert_eq!(response.header("connection"), Some("close"));
        assert!(connection.line().is_none(), "the bytes after it were read as another request");
        response
    };
    let body = json!({"model": TINY, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8});
    for chunk in [1, 7, 1000] {
        let answer = ask(&body.to_string(), chunk);
        assert_eq!(answer.json()["choices"][0]["text"], ", there was a little girl", "{answer:?}");
    }
    let padded = |bytes: usize| format!("{}{}", " ".repeat(bytes - body.to_string().len()), body);
    assert_eq!(ask(&padded(1 << 20), 50_000).status, 200);
    assert_eq!(ask(&padded((1 << 20) + 1), 50_000).status, 413);
    assert_eq!(ask("{", 1).status, 400);
}

#[test]
fn a_request_with_too_many_headers_is_refused() {
    let door = Door::open();
    let many: String = (0..200).map(|n| format!("X-{n}: 1\r\n")).collect();
    let long = format!("X: {}\r\n", "a".repeat(100_000));
    for headers in [many, long] {
        let mut connection = door.connect();
        connection.send(&format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n"));
        let status = connection.response().map(|response| response.status);
        assert!(matches!(status, None | Some(431)), "{status:?} for {} bytes", headers.len());
    }
    assert_eq!(door.get("/health").status, 200);
}

#[test]
fn web_pages_are_refused_and_a_token_opens_the_door() {
    let door = Door::open();
    for header in ["Host: evil.example", "Host: localhost\r\nOrigin: https://evil.example"] {
        for path in ["/v1/models", "/health"] {
            let mut connection = door.connect();
            connection.send(&format!("GET {path} HTTP/1.1\r\n{header}\r\n\r\n"));
            let response = connection.response().unwrap();
            assert_eq!(
                (response.status, &response.json()["error"]["type"]),
                (403, &json!("permission_error"))
            );
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    std::fs::write(&file, "0123456789abcdef0123\n").unwrap();
    let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    std::fs::set_permissions(&file, mode(0o644)).unwrap();
    assert!(Tokens::read(&file).unwrap_err().contains("chmod 600"), "a file that all can read is refused");
    std::fs::set_permissions(&file, mode(0o600)).unwrap();
    // Every address of the machine: with a token, this is allowed.
    let door = Door::open_with("0.0.0.0:0", Some(Tokens::read(&file).unwrap()), Settings::default());
    let port = door.address.rsplit_once(':').unwrap().1;
    for (header, status) in [
        ("", 401),
        ("Authorization: Bearer 0123456789abcdef0124\r\n", 401),
        ("Authorization: Bearer 0123456789abcdef0123\r\n", 200),
        ("X-Api-Key: 0123456789abcdef0123\r\n", 200),
    ] {
        let mut connection = crate::http::Connection::open(&format!("127.0.0.1:{port}"));
        connection.send(&format!("GET /v1/models HTTP/1.1\r\nHost: gateway.example\r\n{header}\r\n"));
        assert_eq!(connection.response().unwrap().status, status, "{header}");
    }
}

#[test]
fn a_unix_socket_is_the_door_of_its_owner_alone() {
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("door.sock");
    let door = Door::open_with(&format!("unix:{}", path.display()), None, Settings::default());
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(b"GET /v1/models HTTP/1.1\r\nHost: anything\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK") && text.contains(TINY), "{text}");
    drop(door);
    assert!(!path.exists(), "the socket is removed at the end");
}

#[test]
fn a_daemon_that_is_gone_gives_503_and_one_that_comes_back_is_found() {
    let mut door = Door::open();
    let ask = json!({"model": TINY, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8});
    assert_eq!(door.post("/v1/completions", &ask).status, 200);
    door.rig.signal(Signal::KILL);
    door.rig.ended();
    door.rig.run();
    let whole = door.post("/v1/completions", &ask).json();
    assert_eq!(whole["choices"][0]["text"], ", there was a little girl", "{whole}");
    // Before a daemon that never was.
    let rig = Rig::idle();
    let mut options = rig.options();
    options.absent_timeout = std::time::Duration::ZERO;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let listener =
        runtime.block_on(async { Listener::open(&"127.0.0.1:0".parse::<Address>().unwrap(), None).unwrap() });
    let address = listener.address().trim_start_matches("http://").to_owned();
    runtime.spawn(serve(Gateway::new(options, Settings::default()), listener, std::future::pending()));
    for path in ["/health", "/v1/models"] {
        let mut connection = crate::http::Connection::open(&address);
        connection.get(path);
        let response = connection.response().unwrap();
        assert_eq!((response.status, response.header("retry-after")), (503, Some("1")), "{path}");
        assert!(response.body.contains("is rocmforged running?"), "{}", response.body);
    }
}
