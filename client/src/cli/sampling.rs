//! Arguments that say how tokens are drawn.

use clap::Args;
use rocmforge_client::wire::SamplingOptions;

use super::args::{share, temperature};

/// The sampling of `run` and `chat`.
#[derive(Clone, Debug, Args)]
pub struct Sampling {
    /// Randomness, 0 to 100; 0 always takes the most likely token
    #[arg(short = 't', long, default_value_t = 0.8, value_name = "T", allow_negative_numbers = true, value_parser = temperature)]
    pub temperature: f32,
    /// Draw from this many most likely tokens; 0: from all
    #[arg(long, default_value_t = 40, value_name = "N", allow_negative_numbers = true)]
    pub top_k: u32,
    /// Draw from the most likely tokens that together have this probability; 1: from all
    #[arg(long, default_value_t = 0.95, value_name = "P", allow_negative_numbers = true, value_parser = share)]
    pub top_p: f32,
    /// Draw from tokens with at least this share of the most likely one's probability; 0: from all
    #[arg(long, default_value_t = 0.05, value_name = "P", allow_negative_numbers = true, value_parser = share)]
    pub min_p: f32,
}

impl Sampling {
    /// For a request with that seed, which reports so many of the most likely tokens.
    pub fn options(&self, seed: Option<u64>, top_logprobs: u32) -> SamplingOptions {
        let Self { temperature, top_k, top_p, min_p } = *self;
        SamplingOptions { temperature, top_k, top_p, min_p, seed, top_logprobs }
    }
}
