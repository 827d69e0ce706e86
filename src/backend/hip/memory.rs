//! What a device's memory is used for, and what things take of it.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::kernels::matmul::planes::planes;
use super::{ALIGN, Device, Owner};
use crate::backend::DeviceMemoryUse;
use crate::tensor::LazyTensor;

/// Bytes that a tensor's copy takes; 0 for a type that has none.
pub fn weight_bytes(tensor: &LazyTensor) -> u64 {
    let shape = tensor.shape();
    let planes = planes(tensor.dtype(), shape.rows(), shape.cols());
    planes.map_or(0, |planes| planes.bytes.next_multiple_of(ALIGN as u64))
}

/// How old an answer of the driver may be: a snapshot is made twenty times a second.
const AGE: Duration = Duration::from_millis(250);

/// What the driver last said is free.
#[derive(Clone, Copy, Debug, Default)]
pub struct Free {
    bytes: u64,
    asked: Option<Instant>,
}

impl Free {
    fn bytes(&mut self, device: &Device) -> u64 {
        if self.asked.is_none_or(|asked| asked.elapsed() >= AGE) && device.alive().is_ok() {
            self.bytes = device.memory().map_or(0, |(free, _)| free);
            self.asked = Some(Instant::now());
        }
        self.bytes
    }
}

/// Who has how much of a device of which at most `limit` bytes may be taken, 0 for all.
pub fn in_use(device: &Device, limit: u64, free: &Cell<Free>) -> DeviceMemoryUse {
    let mut seen = free.get();
    let bytes = seen.bytes(device);
    free.set(seen);
    let ledger = device.ledger();
    let total = device.description().memory_bytes;
    DeviceMemoryUse {
        weights: ledger.of(Owner::Weights),
        kv: ledger.of(Owner::Kv),
        scratch: ledger.of(Owner::Scratch),
        staging: ledger.of(Owner::Staging),
        graphs: ledger.of(Owner::Graphs),
        taken: ledger.driver_bytes,
        budget: if limit == 0 { total } else { limit.min(total) },
        total,
        free: bytes,
    }
}
