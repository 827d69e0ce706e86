//! Activation rows in the two forms that matmuls take: f32, and 8-bit codes ("A8").
//!
//! The A8 form of a row of K values, in groups of 32 consecutive values, has two planes of `codes: i8[K]` in
//! -127..=127 and `scales: f32[K/32]`. One plane is coarse; the fine one is for groups with outliers and is zero for
//! others. A value is `code * scale + fine code * fine scale`.
//!
//! One outlier makes the quantisation steps of its whole group large. About 5 % of a real model's groups cause two
//! thirds of the loss in the layers. Mean KL divergence over 30 layers of Q4_1 weights and a Q8_0 head: 3.6e-3 without
//! fine codes, 1.2e-3 with them. Scales per 16 values, which add cost to every group, leave 1.9e-3.
//!
//! Further planes save the kernels work: `offsets: i32[K/16]` beside each plane of codes (-128 times the sum of 16
//! codes), and `scaled_sums: f32[K/32]` (`scale * sum + fine scale * fine sum` of the group). K is padded to whole
//! groups with zero codes.
//!
//! A row is quantised to the same bits on every instruction set, with all results rounded to f32:
//! - `amax` = largest magnitude of a group. If any value is NaN or infinite, the scale is NaN and the codes are 0, so
//!   everything computed from the row is NaN. If `amax < 2^-100`, scale and codes are 0.
//! - else `scale = amax / 127` and `code = t` rounded to the nearest integer, ties to even, with `t = x * (127 / amax)`.
//! - A group has fine codes if its `amax` exceeds `above * sum / groups`, where `sum` adds the `amax` of all groups in
//!   rising order. Then `fine scale = scale / 254` and `fine code = (t - code) * 254`, rounded in the same way.

mod aligned;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use aligned::Aligned;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::isa::Isa;
use super::isa::Kernels;

/// Values that share one scale.
pub const GROUP: usize = 32;

/// In the layers, a group has fine codes if its largest magnitude exceeds the mean of its row's groups by this
/// factor: 5 of 100 groups. At 2, 8 of 100 groups have them and a quarter of the loss is saved. At 4, 2 of 100 have
/// them and the loss grows by half.
pub const FINE_ABOVE: f32 = 2.5;

/// For the head and the choice of experts: fine codes for all groups. Nothing after them evens their errors out, and
/// they have few rows of activations or of weights.
pub const FINE_ALL: f32 = 0.0;

/// Fine steps per coarse step: the rounding error, up to half a coarse step, fits in 127 of them.
const FINE_STEPS: f32 = 254.0;

/// Groups below this become zeros, so that 127 / amax stays far from overflow.
const AMAX_MIN: f32 = f32::from_bits((127 - 100) << 23);

/// Codes, scales and offsets of all groups.
#[derive(Debug, Default)]
struct Plane {
    codes: Aligned<i8>,
    scales: Aligned<f32>,
    offsets: Aligned<i32>,
}

impl Plane {
    fn resize(&mut self, len: usize) {
        self.codes.resize(len);
        self.scales.resize(len / 32);
        self.offsets.resize(len / 16);
    }

    fn rows_mut(&mut self, stride: usize) -> impl Iterator<Item = PlaneMut<'_>> {
        let codes = self.codes.slice_mut().chunks_exact_mut(stride);
        let scales = self.scales.slice_mut().chunks_exact_mut(stride / 32);
        let offsets = self.offsets.slice_mut().chunks_exact_mut(stride / 16);
        let planes = codes.zip(scales).zip(offsets);
        planes.map(|((codes, scales), offsets)| PlaneMut { codes, scales, offsets })
    }

    fn view(&self) -> PlaneView<'_> {
        PlaneView { codes: self.codes.slice(), scales: self.scales.slice(), offsets: self.offsets.slice() }
    }
}

/// Rows of activations in f32 and A8 form, each plane row-major and 64-byte aligned. Grows, never shrinks.
#[derive(Debug, Default)]
pub struct ActivationBuffer {
    rows: usize,
    cols: usize,
    values: Aligned<f32>,
    coarse: Plane,
    fine: Plane,
    scaled_sums: Aligned<f32>,
}

impl ActivationBuffer {
    /// An empty buffer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for `rows` rows of `cols` values. Contents are unspecified, padding is zero. Allocates only when
    /// the buffer must grow. About 7 bytes per value.
    pub fn reset(&mut self, rows: usize, cols: usize) {
        let padded = cols.next_multiple_of(GROUP);
        (self.rows, self.cols) = (rows, cols);
        self.values.resize(rows * padded);
        self.coarse.resize(rows * padded);
        self.fine.resize(rows * padded);
        self.scaled_sums.resize(rows * padded / 32);
        if padded != cols {
            for row in self.values.slice_mut().chunks_exact_mut(padded) {
                row[cols..].fill(0.0);
            }
        }
    }

