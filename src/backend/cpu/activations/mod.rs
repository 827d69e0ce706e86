//! Activation rows in the two forms that matmuls take: f32, and 8-bit codes ("A8").
//!
//! A8 of a row of K values, in groups of 32 consecutive ones: `codes: i8[K]` in -127..=127, `scales: f32[K/32]`,
//! `sums: i16[K/16]` (exact sums of 16 codes). Two more planes spare the kernels work: `scaled_sums: f32[K/32]`
//! (scale times the group's code sum) and `offsets: i32[K/16]` (-128 times the sums).
//! K is padded to whole groups with zero codes.
//!
//! Quantising one group, the same bits on every instruction set:
//! - `amax` = largest magnitude. If any value is NaN or infinite, the scale is NaN and the codes are 0, so everything
//!   computed from the row is NaN. If `amax < 2^-100`, scale and codes are 0.
//! - else `scale = amax / 127` and `code = x * (127 / amax)` rounded to the nearest integer, ties to even; both
//!   quotients and the product rounded to f32.

mod aligned;
#[cfg(target_arch = "x86_64")]
mod x86;

use aligned::Aligned;

#[cfg(target_arch = "x86_64")]
use super::isa::Isa;
use super::isa::Kernels;

/// Values that share a scale.
pub const GROUP: usize = 32;

/// Groups below this are zeros: 127 / amax stays far from overflow.
const AMAX_MIN: f32 = f32::from_bits((127 - 100) << 23);

/// Rows of activations in f32 and A8 form, each plane row-major and 64-byte aligned. Grows, never shrinks.
#[derive(Debug, Default)]
pub struct ActivationBuffer {
    rows: usize,
    cols: usize,
    values: Aligned<f32>,
    codes: Aligned<i8>,
    scales: Aligned<f32>,
    sums: Aligned<i16>,
    scaled_sums: Aligned<f32>,
    offsets: Aligned<i32>,
}

impl ActivationBuffer {
    /// An empty buffer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for `rows` rows of `cols` values, whose contents are then unspecified, padding zero. Allocates only
    /// when the buffer was never so large. About 5.5 bytes per value.
    pub fn reset(&mut self, rows: usize, cols: usize) {
        let padded = cols.next_multiple_of(GROUP);
        (self.rows, self.cols) = (rows, cols);
        self.values.resize(rows * padded);
        self.codes.resize(rows * padded);
        self.scales.resize(rows * padded / 32);
        self.sums.resize(rows * padded / 16);
        self.scaled_sums.resize(rows * padded / 32);
        self.offsets.resize(rows * padded / 16);
        if padded != cols {
            for row in self.values.slice_mut().chunks_exact_mut(padded) {
                row[cols..].fill(0.0);
            }
        }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values per row, without padding.
    pub fn cols(&self) -> usize {
        self.cols
    }

    fn stride(&self) -> usize {
        self.cols.next_multiple_of(GROUP)
    }

    /// The rows, to be written. Rows are disjoint, so different threads may take them.
    pub fn rows_mut(&mut self) -> impl Iterator<Item = ActivationRow<'_>> {
        let (cols, k) = (self.cols, self.stride().max(GROUP));
        let codes = self.codes.slice_mut().chunks_exact_mut(k);
        let scales = self.scales.slice_mut().chunks_exact_mut(k / 32);
        let sums = self.sums.slice_mut().chunks_exact_mut(k / 16);
        let scaled_sums = self.scaled_sums.slice_mut().chunks_exact_mut(k / 32);
        let offsets = self.offsets.slice_mut().chunks_exact_mut(k / 16);
        let values = self.values.slice_mut().chunks_exact_mut(k);
        values.zip(codes).zip(scales).zip(sums).zip(scaled_sums).zip(offsets).map(
            move |(((((values, codes), scales), sums), scaled_sums), offsets)| ActivationRow {
                cols,
                values,
                codes,
                scales,
                sums,
                scaled_sums,
                offsets,
            },
        )
    }

    /// Row `index` to be written, or `None` past the end.
    pub fn row_mut(&mut self, index: usize) -> Option<ActivationRow<'_>> {
        self.rows_mut().nth(index)
    }

    /// The buffer to be read by matmuls, on any number of threads.
    pub fn view(&self) -> ActivationView<'_> {
        ActivationView {
            rows: self.rows,
            cols: self.cols,
            stride: self.stride(),
            values: self.values.slice(),
            codes: self.codes.slice(),
            scales: self.scales.slice(),
            sums: self.sums.slice(),
            scaled_sums: self.scaled_sums.slice(),
            offsets: self.offsets.slice(),
        }
    }
}

/// One row, or a run of whole groups of one, to be written: fill [`ActivationRow::values_mut`], then
/// [`ActivationRow::quantize`] if quantised weights will meet it in 8 bits.
#[derive(Debug)]
pub struct ActivationRow<'a> {
    cols: usize,
    values: &'a mut [f32],
    codes: &'a mut [i8],
    scales: &'a mut [f32],
    sums: &'a mut [i16],
    scaled_sums: &'a mut [f32],
    offsets: &'a mut [i32],
}

