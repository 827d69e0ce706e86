//! Address tables through which kernels find a layer's experts.

use crate::backend::hip::step::bind::ExpertSet;
use crate::backend::hip::step::run::ExpertTable;
use crate::backend::hip::weights::MatrixShape;
use crate::backend::hip::{Buffer, Device, Purpose, Stream};
use crate::backend::{BackendError, DeviceTensor, Weights};

/// Roles of an expert's matrices: gate, up, down.
const ROLES: usize = 3;

/// Builds the address tables of a set of experts, with 0 for experts that are not resident. They go to `kept`, the
/// buffer of the set's older tables, or to a new one. Returns them with the buffer that holds them. `weight` returns
/// the address of a loaded tensor once the compute stream may use it. Waits until no work uses the older tables.
///
/// # Errors
/// [`BackendError`] of `weight` and of the device.
pub fn tables(
    device: &Device,
    stream: &Stream,
    set: &ExpertSet,
    weights: &Weights<'_>,
    kept: Option<Buffer>,
    weight: impl Fn(&DeviceTensor, MatrixShape) -> Result<u64, BackendError>,
) -> Result<([ExpertTable; ROLES], Buffer), BackendError> {
    let count = set.range.count as usize;
    let shapes = shapes(set);
    let mut addresses = vec![0u64; ROLES * count];
    for number in 0..set.range.count {
        if !is_there(set, weights, number) {
            continue;
        }
        for (role, (id, shape)) in set.range.tensors(number).into_iter().zip(shapes).enumerate() {
            let address = weight(weights.tensor(id)?, shape)?;
            if let Some(slot) = addresses.get_mut(role * count + number as usize) {
                *slot = address;
            }
        }
    }
    let bytes = addresses.len() * size_of::<u64>();
    let buffer = kept.map_or_else(|| device.take(bytes, Purpose::Scratch), Ok)?;
    // The upload waits for the stream, so no kernel still reads the old table.
    stream.upload(buffer.all(), addresses.as_slice())?;
    let table = |role: usize, MatrixShape { dtype, rows, cols }| {
        let table = buffer.ptr_at(role * count * size_of::<u64>())?.first(count);
        Ok::<_, BackendError>(ExpertTable { table, dtype, rows, cols })
    };
    let [gate, up, down] = shapes;
    let tables = [table(0, gate)?, table(1, up)?, table(2, down)?];
    Ok((tables, buffer))
}

/// Whether all tensors of an expert are resident.
pub fn is_there(set: &ExpertSet, weights: &Weights<'_>, expert: u32) -> bool {
    set.range.tensors(expert).into_iter().all(|id| weights.has(id))
}

fn shapes(set: &ExpertSet) -> [MatrixShape; ROLES] {
    let ExpertSet { dtypes: [dtype, down], ffn, cols, out_cols, .. } = *set;
    let gate = MatrixShape { dtype, rows: ffn, cols };
    [gate, gate, MatrixShape { dtype: down, rows: out_cols, cols: ffn }]
}
