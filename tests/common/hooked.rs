//! A backend that calls a test's function before some of its calls.

#![allow(dead_code)] // each test binary uses a part

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use rocmforge::backend::{
    Backend, BackendError, BackendInfo, DeviceCounters, DeviceMemory, DeviceMemoryUse, DeviceTensor,
    ModelSlot, Progress, SampleRow, Sampled, ScratchBytes, StepBatch, StepLimits, Weights,
};
use rocmforge::program::Program;
use rocmforge::tensor::LazyTensor;

type BeforeLayer = Box<dyn FnMut(u32) -> Result<(), BackendError> + Send>;
type BeforeClose = Box<dyn FnMut() + Send>;

/// Forwards every call, also those with a default body: xtask/tests/tidy compares it with the trait.
pub struct Hooked {
    inner: Box<dyn Backend>,
    before_layer: BeforeLayer,
    before_close: BeforeClose,
    /// Layers of the model opened last.
    layers: u32,
}

impl Hooked {
    /// Wraps `inner` with `hook` before each layer. An error of the hook is the layer's error.
    pub fn before_layer(
        inner: impl Backend + 'static,
        hook: impl FnMut(u32) -> Result<(), BackendError> + Send + 'static,
    ) -> Self {
        Self {
            inner: Box::new(inner),
            before_layer: Box::new(hook),
            before_close: Box::new(|| ()),
            layers: 0,
        }
    }

    /// Also calls `hook` before a model is closed.
    pub fn before_close(self, hook: impl FnMut() + Send + 'static) -> Self {
        Self { before_close: Box::new(hook), ..self }
    }
}

impl Backend for Hooked {
    fn info(&self) -> BackendInfo {
        self.inner.info()
    }
    fn refuses(&self) -> fn(&Program) -> Option<BackendError> {
        self.inner.refuses()
    }
    fn load_tensor(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        self.inner.load_tensor(tensor)
    }
    fn retire(&mut self) -> Result<(), BackendError> {
        self.inner.retire()
    }
    fn until_decided(&mut self, load: &Arc<dyn DeviceMemory>) -> Result<(), BackendError> {
        self.inner.until_decided(load)
    }
    fn watch_loads(&mut self, under_way: bool) -> Result<(), BackendError> {
        self.inner.watch_loads(under_way)
    }
    fn reads_in_place(&self) -> bool {
        self.inner.reads_in_place()
    }
    fn weight_bytes(&self) -> fn(&LazyTensor) -> u64 {
        self.inner.weight_bytes()
    }
    fn row_bytes(&self) -> fn(&Program) -> u64 {
        self.inner.row_bytes()
    }

    fn scratch_bytes(&self) -> ScratchBytes {
        self.inner.scratch_bytes()
    }
    fn memory(&self) -> DeviceMemoryUse {
        self.inner.memory()
    }
    fn set_heartbeat(&mut self, heartbeat: Arc<AtomicU64>) {
        self.inner.set_heartbeat(heartbeat);
    }
    fn trim(&mut self) {
        self.inner.trim();
    }
    fn parts_ahead(&self) -> usize {
        self.inner.parts_ahead()
    }
    fn counters(&self) -> DeviceCounters {
        self.inner.counters()
    }
    fn open_model(
        &mut self,
        program: &Arc<Program>,
        limits: StepLimits,
        kv_pages: u32,
    ) -> Result<ModelSlot, BackendError> {
        self.layers = program.layer_count();
        self.inner.open_model(program, limits, kv_pages)
    }
    fn close_model(&mut self, slot: ModelSlot) {
        (self.before_close)();
        self.inner.close_model(slot);
    }
    fn read_page(&mut self, slot: ModelSlot, page: u32) -> Result<Vec<u8>, BackendError> {
        self.inner.read_page(slot, page)
    }

    fn write_page(&mut self, slot: ModelSlot, page: u32, bytes: &[u8]) -> Result<(), BackendError> {
        self.inner.write_page(slot, page, bytes)
    }

    fn read_state(&mut self, slot: ModelSlot, state: u32) -> Result<Vec<u8>, BackendError> {
        self.inner.read_state(slot, state)
    }

    fn write_state(&mut self, slot: ModelSlot, state: u32, bytes: &[u8]) -> Result<(), BackendError> {
        self.inner.write_state(slot, state, bytes)
    }

    fn page_layout(&self) -> &'static str {
        self.inner.page_layout()
    }

    fn copy_page(&mut self, slot: ModelSlot, from: u32, to: u32) -> Result<(), BackendError> {
        self.inner.copy_page(slot, from, to)
    }
    fn release_pages(&mut self, slot: ModelSlot, pages: &[u32]) {
        self.inner.release_pages(slot, pages);
    }
    fn release_states(&mut self, slot: ModelSlot, states: &[u32]) {
        self.inner.release_states(slot, states);
    }
    fn recurrent_bytes(&self) -> fn(&Program) -> u64 {
        self.inner.recurrent_bytes()
    }
    fn kv_page_bytes(&self) -> fn(&Program) -> u64 {
        self.inner.kv_page_bytes()
    }
    fn kv_bytes_max(&self) -> Option<u64> {
        self.inner.kv_bytes_max()
    }
    fn kv_bytes(&self, slot: ModelSlot) -> u64 {
        self.inner.kv_bytes(slot)
    }
    fn open_bytes(&self, slot: ModelSlot) -> u64 {
        self.inner.open_bytes(slot)
    }
    fn begin_step(&mut self, slot: ModelSlot, batch: &StepBatch<'_>) -> Result<(), BackendError> {
        self.inner.begin_step(slot, batch)
    }
    fn suspend_step(&mut self) -> Result<(), BackendError> {
        self.inner.suspend_step()
    }
    fn begin_beside(&mut self, slot: ModelSlot, batch: &StepBatch<'_>) -> Result<(), BackendError> {
        self.inner.begin_beside(slot, batch)
    }
    fn resume_beside(&mut self, slot: ModelSlot) -> Result<(), BackendError> {
        self.inner.resume_beside(slot)
    }
    fn release_values(&mut self, slot: ModelSlot) {
        self.inner.release_values(slot);
    }
    fn resume_step(&mut self, slot: ModelSlot) -> Result<(), BackendError> {
        self.inner.resume_step(slot)
    }
    fn run(&mut self, part: u32, weights: &Weights<'_>) -> Result<Progress, BackendError> {
        if (1..=self.layers).contains(&part) {
            (self.before_layer)(part - 1)?;
        }
        self.inner.run(part, weights)
    }
    fn sample(&mut self, rows: &[SampleRow]) -> Result<Vec<Result<Sampled, BackendError>>, BackendError> {
        self.inner.sample(rows)
    }
    fn finish_step(&mut self) -> Result<(), BackendError> {
        self.inner.finish_step()
    }
    fn load_wait(&mut self) -> Result<Duration, BackendError> {
        self.inner.load_wait()
    }
    fn last_rows(&mut self, rows: Range<u32>) -> Result<Vec<f32>, BackendError> {
        self.inner.last_rows(rows)
    }
    fn logits(&mut self, index: usize) -> Result<Vec<f32>, BackendError> {
        self.inner.logits(index)
    }
}
