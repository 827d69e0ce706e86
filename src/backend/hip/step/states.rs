//! Recurrent states of one model: an array of f32 in device memory for each number in use.
//!
//! An array holds all recurrent states of the program, one after the other, each as its operation lays it out. A step reads a
//! sequence's states at one number and writes them at another.

use crate::backend::hip::{ALIGN, Buffer, Device, Purpose, Stream};
use crate::backend::{BackendError, RECURRENT_PLACES_MAX};
use crate::program::{Program, State};

/// Layout of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// Bytes from an array's start to each state, by state number.
    pub offsets: Vec<u64>,
    /// Bytes of an array; 0 for a program without recurrent states.
    pub bytes: usize,
}

impl StateLayout {
    /// Layout for a program's states; `None` when an array would exceed the address space.
    pub fn of(program: &Program) -> Option<Self> {
        let (mut offsets, mut end) = (Vec::with_capacity(program.states().len()), 0usize);
        for state in program.states() {
            let values = match state {
                State::Kv { .. } => 0,
                State::Recurrent { values } => *values as usize,
            };
            offsets.push(end as u64);
            // A multiple of 16 bytes, because kernels read 16 bytes at a time.
            end = end.checked_add(values.checked_next_multiple_of(4)?.checked_mul(size_of::<f32>())?)?;
        }
        let bytes = end.checked_next_multiple_of(ALIGN)?;
        (bytes < isize::MAX as usize).then_some(Self { offsets, bytes })
    }
}

/// Device bytes of an array; `u64::MAX` when it would exceed the address space.
pub fn array_bytes(program: &Program) -> u64 {
    StateLayout::of(program).map_or(u64::MAX, |layout| layout.bytes as u64)
}

/// The arrays of one model.
#[derive(Debug)]
pub struct StatePool {
    array_bytes: usize,
    arrays: Vec<Option<Buffer>>,
}

impl StatePool {
    /// A pool without memory, for arrays of so many bytes.
    pub fn new(array_bytes: usize) -> Self {
        Self { array_bytes, arrays: Vec::new() }
    }

    /// Device bytes of all arrays.
    pub fn bytes(&self) -> u64 {
        self.arrays.iter().flatten().map(Buffer::taken_bytes).sum()
    }

    /// Address of a number's array; `None` if it has none.
    pub fn address(&self, number: u32) -> Option<u64> {
        let array = self.arrays.get(number as usize)?.as_ref()?;
        Some(array.ptr::<u8>().address())
    }

    /// Gives a number an array, unless it has one, and returns its address.
    ///
    /// # Errors
    /// [`BackendError::Batch`] for a number that is too large; errors of memory.
    pub fn materialise(
        &mut self,
        device: &Device,
        stream: &Stream,
        number: u32,
    ) -> Result<u64, BackendError> {
        if let Some(address) = self.address(number) {
            return Ok(address);
        }
        if number >= RECURRENT_PLACES_MAX {
            return Err(BackendError::Batch("a recurrent state has a number outside the pool"));
        }
        let array = device.take(self.array_bytes, Purpose::Kv)?;
        if cfg!(debug_assertions) {
            stream.fill(array.all(), 0xff)?; // NaN: makes reads of unwritten values visible
        }
        let address = array.ptr::<u8>().address();
        let index = number as usize;
        if self.arrays.len() <= index {
            self.arrays.resize_with(index + 1, || None);
        }
        if let Some(slot) = self.arrays.get_mut(index) {
            *slot = Some(array);
        }
        Ok(address)
    }

    /// Copies an array to the host; waits for the stream.
    ///
    /// # Errors
    /// [`BackendError::Batch`] if the number has none, [`HipError`](crate::backend::hip::HipError).
    pub fn read(&self, stream: &Stream, number: u32) -> Result<Vec<u8>, BackendError> {
        let array = self.arrays.get(number as usize).and_then(Option::as_ref);
        let array = array.ok_or(BackendError::Batch("a recurrent state without memory is read"))?;
        let mut bytes = vec![0u8; self.array_bytes];
        stream.download(array.all(), bytes.as_mut_slice())?;
        Ok(bytes)
    }

    /// Fills an array, which the number gets if it has none; waits for the stream.
    ///
    /// # Errors
    /// As [`StatePool::materialise`], and [`BackendError::Batch`] if `bytes` is not as long as an array.
    pub fn fill(
        &mut self,
        device: &Device,
        stream: &Stream,
        number: u32,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        if bytes.len() != self.array_bytes {
            return Err(BackendError::Batch("a recurrent state is filled with another number of bytes"));
        }
        self.materialise(device, stream, number)?;
        let array = self.arrays.get(number as usize).and_then(Option::as_ref);
        let array = array.ok_or(BackendError::Batch("a recurrent state without memory is filled"))?;
        Ok(stream.upload(array.all(), bytes)?)
    }

    /// Frees a number's array. No work in flight may use it.
    pub fn release(&mut self, number: u32) {
        if let Some(slot) = self.arrays.get_mut(number as usize) {
            *slot = None;
        }
    }
}
