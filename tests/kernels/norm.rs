//! RMS norm, SwiGLU and quantising, into all forms of activations.

use rocmforge::backend::hip::kernels::ops::{
    GatedA8, GatedF32, GatedX16, NormA8, NormF32, NormX16, QuantiseA8, QuantiseX16,
};
use rocmforge::backend::hip::{DevicePtr, Grid};

use crate::forms::{A8, X16, check_f32};
use crate::random::Random;
use crate::rig::{Rig, rig};

const EPS: f32 = 1e-5;

/// `x[r] * weight / sqrt(mean(x[r]^2) + eps)` for the rows named.
fn normed(x: &[f32], weight: &[f32], rows: &[u32]) -> Vec<f64> {
    let cols = weight.len();
    let mut out = Vec::new();
    for &row in rows {
        let x = &x[row as usize * cols..][..cols];
        let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / cols as f64;
        let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
        out.extend(x.iter().zip(weight).map(|(&x, &w)| f64::from(x) * factor * f64::from(w)));
    }
    out
}

struct Norm {
    x: Vec<f32>,
    weight: Vec<f32>,
    rows: Vec<u32>,
    padded: usize,
    threads: u32,
}

impl Norm {
    fn grid(&self) -> Grid {
        Grid::x(self.rows.len() as u32).threads(self.threads)
    }

    /// Runs all three variants and checks them; returns the 8-bit form's bits.
    fn check(&self, rig: &Rig) -> (Vec<i8>, Vec<u32>, Vec<i16>) {
        let (m, cols) = (self.rows.len(), self.weight.len());
        let want = normed(&self.x, &self.weight, &self.rows);
        let (x, weight, rows) = (rig.upload(&self.x), rig.upload(&self.weight), rig.upload(&self.rows));
        let (x, weight, rows) = (x.ptr(), weight.ptr(), rows.ptr());
        let cols_arg = cols as u32;

        let out = rig.output::<f32>(m * cols);
        let arguments = NormF32 { x, weight, rows, out: out.ptr(), eps: EPS, cols: cols_arg };
        rig.device.launch(&rig.stream, NormF32::norm_f32, self.grid(), &arguments).unwrap();
        check_f32(&rig.download(&out), &want, 0.0);

        let out = X16::new(rig, m, cols);
        let (out_ptr, row_scales) = (out.values.ptr(), out.scales.ptr());
        let arguments = NormX16 { x, weight, rows, out: out_ptr, row_scales, eps: EPS, cols: cols_arg };
        rig.device.launch(&rig.stream, NormX16::norm_x16, self.grid(), &arguments).unwrap();
        out.check(rig, &want, cols);

        let out = A8::new(rig, m, self.padded);
        let (codes, scales, sums) = (out.codes.ptr(), out.scales.ptr(), out.sums.ptr());
        let padded = self.padded as u32;
        let arguments = NormA8 { x, weight, rows, codes, scales, sums, eps: EPS, cols: cols_arg, padded };
        rig.device.launch(&rig.stream, NormA8::norm_a8, self.grid(), &arguments).unwrap();
        out.check(rig, &want, cols);
        out.bits(rig)
    }
}

#[test]
fn norm_is_that_of_f64_in_every_form() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    // Odd widths, a width past what lanes keep, padding to 32 and to 256, rows out of order.
    for (cols, padded, rows, threads) in [
        (1, 32, vec![0], 256),
        (33, 64, vec![2, 0, 1, 1], 256),
        (576, 768, vec![0, 1], 256),
        (4096, 4096, vec![1, 0], 1024),
        (5120, 5120, vec![0], 256),
        (8224, 8448, vec![0], 256),
    ] {
        let x = random.normals(3 * cols).iter().map(|v| v * 3.0).collect();
        Norm { x, weight: random.normals(cols), rows, padded, threads }.check(rig);
    }
}

#[test]
fn a_normed_row_has_the_same_bits_in_any_company() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    let (cols, weight) = (2048, random.normals(2048));
    let mut norm =
        Norm { x: random.normals(17 * cols), weight, rows: (0..17).collect(), padded: cols, threads: 256 };
    let (codes, scales, sums) = norm.check(rig);
    for row in [0usize, 7, 16] {
        norm.rows = vec![row as u32];
        let alone = norm.check(rig);
        assert_eq!(alone.0, codes[row * cols..][..cols], "row {row}");
        assert_eq!(alone.1, scales[row * cols / 32..][..cols / 32], "row {row}");
        assert_eq!(alone.2, sums[row * cols / 16..][..cols / 16], "row {row}");
    }
}

