//! Drafts change no token: an answer has those that it has without, whoever else runs, is cancelled or loses its pages.

use super::fake::{PERIOD, REPEATS, page_bytes};
use super::*;

/// A seed of a text that repeats itself.
const SEED: u64 = REPEATS | 7;

impl Rig {
    /// An engine whose steps take 8 ms and 0.1 ms a row. How many tokens are drafted depends on what rows cost.
    fn timed(options: EngineOptions) -> Self {
        Self::with(Control::timed(Duration::from_millis(8), Duration::from_micros(100)), options)
    }

    /// A job that drafts, with a text that repeats itself.
    fn drafting(&self, prompt: &[u32], max_tokens: u32, drafts: u32) -> (Job, Asked) {
        let (mut job, asked) = self.job(prompt, max_tokens);
        (job.drafts, job.sampling.seed) = (drafts, SEED);
        (job, asked)
    }

    fn ask_drafting(&self, prompt: &[u32], max_tokens: u32, drafts: u32) -> Asked {
        let (job, asked) = self.drafting(prompt, max_tokens, drafts);
        self.handle().submit(job).unwrap();
        asked
    }
}

#[test]
fn an_answer_with_drafts_has_the_tokens_of_one_without_in_fewer_steps() {
    let text = prompt(1, 40);
    for drafts in [0, 1, 3, 32] {
        for max_tokens in [1, 2, 3, 5, 31, 200] {
            let rig = Rig::timed(EngineOptions::default());
            let answer = rig.ask_drafting(&text, max_tokens, drafts).finish();
            assert_eq!(answer.ids, expected_of(&text, max_tokens as usize, SEED), "{drafts} drafts");
            let (outcome, counters) = (answer.outcome(), rig.handle().snapshot().counters);
            let (drafted, accepted) = (outcome.drafted_tokens, outcome.accepted_tokens);
            assert_eq!((outcome.reason, outcome.generated_tokens), (StopReason::MaxTokens, max_tokens));
            assert_eq!(
                (counters.drafted_tokens, counters.accepted_tokens),
                (drafted.into(), accepted.into())
            );
            // The first token comes from the prompt's step, and each further one from a step or from a draft.
            let steps = u64::from(max_tokens - accepted);
            assert_eq!((counters.steps, answer.items as u64), (steps, steps));
            assert_eq!((counters.prefill_rows, counters.decode_rows), (40, u64::from(max_tokens) - 1));
            assert!(accepted <= drafted && (drafts > 0 || drafted == 0));
            assert!(max_tokens < 200 || drafts == 0 || accepted > 30, "{accepted} of {drafted}");
            rig.assert_empty();
        }
    }
}

#[test]
fn random_numbers_are_drawn_for_the_same_places_as_without_drafts() {
    let rig = Rig::timed(EngineOptions::default());
    rig.ask_drafting(&prompt(1, 40), 100, 8).finish();
    let draws: std::collections::BTreeSet<u32> = rig.control.draws().into_iter().collect();
    assert_eq!(draws, (40..140).collect());
}

