//! A growing buffer whose first element is 64-byte aligned, without unsafe code.

/// Bytes of a cache line and of the widest vector register.
const ALIGN: usize = 64;

/// A slice of `len` elements at a 64-byte boundary inside a larger allocation.
#[derive(Debug, Default)]
pub(super) struct Aligned<T> {
    data: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Aligned<T> {
    /// Makes it `len` elements long. Contents are unspecified, but never uninitialised.
    pub(super) fn resize(&mut self, len: usize) {
        let slack = ALIGN / size_of::<T>();
        if self.data.len() < len + slack {
            self.data = vec![T::default(); len + slack];
            // align_offset may return usize::MAX; the slice is then unaligned, which is only slower.
            self.start = self.data.as_ptr().align_offset(ALIGN).min(slack);
        }
        self.len = len;
    }

    pub(super) fn slice(&self) -> &[T] {
        &self.data[self.start..self.start + self.len]
    }

    pub(super) fn slice_mut(&mut self) -> &mut [T] {
        &mut self.data[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_at_a_cache_line_at_any_size() {
        let mut a = Aligned::<i16>::default();
        for len in [1, 33, 1000, 5] {
            a.resize(len);
            assert_eq!(a.slice().len(), len);
            assert_eq!(a.slice().as_ptr() as usize % ALIGN, 0);
            a.slice_mut().fill(7);
        }
    }
}
