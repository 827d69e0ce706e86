//! Cancels, deadlines, slow readers, drains, limits and unloading.

use super::*;
use crate::program::{Builder, Op, Output, PartKind, Residence};
use crate::tensor::{DType, LazyTensor};

#[test]
fn a_cancelled_sequence_gives_its_pages_back() {
    let rig = Rig::new(EngineOptions::default());
    let mut asked = rig.ask(&prompt(1, 100), 3000);
    asked.take(40);
    rig.handle().cancel(asked.id);
    assert!(matches!(asked.finish().error(), JobError::Cancelled));
    rig.assert_empty();
    rig.handle().cancel(SequenceId(999)); // the engine ignores unknown ids
    rig.handle().credit(SequenceId(999), 1);
    assert_eq!(rig.ask(&[1], 2).finish().ids.len(), 2);
}

#[test]
fn a_reader_that_went_away_ends_its_sequence() {
    let rig = Rig::new(EngineOptions::default());
    let mut asked = rig.ask(&prompt(1, 10), 3000);
    asked.take(2);
    drop(asked);
    assert!(rig.comes(|s| s.sequences.is_empty() && s.counters.sequences_cancelled == 1));
    rig.assert_empty();
}

#[test]
fn a_waiting_sequence_can_be_cancelled() {
    let rig = Rig::new(EngineOptions { sequences_max: Some(1), ..EngineOptions::default() });
    let mut first = rig.ask(&prompt(1, 10), 3000);
    first.take(1);
    let waiting = rig.ask(&prompt(2, 10), 5);
    rig.handle().cancel(waiting.id);
    assert!(matches!(waiting.finish().error(), JobError::Cancelled));
    rig.handle().cancel(first.id);
    assert!(first.finish().end.is_some());
}

#[test]
fn deadlines_end_waiting_and_running_sequences() {
    let rig = Rig::new(EngineOptions { sequences_max: Some(1), ..EngineOptions::default() });
    let (mut job, mut running) = rig.job(&prompt(1, 10), 4000);
    job.deadline = Some(Instant::now() + Duration::from_millis(200));
    job.credit = 5;
    rig.handle().submit(job).unwrap();
    running.take(5);
    let (mut job, waiting) = rig.job(&prompt(1, 10), 5);
    job.deadline = Some(Instant::now() + Duration::from_millis(20));
    rig.handle().submit(job).unwrap();
    let waited = waiting.finish();
    assert!(matches!(waited.error(), JobError::DeadlineExceeded { generated_tokens: 0 }), "{waited:?}");
    let ran = running.finish();
    assert!(matches!(ran.error(), JobError::DeadlineExceeded { generated_tokens: 5 }), "{ran:?}");
    rig.assert_empty();
}

#[test]
fn as_many_sequences_run_as_suit_the_device() {
    // The device says 32.
    for (rows_max, sequences_max, most) in [(None, None, 32), (Some(8), None, 8), (None, Some(5), 5)] {
        let rig = Rig::new(EngineOptions { rows_max, sequences_max, ..EngineOptions::default() });
        let asked: Vec<_> = (0..40).map(|first| rig.ask(&prompt(first, 10), 3000)).collect();
        assert!(rig.comes(|s| s.running_and_queued() == (most, 40 - most)), "{rows_max:?} {sequences_max:?}");
        drop(asked);
        assert!(rig.comes(|s| s.sequences.is_empty()));
    }
}

#[test]
fn a_slow_reader_is_dropped() {
    let rig = Rig::new(EngineOptions { slow_reader: Duration::from_millis(30), ..EngineOptions::default() });
    let (mut job, asked) = rig.job(&prompt(1, 10), 50);
    job.credit = 2;
    rig.handle().submit(job).unwrap();
    let answer = asked.finish();
    assert_eq!(answer.ids, expected(&prompt(1, 10), 2));
    assert!(matches!(answer.error(), JobError::SlowReader { .. }));
    rig.assert_empty();
}

#[test]
fn the_queue_has_an_end() {
    // Two of the places are root's, and a user alone has half of the others.
    let rig = Rig::new(EngineOptions { sequences_max: Some(1), queue_max: 32, ..EngineOptions::default() });
    let first = rig.hold(&prompt(1, 3), 2);
    assert!(rig.comes(|s| s.running_and_queued() == (1, 0)));
    let waiting: Vec<_> = (2..17).map(|text| rig.ask(&prompt(text, 3), 2)).collect();
    let submit = |uid| {
        let (mut job, asked) = rig.job(&prompt(20, 3), 2);
        job.uid = uid;
        rig.handle().submit(job).map(|()| asked)
    };
    let error = submit(1000).err().unwrap();
    assert!(
        matches!(error, JobError::NoPlace(refusal) if (refusal.own, refusal.total) == (15, 32)),
        "{error}"
    );
    // Each newcomer finds a place as long as there are any, and root behind any number of them.
    let others: Vec<_> = (2000..2040).map(submit).collect();
    assert_eq!(others.iter().filter(|asked| asked.is_ok()).count(), 15);
    let last = submit(0).ok().unwrap();
    rig.handle().credit(first.id, 100);
    assert_eq!(first.finish().ids.len(), 2);
    for asked in waiting.into_iter().chain(others.into_iter().filter_map(Result::ok)).chain([last]) {
        assert_eq!(asked.finish().ids.len(), 2);
    }
    assert_eq!(rig.ask(&prompt(4, 3), 2).finish().ids.len(), 2, "the queue has room again");
}

