//! Chats, as the APIs write them and as the daemon takes them.

use rocmforge_client::calls::{Call, Form, Message, Parser, Tool, conversation, demand};
use rocmforge_client::wire::{AnswerForm, FormKind, GenerateRequest, limits};
use serde_json::{Map, Value};

use crate::Gateway;
use crate::failure::Failure;
use crate::generation::Reader;
use crate::models::shown;
use crate::params::{Params, refused};
use crate::thinking::Thinking;

/// Whether the model must call a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// As the model likes.
    #[default]
    Auto,
    /// It must call one.
    Any,
    /// It must call this one.
    Named(String),
}

/// A chat of a request.
#[derive(Clone, Debug, Default)]
pub struct Chat {
    pub messages: Vec<Message>,
    /// The tools that the model may call; none if it must not call any.
    pub tools: Vec<Tool>,
    pub choice: Choice,
    /// At most one call is wanted.
    pub single: bool,
    /// The JSON schema of an answer that calls no tool, where there are tools.
    pub schema: Option<String>,
    /// Further variables of the chat template.
    pub variables: Map<String, Value>,
    /// Whether the model shall reason; `None` leaves it to the template.
    pub thinking: Option<Thinking>,
}

impl Chat {
    /// Checks what the fields ask for together.
    ///
    /// # Errors
    /// A failure of status 400 that names `field`, the API's name of the choice.
    pub fn check(&self, field: &str) -> Result<(), Failure> {
        match &self.choice {
            Choice::Auto => Ok(()),
            Choice::Any if self.tools.is_empty() => {
                Err(refused(field, "it demands a call, but there are no tools"))
            }
            Choice::Named(name) if !self.tools.iter().any(|tool| tool.name == *name) => {
                Err(refused(field, format!("{:?} is none of the tools", cut(name))))
            }
            Choice::Any | Choice::Named(_) => Ok(()),
        }
    }

    /// Takes the form of an answer that calls no tool. Without tools the form stays the request's own, and is returned.
    ///
    /// # Errors
    /// A failure of status 400 that names `field`, for a form that is no schema beside tools.
    pub fn take_form(
        &mut self,
        form: Option<AnswerForm>,
        field: &str,
    ) -> Result<Option<AnswerForm>, Failure> {
        match form {
            Some(form) if !self.tools.is_empty() => {
                if form.kind != FormKind::JsonSchema {
                    let reason = "beside tools a grammar cannot be honoured, but a JSON schema can: leave one of them out";
                    return Err(refused(field, reason));
                }
                self.schema = Some(form.text);
                Ok(None)
            }
            form => Ok(form),
        }
    }

    /// The daemon's request for an answer, and the reader of its text. Asks the daemon for the model's form of calls, if there may
    /// be any.
    ///
    /// # Errors
    /// Errors of the daemon; status 413 for tools that are too large for a constraint.
    pub async fn request(self, gateway: &Gateway, model: &str) -> Result<(GenerateRequest, Reader), Failure> {
        let Self { messages, tools, choice, single, schema, mut variables, thinking } = self;
        let of_tools = |message: &Message| {
            !message.calls.is_empty() || message.call_id.is_some() || message.role == "tool"
        };
        let plain = tools.is_empty() && variables.is_empty() && !messages.iter().any(of_tools);
        let form = if plain && thinking.is_none() {
            Form::Generic
        } else {
            let shown = shown(gateway, model).await?;
            if let Some(thinking) = thinking {
                thinking.apply(shown.thinking(), &mut variables)?;
            }
            Form::of_name(shown.calls().unwrap_or_default())
        };
        // An answer that must be a call has no other form.
        let otherwise = schema.filter(|_| choice == Choice::Auto);
        let demanded: Vec<Tool> = match &choice {
            Choice::Auto if otherwise.is_none() => Vec::new(),
            Choice::Auto => tools.clone(),
            Choice::Any => tools.clone(),
            Choice::Named(name) => tools.iter().filter(|tool| tool.name == *name).cloned().collect(),
        };
        let request = conversation(form, &tools, messages, variables).request(model);
        if demanded.is_empty() {
            return Ok((request, Reader { parser: Parser::new(form, tools), single, demanded: false }));
        }
        let wanted = demand(form, &demanded, !single, otherwise.as_deref()).map_err(|bytes| {
            let max = limits::FORM_BYTES_MAX;
            Failure::new(
                413,
                format!("tools: as a constraint they have {bytes} bytes, at most {max} are taken"),
            )
            .about("tools")
        })?;
        let parser = Parser::new(wanted.form, tools);
        Ok((request.with_form(&wanted.answer), Reader { parser, single, demanded: true }))
    }
}

/// A message without calls.
pub fn message(role: &str, content: String) -> Message {
    Message { role: role.to_owned(), content: Some(content), ..Message::default() }
}

/// The text of a message's content: a string, or a list of parts that are all text.
///
/// # Errors
/// A failure of status 400 that names the part which is no text.
pub fn text_of(place: &str, content: Value) -> Result<String, Failure> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        _ => return Err(refused(place, "it is neither a string nor a list of parts")),
    };
    let mut text = String::new();
    for (number, part) in parts.into_iter().enumerate() {
        let mut part = Params::inside(&format!("{place}[{number}]"), part)?;
        let kind = part.required_text("type")?;
        text.push_str(&text_part(&kind, part)?);
    }
    Ok(text)
}

