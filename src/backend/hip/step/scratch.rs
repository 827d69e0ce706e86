//! Memory of one model for a step's rows between kernels. Planes share slots; attention and products of many rows have
//! extra buffers.

use crate::backend::hip::kernels::matmul::choice;
use crate::backend::hip::kernels::thresholds::{ATTENTION_ROWS, ATTENTION_ROWS_MAX, Thresholds};
use crate::backend::hip::step::bind::{Bound, PlaneId};
use crate::backend::hip::{ALIGN, Buffer, Device, DevicePtr, Purpose, Stream};
use crate::backend::{ActivationType, BackendError};
use crate::program::Rows;

/// Most splits of a row's tokens (`SPLITS_MAX` of kernels/attention/splits.h).
pub const SPLITS_MAX: u32 = 128;

/// Bytes of weights expanded at a time for many rows. They stay in the last-level cache until they are multiplied.
pub const SLAB_BYTES: usize = 32 << 20;

/// Most slab bytes in steps below `thresholds::WIDE_ROWS` rows; smaller slabs would leave the device idle.
const SLAB_BYTES_MAX: usize = 128 << 20;

/// `cols` rounded up to whole groups of 32. Rows of quantised weights are always whole groups.
pub fn padded(cols: usize) -> usize {
    cols.next_multiple_of(32)
}

/// A model's scratch memory.
#[derive(Debug)]
pub struct Scratch {
    slots: Vec<Buffer>,
    /// Address of each plane.
    planes: Vec<DevicePtr<u8>>,
    /// Partial results of decode attention.
    pub part_values: Buffer,
    /// Maximum score and sum of each partial result.
    pub part_stats: Buffer,
    /// Number of finished workgroups that share a result, of attention and of products; 0 between launches.
    pub counters: Buffer,
    /// Expanded weights in f16, or the sums of a product's splits.
    pub slab: Buffer,
    /// One word: 1 when a row chose an expert that is not resident, in a step that was launched ahead.
    pub absent: Buffer,
}

/// Bytes of the buffers of [`Scratch`]; `usize::MAX` for a buffer that exceeds the address space.
struct Sizes {
    slots: Vec<usize>,
    /// The buffers after the slots, in field order.
    others: [usize; 5],
}

impl Sizes {
    fn of(bound: &Bound) -> Self {
        let rows = bound.rows(Rows::All);
        let words = |count: usize| count.saturating_mul(4);
        let splits = SPLITS_MAX as usize;
        // Tiles have eight rows.
        let whole = if bound.modes.tiled() { 8 } else { 1 };
        let slot = |slot: &crate::backend::hip::step::bind::Slot| {
            slot.row_bytes.saturating_mul(bound.rows(slot.rows).next_multiple_of(whole))
        };
        let Thresholds { half_from, expanded_from, .. } = bound.modes.thresholds();
        let many = rows >= half_from && bound.modes.activations == ActivationType::Int8;
        let expands = many && expanded_from.is_some_and(|from| bound.room.floats || rows >= from);
        let (unit, order) = (bound.modes.unit, bound.modes.order);
        let slab = bound.room.matrix.saturating_mul(2).clamp(SLAB_BYTES, SLAB_BYTES_MAX);
        let slab = [(expands, slab), (many, choice::gemm_parts(unit, order, bound.room.sums, rows))];
        let slab = slab.into_iter().map(|(wanted, bytes)| if wanted { bytes } else { 0 }).fold(0, usize::max);
        Self {
            slots: bound.slots.iter().map(slot).collect(),
            others: [
                words(bound.room.head_values.saturating_mul(splits)),
                words(bound.room.heads.saturating_mul(2 * splits)),
                words(
                    bound
                        .room
                        .heads
                        .saturating_mul(ATTENTION_ROWS_MAX / ATTENTION_ROWS)
                        .max(choice::gemm_counters(order, rows)),
                ),
                slab,
                size_of::<u32>(),
            ],
        }
    }
}

/// Device bytes of [`Scratch::new`]; `u64::MAX` when a buffer exceeds the address space.
pub fn bytes(bound: &Bound) -> u64 {
    // An empty buffer takes one unit too, because it has an address.
    let taken = |bytes: usize| bytes.max(1).checked_next_multiple_of(ALIGN).map(|bytes| bytes as u64);
    let sizes = Sizes::of(bound);
    let mut all = sizes.slots.into_iter().chain(sizes.others);
    all.try_fold(0u64, |all, bytes| all.checked_add(taken(bytes)?)).unwrap_or(u64::MAX)
}

impl Scratch {
    /// Allocates scratch memory for steps of a program.
    ///
    /// # Errors
    /// [`BackendError`] when device memory is short.
    pub fn new(device: &Device, stream: &Stream, bound: &Bound) -> Result<Self, BackendError> {
        let sizes = Sizes::of(bound);
        let slots = sizes.slots.into_iter().map(|bytes| take(device, bytes));
        let slots = slots.collect::<Result<Vec<Buffer>, _>>()?;
        let place = |slot: &u32| slots.get(*slot as usize).map_or(DevicePtr::NULL, Buffer::ptr);
        let [values, stats, counters, slab, absent] = sizes.others;
        let scratch = Self {
            planes: bound.places.iter().map(place).collect(),
            slots,
            part_values: take(device, values)?,
            part_stats: take(device, stats)?,
            counters: take(device, counters)?,
            slab: take(device, slab)?,
            absent: take(device, absent)?,
        };
        stream.fill(scratch.counters.all(), 0)?;
        stream.fill(scratch.absent.all(), 0)?;
        Ok(scratch)
    }

    /// Address of a plane.
    pub fn plane(&self, plane: PlaneId) -> DevicePtr<u8> {
        // Planes belong to the program this scratch was made for.
        self.planes.get(plane.0 as usize).copied().unwrap_or(DevicePtr::NULL)
    }

    /// The buffer that holds a plane while the plane is live.
    ///
    /// # Errors
    /// [`BackendError::Internal`] for a plane of another program.
    pub fn buffer(&self, bound: &Bound, plane: PlaneId) -> Result<&Buffer, BackendError> {
        let slot = bound.places.get(plane.0 as usize).and_then(|slot| self.slots.get(*slot as usize));
        slot.ok_or_else(|| BackendError::Internal("there is no such plane".to_owned()))
    }
}

fn take(device: &Device, bytes: usize) -> Result<Buffer, BackendError> {
    if bytes > isize::MAX as usize {
        return Err(BackendError::Dims("scratch exceeds the address space"));
    }
    Ok(device.take(bytes, Purpose::Scratch)?)
}