    /// Number of rows.
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

    /// Mutable rows. They are disjoint, so different threads may take them.
    pub fn rows_mut(&mut self) -> impl Iterator<Item = ActivationRow<'_>> {
        let (cols, stride) = (self.cols, self.stride().max(GROUP));
        let values = self.values.slice_mut().chunks_exact_mut(stride);
        let codes = self.coarse.rows_mut(stride).zip(self.fine.rows_mut(stride));
        let scaled_sums = self.scaled_sums.slice_mut().chunks_exact_mut(stride / 32);
        values.zip(codes).zip(scaled_sums).map(move |((values, (coarse, fine)), scaled_sums)| ActivationRow {
            cols,
            values,
            codes: A8Mut { coarse, fine, scaled_sums },
        })
    }

    /// Mutable row `index`, or `None` past the end.
    pub fn row_mut(&mut self, index: usize) -> Option<ActivationRow<'_>> {
        self.rows_mut().nth(index)
    }

    /// A read-only view for matmuls, on any number of threads.
    pub fn view(&self) -> ActivationView<'_> {
        ActivationView {
            rows: self.rows,
            cols: self.cols,
            stride: self.stride(),
            values: self.values.slice(),
            coarse: self.coarse.view(),
            fine: self.fine.view(),
            scaled_sums: self.scaled_sums.slice(),
        }
    }
}

/// A mutable row: fill [`ActivationRow::values_mut`], then call [`ActivationRow::quantize`] if quantised weights will
/// meet it in 8 bits.
#[derive(Debug)]
pub struct ActivationRow<'a> {
    cols: usize,
    values: &'a mut [f32],
    codes: A8Mut<'a>,
}

impl ActivationRow<'_> {
    /// The f32 values, without padding.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.cols]
    }

    /// Makes the A8 form from the f32 form, at about 0.1 ns per value with AVX-512. Groups that exceed the mean by
    /// the factor `fine_above` have fine codes ([`FINE_ABOVE`], [`FINE_ALL`]).
    pub fn quantize(&mut self, kernels: Kernels, fine_above: f32) {
        let (values, _) = self.values.as_chunks();
        match kernels.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512Vnni => x86::quantize(kernels, values, fine_above, &mut self.codes),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::quantize(kernels, values, fine_above, &mut self.codes),
            _ => quantize(values, fine_above, &mut self.codes, amax, encode, encode_fine),
        }
    }
}

/// A read-only plane of codes.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlaneView<'a> {
    pub(super) codes: &'a [i8],
    pub(super) scales: &'a [f32],
    pub(super) offsets: &'a [i32],
}

impl<'a> PlaneView<'a> {
    /// The plane from value `at` on; `at` starts a group.
    fn from(self, at: usize) -> Self {
        Self { codes: &self.codes[at..], scales: &self.scales[at / 32..], offsets: &self.offsets[at / 16..] }
    }

    /// Codes and scale of the group at `at`, a multiple of 32. Panics past the last.
    pub(super) fn group(&self, at: usize) -> (&'a [i8], f32) {
        (&self.codes[at..][..GROUP], self.scales[at / 32])
    }
}

/// Read-only rows of activations. All planes are row-major. Per row: `stride` values and codes, `stride / 32` scales
/// and scaled sums, `stride / 16` offsets.
#[derive(Clone, Copy, Debug)]
pub struct ActivationView<'a> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) stride: usize,
    pub(super) values: &'a [f32],
    pub(super) coarse: PlaneView<'a>,
    pub(super) fine: PlaneView<'a>,
    pub(super) scaled_sums: &'a [f32],
}

impl<'a> ActivationView<'a> {
    /// Number of rows.
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

    /// Value `k` of row `m`, decoded from the A8 form. Panics past the last.
    pub fn decoded(&self, m: usize, k: usize) -> f64 {
        let at = m * self.stride + k;
        let part = |plane: PlaneView<'_>| f64::from(plane.codes[at]) * f64::from(plane.scales[at / 32]);
        part(self.coarse) + part(self.fine)
    }

    /// Scaled sums of both halves of the group at `at`, a multiple of 32: see [`half_sum`]. Panics past the last.
    pub(super) fn half_sums(&self, at: usize) -> [f32; 2] {
        let part = |plane: PlaneView<'_>, half: usize| (plane.offsets[at / 16 + half], plane.scales[at / 32]);
        [0, 1].map(|half| half_sum(part(self.coarse, half), part(self.fine, half)))
    }

    /// A view of at most `rows` rows from `start` on.
    pub fn rows_from(&self, start: usize, rows: usize) -> Self {
        let start = start.min(self.rows);
        let (at, rest) = (start * self.stride, self.rows - start);
        Self {
            rows: rows.min(rest),
            values: &self.values[at..],
            coarse: self.coarse.from(at),
            fine: self.fine.from(at),
            scaled_sums: &self.scaled_sums[at / 32..],
            ..*self
        }
    }
}

