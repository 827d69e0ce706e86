//! Responses: answers to items, kept for requests that go on with them.

mod items;
mod output;
mod told;

use std::sync::Arc;
use std::time::Instant;

use hyper::Response;
use rocmforge_client::calls::{Message, Tool};
use rocmforge_client::random_request_id;
use rocmforge_client::wire::SamplingOptions;
use serde_json::{Value, json};

use self::items::{Messages, listed};
use self::told::Told;
use super::chat::{CHOICE, calling, effort};
use super::{HARMLESS, TEMPERATURE, sampling};
use crate::Gateway;
use crate::access::Identity;
use crate::chat::{Chat, cut, message, tool};
use crate::clock::unix_seconds;
use crate::events;
use crate::failure::Failure;
use crate::generation::{Running, Wanted};
use crate::kept::{ENTRY_BYTES_MAX, Entry};
use crate::params::{Params, is_empty};
use crate::reply::{self, Body, json};
use crate::routes::room;
use crate::steering::{Steering, grammar, openai_penalties, samplers, text_format};
use crate::thinking::Thinking;

/// Most bytes of a request that its response repeats: instructions, tools and others.
const FIELDS_BYTES_MAX: usize = 1 << 20;

/// The field that names an earlier response.
const PREVIOUS: &str = "previous_response_id";

/// `POST /v1/responses`
///
/// # Errors
/// Status 400 with the field at fault; errors of the daemon.
pub async fn respond(
    gateway: &Arc<Gateway>,
    caller: Identity,
    params: Params,
    since: Instant,
) -> Result<Response<Body>, Failure> {
    let asked = Asked::take(params)?;
    let Asked { model, instructions, mut chat, sampling, max_tokens, steering, mut fields, .. } = asked;
    let (mut messages, items) = match asked.previous {
        Some(name) => {
            let entry = earlier(gateway, caller, &name)?;
            let items = asked.items.map(|own| format!("{},{own}", entry.items));
            (conversation(gateway, &entry).await?, items)
        }
        None => (Vec::new(), asked.items),
    };
    messages.append(&mut chat.messages);
    chat.messages = instructed(instructions, messages);
    // Items too long to be kept are not held while the answer comes.
    let items = items.filter(|items| items.len() <= ENTRY_BYTES_MAX);
    let id = random_request_id();
    fields["id"] = json!(named(id));
    fields["created_at"] = json!(unix_seconds());
    fields["store"] = json!(items.is_some());
    let fields = fields.to_string();
    if fields.len() > FIELDS_BYTES_MAX {
        let bytes = fields.len();
        let reason =
            format!("the response repeats {bytes} bytes of it, at most {FIELDS_BYTES_MAX} are taken");
        return Err(Failure::new(413, format!("the request is too large: {reason}")));
    }
    let (mut request, reader) = chat.request(gateway, &model).await?;
    request.max_tokens = max_tokens;
    request.sampling = sampling;
    let request = steering.fill(request);
    let wanted = Wanted { request, tokens: false, stop_text: false, reader: Some(reader), echo: None };
    let mut running = Running::start(gateway, wanted, since).await?;
    let mut told = Told::new(Arc::clone(gateway), (caller, id), fields, items);
    if asked.stream {
        return Ok(events::response(running, told));
    }
    let (piece, ended) = running.whole().await?;
    Ok(json(&told.whole(&piece, &ended)))
}

/// `GET /v1/responses/{id}`
///
/// # Errors
/// Status 404 if the caller has no such response; 400 for a query that cannot be honoured.
pub fn response(
    gateway: &Gateway,
    caller: Identity,
    name: &str,
    query: &str,
) -> Result<Response<Body>, Failure> {
    for (field, value) in query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, ""))) {
        let changes_nothing = field.is_empty() || (field == "stream" && value == "false");
        if !changes_nothing {
            let reason = format!("{field}: it cannot be honoured here: leave it out");
            return Err(Failure::invalid(reason).about(field));
        }
    }
    let entry = number(name).and_then(|id| gateway.kept.get(caller, id)).ok_or_else(|| missing(name))?;
    Ok(reply::text("application/json", entry.answer.clone()))
}

/// `DELETE /v1/responses/{id}`
///
/// # Errors
/// Status 404 if the caller has no such response.
pub fn forget(gateway: &Gateway, caller: Identity, name: &str) -> Result<Response<Body>, Failure> {
    match number(name).filter(|id| gateway.kept.remove(caller, *id)) {
        Some(_) => Ok(json(&json!({"id": name, "object": "response", "deleted": true}))),
        None => Err(missing(name)),
    }
}

