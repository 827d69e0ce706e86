//! Answers of the engine on the CPU: the tokens that another engine gives, however prompts are split and steps are
//! shared.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rocmforge::backend::cpu::{CpuBackend, CpuOptions};
use rocmforge::backend::{ActivationType, Backend, KvType};
use rocmforge::model::{Model, ModelId};
use rocmforge::scheduler::{
    Engine, EngineOptions, Event, Job, JobError, Outcome, Penalties, Reuse, Sampling, SequenceId, Steering,
    TokenLogprob,
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::common;

const EXACT: CpuOptions = CpuOptions {
    threads: None,
    isa: None,
    activations: ActivationType::F32,
    kv: KvType::F32,
    unfused: false,
};

struct Rig {
    engine: Engine,
    model: Arc<Model>,
}

/// One answer: ids, text, and log-probabilities of each drawn token and two more.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    ids: Vec<u32>,
    text: String,
    logprobs: Vec<TokenLogprob>,
}

impl Rig {
    fn new(model: &Path, cpu: CpuOptions, rows_max: usize) -> Self {
        Self::with(model, cpu, EngineOptions { rows_max: Some(rows_max), ..EngineOptions::default() })
    }

    fn with(model: &Path, cpu: CpuOptions, options: EngineOptions) -> Self {
        let factory = move || Ok(Box::new(CpuBackend::new(cpu)?) as Box<dyn Backend>);
        let engine = Engine::start(options, factory).unwrap();
        let file = std::fs::File::open(model).unwrap();
        Self { engine, model: Arc::new(Model::open(ModelId(1), "model", vec![file]).unwrap()) }
    }

    fn submit(&self, prompt: &[u32], max_tokens: u32, sampling: Sampling) -> UnboundedReceiver<Event> {
        self.submit_as(0, prompt, max_tokens, sampling).1
    }

    fn submit_as(
        &self,
        uid: u32,
        prompt: &[u32],
        max_tokens: u32,
        sampling: Sampling,
    ) -> (SequenceId, UnboundedReceiver<Event>) {
        let (job, events) = self.job(uid, prompt, max_tokens, sampling);
        let id = job.id;
        self.engine.handle().submit(job).unwrap();
        (id, events)
    }

    fn job(
        &self,
        uid: u32,
        prompt: &[u32],
        max_tokens: u32,
        sampling: Sampling,
    ) -> (Job, UnboundedReceiver<Event>) {
        let (events, receiver) = unbounded_channel();
        let job = Job {
            id: self.engine.handle().new_sequence_id(),
            uid,
            connection: 0,
            priority: 128,
            shift: None,
            scores: None,
            embedding: None,
            drafts: 0,
            draft_model: None,
            alike: 0,
            model: Arc::clone(&self.model),
            prompt: prompt.to_vec(),
            max_tokens,
            context_tokens: self.model.plan.context_length,
            sampling,
            steering: Steering::default(),
            marks: Vec::new(),
            stop: Vec::new(),
            ignore_eog: true,
            deadline: None,
            arrived: Instant::now(),
            credit: u32::MAX,
            events,
        };
        (job, receiver)
    }

    fn ask(&self, prompt: &[u32], max_tokens: u32, sampling: Sampling) -> Answer {
        finish(self.submit(prompt, max_tokens, sampling)).0
    }
}

fn finish(mut events: UnboundedReceiver<Event>) -> (Answer, Outcome) {
    let mut answer = Answer::default();
    loop {
        match events.blocking_recv().expect("the engine sent no last event") {
            Event::Tokens(batch) => {
                answer.ids.extend(batch.ids);
                answer.text.push_str(&batch.text);
                answer.logprobs.extend(batch.logprobs);
            }
            Event::Done(outcome) => {
                answer.text.push_str(&outcome.text);
                return (answer, outcome);
            }
            Event::Failed(error) => panic!("{error}"),
        }
    }
}

