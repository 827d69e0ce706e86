//! `rocmforge-top` on a real daemon: one frame, lines of JSON, a daemon that stops and starts, and a restored terminal.

use std::io::{self, Write};
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};

use clap::Parser;
use rocmforge_client::wire::EventKind;
use rocmforge_top::{Arguments, Failure, Screen};
use rustix::process::Signal;
use serde_json::Value;

use crate::device::on_gpu;
use crate::rig::{PATIENCE, Rig, TINY, answer, story};

/// Names the socket for the program in its own process; see [`as_a_program`].
const SOCKET: &str = "ROCMFORGE_SCENARIO_TOP";

fn arguments(rig: &Rig, more: &[&str]) -> Arguments {
    let socket = rig.socket().to_str().unwrap().to_owned();
    let fixed = ["rocmforge-top", "--socket", &socket, "--interval", "0.1"];
    Arguments::try_parse_from(fixed.into_iter().chain(more.iter().copied())).unwrap()
}

fn frame(rig: &Rig) -> String {
    let mut out = Vec::new();
    rocmforge_top::frame_of(&arguments(rig, &["--once"]), &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

fn json(rig: &Rig) -> Value {
    let mut out = Vec::new();
    rocmforge_top::json_of(&arguments(rig, &["--once", "--json"]), &mut out).unwrap();
    serde_json::from_slice(&out).expect("the output is not one JSON object")
}

#[test]
fn a_frame_and_a_line_of_json_tell_what_the_daemon_has() {
    let rig = Rig::start_with("[device]\nbackend = 'cpu'");
    let before = frame(&rig);
    assert!(
        before.contains("\nModels: 0\n") && before.contains("\nRequests: 0 running, 0 waiting\n"),
        "{before}"
    );
    answer(&rig.client(), &story(8)).unwrap();
    let after = frame(&rig);
    assert!(after.starts_with("rocmforged "), "{after}");
    assert!(after.contains("weights are read in place"), "{after}");
    let model = after.lines().find(|line| line.contains(TINY)).expect("there is no line of the model");
    assert!(model.contains("#######"), "{after}");
    let value = json(&rig);
    assert_eq!((&value["devices"][0]["kind"], &value["models"][0]["model"]), (&"cpu".into(), &TINY.into()));
    assert_eq!(
        value["devices"][0]["rates"]["tokens_per_second"], 0.0,
        "the rate is not 0 although nothing ran"
    );
    assert_eq!(value["status"]["models_mapped"], 1);
}

#[test]
fn weights_on_a_device_are_in_its_bar() {
    let Some(rig) = on_gpu() else { return };
    let mut loading = rig.client().preload_all(TINY).unwrap();
    while loading.next_item().unwrap().is_some() {}
    let value = json(&rig);
    let weights = value["devices"][0]["weight_bytes"].as_u64().unwrap();
    assert_eq!(weights, loading.end().unwrap().device_bytes);
    assert_eq!(
        (&value["models"][0]["parts"], &value["models"][0]["loading"]),
        (&"#######".into(), &Value::Null)
    );
    let text = frame(&rig);
    let bar = text.lines().find(|line| line.starts_with('[')).expect("there is no bar");
    assert!(bar.contains('A') && bar.contains('.'), "{text}");
    assert!(text.contains(&format!("A {TINY} ")), "{text}");
}

/// Sends lines on until the receiver is dropped.
struct Lines(Sender<Value>, Vec<u8>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let line = serde_json::from_slice(&std::mem::take(&mut self.1))?;
        self.0.send(line).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// The next line that satisfies `wanted`.
fn line(lines: &Receiver<Value>, wanted: impl Fn(&Value) -> bool) -> Value {
    loop {
        let line = lines.recv_timeout(PATIENCE).expect("the program wrote no more lines");
        if wanted(&line) {
            return line;
        }
    }
}

#[test]
fn a_daemon_that_goes_is_waited_for_and_watched_again() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'");
    let (sender, lines) = channel();
    let watched = arguments(&rig, &["--json"]);
    let watcher = std::thread::spawn(move || rocmforge_top::json_of(&watched, &mut Lines(sender, vec![])));
    let first = line(&lines, |_| true);
    assert_eq!(first["devices"][0]["rates"], Value::Null, "a single sample gave a rate");
    answer(&rig.client(), &story(8)).unwrap();
    let mapped = |line: &Value| line["events"][0]["kind"] == "model_mapped";
    assert_eq!(line(&lines, mapped)["events"][0]["model"], TINY, "{:?}", EventKind::ModelMapped);
    rig.signal(Signal::TERM);
    assert!(rig.ended().success());
    let gone = line(&lines, |line| line.get("error").is_some());
    assert!(gone["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{gone}");
    rig.run();
    let back = line(&lines, |line| line["status"]["pid"] == rig.pid());
    assert_eq!(back["models"], Value::Array(vec![]));
    drop(lines);
    let ended = watcher.join().unwrap();
    assert!(matches!(ended, Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe));
}

#[test]
fn a_daemon_that_was_never_there_is_an_error() {
    let rig = Rig::idle();
    let mut out = Vec::new();
    let failed = rocmforge_top::frame_of(&arguments(&rig, &["--once"]), &mut out).unwrap_err();
    assert!(failed.to_string().starts_with("Unavailable: "), "{failed}");
    assert!(out.is_empty());
}

/// Does nothing as a test: with [`SOCKET`] set, it runs the program. With an empty socket, it panics on a terminal in
/// raw mode.
#[test]
fn as_a_program() {
    match std::env::var(SOCKET).as_deref() {
        Err(_) => {}
        Ok("") => {
            let _screen = Screen::open().unwrap();
            panic!("planted");
        }
        Ok(socket) => {
            let arguments = ["rocmforge-top", "--socket", socket, "--interval", "0.1"];
            std::process::exit(rocmforge_top::run(arguments.into_iter().map(Into::into)).into());
        }
    }
}

/// Exit status of the program on a terminal, and its output after it left the alternate screen.
fn on_terminal(socket: &str, wait_for: &str, act: &str) -> (i32, String) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/scenario/terminal.py");
    let program = std::env::current_exe().unwrap();
    let output = Command::new("python3")
        .args([script, wait_for, act])
        .arg(program)
        .args(["--exact", "top::as_a_program", "--nocapture", "--test-threads=1"])
        .env(SOCKET, socket)
        .output()
        .expect("python3 cannot be run");
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{act}: {errors}");
    let (status, rest) = text.split_once('\n').unwrap();
    (status.parse().unwrap(), rest.to_owned())
}

#[test]
fn the_terminal_is_given_back_after_keys_signals_and_panics() {
    let rig = Rig::start_with("[device]\nbackend = 'cpu'");
    let socket = rig.socket();
    let socket = socket.to_str().unwrap();
    for (act, status) in
        [("key:q", 0), ("key:\u{3}", 130), ("signal:2", 130), ("signal:15", 143), ("signal:1", 129)]
    {
        assert_eq!(on_terminal(socket, "Models: 0", act).0, status, "{act}");
    }
    let (status, rest) = on_terminal("", "planted", "none");
    assert!(status != 0 && rest.contains("planted"), "the panic is not shown on the normal screen: {rest}");
}
