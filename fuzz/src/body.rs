//! Target `http_body`: a body for one of the gateway's paths, before a running gateway and its daemon.

use std::io::{Read, Write};
use std::sync::OnceLock;

use rocmforge_client::Options;
use rocmforge_gateway::{Address, Gateway, Listener, Settings, serve};
use serde_json::Value;

use crate::served::Served;

/// The gateway's socket, in the daemon's directory.
const SOCKET: &str = "http.sock";

/// All paths that take a body. The first byte of an input chooses one.
pub const PATHS: [&str; 12] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/v1/rerank",
];

fn start() -> Served {
    let served = Served::start();
    let options = Options { socket: served.path("api.sock"), ..Options::default() };
    let address = Address::Unix(served.path(SOCKET));
    // Binding needs the runtime, and is done before the first request.
    let listener = served.runtime.block_on(async { Listener::open(&address, None).expect("a free path") });
    let gateway = Gateway::new(options, Settings::default());
    served.runtime.spawn(serve(gateway, listener, std::future::pending()));
    served
}

/// Sends `data` as a request's body. For any input: an answer comes in time. It is no fault of the gateway's or the
/// daemon's. Its form is that of its type: JSON, lines of JSON, or events with JSON. A refusal has the form of the path's API,
/// also within an answer that has begun.
pub fn http_body(data: &[u8], plant: bool) {
    static SERVED: OnceLock<Served> = OnceLock::new();
    let served = SERVED.get_or_init(start);
    let Some((path, body)) = data.split_first() else { return };
    let path = PATHS[usize::from(*path) % PATHS.len()];
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = served.connect(SOCKET);
    let mut said = Vec::new();
    stream.write_all(&[head.as_bytes(), body].concat()).expect("the gateway reads");
    stream.read_to_end(&mut said).unwrap_or_else(|error| panic!("{path}: no whole answer: {error}"));
    check(path, &said, plant);
}

fn check(path: &str, said: &[u8], plant: bool) {
    let end = said.windows(4).position(|four| four == b"\r\n\r\n").expect("a head that ends");
    let head = std::str::from_utf8(&said[..end]).expect("a head of text").to_lowercase();
    let status: u16 = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let has = |header: &str| head.lines().any(|line| line.starts_with(header));
    let chunked = has("transfer-encoding: chunked");
    let body = if chunked { unchunked(&said[end + 4..]) } else { said[end + 4..].to_vec() };
    let text = std::str::from_utf8(&body).expect("a body of text");
    // 503 says that the daemon has no room now. Any other error of the 500s is a fault.
    let expected = matches!(status, 200 | 400..=499 | 501 | 503);
    assert!(expected, "{path}: status {status}: {text}");
    if has("content-type: text/event-stream") {
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.filter(|data| *data != "[DONE]").for_each(|data| told_as_its_api_does(path, data));
    } else if has("content-type: application/x-ndjson") {
        text.lines().for_each(|line| told_as_its_api_does(path, line));
    } else {
        told_as_its_api_does(path, text);
    }
    if status == 200 {
        return;
    }
    let value = json(text);
    assert!(value.get("error").is_some(), "{path}: status {status} without an error: {text}");
    if plant {
        crate::planted_short(value["error"]["param"].as_str().unwrap_or_default().as_bytes());
    }
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("no JSON ({error}): {text:?}"))
}

/// JSON whose error, if it has one, is as the API's own clients read it. It has words, and a type if the API has types.
fn told_as_its_api_does(path: &str, text: &str) {
    let value = json(text);
    // A response that is whole says with null that nothing went wrong.
    let Some(error) = value.get("error").filter(|error| !error.is_null()) else { return };
    let has = |key: &str| error[key].as_str().is_some_and(|words| !words.is_empty());
    let told = if path.starts_with("/api/") {
        error.as_str().is_some_and(|words| !words.is_empty())
    } else if path.starts_with("/v1/messages") {
        value["type"] == "error" && has("type") && has("message")
    } else {
        has("message") && has("type") && error.get("param").is_some() && error.get("code").is_some()
    };
    assert!(told, "{path}: an error in another form: {text}");
}

/// The content of a body in chunks, which must be whole.
fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut content = Vec::new();
    loop {
        let end = bytes.windows(2).position(|two| two == b"\r\n").expect("a chunk's size ends");
        let size = std::str::from_utf8(&bytes[..end]).expect("a size is text");
        let size = usize::from_str_radix(size, 16).expect("a size is a number");
        if size == 0 {
            return content;
        }
        content.extend_from_slice(&bytes[end + 2..end + 2 + size]);
        bytes = &bytes[end + 2 + size + 2..];
    }
}
