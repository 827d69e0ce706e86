//! The items of a response's input: messages, calls, results of calls, and reasoning.

use rocmforge_client::calls::{Call, Message};
use serde_json::{Map, Value, json};

use crate::chat::{cut, message};
use crate::failure::Failure;
use crate::params::{Params, is_empty, refused};

/// The input as a list of items: a text is the user's message.
///
/// # Errors
/// A failure of status 400 if it is neither a text nor a list of items.
pub fn listed(params: &mut Params) -> Result<Vec<Value>, Failure> {
    const NAME: &str = "input";
    match params.take(NAME) {
        Some(Value::String(text)) => Ok(vec![json!({"type": "message", "role": "user", "content": text})]),
        Some(Value::Array(list)) if !list.is_empty() => Ok(list),
        Some(Value::Array(_)) => Err(params.refuse(NAME, "the list is empty")),
        None => Err(params.refuse(NAME, "it is required")),
        Some(_) => Err(params.refuse(NAME, "it is neither a string nor a list of items")),
    }
}

/// The messages of items. Texts, calls and reasoning of the assistant in a row are one message.
#[derive(Debug, Default)]
pub struct Messages {
    all: Vec<Message>,
    /// Reasoning, whose message follows.
    reasoning: String,
    /// The last item was the assistant's, so a call belongs to its message.
    open: bool,
}

impl Messages {
    /// Adds the messages of these items.
    ///
    /// # Errors
    /// A failure of status 400 that names the field which cannot be honoured.
    pub fn read(&mut self, items: Vec<Value>) -> Result<(), Failure> {
        for (number, item) in items.into_iter().enumerate() {
            let mut item = Params::inside(&format!("input[{number}]"), item)?;
            let kind = item.text("type")?;
            // Fields of answers, which clients send back with them.
            item.drop_harmless(&["id"]);
            let status = item.take("status");
            match kind.as_deref() {
                // The model cannot go on from a call that was cut.
                Some("function_call") if status.is_some_and(|status| status == "incomplete") => continue,
                None | Some("message") => self.message(&mut item)?,
                Some("function_call") => self.call(&mut item)?,
                Some("function_call_output") => self.result(&mut item)?,
                Some("reasoning") => self.reasoning(&mut item)?,
                Some(other) => {
                    let known = "message, function_call, function_call_output or reasoning";
                    let reason = format!("{:?} cannot be honoured here: {known}", cut(other));
                    return Err(item.refuse("type", reason));
                }
            }
            item.finish()?;
        }
        Ok(())
    }

    /// All messages.
    pub fn finish(self) -> Vec<Message> {
        self.all
    }

    fn message(&mut self, item: &mut Params) -> Result<(), Failure> {
        let role = item.required_text("role")?;
        let role = match role.as_str() {
            "system" | "user" | "assistant" => role.as_str(),
            // The newer name of the system's message; chat templates know the older one.
            "developer" => "system",
            other => {
                let reason =
                    format!("{:?} cannot be honoured here: system, developer, user or assistant", cut(other));
                return Err(item.refuse("role", reason));
            }
        };
        // Whether the message is a comment before calls changes no template.
        item.drop_harmless(&["phase"]);
        let content = content(item, "content")?;
        if role == "assistant" {
            self.of_assistant(Some(content));
        } else {
            self.others(message(role, content));
        }
        Ok(())
    }

    fn call(&mut self, item: &mut Params) -> Result<(), Failure> {
        let id = item.required_text("call_id")?;
        let name = item.required_text("name")?;
        let text = item.text("arguments")?.unwrap_or_default();
        let arguments = match text.trim() {
            "" => Value::Object(Map::new()),
            text => serde_json::from_str(text)
                .map_err(|error| item.refuse("arguments", format!("they are no JSON: {error}")))?,
        };
        if !arguments.is_object() {
            return Err(item.refuse("arguments", "they are no object"));
        }
        let call = Call { name, arguments: arguments.to_string(), id: Some(id) };
        if !self.open || !self.reasoning.is_empty() {
            self.of_assistant(None);
        }
        if let Some(last) = self.all.last_mut() {
            last.calls.push(call);
        }
        Ok(())
    }

    fn result(&mut self, item: &mut Params) -> Result<(), Failure> {
        let id = item.required_text("call_id")?;
        let output = content(item, "output")?;
        self.others(Message { call_id: Some(id), ..message("tool", output) });
        Ok(())
    }

    fn reasoning(&mut self, item: &mut Params) -> Result<(), Failure> {
        for part in parts(item, "content")? {
            let mut part = part?;
            part.only("type", |kind| kind == "reasoning_text")?;
            self.reasoning.push_str(&part.required_text("text")?);
            part.finish()?;
        }
        // Models of this API's service tell summaries alone, and a template has no place for them.
        item.drop_harmless(&["summary"]);
        item.only("encrypted_content", is_empty)
    }

    /// Begins a message of the assistant, with the reasoning before it.
    fn of_assistant(&mut self, content: Option<String>) {
        let reasoning = std::mem::take(&mut self.reasoning);
        let reasoning = (!reasoning.is_empty()).then_some(reasoning);
        self.all.push(Message { role: "assistant".to_owned(), content, reasoning, ..Message::default() });
        self.open = true;
    }

