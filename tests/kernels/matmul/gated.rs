//! `gemv_gated_*` and `gemv_experts_gated_*`.

use rocmforge::backend::hip::kernels::matmul::{
    ExpertsGatedA8, ExpertsGatedF32, GemvGatedA8, GemvGatedF32, choice,
};
use rocmforge::backend::hip::kernels::ops::{GELU, SILU};
use rocmforge::backend::hip::{Buffer, DevicePtr};
use rocmforge::tensor::DType;

use super::weights::{Weights, float_types, quantised_types};
use super::{Form, Kind, Rows, Sum, or_null, quantised};
use crate::gated::{ACTIVATIONS, activated, exponent};
use crate::random::Random;
use crate::rig::{Rig, rig};

/// Gate and up of the same shape.
struct Pair {
    gate: Weights,
    up: Weights,
    device: [Buffer; 2],
}

impl Pair {
    fn random(rig: &Rig, dtype: DType, n: usize, cols: usize, random: &mut Random) -> Self {
        let (gate, up) = (Weights::random(dtype, n, cols, random), Weights::random(dtype, n, cols, random));
        let device = [gate.lay_out(rig), up.lay_out(rig)];
        Self { gate, up, device }
    }
}

/// Destination of results: 8-bit planes or f32.
struct Out {
    codes: Buffer,
    scales: Buffer,
    sums: Buffer,
    values: Option<Buffer>,
}

impl Out {
    fn new(rig: &Rig, rows: usize, n: usize, a8: bool) -> Self {
        Self {
            codes: rig.output::<i8>(rows * n.next_multiple_of(32)),
            scales: rig.output::<f32>(rows * n.div_ceil(32)),
            sums: rig.output::<i16>(rows * n.div_ceil(32) * 2),
            values: (!a8).then(|| rig.output::<f32>(rows * n)),
        }
    }
}

fn launch(
    rig: &Rig,
    pair: &Pair,
    biases: Option<&[Buffer; 2]>,
    rows: &Rows,
    m: usize,
    activation: u32,
    out: &Out,
) {
    let (dtype, n) = (pair.gate.dtype, pair.gate.rows as u32);
    let [gate, up] = [pair.device[0].ptr(), pair.device[1].ptr()];
    let (gate_bias, up_bias) = (or_null(biases.map(|b| &b[0])), or_null(biases.map(|b| &b[1])));
    let (cols, m) = (rows.cols as u32, m as u32);
    let (out_codes, out_scales, out_sums) = (out.codes.ptr(), out.scales.ptr(), out.sums.ptr());
    let out = or_null(out.values.as_ref());
    match &rows.device {
        Form::A8 { codes, scales, sums } => {
            let chosen = choice::gated_a8(dtype, m).unwrap();
            let (codes, scales, sums) = (codes.ptr(), scales.ptr(), sums.ptr());
            let arguments = GemvGatedA8 {
                gate,
                up,
                n,
                gate_bias,
                up_bias,
                cols,
                codes,
                scales,
                sums,
                rows: m,
                activation,
                out_codes,
                out_scales,
                out_sums,
                out,
            };
            let grid = choice::gated_grid(n, m, chosen.columns);
            rig.device.launch(&rig.stream, chosen.kernel, grid, &arguments).unwrap();
        }
        Form::F32(x) => {
            let chosen = choice::gated_f32(dtype, m).unwrap();
            let arguments = GemvGatedF32 {
                gate,
                up,
                n,
                gate_bias,
                up_bias,
                cols,
                x: x.ptr(),
                x_stride: cols,
                rows: m,
                activation,
                out_codes,
                out_scales,
                out_sums,
                out,
            };
            let grid = choice::gated_grid(n, m, chosen.columns);
            rig.device.launch(&rig.stream, chosen.kernel, grid, &arguments).unwrap();
        }
    }
}

