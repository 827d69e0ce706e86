//! Drafted tokens on a device: several rows of a sequence with logits for each.

use rocmforge::scheduler::{Sampling, Steering, TokenLogprob};

use crate::common::tinystories;
use crate::rig::{Rig, model};

/// Attention over several rows adds in another order than over one. Log-probabilities then differ by less.
const NEAR: f32 = 2e-3;

fn distance(a: &[TokenLogprob], b: &[TokenLogprob]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a.logprob - b.logprob).abs()).fold(0.0, f32::max)
}

#[test]
fn answers_with_drafts_are_those_without() {
    let Some(rig) = Rig::open() else { return };
    let model = model(1, &tinystories());
    // A passage twice, and an answer that goes on with it here and there.
    let passage: Vec<u32> = (0..24).map(|j| (131 + j * 37) % 512).collect();
    let (mut drafted, mut accepted) = (0, 0);
    for seed in 0..4u64 {
        let prompt = [&passage[seed as usize..], &[1, 403], &passage[..]].concat();
        let temperature = if seed.is_multiple_of(2) { 0.0 } else { 0.8 };
        let sampling = Sampling { temperature, top_k: 0, top_p: 0.95, min_p: 0.0, seed, top_logprobs: 2 };
        let ask = |drafts: u32| {
            let settings = (sampling.clone(), Steering::default());
            rig.submit_changed(&model, &prompt, 100, settings, |job| job.drafts = drafts).finish()
        };
        let (alone, with) = (ask(0), ask(5));
        let counts = with.end.expect("an answer");
        drafted += counts.drafted_tokens;
        accepted += counts.accepted_tokens;
        // As long as the tokens are the same, so are the distributions. They part where two tokens are as likely.
        let same = alone.ids.iter().zip(&with.ids).take_while(|(a, b)| a == b).count();
        assert!(distance(&alone.logprobs[..same], &with.logprobs[..same]) < NEAR, "seed {seed}");
        if temperature == 0.0 && same < 100 {
            let [first, second] = [0, 1].map(|at| alone.logprobs[same].top[at].1);
            assert!(first - second < NEAR, "seed {seed}: token {same} differs by {}", first - second);
        }
        assert!(temperature > 0.0 || same > 50, "seed {seed}: {same} of 100");
    }
    // How many are offered depends on what rows were measured to take: 16 were accepted on a busy machine.
    assert!(drafted > accepted && accepted > 0, "{accepted} of {drafted}");
}
