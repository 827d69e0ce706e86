//! Chat completions.

use std::sync::Arc;
use std::time::Instant;

use hyper::Response;
use rocmforge_client::calls::{Message, Tool};
use rocmforge_client::random_request_id;
use rocmforge_client::wire::limits;
use serde_json::{Map, Value, json};

use super::Common;
use super::chunks::Chunks;
use crate::Gateway;
use crate::chat::{Chat, Choice, cut, function_calls, function_tool, text_of, tools};
use crate::clock::unix_seconds;
use crate::events;
use crate::failure::Failure;
use crate::generation::{Running, Wanted};
use crate::params::{Params, is_empty, refused};
use crate::reply::{Body, json};
use crate::steering::{Steering, response_format};
use crate::thinking::{Effort, Thinking};

/// Most likely tokens that the daemon reports.
const TOP_MAX: u32 = limits::TOP_LOGPROBS_MAX as u32;

/// The field that says whether tools must be called.
pub const CHOICE: &str = "tool_choice";

/// The field that says how much the model shall reason.
const EFFORT: &str = "reasoning_effort";

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
    let (common, chat) = (asked.common, asked.chat);
    let (mut request, reader) = chat.request(gateway, &common.model).await?;
    request.max_tokens = asked.max_tokens;
    request.sampling = common.sampling;
    request.sampling.top_logprobs = asked.top.map_or(0, |top| top.max(1));
    request.stop = common.stop;
    let request = asked.steering.fill(request);
    let wanted =
        Wanted { request, tokens: asked.top.is_some(), stop_text: false, reader: Some(reader), echo: None };
    let mut running = Running::start_several(gateway, wanted, common.count, since).await?;
    let (id, created) = (format!("chatcmpl-{:032x}", random_request_id()), unix_seconds());
    let chunks = |index: usize| Chunks {
        index,
        id: id.clone(),
        created,
        model: common.model.clone(),
        top: asked.top.map(|top| top as usize),
        include_usage: common.include_usage,
        calls: 0,
    };
    if common.stream {
        let answers = running.into_iter().enumerate().map(|(index, running)| (running, chunks(index)));
        return Ok(events::responses(answers.collect()));
    }
    let answers = Running::whole_of(&mut running).await?;
    Ok(json(&chunks(0).whole(&answers)))
}

/// A request, read.
struct Asked {
    common: Common,
    chat: Chat,
    max_tokens: u32,
    /// Alternatives of each token that are wanted; `None` without log-probabilities.
    top: Option<u32>,
    steering: Steering,
}

impl Asked {
    fn take(mut params: Params) -> Result<Self, Failure> {
        let mut common = Common::take(&mut params)?;
        let messages = params.required_list("messages")?;
        let messages = messages.into_iter().enumerate().map(|(number, value)| one_message(number, value));
        let messages = messages.collect::<Result<Vec<_>, _>>()?;
        let (newer, older) =
            (params.whole("max_completion_tokens", 1..=u32::MAX)?, params.whole("max_tokens", 1..=u32::MAX)?);
        let top = top_logprobs(&mut params)?;
        let (format, grammar) = (response_format(&mut params)?, common.steering.form.take());
        if format.is_some() && grammar.is_some() {
            let reason =
                "two forms of the answer cannot be honoured: leave `grammar` or `response_format` out";
            return Err(params.refuse("grammar", reason));
        }
        let form = format.or(grammar);
        let mut chat = of_tools(&mut params, messages)?;
        let form = chat.take_form(form, "grammar")?;
        let steering = Steering { form, ..std::mem::take(&mut common.steering) };
        refuse_others(&mut params)?;
        params.finish()?;
        Ok(Self { common, chat, max_tokens: newer.or(older).unwrap_or(0), top, steering })
    }
}

/// The chat of these messages, with the request's tools.
fn of_tools(params: &mut Params, messages: Vec<Message>) -> Result<Chat, Failure> {
    let chat = calling(params, function_tool, |choice| {
        let place = format!("{CHOICE}.function");
        let mut function = Params::inside(&place, choice["function"].clone())?;
        let name = function.required_text("name")?;
        function.finish()?;
        Ok(name)
    })?;
    let thinking = effort(params, EFFORT)?.map(|effort| Thinking { field: EFFORT, effort });
    Ok(Chat { messages, thinking, ..chat })
}

