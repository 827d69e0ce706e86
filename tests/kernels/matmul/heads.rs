//! `gemv_heads_*`.

use rocmforge::backend::hip::Grid;
use rocmforge::backend::hip::kernels::matmul::{GemvHeads, choice};
use rocmforge::tensor::DType;

use super::gemv::{Matrices, multiply};
use super::weights::{Weights, float_types, quantised_types};
use super::{Kind, Rows, Sum, untouched};
use crate::random::Random;
use crate::rig::{Rig, rig};

/// Heads of rows, and the part that is multiplied.
#[derive(Clone, Copy, Debug)]
struct Parts {
    heads: usize,
    outputs: usize,
    head_dim: usize,
    first: usize,
    cols: usize,
    /// Values between rows of the input.
    gap: usize,
}

/// Unused values between the rows of an output.
const GAP: usize = 3;

impl Parts {
    fn stride(&self) -> usize {
        self.heads * self.head_dim + self.gap
    }

    /// Rows of random parts, and NaN around them.
    fn rows(&self, random: &mut Random, rows: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; rows * self.stride()];
        for row in 0..rows {
            for head in 0..self.heads {
                let at = self.at(row, head);
                values[at..at + self.cols].fill_with(|| random.normal());
            }
        }
        values
    }

    fn at(&self, row: usize, head: usize) -> usize {
        row * self.stride() + head * self.head_dim + self.first
    }

    /// Multiplies the first `rows` rows. With `narrow`, one workgroup takes all tiles of a head.
    fn multiply(&self, rig: &Rig, weights: &Weights, x: &[f32], rows: usize, narrow: bool) -> Vec<f32> {
        let chosen = choice::heads_f32(weights.dtype, rows as u32).unwrap();
        let (w, input) = (weights.lay_out(rig), rig.upload(x));
        let stride = self.heads * self.outputs + GAP;
        let out = rig.output::<f32>(rows * stride);
        let arguments = GemvHeads {
            w: w.ptr(),
            n: self.outputs as u32,
            cols: self.cols as u32,
            x: input.ptr::<f32>().offset(self.first),
            x_stride: self.stride() as u32,
            x_head: self.head_dim as u32,
            rows: rows as u32,
            out: out.ptr(),
            out_stride: stride as u32,
        };
        let grid = choice::heads_grid(self.outputs as u32, self.heads as u32, rows as u32, chosen.columns);
        let [across, down, heads] = grid.workgroups;
        let grid = Grid::xyz(if narrow { 1 } else { across }, down, heads);
        rig.device.launch(&rig.stream, chosen.kernel, grid, &arguments).unwrap();
        let mut got = Vec::new();
        for row in rig.download::<f32>(&out).chunks_exact(stride) {
            got.extend_from_slice(&row[..stride - GAP]);
            assert!(
                row[stride - GAP..].iter().copied().all(untouched),
                "{}: wrote between rows",
                weights.dtype
            );
        }
        got
    }
}

fn check(rig: &Rig, random: &mut Random, dtype: DType, parts: Parts, rows: usize) {
    let weights = Weights::random(dtype, parts.heads * parts.outputs, parts.cols, random);
    let x = parts.rows(random, rows);
    let got = parts.multiply(rig, &weights, &x, rows, false);
    for (place, got) in got.iter().enumerate() {
        let (row, output) = (place / weights.rows, place % weights.rows);
        let at = parts.at(row, output / parts.outputs);
        let seen: Vec<f64> = x[at..at + parts.cols].iter().map(|&x| f64::from(x)).collect();
        let what = || format!("{dtype} {parts:?} row {row} output {output}");
        Sum::of(weights.row(output), &seen).check(*got, &what);
    }
    let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    let narrow = parts.multiply(rig, &weights, &x, rows, true);
    assert!(same(&got, &narrow), "{dtype} {parts:?}: fewer workgroups give other bits");
    for few in 1..rows {
        let some = parts.multiply(rig, &weights, &x, few, false);
        assert!(same(&some, &got), "{dtype} {parts:?}: {few} rows give other bits");
    }
}

#[test]
fn heads_times_their_matrices_are_the_sums_of_their_terms() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for dtype in quantised_types().chain(float_types()) {
        let block = dtype.block_len();
        for (heads, outputs, cols, rows) in [(1, 1, 1, 1), (3, 19, 3, 6), (5, 40, 2, 3)] {
            let cols = if block == 1 { [1, 24, 130][cols - 1] } else { cols * block };
            let head_dim = (cols + 20).next_multiple_of(4);
            let parts = Parts { heads, outputs, head_dim, first: 16, cols, gap: 0 };
            check(rig, random, dtype, parts, rows);
            // Rows of no multiple of 16 bytes are read value by value.
            check(rig, random, dtype, Parts { gap: 3, ..parts }, rows);
        }
    }
}

/// Compares the bits with those of `gemv_*` for each head's matrix alone.
fn check_alone(rig: &Rig, random: &mut Random, dtype: DType, parts: Parts, rows: usize) {
    let weights = Weights::random(dtype, parts.heads * parts.outputs, parts.cols, random);
    let x = parts.rows(random, rows);
    let got = parts.multiply(rig, &weights, &x, rows, false);
    for head in 0..parts.heads {
        let part = |all: usize| head * all / parts.heads..(head + 1) * all / parts.heads;
        let alone = Weights {
            dtype,
            rows: parts.outputs,
            cols: parts.cols,
            bytes: weights.bytes[part(weights.bytes.len())].to_vec(),
            values: weights.values[part(weights.values.len())].to_vec(),
        };
        let of_head = (0..rows).flat_map(|row| x[parts.at(row, head)..][..parts.cols].to_vec()).collect();
        let of_head = Rows::new(rig, Kind::F32, of_head, parts.cols);
        let (want, _) = multiply(rig, &Matrices::one(rig, &alone), &of_head, rows, None);
        for (row, want) in want.chunks_exact(parts.outputs).enumerate() {
            let got = &got[(row * parts.heads + head) * parts.outputs..][..parts.outputs];
            let same = got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{dtype} {parts:?}: head {head} of row {row} has other bits than alone");
        }
    }
}

/// The shapes of DeepSeek's matrices: keys of a latent vector, and values of it.
#[test]
fn heads_of_latent_attention_are_multiplied() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for dtype in [DType::Q8_0, DType::F16, DType::BF16, DType::F32, DType::Q5_0] {
        let keys = Parts { heads: 2, outputs: 512, head_dim: 192, first: 0, cols: 128, gap: 0 };
        check(rig, random, dtype, keys, 2);
        check_alone(rig, random, dtype, keys, 2);
    }
    for dtype in [DType::Q8_0, DType::Q4_K, DType::Q6_K, DType::F16] {
        let values = Parts { heads: 2, outputs: 128, head_dim: 576, first: 64, cols: 512, gap: 0 };
        check(rig, random, dtype, values, 2);
        check_alone(rig, random, dtype, values, 2);
    }
}
