//! Models with recurrent states: the same answers, whoever else runs, is cancelled, loses its pages, or goes on from a known
//! prefix. The fake device checks before each step that a state has the tokens of its sequence.

use super::drafts::crowd;
use super::fake::page_bytes;
use super::prefixes::shelf;
use super::states::STATE_BYTES;
use super::*;

fn rig(pages: u64, states: u64) -> Rig {
    let page = page_bytes(&open(9, &kept_model()).plan.program);
    let kv_budget_bytes = pages * page + states * STATE_BYTES;
    Rig::with(
        Control::recurrent(),
        EngineOptions { sequences_max: Some(6), kv_budget_bytes, ..Default::default() },
    )
}

impl Rig {
    /// Asks, checks the answer, and returns how many prompt tokens were reused.
    fn reuses(&self, prompt: &[u32], max_tokens: u32) -> u32 {
        let answer = self.ask(prompt, max_tokens).finish();
        assert_eq!(answer.ids, expected(prompt, max_tokens as usize));
        answer.outcome().reused_tokens
    }

    /// As [`Rig::assert_empty`], and the device has the states alone that trees keep.
    fn assert_empty_of_states(&self) {
        self.assert_empty();
        let (snapshot, page) = (self.handle().snapshot(), page_bytes(&self.model.plan.program));
        let kept = snapshot.kv_cached_bytes - snapshot.kv_pages_cached * page;
        assert_eq!(self.control.states() as u64 * STATE_BYTES, kept, "bytes of states on the device");
        assert_eq!((snapshot.states_used, snapshot.states_cached_bytes), (0, kept));
        assert_eq!(snapshot.states_cached * STATE_BYTES, kept);
        let model = &snapshot.models[0];
        assert_eq!((model.states_cached, model.states_cached_bytes), (snapshot.states_cached, kept));
    }
}

#[test]
fn a_conversation_goes_on_behind_its_last_answer() {
    let rig = rig(1000, 40);
    let mut text = prompt(1, 300);
    let mut known = 0;
    for _ in 0..5 {
        assert_eq!(rig.reuses(&text, 20), known);
        text.extend(expected(&text, 20));
        known = text.len() as u32 - 1; // the answer's last token was not computed
        text.extend(prompt(3, 9));
    }
    rig.assert_empty_of_states();
}

#[test]
fn prompts_that_part_share_what_they_begin_with_from_the_third_on() {
    let rig = rig(1000, 40);
    let begun = |seed: u32| [prompt(1, 300), prompt(seed, 50)].concat();
    assert_eq!([2, 3, 4, 5].map(|seed| rig.reuses(&begun(seed), 4)), [0, 0, 288, 288]);
    // The same prompt again: there is no state before its last token until a second one asked for it.
    assert_eq!([4, 4].map(|seed| rig.reuses(&begun(seed), 4)), [288; 2]);
    rig.assert_empty_of_states();
}

/// Sequences that are admitted together.
fn in_company(rig: &Rig, prompts: &[Vec<u32>], max_tokens: u32) -> Vec<u32> {
    rig.control.allow(0);
    let first = rig.ask(&prompt(9, 5), 2);
    rig.control.wait_held();
    let asked: Vec<_> = prompts.iter().map(|text| rig.ask(text, max_tokens)).collect();
    rig.control.release();
    first.finish();
    let finish = |(text, asked): (&Vec<u32>, Asked)| {
        let answer = asked.finish();
        assert_eq!(answer.ids, expected(text, max_tokens as usize));
        answer.outcome().reused_tokens
    };
    prompts.iter().zip(asked).map(finish).collect()
}

#[test]
fn answers_to_one_prompt_share_the_state_after_its_whole_pages() {
    let rig = rig(1000, 40);
    let mut reused = in_company(&rig, &vec![prompt(1, 300); 5], 40);
    reused.sort_unstable();
    assert_eq!(reused, [0, 288, 288, 288, 288]);
    // The whole pages once, and the rest by each.
    assert_eq!(rig.handle().snapshot().counters.prefill_rows, 5 + 288 + 5 * 12);
    assert_eq!(rig.reuses(&prompt(1, 300), 4), 288, "a later one goes on there too");
    rig.assert_empty_of_states();
}

#[test]
fn a_prompt_that_others_are_told_to_follow_is_computed_once() {
    let rig = rig(1000, 40);
    let text = prompt(1, 300);
    let (mut job, first) = rig.job(&text, 40);
    job.alike = 2;
    rig.handle().submit(job).unwrap();
    assert!(rig.comes(|snapshot| snapshot.counters.steps > 0), "the others come later");
    let others = [(); 2].map(|()| rig.ask(&text, 40));
    let reused = [first].into_iter().chain(others).map(|asked| {
        let answer = asked.finish();
        assert_eq!(answer.ids, expected(&text, 40));
        answer.outcome().reused_tokens
    });
    assert_eq!(reused.collect::<Vec<_>>(), [0, 288, 288]);
    rig.assert_empty_of_states();
}

