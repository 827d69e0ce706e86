//! Tracks which KV pages of a model's pool are free.

/// Page numbers of one model's pool. Freed numbers are handed out first, so that a device which keeps the memory of
/// freed pages touches the fewest.
#[derive(Debug)]
pub(super) struct PagePool {
    /// Pages in total.
    size: u32,
    /// Numbers from here on have never been handed out.
    fresh: u32,
    /// Freed numbers.
    free: Vec<u32>,
}

impl PagePool {
    pub fn new(size: u32) -> Self {
        Self { size, fresh: 0, free: Vec::new() }
    }

    /// Takes a free page number.
    ///
    /// # Panics
    /// If all pages are taken. The schedule reserves pages before it takes them, so this is a broken invariant.
    pub fn take(&mut self) -> u32 {
        if let Some(page) = self.free.pop() {
            return page;
        }
        assert!(self.fresh < self.size, "more KV pages taken than reserved: pool of {}", self.size);
        self.fresh += 1;
        self.fresh - 1
    }

    pub fn give_back(&mut self, pages: &[u32]) {
        self.free.extend_from_slice(pages);
    }

    pub fn size(&self) -> u32 {
        self.size
    }

    pub fn used(&self) -> u32 {
        self.fresh - self.free.len() as u32
    }
}
