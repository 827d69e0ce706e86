//! Tests the engine on a fake device, with the header and vocabulary of a real model kept in the tree.

mod control;
mod drafters;
mod drafts;
mod fake;
mod faults;
#[cfg(feature = "loom")]
mod interleavings;
pub mod masks;
mod memory;
mod outgrown;
mod paging;
mod prefixes;
mod recurrent;
mod residency;
mod room;
mod schedules;
mod sharing;
mod shift;
mod states;
mod step;
mod swap;
mod text;
mod tokens;
mod users;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::model::ModelId;
use fake::{Control, next_token};

const VOCAB: usize = 512;

pub(in crate::scheduler) fn kept_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/tinystories-260k-f32.gguf")
}

pub(in crate::scheduler) fn open(id: u64, path: &Path) -> Arc<Model> {
    let file = std::fs::File::open(path).unwrap();
    Arc::new(Model::open(ModelId(id), "tinystories", vec![file]).unwrap())
}

/// Runs a test of random schedules for each seed, on all processors. Returns how many there are: `ROCMFORGE_SCHEDULES`, or
/// 10,000. With `ROCMFORGE_SEED` that seed alone.
pub(in crate::scheduler) fn of_all_threads(test: impl Fn(u64) + Sync) -> u64 {
    let number = |name| std::env::var(name).ok().and_then(|number| number.parse::<u64>().ok());
    let count = number("ROCMFORGE_SCHEDULES").unwrap_or(10_000);
    let seeds = number("ROCMFORGE_SEED").map_or(0..count, |seed| seed..seed + 1);
    let threads = std::thread::available_parallelism().map_or(2, usize::from).min(8) as u64;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (test, seeds) = (&test, seeds.clone());
            scope.spawn(move || {
                for seed in seeds.filter(|seed| seed % threads == thread) {
                    let run = std::panic::AssertUnwindSafe(|| test(seed));
                    if let Err(panic) = std::panic::catch_unwind(run) {
                        println!("seed {seed} failed: repeat it with ROCMFORGE_SEED={seed}");
                        std::panic::resume_unwind(panic);
                    }
                }
            });
        }
    });
    seeds.end - seeds.start
}

struct Rig {
    control: Control,
    engine: Option<Engine>,
    model: Arc<Model>,
}

/// A request and the receiver of its events.
struct Asked {
    id: SequenceId,
    events: UnboundedReceiver<Event>,
}

/// All events of a request, collected.
#[derive(Debug, Default)]
struct Answer {
    ids: Vec<u32>,
    text: String,
    items: usize,
    end: Option<Result<Outcome, JobError>>,
}

impl Answer {
    fn outcome(&self) -> &Outcome {
        match &self.end {
            Some(Ok(outcome)) => outcome,
            other => panic!("no answer: {other:?}"),
        }
    }

    fn error(&self) -> &JobError {
        match &self.end {
            Some(Err(error)) => error,
            other => panic!("no failure: {other:?}"),
        }
    }
}

impl Drop for Rig {
    /// Dropping the engine joins its thread, so a failing test must release that thread first.
    fn drop(&mut self) {
        self.control.release();
    }
}

impl Rig {
    fn new(options: EngineOptions) -> Self {
        Self::with(Control::default(), options)
    }

    fn with(control: Control, options: EngineOptions) -> Self {
        let engine = Engine::start(options, control.factory()).unwrap();
        Self { control, engine: Some(engine), model: open(1, &kept_model()) }
    }

    fn handle(&self) -> EngineHandle {
        self.engine.as_ref().unwrap().handle()
    }

    /// A greedy job that ends only by its length.
    fn job(&self, prompt: &[u32], max_tokens: u32) -> (Job, Asked) {
        greedy(self.handle().new_sequence_id(), &self.model, prompt, max_tokens)
    }

