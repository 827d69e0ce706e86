//! Memory directly from the kernel: zeroed, page-aligned, and returned at once on drop. An allocator would keep freed
//! KV pages, and it ends the process where this returns an error.

use memmap2::{MmapOptions, MmapRaw};

/// An anonymous mapping, held as a raw pointer. A pointer made from a `&[u8]` over it could not be written through,
/// and would become invalid with the first `&mut` to any part.
pub struct Memory {
    map: MmapRaw,
}

impl Memory {
    /// Maps `bytes` zero bytes, at least one; `None` if the kernel refuses. With `touched`, all pages take memory at
    /// once (in a tenth of the time of single page faults); else each page when first touched.
    pub fn zeroed(bytes: usize, touched: bool) -> Option<Self> {
        let mut options = MmapOptions::new();
        options.len(bytes);
        if touched {
            options.populate();
        }
        options.map_anon().ok().map(|map| Self { map: map.into() })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// All bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is `len` initialised bytes, readable and writable, and lives as long as `self`. `&mut
        // self` is the only access to it, since users of `base` keep within the borrow they called it under.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr(), self.map.len()) }
    }

    /// First byte, at a page boundary: the kernel's pointer, valid for reads and writes of all `len` bytes while
    /// `self` lives. The call makes no reference. Users of the pointer follow Rust's aliasing rules among themselves:
    /// a writer has its bytes alone.
    pub fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_written_through_the_base_are_read_as_bytes() {
        let mut memory = Memory::zeroed(5000, false).unwrap();
        assert_eq!((memory.len(), memory.base() as usize % 4096), (5000, 0));
        let base = memory.base();
        // SAFETY: in bounds of the mapping, which is alive, and no reference into it exists.
        unsafe { base.add(4999).write(7) };
        assert_eq!(memory.bytes_mut().iter().position(|byte| *byte != 0), Some(4999));
        assert_eq!(memory.bytes_mut()[4999], 7);
    }
}
