//! Shared by the engine's benches: runs requests and reports their times.

#![allow(dead_code)] // each bench uses its own part

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge::model::Model;
use rocmforge::scheduler::{EngineHandle, Event, Job, Outcome, Sampling, Steering};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

pub type Failure = Box<dyn std::error::Error>;

/// Times of the slowest of some requests.
#[derive(Default)]
pub struct Times {
    /// From submission to the first token.
    pub first: Duration,
    /// The part of `first` spent waiting for weights.
    pub load: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// From the first submission to the last token. Of several sequences, the first two overlap.
    pub all: Duration,
}

/// Runs `sequences` requests at once, each with its own prompt of `prompt` tokens.
pub fn run(
    handle: &EngineHandle,
    model: &Arc<Model>,
    sequences: usize,
    prompt: usize,
    tokens: u32,
    salt: usize,
) -> Result<Times, Failure> {
    run_of_users(handle, model, sequences, 1, prompt, tokens, salt)
}

/// As [`run`]; the requests come from that many users in turn.
pub fn run_of_users(
    handle: &EngineHandle,
    model: &Arc<Model>,
    sequences: usize,
    users: u32,
    prompt: usize,
    tokens: u32,
    salt: usize,
) -> Result<Times, Failure> {
    let begin = Instant::now();
    let mut running = Vec::new();
    for (sequence, uid) in (0..sequences).zip((0..users.max(1)).cycle()) {
        running.push(submit(handle, model, uid, prompt, tokens, salt * sequences + sequence)?);
    }
    let mut times = Times::default();
    for events in &mut running {
        let outcome = wait(events)?;
        if outcome.generated_tokens != tokens {
            return Err(format!("{} of {tokens} tokens were generated", outcome.generated_tokens).into());
        }
        times.first = times.first.max(outcome.queue + outcome.load + outcome.prefill);
        times.load = times.load.max(outcome.load);
        times.decode = times.decode.max(outcome.decode);
    }
    times.all = begin.elapsed();
    let all = times.all;
    if sequences == 1 && times.first + times.decode > all + Duration::from_millis(50) {
        return Err(format!("the engine's times add up to more than the {all:?} that passed").into());
    }
    Ok(times)
}

fn submit(
    handle: &EngineHandle,
    model: &Arc<Model>,
    uid: u32,
    prompt: usize,
    tokens: u32,
    salt: usize,
) -> Result<UnboundedReceiver<Event>, Failure> {
    let (events, receiver) = unbounded_channel();
    let vocab = model.plan.program.vocab();
    let job = Job {
        id: handle.new_sequence_id(),
        uid,
        connection: 0,
        priority: 128,
        shift: None,
        scores: None,
        embedding: None,
        drafts: 0,
        draft_model: None,
        alike: 0,
        model: Arc::clone(model),
        prompt: (0..prompt).map(|i| ((i + 1) * 7919 + salt * 104_729) % vocab).map(|id| id as u32).collect(),
        max_tokens: tokens,
        context_tokens: prompt as u32 + tokens,
        sampling: Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0, top_logprobs: 0 },
        steering: Steering::default(),
        marks: Vec::new(),
        stop: Vec::new(),
        ignore_eog: true,
        deadline: None,
        arrived: Instant::now(),
        credit: tokens + 1,
        events,
    };
    handle.submit(job)?;
    Ok(receiver)
}

fn wait(events: &mut UnboundedReceiver<Event>) -> Result<Outcome, Failure> {
    loop {
        match events.blocking_recv() {
            Some(Event::Tokens(_)) => {}
            Some(Event::Done(outcome)) => return Ok(outcome),
            Some(Event::Failed(error)) => return Err(error.into()),
            None => return Err("the engine ended without an answer".into()),
        }
    }
}