#[test]
fn values_that_are_no_numbers_make_a_group_or_row_one() {
    let Some(rig) = rig() else { return };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = vec![1.0f32; 96];
        x[40] = bad;
        x[64..].fill(f32::MIN_POSITIVE); // below 2^-100: zeros
        let input = rig.upload(&x);
        let out = A8::new(rig, 1, 128);
        let (codes, scales, sums) = (out.codes.ptr(), out.scales.ptr(), out.sums.ptr());
        let arguments = QuantiseA8 { x: input.ptr(), codes, scales, sums, stride: 96, cols: 96, padded: 128 };
        rig.device.launch(&rig.stream, QuantiseA8::quantise_a8, Grid::xy(1, 1), &arguments).unwrap();
        let codes = rig.download::<i8>(&out.codes);
        let scales = rig.download::<f32>(&out.scales);
        assert!(codes[..32].iter().all(|&c| c == 127) && codes[32..].iter().all(|&c| c == 0), "{codes:?}");
        assert!(scales[0] == 1.0 / 127.0 && scales[1].is_nan() && scales[2..] == [0.0, 0.0], "{scales:?}");
        assert_eq!(rig.download::<i16>(&out.sums), [2032, 2032, 0, 0, 0, 0, 0, 0]);

        let out = X16::new(rig, 1, 96);
        let (out_ptr, row_scales) = (out.values.ptr(), out.scales.ptr());
        let arguments = QuantiseX16 { x: input.ptr(), out: out_ptr, row_scales, stride: 96, cols: 96 };
        rig.device.launch(&rig.stream, QuantiseX16::quantise_x16, Grid::x(1), &arguments).unwrap();
        assert!(rig.download::<f32>(&out.scales)[0].is_nan());
        assert!(rig.download::<u16>(&out.values).iter().all(|&v| v == 0));
    }
}

/// From 2^-100 on a value is one, in both forms; what is smaller is 0, and so is its scale.
#[test]
fn values_below_the_smallest_scale_are_zeros() {
    let Some(rig) = rig() else { return };
    let least = 2f32.powi(-100);
    for (value, scales, code) in [
        (0.0, (0.0, 0.0), 0),
        (least.next_down(), (0.0, 0.0), 0),
        (least, (least / 127.0, 2f32.powi(-113)), 127),
        (-least, (least / 127.0, 2f32.powi(-113)), -127),
    ] {
        let input = rig.upload(&[value; 32]);
        let out = A8::new(rig, 1, 32);
        let (codes, a8_scales, sums) = (out.codes.ptr(), out.scales.ptr(), out.sums.ptr());
        let arguments =
            QuantiseA8 { x: input.ptr(), codes, scales: a8_scales, sums, stride: 32, cols: 32, padded: 32 };
        rig.device.launch(&rig.stream, QuantiseA8::quantise_a8, Grid::xy(1, 1), &arguments).unwrap();
        assert_eq!(rig.download::<f32>(&out.scales), [scales.0], "{value:e}");
        assert_eq!(rig.download::<i8>(&out.codes), [code; 32], "{value:e}");

        let out = X16::new(rig, 1, 32);
        let (out_ptr, row_scales) = (out.values.ptr(), out.scales.ptr());
        let arguments = QuantiseX16 { x: input.ptr(), out: out_ptr, row_scales, stride: 32, cols: 32 };
        rig.device.launch(&rig.stream, QuantiseX16::quantise_x16, Grid::x(1), &arguments).unwrap();
        assert_eq!(rig.download::<f32>(&out.scales), [scales.1], "{value:e}");
        let stands_for = if scales.1 == 0.0 { 0.0 } else { f64::from(value) };
        assert!(out.values(rig, 32).iter().all(|&v| v == stands_for), "{value:e}");
    }
}

