//! `/api/chat` and `/api/generate`.

use std::sync::Arc;
use std::time::Instant;

use hyper::Response;
use rocmforge_client::calls::{Call, Event, Message, Part, Parts};
use rocmforge_client::random_request_id;
use rocmforge_client::wire::{
    AnswerForm, ChatMessage, GenerateRequest, InfoRequest, LoadRequest, Prompt, StopReason,
};
use serde_json::{Value, json};

use super::options::Chosen;
use super::untagged;
use crate::Gateway;
use crate::chat::{Chat, cut, function_calls, function_tool, message, tools};
use crate::clock::rfc3339;
use crate::events::{self, Events};
use crate::failure::Failure;
use crate::generation::{Ended, Piece, Reader, Running, Wanted};
use crate::models::shown;
use crate::params::{Params, is_empty};
use crate::reply::{Body, json};
use crate::steering::ollama_format;
use crate::thinking::{Effort, Thinking};

/// `POST /api/chat`
///
/// # Errors
/// Status 400 with the field at fault; errors of the daemon.
pub async fn chat(
    gateway: &Arc<Gateway>,
    mut params: Params,
    since: Instant,
) -> Result<Response<Body>, Failure> {
    let mut common = Common::take(&mut params)?;
    let messages = match params.take("messages") {
        Some(Value::Array(list)) => list,
        None => Vec::new(),
        Some(_) => return Err(params.refuse("messages", "it is not a list")),
    };
    let mut chat = Chat { tools: tools(&mut params, function_tool)?, ..Chat::default() };
    common.form = chat.take_form(common.form.take(), "format")?;
    chat.thinking = think(&mut params)?;
    params.finish()?;
    let messages = messages.into_iter().enumerate().map(|(number, value)| one_message(number, value));
    chat.messages = messages.collect::<Result<Vec<_>, _>>()?;
    if chat.messages.is_empty() {
        return load(gateway, &common, Kind::Chat).await;
    }
    let (request, reader) = chat.request(gateway, &common.model).await?;
    common.answer(gateway, request, Some(reader), Kind::Chat, since).await
}

/// `POST /api/generate`
///
/// # Errors
/// Status 400 with the field at fault; errors of the daemon.
pub async fn generate(
    gateway: &Arc<Gateway>,
    mut params: Params,
    since: Instant,
) -> Result<Response<Body>, Failure> {
    let common = Common::take(&mut params)?;
    let text = params.text("prompt")?.unwrap_or_default();
    let system = params.text("system")?.filter(|system| !system.is_empty());
    let raw = params.flag("raw")?.unwrap_or(false);
    let thinking = think(&mut params)?;
    for name in ["suffix", "template", "context", "images"] {
        params.only(name, is_empty)?;
    }
    if raw && system.is_some() {
        return Err(params.refuse("system", "a raw prompt has no system message"));
    }
    params.finish()?;
    if text.is_empty() && system.is_none() {
        return load(gateway, &common, Kind::Generate).await;
    }
    // Without a template of its own, a model gets the bare prompt, as Ollama's default template gives it.
    if raw || !shown(gateway, &common.model).await?.chat_template {
        if system.is_some() {
            return Err(Failure::invalid("system: the model has no chat template").about("system"));
        }
        if thinking.is_some_and(|thinking| thinking.effort != Effort::Off) {
            return Err(Failure::invalid("think: it needs the model's chat template").about("think"));
        }
        let request = GenerateRequest::new(&common.model, Prompt::Text(text));
        return common.answer(gateway, request, None, Kind::Generate, since).await;
    }
    let system = system.map(|system| message("system", system));
    let messages: Vec<Message> = system.into_iter().chain([message("user", text)]).collect();
    if thinking.is_some() {
        let chat = Chat { messages, thinking, ..Chat::default() };
        let (request, reader) = chat.request(gateway, &common.model).await?;
        return common.answer(gateway, request, Some(reader), Kind::Generate, since).await;
    }
    let message =
        |Message { role, content, .. }: Message| ChatMessage { role, content: content.unwrap_or_default() };
    let prompt = Prompt::Chat(messages.into_iter().map(message).collect());
    let request = GenerateRequest::new(&common.model, prompt);
    common.answer(gateway, request, None, Kind::Generate, since).await
}

