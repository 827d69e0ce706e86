//! Norms and quantisation, into all activation forms.

use rocmforge::backend::hip::kernels::ops::{NormA8, NormF32, NormX16, QuantiseA8, QuantiseX16};
use rocmforge::backend::hip::{Buffer, DevicePtr, Grid};

use crate::forms::{A8, X16, check_f32};
use crate::random::Random;
use crate::rig::{Rig, rig};

const EPS: f32 = 1e-5;

/// Rows of `stride` values to norm, and the parameters of the norm.
struct Norm {
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    /// Subtracts the mean first.
    centre: bool,
    rows: Vec<u32>,
    padded: usize,
    threads: u32,
}

impl Norm {
    fn new(x: Vec<f32>, weight: Vec<f32>, rows: Vec<u32>, padded: usize, threads: u32) -> Self {
        Self { x, weight, bias: None, centre: false, rows, padded, threads }
    }

    fn grid(&self) -> Grid {
        Grid::x(self.rows.len() as u32).threads(self.threads)
    }

    /// `(x[r] - mean) * weight / sqrt(mean((x[r] - mean)^2) + eps) + bias` for the chosen rows. Also returns the
    /// absolute error allowed to f32 for the row's mean and its largest values.
    fn want(&self, stride: usize) -> (Vec<f64>, f64) {
        let cols = self.weight.len();
        let (mut out, mut slack) = (Vec::new(), 0.0f64);
        for &row in &self.rows {
            let x: Vec<f64> = self.x[row as usize * stride..][..cols].iter().map(|&v| f64::from(v)).collect();
            let mean = if self.centre { x.iter().sum::<f64>() / cols as f64 } else { 0.0 };
            let square = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / cols as f64;
            let factor = 1.0 / (square + f64::from(EPS)).sqrt();
            let bias = |k: usize| self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[k]));
            out.extend((0..cols).map(|k| (x[k] - mean) * factor * f64::from(self.weight[k]) + bias(k)));
            // Sums of a thousand values round by a few units of 2^-24 of the mean; a bias may cancel most of a value.
            let most = |values: &[f32]| values.iter().fold(0.0, |most: f64, v| most.max(f64::from(v.abs())));
            let size = if self.centre { x.iter().map(|v| v.abs()).sum::<f64>() / cols as f64 } else { 0.0 };
            let of_mean = size * factor * most(&self.weight) * 1e-6;
            slack = slack.max(of_mean + self.bias.as_ref().map_or(0.0, |bias| most(bias)) * 4e-6);
        }
        (out, slack)
    }

    /// Runs all three variants and checks them; returns the bits of the 8-bit form.
    fn check(&self, rig: &Rig) -> (Vec<i8>, Vec<u32>, Vec<i16>) {
        let (m, cols) = (self.rows.len(), self.weight.len());
        let (want, slack) = self.want(cols);
        let (x, weight, rows) = (rig.upload(&self.x), rig.upload(&self.weight), rig.upload(&self.rows));
        let bias = self.bias.as_ref().map(|bias| rig.upload(bias));
        let (x, weight, rows) = (x.ptr(), weight.ptr(), rows.ptr());
        let bias = bias.as_ref().map_or(DevicePtr::NULL, |bias| bias.ptr());
        let (cols_arg, centre, eps) = (cols as u32, u32::from(self.centre), EPS);

        let out = rig.output::<f32>(m * cols);
        let (x_stride, out_stride, out_ptr) = (cols_arg, cols_arg, out.ptr());
        let arguments = NormF32 {
            x,
            weight,
            bias,
            rows,
            out: out_ptr,
            eps,
            cols: cols_arg,
            x_stride,
            out_stride,
            centre,
            add: 0,
        };
        rig.device.launch(&rig.stream, NormF32::norm_f32, self.grid(), &arguments).unwrap();
        let got = rig.download::<f32>(&out);
        check_f32(&got, &want, slack);

        // The other forms come from the same f32 values. If f64 is not precise enough for them, they are checked
        // against the f32 result.
        let want: Vec<f64> = if slack > 0.0 { got.iter().map(|&v| v.into()).collect() } else { want };
        // f32 rows beside another form, with a gap of one value between them.
        let also_stride = cols + 1;
        let also_bits = |rows: &Buffer| {
            let rows = rig.download::<f32>(rows);
            let of = rows.chunks(also_stride).flat_map(|row| row[..cols].iter().map(|v| v.to_bits()));
            of.collect::<Vec<u32>>()
        };
        let bits: Vec<u32> = got.iter().map(|v| v.to_bits()).collect();
        for (out, tiled) in X16::both(rig, m, cols) {
            let (out_ptr, row_scales) = (out.values.ptr(), out.scales.ptr());
            let also = rig.output::<f32>(m * also_stride);
            let arguments = NormX16 {
                x,
                weight,
                bias,
                rows,
                out: out_ptr,
                row_scales,
                also: also.ptr(),
                eps,
                cols: cols_arg,
                centre,
                tiled,
                also_stride: also_stride as u32,
            };
            rig.device.launch(&rig.stream, NormX16::norm_x16, self.grid(), &arguments).unwrap();
            out.check(rig, &want, cols);
            assert_eq!(also_bits(&also), bits);
        }

        let out = A8::new(rig, m, self.padded);
        let (codes, scales, sums) = (out.codes.ptr(), out.scales.ptr(), out.sums.ptr());
        let padded = self.padded as u32;
        let also = rig.output::<f32>(m * also_stride);
        let mut arguments = NormA8 {
            x,
            weight,
            bias,
            rows,
            codes,
            scales,
            sums,
            also: also.ptr(),
            eps,
            cols: cols_arg,
            padded,
            centre,
            also_stride: also_stride as u32,
        };
        rig.device.launch(&rig.stream, NormA8::norm_a8, self.grid(), &arguments).unwrap();
        out.check(rig, &want, cols);
        assert_eq!(also_bits(&also), bits);
        arguments.also = DevicePtr::NULL;
        rig.device.launch(&rig.stream, NormA8::norm_a8, self.grid(), &arguments).unwrap();
        out.check(rig, &want, cols);
        out.bits(rig)
    }
}

