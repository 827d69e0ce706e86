//! Metadata entries: key, type, value.

use std::sync::Arc;

use super::Known;
use super::error::{GgufError, Place};
use super::limits::{KEY_BYTES_MAX, STRING_BYTES_MAX};
use super::source::{Cursor, ReadAt};
use super::value::{Array, Strings, Value};

/// Bytes of an array read at a time: a whole number of elements of any size.
const ARRAY_STEP_BYTES: u64 = 64 << 10;

pub(super) const TYPE_STRING: u32 = 8;
const TYPE_ARRAY: u32 = 9;

impl<S: ReadAt + ?Sized> Cursor<'_, S> {
    /// The next metadata entry, number `index`.
    pub fn entry(&mut self, index: u64, known: Known<'_>) -> Result<(Box<str>, Arc<Value>), GgufError> {
        self.place = Place::Key(index);
        let key = self.key()?;
        self.place = Place::Value(key.clone());
        let type_offset = self.offset();
        let number = self.u32()?;
        if number == TYPE_ARRAY
            && let Some(value) = self.known_array(&known(&key))
        {
            return Ok((key, value));
        }
        let value = match number {
            TYPE_STRING => Value::String(self.string()?),
            TYPE_ARRAY => Value::Array(self.value_array(&key)?),
            _ => self.scalar(&key, number, type_offset)?,
        };
        Ok((key, Arc::new(value)))
    }

    fn key(&mut self) -> Result<Box<str>, GgufError> {
        let offset = self.offset();
        let bytes = self.short_text(KEY_BYTES_MAX)?;
        let text = String::from_utf8(bytes).ok().filter(|t| t.bytes().all(|b| (b' '..=b'~').contains(&b)));
        text.map(String::into_boxed_str).ok_or_else(|| GgufError::Text {
            place: self.place.clone(),
            offset,
            expected: "printable ASCII",
        })
    }

    /// A length from 1 to `limit`, and that many bytes.
    pub fn short_text(&mut self, limit: u64) -> Result<Vec<u8>, GgufError> {
        let offset = self.offset();
        let found = self.u64()?;
        if found == 0 || found > limit {
            return Err(GgufError::Length { place: self.place.clone(), offset, found, min: 1, limit });
        }
        let mut bytes = Vec::new();
        self.append(found, &mut bytes)?;
        Ok(bytes)
    }

    #[inline(always)]
    fn string_length(&mut self) -> Result<u64, GgufError> {
        let offset = self.offset();
        let found = self.u64()?;
        if found > STRING_BYTES_MAX {
            let (place, limit) = (self.place.clone(), STRING_BYTES_MAX);
            return Err(GgufError::Length { place, offset, found, min: 0, limit });
        }
        Ok(found)
    }

    fn not_utf8(&self, offset: u64) -> GgufError {
        GgufError::Text { place: self.place.clone(), offset, expected: "UTF-8" }
    }

    fn string(&mut self) -> Result<String, GgufError> {
        let length = self.string_length()?;
        let offset = self.offset();
        let mut bytes = Vec::new();
        self.append(length, &mut bytes)?;
        String::from_utf8(bytes).map_err(|_| self.not_utf8(offset))
    }

    fn scalar(&mut self, key: &str, number: u32, offset: u64) -> Result<Value, GgufError> {
        Ok(match number {
            0 => Value::U8(u8::from_le_bytes(self.array()?)),
            1 => Value::I8(i8::from_le_bytes(self.array()?)),
            2 => Value::U16(u16::from_le_bytes(self.array()?)),
            3 => Value::I16(i16::from_le_bytes(self.array()?)),
            4 => Value::U32(u32::from_le_bytes(self.array()?)),
            5 => Value::I32(i32::from_le_bytes(self.array()?)),
            6 => Value::F32(f32::from_le_bytes(self.array()?)),
            7 => {
                let (offset, [byte]) = (self.offset(), self.array()?);
                Value::Bool(truth(byte).ok_or_else(|| GgufError::Bool {
                    key: key.into(),
                    offset,
                    found: byte,
                })?)
            }
            10 => Value::U64(u64::from_le_bytes(self.array()?)),
            11 => Value::I64(i64::from_le_bytes(self.array()?)),
            12 => Value::F64(f64::from_le_bytes(self.array()?)),
            found => return Err(GgufError::ValueType { key: key.into(), offset, found }),
        })
    }

    fn value_array(&mut self, key: &str) -> Result<Array, GgufError> {
        let type_offset = self.offset();
        let number = self.u32()?;
        if number == TYPE_ARRAY {
            return Err(GgufError::NestedArray { key: key.into(), offset: type_offset });
        }
        let element_bytes_min = match number {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            TYPE_STRING | 10..=12 => 8,
            found => return Err(GgufError::ValueType { key: key.into(), offset: type_offset, found }),
        };
        let offset = self.offset();
        let found = self.u64()?;
        let limit = self.left().checked_div(element_bytes_min).unwrap_or(0);
        if found > limit {
            let place = self.place.clone();
            return Err(GgufError::Count { place, what: "array elements", offset, found, limit });
        }
        // Refuses an array in the hole of a sparse file before its elements get memory.
        self.expect_left(found.saturating_mul(element_bytes_min))?;
        // The file holds `found` elements and a header has at most 2^28 bytes, so this fits in usize.
        let count = found as usize;
        Ok(match number {
            0 => Array::U8(self.numbers(count, u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(count, i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(count, u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(count, i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(count, u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(count, i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(count, f32::from_le_bytes)?),
            7 => Array::Bool(self.bools(key, count)?),
            10 => Array::U64(self.numbers(count, u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(count, i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(count, f64::from_le_bytes)?),
            _ => Array::String(self.strings(count)?),
        })
    }

    /// `count` numbers of `N` bytes; the caller has checked that the file holds them.
    fn numbers<T, const N: usize>(
        &mut self,
        count: usize,
        number: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, GgufError> {
        let mut out = Vec::with_capacity(count);
        let mut left = (count as u64).saturating_mul(N as u64);
        while left > 0 {
            let step = left.min(ARRAY_STEP_BYTES);
            let (elements, _) = self.take(step as usize)?.as_chunks::<N>();
            out.extend(elements.iter().map(|e| number(*e)));
            left = left.saturating_sub(step);
        }
        Ok(out)
    }

    fn bools(&mut self, key: &str, count: usize) -> Result<Vec<bool>, GgufError> {
        let start = self.offset();
        let bytes = self.numbers(count, u8::from_le_bytes)?;
        let mut out = Vec::with_capacity(count);
        for (offset, found) in (start..).zip(bytes) {
            out.push(truth(found).ok_or_else(|| GgufError::Bool { key: key.into(), offset, found })?);
        }
        Ok(out)
    }

    /// `count` strings, validated together. One pass over the joined text takes 12 ms for the 408,000 strings of a
    /// 128,000-token vocabulary; one pass per string takes 20 ms.
    fn strings(&mut self, count: usize) -> Result<Strings, GgufError> {
        let first = self.offset();
        let mut bytes: Vec<u8> = Vec::new();
        let mut ends = Vec::with_capacity(count);
        for _ in 0..count {
            let length = self.string_length()?;
            self.append(length, &mut bytes)?;
            // At most HEADER_BYTES_MAX = 2^28.
            ends.push(bytes.len() as u32);
        }
        bytes.shrink_to_fit();
        let bad = match String::from_utf8(bytes) {
            // A character that spans two strings is valid in the joined text, but breaks both strings.
            Ok(text) => match ends.iter().position(|end| !text.is_char_boundary(*end as usize)) {
                None => return Ok(Strings::new(text, ends)),
                split => split,
            },
            Err(e) => {
                let valid_to = e.utf8_error().valid_up_to();
                ends.iter().position(|end| *end as usize > valid_to)
            }
        };
        // 8-byte lengths precede the texts: those of all earlier strings and that of string `index`.
        let index = bad.unwrap_or(0);
        let start = index.checked_sub(1).and_then(|i| ends.get(i)).copied().unwrap_or(0);
        let lengths = (index as u64).saturating_add(1).saturating_mul(8);
        Err(self.not_utf8(first.saturating_add(lengths).saturating_add(start.into())))
    }
}

fn truth(byte: u8) -> Option<bool> {
    match byte {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}
