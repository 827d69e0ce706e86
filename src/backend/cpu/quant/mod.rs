//! Quant blocks of GGUF weights: converts their bytes to numbers.
//!
//! Layouts follow ggml (`ggml-common.h`, `dequantize_row_*` in `ggml-quants.c`). Results equal ggml's bit for bit; a
//! golden file made by ggml itself checks this.
//!
//! The layout of 6-bit floats, which ggml has not, is ours. Their values are those of the OCP microscaling format. All
//! numbers are little-endian; a block never spans rows.
//!
//! | type | values | bytes | layout | value |
//! |---|---|---|---|---|
//! | Q8_0 | 32 | 34 | f16 d, 32 i8 q | d*q |
//! | Q4_0 | 32 | 18 | f16 d, 16 B: value i in the low nibble of byte i, value i+16 in the high one | d*(q-8) |
//! | Q4_1 | 32 | 20 | f16 d, f16 m, nibbles as Q4_0 | d*q + m |
//! | Q5_0 | 32 | 22 | f16 d, u32 high bits (bit i is the fifth of value i), nibbles as Q4_0 | d*(q-16) |
//! | Q5_1 | 32 | 24 | f16 d, f16 m, u32 high bits, nibbles as Q4_0 | d*q + m |
//! | MXFP4 | 32 | 17 | u8 e, nibbles as Q4_0: E2M1 floats | 2^(e-127) * E2M1 |
//! | MXFP6_E2M3 | 32 | 25 | u8 e, nibbles as Q4_0, 8 B upper bits (2w and 2w+1 of byte 4h+b: value 16h+4w+b): E2M3 floats | 2^(e-127) * E2M3 |
//! | MXFP6_E3M2 | 32 | 25 | as MXFP6_E2M3: E3M2 floats | 2^(e-127) * E3M2 |
//! | NVFP4 | 64 | 36 | 4 u8 sc: unsigned E4M3 floats, 4 x 8 B: low nibbles 8 values, high the next 8: E2M1 floats | sc * E2M1 |
//! | Q4_K | 256 | 144 | f16 d, f16 dmin, 12 B of 8 six-bit (sc, mn), 4 x 32 B: low nibbles 32 values, high the next 32 | d*sc*q - dmin*mn |
//! | Q5_K | 256 | 176 | f16 d, f16 dmin, 12 B as Q4_K, 32 B high bits (bit g of byte i: value i of group g), nibbles as Q4_K | d*sc*q - dmin*mn |
//! | Q6_K | 256 | 210 | 128 B low nibbles, 64 B high bits, 16 i8 sc, f16 d | d*sc*(q-32) |
//! | Q2_K | 256 | 84 | 16 B nibbles (sc, mn), 64 B of q, 2 bits of 4 groups in a byte, f16 d, f16 dmin | d*sc*q - dmin*mn |
//! | Q3_K | 256 | 110 | 32 B high bits as Q5_K, 64 B low bits as Q2_K, 12 B of 16 six-bit sc, f16 d | d*(sc-32)*(q-4) |
//! | IQ4_NL | 32 | 18 | as Q4_0 | d*IQ4\[q\] |
//! | IQ4_XS | 256 | 136 | f16 d, u16 high bits of sc, 4 B of 8 nibbles of sc, 128 B nibbles as Q4_0 | d*(sc-32)*IQ4\[q\] |
//! | IQ3_XXS | 256 | 98 | f16 d, 64 B indices, 8 u32: 4 x 7 signs, 4 bits sc | d*(2sc+1)/4 * +-grid |
//! | IQ3_S | 256 | 110 | f16 d, 64 B indices, 8 B their ninth bits, 32 B signs, 4 B nibbles sc | d*(2sc+1) * +-grid |
//! | IQ2_XXS | 256 | 66 | f16 d, 8 x (4 B indices, u32 as IQ3_XXS) | d*(2sc+1)/8 * +-grid |
//! | IQ2_XS | 256 | 74 | f16 d, 32 u16: 9 bits index, 7 signs; 8 B nibbles sc | d*(2sc+1)/8 * +-grid |
//! | IQ2_S | 256 | 82 | f16 d, 32 B indices, 32 B signs, 8 B their upper bits, 8 B nibbles sc | d*(2sc+1)/8 * +-grid |
//! | IQ1_S | 256 | 50 | f16 d, 32 B indices, 8 u16: 4 x 3 upper bits, 3 bits sc, sign of delta | d*(2sc+1) * (grid +- 1/8) |
//! | IQ1_M | 256 | 56 | 32 B indices, 16 B nibbles: 3 upper bits, sign of delta; 4 u16: 4 x 3 bits sc, 4 of d | as IQ1_S |
//! | TQ1_0 | 256 | 54 | 52 B of five digits (the last four: of four), f16 d | d*(q-1) |
//! | TQ2_0 | 256 | 66 | 64 B of q as Q2_K, f16 d | d*(q-1) |

