//! Chat completions.

use std::sync::Arc;
use std::time::Instant;

use hyper::Response;
use rocmforge_client::random_request_id;
use rocmforge_client::wire::{ChatMessage, GenerateRequest, Prompt, limits};
use serde_json::{Value, json};

use super::{Common, DONE, event, finish_reason, logprobs, usage};
use crate::Gateway;
use crate::chat::{message, text_of};
use crate::clock::unix_seconds;
use crate::events::{self, Events};
use crate::failure::Failure;
use crate::generation::{Ended, Piece, Running, Wanted};
use crate::params::{Params, is_empty, refused};
use crate::reply::{Body, json};
use crate::steering::{Steering, response_format};

/// Most likely tokens that the daemon reports.
const TOP_MAX: u32 = limits::TOP_LOGPROBS_MAX as u32;

/// `POST /v1/chat/completions`
///
/// # Errors
/// Status 400 with the field at fault; errors of the daemon.
pub async fn chat_completions(
    gateway: &Arc<Gateway>,
    params: Params,
    since: Instant,
) -> Result<Response<Body>, Failure> {
    let asked = Asked::take(params)?;
    let mut running = Running::start(gateway, asked.wanted, since).await?;
    let chunks = Chunks {
        id: format!("chatcmpl-{:032x}", random_request_id()),
        created: unix_seconds(),
        model: asked.model,
        top: asked.top,
        include_usage: asked.include_usage,
    };
    if asked.stream {
        return Ok(events::response(running, chunks));
    }
    let (piece, ended) = running.whole().await?;
    Ok(json(&chunks.whole(&piece, &ended)))
}

/// A request, read.
struct Asked {
    model: String,
    stream: bool,
    include_usage: bool,
    /// Alternatives of each token that are wanted; `None` without log-probabilities.
    top: Option<usize>,
    wanted: Wanted,
}

impl Asked {
    fn take(mut params: Params) -> Result<Self, Failure> {
        let common = Common::take(&mut params)?;
        let messages = params.required_list("messages")?;
        let messages = messages.into_iter().enumerate().map(|(number, value)| one_message(number, value));
        let messages = messages.collect::<Result<Vec<_>, _>>()?;
        let (newer, older) =
            (params.whole("max_completion_tokens", 1..=u32::MAX)?, params.whole("max_tokens", 1..=u32::MAX)?);
        let top = top_logprobs(&mut params)?;
        let steering = Steering { form: response_format(&mut params)?, penalties: Some(common.penalties) };
        refuse_others(&mut params)?;
        params.finish()?;
        let mut request = GenerateRequest::new(&common.model, Prompt::Chat(messages));
        request.max_tokens = newer.or(older).unwrap_or(0);
        request.sampling = common.sampling;
        request.sampling.top_logprobs = top.map_or(0, |top| top.max(1));
        request.stop = common.stop;
        let request = steering.fill(request);
        Ok(Self {
            model: common.model,
            stream: common.stream,
            include_usage: common.include_usage,
            top: top.map(|top| top as usize),
            wanted: Wanted { request, tokens: top.is_some(), stop_text: false },
        })
    }
}

/// Alternatives of each token; `None` without `logprobs`.
fn top_logprobs(params: &mut Params) -> Result<Option<u32>, Failure> {
    let wanted = params.flag("logprobs")?.unwrap_or(false);
    let top = params.whole("top_logprobs", 0..=TOP_MAX)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(params.refuse("top_logprobs", "it needs `logprobs: true`")),
    }
}

/// Fields that ask for abilities which neither gateway nor daemon has.
fn refuse_others(params: &mut Params) -> Result<(), Failure> {
    params.only("tool_choice", |choice| choice == "none" || choice == "auto")?;
    params.only("function_call", |call| call == "none" || call == "auto")?;
    params.only("modalities", |modalities| *modalities == json!(["text"]))?;
    ["tools", "functions", "audio", "prediction"].into_iter().try_for_each(|name| params.only(name, is_empty))
}

fn one_message(number: usize, value: Value) -> Result<ChatMessage, Failure> {
    let mut params = Params::inside(&format!("messages[{number}]"), value)?;
    let role = params.required_text("role")?;
    let role = match role.as_str() {
        "system" | "user" | "assistant" => role.as_str(),
        // The newer name of the system's message; chat templates know the older one.
        "developer" => "system",
        other => {
            let reason = format!("{other:?} cannot be honoured here: system, developer, user or assistant");
            return Err(params.refuse("role", reason));
        }
    };
    let place = params.full("content");
    let content = params.take("content").ok_or_else(|| refused(&place, "it is required"))?;
    let content = text_of(&place, content)?;
    // Fields of answers, which clients send back with them.
    for name in ["refusal", "tool_calls", "function_call", "audio"] {
        params.only(name, is_empty)?;
    }
    params.drop_harmless(&["annotations"]);
    params.finish()?;
    Ok(message(role, content))
}

/// The events of an answer, and its whole form.
struct Chunks {
    id: String,
    created: u64,
    model: String,
    top: Option<usize>,
    include_usage: bool,
}

impl Chunks {
    fn whole(&self, piece: &Piece, ended: &Ended) -> Value {
        json!({
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [{
                "index": 0,
                "message": {"role": "assistant", "content": piece.text, "refusal": null},
                "logprobs": self.top.map(|top| logprobs::of_chat(&piece.tokens, top)),
                "finish_reason": finish_reason(ended.reason),
            }],
            "usage": usage(ended),
        })
    }

    fn chunk(&self, choices: Value, usage: Option<Value>) -> String {
        let mut chunk = json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        });
        if self.include_usage {
            chunk["usage"] = usage.unwrap_or(Value::Null);
        }
        event(&chunk)
    }

    fn delta(&self, delta: Value, logprobs: Option<Value>, finish_reason: Option<&str>) -> String {
        let choice =
            json!({"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason});
        self.chunk(json!([choice]), None)
    }
}

impl Events for Chunks {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn begin(&mut self, _prompt_tokens: usize) -> String {
        self.delta(json!({"role": "assistant", "content": ""}), None, None)
    }

    fn piece(&mut self, piece: &Piece) -> String {
        let logprobs = self.top.map(|top| logprobs::of_chat(&piece.tokens, top));
        self.delta(json!({"content": piece.text}), logprobs, None)
    }

    fn end(&mut self, ended: &Ended) -> String {
        let mut events = self.delta(json!({}), None, Some(finish_reason(ended.reason)));
        if self.include_usage {
            events += &self.chunk(json!([]), Some(usage(ended)));
        }
        events + DONE
    }

    fn failed(&mut self, failure: &Failure) -> String {
        event(&failure.body(crate::api::Api::OpenAi))
    }
}
