//! Streams that are mixed and added to, and rows that are multiplied, rescaled and made sparse.

use rocmforge::backend::hip::kernels::streams::{
    AddToStreams, MixStreams, MultiplyRows, RescaleRows, SparsifyRows,
};
use rocmforge::backend::hip::{DevicePtr, Grid};

use crate::random::Random;
use crate::rig::rig;

/// Rows, streams or groups, values in each, and values between the end of a row and the next one.
const SIZES: [(usize, usize, usize, usize); 6] =
    [(1, 1, 1, 0), (3, 4, 70, 13), (2, 2, 1028, 4), (4, 3, 33, 1), (2, 8, 64, 0), (1, 2, 5000, 8)];

/// Values past the end of each row must be as before.
fn assert_untouched(got: &[f32], before: &[f32], stride: usize, width: usize) {
    for (got, before) in got.chunks(stride).zip(before.chunks(stride)) {
        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
        assert!(got[width..].iter().zip(&before[width..]).all(same), "written past a row's end");
    }
}

#[test]
fn streams_are_mixed() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (m, streams, cols, gap) in SIZES {
        let (pairs, width) = (streams * streams, streams * cols);
        let [amounts_stride, x_stride, out_stride] = [pairs + gap, width + gap, width + 4 * gap];
        let (amounts, x) = (random.normals(m * amounts_stride), random.normals(m * x_stride));
        let before = vec![f32::NAN; m * out_stride];
        let (input, from, out) = (rig.upload(&amounts), rig.upload(&x), rig.upload(&before));
        let arguments = MixStreams {
            amounts: input.ptr(),
            x: from.ptr(),
            out: out.ptr(),
            streams: streams as u32,
            cols: cols as u32,
            amounts_stride: amounts_stride as u32,
            x_stride: x_stride as u32,
            out_stride: out_stride as u32,
        };
        let grid = Grid::xy(cols.div_ceil(1024) as u32, m as u32);
        rig.device.launch(&rig.stream, MixStreams::mix_streams, grid, &arguments).unwrap();
        let got = rig.download::<f32>(&out);
        assert_untouched(&got, &before, out_stride, width);
        for (row, stream) in (0..m).flat_map(|row| (0..streams).map(move |stream| (row, stream))) {
            for k in 0..cols {
                let of = |i: usize| f64::from(x[row * x_stride + i * cols + k]);
                let amount = |i: usize| f64::from(amounts[row * amounts_stride + stream * streams + i]);
                let terms = || (0..streams).map(|i| amount(i) * of(i));
                let want = of(stream) + terms().sum::<f64>();
                let bound = 1e-6 * (of(stream).abs() + terms().map(f64::abs).sum::<f64>());
                let got = f64::from(got[row * out_stride + stream * cols + k]);
                assert!(
                    (got - want).abs() <= bound,
                    "row {row} stream {stream} value {k}: {got}, not {want}"
                );
            }
        }
    }
}

#[test]
fn rows_are_added_to_streams() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (m, streams, cols, gap) in SIZES {
        for (first, has_amounts) in [(0, true), (streams / 2, true), (streams - 1, false), (0, false)] {
            let [x_stride, amounts_stride, out_stride] =
                [cols + 3 * gap, streams + gap, streams * cols + gap];
            let x = random.normals(m * x_stride);
            let (amounts, before) = (random.normals(m * amounts_stride), random.normals(m * out_stride));
            let (from, known, out) = (rig.upload(&x), rig.upload(&amounts), rig.upload(&before));
            let arguments = AddToStreams {
                x: from.ptr(),
                amounts: if has_amounts { known.ptr() } else { DevicePtr::NULL },
                out: out.ptr(),
                first: first as u32,
                streams: streams as u32,
                cols: cols as u32,
                x_stride: x_stride as u32,
                amounts_stride: amounts_stride as u32,
                out_stride: out_stride as u32,
            };
            let grid = Grid::xy(cols.div_ceil(1024) as u32, m as u32);
            rig.device.launch(&rig.stream, AddToStreams::add_to_streams, grid, &arguments).unwrap();
            let got = rig.download::<f32>(&out);
            let mut want = before.clone();
            for (row, stream) in (0..m).flat_map(|row| (first..streams).map(move |stream| (row, stream))) {
                let amount = if has_amounts { 1.0 + amounts[row * amounts_stride + stream] } else { 1.0 };
                let to = &mut want[row * out_stride + stream * cols..][..cols];
                to.iter_mut().zip(&x[row * x_stride..]).for_each(|(to, x)| *to = amount.mul_add(*x, *to));
            }
            let differs = got.iter().zip(&want).position(|(a, b)| a.to_bits() != b.to_bits());
            assert_eq!(differs, None, "{m} rows, {streams} streams of {cols}, from {first}");
        }
    }
}