impl<'a> ActivationRow<'a> {
    /// The f32 values, without padding.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.cols]
    }

    /// Makes the A8 form from the f32 form: about 0.1 ns per value with AVX-512.
    pub fn quantize(&mut self, kernels: Kernels) {
        let out = A8Mut {
            codes: self.codes,
            scales: self.scales,
            sums: self.sums,
            scaled_sums: self.scaled_sums,
            offsets: self.offsets,
        };
        match kernels.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512Vnni => x86::quantize(kernels, self.values, out),
            _ => quantize_portable(self.values, out),
        }
    }

    /// The first `cols` values (rounded down to whole groups) and the rest, for two threads to write.
    pub fn split_at(self, cols: usize) -> (ActivationRow<'a>, ActivationRow<'a>) {
        let k = (cols / GROUP * GROUP).min(self.values.len());
        let (values, values_right) = self.values.split_at_mut(k);
        let (codes, codes_right) = self.codes.split_at_mut(k);
        let (scales, scales_right) = self.scales.split_at_mut(k / 32);
        let (sums, sums_right) = self.sums.split_at_mut(k / 16);
        let (scaled_sums, scaled_sums_right) = self.scaled_sums.split_at_mut(k / 32);
        let (offsets, offsets_right) = self.offsets.split_at_mut(k / 16);
        let left =
            ActivationRow { cols: k.min(self.cols), values, codes, scales, sums, scaled_sums, offsets };
        let right = ActivationRow {
            cols: self.cols.saturating_sub(k),
            values: values_right,
            codes: codes_right,
            scales: scales_right,
            sums: sums_right,
            scaled_sums: scaled_sums_right,
            offsets: offsets_right,
        };
        (left, right)
    }
}

/// Rows of activations to be read. All planes are row-major: `stride` values, codes; `stride / 32` scales, scaled
/// sums; `stride / 16` sums, offsets per row.
#[derive(Clone, Copy, Debug)]
pub struct ActivationView<'a> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) stride: usize,
    pub(super) values: &'a [f32],
    pub(super) codes: &'a [i8],
    pub(super) scales: &'a [f32],
    pub(super) sums: &'a [i16],
    pub(super) scaled_sums: &'a [f32],
    pub(super) offsets: &'a [i32],
}

impl<'a> ActivationView<'a> {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values per row, without padding.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The f32 form of row `m`, without padding. Panics past the last row.
    pub fn values(&self, m: usize) -> &'a [f32] {
        &self.values[m * self.stride..][..self.cols]
    }

    /// The codes of row `m`, with padding. Panics past the last row.
    pub fn codes(&self, m: usize) -> &'a [i8] {
        &self.codes[m * self.stride..][..self.stride]
    }

    /// The scales of row `m`. Panics past the last row.
    pub fn scales(&self, m: usize) -> &'a [f32] {
        &self.scales[m * self.stride / 32..][..self.stride / 32]
    }

    /// The sums of 16 codes of row `m`. Panics past the last row.
    pub fn sums(&self, m: usize) -> &'a [i16] {
        &self.sums[m * self.stride / 16..][..self.stride / 16]
    }

    /// Scale times code sum of each group of row `m`. Panics past the last row.
    pub fn scaled_sums(&self, m: usize) -> &'a [f32] {
        &self.scaled_sums[m * self.stride / 32..][..self.stride / 32]
    }

    /// Only rows `start..` up to `rows` of them.
    pub fn rows_from(&self, start: usize, rows: usize) -> Self {
        let start = start.min(self.rows);
        let (k, rest) = (self.stride, self.rows - start);
        Self {
            rows: rows.min(rest),
            values: &self.values[start * k..],
            codes: &self.codes[start * k..],
            scales: &self.scales[start * k / 32..],
            sums: &self.sums[start * k / 16..],
            scaled_sums: &self.scaled_sums[start * k / 32..],
            offsets: &self.offsets[start * k / 16..],
            ..*self
        }
    }
}

/// Planes of the A8 form of a run of groups.
#[derive(Debug)]
struct A8Mut<'a> {
    codes: &'a mut [i8],
    scales: &'a mut [f32],
    sums: &'a mut [i16],
    scaled_sums: &'a mut [f32],
    offsets: &'a mut [i32],
}

/// Scale and factor (127 / amax) of a group whose largest magnitude has these bits; factor 0 makes all codes 0.
fn scale_and_factor(amax_bits: u32) -> (f32, f32) {
    let amax = f32::from_bits(amax_bits);
    if amax_bits >= f32::INFINITY.to_bits() {
        (f32::NAN, 0.0)
    } else if amax < AMAX_MIN {
        (0.0, 0.0)
    } else {
        (amax / 127.0, 127.0 / amax)
    }
}

fn quantize_portable(values: &[f32], out: A8Mut<'_>) {
    let codes = out.codes.chunks_exact_mut(GROUP);
    for (g, (x, codes)) in values.chunks_exact(GROUP).zip(codes).enumerate() {
        let amax_bits = x.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
        let (scale, factor) = scale_and_factor(amax_bits);
        if factor == 0.0 {
            codes.fill(0);
        } else {
            codes.iter_mut().zip(x).for_each(|(c, &v)| *c = (v * factor).round_ties_even() as i8);
        }
        let sum = |half: &[i8]| half.iter().map(|&c| i16::from(c)).sum::<i16>();
        let (low, high) = (sum(&codes[..16]), sum(&codes[16..]));
        out.scales[g] = scale;
        out.sums[2 * g..2 * g + 2].copy_from_slice(&[low, high]);
        out.scaled_sums[g] = scale * f32::from(low + high);
        out.offsets[2 * g..2 * g + 2].copy_from_slice(&[-128 * i32::from(low), -128 * i32::from(high)]);
    }
}

#[cfg(test)]
mod tests;
