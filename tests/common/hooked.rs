//! A backend with a test's own function before some of its calls.

#![allow(dead_code)] // each test binary uses its own part

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use rocmforge::backend::{
    AttentionInput, Backend, BackendError, BackendInfo, DeviceCounters, DeviceMemory, DeviceMemoryUse,
    DeviceTensor, Experts, FfnInput, ModelDims, ModelSlot, Projection, Router, SampleRow, Sampled, StepBatch,
};
use rocmforge::tensor::{DType, LazyTensor};

type BeforeAttention = Box<dyn FnMut(u32) -> Result<(), BackendError> + Send>;
type BeforeClose = Box<dyn FnMut() + Send>;

/// Forwards every call, those with a default too: tests/tidy compares it with the trait.
pub struct Hooked {
    inner: Box<dyn Backend>,
    before_attention: BeforeAttention,
    before_close: BeforeClose,
}

impl Hooked {
    /// `inner`, with `hook` before each layer's attention; what it fails with, the unit fails with.
    pub fn before_attention(
        inner: impl Backend + 'static,
        hook: impl FnMut(u32) -> Result<(), BackendError> + Send + 'static,
    ) -> Self {
        Self { inner: Box::new(inner), before_attention: Box::new(hook), before_close: Box::new(|| ()) }
    }

    /// With `hook` before a model is closed too.
    pub fn before_close(self, hook: impl FnMut() + Send + 'static) -> Self {
        Self { before_close: Box::new(hook), ..self }
    }
}

impl Backend for Hooked {
    fn info(&self) -> BackendInfo {
        self.inner.info()
    }
    fn supports(&self, dtype: DType) -> bool {
        self.inner.supports(dtype)
    }
    fn load_tensor(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        self.inner.load_tensor(tensor)
    }
    fn load_table(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        self.inner.load_table(tensor)
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
    fn weight_bytes(&self) -> fn(&LazyTensor) -> u64 {
        self.inner.weight_bytes()
    }
    fn scratch_bytes(&self) -> fn(&ModelDims) -> u64 {
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
    fn layers_ahead(&self) -> usize {
        self.inner.layers_ahead()
    }
    fn counters(&self) -> DeviceCounters {
        self.inner.counters()
    }
    fn open_model(&mut self, dims: &ModelDims, kv_pages: u32) -> Result<ModelSlot, BackendError> {
        self.inner.open_model(dims, kv_pages)
    }
    fn close_model(&mut self, slot: ModelSlot) {
        (self.before_close)();
        self.inner.close_model(slot);
    }
    fn release_pages(&mut self, slot: ModelSlot, pages: &[u32]) {
        self.inner.release_pages(slot, pages);
    }
    fn kv_page_bytes(&self) -> fn(&ModelDims) -> u64 {
        self.inner.kv_page_bytes()
    }
    fn kv_bytes_max(&self) -> Option<u64> {
        self.inner.kv_bytes_max()
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
        (self.before_attention)(layer)?;
        self.inner.attention(layer)
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
    fn load_wait(&mut self) -> Result<Duration, BackendError> {
        self.inner.load_wait()
    }
    fn logits(&mut self, index: usize) -> Result<Vec<f32>, BackendError> {
        self.inner.logits(index)
    }
}
