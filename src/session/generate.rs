//! Requests for tokens: checked here, run by the scheduler, streamed back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_client::wire::{
    self, ErrorCode, Ext, GenerateEnd, GenerateItem, GenerateRequest, Prompt, SamplingOptions, TopToken,
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::Call;
use super::answer::Answer;
use super::error::{Failure, failure, of_job, of_store, of_template};
use super::service::random;
use super::text::check_ids;
use crate::model::store::Lease;
use crate::model::template::{Message, SOURCE_BYTES_MAX, TemplateError, TemplateRequest};
use crate::model::tokenizer::{EncodeOptions, Tokenizer};
use crate::model::{ChatTemplate, Model};
use crate::scheduler::{Event, Job, Outcome, Sampling, StopReason, TokenBatch};

/// Highest temperature: beyond it every token is as likely as any other.
const TEMPERATURE_MAX: f32 = 100.0;

/// Bytes of the first item that are left for what is not the prompt's ids; with the largest frames `IDS_MAX` fit beside.
const FIRST_ITEM_BYTES: usize = 4096;

/// A request that was checked against the model and the limits.
struct ValidRequest {
    lease: Lease,
    prompt: Vec<u32>,
    max_tokens: u32,
    context_tokens: u32,
}

/// Answers one request: items as they come, then what ends the stream.
pub(super) async fn run(
    call: &Call,
    answer: &Answer,
    request: GenerateRequest,
) -> Result<GenerateEnd, Failure> {
    let arrived = Instant::now();
    call.service().admit()?;
    let mut ticket = call.service().ticket(call.peer().uid)?;
    let sampling = sampling(&request.sampling)?;
    if request.stop.iter().any(String::is_empty) {
        return Err(failure(
            ErrorCode::InvalidArgument,
            "an empty stop text would end every answer at once: leave it out",
        ));
    }
    let timeout = (request.timeout_ms > 0).then(|| Duration::from_millis(request.timeout_ms.into()));
    let deadline = timeout.and_then(|timeout| arrived.checked_add(timeout));

    let GenerateRequest { model, prompt, max_tokens, stop, ignore_eog, .. } = request;
    let name = model.clone();
    let prepare = call.blocking(move |call| prepare(call, &model, prompt, max_tokens));
    let valid = before_the_job(call, deadline, prepare).await?;

    let engine = &call.service().engine;
    let id = engine.new_sequence_id();
    let (sender, mut events) = unbounded_channel();
    let prompt_ids = valid.prompt.clone();
    let seed = sampling.seed;
    ticket.runs_as(id, &name);
    let job = |credit| Job {
        id,
        uid: call.peer().uid,
        model: Arc::clone(valid.lease.model()),
        prompt: valid.prompt,
        max_tokens: valid.max_tokens,
        context_tokens: valid.context_tokens,
        sampling,
        stop,
        ignore_eog,
        deadline,
        arrived,
        credit,
        events: sender,
    };
    call.control.submit(id, |credit| engine.submit(job(credit))).map_err(|error| of_job(&error))?;
    let outcome = stream(call, answer, id, prompt_ids, &mut events).await?;
    check_whole(call, valid.lease).await?;
    Ok(end(outcome, seed))
}

/// Preparation, unless the client or the clock is faster.
async fn before_the_job<T>(
    call: &Call,
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
        () = passed => Err(failure(ErrorCode::DeadlineExceeded, "the deadline passed while the prompt was being read")),
    }
}

/// Blocks: maps the model if it is not, turns the prompt into ids, checks everything against the model.
fn prepare(call: &Call, name: &str, prompt: Prompt, max_tokens: u32) -> Result<ValidRequest, Failure> {
    let service = call.service();
    let (lease, _) = service.store.acquire(call.peer().uid, name).map_err(|error| of_store(&error))?;
    let model = lease.model();
    let vocab = model.plan.dims.vocab;
    let prompt = prompt_ids(call, model, prompt)?;
    check_ids(&prompt, vocab)?;
    check_frame(&prompt, call.connection.limits.max_frame)?;
    if prompt.is_empty() {
        return Err(failure(
            ErrorCode::EmptyPrompt,
            "the prompt has no tokens: a model needs at least one to go on from",
        ));
    }
    let context_tokens = model.context_length.min(service.settings.context_tokens);
    let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    if prompt_tokens >= context_tokens {
        let (own, limit) = (model.context_length, service.settings.context_tokens);
        let text = format!(
            "the prompt has {prompt_tokens} tokens and the context {context_tokens} (the model's {own}, limits.context_tokens \
             {limit}), which leaves no room for an answer: shorten it or raise the limit"
        );
        let error = failure(ErrorCode::PromptTooLong, &text);
        return Err(error
            .with_detail("prompt_tokens", prompt_tokens)
            .with_detail("context_tokens", context_tokens));
    }
    let max_tokens = if max_tokens == 0 { u32::MAX } else { max_tokens };
    Ok(ValidRequest { lease, prompt, max_tokens, context_tokens })
}

/// The first item tells the prompt's ids, whole: refused before the work where it would not fit the client's frames.
fn check_frame(prompt: &[u32], payload_bytes_max: u32) -> Result<(), Failure> {
    let fit = (payload_bytes_max as usize).saturating_sub(FIRST_ITEM_BYTES) / size_of::<u32>();
    if prompt.len() <= fit {
        return Ok(());
    }
    let text = format!(
        "the prompt has {} tokens and the {payload_bytes_max} bytes of the connection's max_frame hold the ids of {fit}: \
         connect with a larger max_frame",
        prompt.len()
    );
    Err(failure(ErrorCode::LimitExceeded, &text))
}