pub(crate) mod grids;
mod group;
mod small;

pub use group::{Group, GroupKind, group};

use half::{bf16, f16};

use crate::tensor::DType;

/// Errors of reading bytes as values of a type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantError {
    /// The CPU has no arithmetic for the type.
    #[error("type {0} has no CPU arithmetic")]
    Unsupported(DType),
    /// The number of bytes does not match the number of values.
    #[error("{values} values of {dtype} do not take {bytes} bytes")]
    Length {
        /// Element type.
        dtype: DType,
        /// Bytes given.
        bytes: usize,
        /// Values wanted.
        values: usize,
    },
}

/// Types with CPU arithmetic.
pub const SUPPORTED: &[DType] = &[
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::MXFP4,
    DType::MXFP6_E2M3,
    DType::MXFP6_E3M2,
    DType::NVFP4,
    DType::Q2_K,
    DType::Q3_K,
    DType::IQ4_NL,
    DType::IQ4_XS,
    DType::IQ3_XXS,
    DType::IQ3_S,
    DType::IQ2_XXS,
    DType::IQ2_XS,
    DType::IQ2_S,
    DType::IQ1_S,
    DType::IQ1_M,
    DType::TQ1_0,
    DType::TQ2_0,
];

/// Values of the 4-bit floats E2M1 by their bits, doubled so that all are integers.
pub(crate) const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Magnitudes of the 6-bit floats E2M3 by their five lower bits, times 8 so that all are integers.
pub(crate) const E2M3_EIGHTHS: [i8; 32] = {
    let mut table = [0; 32];
    let mut bits = 0;
    while bits < 32 {
        let (exponent, mantissa) = (bits as i8 >> 3, bits as i8 & 7);
        table[bits] = if exponent == 0 { mantissa } else { (8 + mantissa) << (exponent - 1) };
        bits += 1;
    }
    table
};

/// Magnitudes of the 6-bit floats E3M2 by their five lower bits, times 16 so that all are integers.
pub(crate) const E3M2_SIXTEENTHS: [i16; 32] = {
    let mut table = [0; 32];
    let mut bits = 0;
    while bits < 32 {
        let (exponent, mantissa) = (bits as i16 >> 2, bits as i16 & 3);
        table[bits] = if exponent == 0 { mantissa } else { (4 + mantissa) << (exponent - 1) };
        bits += 1;
    }
    table
};

/// Bits of the f32 that is the 8-bit power of two `e`, which is below 256, over 2^`less`: 2^(e - 127 - less). It is subnormal for
/// an `e` of at most `less`, which is at most 4. The format defines 255 as NaN; it gives 2^(128 - less), as in ggml.
#[inline]
pub(crate) fn e8m0_bits(e: u32, less: u32) -> u32 {
    if e > less { (e - less) << 23 } else { 0x0040_0000 >> (less - e) }
}

/// Half of each unsigned 8-bit float E4M3, by its bits; the sign bit counts for nothing. The format defines 0x7f as NaN; it gives
/// 0, as in ggml.
pub(crate) const UE4M3_HALF: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut bits = 0;
    while bits < 256 {
        let (exponent, mantissa) = (bits as u32 >> 3 & 15, bits as u32 & 7);
        table[bits] = match exponent {
            _ if bits == 0x7f => 0.0,
            0 => mantissa as f32 / 1024.0,
            // 2^(exponent - 8), times 1 and eighths.
            _ => f32::from_bits((exponent + 119) << 23 | mantissa << 20),
        };
        bits += 1;
    }
    table
};

/// Whether the CPU can compute with weights of this type.
pub fn is_supported(dtype: DType) -> bool {
    SUPPORTED.contains(&dtype)
}

/// The f16 at byte `at` of a block, exact in f32.
pub(crate) fn f16_at(block: &[u8], at: usize) -> f32 {
    f16_of(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// The f16 of these bits, exact in f32.
pub(crate) fn f16_of(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// Scale and minimum `j` (0..8) of the 12 packed bytes of a Q4_K block, 6 bits each.
pub(crate) fn scale_min_k4(j: usize, packed: &[u8]) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4), (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4))
    }
}

