//! Adding rows to others, capping rows, multiplying them by their gates, and gathering rows.

use rocmforge::backend::hip::Grid;
use rocmforge::backend::hip::kernels::ops::{AddRows, CapRows, OpenRows, TakeRows};

use crate::random::Random;
use crate::rig::{Rig, rig};

/// Rows, values in each, input stride and output stride.
const SIZES: [(usize, usize, usize, usize); 5] =
    [(1, 1, 1, 1), (3, 70, 71, 133), (2, 1028, 1028, 2056), (4, 33, 36, 40), (2, 2052, 2053, 2052)];

fn add(rig: &Rig, x: &[f32], before: &[f32], scale: f32, keep: u32, sizes: (usize, usize, usize, usize)) {
    let (m, cols, x_stride, out_stride) = sizes;
    let (input, out) = (rig.upload(x), rig.upload(before));
    let arguments = AddRows {
        x: input.ptr(),
        out: out.ptr(),
        scale,
        keep,
        x_stride: x_stride as u32,
        out_stride: out_stride as u32,
        cols: cols as u32,
    };
    let grid = Grid::xy(cols.div_ceil(1024) as u32, m as u32);
    rig.device.launch(&rig.stream, AddRows::add_rows, grid, &arguments).unwrap();
    for (row, got) in rig.download::<f32>(&out).chunks_exact(out_stride).enumerate() {
        let before = &before[row * out_stride..][..out_stride];
        for k in 0..cols {
            let value = x[row * x_stride + k];
            let want = if keep == 1 { value.mul_add(scale, before[k]) } else { value * scale };
            assert_eq!(got[k].to_bits(), want.to_bits(), "row {row} value {k}: {} instead of {want}", got[k]);
        }
        let untouched = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
        assert!(got[cols..].iter().zip(&before[cols..]).all(untouched), "row {row}: written past its end");
    }
}

#[test]
fn rows_are_scaled_and_added() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for sizes in SIZES {
        let (m, _, x_stride, out_stride) = sizes;
        let x = random.normals(m * x_stride);
        for scale in [1.0, 0.25, -1.7] {
            add(rig, &x, &random.normals(m * out_stride), scale, 1, sizes);
            // The old content is not read.
            add(rig, &x, &vec![f32::NAN; m * out_stride], scale, 0, sizes);
        }
    }
}

#[test]
fn rows_are_capped() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (m, cols, stride, _) in SIZES {
        for cap in [0.5f32, 20.0, 1e30] {
            let mut x: Vec<f32> = random.normals(m * stride).iter().map(|x| x * 3.0 * cap.min(1e6)).collect();
            (x[0], x[stride * (m - 1)]) = (f32::INFINITY, -1e30);
            let values = rig.upload(&x);
            let arguments = CapRows { x: values.ptr(), cap, stride: stride as u32, cols: cols as u32 };
            let grid = Grid::xy(cols.div_ceil(1024) as u32, m as u32);
            rig.device.launch(&rig.stream, CapRows::cap_rows, grid, &arguments).unwrap();
            for (at, (got, x)) in rig.download::<f32>(&values).into_iter().zip(&x).enumerate() {
                if at % stride >= cols {
                    assert_eq!(got.to_bits(), x.to_bits(), "written past a row's end");
                    continue;
                }
                let want = f64::from(cap) * (f64::from(*x) / f64::from(cap)).tanh();
                // The exponential is within 2^-22, and 1 minus a quotient rounds once more.
                let bound = f64::from(cap) * 2f64.powi(-21);
                assert!(
                    (f64::from(got) - want).abs() <= bound,
                    "{x} capped at {cap}: {got} instead of {want}"
                );
            }
        }
    }
}

#[test]
fn rows_are_opened_by_their_gates() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (m, cols, stride, gate_stride) in SIZES {
        let x = random.normals(m * stride);
        let mut gates: Vec<f32> = random.normals(m * gate_stride).iter().map(|gate| gate * 8.0).collect();
        gates[gate_stride * (m - 1)] = if m > 2 { 100.0 } else { -80.0 };
        let (gate, values) = (rig.upload(&gates), rig.upload(&x));
        let arguments = OpenRows {
            gate: gate.ptr(),
            x: values.ptr(),
            gate_stride: gate_stride as u32,
            stride: stride as u32,
            cols: cols as u32,
        };
        let grid = Grid::xy(cols.div_ceil(1024) as u32, m as u32);
        rig.device.launch(&rig.stream, OpenRows::open_rows, grid, &arguments).unwrap();
        for (at, (got, x)) in rig.download::<f32>(&values).into_iter().zip(&x).enumerate() {
            if at % stride >= cols {
                assert_eq!(got.to_bits(), x.to_bits(), "written past a row's end");
                continue;
            }
            let gate = gates[at / stride * gate_stride];
            let want = f64::from(*x) / (1.0 + (-f64::from(gate)).exp());
            // The exponent is rounded before the exponential: 80 * 2^-24 is 2^-17.7, but only for gates near -80.
            let bound = want.abs() * 2f64.powi(if gate < -10.0 { -17 } else { -20 });
            assert!((f64::from(got) - want).abs() <= bound, "{x} behind {gate}: {got} instead of {want}");
        }
    }
}

#[test]
fn rows_are_picked_out_in_any_order() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (m, cols, x_stride, _) in SIZES {
        let x = random.normals(m * x_stride);
        let rows: Vec<u32> = (0..2 * m + 1).map(|_| random.below(m) as u32).collect();
        let (input, named) = (rig.upload(&x), rig.upload(&rows));
        let out = rig.output::<f32>(rows.len() * cols);
        let arguments = TakeRows {
            x: input.ptr(),
            rows: named.ptr(),
            out: out.ptr(),
            x_stride: x_stride as u32,
            cols: cols as u32,
        };
        let grid = Grid::xy(cols.div_ceil(1024) as u32, rows.len() as u32);
        rig.device.launch(&rig.stream, TakeRows::take_rows, grid, &arguments).unwrap();
        let want: Vec<f32> =
            rows.iter().flat_map(|&row| &x[row as usize * x_stride..][..cols]).copied().collect();
        assert_eq!(rig.download::<f32>(&out), want, "{cols} values at {x_stride}");
    }
}
