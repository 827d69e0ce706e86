//! Gated activations, element by element, in every form.

use rocmforge::backend::hip::kernels::ops::{
    CLAMPED, GELU, GatedA8, GatedF32, GatedX16, LINEAR, SIGMOID, SILU, SQUARED_RELU,
};
use rocmforge::backend::hip::{DevicePtr, Grid};

use crate::forms::{A8, X16, check_f32};
use crate::random::Random;
use crate::rig::{Rig, rig};

/// Activations that are shares of their input, which kernels of two products take too.
pub const ACTIVATIONS: [u32; 2] = [SILU, GELU];

/// Exponent of e in an activation.
pub fn exponent(activation: u32, x: f64) -> f64 {
    if activation == SILU {
        -x
    } else {
        -2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))
    }
}

/// An activation in f64. GELU by tanh is `0.5 x (1 + tanh u) = x / (1 + e^-2u)`.
pub fn activated(activation: u32, x: f64) -> f64 {
    match activation {
        SIGMOID => 1.0 / (1.0 + (-x).exp()),
        LINEAR => x,
        SQUARED_RELU => x.max(0.0).powi(2),
        _ => x / (1.0 + exponent(activation, x).exp()),
    }
}

/// A clamped gate and its up.
fn clamped(gate: f64, up: f64) -> f64 {
    let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
    gate / (1.0 + (-1.702 * gate).exp()) * (1.0 + up)
}

/// Factors and biases of experts, each of gates and ups. Rows of biases begin at multiples of 4 values.
struct Terms {
    /// The expert of each row, or none: `u32::MAX`.
    experts: Vec<u32>,
    factors: [Option<Vec<f32>>; 2],
    biases: [Option<Vec<f32>>; 2],
}

/// Terms of [`Gated`] rows.
#[derive(Clone, Copy)]
enum With {
    Nothing,
    Biases,
    Factors,
    /// A factor of gates alone.
    Factor,
    Both,
}

/// Gates and ups in one buffer, or gates alone.
struct Gated {
    values: Vec<f32>,
    m: usize,
    cols: usize,
    stride: usize,
    padded: usize,
    has_up: bool,
    activation: u32,
    terms: Option<Terms>,
}

impl Gated {
    fn want(&self) -> Vec<f64> {
        let rows = self.values.chunks_exact(self.stride).enumerate();
        rows.flat_map(|(number, row)| (0..self.cols).map(move |k| self.value(number, row, k))).collect()
    }

    /// Value k of a row. Factors and biases are those of f32, as in the kernel.
    fn value(&self, number: usize, row: &[f32], k: usize) -> f64 {
        let (mut gate, mut up) = (row[k], if self.has_up { row[self.cols + k] } else { 1.0 });
        if let Some(Terms { experts, factors, biases }) = &self.terms
            && experts[number] != u32::MAX
        {
            let expert = experts[number] as usize;
            let at = expert * self.cols.next_multiple_of(4) + k;
            for (value, (factors, biases)) in [&mut gate, &mut up].into_iter().zip(factors.iter().zip(biases))
            {
                *value *= factors.as_ref().map_or(1.0, |factors| factors[expert]);
                *value += biases.as_ref().map_or(0.0, |biases| biases[at]);
            }
        }
        if self.activation == CLAMPED {
            return clamped(gate.into(), up.into());
        }
        activated(self.activation, gate.into()) * f64::from(up)
    }

    fn check(&self, rig: &Rig) {
        let Self { m, cols, padded, activation, .. } = *self;
        let want = self.want();
        let input = rig.upload(&self.values);
        let gate = input.ptr();
        let up = if self.has_up { input.ptr_at(4 * cols).unwrap() } else { DevicePtr::NULL };
        let (stride, cols_arg) = (self.stride as u32, cols as u32);
        let experts_in = self.terms.as_ref().map(|terms| rig.upload(&terms.experts));
        let experts = experts_in.as_ref().map_or(DevicePtr::NULL, |experts| experts.ptr());
        let numbers = self.terms.iter().flat_map(|terms| terms.factors.iter().chain(&terms.biases));
        let numbers: Vec<_> = numbers.map(|all| all.as_ref().map(|all| rig.upload(all))).collect();
        let pointer =
            |i: usize| numbers.get(i).and_then(Option::as_ref).map_or(DevicePtr::NULL, |all| all.ptr());
        let [gate_factor, up_factor, gate_bias, up_bias] = [0, 1, 2, 3].map(pointer);

        // e^-x for x down to -40 carries the rounding of 40 log2(e), a relative error of 40 * 2^-24: more than
        // F32_SHARE.
        let slack = want.iter().fold(0.0f64, |most, w| most.max(w.abs())) * 1e-6;
        let out = rig.output::<f32>(m * cols);
        let arguments = GatedF32 {
            gate,
            up,
            experts,
            gate_factor,
            up_factor,
            gate_bias,
            up_bias,
            out: out.ptr(),
            stride,
            cols: cols_arg,
            activation,
        };
        let grid = Grid::xy(cols.div_ceil(1024) as u32, m as u32);
        rig.device.launch(&rig.stream, GatedF32::gated_f32, grid, &arguments).unwrap();
        check_f32(&rig.download(&out), &want, slack);

        for (out, tiled) in X16::both(rig, m, cols) {
            let (out_ptr, row_scales) = (out.values.ptr(), out.scales.ptr());
            let arguments = GatedX16 {
                gate,
                up,
                experts,
                gate_factor,
                up_factor,
                gate_bias,
                up_bias,
                out: out_ptr,
                row_scales,
                stride,
                cols: cols_arg,
                activation,
                tiled,
            };
            let grid = Grid::x(m as u32).threads([64, 256, 1024][m % 3]);
            rig.device.launch(&rig.stream, GatedX16::gated_x16, grid, &arguments).unwrap();
            out.check(rig, &want, cols);
        }

        let out = A8::new(rig, m, padded);
        let (codes, scales, sums) = (out.codes.ptr(), out.scales.ptr(), out.sums.ptr());
        let padded_arg = padded as u32;
        let arguments = GatedA8 {
            gate,
            up,
            experts,
            gate_factor,
            up_factor,
            gate_bias,
            up_bias,
            codes,
            scales,
            sums,
            stride,
            cols: cols_arg,
            padded: padded_arg,
            activation,
        };
        let grid = Grid::xy(padded.div_ceil(1024) as u32, m as u32);
        rig.device.launch(&rig.stream, GatedA8::gated_a8, grid, &arguments).unwrap();
        out.check(rig, &want, cols);
    }
}

