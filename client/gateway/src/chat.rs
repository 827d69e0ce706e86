//! Messages of a chat, as the APIs write them and as the daemon takes them.

use rocmforge_client::wire::ChatMessage;
use serde_json::Value;

use crate::failure::Failure;
use crate::params::{Params, refused};

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
        if kind != "text" {
            return Err(
                part.refuse("type", format!("{kind:?} cannot be read by the daemon's models: only \"text\""))
            );
        }
        text.push_str(&part.required_text("text")?);
        part.drop_harmless(&["cache_control", "citations", "annotations"]);
        part.finish()?;
    }
    Ok(text)
}

/// A message for the daemon.
pub fn message(role: &str, content: String) -> ChatMessage {
    ChatMessage { role: role.to_owned(), content }
}
