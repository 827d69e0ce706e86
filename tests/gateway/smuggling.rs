//! Requests that two readers of HTTP could take for different ones: request smuggling.
//!
//! Each case carries a second request, [`SMUGGLED`], where a reader that is less strict would find one. A section is of RFC 9112
//! if no other RFC is named. The section's rule is in the case: a server must refuse the request, or may take it.

use serde_json::json;

use crate::door::Door;
use crate::http::Connection;
use crate::rig::TINY;

/// The request that nobody may get an answer to.
const SMUGGLED: &str = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// The right treatment of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Right {
    /// It is refused with a status of 4xx, or 501, and the connection ends.
    Refused,
    /// The connection ends without an answer: its bytes are of another protocol.
    HungUp,
    /// It is answered with 200, and the connection ends: nothing behind it is read.
    Last,
    /// It gets one answer, and the connection goes on behind all of its bytes.
    Whole,
}

use Right::{HungUp, Last, Refused, Whole};

/// An answerable request's body.
fn ask() -> String {
    json!({"model": TINY, "prompt": "Once", "temperature": 0, "max_tokens": 1}).to_string()
}

/// A body in one chunk.
fn chunked(body: &str) -> String {
    format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len())
}

/// Sends bytes and checks what comes back.
#[track_caller]
fn check(door: &Door, what: &str, sends: &[u8], right: Right) {
    let mut connection = door.connect();
    connection.send_bytes(sends);
    let (told, shown) = match right {
        HungUp => (None, String::new()),
        _ => {
            let response = connection.response();
            (response.as_ref().map(|response| response.status), format!("{response:?}"))
        }
    };
    let fits = match right {
        Refused => matches!(told, Some(400..=499 | 501)),
        HungUp => told.is_none(),
        Last => told == Some(200),
        // The smuggled request is its body, which is no JSON.
        Whole => told == Some(400),
    };
    assert!(fits, "{what}: {right:?} is right, but it is answered with {shown}");
    if right == Whole {
        goes_on(&mut connection, what);
    }
    assert_eq!(connection.line(), None, "{what}: the bytes behind it were read as another request");
}

