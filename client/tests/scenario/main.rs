//! The client against servers that follow a script: correct, slow and broken ones.

#![allow(clippy::panic, clippy::unwrap_used)] // tests

mod bench;
mod chat;
mod command_line;
mod connecting;
mod drafts;
mod failing;
mod server;
mod several;
mod shortage;
mod silent;
mod terminal;
mod tools;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use rocmforge_client::wire::*;
use rocmforge_client::{Client, ClientError, Connection, Options, ProtocolError};
use server::{SOON, Server, accept, end, item, summary};

fn generate() -> GenerateRequest {
    GenerateRequest::new("m", Prompt::Text("p".into()))
}

fn ping(number: u8) -> PingRequest {
    PingRequest { payload: vec![number], ext: vec![] }
}

#[test]
fn answers_in_any_order_reach_their_requests() {
    let server = Server::greeting(|mut peer| {
        let requests: Vec<_> = (0..3).map(|_| peer.request().unwrap()).collect();
        let streams: Vec<_> = requests.iter().map(|request| request.header.stream).collect();
        assert_eq!(streams, [1, 3, 5], "odd, rising, never used twice");
        requests.iter().rev().for_each(|request| peer.echo(request));
    });
    let connection = Connection::connect(&server.options()).unwrap();
    let pending: Vec<_> = (0..3).map(|number| connection.send(&ping(number)).unwrap()).collect();
    for (number, pending) in (0..).zip(pending) {
        assert_eq!(pending.wait().unwrap().payload, [number]);
    }
    server.join();
}

#[test]
fn many_threads_share_a_connection() {
    const THREADS: u8 = 8;
    const CALLS: u8 = 50;
    let server = Server::greeting(|mut peer| {
        // Two at a time, in reverse order, so that a thread often reads for another.
        for _ in 0..u32::from(THREADS) * u32::from(CALLS) / 2 {
            let first = peer.request().unwrap();
            peer.echo(&first);
        }
        while let Some(request) = peer.request() {
            peer.echo(&request);
        }
    });
    let connection = Connection::connect(&server.options()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let connection = &connection;
            scope.spawn(move || {
                for call in 0..CALLS {
                    let payload = vec![thread, call];
                    let reply = connection.call(&PingRequest { payload: payload.clone(), ext: vec![] });
                    assert_eq!(reply.unwrap().payload, payload);
                }
            });
        }
    });
    drop(connection);
    server.join();
}

#[test]
fn credit_is_granted_as_items_are_taken() {
    const ITEMS: u32 = 100;
    let server = Server::greeting(|mut peer| {
        let stream = peer.request().unwrap().header.stream;
        let mut credit = INITIAL_CREDIT;
        for number in 0..ITEMS {
            while credit == 0 {
                let request = peer.request().unwrap();
                assert_eq!(request.header.stream, stream);
                let ClientMessage::Credit(grant) = request.message else { panic!("{:?}", request.message) };
                credit += grant.items;
                assert!(credit <= INITIAL_CREDIT, "never more than at first");
            }
            credit -= 1;
            peer.send(stream, Op::Item, &item(&number.to_string()));
        }
        peer.send(stream, Op::End, &end());
        peer.drain();
    });
    let connection = Connection::connect(&server.options()).unwrap();
    let mut generation = connection.generate(&generate()).unwrap();
    let texts: Vec<_> = generation.by_ref().map(|item| item.unwrap().text).collect();
    assert_eq!(texts, (0..ITEMS).map(|number| number.to_string()).collect::<Vec<_>>());
    assert_eq!(generation.end(), Some(&end()));
    assert!(generation.next().is_none());
    drop((generation, connection));
    server.join();
}

#[test]
fn frames_sent_before_a_hang_up_are_read_though_credit_cannot_be_granted_any_more() {
    let server = Server::greeting(|mut peer| {
        let stream = peer.request().unwrap().header.stream;
        for number in 0..INITIAL_CREDIT {
            peer.send(stream, Op::Item, &item(&number.to_string()));
        }
        peer.fail(stream, ErrorCode::ServerDraining);
    });
    let connection = Connection::connect(&server.options()).unwrap();
    let mut generation = connection.generate(&generate()).unwrap();
    server.join(); // and with its script it has hung up, before the first item is taken
    let mut items = 0;
    let error = generation.by_ref().find_map(|item| item.map(|_| items += 1).err()).unwrap();
    assert_eq!(items, INITIAL_CREDIT);
    let ClientError::Server(error) = error else { panic!("{error}") };
    assert_eq!(error.code, ErrorCode::ServerDraining as u16);
}

