//! The gated delta rule.

use rocmforge::backend::hip::kernels::recurrent::DeltaRule as Kernel;
use rocmforge::backend::hip::{Buffer, Grid};

use super::{Bounded, FRONT, GAP, Recurrence, Step, check, check_bits, softplus};
use crate::random::Random;
use crate::rig::{Rig, rig};

#[derive(Clone, Copy)]
struct Sizes {
    keys: usize,
    key_dim: usize,
    values: usize,
    value_dim: usize,
    in_turn: bool,
    /// Values before the inputs of a row, and between them and the numbers of heads.
    gap: usize,
}

struct Delta {
    sizes: Sizes,
    bias: Vec<f32>,
    rate: Vec<f32>,
    eps: f32,
    /// Factor of queries and keys.
    scale: f32,
}

impl Delta {
    fn new(random: &mut Random, sizes: Sizes) -> Self {
        let bias = (0..sizes.values).map(|_| (-5.0 + 6.0 * random.uniform()) as f32).collect();
        let rate = (0..sizes.values).map(|_| -(16f64.powf(random.uniform())) as f32).collect();
        Self { sizes, bias, rate, eps: 1e-6, scale: 1.0 }
    }

    fn inputs(&self) -> usize {
        2 * self.sizes.keys * self.sizes.key_dim + self.width()
    }

    fn width(&self) -> usize {
        self.sizes.values * self.sizes.value_dim
    }

    /// A query or key of a row, divided by its length, nearly.
    fn unit(&self, values: &[f32]) -> Vec<f64> {
        let square = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        let by = (square + f64::from(self.eps)).sqrt();
        values.iter().map(|x| f64::from(*x) / by).collect()
    }
}

impl Recurrence for Delta {
    fn sizes(&self) -> [usize; 3] {
        let Sizes { key_dim, values, gap, .. } = self.sizes;
        [(self.inputs() + 2 * values + 3 * gap).next_multiple_of(4), self.width(), self.width() * key_dim]
    }

    fn row(&self, random: &mut Random) -> Vec<f32> {
        let Sizes { keys, key_dim, values, gap, .. } = self.sizes;
        let mut from = random.normals(self.inputs());
        from[..2 * keys * key_dim].iter_mut().for_each(|x| *x *= self.scale);
        let gap = vec![f32::NAN; gap];
        let mut row = [gap.clone(), from, gap, random.normals(2 * values)].concat();
        row.resize(self.sizes()[0], f32::NAN);
        row
    }

    fn state(&self, random: &mut Random) -> Vec<f32> {
        random.normals(self.sizes()[2])
    }

    fn reference(&self, rows: &[Vec<f32>], before: Option<&[f32]>) -> (Bounded, Bounded) {
        let Sizes { keys, key_dim, values, value_dim, in_turn, gap } = self.sizes;
        let start = |at: usize| before.map_or(0.0, |state| f64::from(state[at]));
        let mut state: Vec<f64> = (0..self.sizes()[2]).map(start).collect();
        let at = |head: usize, key: usize, column: usize| (head * key_dim + key) * value_dim + column;
        // The largest length of a column so far, and of its value.
        let mut most = vec![0f64; self.width()];
        let mut out = Vec::new();
        for row in rows {
            let from = &row[gap..][..self.inputs()];
            let numbers = &row[self.inputs() + 2 * gap..][..2 * values];
            for head in 0..values {
                let key_head = if in_turn { head % keys } else { head / (values / keys) };
                let [q, k] =
                    [0, keys].map(|skipped| self.unit(&from[(skipped + key_head) * key_dim..][..key_dim]));
                let decay = softplus(f64::from(numbers[head]) + f64::from(self.bias[head]));
                let g = (f64::from(self.rate[head]) * decay).exp();
                let amount = 1.0 / (1.0 + (-f64::from(numbers[values + head])).exp());
                for column in 0..value_dim {
                    let v = f64::from(from[2 * keys * key_dim + head * value_dim + column]);
                    let size = &mut most[head * value_dim + column];
                    let mut column_of: Vec<f64> =
                        (0..key_dim).map(|key| state[at(head, key, column)]).collect();
                    let length = |s: &[f64]| s.iter().map(|x| x * x).sum::<f64>().sqrt();
                    *size = size.max(v.abs()).max(length(&column_of));
                    column_of.iter_mut().for_each(|s| *s *= g);
                    let seen: f64 = column_of.iter().zip(&k).map(|(s, k)| s * k).sum();
                    column_of.iter_mut().zip(&k).for_each(|(s, k)| *s += k * (v - seen) * amount);
                    *size = size.max(length(&column_of));
                    let root = (key_dim as f64).sqrt();
                    let sum: f64 = column_of.iter().zip(&q).map(|(s, q)| s * q).sum();
                    out.push((sum / root, 2e-5 * *size / root));
                    column_of.iter().enumerate().for_each(|(key, s)| state[at(head, key, column)] = *s);
                }
            }
        }
        let bound = |place: usize| {
            let (head, column) = (place / value_dim / key_dim, place % value_dim);
            2e-5 * most[head * value_dim + column]
        };
        (out, state.iter().enumerate().map(|(place, value)| (*value, bound(place))).collect())
    }