/// The text of a part of that type.
///
/// # Errors
/// A failure of status 400 if it is no text.
pub fn text_part(kind: &str, mut part: Params) -> Result<String, Failure> {
    if kind != "text" {
        return Err(
            part.refuse("type", format!("{kind:?} cannot be read by the daemon's models: only \"text\""))
        );
    }
    let text = part.required_text("text")?;
    part.drop_harmless(&["cache_control", "citations", "annotations"]);
    part.finish()?;
    Ok(text)
}

/// Takes a list of tools, each read by `one`.
///
/// # Errors
/// A failure of status 400 for a tool that cannot be honoured, for a name that is there twice, and for too many tools.
pub fn tools(params: &mut Params, one: fn(Params) -> Result<Tool, Failure>) -> Result<Vec<Tool>, Failure> {
    const NAME: &str = "tools";
    let list = match params.take(NAME) {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(params.refuse(NAME, "it is not a list")),
    };
    if list.len() > limits::TOOLS_MAX {
        let max = limits::TOOLS_MAX;
        return Err(params.refuse(NAME, format!("{} tools, but at most {max} are taken", list.len())));
    }
    let mut tools: Vec<Tool> = Vec::with_capacity(list.len());
    for (number, value) in list.into_iter().enumerate() {
        let place = format!("{NAME}[{number}]");
        let tool = one(Params::inside(&place, value)?)?;
        if tools.iter().any(|earlier| earlier.name == tool.name) {
            return Err(refused(&place, format!("another tool is called {:?} too", tool.name)));
        }
        tools.push(tool);
    }
    Ok(tools)
}

/// A tool of these fields: the name of the field with the schema differs between the APIs.
///
/// # Errors
/// A failure of status 400 for a name or a schema that no function has.
pub fn tool(params: &mut Params, schema: &str) -> Result<Tool, Failure> {
    let name = params.required_text("name")?;
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if !(1..=128).contains(&name.len()) || !name.bytes().all(fits) {
        return Err(params.refuse("name", "a tool's name has 1 to 128 letters, digits and characters of _-."));
    }
    let description = params.text("description")?.filter(|text| !text.is_empty());
    let parameters =
        params.take(schema).unwrap_or_else(|| serde_json::json!({"type": "object", "properties": {}}));
    let is_object =
        parameters.as_object().is_some_and(|keys| keys.get("type").is_none_or(|kind| kind == "object"));
    if !is_object {
        return Err(params.refuse(schema, "it is no JSON schema of an object"));
    }
    Ok(Tool { name, description, parameters })
}

/// A tool in OpenAI's form, which Ollama's clients use too.
///
/// # Errors
/// A failure of status 400 for what is no function.
pub fn function_tool(mut params: Params) -> Result<Tool, Failure> {
    let kind = params.text("type")?.unwrap_or_else(|| "function".to_owned());
    if kind != "function" {
        let reason = format!("{:?} cannot be honoured here: only \"function\"", cut(&kind));
        return Err(params.refuse("type", reason));
    }
    let place = params.full("function");
    let function = params.take("function").ok_or_else(|| params.refuse("function", "it is required"))?;
    params.finish()?;
    let mut function = Params::inside(&place, function)?;
    let tool = tool(&mut function, "parameters")?;
    // Arguments keep to the schema where a call is demanded.
    function.drop_harmless(&["strict"]);
    function.finish()?;
    Ok(tool)
}

/// A call in a message, in OpenAI's form, which Ollama's clients use too. Arguments are an object, or its text.
///
/// # Errors
/// A failure of status 400 for what is no call.
pub fn function_call(mut params: Params) -> Result<Call, Failure> {
    params.only("type", |kind| kind == "function")?;
    let id = params.text("id")?.filter(|id| !id.is_empty());
    let place = params.full("function");
    let function = params.take("function").ok_or_else(|| params.refuse("function", "it is required"))?;
    params.drop_harmless(&["index"]);
    params.finish()?;
    let mut function = Params::inside(&place, function)?;
    let name = function.required_text("name")?;
    let arguments = match function.take("arguments") {
        None => Value::Object(Map::new()),
        Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
        Some(Value::String(text)) => serde_json::from_str(&text)
            .map_err(|error| function.refuse("arguments", format!("they are no JSON: {error}")))?,
        Some(value) => value,
    };
    if !arguments.is_object() {
        return Err(function.refuse("arguments", "they are no object"));
    }
    function.drop_harmless(&["index"]);
    function.finish()?;
    Ok(Call { name, arguments: arguments.to_string(), id })
}

/// The calls of an assistant's message.
///
/// # Errors
/// As [`function_call`].
pub fn function_calls(params: &mut Params) -> Result<Vec<Call>, Failure> {
    const NAME: &str = "tool_calls";
    let list = match params.take(NAME) {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(params.refuse(NAME, "it is not a list")),
    };
    let place = params.full(NAME);
    let calls = list.into_iter().enumerate();
    calls
        .map(|(number, value)| function_call(Params::inside(&format!("{place}[{number}]"), value)?))
        .collect()
}

/// A value from outside for a message, cut short.
pub fn cut(text: &str) -> String {
    text.chars().take(80).collect()
}
