//! Room of one model for the rows of a step between kernels: the slots that planes share, and what attention and products of
//! many rows need beside them.

use super::step::bind::{Bound, PlaneId};
use super::{ALIGN, Buffer, Device, DevicePtr, Owner, Stream};
use crate::backend::{Activations, BackendError};
use crate::program::Rows;

/// Rows whose splits of decode attention are worked on at a time: bounds what partial results take.
pub const ATTENTION_ROWS: usize = 8;

/// Most splits of a row's tokens (`SPLITS_MAX` of kernels/attention/splits.h).
pub const SPLITS_MAX: u32 = 128;

/// Rows from which on weights are expanded for a matrix product: below, reading them once for every eight rows is faster.
pub const MATRIX_ROWS: usize = 64;

/// Bytes of weights that are expanded at a time for many rows: they stay in the last level of cache until they are multiplied.
pub const SLAB_BYTES: usize = 32 << 20;

/// The same for fewer than [`WIDE_ROWS`] rows, where a matrix cut into slabs would leave most of a device idle.
const SLAB_BYTES_MAX: usize = 128 << 20;

/// Rows from which on a slab's product fills a large device.
pub const WIDE_ROWS: u32 = 512;

/// Rows that a step recorded for replays may have. Room for as many there always is.
pub const GRAPH_ROWS: usize = 8;

/// Values of a row in whole groups: what quantised weights' rows always are.
pub fn padded(cols: usize) -> usize {
    cols.next_multiple_of(32)
}

/// A model's room.
#[derive(Debug)]
pub struct Scratch {
    slots: Vec<Buffer>,
    /// Where each plane starts.
    planes: Vec<DevicePtr<u8>>,
    /// Partial results of decode attention.
    pub part_values: Buffer,
    /// Their greatest scores and sums.
    pub part_stats: Buffer,
    /// How many splits have arrived; 0 between launches.
    pub counters: Buffer,
    /// 0, 1, 2, ...
    pub row_numbers: Buffer,
    /// Expanded weights, f16.
    pub slab: Buffer,
}

/// Bytes of the buffers of [`Scratch`]; `usize::MAX` for one that no address space holds.
struct Sizes {
    slots: Vec<usize>,
    /// Those after the slots, in their order.
    others: [usize; 5],
}

impl Sizes {
    fn of(bound: &Bound) -> Self {
        let rows = bound.rows(Rows::All);
        let words = |count: usize| count.saturating_mul(4);
        let splits = SPLITS_MAX as usize;
        let slot = |slot: &super::step::bind::Slot| slot.row_bytes.saturating_mul(bound.rows(slot.rows));
        let expands = rows >= MATRIX_ROWS && bound.modes.activations == Activations::Int8;
        let slab = bound.room.matrix.saturating_mul(2).clamp(SLAB_BYTES, SLAB_BYTES_MAX);
        Self {
            slots: bound.slots.iter().map(slot).collect(),
            others: [
                words(bound.room.head_values.saturating_mul(splits)),
                words(bound.room.heads.saturating_mul(2 * splits)),
                words(bound.room.heads),
                words(rows),
                if expands { slab } else { 0 },
            ],
        }
    }
}

/// What [`Scratch::new`] takes of the device; `u64::MAX` when there can be no such room.
pub fn bytes(bound: &Bound) -> u64 {
    // An empty buffer takes a unit too: it has an address.
    let taken = |bytes: usize| bytes.max(1).checked_next_multiple_of(ALIGN).map(|bytes| bytes as u64);
    let sizes = Sizes::of(bound);
    let mut all = sizes.slots.into_iter().chain(sizes.others);
    all.try_fold(0u64, |all, bytes| all.checked_add(taken(bytes)?)).unwrap_or(u64::MAX)
}

impl Scratch {
    /// Room for steps of a program.
    ///
    /// # Errors
    /// [`BackendError`] when the device has not as much.
    pub fn new(device: &Device, stream: &Stream, bound: &Bound) -> Result<Self, BackendError> {
        let sizes = Sizes::of(bound);
        let slots = sizes.slots.into_iter().map(|bytes| take(device, bytes));
        let slots = slots.collect::<Result<Vec<Buffer>, _>>()?;
        let place = |slot: &u32| slots.get(*slot as usize).map_or(DevicePtr::NULL, Buffer::ptr);
        let [values, stats, counters, numbers, slab] = sizes.others;
        let scratch = Self {
            planes: bound.places.iter().map(place).collect(),
            slots,
            part_values: take(device, values)?,
            part_stats: take(device, stats)?,
            counters: take(device, counters)?,
            row_numbers: take(device, numbers)?,
            slab: take(device, slab)?,
        };
        stream.fill(scratch.counters.all(), 0)?;
        let numbers: Vec<u32> = (0..bound.rows(Rows::All) as u32).collect();
        stream.upload(scratch.row_numbers.all(), numbers.as_slice())?;
        Ok(scratch)
    }

    /// Where a plane starts.
    pub fn plane(&self, plane: PlaneId) -> DevicePtr<u8> {
        // Planes are those of the program that the room was made for.
        self.planes.get(plane.0 as usize).copied().unwrap_or(DevicePtr::NULL)
    }

    /// The memory that a plane has while it lives.
    ///
    /// # Errors
    /// [`BackendError::Internal`] for a plane of another program.
    pub fn buffer(&self, bound: &Bound, plane: PlaneId) -> Result<&Buffer, BackendError> {
        let slot = bound.places.get(plane.0 as usize).and_then(|slot| self.slots.get(*slot as usize));
        slot.ok_or_else(|| BackendError::Internal("no such plane".to_owned()))
    }
}

fn take(device: &Device, bytes: usize) -> Result<Buffer, BackendError> {
    if bytes > isize::MAX as usize {
        return Err(BackendError::Dims("scratch exceeds the address space"));
    }
    Ok(device.take(bytes, Owner::Scratch)?)
}
