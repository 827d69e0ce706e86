//! Groups of the types below four bits, and of those whose codes are indices of a codebook.

use super::grids::{self, Quad};
use super::{E2M1_DOUBLED, E2M3_EIGHTHS, E3M2_SIXTEENTHS, UE4M3_HALF, f16_at, f16_of};

/// Codes of a group and scales of its halves.
type Codes = ([i8; 32], [f32; 2]);

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// The two bits of each value of group `g`: byte i of each 32 holds value i of four groups.
fn two_bits(packed: &[u8], g: usize) -> [i8; 32] {
    std::array::from_fn(|i| (packed[g / 4 * 32 + i] >> (2 * (g % 4)) & 3) as i8)
}

/// Group `g` of a Q2_K block, with the minimum of each half.
pub(super) fn q2_k(block: &[u8], g: usize) -> (Codes, [f32; 2]) {
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    let packed = [block[2 * g], block[2 * g + 1]];
    // 11-bit mantissas times 4 bits: exact.
    let scales = packed.map(|packed| d * f32::from(packed & 15));
    ((two_bits(&block[16..80], g), scales), packed.map(|packed| -(dmin * f32::from(packed >> 4))))
}

pub(super) fn nvfp4(block: &[u8], g: usize) -> Codes {
    let packed = &block[4 + 16 * g..][..16];
    let code = |i: usize| packed[i / 16 * 8 + i % 8] >> (i % 16 / 8 * 4) & 15;
    let codes = std::array::from_fn(|i| E2M1_DOUBLED[usize::from(code(i))]);
    (codes, [0, 1].map(|half| UE4M3_HALF[usize::from(block[2 * g + half])]))
}

/// The 6-bit float of value `i` of an MXFP6 block: whether it is negative, and its other five bits.
fn six_bits(block: &[u8], i: usize) -> (bool, usize) {
    let low = block[1 + i % 16] >> (i / 16 * 4) & 15;
    let upper = block[17 + i / 16 * 4 + i % 4] >> (i % 16 / 4 * 2) & 3;
    (upper > 1, usize::from(low | (upper & 1) << 4))
}

/// Eight times the values of an MXFP6_E2M3 block before scaling.
pub(super) fn e2m3(block: &[u8]) -> [i8; 32] {
    std::array::from_fn(|i| {
        let (negative, bits) = six_bits(block, i);
        if negative { -E2M3_EIGHTHS[bits] } else { E2M3_EIGHTHS[bits] }
    })
}

/// Sixteen times the values of an MXFP6_E3M2 block before scaling.
pub(super) fn e3m2(block: &[u8]) -> [i16; 32] {
    std::array::from_fn(|i| {
        let (negative, bits) = six_bits(block, i);
        if negative { -E3M2_SIXTEENTHS[bits] } else { E3M2_SIXTEENTHS[bits] }
    })
}

pub(super) fn q3_k(block: &[u8], g: usize) -> Codes {
    let mut codes = two_bits(&block[32..96], g);
    codes.iter_mut().zip(&block[..32]).for_each(|(c, high)| *c += ((high >> g & 1) << 2) as i8 - 4);
    let d = f16_at(block, 108);
    let scale = |i: usize| {
        let low = block[96 + i % 8] >> (4 * (i / 8)) & 15;
        let high = block[104 + i % 4] >> (2 * (i / 4)) & 3;
        d * f32::from((low | high << 4) as i8 - 32) // 11 times 6 bits: exact
    };
    (codes, [scale(2 * g), scale(2 * g + 1)])
}

pub(super) fn iq4_xs(block: &[u8], g: usize) -> Codes {
    let low = block[4 + g / 2] >> (4 * (g % 2)) & 15;
    let high = (u16_at(block, 2) >> (2 * g) & 3) as u8;
    let scale = f16_at(block, 0) * f32::from((low | high << 4) as i8 - 32); // 11 times 6 bits: exact
    let packed = &block[8 + 16 * g..][..16];
    (iq4(packed), [scale; 2])
}

/// The 32 codes of 16 bytes of IQ4_NL and IQ4_XS.
pub(super) fn iq4(packed: &[u8]) -> [i8; 32] {
    std::array::from_fn(|i| grids::IQ4[usize::from(packed[i % 16] >> (i / 16 * 4) & 15)])
}

/// Codes of eight quads, negative where bit i of `signs` is set.
fn signed(quads: [Quad; 8], signs: u32) -> [i8; 32] {
    std::array::from_fn(|i| {
        let size = quads[i / 4].to_le_bytes()[i % 4] as i8;
        if signs >> i & 1 == 1 { -size } else { size }
    })
}

/// The signs of a group whose word has 7 bits for each 8 values.
fn four_even_signs(word: u32) -> u32 {
    (0..4).fold(0, |all, k| all | grids::even_signs(word >> (7 * k) & 127) << (8 * k))
}

/// Four entries of a codebook of eight values.
fn entries(entry: impl Fn(usize) -> [Quad; 2]) -> [Quad; 8] {
    let all: [[Quad; 2]; 4] = std::array::from_fn(entry);
    std::array::from_fn(|i| all[i / 2][i % 2])
}

/// `d * (2 s + 1) * part`: exact, since it has at most 11 and 5 bits, and `part` is a power of two.
fn odd_scale(d: f32, s: u32, part: f32) -> f32 {
    d * (2 * s + 1) as f32 * part
}

