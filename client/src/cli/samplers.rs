//! Options of `run` for samplers that few answers need, by the names of llama.cpp.

use clap::Args;
use rocmforge_client::wire::limits::PENALTY_TOKENS_MAX;
use rocmforge_client::wire::{Dry, GenerateRequest, Samplers as Asked};

use super::args::share;

/// Typical, top-n-sigma, XTC, dynamic temperature, mirostat and DRY.
#[derive(Debug, Args)]
pub struct Samplers {
    /// Draw from the tokens of typical surprise that together have this probability; 1: from all
    #[arg(long, default_value_t = 1.0, value_name = "P", allow_negative_numbers = true, value_parser = share)]
    pub typical_p: f32,
    /// Draw from logits of at least the highest less N standard deviations; 0: from all
    #[arg(long, default_value_t = 0.0, value_name = "N", allow_negative_numbers = true)]
    pub top_n_sigma: f32,
    /// Exclude the most likely tokens from so many draws, all but the last with --xtc-threshold; 0: from none
    #[arg(long, default_value_t = 0.0, value_name = "P", allow_negative_numbers = true, value_parser = share)]
    pub xtc_probability: f32,
    /// Probability of the tokens that --xtc-probability excludes; above 0.5: of none
    #[arg(long, default_value_t = 0.1, value_name = "P", allow_negative_numbers = true, value_parser = share)]
    pub xtc_threshold: f32,
    /// Let the temperature rise with the entropy, so much below and above --temperature; 0: do not
    #[arg(long, default_value_t = 0.0, value_name = "T", allow_negative_numbers = true)]
    pub dynatemp_range: f32,
    /// Power of the entropy's share of its maximum, for --dynatemp-range
    #[arg(long, default_value_t = 1.0, value_name = "X", allow_negative_numbers = true)]
    pub dynatemp_exponent: f32,
    /// Draw by mirostat 2 in place of all samplers that cut; 0: do not
    #[arg(long, default_value_t = 0, value_name = "0|2", value_parser = mirostat)]
    pub mirostat: u8,
    /// Surprise in bits that mirostat aims at
    #[arg(long, default_value_t = 5.0, value_name = "BITS", allow_negative_numbers = true)]
    pub mirostat_tau: f32,
    /// How fast mirostat follows, 0 to 1
    #[arg(long, default_value_t = 0.1, value_name = "X", allow_negative_numbers = true, value_parser = share)]
    pub mirostat_eta: f32,
    /// Make tokens less likely that go on with a repetition, by its length (DRY); 0: do not
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    pub dry_multiplier: f32,
    /// DRY's penalty grows by this factor with each token of the repetition, 1 to 100
    #[arg(long, default_value_t = 1.75, value_name = "X", allow_negative_numbers = true)]
    pub dry_base: f32,
    /// Tokens of a repetition from which on DRY's penalty begins
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub dry_allowed_length: u32,
    /// So many last tokens of prompt and answer are looked at by DRY, 0 to 4096
    #[arg(long, default_value_t = PENALTY_TOKENS_MAX, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=i64::from(PENALTY_TOKENS_MAX)))]
    pub dry_penalty_last_n: u32,
    /// DRY's repetitions do not reach across this text; may be given several times [default: a new line, ':', '"', '*']
    #[arg(long, value_name = "TEXT")]
    pub dry_sequence_breaker: Option<Vec<String>>,
}

impl Samplers {
    /// Whether any of them is stated.
    pub fn is_any(&self) -> bool {
        !self.asked().change_nothing()
    }

    /// The request with these samplers.
    pub fn fill(&self, request: GenerateRequest) -> GenerateRequest {
        let asked = self.asked();
        if asked.change_nothing() { request } else { request.with_samplers(&asked) }
    }

    fn asked(&self) -> Asked {
        let dry = Dry {
            multiplier: self.dry_multiplier,
            base: self.dry_base,
            allowed_length: self.dry_allowed_length,
            last: self.dry_penalty_last_n,
            breakers: self.dry_sequence_breaker.clone().unwrap_or_else(|| Dry::default().breakers),
        };
        Asked {
            typical_p: self.typical_p,
            top_n_sigma: self.top_n_sigma,
            xtc_probability: self.xtc_probability,
            xtc_threshold: self.xtc_threshold,
            dynatemp_range: self.dynatemp_range,
            dynatemp_exponent: self.dynatemp_exponent,
            mirostat: self.mirostat == 2,
            mirostat_tau: self.mirostat_tau,
            mirostat_eta: self.mirostat_eta,
            dry,
        }
    }
}

/// Parses the version of mirostat.
fn mirostat(text: &str) -> Result<u8, String> {
    match text {
        "0" => Ok(0),
        "2" => Ok(2),
        other => Err(format!("{other:?} is neither 0 nor 2; there is no mirostat 1 here")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirostat_is_off_or_2() {
        assert_eq!((mirostat("0"), mirostat("2")), (Ok(0), Ok(2)));
        for bad in ["1", "", "-2", "two"] {
            assert!(mirostat(bad).is_err(), "{bad}");
        }
    }
}
