//! Draws tokens from logits.
//!
//! The order is that of llama.cpp's default chain, for which users tune their settings. First come changes of single
//! logits and the mask, then top-k, then top-p and min-p, then temperature, then the draw. Top-p and min-p see the
//! remaining probabilities at temperature 1. Rows with a [`chain`] of further samplers draw by that. Equal logits rank by id, lowest first. A draw depends only on logits,
//! settings, seed and position. Log-probabilities are those of the unchanged logits.

use super::compute::SERIAL_VALUES_MAX;
use super::norm;
use super::pool::Pool;
use super::simd::Level;
use crate::backend::chain;
use crate::backend::{BackendError, LogitChange, MASKED_LOGIT, SampleRow, Sampled, TokenMask};

/// Scratch memory for draws, kept between rows.
#[derive(Default)]
pub struct SampleScratch {
    candidates: Vec<Candidate>,
    weights: Vec<f64>,
    /// Changed logits of a row.
    changed: Vec<f32>,
}

/// A token that may be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::backend) struct Candidate {
    pub logit: f32,
    pub id: u32,
}

impl Candidate {
    /// Most likely first, then lowest id. Logits are finite here.
    pub fn rank(&self, other: &Self) -> std::cmp::Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

/// Draws the tokens of some rows of a step.
#[derive(Default)]
pub struct Sampler {
    scratch: SampleScratch,
    drawn: Vec<Result<Sampled, BackendError>>,
}

/// Most threads that draw at once. Each keeps scratch memory of up to 20 bytes for each token of the vocabulary.
const SAMPLERS_MAX: usize = 8;

/// Draws one token for each of `rows` from the logits beside it, on several threads: with masks over 128,000 tokens a row takes
/// 0.2 ms.
pub fn sample_rows(
    level: Level,
    pool: &mut Pool,
    logits: &[&[f32]],
    rows: &[SampleRow],
    samplers: &mut Vec<Sampler>,
) -> Vec<Result<Sampled, BackendError>> {
    let values: usize = logits.iter().map(|logits| logits.len()).sum();
    let threads = if values > SERIAL_VALUES_MAX { pool.threads() } else { 1 };
    let count = threads.min(SAMPLERS_MAX).min(rows.len());
    if samplers.len() < count {
        samplers.resize_with(count, Sampler::default);
    }
    let samplers = &mut samplers[..count];
    pool.run_items(samplers, |first, sampler| {
        let mine = logits.iter().zip(rows).skip(first).step_by(count);
        let Sampler { scratch, drawn } = sampler;
        drawn.clear(); // a panic may have left some
        drawn.extend(mine.map(|(logits, row)| sample(level, logits, row, scratch)));
    });
    let mut drawn: Vec<_> = samplers.iter_mut().map(|sampler| sampler.drawn.drain(..)).collect();
    (0..rows.len()).filter_map(|row| drawn[row % count].next()).collect()
}

/// Draws one token from `logits`, which holds one value per token of the vocabulary.
///
/// # Errors
/// [`BackendError::NotFinite`] if a logit is infinite or NaN, or a changed one is, or there are no logits.
pub fn sample(
    level: Level,
    logits: &[f32],
    row: &SampleRow,
    scratch: &mut SampleScratch,
) -> Result<Sampled, BackendError> {
    let best = argmax(logits).ok_or(BackendError::NotFinite)?;
    let (id, surprise) = if row.changes.is_none() && row.mask.is_none() {
        drawn(level, logits, best, row, scratch)?
    } else {
        let mut changed = std::mem::take(&mut scratch.changed);
        changed.clear();
        changed.extend_from_slice(logits);
        change(&mut changed, row.changes.as_deref().unwrap_or_default(), row.mask.as_deref());
        let best = argmax(&changed).ok_or(BackendError::NotFinite);
        let drawn = best.and_then(|best| drawn(level, &changed, best, row, scratch));
        scratch.changed = changed;
        drawn?
    };
    if row.top_logprobs == 0 {
        return Ok(Sampled { id, logprob: 0.0, top: Vec::new(), surprise });
    }
    let log_total = norm::sum_exp(level, logits, best.logit, 1.0).ln();
    let logprob = |logit: f32| (f64::from(logit) - f64::from(best.logit) - log_total) as f32;
    select(logits, row.top_logprobs as usize, &mut scratch.candidates);
    let top = scratch.candidates.iter().map(|c| (c.id, logprob(c.logit))).collect();
    let logprob = logits.get(id as usize).map_or(0.0, |&l| logprob(l));
    Ok(Sampled { id, logprob, top, surprise })
}

/// Changes single logits, then masks.
fn change(logits: &mut [f32], changes: &[LogitChange], mask: Option<&TokenMask>) {
    for change in changes {
        if let Some(logit) = logits.get_mut(change.id as usize) {
            *logit = change.apply(*logit);
        }
    }
    let Some(mask) = mask else { return };
    let words = mask.words().iter().copied().chain(std::iter::repeat(0));
    for (chunk, word) in logits.chunks_mut(32).zip(words) {
        match word {
            u32::MAX => {}
            0 => chunk.fill(MASKED_LOGIT),
            _ => {
                let masked = chunk.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                masked.for_each(|(_, logit)| *logit = MASKED_LOGIT);
            }
        }
    }
}

/// The token and its surprise, where a chain of samplers draws.
fn drawn(
    level: Level,
    logits: &[f32],
    best: Candidate,
    row: &SampleRow,
    scratch: &mut SampleScratch,
) -> Result<(u32, Option<f32>), BackendError> {
    if row.is_greedy() {
        return Ok((best.id, None));
    }
    match &row.chain {
        Some(chain) => chain::draw(logits, row, chain).map(|(id, surprise)| (id, Some(surprise))),
        None => Ok((draw(level, logits, best, row, scratch), None)),
    }
}

/// The most likely token; `None` if a logit is not finite, or there are no logits.
fn argmax(logits: &[f32]) -> Option<Candidate> {
    // Two passes, because both compile to vector code; one pass with an index does not.
    let exponent = f32::INFINITY.to_bits();
    if logits.iter().fold(false, |bad, l| bad | (l.to_bits() & exponent == exponent)) {
        return None;
    }
    let chunk_max = |chunk: &[f32]| chunk.iter().fold(f32::NEG_INFINITY, |m, &l| if l > m { l } else { m });
    let mut best: Option<(usize, f32)> = None;
    for (chunk, values) in logits.chunks(CHUNK).enumerate() {
        let max = chunk_max(values);
        if best.is_none_or(|(_, logit)| max > logit) {
            best = Some((chunk * CHUNK, max));
        }
    }
    let (start, logit) = best?;
    let offset = logits[start..].iter().position(|&l| l == logit)?;
    Some(Candidate { logit, id: u32::try_from(start + offset).ok()? })
}

/// Logits scanned at a time.
const CHUNK: usize = 1024;

fn draw(level: Level, logits: &[f32], best: Candidate, row: &SampleRow, scratch: &mut SampleScratch) -> u32 {
    let SampleScratch { candidates, weights, .. } = scratch;
    let floor = floor(best, row);
    let top_k = if row.top_k == 0 { logits.len() } else { row.top_k as usize };
    let top_p = if row.top_p < 1.0 { Some(f64::from(row.top_p.max(0.0))) } else { None };
    if top_k < logits.len() {
        select(logits, top_k, candidates);
        if let Some(p) = top_p {
            let total = candidates.iter().map(|c| share(c.logit, best.logit)).sum::<f64>();
            candidates.truncate(nucleus(candidates, best.logit, p * total).unwrap_or(usize::MAX));
        }
    } else if let Some(p) = top_p {
        let target = p * norm::sum_exp(level, logits, best.logit, 1.0);
        select_nucleus(logits, best.logit, target, candidates);
    } else if let Some(floor) = floor {
        candidates.clear();
        let all = logits.iter().zip(0..).map(|(&logit, id)| Candidate { logit, id });
        candidates.extend(all.filter(|c| c.logit >= floor));
    } else {
        return draw_of_all(level, logits, best, row, weights);
    }
    if let Some(floor) = floor {
        candidates.retain(|c| c.logit >= floor);
    }
    let temperature = f64::from(row.temperature);
    let shares =
        candidates.iter().map(|c| ((f64::from(c.logit) - f64::from(best.logit)) / temperature).exp());
    let chosen = pick(uniform(row.seed, row.position), shares, weights).0;
    candidates.get(chosen).map_or(best.id, |c| c.id)
}

/// Lowest logit that min-p and a mask keep, if one of them drops any. The most likely token always stays.
fn floor(best: Candidate, row: &SampleRow) -> Option<f32> {
    let by_p = (row.min_p > 0.0).then(|| (best.logit + row.min_p.ln()).min(best.logit));
    let by_mask = row.mask.as_ref().map(|_| MASKED_LOGIT.next_up().min(best.logit));
    [by_p, by_mask].into_iter().flatten().reduce(f32::max)
}

/// Draws from the whole vocabulary: first a chunk by the chunks' sums, then a token of that chunk. Most of the work
/// is then in [`norm::sum_exp`].
fn draw_of_all(
    level: Level,
    logits: &[f32],
    best: Candidate,
    row: &SampleRow,
    weights: &mut Vec<f64>,
) -> u32 {
    // Limits the scale for temperatures below 1e-38: it stays finite, so that 0 times it is 0.
    let scale = (1.0 / row.temperature).min(f32::MAX);
    let sums = logits.chunks(CHUNK).map(|chunk| norm::sum_exp(level, chunk, best.logit, scale));
    let (chunk, rest) = pick(uniform(row.seed, row.position), sums, weights);
    let first = chunk * CHUNK;
    let tokens = &logits[first..(first + CHUNK).min(logits.len())];
    let shares = tokens.iter().map(|l| f64::from((l - best.logit) * scale).max(-87.0).exp());
    let chosen = first + pick(rest, shares, weights).0;
    u32::try_from(chosen).unwrap_or(best.id)
}

/// The entry of `shares` at the fraction `u` of their sum, and the fraction within that entry. `sums` is scratch.
pub(in crate::backend) fn pick(
    u: f64,
    shares: impl Iterator<Item = f64>,
    sums: &mut Vec<f64>,
) -> (usize, f64) {
    sums.clear();
    let mut total = 0.0;
    sums.extend(shares.map(|share| {
        total += share;
        total
    }));
    let target = u * total;
    let chosen = sums.partition_point(|&sum| sum <= target).min(sums.len().saturating_sub(1));
    let before = chosen.checked_sub(1).map_or(0.0, |i| sums[i]);
    let share = sums.get(chosen).map_or(0.0, |sum| sum - before);
    (chosen, if share > 0.0 { ((target - before) / share).clamp(0.0, 1.0) } else { 0.0 })
}

/// Probability relative to the most likely token's.
fn share(logit: f32, best: f32) -> f64 {
    (f64::from(logit) - f64::from(best)).exp()
}

/// How many of `ranked` are needed to reach `target`; `None` if all together do not.
fn nucleus(ranked: &[Candidate], best: f32, target: f64) -> Option<usize> {
    let mut sum = 0.0;
    let last = ranked.iter().position(|c| {
        sum += share(c.logit, best);
        sum >= target
    });
    last.map(|last| last + 1)
}

/// The most likely tokens that together reach `target`, ranked. Tries the best 64, then four times as many, and so
/// on: only a nearly flat distribution sorts the whole vocabulary.
fn select_nucleus(logits: &[f32], best: f32, target: f64, out: &mut Vec<Candidate>) {
    let mut k = 64;
    loop {
        select(logits, k, out);
        if let Some(count) = nucleus(out, best, target) {
            out.truncate(count);
            return;
        }
        if k >= logits.len() {
            return;
        }
        k = k.saturating_mul(4);
    }
}

/// The `k` most likely tokens, ranked. One pass over the logits, with a buffer of at most 2k + 64 candidates.
fn select(logits: &[f32], k: usize, out: &mut Vec<Candidate>) {
    out.clear();
    let k = k.min(logits.len());
    if k == 0 {
        return;
    }
    let room = k.saturating_mul(2).saturating_add(64);
    let mut floor = f32::NEG_INFINITY;
    for (&logit, id) in logits.iter().zip(0u32..) {
        // A later token that equals the floor ranks behind the k already kept.
        if logit <= floor {
            continue;
        }
        out.push(Candidate { logit, id });
        if out.len() == room {
            floor = keep(out, k);
        }
    }
    keep(out, k);
    out.sort_unstable_by(Candidate::rank);
}

/// Keeps the first `k` by rank, in any order. Returns the lowest kept logit, or minus infinity if there are fewer
/// than `k`.
fn keep(candidates: &mut Vec<Candidate>, k: usize) -> f32 {
    if candidates.len() < k {
        return f32::NEG_INFINITY;
    }
    let (_, last, _) = candidates.select_nth_unstable_by(k - 1, Candidate::rank);
    let floor = last.logit;
    candidates.truncate(k);
    floor
}

/// A number in [0, 1), a function of seed and position: 53 bits of two rounds of SplitMix64's finaliser (Steele, Lea,
/// Flood 2014). The first round takes the seed, the second its result and the position.
pub(in crate::backend) fn uniform(seed: u64, position: u32) -> f64 {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let key = mix(seed.wrapping_add(GOLDEN));
    let bits = mix(key.wrapping_add(GOLDEN.wrapping_mul(u64::from(position).wrapping_add(1))));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests;