#[test]
fn a_request_is_cancelled_from_another_thread() {
    let server = Server::greeting(|mut peer| {
        let stream = peer.request().unwrap().header.stream;
        peer.send(stream, Op::Item, &item("a"));
        let request = peer.request().unwrap();
        assert_eq!(
            (request.header.stream, request.message),
            (stream, ClientMessage::Cancel(Cancel::default()))
        );
        peer.fail(stream, ErrorCode::Cancelled);
        assert_eq!(peer.drain(), [], "a stream that has ended is not cancelled again");
    });
    let connection = Connection::connect(&server.options()).unwrap();
    let mut generation = connection.generate(&generate()).unwrap();
    assert_eq!(generation.next().unwrap().unwrap().text, "a");
    let stream = generation.stream();
    std::thread::scope(|scope| {
        scope.spawn(|| connection.cancel(stream).unwrap());
        let error = generation.next().unwrap().unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::Cancelled as u16));
    });
    assert!(generation.next().is_none(), "nothing comes after an error");
    connection.cancel(stream).unwrap();
    drop((generation, connection));
    server.join();
}

#[test]
fn a_dropped_request_is_cancelled_and_its_rest_ignored() {
    let server = Server::greeting(|mut peer| {
        let stream = peer.request().unwrap().header.stream;
        assert!(matches!(peer.request().unwrap().message, ClientMessage::Cancel(_)));
        peer.send(stream, Op::Item, &item("late"));
        peer.send(stream, Op::End, &end());
        let request = peer.request().unwrap();
        peer.echo(&request);
    });
    let connection = Connection::connect(&server.options()).unwrap();
    drop(connection.generate(&generate()).unwrap());
    assert_eq!(connection.call(&ping(7)).unwrap().payload, [7]);
    server.join();
}

#[test]
fn a_reply_that_is_late_is_given_up_and_the_connection_goes_on() {
    let server = Server::greeting(|mut peer| {
        let late = peer.request().unwrap();
        assert!(matches!(peer.request().unwrap().message, ClientMessage::Cancel(_)));
        let next = peer.request().unwrap();
        peer.echo(&late);
        peer.echo(&next);
    });
    let connection = Connection::connect(&server.options()).unwrap();
    let error = connection.send(&ping(1)).unwrap().wait_until(Instant::now() + SOON).unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    assert_eq!(connection.call(&ping(2)).unwrap().payload, [2]);
    server.join();
}

#[test]
fn more_requests_than_agreed_are_not_sent() {
    let server = Server::greeting(|mut peer| assert_eq!(peer.drain().len() as u32, 2 * STREAMS_MAX));
    let connection = Connection::connect(&server.options()).unwrap();
    let pending: Vec<_> = (0..STREAMS_MAX).map(|_| connection.send(&ping(0)).unwrap()).collect();
    let error = connection.send(&ping(0)).unwrap_err();
    assert!(matches!(error, ClientError::TooManyStreams { max: STREAMS_MAX }), "{error}");
    // Each request is cancelled, and the server counts that too.
    drop((pending, connection));
    server.join();
}

#[test]
fn a_file_is_opened_by_the_client_and_its_descriptor_passed() {
    let server = Server::greeting(|mut peer| {
        let mut request = peer.request().unwrap();
        let ClientMessage::Load(load) = request.message else { panic!("{:?}", request.message) };
        assert_eq!((load.name.as_str(), load.by_descriptor), ("story", true));
        let mut text = String::new();
        std::fs::File::from(request.fds.remove(0)).read_to_string(&mut text).unwrap();
        assert_eq!(text, "GGUF...");
        let reply = LoadReply { summary: summary("story"), mapped_now: true, elapsed_us: 1, ext: vec![] };
        peer.send(request.header.stream, Op::Reply, &reply);
    });
    let mut file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    file.write_all(b"GGUF...").unwrap();
    let client = Client::new(server.options());
    assert_eq!(client.load_file(file.path(), Some("story")).unwrap().summary.name, "story");
    let error = client.load_file("/does/not/exist.gguf".as_ref(), None).unwrap_err();
    assert!(matches!(error, ClientError::File { .. }), "{error}");
    server.join();
}