/// How much the model shall reason: yes, no, or a degree.
fn think(params: &mut Params) -> Result<Option<Thinking>, Failure> {
    const FIELD: &str = "think";
    let effort = match params.take(FIELD) {
        None => return Ok(None),
        Some(Value::Bool(false)) => Effort::Off,
        Some(Value::Bool(true)) => Effort::On,
        Some(value) => match value.as_str() {
            Some("low") => Effort::Low,
            Some("medium") => Effort::Medium,
            Some("high") => Effort::High,
            _ => return Err(params.refuse(FIELD, "it is none of true, false, low, medium and high")),
        },
    };
    Ok(Some(Thinking { field: FIELD, effort }))
}

/// A request without a prompt maps the model, so that the next one need not wait for it.
async fn load(gateway: &Gateway, common: &Common, kind: Kind) -> Result<Response<Body>, Failure> {
    if common.unload {
        let reason = "0 with an empty prompt unloads a model, which `rocmforge-client unload` does";
        return Err(Failure::invalid(format!("keep_alive: {reason}")).about("keep_alive"));
    }
    let (name, request_id) = (common.model.clone(), random_request_id());
    gateway.client.call(&LoadRequest { name, by_descriptor: false, request_id, ext: vec![] }).await?;
    let mut value = Lines::new(common.model.clone(), kind).line(&Piece::default(), true);
    value["done_reason"] = json!("load");
    Ok(json(&value))
}

fn one_message(number: usize, value: Value) -> Result<Message, Failure> {
    let mut params = Params::inside(&format!("messages[{number}]"), value)?;
    let role = params.required_text("role")?;
    if !["system", "user", "assistant", "tool"].contains(&role.as_str()) {
        let reason = format!("{:?} cannot be honoured here: system, user, assistant or tool", cut(&role));
        return Err(params.refuse("role", reason));
    }
    let mut message = message(&role, params.text("content")?.unwrap_or_default());
    match role.as_str() {
        "assistant" => {
            message.calls = function_calls(&mut params)?;
            message.reasoning = params.text("thinking")?.filter(|text| !text.is_empty());
            if message.content.as_deref() == Some("") && !message.calls.is_empty() {
                message.content = None;
            }
        }
        "tool" => {
            let named = params.text("tool_name")?;
            message.tool = named.or(params.text("name")?);
            message.call_id = params.text("tool_call_id")?;
        }
        _ => {}
    }
    for name in ["images", "tool_calls", "thinking", "tool_name"] {
        params.only(name, is_empty)?;
    }
    params.finish()?;
    Ok(message)
}

/// The fields that both requests have.
struct Common {
    model: String,
    stream: bool,
    unload: bool,
    form: Option<AnswerForm>,
    options: Chosen,
}

impl Common {
    fn take(params: &mut Params) -> Result<Self, Failure> {
        let model = untagged(&params.required_text("model")?).to_owned();
        let stream = params.flag("stream")?.unwrap_or(true);
        // The daemon keeps models as its own rules say. Ollama's time changes no answer.
        let unload = params.take("keep_alive").is_some_and(|time| time == 0 || time == "0" || time == "0s");
        let form = ollama_format(params)?;
        for name in ["logprobs", "top_logprobs"] {
            params.only(name, is_empty)?;
        }
        let options = Chosen::take(params)?;
        Ok(Self { model, stream, unload, form, options })
    }

    async fn answer(
        self,
        gateway: &Arc<Gateway>,
        request: GenerateRequest,
        reader: Option<Reader>,
        kind: Kind,
        since: Instant,
    ) -> Result<Response<Body>, Failure> {
        self.check_context(gateway).await?;
        let request = self.options.fill(request, self.form);
        let wanted = Wanted { request, tokens: false, stop_text: false, reader, echo: None };
        let mut running = Running::start(gateway, wanted, since).await?;
        let mut lines = Lines::new(self.model, kind);
        if self.stream {
            return Ok(events::response(running, lines));
        }
        let (piece, ended) = running.whole().await?;
        Ok(json(&lines.last(&piece, &ended)))
    }

