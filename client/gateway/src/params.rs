//! The fields of a request's JSON object: each is taken by name, and a field that nothing took is refused by its name.

use std::ops::RangeInclusive;

use rocmforge_client::calls::counts;
use rocmforge_client::wire::limits;
use serde_json::{Map, Value};
use tokio::sync::OwnedSemaphorePermit;

use crate::failure::Failure;

/// An object whose fields are taken one by one. A field that is null counts as absent.
#[derive(Debug)]
pub struct Params {
    /// Place of the object in the request, such as `messages[2].`; empty for the request itself.
    place: String,
    fields: Map<String, Value>,
    /// Room for the body's bytes, held until all fields are taken.
    room: Option<OwnedSemaphorePermit>,
}

/// Most lists and objects of a body, some 600 bytes each in memory whatever their text takes.
const CONTAINERS_MAX: usize = 1 << 16;
/// Most commas of a body, each before a value of some 100 bytes: a prompt of a million token ids has as many.
const COMMAS_MAX: usize = 1 << 20;

impl Params {
    /// Reads a request's body.
    ///
    /// # Errors
    /// A failure of status 400 with the place of the fault.
    pub fn read(body: &[u8]) -> Result<Self, Failure> {
        let (containers, commas) = counts(body);
        if containers > CONTAINERS_MAX || commas > COMMAS_MAX {
            let text = format!(
                "the body has {containers} lists and objects and {commas} commas, but at most {CONTAINERS_MAX} and \
                 {COMMAS_MAX} are taken"
            );
            return Err(Failure::new(413, text));
        }
        let value: Value = serde_json::from_slice(body)
            .map_err(|error| Failure::invalid(format!("the body is no JSON: {error}")))?;
        match value {
            Value::Object(fields) => Ok(Self { place: String::new(), fields, room: None }),
            other => Err(Failure::invalid(format!("the body is {}, not an object", kind(&other)))),
        }
    }

    /// An object inside of a request, such as a message.
    ///
    /// # Errors
    /// A failure of status 400 if the value is no object.
    pub fn inside(place: &str, value: Value) -> Result<Self, Failure> {
        match value {
            Value::Object(fields) => Ok(Self { place: format!("{place}."), fields, room: None }),
            other => Err(refused(place, format!("it is {}, not an object", kind(&other)))),
        }
    }

    /// The same object, with the room for its body's bytes.
    pub fn holding(self, room: Option<OwnedSemaphorePermit>) -> Self {
        Self { room, ..self }
    }

    /// A field's name with its place.
    pub fn full(&self, name: &str) -> String {
        format!("{}{name}", self.place)
    }

    /// A failure that names the field.
    pub fn refuse(&self, name: &str, reason: impl std::fmt::Display) -> Failure {
        refused(&self.full(name), reason)
    }

    /// Takes a field of any kind.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    /// Sets a field.
    pub fn set(&mut self, name: &str, value: Value) {
        self.fields.insert(name.to_owned(), value);
    }

    /// A copy of a field, which stays; null if it is absent.
    pub fn copy(&self, name: &str) -> Value {
        self.fields.get(name).cloned().unwrap_or_default()
    }

