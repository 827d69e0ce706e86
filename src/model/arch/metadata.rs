//! Reading an architecture's numbers, each within limits that keep later arithmetic from overflowing.

use std::ops::RangeInclusive;

use crate::model::gguf::{Array, Gguf, Value};
use crate::model::plan::PlanError;

/// The keys `PREFIX.*` of a file.
pub(super) struct Metadata<'a> {
    gguf: &'a Gguf,
    prefix: &'static str,
}

impl<'a> Metadata<'a> {
    pub fn new(gguf: &'a Gguf, prefix: &'static str) -> Self {
        Self { gguf, prefix }
    }

    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    /// A required count within `range`.
    pub fn count(&self, name: &str, range: RangeInclusive<u64>) -> Result<usize, PlanError> {
        self.count_if_there(name, range)?
            .ok_or_else(|| PlanError::Key { key: self.key(name), want: "an unsigned integer" })
    }

    /// A count within `range`, where the file has it. An array with one value for all layers counts as that value.
    pub fn count_if_there(&self, name: &str, range: RangeInclusive<u64>) -> Result<Option<usize>, PlanError> {
        let key = self.key(name);
        let value = match self.gguf.get(&key) {
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

    /// A finite real number, where the file has it.
    pub fn float_if_there(&self, name: &str) -> Result<Option<f32>, PlanError> {
        let key = self.key(name);
        if self.gguf.get(&key).is_none() {
            return Ok(None);
        }
        match self.gguf.float(&key) {
            None => Err(PlanError::Key { key, want: "a real number" }),
            Some(value) if !value.is_finite() => Err(PlanError::Float { key, value, want: "finite" }),
            Some(value) => Ok(Some(value)),
        }
    }

    /// A real number above 0, where the file has it.
    pub fn above_0(&self, name: &str) -> Result<Option<f32>, PlanError> {
        match self.float_if_there(name)? {
            Some(value) if value <= 0.0 => {
                Err(PlanError::Float { key: self.key(name), value, want: "above 0" })
            }
            value => Ok(value),
        }
    }

    /// A truth value, where the file has it.
    pub fn flag_if_there(&self, name: &str) -> Result<Option<bool>, PlanError> {
        let key = self.key(name);
        if self.gguf.get(&key).is_none() {
            return Ok(None);
        }
        self.gguf.boolean(&key).map(Some).ok_or(PlanError::Key { key, want: "a bool" })
    }

    /// The error for a model that shares the architecture's name and needs other arithmetic.
    pub fn unsupported(&self, feature: &str) -> PlanError {
        PlanError::Feature { architecture: self.prefix.to_owned(), feature: feature.to_owned() }
    }

    /// A text, where the file has it.
    pub fn string_if_there(&self, name: &str) -> Result<Option<&'a str>, PlanError> {
        let key = self.key(name);
        if self.gguf.get(&key).is_none() {
            return Ok(None);
        }
        self.gguf.string(&key).map(Some).ok_or(PlanError::Key { key, want: "a string" })
    }
}

/// The value of an array whose values are all equal; `None` when it is empty, negative or not of integers.
fn uniform(array: &Array, key: &str) -> Result<Option<u64>, PlanError> {
    let values: Option<Vec<u64>> = match array {
        Array::U8(v) => Some(v.iter().map(|&n| n.into()).collect()),
        Array::U16(v) => Some(v.iter().map(|&n| n.into()).collect()),
        Array::U32(v) => Some(v.iter().map(|&n| n.into()).collect()),
        Array::U64(v) => Some(v.clone()),
        Array::I8(v) => v.iter().map(|&n| n.try_into().ok()).collect(),
        Array::I16(v) => v.iter().map(|&n| n.try_into().ok()).collect(),
        Array::I32(v) => v.iter().map(|&n| n.try_into().ok()).collect(),
        Array::I64(v) => v.iter().map(|&n| n.try_into().ok()).collect(),
        _ => None,
    };
    let Some(values) = values else { return Ok(None) };
    if values.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err(PlanError::PerLayer { key: key.to_owned() });
    }
    Ok(values.first().copied())
}
