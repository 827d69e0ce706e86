//! The KV cache of one model: pages of 32 tokens. Each page is an anonymous mapping that exists only while the page
//! is in use.
//!
//! Layout of a page: `[state][head] { K [head_dim][32 tokens], V [32 tokens][head_stride] }`, where `head_stride` is
//! head_dim rounded up to 16. K is transposed, so that one vector yields the scores of 16 tokens without a sum across
//! lanes. V is stored by token, so that its weighted sum is a vector too. A key is written once and read by every
//! later token, which pays for the scattered write.

use half::f16;

use super::memory::Memory;
use super::pool::Pool;
use super::simd::{LANES, Level, Simd, vectorize};
use crate::backend::{BackendError, KV_PAGE_TOKENS, KvType};
use crate::program::{State, StateId};

/// An element of the cache.
pub trait KvElement: Copy + Send + Sync + 'static {
    /// Value of all-zero bytes.
    const ZERO: Self;

    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::V;
    fn store<S: Simd>(simd: S, v: S::V, to: &mut [Self; LANES]);
    /// Writes one token's key and value of a head into that head's part of a page.
    fn write(level: Level, rows: HeadRows<'_>, k: &mut [Self], v: &mut [Self]);
}

/// Key and value of one token and head, and the token's index in the page.
#[derive(Clone, Copy)]
pub struct HeadRows<'a> {
    key: &'a [f32],
    value: &'a [f32],
    token: usize,
}

