//! The program itself: refused arguments, a socket from the service manager, and its end. No daemon is needed.

#![allow(clippy::unwrap_used, clippy::panic)] // tests fail by panicking

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rocmforge-gateway");

/// Exit code and complaint.
fn refused(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(PROGRAM).env_remove("LISTEN_FDS").args(arguments).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// The address that the program says it serves.
fn address(child: &mut Child) -> String {
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    line.trim_end().rsplit_once("http://").unwrap_or_else(|| panic!("no address: {line}")).1.to_owned()
}

/// Starts the program at a free port, for a daemon that is not there.
fn listening(dir: &Path, arguments: &[&str]) -> Child {
    let mut command = Command::new(PROGRAM);
    command.args(["--listen", "127.0.0.1:0", "--socket"]).arg(dir.join("api.sock")).args(arguments);
    command.env_remove("LISTEN_FDS").stderr(Stdio::piped()).spawn().unwrap()
}

fn stop(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
}

fn end(mut child: Child) {
    stop(&child);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn addresses_that_others_reach_need_tokens() {
    for address in ["0.0.0.0:0", "[::]:0"] {
        let (code, complaint) = refused(&["--listen", address]);
        assert_eq!(code, Some(2), "{complaint}");
        assert!(complaint.contains("can be reached from other machines"), "{complaint}");
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    let with = |text: &str, mode: u32| {
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        refused(&["--listen", "0.0.0.0:0", "--token-file", file.to_str().unwrap()])
    };
    for (text, mode, complaint) in
        [("", 0o600, "no token"), ("short", 0o600, "5 bytes"), ("", 0o644, "chmod 600")]
    {
        let (code, told) = with(text, mode);
        assert!(code == Some(2) && told.contains(complaint), "{told}");
    }
    assert_eq!(refused(&["--listen", "example.com:80"]).0, Some(2));
    assert_eq!(refused(&["--token-file", "/nonexistent/tokens"]).0, Some(2));
    let long = format!("/{}", "a".repeat(200));
    assert_eq!(refused(&["--socket", &long]).0, Some(2), "a path that no socket can have");
}

#[test]
fn a_free_port_is_served_until_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = listening(dir.path(), &[]);
    let address = address(&mut child);
    assert!(get(&address, "/metrics").contains("rocmforge_gateway_connections_open 1"));
    let health = get(&address, "/health");
    assert!(health.starts_with("HTTP/1.1 503") && health.contains("is rocmforged running?"), "{health}");
    end(child);
}

#[test]
fn routers_are_told_of_the_end_before_requests_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = listening(dir.path(), &["--notice-s", "3600"]);
    let address = address(&mut child);
    stop(&child);
    while !get(&address, "/health").contains("the gateway is stopping") {}
    let health = get(&address, "/health");
    assert!(health.starts_with("HTTP/1.1 503") && health.contains("retry-after: 1"), "{health}");
    let lives = get(&address, "/livez");
    assert!(lives.starts_with("HTTP/1.1 200") && lives.contains("content-length: 15"), "{lives}");
    // A request that comes nevertheless is answered, and its connection is not kept for another one.
    let mut stream = TcpStream::connect(&address).unwrap();
    write!(stream, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200") && text.contains("connection: close"), "{text}");
    // The second signal does not wait for the hour.
    end(child);
}

#[test]
fn the_log_says_whose_connections_were_closed_for_newcomers() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = listening(dir.path(), &["--connections", "2"]);
    let mut told = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    told.read_line(&mut line).unwrap();
    let address = line.trim_end().rsplit_once("http://").unwrap().1;
    let _idle: Vec<_> = (0..6).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert!(get(address, "/livez").starts_with("HTTP/1.1 200"));
    end(child);
    let mut rest = String::new();
    told.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("; this machine: 5 for newcomers, 0 too slow"), "{rest}");
}

/// Starts the program as systemd does: descriptor 3 is the socket.
///
/// The socket comes through standard input: only this child inherits it, and dash duplicates no descriptor above 9.
fn handed(socket: &TcpListener, daemon: &Path) -> Child {
    let script = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\"";
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script, "sh", PROGRAM, "--listen", "127.0.0.1:1", "--socket"]).arg(daemon);
    command.stdin(OwnedFd::from(socket.try_clone().unwrap())).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_socket_from_the_service_manager_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let wanted = socket.local_addr().unwrap().to_string();
    let mut child = handed(&socket, &dir.path().join("api.sock"));
    assert_eq!(address(&mut child), wanted, "the socket goes before --listen");
    assert!(get(&wanted, "/").contains("rocmforge-gateway is running"));
    end(child);
    // The socket of an address that others reach needs tokens too.
    let open = TcpListener::bind("0.0.0.0:0").unwrap();
    let output = handed(&open, &dir.path().join("api.sock")).wait_with_output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && told.contains("--token-file"), "{told}");
}
