//! The recurrence of Mamba 2.

use rocmforge::backend::hip::kernels::recurrent::SelectiveScan as Kernel;
use rocmforge::backend::hip::{Buffer, Grid};

use super::{Bounded, FRONT, GAP, Recurrence, Step, check, check_bits, softplus};
use crate::random::Random;
use crate::rig::{Rig, rig};

#[derive(Clone, Copy)]
struct Sizes {
    heads: usize,
    groups: usize,
    head_dim: usize,
    columns: usize,
    /// Values before the inputs of a row, and between them and the steps.
    gap: usize,
}

struct Scan {
    sizes: Sizes,
    step_bias: Vec<f32>,
    rate: Vec<f32>,
    skip: Vec<f32>,
}

impl Scan {
    fn new(random: &mut Random, sizes: Sizes) -> Self {
        let mut each = |of: &mut dyn FnMut(f64) -> f64| -> Vec<f32> {
            (0..sizes.heads).map(|_| of(random.uniform()) as f32).collect()
        };
        // As models have them: steps of 0.001 to 1, and rates of 1 to 16.
        let step_bias = each(&mut |u| -7.0 + 8.0 * u);
        let rate = each(&mut |u| -(16f64.powf(u)));
        Self { sizes, step_bias, rate, skip: random.normals(sizes.heads) }
    }

    fn width(&self) -> usize {
        self.sizes.heads * self.sizes.head_dim
    }

    fn inputs(&self) -> usize {
        self.width() + 2 * self.sizes.groups * self.sizes.columns
    }
}

impl Recurrence for Scan {
    fn sizes(&self) -> [usize; 3] {
        let Sizes { heads, columns, gap, .. } = self.sizes;
        [(self.inputs() + heads + 3 * gap).next_multiple_of(4), self.width(), self.width() * columns]
    }

    fn row(&self, random: &mut Random) -> Vec<f32> {
        let gap = vec![f32::NAN; self.sizes.gap];
        let (from, steps) = (random.normals(self.inputs()), random.normals(self.sizes.heads));
        let mut row = [gap.clone(), from, gap, steps].concat();
        row.resize(self.sizes()[0], f32::NAN);
        row
    }

    fn state(&self, random: &mut Random) -> Vec<f32> {
        random.normals(self.width() * self.sizes.columns)
    }

    fn reference(&self, rows: &[Vec<f32>], before: Option<&[f32]>) -> (Bounded, Bounded) {
        let Sizes { heads, groups, head_dim, columns, gap } = self.sizes;
        let width = self.width();
        let start = |at: usize| before.map_or(0.0, |state| f64::from(state[at]));
        // The state, and the same for magnitudes.
        let mut state: Vec<f64> = (0..width * columns).map(start).collect();
        let mut sizes: Vec<f64> = state.iter().map(|value| value.abs()).collect();
        let mut out = Vec::new();
        for row in rows {
            let (from, steps) = (&row[gap..][..self.inputs()], &row[self.inputs() + 2 * gap..][..heads]);
            for (head, step) in steps.iter().enumerate() {
                let t = softplus(f64::from(*step) + f64::from(self.step_bias[head]));
                let a = (t * f64::from(self.rate[head])).exp();
                let group = head / (heads / groups);
                let [b, c] =
                    [0, groups].map(|skipped| &from[width + (skipped + group) * columns..][..columns]);
                for p in head * head_dim..(head + 1) * head_dim {
                    let x = f64::from(from[p]);
                    let mut sum = (f64::from(self.skip[head]) * x, (f64::from(self.skip[head]) * x).abs());
                    for n in 0..columns {
                        let (s, size) = (&mut state[p * columns + n], &mut sizes[p * columns + n]);
                        let more = t * x * f64::from(b[n]);
                        (*s, *size) = (a * *s + more, a * *size + more.abs());
                        sum = (sum.0 + *s * f64::from(c[n]), sum.1 + *size * f64::from(c[n]).abs());
                    }
                    out.push((sum.0, 1e-5 * sum.1 + 1e-30));
                }
            }
        }
        (out, state.iter().zip(&sizes).map(|(value, size)| (*value, 1e-5 * size + 1e-30)).collect())
    }

