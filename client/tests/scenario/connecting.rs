//! Reaching the daemon, or a clear error if that fails.

use rocmforge_client::wire::*;
use rocmforge_client::{Client, ClientError, Connection, Options, ProtocolError, ServerTrust};

use crate::server::{SOON, Server, accept, listen};

fn refused(options: &Options) -> ClientError {
    Connection::connect(options).unwrap_err()
}

#[test]
fn a_missing_socket_and_a_stale_one_are_unavailable() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api.sock");
    let options = Options { socket: socket.clone(), absent_timeout: SOON, ..Options::default() };
    let error = refused(&options);
    assert!(matches!(error, ClientError::Unavailable { attempts: 2.., .. }), "{error}");
    // No process listens, but the path still exists, as after a killed daemon.
    drop(listen(&socket));
    assert!(socket.exists());
    let error = refused(&options);
    assert!(matches!(error, ClientError::Unavailable { .. }), "{error}");
    assert!(error.to_string().contains("systemctl"), "it says what to do: {error}");
}

#[test]
fn a_daemon_that_starts_meanwhile_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api.sock");
    let options = Options {
        socket: socket.clone(),
        absent_timeout: 50 * SOON,
        connect_timeout: 50 * SOON,
        ..Options::default()
    };
    let starter = std::thread::spawn(move || {
        std::thread::sleep(SOON / 4);
        let listener = listen(&socket);
        accept(&listener).greet();
    });
    Connection::connect(&options).unwrap();
    starter.join().unwrap();
}

#[test]
fn an_older_daemon_counts_nothing_for_the_wrong_user() {
    let server = Server::new(|listener| {
        let mut peer = accept(&listener);
        let hello = peer.client_hello();
        assert_eq!(hello.acts_as(), Some(7));
        let (features, features_unknown) = (0, hello.features);
        let answer = ServerHello { features, features_unknown, ..ServerOffer::default().answer(&hello) };
        peer.write(&answer.to_bytes());
        peer.drain();
    });
    let error = refused(&Options { acts_as: Some(7), ..server.options() });
    assert!(matches!(error, ClientError::CannotAct), "{error}");
    server.join();
}

#[test]
fn a_daemon_may_refuse_to_act_and_says_what_to_change() {
    let server = Server::new(|listener| {
        let mut peer = accept(&listener);
        peer.client_hello();
        peer.write(&ServerOffer::default().refuse(ErrorCode::Forbidden, 0).to_bytes());
        peer.drain();
    });
    let error = refused(&Options { acts_as: Some(7), ..server.options() });
    assert_eq!(error.code(), Some(ErrorCode::Forbidden as u16));
    assert!(error.to_string().contains("policy.subordinates"), "{error}");
    server.join();
}

#[test]
fn a_server_that_says_nothing_is_given_up() {
    let server = Server::new(|listener| {
        let mut peer = accept(&listener);
        peer.client_hello();
        peer.drain();
    });
    let error = refused(&Options { connect_timeout: SOON, ..server.options() });
    assert!(matches!(error, ClientError::Unavailable { .. }), "{error}");
    server.join();
}

#[test]
fn a_full_queue_is_waited_for_and_then_given_up() {
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let server = Server::new(move |listener| {
        let _ = stopped.recv();
        drop(listener);
    });
    // No process accepts: connections fill the queue, whatever its size, and the rest must fail in time. The kernel's
    // largest queue is net.core.somaxconn, 4096. If the limit of open files is reached first, the test cannot fill
    // it.
    let options = Options { connect_timeout: SOON, ..server.options() };
    let mut held = vec![];
    let name = server.socket();
    loop {
        use interprocess::local_socket::{ConnectOptions, GenericFilePath, prelude::*};
        let connect = ConnectOptions::new()
            .name(name.as_path().to_fs_name::<GenericFilePath>().unwrap())
            .wait_mode(interprocess::ConnectWaitMode::Timeout(SOON / 4))
            .nonblocking_stream(true)
            .connect_sync();
        use std::io::Write;
        match connect.and_then(|mut stream| stream.write(&[0]).map(|_| stream)) {
            Ok(stream) => held.push(stream),
            Err(_) => break,
        }
    }
    let error = refused(&options);
    assert!(matches!(error, ClientError::Unavailable { attempts: 2.., .. }), "{} held: {error}", held.len());
    drop(stop);
    server.join();
}

#[test]
fn a_server_of_another_uid_gets_a_hello_and_nothing_else() {
    let server = Server::new(|listener| {
        let mut peer = accept(&listener);
        peer.client_hello();
        assert_eq!(peer.drain(), []);
    });
    let own = rustix::process::geteuid().as_raw();
    let options = Options { trust: ServerTrust::Uids(vec![own + 1]), ..server.options() };
    let error = Client::new(options).ping(b"secret").unwrap_err();
    assert!(matches!(error, ClientError::UntrustedServer { uid: Some(uid), .. } if uid == own), "{error}");
    server.join();
}

#[test]
fn another_major_version_is_a_typed_error() {
    let server = Server::new(|listener| {
        let mut peer = accept(&listener);
        peer.client_hello();
        let mut answer = ServerOffer::default().refuse(ErrorCode::UnsupportedMajor, 0);
        (answer.min_major, answer.max_major) = (2, 3);
        peer.write(&answer.to_bytes());
    });
    let error = refused(&server.options());
    assert!(matches!(error, ClientError::UnsupportedVersion { server_min: 2, server_max: 3 }), "{error}");
    server.join();
}

#[test]
fn a_server_of_another_protocol_is_a_typed_error() {
    let server = Server::new(|listener| {
        let mut peer = accept(&listener);
        peer.client_hello();
        peer.write(&[b'4'; SERVER_HELLO_BYTES]);
    });
    let error = refused(&server.options());
    assert!(matches!(error, ClientError::Protocol(ProtocolError::Hello(_))), "{error}");
    server.join();
}

#[test]
fn a_refusal_that_may_pass_is_tried_again_and_one_that_may_not_is_told() {
    let server = Server::new(|listener| {
        for code in [Some(ErrorCode::Quota), None, Some(ErrorCode::PeerRefused)] {
            let mut peer = accept(&listener);
            match code {
                None => peer.greet(),
                Some(code) => {
                    peer.client_hello();
                    peer.write(&ServerOffer::default().refuse(code, 1).to_bytes());
                }
            }
        }
    });
    Connection::connect(&server.options()).unwrap();
    let error = refused(&server.options());
    assert_eq!(error.code(), Some(ErrorCode::PeerRefused as u16), "{error}");
    server.join();
}