#[test]
fn norm_is_that_of_f64_in_every_form() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    // Odd widths, a width beyond what lanes hold, padding to 32 and to 256, rows out of order.
    for (cols, padded, rows, threads) in [
        (1, 32, vec![0], 256),
        (33, 64, vec![2, 0, 1, 1], 256),
        (576, 768, vec![0, 1], 256),
        (4096, 4096, vec![1, 0], 1024),
        (5120, 5120, vec![0], 256),
        (8224, 8448, vec![0], 256),
    ] {
        let x = random.normals(3 * cols).iter().map(|v| v * 3.0).collect();
        Norm::new(x, random.normals(cols), rows, padded, threads).check(rig);
    }
}

#[test]
fn a_normed_row_has_the_same_bits_in_any_company() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    let (cols, weight) = (2048, random.normals(2048));
    let mut norm = Norm::new(random.normals(17 * cols), weight, (0..17).collect(), cols, 256);
    let (codes, scales, sums) = norm.check(rig);
    for row in [0usize, 7, 16] {
        norm.rows = vec![row as u32];
        let alone = norm.check(rig);
        assert_eq!(alone.0, codes[row * cols..][..cols], "row {row}");
        assert_eq!(alone.1, scales[row * cols / 32..][..cols / 32], "row {row}");
        assert_eq!(alone.2, sums[row * cols / 16..][..cols / 16], "row {row}");
    }
}

/// Rows far from 0: a sum of squares without subtracting the mean would lose the variance.
#[test]
fn a_layer_norm_takes_the_mean_first() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (cols, padded, rows, threads, mean) in [
        (2, 32, vec![0], 256, 5.0),
        (33, 64, vec![2, 0, 1, 1], 256, 0.0),
        (578, 768, vec![0, 1], 256, -1000.0),
        (4096, 4096, vec![1, 0], 1024, 300.0),
        (8224, 8448, vec![0, 2], 256, 1000.0),
        (8230, 8448, vec![1], 256, -20.0),
    ] {
        for biased in [false, true] {
            let x = random.normals(3 * cols).iter().map(|v| v * 2.0 + mean).collect();
            let norm = Norm::new(x, random.normals(cols), rows.clone(), padded, threads);
            let bias = biased.then(|| random.normals(cols));
            Norm { bias, centre: true, ..norm }.check(rig);
        }
    }
}

/// An RMS norm may have a bias too.
#[test]
fn a_bias_is_added_to_what_was_normed() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (cols, padded) in [(31, 32), (1200, 1280)] {
        let norm = Norm::new(random.normals(3 * cols), random.normals(cols), vec![1, 2], padded, 256);
        Norm { bias: Some(random.normals(cols)), ..norm }.check(rig);
    }
}

