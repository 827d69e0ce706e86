//! Prompts that begin as earlier ones of the same user: computed once, with the same tokens.

use super::fake::page_bytes;
use super::*;

const ALICE: u32 = 1001;
const BOB: u32 = 1002;

impl Rig {
    /// Submits a request of a user and returns its whole answer.
    fn answer_as(&self, uid: u32, prompt: &[u32], max_tokens: u32) -> Answer {
        let (mut job, asked) = self.job(prompt, max_tokens);
        job.uid = uid;
        self.handle().submit(job).unwrap();
        asked.finish()
    }

    /// As [`Rig::answer_as`], checked. Returns how many prompt tokens were reused, and how many rows were computed.
    fn reused_as(&self, uid: u32, prompt: &[u32], max_tokens: u32) -> (u32, u64) {
        let before = self.handle().snapshot().counters;
        let answer = self.answer_as(uid, prompt, max_tokens);
        assert_eq!(answer.ids, expected(prompt, max_tokens as usize));
        let after = self.handle().snapshot().counters;
        let reused = answer.outcome().reused_tokens;
        assert_eq!(after.reused_tokens - before.reused_tokens, u64::from(reused));
        (reused, after.prefill_rows - before.prefill_rows)
    }
}

fn budget_of(pages: u64) -> u64 {
    pages * page_bytes(&open(9, &kept_model()).plan.program)
}

#[test]
fn a_second_prompt_of_the_same_user_is_computed_to_one_token() {
    let rig = Rig::new(EngineOptions::default());
    let shared = prompt(1, 2000);
    assert_eq!(rig.reused_as(ALICE, &shared, 5), (0, 2000));
    assert_eq!(rig.reused_as(ALICE, &shared, 5), (1999, 1));
    assert_eq!(rig.reused_as(BOB, &shared, 5), (0, 2000), "another user's prompts are not known");
    assert_eq!(rig.reused_as(BOB, &shared, 5), (1999, 1));
    // Longer and shorter ones, and one that goes another way at each token around the end of a page.
    for len in [1, 2, 31, 32, 33, 63, 64, 65, 1999] {
        assert_eq!(rig.reused_as(ALICE, &shared[..len], 3), (len as u32 - 1, 1), "{len} tokens");
    }
    let mut longer = shared.clone();
    longer.extend(expected(&shared, 5));
    longer.extend([7, 8, 9]);
    // The answer's last token was not computed.
    assert_eq!(rig.reused_as(ALICE, &longer, 3), (2004, 4));
    for at in [1, 30, 31, 32, 33, 63, 64, 65, 1000] {
        let mut other = shared.clone();
        other[at] = (other[at] + 1) % VOCAB as u32;
        assert_eq!(rig.reused_as(ALICE, &other, 3), (at as u32, 2000 - at as u64), "token {at} differs");
    }
    rig.assert_empty();
}

#[test]
fn a_prompt_is_known_while_its_first_asker_still_runs() {
    let rig = Rig::new(EngineOptions::default());
    let shared = prompt(1, 100);
    let mut first = rig.ask(&shared, 3000);
    let mut ids = first.take(3);
    for len in [100, 99, 90] {
        let answer = rig.answer_as(1000, &shared[..len], 40);
        assert_eq!(answer.ids, expected(&shared[..len], 40));
        assert_eq!(answer.outcome().reused_tokens, len as u32 - 1, "{len} tokens");
    }
    ids.extend(first.take(200));
    rig.handle().cancel(first.id);
    first.finish();
    assert_eq!(ids, expected(&shared, ids.len()), "its page was copied, not written");
    rig.assert_empty();
}

#[test]
fn equal_prompts_that_come_together_are_computed_once() {
    let cases = [(1000u32, 0u32, None), (1000, 200, None), (1000, 0, Some(48)), (20, 0, None)];
    for (shared, own, rows_max) in cases {
        let text = |i| [prompt(1, shared), prompt(i, own)].concat();
        // Those of each user once, and what each has for itself; the last token of a prompt is computed in any case.
        let of_user = |asked: u32| shared + own + (asked - 1) * own.max(1);
        assert_eq!(
            rows_of((8, 2), rows_max, text),
            of_user(8) + of_user(2),
            "{shared} + {own}, {rows_max:?}"
        );
    }
    // Nobody waits for less than a page, or for a fifth of a prompt. So few rows fit one step.
    assert_eq!(rows_of((4, 1), None, |i| [prompt(1, 20), prompt(i, 10)].concat()), 5 * 30);
    assert_eq!(rows_of((2, 1), Some(1000), |i| [prompt(1, 33), prompt(i, 120)].concat()), 3 * 153);
}

