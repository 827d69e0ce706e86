//! From the text between marks to calls.

use serde_json::{Map, Value};

use super::{Call, Tool};

/// The calls of an object or of a list of objects. With `known`, every name must be a tool's. `None` if the value is no call.
pub fn of_json(text: &str, known: Option<&[Tool]>) -> Option<Vec<Call>> {
    of_value(serde_json::from_str(text).ok()?, known)
}

fn of_value(value: Value, known: Option<&[Tool]>) -> Option<Vec<Call>> {
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

fn of_object(mut fields: Map<String, Value>, known: Option<&[Tool]>) -> Option<Call> {
    let Some(Value::String(name)) = fields.shift_remove("name") else { return None };
    if name.is_empty() || known.is_some_and(|tools| !tools.iter().any(|tool| tool.name == name)) {
        return None;
    }
    let arguments = fields.shift_remove("arguments").or_else(|| fields.shift_remove("parameters"));
    let arguments = match arguments {
        // A list of tools has no arguments; an answer about a tool without any has neither.
        None if known.is_some() => return None,
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

/// The call of a name and of an object's text.
pub fn of_parts(name: &str, arguments: &str, id: Option<&str>) -> Option<Call> {
    let name = name.trim();
    let arguments = match serde_json::from_str(arguments).ok()? {
        Value::Object(arguments) => Value::Object(arguments).to_string(),
        _ => return None,
    };
    let id = id.map(str::trim).filter(|id| !id.is_empty()).map(str::to_owned);
    is_name(name).then(|| Call { name: name.to_owned(), arguments, id })
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
