//! Sequences that share steps get the same tokens as alone.

use super::*;

#[test]
fn one_sequence_gets_its_tokens_and_an_account() {
    let rig = Rig::new(EngineOptions::default());
    let answer = rig.ask(&prompt(1, 300), 50).finish();
    assert_eq!(answer.ids, expected(&prompt(1, 300), 50));
    let outcome = answer.outcome();
    assert_eq!((outcome.prompt_tokens, outcome.generated_tokens), (300, 50));
    assert_eq!((outcome.reason, answer.items), (StopReason::MaxTokens, 50));
    let counters = rig.handle().snapshot().counters;
    assert_eq!((counters.steps, counters.prefill_rows, counters.decode_rows), (51, 300, 49));
    assert_eq!((counters.rows, counters.step_sequences), (349, 51));
    assert_eq!((counters.sequences_done, counters.sequences_failed), (1, 0));
    rig.assert_empty();
}

#[test]
fn sixteen_at_once_get_the_tokens_they_get_alone() {
    let rig = Rig::new(EngineOptions { rows_max: Some(64), ..EngineOptions::default() });
    rig.control.allow(0); // all are there before the first step
    let prompts: Vec<Vec<u32>> = (0..16).map(|i| prompt(i, 1 + i * 23)).collect();
    let asked: Vec<Asked> = prompts.iter().map(|p| rig.ask(p, 40 + p.len() as u32 % 30)).collect();
    let cancelled: Vec<SequenceId> = asked.iter().skip(3).step_by(5).map(|a| a.id).collect();
    rig.control.allow(30);
    rig.control.wait_held();
    for &id in &cancelled {
        rig.handle().cancel(id);
    }
    rig.control.release();
    for (asked, prompt) in asked.into_iter().zip(&prompts) {
        let id = asked.id;
        let answer = asked.finish();
        assert_eq!(answer.ids, expected(prompt, answer.ids.len()), "sequence {id:?}");
        match cancelled.contains(&id) {
            true => assert!(matches!(answer.error(), JobError::Cancelled)),
            false => assert_eq!(answer.ids.len(), 40 + prompt.len() % 30),
        }
    }
    let counters = rig.handle().snapshot().counters;
    assert_eq!(
        (counters.sequences_done, counters.sequences_failed, counters.sequences_cancelled),
        (13, 0, 3)
    );
    assert!(counters.step_sequences >= 8 * counters.steps, "steps are shared: {counters:?}");
    rig.assert_empty();
}

#[test]
fn models_share_the_device() {
    let rig = Rig::new(EngineOptions::default());
    let other = open(2, &kept_model());
    rig.control.allow(0);
    let mut asked = Vec::new();
    for i in 0..6 {
        let (mut job, waits) = rig.job(&prompt(i, 20 + i), 30);
        if i % 2 == 1 {
            job.model = Arc::clone(&other);
        }
        rig.handle().submit(job).unwrap();
        asked.push(waits);
    }
    rig.control.release();
    for (i, asked) in asked.into_iter().enumerate() {
        assert_eq!(asked.finish().ids, expected(&prompt(i as u32, 20 + i as u32), 30));
    }
    assert_eq!(rig.control.holds().1, 2, "a slot for each model");
    rig.assert_empty();
}

#[test]
fn a_tensor_is_loaded_once_for_all() {
    let rig = Rig::new(EngineOptions::default());
    let first = rig.ask(&prompt(1, 5), 3).finish();
    let loads = rig.control.loads();
    assert_eq!(loads.len(), 5 * 9 + 2, "5 layers, output norm and output: each once");
    assert_eq!(loads[0], "blk.0.attn_norm.weight", "the embedding stays in the file");
    let second = rig.ask(&prompt(2, 5), 3).finish();
    assert_eq!((first.ids.len(), second.ids.len()), (3, 3));
    assert_eq!(rig.control.loads().len(), loads.len());
    let counters = rig.handle().snapshot().counters;
    assert_eq!(
        (counters.tensors_loaded, counters.tensor_hits),
        (48, 0),
        "a step over complete parts makes no request"
    );
}