/// Rows that prompts of Alice and of Bob took that were known before the first step of any.
fn rows_of((alice, bob): (u32, u32), rows_max: Option<usize>, text: impl Fn(u32) -> Vec<u32>) -> u32 {
    let rig = Rig::new(EngineOptions { rows_max, ..EngineOptions::default() });
    rig.control.allow(0);
    let first = rig.ask(&prompt(90, 5), 1);
    rig.control.wait_held(); // all others wait until this step is over
    let asked = (0..alice + bob).map(|i| {
        let (mut job, asked) = rig.job(&text(i), 5);
        job.uid = if i < alice { ALICE } else { BOB };
        rig.handle().submit(job).unwrap();
        (i, asked)
    });
    let asked: Vec<_> = asked.collect();
    rig.control.release();
    first.finish();
    for (i, asked) in asked {
        assert_eq!(asked.finish().ids, expected(&text(i), 5), "prompt {i}");
    }
    rig.assert_empty();
    rig.handle().snapshot().counters.prefill_rows as u32 - 5
}

#[test]
fn without_reuse_all_is_computed_and_with_it_for_all_users_nothing_is() {
    let (shared, options) = (prompt(1, 200), EngineOptions::default);
    let rig = Rig::new(EngineOptions { reuse: Reuse::Off, ..options() });
    assert_eq!([rig.reused_as(ALICE, &shared, 5), rig.reused_as(ALICE, &shared, 5)], [(0, 200); 2]);
    assert_eq!((rig.handle().snapshot().kv_pages_cached, rig.control.holds().0), (0, 0));
    let rig = Rig::new(EngineOptions { reuse: Reuse::All, ..options() });
    assert_eq!([rig.reused_as(ALICE, &shared, 5), rig.reused_as(BOB, &shared, 5)], [(0, 200), (199, 1)]);
}

#[test]
fn a_conversation_goes_on_where_it_was_without_a_copy() {
    let rig = Rig::new(EngineOptions::default());
    let mut text = prompt(3, 40);
    for turn in 0..6 {
        let (reused, rows) = rig.reused_as(ALICE, &text, 20);
        assert_eq!(rows, if turn == 0 { 40 } else { 11 }, "{reused} reused");
        let answer = expected(&text, 20);
        text.extend(answer);
        text.extend(prompt(turn, 10));
    }
    assert_eq!(rig.control.copies(), 0, "nobody else had its last page");
    rig.reused_as(ALICE, &text[..50], 20);
    assert_eq!(rig.control.copies(), 1);
    rig.assert_empty();
}

#[test]
fn cached_pages_keep_nobody_waiting() {
    let pages = 12;
    let rig = Rig::new(EngineOptions { kv_budget_bytes: budget_of(pages), ..EngineOptions::default() });
    // Alice's prompts fill the budget, Bob's little is older.
    rig.reused_as(BOB, &prompt(50, 60), 4);
    for i in 0..8 {
        rig.reused_as(ALICE, &prompt(i, 100), 4);
    }
    let full = rig.handle().snapshot();
    assert_eq!((full.kv_pages_cached, full.kv_claimed_bytes), (pages, 0));
    assert!(full.counters.kv_pages_evicted > 0);
    assert_eq!(rig.reused_as(BOB, &prompt(50, 60), 4).0, 59, "the pages of the user with most went first");
    let outcome = rig.answer_as(BOB, &prompt(60, 12 * 32 - 20), 20);
    assert_eq!(outcome.ids, expected(&prompt(60, 12 * 32 - 20), 20), "all pages are his for the asking");
    rig.assert_empty();
}

