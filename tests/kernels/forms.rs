//! The activation forms (kernels/common/activation.h), converted back to f64 and checked against their exact values.

use half::f16;
use rocmforge::backend::hip::Buffer;

use crate::rig::Rig;

/// Largest relative f32 error of a value before it is quantised. It comes from sums of a few thousand squares in 256
/// lanes, exponentials and quotients, each within a few units of 2^-24.
pub const F32_SHARE: f64 = 4e-6;

/// Planes of 8-bit rows.
pub struct A8 {
    pub codes: Buffer,
    pub scales: Buffer,
    pub sums: Buffer,
    pub padded: usize,
}

impl A8 {
    pub fn new(rig: &Rig, rows: usize, padded: usize) -> Self {
        Self {
            codes: rig.output::<i8>(rows * padded),
            scales: rig.output::<f32>(rows * padded / 32),
            sums: rig.output::<i16>(rows * padded / 16),
            padded,
        }
    }

    /// All planes, as bits.
    pub fn bits(&self, rig: &Rig) -> (Vec<i8>, Vec<u32>, Vec<i16>) {
        (rig.download(&self.codes), rig.download(&self.scales), rig.download(&self.sums))
    }

    /// Checks all planes against the values `want[row][k]` of rows of `cols`.
    pub fn check(&self, rig: &Rig, want: &[f64], cols: usize) {
        let codes = rig.download::<i8>(&self.codes);
        let scales = rig.download::<f32>(&self.scales);
        let sums = rig.download::<i16>(&self.sums);
        for (row, want) in want.chunks_exact(cols).enumerate() {
            for group in 0..self.padded / 32 {
                let value = |i: usize| want.get(32 * group + i).copied().unwrap_or(0.0);
                let at = row * self.padded / 32 + group;
                let amax = (0..32).map(|i| value(i).abs()).fold(0.0, f64::max);
                let scale = f64::from(scales[at]);
                let slack = amax / 127.0 * F32_SHARE;
                assert!(
                    (scale - amax / 127.0).abs() <= slack,
                    "row {row} group {group}: scale {scale}, amax {amax}"
                );
                for i in 0..32 {
                    let code = f64::from(codes[32 * at + i]);
                    // Half a code, and the shift from the value's own error.
                    let off = (code * scale - value(i)).abs();
                    assert!(
                        off <= scale * 0.5 + 127.0 * 2.0 * slack,
                        "row {row} value {}: code {code} at {scale} for {}",
                        32 * group + i,
                        value(i)
                    );
                }
                for half in 0..2 {
                    let codes = &codes[32 * at + 16 * half..][..16];
                    let sum: i16 = codes.iter().map(|&code| i16::from(code)).sum();
                    assert_eq!(sums[2 * at + half], sum, "row {row} group {group} half {half}");
                }
            }
        }
    }
}

/// Planes of f16 rows, with one scale each.
pub struct X16 {
    pub values: Buffer,
    pub scales: Buffer,
    /// Whether the values are in tiles: `kernels/common/tiled.h`.
    is_tiled: bool,
}

/// The place of a value in tiles of rows of `cols` values.
fn place_in_tiles(row: usize, k: usize, cols: usize) -> usize {
    let (group, half, word, byte) = (k / 32 % 4, k / 16 % 2, k / 4 % 4, k % 4);
    let part = (2 * word + byte / 2) ^ (row % 8);
    let tile = (row / 8 * cols.div_ceil(128) + k / 128) * 2 + half;
    tile * 512 + row % 8 * 64 + part * 8 + 2 * group + byte % 2
}

/// Rows as a matrix unit across waves reads them. Up to whole steps of 128, zeros follow; other places hold no numbers.
pub fn tiled(bits: &[u16], stride: usize, cols: usize) -> Vec<u16> {
    let (rows, padded) = (bits.len() / stride, cols.next_multiple_of(128));
    let mut tiles = vec![f16::NAN.to_bits(); rows.next_multiple_of(8) * padded];
    for (row, values) in bits.chunks_exact(stride).enumerate() {
        for k in 0..padded {
            tiles[place_in_tiles(row, k, cols)] = if k < cols { values[k] } else { 0 };
        }
    }
    tiles
}