/// A mutable row of a plane of codes.
#[derive(Debug)]
struct PlaneMut<'a> {
    codes: &'a mut [i8],
    scales: &'a mut [f32],
    offsets: &'a mut [i32],
}

impl PlaneMut<'_> {
    /// Writes group `g`; `encode` writes its codes. Returns the code sum times the scale.
    #[inline(always)]
    fn put(&mut self, g: usize, scale: f32, encode: impl FnOnce(&mut [i8; GROUP]) -> [i16; 2]) -> f32 {
        let sums = match self.codes.as_chunks_mut().0.get_mut(g) {
            Some(codes) => encode(codes),
            None => [0; 2],
        };
        self.scales[g] = scale;
        self.offsets[2 * g..2 * g + 2].copy_from_slice(&sums.map(|sum| -128 * i32::from(sum)));
        scale * f32::from(sums[0] + sums[1])
    }
}

/// The A8 form of a row.
#[derive(Debug)]
struct A8Mut<'a> {
    coarse: PlaneMut<'a>,
    fine: PlaneMut<'a>,
    scaled_sums: &'a mut [f32],
}

/// `scale * sum + fine scale * fine sum` of half a group, from the offset and the scale of each plane.
#[inline(always)]
pub(super) fn half_sum(coarse: (i32, f32), fine: (i32, f32)) -> f32 {
    // Offsets are -128 times the sums; a power of two rounds nothing.
    let part = |(offset, scale): (i32, f32)| scale * (offset as f32 * (-1.0 / 128.0));
    part(coarse) + part(fine)
}

/// Scale and factor (127 / amax) of a group with this `amax`; factor 0 makes all codes 0.
fn scale_and_factor(amax: f32) -> (f32, f32) {
    if !amax.is_finite() {
        (f32::NAN, 0.0)
    } else if amax < AMAX_MIN {
        (0.0, 0.0)
    } else {
        (amax / 127.0, 127.0 / amax)
    }
}

/// Quantises a row. The caller gives an instruction set's operations on a group: `amax` is the largest magnitude,
/// with NaN above infinity. `encode` and `encode_fine` write codes for a factor and return the sums of both halves.
#[inline(always)]
fn quantize(
    values: &[[f32; GROUP]],
    fine_above: f32,
    out: &mut A8Mut<'_>,
    amax: impl Fn(&[f32; GROUP]) -> f32,
    encode: impl Fn(&[f32; GROUP], f32, &mut [i8; GROUP]) -> [i16; 2],
    encode_fine: impl Fn(&[f32; GROUP], f32, &mut [i8; GROUP]) -> [i16; 2],
) {
    let A8Mut { coarse, fine, scaled_sums } = out;
    let mut sum = 0.0;
    for (scale, x) in coarse.scales.iter_mut().zip(values) {
        *scale = amax(x); // the second pass replaces it
        sum += *scale;
    }
    let limit = fine_above * sum / values.len() as f32;
    for (g, (x, scaled_sum)) in values.iter().zip(scaled_sums.iter_mut()).enumerate() {
        let amax = coarse.scales[g];
        let (scale, factor) = scale_and_factor(amax);
        let none = |codes: &mut [i8; GROUP]| {
            codes.fill(0);
            [0; 2]
        };
        *scaled_sum = if factor == 0.0 {
            coarse.put(g, scale, none)
        } else {
            coarse.put(g, scale, |codes| encode(x, factor, codes))
        };
        *scaled_sum += if amax > limit && factor != 0.0 {
            fine.put(g, scale / FINE_STEPS, |codes| encode_fine(x, factor, codes))
        } else {
            fine.put(g, 0.0, none)
        };
    }
}

fn amax(x: &[f32; GROUP]) -> f32 {
    f32::from_bits(x.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().unwrap_or(0))
}

fn encode(x: &[f32; GROUP], factor: f32, codes: &mut [i8; GROUP]) -> [i16; 2] {
    codes.iter_mut().zip(x).for_each(|(code, &x)| *code = (x * factor).round_ties_even() as i8);
    sums(codes)
}

fn encode_fine(x: &[f32; GROUP], factor: f32, codes: &mut [i8; GROUP]) -> [i16; 2] {
    for (code, &x) in codes.iter_mut().zip(x) {
        let t = x * factor;
        *code = ((t - t.round_ties_even()) * FINE_STEPS).round_ties_even() as i8;
    }
    sums(codes)
}

/// Sums of the first and the last 16 codes.
fn sums(codes: &[i8; GROUP]) -> [i16; 2] {
    let sum = |half: &[i8]| half.iter().map(|&c| i16::from(c)).sum();
    [sum(&codes[..16]), sum(&codes[16..])]
}

#[cfg(test)]
mod tests;
