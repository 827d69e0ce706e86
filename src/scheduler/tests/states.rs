//! The fake device's recurrent states: each holds the tokens of all rows that made it.

use std::collections::HashMap;

use super::memory::Memory;
use crate::backend::{BackendError, StepBatch};
use crate::program::Program;

/// Bytes of a state: some pages.
pub const STATE_BYTES: u64 = 500_000;

/// Little-endian numbers.
pub fn words_of(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()))
}

#[derive(Debug, Default)]
pub struct States {
    /// Whether sequences have states.
    used: bool,
    /// Tokens by slot and number.
    tokens: HashMap<(u32, u32), Vec<u32>>,
}

impl States {
    pub fn begin(&mut self) {
        self.used = true;
    }

    pub fn bytes_of(&self) -> fn(&Program) -> u64 {
        if self.used { |_| STATE_BYTES } else { |_| 0 }
    }

    pub fn count(&self) -> usize {
        self.tokens.len()
    }

    pub fn clear(&mut self) {
        self.tokens.clear();
    }

    /// Writes the states after the rows of a step, and checks those before them. `token` gives what a page has at a position.
    pub fn step(
        &mut self,
        (slot, memory): (u32, &Memory),
        batch: &StepBatch<'_>,
        token: impl Fn(usize, u32) -> Option<u32>,
    ) -> Result<(), BackendError> {
        if !self.used {
            assert!(batch.recurrent.is_empty(), "places for states that nobody has");
            return Ok(());
        }
        assert_eq!(batch.recurrent.len(), batch.page_tables.len() / batch.page_table_stride);
        let (mut read, mut written) = (Vec::new(), Vec::new());
        let mut first = 0;
        for rows in batch.row_sequences.chunk_by(|a, b| a == b) {
            let (place, start) = (batch.recurrent[rows[0] as usize], batch.positions[first]);
            let before = place.before.map(|number| {
                read.push(number);
                self.tokens.get(&(slot, number)).expect("a state that is read was written").clone()
            });
            assert_eq!(before.is_none(), start == 0, "the state before position {start}");
            let mut tokens = before.unwrap_or_default();
            let of_pages: Option<Vec<u32>> = (0..start).map(|position| token(first, position)).collect();
            assert_eq!(Some(&tokens), of_pages.as_ref(), "a state of other tokens than its pages");
            tokens.extend(&batch.token_ids[first..first + rows.len()]);
            written.push((place.after, tokens));
            first += rows.len();
        }
        for (number, tokens) in written {
            assert!(!read.contains(&number), "a state is read and written");
            if !self.tokens.contains_key(&(slot, number)) {
                memory.take_pages(STATE_BYTES)?;
            }
            self.tokens.insert((slot, number), tokens);
        }
        Ok(())
    }

    /// A state as bytes: the number of its tokens, and these.
    pub fn read(&self, slot: u32, number: u32) -> Vec<u8> {
        let tokens = self.tokens.get(&(slot, number)).expect("a state that is read was written");
        let words = [tokens.len() as u32].into_iter().chain(tokens.iter().copied());
        let mut bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        bytes.resize(STATE_BYTES as usize, 0);
        bytes
    }

    pub fn write(
        &mut self,
        (slot, memory): (u32, &Memory),
        number: u32,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        assert_eq!(bytes.len() as u64, STATE_BYTES);
        let mut words = words_of(bytes);
        let count = words.next().unwrap() as usize;
        if !self.tokens.contains_key(&(slot, number)) {
            memory.take_pages(STATE_BYTES)?;
        }
        self.tokens.insert((slot, number), words.take(count).collect());
        Ok(())
    }

    /// Frees states of a slot: these, or all.
    pub fn release(&mut self, slot: u32, numbers: Option<&[u32]>, memory: &Memory) {
        let before = self.tokens.len();
        self.tokens
            .retain(|(of, number), _| *of != slot || numbers.is_some_and(|gone| !gone.contains(number)));
        memory.free_pages((before - self.tokens.len()) as u64 * STATE_BYTES);
    }
}
