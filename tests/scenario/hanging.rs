//! A file system whose server stops answering: requests for its models fail in time; all others go on.

use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rocmforge_client::metrics::prometheus;
use rocmforge_client::wire::{
    ErrorCode, Ext, Flags, GenerateRequest, LoadRequest, ModelState, Op, PAYLOAD_BYTES_MAX, PingRequest,
    encode_frame_with_descriptors,
};
use rustix::process::Signal;

use crate::common;
use crate::hangs::HangingFs;
use crate::raw::Raw;
use crate::rig::{PATIENCE, Rig, TINY, answer, refusal, story};

/// Requests at once for the model that hangs.
const CROWD: usize = 8;

/// A daemon with the kept model on a local disk, and with the same model as `far` on a file system that can hang. `None`
/// where nobody may mount one.
fn start() -> Option<(Rig, HangingFs)> {
    start_with("")
}

/// As [`start`], with more keys of the table `limits`.
fn start_with(limits: &str) -> Option<(Rig, HangingFs)> {
    if !rustix::process::geteuid().is_root() {
        common::not_run("only root can mount a file system that hangs");
        return None;
    }
    let mut rig = Rig::idle();
    let mounted = rig.dir.path().join("far");
    std::fs::create_dir(&mounted).unwrap();
    let bytes = std::fs::read(common::tinystories()).unwrap();
    let far = match HangingFs::mount(&mounted, &[("far.gguf", &bytes)]) {
        Ok(far) => far,
        Err(error) => {
            common::not_run(&format!("this machine cannot mount FUSE: {error}"));
            return None;
        }
    };
    rig.configure(&format!("[device]\nbackend = 'cpu'\n[limits]\ndrain_s = 1\n{limits}"));
    let mut command = rig.command();
    command.arg("--models").arg(&mounted);
    rig.spawn(&mut command);
    rig.client().ping(b"").unwrap();
    Some((rig, far))
}

fn far_story() -> GenerateRequest {
    GenerateRequest { model: "far".into(), ..story(8) }
}

#[test]
fn a_file_system_that_hangs_fails_its_models_alone() {
    let Some((mut rig, far)) = start() else { return };
    let client = rig.client();
    let whole = answer(&client, &story(8)).unwrap();
    assert_eq!(answer(&client, &far_story()).unwrap(), whole);
    let shown = client.show("far", false).unwrap();
    assert!(shown.copy().is_some_and(|text| text.contains("(fuse) may hang")), "{:?}", shown.copy());
    assert_eq!(client.show(TINY, false).unwrap().copy(), None);
    let copies = |notes: Vec<(&str, &str)>| {
        notes.iter().any(|(name, text)| *name == "copies" && text.starts_with("1 "))
    };
    let status = client.status().unwrap();
    assert!(copies(status.notes()) && status.lost_threads() == 0, "{:?}", status.notes());
    assert!(rig.log_text().contains("served from a copy in memory"));

    far.hang();
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let crowd: Vec<_> =
            (0..CROWD).map(|_| scope.spawn(|| refusal(answer(&rig.client(), &far_story())))).collect();
        let others = scope.spawn(|| {
            let mut answers = 0;
            while !failed.load(Ordering::Relaxed) {
                assert_eq!(answer(&client, &story(8)).unwrap(), whole, "the other model's tokens changed");
                answers += 1;
            }
            answers
        });
        let begun = Instant::now();
        for request in crowd {
            let error = request.join().unwrap();
            assert_eq!(error.code, ErrorCode::Unavailable as u16, "{error}");
            assert!(error.message.contains("(fuse) does not answer"), "{error}");
        }
        println!("{CROWD} requests failed within {:.1} s", begun.elapsed().as_secs_f64());
        assert!(begun.elapsed() < PATIENCE);
        failed.store(true, Ordering::Relaxed);
        assert!(others.join().unwrap() > 0);
    });

    let listed = client.list().unwrap().models;
    let entry = |name: &str| listed.iter().find(|model| model.name == name).unwrap();
    assert_eq!((entry("far").state, entry(TINY).state), (ModelState::Unusable, ModelState::Mapped));
    assert!(entry("far").reason.contains("has not answered for"), "{}", entry("far").reason);
    let status = client.status().unwrap();
    assert!((1..=4).contains(&status.lost_threads()), "{} lost threads", status.lost_threads());
    let page = prometheus(&status, &client.residency().unwrap());
    assert!(page.contains(&format!("rocmforge_lost_threads {}", status.lost_threads())), "{page}");
    let told = rig.log_text().matches("the thread is lost until it does").count();
    assert!((1..=2).contains(&told), "{told} warnings");

    // It comes back, and is served again.
    far.answer();
    rig.eventually("no thread is lost", |status| status.lost_threads() == 0);
    assert_eq!(answer(&client, &far_story()).unwrap(), whole);

    // Threads that stand still do not keep the daemon from its end.
    far.hang();
    let error = refusal(client.load("far"));
    assert_eq!(error.code, ErrorCode::Unavailable as u16, "{error}");
    rig.assert_serves();
    rig.signal(Signal::TERM);
    assert!(rig.ended().success(), "{}", rig.log_text());
}