/// Checks `act(gate) * up`. The bound adds each sum's error, times the slope or the other factor. It also adds a few
/// units of the last place for the exponential and the quotient.
fn check(activation: u32, gate: Sum, up: Sum, got: f32, what: &dyn Fn() -> String) {
    let open = activated(activation, gate.value);
    let want = open * up.value;
    let slack = 2e-6 * (1.13 * gate.size * up.value.abs() + open.abs() * up.size);
    // exp2(x * log2 e) in f32: its rounding error grows with x, but only where the result is small.
    let share = if activation == SILU { 1.2e-7 } else { 6e-7 };
    let bound = slack + want.abs() * (2e-6 + share * exponent(activation, gate.value).abs()) + 1e-30;
    let off = (f64::from(got) - want).abs();
    assert!(off <= bound, "{}: {got} instead of {want}, off {off:e} of {bound:e}", what());
}

fn kinds(dtype: DType) -> &'static [Kind] {
    if dtype.block_len() == 1 { &[Kind::F32] } else { &[Kind::A8, Kind::F32] }
}

#[test]
fn gate_and_up_meet_in_one_launch() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for dtype in quantised_types().chain(float_types()) {
        let (n, cols) = if dtype.block_len() == 1 {
            (43, 57)
        } else {
            (64, 96_usize.next_multiple_of(dtype.block_len()))
        };
        let pair = Pair::random(rig, dtype, n, cols, &mut random);
        let biases = [random.normals(n), random.normals(n)];
        let device_biases = [rig.upload(&biases[0]), rig.upload(&biases[1])];
        for &kind in kinds(dtype) {
            let rows = Rows::random(rig, kind, 11, cols, &mut random);
            let mut before: Vec<f32> = Vec::new();
            // GELU is checked with two rows only: the code before the activation is shared.
            for (m, activation) in
                [(2, GELU), (11, SILU), (5, SILU), (4, SILU), (3, SILU), (2, SILU), (1, SILU)]
            {
                let out = Out::new(rig, m, n, false);
                launch(rig, &pair, Some(&device_biases), &rows, m, activation, &out);
                let got = rig.download::<f32>(out.values.as_ref().unwrap());
                for (i, &got) in got.iter().enumerate() {
                    let (row, n) = (i / n, i % n);
                    let gate = Sum::of(pair.gate.row(n), rows.seen(row)).plus(biases[0][n]);
                    let up = Sum::of(pair.up.row(n), rows.seen(row)).plus(biases[1][n]);
                    let what = || format!("{dtype} {kind:?} row {row} of {m} output {n}");
                    check(activation, gate, up, got, &what);
                }
                if activation == GELU {
                    continue;
                }
                let same = got.iter().zip(&before).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{dtype} {kind:?}: {m} rows give other bits");
                before = got;
            }
        }
    }
}

/// The 8-bit form is bit-exact to the f32 form, quantised.
#[test]
fn results_are_quantised_where_they_are_made() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for dtype in quantised_types().chain(float_types()) {
        let cols = dtype.block_len().max(64);
        let pair = Pair::random(rig, dtype, 96, cols, &mut random);
        for &kind in kinds(dtype) {
            let rows = Rows::random(rig, kind, 9, cols, &mut random);
            for (m, activation) in [(1, SILU), (2, GELU), (3, SILU), (9, SILU)] {
                let (planes, values) = (Out::new(rig, m, 96, true), Out::new(rig, m, 96, false));
                launch(rig, &pair, None, &rows, m, activation, &planes);
                launch(rig, &pair, None, &rows, m, activation, &values);
                let (codes, scales, sums) = quantised(&rig.download::<f32>(values.values.as_ref().unwrap()));
                assert_eq!(rig.download::<i8>(&planes.codes), codes, "{dtype} {kind:?} {m} rows");
                assert_eq!(rig.download::<f32>(&planes.scales), scales, "{dtype} {kind:?} {m} rows");
                assert_eq!(rig.download::<i16>(&planes.sums), sums, "{dtype} {kind:?} {m} rows");
                let untouched = rig.download::<u8>(&values.codes);
                assert!(untouched.iter().all(|&b| b == 0xff), "{dtype}: the f32 output was written too");
            }
        }
    }
}

