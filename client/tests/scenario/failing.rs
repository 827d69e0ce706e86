//! The program in error cases: what it keeps, what it refuses, and its messages.

use std::io::Write;
use std::path::Path;
use std::process::{Child, Output};
use std::time::Duration;

use rocmforge_client::wire::*;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

use crate::command_line::{generate, run, spawn};
use crate::server::{Server, accept, item, summary};

/// A server that must get no request.
fn unasked() -> Server {
    Server::new(drop)
}

/// Output of a program that must end by itself. A program that hangs in open(2) or waits for input must fail its test,
/// not hang it. The limit is longer than any sane start takes.
fn output_in_time(mut child: Child) -> Output {
    for _ in 0..2000 {
        if child.try_wait().unwrap().is_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = child.kill();
    child.wait_with_output().unwrap()
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
            // Without an error frame the connection just ends, as after a killed daemon.
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
        (Path::new("/"), "the path names no file"),
    ];
    for (path, says) in cases {
        let output = output_in_time(spawn(&server, &["load", path.to_str().unwrap()]));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(4), "{path:?}: {stderr}");
        assert!(stderr.contains(says), "{path:?}: {stderr}");
    }
    server.join();
}

#[test]
fn metrics_replace_a_regular_file_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("page.prom");
    for (path, exit) in [(file.as_path(), 0), (Path::new("/dev/full"), 1), (dir.path(), 1)] {
        let server = Server::greeting(|mut peer| {
            let status = peer.request().unwrap();
            peer.send(status.header.stream, Op::Reply, &StatusReply::default());
            let residency = peer.request().unwrap();
            let reply = ResidencyReply { devices: vec![], models: vec![], more: false, ext: vec![] };
            peer.send(residency.header.stream, Op::Reply, &reply);
        });
        let (code, stdout, stderr) = run(&server, &["metrics", "--out", path.to_str().unwrap()]);
        assert_eq!((code, stdout.as_str()), (exit, ""), "{stderr}");
        let says = stderr.contains(path.to_str().unwrap()) && stderr.contains("not a regular file");
        assert_eq!(says, exit != 0, "{stderr}");
        server.join();
    }
    assert!(std::fs::read_to_string(&file).unwrap().contains("rocmforge_uptime_seconds"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "a file was left beside the page");
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
    assert_eq!((code, stdout.as_str()), (0, "new: its file was already mapped\n"));
    server.join();
}

#[test]
fn errors_the_client_makes_have_their_codes() {
    // The hello refuses for now, until the client times out.
    let server = Server::new(|listener| {
        let mut peer = accept(&listener);
        peer.client_hello();
        peer.write(&ServerOffer::default().refuse(ErrorCode::Quota, 70_000).to_bytes());
    });
    let told = |stderr: &str| {
        let error = object(stderr)["error"].take();
        ["name", "code", "retryable", "retry_after_ms"].map(|key| error[key].clone())
    };
    let (exit, _, stderr) = run(&server, &["list", "--json"]);
    assert_eq!(exit, 3, "{stderr}");
    assert_eq!(told(&stderr), [json!("Quota"), json!(301), json!(true), json!(70_000)]);
    server.join();

    let server = unasked();
    let (_, _, stderr) = run(&server, &["list", "--json", "--connect-timeout", "50"]);
    assert_eq!(told(&stderr), [json!("Unavailable"), json!(303), json!(true), json!(0)]);
    server.join();

    let server = Server::greeting(|mut peer| drop(peer.drain()));
    let name = "n".repeat(limits::NAME_BYTES_MAX + 1);
    let (_, _, stderr) = run(&server, &["unload", &name, "--json"]);
    assert_eq!(told(&stderr), [json!("LimitExceeded"), json!(202), json!(false), json!(0)]);
    server.join();

    let server = Server::greeting(|mut peer| drop(generate(&mut peer)));
    let (_, _, stderr) = run(&server, &["run", "m", "p", "--json"]);
    assert_eq!(told(&stderr), [json!("Disconnected"), json!(null), json!(true), json!(0)]);
    server.join();
}

