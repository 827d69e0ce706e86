//! GPUs that are missing, too old, too small, lost or hung: the daemon reports it and lives, and the CPU serves if
//! allowed.
//!
//! The look-alike plays the GPU in each test.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rocmforge::backend::hip::Runtime;
use rocmforge_client::wire::{ErrorClass, ErrorCode, EventKind, WireError};

use crate::common;
use crate::gpu;
use crate::rig::{Rig, TINY, answer, refusal, story};

const ANY: &str = "";
const ONLY_HIP: &str = "[device]\nbackend = 'hip'\n";

/// A daemon with this configuration and environment, on this runtime.
fn start(config: &str, library: &Path, settings: &[(&str, &str)]) -> Rig {
    let mut rig = Rig::idle();
    rig.configure(config);
    let mut command = rig.command();
    command.env("ROCMFORGE_HIP_LIB", library).envs(settings.iter().copied());
    rig.spawn(&mut command);
    rig
}

/// The look-alike; `None` after reporting that it is missing or that another runtime was requested.
fn lookalike() -> Option<PathBuf> {
    let library = gpu::library()?;
    if Runtime::open(&library).is_ok_and(|runtime| gpu::is_lookalike(&runtime)) {
        return Some(library);
    }
    common::skip(&format!("{} cannot inject faults", library.display()));
    None
}

/// Kind of the device and the reason for not using a GPU.
fn device(rig: &Rig) -> (String, String) {
    let device = rig.client().status().unwrap().devices.remove(0);
    let why = device.notes().into_iter().find(|(name, _)| *name == "no GPU");
    let why = why.map(|(_, why)| why.to_owned()).unwrap_or_default();
    (device.kind, why)
}

/// With `auto` the CPU serves and states the reason; with `hip` the daemon logs the reason and ends.
#[track_caller]
fn check_unusable(library: &Path, settings: &[(&str, &str)], words: &[&str]) {
    let mut rig = start(ANY, library, settings);
    rig.assert_serves();
    let (kind, why) = device(&rig);
    assert_eq!(kind, "cpu");
    assert!(words.iter().all(|word| why.contains(word)), "{why:?} does not say {words:?}");

    let mut rig = start(ONLY_HIP, library, settings);
    let status = rig.ended();
    assert!(!status.success(), "a daemon without its device ended with success");
    let log = rig.log_text();
    assert!(words.iter().all(|word| log.contains(word)), "{log:?} does not say {words:?}");
}

#[test]
fn without_a_library() {
    check_unusable(Path::new("/nowhere/libamdhip64.so"), &[], &["/nowhere/libamdhip64.so", "libamdhip64"]);
}

/// A library that has the first function and no other.
#[test]
fn with_a_library_that_is_too_old() {
    let dir = tempfile::tempdir().unwrap();
    let (source, library) = (dir.path().join("old.c"), dir.path().join("libamdhip64.so.4"));
    std::fs::write(&source, "int hipInit(unsigned flags) { return 0; }\n").unwrap();
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).stdin(Stdio::null());
    let output = command.output().expect("cc cannot be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    check_unusable(&library, &[], &["libamdhip64.so.4", "has no function", "too old", "5.2"]);
}

#[test]
fn with_a_library_that_sees_no_device() {
    let Some(library) = lookalike() else { return };
    check_unusable(&library, &[("ROCMFORGE_LOOKALIKE_DEVICES", "0")], &["sees no device"]);
}

#[test]
fn with_a_device_that_has_too_little_memory() {
    let Some(library) = lookalike() else { return };
    check_unusable(&library, &[("ROCMFORGE_LOOKALIKE_MEMORY", "4194304")], &["bytes"]);
}

/// SmolLM2, of 90 MB, beside the small model on a device of `bytes` bytes.
fn beside_a_large_model(library: &Path, large: &Path, bytes: u64) -> Rig {
    let config = "[device]\nbackend = 'hip'\nupload_threads = 1\n[limits]\nstep_rows = 32\nrunning = 4\n";
    let mut rig = start(config, library, &[("ROCMFORGE_LOOKALIKE_MEMORY", &bytes.to_string())]);
    rig.assert_serves();
    rig.client().load_file(large, Some("large")).unwrap();
    rig
}

#[test]
fn a_model_that_does_not_fit_the_device_is_refused_and_others_are_served() {
    let (Some(library), Some(large)) = (lookalike(), common::smollm2()) else { return };
    // Its head does not fit, even if everything else is evicted.
    let mut rig = beside_a_large_model(&library, &large, 32 << 20);
    let request = rocmforge_client::wire::GenerateRequest { model: "large".into(), ..story(4) };
    for _ in 0..2 {
        let error = refusal(answer(&rig.client(), &request));
        assert_eq!(error.code, ErrorCode::OutOfMemory as u16, "{error:?}");
        assert!(
            error.message.contains("of the device's memory") && error.message.contains("free"),
            "{error:?}"
        );
        rig.assert_serves();
    }
    assert_eq!(device(&rig).0, "hip");
}

