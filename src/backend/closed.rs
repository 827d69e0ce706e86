//! No device: what stands in the place of one that was lost, until another is opened.

use super::*;

/// Refuses every step. What was open on the device before is gone.
#[derive(Debug)]
pub struct Closed;

fn refuse<T>() -> Result<T, BackendError> {
    Err(BackendError::Start { what: "the device", why: "it is closed".to_owned() })
}

impl Backend for Closed {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            kind: "none",
            device: "none".to_owned(),
            isa: "none".to_owned(),
            threads: 0,
            step_rows: 1,
            activations: Activations::default(),
            kv: KvType::default(),
            notes: Vec::new(),
        }
    }

    fn supports(&self, _: crate::tensor::DType) -> bool {
        false
    }

    fn load_tensor(&mut self, _: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        refuse()
    }

    fn open_model(&mut self, _: &ModelDims, _: u32) -> Result<ModelSlot, BackendError> {
        refuse()
    }

    fn close_model(&mut self, _: ModelSlot) {}

    fn release_pages(&mut self, _: ModelSlot, _: &[u32]) {}

    fn kv_page_bytes(&self) -> fn(&ModelDims) -> u64 {
        |_| u64::MAX
    }

    fn kv_bytes(&self, _: ModelSlot) -> u64 {
        0
    }

    fn begin_step(&mut self, _: ModelSlot, _: &StepBatch<'_>) -> Result<(), BackendError> {
        refuse()
    }

    fn embed(&mut self, _: &DeviceTensor) -> Result<(), BackendError> {
        refuse()
    }

    fn attention_input(&mut self, _: u32, _: &AttentionInput<'_>) -> Result<(), BackendError> {
        refuse()
    }

    fn attention(&mut self, _: u32) -> Result<(), BackendError> {
        refuse()
    }

    fn attention_output(&mut self, _: &Projection<'_>) -> Result<(), BackendError> {
        refuse()
    }

    fn ffn_input(&mut self, _: &FfnInput<'_>) -> Result<(), BackendError> {
        refuse()
    }

    fn ffn_output(&mut self, _: &Projection<'_>) -> Result<(), BackendError> {
        refuse()
    }

    fn route(&mut self, _: u32, _: &Router<'_>) -> Result<(), BackendError> {
        refuse()
    }

    fn routed(&mut self) -> Result<Vec<u32>, BackendError> {
        refuse()
    }

    fn experts(&mut self, _: u32, _: &Experts<'_>) -> Result<(), BackendError> {
        refuse()
    }

    fn head(&mut self, _: &DeviceTensor, _: &DeviceTensor) -> Result<(), BackendError> {
        refuse()
    }

    fn sample(&mut self, _: &[SampleRow]) -> Result<Vec<Result<Sampled, BackendError>>, BackendError> {
        refuse()
    }

    fn logits(&mut self, _: usize) -> Result<Vec<f32>, BackendError> {
        refuse()
    }
}
