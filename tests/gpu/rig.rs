//! An engine on a device, and requests to it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge::backend::hip::{HipBackend, HipOptions};
use rocmforge::backend::{Backend, DeviceMemoryUse};
use rocmforge::model::{Model, ModelId};
use rocmforge::scheduler::{
    Engine, EngineHandle, EngineOptions, Event, Job, JobError, Outcome, Reuse, Sampling, SequenceId,
    Steering, TokenLogprob,
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::gpu;

/// Maximum rows of a step: below the count at which matrix products expand weights, so that an answer is computed one
/// way.
const ROWS: usize = 32;

pub struct Rig {
    pub engine: Engine,
}

/// Outcome of a request.
pub struct Answer {
    pub ids: Vec<u32>,
    pub logprobs: Vec<TokenLogprob>,
    pub end: Result<Outcome, JobError>,
}

/// A request in flight.
pub struct Asked {
    pub id: SequenceId,
    refused: Option<JobError>,
    receiver: UnboundedReceiver<Event>,
}

impl Asked {
    /// Waits for the end; returns all tokens.
    pub fn finish(mut self) -> Answer {
        let (mut ids, mut logprobs) = (Vec::new(), Vec::new());
        if let Some(error) = self.refused {
            return Answer { ids, logprobs, end: Err(error) };
        }
        loop {
            match self.receiver.blocking_recv() {
                Some(Event::Tokens(batch)) => {
                    ids.extend(batch.ids);
                    logprobs.extend(batch.logprobs);
                }
                Some(Event::Done(outcome)) => return Answer { ids, logprobs, end: Ok(outcome) },
                Some(Event::Failed(error)) => return Answer { ids, logprobs, end: Err(error) },
                None => panic!("a request ended without a last event"),
            }
        }
    }
}

/// Without cached pages: then all memory beside weights is that of running requests.
pub fn options() -> EngineOptions {
    EngineOptions {
        rows_max: Some(ROWS),
        sequences_max: Some(8),
        reuse: Reuse::Off,
        ..EngineOptions::default()
    }
}

/// A model's device bytes beside its weights. Excludes recorded steps: those are measured as the drop in free device
/// memory, which other tests change too.
pub fn beside_weights(memory: &DeviceMemoryUse) -> u64 {
    memory.kv + memory.scratch + memory.staging
}

pub fn model(id: u64, path: &Path) -> Arc<Model> {
    let file = std::fs::File::open(path).unwrap();
    Arc::new(Model::open(ModelId(id), "a test's", vec![file]).unwrap())
}

impl Rig {
    /// An engine on the test device; `None` after reporting why there is none.
    pub fn open() -> Option<Self> {
        Self::open_with(HipOptions { upload_threads: 2, ..HipOptions::default() })
    }

    /// Like [`Rig::open`] with other options.
    pub fn open_with(options: HipOptions) -> Option<Self> {
        let runtime = gpu::runtime()?;
        Some(Self::with(move || {
            let backend = HipBackend::with_runtime(runtime.clone(), options.clone())?;
            Ok(Box::new(backend) as Box<dyn Backend>)
        }))
    }

    /// An engine on the backend that `factory` opens.
    pub fn with(
        factory: impl Fn() -> Result<Box<dyn Backend>, rocmforge::backend::BackendError> + Send + 'static,
    ) -> Self {
        Self { engine: Engine::start(options(), factory).unwrap() }
    }

    pub fn handle(&self) -> EngineHandle {
        self.engine.handle()
    }

    /// A greedy answer of `tokens` tokens.
    pub fn ask(&self, model: &Arc<Model>, prompt: &[u32], tokens: u32) -> Answer {
        self.submit(model, prompt, tokens).finish()
    }

    /// Like [`Rig::ask`], with the log-probabilities of `top_logprobs` tokens beside each drawn one.
    pub fn ask_with_logprobs(
        &self,
        model: &Arc<Model>,
        prompt: &[u32],
        tokens: u32,
        top_logprobs: u32,
    ) -> Answer {
        self.submit_with_logprobs(model, prompt, tokens, top_logprobs).finish()
    }

    /// Submits a greedy request of `tokens` tokens.
    pub fn submit(&self, model: &Arc<Model>, prompt: &[u32], tokens: u32) -> Asked {
        self.submit_with_logprobs(model, prompt, tokens, 0)
    }

    fn submit_with_logprobs(
        &self,
        model: &Arc<Model>,
        prompt: &[u32],
        tokens: u32,
        top_logprobs: u32,
    ) -> Asked {
        self.submit_steered(model, prompt, tokens, top_logprobs, Steering::default())
    }

    /// Submits a greedy request of `tokens` tokens with limits of their choice.
    pub fn submit_steered(
        &self,
        model: &Arc<Model>,
        prompt: &[u32],
        tokens: u32,
        top_logprobs: u32,
        steering: Steering,
    ) -> Asked {
        let sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0, top_logprobs };
        self.submit_sampled(model, prompt, tokens, sampling, steering)
    }

    /// Submits a request of `tokens` tokens.
    pub fn submit_sampled(
        &self,
        model: &Arc<Model>,
        prompt: &[u32],
        tokens: u32,
        sampling: Sampling,
        steering: Steering,
    ) -> Asked {
        self.submit_changed(model, prompt, tokens, (sampling, steering), |_| ())
    }

    /// Submits a request of `tokens` tokens, after a change.
    pub fn submit_changed(
        &self,
        model: &Arc<Model>,
        prompt: &[u32],
        tokens: u32,
        (sampling, steering): (Sampling, Steering),
        change: impl FnOnce(&mut Job),
    ) -> Asked {
        let handle = self.handle();
        let (events, receiver) = unbounded_channel();
        let mut job = Job {
            id: handle.new_sequence_id(),
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
            max_tokens: tokens,
            context_tokens: 512,
            sampling,
            steering,
            marks: Vec::new(),
            stop: Vec::new(),
            ignore_eog: true,
            deadline: None,
            arrived: Instant::now(),
            credit: u32::MAX,
            events,
        };
        change(&mut job);
        let id = job.id;
        let refused = handle.submit(job).err();
        Asked { id, refused, receiver }
    }

    /// Polls for 60 s; true once `so` holds.
    pub fn comes(&self, so: impl Fn(&rocmforge::scheduler::EngineSnapshot) -> bool) -> bool {
        let until = Instant::now() + Duration::from_secs(60);
        while Instant::now() < until {
            if so(&self.handle().snapshot()) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}