/// The tokens of an answer, and whether all came. It may fail as `may` says.
fn collect(mut events: UnboundedReceiver<Event>, may: impl Fn(&JobError) -> bool) -> (Answer, bool) {
    let mut answer = Answer::default();
    loop {
        match events.blocking_recv().expect("the engine sent no last event") {
            Event::Tokens(batch) => {
                answer.ids.extend(batch.ids);
                answer.logprobs.extend(batch.logprobs);
            }
            Event::Done(_) => return (answer, true),
            Event::Failed(error) if may(&error) => return (answer, false),
            Event::Failed(error) => panic!("{error}"),
        }
    }
}

fn greedy() -> Sampling {
    Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0, top_logprobs: 2 }
}

/// Sampling settings under which each draw depends on every logit.
fn drawn(seed: u64) -> Sampling {
    Sampling { temperature: 1.0, top_k: 0, top_p: 0.95, min_p: 0.0, seed, top_logprobs: 2 }
}

/// Answers of llama.cpp on weights dequantised to F32 (see `oracle.py`). The smallest margin between the first two
/// tokens of any step is 0.13 nats, and F32 arithmetic differs by less than 0.01.
fn check_greedy(model: &Path, cases: &[(&[u32], &[u32])]) {
    let rig = Rig::new(model, EXACT, 256);
    for (prompt, want) in cases {
        let answer = rig.ask(prompt, want.len() as u32, greedy());
        assert_eq!(&answer.ids, want);
        let best = answer.logprobs.iter().map(|l| l.top[0].0).collect::<Vec<_>>();
        assert_eq!(&best, want, "the drawn token is not the most likely one");
    }
}

#[test]
fn tinystories_goes_on_as_another_engine_does() {
    let want = [432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338];
    check_greedy(&common::tinystories(), &[(&[1, 403, 407, 261, 378], &want)]);
    let rig = Rig::new(&common::tinystories(), EXACT, 256);
    assert_eq!(
        rig.ask(&[1, 403, 407, 261, 378], 12, greedy()).text,
        ", there was a little girl named Lily. She"
    );
}

#[test]
fn smollm2_goes_on_as_another_engine_does() {
    let Some(model) = common::smollm2() else { return };
    let capital = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33];
    let story = [28, 260, 2240, 282, 23324, 27108, 436, 253, 15114, 39228, 28, 351];
    let python = [1003, 304, 1672, 3987, 24, 94, 731, 216, 33, 25, 2272, 216];
    check_greedy(
        &model,
        &[
            (&[504, 3575, 282, 4649, 314], &capital), // The capital of France is
            (&[6403, 1980, 253, 655], &story),        // Once upon a time
            (&[1604, 3987, 24, 94, 727, 2367], &python), // def fib(n):, line end, 4 spaces
        ],
    );
}

/// Every log-probability of the answer has the same bits, however the prompt is split into chunks.
fn check_chunks(model: &Path, cpu: CpuOptions, prompt: &[u32]) {
    let chunked = |rows| Rig::new(model, cpu, rows).ask(prompt, 6, greedy());
    let whole = chunked(256);
    for rows in [64, 7, 1] {
        assert_eq!(chunked(rows), whole, "{rows} rows a step");
    }
}

/// Sixteen simultaneous sequences, of `1 + i * longer` tokens, get the same bits as each does alone.
fn check_batch(model: &Path, cpu: CpuOptions, longer: u32) {
    let rig = Rig::new(model, cpu, 48);
    let vocab = rig.model.plan.program.vocab() as u32;
    let prompt =
        |i: u32| -> Vec<u32> { (0..1 + i * longer).map(|j| (i * 131 + j * 37 + 5) % vocab).collect() };
    let sampling = |i: u32| if i.is_multiple_of(3) { greedy() } else { drawn(u64::from(i)) };
    let alone: Vec<Answer> = (0..16).map(|i| rig.ask(&prompt(i), 6, sampling(i))).collect();
    let before = rig.engine.handle().snapshot().counters;
    let together: Vec<_> = (0..16).map(|i| rig.submit(&prompt(i), 6, sampling(i))).collect();
    for (i, events) in together.into_iter().enumerate() {
        assert_eq!(finish(events).0, alone[i], "sequence {i}");
    }
    let snapshot = rig.engine.handle().snapshot();
    let steps = snapshot.counters.steps - before.steps;
    assert!(steps < 48, "steps were not shared: {steps} steps; 16 sequences alone take at least 96");
    assert_eq!((snapshot.kv_pages_used, snapshot.kv_bytes), (0, snapshot.kv_cached_bytes));
}