/// Decodes whole blocks of `dtype` into `out.len()` f32 values. Equal to ggml's bit for bit.
///
/// # Errors
/// [`QuantError`]; `out` is then unchanged.
pub fn dequantize_row(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    if !is_supported(dtype) {
        return Err(QuantError::Unsupported(dtype));
    }
    if dtype.row_bytes(out.len() as u64) != Some(bytes.len() as u64) {
        return Err(QuantError::Length { dtype, bytes: bytes.len(), values: out.len() });
    }
    let decode: &dyn Fn(&[u8], &mut [f32]) = match dtype {
        DType::F16 => &|b: &[u8], y: &mut [f32]| y[0] = f16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::BF16 => &|b: &[u8], y: &mut [f32]| y[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::Q8_0 => &q8_0,
        DType::Q4_0 => &q4_0,
        DType::Q4_1 => &q4_1,
        DType::Q5_0 => &q5_0,
        DType::Q5_1 => &q5_1,
        DType::MXFP4 => &mxfp4,
        DType::Q4_K => &q4_k,
        DType::Q5_K => &q5_k,
        DType::Q6_K => &q6_k,
        DType::F32 => &|b: &[u8], y: &mut [f32]| y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        _ if GroupKind::of(dtype).is_some() => &|block, y| by_groups(dtype, block, y),
        _ => return Err(QuantError::Unsupported(dtype)),
    };
    for (block, y) in bytes.chunks_exact(dtype.block_bytes()).zip(out.chunks_exact_mut(dtype.block_len())) {
        decode(block, y);
    }
    Ok(())
}

/// Decodes a block of a type whose scales times codes are exact. Only adding a minimum rounds, once, as in ggml.
fn by_groups(dtype: DType, block: &[u8], y: &mut [f32]) {
    let affine = GroupKind::of(dtype) == Some(GroupKind::AffineHalves);
    for (g, y) in y.chunks_exact_mut(32).enumerate() {
        let Group { codes, scales, mins } = group(dtype, block, g);
        for (i, (y, code)) in y.iter_mut().zip(codes).enumerate() {
            *y = scales[i / 16] * f32::from(code);
            if affine {
                *y += mins[i / 16]; // not for others: 0 would change the sign of -0
            }
        }
    }
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

fn q5_0(block: &[u8], y: &mut [f32]) {
    let d = f16_at(block, 0);
    let codes = five_bits(&block[2..22]);
    y.iter_mut().zip(codes).for_each(|(y, q)| *y = (f32::from(q) - 16.0) * d);
}

fn q5_1(block: &[u8], y: &mut [f32]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    let codes = five_bits(&block[4..24]);
    y.iter_mut().zip(codes).for_each(|(y, q)| *y = f32::from(q) * d + m);
}

/// The codes of 4 bytes of high bits and 16 bytes of nibbles.
pub(crate) fn five_bits(packed: &[u8]) -> [u8; 32] {
    let high = u32::from_le_bytes([packed[0], packed[1], packed[2], packed[3]]);
    let fifth = |i: usize| ((high >> i & 1) << 4) as u8;
    std::array::from_fn(|i| (packed[4 + i % 16] >> (i / 16 * 4) & 15) | fifth(i))
}

fn mxfp4(block: &[u8], y: &mut [f32]) {
    let d = f32::from_bits(e8m0_bits(block[0].into(), 1));
    for (i, &q) in block[1..17].iter().enumerate() {
        y[i] = f32::from(E2M1_DOUBLED[usize::from(q & 15)]) * d;
        y[i + 16] = f32::from(E2M1_DOUBLED[usize::from(q >> 4)]) * d;
    }
}

fn q4_k(block: &[u8], y: &mut [f32]) {
    k4(block, &block[16..144], |_, _| 0, y);
}

fn q5_k(block: &[u8], y: &mut [f32]) {
    k4(block, &block[48..176], |g, i| (block[16 + i] >> g & 1) << 4, y);
}

/// Decodes Q4_K and Q5_K: scales and minima of 8 groups, and nibbles, to which `high(group, i)` is added.
fn k4(block: &[u8], nibbles: &[u8], high: impl Fn(usize, usize) -> u8, y: &mut [f32]) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    for (g, y) in y.chunks_exact_mut(32).enumerate() {
        let (sc, mn) = scale_min_k4(g, &block[4..16]);
        let (d, m) = (d * f32::from(sc), dmin * f32::from(mn));
        for (i, (y, q)) in y.iter_mut().zip(&nibbles[g / 2 * 32..]).enumerate() {
            *y = d * f32::from((q >> (4 * (g % 2)) & 15) | high(g, i)) - m;
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
