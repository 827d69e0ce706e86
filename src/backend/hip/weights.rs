//! One tensor's copy on the device: where it lies, and how far its upload is.

use std::sync::Arc;

use super::arrival::Arrival;
use super::{Buffer, Event};
use crate::backend::{DeviceMemory, LoadState};
use crate::tensor::DType;

/// What a tensor's kernels need to know of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// Element type: which kernels take it.
    pub dtype: DType,
    /// Outputs.
    pub rows: u32,
    /// Inputs.
    pub cols: u32,
}

/// A tensor's copy.
pub struct Weight {
    name: String,
    form: Form,
    buffer: Buffer,
    /// Apart from the memory: who brings it lets go of that before he says that it is there.
    arrival: Arc<Arrival<Event>>,
}

impl std::fmt::Debug for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Weight").field("name", &self.name).field("form", &self.form).finish_non_exhaustive()
    }
}

impl Weight {
    /// A copy that is to be, in `buffer`.
    pub fn new(name: &str, form: Form, buffer: Buffer) -> Self {
        Self { name: name.to_owned(), form, buffer, arrival: Arc::new(Arrival::new()) }
    }

    /// What it is.
    pub fn form(&self) -> Form {
        self.form
    }

    /// Where it lies.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// How far its upload is.
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
