//! A gateway that stops: it tells routers, refuses requests in each API's form, and lets answers finish.

use std::time::Instant;

use rocmforge_gateway::Settings;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::door::{CHATTY, Door, ENDLESS, small_rig};
use crate::http::{Connection, Response};
use crate::rig::PATIENCE;

/// A request for a stream that does not end before its client reads on: it has more bytes than buffers hold.
pub fn long_stream() -> Value {
    json!({
        "model": ENDLESS, "messages": [{"role": "user", "content": "ab"}], "temperature": 0, "stream": true,
        "max_tokens": 2000, "logprobs": true, "top_logprobs": 20,
    })
}

/// Begins an answer of that kind.
pub fn begin(door: &Door) -> Connection {
    let mut connection = door.connect();
    connection.post("/v1/chat/completions", &long_stream().to_string());
    assert_eq!(connection.head().unwrap().status, 200);
    connection.chunk().expect("a first event");
    connection
}

/// The rest of a stream.
fn rest(mut connection: Connection) -> String {
    let mut bytes = Vec::new();
    while let Some(chunk) = connection.chunk() {
        bytes.extend(chunk);
    }
    String::from_utf8(bytes).unwrap()
}

fn await_health(door: &Door, message: &str) -> Response {
    let until = Instant::now() + PATIENCE;
    loop {
        let health = door.get("/health");
        if health.body.contains(message) {
            return health;
        }
        assert!(Instant::now() < until, "{message} never came: {health:?}");
    }
}

#[test]
fn a_gateway_that_stops_refuses_in_each_apis_form_and_lets_answers_finish() {
    let mut door = Door::open_with("127.0.0.1:0", None, Settings { drain: PATIENCE, ..Settings::default() });
    let mut idle = door.connect();
    idle.get("/health");
    assert_eq!(idle.response().unwrap().status, 200);
    let running = begin(&door);
    door.stop();
    let health = await_health(&door, "the gateway is stopping");
    let told = |response: &Response| {
        let header = |name| response.header(name).unwrap_or_default().to_owned();
        (response.status, header("retry-after"), header("connection"))
    };
    let refused = (503, "1".to_owned(), "close".to_owned());
    assert_eq!(told(&health), refused);
    assert_eq!((door.get("/livez").status, door.get("/metrics").status), (200, 200));
    // A request that is on its way on an older connection hears it too.
    idle.get("/v1/models");
    assert_eq!(told(&idle.response().unwrap()), refused);
    assert!(idle.line().is_none(), "its connection goes on");
    let messages = json!([{"role": "user", "content": "ab"}]);
    let ask = |path: &str| {
        let response =
            door.post(path, &json!({"model": CHATTY, "messages": messages, "max_tokens": 8, "stream": true}));
        assert_eq!(told(&response), refused, "{path}");
        response.json()
    };
    let openai = &ask("/v1/chat/completions")["error"];
    assert_eq!((&openai["type"], &openai["code"]), (&json!("server_error"), &json!("ServerDraining")));
    let anthropic = ask("/v1/messages");
    assert_eq!(
        (&anthropic["type"], &anthropic["error"]["type"]),
        (&json!("error"), &json!("overloaded_error"))
    );
    assert!(ask("/api/chat")["error"].is_string());
    assert_eq!(told(&door.get("/v1/models")), refused);
    let rest = rest(running);
    assert!(rest.ends_with("data: [DONE]\n\n") && !rest.contains("\"error\""), "the answer was cut");
}

#[test]
fn a_daemon_that_stops_is_told_and_its_answers_end_whole_or_with_an_error() {
    for (signal, cut) in [(Signal::TERM, false), (Signal::KILL, true)] {
        // Its drain outlasts any machine's slowness.
        let door = Door::before(small_rig("drain_s = 600"), "127.0.0.1:0", None, Settings::default());
        let running = begin(&door);
        door.rig.signal(signal);
        let message = if cut { "is rocmforged running?" } else { "the daemon is stopping" };
        let health = await_health(&door, message);
        assert_eq!((health.status, health.header("retry-after")), (503, Some("1")));
        // Nothing of this answer was sent, so its status says that it may be asked for again.
        for stream in [false, true] {
            let messages = json!([{"role": "user", "content": "ab"}]);
            let body = json!({"model": CHATTY, "messages": messages, "max_tokens": 8, "stream": stream});
            let refused = door.post("/v1/chat/completions", &body);
            assert!(refused.status == 503 && refused.header("retry-after").is_some(), "{refused:?}");
            assert!(!refused.json()["error"].is_null());
        }
        let rest = rest(running);
        let end = &rest[rest.len().saturating_sub(500)..];
        assert_eq!(rest.ends_with("data: [DONE]\n\n"), !cut, "the end says whether it is whole: {end}");
        assert_eq!(rest.contains("\"error\""), cut);
    }
}
