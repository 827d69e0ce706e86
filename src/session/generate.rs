//! Checks token requests, submits them and streams the answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_client::wire::{
    self, EXT_END_ACCEPTED, EXT_END_DRAFTED, EXT_END_DROPPED, EXT_END_EMBEDDING, EXT_END_LOADED_BYTES,
    EXT_END_RELEVANCE, EXT_END_REUSED, EXT_END_SESSION, EXT_END_TENSORS_FOUND, EXT_END_TENSORS_LOADED,
    EXT_ITEM_REASONING, ErrorCode, GenerateEnd, GenerateItem, GenerateRequest, SamplingOptions, TopToken,
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_util::sync::CancellationToken;

use super::continued::Continued;
use super::error::{Failure, failure, of_job};
use super::responder::Responder;
use super::service::random;
use super::steering::Asked;
use super::{Call, drafting, embedding, prompt};
use crate::model::store::Lease;
use crate::scheduler::{
    Event, Job, JobError, Outcome, Sampling, SequenceId, Steering, StopReason, TokenBatch,
};

/// Highest temperature: beyond it all tokens are equally likely.
const TEMPERATURE_MAX: f32 = 100.0;

/// Answers one request: items as tokens arrive, then the end of the stream.
pub(super) async fn run(
    call: &Call,
    responder: &Responder,
    request: GenerateRequest,
) -> Result<GenerateEnd, Failure> {
    let arrived = Instant::now();
    call.service().refuse_while_draining()?;
    let mut ticket = call.service().ticket(call.peer().uid)?;
    let sampling = sampling(&request.sampling)?;
    if request.stop.iter().any(String::is_empty) {
        return Err(failure(
            ErrorCode::InvalidArgument,
            "a stop text is empty and would end the answer at once: leave it out",
        ));
    }
    let timeout = (request.timeout_ms > 0).then(|| Duration::from_millis(request.timeout_ms.into()));
    let deadline = timeout.and_then(|timeout| arrived.checked_add(timeout));

    let steering = Asked::of(&request)?;
    let mut session = Continued::begin(call, &request)?;
    let (priority, shift) = (request.priority(), request.context_shift());
    if session.is_some() && shift.is_some() {
        let text = "a session keeps all its tokens, and a context shift drops some: leave one of them out";
        return Err(failure(ErrorCode::InvalidArgument, text));
    }
    let scores = request.scores().map_err(|error| failure(ErrorCode::InvalidArgument, &error.to_string()))?;
    if session.is_some() && scores.is_some() {
        let text = "a session's earlier tokens are known, and scoring computes all: leave one of them out";
        return Err(failure(ErrorCode::InvalidArgument, text));
    }
    let wanted = embedding::Wanted::of(&request)?;
    if wanted.is_some() && (session.is_some() || scores.is_some() || shift.is_some()) {
        let text = "an embedding or a relevance is of one prompt alone: leave out the session, the scores and the context shift";
        return Err(failure(ErrorCode::InvalidArgument, text));
    }
    let ranks = matches!(wanted, Some(embedding::Wanted::Relevance(_)));
    let extras = prompt::extras(&request)?;
    let (marks, drafts, alike) = (request.marks(), request.drafts(), request.alike());
    let GenerateRequest { model, prompt, max_tokens, stop, ignore_eog, .. } = request;
    let engine = &call.service().engine;
    let id = engine.new_sequence_id();
    let stopped = ticket.becomes(id, &model, arrived);
    let prepare = async {
        let earlier = session.as_ref().map(|session| session.earlier(&model));
        let mut valid = match &wanted {
            Some(embedding::Wanted::Relevance(document)) => {
                prompt::pair(call, model.clone(), prompt, document.clone()).await?
            }
            _ => prompt::prepare(call, model.clone(), prompt, extras, max_tokens, earlier).await?,
        };
        if wanted.is_none() {
            embedding::refuse_answers(valid.lease.model())?;
        }
        if let Some(session) = &mut session {
            session.asked(&mut valid)?;
        }
        if let Some(restores) = call.service().restores.get() {
            restores.bring(engine, call.peer().uid, valid.lease.model(), &valid.prompt).await;
        }
        let pooler = match &wanted {
            Some(wanted) => Some(embedding::pooler(call, &valid.lease, wanted).await?),
            None => None,
        };
        let steering = match pooler {
            // Nothing is drawn.
            Some(_) => Steering::default(),
            None => steering.for_model(call, valid.lease.model()).await?,
        };
        let draft_model = match wanted {
            Some(_) => None,
            None => drafting::model_for(call, &model, valid.lease.model()).await,
        };
        Ok((valid, steering, pooler, draft_model))
    };
    let (valid, steering, pooler, draft_model) = before_the_job(call, &stopped, deadline, prepare).await?;

    let (sender, mut events) = unbounded_channel();
    let first = First { prompt_ids: valid.prompt.clone(), in_reasoning: valid.in_reasoning };
    let marks = if marks { valid.lease.model().tokenizer.marks() } else { Vec::new() };
    let seed = sampling.seed;
    let job = |credit| Job {
        id,
        uid: call.peer().uid,
        connection: call.connection.number,
        priority,
        shift,
        scores: scores.map(u32::from),
        embedding: pooler,
        model: Arc::clone(valid.lease.model()),
        prompt: valid.prompt,
        max_tokens: if wanted.is_some() { 1 } else { valid.max_tokens },
        context_tokens: valid.context_tokens,
        drafts: if draft_model.is_some() && drafts == 0 { drafting::DRAFTED } else { drafts.into() },
        draft_model: draft_model.as_ref().map(|lease| Arc::clone(lease.model())),
        alike: alike.into(),
        sampling,
        steering,
        marks,
        stop,
        ignore_eog,
        deadline,
        arrived,
        // The item that has the prompt's ids alone takes one.
        credit: if scores.is_some() { u32::saturating_sub(credit, 1) } else { credit },
        events: sender,
    };
    call.control.submit(id, |credit| engine.submit(job(credit))).map_err(|error| of_job(&error))?;
    ticket.submitted();
    let lease = Arc::new(valid.lease);
    let answered = async {
        let outcome = stream(call, responder, id, &stopped, first, session.as_mut(), &mut events).await?;
        check_whole(call, Arc::clone(&lease)).await?;
        let tokens = session.map(|session| session.commit(lease.model(), &outcome)).transpose()?;
        Ok(end(outcome, seed, tokens.unwrap_or(0), ranks))
    };
    let answered: Result<GenerateEnd, Failure> = answered.await;
    let (uid, request) = (call.peer().uid, id.0);
    match &answered {
        Ok(_) => tracing::debug!(name: "answered", uid, request, model, "answered a request"),
        Err(error) => {
            if let Some(untold) = call.service().may_log(call.connection.peer.real_uid()) {
                let (code, text) = (error.code, &error.message);
                tracing::info!(name: "failed", uid, request, model, code, untold, error = text, "a request failed");
            }
        }
    }
    if answered.is_err() {
        call.note_poison(lease).await;
    }
    answered
}