fn named(id: u128) -> String {
    format!("resp_{id:032x}")
}

fn number(name: &str) -> Option<u128> {
    let id = u128::from_str_radix(name.strip_prefix("resp_")?, 16).ok()?;
    (named(id) == name).then_some(id)
}

fn missing(name: &str) -> Failure {
    let reason = "it was not stored, was deleted, or left for newer ones";
    Failure::new(404, format!("there is no response {:?}: {reason}", cut(name)))
}

fn earlier(gateway: &Gateway, caller: Identity, name: &str) -> Result<Arc<Entry>, Failure> {
    number(name).and_then(|id| gateway.kept.get(caller, id)).ok_or_else(|| {
        let Failure { message, .. } = missing(name);
        let failure = Failure::invalid(format!("{PREVIOUS}: {message}; send the whole conversation"));
        failure.about(PREVIOUS).coded("previous_response_not_found")
    })
}

/// The messages of an earlier response's conversation.
async fn conversation(gateway: &Gateway, entry: &Entry) -> Result<Vec<Message>, Failure> {
    let text = format!("{{\"input\":[{}]}}", entry.items);
    let _room = room(gateway, (text.len() as u64).min(gateway.body_bytes_max())).await?;
    let mut params = Params::read(text.as_bytes())?;
    let mut messages = Messages::default();
    messages.read(listed(&mut params)?)?;
    Ok(messages.finish())
}

/// The messages after the instructions. Templates take one system's message, so that of the input joins them.
fn instructed(instructions: Option<String>, mut messages: Vec<Message>) -> Vec<Message> {
    let Some(instructions) = instructions else { return messages };
    match messages.first_mut() {
        Some(Message { role, content: Some(content), .. }) if role == "system" => {
            *content = format!("{instructions}\n\n{content}");
        }
        _ => messages.insert(0, message("system", instructions)),
    }
    messages
}

/// A request, read.
struct Asked {
    model: String,
    stream: bool,
    previous: Option<String>,
    instructions: Option<String>,
    /// With the messages of the input alone.
    chat: Chat,
    sampling: SamplingOptions,
    max_tokens: u32,
    steering: Steering,
    /// The response's fields that are known before the answer.
    fields: Value,
    /// The input's items in JSON without the list's brackets, if the response shall be kept.
    items: Option<String>,
}

impl Asked {
    fn take(mut params: Params) -> Result<Self, Failure> {
        let fields = repeated(&params);
        let model = params.required_text("model")?;
        let stream = params.flag("stream")?.unwrap_or(false);
        let store = params.flag("store")?.unwrap_or(true);
        let previous = params.text(PREVIOUS)?;
        let instructions = params.text("instructions")?.filter(|text| !text.is_empty());
        let input = listed(&mut params)?;
        let items = store.then(|| input.iter().map(Value::to_string).collect::<Vec<_>>().join(","));
        let mut messages = Messages::default();
        messages.read(input)?;
        let sampling = sampling(&mut params)?;
        let max_tokens = params.whole("max_output_tokens", 1..=u32::MAX)?.unwrap_or(0);
        let mut chat = calling(&mut params, one_tool, named_function)?;
        chat.messages = messages.finish();
        chat.thinking = reasoning(&mut params)?;
        let (form, grammar) = (text_format(&mut params)?, grammar(&mut params)?);
        if form.is_some() && grammar.is_some() {
            let reason = "two forms of the answer cannot be honoured: leave `grammar` or `text.format` out";
            return Err(params.refuse("grammar", reason));
        }
        let form = chat.take_form(form.or(grammar), "grammar")?;
        let (penalties, samplers) = (openai_penalties(&mut params)?, samplers(&mut params)?);
        let steering = Steering { form, penalties, samplers };
        refuse_others(&mut params)?;
        params.finish()?;
        Ok(Self {
            model,
            stream,
            previous,
            instructions,
            chat,
            sampling,
            max_tokens,
            steering,
            fields,
            items,
        })
    }
}

