//! Forms of answers, penalties and biases, as the APIs write them and as the daemon takes them.

use rocmforge_client::wire::{AnswerForm, FormKind, GenerateRequest, Penalties, limits};
use serde_json::Value;

use crate::failure::Failure;
use crate::params::{Params, is_empty};

/// Any JSON object.
const OBJECT: &str = r#"{"type": "object"}"#;

/// The limits of an answer's tokens that a request states.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Steering {
    /// The form of the answer.
    pub form: Option<AnswerForm>,
    /// Penalties and biases.
    pub penalties: Option<Penalties>,
}

impl Steering {
    /// The request with these limits.
    #[must_use]
    pub fn fill(&self, request: GenerateRequest) -> GenerateRequest {
        let request = match &self.form {
            Some(form) => request.with_form(form),
            None => request,
        };
        match self.penalties.as_ref().filter(|penalties| !penalties.change_nothing()) {
            Some(penalties) => request.with_penalties(penalties),
            None => request,
        }
    }
}

/// Takes OpenAI's penalties and biases. As its page has it, only tokens of the answer count; the daemon counts the last
/// [`limits::PENALTY_TOKENS_MAX`] of them.
///
/// # Errors
/// Status 400 with the field at fault; so also the functions below.
pub fn openai_penalties(params: &mut Params) -> Result<Penalties, Failure> {
    Ok(Penalties {
        frequency: params.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        presence: params.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        last: limits::PENALTY_TOKENS_MAX,
        prompt: false,
        bias: biases(params)?,
        ..Penalties::default()
    })
}

fn biases(params: &mut Params) -> Result<Vec<(u32, f32)>, Failure> {
    const NAME: &str = "logit_bias";
    const MAX: usize = limits::BIASES_MAX;
    let Some(value) = params.take(NAME).filter(|value| !is_empty(value)) else { return Ok(Vec::new()) };
    let Value::Object(fields) = value else { return Err(params.refuse(NAME, "it is not an object")) };
    if fields.len() > MAX {
        return Err(params.refuse(NAME, format!("{} tokens, but at most {MAX} are allowed", fields.len())));
    }
    let mut biases = Vec::with_capacity(fields.len());
    for (token, value) in fields {
        let id = token.parse::<u32>().map_err(|_| params.refuse(NAME, "a key is not a token id"))?;
        let Some(bias) = value.as_f64().filter(|bias| (-100.0..=100.0).contains(bias)) else {
            return Err(params.refuse(NAME, format!("the bias of token {id} is not in -100..=100")));
        };
        // Within the range, single precision has it.
        #[allow(clippy::cast_possible_truncation)]
        biases.push((id, bias as f32));
    }
    Ok(biases)
}

/// Takes OpenAI's `response_format`.
pub fn response_format(params: &mut Params) -> Result<Option<AnswerForm>, Failure> {
    const NAME: &str = "response_format";
    let Some(value) = params.take(NAME) else { return Ok(None) };
    let mut format = Params::inside(NAME, value)?;
    let kind = format.required_text("type")?;
    let form = match kind.as_str() {
        "text" => None,
        "json_object" => Some(AnswerForm::new(FormKind::JsonSchema, OBJECT)),
        "json_schema" => {
            let stated =
                format.take("json_schema").ok_or_else(|| format.refuse("json_schema", "it is required"))?;
            let mut stated = Params::inside(&format.full("json_schema"), stated)?;
            let schema = stated.take("schema").ok_or_else(|| stated.refuse("schema", "it is required"))?;
            // The schema is kept to in any case.
            stated.drop_harmless(&["name", "description", "strict"]);
            let form = schema_form(&stated, "schema", &schema)?;
            stated.finish()?;
            Some(form)
        }
        other => {
            let reason = format!("{other:?} cannot be honoured here: text, json_object or json_schema");
            return Err(format.refuse("type", reason));
        }
    };
    format.finish()?;
    Ok(form)
}

/// Takes Ollama's `format`: `"json"` or a schema.
pub fn ollama_format(params: &mut Params) -> Result<Option<AnswerForm>, Failure> {
    const NAME: &str = "format";
    match params.take(NAME) {
        None => Ok(None),
        Some(value) if value == "" => Ok(None),
        Some(value) if value == "json" => Ok(Some(AnswerForm::new(FormKind::JsonSchema, OBJECT))),
        Some(schema @ Value::Object(_)) => schema_form(params, NAME, &schema).map(Some),
        Some(_) => Err(params.refuse(NAME, "it is neither \"json\" nor a JSON schema")),
    }
}

fn schema_form(params: &Params, name: &str, schema: &Value) -> Result<AnswerForm, Failure> {
    const MAX: usize = limits::FORM_BYTES_MAX - 1;
    let text = schema.to_string();
    if text.len() > MAX {
        return Err(
            params.refuse(name, format!("a schema of {} bytes, but at most {MAX} are allowed", text.len()))
        );
    }
    Ok(AnswerForm::new(FormKind::JsonSchema, &text))
}

