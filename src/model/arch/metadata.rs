//! Reads an architecture's numbers, each within limits that keep later arithmetic from overflowing.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::RangeInclusive;

use crate::model::gguf::{Array, Gguf, Value};
use crate::model::plan::PlanError;

/// Most token types: BERT has 2.
const TOKEN_TYPES_MAX: u64 = 1 << 16;

/// The keys `PREFIX.*` of a file, with a record of those that were read.
pub(super) struct Metadata<'a> {
    gguf: &'a Gguf,
    prefix: &'static str,
    read: RefCell<HashSet<String>>,
}

impl<'a> Metadata<'a> {
    pub fn new(gguf: &'a Gguf, prefix: &'static str) -> Self {
        Self { gguf, prefix, read: RefCell::default() }
    }

    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    /// The value of a key. Marks the key as read.
    fn get(&self, key: &str) -> Option<&'a Value> {
        let value = self.gguf.get(key)?;
        self.read.borrow_mut().insert(key.to_owned());
        Some(value)
    }

    /// Keys not read yet, without their prefix, and their values.
    pub fn unread(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.gguf.metadata().filter_map(|(key, value)| {
            let name = key.strip_prefix(self.prefix)?.strip_prefix('.')?;
            (!self.read.borrow().contains(key)).then_some((name, value))
        })
    }

    /// Rows of the token type table: `tokenizer.ggml.token_type_count`, 0 without it.
    pub fn token_types(&self) -> Result<usize, PlanError> {
        let key = "tokenizer.ggml.token_type_count";
        match (self.gguf.get(key), self.gguf.unsigned(key)) {
            (None, _) => Ok(0),
            (_, Some(value @ 0..=TOKEN_TYPES_MAX)) => Ok(value as usize),
            (_, Some(value)) => {
                Err(PlanError::Range { key: key.to_owned(), value, min: 0, max: TOKEN_TYPES_MAX })
            }
            (_, None) => Err(PlanError::Key { key: key.to_owned(), want: "an unsigned integer" }),
        }
    }

    /// A required count within `range`.
    pub fn count(&self, name: &str, range: RangeInclusive<u64>) -> Result<usize, PlanError> {
        self.count_if_there(name, range)?
            .ok_or_else(|| PlanError::Key { key: self.key(name), want: "an unsigned integer" })
    }

    /// An optional count within `range`. An array with one value for all layers counts as that value.
    pub fn count_if_there(&self, name: &str, range: RangeInclusive<u64>) -> Result<Option<usize>, PlanError> {
        let key = self.key(name);
        let value = match self.get(&key) {
            None => return Ok(None),
            Some(Value::Array(array)) => uniform(array, &key)?,
            Some(_) => self.gguf.unsigned(&key),
        };
        let Some(value) = value else {
            return Err(PlanError::Key { key, want: "an unsigned integer" });
        };
        let (min, max) = range.into_inner();
        match usize::try_from(value) {
            Ok(count) if (min..=max).contains(&value) => Ok(Some(count)),
            _ => Err(PlanError::Range { key, value, min, max }),
        }
    }

    /// As [`Metadata::count_if_there`]; a real number without a fraction counts too.
    pub fn whole_if_there(&self, name: &str, range: RangeInclusive<u64>) -> Result<Option<usize>, PlanError> {
        let key = self.key(name);
        let (Some(value), (min, max)) = (self.gguf.float(&key), range.clone().into_inner()) else {
            return self.count_if_there(name, range);
        };
        self.get(&key);
        if value.fract() != 0.0 || !(0.0..=1e9).contains(&value) {
            return Err(PlanError::Float { key, value, want: "a whole number, at least 0" });
        }
        let count = value as u64;
        if !(min..=max).contains(&count) {
            return Err(PlanError::Range { key, value: count, min, max });
        }
        Ok(Some(count as usize))
    }

    /// As [`Metadata::count_if_there`]; layers with 0 in an array have none.
    pub fn count_beside_0(&self, name: &str, range: RangeInclusive<u64>) -> Result<Option<usize>, PlanError> {
        let key = self.key(name);
        let Some(Value::Array(array)) = self.get(&key) else { return self.count_if_there(name, range) };
        let counts: Vec<i128> = integers(array).into_iter().flatten().filter(|count| *count != 0).collect();
        if counts.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err(PlanError::PerLayer { key });
        }
        let want = "an array of integers of which one is above 0";
        let value = counts.first().and_then(|count| u64::try_from(*count).ok());
        let Some(value) = value else { return Err(PlanError::Key { key, want }) };
        let (min, max) = range.into_inner();
        match usize::try_from(value) {
            Ok(count) if (min..=max).contains(&value) => Ok(Some(count)),
            _ => Err(PlanError::Range { key, value, min, max }),
        }
    }

    /// Whether each layer's number is above 0. All are in a file with one number for all layers.
    pub fn layers_above_0(&self, name: &str, layers: usize) -> Result<Vec<bool>, PlanError> {
        match self.flags_if_there(name)? {
            None => Ok(vec![true; layers]),
            Some(flags) if flags.len() == layers => Ok(flags),
            Some(_) => Err(PlanError::Key { key: self.key(name), want: "one value for each layer" }),
        }
    }

    /// Marks a real number as read where `is_so` accepts its value.
    pub fn ignore_if(&self, name: &str, is_so: impl Fn(f32) -> bool) {
        let key = self.key(name);
        if self.gguf.float(&key).is_some_and(is_so) {
            self.read.borrow_mut().insert(key);
        }
    }

    /// Marks an array as read that has one text at most.
    pub fn ignore_one_text(&self, name: &str) {
        let key = self.key(name);
        if self.gguf.strings(&key).is_some_and(|texts| texts.len() <= 1) {
            self.read.borrow_mut().insert(key);
        }
    }

    /// An optional array of texts.
    pub fn texts_if_there(&self, name: &str) -> Result<Option<Vec<&'a str>>, PlanError> {
        let key = self.key(name);
        if self.get(&key).is_none() {
            return Ok(None);
        }
        let texts = self.gguf.strings(&key).map(|texts| texts.iter().collect());
        texts.map(Some).ok_or(PlanError::Key { key, want: "an array of strings" })
    }

    /// An optional array of real numbers, of which some may not be finite.
    pub fn floats_if_there(&self, name: &str) -> Result<Option<Vec<f32>>, PlanError> {
        let key = self.key(name);
        match self.get(&key) {
            None => Ok(None),
            Some(Value::Array(Array::F32(numbers))) => Ok(Some(numbers.clone())),
            Some(_) => Err(PlanError::Key { key, want: "an array of real numbers" }),
        }
    }

    /// An optional finite real number.
    pub fn float_if_there(&self, name: &str) -> Result<Option<f32>, PlanError> {
        let key = self.key(name);
        if self.get(&key).is_none() {
            return Ok(None);
        }
        match self.gguf.float(&key) {
            None => Err(PlanError::Key { key, want: "a real number" }),
            Some(value) if !value.is_finite() => Err(PlanError::Float { key, value, want: "finite" }),
            Some(value) => Ok(Some(value)),
        }
    }

    /// An optional real number above 0.
    pub fn above_0(&self, name: &str) -> Result<Option<f32>, PlanError> {
        match self.float_if_there(name)? {
            Some(value) if value <= 0.0 => {
                Err(PlanError::Float { key: self.key(name), value, want: "above 0" })
            }
            value => Ok(value),
        }
    }

    /// An optional bool.
    pub fn flag_if_there(&self, name: &str) -> Result<Option<bool>, PlanError> {
        let key = self.key(name);
        if self.get(&key).is_none() {
            return Ok(None);
        }
        self.gguf.boolean(&key).map(Some).ok_or(PlanError::Key { key, want: "a bool" })
    }

    /// An array of bools, or of integers where every nonzero value is true; `None` where the file has no array.
    pub fn flags_if_there(&self, name: &str) -> Result<Option<Vec<bool>>, PlanError> {
        let key = self.key(name);
        match self.get(&key) {
            Some(Value::Array(Array::Bool(flags))) => Ok(Some(flags.clone())),
            Some(Value::Array(array)) => {
                let numbers = integers(array).ok_or(PlanError::Key { key, want: "an array of bools" })?;
                Ok(Some(numbers.into_iter().map(|n| n != 0).collect()))
            }
            _ => Ok(None),
        }
    }

    /// Refuses a file where a number, or any of an array, satisfies `other`: it asks for `feature`.
    pub fn refuse_any(
        &self,
        name: &str,
        feature: &str,
        other: impl Fn(i128) -> bool,
    ) -> Result<(), PlanError> {
        let key = self.key(name);
        let found = match self.get(&key) {
            None => return Ok(()),
            Some(Value::Array(array)) => integers(array),
            Some(_) => self.gguf.unsigned(&key).map(|n| vec![n.into()]),
        };
        let found = found.ok_or(PlanError::Key { key, want: "an integer or an array of integers" })?;
        match found.into_iter().find(|n| other(*n)) {
            None => Ok(()),
            Some(n) => Err(self.unsupported(&format!("{feature} ({name} has {n})"))),
        }
    }

    /// An array of integers that are at least 0; `None` where the file has no such key.
    pub fn numbers(&self, name: &str) -> Result<Option<Vec<usize>>, PlanError> {
        let key = self.key(name);
        let Some(value) = self.get(&key) else { return Ok(None) };
        let found = if let Value::Array(array) = value { integers(array) } else { None };
        let all = found.and_then(|all| all.into_iter().map(|n| usize::try_from(n).ok()).collect());
        all.map(Some).ok_or(PlanError::Key { key, want: "an array of integers that are at least 0" })
    }

    /// The error for a model of this architecture that needs another computation.
    pub fn unsupported(&self, feature: &str) -> PlanError {
        PlanError::Feature { architecture: self.prefix.to_owned(), feature: feature.to_owned() }
    }

    /// An optional string.
    pub fn string_if_there(&self, name: &str) -> Result<Option<&'a str>, PlanError> {
        let key = self.key(name);
        if self.get(&key).is_none() {
            return Ok(None);
        }
        self.gguf.string(&key).map(Some).ok_or(PlanError::Key { key, want: "a string" })
    }
}

/// Values of an array of integers.
pub(super) fn integers(array: &Array) -> Option<Vec<i128>> {
    Some(match array {
        Array::U8(v) => v.iter().map(|&n| n.into()).collect(),
        Array::U16(v) => v.iter().map(|&n| n.into()).collect(),
        Array::U32(v) => v.iter().map(|&n| n.into()).collect(),
        Array::U64(v) => v.iter().map(|&n| n.into()).collect(),
        Array::I8(v) => v.iter().map(|&n| n.into()).collect(),
        Array::I16(v) => v.iter().map(|&n| n.into()).collect(),
        Array::I32(v) => v.iter().map(|&n| n.into()).collect(),
        Array::I64(v) => v.iter().map(|&n| n.into()).collect(),
        _ => return None,
    })
}

/// The value of an array whose values are all equal; `None` when it is empty, negative or not of integers.
fn uniform(array: &Array, key: &str) -> Result<Option<u64>, PlanError> {
    let values = integers(array).map(|all| all.into_iter().map(u64::try_from).collect::<Result<Vec<_>, _>>());
    let Some(Ok(values)) = values else { return Ok(None) };
    if values.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err(PlanError::PerLayer { key: key.to_owned() });
    }
    Ok(values.first().copied())
}
