//! Weights and KV pages share one memory: which of them leave first, and what a plan says about that.

use super::fake::page_bytes;
use super::*;
use crate::backend::KV_PAGE_TOKENS;
use crate::scheduler::{Fit, RulesChange};

const PAGE: u32 = KV_PAGE_TOKENS as u32;

/// Device bytes of the model's weights: all but the embedding.
fn weights(model: &Model) -> u64 {
    let program = &model.plan.program;
    let tensors = (1..program.part_count()).flat_map(|part| program.part_tensors(part));
    tensors.map(|(_, tensor)| tensor.lazy.byte_len()).sum()
}

/// An engine on a device with room for the weights of so many models and for so many pages.
fn rig(models: u64, pages: u64) -> Rig {
    let rig = Rig::new(EngineOptions::default());
    let page = page_bytes(&rig.model.plan.program);
    rig.control.memory().count_pages();
    rig.control.memory().limit(models * weights(&rig.model) + pages * page);
    rig
}

fn ask(rig: &Rig, model: &Arc<Model>, prompt: &[u32], tokens: u32) -> Asked {
    let (mut job, asked) = rig.job(prompt, tokens);
    job.model = Arc::clone(model);
    rig.handle().submit(job).unwrap();
    asked
}

fn pin(rig: &Rig, model: &Arc<Model>) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let pin = RulesChange { pinned: Some(true), ..RulesChange::default() };
    assert!(runtime.block_on(rig.handle().set_rules(model, pin)).unwrap().pinned);
}

#[test]
fn a_plan_counts_cached_pages_as_available_and_comes_true() {
    let rig = rig(2, 6);
    let (first, second) = (open(1, &kept_model()), open(2, &kept_model()));
    pin(&rig, &first);
    let long = prompt(1, 5 * PAGE - 2);
    assert_eq!(ask(&rig, &first, &long, 2).finish().ids, expected(&long, 2));
    assert_eq!(rig.handle().snapshot().kv_pages_cached, 5);
    let plan = rig.handle().plan(&second, 4 * PAGE);
    assert_eq!((plan.fit, plan.leaving.len()), (Fit::Whole, 0), "{plan:?}");
    assert_eq!(plan.available_bytes, weights(&second) + 6 * page_bytes(&second.plan.program));
    let other = prompt(2, 4 * PAGE - 2);
    assert_eq!(ask(&rig, &second, &other, 2).finish().ids, expected(&other, 2));
    let after = rig.handle().snapshot();
    assert_eq!(after.counters.evictions, 0);
    assert_eq!(after.models.iter().map(|of| of.weight_bytes).sum::<u64>(), 2 * weights(&second));
    // More than all cached pages have.
    pin(&rig, &second);
    let third = rig.handle().plan(&open(3, &kept_model()), PAGE);
    assert!(third.fit != Fit::Whole && third.leaving.is_empty(), "{third:?}");
}

#[test]
fn cached_pages_leave_before_weights_of_another_model_and_no_more_than_it_takes() {
    let rig = rig(2, 6);
    let (first, second) = (open(1, &kept_model()), open(2, &kept_model()));
    let long = prompt(1, 10 * PAGE - 2);
    assert_eq!(ask(&rig, &first, &long, 2).finish().ids, expected(&long, 2));
    assert_eq!(rig.handle().snapshot().kv_pages_cached, 10, "the second model's room has four of them");
    let short = prompt(2, 20);
    assert_eq!(ask(&rig, &second, &short, 2).finish().ids, expected(&short, 2));
    let after = rig.handle().snapshot();
    assert_eq!(after.counters.evictions, 0, "weights left for cached pages: {after:?}");
    // Of 2 models and 6 pages of room, 2 models and 1 page are taken by sequences.
    assert_eq!((after.kv_pages_cached, after.counters.kv_pages_evicted), (6, 5));
    // The pages before those that left are of use still.
    let begins = &long[..5 * PAGE as usize + 2];
    let again = ask(&rig, &first, begins, 2).finish();
    assert_eq!(again.ids, expected(begins, 2));
    assert_eq!(again.outcome().reused_tokens, 5 * PAGE);
    assert_eq!(rig.handle().snapshot().counters.evictions, 0);
}

#[test]
fn a_client_s_load_takes_the_room_of_cached_pages_before_that_of_weights() {
    let rig = rig(2, 2);
    let (first, second) = (open(1, &kept_model()), open(2, &kept_model()));
    let long = prompt(1, 6 * PAGE - 2);
    ask(&rig, &first, &long, 2).finish();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(rig.handle().preload_all(&second).unwrap().wait()).unwrap();
    let after = rig.handle().snapshot();
    assert_eq!((after.counters.evictions, after.kv_pages_cached), (0, 2));
    assert_eq!(after.models.iter().map(|of| of.weight_bytes).sum::<u64>(), 2 * weights(&second));
}

#[test]
fn sequences_wait_for_each_other_before_a_model_gives_its_own_weights_for_their_pages() {
    for pinned in [true, false] {
        let rig = rig(1, 8);
        if pinned {
            pin(&rig, &rig.model);
        }
        // Four sequences of five pages: two have room at a time.
        let asked: Vec<_> = (0..4).map(|n| (prompt(n, 20), rig.ask(&prompt(n, 20), 4 * PAGE))).collect();
        for (prompt, asked) in asked {
            let answer = asked.finish();
            assert_eq!(answer.ids, expected(&prompt, 4 * PAGE as usize), "{:?}", answer.end);
        }
        let after = rig.handle().snapshot();
        assert_eq!(after.counters.evictions, 0, "pinned: {pinned}");
        assert!(after.counters.sequences_parked > 0);
        rig.assert_empty();
    }
}

#[test]
fn one_sequence_alone_takes_the_room_of_its_model_s_weights_unless_they_are_pinned() {
    let rig = rig(1, 4);
    let (long, tokens) = (prompt(1, 20), 5 * PAGE);
    let answer = rig.ask(&long, tokens).finish();
    assert_eq!(answer.ids, expected(&long, tokens as usize), "{:?}", answer.end);
    assert!(rig.handle().snapshot().counters.evictions > 0);
    rig.assert_empty();
    pin(&rig, &rig.model);
    let other = prompt(2, 20);
    let (small, large) = (rig.ask(&other, 3), prompt(3, 20));
    assert_eq!(small.finish().ids, expected(&other, 3));
    assert_eq!(rig.handle().snapshot().models[0].weight_bytes, weights(&rig.model));
    let evicted = rig.handle().snapshot().counters.evictions;
    let answer = rig.ask(&large, tokens).finish();
    let JobError::NoRoom { .. } = answer.error() else { panic!("{:?}", answer.end) };
    assert_eq!(rig.handle().snapshot().counters.evictions, evicted, "pinned weights left for pages");
    assert_eq!(rig.ask(&other, 3).finish().ids, expected(&other, 3), "the next one is served");
}

/// Each alone has no room without its model's weights: the second waits until the first ends.
#[test]
fn one_of_two_sequences_goes_on_alone_where_even_one_exceeds_the_room() {
    let rig = rig(1, 4);
    let tokens = 5 * PAGE;
    let asked: Vec<_> = (0..2).map(|n| (prompt(n, 20), rig.ask(&prompt(n, 20), tokens))).collect();
    for (prompt, asked) in asked {
        let answer = asked.finish();
        assert_eq!(answer.ids, expected(&prompt, tokens as usize), "{:?}", answer.end);
    }
    let parked = rig.handle().snapshot().counters.sequences_parked;
    assert!((1..=2).contains(&parked), "{parked}: they took turns by page");
    rig.assert_empty();
}
