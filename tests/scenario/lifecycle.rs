//! Start, reload and end: sockets that are taken or stale, wrong configurations, signals.

use std::fs;
use std::process::Command;

use rocmforge_client::wire::{self, ErrorCode, ModelState, Op, WireError};
use rustix::process::Signal;

use crate::raw::Raw;
use crate::rig::{Rig, TINY, answer, code, collect, story};

/// Exit status and standard error of a daemon that does not start.
fn output(command: &mut Command) -> (i32, String) {
    let output = command.output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_second_daemon_on_the_same_socket_is_refused_and_the_first_serves_on() {
    let mut rig = Rig::start();
    let (status, says) = output(&mut rig.command());
    assert_eq!(status, 69, "{says}");
    assert!(says.contains("another rocmforged serves this socket"), "{says}");
    rig.assert_serves();
    // Also if the lock file was removed.
    fs::remove_file(rig.dir.path().join("api.sock.lock")).unwrap();
    let (status, says) = output(&mut rig.command());
    assert_eq!(status, 69, "{says}");
    rig.assert_serves();
}

#[test]
fn the_socket_of_a_killed_daemon_is_taken_over() {
    let mut rig = Rig::start();
    rig.signal(Signal::KILL);
    assert!(!rig.ended().success());
    assert!(rig.socket().exists(), "a killed daemon left no stale socket");
    rig.run();
    rig.assert_serves();
    rig.signal(Signal::TERM);
    assert!(rig.ended().success());
    assert!(!rig.socket().exists(), "an orderly end left the socket");
}

#[test]
fn a_file_that_is_no_socket_is_not_touched() {
    let rig = Rig::idle();
    fs::write(rig.socket(), "precious").unwrap();
    let (status, says) = output(&mut rig.command());
    assert_eq!(status, 69, "{says}");
    assert_eq!(fs::read_to_string(rig.socket()).unwrap(), "precious");
}

/// A link in the socket's place, to a file, to nothing, and to another daemon's socket: the daemon neither follows nor
/// removes it.
#[test]
fn a_link_in_the_sockets_place_is_not_touched() {
    let mut other = Rig::start();
    let rig = Rig::idle();
    let file = rig.dir.path().join("file");
    fs::write(&file, "precious").unwrap();
    for to in [file.clone(), rig.dir.path().join("nothing"), other.socket()] {
        std::os::unix::fs::symlink(&to, rig.socket()).unwrap();
        let (status, says) = output(&mut rig.command());
        assert_eq!(status, 69, "{to:?}: {says}");
        assert_eq!(fs::read_link(rig.socket()).unwrap(), to, "{says}");
        fs::remove_file(rig.socket()).unwrap();
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    assert!(!rig.dir.path().join("nothing").exists());
    other.assert_serves();
}

#[test]
fn a_wrong_configuration_stops_the_daemon_and_says_where() {
    let rig = Rig::idle();
    let cases = [
        ("sockt = '/x'", "sockt"),
        ("[limits]\ncontext_tokens = 7", "limits.context_tokens = 7 is not in 16..=131072"),
        ("[cpu]\nsimd = 'altivec'", "altivec"),
        ("[log", "config.toml"),
        (
            "[policy]\nsubordinates = { '7' = [1000, 5] }",
            "policy.subordinates.\"7\": 5 uids from 1000 on are not",
        ),
        ("[policy]\nsubordinates = { nobody-at-all = [3000000000, 5] }", "not a user of /etc/passwd"),
        ("[policy]\nsubordinates = { '7' = [3000000000] }", "subordinates"),
    ];
    for (config, says) in cases {
        rig.configure(config);
        for check in [true, false] {
            let mut command = rig.command();
            if check {
                command.arg("--check-config");
            }
            let (status, text) = output(&mut command);
            assert_eq!(status, 78, "{text}");
            assert!(text.contains(says), "{text:?} does not say {says:?}");
        }
    }
    // Another machine may have the instruction set: the configuration is right.
    rig.configure(if cfg!(target_arch = "x86_64") { "[cpu]\nsimd = 'neon'" } else { "[cpu]\nsimd = 'avx2'" });
    assert_eq!(output(rig.command().arg("--check-config")).0, 0);
    let (status, text) = output(&mut rig.command());
    assert!(status == 71 && text.contains("this processor has no "), "{status}: {text}");
    // Not at a start, which may be the first. But a reload refuses it, and so does the check before one.
    for empty in ["", " \n"] {
        rig.configure(empty);
        let (status, text) = output(rig.command().arg("--check-config"));
        assert!(status == 78 && text.contains("is empty, as after an interrupted write"), "{status}: {text}");
    }
    for valid in ["[log]\nformat = 'json'", "# all defaults"] {
        rig.configure(valid);
        assert_eq!(output(rig.command().arg("--check-config")).0, 0);
    }
    let drop_ins = rig.dir.path().join("conf.d");
    fs::create_dir(&drop_ins).unwrap();
    for (drop_in, status, says) in [
        ("[limits]\nqueued = 0", 78, "conf.d/a.toml: limits.queued = 0 is not in 1..=1048576"),
        ("[policy]\nsee = ['nobody-of-this-name']", 78, "conf.d/a.toml: policy.see names"),
        (
            "[policy]\nsubordinates = { '7' = [3000000000, 0] }",
            78,
            "conf.d/a.toml: policy.subordinates.\"7\"",
        ),
        ("[limits]\nqued = 1", 78, "conf.d/a.toml is not valid"),
        ("", 78, "conf.d/a.toml is empty"),
        ("[limits]\nqueued = 1", 0, ""),
    ] {
        fs::write(drop_ins.join("a.toml"), drop_in).unwrap();
        let (found, text) = output(rig.command().arg("--check-config"));
        assert!(found == status && text.contains(says), "{found}: {text:?} does not say {says:?}");
    }
    // A directory that cannot be served is no fault at a start, when its disk may come later.
    for (models, says) in [("/none", "No such file"), ("/dev/null", "Not a directory")] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforged"));
        command.arg("--models").arg(models).arg("--check-config");
        let (status, text) = output(&mut command);
        assert!(status == 78 && text.contains(models) && text.contains(says), "{status}: {text}");
    }
    assert!(!rig.socket().exists(), "a configuration check made a socket");
}

#[test]
fn a_stop_lets_running_answers_finish_and_refuses_new_ones() {
    let mut rig = Rig::start();
    let whole = answer(&rig.client(), &story(200)).unwrap();
    let (early, late) = (rig.client(), rig.client());
    late.ping(b"").unwrap();
    let mut running: Vec<_> = (0..16).map(|_| early.generate(&story(200)).unwrap()).collect();
    for generation in &mut running {
        generation.next_item().unwrap().unwrap();
    }
    rig.signal(Signal::TERM);
    while !late.status().unwrap().draining {}
    let mut refused = late.connection().unwrap().generate(&story(4)).unwrap();
    assert_eq!(code(collect(&mut refused)), ErrorCode::ServerDraining as u16);
    for generation in &mut running {
        let rest = collect(generation).expect("a running answer did not finish");
        assert!(whole.text.ends_with(&rest.text) && rest.ids.len() >= 190, "{rest:?}");
    }
    assert_eq!(rig.ended().code(), Some(0));
}

#[test]
fn answers_that_do_not_finish_in_time_end_with_a_typed_error() {
    let mut rig = Rig::start_with("[limits]\ndrain_s = 1");
    let mut raw = Raw::connect(&rig);
    // The client grants no credit, so the request is waiting for credit when the daemon stops.
    raw.send(1, Op::Generate, &story(400));
    rig.eventually("the request waits for credit", |_| {
        rig.client().ps().unwrap().sequences.iter().any(|s| s.generated_tokens >= 32)
    });
    rig.signal(Signal::INT);
    assert_eq!(rig.ended().code(), Some(0));
    // The items sent before the end can still be read.
    let (last, payload) = loop {
        let (header, payload) = raw.receive();
        if header.known_op() != Some(Op::Item) {
            break (header, payload);
        }
    };
    assert_eq!((last.stream, last.known_op()), (1, Some(Op::Error)));
    let error: WireError = wire::decode(&payload).unwrap();
    assert_eq!(error.code, ErrorCode::ServerDraining as u16);
    raw.assert_closed();
}

#[test]
fn a_second_signal_ends_at_once() {
    let mut rig = Rig::start();
    let client = rig.client();
    let mut stalled = client.generate(&story(400)).unwrap();
    stalled.next_item().unwrap().unwrap();
    rig.signal(Signal::TERM);
    while !client.status().is_ok_and(|status| status.draining) {}
    rig.signal(Signal::TERM);
    assert_eq!(rig.ended().code(), Some(130));
}

#[test]
fn a_reload_reads_the_configuration_and_keeps_models_and_answers() {
    let mut rig = Rig::start_with("[limits]\nconnections_per_uid = 100");
    let more = rig.dir.path().join("more");
    fs::create_dir(&more).unwrap();
    fs::copy(rig.model(TINY), more.join("extra.gguf")).unwrap();
    let client = rig.client();
    let mut running = client.generate(&story(200)).unwrap();
    running.next_item().unwrap().unwrap();

    // The command line's --models overrides the file's, so this daemon runs on the file alone.
    let mut other = Rig::idle();
    let config = |dirs: &[&std::path::Path]| {
        let dirs: Vec<String> = dirs.iter().map(|dir| format!("{:?}", dir.to_str().unwrap())).collect();
        format!("models = [{}]\n", dirs.join(", "))
    };
    let own = other.dir.path().join("models");
    other.configure(&config(&[&own]));
    let mut command = Command::new(env!("CARGO_BIN_EXE_rocmforged"));
    command.arg("--socket").arg(other.socket()).arg("--config").arg(other.config());
    other.spawn(&mut command);
    let names = |rig: &Rig| -> Vec<String> {
        rig.client().list().unwrap().models.into_iter().map(|model| model.name).collect()
    };
    other.client().load(TINY).unwrap();
    assert_eq!(names(&other), [TINY]);
    other.configure(&config(&[&own, &more]));
    other.signal(Signal::HUP);
    other.eventually("the new directory's models are listed", |_| names(&other) == ["extra", TINY]);
    let states: Vec<ModelState> = other.client().list().unwrap().models.iter().map(|m| m.state).collect();
    assert_eq!(states, [ModelState::Registered, ModelState::Mapped], "the reload unmapped a mapped model");
    // A drop-in wins over the file, and an invalid one changes nothing.
    let drop_in = other.dir.path().join("conf.d/a.toml");
    fs::create_dir(drop_in.parent().unwrap()).unwrap();
    fs::write(&drop_in, config(&[&own])).unwrap();
    other.signal(Signal::HUP);
    other.eventually("the drop-in's models are listed", |_| names(&other) == [TINY]);
    fs::write(&drop_in, "models = ['relative']").unwrap();
    other.signal(Signal::HUP);
    other.eventually("the log names the drop-in", |_| {
        other.log_text().contains("conf.d/a.toml: models must be an absolute path, not relative")
    });
    assert_eq!(names(&other), [TINY]);
    fs::remove_file(&drop_in).unwrap();
    other.signal(Signal::HUP);
    other.eventually("the file's models are listed again", |_| names(&other) == ["extra", TINY]);
    // A broken file changes nothing.
    other.configure("nonsense = true");
    other.signal(Signal::HUP);
    other.eventually("the log reports the broken file", |_| {
        other.log_text().contains("the one in force stays")
    });
    assert_eq!(names(&other), ["extra", TINY]);
    // So does one with a directory that is not there.
    other.configure(&config(&[&own, &more.join("none")]));
    other.signal(Signal::HUP);
    other.eventually("the log names the missing directory", |_| {
        other.log_text().contains("more/none cannot be read: No such file")
    });
    assert_eq!(names(&other), ["extra", TINY]);
    // So does an empty one, which an interrupted write leaves.
    other.configure("\n");
    other.signal(Signal::HUP);
    other.eventually("the log reports the empty file", |_| other.log_text().contains("is empty, as after"));
    assert_eq!(names(&other), ["extra", TINY]);
    other.assert_serves();
    // A file that names no models is obeyed, and the log warns.
    other.reload(&config(&[]));
    assert!(names(&other).len() < 2);
    assert!(other.log_text().contains("drops all 2 models"), "{}", other.log_text());

    rig.signal(Signal::HUP);
    assert_eq!(collect(&mut running).unwrap().text.len(), {
        let whole = answer(&rig.client(), &story(200)).unwrap().text;
        whole.len() - ",".len()
    });
    rig.assert_serves();
}
