//! Inputs that differ from run to run. A failing test prints the seed; `ROCMFORGE_SEED` repeats it.

use std::time::{SystemTime, UNIX_EPOCH};

/// SplitMix64 (Steele, Lea, Flood 2014).
pub struct Random(u64);

impl Random {
    /// Seeded from `ROCMFORGE_SEED`, else from the clock.
    pub fn new() -> Self {
        let given = std::env::var("ROCMFORGE_SEED").ok().and_then(|text| text.parse().ok());
        let clock =
            || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64);
        let seed = given.unwrap_or_else(clock);
        println!("ROCMFORGE_SEED={seed}");
        Self(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform integer in 0..n.
    pub fn below(&mut self, n: usize) -> usize {
        (self.uniform() * n as f64) as usize
    }

    /// Cosines and sines of `count` angles of a whole turn.
    pub fn angles(&mut self, count: usize) -> Vec<f32> {
        let both = |_| {
            let angle = self.uniform() * std::f64::consts::TAU;
            [angle.cos() as f32, angle.sin() as f32]
        };
        (0..count).flat_map(both).collect()
    }

    /// Normal with mean 0 and variance 1, by Box and Muller.
    pub fn normal(&mut self) -> f32 {
        let (u, v) = (1.0 - self.uniform(), self.uniform());
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }

    pub fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }

    /// The numbers 0..n in random order.
    pub fn shuffled(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}