#[test]
fn gates_are_those_of_f64_in_every_form() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (m, cols, padded) in [(3, 1536, 1536), (2, 33, 64), (1, 4128, 4352)] {
        let plain =
            ACTIVATIONS.into_iter().flat_map(|a| [(a, true, With::Nothing), (a, false, With::Nothing)]);
        let more = [
            (CLAMPED, true, With::Nothing),
            (CLAMPED, true, With::Biases),
            (SILU, true, With::Biases),
            (SILU, true, With::Factors),
            (GELU, true, With::Both),
            (SIGMOID, true, With::Nothing),
            (SIGMOID, false, With::Nothing),
            (LINEAR, true, With::Nothing),
            (SQUARED_RELU, true, With::Nothing),
            (SQUARED_RELU, false, With::Nothing),
            (SQUARED_RELU, false, With::Factor),
        ];
        for (activation, has_up, with) in plain.chain(more) {
            // Gates far from 0 on both sides.
            let stride = if has_up { 2 * cols } else { cols };
            let mut values: Vec<f32> = random.normals(m * stride).iter().map(|v| v * 8.0).collect();
            // One gate of each group is open: values below 2^-100 become 0.
            values.chunks_exact_mut(stride).for_each(|row| {
                row[..cols].iter_mut().step_by(32).for_each(|gate| *gate = gate.abs());
            });
            let mut of_experts = |there: bool, len: usize| there.then(|| random.normals(3 * len));
            let [gate_factor, up_factor, biases] = match with {
                With::Nothing => [false; 3],
                With::Biases => [false, false, true],
                With::Factors => [true, true, false],
                With::Factor => [true, false, false],
                With::Both => [true; 3],
            };
            let factors = [gate_factor, up_factor].map(|there| of_experts(there, 1));
            let biases = [biases; 2].map(|there| of_experts(there, cols.next_multiple_of(4)));
            let terms = Terms { experts: [2, u32::MAX, 0][..m].to_vec(), factors, biases };
            let terms = (!matches!(with, With::Nothing)).then_some(terms);
            Gated { values, m, cols, stride, padded, has_up, activation, terms }.check(rig);
        }
    }
    // Rows of gates with other values between them.
    let (m, cols, stride) = (2, 70, 75);
    let values = random.normals(m * stride);
    let (padded, has_up, activation, terms) = (96, false, GELU, None);
    Gated { values, m, cols, stride, padded, has_up, activation, terms }.check(rig);
}

/// A large gate passes its input or closes, whatever the exponential overflows to; the result is never NaN.
#[test]
fn large_gates_are_open_or_closed() {
    let Some(rig) = rig() else { return };
    let large = [20.0f32, 100.0, 1e4, 1e10, 3e18, 1e30, f32::MAX];
    let gates: Vec<f32> = large.iter().flat_map(|&x| [x, -x]).chain([0.0, -0.0, 1e-30]).collect();
    let input = rig.upload(&gates);
    for activation in ACTIVATIONS.into_iter().chain([SIGMOID]) {
        let out = rig.output::<f32>(gates.len());
        let cols = gates.len() as u32;
        let (gate, up, out_ptr) = (input.ptr(), DevicePtr::NULL, out.ptr());
        let (experts, none, stride) = (DevicePtr::NULL, DevicePtr::NULL, cols);
        let arguments = GatedF32 {
            gate,
            up,
            experts,
            gate_factor: none,
            up_factor: none,
            gate_bias: none,
            up_bias: none,
            out: out_ptr,
            stride,
            cols,
            activation,
        };
        rig.device.launch(&rig.stream, GatedF32::gated_f32, Grid::xy(1, 1), &arguments).unwrap();
        for (&gate, got) in gates.iter().zip(rig.download::<f32>(&out)) {
            let want = activated(activation, gate.into());
            assert!(
                (f64::from(got) - want).abs() <= want.abs() * 1e-5 + 1e-37,
                "{gate}: {got} instead of {want}"
            );
        }
    }
}