#[test]
fn a_daemon_starts_beside_a_directory_that_hangs() {
    let Some((mut rig, far)) = start() else { return };
    rig.signal(Signal::TERM);
    assert!(rig.ended().success());
    far.hang();
    let mut command = rig.command();
    command.arg("--models").arg(rig.dir.path().join("far"));
    rig.spawn(&mut command);
    rig.assert_serves();
    assert!(rig.log_text().contains("a model directory does not answer"), "{}", rig.log_text());
    far.answer();
    let until = Instant::now() + PATIENCE;
    while let Err(error) = answer(&rig.client(), &far_story()) {
        assert!(Instant::now() < until, "{error}");
    }
    rig.assert_serves();
}

#[test]
fn descriptors_that_hang_when_they_are_closed_stop_nobody() {
    let Some((mut rig, far)) = start() else { return };
    rig.assert_serves();
    // This process must not close it either while nobody answers.
    let file = ManuallyDrop::new(std::fs::File::open(rig.dir.path().join("far/far.gguf")).unwrap());
    far.hang();
    let ping = PingRequest::default();
    let ping = encode_frame_with_descriptors(1, Op::Ping, Flags::NONE, PAYLOAD_BYTES_MAX, 1, &ping).unwrap();
    let send = |rig: &Rig| {
        let mut raw = Raw::connect(rig);
        raw.send_with(&ping, &[file.as_fd()]);
        assert_eq!(raw.error().1.code, ErrorCode::BadDescriptors as u16);
    };
    (0..CROWD).for_each(|_| send(&rig));
    rig.client().load_file(&rig.model(TINY), Some("mine")).unwrap();
    rig.assert_serves();
    let status = rig.eventually("the threads that close count as lost", |status| status.lost_threads() > 0);
    assert!(status.lost_threads() as usize <= CROWD, "{}", status.lost_threads());
    far.answer();
    rig.eventually("no thread is lost", |status| status.lost_threads() == 0);

    // The kernel keeps the process until the server answers; the log says so, and how to end it.
    far.hang();
    send(&rig);
    rig.signal(Signal::TERM);
    let until = Instant::now() + PATIENCE;
    while !rig.log_text().contains("connections/N/abort") {
        assert!(Instant::now() < until, "{}", rig.log_text());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    far.answer();
    assert!(rig.ended().success(), "{}", rig.log_text());
}

#[test]
fn descriptors_of_users_who_may_pass_none_never_reach_the_daemon() {
    let Some((mut rig, far)) = start_with("passed_models_per_uid = 0\n") else { return };
    let file = ManuallyDrop::new(std::fs::File::open(rig.dir.path().join("far/far.gguf")).unwrap());
    far.hang();
    let load = LoadRequest { name: "mine".into(), by_descriptor: true, request_id: 0, ext: Ext::new() };
    let load = encode_frame_with_descriptors(1, Op::Load, Flags::NONE, PAYLOAD_BYTES_MAX, 1, &load).unwrap();
    let crowd: Vec<Raw> = (0..CROWD).map(|_| Raw::connect(&rig)).collect();
    for mut raw in crowd {
        raw.send_with(&load, &[file.as_fd()]);
        let error = raw.error().1;
        assert_eq!(error.code, ErrorCode::Quota as u16, "{}", error.message);
        assert!(error.message.contains("the limit is 0: name a model"), "{}", error.message);
    }
    rig.assert_serves();
    // Nothing is left to close, so the process ends although the file system still hangs.
    rig.signal(Signal::TERM);
    assert!(rig.ended().success());
    assert!(!rig.log_text().contains("do not close"), "{}", rig.log_text());
    far.answer();
}