/// Prompts with common beginnings get the same bits as each does alone when every token is computed. They come from three
/// users at once, with cancels and with pages for a few of them.
fn check_reuse(model: &Path, cpu: CpuOptions, count: u32, pages: u64, tokens: u32) {
    let options = |kv_budget_bytes, reuse| EngineOptions {
        rows_max: Some(48),
        kv_budget_bytes,
        reuse,
        ..EngineOptions::default()
    };
    let off = Rig::with(model, cpu, options(4 << 30, Reuse::Off));
    let program = &off.model.plan.program;
    let (vocab, page_bytes) = (program.vocab() as u32, off.engine.handle().kv_bytes(program, 1));
    let prompt = |i: u32| -> Vec<u32> {
        let stem = (0..20 + i * 13 % 60).map(|j| ((i % 3) * 131 + j * 37 + 5) % vocab);
        stem.chain((0..i % 4).map(|j| (i * 7 + j) % vocab)).collect()
    };
    let sampling = |i: u32| if i.is_multiple_of(3) { greedy() } else { drawn(u64::from(i)) };
    let alone: Vec<Answer> = (0..count).map(|i| off.ask(&prompt(i), tokens, sampling(i))).collect();
    let rig = Rig::with(model, cpu, options(pages * page_bytes, Reuse::User));
    for round in 0..2 {
        let together: Vec<_> =
            (0..count).map(|i| rig.submit_as(i * 5 % 3, &prompt(i), tokens, sampling(i))).collect();
        for (id, _) in together.iter().skip(2).step_by(7) {
            rig.engine.handle().cancel(*id);
        }
        for (i, (_, events)) in together.into_iter().enumerate() {
            let cancelled = |error: &JobError| i % 7 == 2 && matches!(error, JobError::Cancelled);
            let (Answer { ids, logprobs, .. }, ended) = collect(events, cancelled);
            assert!(!ended || ids.len() == tokens as usize, "round {round}, sequence {i}");
            assert_eq!(ids, alone[i].ids[..ids.len()], "round {round}, sequence {i}");
            assert_eq!(logprobs, alone[i].logprobs[..ids.len()], "round {round}, sequence {i}");
        }
    }
    let snapshot = rig.engine.handle().snapshot();
    let counters = snapshot.counters;
    assert!(counters.reused_tokens > 0 && counters.sequences_parked > 0, "{counters:?}");
    assert_eq!((snapshot.kv_pages_used, snapshot.kv_bytes), (0, snapshot.kv_cached_bytes));
}

