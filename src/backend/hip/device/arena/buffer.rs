//! Owned pieces of device memory.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;

use super::spans::Place;
use super::{Arena, Purpose};
use crate::backend::hip::device::error::HipError;
use crate::backend::hip::device::pointer::DevicePtr;

/// Device memory that returns to its arena on drop. Work submitted on it must be done by then.
#[derive(Debug)]
pub struct Buffer {
    arena: Arc<Arena>,
    place: Place,
    address: u64,
    bytes: usize,
    purpose: Purpose,
}

/// Bytes of a buffer, for copies and fills.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRange<'a> {
    address: u64,
    bytes: usize,
    of: PhantomData<&'a Buffer>,
}

impl Buffer {
    pub(super) fn new(
        arena: &Arc<Arena>,
        place: Place,
        address: u64,
        bytes: usize,
        purpose: Purpose,
    ) -> Self {
        Self { arena: arena.clone(), place, address, bytes, purpose }
    }

    /// Bytes requested, without padding.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether no bytes were requested.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Bytes taken from the device with padding, as the ledger counts them.
    pub fn taken_bytes(&self) -> u64 {
        self.place.bytes as u64
    }

    /// The whole buffer.
    pub fn all(&self) -> DeviceRange<'_> {
        DeviceRange { address: self.address, bytes: self.bytes, of: PhantomData }
    }

    /// `bytes` bytes from `start`.
    ///
    /// # Errors
    /// [`HipError::Refused`] when the range ends past the buffer.
    pub fn range(&self, start: usize, bytes: usize) -> Result<DeviceRange<'_>, HipError> {
        if start.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let why =
                format!("{bytes} bytes at offset {start} do not fit in a buffer of {} bytes", self.bytes);
            return Err(HipError::refused("a range of device memory", why));
        }
        Ok(DeviceRange { address: self.address + start as u64, bytes, of: PhantomData })
    }

    /// The whole buffer as `T`s.
    pub fn ptr<T>(&self) -> DevicePtr<T> {
        DevicePtr::new(self.address, self.bytes as u64)
    }

    /// The `T`s from `offset` bytes on.
    ///
    /// # Errors
    /// [`HipError::Refused`] when it is misaligned or ends past the buffer.
    pub fn ptr_at<T>(&self, offset: usize) -> Result<DevicePtr<T>, HipError> {
        let inside = offset.checked_add(size_of::<T>()).is_some_and(|end| end <= self.bytes);
        if !inside || !offset.is_multiple_of(align_of::<T>()) {
            let why = format!(
                "{} bytes at offset {offset} are misaligned or exceed a buffer of {} bytes",
                size_of::<T>(),
                self.bytes
            );
            return Err(HipError::refused("a device pointer", why));
        }
        Ok(DevicePtr::new(self.address + offset as u64, (self.bytes - offset) as u64))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.arena.give(self.place, self.purpose);
    }
}

impl DeviceRange<'_> {
    /// Bytes of the range.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub(in crate::backend::hip) fn raw(&self) -> *mut c_void {
        self.address as *mut c_void
    }
}
