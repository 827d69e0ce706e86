//! Samplers beyond top-k, top-p and min-p: top-n-sigma, typical, XTC, dynamic temperature, mirostat.
//!
//! They are computed on the host, also for logits of a GPU. That costs a copy of one row, and few requests ask for them.
//! The order is that of llama.cpp's default chain: top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature. Each sees the
//! probabilities of what those before it kept, at temperature 1. With mirostat, temperature comes first, and nothing else cuts.
//! Typical sampling: Meister et al., arXiv 2202.00666. Top-n-sigma: Tang et al., arXiv 2411.07641. Mirostat: Basu et al.,
//! arXiv 2007.14966. XTC (excluding top choices) and dynamic temperature are of the communities of users alone.

use std::cmp::Ordering;

use super::cpu::sample::{Candidate, pick, uniform};
use super::{BackendError, MASKED_LOGIT, SampleRow};

/// Settings of these samplers for one draw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chain {
    /// Keep logits of at least the highest less so many standard deviations of all; 0 keeps all.
    pub top_n_sigma: f32,
    /// Keep tokens whose surprise is nearest to the entropy, until their probabilities exceed this; 1 keeps all.
    pub typical_p: f32,
    /// How likely a draw is to exclude the top choices; 0 for never.
    pub xtc_probability: f32,
    /// Top choices have at least this probability; the least likely of them stays. Above 0.5 there is no second one.
    pub xtc_threshold: f32,
    /// The temperature lies within so much of the row's, by the entropy; 0 leaves it.
    pub dynatemp_range: f32,
    /// Power of the entropy's share of its maximum.
    pub dynatemp_exponent: f32,
    /// Mirostat 2: keep tokens of at most so much surprise, in bits. `None` for no mirostat.
    pub mirostat: Option<f32>,
}

impl Chain {
    /// A chain that keeps all.
    pub const NONE: Self = Self {
        top_n_sigma: 0.0,
        typical_p: 1.0,
        xtc_probability: 0.0,
        xtc_threshold: 0.1,
        dynatemp_range: 0.0,
        dynatemp_exponent: 1.0,
        mirostat: None,
    };
}

/// Mixed into the seed of the number that decides whether top choices are excluded: it is not the one that draws.
const XTC_SEED: u64 = 0x5854_4300_5854_4300;

/// Draws from changed and masked logits. Returns the token and its surprise in bits, which mirostat learns from.
///
/// # Errors
/// [`BackendError::NotFinite`] if a logit is infinite or NaN, or there are no logits.
pub fn draw(logits: &[f32], row: &SampleRow, chain: &Chain) -> Result<(u32, f32), BackendError> {
    let kept = distribution(logits, row, chain)?;
    let chosen =
        pick(uniform(row.seed, row.position), kept.iter().map(|(_, share)| *share), &mut Vec::new()).0;
    let (id, share) = kept.get(chosen).copied().ok_or(BackendError::NotFinite)?;
    Ok((id, -share.log2() as f32))
}

/// The tokens that can be drawn, by id, and their probabilities. The row's temperature is above 0.
///
/// # Errors
/// As [`draw`].
pub fn distribution(logits: &[f32], row: &SampleRow, chain: &Chain) -> Result<Vec<(u32, f64)>, BackendError> {
    if logits.iter().any(|logit| !logit.is_finite()) {
        return Err(BackendError::NotFinite);
    }
    let all = logits.iter().zip(0..).map(|(&logit, id)| Candidate { logit, id });
    let mut kept: Vec<Candidate> = all.filter(|c| c.logit > MASKED_LOGIT).collect();
    if kept.is_empty() {
        return Err(BackendError::NotFinite);
    }
    let temperature = match chain.mirostat {
        Some(most) => {
            keep_surprising(&mut kept, f64::from(row.temperature), f64::from(most));
            f64::from(row.temperature)
        }
        None => {
            cut(&mut kept, row, chain);
            temperature(&kept, row, chain)
        }
    };
    kept.sort_unstable_by_key(|c| c.id);
    let shares = probabilities(&kept, temperature);
    Ok(kept.iter().map(|c| c.id).zip(shares).collect())
}

fn cut(kept: &mut Vec<Candidate>, row: &SampleRow, chain: &Chain) {
    if chain.top_n_sigma > 0.0 {
        let floor = f64::from(highest(kept)) - f64::from(chain.top_n_sigma) * deviation(kept);
        kept.retain(|c| f64::from(c.logit) >= floor);
    }
    let top_k = row.top_k as usize;
    if (1..kept.len()).contains(&top_k) {
        kept.select_nth_unstable_by(top_k - 1, Candidate::rank);
        kept.truncate(top_k);
    }
    if chain.typical_p < 1.0 {
        keep_typical(kept, f64::from(chain.typical_p));
    }
    if row.top_p < 1.0 {
        let (best, total) = (highest(kept), sum(kept, 1.0));
        let target = f64::from(row.top_p.max(0.0)) * total;
        keep_first(kept, Candidate::rank, |c, sum| {
            *sum += share(c, best, 1.0);
            *sum >= target
        });
    }
    if row.min_p > 0.0 {
        let best = highest(kept);
        let floor = (best + row.min_p.ln()).min(best);
        kept.retain(|c| c.logit >= floor);
    }
    let excludes = chain.xtc_probability > 0.0 && chain.xtc_threshold <= 0.5;
    if excludes && uniform(row.seed ^ XTC_SEED, row.position) <= f64::from(chain.xtc_probability) {
        exclude_top_choices(kept, f64::from(chain.xtc_threshold));
    }
}

