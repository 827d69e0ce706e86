//! Answers that go on when the context is full: the same tokens as fresh requests with the tokens that were kept.

use super::fake::page_bytes;
use super::*;

const CONTEXT: usize = 96;

impl Rig {
    /// A request with a context of [`CONTEXT`] tokens that goes on with `kept` first ones when it is full.
    fn shifting(&self, prompt: &[u32], max_tokens: u32, kept: u32) -> Asked {
        let (mut job, asked) = self.job(prompt, max_tokens);
        (job.context_tokens, job.shift) = (CONTEXT as u32, Some(kept));
        self.handle().submit(job).unwrap();
        asked
    }
}

/// The tokens of a shifted answer, and the prompts of the fresh requests that give them.
fn expected_after(prompt: &[u32], count: usize, kept: usize) -> (Vec<u32>, Vec<Vec<u32>>) {
    let (mut ids, mut known, mut prompts) = (Vec::new(), prompt.to_vec(), Vec::new());
    while ids.len() < count {
        prompts.push(known.clone());
        let new = expected(&known, (CONTEXT - known.len()).min(count - ids.len()));
        known.extend(&new);
        ids.extend(new);
        let kept = kept.min(known.len() / 2);
        let gone = (known.len() - kept) / 2;
        known.drain(kept..kept + gone);
    }
    (ids, prompts)
}

#[test]
fn a_full_context_is_halved_after_the_kept_tokens_and_the_answer_goes_on() {
    let prompt = prompt(1, 40);
    for kept in [0, 1, 33, 40, 95, u32::MAX] {
        let rig = Rig::new(EngineOptions::default());
        let answer = rig.shifting(&prompt, 300, kept).finish();
        let (ids, prompts) = expected_after(&prompt, 300, kept as usize);
        assert_eq!(answer.ids, ids, "{kept} are kept");
        assert!(prompts.len() > 4);
        let outcome = answer.outcome();
        assert_eq!((outcome.reason, outcome.generated_tokens), (StopReason::MaxTokens, 300));
        let dropped = 40 + 300 - outcome.dropped_tokens as usize;
        assert!(dropped <= CONTEXT, "{dropped} tokens are left");
        // Fresh requests for what was kept give the same tokens.
        let mut got = answer.ids.as_slice();
        for prompt in prompts {
            let count = (CONTEXT - prompt.len()).min(got.len());
            assert_eq!(rig.ask(&prompt, count as u32).finish().ids, got[..count]);
            got = &got[count..];
        }
        rig.assert_empty();
    }
}

#[test]
fn no_random_number_is_drawn_twice() {
    let rig = Rig::new(EngineOptions::default());
    rig.shifting(&prompt(1, 40), 300, 1).finish();
    assert_eq!(rig.control.draws(), (40..340).collect::<Vec<u32>>());
    let rig = Rig::new(EngineOptions::default());
    rig.ask(&prompt(1, 40), 50).finish();
    assert_eq!(rig.control.draws(), (40..90).collect::<Vec<u32>>(), "without a shift they are positions");
}

#[test]
fn without_the_request_a_full_context_ends_the_answer() {
    let rig = Rig::new(EngineOptions::default());
    let (mut job, asked) = rig.job(&prompt(1, 40), 300);
    job.context_tokens = CONTEXT as u32;
    rig.handle().submit(job).unwrap();
    let answer = asked.finish();
    assert_eq!(answer.outcome().reason, StopReason::ContextFull);
    assert_eq!((answer.ids.len(), answer.outcome().dropped_tokens), (CONTEXT - 40, 0));
}

#[test]
fn kept_first_pages_are_not_computed_again() {
    let rig = Rig::new(EngineOptions::default());
    let prompt = prompt(1, 40);
    rig.shifting(&prompt, 57, 32).finish();
    // 96 tokens are halved to the 32 kept ones and 32 more, of which one token comes; the kept page is there.
    let counters = rig.handle().snapshot().counters;
    assert_eq!((counters.prefill_rows, counters.decode_rows), (40 + 32, 55));
    rig.assert_empty();
}

#[test]
fn shifts_beside_each_other_with_few_pages_change_no_token() {
    let page = page_bytes(&open(9, &kept_model()).plan.program);
    let rig = Rig::new(EngineOptions { kv_budget_bytes: 7 * page, ..EngineOptions::default() });
    let asked: Vec<_> = (0..6).map(|n| (n, rig.shifting(&prompt(n, 20 + n), 250, n))).collect();
    for (n, asked) in asked {
        let answer = asked.finish();
        assert_eq!(answer.ids, expected_after(&prompt(n, 20 + n), 250, n as usize).0, "{:?}", answer.end);
    }
    rig.assert_empty();
}

#[test]
fn an_answer_without_an_end_is_cancelled_in_the_middle() {
    let rig = Rig::new(EngineOptions::default());
    let prompt = prompt(1, 40);
    let mut endless = rig.shifting(&prompt, u32::MAX, 1);
    let ids = endless.take(2000);
    assert_eq!(ids, expected_after(&prompt, 2000, 1).0);
    rig.handle().cancel(endless.id);
    assert!(matches!(endless.finish().error(), JobError::Cancelled));
    rig.assert_empty();
}
