//! Memory pressure: idle memory is given back; running and pinned models keep theirs.

use std::fs::File;
use std::io::Write;
use std::time::Instant;

use rocmforge_client::wire::{GenerateRequest, PagesState, SequenceState};

use crate::changes::hollow_model;
use crate::gpu;
use crate::residency::{comes, host, smaps};
use crate::rig::{PATIENCE, Rig, TINY, answer, collect, story};

/// Starts a daemon with this configuration and a pipe that signals pressure; returns the pipe's path.
fn start(rig: &mut Rig, config: &str) -> std::path::PathBuf {
    start_with(rig, config, &[])
}

/// Like [`start`], with more environment variables.
pub fn start_with(
    rig: &mut Rig,
    config: &str,
    environment: &[(&str, &std::path::Path)],
) -> std::path::PathBuf {
    let pipe = rig.dir.path().join("pressure");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    rig.configure(config);
    let mut command = rig.command();
    rig.spawn(command.envs(environment.iter().copied()).env("MEMORY_PRESSURE_WATCH", &pipe));
    pipe
}

/// Signals pressure through that pipe.
pub fn tell(pipe: &std::path::Path) {
    File::options().write(true).open(pipe).unwrap().write_all(b"short").unwrap();
}

#[test]
fn idle_models_give_their_pages_back_and_requests_go_on() {
    let mut rig = Rig::idle();
    let idle = rig.model("idle");
    let bytes = hollow_model(&idle, 1 << 14);
    std::fs::copy(rig.model(TINY), rig.model("pinned")).unwrap();
    std::fs::copy(rig.model(TINY), rig.model("busy")).unwrap();
    let pipe = start(&mut rig, "[host]\nmodels = { idle = 'populate', pinned = 'lock' }");
    let client = rig.client();
    comes(&rig, "idle", |host| host.state == PagesState::Here && host.resident_bytes >= bytes);
    let pinned = comes(&rig, "pinned", |host| host.state == PagesState::Here && host.locked_bytes > 0);
    let request = GenerateRequest { model: "busy".into(), ..story(200) };
    let whole = answer(&client, &request).unwrap();
    let mut running = client.generate(&request).unwrap();
    rig.eventually("the request waits for credit", |_| {
        rig.client().ps().unwrap().sequences.iter().any(|s| s.state == SequenceState::Stalled)
    });
    let before = smaps(&rig, &rig.model("busy"), "Rss:");
    assert_eq!(client.status().unwrap().host.pressure_events, 0);

    let begun = Instant::now();
    tell(&pipe);
    while smaps(&rig, &idle, "Rss:") > 0 {
        assert!(begun.elapsed() < PATIENCE, "idle pages were not given back:\n{}", rig.log_text());
    }
    println!("{} MiB were given back within {:?}", bytes >> 20, begun.elapsed());
    let told = comes(&rig, "idle", |host| host.state == PagesState::GivenBack);
    println!("{:?} bytes are left in the page cache", told.cached_bytes);
    assert_eq!(host(&rig, "pinned").locked_bytes, pinned.locked_bytes, "pinned pages were given back");
    assert_eq!(smaps(&rig, &rig.model("busy"), "Rss:"), before, "a running model lost pages");
    assert_eq!(collect(&mut running).unwrap(), whole, "a running request got another answer");
    let status = client.status().unwrap().host;
    assert_eq!((status.pressure.as_str(), status.pressure_events), (pipe.to_str().unwrap(), 1));
    // A second event with nothing to give back; and the model serves again.
    tell(&pipe);
    rig.eventually("the second pressure event is counted", |status| status.host.pressure_events == 2);
    assert_eq!(answer(&client, &request).unwrap(), whole);
    rig.assert_serves();
}

#[test]
fn idle_models_leave_a_device_and_requests_go_on() {
    let Some(library) = gpu::library() else { return };
    let mut rig = Rig::idle();
    std::fs::copy(rig.model(TINY), rig.model("busy")).unwrap();
    let config = "[device]\nbackend = 'hip'\nupload_threads = 2\n[limits]\nstep_rows = 32";
    let pipe = start_with(&mut rig, config, &[("ROCMFORGE_HIP_LIB", &library)]);
    let client = rig.client();
    // Longer than the first credit.
    let request = GenerateRequest { model: "busy".into(), ..story(40) };
    let whole = answer(&client, &request).unwrap();
    let mut loading = client.preload_all(TINY).unwrap();
    while loading.next_item().unwrap().is_some() {}
    let mut running = client.generate(&request).unwrap();
    rig.eventually("the request waits for credit", |_| {
        rig.client().ps().unwrap().sequences.iter().any(|s| s.state == SequenceState::Stalled)
    });
    let held = |name: &str| {
        let models = client.residency().unwrap().models;
        models.iter().find(|model| model.model == name).map_or(0, |model| model.weight_bytes)
    };
    let (idle, busy) = (held(TINY), held("busy"));
    assert!(idle > 0 && busy > 0, "a model has no weights on the device: idle {idle}, busy {busy}");

    let begun = Instant::now();
    tell(&pipe);
    while held(TINY) > 0 {
        assert!(begun.elapsed() < PATIENCE, "idle weights were not evicted:\n{}", rig.log_text());
    }
    println!("{idle} bytes were evicted within {:?}", begun.elapsed());
    assert_eq!(held("busy"), busy, "a running model lost weights");
    assert_eq!(collect(&mut running).unwrap(), whole, "a running request got another answer");
    rig.eventually("the pressure event is counted", |status| status.host.pressure_events == 1);
    // Once nothing runs, all weights are evicted; and an evicted model loads again.
    tell(&pipe);
    while client.residency().unwrap().devices[0].weight_bytes > 0 {
        assert!(begun.elapsed() < PATIENCE, "idle weights were not evicted:\n{}", rig.log_text());
    }
    assert_eq!(answer(&client, &request).unwrap(), whole);
    rig.assert_serves();
}

#[test]
fn without_the_variable_the_kernels_own_account_is_watched() {
    let mut rig = Rig::idle();
    let mut command = rig.command();
    rig.spawn(command.env_remove("MEMORY_PRESSURE_WATCH"));
    let watched = rig.client().status().unwrap().host.pressure;
    let offered = File::options().write(true).open("/proc/pressure/memory").is_ok();
    assert_eq!(watched.is_empty(), !offered, "{watched:?}:\n{}", rig.log_text());
    assert!(
        !offered || watched.ends_with("memory.pressure") || watched == "/proc/pressure/memory",
        "{watched}"
    );
    rig.assert_serves();
}

#[test]
fn a_file_that_cannot_be_watched_is_told_and_nothing_else_happens() {
    let mut rig = Rig::idle();
    let mut command = rig.command();
    rig.spawn(command.env("MEMORY_PRESSURE_WATCH", "/nowhere/memory.pressure"));
    assert_eq!(rig.client().status().unwrap().host.pressure, "");
    assert!(rig.log_text().contains("memory pressure is not watched: /nowhere/memory.pressure"));
    rig.assert_serves();
}