#[test]
fn jobs_that_break_their_promises_are_refused() {
    let rig = Rig::new(EngineOptions::default());
    let check = |change: fn(&mut Job), want: &str| {
        let (mut job, _asked) = rig.job(&prompt(1, 10), 5);
        change(&mut job);
        let text = rig.handle().submit(job).unwrap_err().to_string();
        assert!(text.contains(want), "{text}");
    };
    check(|job| job.prompt.clear(), "no token");
    check(|job| job.max_tokens = 0, "max_tokens is 0");
    check(|job| job.context_tokens = 10, "no room for an answer");
    check(|job| job.prompt[3] = VOCAB as u32, "outside the vocabulary");
    rig.control.allow(0);
    let (first, asked) = rig.job(&prompt(1, 10), 5);
    let (mut second, _again) = rig.job(&prompt(1, 10), 5);
    second.id = first.id;
    rig.handle().submit(first).unwrap();
    assert!(matches!(rig.handle().submit(second), Err(JobError::Invalid(_))));
    rig.control.release();
    assert_eq!(asked.finish().ids.len(), 5);
}

#[test]
fn a_full_context_is_told_from_a_reached_count() {
    let rig = Rig::new(EngineOptions::default());
    // Fewer tokens than the context has room for, exactly as many, more, and the maximum.
    let cases = [
        (4, StopReason::MaxTokens, 4),
        (5, StopReason::MaxTokens, 5),
        (6, StopReason::ContextFull, 5),
        (u32::MAX, StopReason::ContextFull, 5),
    ];
    for (max_tokens, reason, tokens) in cases {
        let (mut job, asked) = rig.job(&prompt(1, 10), max_tokens);
        job.context_tokens = 15;
        rig.handle().submit(job).unwrap();
        let answer = asked.finish();
        assert_eq!((answer.outcome().reason, answer.ids), (reason, expected(&prompt(1, 10), tokens)));
    }
}

#[test]
fn log_probabilities_come_when_asked_for() {
    let rig = Rig::new(EngineOptions::default());
    let (mut job, mut asked) = rig.job(&prompt(1, 10), 1);
    job.sampling.top_logprobs = 2;
    rig.handle().submit(job).unwrap();
    let Some(Event::Tokens(batch)) = asked.events.blocking_recv() else { panic!("tokens come first") };
    assert_eq!(batch.logprobs, [TokenLogprob { logprob: -0.5, top: vec![(0, -1.0), (1, -2.0)] }]);
}

#[test]
fn a_drain_lets_what_runs_finish() {
    let rig = Rig::new(EngineOptions { sequences_max: Some(1), ..EngineOptions::default() });
    let running = rig.hold(&prompt(1, 10), 20);
    let waiting = rig.ask(&prompt(2, 10), 20);
    assert!(rig.comes(|s| s.running_and_queued() == (1, 1)));
    rig.handle().drain(Instant::now() + Duration::from_secs(600));
    let (job, _asked) = rig.job(&prompt(3, 10), 20);
    assert!(matches!(rig.handle().submit(job), Err(JobError::Draining)));
    rig.handle().credit(running.id, 100);
    assert!(matches!(waiting.finish().error(), JobError::Draining));
    assert_eq!(running.finish().ids, expected(&prompt(1, 10), 20));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(rig.handle().drained());
    rig.assert_empty();
}

#[test]
fn a_drain_ends_at_its_deadline_and_a_stop_at_once() {
    let rig = Rig::new(EngineOptions::default());
    let mut running = rig.ask(&prompt(1, 10), 4000);
    running.take(2);
    rig.handle().drain(Instant::now());
    assert!(matches!(running.finish().error(), JobError::Draining));

    let mut rig = Rig::new(EngineOptions::default());
    let mut running = rig.ask(&prompt(1, 10), 4000);
    running.take(2);
    let handle = rig.handle();
    rig.engine.take().unwrap().stop();
    assert!(matches!(running.finish().error(), JobError::Draining));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(handle.drained());
}