/// Keeps the tokens whose surprise is nearest to the entropy, until their probabilities exceed `p`.
fn keep_typical(kept: &mut Vec<Candidate>, p: f64) {
    let (best, total) = (highest(kept), sum(kept, 1.0));
    let surprise = |c: &Candidate| total.ln() - (f64::from(c.logit) - f64::from(best));
    let probability = |c: &Candidate| share(c, best, 1.0) / total;
    let entropy: f64 = kept.iter().map(|c| probability(c) * surprise(c)).sum();
    let off = |c: &Candidate| (surprise(c) - entropy).abs();
    keep_first(
        kept,
        |a, b| off(a).total_cmp(&off(b)).then(a.rank(b)),
        |c, sum| {
            *sum += probability(c);
            *sum > p
        },
    );
}

/// Keeps the first candidates in `order`, up to the one at which `is_last` is true. Sorts the first 64, then four times as many,
/// and so on: few distributions need more.
fn keep_first(
    kept: &mut Vec<Candidate>,
    order: impl Fn(&Candidate, &Candidate) -> Ordering,
    is_last: impl Fn(&Candidate, &mut f64) -> bool,
) {
    let mut k = 64;
    loop {
        if k < kept.len() {
            kept.select_nth_unstable_by(k - 1, &order);
        }
        let first = k.min(kept.len());
        kept[..first].sort_unstable_by(&order);
        let mut state = 0.0;
        if let Some(last) = kept[..first].iter().position(|c| is_last(c, &mut state)) {
            return kept.truncate(last + 1);
        }
        if k >= kept.len() {
            return;
        }
        k = k.saturating_mul(4);
    }
}

/// Drops all tokens of at least this probability but the least likely of them.
fn exclude_top_choices(kept: &mut Vec<Candidate>, threshold: f64) {
    let (best, total) = (highest(kept), sum(kept, 1.0));
    let is_top = |c: &Candidate| share(c, best, 1.0) / total >= threshold;
    let last = kept.iter().copied().filter(is_top).max_by(Candidate::rank);
    if let Some(last) = last {
        kept.retain(|c| c.rank(&last) != Ordering::Less);
    }
}

/// Mirostat's cut: tokens of more surprise than `most` bits go, but never the most likely one.
fn keep_surprising(kept: &mut Vec<Candidate>, temperature: f64, most: f64) {
    let (best, total) = (highest(kept), sum(kept, temperature));
    let surprise = |c: &Candidate| (total.ln() - scaled(c, best, temperature)) / std::f64::consts::LN_2;
    let first = kept.iter().copied().min_by(Candidate::rank);
    kept.retain(|c| surprise(c) <= most || Some(*c) == first);
}

/// The temperature of the row, or the one that the entropy asks for.
fn temperature(kept: &[Candidate], row: &SampleRow, chain: &Chain) -> f64 {
    let (middle, range) = (f64::from(row.temperature), f64::from(chain.dynatemp_range));
    if chain.dynatemp_range <= 0.0 || kept.len() < 2 {
        return middle;
    }
    let (low, high) = ((middle - range).max(0.0), middle + range);
    let entropy: f64 = probabilities(kept, 1.0).filter(|p| *p > 0.0).map(|p| -p * p.ln()).sum();
    let part = (entropy / (kept.len() as f64).ln()).clamp(0.0, 1.0);
    low + (high - low) * part.powf(f64::from(chain.dynatemp_exponent))
}

/// Probabilities in the order of the candidates. Temperature 0 has the first of the most likely ones.
fn probabilities(kept: &[Candidate], temperature: f64) -> impl Iterator<Item = f64> {
    let best = kept.iter().copied().min_by(Candidate::rank);
    let logit = best.map_or(0.0, |best| best.logit);
    let total = sum(kept, temperature);
    kept.iter().map(move |c| match best {
        Some(best) if temperature <= 0.0 => f64::from(u8::from(*c == best)),
        _ => share(c, logit, temperature) / total,
    })
}

fn highest(kept: &[Candidate]) -> f32 {
    kept.iter().fold(MASKED_LOGIT, |best, c| best.max(c.logit))
}

/// Standard deviation of the logits.
fn deviation(kept: &[Candidate]) -> f64 {
    let count = kept.len().max(1) as f64;
    let mean = kept.iter().map(|c| f64::from(c.logit)).sum::<f64>() / count;
    let squares = kept.iter().map(|c| (f64::from(c.logit) - mean).powi(2)).sum::<f64>();
    (squares / count).sqrt()
}

/// The sum of the candidates' shares.
fn sum(kept: &[Candidate], temperature: f64) -> f64 {
    let best = highest(kept);
    kept.iter().map(|c| share(c, best, temperature)).sum()
}

/// Probability relative to that of the logit `best`.
fn share(c: &Candidate, best: f32, temperature: f64) -> f64 {
    scaled(c, best, temperature).exp()
}

fn scaled(c: &Candidate, best: f32, temperature: f64) -> f64 {
    let below = f64::from(c.logit) - f64::from(best);
    if below == 0.0 { 0.0 } else { below / temperature }
}
