//! Weights in groups of 32: integer codes with float scales, the form that 8-bit activations meet.

use super::{E2M1_DOUBLED, e8m0_bits, f16_at, five_bits, scale_min_k4, small};
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
    /// `scale * code + min`, one of each per 16.
    AffineHalves,
}

impl GroupKind {
    /// The kind of a quantised type with CPU arithmetic; `None` for others.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::Q8_0 | DType::Q4_0 | DType::Q5_0 | DType::MXFP4 | DType::IQ4_NL => Some(Self::Symmetric),
            DType::IQ4_XS | DType::IQ3_XXS | DType::IQ3_S | DType::IQ2_XXS | DType::IQ1_S => {
                Some(Self::Symmetric)
            }
            DType::TQ1_0 | DType::TQ2_0 | DType::MXFP6_E2M3 | DType::MXFP6_E3M2 => Some(Self::Symmetric),
            DType::Q3_K | DType::Q6_K | DType::IQ2_XS | DType::IQ2_S | DType::IQ1_M | DType::NVFP4 => {
                Some(Self::SymmetricHalves)
            }
            DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => Some(Self::Affine),
            DType::Q2_K => Some(Self::AffineHalves),
            _ => None,
        }
    }

    /// Whether both halves of a group have scales of their own.
    pub const fn has_halves(self) -> bool {
        matches!(self, Self::SymmetricHalves | Self::AffineHalves)
    }
}

/// 32 consecutive weights of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Integer codes: -128..=127 (Q8_0), -8..=7 (Q4_0), -16..=15 (Q5_0), -12..=12 (MXFP4, NVFP4: twice the value), 0..=15
    /// (Q4_1, Q4_K), 0..=31 (Q5_1, Q5_K), -32..=31 (Q6_K), 0..=3 (Q2_K), -4..=3 (Q3_K). IQ4_NL and IQ4_XS
    /// have -127..=113, IQ3_XXS -62..=62, IQ3_S -15..=15, IQ2_XXS, IQ2_XS and IQ2_S -43..=43. IQ1_S and IQ1_M have
    /// -9..=9, eight times the value, TQ1_0 -1..=1 and TQ2_0 -1..=2. MXFP6_E2M3 has -60..=60, eight times the value, MXFP6_E3M2
    /// -448..=448, sixteen times the value.
    pub codes: [i16; 32],
    /// Scale of each 16 codes; both are equal unless [`GroupKind::has_halves`]. Computed exactly.
    pub scales: [f32; 2],
    /// Added to each value of a half; 0 for symmetric kinds, and both are equal unless [`GroupKind::has_halves`].
    pub mins: [f32; 2],
}

/// Group `index` of a row of quantised `dtype`. Panics if `row` ends before it; other types give zeros.
pub fn group(dtype: DType, row: &[u8], index: usize) -> Group {
    let mut codes = [0i8; 32];
    let groups = dtype.block_len() / 32;
    let block = &row[index / groups.max(1) * dtype.block_bytes()..][..dtype.block_bytes()];
    let none = [0.0; 2];
    let g = index % groups.max(1);
    if let Some((codes, scales)) = of_small(dtype, block, g) {
        return Group { codes: codes.map(i16::from), scales, mins: none };
    }
    if dtype == DType::MXFP6_E3M2 {
        let scale = f32::from_bits(e8m0_bits(block[0].into(), 4));
        return Group { codes: small::e3m2(block), scales: [scale; 2], mins: none };
    }
    let (scales, mins) = match dtype {
        DType::Q8_0 => {
            codes.iter_mut().zip(&block[2..34]).for_each(|(c, &q)| *c = q as i8);
            ([f16_at(block, 0); 2], none)
        }
        DType::Q4_0 => {
            nibbles(&block[2..18], &mut codes);
            codes.iter_mut().for_each(|c| *c -= 8);
            ([f16_at(block, 0); 2], none)
        }
        DType::Q4_1 => {
            nibbles(&block[4..20], &mut codes);
            ([f16_at(block, 0); 2], [f16_at(block, 2); 2])
        }
        DType::Q5_0 => {
            codes.iter_mut().zip(five_bits(&block[2..22])).for_each(|(c, q)| *c = q as i8 - 16);
            ([f16_at(block, 0); 2], none)
        }
        DType::Q5_1 => {
            codes.iter_mut().zip(five_bits(&block[4..24])).for_each(|(c, q)| *c = q as i8);
            ([f16_at(block, 0); 2], [f16_at(block, 2); 2])
        }
        DType::MXFP4 => {
            nibbles(&block[1..17], &mut codes);
            codes.iter_mut().for_each(|c| *c = E2M1_DOUBLED[*c as usize & 15]);
            ([f32::from_bits(e8m0_bits(block[0].into(), 1)); 2], none)
        }
        DType::Q2_K => {
            let (found, mins) = small::q2_k(block, g);
            codes = found.0;
            (found.1, mins)
        }
        DType::Q4_K => k4(block, &block[16..144], g, &mut codes),
        DType::Q5_K => {
            let scales = k4(block, &block[48..176], g, &mut codes);
            codes.iter_mut().zip(&block[16..48]).for_each(|(c, high)| *c |= ((high >> g & 1) << 4) as i8);
            scales
        }
        DType::Q6_K => (q6_k(block, g, &mut codes), none),
        _ => (none, none),
    };
    Group { codes: codes.map(i16::from), scales, mins }
}