/// Scales of group `g`, 4 bits for each half in the bytes at `at`.
fn nibble_scales(block: &[u8], at: usize, g: usize) -> [f32; 2] {
    let (d, packed) = (f16_at(block, 0), u32::from(block[at + g]));
    [odd_scale(d, packed & 15, 0.125), odd_scale(d, packed >> 4, 0.125)]
}

pub(super) fn iq2_xxs(block: &[u8], g: usize) -> Codes {
    let (indices, word) = (&block[2 + 8 * g..][..4], u32_at(block, 6 + 8 * g));
    let quads = entries(|k| grids::IQ2_XXS[usize::from(indices[k])]);
    (signed(quads, four_even_signs(word)), [odd_scale(f16_at(block, 0), word >> 28, 0.125); 2])
}

pub(super) fn iq2_xs(block: &[u8], g: usize) -> Codes {
    let q: [u16; 4] = std::array::from_fn(|k| u16_at(block, 2 + 8 * g + 2 * k));
    let quads = entries(|k| grids::IQ2_XS[usize::from(q[k] & 511)]);
    let signs = (0..4).fold(0, |all, k| all | grids::even_signs((q[k] >> 9).into()) << (8 * k));
    (signed(quads, signs), nibble_scales(block, 66, g))
}

pub(super) fn iq2_s(block: &[u8], g: usize) -> Codes {
    let index = |k: usize| usize::from(block[2 + 4 * g + k]) | usize::from(block[66 + g] >> (2 * k) & 3) << 8;
    let quads = entries(|k| grids::IQ2_S[index(k)]);
    (signed(quads, u32_at(block, 34 + 4 * g)), nibble_scales(block, 74, g))
}

pub(super) fn iq3_xxs(block: &[u8], g: usize) -> Codes {
    let word = u32_at(block, 66 + 4 * g);
    let quads = std::array::from_fn(|k| grids::IQ3_XXS[usize::from(block[2 + 8 * g + k])]);
    (signed(quads, four_even_signs(word)), [odd_scale(f16_at(block, 0), word >> 28, 0.25); 2])
}

pub(super) fn iq3_s(block: &[u8], g: usize) -> Codes {
    let index = |k: usize| usize::from(block[2 + 8 * g + k]) | usize::from(block[66 + g] >> k & 1) << 8;
    let quads = std::array::from_fn(|k| grids::IQ3_S[index(k)]);
    let scale = u32::from(block[106 + g / 2] >> (4 * (g % 2)) & 15);
    (signed(quads, u32_at(block, 74 + 4 * g)), [odd_scale(f16_at(block, 0), scale, 1.0); 2])
}

/// Codes of IQ1_S and IQ1_M: eight times the value, plus one, or minus one where bit k of `below` is set.
fn iq1(index: impl Fn(usize) -> usize, below: u32) -> [i8; 32] {
    let quads = entries(|k| grids::IQ1[index(k)]);
    std::array::from_fn(|i| {
        let shift = if below >> (i / 8) & 1 == 1 { 9 } else { 7 };
        quads[i / 4].to_le_bytes()[i % 4] as i8 - shift
    })
}

pub(super) fn iq1_s(block: &[u8], g: usize) -> Codes {
    let high = u16_at(block, 34 + 2 * g);
    let index = |k: usize| usize::from(block[2 + 4 * g + k]) | usize::from(high >> (3 * k) & 7) << 8;
    let below = if high >> 15 == 1 { 15 } else { 0 };
    (iq1(index, below), [odd_scale(f16_at(block, 0), u32::from(high >> 12 & 7), 0.125); 2])
}

pub(super) fn iq1_m(block: &[u8], g: usize) -> Codes {
    let high = u16_at(block, 32 + 2 * g);
    let index = |k: usize| usize::from(block[4 * g + k]) | usize::from(high >> (4 * k) & 7) << 8;
    let below = (0..4).fold(0, |all, k| all | u32::from(high >> (4 * k + 3) & 1) << k);
    // The f16 d is in the upper four bits of the four words of scales, its lowest ones first.
    let words: [u16; 4] = std::array::from_fn(|i| u16_at(block, 48 + 2 * i));
    let d = f16_of(words[0] >> 12 | words[1] >> 8 & 0xf0 | words[2] >> 4 & 0xf00 | words[3] & 0xf000);
    let scale = |i: usize| odd_scale(d, u32::from(words[i / 4] >> (3 * (i % 4)) & 7), 0.125);
    (iq1(index, below), [scale(2 * g), scale(2 * g + 1)])
}

pub(super) fn tq1_0(block: &[u8], g: usize) -> Codes {
    // Five digits of base three in a byte: the byte times 3^n, modulo 256, times 3 / 256 is digit n.
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let digit = |at: usize, n: usize| ((u16::from(block[at].wrapping_mul(POWERS[n])) * 3) >> 8) as i8 - 1;
    let codes = std::array::from_fn(|i| match 32 * g + i {
        at @ 0..160 => digit(at % 32, at / 32),
        at @ 160..240 => digit(32 + at % 16, (at - 160) / 16),
        at => digit(48 + at % 4, (at - 240) / 4),
    });
    (codes, [f16_at(block, 52); 2])
}

pub(super) fn tq2_0(block: &[u8], g: usize) -> Codes {
    (two_bits(block, g).map(|code| code - 1), [f16_at(block, 64); 2])
}
