//! Changes of logits by what was said already, and by token.
//!
//! As in llama.cpp, biases come first, then the repetition penalty, then frequency and presence. Only tokens of the answer
//! count for OpenAI's frequency and presence, those of the prompt too in llama.cpp: [`Penalties::prompt`] says which.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backend::LogitChange;

/// Penalties and biases of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Penalties {
    /// Logits of counted tokens are divided by it if above 0, else multiplied; above 0, and 1 changes nothing.
    pub repeat: f32,
    /// Subtracted from a counted token's logit as often as it is there; 0 changes nothing.
    pub frequency: f32,
    /// Subtracted once from each counted token's logit; 0 changes nothing.
    pub presence: f32,
    /// So many last tokens count.
    pub last: u32,
    /// Whether tokens of the prompt count.
    pub prompt: bool,
    /// Added to logits, by token id.
    pub bias: BTreeMap<u32, f32>,
}

impl Penalties {
    /// Penalties that change nothing.
    pub const NONE: Self =
        Self { repeat: 1.0, frequency: 0.0, presence: 0.0, last: 0, prompt: true, bias: BTreeMap::new() };

    /// The changes after `tokens`, of which the last `generated` are the answer's. In order of token ids; none of ids outside a
    /// vocabulary of `vocab` tokens. `repeated` has what [`Dry`](super::Dry) subtracts. Costs a sort of the tokens that count.
    pub fn changes(
        &self,
        tokens: &[u32],
        generated: u32,
        vocab: usize,
        repeated: &BTreeMap<u32, f32>,
    ) -> Option<Arc<[LogitChange]>> {
        let counted = if self.prompt { self.last } else { self.last.min(generated) } as usize;
        let punishes = self.repeat != 1.0 || self.frequency != 0.0 || self.presence != 0.0;
        let last = if punishes { &tokens[tokens.len().saturating_sub(counted)..] } else { &[] };
        let mut last = last.to_vec();
        last.sort_unstable();
        let mut changes: BTreeMap<u32, LogitChange> =
            self.bias.iter().map(|(&id, &bias)| (id, LogitChange { bias, ..unchanged(id) })).collect();
        for equal in last.chunk_by(|a, b| a == b) {
            let change = changes.entry(equal[0]).or_insert_with(|| unchanged(equal[0]));
            change.repeat = self.repeat;
            change.less = equal.len() as f32 * self.frequency + self.presence;
        }
        for (&id, &less) in repeated {
            changes.entry(id).or_insert_with(|| unchanged(id)).less += less;
        }
        let changes: Arc<[_]> = changes.into_values().filter(|change| (change.id as usize) < vocab).collect();
        (!changes.is_empty()).then_some(changes)
    }
}

fn unchanged(id: u32) -> LogitChange {
    LogitChange { id, bias: 0.0, repeat: 1.0, less: 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// llama.cpp's `llama_sampler_logit_bias_apply` and `llama_sampler_penalties_apply`, in f64 over all tokens.
    fn expected(penalties: &Penalties, logits: &[f32], counted: &[u32]) -> Vec<f64> {
        let mut changed: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
        for (id, logit) in changed.iter_mut().enumerate() {
            *logit += f64::from(penalties.bias.get(&(id as u32)).copied().unwrap_or(0.0));
            let count = counted.iter().filter(|of| **of == id as u32).count();
            if count == 0 {
                continue;
            }
            let repeat = f64::from(penalties.repeat);
            *logit = if *logit <= 0.0 { *logit * repeat } else { *logit / repeat };
            *logit -= count as f64 * f64::from(penalties.frequency) + f64::from(penalties.presence);
        }
        changed
    }

    fn check(penalties: &Penalties, tokens: &[u32], generated: u32, counted: &[u32]) {
        let logits: Vec<f32> = (0..40u8).map(|id| f32::from(id % 7) * 1.25 - 3.5).collect();
        let mut changed = logits.clone();
        for change in penalties
            .changes(tokens, generated, logits.len(), &BTreeMap::new())
            .iter()
            .flat_map(|all| all.iter())
        {
            changed[change.id as usize] = change.apply(logits[change.id as usize]);
        }
        for (id, (got, want)) in changed.iter().zip(expected(penalties, &logits, counted)).enumerate() {
            assert!(
                (f64::from(*got) - want).abs() < 1e-5,
                "token {id}: {got} instead of {want}, {penalties:?}"
            );
        }
    }

    #[test]
    fn penalties_and_biases_are_those_of_the_formulas() {
        let tokens = [3, 9, 3, 3, 17, 8, 9, 39, 3, 100];
        let bias = BTreeMap::from([(3, 2.5), (5, -100.0), (38, 0.125), (4_000_000, 1.0)]);
        for repeat in [1.0, 1.3, 0.5] {
            for (frequency, presence) in [(0.0, 0.0), (0.5, 0.0), (0.0, -1.5), (-0.25, 2.0)] {
                for bias in [BTreeMap::new(), bias.clone()] {
                    let all = Penalties { repeat, frequency, presence, last: u32::MAX, prompt: true, bias };
                    check(&all, &tokens, 4, &tokens);
                    check(&Penalties { last: 3, ..all.clone() }, &tokens, 4, &tokens[7..]);
                    check(&Penalties { last: 0, ..all.clone() }, &tokens, 4, &[]);
                    check(&Penalties { prompt: false, ..all.clone() }, &tokens, 4, &tokens[6..]);
                    check(&Penalties { prompt: false, last: 2, ..all.clone() }, &tokens, 4, &tokens[8..]);
                    check(&Penalties { prompt: false, ..all }, &tokens, 0, &[]);
                }
            }
        }
    }

    #[test]
    fn penalties_that_change_nothing_cost_nothing() {
        assert_eq!(Penalties::NONE.changes(&[1, 2, 3], 3, 10, &BTreeMap::new()), None);
        let outside = Penalties { bias: BTreeMap::from([(10, 1.0)]), ..Penalties::NONE };
        assert_eq!(outside.changes(&[1], 1, 10, &BTreeMap::new()), None);
    }
}