#[test]
fn quantised_rows_stand_for_their_values() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (m, cols, stride, padded) in [(1, 1, 1, 32), (3, 100, 133, 256), (2, 4128, 4200, 4352)] {
        // Rows of very different size: each has a scale of its own.
        let mut x = random.normals(m * stride);
        for (row, x) in x.chunks_exact_mut(stride).enumerate() {
            x.iter_mut().for_each(|v| *v *= 10f32.powi(6 - 9 * row as i32));
        }
        let want: Vec<f64> = x.chunks_exact(stride).flat_map(|row| &row[..cols]).map(|&v| v.into()).collect();
        let input = rig.upload(&x);
        let out = A8::new(rig, m, padded);
        let (codes, scales, sums) = (out.codes.ptr(), out.scales.ptr(), out.sums.ptr());
        let (stride, cols_arg) = (stride as u32, cols as u32);
        let x = input.ptr();
        let arguments = QuantiseA8 { x, codes, scales, sums, stride, cols: cols_arg, padded: padded as u32 };
        let grid = Grid::xy(padded.div_ceil(1024) as u32, m as u32);
        rig.device.launch(&rig.stream, QuantiseA8::quantise_a8, grid, &arguments).unwrap();
        out.check(rig, &want, cols);
        let out = X16::new(rig, m, cols);
        let (out_ptr, row_scales) = (out.values.ptr(), out.scales.ptr());
        let arguments = QuantiseX16 { x, out: out_ptr, row_scales, stride, cols: cols_arg };
        rig.device.launch(&rig.stream, QuantiseX16::quantise_x16, Grid::x(m as u32), &arguments).unwrap();
        out.check(rig, &want, cols);
    }
}

#[test]
fn swiglu_is_that_of_f64_in_every_form() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (m, cols, padded, biased) in [(3, 1536, 1536, false), (2, 33, 64, true), (1, 4128, 4352, true)] {
        // Gates far to both sides; gate and up in one buffer.
        let stride = 2 * cols;
        let values: Vec<f32> = random.normals(m * stride).iter().map(|v| v * 8.0).collect();
        let (gate_bias, up_bias) = (random.normals(cols), random.normals(cols));
        let at = |values: &[f32], bias: &[f32], row: usize, from: usize, k: usize| {
            let sum = values[row * stride + from + k] + if biased { bias[k] } else { 0.0 };
            f64::from(sum)
        };
        let mut want = Vec::new();
        for row in 0..m {
            want.extend((0..cols).map(|k| {
                let (gate, up) = (at(&values, &gate_bias, row, 0, k), at(&values, &up_bias, row, cols, k));
                gate / (1.0 + (-gate).exp()) * up
            }));
        }
        let input = rig.upload(&values);
        let biases = [rig.upload(&gate_bias), rig.upload(&up_bias)];
        let [gate_bias, up_bias] = biases.each_ref().map(|b| if biased { b.ptr() } else { DevicePtr::NULL });
        let (gate, up) = (input.ptr(), input.ptr_at(4 * cols).unwrap());
        let (stride, cols_arg) = (stride as u32, cols as u32);

        // e^-x for x down to -40 carries the rounding of 40 log2(e): 40 * 2^-24 of its value, more than F32_SHARE.
        let share = |want: &[f64]| want.iter().fold(0.0f64, |most, w| most.max(w.abs())) * 1e-6;
        let out = rig.output::<f32>(m * cols);
        let arguments = GatedF32 { gate, up, gate_bias, up_bias, out: out.ptr(), stride, cols: cols_arg };
        let grid = Grid::xy(cols.div_ceil(1024) as u32, m as u32);
        rig.device.launch(&rig.stream, GatedF32::swiglu_f32, grid, &arguments).unwrap();
        check_f32(&rig.download(&out), &want, share(&want));

        let out = X16::new(rig, m, cols);
        let (out_ptr, row_scales) = (out.values.ptr(), out.scales.ptr());
        let arguments =
            GatedX16 { gate, up, gate_bias, up_bias, out: out_ptr, row_scales, stride, cols: cols_arg };
        rig.device.launch(&rig.stream, GatedX16::swiglu_x16, Grid::x(m as u32), &arguments).unwrap();
        out.check(rig, &want, cols);

        let out = A8::new(rig, m, padded);
        let (codes, scales, sums) = (out.codes.ptr(), out.scales.ptr(), out.sums.ptr());
        let padded_arg = padded as u32;
        let arguments = GatedA8 {
            gate,
            up,
            gate_bias,
            up_bias,
            codes,
            scales,
            sums,
            stride,
            cols: cols_arg,
            padded: padded_arg,
        };
        let grid = Grid::xy(padded.div_ceil(1024) as u32, m as u32);
        rig.device.launch(&rig.stream, GatedA8::swiglu_a8, grid, &arguments).unwrap();
        out.check(rig, &want, cols);
    }
}
