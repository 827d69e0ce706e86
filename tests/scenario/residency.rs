//! Models that are kept in the machine's memory: locked and read ahead as configured, refused with numbers, released.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rocmforge_client::wire::{HostMemory, PagesState, Residency};
use rustix::process::Signal;

use crate::changes::hollow_model;
use crate::rig::{PATIENCE, Rig, TINY, maps};

/// Wide enough for two pieces of read-ahead.
const FFN: u32 = 1 << 16;

pub fn host(rig: &Rig, model: &str) -> HostMemory {
    rig.client().show(model, false).unwrap().host
}

/// Waits until the model's host memory is as wanted.
#[track_caller]
pub fn comes(rig: &Rig, model: &str, wanted: impl Fn(&HostMemory) -> bool) -> HostMemory {
    let until = Instant::now() + PATIENCE;
    loop {
        let found = host(rig, model);
        if wanted(&found) {
            return found;
        }
        assert!(Instant::now() < until, "{found:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sum in bytes over the daemon's mappings of a file.
pub fn smaps(rig: &Rig, path: &Path, key: &str) -> u64 {
    let text = maps(rig.pid(), path);
    let lines = text.lines().filter_map(|line| line.strip_prefix(key));
    lines.map(|line| line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10).sum()
}

/// Asks the kernel to drop a file's pages from the page cache.
fn drop_cache(path: &Path) {
    let file = File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

#[test]
fn a_locked_model_stays_when_all_clients_left_and_the_page_cache_was_dropped() {
    let mut rig = Rig::idle();
    let path = rig.model("large");
    let bytes = hollow_model(&path, FFN);
    rig.configure("[host]\nmodels = { large = 'lock' }");
    rig.run();
    // Mapped at start, without a request.
    rig.eventually("the model is mapped and locked", |status| {
        status.models_mapped == 1 && status.host.locked_bytes == bytes
    });
    let told = comes(&rig, "large", |host| host.state == PagesState::Here);
    assert_eq!((told.wanted, told.mapped_bytes, told.read_bytes), (Residency::Lock, bytes, bytes));
    assert!(told.locked_bytes >= bytes && told.resident_bytes >= bytes, "{told:?}");
    assert_eq!(told.cached_bytes, Some(bytes), "the cached bytes of the daemon user's own file are unknown");
    rig.eventually("only this client is connected", |status| status.connections == 1);
    drop_cache(&path);
    let (rss, locked) = (smaps(&rig, &path, "Rss:"), smaps(&rig, &path, "Locked:"));
    println!("of {bytes} bytes {rss} are resident, {locked} locked, after the page cache was dropped");
    assert!(rss * 100 >= bytes * 99 && locked * 100 >= bytes * 99, "{rss} and {locked} of {bytes}");
    // Another configuration releases the lock without a restart.
    rig.configure("[host]\nmodels = { large = 'none' }");
    rig.signal(Signal::HUP);
    let told = comes(&rig, "large", |host| host.state == PagesState::AsTheyCome);
    assert_eq!((told.wanted, told.locked_bytes), (Residency::None, 0));
    rig.eventually("no bytes are counted as locked", |status| status.host.locked_bytes == 0);
    assert_eq!(smaps(&rig, &path, "Locked:"), 0);
    rig.assert_serves();
}

#[test]
fn every_model_is_read_ahead_where_that_is_the_default() {
    let mut rig = Rig::start_with("[host]\nresidency = 'populate'");
    let path = rig.model(TINY);
    let bytes = std::fs::metadata(&path).unwrap().len();
    assert_eq!(smaps(&rig, &path, "Rss:"), 0, "an unused model has resident pages");
    rig.client().load(TINY).unwrap();
    let told = comes(&rig, TINY, |host| host.state == PagesState::Here);
    assert_eq!((told.wanted, told.locked_bytes), (Residency::Populate, 0));
    assert!(told.resident_bytes >= bytes, "{told:?}");
    rig.assert_serves();
}

/// Starts a daemon that may lock 64 KiB.
fn with_little_to_lock(rig: &mut Rig) {
    let mut command = Command::new("/bin/sh");
    // With this capability root could lock more than its limit.
    let drop = if rustix::process::geteuid().is_root() { "setpriv --bounding-set -ipc_lock" } else { "" };
    command.args(["-c", &format!("ulimit -l 64; exec {drop} \"$@\""), "sh"]);
    let daemon = rig.command();
    command.arg(daemon.get_program()).args(daemon.get_args());
    rig.spawn(&mut command);
}

#[test]
fn a_model_that_may_not_be_locked_is_served_and_the_refusal_has_the_numbers() {
    let mut rig = Rig::idle();
    let bytes = std::fs::metadata(rig.model(TINY)).unwrap().len();
    rig.configure("[host]\nresidency = 'lock'");
    with_little_to_lock(&mut rig);
    rig.assert_serves();
    let told = comes(&rig, TINY, |host| host.state == PagesState::Refused);
    assert_eq!((told.wanted, told.locked_bytes), (Residency::Lock, 0));
    let status = rig.client().status().unwrap().host;
    assert_eq!((status.locks_refused, status.locked_bytes), (1, 0));
    for text in [&told.reason, &status.reason, &rig.log_text()] {
        for part in [format!("locking {bytes} bytes"), "65536 bytes".into(), "LimitMEMLOCK".into()] {
            assert!(text.contains(&part), "{text:?} does not contain {part:?}");
        }
    }
    rig.assert_serves();
}

#[test]
fn more_than_the_configuration_allows_is_not_locked() {
    let mut rig = Rig::idle();
    let bytes = hollow_model(&rig.model("large"), FFN);
    rig.configure("[host]\nlock_mib = 8\nmodels = { large = 'lock', tiny = 'lock' }");
    rig.run();
    let told = comes(&rig, "large", |host| host.state == PagesState::Refused);
    assert!(told.reason.contains(&format!("locking {bytes} bytes")), "{}", told.reason);
    assert!(told.reason.contains("host.lock_mib"), "{}", told.reason);
    assert!(told.reason.contains(&format!("{} bytes", 8 << 20)), "{}", told.reason);
    comes(&rig, TINY, |host| host.state == PagesState::Here && host.locked_bytes > 0);
    // The running daemon applies a higher limit.
    rig.configure("[host]\nlock_mib = 1024\nmodels = { large = 'lock', tiny = 'lock' }");
    rig.signal(Signal::HUP);
    comes(&rig, "large", |host| host.state == PagesState::Here && host.locked_bytes >= bytes);
    rig.assert_serves();
}

#[test]
fn unloading_a_model_ends_its_locking() {
    let mut rig = Rig::idle();
    let path = rig.model("large");
    let bytes = hollow_model(&path, 4 * FFN);
    rig.configure("[host]\nresidency = 'lock'");
    rig.run();
    let client = rig.client();
    client.load("large").unwrap();
    rig.eventually("the model is counted as locked", |status| status.host.locked_bytes == bytes);
    assert!(client.unload("large").unwrap().was_mapped);
    rig.eventually("the model is unmapped and unlocked", |status| {
        status.models_mapped == 0 && status.host.locked_bytes == 0
    });
    let until = Instant::now() + PATIENCE;
    while !maps(rig.pid(), &path).is_empty() {
        assert!(Instant::now() < until, "the read-ahead thread keeps the mapping");
        std::thread::sleep(Duration::from_millis(5));
    }
    rig.assert_serves();
}
