//! One tensor's way to the device, in pieces.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::super::kernels::matmul::choice::repack;
use super::super::kernels::matmul::{Repack, RepackRows};
use super::super::weights::Weight;
use super::super::{Buffer, Device, Grid, HipError, Stream};
use super::{BUFFER_BYTES, Ended, Shared, Streams};
use crate::backend::BackendError;
use crate::lock::{Mutex, Rank};
use crate::tensor::LazyTensor;

/// Values of a group: what layout kernels count in.
const GROUP: u64 = 32;

/// A tensor's load.
pub struct Job {
    weight: Arc<Weight>,
    tensor: LazyTensor,
    /// Bytes of a unit that may not be cut: a block of a quantised type, a row of a float type.
    unit_bytes: u64,
    piece_units: u64,
    units: u64,
    /// Units handed out to staging threads.
    taken: AtomicU64,
    /// Units that were submitted or given up.
    ended: AtomicU64,
    failed: Mutex<Option<BackendError>>,
}

/// A part of a tensor that fits a pinned buffer.
pub struct Piece {
    pub job: Arc<Job>,
    /// First unit, and how many.
    first: u64,
    units: u64,
}

impl Job {
    /// The load of `tensor` into `weight`.
    ///
    /// # Errors
    /// [`BackendError::Upload`] when a row is longer than a pinned buffer.
    pub fn new(tensor: &LazyTensor, weight: Arc<Weight>) -> Result<Self, BackendError> {
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        let unit_values = if repack(dtype).is_some() { dtype.block_len() as u64 } else { shape.cols() };
        let unit_bytes = dtype.row_bytes(unit_values).filter(|b| (1..=BUFFER_BYTES as u64).contains(b));
        let unit_bytes = unit_bytes.ok_or_else(|| BackendError::Upload {
            tensor: tensor.name().to_owned(),
            why: format!("a row of it is longer than {BUFFER_BYTES} bytes"),
        })?;
        Ok(Self {
            weight,
            tensor: tensor.clone(),
            unit_bytes,
            piece_units: BUFFER_BYTES as u64 / unit_bytes,
            units: shape.elements() / unit_values,
            taken: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            failed: Mutex::new(Rank::UploadJob, None),
        })
    }

    /// The next piece and whether it is the last. Called under the queue's lock.
    pub fn next_piece(self: &Arc<Self>) -> (Piece, bool) {
        let first = self.taken.fetch_add(self.piece_units, Ordering::Relaxed);
        let end = first.saturating_add(self.piece_units).min(self.units);
        let piece = Piece { job: Arc::clone(self), first, units: end.saturating_sub(first) };
        (piece, end == self.units)
    }

    /// Gives up what no thread has taken.
    pub(super) fn give_up(self: &Arc<Self>, shared: &Shared, why: &str) {
        let first = self.taken.load(Ordering::Relaxed);
        let piece = Piece { job: Arc::clone(self), first, units: self.units.saturating_sub(first) };
        piece.end(shared, &shared.streams.lock(), Err(self.failure(why.to_owned())));
    }

    fn failure(&self, why: String) -> BackendError {
        BackendError::Upload { tensor: self.tensor.name().to_owned(), why }
    }
}

impl Piece {
    /// Its bytes.
    pub fn bytes(&self) -> usize {
        (self.units * self.job.unit_bytes) as usize // at most BUFFER_BYTES
    }

    /// Reads it into the first of `out`'s bytes.
    ///
    /// # Errors
    /// [`BackendError::Upload`]: the file ends before, or cannot be read; and of other pieces of the tensor.
    pub fn read(&self, out: &mut [u8]) -> Result<(), BackendError> {
        if let Some(error) = &*self.job.failed.lock() {
            return Err(error.clone());
        }
        let tensor = &self.job.tensor;
        let offset = tensor.range().start + self.first * self.job.unit_bytes;
        let out = out.get_mut(..self.bytes()).unwrap_or_default();
        tensor.file().read_at(offset, out).map_err(|error| self.job.failure(error.to_string()))
    }

    /// Starts the kernel that makes planes of the bytes in `slot`.
    ///
    /// # Errors
    /// [`HipError`].
    pub fn lay_out(&self, device: &Device, stream: &Stream, slot: &Buffer) -> Result<(), HipError> {
        let (job, planes) = (&self.job, self.job.weight.buffer());
        let dtype = job.tensor.dtype();
        let blocks = |threads: u64| Grid::x(threads.div_ceil(256).clamp(1, 4096) as u32);
        let Some(kernel) = repack(dtype) else {
            let row_bytes = job.unit_bytes;
            let arguments = RepackRows {
                file: slot.ptr(),
                planes: planes.ptr(),
                first: self.first,
                rows: self.units,
                row_bytes,
            };
            let grid = blocks(self.units * row_bytes.div_ceil(16));
            return device.launch(stream, RepackRows::repack_rows, grid, &arguments);
        };
        let groups = dtype.block_len() as u64 / GROUP;
        let arguments = Repack {
            file: slot.ptr(),
            planes: planes.ptr(),
            weights: job.tensor.shape().elements(),
            first: self.first * groups,
            groups: self.units * groups,
        };
        device.launch(stream, kernel, blocks(self.units * groups), &arguments)
    }

    /// Counts it as submitted or given up; behind the last one an event is recorded.
    pub(super) fn end(self, shared: &Shared, streams: &Streams, result: Result<(), BackendError>) {
        let job = self.job;
        if let Err(error) = result {
            job.failed.lock().get_or_insert(error);
        }
        if job.ended.fetch_add(self.units, Ordering::AcqRel) + self.units < job.units {
            return;
        }
        let failed = job.failed.lock().take();
        let event = shared.device.event(false).and_then(|event| {
            streams.layout.record(&event)?;
            Ok(Arc::new(event))
        });
        let (event, failed) = match (event, failed) {
            (Ok(event), None) => {
                job.weight.set_submitted(Arc::clone(&event));
                (Some(event), None)
            }
            (Ok(event), failed) => (Some(event), failed),
            (Err(error), failed) => (None, Some(failed.unwrap_or_else(|| error.into()))),
        };
        // Decided there and not here: who waits is called, and that may take any lock.
        let (weight, result) = (Arc::clone(&job.weight), failed.map_or(Ok(()), Err));
        let _ = streams.ended.send(Ended { weight, event, result }); // nobody listens when the device closes
    }
}