vectorize!(fn write_f16 = write_lanes::<_, f16>, (rows: HeadRows<'_>, k: &mut [f16], v: &mut [f16]));
vectorize!(fn write_f32 = write_lanes::<_, f32>, (rows: HeadRows<'_>, k: &mut [f32], v: &mut [f32]));

impl KvElement for f16 {
    const ZERO: Self = f16::ZERO;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::V {
        simd.load_f16(from)
    }
    #[inline(always)]
    fn store<S: Simd>(simd: S, v: S::V, to: &mut [Self; LANES]) {
        simd.store_f16(v, to);
    }
    fn write(level: Level, rows: HeadRows<'_>, k: &mut [Self], v: &mut [Self]) {
        write_f16(level, rows, k, v);
    }
}

impl KvElement for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::V {
        simd.load(from)
    }
    #[inline(always)]
    fn store<S: Simd>(simd: S, v: S::V, to: &mut [Self; LANES]) {
        simd.store(v, to);
    }
    fn write(level: Level, rows: HeadRows<'_>, k: &mut [Self], v: &mut [Self]) {
        write_f32(level, rows, k, v);
    }
}

#[inline(always)]
fn write_lanes<S: Simd, E: KvElement>(s: S, rows: HeadRows<'_>, k: &mut [E], v: &mut [E]) {
    let HeadRows { key, value, token } = rows;
    let v_row = &mut v[token * value.len().next_multiple_of(LANES)..][..value.len()];
    for (value, out) in value.chunks(LANES).zip(v_row.chunks_mut(LANES)) {
        out.copy_from_slice(&narrow::<S, E>(s, value)[..value.len()]);
    }
    for (key, columns) in key.chunks(LANES).zip(k.chunks_mut(LANES * KV_PAGE_TOKENS)) {
        let narrow = narrow::<S, E>(s, key);
        for (x, column) in narrow.iter().zip(columns.chunks_exact_mut(KV_PAGE_TOKENS)) {
            column[token] = *x;
        }
    }
}

/// Converts up to sixteen values; the rest of the sixteen are zero.
#[inline(always)]
fn narrow<S: Simd, E: KvElement>(s: S, values: &[f32]) -> [E; LANES] {
    let mut wide = [0.0; LANES];
    wide[..values.len()].copy_from_slice(values);
    let mut narrow = [E::ZERO; LANES];
    E::store(s, s.load(&wide), &mut narrow);
    narrow
}

/// Bytes of memory per page; `u64::MAX` if it exceeds the address space.
pub fn page_bytes(states: &[State], kv: KvType) -> u64 {
    let (_, mapped_bytes) = place(states, kv, |_| {}).unwrap_or((0, usize::MAX));
    mapped_bytes as u64
}

/// Position of one state's keys and values in a page, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    start: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// Distance between V rows of a head: head_dim rounded up to whole vectors.
    pub head_stride: usize,
}

impl KvLayout {
    fn k_len(&self) -> usize {
        self.head_dim * KV_PAGE_TOKENS
    }

    fn head_len(&self) -> usize {
        (self.head_dim + self.head_stride) * KV_PAGE_TOKENS
    }

    fn head_start(&self, head: usize) -> usize {
        assert!(head < self.heads, "a head outside the page");
        self.start + head * self.head_len()
    }
}

/// Places every state. Returns the elements of a page and the bytes of its mapping, rounded to whole kernel pages,
/// the unit in which the kernel gives memory. `None` if a page exceeds the address space.
fn place(states: &[State], kv: KvType, mut take: impl FnMut(KvLayout)) -> Option<(usize, usize)> {
    let mut end = 0usize;
    for state in states {
        let (heads, head_dim) = match state {
            State::Kv { heads, head_dim } => (*heads as usize, *head_dim as usize),
            State::Recurrent { .. } => (0, 0),
        };
        let head_stride = head_dim.checked_next_multiple_of(LANES)?;
        take(KvLayout { start: end, heads, head_dim, head_stride });
        let head = head_dim.checked_add(head_stride)?.checked_mul(KV_PAGE_TOKENS)?;
        end = end.checked_add(head.checked_mul(heads)?)?;
    }
    let mapped_bytes =
        end.checked_mul(element_bytes(kv))?.checked_next_multiple_of(rustix::param::page_size())?;
    // A program without keys and values has pages all the same: they count positions.
    let mapped_bytes = mapped_bytes.max(rustix::param::page_size());
    isize::try_from(mapped_bytes).is_ok().then_some((end, mapped_bytes))
}

fn element_bytes(kv: KvType) -> usize {
    match kv {
        KvType::F16 => 2,
        KvType::F32 => 4,
    }
}

/// Keys and values of one head in one page.
pub struct KvHead<'a, E> {
    /// Shape `[head_dim][32 tokens]`.
    pub k: &'a [E],
    /// Shape `[32 tokens][head_stride]`.
    pub v: &'a [E],
}

/// The KV pages of one model.
pub struct KvPool {
    /// Layout by state number.
    layouts: Vec<KvLayout>,
    /// Elements per page.
    page_len: usize,
    /// Bytes of a page's mapping.
    mapped_bytes: usize,
    kv: KvType,
    /// Page numbers are below this.
    size: u32,
    /// Memory by page number; `None` for a page that is not in use. As long as the highest page used.
    pages: Vec<Option<Memory>>,
    used: u64,
}

/// Destination of a row's key and value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPlace {
    /// Page number.
    pub page: u32,
    /// Token index in the page.
    pub token: u32,
}

impl KvPool {
    /// A pool of `size` pages without memory. A budget of some GiB has millions of small pages, so the page table
    /// also grows with use.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] if a page exceeds the address space.
    pub fn new(states: &[State], kv: KvType, size: u32) -> Result<Self, BackendError> {
        let mut layouts = Vec::new();
        let placed = place(states, kv, |layout| layouts.push(layout));
        let refused = BackendError::OutOfMemory { what: "a KV page", need_bytes: u64::MAX };
        let (page_len, mapped_bytes) = placed.ok_or(refused)?;
        Ok(Self { layouts, page_len, mapped_bytes, kv, size, pages: Vec::new(), used: 0 })
    }

    /// Position of a state in each page.
    ///
    /// # Panics
    /// If the program lacks the state (a broken invariant: programs are checked).
    pub fn layout(&self, state: StateId) -> KvLayout {
        self.layouts[state.0 as usize]
    }

    /// Element type.
    pub fn kv(&self) -> KvType {
        self.kv
    }

    /// Whether the page has memory.
    pub fn is_used(&self, page: u32) -> bool {
        self.pages.get(page as usize).is_some_and(Option::is_some)
    }

    /// Bytes of memory per page.
    pub fn page_bytes(&self) -> u64 {
        self.mapped_bytes as u64
    }

