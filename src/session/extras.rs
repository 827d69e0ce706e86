//! The values that a chat's template sees beside roles and texts: tools, further fields of messages, and variables.

use rocmforge_client::calls::counts;
use rocmforge_client::wire::limits::TOOLS_MAX;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::model::template::TemplateRequest;

/// Most lists and objects, some 600 bytes each in memory whatever their text takes.
const CONTAINERS_MAX: usize = 1 << 14;
/// Most commas, each before a value of some 100 bytes.
const COMMAS_MAX: usize = 1 << 16;

/// The extras of a chat, read.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extras {
    /// `tools` of the template.
    #[serde(default)]
    tools: Vec<Map<String, Value>>,
    /// For each message its further fields, or null.
    #[serde(default)]
    messages: Option<Vec<Option<Map<String, Value>>>>,
    /// Further variables of the template.
    #[serde(default)]
    variables: Map<String, Value>,
}

/// Extras that no template gets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExtrasError {
    /// They are no JSON of the expected shape.
    #[error("the chat's tools, fields and variables cannot be read: {reason}")]
    Shape {
        /// The reason, with the place.
        reason: String,
    },
    /// They have too many values.
    #[error(
        "the chat's tools, fields and variables have {containers} lists and objects and {commas} commas, but at most \
         {CONTAINERS_MAX} and {COMMAS_MAX} are taken: send fewer"
    )]
    TooMany {
        /// Lists and objects.
        containers: usize,
        /// Commas.
        commas: usize,
    },
    /// There are too many tools.
    #[error("the chat has {tools} tools, but at most {TOOLS_MAX} are taken: send fewer")]
    TooManyTools {
        /// Tools of the chat.
        tools: usize,
    },
}

impl Extras {
    /// Reads the extras of a chat of so many messages. Takes at most some 20 MiB of memory for the time being.
    ///
    /// # Errors
    /// [`ExtrasError`].
    pub fn read(json: &str, messages: usize) -> Result<Self, ExtrasError> {
        let (containers, commas) = counts(json.as_bytes());
        if containers > CONTAINERS_MAX || commas > COMMAS_MAX {
            return Err(ExtrasError::TooMany { containers, commas });
        }
        let shape = |reason: String| ExtrasError::Shape { reason };
        if !json.trim_start().starts_with('{') {
            return Err(shape("they are no JSON object".to_owned())); // a list would pass for the fields in order
        }
        let extras: Self = serde_json::from_str(json).map_err(|error| shape(error.to_string()))?;
        if extras.tools.len() > TOOLS_MAX {
            return Err(ExtrasError::TooManyTools { tools: extras.tools.len() });
        }
        let fields = extras.messages.as_deref().unwrap_or_default();
        if extras.messages.is_some() && fields.len() != messages {
            let text = format!("fields of {} messages, but the chat has {messages}", fields.len());
            return Err(shape(text));
        }
        for (number, fields) in fields.iter().enumerate() {
            let Some(fields) = fields else { continue };
            if fields.contains_key("role") || fields.get("content").is_some_and(|content| !content.is_null())
            {
                let text = format!("messages[{number}]: a role or a text belongs into the message itself");
                return Err(shape(text));
            }
        }
        Ok(extras)
    }

    /// Adds them to a request with the chat's messages.
    pub fn fill(self, request: &mut TemplateRequest) {
        request.tools = self.tools.into_iter().map(Value::Object).collect();
        request.variables = self.variables;
        let fields = self.messages.unwrap_or_default();
        for (message, fields) in request.messages.iter_mut().zip(fields) {
            let Some(mut fields) = fields else { continue };
            if fields.shift_remove("content").is_some() && message.content.as_deref() == Some("") {
                message.content = None;
            }
            message.fields = fields;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::template::{Message, render_unconfined};

    #[test]
    fn a_template_sees_tools_fields_and_variables() {
        let template = "{{ tools|tojson }}|{% for m in messages %}{{ m|tojson }}{% endfor %}|{{ flag }}";
        let messages = vec![Message::new("user", "a"), Message::new("assistant", "")];
        let mut request = TemplateRequest::new(template, messages);
        let json = r#"{"tools": [{"z": 1, "a": 2.50}], "variables": {"flag": true},
            "messages": [null, {"content": null, "tool_calls": [{"id": "x"}]}]}"#;
        Extras::read(json, 2).unwrap().fill(&mut request);
        let expected = r#"[{"z": 1, "a": 2.5}]|{"role": "user", "content": "a"}{"role": "assistant", "content": null, "tool_calls": [{"id": "x"}]}|True"#;
        assert_eq!(render_unconfined(&request).unwrap(), expected);
    }

    #[test]
    fn extras_of_another_shape_or_size_are_refused() {
        for bad in [
            "",
            "[]",
            r#"{"tools": {}}"#,
            r#"{"tools": [1]}"#,
            r#"{"more": 1}"#,
            r#"{"messages": []}"#,
            r#"{"messages": [{"role": "user"}]}"#,
            r#"{"messages": [{"content": "text"}]}"#,
        ] {
            let error = Extras::read(bad, 1).unwrap_err();
            assert!(matches!(error, ExtrasError::Shape { .. }), "{bad}: {error}");
        }
        let many = |count| format!("{{\"tools\": [{{}}{}]}}", ",{}".repeat(count - 1));
        assert!(Extras::read(&many(TOOLS_MAX), 0).is_ok());
        assert_eq!(Extras::read(&many(129), 0), Err(ExtrasError::TooManyTools { tools: 129 }));
        let deep = format!("{{\"variables\": {{\"a\": {}}}}}", "[".repeat(CONTAINERS_MAX));
        assert!(matches!(Extras::read(&deep, 0), Err(ExtrasError::TooMany { .. })));
    }
}
