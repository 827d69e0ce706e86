//! Weights in groups of 32: integer codes with float scales, the form that 8-bit activations meet.

use super::{E2M1_DOUBLED, e8m0_half_bits, f16_at, five_bits, scale_min_k4};
use crate::tensor::DType;

/// How a type's codes become values within a group of 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// `scale * code`, one scale per 32.
    Symmetric,
    /// `scale * code`, one scale per 16.
    SymmetricHalves,
    /// `scale * code + min`, one of each per 32.
    Affine,
}

impl GroupKind {
    /// The kind of a quantised type with CPU arithmetic; `None` for others.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::Q8_0 | DType::Q4_0 | DType::Q5_0 | DType::MXFP4 => Some(Self::Symmetric),
            DType::Q6_K => Some(Self::SymmetricHalves),
            DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => Some(Self::Affine),
            _ => None,
        }
    }
}

/// 32 consecutive weights of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Integer codes: -128..=127 (Q8_0), -8..=7 (Q4_0), -16..=15 (Q5_0), -12..=12 (MXFP4: twice the value), 0..=15
    /// (Q4_1, Q4_K), 0..=31 (Q5_1, Q5_K), -32..=31 (Q6_K).
    pub codes: [i8; 32],
    /// Scale of each 16 codes; both are equal unless the kind is [`GroupKind::SymmetricHalves`]. Computed exactly.
    pub scales: [f32; 2],
    /// Added to each value; 0 unless the kind is [`GroupKind::Affine`].
    pub min: f32,
}

/// Group `index` of a row of quantised `dtype`. Panics if `row` ends before it; other types give zeros.
pub fn group(dtype: DType, row: &[u8], index: usize) -> Group {
    let mut codes = [0i8; 32];
    let groups = dtype.block_len() / 32;
    let block = &row[index / groups.max(1) * dtype.block_bytes()..][..dtype.block_bytes()];
    let (scales, min) = match dtype {
        DType::Q8_0 => {
            codes.iter_mut().zip(&block[2..34]).for_each(|(c, &q)| *c = q as i8);
            ([f16_at(block, 0); 2], 0.0)
        }
        DType::Q4_0 => {
            nibbles(&block[2..18], &mut codes);
            codes.iter_mut().for_each(|c| *c -= 8);
            ([f16_at(block, 0); 2], 0.0)
        }
        DType::Q4_1 => {
            nibbles(&block[4..20], &mut codes);
            ([f16_at(block, 0); 2], f16_at(block, 2))
        }
        DType::Q5_0 => {
            codes.iter_mut().zip(five_bits(&block[2..22])).for_each(|(c, q)| *c = q as i8 - 16);
            ([f16_at(block, 0); 2], 0.0)
        }
        DType::Q5_1 => {
            codes.iter_mut().zip(five_bits(&block[4..24])).for_each(|(c, q)| *c = q as i8);
            ([f16_at(block, 0); 2], f16_at(block, 2))
        }
        DType::MXFP4 => {
            nibbles(&block[1..17], &mut codes);
            codes.iter_mut().for_each(|c| *c = E2M1_DOUBLED[*c as usize & 15]);
            ([f32::from_bits(e8m0_half_bits(block[0].into())); 2], 0.0)
        }
        DType::Q4_K => k4(block, &block[16..144], index % 8, &mut codes),
        DType::Q5_K => {
            let g = index % 8;
            let scales = k4(block, &block[48..176], g, &mut codes);
            codes.iter_mut().zip(&block[16..48]).for_each(|(c, high)| *c |= ((high >> g & 1) << 4) as i8);
            scales
        }
        DType::Q6_K => q6_k(block, index % 8, &mut codes),
        _ => ([0.0; 2], 0.0),
    };
    Group { codes, scales, min }
}

fn nibbles(packed: &[u8], codes: &mut [i8; 32]) {
    for (i, &q) in packed.iter().enumerate() {
        codes[i] = (q & 15) as i8;
        codes[i + 16] = (q >> 4) as i8;
    }
}

/// Decodes group `g` of a Q4_K or Q5_K block: returns scale and minimum, writes its nibbles.
fn k4(block: &[u8], nibbles: &[u8], g: usize, codes: &mut [i8; 32]) -> ([f32; 2], f32) {
    let q = &nibbles[g / 2 * 32..][..32];
    codes.iter_mut().zip(q).for_each(|(c, &q)| *c = (q >> (4 * (g % 2)) & 15) as i8);
    let (scale, min) = scale_min_k4(g, &block[4..16]);
    // 11-bit mantissa times 6 bits: exact in f32.
    ([f16_at(block, 0) * f32::from(scale); 2], -(f16_at(block, 2) * f32::from(min)))
}

fn q6_k(block: &[u8], g: usize, codes: &mut [i8; 32]) -> ([f32; 2], f32) {
    let (half, quarter) = (g / 4, g % 4);
    let low = &block[64 * half + 32 * (quarter % 2)..][..32];
    let high = &block[128 + 32 * half..][..32];
    for (i, c) in codes.iter_mut().enumerate() {
        let q = (low[i] >> (4 * (quarter / 2)) & 15) | (high[i] >> (2 * quarter) & 3) << 4;
        *c = q as i8 - 32;
    }
    let d = f16_at(block, 208);
    let scale = |at: usize| d * f32::from(block[192 + at] as i8); // 11 times 7 bits: exact
    ([scale(2 * g), scale(2 * g + 1)], 0.0)
}