/// The response's fields that repeat the request, in the API's order.
fn repeated(params: &Params) -> Value {
    let or =
        |name: &str, usual: Value| Some(params.copy(name)).filter(|value| !value.is_null()).unwrap_or(usual);
    json!({
        "id": null,
        "object": "response",
        "created_at": null,
        "status": "in_progress",
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": params.copy("instructions"),
        "max_output_tokens": params.copy("max_output_tokens"),
        "max_tool_calls": params.copy("max_tool_calls"),
        "model": params.copy("model"),
        "output": [],
        "parallel_tool_calls": or("parallel_tool_calls", json!(true)),
        "previous_response_id": params.copy(PREVIOUS),
        "reasoning": or("reasoning", json!({"effort": null, "summary": null})),
        "service_tier": "default",
        "store": true,
        "temperature": or("temperature", json!(TEMPERATURE)),
        "text": or("text", json!({"format": {"type": "text"}})),
        "tool_choice": or("tool_choice", json!("auto")),
        "tools": or("tools", json!([])),
        "top_logprobs": 0,
        "top_p": or("top_p", json!(1.0)),
        "truncation": "disabled",
        "usage": null,
        "user": params.copy("user"),
        "metadata": or("metadata", json!({})),
    })
}

/// The name of the function that must be called.
fn named_function(choice: Value) -> Result<String, Failure> {
    let mut function = Params::inside(CHOICE, choice)?;
    function.take("type");
    let name = function.required_text("name")?;
    function.finish()?;
    Ok(name)
}

fn one_tool(mut params: Params) -> Result<Tool, Failure> {
    let kind = params.required_text("type")?;
    if kind != "function" {
        let reason = format!("{:?} cannot be honoured here: only \"function\"", cut(&kind));
        return Err(params.refuse("type", reason));
    }
    let tool = tool(&mut params, "parameters")?;
    // Arguments keep to the schema where a call is demanded.
    params.drop_harmless(&["strict"]);
    params.finish()?;
    Ok(tool)
}

/// How much the model shall reason.
fn reasoning(params: &mut Params) -> Result<Option<Thinking>, Failure> {
    let Some(value) = params.take("reasoning") else { return Ok(None) };
    let mut wanted = Params::inside("reasoning", value)?;
    let effort = effort(&mut wanted, "effort")?;
    // The reasoning itself is in the output, and nobody sums it up.
    for name in ["summary", "generate_summary"] {
        wanted.only(name, |summary| summary == "auto")?;
    }
    wanted.finish()?;
    Ok(effort.map(|effort| Thinking { field: "reasoning.effort", effort }))
}

/// Fields that ask for abilities which neither gateway nor daemon has.
fn refuse_others(params: &mut Params) -> Result<(), Failure> {
    // Reasoning is in the output as it is, and clients send that back.
    params
        .only("include", |include| is_empty(include) || *include == json!(["reasoning.encrypted_content"]))?;
    params.only("truncation", |truncation| truncation == "disabled")?;
    params.only("service_tier", |tier| tier == "auto" || tier == "default")?;
    for name in ["background", "conversation", "prompt", "top_logprobs", "context_management"] {
        params.only(name, is_empty)?;
    }
    if let Some(options) = params.take("stream_options") {
        let mut options = Params::inside("stream_options", options)?;
        // Padding of events, against readers of the encrypted traffic.
        options.drop_harmless(&["include_obfuscation"]);
        options.finish()?;
    }
    // It bounds calls of the service's own tools, and there are none.
    params.whole("max_tool_calls", 1..=u32::MAX)?;
    params.drop_harmless(&HARMLESS);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_as_it_was_written() {
        for id in [0, 7, u128::MAX] {
            assert_eq!(number(&named(id)), Some(id));
        }
        for bad in ["", "resp_", "resp_7", "resp_+0000000000000000000000000000007", "msg_7"] {
            assert_eq!(number(bad), None, "{bad}");
        }
        assert_eq!(number(&named(0xab).to_uppercase()), None);
    }

    #[test]
    fn instructions_and_the_inputs_system_message_are_one() {
        let texts = |instructions: Option<&str>, messages: Vec<Message>| -> Vec<String> {
            let all = instructed(instructions.map(str::to_owned), messages);
            all.into_iter()
                .map(|message| format!("{}:{}", message.role, message.content.unwrap_or_default()))
                .collect()
        };
        let user = || message("user", "u".to_owned());
        assert_eq!(texts(None, vec![user()]), ["user:u"]);
        assert_eq!(texts(Some("i"), vec![user()]), ["system:i", "user:u"]);
        assert_eq!(
            texts(Some("i"), vec![message("system", "s".to_owned()), user()]),
            ["system:i\n\ns", "user:u"]
        );
    }
}