    /// Bytes that all pages take now.
    pub fn bytes(&self) -> u64 {
        self.used * self.page_bytes()
    }

    /// Gives memory to a page and populates it at once, in a tenth of the time of single page faults. A page that has
    /// memory keeps it and its contents.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`]; [`BackendError::Batch`] for a page outside the pool.
    pub fn materialise(&mut self, page: u32) -> Result<(), BackendError> {
        if page >= self.size {
            return Err(BackendError::Batch("a KV page is outside the pool"));
        }
        if self.is_used(page) {
            return Ok(());
        }
        self.grow_table(page as usize + 1)?;
        let bytes = self.mapped_bytes;
        let refused = BackendError::OutOfMemory { what: "a KV page", need_bytes: bytes as u64 };
        let mut memory = Memory::zeroed(bytes, true).ok_or(refused)?;
        if cfg!(debug_assertions) {
            memory.bytes_mut().fill(0xff); // NaN in both types, so that a read of unwritten values shows
        }
        self.pages[page as usize] = Some(memory);
        self.used += 1;
        Ok(())
    }

    /// Copies a page to another, which gets memory if it has none.
    ///
    /// # Errors
    /// As [`KvPool::materialise`], and [`BackendError::Batch`] if `from` has no memory.
    pub fn copy(&mut self, from: u32, to: u32) -> Result<(), BackendError> {
        self.materialise(to)?;
        let none = BackendError::Batch("a KV page without memory is copied");
        let pages = self.pages.get_disjoint_mut([from as usize, to as usize]);
        let Ok([Some(from), Some(to)]) = pages else { return Err(none) };
        to.bytes_mut().copy_from_slice(from.bytes_mut());
        Ok(())
    }

    /// All bytes of a page.
    ///
    /// # Errors
    /// [`BackendError::Batch`] if it has no memory.
    pub fn read(&mut self, page: u32) -> Result<Vec<u8>, BackendError> {
        let memory = self.pages.get_mut(page as usize).and_then(Option::as_mut);
        let memory = memory.ok_or(BackendError::Batch("a KV page without memory is read"))?;
        Ok(memory.bytes_mut().to_vec())
    }

    /// Fills a page, which gets memory if it has none.
    ///
    /// # Errors
    /// As [`KvPool::materialise`], and [`BackendError::Batch`] if `bytes` is not as long as a page.
    pub fn fill(&mut self, page: u32, bytes: &[u8]) -> Result<(), BackendError> {
        if bytes.len() != self.mapped_bytes {
            return Err(BackendError::Batch("a KV page is filled with another number of bytes"));
        }
        self.materialise(page)?;
        let memory = self.pages.get_mut(page as usize).and_then(Option::as_mut);
        memory
            .ok_or(BackendError::Batch("a KV page without memory is filled"))?
            .bytes_mut()
            .copy_from_slice(bytes);
        Ok(())
    }

    /// Makes the table at least `len` entries long.
    fn grow_table(&mut self, len: usize) -> Result<(), BackendError> {
        let more = len.saturating_sub(self.pages.len());
        self.pages.try_reserve(more).map_err(|_| BackendError::OutOfMemory {
            what: "the table of KV pages",
            need_bytes: len as u64 * size_of::<Option<Memory>>() as u64,
        })?;
        self.pages.resize_with(self.pages.len() + more, || None);
        Ok(())
    }

    /// Frees the memory of a page. Ignores a page without memory or outside the pool.
    pub fn release(&mut self, page: u32) {
        if let Some(slot) = self.pages.get_mut(page as usize)
            && slot.take().is_some()
        {
            self.used -= 1;
        }
    }

    /// Start of a page as elements. Panics if the page has no memory (a broken invariant: `begin_step` checks all
    /// pages).
    fn base<E: KvElement>(&self, page: u32) -> *mut E {
        assert_eq!(size_of::<E>(), element_bytes(self.kv), "element type of another pool");
        let memory = self.pages.get(page as usize).and_then(Option::as_ref);
        assert!(memory.is_some_and(|m| m.len() == self.mapped_bytes), "a KV page without memory");
        memory.map_or(std::ptr::null_mut(), |m| m.base().cast())
    }

