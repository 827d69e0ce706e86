//! Use of a device's memory, and the size of what goes there.

use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::backend::DeviceMemoryUse;
use crate::backend::hip::device::sysfs::CardMemory;
use crate::backend::hip::kernels::matmul::planes::planes;
use crate::backend::hip::{ALIGN, Device, Purpose};
use crate::tensor::LazyTensor;

/// Device bytes of a tensor; 0 for types without kernels.
pub fn weight_bytes(tensor: &LazyTensor) -> u64 {
    let shape = tensor.shape();
    let planes = planes(tensor.dtype(), shape.rows(), shape.cols());
    planes.map_or(0, |planes| planes.bytes.next_multiple_of(ALIGN as u64))
}

/// How long the driver's answer is reused: snapshots are taken twenty times a second.
const AGE: Duration = Duration::from_millis(250);

/// Last values reported: free bytes of the driver, bytes in use of the kernel.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    free: u64,
    kernel_used: Option<u64>,
    asked: Option<Instant>,
}

/// Second opinions on a device's memory: the kernel's and the driver's.
#[derive(Debug)]
pub struct Counts {
    card: Option<CardMemory>,
    seen: Cell<Seen>,
}

impl Counts {
    /// Counts of a device; the kernel's files are below `root`.
    pub fn of(device: &Device, root: &Path) -> Self {
        Self { card: CardMemory::find(root, &device.description().pci), seen: Cell::default() }
    }

    fn look(&self, device: &Device) -> Seen {
        let mut seen = self.seen.get();
        if seen.asked.is_none_or(|asked| asked.elapsed() >= AGE) && device.alive().is_ok() {
            let kernel_used = self.card.as_ref().and_then(CardMemory::used);
            let free = device.memory().map_or(0, |(free, _)| free);
            seen = Seen { free, kernel_used, asked: Some(Instant::now()) };
            self.seen.set(seen);
        }
        seen
    }
}

/// Memory use of a device. `limit` caps the bytes to take, 0 for no cap; recorded steps use `graphs` bytes.
pub fn in_use(device: &Device, limit: u64, counts: &Counts, graphs: u64) -> DeviceMemoryUse {
    let seen = counts.look(device);
    let ledger = device.ledger();
    let total = device.description().memory_bytes;
    DeviceMemoryUse {
        weights: ledger.of(Purpose::Weights),
        kv: ledger.of(Purpose::Kv),
        scratch: ledger.of(Purpose::Scratch),
        staging: ledger.of(Purpose::Staging),
        graphs,
        taken: ledger.driver_bytes + graphs,
        budget: if limit == 0 { total } else { limit.min(total) },
        total,
        free: seen.free,
        kernel_used: seen.kernel_used,
    }
}