#[test]
fn a_model_larger_than_the_device_streams_through_it_and_others_are_served() {
    let (Some(library), Some(large)) = (lookalike(), common::smollm2()) else { return };
    let mut rig = beside_a_large_model(&library, &large, 64 << 20);
    let request = rocmforge_client::wire::GenerateRequest { model: "large".into(), ..story(2) };
    let streamed = answer(&rig.client(), &request).unwrap();
    rig.assert_serves();
    let mut roomy = beside_a_large_model(&library, &large, 1 << 30);
    assert_eq!(answer(&roomy.client(), &request).unwrap().ids, streamed.ids);
    roomy.assert_serves();
}

/// Runs an answer during which the device fails; returns the error, which comes after some tokens.
fn broken_answer(rig: &Rig) -> WireError {
    let client = rig.client();
    let mut generation = client.generate(&story(40)).unwrap();
    let mut ids = Vec::new();
    loop {
        match generation.next_item() {
            Ok(Some(item)) => ids.extend(item.ids),
            Ok(None) => panic!("the device did not fail"),
            Err(error) => {
                assert!(!ids.is_empty() && ids.len() < 40, "the device failed after {} tokens", ids.len());
                return refusal(Err::<(), _>(error));
            }
        }
    }
}

/// The device fails during an answer; the event, the error and the status then contain `words`.
#[track_caller]
fn check_broken(settings: &[(&str, &str)], more: &str, words: &[&str]) {
    let Some(library) = lookalike() else { return };
    let mut rig = start(&format!("[device]\n{more}\n"), &library, settings);
    assert_eq!(device(&rig).0, "hip");
    let watcher = rig.client();
    let mut events = watcher.events().unwrap();
    events.next_item().unwrap().expect("no first item came");
    let error = broken_answer(&rig);
    assert_eq!(error.code, ErrorCode::DeviceFailed as u16, "{error:?}");
    let told = events
        .find_map(|item| item.unwrap().events.into_iter().find(|event| event.kind == EventKind::DeviceLost));
    let told = told.expect("the event stream ended");
    assert!(words.iter().all(|word| told.text.contains(word)), "{told:?} does not say {words:?}");
    assert!(told.text.contains("; the engine continues on "), "{told:?}");
    assert_eq!((told.id, told.model.as_str(), told.device_bytes), (0, "", 0), "the event blames a model");
    assert_eq!(error.class(), Some(ErrorClass::Device));
    assert!(words.iter().all(|word| error.message.contains(word)), "{error:?} does not say {words:?}");
    rig.assert_serves();
    let (kind, why) = device(&rig);
    assert_eq!(kind, "cpu");
    assert!(words.iter().all(|word| why.contains(word)), "{why:?} does not say {words:?}");
    assert!(rig.client().list().unwrap().models.iter().any(|model| model.name == TINY));

    let mut rig = start(&format!("[device]\nbackend = 'hip'\n{more}\n"), &library, settings);
    assert_eq!(broken_answer(&rig).code, ErrorCode::DeviceFailed as u16);
    assert_eq!(rig.ended().code(), Some(70), "the exit status does not ask for a restart");
}

#[test]
fn a_device_lost_in_an_answer() {
    check_broken(&[("ROCMFORGE_LOOKALIKE_FAULTS", "kernel.sample_greedy:6=719")], "", &["719"]);
}

/// No step waits for these weights: the requesting client gets an error all the same, and other clients are served.
#[test]
fn a_device_that_hangs_while_weights_are_brought() {
    let Some(library) = lookalike() else { return };
    let settings = [("ROCMFORGE_LOOKALIKE_FAULTS", "kernel.repack_rows:3=hang")];
    let mut rig = start("[device]\nbackend = 'auto'\npatience_s = 2\n", &library, &settings);
    assert_eq!(device(&rig).0, "hip");
    let loading = rig.client().preload_all(TINY).and_then(|mut loading| {
        while loading.next_item()?.is_some() {}
        Ok(())
    });
    let error = refusal(loading);
    assert_eq!(error.code, ErrorCode::DeviceFailed as u16, "{error:?}");
    assert!(error.message.contains("no answer for 2 s"), "{error:?}");
    rig.assert_serves();
    assert_eq!(device(&rig).0, "cpu");
}

#[test]
fn a_device_that_hangs_in_an_answer() {
    let settings = [("ROCMFORGE_LOOKALIKE_FAULTS", "kernel.sample_greedy:6=hang")];
    check_broken(&settings, "patience_s = 2", &["no answer for 2 s"]);
}
