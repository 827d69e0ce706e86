//! The program's output on a terminal, and the same output to a pipe.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::process::Child;

use rocmforge_client::wire::*;
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::command_line::{client, generate, run};
use crate::server::{Peer, Server, end, item, summary};

/// Sets a title, clears the screen in two ways, and rings.
const HOSTILE: &str = "a\u{1b}]0;x\u{7}\u{9b}2J\u{7f}\r\tb\n\u{1b}[2J";
/// The same text on a terminal, which begins each line with a carriage return of its own.
const SHOWN: &str = "a\\u{1b}]0;x\\u{7}\\u{9b}2J\\u{7f}\\u{d}\tb\r\n\\u{1b}[2J";

/// A terminal: the side of the screen, and the side of the programs.
pub fn terminal() -> (File, OwnedFd) {
    let screen = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&screen).unwrap();
    unlockpt(&screen).unwrap();
    let path = ptsname(&screen, Vec::new()).unwrap();
    let programs =
        rustix::fs::open(path.as_c_str(), OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty());
    (File::from(screen), programs.unwrap())
}

/// Starts the program with its output and errors on a terminal.
fn on_terminal(server: &Server, arguments: &[&str]) -> (Child, File) {
    let (screen, programs) = terminal();
    let child = client(server)
        .args(arguments)
        .stdout(programs.try_clone().unwrap())
        .stderr(programs)
        .spawn()
        .unwrap();
    (child, screen)
}

/// The output of the program on a terminal until its end.
fn shown(server: &Server, arguments: &[&str]) -> String {
    let (mut child, mut screen) = on_terminal(server, arguments);
    let mut bytes = Vec::new();
    // The last program that leaves a terminal makes its reads fail.
    let _: io::Result<usize> = screen.read_to_end(&mut bytes);
    child.wait().unwrap();
    String::from_utf8(bytes).unwrap()
}

fn detokenized(peer: &mut Peer) {
    let request = peer.request().unwrap();
    let reply = DetokenizeReply { text: HOSTILE.into(), ext: vec![] };
    peer.send(request.header.stream, Op::Reply, &reply);
}

fn answered(peer: &mut Peer) {
    let (stream, _) = generate(peer);
    peer.send(stream, Op::Item, &item(HOSTILE));
    peer.send(stream, Op::End, &end());
}

#[test]
fn a_models_text_is_escaped_on_a_terminal_and_exact_in_a_pipe() {
    let arguments = ["detokenize", "m", "1"];
    let server = Server::greeting(|mut peer| detokenized(&mut peer));
    assert_eq!(shown(&server, &arguments), SHOWN);
    server.join();
    let server = Server::greeting(|mut peer| detokenized(&mut peer));
    assert_eq!(run(&server, &arguments), (0, HOSTILE.to_owned(), String::new()));
    server.join();

    let arguments = ["run", "m", "p"];
    let server = Server::greeting(|mut peer| answered(&mut peer));
    assert_eq!(shown(&server, &arguments), format!("{SHOWN}!\r\n"));
    server.join();
    let server = Server::greeting(|mut peer| answered(&mut peer));
    assert_eq!(run(&server, &arguments), (0, format!("{HOSTILE}!"), String::new()));
    server.join();
}

#[test]
fn names_and_errors_are_escaped_wherever_they_go() {
    const NAME: &str = "a\u{1b}[2J\u{202e}b\u{200b}";
    let server = Server::greeting(|mut peer| {
        let stream = peer.request().unwrap().header.stream;
        let reply = ListReply { models: vec![summary(NAME)], more: false, ext: vec![] };
        peer.send(stream, Op::Reply, &reply);
    });
    let (_, stdout, _) = run(&server, &["list"]);
    assert!(stdout.contains("a\\u{1b}[2J\\u{202e}b\\u{200b}  mapped"), "{stdout}");
    server.join();

    let server = Server::greeting(|mut peer| {
        let stream = peer.request().unwrap().header.stream;
        peer.send(stream, Op::Error, &WireError::new(ErrorCode::ModelNotFound, NAME));
    });
    let (_, _, stderr) = run(&server, &["list"]);
    assert_eq!(stderr, "rocmforge-client: model not found: a\\u{1b}[2J\\u{202e}b\\u{200b}\n");
    server.join();

    let server = Server::new(drop);
    let path = format!("/none/{NAME}.gguf");
    let (_, _, stderr) = run(&server, &["load", &path]);
    assert!(stderr.contains("a\\u{1b}[2J") && !stderr.contains('\u{1b}'), "{stderr}");
    server.join();
}
