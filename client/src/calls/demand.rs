//! A constraint under which an answer must be a call.

use serde_json::{Value, json};

use super::{Form, Tool};
use crate::wire::{AnswerForm, FormKind, limits};

/// Most calls of an answer that must have some: without a bound, a model may write calls for long.
const CALLS_MAX: usize = 8;

/// White space of arguments and answers where JSON allows it.
const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,16}";

/// An answer's form, and the form by which its calls are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// For the request.
    pub answer: AnswerForm,
    /// For the [`super::Parser`].
    pub form: Form,
}

/// The constraint that an answer is a call of one of these tools; with `parallel`, of up to eight. Its arguments keep to the
/// tool's schema. Models whose marks are control tokens write objects alone, because no constraint can ask for such tokens.
///
/// With `otherwise`, the text of a JSON schema, the answer may also be a value of that schema. Where calls are objects alone, a
/// value that looks like a call of one of the tools is read as one.
///
/// # Errors
/// The bytes of a constraint that is too long for the protocol.
pub fn demand(form: Form, tools: &[Tool], parallel: bool, otherwise: Option<&str>) -> Result<Demand, usize> {
    let hermes = form == Form::Hermes;
    let (before, after, form) =
        if hermes { ("<tool_call>\n", "\n</tool_call>", Form::Hermes) } else { ("", "", Form::Described) };
    let more = CALLS_MAX - 1;
    let calls = match (parallel, hermes) {
        (false, _) => "call".to_owned(),
        (true, true) => format!("call (\"\\n\" call){{0,{more}}}"),
        (true, false) => format!("call | \"[\" call (\", \" call){{0,{more}}} \"]\""),
    };
    let start = match otherwise {
        None => format!("start: {calls}\n"),
        Some(schema) => format!("start: {calls} | answer\nanswer: %json {}\n", with_bound(schema)),
    };
    let names: Vec<String> = (0..tools.len()).map(|number| format!("call_{number}")).collect();
    let mut grammar = format!("{start}call: {}\n", names.join(" | "));
    for (number, tool) in tools.iter().enumerate() {
        let head = format!("{before}{{\"name\": {}, \"arguments\": ", Value::from(tool.name.as_str()));
        let (head, tail) = (Value::from(head), Value::from(format!("}}{after}")));
        let mut schema = tool.parameters.clone();
        if let Value::Object(keys) = &mut schema {
            keys.entry("type").or_insert_with(|| json!("object"));
        }
        bound(&mut schema);
        grammar +=
            &format!("call_{number}: {head} arguments_{number} {tail}\narguments_{number}: %json {schema}\n");
    }
    if grammar.len() >= limits::FORM_BYTES_MAX {
        return Err(grammar.len());
    }
    Ok(Demand { answer: AnswerForm::new(FormKind::Lark, &grammar), form })
}

/// Bounds the white space of a schema's values.
fn bound(schema: &mut Value) {
    if let Value::Object(keys) = schema {
        keys.insert("x-guidance".to_owned(), json!({ "whitespace_pattern": WHITE_SPACE }));
    }
}

/// The text of a schema whose white space is bounded. The daemon says why a text is no schema.
fn with_bound(schema: &str) -> String {
    let Ok(mut value) = serde_json::from_str(schema) else { return schema.to_owned() };
    bound(&mut value);
    value.to_string()
}
