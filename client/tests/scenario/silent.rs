//! Daemons that say nothing, that are slow, and that never stop.

use std::time::Duration;

use rocmforge_client::wire::*;
use rocmforge_client::{Client, ClientError, Connection, Options, ProtocolError};

use crate::command_line::{generate, run};
use crate::server::{Peer, SOON, Server, accept, end, item, summary};

/// Longer than a busy machine delays an answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Options with which silence is noticed soon. Replies, and answers to pings, are waited for much longer than that.
fn impatient(server: &Server) -> Options {
    Options { ping_after: SOON, ping_timeout: PATIENCE, reply_timeout: PATIENCE, ..server.options() }
}

fn request() -> GenerateRequest {
    GenerateRequest::new("m", Prompt::Text("p".into()))
}

fn answer_ping(peer: &mut Peer) {
    let request = peer.request().unwrap();
    assert!(matches!(request.message, ClientMessage::Ping(_)), "{:?}", request.message);
    peer.echo(&request);
}

fn is_silent(error: &ClientError) -> bool {
    matches!(error, ClientError::Silent { waited_ms } if u128::from(*waited_ms) >= 2 * SOON.as_millis())
}

#[test]
fn every_request_of_a_daemon_that_answers_no_ping_fails() {
    let server = Server::greeting(|mut peer| {
        let heard = peer.drain();
        let pings = heard.iter().filter(|message| matches!(message, ClientMessage::Ping(_))).count();
        assert_eq!((heard.len(), pings), (3, 1), "{heard:?}");
    });
    let options = Options { ping_timeout: SOON, ..impatient(&server) };
    let connection = Connection::connect(&options).unwrap();
    let mut generation = connection.generate(&request()).unwrap();
    let status = connection.send(&StatusRequest::default()).unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| status.wait().unwrap_err());
        let error = generation.next_item().unwrap_err();
        assert!(is_silent(&error), "{error}");
        assert!(error.to_string().contains("not even a ping"), "{error}");
        assert!(is_silent(&other.join().unwrap()));
    });
    assert!(!connection.is_alive());
    drop((generation, connection));
    server.join();
}

#[test]
fn an_answer_may_be_slow_while_pings_are_answered() {
    let server = Server::greeting(|mut peer| {
        let (stream, _) = generate(&mut peer);
        (0..3).for_each(|_| answer_ping(&mut peer));
        peer.send(stream, Op::Item, &item("late"));
        answer_ping(&mut peer);
        peer.send(stream, Op::End, &end());
    });
    let connection = Connection::connect(&impatient(&server)).unwrap();
    let mut generation = connection.generate(&request()).unwrap();
    assert_eq!(generation.next_item().unwrap().unwrap().text, "late");
    assert!(generation.next_item().unwrap().is_none());
    assert_eq!(generation.end(), Some(&end()));
    server.join();
}

#[test]
fn a_reply_that_is_late_and_a_silent_daemon_are_told_apart() {
    let server = Server::greeting(|mut peer| {
        let late = peer.request().unwrap();
        assert!(matches!(late.message, ClientMessage::Status(_)));
        answer_ping(&mut peer);
        peer.drain();
    });
    let options = Options { reply_timeout: 2 * SOON - SOON / 2, ..impatient(&server) };
    let connection = Connection::connect(&options).unwrap();
    let error = connection.call(&StatusRequest::default()).unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    assert!(connection.is_alive());
    drop(connection);
    server.join();
}

#[test]
fn a_connection_without_a_free_stream_is_not_pinged() {
    let server = Server::new(|listener| {
        let mut peer = accept(&listener);
        let hello = peer.client_hello();
        let mut answer = ServerOffer::default().answer(&hello);
        answer.limits.max_streams = 1;
        peer.write(&answer.to_bytes());
        let (stream, _) = generate(&mut peer);
        std::thread::sleep(4 * SOON);
        peer.send(stream, Op::End, &end());
        assert_eq!(peer.drain(), []);
    });
    let connection = Connection::connect(&impatient(&server)).unwrap();
    let mut generation = connection.generate(&request()).unwrap();
    assert!(generation.next_item().unwrap().is_none());
    drop((generation, connection));
    server.join();
}

#[test]
fn limits_that_no_daemon_has_end_the_connection() {
    type Lie = fn(&mut HelloLimits);
    let cases: [(&str, Lie); 4] = [
        ("max_frame", |limits| limits.max_frame = PAYLOAD_BYTES_MAX + 1),
        ("max_frame", |limits| limits.max_frame = PAYLOAD_BYTES_MIN - 1),
        ("max_streams", |limits| limits.max_streams = 0),
        ("initial_credit", |limits| limits.initial_credit = 0),
    ];
    for (name, lie) in cases {
        let server = Server::new(move |listener| {
            let mut peer = accept(&listener);
            let hello = peer.client_hello();
            let mut answer = ServerOffer::default().answer(&hello);
            lie(&mut answer.limits);
            peer.write(&answer.to_bytes());
        });
        let error = Connection::connect(&server.options()).unwrap_err();
        let is_told = |error: &ClientError| matches!(error, ClientError::Protocol(ProtocolError::HelloLimit { field, .. }) if *field == name);
        assert!(is_told(&error), "{name}: {error}");
        server.join();
    }
}

#[test]
fn a_list_without_an_end_ends_the_connection() {
    let server = Server::greeting(|mut peer| {
        while let Some(request) = peer.request() {
            let reply = ListReply { models: vec![summary("m")], more: true, ext: vec![] };
            peer.send(request.header.stream, Op::Reply, &reply);
        }
    });
    let client = Client::new(server.options());
    let connection = client.connection().unwrap();
    let error = client.list().unwrap_err();
    assert!(matches!(error, ClientError::Protocol(ProtocolError::TooManyParts { .. })), "{error}");
    assert!(!connection.is_alive());
    drop((client, connection));
    server.join();
}

#[test]
fn an_answer_without_an_end_is_not_kept() {
    let server = Server::greeting(|mut peer| {
        let (stream, _) = generate(&mut peer);
        let item = item(&"x".repeat(limits::TEXT_BYTES_MAX - 64));
        let mut credit = INITIAL_CREDIT;
        loop {
            while credit == 0 {
                let Some(request) = peer.request() else { return };
                match request.message {
                    ClientMessage::Credit(grant) => credit += grant.items,
                    other => {
                        assert!(matches!(other, ClientMessage::Cancel(_)), "{other:?}");
                        return;
                    }
                }
            }
            credit -= 1;
            peer.try_send(stream, Op::Item, &item);
        }
    });
    let (code, _, stderr) = run(&server, &["run", "m", "p"]);
    assert_eq!(code, 1, "{stderr}");
    assert!(
        stderr.contains("rocmforge-client: protocol: the daemon broke the protocol: an answer of more than"),
        "{stderr}"
    );
    server.join();
}
