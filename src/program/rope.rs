//! Rotary embedding: a model's parameters, and the one table of cosines and sines that every device rotates with.

/// The values of a head that form a rotary pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// Neighbours `(2i, 2i+1)`: llama in GGUF.
    Interleaved,
    /// Halves `(i, i + dims/2)`: NeoX, qwen.
    Halves,
}

/// A rotary embedding. Divisors of single frequencies (Llama 3, LongRoPE) are a tensor beside it:
/// [`Rope::factors`](super::Rope::factors).
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Layout of the pairs.
    pub layout: RopeLayout,
    /// Rotated dimensions of each head; the rest pass unchanged. Even, at most head_dim.
    pub dims: usize,
    /// Base of the angles.
    pub theta: f32,
    /// Scaling of positions past the trained context.
    pub scaling: RopeScaling,
    /// Length factor of rotated pairs, besides that of [`RopeScaling::Yarn`]; 1 for nearly all models.
    pub magnitude: f32,
    /// Length factor by position, besides `magnitude`; `None` for nearly all models.
    pub growth: Option<Growth>,
}

/// Growth of queries with their position: times `1 + scale * ln(1 + floor(position / period))`. Attention flattens as
/// contexts grow, and longer queries counter that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// Factor of the logarithm.
    pub scale: f32,
    /// Positions without growth at the start, and of each step. At least 1.
    pub period: u32,
}

impl Growth {
    /// The factor at a position.
    fn at(self, position: u32) -> f64 {
        let steps = f64::from(position / self.period.max(1));
        1.0 + f64::from(self.scale) * steps.ln_1p()
    }
}

/// Scaling of positions past the trained context.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// Positions are not scaled.
    #[default]
    None,
    /// All positions are divided.
    Linear {
        /// Divisor. Above 0.
        factor: f32,
    },
    /// Slow pairs are divided, fast ones are not, and those between are mixed (arXiv 2309.00071).
    Yarn(Yarn),
}

/// Parameters of [`RopeScaling::Yarn`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Divisor of slow pairs' positions. Above 0.
    pub factor: f32,
    /// Trained context in tokens. At least 1.
    pub original_context: u32,
    /// Strength of the mix: 1 is all of it, 0 is linear scaling.
    pub ext_factor: f32,
    /// Pairs with more turns than this in the trained context are fast. Above 0.
    pub beta_fast: f32,
    /// Pairs with fewer turns than this in the trained context are slow. Above 0.
    pub beta_slow: f32,
    /// Weight of the length that was trained into the model already (`mscale_all_dim`); 0 for most.
    pub log_multiplier: f32,
    /// Rounds the ends of the mix outwards to whole pairs, as nearly all models do.
    pub whole_pairs: bool,
}

/// The rotation of each pair of a head from one position to the next. Made once for a model. Uses f64 throughout, so
/// that angles are right at any position.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeAngles {
    /// Radians per position, by pair.
    frequencies: Vec<f64>,
    /// Factor of cosines and sines.
    magnitude: f64,
    growth: Option<Growth>,
}

