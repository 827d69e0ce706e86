//! A missing device, and devices that fail: each in its own process, on the look-alike with a script of faults.

use std::process::Command;
use std::time::Duration;

use rocmforge::backend::BackendError;
use rocmforge::backend::hip::Runtime;
use rocmforge::config::Config;
use rocmforge::daemon::device::{REASON, factory};
use rocmforge::scheduler::JobError;

use crate::common::{skip, tinystories};
use crate::gpu::{is_lookalike, library};
use crate::rig::{Rig, model};

const MARK: &str = "ROCMFORGE_TEST_FAULTS";
const PROMPT: [u32; 4] = [1, 403, 407, 261];

/// True in the child. The parent runs `test` in a child with these settings, panics if it fails, and gets false.
pub fn child(test: &str, settings: &[(&str, &str)]) -> bool {
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let Some(library) = library() else { return false };
    if !Runtime::open(&library).is_ok_and(|runtime| is_lookalike(&runtime)) {
        skip(&format!("{} cannot inject faults", library.display()));
        return false;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env("ROCMFORGE_HIP_LIB", &library)
        .envs(settings.iter().copied())
        .env(MARK, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("running 1 test"), "{test} is not the name of a test: {text}");
    assert!(output.status.success(), "{test} failed in its child: {}\n{text}{errors}", output.status);
    false
}

fn config(text: &str) -> Config {
    toml::from_str(text).unwrap()
}

/// The reason that the CPU backend gives for running instead of a GPU.
fn reason(rig: &Rig) -> String {
    let info = rig.handle().info();
    assert_eq!(info.kind, "cpu");
    info.notes.into_iter().find(|(name, _)| *name == REASON).map(|(_, why)| why).unwrap_or_default()
}

#[test]
fn without_a_runtime_the_cpu_serves_and_says_why() {
    let test = "faults::without_a_runtime_the_cpu_serves_and_says_why";
    if !child(test, &[("ROCMFORGE_HIP_LIB", "/nowhere/libamdhip64.so")]) {
        return;
    }
    let rig = Rig::with(factory(&config("")));
    assert!(reason(&rig).contains("/nowhere/libamdhip64.so"), "{}", reason(&rig));
    assert_eq!(rig.ask(&model(1, &tinystories()), &PROMPT, 3).ids.len(), 3);
    let error = factory(&config("[device]\nbackend = 'hip'"))()
        .err()
        .expect("the factory opened a GPU that does not exist");
    assert!(matches!(error, BackendError::Device { .. }), "{error}");
}

#[test]
fn without_a_device_the_cpu_serves_and_says_why() {
    let test = "faults::without_a_device_the_cpu_serves_and_says_why";
    if !child(test, &[("ROCMFORGE_LOOKALIKE_DEVICES", "0")]) {
        return;
    }
    let rig = Rig::with(factory(&config("")));
    assert!(reason(&rig).contains("sees no device"), "{}", reason(&rig));
    assert_eq!(rig.ask(&model(1, &tinystories()), &PROMPT, 3).ids.len(), 3);
}

#[test]
fn a_device_without_room_leaves_the_work_to_the_cpu() {
    let test = "faults::a_device_without_room_leaves_the_work_to_the_cpu";
    if !child(test, &[("ROCMFORGE_LOOKALIKE_MEMORY", "4194304")]) {
        return;
    }
    let rig = Rig::with(factory(&config("")));
    assert!(reason(&rig).contains("bytes"), "{}", reason(&rig));
    assert_eq!(rig.ask(&model(1, &tinystories()), &PROMPT, 3).ids.len(), 3);
}

/// The device is lost during an answer: that answer fails with the cause, and the CPU serves the next one.
fn lost_in_an_answer(config_text: &str) {
    let rig = Rig::with(factory(&config(config_text)));
    assert_eq!(rig.handle().info().kind, "hip");
    let model = model(1, &tinystories());
    let answer = rig.ask(&model, &PROMPT, 20);
    assert!(
        matches!(answer.end, Err(JobError::Backend(BackendError::DeviceLost { .. }))),
        "{:?}",
        answer.end
    );
    assert!(answer.ids.len() < 20);
    assert_eq!(rig.ask(&model, &PROMPT, 3).ids.len(), 3);
    assert!(!reason(&rig).is_empty());
}

#[test]
fn a_device_lost_in_an_answer_is_replaced_by_the_cpu() {
    let test = "faults::a_device_lost_in_an_answer_is_replaced_by_the_cpu";
    if child(test, &[("ROCMFORGE_LOOKALIKE_FAULTS", "kernel.sample_greedy:4=719")]) {
        lost_in_an_answer("");
    }
}

/// The watchdog must not take the engine for hung before the engine's own patience ends.
#[test]
fn an_engine_that_waits_for_its_device_is_alive() {
    let test = "faults::an_engine_that_waits_for_its_device_is_alive";
    if !child(test, &[("ROCMFORGE_LOOKALIKE_FAULTS", "kernel.sample_greedy:4=hang")]) {
        return;
    }
    let rig = Rig::with(factory(&config("[device]\npatience_s = 4")));
    let asked = rig.submit(&model(1, &tinystories()), &PROMPT, 20);
    // Three steps take a moment; after that only the wait moves the heartbeat.
    std::thread::sleep(Duration::from_secs(2));
    for _ in 0..3 {
        let beat = rig.handle().heartbeat();
        std::thread::sleep(Duration::from_millis(500));
        assert!(rig.handle().heartbeat() > beat);
    }
    assert!(matches!(asked.finish().end, Err(JobError::Backend(BackendError::DeviceLost { .. }))));
}

#[test]
fn a_device_that_hangs_is_replaced_by_the_cpu() {
    let test = "faults::a_device_that_hangs_is_replaced_by_the_cpu";
    if child(test, &[("ROCMFORGE_LOOKALIKE_FAULTS", "kernel.sample_greedy:4=hang")]) {
        lost_in_an_answer("[device]\npatience_s = 2");
    }
}
