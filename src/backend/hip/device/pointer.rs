//! Typed device addresses.

use std::marker::PhantomData;

/// Device address of `T`s, as kernels take it. Only buffers create it, within their bounds; the host never follows it.
pub struct DevicePtr<T> {
    address: u64,
    of: PhantomData<fn() -> T>,
}

impl<T> DevicePtr<T> {
    /// Null, for arguments that a kernel ignores.
    pub const NULL: Self = Self { address: 0, of: PhantomData };

    pub(in crate::backend::hip) const fn at(address: u64) -> Self {
        Self { address, of: PhantomData }
    }

    /// The address as a number, for tables of pointers that kernels read.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Whether this is [`DevicePtr::NULL`].
    pub fn is_null(self) -> bool {
        self.address == 0
    }

    /// The same address with another type.
    pub fn cast<U>(self) -> DevicePtr<U> {
        DevicePtr { address: self.address, of: PhantomData }
    }
}

// By hand: the derived ones would require the same of `T`.
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
