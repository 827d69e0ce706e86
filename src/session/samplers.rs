//! Further samplers of a request, checked.

use rocmforge_client::wire::{self, ErrorCode, limits};

use super::error::{Failure, failure};
use super::steering::range;
use crate::backend::Chain;
use crate::scheduler::{Dry, Mirostat};

/// Largest setting of those without a bound of their own: beyond it nothing changes, as with the temperature.
const MOST: f32 = 100.0;

/// Samplers as the engine has them; none of those that change nothing.
#[derive(Debug, Default)]
pub(super) struct Samplers {
    pub chain: Option<Chain>,
    pub mirostat: Option<Mirostat>,
    pub dry: Option<Dry>,
}

/// # Errors
/// `InvalidArgument` for numbers out of range.
pub(super) fn checked(asked: wire::Samplers) -> Result<Samplers, Failure> {
    let chain = Chain {
        top_n_sigma: range("top_n_sigma", asked.top_n_sigma, 0.0, MOST)?,
        typical_p: range("typical_p", asked.typical_p, 0.0, 1.0)?,
        xtc_probability: range("xtc_probability", asked.xtc_probability, 0.0, 1.0)?,
        xtc_threshold: range("xtc_threshold", asked.xtc_threshold, 0.0, 1.0)?,
        dynatemp_range: range("dynatemp_range", asked.dynatemp_range, 0.0, MOST)?,
        dynatemp_exponent: range("dynatemp_exponent", asked.dynatemp_exponent, 0.0, MOST)?,
        mirostat: None,
    };
    let mirostat = Mirostat {
        tau: range("mirostat_tau", asked.mirostat_tau, 0.0, MOST)?,
        eta: range("mirostat_eta", asked.mirostat_eta, 0.0, 1.0)?,
    };
    let wire::Dry { multiplier, base, allowed_length, last, breakers } = asked.dry;
    let last_max = limits::PENALTY_TOKENS_MAX;
    if last > last_max {
        let text = format!("dry_last = {last} is not in 0..={last_max}");
        return Err(failure(ErrorCode::InvalidArgument, &text));
    }
    let dry = Dry {
        multiplier: range("dry_multiplier", multiplier, 0.0, MOST)?,
        base: range("dry_base", base, 1.0, MOST)?,
        allowed_length,
        last,
        breakers,
    };
    let draws = chain.top_n_sigma > 0.0 || chain.typical_p < 1.0 || chain.dynatemp_range > 0.0;
    Ok(Samplers {
        chain: (draws || chain.xtc_probability > 0.0).then_some(chain),
        mirostat: asked.mirostat.then_some(mirostat),
        dry: (dry.multiplier > 0.0).then_some(dry),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samplers_out_of_range_are_refused_by_name() {
        let none = checked(wire::Samplers::default()).unwrap();
        assert!(none.chain.is_none() && none.mirostat.is_none() && none.dry.is_none());
        type Change = fn(&mut wire::Samplers);
        let bad: [(&str, Change); 13] = [
            ("top_n_sigma", |s| s.top_n_sigma = -0.5),
            ("typical_p", |s| s.typical_p = 1.5),
            ("typical_p", |s| s.typical_p = f32::NAN),
            ("xtc_probability", |s| s.xtc_probability = 1.1),
            ("xtc_threshold", |s| s.xtc_threshold = -0.1),
            ("dynatemp_range", |s| s.dynatemp_range = f32::INFINITY),
            ("dynatemp_exponent", |s| s.dynatemp_exponent = -1.0),
            ("mirostat_tau", |s| s.mirostat_tau = 101.0),
            ("mirostat_eta", |s| s.mirostat_eta = 2.0),
            ("dry_multiplier", |s| s.dry.multiplier = -1.0),
            ("dry_base", |s| s.dry.base = 0.5),
            ("dry_base", |s| s.dry.base = 101.0),
            ("dry_last", |s| s.dry.last = 4097),
        ];
        for (name, change) in bad {
            let mut samplers = wire::Samplers::default();
            change(&mut samplers);
            let error = checked(samplers).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidArgument as u16);
            assert!(error.message.starts_with(name), "{}", error.message);
        }
        type Switch = fn(&mut wire::Samplers);
        let on: [(&str, Switch); 6] = [
            ("chain", |s| s.top_n_sigma = 1.0),
            ("chain", |s| s.typical_p = 0.9),
            ("chain", |s| s.xtc_probability = 0.5),
            ("chain", |s| s.dynatemp_range = 0.5),
            ("mirostat", |s| s.mirostat = true),
            ("dry", |s| s.dry.multiplier = 0.8),
        ];
        for (name, switch) in on {
            let mut samplers = wire::Samplers::default();
            switch(&mut samplers);
            let Samplers { chain, mirostat, dry } = checked(samplers).unwrap();
            let there = [chain.is_some(), mirostat.is_some(), dry.is_some()];
            assert_eq!(there, ["chain", "mirostat", "dry"].map(|of| of == name));
        }
    }
}