    /// Every request has the model's whole context, so a smaller `num_ctx` is satisfied.
    async fn check_context(&self, gateway: &Gateway) -> Result<(), Failure> {
        let Some(wanted) = self.options.context else { return Ok(()) };
        let info = gateway.client.call(&InfoRequest::default()).await?;
        let has = shown(gateway, &self.model).await?.context_length.min(info.limits.context_tokens_max);
        if wanted <= has {
            return Ok(());
        }
        let reason = format!("options.num_ctx: {wanted} tokens, but the model has {has} here");
        Err(Failure::invalid(reason).about("options.num_ctx"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Chat,
    Generate,
}

/// The message of parts of an answer. Arguments are an object in this API, so calls that were cut are left out.
fn said(parts: Vec<Part>) -> Value {
    let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for part in parts {
        match part {
            Part::Text(more) => text.push_str(&more),
            Part::Reasoning(more) => reasoning.push_str(&more),
            Part::Call(Call { name, arguments, .. }) => {
                // The parser found that they are an object.
                let arguments: Value = serde_json::from_str(&arguments).unwrap_or_else(|_| json!({}));
                calls.push(json!({"function": {"name": name, "arguments": arguments}}));
            }
            Part::Cut(_) => {}
        }
    }
    let mut message = json!({"role": "assistant", "content": text});
    if !reasoning.is_empty() {
        message["thinking"] = json!(reasoning);
    }
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
    }
    message
}

/// The lines of an answer, and its whole form.
struct Lines {
    model: String,
    kind: Kind,
    /// The parts that are not told yet: a call is told once it is whole.
    parts: Parts,
}

impl Lines {
    fn new(model: String, kind: Kind) -> Self {
        Self { model, kind, parts: Parts::default() }
    }

    fn line(&mut self, piece: &Piece, done: bool) -> Value {
        let mut line = json!({"model": self.model, "created_at": rfc3339(), "done": done});
        match self.kind {
            Kind::Chat => {
                piece.parts.iter().for_each(|part| self.parts.push(part));
                line["message"] = said(self.parts.take());
            }
            Kind::Generate if piece.parts.is_empty() => line["response"] = json!(piece.text),
            // Reasoning was asked for or turned off, so a reader cut the text.
            Kind::Generate => {
                let (text, reasoning) = piece.texts();
                line["response"] = json!(text);
                if !reasoning.is_empty() {
                    line["thinking"] = json!(reasoning);
                }
            }
        }
        line
    }

    /// The last line, or the only one. Times are in nanoseconds.
    fn last(&mut self, piece: &Piece, ended: &Ended) -> Value {
        let times = &ended.end.timings;
        let ns = |us: u64| us.saturating_mul(1000);
        let total = times.queue_us + times.load_us + times.prefill_us + times.decode_us;
        let mut line = self.line(piece, true);
        line["done_reason"] = match ended.reason {
            StopReason::EndOfGeneration | StopReason::StopText => json!("stop"),
            StopReason::MaxTokens | StopReason::ContextFull => json!("length"),
        };
        line["total_duration"] = json!(ns(total));
        line["load_duration"] = json!(ns(times.load_us));
        line["prompt_eval_count"] = json!(ended.usage.prompt_tokens);
        line["prompt_eval_duration"] = json!(ns(times.prefill_us));
        line["eval_count"] = json!(ended.usage.generated_tokens);
        line["eval_duration"] = json!(ns(times.decode_us));
        line
    }
}

impl Events for Lines {
    const CONTENT_TYPE: &'static str = "application/x-ndjson";

    fn begin(&mut self, _prompt_tokens: usize) -> String {
        String::new()
    }

    fn piece(&mut self, piece: &Piece) -> String {
        let of_calls = |part: &Event| matches!(part, Event::CallBegin { .. } | Event::Arguments(_));
        if self.kind == Kind::Chat && piece.parts.iter().all(of_calls) {
            piece.parts.iter().for_each(|part| self.parts.push(part));
            return String::new();
        }
        format!("{}\n", self.line(piece, false))
    }

    fn end(&mut self, ended: &Ended) -> String {
        format!("{}\n", self.last(&Piece::default(), ended))
    }

    fn failed(&mut self, failure: &Failure) -> String {
        format!("{}\n", failure.body(crate::api::Api::Ollama))
    }
}
