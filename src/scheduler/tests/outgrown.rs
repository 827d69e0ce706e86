//! Requests that together need more keys and values than there is room for.

use super::fake::page_bytes;
use super::*;

fn rig(pages: u64) -> Rig {
    let budget = pages * page_bytes(&open(9, &kept_model()).plan.program);
    Rig::new(EngineOptions { kv_budget_bytes: budget, ..EngineOptions::default() })
}

#[test]
fn requests_without_a_length_run_together() {
    let rig = rig(20); // the context of one has 128 pages
    let start = |i| {
        let (mut job, asked) = rig.job(&prompt(i, 10), u32::MAX);
        job.credit = 20; // one page each, however slowly this thread reads
        rig.handle().submit(job).unwrap();
        asked
    };
    let mut asked: Vec<Asked> = (0..6).map(start).collect();
    let mut ids: Vec<Vec<u32>> = asked.iter_mut().map(|asked| asked.take(20)).collect();
    assert_eq!(rig.handle().snapshot().counters.sequences_parked, 0, "nobody waited for room that none used");
    for asked in asked.iter().skip(1) {
        rig.handle().cancel(asked.id);
    }
    rig.handle().credit(asked[0].id, u32::MAX);
    for (i, (asked, ids)) in asked.into_iter().zip(&mut ids).enumerate() {
        let answer = asked.finish();
        ids.extend(&answer.ids);
        assert_eq!(*ids, expected(&prompt(i as u32, 10), ids.len()), "sequence {i}");
        if i == 0 {
            // The whole budget holds the context of one alone.
            assert_eq!((answer.outcome().reason, ids.len()), (StopReason::ContextFull, 20 * 32 - 10));
        }
    }
    rig.assert_empty();
}

#[test]
fn a_request_that_can_never_fit_alone_is_refused() {
    let rig = rig(4);
    let refused = |prompt_tokens, max_tokens| {
        let (job, _asked) = rig.job(&prompt(1, prompt_tokens), max_tokens);
        matches!(rig.handle().submit(job), Err(JobError::DoesNotFit { .. }))
    };
    assert!(refused(10, 119) && refused(128, u32::MAX) && refused(129, u32::MAX));
    assert_eq!(rig.ask(&prompt(1, 10), 118).finish().ids, expected(&prompt(1, 10), 118));
    assert_eq!(rig.ask(&prompt(1, 127), u32::MAX).finish().ids, expected(&prompt(1, 127), 1));
    rig.assert_empty();
}

#[test]
fn sequences_that_gave_their_pages_up_go_on_where_they_were() {
    for (pages, reuse) in [(24, Reuse::User), (16, Reuse::User), (9, Reuse::User), (16, Reuse::Off)] {
        let budget = pages * page_bytes(&open(9, &kept_model()).plan.program);
        let rig = Rig::new(EngineOptions { kv_budget_bytes: budget, reuse, ..EngineOptions::default() });
        let asked: Vec<_> = (0..12u32)
            .map(|i| {
                let (text, count) = (prompt(i % 5, 20 + i * 5), 100 + i * 7);
                let (mut job, asked) = rig.job(&text, count);
                job.uid = 1000 + i % 3;
                rig.handle().submit(job).unwrap();
                (text, count as usize, asked)
            })
            .collect();
        for (i, (text, count, asked)) in asked.into_iter().enumerate() {
            let answer = asked.finish();
            assert!(answer.end.as_ref().is_some_and(Result::is_ok), "sequence {i}: {:?}", answer.end);
            assert_eq!(answer.ids, expected(&text, count), "sequence {i} of {pages} pages");
        }
        let counters = rig.handle().snapshot().counters;
        assert!(counters.sequences_parked > 0 && counters.sequences_failed == 0, "{counters:?}");
        rig.assert_empty();
    }
}
