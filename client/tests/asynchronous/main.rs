//! Connections of tasks against servers that follow a script: correct, silent and broken ones.

#![allow(clippy::panic, clippy::unwrap_used)] // tests

#[path = "../scenario/server.rs"]
#[allow(dead_code)] // the other tests use the rest
mod server;

use rocmforge_client::asynchronous::{Client, Connection};
use rocmforge_client::wire::*;
use rocmforge_client::{ClientError, Options, ProtocolError};
use server::{SOON, Server, accept, end, item};

fn generate() -> GenerateRequest {
    GenerateRequest::new("m", Prompt::Text("p".into()))
}

fn ping(number: u8) -> PingRequest {
    PingRequest { payload: vec![number], ext: vec![] }
}

/// Lets the connection's task close its socket meanwhile, which the scripts wait for.
async fn join(server: Server) {
    tokio::task::spawn_blocking(|| server.join()).await.unwrap();
}

#[tokio::test]
async fn answers_in_any_order_reach_their_requests() {
    let server = Server::greeting(|mut peer| {
        let requests: Vec<_> = (0..3).map(|_| peer.request().unwrap()).collect();
        let streams: Vec<_> = requests.iter().map(|request| request.header.stream).collect();
        assert_eq!(streams, [1, 3, 5], "odd, rising, never used twice");
        requests.iter().rev().for_each(|request| peer.echo(request));
    });
    let connection = Connection::connect(&Options { checksum: true, ..server.options() }).await.unwrap();
    let (one, two, three) = (ping(1), ping(2), ping(3));
    let replies = tokio::join!(connection.call(&one), connection.call(&two), connection.call(&three));
    let numbers = [replies.0, replies.1, replies.2].map(|reply| reply.unwrap().payload[0]);
    assert_eq!(numbers, [1, 2, 3]);
    drop(connection);
    join(server).await;
}

#[tokio::test]
async fn credit_is_granted_only_for_items_that_were_taken() {
    let server = Server::greeting(|mut peer| {
        let stream = peer.request().unwrap().header.stream;
        for _ in 0..INITIAL_CREDIT {
            peer.send(stream, Op::Item, &item("a"));
        }
        // A ping of another stream comes before any credit.
        let request = peer.request().unwrap();
        peer.echo(&request);
        let granted = peer.request().unwrap();
        let ClientMessage::Credit(credit) = granted.message else { panic!("{:?}", granted.message) };
        assert_eq!((granted.header.stream, credit.items), (stream, INITIAL_CREDIT / 2));
        peer.send(stream, Op::End, &end());
        peer.drain();
    });
    let connection = Connection::connect(&server.options()).await.unwrap();
    let mut generation = connection.generate(&generate()).unwrap();
    assert_eq!(connection.call(&ping(9)).await.unwrap().payload, [9]);
    let mut count = 0;
    while let Some(item) = generation.next_item().await.unwrap() {
        assert_eq!(item.text, "a");
        count += 1;
    }
    assert_eq!((count, generation.end().unwrap().seed), (INITIAL_CREDIT, 9));
    assert!(generation.next_item().await.unwrap().is_none());
    drop((generation, connection));
    join(server).await;
}

#[tokio::test]
async fn a_dropped_request_is_cancelled_and_keeps_its_stream_until_its_end() {
    let server = Server::greeting(|mut peer| {
        let streams: Vec<u32> = (0..2).map(|_| peer.request().unwrap().header.stream).collect();
        // The call was dropped first.
        for stream in streams.into_iter().rev() {
            let cancel = peer.request().unwrap();
            assert!(matches!(cancel.message, ClientMessage::Cancel(_)), "{:?}", cancel.message);
            assert_eq!(cancel.header.stream, stream);
            peer.fail(stream, ErrorCode::Cancelled);
        }
        let request = peer.request().unwrap();
        peer.echo(&request);
        assert!(peer.request().is_none(), "nothing is cancelled twice");
    });
    let connection = Connection::connect(&server.options()).await.unwrap();
    let all = connection.free_streams();
    let generation = connection.generate(&generate()).unwrap();
    let request = ping(1);
    assert!(tokio::time::timeout(SOON, connection.call(&request)).await.is_err());
    assert!(connection.free_streams() < all, "a cancelled stream counts until the daemon ends it");
    drop(generation);
    assert_eq!(connection.call(&ping(2)).await.unwrap().payload, [2]);
    assert_eq!(connection.free_streams(), all);
    drop(connection);
    join(server).await;
}