/// Answers of sequences that draft, together and with cancels and few pages, have the bits of those alone that do not.
fn check_drafts(model: &Path, cpu: CpuOptions, count: u32, pages: u64, tokens: u32) {
    let options = |kv_budget_bytes| EngineOptions {
        rows_max: Some(64),
        sequences_max: Some(24),
        kv_budget_bytes,
        ..EngineOptions::default()
    };
    let off = Rig::with(model, cpu, options(4 << 30));
    let program = &off.model.plan.program;
    let (vocab, page_bytes) = (program.vocab() as u32, off.engine.handle().kv_bytes(program, 1));
    // Each prompt has a passage twice, so that the answer finds something to go on with.
    let prompt = |i: u32| -> Vec<u32> {
        let passage: Vec<u32> = (0..15 + i % 9).map(|j| ((i % 5) * 131 + j * 37 + 5) % vocab).collect();
        [&passage[..], &[i % vocab], &passage[..]].concat()
    };
    let penalties = Penalties { repeat: 1.1, last: 64, ..Penalties::NONE };
    let job = |rig: &Rig, i: u32, drafts: u32| {
        let sampling = if i.is_multiple_of(2) { greedy() } else { drawn(u64::from(i)) };
        let (mut job, events) = rig.job(i * 5 % 3, &prompt(i), tokens, sampling);
        job.drafts = drafts;
        job.steering.penalties = (i % 4 == 3).then(|| penalties.clone());
        (job, events)
    };
    let ask = |rig: &Rig, i: u32, drafts: u32| {
        let (job, events) = job(rig, i, drafts);
        rig.engine.handle().submit(job).unwrap();
        finish(events)
    };
    let alone: Vec<Answer> = (0..count).map(|i| ask(&off, i, 0).0).collect();
    for i in 0..count {
        assert_eq!(ask(&off, i, 1 + i % 16).0, alone[i as usize], "sequence {i} alone");
    }
    let counters = off.engine.handle().snapshot().counters;
    assert!(counters.accepted_tokens > 0, "{counters:?}");
    assert!(counters.drafted_tokens > counters.accepted_tokens, "{counters:?}");
    let rig = Rig::with(model, cpu, options(pages * page_bytes));
    let together: Vec<_> = (0..count)
        .map(|i| {
            let (job, events) = job(&rig, i, [0, 3, 16][i as usize % 3]);
            let id = job.id;
            rig.engine.handle().submit(job).unwrap();
            (id, events)
        })
        .collect();
    for (id, _) in together.iter().skip(2).step_by(7) {
        rig.engine.handle().cancel(*id);
    }
    for (i, (_, events)) in together.into_iter().enumerate() {
        let (answer, ended) = collect(events, |error| i % 7 == 2 && matches!(error, JobError::Cancelled));
        assert!(!ended || answer.ids.len() == tokens as usize, "sequence {i}");
        assert_eq!(answer.ids, alone[i].ids[..answer.ids.len()], "sequence {i}");
        assert_eq!(answer.logprobs, alone[i].logprobs[..answer.ids.len()], "sequence {i}");
    }
    let snapshot = rig.engine.handle().snapshot();
    assert_eq!((snapshot.kv_pages_used, snapshot.kv_bytes), (0, snapshot.kv_cached_bytes));
}

#[test]
fn tinystories_answers_do_not_depend_on_drafts() {
    check_drafts(&common::tinystories(), CpuOptions::default(), 32, 40, 110);
    check_drafts(&common::tinystories(), EXACT, 16, 12, 110);
}

#[test]
fn smollm2_answers_do_not_depend_on_drafts() {
    let Some(model) = common::smollm2() else { return };
    check_drafts(&model, CpuOptions::default(), 4, 9, 60);
}

#[test]
fn tinystories_answers_do_not_depend_on_what_is_reused() {
    check_reuse(&common::tinystories(), CpuOptions::default(), 64, 40, 110);
    check_reuse(&common::tinystories(), EXACT, 16, 12, 110);
}

#[test]
fn smollm2_answers_do_not_depend_on_what_is_reused() {
    let Some(model) = common::smollm2() else { return };
    check_reuse(&model, CpuOptions::default(), 5, 9, 90);
}

#[test]
fn smollm2_answers_from_codes_do_not_depend_on_what_is_reused() {
    let Some(model) = common::smollm2() else { return };
    let codes = CpuOptions { kv: KvType::Int8, ..CpuOptions::default() };
    check_reuse(&model, codes, 5, 9, 90);
    check_chunks(&model, codes, &(0..70).map(|i| (i * 37 + 3) % 512).collect::<Vec<_>>());
}

#[test]
fn tinystories_answers_do_not_depend_on_chunks_or_company() {
    let prompt: Vec<u32> = (0..150).map(|i| (i * 37 + 3) % 512).collect();
    for cpu in [EXACT, CpuOptions::default()] {
        check_chunks(&common::tinystories(), cpu, &prompt);
        check_batch(&common::tinystories(), cpu, 5);
    }
}

#[test]
fn smollm2_answers_do_not_depend_on_chunks_or_company() {
    let Some(model) = common::smollm2() else { return };
    let prompt: Vec<u32> = (0..35).map(|i| (i * 997 + 3) % 49_000).collect();
    check_chunks(&model, CpuOptions::default(), &prompt);
    check_batch(&model, CpuOptions::default(), 2);
}
