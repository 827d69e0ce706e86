//! Shared by the engine's benches: runs requests and reports their times.

#![allow(dead_code)] // each bench uses its own part

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge::model::Model;
use rocmforge::scheduler::{EngineHandle, Event, Job, Outcome, Sampling, Steering};
use tokio::sync::mpsc::error::TryRecvError;
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
    /// Tokens of all sequences a second, from when the last one has its first token until one has its last. No prompt comes in then.
    /// Zero if there is no such time.
    pub together_tok_s: f64,
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
    let answers = wait(&mut running)?;
    let mut times = Times { together_tok_s: together(&answers), ..Times::default() };
    for Answer { outcome, .. } in answers {
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

/// A request's outcome, and when its tokens came.
struct Answer {
    outcome: Outcome,
    tokens: Vec<Instant>,
}

/// Waits for all answers. Looks for tokens every few microseconds: a thread for each sequence would take the processor from the engine.
fn wait(running: &mut [UnboundedReceiver<Event>]) -> Result<Vec<Answer>, Failure> {
    let mut answers: Vec<(Option<Outcome>, Vec<Instant>)> =
        running.iter().map(|_| (None, Vec::new())).collect();
    while answers.iter().any(|(outcome, _)| outcome.is_none()) {
        let now = Instant::now();
        for (events, (outcome, tokens)) in running.iter_mut().zip(&mut answers) {
            while outcome.is_none() {
                match events.try_recv() {
                    Ok(Event::Tokens(batch)) => tokens.extend(batch.ids.iter().map(|_| now)),
                    Ok(Event::Done(done)) => *outcome = Some(done),
                    Ok(Event::Failed(error)) => return Err(error.into()),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        return Err("the engine ended without an answer".into());
                    }
                }
            }
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok(answers
        .into_iter()
        .filter_map(|(outcome, tokens)| Some(Answer { outcome: outcome?, tokens }))
        .collect())
}

/// [`Times::together_tok_s`].
fn together(answers: &[Answer]) -> f64 {
    let begin = answers.iter().filter_map(|answer| answer.tokens.first()).max();
    let end = answers.iter().filter_map(|answer| answer.tokens.last()).min();
    let (Some(begin), Some(end)) = (begin, end) else { return 0.0 };
    let seconds = end.saturating_duration_since(*begin).as_secs_f64();
    let tokens =
        answers.iter().flat_map(|answer| &answer.tokens).filter(|at| *at > begin && *at <= end).count();
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}