/// Addresses of the first or second matrix of each pair.
fn table(rig: &Rig, pairs: &[Pair], which: usize) -> Buffer {
    rig.upload(&pairs.iter().map(|p| p.device[which].ptr::<u8>().address()).collect::<Vec<u64>>())
}

fn launch_experts(rig: &Rig, pairs: &[Pair], chosen: &[u32], activation: u32, rows: &Rows, out: &Out) {
    let slots = 2;
    let (dtype, n, cols) = (pairs[0].gate.dtype, pairs[0].gate.rows as u32, rows.cols as u32);
    let (gates, ups, experts) = (table(rig, pairs, 0), table(rig, pairs, 1), rig.upload(chosen));
    let (gate_table, up_table, experts) = (gates.ptr(), ups.ptr(), experts.ptr());
    let (out_codes, out_scales, out_sums) = (out.codes.ptr(), out.scales.ptr(), out.sums.ptr());
    let out: DevicePtr<f32> = or_null(out.values.as_ref());
    let grid = choice::experts_gated_grid(n, chosen.len() as u32);
    match &rows.device {
        Form::A8 { codes, scales, sums } => {
            let (codes, scales, sums) = (codes.ptr(), scales.ptr(), sums.ptr());
            let arguments = ExpertsGatedA8 {
                gate_table,
                up_table,
                experts,
                n,
                cols,
                codes,
                scales,
                sums,
                slots,
                activation,
                out_codes,
                out_scales,
                out_sums,
                out,
            };
            rig.device
                .launch(&rig.stream, choice::experts_gated_a8(dtype).unwrap(), grid, &arguments)
                .unwrap();
        }
        Form::F32(x) => {
            let arguments = ExpertsGatedF32 {
                gate_table,
                up_table,
                experts,
                n,
                cols,
                x: x.ptr(),
                x_stride: cols,
                slots,
                activation,
                out_codes,
                out_scales,
                out_sums,
                out,
            };
            rig.device
                .launch(&rig.stream, choice::experts_gated_f32(dtype).unwrap(), grid, &arguments)
                .unwrap();
        }
    }
    rig.stream.synchronize().unwrap();
}

#[test]
fn each_pair_meets_gate_and_up_of_its_own_expert() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for dtype in quantised_types().chain(float_types()) {
        let (n, cols) = (32, 32_usize.next_multiple_of(dtype.block_len()));
        let pairs: Vec<Pair> = (0..3).map(|_| Pair::random(rig, dtype, n, cols, &mut random)).collect();
        let chosen = [2, 0, 1, 2];
        for &kind in kinds(dtype) {
            let rows = Rows::random(rig, kind, 2, cols, &mut random);
            let (values, planes) = (Out::new(rig, 4, n, false), Out::new(rig, 4, n, true));
            for activation in ACTIVATIONS {
                launch_experts(rig, &pairs, &chosen, activation, &rows, &values);
                launch_experts(rig, &pairs, &chosen, activation, &rows, &planes);
                let got = rig.download::<f32>(values.values.as_ref().unwrap());
                for (i, &got) in got.iter().enumerate() {
                    let (pair, n) = (i / n, i % n);
                    let (w, x) = (&pairs[chosen[pair] as usize], rows.seen(pair / 2));
                    let what = || format!("{dtype} {kind:?} pair {pair} output {n}");
                    check(activation, Sum::of(w.gate.row(n), x), Sum::of(w.up.row(n), x), got, &what);
                }
                assert_eq!(rig.download::<i8>(&planes.codes), quantised(&got).0, "{dtype} {kind:?}");
            }
        }
    }
}
