//! Memory for a step's intermediate rows. The kernel zeroes it and backs each page when it is touched. So a model
//! opened for 256 rows that decodes one row takes the memory of one.

use super::memory::Memory;
use crate::backend::BackendError;

/// `rows` rows of `cols` f32.
pub struct Plane {
    memory: Option<Memory>,
    rows: usize,
    cols: usize,
}

impl Plane {
    /// A plane of zeros.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    pub fn new(what: &'static str, rows: usize, cols: usize) -> Result<Self, BackendError> {
        let bytes = rows.checked_mul(cols).and_then(|n| n.checked_mul(size_of::<f32>()));
        let need_bytes = bytes.map_or(u64::MAX, |b| b as u64);
        let refused = || BackendError::OutOfMemory { what, need_bytes };
        let memory = match bytes.ok_or_else(refused)? {
            0 => None,
            bytes => Some(Memory::zeroed(bytes, false).ok_or_else(refused)?),
        };
        Ok(Self { memory, rows, cols })
    }

    /// A plane without rows or columns.
    pub fn empty() -> Self {
        Self { memory: None, rows: 0, cols: 0 }
    }

    /// Gives the memory back: all values are zero. Where the kernel has no other mapping to give, they stay.
    pub fn release(&mut self) {
        let fresh = self.memory.as_ref().and_then(|memory| Memory::zeroed(memory.len(), false));
        self.memory = fresh.or_else(|| self.memory.take());
    }

    /// Values per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    fn base(&self) -> *mut f32 {
        self.memory.as_ref().map_or(std::ptr::dangling_mut(), |m| m.base().cast())
    }

    /// All values, row after row.
    pub fn values(&self) -> &[f32] {
        let base = self.base();
        // SAFETY: the mapping is `rows * cols` f32 long (`new`), page-aligned and readable, and any bytes are a valid
        // f32. An empty plane has no element. The mapping lives as long as `&self`, and is written through `&mut
        // self` only.
        unsafe { std::slice::from_raw_parts(base, self.rows * self.cols) }
    }

    /// All values, row after row, mutable.
    pub fn values_mut(&mut self) -> &mut [f32] {
        let base = self.base();
        // SAFETY: as in `values`. The pointer is the mapping's own, made from no reference, so it may be written
        // through, and `&mut self` is the only access to it.
        unsafe { std::slice::from_raw_parts_mut(base, self.rows * self.cols) }
    }

    /// Row `row`.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values()[row * self.cols..][..self.cols]
    }

    /// Row `row`, mutable.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        let cols = self.cols;
        &mut self.values_mut()[row * cols..][..cols]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_apart_and_begin_as_zeros() {
        let mut plane = Plane::new("a test", 3, 5).unwrap();
        plane.row_mut(1).fill(2.0);
        let sums: Vec<f32> = (0..3).map(|row| plane.row(row).iter().sum()).collect();
        assert_eq!(sums, [0.0, 10.0, 0.0]);
        plane.release();
        assert_eq!(plane.values(), [0.0; 15]);
        assert!(Plane::new("a test", 0, 5).unwrap().values_mut().is_empty());
    }

    #[test]
    fn sizes_beyond_memory_are_an_error() {
        for (rows, cols) in [(usize::MAX, 2), (1 << 40, 1 << 20)] {
            assert!(matches!(Plane::new("a test", rows, cols), Err(BackendError::OutOfMemory { .. })));
        }
    }
}