#[test]
fn a_call_is_repeated_on_a_new_connection_with_the_same_request_id() {
    let server = Server::new(|listener| {
        let mut ids = vec![];
        for round in 0..3 {
            let mut peer = accept(&listener);
            peer.greet();
            let request = peer.request().unwrap();
            let ClientMessage::Unload(unload) = request.message else { panic!("{:?}", request.message) };
            ids.push(unload.request_id);
            match round {
                0 => {} // hangs up
                1 => peer.fail(request.header.stream, ErrorCode::ServerDraining),
                _ => {
                    let reply = UnloadReply { was_mapped: true, draining_sequences: 0, ext: vec![] };
                    peer.send(request.header.stream, Op::Reply, &reply);
                }
            }
        }
        assert!(ids.iter().all(|id| *id == ids[0] && *id != 0), "{ids:?}");
    });
    assert!(Client::new(server.options()).unload("m").unwrap().was_mapped);
    server.join();
}

#[test]
fn a_generation_is_not_repeated_but_the_next_one_connects_again() {
    let server = Server::new(|listener| {
        for round in 0..2 {
            let mut peer = accept(&listener);
            peer.greet();
            let stream = peer.request().unwrap().header.stream;
            if round == 1 {
                peer.send(stream, Op::End, &end());
            }
        }
    });
    let client = Client::new(server.options());
    let error = client.generate(&generate()).unwrap().next().unwrap().unwrap_err();
    assert!(matches!(error, ClientError::Disconnected { .. }), "{error}");
    let mut generation = client.generate(&generate()).unwrap();
    assert!(generation.next().is_none());
    assert_eq!(generation.end(), Some(&end()));
    server.join();
}

#[test]
fn all_metadata_and_tensors_are_asked_for_in_parts() {
    let entry =
        |number: u32| MetadataEntry { key: number.to_string(), kind: "u32".into(), value: "0".into() };
    let server = Server::greeting(move |mut peer| {
        for expected in [0, 2, 4] {
            let request = peer.request().unwrap();
            let ClientMessage::Show(show) = request.message else { panic!("{:?}", request.message) };
            assert_eq!((show.skip_metadata, show.skip_tensors), (expected, 0));
            let mut reply: ShowReply = empty_show();
            reply.metadata_total = 5;
            reply.metadata = (expected..5.min(expected + 2)).map(entry).collect();
            peer.send(request.header.stream, Op::Reply, &reply);
        }
    });
    let reply = Client::new(server.options()).show("m", true).unwrap();
    assert_eq!(reply.metadata.iter().map(|entry| entry.key.as_str()).collect::<String>(), "01234");
    server.join();
}

fn empty_show() -> ShowReply {
    ShowReply {
        summary: summary("m"),
        gguf_version: 3,
        parameters: 0,
        weight_bytes: 0,
        context_length: 0,
        hidden: 0,
        layers: 0,
        heads: 0,
        kv_heads: 0,
        head_dim: 0,
        ffn: 0,
        vocab: 0,
        tokenizer: String::new(),
        chat_template: false,
        end_of_generation: vec![],
        types: vec![],
        metadata_total: 0,
        tensors_total: 0,
        metadata: vec![],
        tensors: vec![],
        host: HostMemory::default(),
        ext: vec![],
    }
}

#[test]
fn the_fail_request_returns_the_asked_error() {
    let server = Server::greeting(|mut peer| {
        let request = peer.request().unwrap();
        let ClientMessage::Fail(fail) = request.message else { panic!("{:?}", request.message) };
        peer.fail(request.header.stream, ErrorCode::from_u16(fail.code).unwrap());
    });
    let error = Client::new(server.options()).fail(ErrorCode::ModelCorrupt as u16);
    assert_eq!(error.code(), Some(ErrorCode::ModelCorrupt as u16));
    server.join();
}

#[test]
fn checksums_are_used_where_agreed_and_a_wrong_one_breaks_the_connection() {
    let server = Server::greeting(|mut peer| {
        assert_eq!(peer.flags, Flags::CRC);
        let request = peer.request().unwrap();
        assert!(request.header.flags.contains(Flags::CRC));
        peer.echo(&request);
        let stream = peer.request().unwrap().header.stream;
        let reply = PingReply { payload: vec![1], ext: vec![] };
        let mut frame = encode_frame(stream, Op::Reply, Flags::CRC, PAYLOAD_BYTES_MAX, &reply).unwrap();
        frame[24] ^= 1;
        peer.write(&frame);
    });
    let options = Options { checksum: true, ..server.options() };
    let connection = Connection::connect(&options).unwrap();
    connection.call(&ping(3)).unwrap();
    let error = connection.call(&ping(1)).unwrap_err();
    let wrong = |error| {
        matches!(error, ClientError::Protocol(ProtocolError::Header(HeaderError::BadChecksum { .. })))
    };
    assert!(wrong(error));
    assert!(wrong(connection.call(&ping(1)).unwrap_err()), "it stays broken");
    assert!(!connection.is_alive());
    server.join();
}

