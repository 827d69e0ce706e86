//! Device layout of a weight tensor: `kernels/quant/planes.h` in Rust.

use super::super::types::weight_type;
use crate::tensor::DType;

/// Alignment of each plane, in bytes.
pub const PLANE_ALIGN: u64 = 256;

/// Most planes per type.
pub const PLANES_MAX: usize = 4;

/// Layout of a tensor's planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planes {
    /// Bytes from the tensor's start to each plane; the tensor's size for planes that the type lacks.
    pub offsets: [u64; PLANES_MAX],
    /// Bytes of the tensor on the device.
    pub bytes: u64,
}

/// The planes of `rows` x `cols` values. `None` for types without kernels and for rows that are not whole quant blocks.
/// Also `None` when kernels could not count groups of 32 (for float types: 16-byte chunks) in 32 bits.
pub fn planes(dtype: DType, rows: u64, cols: u64) -> Option<Planes> {
    let entries = weight_type(dtype)?.planes;
    let row_bytes = dtype.row_bytes(cols)?;
    let weights = rows.checked_mul(cols)?;
    let mut planes = Planes { offsets: [0; PLANES_MAX], bytes: 0 };
    if entries.is_empty() {
        planes.bytes = row_bytes.checked_next_multiple_of(16)?.checked_mul(rows)?;
        u32::try_from(planes.bytes / 16).ok()?;
        planes.offsets[1..].fill(planes.bytes);
        return Some(planes);
    }
    u32::try_from(weights / 32).ok()?;
    for (i, offset) in planes.offsets.iter_mut().enumerate() {
        *offset = planes.bytes;
        let &(bytes, per) = entries.get(i).unwrap_or(&(0, 1));
        planes.bytes += (weights / per * bytes).next_multiple_of(PLANE_ALIGN); // below 2^32 * 33: no overflow
    }
    Some(planes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_follow_each_other_at_multiples_of_256() {
        let found = planes(DType::Q6_K, 3, 256).unwrap();
        assert_eq!(found.offsets, [0, 512, 768, 1024]);
        assert_eq!(found.bytes, 1280);
        let found = planes(DType::Q4_K, 2, 4096).unwrap();
        assert_eq!(found, Planes { offsets: [0, 4096, 4608, 4608], bytes: 4608 });
        assert_eq!(planes(DType::F32, 3, 5).unwrap().bytes, 96);
        assert_eq!(planes(DType::BF16, 3, 5).unwrap().bytes, 48);
    }

    #[test]
    fn sizes_that_kernels_cannot_count_are_refused() {
        assert_eq!(planes(DType::Q4_K, 1, 128), None);
        assert_eq!(planes(DType::Q8_K, 1, 256), None);
        assert_eq!(planes(DType::Q8_0, 1 << 20, 1 << 17), None);
        assert_eq!(planes(DType::F16, u64::MAX, 2), None);
    }
}