/// Checks that the connection's next answer is to the next request.
#[track_caller]
fn goes_on(connection: &mut Connection, what: &str) {
    connection.send("GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    let next = connection.response().unwrap_or_else(|| panic!("{what}: the connection ended"));
    assert_eq!((next.status, next.body.as_str()), (200, r#"{"status":"ok"}"#), "{what}");
}

/// Headers that tell a body's length, or seem to. `{all}` is the length of all bytes behind the head: a body in chunks, and the
/// smuggled request behind it.
const LENGTHS: &[(&str, &str, Right)] = &[
    // CL.TE and TE.CL
    (
        "6.1 a coding overrides a length, and ends",
        "Content-Length: {all}\r\nTransfer-Encoding: chunked",
        Last,
    ),
    (
        "6.1 a coding overrides a length, and ends",
        "Transfer-Encoding: chunked\r\nContent-Length: {all}",
        Last,
    ),
    ("6.1 a coding overrides a length, and ends", "Transfer-Encoding: chunked\r\nContent-Length: 0", Last),
    ("6.1 a coding overrides a length, and ends", "Content-Length: 0\r\nTransfer-Encoding: chunked", Last),
    ("6.2 a length has digits alone", "Content-Length: x\r\nTransfer-Encoding: chunked", Refused),
    // TE.TE: the header is there, but not every reader sees it.
    ("7.1 chunked", "Transfer-Encoding: chunked", Last),
    ("7 names of codings ignore case", "TRANSFER-encoding: Chunked", Last),
    ("5.1 white space around a value", "Transfer-Encoding:chunked", Last),
    ("5.1 white space around a value", "Transfer-Encoding:\t chunked \t", Last),
    ("6.1 chunked once", "Transfer-Encoding: chunked, chunked", Refused),
    ("6.1 chunked once", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", Refused),
    ("6.1 chunked is the last coding", "Transfer-Encoding: chunked, identity", Refused),
    ("6.1 chunked is the last coding", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", Refused),
    ("6.1 an unknown coding is 501", "Transfer-Encoding: identity, chunked", Refused),
    ("6.1 an unknown coding is 501", "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked", Refused),
    ("6.1 an unknown coding is 501", "Transfer-Encoding: gzip, chunked", Refused),
    ("6.1 an unknown coding is 501", "Transfer-Encoding: xchunked", Refused),
    ("6.1 an unknown coding is 501", "Transfer-Encoding: chunked\u{e9}", Refused),
    ("6.3 a length that is none", "Transfer-Encoding: identity", Refused),
    ("6.3 a length that is none", "Transfer-Encoding:", Refused),
    ("6.3 a length that is none", "Transfer-Encoding: identity\r\nContent-Length: {all}", Refused),
    ("7 a coding is a token", "Transfer-Encoding: \"chunked\"", Refused),
    ("7 a coding is a token", "Transfer-Encoding: 'chunked'", Refused),
    ("7 a coding is a token", "Transfer-Encoding: chunked;q=1", Refused),
    ("7 a coding is a token", "Transfer-Encoding: ,chunked", Refused),
    ("7 a coding is a token", "Transfer-Encoding: chunked,", Refused),
    ("5.5 of RFC 9110, no controls", "Transfer-Encoding: \u{b}chunked", Refused),
    ("5.5 of RFC 9110, no controls", "Transfer-Encoding: \u{c}chunked", Refused),
    ("5.5 of RFC 9110, no controls", "Transfer-Encoding: \0chunked", Refused),
    ("5.5 of RFC 9110, no controls", "Transfer-Encoding: chunked\0", Refused),
    ("5.5 of RFC 9110, no controls", "X: a\0b", Refused),
    ("5.5 of RFC 9110, no controls", "X: a\u{7f}b", Refused),
    ("5.1 no white space before a colon", "Transfer-Encoding : chunked", Refused),
    ("5.1 no white space before a colon", "Transfer-Encoding\t: chunked", Refused),
    ("5.1 no white space before a colon", "Content-Length : {all}", Refused),
    ("5.1 a name is a token", "Transfer-Encoding\u{b}: chunked", Refused),
    ("5.1 a name is a token", "Transfer\0-Encoding: chunked", Refused),
    ("5.1 a name is a token", "Transf\u{e9}r-Encoding: chunked", Refused),
    ("5.1 a name is a token", "Transfer Encoding: chunked", Refused),
    ("5.1 a name is a token", "(X): 1", Refused),
    ("5.1 a name is a token", ": chunked", Refused),
    ("5 a line has a colon", "Transfer-Encoding", Refused),
    // Lines that go on
    ("2.2 no white space before the first header", " X: 1\r\nTransfer-Encoding: chunked", Refused),
    ("5.2 a server may refuse obs-fold", "X: 1\r\n Transfer-Encoding: chunked", Refused),
    ("5.2 a server may refuse obs-fold", "X: 1\r\n\tTransfer-Encoding: chunked", Refused),
    ("5.2 a server may refuse obs-fold", "Transfer-Encoding:\r\n chunked", Refused),
    ("5.2 a server may refuse obs-fold", "Transfer-Encoding: chunked\r\n , identity", Refused),
    ("5.2 a server may refuse obs-fold", "Content-Length: {all}\r\n 0", Refused),
    // Ends of lines
    ("2.2 a bare LF may end a line", "X: 1\nTransfer-Encoding: chunked", Last),
    ("2.2 a bare LF may end a line", "X: 1\nContent-Length: {all}", Whole),
    ("2.2 a bare LF may end a line", "X: 1\nContent-Length: {all}\r\nTransfer-Encoding: chunked", Last),
    ("2.2 a bare CR ends none", "X: 1\rTransfer-Encoding: chunked", Refused),
    ("2.2 a bare CR ends none", "Transfer-Encoding: chunked\rX: 1", Refused),
    ("2.2 a bare CR ends none", "X: 1\r\r\nTransfer-Encoding: chunked", Refused),
    ("2.2 a bare CR ends none", "Content-Length: {all}\r", Refused),
    // Content-Length
    ("6.2 a length", "Content-Length: {all}", Whole),
    ("6.2 a length", "CONTENT-LENGTH:{all}", Whole),
    ("6.2 a length has any number of digits", "Content-Length: 00000000000000000000000000000{all}", Whole),
    ("6.3 equal lengths may be taken", "Content-Length: {all}\r\nContent-Length: {all}", Whole),
    ("6.3 a list of equal lengths may be refused", "Content-Length: {all}, {all}", Refused),
    ("6.3 lengths that differ", "Content-Length: {all}\r\nContent-Length: 6", Refused),
    ("6.3 lengths that differ", "Content-Length: 6\r\nContent-Length: {all}", Refused),
    ("6.3 lengths that differ", "Content-Length: 5, 6", Refused),
    ("6.2 digits alone", "Content-Length:", Refused),
    ("6.2 digits alone", "Content-Length: +5", Refused),
    ("6.2 digits alone", "Content-Length: -1", Refused),
    ("6.2 digits alone", "Content-Length: 0x5", Refused),
    ("6.2 digits alone", "Content-Length: 5_0", Refused),
    ("6.2 digits alone", "Content-Length: 5 0", Refused),
    ("6.2 digits alone", "Content-Length: 5.0", Refused),
    ("6.2 digits alone", "Content-Length: 5e0", Refused),
    ("6.2 digits alone", "Content-Length: \"5\"", Refused),
    ("6.2 digits alone", "Content-Length: 5;", Refused),
    ("6.2 digits alone", "Content-Length: \u{665}", Refused),
    ("8.6 of RFC 9110, no overflow", "Content-Length: 18446744073709551621", Refused),
    ("8.6 of RFC 9110, no overflow", "Content-Length: 99999999999999999999999999", Refused),
    // Headers that hide a length from a proxy, or make it wait
    ("7.6.1 of RFC 9110, for proxies", "Connection: Content-Length\r\nContent-Length: {all}", Whole),
    ("7.6.1 of RFC 9110, for proxies", "Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked", Last),
    ("10.1.1 of RFC 9110, a wait", "Expect: 100-continue\r\nContent-Length: {all}", Whole),
    ("10.1.1 of RFC 9110, a wait", "Expect: y 100-continue\r\nContent-Length: {all}", Whole),
    ("7.8 of RFC 9110, ignored", "Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: {all}", Whole),
];

#[test]
fn a_bodys_length_is_told_in_one_way_or_the_request_is_refused() {
    let door = Door::open();
    let body = format!("{}{SMUGGLED}", chunked(&ask()));
    for (section, headers, right) in LENGTHS {
        let headers = headers.replace("{all}", &body.len().to_string());
        let request = format!("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n{body}");
        check(&door, &format!("{section}: {headers:?}"), request.as_bytes(), *right);
    }
}

/// Bodies in chunks. `{n}` is a text's length as a chunk's size, and `{text}` the text.
const CHUNKS: &[(&str, &str, Right)] = &[
    ("7.1 a chunk", "{n}\r\n{text}\r\n0\r\n\r\n", Last),
    ("7.1 a size has any number of digits", "00000000000000000000{n}\r\n{text}\r\n0\r\n\r\n", Last),
    ("7.1 the last chunk has only zeros", "{n}\r\n{text}\r\n000\r\n\r\n", Last),
    ("7.1 a size has digits alone", "\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 a size has digits alone", "+{n}\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 a size has digits alone", "-{n}\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 a size has digits alone", "0x{n}\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 a size has digits alone", "0_{n}\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 a size has digits alone", "{n}h\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 a size has digits alone", "{n}.0\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 a size has digits alone", " {n}\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 a size has digits alone", "{n} 0\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 a size has digits alone", "{n},0\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 a size has digits alone", "{n}\0\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 a size has digits alone", "\u{ff15}\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 no overflow", "1{n16}\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 no overflow", "fffffffffffffffff\r\n{text}\r\n0\r\n\r\n", Refused),
    // The grammar has no such space. It does no harm: a size ends at its first space, and nothing behind the body is read.
    ("7.1 white space behind a size", "{n} \t\r\n{text}\r\n0\r\n\r\n", Last),
    ("7.1.1 an unknown extension is ignored", "{n};a=b\r\n{text}\r\n0;c=\"d;e\"\r\n\r\n", Last),
    ("7.1.1 an unknown extension is ignored", "{n} ; a = b\r\n{text}\r\n0\r\n\r\n", Last),
    // An empty name is no extension. Its text is not read, and it ends at CRLF.
    ("7.1.1 an extension without a name", "{n};\r\n{text}\r\n0\r\n\r\n", Last),
    ("7.1.1 no bare LF in an extension", "{n};\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1.1 no bare LF in an extension", "{n};a\nb\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1.1 no bare CR in an extension", "{n};a\rb\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1.1 no bare LF in an extension", "{n}\r\n{text}\r\n0;\n\r\n", Refused),
    ("2.2 of lines alone: a size ends with CRLF", "{n}\n{text}\r\n0\r\n\r\n", Refused),
    ("2.2 of lines alone: a size ends with CRLF", "{n}\r{text}\r\n0\r\n\r\n", Refused),
    ("7.1 data ends with CRLF", "{n}\r\n{text}0\r\n\r\n", Refused),
    ("7.1 data ends with CRLF", "{n}\r\n{text}\n0\r\n\r\n", Refused),
    ("7.1 data ends with CRLF", "{n}\r\n{text}\r0\r\n\r\n", Refused),
    ("7.1 data ends with CRLF", "{n}\r\n{text}xx0\r\n\r\n", Refused),
    ("7.1 data ends with CRLF", "1\r\n{text}\r\n0\r\n\r\n", Refused),
    ("7.1 the body ends with CRLF", "{n}\r\n{text}\r\n0\r\n\r", Refused),
    // The smuggled request is then in the trailers' place.
    ("2.2 a bare LF may end the trailers", "{n}\r\n{text}\r\n0\r\n\n", Last),
    // Trailers say nothing here, whatever they are.
    ("7.1.2 trailers may be dropped", "{n}\r\n{text}\r\n0\r\nContent-Length: 99\r\n\r\n", Last),
    ("7.1.2 trailers may be dropped", "{n}\r\n{text}\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n", Last),
    ("7.1.2 trailers may be dropped", "{n}\r\n{text}\r\n0\r\nHost: evil.example\r\n\r\n", Last),
    ("7.1.2 a trailer is a header", "{n}\r\n{text}\r\n0\r\nBad Name: 1\r\n\r\n", Refused),
    ("7.1.2 a trailer is a header", "{n}\r\n{text}\r\n0\r\nX: a\0b\r\n\r\n", Refused),
];

#[test]
fn chunks_are_read_by_the_grammar_and_nothing_behind_them() {
    let (door, text) = (Door::open(), ask());
    for (section, body, right) in CHUNKS {
        let body = body.replace("{n16}", &format!("{:016x}", text.len()));
        let body = body.replace("{n}", &format!("{:x}", text.len())).replace("{text}", &text);
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n";
        check(&door, &format!("{section}: {body:?}"), format!("{head}{body}{SMUGGLED}").as_bytes(), *right);
    }
}

/// Heads of requests; the smuggled one follows, and `{all}` is its length.
const HEADS: &[(&str, &str, Right)] = &[
    // Host
    ("3.2 one Host", "GET /livez HTTP/1.1\r\n\r\n", Refused),
    ("3.2 one Host", "GET http://localhost/livez HTTP/1.1\r\n\r\n", Refused),
    ("3.2 one Host", "GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", Refused),
    ("3.2 one Host", "GET /livez HTTP/1.1\r\nHost: localhost\r\nhost: evil.example\r\n\r\n", Refused),
    ("3.2 one Host", "GET /livez HTTP/1.0\r\nHost: localhost\r\nHost: localhost\r\n\r\n", Refused),
    ("3.2 a valid Host", "GET /livez HTTP/1.1\r\nHost: local host\r\n\r\n", Refused),
    ("3.2 a valid Host", "GET /livez HTTP/1.1\r\nHost: localhost, evil.example\r\n\r\n", Refused),
    ("3.2 a valid Host", "GET /livez HTTP/1.1\r\nHost: evil.example@localhost\r\n\r\n", Refused),
    ("3.2 a valid Host", "GET /livez HTTP/1.1\r\nHost: localhost/@evil.example\r\n\r\n", Refused),
    ("3.2 a valid Host", "GET /livez HTTP/1.1\r\nHost: localhost:80@evil.example\r\n\r\n", Refused),
    ("3.2 a valid Host", "GET /livez HTTP/1.1\r\nHost: http://localhost\r\n\r\n", Refused),
    ("3.2 a valid Host", "GET /livez HTTP/1.1\r\nHost: local\u{e9}host\r\n\r\n", Refused),
    ("3.2 a valid Host", "GET /livez HTTP/1.1\r\nHost: localhost:8x\r\n\r\n", Refused),
    ("5.1 no white space before a colon", "GET /livez HTTP/1.1\r\nHost : localhost\r\n\r\n", Refused),
    ("5.2 a server may refuse obs-fold", "GET /livez HTTP/1.1\r\nHost:\r\n localhost\r\n\r\n", Refused),
    (
        "3.2.2 the target's host counts",
        "GET http://evil.example/livez HTTP/1.1\r\nHost: localhost\r\n\r\n",
        Refused,
    ),
    ("3.2.3 for CONNECT alone", "GET localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", Refused),
    ("3.2.3 no proxy", "CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", Refused),
    // Versions
    ("2.3 an older protocol", "GET /livez\r\n\r\n", Refused),
    ("2.3 an older protocol", "GET /livez\r\nHost: localhost\r\n\r\n", Refused),
    ("2.3 a version", "GET /livez HTTP/0.9\r\nHost: localhost\r\n\r\n", Refused),
    ("2.3 a version", "GET /livez HTTP/1.2\r\nHost: localhost\r\n\r\n", Refused),
    ("2.3 a version", "GET /livez HTTP/2.0\r\nHost: localhost\r\n\r\n", Refused),
    ("2.3 a version", "GET /livez HTTP/1.10\r\nHost: localhost\r\n\r\n", Refused),
    ("2.3 a version", "GET /livez HTTP/01.1\r\nHost: localhost\r\n\r\n", Refused),
    ("2.3 a version", "GET /livez http/1.1\r\nHost: localhost\r\n\r\n", Refused),
    ("3.4 of RFC 9113, HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HungUp),
    (
        "6.1 no coding in HTTP/1.0",
        "POST /livez HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        Refused,
    ),
    (
        "6.1 no coding in HTTP/1.0",
        "POST /livez HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        Refused,
    ),
    ("9.3 HTTP/1.0 ends", "GET /livez HTTP/1.0\r\nHost: localhost\r\n\r\n", Last),
    ("9.3 close ends", "GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", Last),
    (
        "9.3 close ends",
        "GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive, close\r\n\r\n",
        Last,
    ),
    (
        "9.3 close ends",
        "GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nConnection: keep-alive\r\n\r\n",
        Last,
    ),
    // Request lines
    ("3 single spaces", "GET  /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", Refused),
    ("3 single spaces", "GET /livez HTTP/1.1 \r\nHost: localhost\r\n\r\n", Refused),
    ("3 single spaces", "GET\t/livez\tHTTP/1.1\r\nHost: localhost\r\n\r\n", Refused),
    ("3 single spaces", " GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", Refused),
    ("3 single spaces", "GET /livez HTTP/1.1 HTTP/1.1\r\nHost: localhost\r\n\r\n", Refused),
    ("2.2 a bare CR ends none", "GET /livez HTTP/1.1\rHost: localhost\r\n\r\n", Refused),
    ("2.2 a bare CR ends none", "GET /livez\rx HTTP/1.1\r\nHost: localhost\r\n\r\n", Refused),
    ("3.2 no controls in a target", "GET /livez\0 HTTP/1.1\r\nHost: localhost\r\n\r\n", Refused),
    ("3.2 no controls in a target", "GET /liv\u{b}ez HTTP/1.1\r\nHost: localhost\r\n\r\n", Refused),
    ("3.1 a method is a token", "G\0ET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", Refused),
    ("3.1 a method is a token", "G:ET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", Refused),
    ("3.1 methods tell case apart", "get /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", Refused),
    // CL.0: bodies where none is wanted. The smuggled request is the body.
    ("6.3 a body", "GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: {all}\r\n\r\n", Refused),
    ("6.3 a body", "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: {all}\r\n\r\n", Refused),
    ("6.3 a body", "POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: {all}\r\n\r\n", Refused),
    ("6.3 a body", "POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: {all}\r\n\r\n", Refused),
    ("6.3 a body", "POST /api/pull HTTP/1.1\r\nHost: localhost\r\nContent-Length: {all}\r\n\r\n", Refused),
    ("6.3 a body", "OPTIONS * HTTP/1.1\r\nHost: localhost\r\nContent-Length: {all}\r\n\r\n", Refused),
    (
        "6.3 a body",
        "DELETE /v1/responses/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: {all}\r\n\r\n",
        Refused,
    ),
    (
        "6.3 a body",
        "PUT /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {all}\r\n\r\n",
        Refused,
    ),
    (
        "6.3 a body",
        "GET /livez HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        Refused,
    ),
    (
        "6.3 a body",
        "POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: {all}\r\n\r\n",
        Refused,
    ),
    // Empty lines and other ends of lines
    (
        "2.2 empty lines before a request",
        "\r\n\r\nPOST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {all}\r\n\r\n",
        Whole,
    ),
    (
        "2.2 a bare LF may end a line",
        "POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Length: {all}\n\n",
        Whole,
    ),
    (
        "2.2 a bare LF may end a line",
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {all}\n\r\n",
        Whole,
    ),
];

#[test]
fn a_head_that_can_be_read_in_two_ways_is_refused() {
    let door = Door::open();
    for (section, head, right) in HEADS {
        let head = head.replace("{all}", &SMUGGLED.len().to_string());
        check(&door, &format!("{section}: {head:?}"), format!("{head}{SMUGGLED}").as_bytes(), *right);
    }
    // Bytes that are not UTF-8, in a name, a value of a length, a coding and a target.
    for header in
        [&b"Transfer-Encod\xefng: chunked"[..], b"Content-Length: \xa05", b"Transfer-Encoding: \xa0chunked"]
    {
        let request = [
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
            header,
            b"\r\n\r\n0\r\n\r\n",
            SMUGGLED.as_bytes(),
        ];
        check(&door, &header.escape_ascii().to_string(), &request.concat(), Refused);
    }
    let target = [b"GET /livez\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", SMUGGLED.as_bytes()];
    check(&door, "a target that is not UTF-8", &target.concat(), Refused);
}
