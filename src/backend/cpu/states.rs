//! Recurrent states of one model's sequences: one array of f32 each, which exists only while it is in use.
//!
//! A step reads a sequence's state at one number and writes it at another. So a step that is given up, or run again, loses
//! nothing. An array holds all recurrent states of the program, one after the other.

use std::collections::BTreeMap;
use std::ops::Range;

use zerocopy::IntoBytes;

use crate::backend::{BackendError, RECURRENT_PLACES_MAX, RecurrentPlace};
use crate::program::{State, StateId};

/// The arrays of one model.
#[derive(Debug)]
pub struct StatePool {
    /// Part of an array, by state number; empty for keys and values.
    parts: Vec<Range<usize>>,
    /// Values of an array.
    len: usize,
    /// Arrays by number.
    arrays: Vec<Option<Vec<f32>>>,
    used: u64,
}

/// A sequence's state before a step, `None` before its first position, and after it.
pub type Change<'a> = (Option<&'a [f32]>, &'a mut [f32]);

impl StatePool {
    /// A pool without memory.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] if an array exceeds the address space.
    pub fn new(states: &[State]) -> Result<Self, BackendError> {
        let mut len = 0usize;
        let mut parts = Vec::with_capacity(states.len());
        for state in states {
            let values = match state {
                State::Kv { .. } => 0,
                State::Recurrent { values } => *values as usize,
            };
            let end = len.checked_add(values).filter(|end| *end < isize::MAX as usize / size_of::<f32>());
            let end =
                end.ok_or(BackendError::OutOfMemory { what: "a recurrent state", need_bytes: u64::MAX })?;
            parts.push(len..end);
            len = end;
        }
        Ok(Self { parts, len, arrays: Vec::new(), used: 0 })
    }

    /// Bytes that all arrays take now.
    pub fn bytes(&self) -> u64 {
        self.used * (self.len * size_of::<f32>()) as u64
    }

    /// Whether the number has an array.
    pub fn is_used(&self, number: u32) -> bool {
        self.arrays.get(number as usize).is_some_and(Option::is_some)
    }

    /// Gives the number an array, unless it has one.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`]; [`BackendError::Batch`] for a number that is too large.
    pub fn materialise(&mut self, number: u32) -> Result<(), BackendError> {
        if number >= RECURRENT_PLACES_MAX {
            return Err(BackendError::Batch("a recurrent state has a number outside the pool"));
        }
        if self.is_used(number) {
            return Ok(());
        }
        let bytes = (self.len * size_of::<f32>()) as u64;
        let refused = |_| BackendError::OutOfMemory { what: "a recurrent state", need_bytes: bytes };
        let mut array = Vec::new();
        array.try_reserve_exact(self.len).map_err(refused)?;
        array.resize(self.len, f32::NAN); // so that a read of unwritten values shows
        let index = number as usize;
        if self.arrays.len() <= index {
            self.arrays.resize_with(index + 1, || None);
        }
        self.arrays[index] = Some(array);
        self.used += 1;
        Ok(())
    }

    /// Copies an array out.
    ///
    /// # Errors
    /// [`BackendError::Batch`] if the number has none.
    pub fn read(&self, number: u32) -> Result<Vec<u8>, BackendError> {
        let array = self.arrays.get(number as usize).and_then(Option::as_ref);
        let array = array.ok_or(BackendError::Batch("a recurrent state without memory is read"))?;
        Ok(array.as_bytes().to_vec())
    }

    /// Fills an array, which the number gets if it has none.
    ///
    /// # Errors
    /// As [`StatePool::materialise`], and [`BackendError::Batch`] if `bytes` is not as long as an array.
    pub fn fill(&mut self, number: u32, bytes: &[u8]) -> Result<(), BackendError> {
        if bytes.len() != self.len * size_of::<f32>() {
            return Err(BackendError::Batch("a recurrent state is filled with another number of bytes"));
        }
        self.materialise(number)?;
        let array = self.arrays.get_mut(number as usize).and_then(Option::as_mut);
        let array = array.ok_or(BackendError::Batch("a recurrent state without memory is filled"))?;
        array.as_mut_bytes().copy_from_slice(bytes);
        Ok(())
    }

    /// Frees an array, if the number has one.
    pub fn release(&mut self, number: u32) {
        if let Some(array) = self.arrays.get_mut(number as usize)
            && array.take().is_some()
        {
            self.used -= 1;
        }
    }