    /// Takes a text.
    ///
    /// # Errors
    /// A failure of status 400 if it is no text; so also the functions below.
    pub fn text(&mut self, name: &str) -> Result<Option<String>, Failure> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, &other, "a string")),
        }
    }

    /// Takes a text that must be there.
    ///
    /// # Errors
    /// As [`Params::text`].
    pub fn required_text(&mut self, name: &str) -> Result<String, Failure> {
        self.text(name)?.ok_or_else(|| self.refuse(name, "it is required"))
    }

    /// Takes a boolean; `None` if it is absent.
    ///
    /// # Errors
    /// As [`Params::text`].
    pub fn flag(&mut self, name: &str) -> Result<Option<bool>, Failure> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(self.wrong(name, &other, "true or false")),
        }
    }

    /// Takes a number within a range.
    ///
    /// # Errors
    /// As [`Params::text`].
    pub fn number(&mut self, name: &str, range: RangeInclusive<f32>) -> Result<Option<f32>, Failure> {
        let Some(value) = self.take(name) else { return Ok(None) };
        // A number beyond single precision becomes infinite, which no range has.
        #[allow(clippy::cast_possible_truncation)]
        let number = value.as_f64().ok_or_else(|| self.wrong(name, &value, "a number"))? as f32;
        if range.contains(&number) {
            return Ok(Some(number));
        }
        Err(self.refuse(name, format!("{value} is not in {}..={}", range.start(), range.end())))
    }

    /// Takes a whole number within a range.
    ///
    /// # Errors
    /// As [`Params::text`].
    pub fn whole(&mut self, name: &str, range: RangeInclusive<u32>) -> Result<Option<u32>, Failure> {
        let Some(value) = self.take(name) else { return Ok(None) };
        // Some clients write whole numbers as 7.0.
        let number = value.as_i64().or_else(|| whole_of(value.as_f64()?));
        let number = number.ok_or_else(|| self.wrong(name, &value, "a whole number"))?;
        match u32::try_from(number).ok().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.refuse(name, format!("{number} is not in {}..={}", range.start(), range.end()))),
        }
    }

    /// Takes a seed: any whole number of 64 bits, with or without a sign.
    ///
    /// # Errors
    /// As [`Params::text`].
    pub fn seed(&mut self, name: &str) -> Result<Option<u64>, Failure> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let seed = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
        seed.map(Some).ok_or_else(|| self.wrong(name, &value, "a whole number of 64 bits"))
    }

    /// Takes a text or a list of texts, as a list.
    ///
    /// # Errors
    /// As [`Params::text`].
    pub fn texts(&mut self, name: &str) -> Result<Vec<String>, Failure> {
        match self.take(name) {
            None => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![text]),
            Some(Value::Array(list)) => list
                .into_iter()
                .map(|one| match one {
                    Value::String(text) => Ok(text),
                    other => Err(self.wrong(name, &other, "a string in the list")),
                })
                .collect(),
            Some(other) => Err(self.wrong(name, &other, "a string or a list of strings")),
        }
    }

    /// Takes a list that must be there and not be empty.
    ///
    /// # Errors
    /// As [`Params::text`].
    pub fn required_list(&mut self, name: &str) -> Result<Vec<Value>, Failure> {
        match self.take(name) {
            None => Err(self.refuse(name, "it is required")),
            Some(Value::Array(list)) if !list.is_empty() => Ok(list),
            Some(Value::Array(_)) => Err(self.refuse(name, "the list is empty")),
            Some(other) => Err(self.wrong(name, &other, "a list")),
        }
    }

    /// Takes texts that end an answer.
    ///
    /// # Errors
    /// As [`Params::text`]; also for more or longer ones than the daemon takes. An empty one would end every answer at once.
    pub fn stops(&mut self, name: &str) -> Result<Vec<String>, Failure> {
        const COUNT_MAX: usize = limits::STOP_TEXTS_MAX;
        const BYTES_MAX: usize = limits::STOP_TEXT_BYTES_MAX;
        let stops = self.texts(name)?;
        if stops.len() > COUNT_MAX {
            return Err(
                self.refuse(name, format!("{} texts, but at most {COUNT_MAX} are allowed", stops.len()))
            );
        }
        match stops.iter().map(String::len).find(|bytes| !(1..=BYTES_MAX).contains(bytes)) {
            None => Ok(stops),
            Some(bytes) => {
                Err(self.refuse(name, format!("a text of {bytes} bytes, but 1 to {BYTES_MAX} are allowed")))
            }
        }
    }

    /// Drops fields that change no answer.
    pub fn drop_harmless(&mut self, names: &[&str]) {
        for name in names {
            self.fields.remove(*name);
        }
    }

    /// Accepts a field only with a value that changes nothing, because others cannot be honoured.
    ///
    /// # Errors
    /// A failure of status 400 that names the field and its value.
    pub fn only(&mut self, name: &str, harmless: impl Fn(&Value) -> bool) -> Result<(), Failure> {
        match self.take(name) {
            Some(value) if !harmless(&value) => {
                Err(self.refuse(name, format!("{} cannot be honoured here: leave it out", shown(&value))))
            }
            _ => Ok(()),
        }
    }

    /// Ends the object.
    ///
    /// # Errors
    /// A failure of status 400 that names a field which nothing took.
    pub fn finish(mut self) -> Result<(), Failure> {
        drop(self.room.take());
        let left = self.fields.iter().find(|(_, value)| !value.is_null());
        match left {
            None => Ok(()),
            Some((name, _)) => {
                Err(refused(&self.full(name), "it is unknown or cannot be honoured here: leave it out"))
            }
        }
    }

    fn wrong(&self, name: &str, found: &Value, wanted: &str) -> Failure {
        self.refuse(name, format!("it is {}, not {wanted}", kind(found)))
    }
}

/// A failure of status 400 that names a field.
pub fn refused(full: &str, reason: impl std::fmt::Display) -> Failure {
    // A name from outside may be as long as the body.
    let full: String = full.chars().take(200).collect();
    Failure::invalid(format!("{full}: {reason}")).about(&full)
}

/// True for 0, `false`, and empty texts, lists and objects.
pub fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

