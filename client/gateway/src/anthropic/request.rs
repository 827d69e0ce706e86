//! Requests for messages.

use rocmforge_client::calls::{Call, Message, Tool};
use rocmforge_client::wire::{AnswerForm, SamplingOptions};
use serde_json::{Map, Value};

use crate::Gateway;
use crate::chat::{Chat, Choice, cut, message, text_of, text_part, tool, tools};
use crate::failure::Failure;
use crate::generation::Wanted;
use crate::params::{Params, is_empty, refused};
use crate::steering::{Steering, output_config};
use crate::thinking::{Effort, Thinking};

/// Temperature of a request without one, as the API has it.
const TEMPERATURE: f32 = 1.0;

/// A request, read.
pub struct Asked {
    pub model: String,
    /// Whether the answer is streamed.
    pub stream: bool,
    chat: Chat,
    max_tokens: u32,
    sampling: SamplingOptions,
    stop: Vec<String>,
    stop_text: bool,
    form: Option<AnswerForm>,
}

impl Asked {
    /// Reads a request for an answer.
    ///
    /// # Errors
    /// Status 400 with the field at fault.
    pub fn of_message(mut params: Params) -> Result<Self, Failure> {
        let (model, mut chat) = conversation(&mut params)?;
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
        let form = chat.take_form(output_config(&mut params)?, "output_config.format")?;
        refuse_others(&mut params)?;
        params.finish()?;
        Ok(Self { model, stream, chat, max_tokens, sampling, stop, stop_text: true, form })
    }

    /// Reads a request for the number of tokens: the daemon tells it with an answer's first token.
    ///
    /// # Errors
    /// As [`Asked::of_message`].
    pub fn of_count(mut params: Params) -> Result<Self, Failure> {
        let (model, chat) = conversation(&mut params)?;
        // The prompt does not say it.
        output_config(&mut params)?;
        refuse_others(&mut params)?;
        params.finish()?;
        let (sampling, stop) = (SamplingOptions::default(), Vec::new());
        Ok(Self { model, stream: false, chat, max_tokens: 1, sampling, stop, stop_text: false, form: None })
    }

    /// The daemon's request.
    ///
    /// # Errors
    /// As [`Chat::request`].
    pub async fn wanted(self, gateway: &Gateway) -> Result<Wanted, Failure> {
        let Self { model, chat, max_tokens, sampling, stop, stop_text, form, .. } = self;
        let (mut request, reader) = chat.request(gateway, &model).await?;
        (request.max_tokens, request.sampling, request.stop) = (max_tokens, sampling, stop);
        let request = Steering { form, ..Steering::default() }.fill(request);
        Ok(Wanted { request, tokens: false, stop_text, reader: Some(reader), echo: None })
    }
}

/// Model and chat, with the system's text as the first message.
fn conversation(params: &mut Params) -> Result<(String, Chat), Failure> {
    const CHOICE: &str = "tool_choice";
    let model = params.required_text("model")?;
    let list = params.required_list("messages")?;
    let mut messages = Vec::with_capacity(list.len() + 1);
    if let Some(system) = params.take("system") {
        messages.push(message("system", text_of("system", system)?));
    }
    for (number, value) in list.into_iter().enumerate() {
        messages.extend(one_message(number, value)?);
    }
    if messages.last().is_some_and(|last| last.role == "assistant") {
        let reason = "the last one is the assistant's, and beginnings of answers cannot be honoured here";
        return Err(params.refuse("messages", reason));
    }
    let mut chat = Chat { messages, tools: tools(params, one_tool)?, ..Chat::default() };
    if let Some(value) = params.take(CHOICE) {
        let mut choice = Params::inside(CHOICE, value)?;
        match choice.required_text("type")?.as_str() {
            "auto" => {}
            "none" => chat.tools.clear(),
            "any" => chat.choice = Choice::Any,
            "tool" => chat.choice = Choice::Named(choice.required_text("name")?),
            other => {
                let reason = format!("{:?} cannot be honoured here: auto, any, tool or none", cut(other));
                return Err(choice.refuse("type", reason));
            }
        }
        chat.single = choice.flag("disable_parallel_tool_use")?.unwrap_or(false);
        choice.finish()?;
    }
    chat.thinking = thinking(params)?;
    chat.check(CHOICE)?;
    Ok((model, chat))
}

