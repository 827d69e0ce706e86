//! Quant blocks of GGUF weights: how their bytes become numbers.
//!
//! Layouts follow ggml (`ggml-common.h`, `dequantize_row_*` in `ggml-quants.c`); results equal ggml's to the bit, which
//! a golden file made by ggml itself checks. All numbers are little-endian; a block never spans rows.
//!
//! | type | values | bytes | layout | value |
//! |---|---|---|---|---|
//! | Q8_0 | 32 | 34 | f16 d, 32 i8 q | d*q |
//! | Q4_0 | 32 | 18 | f16 d, 16 B: value i in the low nibble of byte i, value i+16 in the high one | d*(q-8) |
//! | Q4_1 | 32 | 20 | f16 d, f16 m, nibbles as Q4_0 | d*q + m |
//! | Q4_K | 256 | 144 | f16 d, f16 dmin, 12 B of 8 six-bit (sc, mn), 4 x 32 B: low nibbles 32 values, high the next 32 | d*sc*q - dmin*mn |
//! | Q6_K | 256 | 210 | 128 B low nibbles, 64 B high bits, 16 i8 sc, f16 d | d*sc*(q-32) |

mod group;

pub use group::{Group, GroupKind, group};

use half::{bf16, f16};

use crate::tensor::DType;

/// Why bytes could not be read as values of a type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantError {
    /// No arithmetic for the type.
    #[error("type {0} has no CPU arithmetic")]
    Unsupported(DType),
    /// Sizes disagree.
    #[error("{values} values of {dtype} do not take {bytes} bytes")]
    Length {
        /// The type.
        dtype: DType,
        /// Bytes given.
        bytes: usize,
        /// Values wanted.
        values: usize,
    },
}

/// Types with CPU arithmetic.
pub const SUPPORTED: [DType; 8] =
    [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q4_1, DType::Q4_K, DType::Q6_K];

/// Whether the CPU computes with weights of this type.
pub fn is_supported(dtype: DType) -> bool {
    SUPPORTED.contains(&dtype)
}

/// f16 at byte `at` of a block, exact in f32.
pub(crate) fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Scale and minimum number `j` (0..8) of the 12 packed bytes of a Q4_K block, 6 bits each.
pub(crate) fn scale_min_k4(j: usize, packed: &[u8]) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4), (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4))
    }
}

/// Writes the `out.len()` values that `bytes` hold, whole blocks of `dtype`, as f32. Equal to ggml's to the bit.
///
/// # Errors
/// [`QuantError`]; `out` is then untouched.
pub fn dequantize_row(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    if !is_supported(dtype) {
        return Err(QuantError::Unsupported(dtype));
    }
    if dtype.row_bytes(out.len() as u64) != Some(bytes.len() as u64) {
        return Err(QuantError::Length { dtype, bytes: bytes.len(), values: out.len() });
    }
    let decode: fn(&[u8], &mut [f32]) = match dtype {
        DType::F16 => |b, y| y[0] = f16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::BF16 => |b, y| y[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::Q8_0 => q8_0,
        DType::Q4_0 => q4_0,
        DType::Q4_1 => q4_1,
        DType::Q4_K => q4_k,
        DType::Q6_K => q6_k,
        _ => |b, y| y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
    };
    for (block, y) in bytes.chunks_exact(dtype.block_bytes()).zip(out.chunks_exact_mut(dtype.block_len())) {
        decode(block, y);
    }
    Ok(())
}

fn q8_0(block: &[u8], y: &mut [f32]) {
    let d = f16_at(block, 0);
    for (y, &q) in y.iter_mut().zip(&block[2..34]) {
        *y = f32::from(q as i8) * d;
    }
}

fn q4_0(block: &[u8], y: &mut [f32]) {
    let d = f16_at(block, 0);
    for (i, &q) in block[2..18].iter().enumerate() {
        y[i] = (f32::from(q & 15) - 8.0) * d;
        y[i + 16] = (f32::from(q >> 4) - 8.0) * d;
    }
}

fn q4_1(block: &[u8], y: &mut [f32]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    for (i, &q) in block[4..20].iter().enumerate() {
        y[i] = f32::from(q & 15) * d + m;
        y[i + 16] = f32::from(q >> 4) * d + m;
    }
}

fn q4_k(block: &[u8], y: &mut [f32]) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    for (pair, (q, y)) in block[16..144].chunks_exact(32).zip(y.chunks_exact_mut(64)).enumerate() {
        let (sc_lo, mn_lo) = scale_min_k4(2 * pair, &block[4..16]);
        let (sc_hi, mn_hi) = scale_min_k4(2 * pair + 1, &block[4..16]);
        let (d_lo, m_lo) = (d * f32::from(sc_lo), dmin * f32::from(mn_lo));
        let (d_hi, m_hi) = (d * f32::from(sc_hi), dmin * f32::from(mn_hi));
        for (i, &q) in q.iter().enumerate() {
            y[i] = d_lo * f32::from(q & 15) - m_lo;
            y[i + 32] = d_hi * f32::from(q >> 4) - m_hi;
        }
    }
}

fn q6_k(block: &[u8], y: &mut [f32]) {
    let d = f16_at(block, 208);
    for (half, y) in y.chunks_exact_mut(128).enumerate() {
        let (low, high) = (&block[64 * half..][..64], &block[128 + 32 * half..][..32]);
        let scales = &block[192 + 8 * half..][..8];
        for (i, &bits) in high.iter().enumerate() {
            let codes = [
                low[i] & 15 | (bits & 3) << 4,
                low[i + 32] & 15 | (bits >> 2 & 3) << 4,
                low[i] >> 4 | (bits >> 4 & 3) << 4,
                low[i + 32] >> 4 | (bits >> 6) << 4,
            ];
            for (quarter, &q) in codes.iter().enumerate() {
                let scale = f32::from(scales[2 * quarter + i / 16] as i8);
                y[32 * quarter + i] = d * scale * f32::from(q as i8 - 32);
            }
        }
    }
}

#[cfg(test)]
mod tests;
