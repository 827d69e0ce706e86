//! Addresses on a device, typed by what lies there.

use std::marker::PhantomData;

/// Where `T`s lie on a device: what kernels take. Made by buffers only, within their bounds; never followed on the host.
pub struct DevicePtr<T> {
    address: u64,
    of: PhantomData<fn() -> T>,
}

impl<T> DevicePtr<T> {
    /// No memory: for arguments that a kernel leaves alone.
    pub const NULL: Self = Self { address: 0, of: PhantomData };

    pub(super) const fn at(address: u64) -> Self {
        Self { address, of: PhantomData }
    }

    /// As a number: for tables of pointers that kernels read.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Whether this is [`DevicePtr::NULL`].
    pub fn is_null(self) -> bool {
        self.address == 0
    }

    /// The same place, taken for something else.
    pub fn cast<U>(self) -> DevicePtr<U> {
        DevicePtr { address: self.address, of: PhantomData }
    }
}

// By hand: derived ones would ask the same of `T`.
impl<T> Clone for DevicePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DevicePtr<T> {}

impl<T> PartialEq for DevicePtr<T> {
    fn eq(&self, other: &Self) -> bool {
        self.address == other.address
    }
}

impl<T> Eq for DevicePtr<T> {}

impl<T> std::fmt::Debug for DevicePtr<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.address)
    }
}