    fn others(&mut self, message: Message) {
        // Reasoning that led to nothing.
        self.reasoning.clear();
        self.all.push(message);
        self.open = false;
    }
}

/// The text of a message's or a result's content: a string, or a list of parts that are all text.
fn content(item: &mut Params, name: &str) -> Result<String, Failure> {
    let place = item.full(name);
    match item.take(name) {
        None => Err(refused(&place, "it is required")),
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(list)) => {
            let texts = list.into_iter().enumerate().map(|(number, part)| {
                let mut part = Params::inside(&format!("{place}[{number}]"), part)?;
                let kind = part.required_text("type")?;
                let field = match kind.as_str() {
                    "input_text" | "output_text" | "text" => "text",
                    "refusal" => "refusal",
                    other => {
                        let reason = format!(
                            "{:?} cannot be read by the daemon's models: only \"input_text\" and \"output_text\"",
                            cut(other)
                        );
                        return Err(part.refuse("type", reason));
                    }
                };
                let text = part.required_text(field)?;
                part.drop_harmless(&["annotations", "logprobs"]);
                part.finish()?;
                Ok(text)
            });
            texts.collect()
        }
        Some(_) => Err(refused(&place, "it is neither a string nor a list of parts")),
    }
}

/// The objects of a list, which may be absent.
fn parts(
    item: &mut Params,
    name: &str,
) -> Result<impl Iterator<Item = Result<Params, Failure>> + use<>, Failure> {
    let place = item.full(name);
    let list = match item.take(name) {
        None => Vec::new(),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(refused(&place, "it is not a list")),
    };
    let parts = list.into_iter().enumerate();
    Ok(parts.map(move |(number, part)| Params::inside(&format!("{place}[{number}]"), part)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // tests fail by panicking

    use super::*;

    fn read(items: Value) -> Result<Vec<Message>, Failure> {
        let mut messages = Messages::default();
        messages.read(serde_json::from_value(items).unwrap())?;
        Ok(messages.finish())
    }

    #[test]
    fn a_call_that_was_cut_is_left_out() {
        let cut = json!({"type": "function_call", "id": "fc_1", "status": "incomplete", "call_id": "1",
            "name": "f", "arguments": "{\"a"});
        let all = read(json!([{"role": "user", "content": "a"}, cut])).unwrap();
        assert_eq!(all, [message("user", "a".into())]);
    }

    #[test]
    fn items_of_the_assistant_in_a_row_are_one_message() {
        let call = |id: &str| {
            json!({"type": "function_call", "id": "fc_1", "status": "completed", "call_id": id,
            "name": "f", "arguments": "{\"a\": 1}"})
        };
        let output = |id: &str| json!({"type": "function_call_output", "call_id": id, "output": "done"});
        let thought = |text: &str| {
            json!({"type": "reasoning", "id": "rs_1", "summary": [],
            "content": [{"type": "reasoning_text", "text": text}]})
        };
        let said = json!({"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": "I call", "annotations": [], "logprobs": []}]});
        let messages = read(json!([
            {"role": "developer", "content": "be good"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            thought("hm"), said, call("1"), call("2"), output("1"), output("2"),
            thought("again"), call("3"), output("3"), thought("lost"), {"role": "user", "content": "c"},
        ]))
        .unwrap();
        let roles: Vec<&str> = messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "tool", "assistant", "tool", "user"]);
        assert_eq!(messages[1].content.as_deref(), Some("ab"));
        let first = &messages[2];
        assert_eq!((first.content.as_deref(), first.reasoning.as_deref()), (Some("I call"), Some("hm")));
        assert_eq!(
            first.calls.iter().map(|call| call.id.as_deref().unwrap()).collect::<Vec<_>>(),
            ["1", "2"]
        );
        assert_eq!(first.calls[0].arguments, r#"{"a":1}"#);
        assert_eq!(
            (messages[3].call_id.as_deref(), messages[3].content.as_deref()),
            (Some("1"), Some("done"))
        );
        let second = &messages[5];
        assert_eq!((second.content.as_deref(), second.reasoning.as_deref()), (None, Some("again")));
        assert_eq!(second.calls.len(), 1);
    }

    #[test]
    fn items_that_cannot_be_honoured_are_named() {
        for (item, place) in [
            (json!({"type": "item_reference", "id": "x"}), "input[0].type"),
            (json!({"type": "web_search_call"}), "input[0].type"),
            (json!({"role": "tool", "content": "a"}), "input[0].role"),
            (json!({"role": "user"}), "input[0].content"),
            (json!({"role": "user", "content": [{"type": "input_image"}]}), "input[0].content[0].type"),
            (json!({"role": "user", "content": "a", "tone": "sad"}), "input[0].tone"),
            (
                json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": "[]"}),
                "input[0].arguments",
            ),
            (json!({"type": "function_call_output", "output": "x"}), "input[0].call_id"),
            (json!({"type": "reasoning", "encrypted_content": "x"}), "input[0].encrypted_content"),
            (json!("text"), "input[0]"),
        ] {
            assert_eq!(read(json!([item])).unwrap_err().param.as_deref(), Some(place));
        }
    }
}
