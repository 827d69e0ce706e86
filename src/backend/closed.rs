//! Stands in for a lost device until the engine opens another one.

use super::*;

/// Refuses every step. Models and KV pages of the lost device are gone.
#[derive(Debug)]
pub struct Closed;

fn refuse<T>() -> Result<T, BackendError> {
    Err(BackendError::Start { what: "the device", source: cause("it is closed") })
}

impl Backend for Closed {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            kind: "none",
            device: "none".to_owned(),
            isa: "none".to_owned(),
            threads: 0,
            step_rows: 1,
            sequences: 1,
            activations: ActivationType::default(),
            kv: KvType::default(),
            notes: Vec::new(),
        }
    }

    fn refuses(&self) -> fn(&Program) -> Option<BackendError> {
        |_| refuse::<()>().err()
    }

    fn load_tensor(&mut self, _: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        refuse()
    }

    fn open_model(&mut self, _: &Arc<Program>, _: StepLimits, _: u32) -> Result<ModelSlot, BackendError> {
        refuse()
    }

    fn close_model(&mut self, _: ModelSlot) {}

    fn copy_page(&mut self, _: ModelSlot, _: u32, _: u32) -> Result<(), BackendError> {
        refuse()
    }

    fn read_page(&mut self, _: ModelSlot, _: u32) -> Result<Vec<u8>, BackendError> {
        refuse()
    }

    fn write_page(&mut self, _: ModelSlot, _: u32, _: &[u8]) -> Result<(), BackendError> {
        refuse()
    }

    fn read_state(&mut self, _: ModelSlot, _: u32) -> Result<Vec<u8>, BackendError> {
        refuse()
    }

    fn write_state(&mut self, _: ModelSlot, _: u32, _: &[u8]) -> Result<(), BackendError> {
        refuse()
    }

    fn page_layout(&self) -> &'static str {
        "none"
    }

    fn release_pages(&mut self, _: ModelSlot, _: &[u32]) {}

    fn release_states(&mut self, _: ModelSlot, _: &[u32]) {}

    fn kv_page_bytes(&self) -> fn(&Program) -> u64 {
        |_| u64::MAX
    }

    fn kv_bytes(&self, _: ModelSlot) -> u64 {
        0
    }

    fn begin_step(&mut self, _: ModelSlot, _: &StepBatch<'_>) -> Result<(), BackendError> {
        refuse()
    }

    fn resume_step(&mut self, _: ModelSlot) -> Result<(), BackendError> {
        refuse()
    }

    fn run(&mut self, _: u32, _: &Weights<'_>) -> Result<Progress, BackendError> {
        refuse()
    }

    fn sample(&mut self, _: &[SampleRow]) -> Result<Vec<Result<Sampled, BackendError>>, BackendError> {
        refuse()
    }

    fn logits(&mut self, _: usize) -> Result<Vec<f32>, BackendError> {
        refuse()
    }
}
