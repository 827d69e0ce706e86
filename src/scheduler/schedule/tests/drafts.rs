//! Drafted tokens in the steps of a schedule.

use super::*;

/// Limits with room for the rows of drafts.
fn wide() -> Limits {
    Limits { rows_max: 64, sequences_max: 40, ..limits() }
}

/// A request whose last tokens were in its prompt before, so that every step has a draft.
fn submit_repeating(schedule: &mut Schedule<()>, request: Request) {
    let prompt = (0..request.prompt_tokens).map(|at| at % 3).collect();
    schedule.submit(Sequence::new(request, prompt, ()));
}

/// (id, start, rows, drafts) of the next step's work, of whose drafts the first tokens are drawn.
fn step_with(schedule: &mut Schedule<()>, accepted: u32, now: Instant) -> Vec<(u64, u32, u32, u32)> {
    let step = schedule.next_step(now).expect("a sequence can run");
    let mut random = Random(1);
    step.work.iter().for_each(|work| draw(schedule, work, accepted.min(work.drafts), &mut random, now));
    step.work.iter().map(|w| (w.id.0, w.start, w.rows, w.drafts)).collect()
}

/// Makes the last token of the first sequence the one that its repeating prompt would have, and looks for its draft.
fn repeat(schedule: &mut Schedule<()>) -> u32 {
    let sequence = schedule.get_mut(SequenceId(1)).unwrap();
    let last = sequence.tokens.len() as u32 - 1;
    *sequence.tokens.last_mut().unwrap() = last % 3;
    sequence.look_ahead();
    sequence.draft.ids().len() as u32
}

#[test]
fn a_draft_that_is_refused_leaves_no_page_behind() {
    let (mut schedule, now) = (Schedule::new(wide()), Instant::now());
    submit_repeating(&mut schedule, Request { drafts: 32, ..request(1, 1, PAGE - 2, 500) });
    schedule.admit(now);
    assert_eq!(step_with(&mut schedule, 0, now), [(1, 0, PAGE - 2, 0)]);
    assert_eq!(repeat(&mut schedule), 32);
    let step = schedule.next_step(now).unwrap();
    assert_eq!((step.rows(), step.drafts(), schedule.page_sums().used), (33, 32, 2));
    draw(&mut schedule, &step.work[0], 0, &mut Random(1), now);
    assert_eq!((schedule.page_sums().used, schedule.get(SequenceId(1)).unwrap().computed), (1, PAGE - 1));
    assert_eq!(repeat(&mut schedule), 1, "the next draft is short");
    assert_eq!(step_with(&mut schedule, 1, now), [(1, PAGE - 1, 2, 1)]);
    let sequence = schedule.get(SequenceId(1)).unwrap();
    assert_eq!((sequence.computed, sequence.token_count()), (PAGE + 1, PAGE + 2));
    assert_eq!((schedule.page_sums().used, sequence.draft.counts()), (2, (33, 1)));
    schedule.remove(SequenceId(1));
    assert_eq!((schedule.page_sums().used, schedule.claimed_bytes()), (0, 0));
}

#[test]
fn a_draft_takes_no_page_from_another_sequence_and_ends_with_the_context() {
    let (mut schedule, now) = (Schedule::new(wide()), Instant::now());
    submit_repeating(&mut schedule, Request { drafts: 32, ..request(1, 1, PAGE - 3, PAGE + 9) });
    schedule.admit(now);
    step_with(&mut schedule, 0, now);
    assert_eq!(repeat(&mut schedule), 10, "the eleventh would have no next token");
    while schedule.kv_mut().take(ModelId(1), 7).is_some() {}
    assert_eq!(step_with(&mut schedule, 2, now), [(1, PAGE - 3, 3, 2)], "two are left in its page");
    assert_eq!((schedule.take_preempted(), schedule.pages(SequenceId(1)).len()), (0, 1));
}

#[test]
fn steps_with_a_prompt_or_of_several_users_have_no_drafts() {
    for (uid, prompt, drafts) in [(1000, 1, true), (1001, 1, false), (1000, 500, false)] {
        let (mut schedule, now) = (Schedule::new(wide()), Instant::now());
        submit_repeating(&mut schedule, Request { drafts: 5, ..request(1, 1, 7, 500) });
        submit(&mut schedule, Request { uid, ..request(2, 1, prompt, 1000) });
        schedule.admit(now);
        step_with(&mut schedule, 0, now);
        repeat(&mut schedule);
        let work = step_with(&mut schedule, 5, now);
        let first = work.iter().find(|work| work.0 == 1).expect("it decodes in every step");
        assert_eq!((first.3 > 0, first.2), (drafts, 1 + first.3), "user {uid}, prompt of {prompt}");
        assert_eq!(work.len(), 2);
    }
}

#[test]
fn rows_of_drafts_are_their_users_time() {
    let (mut schedule, now) = (Schedule::new(wide()), Instant::now());
    submit_repeating(&mut schedule, Request { drafts: 3, ..request(1, 1, 6, 500) });
    submit(&mut schedule, Request { connection: 2, ..request(2, 1, 6, 500) });
    schedule.admit(now);
    step_with(&mut schedule, 0, now);
    repeat(&mut schedule);
    let step = schedule.next_step(now).unwrap();
    assert_eq!((step.rows(), step.drafts()), (5, 3));
    schedule.charge(&step, Duration::from_millis(5));
    let time = |id| schedule.get(SequenceId(id)).unwrap().device_time.as_millis();
    assert_eq!((time(1), time(2)), (4, 1), "by rows");
}