/// Takes tools, whether they must be called, and the template's variables. `named` reads the name of a function that must be.
///
/// # Errors
/// A failure of status 400 for what cannot be honoured, or contradicts the tools.
pub fn calling(
    params: &mut Params,
    one_tool: fn(Params) -> Result<Tool, Failure>,
    named: fn(Value) -> Result<String, Failure>,
) -> Result<Chat, Failure> {
    let mut tools = tools(params, one_tool)?;
    let choice = match params.take(CHOICE) {
        None => Choice::Auto,
        Some(value) if value == "auto" => Choice::Auto,
        Some(value) if value == "none" => {
            tools.clear();
            Choice::Auto
        }
        Some(value) if value == "required" => Choice::Any,
        Some(value) if value["type"] == "function" => Choice::Named(named(value)?),
        Some(value) => {
            let reason = format!(
                "{} cannot be honoured here: none, auto, required, or one function's name",
                cut(&value.to_string())
            );
            return Err(params.refuse(CHOICE, reason));
        }
    };
    let single = !params.flag("parallel_tool_calls")?.unwrap_or(true) || matches!(choice, Choice::Named(_));
    let chat = Chat { tools, choice, single, variables: variables(params)?, ..Chat::default() };
    chat.check(CHOICE)?;
    Ok(chat)
}

/// Takes variables of the chat template. They are not OpenAI's, but common among servers of this API.
///
/// # Errors
/// A failure of status 400 if they are no object.
fn variables(params: &mut Params) -> Result<Map<String, Value>, Failure> {
    const NAME: &str = "chat_template_kwargs";
    match params.take(NAME) {
        None => Ok(Map::new()),
        Some(Value::Object(variables)) => Ok(variables),
        Some(_) => Err(params.refuse(NAME, "it is no object")),
    }
}

/// Takes how much the model shall reason. Templates know at most three degrees.
///
/// # Errors
/// A failure of status 400 for an unknown degree.
pub fn effort(params: &mut Params, name: &str) -> Result<Option<Effort>, Failure> {
    let Some(effort) = params.text(name)? else { return Ok(None) };
    match effort.as_str() {
        "none" => Ok(Some(Effort::Off)),
        "minimal" | "low" => Ok(Some(Effort::Low)),
        "medium" => Ok(Some(Effort::Medium)),
        "high" | "xhigh" => Ok(Some(Effort::High)),
        other => {
            let known = "none, minimal, low, medium, high or xhigh";
            Err(params.refuse(name, format!("{:?} cannot be honoured here: {known}", cut(other))))
        }
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
    params.only("function_call", |call| call == "none" || call == "auto")?;
    params.only("modalities", |modalities| *modalities == json!(["text"]))?;
    ["functions", "audio", "prediction"].into_iter().try_for_each(|name| params.only(name, is_empty))
}

fn one_message(number: usize, value: Value) -> Result<Message, Failure> {
    let mut params = Params::inside(&format!("messages[{number}]"), value)?;
    let role = params.required_text("role")?;
    let role = match role.as_str() {
        "system" | "user" | "assistant" | "tool" => role.as_str(),
        // The newer name of the system's message; chat templates know the older one.
        "developer" => "system",
        other => {
            let reason = format!(
                "{:?} cannot be honoured here: system, developer, user, assistant or tool",
                cut(other)
            );
            return Err(params.refuse("role", reason));
        }
    };
    let place = params.full("content");
    let content = params.take("content").map(|content| text_of(&place, content)).transpose()?;
    let mut message = Message { role: role.to_owned(), content, ..Message::default() };
    match role {
        "assistant" => {
            message.calls = function_calls(&mut params)?;
            message.reasoning = params.text("reasoning_content")?.filter(|text| !text.is_empty());
        }
        "tool" => {
            message.call_id = Some(params.required_text("tool_call_id")?);
            message.tool = params.text("name")?;
        }
        _ => {}
    }
    if message.content.is_none() && message.calls.is_empty() {
        return Err(refused(&place, "it is required"));
    }
    // Fields of answers, which clients send back with them.
    for name in ["refusal", "tool_calls", "function_call", "audio"] {
        params.only(name, is_empty)?;
    }
    params.drop_harmless(&["annotations"]);
    params.finish()?;
    Ok(message)
}
