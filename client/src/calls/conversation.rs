//! A chat with tools, as the daemon takes it.

use serde_json::{Map, Value, json};

use super::{Call, Form, Tool};
use crate::wire::{ChatMessage, GenerateRequest, Prompt};

/// A message of a chat with tools.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// Its text; `None` for a message of calls alone.
    pub content: Option<String>,
    /// The assistant's reasoning before its text.
    pub reasoning: Option<String>,
    /// The assistant's calls.
    pub calls: Vec<Call>,
    /// Name of the call that a tool's message answers.
    pub call_id: Option<String>,
    /// Name of the tool that answers; found by the call, if it is not stated.
    pub tool: Option<String>,
}

/// A chat for the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// Roles and texts.
    pub messages: Vec<ChatMessage>,
    /// Values that the template sees beside them: a JSON object, if there are any.
    pub extras: Option<String>,
}

impl Conversation {
    /// A request for an answer, whose text has the marks that a parser needs.
    pub fn request(self, model: &str) -> GenerateRequest {
        let request = GenerateRequest::new(model, Prompt::Chat(self.messages)).with_marks();
        match self.extras {
            Some(extras) => request.with_chat_extras(&extras),
            None => request,
        }
    }
}

/// The chat for a model whose calls have this form. Models whose template knows no tools get them described in the system's message,
/// and calls and results as texts. `variables` are for the template.
pub fn conversation(
    form: Form,
    tools: &[Tool],
    mut messages: Vec<Message>,
    variables: Map<String, Value>,
) -> Conversation {
    name_tools(&mut messages);
    if form == Form::Generic {
        let extras = (!variables.is_empty()).then(|| json!({ "variables": variables }).to_string());
        return Conversation { messages: as_texts(tools, messages), extras };
    }
    let fields: Vec<Value> = messages.iter().map(|message| fields(form, message)).collect();
    let mut extras = Map::new();
    if !tools.is_empty() {
        let tools = tools.iter().map(Tool::for_template).collect();
        extras.insert("tools".to_owned(), Value::Array(tools));
    }
    if fields.iter().any(|fields| !fields.is_null()) {
        extras.insert("messages".to_owned(), Value::Array(fields));
    }
    if !variables.is_empty() {
        extras.insert("variables".to_owned(), Value::Object(variables));
    }
    let plain =
        |message: Message| ChatMessage { role: message.role, content: message.content.unwrap_or_default() };
    Conversation {
        messages: messages.into_iter().map(plain).collect(),
        extras: (!extras.is_empty()).then(|| Value::Object(extras).to_string()),
    }
}

/// Finds the tool of each result by its call.
fn name_tools(messages: &mut [Message]) {
    for number in 0..messages.len() {
        let (before, rest) = messages.split_at_mut(number);
        let Some(message) = rest.first_mut().filter(|message| message.tool.is_none()) else { continue };
        let Some(id) = &message.call_id else { continue };
        let mut calls = before.iter().rev().flat_map(|earlier| &earlier.calls);
        message.tool = calls.find(|call| call.id.as_ref() == Some(id)).map(|call| call.name.clone());
    }
}

/// Further fields of a message, as transformers' templates know them; null if there are none.
fn fields(form: Form, message: &Message) -> Value {
    let id_of = |id: &str| if form == Form::Mistral { nine_characters(id) } else { id.to_owned() };
    let mut fields = Map::new();
    // A message of calls alone has an empty text: Qwen 3's template searches it, and fails for none.
    if let Some(reasoning) = &message.reasoning {
        fields.insert("reasoning_content".to_owned(), json!(reasoning));
    }
    if !message.calls.is_empty() {
        let calls = message.calls.iter().map(|call| {
            let mut value =
                json!({"type": "function", "function": {"name": call.name, "arguments": arguments(call)}});
            if let Some(id) = &call.id {
                value["id"] = json!(id_of(id));
            }
            value
        });
        fields.insert("tool_calls".to_owned(), Value::Array(calls.collect()));
    }
    if let Some(id) = &message.call_id {
        fields.insert("tool_call_id".to_owned(), json!(id_of(id)));
    }
    if let Some(tool) = &message.tool {
        fields.insert("name".to_owned(), json!(tool));
    }
    if fields.is_empty() { Value::Null } else { Value::Object(fields) }
}

/// A call's arguments as a value. The maker of the call checked that they are an object.
fn arguments(call: &Call) -> Value {
    serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}))
}

/// Mistral's templates take only names of calls that have nine letters or digits.
fn nine_characters(id: &str) -> String {
    if id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    // FNV-1a: other calls of the chat have other names, and the same call the same one in each request.
    let digest = id.bytes().fold(0xcbf2_9ce4_8422_2325u64, |digest, byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{:09x}", digest & 0xf_ffff_ffff)
}

/// The system's text about tools.
fn description(tools: &[Tool]) -> String {
    let list: Vec<String> = tools.iter().map(|tool| tool.for_template().to_string()).collect();
    format!(
        "You may call these tools:\n{}\nTo call one, answer with nothing but an object in JSON: {{\"name\": <the tool's name>, \
         \"arguments\": <an object by the tool's schema>}}. To call several, answer with a list of such objects. If no tool is \
         of use, answer in plain text.",
        list.join("\n")
    )
}

fn as_texts(tools: &[Tool], messages: Vec<Message>) -> Vec<ChatMessage> {
    let mut texts: Vec<ChatMessage> = Vec::with_capacity(messages.len() + 1);
    if !tools.is_empty() {
        texts.push(ChatMessage { role: "system".to_owned(), content: description(tools) });
    }
    let mut after_result = false;
    for (number, message) in messages.into_iter().enumerate() {
        let is_result = message.role == "tool";
        let mut content = message.content.unwrap_or_default();
        if !message.calls.is_empty() {
            let of = |call: &Call| json!({"name": call.name, "arguments": arguments(call)});
            let calls: Vec<Value> = message.calls.iter().map(of).collect();
            let text =
                if let [call] = calls.as_slice() { call.to_string() } else { json!(calls).to_string() };
            content =
                [content, text].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n");
        }
        if is_result {
            let tool = message.tool.as_deref().unwrap_or("the tool");
            content = format!("Result of {tool}:\n{content}");
        }
        let role = if is_result { "user".to_owned() } else { message.role };
        // Most templates want users and assistants in turns, and one message of the system at the beginning.
        let joins = (number == 0 && role == "system") || (after_result && role == "user");
        match texts.last_mut().filter(|_| joins) {
            Some(earlier) => earlier.content = format!("{}\n\n{content}", earlier.content),
            None => texts.push(ChatMessage { role, content }),
        }
        after_result = is_result;
    }
    texts
}