    /// Start of a head in a page; panics unless the whole head lies in it.
    fn head_start(&self, layout: &KvLayout, head: usize) -> usize {
        let start = layout.head_start(head);
        assert!(start + layout.head_len() <= self.page_len, "a head outside the page");
        start
    }

    /// Keys and values of one head.
    ///
    /// # Panics
    /// If the page has no memory, or `E` is not the pool's element type (broken invariants of this backend).
    pub fn head<E: KvElement>(&self, page: u32, layout: &KvLayout, head: usize) -> KvHead<'_, E> {
        let start = self.head_start(layout, head);
        let base = self.base::<E>(page);
        // SAFETY: `base` checked that the page is a live mapping of all heads' elements, and `head_start` that the head
        // lies in it. Elements are aligned, since mappings start at page boundaries. Any bytes are an f16 or f32. The
        // mapping lives as long as `&self`; writes go through `&mut self` only.
        let head = unsafe { std::slice::from_raw_parts(base.add(start), layout.head_len()) };
        let (k, v) = head.split_at(layout.k_len());
        KvHead { k, v }
    }

    /// Writes key and value of each row to its place, for all heads of a state. `rows(row, head)` returns both,
    /// `head_dim` values each. With `parallel`, the workers of `pool` share the heads.
    pub fn write<'r>(
        &mut self,
        pool: &mut Pool,
        parallel: bool,
        level: Level,
        layout: KvLayout,
        places: &[KvPlace],
        rows: impl Fn(usize, usize) -> [&'r [f32]; 2] + Sync,
    ) {
        let this: &Self = self;
        let head = |kv_head: usize| match this.kv {
            // SAFETY: see `write_head`: only this call has `kv_head`, and `&mut self` keeps readers away.
            KvType::F16 => unsafe { this.write_head::<f16>(level, &layout, kv_head, places, &rows) },
            // SAFETY: as above.
            KvType::F32 => unsafe { this.write_head::<f32>(level, &layout, kv_head, places, &rows) },
        };
        if parallel {
            pool.run(layout.heads, |_, kv_head| head(kv_head));
        } else {
            (0..layout.heads).for_each(head);
        }
    }

    /// # Safety
    /// No other code reads or writes this head of this state at the same time.
    unsafe fn write_head<'r, E: KvElement>(
        &self,
        level: Level,
        layout: &KvLayout,
        kv_head: usize,
        places: &[KvPlace],
        rows: &impl Fn(usize, usize) -> [&'r [f32]; 2],
    ) {
        let start = self.head_start(layout, kv_head);
        for (row, place) in places.iter().enumerate() {
            let base = self.base::<E>(place.page);
            // SAFETY: in bounds and aligned as in `head`. `base` is the mapping's own pointer, made from no
            // reference, so it may be written through. The caller has exclusive use of the head: heads do not
            // overlap.
            let head = unsafe { std::slice::from_raw_parts_mut(base.add(start), layout.head_len()) };
            let (k, v) = head.split_at_mut(layout.k_len());
            let [key, value] = rows(row, kv_head);
            let token = place.token as usize;
            E::write(level, HeadRows { key, value, token }, k, v);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::tests::levels;
    use super::*;
    const STATES: [State; 2] = [State::Kv { heads: 2, head_dim: 20 }; 2];

    fn check_written<E: KvElement + Into<f32>>(kv: KvType, level: Level) {
        let mut pages = KvPool::new(&STATES, kv, 3).unwrap();
        let [first, second] = [0, 1].map(|state| pages.layout(StateId(state)));
        let mut workers = Pool::new(2).unwrap();
        pages.materialise(1).unwrap();
        pages.materialise(2).unwrap();
        let places = [KvPlace { page: 2, token: 31 }, KvPlace { page: 1, token: 0 }];
        // Halves are exact in f16. Each row holds keys of two heads, then values of two heads.
        let data: Vec<f32> = (0..160).map(|i| i as f32 * 0.5).collect();
        let rows = |row: usize, head: usize| {
            [&data[row * 80 + head * 20..][..20], &data[row * 80 + 40 + head * 20..][..20]]
        };
        pages.write(&mut workers, true, level, second, &places, rows);
        for (row, place) in places.into_iter().enumerate() {
            for kv_head in 0..2 {
                let head = pages.head::<E>(place.page, &second, kv_head);
                let (token, [key, value]) = (place.token as usize, rows(row, kv_head));
                for d in 0..20 {
                    assert_eq!(head.k[d * 32 + token].into(), key[d]);
                    assert_eq!(head.v[token * 32 + d].into(), value[d]);
                }
                // Pages start as NaN in tests.
                let written = |x: &&E| !(**x).into().is_nan();
                assert_eq!(head.k.iter().chain(head.v).filter(written).count(), 40);
                assert!(pages.head::<E>(place.page, &first, kv_head).k.iter().all(|&x| x.into().is_nan()));
            }
        }
    }

    #[test]
    fn rows_land_in_their_places_and_nowhere_else() {
        for (_, level) in levels() {
            check_written::<f16>(KvType::F16, level);
            check_written::<f32>(KvType::F32, level);
        }
    }

    #[test]
    fn pages_take_memory_from_first_use_until_release() {
        let mut pages = KvPool::new(&STATES, KvType::F16, 2).unwrap();
        // 2 states, 2 heads, 32 tokens, 20 + 32 values of 2 bytes, rounded to whole kernel pages.
        let values = 2 * 2 * 32 * 52 * 2_u64;
        let whole = values.next_multiple_of(rustix::param::page_size() as u64);
        assert_eq!((pages.bytes(), pages.page_bytes()), (0, whole));
        assert_eq!(page_bytes(&STATES, KvType::F16), whole);
        pages.materialise(1).unwrap();
        pages.materialise(1).unwrap();
        assert_eq!(pages.bytes(), pages.page_bytes());
        assert!(pages.is_used(1) && !pages.is_used(0) && !pages.is_used(7));
        assert!(matches!(pages.materialise(2), Err(BackendError::Batch(_))));
        for page in [0, 1, 1, 7] {
            pages.release(page);
        }
        assert_eq!(pages.bytes(), 0);
    }

    #[test]
    fn counted_bytes_are_those_that_the_kernel_gives() {
        // Heads of 2 values: V rows of 16, and 2304 bytes per page, which takes a whole kernel page.
        let tiny = [State::Kv { heads: 2, head_dim: 2 }];
        for kv in [KvType::F16, KvType::F32] {
            let mut pool = KvPool::new(&tiny, kv, u32::MAX).unwrap();
            pool.materialise(0).unwrap();
            let mapping = pool.pages[0].as_ref().unwrap();
            assert_eq!(mapping.len() as u64, page_bytes(&tiny, kv));
            assert!(mapping.len().is_multiple_of(rustix::param::page_size()));
            assert!(mapping.len() >= 2 * 32 * (2 + 16) * element_bytes(kv));
        }
    }

    #[test]
    fn a_pool_of_millions_of_pages_has_a_table_of_those_in_use() {
        let mut pool = KvPool::new(&STATES, KvType::F16, u32::MAX).unwrap();
        assert_eq!(pool.pages.capacity(), 0);
        pool.materialise(3).unwrap();
        assert_eq!((pool.pages.len(), pool.bytes()), (4, pool.page_bytes()));
        assert!(pool.is_used(3) && !pool.is_used(0) && !pool.is_used(1 << 30));
        pool.release(1 << 30);
        pool.release(3);
        assert_eq!(pool.bytes(), 0);
    }

    #[test]
    fn pages_beyond_the_address_space_are_refused() {
        let huge = [State::Kv { heads: u32::MAX, head_dim: u32::MAX }];
        assert!(matches!(KvPool::new(&huge, KvType::F16, 1), Err(BackendError::OutOfMemory { .. })));
        assert_eq!(page_bytes(&huge, KvType::F16), u64::MAX);
        let large = [State::Kv { heads: 1 << 31, head_dim: 1 << 16 }];
        let mut pages = KvPool::new(&large, KvType::F16, 1).unwrap();
        assert!(matches!(pages.materialise(0), Err(BackendError::OutOfMemory { .. })));
        assert_eq!(pages.bytes(), 0);
    }
}