fn whole_of(number: f64) -> Option<i64> {
    let fits = number.fract() == 0.0 && number.abs() < 9e15;
    // The range was checked, and there is no fraction to lose.
    #[allow(clippy::cast_possible_truncation)]
    fits.then_some(number as i64)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A value for a message, cut short.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    let cut: String = text.chars().take(80).collect();
    if cut.len() < text.len() { format!("{cut}...") } else { cut }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)] // tests fail by panicking

    use super::*;

    fn params(text: &str) -> Params {
        Params::read(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_field_that_nothing_takes_is_refused_by_name() {
        let mut fields = params(r#"{"model": "m", "top_p": 0.5, "nothing": null, "strange": 1}"#);
        assert_eq!(fields.required_text("model").unwrap(), "m");
        assert_eq!(fields.number("top_p", 0.0..=1.0).unwrap(), Some(0.5));
        let failure = fields.finish().unwrap_err();
        assert_eq!((failure.status, failure.param.as_deref()), (400, Some("strange")));
        let inside = Params::inside("messages[2]", serde_json::json!({"tone": "sad"})).unwrap();
        assert_eq!(inside.finish().unwrap_err().param.as_deref(), Some("messages[2].tone"));
    }

    #[test]
    fn numbers_are_checked_against_their_range_and_kind() {
        let all = r#"{"a": 3, "b": 3.0, "c": 3.5, "d": -1, "e": 1e300, "f": "3", "g": 18446744073709551615}"#;
        let whole = |name: &str| params(all).whole(name, 1..=9);
        assert_eq!((whole("a").unwrap(), whole("b").unwrap()), (Some(3), Some(3)));
        assert_eq!(whole("absent").unwrap(), None);
        for bad in ["c", "d", "e", "f", "g"] {
            assert_eq!(whole(bad).unwrap_err().param.as_deref(), Some(bad));
        }
        assert!(params(all).number("e", 0.0..=f32::MAX).is_err());
        assert_eq!(params(all).seed("g").unwrap(), Some(u64::MAX));
        assert_eq!(params(all).seed("d").unwrap(), Some(u64::MAX));
        assert!(params(all).seed("c").is_err());
    }

    #[test]
    fn texts_that_end_an_answer_are_one_or_a_list() {
        let stops = |text: &str| params(text).stops("stop");
        assert_eq!(stops("{}").unwrap(), [""; 0]);
        assert_eq!(stops(r#"{"stop": "a"}"#).unwrap(), ["a"]);
        assert_eq!(stops(r#"{"stop": ["a", "b"]}"#).unwrap(), ["a", "b"]);
        for bad in [r#"{"stop": ""}"#, r#"{"stop": ["a", 1]}"#, r#"{"stop": {}}"#] {
            assert_eq!(stops(bad).unwrap_err().param.as_deref(), Some("stop"), "{bad}");
        }
    }

    #[test]
    fn a_value_that_changes_nothing_is_accepted_and_others_are_named() {
        let mut fields = params(r#"{"n": 1, "penalty": 0.5, "bias": {}}"#);
        fields.only("n", |n| n == 1).unwrap();
        fields.only("bias", is_empty).unwrap();
        let failure = fields.only("penalty", is_empty).unwrap_err();
        assert!(failure.message.starts_with("penalty: 0.5 cannot be honoured"), "{}", failure.message);
        fields.finish().unwrap();
    }

    #[test]
    fn a_body_that_is_no_object_is_refused() {
        for bad in ["", "{", "[1]", "3", "{\"a\": 1,}", "\u{0}"] {
            assert_eq!(Params::read(bad.as_bytes()).unwrap_err().status, 400, "{bad}");
        }
        let deep = "[".repeat(50_000);
        assert_eq!(Params::read(deep.as_bytes()).unwrap_err().status, 400);
    }

    /// Eight bytes of a body can become hundreds in memory.
    #[test]
    fn a_body_of_too_many_values_is_refused_and_one_of_long_texts_is_not() {
        let objects = |count| format!("{{\"a\": [{}{{}}]}}", "{},".repeat(count - 3));
        assert!(Params::read(objects(CONTAINERS_MAX).as_bytes()).is_ok());
        assert_eq!(Params::read(objects(CONTAINERS_MAX + 1).as_bytes()).unwrap_err().status, 413);
        let numbers = |commas| format!("{{\"a\": [{}1]}}", "1,".repeat(commas));
        assert!(Params::read(numbers(COMMAS_MAX).as_bytes()).is_ok());
        assert_eq!(Params::read(numbers(COMMAS_MAX + 1).as_bytes()).unwrap_err().status, 413);
        let text = format!("{{\"a\": \"{}\"}}", "{[,\\\"".repeat(CONTAINERS_MAX));
        assert!(Params::read(text.as_bytes()).is_ok());
    }
}