impl X16 {
    pub fn new(rig: &Rig, rows: usize, cols: usize) -> Self {
        Self { values: rig.output::<u16>(rows * cols), scales: rig.output::<f32>(rows), is_tiled: false }
    }

    /// Room for rows one after the other, and for rows in tiles, with the kernels' argument for each.
    pub fn both(rig: &Rig, rows: usize, cols: usize) -> [(Self, u32); 2] {
        let values = rig.output::<u16>(rows.next_multiple_of(8) * cols.next_multiple_of(128));
        let tiles = Self { values, scales: rig.output::<f32>(rows), is_tiled: true };
        [(Self::new(rig, rows, cols), 0), (tiles, 1)]
    }

    /// The values that the rows represent. Of tiles, what follows a row is 0.
    pub fn values(&self, rig: &Rig, cols: usize) -> Vec<f64> {
        let scales = rig.download::<f32>(&self.scales);
        let values = rig.download::<f16>(&self.values);
        let value = |row: usize, k: usize| {
            let at = if self.is_tiled { place_in_tiles(row, k, cols) } else { row * cols + k };
            values[at].to_f64() * f64::from(scales[row])
        };
        let rows = 0..scales.len();
        if self.is_tiled {
            let mut after =
                rows.clone().flat_map(|row| (cols..cols.next_multiple_of(128)).map(move |k| (row, k)));
            assert!(
                after.all(|(row, k)| values[place_in_tiles(row, k, cols)].to_bits() == 0),
                "no zeros after a row"
            );
        }
        rows.flat_map(|row| (0..cols).map(move |k| (row, k))).map(|(row, k)| value(row, k)).collect()
    }

    /// Checks against `want[row][k]`: half a unit of f16's 11 bits, or half of its smallest step, 2^-24 times the
    /// scale. The scale puts the row's largest value between 2^13 and 2^14.
    pub fn check(&self, rig: &Rig, want: &[f64], cols: usize) {
        for (row, (scale, want)) in
            rig.download::<f32>(&self.scales).iter().zip(want.chunks_exact(cols)).enumerate()
        {
            let amax = want.iter().fold(0.0, |most: f64, v| most.max(v.abs()));
            assert_eq!(scale.to_bits() & 0x007f_ffff, 0, "row {row}: scale {scale} is not a power of two");
            // f32 error may move an amax across a power of two.
            let top = amax / f64::from(*scale);
            let range = 8192.0 * (1.0 - F32_SHARE)..16384.0 * (1.0 + F32_SHARE);
            assert!(range.contains(&top), "row {row}: {amax} at scale {scale}");
        }
        self.check_by_step(rig, want, cols, |amax| amax * 2f64.powi(-24 - 13));
    }

    /// Like `check`, for rows whose scale is 1.
    pub fn check_unscaled(&self, rig: &Rig, want: &[f64], cols: usize) {
        assert!(rig.download::<f32>(&self.scales).iter().all(|&s| s == 1.0));
        self.check_by_step(rig, want, cols, |_| 2f64.powi(-24));
    }

    fn check_by_step(&self, rig: &Rig, want: &[f64], cols: usize, step: impl Fn(f64) -> f64) {
        let got = self.values(rig, cols);
        for (row, (got, want)) in got.chunks_exact(cols).zip(want.chunks_exact(cols)).enumerate() {
            let amax = want.iter().fold(0.0, |most: f64, v| most.max(v.abs()));
            for (k, (got, want)) in got.iter().zip(want).enumerate() {
                let bound = want.abs() * (2f64.powi(-11) + F32_SHARE) + step(amax) / 2.0;
                assert!((got - want).abs() <= bound, "row {row} value {k}: {got} instead of {want}");
            }
        }
    }
}

/// Checks f32 values within a relative error plus `slack`.
pub fn check_f32(got: &[f32], want: &[f64], slack: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!(
            (f64::from(got) - want).abs() <= want.abs() * F32_SHARE + slack,
            "value {i}: {got} instead of {want}"
        );
    }
}
