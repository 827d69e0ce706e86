//! Extension of [`GenerateRequest`]: samplers beside those of [`SamplingOptions`](super::SamplingOptions).

use super::{BadSteering, EXT_CRITICAL, GenerateRequest};
use crate::wire::validate::limits;

/// Key of [`GenerateRequest`]'s `ext`: further samplers, as [`Samplers::bytes`] has them.
pub const EXT_GENERATE_SAMPLERS: u16 = EXT_CRITICAL | 5;

/// Bytes of samplers without breakers.
const FIXED_BYTES: usize = 49;

/// Samplers that few requests ask for, by the names of llama.cpp. The default changes nothing. The daemon checks ranges.
#[derive(Clone, Debug, PartialEq)]
pub struct Samplers {
    /// Keep tokens whose surprise is nearest to the entropy, until their probabilities exceed this; 0..=1, 1 keeps all.
    pub typical_p: f32,
    /// Keep logits of at least the highest less so many standard deviations; 0..=100, 0 keeps all.
    pub top_n_sigma: f32,
    /// How likely a draw is to exclude the top choices but the least likely of them; 0..=1.
    pub xtc_probability: f32,
    /// Top choices have at least this probability; 0..=1, above 0.5 for none.
    pub xtc_threshold: f32,
    /// The temperature lies within so much of the request's, by the entropy; 0..=100, 0 leaves it.
    pub dynatemp_range: f32,
    /// Power of the entropy's share of its maximum; 0..=100.
    pub dynatemp_exponent: f32,
    /// Mirostat 2, in place of all samplers that cut.
    pub mirostat: bool,
    /// Surprise in bits that mirostat aims at; 0..=100.
    pub mirostat_tau: f32,
    /// How fast mirostat follows; 0..=1.
    pub mirostat_eta: f32,
    /// A penalty for tokens that go on with a repetition.
    pub dry: Dry,
}

/// The settings of DRY: tokens that go on with a repetition are less likely, by its length.
#[derive(Clone, Debug, PartialEq)]
pub struct Dry {
    /// The penalty of a repetition of `allowed_length` tokens; 0..=100, 0 for none.
    pub multiplier: f32,
    /// The penalty grows by this factor with each further token; 1..=100.
    pub base: f32,
    /// Shorter repetitions are not penalised.
    pub allowed_length: u32,
    /// So many last tokens of prompt and answer are looked at, at most [`limits::PENALTY_TOKENS_MAX`].
    pub last: u32,
    /// Repetitions do not reach across these. At most [`limits::BREAKERS_MAX`], each of 1 to [`limits::BREAKER_BYTES_MAX`] bytes.
    pub breakers: Vec<String>,
}

impl Default for Dry {
    /// No penalty, and llama.cpp's values for one.
    fn default() -> Self {
        let breakers = ["\n", ":", "\"", "*"].map(str::to_owned).to_vec();
        Self { multiplier: 0.0, base: 1.75, allowed_length: 2, last: limits::PENALTY_TOKENS_MAX, breakers }
    }
}

impl Default for Samplers {
    /// Samplers that change nothing. Settings of a sampler that is off have llama.cpp's values.
    fn default() -> Self {
        Self {
            typical_p: 1.0,
            top_n_sigma: 0.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            mirostat: false,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            dry: Dry::default(),
        }
    }
}

impl Samplers {
    /// Whether they change anything.
    pub fn change_nothing(&self) -> bool {
        let draws = self.typical_p == 1.0 && self.top_n_sigma == 0.0 && self.xtc_probability == 0.0;
        draws && self.dynatemp_range == 0.0 && !self.mirostat && self.dry.multiplier == 0.0
    }

