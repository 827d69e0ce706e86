//! Pages of parked sequences go to host memory and come back.

use super::fake::page_bytes;
use super::states::STATE_BYTES;
use super::*;
use crate::backend::KV_PAGE_TOKENS;

const PAGE: u32 = KV_PAGE_TOKENS as u32;
const PROMPT: u32 = 3 * PAGE + 5;
const TOKENS: u32 = 6 * PAGE;
/// Two sequences are admitted, at six pages each. Their answers need ten each.
const ROOM: u64 = 13;

/// An engine with room for so many pages, and host memory for so many.
fn rig(pages: u64, swapped: u64) -> Rig {
    let page = page_bytes(&open(1, &kept_model()).plan.program);
    Rig::new(EngineOptions {
        kv_budget_bytes: pages * page,
        swap_bytes: swapped * page,
        ..EngineOptions::default()
    })
}

/// Four sequences, all there before the first step ends; returns the counters after all have ended.
fn crowd(rig: &Rig) -> Counters {
    rig.control.allow(0);
    let asked: Vec<_> = (0..4).map(|n| (prompt(n, PROMPT), rig.ask(&prompt(n, PROMPT), TOKENS))).collect();
    rig.control.release();
    for (prompt, asked) in asked {
        let answer = asked.finish();
        assert_eq!(answer.ids, expected(&prompt, TOKENS as usize), "{:?}", answer.end);
    }
    let counters = rig.handle().snapshot().counters;
    rig.assert_empty();
    counters
}

#[test]
fn a_parked_sequence_computes_no_whole_page_again() {
    let counters = crowd(&rig(ROOM, 1000));
    assert!(counters.sequences_parked > 0 && counters.kv_pages_swapped_in > 0, "{counters:?}");
    // Beside the prompts: of each parked sequence, the tokens of its last page.
    let again = counters.prefill_rows - u64::from(4 * PROMPT);
    let parked = counters.sequences_parked;
    assert!(again <= parked * u64::from(PAGE), "{again} rows again for {parked} parked: {counters:?}");
    let without = crowd(&rig(ROOM, 0));
    assert_eq!((without.kv_pages_swapped_out, without.kv_pages_swapped_in), (0, 0));
    assert!(without.sequences_parked > 0);
}

#[test]
fn a_parked_sequence_with_a_recurrent_state_goes_on_where_it_was() {
    let page = page_bytes(&open(1, &kept_model()).plan.program);
    // As many pages and states as two or three sequences are admitted with: they need more as they grow.
    for (pages, states) in [(12, 4), (18, 6)] {
        let kv_budget_bytes = pages * page + states * STATE_BYTES;
        let rig = |swap_bytes| {
            let options = EngineOptions { kv_budget_bytes, swap_bytes, ..Default::default() };
            Rig::with(Control::recurrent(), options)
        };
        // Which sequences are parked, and how often, is a matter of time: of one crowd each, the rows may be about the same.
        let crowds = |swap_bytes| -> Vec<_> { (0..8).map(|_| crowd(&rig(swap_bytes))).collect() };
        let sum = |crowds: &[Counters], of: fn(&Counters) -> u64| crowds.iter().map(of).sum::<u64>();
        let (with, without) = (crowds(1 << 40), crowds(0));
        assert!(with.iter().all(|c| c.sequences_parked > 0 && c.kv_pages_swapped_in > 0), "{with:?}");
        assert_eq!(sum(&without, |c| c.kv_pages_swapped_out + c.kv_pages_swapped_in), 0);
        let [with, without] = [with, without].map(|crowds| sum(&crowds, |c| c.prefill_rows));
        assert!(with < without, "{with} rows of prompts with host memory, {without} without");
    }
}

#[test]
fn pages_that_find_no_room_on_the_host_are_computed_again() {
    // A user alone may take half.
    let counters = crowd(&rig(ROOM, 4));
    assert!(counters.kv_pages_swapped_out > 0, "{counters:?}");
    assert!(counters.kv_pages_evicted > counters.kv_pages_swapped_out, "{counters:?}");
}

#[test]
fn copies_end_with_their_sequence() {
    let rig = rig(ROOM, 1000);
    rig.control.slow_down(1, Duration::from_micros(500));
    let asked: Vec<_> = (0..4).map(|n| rig.ask(&prompt(n, PROMPT), TOKENS)).collect();
    assert!(rig.comes(|snapshot| snapshot.kv_swapped_bytes > 0), "{:?}", rig.handle().snapshot());
    asked.iter().for_each(|asked| rig.handle().cancel(asked.id));
    for asked in asked {
        asked.finish();
    }
    assert!(rig.comes(|snapshot| snapshot.kv_swapped_bytes == 0), "{:?}", rig.handle().snapshot());
    rig.assert_empty();
}

#[test]
fn a_device_that_reads_host_memory_copies_nothing() {
    let rig = rig(ROOM, 1000);
    rig.control.read_in_place();
    assert_eq!(crowd(&rig).kv_pages_swapped_out, 0);
}