    fn ask(&self, prompt: &[u32], max_tokens: u32) -> Asked {
        let (job, asked) = self.job(prompt, max_tokens);
        self.handle().submit(job).unwrap();
        asked
    }

    /// A request that is admitted without credit.
    fn hold(&self, prompt: &[u32], max_tokens: u32) -> Asked {
        let (mut job, asked) = self.job(prompt, max_tokens);
        job.credit = 0;
        self.handle().submit(job).unwrap();
        asked
    }

    /// Polls the snapshot for up to 20 s; true once `so` holds.
    fn comes(&self, so: impl Fn(&EngineSnapshot) -> bool) -> bool {
        let until = Instant::now() + Duration::from_secs(20);
        while Instant::now() < until {
            if so(&self.handle().snapshot()) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        false
    }

    /// No sequence is live and none holds a page. The device has the cached pages alone.
    fn assert_empty(&self) {
        let snapshot = self.handle().snapshot();
        assert_eq!((snapshot.sequences.len(), snapshot.kv_pages_used, snapshot.kv_claimed_bytes), (0, 0, 0));
        assert_eq!(self.control.holds().0 as u64, snapshot.kv_pages_cached, "pages on the device");
        assert_eq!(snapshot.kv_swapped_bytes, 0, "bytes in host memory");
    }
}

impl Asked {
    /// The tokens of the next `count` events.
    fn take(&mut self, count: usize) -> Vec<u32> {
        let mut ids = Vec::new();
        for _ in 0..count {
            match self.events.blocking_recv() {
                Some(Event::Tokens(batch)) => ids.extend(batch.ids),
                other => panic!("expected tokens: {other:?}"),
            }
        }
        ids
    }

    /// Collects all remaining events.
    fn finish(mut self) -> Answer {
        let mut answer = Answer::default();
        while let Some(event) = self.events.blocking_recv() {
            assert!(answer.end.is_none(), "an event after the last one");
            match event {
                Event::Tokens(batch) => {
                    answer.ids.extend(batch.ids);
                    answer.text.push_str(&batch.text);
                    answer.items += 1;
                }
                Event::Done(outcome) => {
                    answer.text.push_str(&outcome.text);
                    answer.end = Some(Ok(outcome));
                }
                Event::Failed(error) => answer.end = Some(Err(error)),
            }
        }
        answer
    }
}

/// A greedy job that ends only by its length.
fn greedy(id: SequenceId, model: &Arc<Model>, prompt: &[u32], max_tokens: u32) -> (Job, Asked) {
    let (events, receiver) = unbounded_channel();
    let sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 7, top_logprobs: 0 };
    let job = Job {
        id,
        uid: 1000,
        connection: 0,
        priority: 128,
        shift: None,
        scores: None,
        embedding: None,
        drafts: 0,
        draft_model: None,
        alike: 0,
        model: Arc::clone(model),
        prompt: prompt.to_vec(),
        max_tokens,
        context_tokens: 4096,
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
    (job, Asked { id, events: receiver })
}

/// The tokens that the fake device must generate.
fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
    expected_of(prompt, count, 7)
}

/// The same with this seed.
fn expected_of(prompt: &[u32], count: usize, seed: u64) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        tokens.push(next_token(&tokens, seed, VOCAB));
    }
    tokens.split_off(prompt.len())
}

/// Waits for requests: prompt, tokens wanted, events. Each has its whole answer, or the beginning of it if it was cancelled.
fn finish_all(asked: Vec<(Vec<u32>, u32, Asked)>, seed: u64) {
    for (text, count, waits) in asked {
        let answer = waits.finish();
        assert_eq!(answer.ids, expected_of(&text, answer.ids.len(), seed), "{text:?}");
        match &answer.end {
            Some(Ok(_)) => assert_eq!(answer.ids.len(), count as usize),
            end => assert!(matches!(end, Some(Err(JobError::Cancelled))), "{end:?}"),
        }
    }
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (seed * 31 + i * 7) % VOCAB as u32).collect()
}
