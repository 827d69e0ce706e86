//! Runs random schedules of all requests to an engine whose models exceed its device together, and checks a few rules.
//! Each answer is the right one or a planted fault. No tensor is loaded twice, and none is evicted while an unlaunched
//! unit reads it. No request waits for ever. At the end the device is empty.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::fake::{Fault, REPEATS};
use super::*;
use crate::model::Model;
use crate::scheduler::{Preload, RulesChange};

const MODELS: usize = 3;

/// A request that waits longer counts as waiting for ever.
const PATIENCE: Duration = Duration::from_secs(60);

/// A small generator: the seed alone reproduces a failure.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// Failures that a schedule may see.
#[derive(Default)]
struct Planted {
    load: bool,
    panic: bool,
    cleared_away: bool,
}

impl Planted {
    fn allows(&self, error: &JobError) -> bool {
        match error {
            JobError::Cancelled => true,
            JobError::NoRoom { need_bytes, budget_bytes, .. } => need_bytes > &0 && budget_bytes > &0,
            JobError::Backend(BackendError::Upload { .. }) => self.load,
            JobError::Panicked(_) => self.panic,
            _ => false,
        }
    }
}

struct Schedule {
    rig: Rig,
    models: Vec<Arc<Model>>,
    /// It drafts for others, and is wrong now and then.
    wrong: Arc<Model>,
    random: Random,
    planted: Planted,
    /// Requests, and the tokens that they are to get.
    asked: Vec<(Asked, Vec<u32>)>,
    loading: Vec<Loading>,
    next_model: u64,
}

