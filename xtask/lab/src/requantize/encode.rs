//! Makes blocks of the microscaling formats, by section 6.3 of the OCP specification. A block's power of two is that of its
//! largest value, less that of the largest element. Elements round to the nearest, ties to even, and those beyond the
//! largest become it.

use rocmforge::backend::cpu::quant::dequantize_row;
use rocmforge::tensor::DType;

/// Values of a block.
pub const BLOCK: usize = 32;
/// Bytes of a block: the power of two, lower four bits, upper two bits.
const BYTES: usize = 25;
/// Bit of a negative element.
const SIGN: u8 = 32;

/// The elements of a 6-bit type.
pub struct Elements {
    /// Magnitude of each code without a sign, ascending.
    sizes: [f32; SIGN as usize],
}

impl Elements {
    /// Those of `dtype`; `None` for a type that is none of the 6-bit floats.
    pub fn of(dtype: DType) -> Option<Self> {
        if !matches!(dtype, DType::MXFP6_E2M3 | DType::MXFP6_E3M2) {
            return None;
        }
        // The values of a block of all codes under 2^0 are the elements.
        let mut sizes = [0.0; SIGN as usize];
        dequantize_row(dtype, &pack(127, &std::array::from_fn(|i| i as u8)), &mut sizes).ok()?;
        Some(Self { sizes })
    }

    /// The block of these values, which are finite.
    pub fn encode(&self, values: &[f32; BLOCK]) -> [u8; BYTES] {
        let most = values.iter().fold(0f32, |most, value| most.max(value.abs()));
        let largest = exponent(self.sizes[SIGN as usize - 1]);
        let power = if most == 0.0 { 0 } else { (exponent(most) - largest + 127).clamp(0, 254) };
        let scale = f64::from(power - 127).exp2();
        pack(power as u8, &values.map(|value| self.nearest(f64::from(value) / scale)))
    }

    fn nearest(&self, value: f64) -> u8 {
        let size = value.abs();
        let above = self.sizes.partition_point(|&s| f64::from(s) < size).min(self.sizes.len() - 1);
        let below = above.saturating_sub(1);
        let middle = f64::midpoint(f64::from(self.sizes[below]), f64::from(self.sizes[above]));
        // In the middle, the even code.
        let up = size > middle || (size == middle && above.is_multiple_of(2));
        let code = if up { above } else { below };
        code as u8 | if value.is_sign_negative() { SIGN } else { 0 }
    }
}

/// The exponent of a number's leading bit. `value` is above 0.
fn exponent(value: f32) -> i32 {
    // Exact in f64, where no f32 is subnormal.
    (f64::from(value).to_bits() >> 52) as i32 - 1023
}

/// A block of these six-bit codes; `src/backend/cpu/quant/mod.rs` has the layout.
fn pack(power: u8, codes: &[u8; BLOCK]) -> [u8; BYTES] {
    let mut block = [0; BYTES];
    block[0] = power;
    for (i, code) in codes.iter().enumerate() {
        block[1 + i % 16] |= (code & 15) << (i / 16 * 4);
        block[17 + i / 16 * 4 + i % 4] |= code >> 4 << (i % 16 / 4 * 2);
    }
    block
}

#[cfg(test)]
mod tests {
    #![allow(clippy::expect_used)] // tests fail by panicking

    use rocmforge_test_support::quant_blocks::{QuantBlocks, quant_blocks};

    use super::*;

    fn golden(dtype: DType) -> QuantBlocks {
        let found = quant_blocks().into_iter().find(|blocks| blocks.number == dtype.ggml());
        found.expect("golden blocks of the type")
    }

    #[test]
    fn blocks_equal_those_of_an_independent_encoder() {
        // `ml_dtypes` made the blocks out of these values.
        let source = golden(DType::F16).values;
        for dtype in [DType::MXFP6_E2M3, DType::MXFP6_E3M2] {
            let elements = Elements::of(dtype).expect("a 6-bit type");
            let want = golden(dtype).bytes;
            // The third row is random bytes.
            let rows = source.as_chunks::<BLOCK>().0[..2 * 512 / BLOCK].iter();
            for (number, (values, want)) in rows.zip(want.as_chunks::<BYTES>().0).enumerate() {
                assert_eq!(elements.encode(values), *want, "{dtype} block {number}");
            }
        }
    }

    #[test]
    fn ties_go_to_even_codes_and_no_element_is_exceeded() {
        let elements = Elements::of(DType::MXFP6_E2M3).expect("a 6-bit type");
        for (value, code) in
            [(0.0625, 0), (0.1875, 2), (0.0626, 1), (7.25, 30), (7.3, 31), (7.99, 31), (-0.0, 32)]
        {
            assert_eq!(elements.nearest(value), code, "{value}");
        }
        assert!(Elements::of(DType::MXFP4).is_none());
    }
}
