//! One tensor's copy on the device: its memory and the progress of its upload. `upload` loads it, `waits` measures how long
//! the device stood still for it.

pub mod arrival;
pub mod upload;
pub mod waits;

use std::sync::Arc;

use crate::backend::hip::weights::arrival::Arrival;
use crate::backend::hip::{Buffer, Event};
use crate::backend::{DeviceMemory, LoadState};
use crate::tensor::DType;

/// The properties of a tensor that its kernels need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    /// Element type; it selects the kernels.
    pub dtype: DType,
    /// Number of outputs.
    pub rows: u32,
    /// Number of inputs.
    pub cols: u32,
}

/// A tensor's copy on the device.
pub struct Weight {
    name: String,
    shape: MatrixShape,
    buffer: Buffer,
    /// Separate from the memory: the uploader drops its buffer reference before it marks the tensor resident.
    arrival: Arc<Arrival<Event>>,
}

impl std::fmt::Debug for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Weight").field("name", &self.name).field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Weight {
    /// A copy in `buffer` that is still to be loaded.
    pub fn new(name: &str, shape: MatrixShape, buffer: Buffer) -> Self {
        Self { name: name.to_owned(), shape, buffer, arrival: Arc::new(Arrival::new()) }
    }

    /// Type and shape.
    pub fn shape(&self) -> MatrixShape {
        self.shape
    }

    /// The copy's memory.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Progress of the upload.
    pub fn arrival(&self) -> &Arc<Arrival<Event>> {
        &self.arrival
    }
}

impl DeviceMemory for Weight {
    fn bytes(&self) -> u64 {
        self.buffer.taken_bytes()
    }

    fn address(&self) -> u64 {
        self.buffer.ptr::<u8>().address()
    }

    fn state(&self) -> LoadState {
        self.arrival.state()
    }

    fn when_decided(&self, done: Box<dyn FnOnce() + Send>) {
        self.arrival.when_decided(done);
    }
}