#[test]
fn cached_pages_go_with_their_model_and_by_order() {
    let rig = Rig::new(EngineOptions::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let shared = prompt(1, 100);
    rig.reused_as(ALICE, &shared, 5);
    assert_eq!(rig.handle().snapshot().models[0].kv_cached_bytes, budget_of(4));
    runtime.block_on(rig.handle().evict_weights(Some(rig.model.id))).unwrap();
    assert_eq!((rig.control.holds().0, rig.handle().snapshot().kv_pages_cached), (0, 0), "clear-cache");
    assert_eq!(rig.reused_as(ALICE, &shared, 5).0, 0);
    runtime.block_on(rig.handle().release_idle()).unwrap();
    assert_eq!((rig.control.holds().0, rig.handle().snapshot().kv_pages_cached), (0, 0), "pressure");
    assert_eq!(rig.reused_as(ALICE, &shared, 5).0, 0);
    rig.handle().model_gone(rig.model.id);
    assert!(rig.comes(|s| s.models.is_empty() && s.kv_pages_cached == 0));
    assert_eq!(rig.control.holds().0, 0);
}

#[test]
fn pages_of_a_live_sequence_outlive_an_order_to_drop_what_is_cached() {
    let rig = Rig::new(EngineOptions::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let shared = prompt(1, 100);
    let (mut job, mut asked) = rig.job(&shared, 60);
    job.credit = 5;
    rig.handle().submit(job).unwrap();
    let mut ids = asked.take(5);
    runtime.block_on(rig.handle().evict_weights(None)).unwrap();
    rig.handle().credit(asked.id, 100);
    ids.extend(asked.finish().ids);
    assert_eq!(ids, expected(&shared, 60));
    assert_eq!(rig.reused_as(1000, &shared, 5).0, 99);
    rig.assert_empty();
}

#[test]
fn users_prefixes_and_cancels_at_random_change_no_token() {
    for (seed, pages) in [(1, 1000), (2, 40), (3, 16), (4, 11)] {
        let rig = Rig::new(EngineOptions {
            sequences_max: Some(6),
            rows_max: Some(48),
            kv_budget_bytes: budget_of(pages),
            ..Default::default()
        });
        let other = open(2, &kept_model());
        let mut asked = Vec::new();
        for i in 0..150u32 {
            // Three stems of which each prompt has a part, and then its own tokens.
            let pick = (i * 7919 + seed * 104_729) % 1000;
            let mut text = prompt(pick % 3, 20 + pick % 150);
            text.extend(prompt(pick, pick % 5));
            let count = 3 + pick % 60;
            let (mut job, waits) = rig.job(&text, count);
            (job.uid, job.connection) = (1000 + pick % 3, u64::from(pick % 4));
            if pick % 11 == 0 {
                job.model = Arc::clone(&other);
            }
            rig.handle().submit(job).unwrap();
            asked.push((text, count, waits));
            if i % 5 == 4 {
                let victim = &asked[(pick as usize * 13) % asked.len()].2;
                rig.handle().cancel(victim.id);
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        let mut done = 0;
        for (text, count, waits) in asked {
            let answer = waits.finish();
            assert_eq!(answer.ids, expected(&text, answer.ids.len()), "seed {seed}");
            match &answer.end {
                Some(Ok(_)) => done += usize::from(answer.ids.len() == count as usize),
                end => assert!(matches!(end, Some(Err(JobError::Cancelled))), "{end:?}"),
            }
        }
        let snapshot = rig.handle().snapshot();
        assert!(done >= 100 && snapshot.counters.reused_tokens > 1000, "{done} {:?}", snapshot.counters);
        rig.assert_empty();
    }
}

/// Keeps what it is given.
#[derive(Debug)]
pub struct Shelf {
    room_bytes: u64,
    pub kept: std::sync::Mutex<Vec<Prefixes>>,
}

impl PrefixKeeper for Shelf {
    fn room(&self, page_bytes: u64) -> u64 {
        self.room_bytes / page_bytes
    }

    fn keep(&self, _: &Arc<Model>, prefixes: Prefixes) {
        self.kept.lock().unwrap().push(prefixes);
    }
}

/// A shelf, and options with it.
pub fn shelf(pages: u64, reuse: Reuse) -> (Arc<Shelf>, EngineOptions) {
    let shelf = Arc::new(Shelf { room_bytes: budget_of(pages), kept: Default::default() });
    let keeper = Some(Arc::clone(&shelf) as Arc<dyn PrefixKeeper>);
    (shelf, EngineOptions { keeper, reuse, ..EngineOptions::default() })
}

#[test]
fn the_next_engine_knows_the_prefixes_of_the_last() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for reuse in [Reuse::User, Reuse::All] {
        let (shelf, options) = shelf(10_000, reuse);
        let mut rig = Rig::new(options);
        let (long, fork) = (prompt(1, 2000), [prompt(1, 1000), prompt(2, 77)].concat());
        let of_bob = prompt(3, 100);
        rig.reused_as(ALICE, &long, 5);
        rig.reused_as(ALICE, &fork, 5);
        rig.reused_as(BOB, &of_bob, 5);
        // One that runs when the engine ends.
        let running = rig.ask(&prompt(4, 40), 3000);
        assert!(rig.comes(|s| s.sequences.iter().any(|s| s.generated_tokens > 50)));
        rig.engine.take().unwrap().stop();
        let ids = running.finish().ids;
        let kept = std::mem::take(&mut *shelf.kept.lock().unwrap());
        assert_eq!(kept.len(), if reuse == Reuse::All { 1 } else { 3 }, "one for each tree");

        let rig = Rig::new(EngineOptions { reuse, ..EngineOptions::default() });
        for prefixes in kept {
            let (uid, pages) = (prefixes.uid.unwrap_or(ALICE), prefixes.pages.len() as u32);
            for (reuse, uid) in [(Reuse::Off, uid), (Reuse::User, 77)] {
                let other = Rig::new(EngineOptions { reuse, ..EngineOptions::default() });
                let handle = other.handle();
                let restored = handle.restore_prefixes(&rig.model, uid, prefixes.clone());
                assert_eq!(runtime.block_on(restored).unwrap(), 0, "{reuse:?}, user {uid}");
            }
            let taken = runtime.block_on(rig.handle().restore_prefixes(&rig.model, uid, prefixes)).unwrap();
            assert_eq!(taken, pages);
        }
        // The answer's last token was not computed, the prompt's last one is computed again.
        assert_eq!(rig.reused_as(ALICE, &long, 5), (1999, 1));
        assert_eq!(rig.reused_as(ALICE, &fork, 5), (1076, 1));
        assert_eq!(rig.reused_as(BOB, &of_bob, 5), (99, 1));
        let goes_on = [prompt(4, 40), ids.clone(), vec![7]].concat();
        let (reused, _) = rig.reused_as(1000, &goes_on, 5);
        assert!(reused as usize >= 40 + ids.len() - 1, "{reused} of {}", goes_on.len());
        rig.assert_empty();
    }
}

#[test]
fn prefixes_of_an_idle_model_are_kept_when_its_pool_closes() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (shelf, options) = shelf(100, Reuse::User);
    let rig = Rig::new(EngineOptions { idle_release: Duration::from_millis(20), ..options });
    let shared = prompt(1, 200);
    rig.reused_as(ALICE, &shared, 5);
    assert!(rig.comes(|s| s.kv_pages_cached == 0), "the pool closes");
    let kept = shelf.kept.lock().unwrap().pop().unwrap();
    runtime.block_on(rig.handle().restore_prefixes(&rig.model, ALICE, kept)).unwrap();
    // The pool may close again before the request, which then finds nothing.
    let answer = rig.answer_as(ALICE, &shared, 5);
    assert_eq!(answer.ids, expected(&shared, 5));
    assert!([0, 199].contains(&answer.outcome().reused_tokens), "{:?}", answer.outcome());
}

#[test]
fn pages_that_are_kept_or_taken_back_stay_within_their_limits() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (shelf, options) = shelf(5, Reuse::User);
    let mut rig = Rig::new(options);
    rig.reused_as(ALICE, &prompt(1, 320), 2);
    rig.engine.take().unwrap().stop();
    let kept = shelf.kept.lock().unwrap().pop().unwrap();
    assert_eq!(kept.pages.len(), 5);

    let rig = Rig::new(EngineOptions { kv_budget_bytes: budget_of(13), ..EngineOptions::default() });
    let restore =
        |prefixes| runtime.block_on(rig.handle().restore_prefixes(&rig.model, ALICE, prefixes)).unwrap();
    let mut other = kept.clone();
    other.layout = "another".to_owned();
    assert_eq!(restore(other), 0);
    let mut short = kept.clone();
    short.pages[3].bytes.pop();
    assert_eq!(restore(short), 0);
    // A page whose tokens are too many, one after itself, and one after a page that is not whole.
    type Change = fn(&mut Prefixes);
    let changes: [(Change, u32); 3] = [
        (|p| p.pages[1].tokens.push(1), 1),
        (|p| p.pages[2].after = Some(2), 0),
        (|p| p.pages[1].tokens.truncate(9), 2),
    ];
    for (change, taken) in changes {
        let mut wrong = kept.clone();
        change(&mut wrong);
        assert_eq!(restore(wrong), taken);
        runtime.block_on(rig.handle().evict_weights(None)).unwrap();
    }
    // Eleven pages are Bob's: two are free, and none is evicted for pages that may never be used.
    rig.reused_as(BOB, &prompt(2, 11 * 32 - 4), 2);
    assert_eq!(restore(kept), 2);
    assert!(rig.comes(|s| s.kv_pages_cached == 13));
    assert_eq!(rig.reused_as(ALICE, &prompt(1, 320), 2).0, 64);
    rig.assert_empty();
}