    fn launch(&self, rig: &Rig, input: &Buffer, out: &Buffer, step: &Step, shape: usize) {
        let Sizes { keys, key_dim, values, value_dim, in_turn, gap } = self.sizes;
        let threads = [64, 128, 256][shape];
        let padded: Vec<f32> =
            self.bias.iter().flat_map(|bias| [*bias, f32::NAN, f32::NAN, f32::NAN]).collect();
        // Either form of the numbers of heads.
        let (bias, bias_stride) =
            if shape == 1 { (rig.upload(&padded), 4) } else { (rig.upload(&self.bias), 1) };
        let rate = rig.upload(&self.rate);
        let from = input.ptr::<f32>().offset(gap);
        let decay = from.offset(self.inputs() + gap);
        let all = self.sizes()[0] as u32;
        let arguments = Kernel {
            from,
            decay,
            decay_bias: bias.ptr(),
            rate: rate.ptr(),
            amount: decay.offset(values),
            runs: step.runs.ptr(),
            out: out.ptr(),
            state_offset: 4 * FRONT as u64,
            eps: self.eps,
            stride: all,
            decay_stride: all,
            amount_stride: all,
            out_stride: (self.width() + GAP) as u32,
            bias_stride,
            rate_stride: 1,
            keys: keys as u32,
            key_dim: key_dim as u32,
            values: values as u32,
            value_dim: value_dim as u32,
            in_turn: u32::from(in_turn),
        };
        let kernel = match key_dim {
            ..=64 => Kernel::delta_rule_64,
            65..=128 => Kernel::delta_rule_128,
            _ => Kernel::delta_rule_256,
        };
        // One stripe more than there are outputs for.
        let stripes = value_dim.div_ceil(threads / 4) + 1;
        let grid = Grid::xyz(stripes as u32, values as u32, step.sequences as u32).threads(threads as u32);
        rig.device.launch(&rig.stream, kernel, grid, &arguments).unwrap();
    }
}

const SIZES: [Sizes; 6] = [
    Sizes { keys: 1, key_dim: 128, values: 2, value_dim: 64, in_turn: false, gap: 4 },
    Sizes { keys: 2, key_dim: 32, values: 6, value_dim: 20, in_turn: true, gap: 0 },
    Sizes { keys: 2, key_dim: 36, values: 4, value_dim: 8, in_turn: false, gap: 0 },
    Sizes { keys: 1, key_dim: 256, values: 1, value_dim: 80, in_turn: true, gap: 0 },
    Sizes { keys: 3, key_dim: 4, values: 3, value_dim: 4, in_turn: false, gap: 8 },
    Sizes { keys: 1, key_dim: 68, values: 3, value_dim: 36, in_turn: true, gap: 4 },
];

#[test]
fn delta_rules_are_those_of_f64() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for sizes in SIZES {
        for (shape, lengths) in [&[1][..], &[2, 1, 1, 3], &[5, 20, 2, 13]].into_iter().enumerate() {
            let delta = Delta::new(&mut random, sizes);
            check(rig, &mut random, &delta, lengths, shape);
        }
    }
}

/// Short queries and keys stay short.
#[test]
fn eps_bounds_the_divisor_of_keys() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (eps, scale) in [(2.0, 0.1), (6.0, 1.0), (1e-6, 1e-6)] {
        let delta = Delta { eps, scale, ..Delta::new(&mut random, SIZES[1]) };
        check(rig, &mut random, &delta, &[5, 2], 0);
    }
}

#[test]
fn a_delta_rules_rows_have_the_same_bits_in_any_step() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for sizes in [SIZES[1], SIZES[2], Sizes { values: 1, ..SIZES[0] }] {
        let delta = Delta::new(&mut random, sizes);
        check_bits(rig, &mut random, &delta, 19, 3);
    }
}
