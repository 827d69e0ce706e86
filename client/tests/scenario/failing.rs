//! The program where something is wrong: what it keeps, what it refuses, and what it says.

use std::path::Path;
use std::time::Duration;

use rocmforge_client::wire::*;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

use crate::command_line::{generate, run, spawn};
use crate::server::{Server, item, summary};

/// A server that nobody must ask anything.
fn unasked() -> Server {
    Server::new(drop)
}

fn object(stderr: &str) -> Value {
    serde_json::from_str(stderr).unwrap_or_else(|error| panic!("{error}: {stderr:?}"))
}

#[test]
fn an_error_in_json_keeps_what_came_before_it() {
    let endings = [
        (Some(ErrorCode::DeadlineExceeded), "DeadlineExceeded", 1),
        (Some(ErrorCode::ServerDraining), "ServerDraining", 3),
        (None, "Disconnected", 3),
    ];
    for (code, name, exit) in endings {
        let server = Server::greeting(move |mut peer| {
            let (stream, _) = generate(&mut peer);
            let logprobs = vec![TokenLogprob { logprob: -0.5, top: vec![] }];
            peer.send(stream, Op::Item, &GenerateItem { prompt_ids: vec![5, 6], ..item("one ") });
            peer.send(stream, Op::Item, &GenerateItem { logprobs, ..item("two") });
            // Without an error frame the connection just ends, as when the daemon is killed.
            if let Some(code) = code {
                peer.fail(stream, code);
            }
        });
        let (code, stdout, stderr) = run(&server, &["run", "m", "p", "--json", "--logprobs", "1"]);
        assert_eq!((code, stdout.as_str()), (exit, ""), "{stderr}");
        let mut found = object(&stderr);
        assert_eq!(found["error"].take()["name"], name);
        let came = json!({
            "error": null, "text": "one two", "prompt_ids": [5, 6], "ids": [1, 1],
            "logprobs": [{ "logprob": -0.5, "top": [] }],
        });
        assert_eq!(found, came);
        server.join();
    }
}

#[test]
fn only_regular_files_are_passed() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("pipe.gguf");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::from(0o600), 0).unwrap();
    let server = unasked();
    let socket = server.socket();
    let cases = [
        (fifo.as_path(), "it is a pipe, not a regular file"),
        (dir.path(), "it is a directory, not a regular file"),
        (socket.as_path(), "it is a socket"),
        (Path::new("/dev/null"), "it is a device, not a regular file"),
        (Path::new("/"), "it names no file"),
    ];
    for (path, says) in cases {
        let mut child = spawn(&server, &["load", path.to_str().unwrap()]);
        // A program that hangs in open(2) must fail the test, not hang it: this is longer than any sane start takes.
        for _ in 0..2000 {
            if child.try_wait().unwrap().is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = child.kill();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(4), "{path:?}: {stderr}");
        assert!(stderr.contains(says), "{path:?}: {stderr}");
    }
    server.join();
}

#[test]
fn options_that_would_be_dropped_are_refused() {
    let server = unasked();
    for arguments in
        [&["run", "m", "1", "--ids", "--system", "Be brief."][..], &["load", "story", "--name", "foo"]]
    {
        let (code, stdout, stderr) = run(&server, arguments);
        assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
        assert!(stderr.contains(arguments[arguments.len() - 2]), "{stderr}");
    }
    server.join();
}

#[test]
fn a_new_name_for_a_mapped_file_is_not_said_to_be_old() {
    let server = Server::greeting(|mut peer| {
        let request = peer.request().unwrap();
        let reply = LoadReply { summary: summary("new"), mapped_now: false, elapsed_us: 1, ext: vec![] };
        peer.send(request.header.stream, Op::Reply, &reply);
    });
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tale.gguf");
    std::fs::write(&path, "GGUF").unwrap();
    let (code, stdout, _) = run(&server, &["load", path.to_str().unwrap(), "--name", "new"]);
    assert_eq!((code, stdout.as_str()), (0, "new: its file was mapped already\n"));
    server.join();
}