/// Whether the model shall reason. The budget is a target of the API, and `max_tokens` bounds reasoning and answer together.
fn thinking(params: &mut Params) -> Result<Option<Thinking>, Failure> {
    const FIELD: &str = "thinking";
    /// Least budget that the API takes.
    const BUDGET_MIN: u32 = 1024;
    let Some(value) = params.take(FIELD) else { return Ok(None) };
    let mut wanted = Params::inside(FIELD, value)?;
    let effort = match wanted.required_text("type")?.as_str() {
        "disabled" => Effort::Off,
        "enabled" => {
            let budget = wanted.whole("budget_tokens", BUDGET_MIN..=u32::MAX)?;
            budget.ok_or_else(|| wanted.refuse("budget_tokens", "it is required"))?;
            Effort::On
        }
        // The model decides, as its template has it without the variable.
        "adaptive" => {
            wanted.finish()?;
            return Ok(None);
        }
        other => {
            let reason = format!("{:?} cannot be honoured here: enabled, adaptive or disabled", cut(other));
            return Err(wanted.refuse("type", reason));
        }
    };
    wanted.finish()?;
    Ok(Some(Thinking { field: FIELD, effort }))
}

fn one_tool(mut params: Params) -> Result<Tool, Failure> {
    params.only("type", |kind| kind == "custom")?;
    let tool = tool(&mut params, "input_schema")?;
    // Where the service keeps a prompt for later; and arguments keep to the schema where a call is demanded.
    params.drop_harmless(&[
        "cache_control",
        "strict",
        "eager_input_streaming",
        "defer_loading",
        "input_examples",
    ]);
    params.finish()?;
    Ok(tool)
}

/// Fields that ask for abilities which neither gateway nor daemon has.
fn refuse_others(params: &mut Params) -> Result<(), Failure> {
    params.only("speed", |speed| speed == "standard")?;
    for name in ["mcp_servers", "container", "context_management"] {
        params.only(name, is_empty)?;
    }
    // Where the service keeps a prompt for later, which the daemon does anyway, and whose books the request is in.
    params.drop_harmless(&["cache_control", "user_profile_id", "workspace_id"]);
    Ok(())
}

/// The messages of one: results of tools come before the user's text.
fn one_message(number: usize, value: Value) -> Result<Vec<Message>, Failure> {
    let mut params = Params::inside(&format!("messages[{number}]"), value)?;
    let role = params.required_text("role")?;
    if role != "user" && role != "assistant" {
        return Err(params.refuse("role", format!("{:?} is neither \"user\" nor \"assistant\"", cut(&role))));
    }
    let place = params.full("content");
    let content = params.take("content").ok_or_else(|| refused(&place, "it is required"))?;
    params.finish()?;
    let parts = match content {
        Value::Array(parts) => parts,
        text => return Ok(vec![message(&role, text_of(&place, text)?)]),
    };
    let mut said = Message { role: role.clone(), ..Message::default() };
    let mut messages = Vec::new();
    for (number, part) in parts.into_iter().enumerate() {
        let mut part = Params::inside(&format!("{place}[{number}]"), part)?;
        let kind = part.required_text("type")?;
        match (kind.as_str(), role.as_str()) {
            ("tool_use", "assistant") => said.calls.push(call(part)?),
            ("tool_result", "user") => messages.push(result(part)?),
            ("thinking", "assistant") => {
                let thinking = part.required_text("thinking")?;
                part.drop_harmless(&["signature"]);
                part.finish()?;
                said.reasoning.get_or_insert_default().push_str(&thinking);
            }
            _ => said.content.get_or_insert_default().push_str(&text_part(&kind, part)?),
        }
    }
    if said.content.is_some() || !said.calls.is_empty() || messages.is_empty() {
        if said.content.is_none() && said.calls.is_empty() {
            said.content = Some(String::new());
        }
        messages.push(said);
    }
    Ok(messages)
}

fn call(mut part: Params) -> Result<Call, Failure> {
    let id = Some(part.required_text("id")?);
    let name = part.required_text("name")?;
    let input = part.take("input").unwrap_or_else(|| Value::Object(Map::new()));
    if !input.is_object() {
        return Err(part.refuse("input", "it is no object"));
    }
    part.drop_harmless(&["cache_control", "caller"]);
    part.finish()?;
    Ok(Call { name, arguments: input.to_string(), id })
}

fn result(mut part: Params) -> Result<Message, Failure> {
    let call_id = Some(part.required_text("tool_use_id")?);
    let place = part.full("content");
    let content = match part.take("content") {
        Some(content) => text_of(&place, content)?,
        None => String::new(),
    };
    let failed = part.flag("is_error")?.unwrap_or(false);
    part.drop_harmless(&["cache_control"]);
    part.finish()?;
    // No template has a field for it.
    let content = if failed { format!("Error: {content}") } else { content };
    Ok(Message { call_id, ..message("tool", content) })
}
