//! From the text between marks to calls.

use serde_json::{Map, Value};

use super::{Call, Tool};

/// The names that calls may have.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a>(Option<&'a [Tool]>);

impl<'a> Known<'a> {
    /// Any name: a mark says that there is a call.
    pub const ANY: Known<'static> = Known(None);

    /// The names of these tools.
    pub fn of(tools: &'a [Tool]) -> Self {
        Self(Some(tools))
    }

    pub fn has(self, name: &str) -> bool {
        !name.is_empty() && self.0.is_none_or(|tools| tools.iter().any(|tool| tool.name == name))
    }
}

/// The calls of an object or of a list of objects. `None` if the value is no call, or a name is not known.
pub fn of_json(text: &str, known: Known<'_>) -> Option<Vec<Call>> {
    of_value(serde_json::from_str(text).ok()?, known)
}

fn of_value(value: Value, known: Known<'_>) -> Option<Vec<Call>> {
    match value {
        Value::Array(list) if !list.is_empty() => {
            let calls: Option<Vec<Vec<Call>>> = list.into_iter().map(|one| of_value(one, known)).collect();
            Some(calls?.into_iter().flatten().collect())
        }
        Value::Object(mut fields) => {
            if let Some(inner) =
                fields.shift_remove("tool_calls").or_else(|| fields.shift_remove("tool_call"))
            {
                return of_value(inner, known);
            }
            // OpenAI's own form, which some models repeat.
            if let Some(Value::Object(function)) = fields.get_mut("function") {
                let mut function = std::mem::take(function);
                if let Some(id) = fields.shift_remove("id") {
                    function.insert("id".to_owned(), id);
                }
                return of_value(Value::Object(function), known);
            }
            of_object(fields, known).map(|call| vec![call])
        }
        _ => None,
    }
}

fn of_object(mut fields: Map<String, Value>, known: Known<'_>) -> Option<Call> {
    let Some(Value::String(name)) = fields.shift_remove("name") else { return None };
    if !known.has(&name) {
        return None;
    }
    let arguments = fields.shift_remove("arguments").or_else(|| fields.shift_remove("parameters"));
    let arguments = match arguments {
        // A list of tools has no arguments; an answer about a tool without any has neither.
        None if known.0.is_some() => return None,
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => match serde_json::from_str(&text).ok()? {
            Value::Object(arguments) => Value::Object(arguments).to_string(),
            _ => return None,
        },
        Some(arguments @ Value::Object(_)) => arguments.to_string(),
        Some(_) => return None,
    };
    let id = match fields.shift_remove("id") {
        Some(Value::String(id)) if !id.is_empty() => Some(id),
        _ => None,
    };
    Some(Call { name, arguments, id })
}

/// Whether a text is a JSON object.
pub fn is_object(text: &str) -> bool {
    serde_json::from_str::<Map<String, Value>>(text).is_ok()
}

/// Whether a text can be a function's name.
pub fn is_name(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b':' | b'/');
    (1..=256).contains(&text.len()) && text.bytes().all(fits)
}

/// The call of a name and of pairs of `<arg_key>` and `<arg_value>`. Values of parameters that are strings are taken as they
/// are, others are JSON.
pub fn of_tags(text: &str, tools: &[Tool]) -> Option<Call> {
    let (name, mut rest) = match text.find("<arg_key>") {
        Some(at) => text.split_at(at),
        None => (text, ""),
    };
    let name = name.trim();
    let schema = tools.iter().find(|tool| tool.name == name).map(|tool| &tool.parameters);
    let mut arguments = Map::new();
    while let Some(key) = rest.trim_start().strip_prefix("<arg_key>") {
        let (key, after) = key.split_once("</arg_key>")?;
        let (value, after) = after.trim_start().strip_prefix("<arg_value>")?.split_once("</arg_value>")?;
        let key = key.trim();
        let is_string = schema.is_some_and(|schema| schema["properties"][key]["type"] == "string");
        let value = match serde_json::from_str(value) {
            Ok(value) if !is_string => value,
            _ => Value::String(value.to_owned()),
        };
        arguments.insert(key.to_owned(), value);
        rest = after;
    }
    (is_name(name) && rest.trim().is_empty()).then(|| Call {
        name: name.to_owned(),
        arguments: Value::Object(arguments).to_string(),
        id: None,
    })
}
