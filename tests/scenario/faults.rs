//! Faults of our own: a device that panics in a unit, fails, or hangs. Its request gets a typed error; others go on.
//!
//! These run a daemon inside the test's process, with a device of the test's making.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rocmforge::backend::cpu::{CpuBackend, CpuOptions};
use rocmforge::backend::{
    AttentionInput, Backend, BackendError, BackendInfo, DeviceTensor, Experts, FfnInput, ModelDims,
    ModelSlot, Projection, Router, SampleRow, Sampled, StepBatch,
};
use rocmforge::config::Config;
use rocmforge::daemon::{self, ConfigSource, Daemon, DaemonError, Start};
use rocmforge::tensor::{DType, LazyTensor};
use rocmforge_client::wire::ErrorCode;
use rocmforge_client::{Client, Options};

use crate::common;
use crate::rig::{PATIENCE, TINY, answer, code, story};

/// What the device does to the next step.
const WELL: u32 = 0;
const PANIC: u32 = 1;
const NOT_FINITE: u32 = 2;
const OUT_OF_MEMORY: u32 = 3;
/// A panic that cannot be cleaned up.
const BROKEN: u32 = 4;

/// The CPU, with a fault on demand in the middle of a step.
struct Faulty {
    inner: CpuBackend,
    fault: Arc<AtomicU32>,
}

impl Backend for Faulty {
    fn info(&self) -> BackendInfo {
        self.inner.info()
    }
    fn supports(&self, dtype: DType) -> bool {
        self.inner.supports(dtype)
    }
    fn load_tensor(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        self.inner.load_tensor(tensor)
    }
    fn open_model(&mut self, dims: &ModelDims, kv_pages: u32) -> Result<ModelSlot, BackendError> {
        self.inner.open_model(dims, kv_pages)
    }
    fn close_model(&mut self, slot: ModelSlot) {
        assert_ne!(self.fault.load(Ordering::SeqCst), BROKEN, "a fault in close_model");
        self.inner.close_model(slot);
    }
    fn release_pages(&mut self, slot: ModelSlot, pages: &[u32]) {
        self.inner.release_pages(slot, pages);
    }
    fn kv_page_bytes(&self) -> fn(&ModelDims) -> u64 {
        self.inner.kv_page_bytes()
    }
    fn kv_bytes(&self, slot: ModelSlot) -> u64 {
        self.inner.kv_bytes(slot)
    }
    fn begin_step(&mut self, slot: ModelSlot, batch: &StepBatch<'_>) -> Result<(), BackendError> {
        self.inner.begin_step(slot, batch)
    }
    fn embed(&mut self, table: &DeviceTensor) -> Result<(), BackendError> {
        self.inner.embed(table)
    }
    fn attention_input(&mut self, layer: u32, weights: &AttentionInput<'_>) -> Result<(), BackendError> {
        self.inner.attention_input(layer, weights)
    }
    fn attention(&mut self, layer: u32) -> Result<(), BackendError> {
        assert_ne!(self.fault.load(Ordering::SeqCst), BROKEN, "a fault that stays");
        match self.fault.swap(WELL, Ordering::SeqCst) {
            PANIC => panic!("a fault in attention"),
            NOT_FINITE => Err(BackendError::NotFinite),
            OUT_OF_MEMORY => Err(BackendError::OutOfMemory { what: "a test", need_bytes: 1 << 40 }),
            _ => self.inner.attention(layer),
        }
    }
    fn attention_output(&mut self, weights: &Projection<'_>) -> Result<(), BackendError> {
        self.inner.attention_output(weights)
    }
    fn ffn_input(&mut self, weights: &FfnInput<'_>) -> Result<(), BackendError> {
        self.inner.ffn_input(weights)
    }
    fn ffn_output(&mut self, weights: &Projection<'_>) -> Result<(), BackendError> {
        self.inner.ffn_output(weights)
    }
    fn route(&mut self, layer: u32, weights: &Router<'_>) -> Result<(), BackendError> {
        self.inner.route(layer, weights)
    }
    fn routed(&mut self) -> Result<Vec<u32>, BackendError> {
        self.inner.routed()
    }
    fn experts(&mut self, layer: u32, experts: &Experts<'_>) -> Result<(), BackendError> {
        self.inner.experts(layer, experts)
    }
    fn head(&mut self, norm: &DeviceTensor, output: &DeviceTensor) -> Result<(), BackendError> {
        self.inner.head(norm, output)
    }
    fn sample(&mut self, rows: &[SampleRow]) -> Result<Vec<Result<Sampled, BackendError>>, BackendError> {
        self.inner.sample(rows)
    }
    fn logits(&mut self, index: usize) -> Result<Vec<f32>, BackendError> {
        self.inner.logits(index)
    }
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
        Ok(Box::new(Faulty { inner, fault: Arc::clone(&armed) }))
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
    for (kind, wanted) in cases {
        fault.store(kind, Ordering::SeqCst);
        assert_eq!(code(answer(&client(), &story(64))), wanted as u16);
        assert_eq!(answer(&client(), &story(64)).unwrap(), whole, "the next request gets its answer");
        let device = client().status().unwrap().devices.remove(0);
        assert_eq!((device.sequences_running, device.kv_pages_used), (0, 0), "all pages are back");
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
            return Err(BackendError::Start { what: "the device", why: "it is gone".to_owned() });
        }
        let inner = CpuBackend::new(CpuOptions::default())?;
        Ok(Box::new(Faulty { inner, fault: Arc::clone(&armed) }))
    };
    let client = Client::new(Options {
        socket: config.socket.clone(),
        connect_timeout: PATIENCE,
        absent_timeout: PATIENCE,
        ..Options::default()
    });
    let start = Start { config, source: ConfigSource::default(), listener: None };
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || ended.send(daemon::run(start, factory)));

    answer(&client, &story(8)).unwrap();
    fault.store(BROKEN, Ordering::SeqCst);
    assert_eq!(code(answer(&client, &story(8))), ErrorCode::Internal as u16);
    let error = end.recv_timeout(PATIENCE).expect("the daemon ends by itself").unwrap_err();
    assert!(matches!(error, DaemonError::EngineFailed), "{error}");
    assert_eq!(error.exit_status(), 70);
}
