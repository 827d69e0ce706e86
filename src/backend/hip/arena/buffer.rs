//! Pieces of device memory, owned.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;

use super::super::error::HipError;
use super::super::pointer::DevicePtr;
use super::blocks::Place;
use super::{Arena, Owner};

/// Device memory that goes back to its arena when dropped. What is submitted and uses it has to be done by then.
#[derive(Debug)]
pub struct Buffer {
    arena: Arc<Arena>,
    place: Place,
    address: u64,
    bytes: usize,
    owner: Owner,
}

/// Bytes of a buffer, for copies and fills.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRange<'a> {
    address: u64,
    bytes: usize,
    of: PhantomData<&'a Buffer>,
}

impl Buffer {
    pub(super) fn new(arena: &Arc<Arena>, place: Place, address: u64, bytes: usize, owner: Owner) -> Self {
        Self { arena: arena.clone(), place, address, bytes, owner }
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether none were asked for.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Bytes it takes of the device, with its padding: what the ledger counts.
    pub fn taken_bytes(&self) -> u64 {
        self.place.bytes as u64
    }

    /// All of it.
    pub fn all(&self) -> DeviceRange<'_> {
        DeviceRange { address: self.address, bytes: self.bytes, of: PhantomData }
    }

    /// `bytes` bytes from `start`.
    ///
    /// # Errors
    /// [`HipError::Refused`] when they end past it.
    pub fn range(&self, start: usize, bytes: usize) -> Result<DeviceRange<'_>, HipError> {
        if start.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let why = format!("{bytes} bytes at {start} of {}", self.bytes);
            return Err(HipError::refused("a range of device memory", why));
        }
        Ok(DeviceRange { address: self.address + start as u64, bytes, of: PhantomData })
    }

    /// Where its first `T` lies. Kernels are told separately how many there are.
    pub fn ptr<T>(&self) -> DevicePtr<T> {
        DevicePtr::at(self.address)
    }

    /// Where the `T` lies that starts `offset` bytes in.
    ///
    /// # Errors
    /// [`HipError::Refused`] when it is not aligned or ends past the buffer.
    pub fn ptr_at<T>(&self, offset: usize) -> Result<DevicePtr<T>, HipError> {
        let inside = offset.checked_add(size_of::<T>()).is_some_and(|end| end <= self.bytes);
        if !inside || !offset.is_multiple_of(align_of::<T>()) {
            let why = format!("{} bytes at {offset} of {}", size_of::<T>(), self.bytes);
            return Err(HipError::refused("a device pointer", why));
        }
        Ok(DevicePtr::at(self.address + offset as u64))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.arena.give(self.place, self.owner);
    }
}

impl DeviceRange<'_> {
    /// Bytes in it.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub(in crate::backend::hip) fn raw(&self) -> *mut c_void {
        self.address as *mut c_void
    }
}