#[test]
fn arguments_that_do_not_parse_are_one_object_in_json() {
    let server = unasked();
    let cases: [(&[&str], &str); 9] = [
        (&["--json", "nonsense"], "nonsense"),
        (&["run", "--json"], "<MODEL>"),
        (&["run", "m", "p", "-n", "-1", "--json"], "-1 is not in 0..=4294967295"),
        (&["run", "m", "p", "-t", "-1", "--json"], "-1 is not in 0..=100"),
        (&["run", "m", "p", "--temperature", "nan", "--json"], "NaN is not in 0..=100"),
        (&["run", "m", "p", "--top-p", "1.5", "--json"], "1.5 is not in 0..=1"),
        (&["run", "m", "p", "--min-p", "much", "--json"], "not a number"),
        (&["run", "m", "p", "--logprobs", "21", "--json"], "21 is not in 0..=20"),
        (&["run", "m", "p", "--seed", "-1", "--json"], "-1 is not in 0..=18446744073709551615"),
    ];
    for (arguments, says) in cases {
        let (code, stdout, stderr) = run(&server, arguments);
        assert_eq!((code, stdout.as_str(), stderr.lines().count()), (2, "", 1), "{stderr}");
        let error = object(&stderr)["error"].take();
        assert_eq!((&error["name"], &error["retryable"]), (&json!("Usage"), &json!(false)));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(says) && !message.starts_with("error:"), "{message}");
    }
    let (code, _, stderr) = run(&server, &["run", "m", "--nonsense", "--", "--json"]);
    assert!(code == 2 && stderr.starts_with("error: "), "a prompt is no option: {stderr}");
    let (code, stdout, _) = run(&server, &["--json", "--help"]);
    assert!(code == 0 && stdout.contains("Exit codes"), "{stdout}");
    server.join();
}

#[test]
fn a_socket_path_no_socket_can_have_is_an_argument_error() {
    let server = unasked();
    let path = format!("/{}", "s".repeat(107));
    // Standard input stays open: the path is refused before standard input is read.
    let mut child = spawn(&server, &["run", "m", "-", "--socket", &path]);
    let stdin = child.stdin.take();
    let output = output_in_time(child);
    drop(stdin);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("108 bytes, but 1 to 107 are allowed"), "{stderr}");
    server.join();
}

#[test]
fn input_over_the_limit_is_said_to_be_more() {
    let server = unasked();
    let mut child = spawn(&server, &["run", "m", "-", "--json"]);
    // Two bytes a character: the limit is even, so one byte more cuts a character in half.
    let text = "é".repeat(limits::TEXT_BYTES_MAX);
    let _ = child.stdin.take().unwrap().write_all(text.as_bytes());
    let output = child.wait_with_output().unwrap();
    let error = object(str::from_utf8(&output.stderr).unwrap())["error"].take();
    assert_eq!((output.status.code(), &error["code"]), (Some(1), &json!(202)), "{error}");
    assert!(error["message"].as_str().unwrap().contains("more than 1044480 bytes"), "{error}");
    server.join();
}

#[test]
fn a_server_that_is_not_the_named_one_is_said_to_be_that() {
    let server = Server::new(|listener| {
        let mut peer = accept(&listener);
        peer.client_hello();
    });
    let own = rustix::process::geteuid().as_raw();
    let other = (own + 1).to_string();
    let (code, _, stderr) = run(&server, &["list", "--server-uid", &other]);
    assert_eq!(code, 3, "{stderr}");
    assert!(stderr.contains(&format!("served by uid {own}, not by uid {other}:")), "{stderr}");
    server.join();
}

#[test]
fn other_versions_are_told_with_who_is_older() {
    let refusing = |min, max| ServerHello {
        min_major: min,
        max_major: max,
        ..ServerOffer::default().refuse(ErrorCode::UnsupportedMajor, 0)
    };
    let cases = [
        (refusing(2, 3), "versions 2 to 3, this client version 1: update this client"),
        (refusing(0, 0), "version 0, this client version 1: update the daemon"),
        (
            ServerHello { status: 0, major: 2, ..refusing(1, 1) },
            "version 2, this client version 1: update this",
        ),
    ];
    for (hello, says) in cases {
        let server = Server::new(move |listener| {
            let mut peer = accept(&listener);
            peer.client_hello();
            peer.write(&hello.to_bytes());
        });
        let (code, _, stderr) = run(&server, &["list"]);
        assert_eq!(code, 3, "{stderr}");
        assert!(stderr.contains(says), "{stderr}");
        server.join();
    }
}