#[tokio::test]
async fn a_silent_daemon_is_pinged_and_given_up() {
    let server = Server::greeting(|mut peer| {
        let heard = peer.drain();
        assert_eq!(heard.iter().filter(|message| matches!(message, ClientMessage::Ping(_))).count(), 1);
    });
    let options = Options { ping_after: SOON, ping_timeout: SOON, ..server.options() };
    let connection = Connection::connect(&options).await.unwrap();
    let mut generation = connection.generate(&generate()).unwrap();
    let error = generation.next_item().await.unwrap_err();
    assert!(matches!(error, ClientError::Silent { .. }), "{error}");
    assert!(!connection.is_alive() && connection.generate(&generate()).is_err());
    drop((generation, connection));
    join(server).await;
}

#[tokio::test]
async fn a_daemon_that_breaks_the_protocol_fails_every_request() {
    let server = Server::greeting(|mut peer| {
        let stream = peer.request().unwrap().header.stream;
        peer.request().unwrap();
        for _ in 0..=INITIAL_CREDIT {
            peer.send(stream, Op::Item, &item("a"));
        }
        peer.drain();
    });
    let connection = Connection::connect(&server.options()).await.unwrap();
    let mut generation = connection.generate(&generate()).unwrap();
    let other = connection.call(&ping(1)).await.unwrap_err();
    assert!(matches!(other, ClientError::Protocol(ProtocolError::NoCredit { .. })), "{other}");
    // Items that came before are still there.
    for _ in 0..INITIAL_CREDIT {
        assert_eq!(generation.next_item().await.unwrap().unwrap().text, "a");
    }
    assert!(matches!(generation.next_item().await, Err(ClientError::Protocol(_))));
    drop((generation, connection));
    join(server).await;
}

#[tokio::test]
async fn a_client_connects_again_and_repeats_only_calls() {
    let server = Server::new(|listener| {
        for round in 0..3 {
            let mut peer = accept(&listener);
            peer.greet();
            let request = peer.request().unwrap();
            match round {
                0 => peer.fail(request.header.stream, ErrorCode::ServerDraining),
                1 => peer.echo(&request),
                _ => unreachable!("a generation is sent on the second connection"),
            }
            if round == 1 {
                assert!(matches!(peer.request().unwrap().message, ClientMessage::Generate(_)));
                return;
            }
        }
    });
    let client = Client::new(server.options(), 1);
    assert_eq!(client.call(&ping(5)).await.unwrap().payload, [5]);
    let mut generation = client.generate(&generate()).await.unwrap();
    let error = generation.next_item().await.unwrap_err();
    assert!(error.is_unreachable(), "{error}");
    join(server).await;
    drop(generation);
    // Tasks that wait for one attempt to connect share its outcome.
    let options = Options { connect_timeout: SOON, absent_timeout: SOON, ..Options::default() };
    let absent = Client::new(Options { socket: "/nonexistent/api.sock".into(), ..options }, 1);
    let asked = ping(1);
    let outcomes = tokio::join!(absent.call(&asked), absent.call(&asked), absent.call(&asked));
    let attempts = [outcomes.0, outcomes.1, outcomes.2].map(|outcome| match outcome {
        Err(ClientError::Unavailable { waited_ms, attempts, .. }) => (waited_ms, attempts),
        other => panic!("{other:?}"),
    });
    assert!(attempts.windows(2).all(|two| two[0] == two[1]), "{attempts:?}");
}