    /// One state of the sequences that have these places.
    ///
    /// # Errors
    /// [`BackendError::Internal`] for places without arrays, or if one is written twice or read too: broken invariants of
    /// `begin_step`.
    pub fn changes(
        &mut self,
        state: StateId,
        places: &[RecurrentPlace],
    ) -> Result<Vec<Change<'_>>, BackendError> {
        let broken =
            || BackendError::Internal("the places of recurrent states overlap, or have no memory".into());
        let part = self.parts.get(state.0 as usize).cloned().ok_or_else(broken)?;
        let read = places.iter().filter_map(|place| Some((place.before?, false)));
        let written = places.iter().map(|place| (place.after, true));
        let wanted: BTreeMap<u32, bool> = read.chain(written).collect();
        let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
        // Trees of prefixes may keep thousands of other arrays.
        let (mut rest, mut first) = (self.arrays.as_mut_slice(), 0);
        for (number, written) in wanted {
            let (_, from) = rest.split_at_mut_checked((number - first) as usize).ok_or_else(broken)?;
            let (array, behind) = from.split_first_mut().ok_or_else(broken)?;
            let values = array.as_mut().and_then(|array| array.get_mut(part.clone())).ok_or_else(broken)?;
            if written {
                after.insert(number, values);
            } else {
                before.insert(number, &*values);
            }
            (rest, first) = (behind, number + 1); // numbers are below `RECURRENT_PLACES_MAX`
        }
        let mut changes = Vec::with_capacity(places.len());
        for place in places {
            let read =
                place.before.map(|number| before.get(&number).copied().ok_or_else(broken)).transpose()?;
            changes.push((read, after.remove(&place.after).ok_or_else(broken)?));
        }
        Ok(changes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 3] =
        [State::Recurrent { values: 3 }, State::Kv { heads: 2, head_dim: 4 }, State::Recurrent { values: 2 }];

    #[test]
    fn arrays_come_and_go_and_are_counted() {
        let mut pool = StatePool::new(&STATES).unwrap();
        assert_eq!(pool.bytes(), 0);
        pool.materialise(4).unwrap();
        pool.materialise(4).unwrap();
        pool.materialise(0).unwrap();
        assert_eq!((pool.bytes(), pool.is_used(4), pool.is_used(1)), (40, true, false));
        assert!(matches!(pool.materialise(RECURRENT_PLACES_MAX), Err(BackendError::Batch(_))));
        pool.release(4);
        pool.release(4);
        pool.release(77);
        assert_eq!((pool.bytes(), pool.is_used(4)), (20, false));
        let huge = [State::Recurrent { values: u32::MAX }; 3];
        assert_eq!(StatePool::new(&huge).unwrap().bytes(), 0, "nothing is taken before it is used");
    }

    #[test]
    fn an_array_is_copied_out_and_back() {
        let mut pool = StatePool::new(&STATES).unwrap();
        let values: Vec<u8> =
            [1.0f32, -2.5, 3.0, 4.0, f32::MIN].iter().flat_map(|v| v.to_le_bytes()).collect();
        pool.fill(6, &values).unwrap();
        assert_eq!((pool.read(6).unwrap(), pool.bytes()), (values.clone(), 20));
        let changes = pool.changes(StateId(2), &[RecurrentPlace { before: None, after: 6 }]).unwrap();
        assert_eq!(changes[0].1, [4.0, f32::MIN]);
        for wrong in [&values[1..], &[], &[values.clone(), values.clone()].concat()] {
            assert!(matches!(pool.fill(6, wrong), Err(BackendError::Batch(_))));
        }
        assert!(matches!(pool.read(5), Err(BackendError::Batch(_))));
        assert!(pool.fill(RECURRENT_PLACES_MAX, &values).is_err());
    }

    #[test]
    fn sequences_read_one_array_and_write_another() {
        let mut pool = StatePool::new(&STATES).unwrap();
        (0..4).for_each(|number| pool.materialise(number).unwrap());
        let places = |all: &[(Option<u32>, u32)]| -> Vec<RecurrentPlace> {
            all.iter().map(|&(before, after)| RecurrentPlace { before, after }).collect()
        };
        for (read, written) in pool.changes(StateId(2), &places(&[(None, 0), (None, 1)])).unwrap() {
            assert!(read.is_none());
            written.fill(7.0);
        }
        // Two sequences begin at one state.
        let both = pool.changes(StateId(2), &places(&[(Some(1), 3), (Some(1), 2)])).unwrap();
        assert!(both.iter().all(|(read, written)| *read == Some(&[7.0; 2][..]) && written.len() == 2));
        let kv = pool.changes(StateId(1), &places(&[(Some(1), 3)])).unwrap();
        assert!(kv[0].1.is_empty());
        for broken in [&[(Some(2), 2)][..], &[(Some(1), 3), (None, 3)], &[(Some(9), 3)], &[(None, 9)]] {
            assert!(pool.changes(StateId(0), &places(broken)).is_err(), "{broken:?}");
        }
    }
}
