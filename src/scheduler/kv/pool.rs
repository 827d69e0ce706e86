//! The KV pages of one model: who holds each, and which are free.

use std::collections::BTreeMap;

/// Holders of a page.
#[derive(Clone, Copy, Debug, Default)]
struct Page {
    /// Sequences that read or write it.
    sequences: u32,
    /// The tree of prefixes has it.
    kept: bool,
    /// The user that computed it.
    uid: u32,
}

impl Page {
    fn is_used(self) -> bool {
        self.sequences > 0 || self.kept
    }
}

/// Page numbers of one model's pool. Freed numbers are handed out first, those whose memory the device still has before
/// others, so that the device touches the fewest.
#[derive(Debug)]
pub(super) struct Pool {
    /// Pages in total.
    size: u32,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// By page number, up to the highest one ever handed out.
    pages: Vec<Page>,
    /// Freed numbers whose memory the device has given back.
    free: Vec<u32>,
    /// Freed numbers whose memory the device still has.
    freed: Vec<u32>,
    /// Number of pages that only the tree has.
    cached: u32,
    /// Number of sequences that hold a page, by page and user.
    holders: BTreeMap<(u32, u32), u32>,
    /// Number of pages that each user's sequences hold.
    held: BTreeMap<u32, u32>,
}

/// The change that the end of a hold made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// Others hold the page.
    Held,
    /// The page is free; this user computed it.
    Free(u32),
}

impl Pool {
    pub fn new(size: u32, page_bytes: u64) -> Self {
        let (pages, free, freed, holders, held) = Default::default();
        Self { size, page_bytes, pages, free, freed, cached: 0, holders, held }
    }

    /// Takes a free page number for a sequence of a user; `None` if all are in use.
    pub fn take(&mut self, uid: u32) -> Option<u32> {
        let page = match self.freed.pop().or_else(|| self.free.pop()) {
            Some(page) => page,
            None if (self.pages.len() as u64) < u64::from(self.size) => {
                self.pages.push(Page::default());
                self.pages.len() as u32 - 1
            }
            None => return None,
        };
        *self.page(page) = Page { sequences: 1, kept: false, uid };
        self.count(page, uid);
        Some(page)
    }

    /// # Panics
    /// For a number that was never handed out: a broken invariant, because page numbers come from [`Pool::take`] alone.
    fn page(&mut self, page: u32) -> &mut Page {
        &mut self.pages[page as usize]
    }

    /// A sequence more of a user holds a page: it counts for the user once, whoever computed it.
    fn count(&mut self, page: u32, uid: u32) {
        let of_user = self.holders.entry((page, uid)).or_default();
        *of_user += 1;
        if *of_user == 1 {
            *self.held.entry(uid).or_default() += 1;
        }
    }

    fn count_down(&mut self, page: u32, uid: u32) {
        let Some(of_user) = self.holders.get_mut(&(page, uid)) else {
            debug_assert!(false, "a user drops a page that it does not hold");
            return;
        };
        *of_user -= 1; // entries are above 0
        if *of_user > 0 {
            return;
        }
        self.holders.remove(&(page, uid));
        if let Some(count) = self.held.get_mut(&uid) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.held.remove(&uid);
            }
        }
    }

    /// A further sequence, of this user, holds a page in use.
    pub fn hold(&mut self, page: u32, uid: u32) {
        let of = self.page(page);
        debug_assert!(of.is_used(), "a free page is held");
        of.sequences += 1;
        let only_kept = of.sequences == 1;
        self.cached -= u32::from(only_kept);
        self.count(page, uid);
    }

    /// A sequence of a user holds a page no more.
    pub fn drop(&mut self, page: u32, uid: u32) -> Left {
        let of = self.page(page);
        of.sequences = of.sequences.checked_sub(1).unwrap_or_else(|| {
            debug_assert!(false, "a page is dropped more often than held");
            0
        });
        let (last, kept) = (of.sequences == 0, of.kept);
        self.cached += u32::from(last && kept);
        self.count_down(page, uid);
        self.left(page)
    }

    /// The tree takes a page that a sequence holds.
    pub fn keep(&mut self, page: u32) {
        let of = self.page(page);
        debug_assert!(of.sequences > 0 && !of.kept, "the tree takes a page of nobody, or twice");
        of.kept = true;
    }

    /// The tree drops a page.
    pub fn forget(&mut self, page: u32) -> Left {
        let of = self.page(page);
        debug_assert!(of.kept, "the tree drops a page that it does not have");
        of.kept = false;
        let only_kept = of.sequences == 0;
        self.cached -= u32::from(only_kept);
        self.left(page)
    }

    fn left(&mut self, page: u32) -> Left {
        let of = *self.page(page);
        if of.is_used() {
            return Left::Held;
        }
        self.freed.push(page);
        Left::Free(of.uid)
    }

    /// Bytes that a user's sequences hold, each page counted once. One that others hold too counts in full for each user.
    pub fn held_by(&self, uid: u32) -> u64 {
        self.held.get(&uid).map_or(0, |count| u64::from(*count) * self.page_bytes)
    }

    /// Number of sequences that hold the page.
    pub fn holders_of(&self, page: u32) -> u32 {
        self.pages.get(page as usize).map_or(0, |of| of.sequences)
    }

    /// Number of a user's sequences that hold the page.
    pub fn holders_of_user(&self, page: u32, uid: u32) -> u32 {
        self.holders.get(&(page, uid)).copied().unwrap_or(0)
    }

    /// True if a sequence holds the page.
    pub fn is_held(&self, page: u32) -> bool {
        self.holders_of(page) > 0
    }

    /// True if one sequence holds the page, and nobody else has it.
    pub fn is_alone(&self, page: u32) -> bool {
        self.pages.get(page as usize).is_some_and(|of| of.sequences == 1 && !of.kept)
    }

    /// True if the tree has the page.
    pub fn is_kept(&self, page: u32) -> bool {
        self.pages.get(page as usize).is_some_and(|of| of.kept)
    }

    /// Freed numbers whose memory the device still has; it gives it back now.
    pub fn take_freed(&mut self) -> Vec<u32> {
        self.free.extend_from_slice(&self.freed);
        std::mem::take(&mut self.freed)
    }

    pub fn size(&self) -> u32 {
        self.size
    }

    /// Pages in use, by sequences or by the tree alone.
    pub fn used(&self) -> u32 {
        self.pages.len() as u32 - (self.free.len() + self.freed.len()) as u32
    }

    /// Pages that only the tree has.
    pub fn cached(&self) -> u32 {
        self.cached
    }

    /// Bytes in use by the users that computed them.
    pub fn charged(&self) -> impl Iterator<Item = (u32, u64)> {
        self.pages.iter().filter(|page| page.is_used()).map(|page| (page.uid, self.page_bytes))
    }

    /// Number of sequences that hold each page, for those that any holds.
    #[cfg(test)]
    pub fn holders(&self) -> BTreeMap<u32, u32> {
        let held = (0..).zip(&self.pages).filter(|(_, page)| page.sequences > 0);
        held.map(|(number, page)| (number, page.sequences)).collect()
    }

    /// Number of sequences that hold each page, by page and user, if the pages of each user are counted right.
    #[cfg(test)]
    pub fn holders_by_user(&self) -> Option<&BTreeMap<(u32, u32), u32>> {
        let mut held: BTreeMap<u32, u32> = BTreeMap::new();
        self.holders.keys().for_each(|(_, uid)| *held.entry(*uid).or_default() += 1);
        (held == self.held).then_some(&self.holders)
    }
}
