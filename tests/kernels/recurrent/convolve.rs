//! Short convolutions.

use rocmforge::backend::hip::kernels::ops::{LINEAR, SILU};
use rocmforge::backend::hip::kernels::recurrent::Convolve as Kernel;
use rocmforge::backend::hip::{Buffer, DevicePtr, Grid};

use super::{Bounded, FRONT, GAP, Recurrence, Step, check, check_bits};
use crate::gated::activated;
use crate::random::Random;
use crate::rig::{Rig, rig};

struct Convolve {
    width: usize,
    taps: usize,
    /// Values of a row before and after its inputs.
    gap: usize,
    activation: u32,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Convolve {
    fn new(random: &mut Random, width: usize, taps: usize, gap: usize, activation: u32) -> Self {
        let bias = taps.is_multiple_of(2).then(|| random.normals(width));
        Self { width, taps, gap, activation, weight: random.normals(width * taps), bias }
    }
}

impl Recurrence for Convolve {
    fn sizes(&self) -> [usize; 3] {
        [self.width + 2 * self.gap, self.width, (self.taps - 1) * self.width]
    }

    fn row(&self, random: &mut Random) -> Vec<f32> {
        let gap = vec![f32::NAN; self.gap];
        [gap.clone(), random.normals(self.width), gap].concat()
    }

    fn state(&self, random: &mut Random) -> Vec<f32> {
        random.normals((self.taps - 1) * self.width)
    }

    fn reference(&self, rows: &[Vec<f32>], before: Option<&[f32]>) -> (Bounded, Bounded) {
        let mut all = before.map_or(vec![0.0; (self.taps - 1) * self.width], <[f32]>::to_vec);
        rows.iter().for_each(|row| all.extend(&row[self.gap..][..self.width]));
        let share = if self.activation == LINEAR { 1e-6 } else { 4e-6 };
        let mut out = Vec::new();
        for row in 0..rows.len() {
            for c in 0..self.width {
                let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[c]));
                let term = |j: usize| {
                    f64::from(self.weight[c * self.taps + j]) * f64::from(all[(row + j) * self.width + c])
                };
                let sum = bias + (0..self.taps).map(term).sum::<f64>();
                let size = bias.abs() + (0..self.taps).map(|j| term(j).abs()).sum::<f64>();
                let want = if self.activation == LINEAR { sum } else { activated(self.activation, sum) };
                out.push((want, share * size + 1e-30));
            }
        }
        let last = all[rows.len() * self.width..].iter().map(|value| (f64::from(*value), 0.0));
        (out, last.collect())
    }

    fn launch(&self, rig: &Rig, input: &Buffer, out: &Buffer, step: &Step, shape: usize) {
        let padded = |row: &[f32]| {
            let mut four = [0.0; 4];
            four[..row.len()].copy_from_slice(row);
            four
        };
        let weight: Vec<f32> = self.weight.chunks_exact(self.taps).flat_map(padded).collect();
        let (weight, bias) = (rig.upload(&weight), self.bias.as_ref().map(|bias| rig.upload(bias)));
        let tile = [16, 1, 5][shape];
        let arguments = Kernel {
            x: input.ptr::<f32>().offset(self.gap),
            row_seq: step.row_seq.ptr(),
            runs: step.runs.ptr(),
            weight: weight.ptr(),
            bias: bias.as_ref().map_or(DevicePtr::NULL, Buffer::ptr),
            out: out.ptr(),
            state_offset: 4 * FRONT as u64,
            x_stride: (self.width + 2 * self.gap) as u32,
            out_stride: (self.width + GAP) as u32,
            rows: step.rows as u32,
            tile,
            width: self.width as u32,
            activation: self.activation,
        };
        let kernel = [Kernel::convolve_2, Kernel::convolve_3, Kernel::convolve_4][self.taps - 2];
        let grid = Grid::xy(self.width.div_ceil(1024) as u32, (step.rows as u32).div_ceil(tile));
        rig.device.launch(&rig.stream, kernel, grid, &arguments).unwrap();
    }
}

#[test]
fn convolutions_are_those_of_f64() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (width, taps, gap) in [(4, 2, 0), (68, 3, 0), (1032, 4, 4), (1020, 4, 0), (64, 2, 8), (1028, 3, 4)] {
        for (shape, lengths) in [&[1][..], &[2, 1, 1, 3], &[5, 40, 2, 1, 23]].into_iter().enumerate() {
            for activation in [SILU, LINEAR] {
                let convolve = Convolve::new(&mut random, width, taps, gap, activation);
                check(rig, &mut random, &convolve, lengths, shape);
            }
        }
    }
}

#[test]
fn a_convolutions_rows_have_the_same_bits_in_any_step() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (width, taps) in [(72, 4), (36, 3), (64, 2)] {
        let convolve = Convolve::new(&mut random, width, taps, 0, SILU);
        check_bits(rig, &mut random, &convolve, 35, 3);
    }
}