#[test]
fn stop_texts_the_context_and_its_shift_end_answers_where_they_would_without_drafts() {
    let text = prompt(1, 40);
    let rig = Rig::timed(EngineOptions::default());
    let answer = |drafts: u32, change: &dyn Fn(&mut Job)| {
        let (mut job, asked) = rig.drafting(&text, 150, drafts);
        change(&mut job);
        rig.handle().submit(job).unwrap();
        let Answer { ids, text, end, .. } = asked.finish();
        let outcome = end.unwrap().unwrap();
        (ids, text, outcome.reason, outcome.dropped_tokens, outcome.generated_tokens)
    };
    let whole = answer(0, &|_| ()).1;
    let stop: String = whole.chars().skip(whole.chars().count() / 2).take(3).collect();
    type Change<'a> = &'a dyn Fn(&mut Job);
    let changes: [(Change<'_>, StopReason); 4] = [
        (&|job| job.stop = vec![stop.clone()], StopReason::StopText),
        (&|job| job.context_tokens = 96, StopReason::ContextFull),
        (&|job| (job.context_tokens, job.shift) = (96, Some(3)), StopReason::MaxTokens),
        (&|job| job.sampling.top_logprobs = 3, StopReason::MaxTokens),
    ];
    for (change, reason) in changes {
        let without = answer(0, change);
        assert_eq!(without.2, reason);
        for drafts in [1, 7, 32] {
            assert_eq!(answer(drafts, change), without, "{reason:?}, {drafts} drafts");
        }
    }
    rig.assert_empty();
}

#[test]
fn each_token_of_a_draft_has_its_log_probability() {
    let rig = Rig::timed(EngineOptions::default());
    let (mut job, mut asked) = rig.drafting(&prompt(1, 40), 100, 8);
    job.sampling.top_logprobs = 2;
    rig.handle().submit(job).unwrap();
    let mut longest = 0;
    while let Some(Event::Tokens(batch)) = asked.events.blocking_recv() {
        assert_eq!(batch.ids.len(), batch.logprobs.len());
        longest = longest.max(batch.ids.len());
    }
    assert!((2..=9).contains(&longest), "{longest} tokens at once");
}

#[test]
fn a_step_with_a_draft_costs_one_credit() {
    let rig = Rig::timed(EngineOptions::default());
    let (mut job, mut asked) = rig.drafting(&prompt(1, 40), 100, 8);
    job.credit = 3;
    rig.handle().submit(job).unwrap();
    let mut ids = asked.take(3);
    rig.handle().credit(asked.id, 1000);
    ids.extend(asked.finish().ids);
    assert_eq!(ids, expected_of(&prompt(1, 40), 100, SEED));
}

/// Six places, and KV cache for so many pages.
pub(super) fn with_pages(pages: u64) -> EngineOptions {
    EngineOptions {
        sequences_max: Some(6),
        rows_max: Some(48),
        kv_budget_bytes: pages * page_bytes(&open(9, &kept_model()).plan.program),
        ..EngineOptions::default()
    }
}

/// Two users ask for 120 answers to texts that begin alike, and cancel some. `length` gives most of a text's tokens, by a number.
/// `job` makes a request for so many tokens, with so many drafts. Each answer has the tokens of its seed. Returns the engine's counters.
pub(super) fn crowd(
    rig: &Rig,
    number: u32,
    seed: u64,
    length: impl Fn(u32) -> u32,
    job: impl Fn(&[u32], u32, u32) -> (Job, Asked),
) -> Counters {
    let mut asked = Vec::new();
    for i in 0..120u32 {
        let pick = (i * 7919 + number * 104_729) % 1000;
        let mut text = prompt(pick % 3, length(pick));
        text.extend(prompt(pick, pick % 5));
        let count = 3 + pick % 60;
        let (mut job, waits) = job(&text, count, [0, 2, 5, 32][pick as usize % 4]);
        (job.uid, job.connection) = (1000 + (i / 8) % 2, u64::from(pick % 3));
        rig.handle().submit(job).unwrap();
        asked.push((text, count, waits));
        if i % 5 == 4 {
            rig.handle().cancel(asked[(pick as usize * 13) % asked.len()].2.id);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    finish_all(asked, seed);
    rig.handle().snapshot().counters
}

/// The length of a text that has a whole period.
pub(super) fn with_period(pick: u32) -> u32 {
    PERIOD as u32 + pick % 90
}

/// Some drafts of these crowds were refused and some not, and sequences lost their pages.
pub(super) fn assert_all_happened(crowds: &[Counters]) {
    let sum = |of: fn(&Counters) -> u64| crowds.iter().map(of).sum::<u64>();
    let (drafted, accepted) = (sum(|c| c.drafted_tokens), sum(|c| c.accepted_tokens));
    let parked = sum(|c| c.sequences_parked);
    assert!(accepted > 50 && drafted > accepted && parked > 0, "{accepted} of {drafted}, {parked} parked");
}

#[test]
fn drafts_beside_prefixes_cancels_and_few_pages_change_no_token() {
    let crowds = [(1, 1000), (2, 40), (3, 16), (4, 11)].map(|(number, pages)| {
        let rig = Rig::timed(with_pages(pages));
        let counters =
            crowd(&rig, number, SEED, with_period, |text, count, drafts| rig.drafting(text, count, drafts));
        rig.assert_empty();
        counters
    });
    assert_all_happened(&crowds);
}
