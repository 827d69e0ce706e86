//! Memory straight from the kernel: zeroed, page-aligned, and given back at once when dropped. An allocator would keep
//! freed KV pages for itself, and ends the process where this returns an error.

use memmap2::{MmapMut, MmapOptions};

/// An anonymous mapping.
pub struct Memory {
    map: MmapMut,
}

impl Memory {
    /// `bytes` bytes of zeros, at least one; `None` when they cannot be had. With `touched` they take memory at once
    /// (in a tenth of the time that single faults take), else each page when it is first touched.
    pub fn zeroed(bytes: usize, touched: bool) -> Option<Self> {
        let mut options = MmapOptions::new();
        options.len(bytes);
        if touched {
            options.populate();
        }
        options.map_anon().ok().map(|map| Self { map })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// All bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map
    }

    /// First byte, at a page boundary. Valid for reads and writes of `len` bytes while `self` lives.
    pub fn base(&self) -> *mut u8 {
        self.map.as_ptr().cast_mut()
    }
}
