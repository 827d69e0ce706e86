//! Typed device addresses that know where their memory ends.

use std::marker::PhantomData;

/// Device address of `T`s, as kernels take it, with the bytes from there to the end of the memory. Only buffers and
/// host words create it, within their bounds; the host never follows it.
pub struct DevicePtr<T> {
    address: u64,
    /// In bytes, so that a cast there and back keeps the end.
    bytes: u64,
    of: PhantomData<fn() -> T>,
}

impl<T> DevicePtr<T> {
    /// Null, for arguments that a kernel ignores. Holds no elements.
    pub const NULL: Self = Self { address: 0, bytes: 0, of: PhantomData };

    pub(in crate::backend::hip::device) const fn new(address: u64, bytes: u64) -> Self {
        Self { address, bytes, of: PhantomData }
    }

    /// Some address with `count` elements, for tests of what launches refuse.
    #[cfg(test)]
    pub(in crate::backend::hip) const fn of_len(count: u64) -> Self {
        Self::new(4096, count * Self::SIZE)
    }

    /// The address as a number, for tables of pointers that kernels read.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Whole elements from here to the end of the memory.
    pub fn len(self) -> u64 {
        self.bytes / Self::SIZE
    }

    /// Whether no whole element is left.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Whether this is [`DevicePtr::NULL`].
    pub fn is_null(self) -> bool {
        self.address == 0
    }

    /// The same address with another type, and the same end.
    pub fn cast<U>(self) -> DevicePtr<U> {
        DevicePtr { address: self.address, bytes: self.bytes, of: PhantomData }
    }

    /// The address `count` elements further on, with the same end. Past the end no elements are left, so that a launch
    /// is refused. Null stays null.
    #[must_use]
    pub fn offset(self, count: usize) -> Self {
        let skipped = (count as u64).saturating_mul(Self::SIZE).min(self.bytes);
        Self { address: self.address + skipped, bytes: self.bytes - skipped, of: PhantomData }
    }

    /// The first `count` elements, or all if there are fewer.
    #[must_use]
    pub fn first(self, count: usize) -> Self {
        Self { bytes: self.bytes.min((count as u64).saturating_mul(Self::SIZE)), ..self }
    }

    const SIZE: u64 = size_of::<T>() as u64;
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
        (self.address, self.bytes) == (other.address, other.bytes)
    }
}

impl<T> Eq for DevicePtr<T> {}

impl<T> std::fmt::Debug for DevicePtr<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}[{}]", self.address, self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn casts_and_offsets_keep_the_end() {
        let bytes = DevicePtr::<u8>::new(4096, 27);
        let words = bytes.cast::<u32>();
        assert_eq!((bytes.len(), words.len(), words.cast::<u8>()), (27, 6, bytes));
        let later = words.offset(4);
        assert_eq!((later.address(), later.len(), later.cast::<u8>().len()), (4112, 2, 11));
        assert_eq!((words.first(4).len(), words.first(9).len(), words.first(4).offset(3).len()), (4, 6, 1));
    }

    #[test]
    fn nothing_is_left_past_the_end() {
        let words = DevicePtr::<u32>::new(4096, 24);
        assert!(words.offset(6).is_empty() && !words.offset(6).is_null());
        for far in [7, 1 << 40, usize::MAX] {
            assert!(words.offset(far).is_empty() && !words.offset(far).is_null(), "{far}");
            assert!(words.offset(far).offset(1).is_empty());
            assert_eq!(DevicePtr::<u32>::NULL.offset(far), DevicePtr::NULL);
        }
        assert!(DevicePtr::<u64>::NULL.is_empty());
    }
}