    /// Their bytes on the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let Dry { multiplier, base, allowed_length, last, breakers } = &self.dry;
        let mut bytes = Vec::with_capacity(FIXED_BYTES);
        for number in [
            self.typical_p,
            self.top_n_sigma,
            self.xtc_probability,
            self.xtc_threshold,
            self.dynatemp_range,
            self.dynatemp_exponent,
        ] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.push(if self.mirostat { 2 } else { 0 });
        for number in [self.mirostat_tau, self.mirostat_eta, *multiplier, *base] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(&allowed_length.to_le_bytes());
        bytes.extend_from_slice(&last.to_le_bytes());
        for breaker in breakers {
            // A longer one is cut, and the daemon refuses what is left over.
            bytes.push(u8::try_from(breaker.len()).unwrap_or(u8::MAX));
            bytes.extend_from_slice(breaker.as_bytes());
        }
        bytes
    }

    /// The samplers of these bytes.
    ///
    /// # Errors
    /// [`BadSteering`] for bytes that are none.
    pub fn of(bytes: &[u8]) -> Result<Self, BadSteering> {
        const BAD: BadSteering = BadSteering::Samplers;
        let (fixed, mut rest) = bytes.split_at_checked(FIXED_BYTES).ok_or(BAD)?;
        let (draws, fixed) = fixed.split_at(24);
        let (mirostat, fixed) = fixed.split_first().ok_or(BAD)?;
        let ([typical, sigma, probability, threshold, range, exponent], []) = draws.as_chunks::<4>() else {
            return Err(BAD);
        };
        let ([tau, eta, multiplier, base, allowed, last], []) = fixed.as_chunks::<4>() else {
            return Err(BAD);
        };
        let mirostat = match mirostat {
            0 => false,
            2 => true,
            _ => return Err(BAD),
        };
        let mut breakers = Vec::new();
        while let Some((length, after)) = rest.split_first() {
            let (breaker, after) = after.split_at_checked(usize::from(*length)).ok_or(BAD)?;
            let fits = (1..=limits::BREAKER_BYTES_MAX).contains(&breaker.len());
            if !fits || breakers.len() == limits::BREAKERS_MAX {
                return Err(BAD);
            }
            breakers.push(std::str::from_utf8(breaker).map_err(|_| BAD)?.to_owned());
            rest = after;
        }
        Ok(Self {
            typical_p: f32::from_le_bytes(*typical),
            top_n_sigma: f32::from_le_bytes(*sigma),
            xtc_probability: f32::from_le_bytes(*probability),
            xtc_threshold: f32::from_le_bytes(*threshold),
            dynatemp_range: f32::from_le_bytes(*range),
            dynatemp_exponent: f32::from_le_bytes(*exponent),
            mirostat,
            mirostat_tau: f32::from_le_bytes(*tau),
            mirostat_eta: f32::from_le_bytes(*eta),
            dry: Dry {
                multiplier: f32::from_le_bytes(*multiplier),
                base: f32::from_le_bytes(*base),
                allowed_length: u32::from_le_bytes(*allowed),
                last: u32::from_le_bytes(*last),
                breakers,
            },
        })
    }
}

impl GenerateRequest {
    /// The same request with these samplers.
    #[must_use]
    pub fn with_samplers(mut self, samplers: &Samplers) -> Self {
        self.ext.retain(|(key, _)| *key != EXT_GENERATE_SAMPLERS);
        self.ext.push((EXT_GENERATE_SAMPLERS, samplers.bytes()));
        self
    }

    /// Further samplers, if the request states any.
    ///
    /// # Errors
    /// [`BadSteering`] for bytes that are none.
    pub fn samplers(&self) -> Result<Option<Samplers>, BadSteering> {
        self.bytes_of(EXT_GENERATE_SAMPLERS).map(Samplers::of).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Prompt, Validate};

    #[test]
    fn samplers_are_read_as_they_were_written() {
        let breakers = vec!["\n".to_owned(), "ß".repeat(32)];
        let dry = Dry { multiplier: 0.8, base: 1.5, allowed_length: 3, last: 100, breakers };
        let samplers =
            Samplers { typical_p: 0.25, mirostat: true, mirostat_tau: 3.5, dry, ..Samplers::default() };
        let request = GenerateRequest::new("m", Prompt::Text("p".into()));
        assert_eq!(request.samplers(), Ok(None));
        let request = request.with_samplers(&Samplers::default()).with_samplers(&samplers);
        assert_eq!((request.samplers(), request.validate()), (Ok(Some(samplers.clone())), Ok(())));
        assert!(Samplers::default().change_nothing() && !samplers.change_nothing());
        let most = Dry { breakers: vec!["x".repeat(64); 16], ..Dry::default() };
        let request = request.with_samplers(&Samplers { dry: most, ..samplers });
        assert_eq!(request.validate(), Ok(()));
    }

    #[test]
    fn bytes_that_are_none_are_refused() {
        let with = |breakers: Vec<String>| {
            Samplers { dry: Dry { breakers, ..Dry::default() }, ..Samplers::default() }.bytes()
        };
        let good = with(vec!["ab".to_owned()]);
        assert!(Samplers::of(&good).is_ok());
        for cut in (0..good.len()).filter(|cut| *cut != FIXED_BYTES) {
            assert_eq!(Samplers::of(&good[..cut]), Err(BadSteering::Samplers), "{cut}");
        }
        let mut mirostat = good;
        mirostat[24] = 1;
        let bad = [
            mirostat,
            with(vec![String::new()]),
            with(vec!["x".repeat(65)]),
            with(vec!["x".to_owned(); 17]),
            [with(vec![]), vec![1, 0xff]].concat(),
        ];
        for bytes in bad {
            assert_eq!(Samplers::of(&bytes), Err(BadSteering::Samplers), "{bytes:?}");
        }
    }
}