#[test]
fn the_heart_beats_while_idle() {
    let rig = Rig::new(EngineOptions::default());
    let beat = rig.handle().heartbeat();
    assert!(rig.comes(|_| rig.handle().heartbeat() > beat + 1));
}

#[test]
fn an_idle_model_gives_its_room_back_and_keeps_its_tensors() {
    let options = EngineOptions { idle_release: Duration::from_millis(20), ..EngineOptions::default() };
    let rig = Rig::new(options);
    assert_eq!(rig.ask(&prompt(1, 10), 3).finish().ids.len(), 3);
    assert!(rig.comes(|s| s.kv_pages_max == 0));
    assert_eq!(rig.control.holds().1, 0, "the slot is closed");
    let loads = rig.control.loads().len();
    assert_eq!(rig.ask(&prompt(2, 10), 3).finish().ids, expected(&prompt(2, 10), 3));
    assert_eq!(rig.control.loads().len(), loads);
}

#[test]
fn an_unloaded_model_goes_with_its_last_sequence() {
    let rig = Rig::new(EngineOptions::default());
    rig.control.allow(1);
    let asked = rig.ask(&prompt(1, 10), 20);
    rig.control.wait_held();
    rig.handle().model_gone(rig.model.id);
    rig.control.release();
    assert_eq!(asked.finish().ids, expected(&prompt(1, 10), 20));
    assert_eq!(rig.control.holds().1, 0);
    assert_eq!(Arc::strong_count(&rig.model), 1, "the engine holds nothing of it");
    let loads = rig.control.loads().len();
    assert_eq!(rig.ask(&prompt(2, 10), 3).finish().ids.len(), 3);
    assert!(rig.control.loads().len() > loads, "its tensors were evicted too");
    rig.handle().model_gone(rig.model.id);
    assert!(rig.comes(|s| s.kv_pages_max == 0) && rig.control.holds().1 == 0);
}

#[test]
fn types_without_arithmetic_are_named() {
    let rig = Rig::new(EngineOptions::default());
    let program = &rig.model.plan.program;
    rig.handle().check_program(program).unwrap();
    let table = &program.tensors()[0].lazy;
    let (shape, range) = (table.shape(), table.range());
    let halves = range.start..range.start + table.byte_len() / 2;
    let halves = LazyTensor::new("blk.2.ffn_up.weight", DType::F16, shape, halves, table.file().clone());

    let mut other = Builder::new(program.vocab());
    let width = shape.cols() as usize;
    let (x, last, logits) =
        (other.value(width), other.wanted_value(width), other.wanted_value(program.vocab()));
    other.part(PartKind::Embedding);
    let table = other.tensor(table.clone(), Residence::Host);
    other.push(Op::Embed { table, scale: 1.0, out: x });
    other.part(PartKind::Head);
    other.push(Op::Take { from: x, out: last });
    let weight = other.tensor(halves.unwrap(), Residence::Device);
    other.push(Op::Project { weight, bias: None, from: last, out: logits, add: false });
    let text =
        rig.handle().check_program(&other.finish(Output::Logits(logits)).unwrap()).unwrap_err().to_string();
    assert_eq!(text, "tensor blk.2.ffn_up.weight: type F16 is not supported by the fake backend");
}

#[test]
fn waits_of_a_step_for_weights_are_load_and_not_prefill() {
    let rig = Rig::new(EngineOptions::default());
    let wait = Duration::from_millis(40);
    rig.control.wait_for_weights(wait);
    let begun = Instant::now();
    let cold = rig.ask(&prompt(1, 10), 3).finish();
    let (all, cold) = (begun.elapsed(), cold.outcome());
    assert_eq!(cold.load, wait);
    let parts = cold.queue + cold.load + cold.prefill + cold.decode;
    assert!(parts <= all, "the wait counts twice: {parts:?} of {all:?}");
    assert_eq!(rig.ask(&prompt(1, 10), 3).finish().outcome().load, Duration::ZERO);
}

#[test]
fn a_load_that_nobody_follows_any_more_begins_nothing() {
    let rig = Rig::new(EngineOptions::default());
    rig.control.allow(0);
    let asked = rig.ask(&prompt(1, 10), 3);
    rig.control.wait_held();
    let other = open(2, &kept_model());
    drop(rig.handle().preload_all(&other).unwrap());
    rig.control.release();
    assert_eq!(asked.finish().ids.len(), 3);
    let loads = rig.control.loads().len();
    let on_device = rig.model.plan.program.tensors().iter().filter(|t| t.residence == Residence::Device);
    assert_eq!(loads, on_device.count(), "only the step's tensors");
    // A load with a receiver loads all its tensors.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let reached = runtime.block_on(rig.handle().preload_all(&other).unwrap().wait()).unwrap();
    assert_eq!(reached.tensors, other.plan.program.tensors().len());
}