impl Schedule {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let swap_bytes = [0, 1 << 20, 1 << 40][random.below(3) as usize];
        let control = if seed.is_multiple_of(4) { Control::recurrent() } else { Control::default() };
        let rig = Rig::with(control, EngineOptions { swap_bytes, ..EngineOptions::default() });
        let models: Vec<_> = (0..MODELS as u64).map(|n| open(10 + n, &kept_model())).collect();
        let wrong = open(50, &kept_model());
        rig.control.is_small(&wrong.plan.program, true);
        let all = models[0].plan.program.weight_bytes();
        // From too little room to stream a model, to more than enough for all models.
        rig.control.memory().limit(all / 3 + random.below(all * 3));
        rig.control.load_ahead_always(random.below(4) as usize);
        if random.below(2) == 0 {
            rig.control.memory().count_pages();
        }
        let next_model = 100;
        Self {
            rig,
            models,
            wrong,
            random,
            planted: Planted::default(),
            asked: vec![],
            loading: vec![],
            next_model,
        }
    }

    fn some_model(&mut self) -> usize {
        self.random.below(MODELS as u64) as usize
    }

    fn act(&mut self, runtime: &tokio::runtime::Runtime) {
        let (handle, number) = (self.rig.handle(), self.some_model());
        let model = Arc::clone(&self.models[number]);
        match self.random.below(16) {
            0..=6 => {
                let prompt = prompt(self.random.below(50) as u32, 1 + self.random.below(40) as u32);
                // Few are long: each token is a step.
                let most = if self.random.below(8) == 0 { 60 } else { 3 };
                let tokens = 1 + self.random.below(most) as usize;
                let (mut job, asked) = self.rig.job(&prompt, tokens as u32);
                job.model = model;
                job.priority = self.random.below(3) as u8;
                job.drafts = [0, 2, 16][self.random.below(3) as usize];
                job.draft_model = match self.random.below(4) {
                    0 => Some(Arc::clone(&self.models[self.random.below(MODELS as u64) as usize])),
                    1 => Some(Arc::clone(&self.wrong)),
                    _ => None,
                };
                job.sampling.seed |= if job.drafts > 0 { REPEATS } else { 0 };
                self.asked.push((asked, expected_of(&prompt, tokens, job.sampling.seed)));
                handle.submit(job).unwrap();
            }
            7 => {
                if let Some((asked, ..)) = self.asked.last() {
                    handle.cancel(asked.id);
                }
            }
            8 => {
                let layers = u64::from(model.plan.program.layer_count());
                let what = match self.random.below(4) {
                    0 => Preload::All,
                    1 => Preload::Critical,
                    2 => Preload::First(self.random.below(layers + 2) as u32),
                    _ => Preload::Layers(vec![self.random.below(layers) as u32]),
                };
                let loading = handle.preload(&model, &what).unwrap();
                if self.random.below(3) > 0 {
                    self.loading.push(loading);
                }
            }
            9 => {
                let of = (self.random.below(2) == 0).then_some(model.id);
                runtime.block_on(handle.evict_weights(of)).unwrap();
            }
            10 => {
                let change = RulesChange {
                    pinned: Some(self.random.below(3) == 0),
                    priority: Some(self.random.below(3) as u8),
                    parts_min: Some(self.random.below(4) as u32),
                    idle_max: Some((self.random.below(4) == 0).then_some(Duration::ZERO)),
                };
                let rules = runtime.block_on(handle.set_rules(&model, change)).unwrap();
                assert_eq!(Some(rules.pinned), change.pinned);
            }
            11 => {
                // Unloads a model whose requests continue, and opens it again under another id.
                handle.model_gone(model.id);
                self.planted.cleared_away = true;
                self.next_model += 1;
                self.models[number] = open(self.next_model, &kept_model());
            }
            12 => {
                self.rig.control.memory().fail_loads(1 + self.random.below(3) as u32);
                self.planted.load = true;
            }
            13 if self.random.below(4) == 0 => {
                self.rig.control.fault(Fault::PanicInAttention);
                self.planted.panic = true;
            }
            14 => drop(runtime.block_on(handle.release_idle()).unwrap()),
            _ => std::thread::yield_now(),
        }
    }

    /// Waits for the end of every request. Then unloads all models and checks that the device is empty.
    fn finish(mut self, runtime: &tokio::runtime::Runtime) {
        for (asked, expected) in std::mem::take(&mut self.asked) {
            let answer = finish(asked, runtime);
            match answer.end.as_ref().expect("a last event") {
                Ok(_) => assert_eq!(answer.ids, expected, "wrong answer"),
                Err(error) => assert!(self.planted.allows(error), "{error}"),
            }
        }
        for loading in std::mem::take(&mut self.loading) {
            let ended = runtime.block_on(async { tokio::time::timeout(PATIENCE, loading.wait()).await });
            if let Err(error) = ended.expect("a load without an end") {
                assert!(self.planted.allows(&error) || self.planted.cleared_away, "{error}");
            }
        }
        let handle = self.rig.handle();
        runtime.block_on(handle.evict_weights(None)).unwrap();
        let memory = self.rig.control.memory();
        // Parts in flight leave when their loads complete, in a later turn.
        let matches = self.rig.comes(|snapshot| snapshot.device_bytes == memory.used());
        let snapshot = handle.snapshot();
        assert!(matches, "{} bytes in the ledger, {} live", snapshot.device_bytes, memory.used());
        let by_model: u64 = snapshot.models.iter().map(|model| model.weight_bytes).sum();
        assert_eq!(by_model, snapshot.device_bytes, "the ledger matches the sum over models");
        for model in self.models.iter().chain([&self.wrong]) {
            handle.model_gone(model.id);
        }
        assert!(
            self.rig.comes(|s| s.models.is_empty() && s.device_bytes == 0),
            "{:?}",
            handle.snapshot().models
        );
        assert_eq!(memory.used(), 0, "bytes are left on the device");
        assert_eq!(memory.wrongs(), Vec::<String>::new());
        self.rig.assert_empty();
    }
}

/// Collects all remaining events, with a time limit.
fn finish(mut asked: Asked, runtime: &tokio::runtime::Runtime) -> Answer {
    runtime.block_on(async {
        let mut answer = Answer::default();
        let until = tokio::time::Instant::from_std(Instant::now() + PATIENCE);
        while answer.end.is_none() {
            match tokio::time::timeout_at(until, asked.events.recv()).await.expect("a request without an end")
            {
                Some(Event::Tokens(batch)) => answer.ids.extend(batch.ids),
                Some(Event::Done(outcome)) => answer.end = Some(Ok(outcome)),
                Some(Event::Failed(error)) => answer.end = Some(Err(error)),
                None => break,
            }
        }
        assert!(asked.events.recv().await.is_none(), "an event after the last one");
        answer
    })
}

#[test]
fn no_schedule_breaks_a_rule() {
    of_all_threads(|seed| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let mut schedule = Schedule::new(seed);
        for _ in 0..4 + schedule.random.below(10) {
            schedule.act(&runtime);
        }
        schedule.finish(&runtime);
    });
}