#[test]
fn rows_are_multiplied_with_a_vector() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (m, _, cols, gap) in SIZES {
        let stride = cols + gap;
        let (weight, x) = (random.normals(cols), random.normals(m * stride));
        let (gain, values) = (rig.upload(&weight), rig.upload(&x));
        let arguments =
            MultiplyRows { weight: gain.ptr(), x: values.ptr(), stride: stride as u32, cols: cols as u32 };
        let grid = Grid::xy(cols.div_ceil(1024) as u32, m as u32);
        rig.device.launch(&rig.stream, MultiplyRows::multiply_rows, grid, &arguments).unwrap();
        for (at, (got, x)) in rig.download::<f32>(&values).into_iter().zip(&x).enumerate() {
            let want = weight.get(at % stride).map_or(*x, |weight| x * weight);
            assert_eq!(got.to_bits(), want.to_bits(), "{cols} values, number {at}");
        }
    }
}

#[test]
fn groups_get_the_size_of_a_row_or_1() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (m, groups, group, gap) in SIZES {
        for (like_cols, eps, threads) in [(0, 0.25f32, 64), (group, 1e-6, 256), (77, 1e-2, 1024)] {
            let [stride, like_stride] = [groups * group + gap, like_cols + gap];
            let x: Vec<f32> = random.normals(m * stride).iter().map(|x| x * 0.3).collect();
            let like = random.normals((m * like_stride).max(1));
            let (values, other) = (rig.upload(&x), rig.upload(&like));
            let arguments = RescaleRows {
                x: values.ptr(),
                like: if like_cols > 0 { other.ptr() } else { DevicePtr::NULL },
                eps,
                group: group as u32,
                stride: stride as u32,
                like_stride: like_stride as u32,
                like_cols: like_cols as u32,
            };
            let grid = Grid::xy(groups as u32, m as u32).threads(threads);
            rig.device.launch(&rig.stream, RescaleRows::rescale_rows, grid, &arguments).unwrap();
            let got = rig.download::<f32>(&values);
            assert_untouched(&got, &x, stride, groups * group);
            let mean_square =
                |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
            for row in 0..m {
                let size = match like_cols {
                    0 => 1.0,
                    _ => mean_square(&like[row * like_stride..][..like_cols]).sqrt(),
                };
                for at in (0..groups).map(|number| row * stride + number * group) {
                    let factor = size / (mean_square(&x[at..][..group]) + f64::from(eps)).sqrt();
                    for (got, x) in got[at..][..group].iter().zip(&x[at..]) {
                        let want = f64::from(*x) * factor;
                        let bound = 4e-6 * want.abs();
                        assert!(
                            (f64::from(*got) - want).abs() <= bound,
                            "{group} of {groups}: {got}, not {want}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn values_far_above_the_mean_remain() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (m, _, cols, gap) in SIZES.into_iter().filter(|(_, _, cols, _)| *cols > 1) {
        for (deviations, mean, threads) in
            [(1.644_853_6f32, 0.0f32, 1024), (-0.5, 40.0, 64), (0.0, -3.0, 256)]
        {
            let stride = cols + gap;
            let mut x: Vec<f32> = random.normals(m * stride).iter().map(|x| x + mean).collect();
            if m > 2 {
                x[stride] = f32::NAN;
            }
            let values = rig.upload(&x);
            let arguments =
                SparsifyRows { x: values.ptr(), deviations, stride: stride as u32, cols: cols as u32 };
            rig.device
                .launch(
                    &rig.stream,
                    SparsifyRows::sparsify_rows,
                    Grid::x(m as u32).threads(threads),
                    &arguments,
                )
                .unwrap();
            let got = rig.download::<f32>(&values);
            assert_untouched(&got, &x, stride, cols);
            for (got, x) in got.chunks(stride).zip(x.chunks(stride)) {
                let (got, x) = (&got[..cols], &x[..cols]);
                let average = x.iter().map(|x| f64::from(*x)).sum::<f64>() / cols as f64;
                let squares = x.iter().map(|x| (f64::from(*x) - average).powi(2)).sum::<f64>();
                let deviation = (squares / (cols - 1) as f64).sqrt() * f64::from(deviations);
                for (got, x) in got.iter().zip(x) {
                    let want = f64::from(*x) - average - deviation;
                    if want.is_nan() {
                        assert!(got.is_nan(), "{x} became {got} beside a NaN");
                        continue;
                    }
                    let bound = 1e-6 * (f64::from(x.abs()) + average.abs() + deviation.abs());
                    assert!(
                        (f64::from(*got) - want.max(0.0)).abs() <= bound,
                        "{x} of {cols}: {got}, not {want}"
                    );
                }
            }
        }
    }
}