impl RopeAngles {
    /// Computes the frequencies. `factors`, if any, divide them pair by pair; there are `dims / 2`.
    pub fn new(spec: &RopeSpec, factors: Option<&[f32]>) -> Self {
        let dims = spec.dims as f64;
        let theta = f64::from(spec.theta);
        let ramp = match spec.scaling {
            RopeScaling::Yarn(yarn) => Some((yarn, yarn.ramp(dims, theta))),
            RopeScaling::None | RopeScaling::Linear { .. } => None,
        };
        let frequency = |pair: usize| {
            let divisor = factors.and_then(|f| f.get(pair)).map_or(1.0, |&f| f64::from(f));
            let plain = theta.powf(-2.0 * pair as f64 / dims) / divisor;
            match (spec.scaling, ramp) {
                (RopeScaling::Linear { factor }, _) => plain / f64::from(factor),
                (_, Some((yarn, [low, high]))) => {
                    let fast = 1.0 - ((pair as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    let mix = fast * f64::from(yarn.ext_factor);
                    plain / f64::from(yarn.factor) * (1.0 - mix) + plain * mix
                }
                _ => plain,
            }
        };
        let length = ramp.map_or(1.0, |(yarn, _)| yarn.length());
        Self {
            frequencies: (0..spec.dims / 2).map(frequency).collect(),
            magnitude: f64::from(spec.magnitude) * length,
            growth: spec.growth,
        }
    }

    /// Number of rotated pairs of a head.
    pub fn pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// Appends `[cosine, sine]` of each pair at `position`, magnitude included. About 20 ns a pair.
    ///
    /// Calls for positions 0, 1, 2, ... build the table `[positions][dims / 2][2]` that devices keep.
    pub fn append(&self, position: u32, table: &mut Vec<[f32; 2]>) {
        let magnitude = self.magnitude * self.growth.map_or(1.0, |growth| growth.at(position));
        table.extend(self.frequencies.iter().map(|frequency| {
            let (sin, cos) = (f64::from(position) * frequency).sin_cos();
            [(cos * magnitude) as f32, (sin * magnitude) as f32]
        }));
    }
}

impl Yarn {
    /// The last pair that is fast enough to stay unscaled, and the first slow pair.
    fn ramp(&self, dims: f64, theta: f64) -> [f64; 2] {
        // The pair that makes `turns` turns within the trained context.
        let pair_of = |turns: f32| {
            let context = f64::from(self.original_context);
            let wavelengths = context / (f64::from(turns) * 2.0 * std::f64::consts::PI);
            dims * wavelengths.ln() / (2.0 * theta.ln())
        };
        let [fast, slow] = [pair_of(self.beta_fast), pair_of(self.beta_slow)];
        let [fast, slow] = if self.whole_pairs { [fast.floor(), slow.ceil()] } else { [fast, slow] };
        [fast.max(0.0), slow.min(dims - 1.0)]
    }

    /// Length factor of q and k: attention flattens as contexts grow, and longer vectors counter that.
    fn length(&self) -> f64 {
        let factor = f64::from(self.factor);
        if self.ext_factor == 0.0 || factor <= 1.0 {
            return 1.0;
        }
        let scale = |multiplier: f64| 1.0 + 0.1 * multiplier * factor.ln();
        match f64::from(self.log_multiplier) {
            0.0 => scale(1.0),
            multiplier => scale(1.0) / scale(multiplier),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn angles(scaling: RopeScaling, factors: Option<&[f32]>) -> RopeAngles {
        let spec = RopeSpec {
            layout: RopeLayout::Halves,
            dims: 8,
            theta: 1e4,
            scaling,
            magnitude: 1.0,
            growth: None,
        };
        RopeAngles::new(&spec, factors)
    }

    #[track_caller]
    fn close(got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= want.abs() * 1e-12, "{got} where {want} was expected");
        }
    }

    #[test]
    fn frequencies_fall_by_powers_of_the_base() {
        close(&angles(RopeScaling::None, None).frequencies, &[1.0, 0.1, 0.01, 0.001]);
        close(
            &angles(RopeScaling::Linear { factor: 4.0 }, Some(&[1.0, 2.0, 1.0, 8.0])).frequencies,
            &[0.25, 0.0125, 0.0025, 0.000_031_25],
        );
    }

    /// By hand: with a trained context of 2000 pi the pairs turn 1000, 100, 10 and 1 times in it. So `beta_fast` 10 is
    /// pair 2 and `beta_slow` 1 pair 3: pairs up to 2 are left alone, pair 3 is divided.
    #[test]
    fn yarn_leaves_fast_pairs_alone_and_divides_slow_ones() {
        let mut yarn = Yarn {
            factor: 4.0,
            original_context: 6284, // just above 2000 pi, so that rounding down and up gives 2 and 3 + 1
            ext_factor: 1.0,
            beta_fast: 10.0,
            beta_slow: 1.0,
            log_multiplier: 0.0,
            whole_pairs: true,
        };
        let made = angles(RopeScaling::Yarn(yarn), None);
        // The ramp goes from pair 2 to pair 4 (3.0001 rounded up): pair 3 lies half way.
        close(&made.frequencies, &[1.0, 0.1, 0.01, 0.001 * (0.5 + 0.5 / 4.0)]);
        close(&[made.magnitude], &[1.0 + 0.1 * 4f64.ln()]);
        // Unrounded, 10 turns are pair 2.0001 and 1 turn is pair 3.0001: the last pair is divided all but 1 / 10,000.
        yarn.whole_pairs = false;
        let exact = angles(RopeScaling::Yarn(yarn), None).frequencies;
        close(&exact[..3], &[1.0, 0.1, 0.01]);
        assert!((exact[3] / 0.000_25 - 1.0).abs() < 1e-3, "{exact:?}");
        yarn.whole_pairs = true;
        yarn.log_multiplier = 1.0;
        close(&[angles(RopeScaling::Yarn(yarn), None).magnitude], &[1.0]);
        yarn.ext_factor = 0.0;
        let linear = angles(RopeScaling::Linear { factor: 4.0 }, None);
        assert_eq!(angles(RopeScaling::Yarn(yarn), None), linear, "no mix: linear, and no longer pairs");
        (yarn.ext_factor, yarn.factor, yarn.log_multiplier) = (1.0, 1.0, 0.0);
        close(&angles(RopeScaling::Yarn(yarn), None).frequencies, &[1.0, 0.1, 0.01, 0.001]);
        // A context too short for any turn, and a base of 1: the results are still numbers.
        (yarn.original_context, yarn.factor) = (1, 8.0);
        assert!(angles(RopeScaling::Yarn(yarn), None).frequencies.iter().all(|f| f.is_finite()));
    }

    #[test]
    fn a_table_holds_cosines_and_sines_with_the_magnitude() {
        let spec = RopeSpec {
            layout: RopeLayout::Halves,
            dims: 4,
            theta: 100.0,
            scaling: RopeScaling::None,
            magnitude: 2.0,
            growth: None,
        };
        let (angles, mut table) = (RopeAngles::new(&spec, None), Vec::new());
        (0..3).for_each(|position| angles.append(position, &mut table));
        let want = |angle: f64| [(2.0 * angle.cos()) as f32, (2.0 * angle.sin()) as f32];
        assert_eq!(angles.pairs(), 2);
        assert_eq!(table, [0.0, 0.0, 1.0, 0.1, 2.0, 0.2].map(want));
    }

    /// By hand: `e^2 - 1` is 6.39, so within 7 steps the factor passes `1 + 0.5 * 2`.
    #[test]
    fn growth_goes_in_steps_of_its_period() {
        let growth = Growth { scale: 0.5, period: 10 };
        close(&[growth.at(0), growth.at(9)], &[1.0, 1.0]);
        close(&[growth.at(10), growth.at(19)], &[1.0 + 0.5 * 2f64.ln(); 2]);
        assert!(growth.at(63) < 2.0 && growth.at(70) > 2.0);
        let spec = RopeSpec {
            layout: RopeLayout::Halves,
            dims: 2,
            theta: 100.0,
            scaling: RopeScaling::None,
            magnitude: 2.0,
            growth: Some(growth),
        };
        let mut table = Vec::new();
        RopeAngles::new(&spec, None).append(10, &mut table);
        let length = 2.0 * (1.0 + 0.5 * 2f64.ln());
        assert_eq!(table, [[(length * 10f64.cos()) as f32, (length * 10f64.sin()) as f32]]);
    }
}
