//! Device faults: a panic, an error or a hang. The affected request gets a typed error; the others continue.
//!
//! These tests run a daemon inside the test's process, on a device made by the test.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rocmforge::backend::cpu::{CpuBackend, CpuOptions};
use rocmforge::backend::{Backend, BackendError};
use rocmforge::config::Config;
use rocmforge::daemon::inherited::Inherited;
use rocmforge::daemon::{self, ConfigSource, Daemon, DaemonError, Start};
use rocmforge_client::wire::ErrorCode;
use rocmforge_client::{Client, Options};

use crate::common;
use crate::hooked::Hooked;
use crate::rig::{PATIENCE, TINY, answer, code, story};

/// Fault of the device's next step.
const WELL: u32 = 0;
const PANIC: u32 = 1;
const NOT_FINITE: u32 = 2;
const OUT_OF_MEMORY: u32 = 3;
/// A panic whose cleanup panics too.
const BROKEN: u32 = 4;

/// The CPU backend, with a fault on demand in the middle of a step.
fn faulty(inner: CpuBackend, fault: &Arc<AtomicU32>) -> Hooked {
    let (step, close) = (Arc::clone(fault), Arc::clone(fault));
    let before_layer = move |_| {
        assert_ne!(step.load(Ordering::SeqCst), BROKEN, "a fault that stays");
        match step.swap(WELL, Ordering::SeqCst) {
            PANIC => panic!("a fault in attention"),
            NOT_FINITE => Err(BackendError::NotFinite),
            OUT_OF_MEMORY => Err(BackendError::OutOfMemory { what: "a test", need_bytes: 1 << 40 }),
            _ => Ok(()),
        }
    };
    Hooked::before_layer(inner, before_layer)
        .before_close(move || assert_ne!(close.load(Ordering::SeqCst), BROKEN, "a fault in close_model"))
}

#[test]
fn a_step_that_panics_or_fails_ends_its_requests_and_the_daemon_serves_on() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(common::tinystories(), dir.path().join(format!("{TINY}.gguf"))).unwrap();
    let config =
        Config { socket: dir.path().join("api.sock"), models: vec![dir.path().into()], ..Config::default() };
    let fault = Arc::new(AtomicU32::new(WELL));
    let armed = Arc::clone(&fault);
    let factory = move || -> Result<Box<dyn Backend>, BackendError> {
        let inner = CpuBackend::new(CpuOptions::default())?;
        Ok(Box::new(faulty(inner, &armed)))
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let daemon = runtime.block_on(Daemon::start(&config, None, factory)).unwrap();
    let client = || {
        Client::new(Options {
            socket: config.socket.clone(),
            connect_timeout: PATIENCE,
            ..Options::default()
        })
    };

    let whole = answer(&client(), &story(64)).unwrap();
    let cases = [
        (PANIC, ErrorCode::Internal),
        (NOT_FINITE, ErrorCode::ModelCorrupt),
        (OUT_OF_MEMORY, ErrorCode::OutOfMemory),
        (PANIC, ErrorCode::Internal),
    ];
    // The keys and values of that answer make room for a step that found none.
    fault.store(OUT_OF_MEMORY, Ordering::SeqCst);
    assert_eq!(answer(&client(), &story(64)).unwrap(), whole);
    assert_eq!(fault.load(Ordering::SeqCst), WELL, "the step did not fail");
    for (kind, wanted) in cases {
        client().evict_weights(Some(TINY)).unwrap(); // so that nothing is left to make room
        fault.store(kind, Ordering::SeqCst);
        assert_eq!(code(answer(&client(), &story(64))), wanted as u16);
        assert_eq!(answer(&client(), &story(64)).unwrap(), whole, "the next request got another answer");
        let device = client().status().unwrap().devices.remove(0);
        assert_eq!((device.sequences_running, device.kv_pages_used), (0, 0), "pages were not freed");
    }
    runtime.block_on(daemon.stop()).unwrap();
    assert!(!config.socket.exists());
}

#[test]
fn a_daemon_that_lost_its_device_ends_with_a_status() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(common::tinystories(), dir.path().join(format!("{TINY}.gguf"))).unwrap();
    let config =
        Config { socket: dir.path().join("api.sock"), models: vec![dir.path().into()], ..Config::default() };
    let fault = Arc::new(AtomicU32::new(WELL));
    let (armed, opened) = (Arc::clone(&fault), AtomicU32::new(0));
    let factory = move || -> Result<Box<dyn Backend>, BackendError> {
        if opened.fetch_add(1, Ordering::SeqCst) > 0 {
            return Err(BackendError::Start {
                what: "the device",
                source: rocmforge::backend::cause("it is gone"),
            });
        }
        let inner = CpuBackend::new(CpuOptions::default())?;
        Ok(Box::new(faulty(inner, &armed)))
    };
    let client = Client::new(Options {
        socket: config.socket.clone(),
        connect_timeout: PATIENCE,
        absent_timeout: PATIENCE,
        ..Options::default()
    });
    let start = Start { config, source: ConfigSource::default(), inherited: Inherited::default() };
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || ended.send(daemon::run(start, factory)));

    answer(&client, &story(8)).unwrap();
    fault.store(BROKEN, Ordering::SeqCst);
    assert_eq!(code(answer(&client, &story(8))), ErrorCode::Internal as u16);
    let error = end.recv_timeout(PATIENCE).expect("the daemon did not end").unwrap_err();
    assert!(matches!(error, DaemonError::EngineFailed), "{error}");
    assert_eq!(error.exit_status(), 70);
}
