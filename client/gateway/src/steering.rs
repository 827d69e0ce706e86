//! Forms of answers, penalties, biases and further samplers, as the APIs write them and as the daemon takes them.

use rocmforge_client::wire::{AnswerForm, Dry, FormKind, GenerateRequest, Penalties, Samplers, limits};
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
    pub penalties: Penalties,
    /// Further samplers.
    pub samplers: Samplers,
}

impl Steering {
    /// The request with these limits.
    #[must_use]
    pub fn fill(&self, request: GenerateRequest) -> GenerateRequest {
        let request = match &self.form {
            Some(form) => request.with_form(form),
            None => request,
        };
        let request = match self.penalties.change_nothing() {
            true => request,
            false => request.with_penalties(&self.penalties),
        };
        match self.samplers.change_nothing() {
            true => request,
            false => request.with_samplers(&self.samplers),
        }
    }
}

/// Takes further samplers, by llama.cpp's names: no API has them all, but servers and clients of each do.
///
/// # Errors
/// As the function below.
pub fn samplers(params: &mut Params) -> Result<Samplers, Failure> {
    const MIROSTAT: &str = "mirostat";
    let usual = Samplers::default();
    let mirostat = params.take(MIROSTAT);
    if mirostat.as_ref().is_some_and(|value| *value != 0 && *value != 2) {
        return Err(params.refuse(MIROSTAT, "it is neither 0 nor 2; there is no mirostat 1 here"));
    }
    Ok(Samplers {
        typical_p: params.number("typical_p", 0.0..=1.0)?.unwrap_or(usual.typical_p),
        // Negative values switch it off in llama.cpp.
        top_n_sigma: params.number("top_n_sigma", -1.0..=100.0)?.unwrap_or(0.0).max(0.0),
        xtc_probability: params.number("xtc_probability", 0.0..=1.0)?.unwrap_or(usual.xtc_probability),
        xtc_threshold: params.number("xtc_threshold", 0.0..=1.0)?.unwrap_or(usual.xtc_threshold),
        dynatemp_range: params.number("dynatemp_range", 0.0..=100.0)?.unwrap_or(usual.dynatemp_range),
        dynatemp_exponent: params
            .number("dynatemp_exponent", 0.0..=100.0)?
            .unwrap_or(usual.dynatemp_exponent),
        mirostat: mirostat.is_some_and(|value| value == 2),
        mirostat_tau: params.number("mirostat_tau", 0.0..=100.0)?.unwrap_or(usual.mirostat_tau),
        mirostat_eta: params.number("mirostat_eta", 0.0..=1.0)?.unwrap_or(usual.mirostat_eta),
        dry: dry(params, usual.dry)?,
    })
}

fn dry(params: &mut Params, usual: Dry) -> Result<Dry, Failure> {
    const BREAKERS: &str = "dry_sequence_breakers";
    let multiplier = params.number("dry_multiplier", 0.0..=100.0)?.unwrap_or(usual.multiplier);
    let base = params.number("dry_base", 1.0..=100.0)?.unwrap_or(usual.base);
    let allowed_length = params.whole("dry_allowed_length", 0..=u32::MAX)?.unwrap_or(usual.allowed_length);
    let last = last_tokens(params, "dry_penalty_last_n")?.unwrap_or(usual.last);
    let Some(value) = params.take(BREAKERS) else {
        return Ok(Dry { multiplier, base, allowed_length, last, ..usual });
    };
    let Value::Array(list) = value else { return Err(params.refuse(BREAKERS, "it is not a list")) };
    let text = |value: Value| match value {
        Value::String(text) if (1..=limits::BREAKER_BYTES_MAX).contains(&text.len()) => Some(text),
        _ => None,
    };
    let breakers: Option<Vec<String>> = list.into_iter().map(text).collect();
    match breakers.filter(|breakers| breakers.len() <= limits::BREAKERS_MAX) {
        Some(breakers) => Ok(Dry { multiplier, base, allowed_length, last, breakers }),
        None => {
            let (most, bytes) = (limits::BREAKERS_MAX, limits::BREAKER_BYTES_MAX);
            Err(params
                .refuse(BREAKERS, format!("it is not a list of at most {most} texts of 1 to {bytes} bytes")))
        }
    }
}