/// Blocks, for a chat as long as its template takes.
fn prompt_ids(call: &Call, model: &Model, prompt: Prompt) -> Result<Vec<u32>, Failure> {
    let messages = match prompt {
        Prompt::Ids(ids) => return Ok(ids),
        Prompt::Text(text) => {
            return Ok(model
                .tokenizer
                .encode(&text, EncodeOptions { add_special: true, parse_special: false }));
        }
        Prompt::Chat(messages) => messages,
    };
    let template = match &model.chat_template {
        ChatTemplate::Source(source) => source,
        ChatTemplate::Absent => {
            let text = "the model's file has no chat template: send the prompt as text, in the form the model was trained on";
            return Err(failure(ErrorCode::NoChatTemplate, text));
        }
        ChatTemplate::TooLong { bytes } => {
            let limit = SOURCE_BYTES_MAX;
            return Err(of_template(&TemplateError::SourceTooLong { bytes: *bytes, limit }));
        }
    };
    let messages = messages.into_iter().map(|message| Message::new(message.role, message.content)).collect();
    let request = TemplateRequest::new(template.as_str(), messages).with_tokens_of(&model.tokenizer);
    let text = call.service().renderer.render(&request).map_err(|error| of_template(&error))?;
    Ok(rendered_ids(&model.tokenizer, &text))
}

/// Ids of a rendered conversation. Special tokens written out in it count. Where the vocabulary asks for a beginning of
/// sequence there is one, whether the template wrote it or not, and never two.
fn rendered_ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let mut ids = tokenizer.encode(text, EncodeOptions { add_special: false, parse_special: true });
    let added = tokenizer.encode("", EncodeOptions { add_special: true, parse_special: false });
    if let Some(bos) = tokenizer.bos().filter(|bos| added.first() == Some(bos) && ids.first() != Some(bos)) {
        ids.insert(0, bos);
    }
    ids
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

/// Sends what the engine reports until its last event. The engine always sends one, also after a cancel.
async fn stream(
    call: &Call,
    answer: &Answer,
    id: crate::scheduler::SequenceId,
    mut prompt_ids: Vec<u32>,
    events: &mut UnboundedReceiver<Event>,
) -> Result<Outcome, Failure> {
    let engine = &call.service().engine;
    let mut cancelled = false;
    let mut unsent = None;
    loop {
        let event = tokio::select! {
            biased;
            () = call.control.cancel.cancelled(), if !cancelled => {
                cancelled = true;
                engine.cancel(id);
                continue;
            }
            event = events.recv() => event,
        };
        match event {
            // Once something could not be sent, the rest is only waited for.
            Some(Event::Tokens(_)) if unsent.is_some() => {}
            Some(Event::Tokens(batch)) => {
                let item = item(batch, std::mem::take(&mut prompt_ids));
                let sent = if item.prompt_ids.is_empty() {
                    answer.item(&item)
                } else {
                    answer.first_item(&item).await
                };
                if let Err(error) = sent {
                    engine.cancel(id);
                    unsent = Some(error);
                }
            }
            Some(Event::Done(outcome)) => match unsent {
                Some(error) => return Err(error),
                None if prompt_ids.is_empty() => return Ok(outcome),
                None => {
                    answer.first_item(&item(TokenBatch::default(), prompt_ids)).await?;
                    return Ok(outcome);
                }
            },
            Some(Event::Failed(error)) => return Err(unsent.unwrap_or_else(|| of_job(&error))),
            None => return Err(failure(ErrorCode::Internal, "the engine ended without an answer")),
        }
    }
}

/// An answer made while the file changed under the mapping may be of no model at all: it does not count.
async fn check_whole(call: &Call, lease: Lease) -> Result<(), Failure> {
    call.blocking(move |_| {
        let file = &lease.model().file;
        file.check_poison().and_then(|()| file.check_unchanged()).map_err(|error| of_job(&error.into()))
    })
    .await
}

fn item(batch: TokenBatch, prompt_ids: Vec<u32>) -> GenerateItem {
    let logprobs = batch.logprobs.into_iter().map(|token| wire::TokenLogprob {
        logprob: token.logprob,
        top: token.top.into_iter().map(|(id, logprob)| TopToken { id, logprob }).collect(),
    });
    GenerateItem {
        ids: batch.ids,
        text: batch.text,
        logprobs: logprobs.collect(),
        prompt_ids,
        ext: Ext::new(),
    }
}

fn end(outcome: Outcome, seed: u64) -> GenerateEnd {
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
        ext: Ext::new(),
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
    fn a_prompt_whose_ids_do_not_fit_the_first_item_is_refused() {
        let fit = (65536 - FIRST_ITEM_BYTES) / 4;
        assert_eq!(check_frame(&vec![0; fit], 65536), Ok(()));
        let error = check_frame(&vec![0; fit + 1], 65536).unwrap_err();
        assert_eq!(error.code, ErrorCode::LimitExceeded as u16);
        let max = wire::limits::IDS_MAX;
        assert_eq!(
            check_frame(&vec![0; max], wire::PAYLOAD_BYTES_MAX),
            Ok(()),
            "never with the largest frames"
        );
    }

    #[test]
    fn a_seed_left_out_is_random() {
        let none = SamplingOptions { seed: None, ..options() };
        let seeds: Vec<_> = (0..4).map(|_| sampling(&none).map(|s| s.seed)).collect();
        assert!(seeds.windows(2).any(|pair| pair[0] != pair[1]), "{seeds:?}");
    }
}
