//! Which KV pages of a model's pool are free.

/// Page numbers of one model's pool. Numbers that were used before are handed out first: a device that keeps the
/// memory of given-back pages then touches the fewest.
#[derive(Debug)]
pub(super) struct PagePool {
    /// Pages in all.
    size: u32,
    /// Numbers from here on were never handed out.
    fresh: u32,
    /// Given back.
    free: Vec<u32>,
}

impl PagePool {
    pub fn new(size: u32) -> Self {
        Self { size, fresh: 0, free: Vec::new() }
    }

    /// A page number that nobody has.
    ///
    /// # Panics
    /// When all are taken: the policy reserves pages before it takes them, so that is a broken invariant.
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
