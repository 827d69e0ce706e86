//! Requests for messages.

use rocmforge_client::wire::{ChatMessage, GenerateRequest, Prompt, SamplingOptions};
use serde_json::Value;

use crate::chat::{message, text_of};
use crate::failure::Failure;
use crate::generation::Wanted;
use crate::params::{Params, is_empty, refused};

/// Temperature of a request without one, as the API has it.
const TEMPERATURE: f32 = 1.0;

/// A request, read.
pub struct Asked {
    /// Whether the answer is streamed.
    pub stream: bool,
    /// The daemon's request.
    pub wanted: Wanted,
}

impl Asked {
    /// Reads a request for an answer.
    ///
    /// # Errors
    /// Status 400 with the field at fault.
    pub fn of_message(mut params: Params) -> Result<Self, Failure> {
        let (model, messages) = conversation(&mut params)?;
        let stream = params.flag("stream")?.unwrap_or(false);
        let max_tokens = params.whole("max_tokens", 1..=u32::MAX)?;
        let max_tokens = max_tokens.ok_or_else(|| params.refuse("max_tokens", "it is required"))?;
        let sampling = SamplingOptions {
            temperature: params.number("temperature", 0.0..=1.0)?.unwrap_or(TEMPERATURE),
            top_p: params.number("top_p", 0.0..=1.0)?.unwrap_or(1.0),
            top_k: params.whole("top_k", 0..=u32::MAX)?.unwrap_or(0),
            ..SamplingOptions::default()
        };
        let stop = params.stops("stop_sequences")?;
        params.only("service_tier", |tier| tier == "auto" || tier == "standard_only")?;
        params.drop_harmless(&["metadata", "inference_geo"]);
        params.only("diagnostics", is_empty)?;
        refuse_others(&mut params)?;
        params.finish()?;
        let mut request = GenerateRequest::new(&model, Prompt::Chat(messages));
        (request.max_tokens, request.sampling, request.stop) = (max_tokens, sampling, stop);
        Ok(Self { stream, wanted: Wanted { request, tokens: false, stop_text: true } })
    }

    /// Reads a request for the number of tokens: the daemon tells it with an answer's first token.
    ///
    /// # Errors
    /// As [`Asked::of_message`].
    pub fn of_count(mut params: Params) -> Result<Self, Failure> {
        let (model, messages) = conversation(&mut params)?;
        refuse_others(&mut params)?;
        params.finish()?;
        let mut request = GenerateRequest::new(&model, Prompt::Chat(messages));
        request.max_tokens = 1;
        Ok(Self { stream: false, wanted: Wanted { request, tokens: false, stop_text: false } })
    }
}

/// Model and messages, with the system's text as the first.
fn conversation(params: &mut Params) -> Result<(String, Vec<ChatMessage>), Failure> {
    let model = params.required_text("model")?;
    let list = params.required_list("messages")?;
    let mut messages = Vec::with_capacity(list.len() + 1);
    if let Some(system) = params.take("system") {
        messages.push(message("system", text_of("system", system)?));
    }
    for (number, value) in list.into_iter().enumerate() {
        messages.push(one_message(number, value)?);
    }
    if messages.last().is_some_and(|last| last.role == "assistant") {
        let reason = "the last one is the assistant's, and beginnings of answers cannot be honoured here";
        return Err(params.refuse("messages", reason));
    }
    Ok((model, messages))
}

/// Fields that ask for abilities which neither gateway nor daemon has.
fn refuse_others(params: &mut Params) -> Result<(), Failure> {
    params.only("thinking", |thinking| thinking["type"] == "disabled")?;
    params.only("tool_choice", |choice| choice["type"] == "none" || choice["type"] == "auto")?;
    params.only("speed", |speed| speed == "standard")?;
    for name in ["tools", "mcp_servers", "container", "context_management", "output_config"] {
        params.only(name, is_empty)?;
    }
    // Where the service keeps a prompt for later, which the daemon does anyway, and whose books the request is in.
    params.drop_harmless(&["cache_control", "user_profile_id", "workspace_id"]);
    Ok(())
}

fn one_message(number: usize, value: Value) -> Result<ChatMessage, Failure> {
    let mut params = Params::inside(&format!("messages[{number}]"), value)?;
    let role = params.required_text("role")?;
    if role != "user" && role != "assistant" {
        return Err(params.refuse("role", format!("{role:?} is neither \"user\" nor \"assistant\"")));
    }
    let place = params.full("content");
    let content = params.take("content").ok_or_else(|| refused(&place, "it is required"))?;
    let content = text_of(&place, content)?;
    params.finish()?;
    Ok(message(&role, content))
}