/// Takes a number of last tokens: -1 stands for the whole context, of which the daemon looks at so many.
fn last_tokens(params: &mut Params, name: &str) -> Result<Option<u32>, Failure> {
    match params.take(name) {
        None => Ok(None),
        Some(value) if value == -1 => Ok(Some(limits::PENALTY_TOKENS_MAX)),
        Some(value) => match value.as_u64().and_then(|last| u32::try_from(last).ok()) {
            Some(last) => Ok(Some(last.min(limits::PENALTY_TOKENS_MAX))),
            None => Err(params.refuse(name, format!("{value} is neither -1 nor a whole number from 0"))),
        },
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

/// Takes llama.cpp's `grammar`, a text in GBNF.
///
/// # Errors
/// Status 400 if it is no text, or too long.
pub fn grammar(params: &mut Params) -> Result<Option<AnswerForm>, Failure> {
    const NAME: &str = "grammar";
    const MAX: usize = limits::FORM_BYTES_MAX - 1;
    match params.text(NAME)?.filter(|text| !text.is_empty()) {
        Some(text) if text.len() > MAX => {
            Err(params.refuse(NAME, format!("{} bytes, but at most {MAX} are allowed", text.len())))
        }
        text => Ok(text.map(|text| AnswerForm::new(FormKind::Gbnf, &text))),
    }
}

/// Takes OpenAI's `response_format`, whose schema is in an object of its own.
pub fn response_format(params: &mut Params) -> Result<Option<AnswerForm>, Failure> {
    const NAME: &str = "response_format";
    let Some(value) = params.take(NAME) else { return Ok(None) };
    let mut format = Params::inside(NAME, value)?;
    let kind = format.required_text("type")?;
    let form = if kind == "json_schema" {
        let stated =
            format.take("json_schema").ok_or_else(|| format.refuse("json_schema", "it is required"))?;
        let mut stated = Params::inside(&format.full("json_schema"), stated)?;
        let form = stated_schema(&mut stated)?;
        stated.finish()?;
        Some(form)
    } else {
        schemaless(&mut format, &kind)?
    };
    format.finish()?;
    Ok(form)
}

/// Takes `text` of OpenAI's responses, whose format has its schema beside its type.
pub fn text_format(params: &mut Params) -> Result<Option<AnswerForm>, Failure> {
    const NAME: &str = "text";
    let Some(value) = params.take(NAME) else { return Ok(None) };
    let mut text = Params::inside(NAME, value)?;
    text.only("verbosity", |verbosity| verbosity == "medium")?;
    let Some(mut format) = format_inside(text)? else { return Ok(None) };
    let kind = format.required_text("type")?;
    let form = match kind.as_str() {
        "json_schema" => Some(stated_schema(&mut format)?),
        kind => schemaless(&mut format, kind)?,
    };
    format.finish()?;
    Ok(form)
}

/// The object `format` of a field that has nothing else.
fn format_inside(mut field: Params) -> Result<Option<Params>, Failure> {
    let (place, format) = (field.full("format"), field.take("format"));
    field.finish()?;
    format.map(|format| Params::inside(&place, format)).transpose()
}

/// Takes Anthropic's `output_config`, whose format is a schema.
pub fn output_config(params: &mut Params) -> Result<Option<AnswerForm>, Failure> {
    const NAME: &str = "output_config";
    let Some(value) = params.take(NAME) else { return Ok(None) };
    let mut config = Params::inside(NAME, value)?;
    // The degree of requests without one.
    config.only("effort", |effort| effort == "high")?;
    let Some(mut format) = format_inside(config)? else { return Ok(None) };
    format.only("type", |kind| kind == "json_schema")?;
    let form = stated_schema(&mut format)?;
    format.finish()?;
    Ok(Some(form))
}

/// The form that a stated schema asks for. It is kept to in any case, so `strict` says nothing.
fn stated_schema(stated: &mut Params) -> Result<AnswerForm, Failure> {
    let schema = stated.take("schema").ok_or_else(|| stated.refuse("schema", "it is required"))?;
    stated.drop_harmless(&["name", "description", "strict"]);
    schema_form(stated, "schema", &schema)
}

/// The form of a type that needs no schema. Some servers take one beside `json_object`.
fn schemaless(format: &mut Params, kind: &str) -> Result<Option<AnswerForm>, Failure> {
    match kind {
        "text" => Ok(None),
        "json_object" => match format.take("schema") {
            Some(schema) => schema_form(format, "schema", &schema).map(Some),
            None => Ok(Some(AnswerForm::new(FormKind::JsonSchema, OBJECT))),
        },
        other => {
            let reason = format!("{other:?} cannot be honoured here: text, json_object or json_schema");
            Err(format.refuse("type", reason))
        }
    }
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
    let usual = Penalties::default();
    let last = last_tokens(options, "repeat_last_n")?.unwrap_or(usual.last);
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
        let beside: Value =
            serde_json::from_str(&format!(r#"{{"type":"json_object","schema":{schema}}}"#)).unwrap();
        assert_eq!(format(beside).unwrap().unwrap(), form);
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
        let format = |value: Value| text_format(&mut params(json!({"text": {"format": value}})));
        let stated = format!(r#"{{"type":"json_schema","name":"n","strict":true,"schema":{schema}}}"#);
        let form = format(serde_json::from_str(&stated).unwrap()).unwrap().unwrap();
        assert_eq!(form, AnswerForm::new(FormKind::JsonSchema, schema));
        assert_eq!(format(json!({"type": "text"})).unwrap(), None);
        let refused = format(json!({"type": "json_schema", "name": "n"})).unwrap_err();
        assert_eq!(refused.param.as_deref(), Some("text.format.schema"));
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

    #[test]
    fn samplers_are_taken_within_their_ranges() {
        assert_eq!(
            samplers(&mut params(json!({"top_n_sigma": -1, "mirostat": 0}))).unwrap(),
            Samplers::default()
        );
        let asked = json!({"typical_p": 0.5, "mirostat": 2, "mirostat_tau": 3, "dry_multiplier": 0.8,
            "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n", "."]});
        let taken = samplers(&mut params(asked)).unwrap();
        assert_eq!((taken.typical_p, taken.mirostat, taken.mirostat_tau), (0.5, true, 3.0));
        assert_eq!((taken.dry.multiplier, taken.dry.last), (0.8, limits::PENALTY_TOKENS_MAX));
        assert_eq!(taken.dry.breakers, ["\n", "."]);
        for (field, bad) in [
            ("typical_p", json!(1.5)),
            ("top_n_sigma", json!("1")),
            ("xtc_threshold", json!(-0.5)),
            ("mirostat", json!(1)),
            ("mirostat_eta", json!(2)),
            ("dry_base", json!(0.5)),
            ("dry_allowed_length", json!(-1)),
            ("dry_sequence_breakers", json!("x")),
            ("dry_sequence_breakers", json!([""])),
            ("dry_sequence_breakers", json!(vec!["x"; 17])),
        ] {
            let failure = samplers(&mut params(json!({ field: bad }))).unwrap_err();
            assert_eq!(failure.param.as_deref(), Some(field));
        }
    }
}