#[test]
fn without_credit_a_sequence_waits_and_then_goes_on() {
    let rig = Rig::new(EngineOptions::default());
    let (mut job, mut stalled) = rig.job(&prompt(4, 40), 30);
    job.credit = 3;
    rig.handle().submit(job).unwrap();
    let mut ids = stalled.take(3);
    assert!(rig.comes(|s| s.sequences.first().is_some_and(|s| s.state == SequenceState::Stalled)));
    assert_eq!(rig.ask(&prompt(5, 40), 30).finish().ids, expected(&prompt(5, 40), 30));
    let snapshot = rig.handle().snapshot();
    assert_eq!(snapshot.sequences.len(), 1);
    assert_eq!((snapshot.sequences[0].generated_tokens, snapshot.kv_pages_used), (3, 2));
    assert!(stalled.events.try_recv().is_err(), "no event without credit");
    rig.handle().credit(stalled.id, 100);
    let rest = stalled.finish();
    ids.extend(&rest.ids);
    assert_eq!(ids, expected(&prompt(4, 40), 30));
    rig.assert_empty();
}

#[test]
fn a_small_budget_makes_them_wait_their_turn() {
    let page_bytes = 5 * 4 * 8 * 1000; // layers, kv heads, head_dim, and the factor of the fake device
    let rig = Rig::new(EngineOptions {
        kv_budget_bytes: 5 * page_bytes,
        sequences_max: Some(4),
        ..Default::default()
    });
    let mut asked = vec![rig.hold(&prompt(0, 40), 30)]; // 3 pages each
    asked.extend((1..5).map(|i| rig.ask(&prompt(i, 40), 30)));
    assert!(rig.comes(|s| s.running_and_queued() == (1, 4)));
    let snapshot = rig.handle().snapshot();
    assert_eq!(snapshot.kv_claimed_bytes, 3 * page_bytes);
    assert_eq!(snapshot.kv_pages_max, 5);
    assert_eq!(snapshot.sequences.iter().map(|s| s.queue_position).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    rig.handle().credit(asked[0].id, 100);
    for (i, asked) in asked.into_iter().enumerate() {
        assert_eq!(asked.finish().ids, expected(&prompt(i as u32, 40), 30));
    }
    rig.assert_empty();
    let (job, _asked) = rig.job(&prompt(0, 100), 100);
    match rig.handle().submit(job).unwrap_err() {
        JobError::DoesNotFit { context_tokens: 200, need_bytes, budget_bytes } => {
            assert_eq!((need_bytes, budget_bytes), (7 * page_bytes, 5 * page_bytes));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_request_above_its_users_part_of_the_budget_is_refused_and_one_to_the_end_of_the_context_is_cut() {
    let page_bytes = 5 * 4 * 8 * 1000; // as above
    let options =
        EngineOptions { kv_budget_bytes: 10 * page_bytes, kv_percent_per_user: 50, ..Default::default() };
    let rig = Rig::new(options);
    let (job, _asked) = rig.job(&prompt(0, 100), 100);
    match rig.handle().submit(job).unwrap_err() {
        JobError::AboveShare { context_tokens: 200, need_bytes, share_bytes, percent: 50 } => {
            assert_eq!((need_bytes, share_bytes), (7 * page_bytes, 5 * page_bytes));
        }
        other => panic!("{other}"),
    }
    let (job, _asked) = rig.job(&prompt(0, 100), 500);
    assert!(matches!(rig.handle().submit(job).unwrap_err(), JobError::DoesNotFit { .. }), "more than all");
    let answer = rig.ask(&prompt(0, 100), u32::MAX).finish();
    assert_eq!(answer.outcome().reason, StopReason::ContextFull);
    assert_eq!(answer.ids, expected(&prompt(0, 100), 60), "five pages of 32 tokens");
    rig.assert_empty();
}