/// Faults of a server after the hello, and the client's errors for them.
#[test]
fn a_server_that_breaks_the_protocol_is_left() {
    type Script = fn(u32) -> Vec<u8>;
    fn frame<T: Message>(stream: u32, op: Op, message: &T) -> Vec<u8> {
        encode_frame(stream, op, Flags::NONE, PAYLOAD_BYTES_MAX, message).unwrap()
    }
    let cases: [(&str, Script); 8] = [
        ("UnknownStream", |stream| frame(stream + 2, Op::Item, &item("x"))),
        ("UnexpectedOp", |stream| frame(stream, Op::Reply, &PingReply::default())),
        ("UnexpectedOp", |stream| frame(stream, Op::Ping, &PingRequest::default())),
        ("Payload", |stream| frame(stream, Op::Item, &Cancel::default())),
        ("Header", |_| vec![0xff; HEADER_BYTES]),
        ("Header", |stream| {
            let mut longer = frame(stream, Op::Item, &item("x"));
            longer[..4].copy_from_slice(&(PAYLOAD_BYTES_MAX + 1).to_le_bytes());
            longer
        }),
        ("Descriptors", |stream| {
            encode_frame_with_descriptors(stream, Op::End, Flags::NONE, PAYLOAD_BYTES_MAX, 1, &end()).unwrap()
        }),
        ("UnknownStream", |_| frame(0, Op::Reply, &PingReply::default())),
    ];
    for (expected, script) in cases {
        let server = Server::greeting(move |mut peer| {
            let stream = peer.request().unwrap().header.stream;
            peer.write(&script(stream));
            peer.drain();
        });
        let connection = Connection::connect(&server.options()).unwrap();
        let error = connection.generate(&generate()).unwrap().find_map(Result::err).unwrap();
        let ClientError::Protocol(error) = error else { panic!("{expected}: {error}") };
        assert!(format!("{error:?}").starts_with(expected), "{expected}: {error:?}");
        assert!(!connection.is_alive());
        drop(connection);
        server.join();
    }
}

#[test]
fn more_items_than_granted_break_the_connection() {
    let server = Server::greeting(|mut peer| {
        let stream = peer.request().unwrap().header.stream;
        peer.request().unwrap();
        for _ in 0..=INITIAL_CREDIT {
            peer.send(stream, Op::Item, &item("x"));
        }
        peer.drain();
    });
    let connection = Connection::connect(&server.options()).unwrap();
    let generation = connection.generate(&generate()).unwrap();
    // Reads for the generation too, which takes no items and so grants no credit.
    let error = connection.call(&ping(0)).unwrap_err();
    assert!(matches!(error, ClientError::Protocol(ProtocolError::NoCredit { stream: 1 })), "{error}");
    drop((generation, connection));
    server.join();
}

#[test]
fn an_error_of_the_connection_reaches_every_request() {
    let server = Server::greeting(|mut peer| {
        let _ = (peer.request(), peer.request());
        peer.fail(0, ErrorCode::FrameTimeout);
    });
    let connection = Connection::connect(&server.options()).unwrap();
    let pending = [connection.send(&ping(0)).unwrap(), connection.send(&ping(1)).unwrap()];
    for pending in pending {
        let error = pending.wait_until(Instant::now() + Duration::from_secs(20)).unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::FrameTimeout as u16), "{error}");
    }
    server.join();
}

#[test]
fn a_frame_in_many_pieces_is_put_together() {
    let server = Server::greeting(|mut peer| {
        let stream = peer.request().unwrap().header.stream;
        let reply = PingReply { payload: vec![5; 100], ext: vec![] };
        for byte in encode_frame(stream, Op::Reply, Flags::NONE, PAYLOAD_BYTES_MAX, &reply).unwrap() {
            peer.write(&[byte]);
        }
    });
    let connection = Connection::connect(&server.options()).unwrap();
    assert_eq!(connection.call(&ping(0)).unwrap().payload, [5; 100]);
    server.join();
}
