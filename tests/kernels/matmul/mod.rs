//! Products with weights of every type, against f64 sums over values that ggml decoded.

mod gated;
mod gemm;
mod gemm_experts;
mod gemm_quant;
mod gemv;
mod heads;
mod layout;
mod weights;

use rocmforge::backend::hip::{Buffer, DevicePtr};

use crate::random::Random;
use crate::rig::Rig;

/// Tier A: the same inputs on both sides, f32 sums.
const TIER_A: f64 = 2e-6;

/// Rows of activations on the host and on the device.
pub struct Rows {
    /// The values that the kernels see, in f64.
    pub seen: Vec<f64>,
    /// The values before any rounding.
    pub exact: Vec<f32>,
    pub cols: usize,
    pub device: Form,
}

/// Layout of the rows on the device.
pub enum Form {
    A8 { codes: Buffer, scales: Buffer, sums: Buffer },
    F32(Buffer),
}

/// Activation form that quantised weights are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    A8,
    F32,
}

/// Codes, scales, and sums of 16 codes, as kernels/common/activation.h defines them.
pub fn quantised(values: &[f32]) -> (Vec<i8>, Vec<f32>, Vec<i16>) {
    let (mut codes, mut scales, mut sums) = (Vec::new(), Vec::new(), Vec::new());
    for group in values.chunks_exact(32) {
        let amax = group.iter().fold(0f32, |most, v| most.max(v.abs()));
        // As `kernels/common/activation.h` says: less than 2^-100 counts as 0.
        let amax = if amax < 2f32.powi(-100) { 0.0 } else { amax };
        let factor = if amax == 0.0 { 0.0 } else { 127.0 / amax };
        scales.push(amax / 127.0);
        codes.extend(group.iter().map(|v| (v * factor).round_ties_even() as i8));
    }
    sums.extend(codes.chunks_exact(16).map(|half| half.iter().map(|&c| i16::from(c)).sum::<i16>()));
    (codes, scales, sums)
}

impl Rows {
    pub fn random(rig: &Rig, kind: Kind, rows: usize, cols: usize, random: &mut Random) -> Self {
        Self::new(rig, kind, random.normals(rows * cols), cols)
    }

    pub fn new(rig: &Rig, kind: Kind, exact: Vec<f32>, cols: usize) -> Self {
        if kind == Kind::F32 {
            let seen = exact.iter().map(|&v| f64::from(v)).collect();
            let device = Form::F32(rig.upload(&exact));
            return Self { seen, exact, cols, device };
        }
        let (codes, scales, sums) = quantised(&exact);
        let seen = codes.iter().enumerate().map(|(i, &c)| f64::from(c) * f64::from(scales[i / 32])).collect();
        let device =
            Form::A8 { codes: rig.upload(&codes), scales: rig.upload(&scales), sums: rig.upload(&sums) };
        Self { seen, exact, cols, device }
    }

    pub fn seen(&self, row: usize) -> &[f64] {
        &self.seen[row * self.cols..][..self.cols]
    }
}

/// A product and the sum of its terms' magnitudes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    pub value: f64,
    pub size: f64,
}

impl Sum {
    pub fn of(weights: &[f32], x: &[f64]) -> Self {
        weights.iter().zip(x).fold(Self::default(), |sum, (&w, x)| {
            let term = f64::from(w) * x;
            Self { value: sum.value + term, size: sum.size + term.abs() }
        })
    }

    /// Adds a number to the sum.
    pub fn plus(self, v: f32) -> Self {
        Self { value: self.value + f64::from(v), size: self.size + f64::from(v).abs() }
    }

    pub fn check(self, got: f32, what: &dyn Fn() -> String) {
        self.check_to(0.0, got, what);
    }

    /// The same where something else may differ by `more`.
    pub fn check_to(self, more: f64, got: f32, what: &dyn Fn() -> String) {
        let off = (f64::from(got) - self.value).abs();
        assert!(
            off <= TIER_A * self.size + more + 1e-30,
            "{}: {got} instead of {}, off {off:e} of {:e}",
            what(),
            self.value,
            self.size
        );
    }
}

/// `||got - want|| / ||want||`.
pub fn relative_error(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let off: f64 = got.iter().zip(want).map(|(&g, w)| (f64::from(g) - w).powi(2)).sum();
    (off / want.iter().map(|w| w * w).sum::<f64>()).sqrt()
}

/// True for the NaN bits that outputs are filled with.
pub fn untouched(v: f32) -> bool {
    v.to_bits() == u32::MAX
}

/// The buffer's address, or null without a buffer.
pub fn or_null<T>(buffer: Option<&Buffer>) -> DevicePtr<T> {
    buffer.map_or(DevicePtr::NULL, Buffer::ptr)
}
