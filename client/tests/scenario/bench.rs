//! `bench` against scripted servers: Ctrl-C, a client process that is killed, and an answer that fails.

use std::process::Child;

use interprocess::os::unix::uds_local_socket::Listener;
use rocmforge_client::wire::*;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::command_line::{generate, spawn};
use crate::server::{Peer, Server, accept, end, item};

/// Answers the benchmark's question about the model, on the connection of the command itself.
fn show(listener: &Listener) -> Peer {
    let mut peer = accept(listener);
    peer.greet();
    let request = peer.request().unwrap();
    assert!(matches!(request.message, ClientMessage::Show(_)), "{:?}", request.message);
    let reply = ShowReply { vocab: 100, end_of_generation: vec![2], ..crate::empty_show() };
    peer.send(request.header.stream, Op::Reply, &reply);
    peer
}

/// The connection of a client process.
fn client(listener: &Listener) -> Peer {
    let mut peer = accept(listener);
    peer.greet();
    peer
}

/// An item of two tokens; the first has the prompt.
fn two_tokens() -> GenerateItem {
    GenerateItem { ids: vec![5, 6], ..item("ab") }
}

fn start(server: &Server, arguments: &[&str]) -> Child {
    let fixed = ["bench", "m", "--json", "--prompt-tokens", "7", "--answer-tokens", "3", "--clients", "1"];
    spawn(server, &[&fixed, arguments].concat())
}

/// The exit code, the figures, and standard error.
fn ended(child: Child) -> (i32, Value, String) {
    let output = child.wait_with_output().unwrap();
    let figures = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code().unwrap(), figures, String::from_utf8(output.stderr).unwrap())
}

#[test]
fn ctrl_c_ends_a_benchmark_with_what_was_measured() {
    let (told, heard) = std::sync::mpsc::channel();
    let server = Server::new(move |listener| {
        let _command = show(&listener);
        let mut peer = client(&listener);
        let (stream, request) = generate(&mut peer);
        let Prompt::Ids(ids) = request.prompt else { panic!("{:?}", request.prompt) };
        assert_eq!((ids.len(), request.max_tokens, request.ignore_eog), (7, 3, true));
        assert!(ids.iter().all(|id| *id < 100 && *id != 2));
        peer.send(stream, Op::Item, &two_tokens());
        peer.send(stream, Op::Item, &item("c"));
        peer.send(stream, Op::End, &end());
        let (stream, _) = generate(&mut peer);
        peer.send(stream, Op::Item, &two_tokens());
        told.send(()).unwrap();
        let cancel = peer.request().unwrap();
        assert!(matches!(cancel.message, ClientMessage::Cancel(_)), "{:?}", cancel.message);
        peer.fail(stream, ErrorCode::Cancelled);
        assert!(peer.request().is_none(), "nothing is asked after that");
    });
    let child = start(&server, &["--requests", "9"]);
    heard.recv().unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let (code, figures, stderr) = ended(child);
    assert_eq!((code, stderr.as_str()), (130, ""));
    let requests = &figures["requests"];
    assert_eq!(
        (&requests["done"], &requests["failed"], &requests["cancelled"]),
        (&1.into(), &0.into(), &1.into())
    );
    assert_eq!((&figures["tokens"]["prompt"], &figures["tokens"]["answer"]), (&14.into(), &5.into()));
    server.join();
}

#[test]
fn a_client_process_that_is_killed_is_a_failed_request() {
    let server = Server::new(|listener| {
        let _command = show(&listener);
        let mut peer = client(&listener);
        generate(&mut peer);
        kill_process(Pid::from_raw(peer.pid()).unwrap(), Signal::KILL).unwrap();
        assert!(peer.request().is_none());
    });
    let (code, figures, stderr) = ended(start(&server, &["--requests", "3"]));
    assert_eq!(code, 1, "{stderr}");
    assert_eq!(
        (&figures["requests"]["failed"], &figures["errors"][0]["name"]),
        (&1.into(), &"ClientEnded".into())
    );
    assert_eq!(figures["ttft_ms"], Value::Null);
    server.join();
}

#[test]
fn failed_requests_are_counted_by_error_and_make_the_exit_code() {
    let server = Server::new(|listener| {
        let _command = show(&listener);
        let mut peer = client(&listener);
        for code in [ErrorCode::Quota, ErrorCode::Busy, ErrorCode::Busy] {
            let (stream, _) = generate(&mut peer);
            peer.fail(stream, code);
        }
        let (stream, _) = generate(&mut peer);
        peer.send(stream, Op::Item, &two_tokens());
        peer.send(stream, Op::End, &end());
        assert!(peer.request().is_none());
    });
    let (code, figures, stderr) = ended(start(&server, &["--requests", "4"]));
    assert_eq!(code, 1, "{stderr}");
    let errors: Vec<_> =
        figures["errors"].as_array().unwrap().iter().map(|e| (&e["name"], &e["count"])).collect();
    assert_eq!(errors, [(&"Busy".into(), &2.into()), (&"Quota".into(), &1.into())]);
    let error: Value = serde_json::from_str(&stderr).unwrap();
    assert_eq!(error["error"]["name"], "RequestsFailed");
    let message = error["error"]["message"].as_str().unwrap();
    assert_eq!(message, "3 of 4 requests failed, 2 of them with Busy: as the script says");
    assert_eq!((&figures["requests"]["done"], &figures["tokens"]["answer"]), (&1.into(), &2.into()));
    server.join();
}

#[test]
fn a_daemon_that_is_gone_fails_requests_and_does_not_hang() {
    let server = Server::new(|listener| {
        let _command = show(&listener);
        drop(client(&listener));
    });
    let child = start(&server, &["--requests", "2", "--connect-timeout", "50"]);
    server.join();
    let (code, figures, _) = ended(child);
    assert_eq!((code, &figures["requests"]["failed"]), (1, &2.into()));
}

#[test]
fn a_client_process_is_not_for_people() {
    let server = Server::new(|_| ());
    let mut child = spawn(&server, &["bench-client"]);
    std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"hello\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && stderr.contains("not that of `bench`"), "{stderr}");
    server.join();
}

#[test]
fn a_client_process_ends_with_its_input() {
    let server = Server::new(|_| ());
    let child = spawn(&server, &["bench-client"]);
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        (output.status.code(), output.stdout.as_slice(), output.stderr.as_slice()),
        (Some(0), &b""[..], &b""[..])
    );
    server.join();
}