/// Values between rows are neither read nor written. A result may be added to rows, or replace its own input.
#[test]
fn normed_rows_lie_at_strides_and_may_be_added() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (cols, x_stride, out_stride, centre) in
        [(70, 131, 77, false), (64, 192, 64, true), (1030, 1032, 1031, true), (1028, 3084, 1028, false)]
    {
        let rows = vec![2, 0, 2, 1];
        let m = rows.len();
        let mut x = vec![f32::NAN; 3 * x_stride];
        x.chunks_exact_mut(x_stride).for_each(|row| row[..cols].fill_with(|| random.normal() * 3.0));
        let norm = Norm { centre, ..Norm::new(x, random.normals(cols), rows, cols, 256) };
        let (want, slack) = norm.want(x_stride);
        let (weight, named) = (rig.upload(&norm.weight), rig.upload(&norm.rows));
        let input = rig.upload(&norm.x);
        let mut arguments = NormF32 {
            x: input.ptr(),
            weight: weight.ptr(),
            bias: DevicePtr::NULL,
            rows: named.ptr(),
            out: DevicePtr::NULL,
            eps: EPS,
            cols: cols as u32,
            x_stride: x_stride as u32,
            out_stride: out_stride as u32,
            centre: centre.into(),
            add: 0,
        };
        for add in [0, 1] {
            let before = random.normals(m * out_stride);
            let out = rig.upload(&before);
            (arguments.out, arguments.add) = (out.ptr(), add);
            rig.device.launch(&rig.stream, NormF32::norm_f32, norm.grid(), &arguments).unwrap();
            let got = rig.download::<f32>(&out);
            for (row, (got, before)) in
                got.chunks_exact(out_stride).zip(before.chunks_exact(out_stride)).enumerate()
            {
                let was = |k: usize| if add == 1 { f64::from(before[k]) } else { 0.0 };
                let want: Vec<f64> = (0..cols).map(|k| want[row * cols + k] + was(k)).collect();
                check_f32(&got[..cols], &want, slack + if add == 1 { 4e-5 } else { 0.0 });
                assert_eq!(got[cols..], before[cols..], "row {row}: written past its end");
            }
        }
        // In place, with all rows in order.
        (arguments.rows, arguments.out, arguments.out_stride, arguments.add) =
            (DevicePtr::NULL, input.ptr(), arguments.x_stride, 0);
        rig.device.launch(&rig.stream, NormF32::norm_f32, Grid::x(3), &arguments).unwrap();
        let in_order = Norm { rows: vec![0, 1, 2], ..norm };
        let (want, slack) = in_order.want(x_stride);
        for (row, got) in rig.download::<f32>(&input).chunks_exact(x_stride).enumerate() {
            check_f32(&got[..cols], &want[row * cols..][..cols], slack);
            assert!(got[cols..].iter().all(|v| v.is_nan()), "row {row}: written past its end");
        }
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
        let arguments =
            QuantiseX16 { x: input.ptr(), out: out_ptr, row_scales, stride: 96, cols: 96, tiled: 0 };
        rig.device.launch(&rig.stream, QuantiseX16::quantise_x16, Grid::x(1), &arguments).unwrap();
        assert!(rig.download::<f32>(&out.scales)[0].is_nan());
        assert!(rig.download::<u16>(&out.values).iter().all(|&v| v == 0));
    }
}

/// A value of 2^-100 or more is kept, in both forms; a smaller one becomes 0, and so does its scale.
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
        let arguments =
            QuantiseX16 { x: input.ptr(), out: out_ptr, row_scales, stride: 32, cols: 32, tiled: 0 };
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
        // Rows of very different magnitude: each has its own scale.
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
        for (out, tiled) in X16::both(rig, m, cols) {
            let (out_ptr, row_scales) = (out.values.ptr(), out.scales.ptr());
            let arguments = QuantiseX16 { x, out: out_ptr, row_scales, stride, cols: cols_arg, tiled };
            let grid = Grid::x(m as u32).threads([64, 256, 1024][m % 3]);
            rig.device.launch(&rig.stream, QuantiseX16::quantise_x16, grid, &arguments).unwrap();
            out.check(rig, &want, cols);
        }
    }
}