/// Codes and scales of group `g` of a block of the symmetric types in `small.rs`; `None` for others.
fn of_small(dtype: DType, block: &[u8], g: usize) -> Option<([i8; 32], [f32; 2])> {
    Some(match dtype {
        DType::Q3_K => small::q3_k(block, g),
        DType::NVFP4 => small::nvfp4(block, g),
        DType::MXFP6_E2M3 => (small::e2m3(block), [f32::from_bits(e8m0_bits(block[0].into(), 3)); 2]),
        DType::IQ4_NL => (small::iq4(&block[2..18]), [f16_at(block, 0); 2]),
        DType::IQ4_XS => small::iq4_xs(block, g),
        DType::IQ3_XXS => small::iq3_xxs(block, g),
        DType::IQ3_S => small::iq3_s(block, g),
        DType::IQ2_XXS => small::iq2_xxs(block, g),
        DType::IQ2_XS => small::iq2_xs(block, g),
        DType::IQ2_S => small::iq2_s(block, g),
        DType::IQ1_S => small::iq1_s(block, g),
        DType::IQ1_M => small::iq1_m(block, g),
        DType::TQ1_0 => small::tq1_0(block, g),
        DType::TQ2_0 => small::tq2_0(block, g),
        _ => return None,
    })
}

fn nibbles(packed: &[u8], codes: &mut [i8; 32]) {
    for (i, &q) in packed.iter().enumerate() {
        codes[i] = (q & 15) as i8;
        codes[i + 16] = (q >> 4) as i8;
    }
}

/// Decodes group `g` of a Q4_K or Q5_K block: returns scale and minimum, writes its nibbles.
fn k4(block: &[u8], nibbles: &[u8], g: usize, codes: &mut [i8; 32]) -> ([f32; 2], [f32; 2]) {
    let q = &nibbles[g / 2 * 32..][..32];
    codes.iter_mut().zip(q).for_each(|(c, &q)| *c = (q >> (4 * (g % 2)) & 15) as i8);
    let (scale, min) = scale_min_k4(g, &block[4..16]);
    // 11-bit mantissa times 6 bits: exact in f32.
    ([f16_at(block, 0) * f32::from(scale); 2], [-(f16_at(block, 2) * f32::from(min)); 2])
}

fn q6_k(block: &[u8], g: usize, codes: &mut [i8; 32]) -> [f32; 2] {
    let (half, quarter) = (g / 4, g % 4);
    let low = &block[64 * half + 32 * (quarter % 2)..][..32];
    let high = &block[128 + 32 * half..][..32];
    for (i, c) in codes.iter_mut().enumerate() {
        let q = (low[i] >> (4 * (quarter / 2)) & 15) | (high[i] >> (2 * quarter) & 3) << 4;
        *c = q as i8 - 32;
    }
    let d = f16_at(block, 208);
    let scale = |at: usize| d * f32::from(block[192 + at] as i8); // 11 times 7 bits: exact
    [scale(2 * g), scale(2 * g + 1)]
}