/// A request that its client did not cancel on its stream.
fn cancelled_elsewhere() -> Failure {
    failure(ErrorCode::Cancelled, "cancelled by an administrator, or by another connection of the same user")
}

/// Runs `prepare` until it ends, somebody cancels the request, or the deadline passes.
async fn before_the_job<T>(
    call: &Call,
    stopped: &CancellationToken,
    deadline: Option<Instant>,
    prepare: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let passed = async {
        match deadline {
            Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        result = prepare => result,
        () = call.control.cancel.cancelled() => Err(failure(ErrorCode::Cancelled, "cancelled")),
        () = stopped.cancelled() => Err(cancelled_elsewhere()),
        () = passed => Err(failure(ErrorCode::DeadlineExceeded, "the deadline passed while the prompt was prepared")),
    }
}

fn sampling(options: &SamplingOptions) -> Result<Sampling, Failure> {
    let range = |name: &str, value: f32, max: f32| {
        if (0.0..=max).contains(&value) {
            return Ok(value); // NaN is in no range
        }
        Err(failure(ErrorCode::InvalidArgument, &format!("{name} = {value} is not in 0..={max}")))
    };
    let top_logprobs_max = wire::limits::TOP_LOGPROBS_MAX as u32;
    if options.top_logprobs > top_logprobs_max {
        let text = format!("top_logprobs = {} is not in 0..={top_logprobs_max}", options.top_logprobs);
        return Err(failure(ErrorCode::InvalidArgument, &text));
    }
    Ok(Sampling {
        temperature: range("temperature", options.temperature, TEMPERATURE_MAX)?,
        top_k: options.top_k,
        top_p: range("top_p", options.top_p, 1.0)?,
        min_p: range("min_p", options.min_p, 1.0)?,
        seed: options.seed.unwrap_or_else(random),
        top_logprobs: options.top_logprobs,
    })
}

/// Sends the engine's events until the last one. The engine always sends a last event, also after a cancel.
async fn stream(
    call: &Call,
    responder: &Responder,
    id: SequenceId,
    stopped: &CancellationToken,
    mut first: First,
    mut session: Option<&mut Continued>,
    events: &mut UnboundedReceiver<Event>,
) -> Result<Outcome, Failure> {
    let engine = &call.service().engine;
    let (mut cancelled, mut stopping) = (false, false);
    let mut unsent = None;
    loop {
        let event = tokio::select! {
            biased;
            () = call.control.cancel.cancelled(), if !cancelled => {
                cancelled = true;
                engine.cancel(id);
                continue;
            }
            // It may have come before the engine had the sequence.
            () = stopped.cancelled(), if !stopping => {
                stopping = true;
                engine.cancel(id);
                continue;
            }
            event = events.recv() => event,
        };
        match event {
            // After a send failed, the remaining tokens are discarded.
            Some(Event::Tokens(_)) if unsent.is_some() => {}
            Some(Event::Tokens(batch)) => {
                if let Some(session) = &mut session {
                    session.answered(&batch);
                }
                if batch.ids.is_empty() && !first.prompt_ids.is_empty() {
                    // The ids alone may take the whole frame.
                    let ids = item(TokenBatch::default(), std::mem::take(&mut first));
                    if let Err(error) = responder.first_item(&ids).await {
                        engine.cancel(id);
                        unsent = Some(error);
                        continue;
                    }
                }
                let item = item(batch, std::mem::take(&mut first));
                let sent = if item.prompt_ids.is_empty() {
                    responder.item(&item)
                } else {
                    responder.first_item(&item).await
                };
                if let Err(error) = sent {
                    engine.cancel(id);
                    unsent = Some(error);
                }
            }
            Some(Event::Done(outcome)) => match unsent {
                Some(error) => return Err(error),
                None if first.prompt_ids.is_empty() => return Ok(outcome),
                None => {
                    responder.first_item(&item(TokenBatch::default(), first)).await?;
                    return Ok(outcome);
                }
            },
            Some(Event::Failed(JobError::Cancelled)) if !cancelled && unsent.is_none() => {
                return Err(cancelled_elsewhere());
            }
            Some(Event::Failed(error)) => return Err(unsent.unwrap_or_else(|| of_job(&error))),
            None => return Err(failure(ErrorCode::Internal, "the engine ended without an answer")),
        }
    }
}

/// Refuses an answer if the model's file changed under the mapping: its tokens may come from mixed data.
async fn check_whole(call: &Call, lease: Arc<Lease>) -> Result<(), Failure> {
    if lease.model().files.are_as_mapped() {
        return Ok(());
    }
    call.blocking(move |_| {
        let files = &lease.model().files;
        files.check_poison().and_then(|()| files.check_unchanged()).map_err(|error| of_job(&error.into()))
    })
    .await
}

/// Values that only the first item has.
#[derive(Debug, Default)]
struct First {
    prompt_ids: Vec<u32>,
    /// Whether the prompt ends with the begin mark of a reasoning.
    in_reasoning: bool,
}

fn item(batch: TokenBatch, first: First) -> GenerateItem {
    let logprobs = batch.logprobs.into_iter().map(|token| wire::TokenLogprob {
        logprob: token.logprob,
        top: token.top.into_iter().map(|(id, logprob)| TopToken { id, logprob }).collect(),
    });
    GenerateItem {
        ids: batch.ids,
        text: batch.text,
        logprobs: logprobs.collect(),
        prompt_ids: first.prompt_ids,
        ext: wire::number_ext([(EXT_ITEM_REASONING, first.in_reasoning.into())]),
    }
}

fn end(outcome: Outcome, seed: u64, session_tokens: u64, ranks: bool) -> GenerateEnd {
    let mut ext = wire::number_ext([
        (EXT_END_REUSED, outcome.reused_tokens.into()),
        (EXT_END_SESSION, session_tokens),
        (EXT_END_DROPPED, outcome.dropped_tokens.into()),
        (EXT_END_DRAFTED, outcome.drafted_tokens.into()),
        (EXT_END_ACCEPTED, outcome.accepted_tokens.into()),
        (EXT_END_TENSORS_FOUND, outcome.lookups.hits),
        (EXT_END_TENSORS_LOADED, outcome.lookups.loads),
        (EXT_END_LOADED_BYTES, outcome.lookups.load_bytes),
    ]);
    if let Some(numbers) = &outcome.embedding {
        let key = if ranks { EXT_END_RELEVANCE } else { EXT_END_EMBEDDING };
        ext.push((key, numbers.iter().flat_map(|number| number.to_le_bytes()).collect()));
    }
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    GenerateEnd {
        stop_reason: match outcome.reason {
            StopReason::EndOfGeneration => wire::StopReason::EndOfGeneration,
            StopReason::MaxTokens => wire::StopReason::MaxTokens,
            StopReason::ContextFull => wire::StopReason::ContextFull,
            StopReason::StopText => wire::StopReason::StopText,
        },
        text: outcome.text,
        usage: wire::Usage {
            prompt_tokens: outcome.prompt_tokens,
            generated_tokens: outcome.generated_tokens,
        },
        timings: wire::Timings {
            queue_us: us(outcome.queue),
            load_us: us(outcome.load),
            prefill_us: us(outcome.prefill),
            decode_us: us(outcome.decode),
        },
        seed,
        ext,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> SamplingOptions {
        SamplingOptions { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: Some(7), top_logprobs: 0 }
    }

    #[test]
    fn sampling_out_of_range_is_refused_by_name() {
        assert_eq!(sampling(&options()).map(|s| s.seed), Ok(7));
        type Change = fn(&mut SamplingOptions);
        let bad: [(&str, Change); 5] = [
            ("temperature", |o| o.temperature = -0.1),
            ("temperature", |o| o.temperature = f32::NAN),
            ("top_p", |o| o.top_p = 1.5),
            ("min_p", |o| o.min_p = f32::INFINITY),
            ("top_logprobs", |o| o.top_logprobs = 21),
        ];
        for (name, change) in bad {
            let mut options = options();
            change(&mut options);
            let error = sampling(&options).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidArgument as u16);
            assert!(error.message.starts_with(name), "{}", error.message);
        }
    }

    #[test]
    fn a_seed_left_out_is_random() {
        let none = SamplingOptions { seed: None, ..options() };
        let seeds: Vec<_> = (0..4).map(|_| sampling(&none).map(|s| s.seed)).collect();
        assert!(seeds.windows(2).any(|pair| pair[0] != pair[1]), "{seeds:?}");
    }
}