    fn launch(&self, rig: &Rig, input: &Buffer, out: &Buffer, step: &Step, shape: usize) {
        let Sizes { heads, groups, head_dim, columns, gap } = self.sizes;
        let threads = [64, 128, 256][shape];
        // Either form of the numbers of heads.
        let stride = if shape == 1 { 4 } else { 1 };
        let of_heads = |values: &[f32]| {
            let rows = values.iter().flat_map(|value| [*value, f32::NAN, f32::NAN, f32::NAN]);
            rig.upload(&if stride == 4 { rows.collect::<Vec<_>>() } else { values.to_vec() })
        };
        let [bias, rate] = [&self.step_bias, &self.rate].map(|values| of_heads(values));
        let skip = rig.upload(&self.skip);
        let from = input.ptr::<f32>().offset(gap);
        let all = self.sizes()[0] as u32;
        let arguments = Kernel {
            from,
            steps: from.offset(self.inputs() + gap),
            step_bias: bias.ptr(),
            rate: rate.ptr(),
            skip: skip.ptr(),
            runs: step.runs.ptr(),
            out: out.ptr(),
            state_offset: 4 * FRONT as u64,
            stride: all,
            steps_stride: all,
            out_stride: (self.width() + GAP) as u32,
            bias_stride: stride,
            rate_stride: stride,
            skip_stride: 1,
            heads: heads as u32,
            groups: groups as u32,
            head_dim: head_dim as u32,
            columns: columns as u32,
        };
        let kernel = match columns {
            ..=64 => Kernel::selective_scan_64,
            65..=128 => Kernel::selective_scan_128,
            _ => Kernel::selective_scan_256,
        };
        // One stripe more than there are outputs for.
        let stripes = head_dim.div_ceil(threads / 4) + 1;
        let grid = Grid::xyz(stripes as u32, heads as u32, step.sequences as u32).threads(threads as u32);
        rig.device.launch(&rig.stream, kernel, grid, &arguments).unwrap();
    }
}

const SIZES: [Sizes; 6] = [
    Sizes { heads: 2, groups: 1, head_dim: 64, columns: 128, gap: 4 },
    Sizes { heads: 8, groups: 2, head_dim: 8, columns: 16, gap: 0 },
    Sizes { heads: 1, groups: 1, head_dim: 80, columns: 256, gap: 0 },
    Sizes { heads: 4, groups: 4, head_dim: 20, columns: 68, gap: 4 },
    Sizes { heads: 2, groups: 2, head_dim: 4, columns: 132, gap: 8 },
    Sizes { heads: 3, groups: 1, head_dim: 36, columns: 64, gap: 0 },
];

#[test]
fn scans_are_those_of_f64() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for sizes in SIZES {
        for (shape, lengths) in [&[1][..], &[2, 1, 1, 3], &[5, 20, 2, 13]].into_iter().enumerate() {
            let scan = Scan::new(&mut random, sizes);
            check(rig, &mut random, &scan, lengths, shape);
        }
    }
}

/// Steps far from 0 on both sides: the state is kept as it is, or lost.
#[test]
fn steps_of_a_scan_may_be_of_any_size() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    let mut scan = Scan::new(&mut random, SIZES[1]);
    scan.step_bias = vec![-1e4, -88.0, -40.0, -20.0, 0.0, 5.0, 20.0, 300.0];
    check(rig, &mut random, &scan, &[5, 2], 0);
}

#[test]
fn a_scans_rows_have_the_same_bits_in_any_step() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for sizes in [SIZES[1], SIZES[3], Sizes { heads: 1, ..SIZES[0] }] {
        let scan = Scan::new(&mut random, sizes);
        check_bits(rig, &mut random, &scan, 19, 3);
    }
}