/// Takes Ollama's penalties. Without them there are none: clients that want those of Ollama's model files send them.
pub fn ollama_penalties(options: &mut Params) -> Result<Penalties, Failure> {
    const LAST: &str = "repeat_last_n";
    let usual = Penalties::default();
    let last = match options.take(LAST) {
        None => usual.last,
        // The whole context, of which the daemon counts so many.
        Some(value) if value == -1 => limits::PENALTY_TOKENS_MAX,
        Some(value) => match value.as_u64().and_then(|last| u32::try_from(last).ok()) {
            Some(last) => last.min(limits::PENALTY_TOKENS_MAX),
            None => {
                return Err(options.refuse(LAST, format!("{value} is neither -1 nor a whole number from 0")));
            }
        },
    };
    Ok(Penalties {
        repeat: options.number("repeat_penalty", 0.01..=100.0)?.unwrap_or(usual.repeat),
        frequency: options.number("frequency_penalty", -100.0..=100.0)?.unwrap_or(0.0),
        presence: options.number("presence_penalty", -100.0..=100.0)?.unwrap_or(0.0),
        last,
        ..usual
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)] // tests fail by panicking

    use serde_json::json;

    use super::*;

    fn params(value: Value) -> Params {
        Params::read(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn formats_become_schemas_in_their_order() {
        let format = |value: Value| response_format(&mut params(json!({ "response_format": value })));
        assert_eq!(format(json!({"type": "text"})).unwrap(), None);
        assert_eq!(format(json!({"type": "json_object"})).unwrap().unwrap().text, OBJECT);
        let schema = r#"{"type":"object","properties":{"z":{"type":"null"},"a":{"type":"null"}}}"#;
        let stated = format!(
            r#"{{"type":"json_schema","json_schema":{{"name":"n","strict":true,"schema":{schema}}}}}"#
        );
        let form = format(serde_json::from_str(&stated).unwrap()).unwrap().unwrap();
        assert_eq!(form, AnswerForm::new(FormKind::JsonSchema, schema));
        for (value, place) in [
            (json!({"type": "xml"}), "response_format.type"),
            (json!({"type": "json_schema"}), "response_format.json_schema"),
            (
                json!({"type": "json_schema", "json_schema": {"name": "n"}}),
                "response_format.json_schema.schema",
            ),
            (json!({"type": "text", "more": 1}), "response_format.more"),
        ] {
            assert_eq!(format(value).unwrap_err().param.as_deref(), Some(place));
        }
        let format = |value: Value| ollama_format(&mut params(json!({ "format": value })));
        assert_eq!(format(json!("json")).unwrap().unwrap().text, OBJECT);
        assert_eq!(format(serde_json::from_str(schema).unwrap()).unwrap().unwrap().text, schema);
        assert_eq!((format(json!("")).unwrap(), format(json!(null)).unwrap()), (None, None));
        assert_eq!(format(json!(["a"])).unwrap_err().param.as_deref(), Some("format"));
        let long = json!({ "description": "x".repeat(limits::FORM_BYTES_MAX) });
        assert_eq!(format(long).unwrap_err().param.as_deref(), Some("format"));
    }

    #[test]
    fn penalties_are_taken_within_their_ranges() {
        let asked =
            json!({"frequency_penalty": 0.5, "presence_penalty": -2, "logit_bias": {"7": -100, "9": 1.5}});
        let penalties = openai_penalties(&mut params(asked)).unwrap();
        assert_eq!((penalties.frequency, penalties.presence, penalties.prompt), (0.5, -2.0, false));
        assert_eq!(penalties.bias, [(7, -100.0), (9, 1.5)]);
        assert!(openai_penalties(&mut params(json!({"logit_bias": {}}))).unwrap().change_nothing());
        for (field, bad) in [
            ("frequency_penalty", json!(2.5)),
            ("presence_penalty", json!("1")),
            ("logit_bias", json!([1])),
            ("logit_bias", json!({"x": 1})),
            ("logit_bias", json!({"1": 101})),
        ] {
            let failure = openai_penalties(&mut params(json!({ field: bad }))).unwrap_err();
            assert_eq!(failure.param.as_deref(), Some(field));
        }
        let options = json!({"repeat_penalty": 1.1, "repeat_last_n": -1, "presence_penalty": 0.5});
        let penalties = ollama_penalties(&mut params(options)).unwrap();
        assert_eq!((penalties.repeat, penalties.last), (1.1, limits::PENALTY_TOKENS_MAX));
        assert!(penalties.prompt);
        assert!(ollama_penalties(&mut params(json!({"repeat_penalty": 0}))).is_err());
        assert!(ollama_penalties(&mut params(json!({"repeat_last_n": -2}))).is_err());
    }
}