#[test]
fn prompts_in_company_share_what_they_begin_with_if_that_spares_enough() {
    let rig = rig(1000, 40);
    let begun = |stem: u32, seed: u32| [prompt(1, stem), prompt(seed, 50)].concat();
    let mut reused = in_company(&rig, &[2, 3, 4].map(|seed| begun(300, seed)), 4);
    reused.sort_unstable();
    assert_eq!(reused, [0, 288, 288]);
    let other = |seed: u32| [prompt(7, 70), prompt(seed, 9)].concat();
    assert_eq!(in_company(&rig, &[2, 3].map(other), 4), [0, 0], "64 rows cost less than a further step");
    rig.assert_empty_of_states();
}

#[test]
fn the_next_engine_goes_on_from_the_states_of_the_last() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (shelf, options) = shelf(10_000, Reuse::User);
    let mut first = Rig::with(Control::recurrent(), options);
    let (talk, other) = (prompt(1, 300), [prompt(1, 200), prompt(2, 50)].concat());
    first.reuses(&talk, 20);
    assert_eq!(first.reuses(&other, 4), 0);
    first.engine.take().unwrap().stop();
    let kept = shelf.kept.lock().unwrap().pop().unwrap();
    assert_eq!(
        kept.pages.iter().filter(|page| page.state.is_some()).count(),
        3,
        "two ends and where they part"
    );
    let second = rig(1000, 40);
    let restore = |prefixes: Prefixes| {
        runtime.block_on(second.handle().restore_prefixes(&second.model, 1000, prefixes)).unwrap()
    };
    let mut short = kept.clone();
    short.pages.iter_mut().filter_map(|page| page.state.as_mut()).for_each(|state| state.truncate(9));
    assert_eq!(restore(short), 0, "states of another length");
    let pages = kept.pages.len() as u32;
    assert_eq!(restore(kept), pages);
    let goes_on = [talk.clone(), expected(&talk, 20), prompt(3, 9)].concat();
    assert_eq!(second.reuses(&goes_on, 5), 319, "the answer's last token was not computed");
    assert_eq!(second.reuses(&[prompt(1, 200), prompt(5, 30)].concat(), 5), 192);
    second.assert_empty_of_states();
}

#[test]
fn states_that_are_taken_back_stay_within_half_of_the_budget() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (shelf, options) = shelf(10_000, Reuse::User);
    let mut first = Rig::with(Control::recurrent(), options);
    assert_eq!([1, 2, 3, 4, 5].map(|seed| first.reuses(&prompt(seed, 40), 2)), [0; 5]);
    first.engine.take().unwrap().stop();
    let kept = shelf.kept.lock().unwrap().pop().unwrap();
    assert_eq!(kept.pages.len(), 10);
    let second = Rig::with(
        Control::recurrent(),
        EngineOptions { kv_budget_bytes: 7 * STATE_BYTES, ..Default::default() },
    );
    let handle = second.handle();
    let restored = handle.restore_prefixes(&second.model, 1000, kept);
    assert_eq!(runtime.block_on(restored).unwrap(), 7, "three prompts of two pages, and a page of the next");
    assert!(second.comes(|snapshot| snapshot.states_cached == 3));
    second.assert_empty_of_states();
}

#[test]
fn a_budget_without_room_for_a_states_pair_is_refused_with_the_numbers() {
    let rig = rig(2, 1);
    let (job, _asked) = rig.job(&prompt(1, 20), 20);
    match rig.handle().submit(job) {
        Err(JobError::DoesNotFit { need_bytes, budget_bytes, .. }) => {
            assert!(
                need_bytes > budget_bytes && need_bytes > 2 * STATE_BYTES,
                "{need_bytes} of {budget_bytes}"
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn drafts_are_not_made_where_a_refused_token_could_not_be_taken_back() {
    let rig = rig(1000, 40);
    let (mut job, asked) = rig.job(&prompt(1, 40), 60);
    job.drafts = 8;
    rig.handle().submit(job).unwrap();
    let answer = asked.finish();
    assert_eq!((answer.ids.len(), answer.outcome().drafted_tokens), (60, 0));
}

#[test]
fn answers_are_the_same_with_few_pages_and_states_cancels_and_known_prefixes() {
    let (mut parked, mut reused) = (0, 0);
    for (number, pages, states) in [(1, 1000, 100), (2, 40, 12), (3, 24, 5), (4, 16, 2)] {
        let rig = rig(pages, states);
        let length = |pick| 20 + (pick % 4) * 60;
        let counters = crowd(&rig, number, 7, length, |text, count, _| rig.job(text, count));
        parked += counters.sequences_parked;
        reused += counters.reused_tokens;
        rig.assert_empty_of_states();
    }
    assert!(parked > 0 && reused > 0, "{parked} parked, {reused} tokens reused");
}
