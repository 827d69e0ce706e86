//! The KV cache of one model: pages of 32 tokens. Each page is an anonymous mapping that exists only while the page
//! is in use.
//!
//! Layout of a page: `[state][head] { K [head_dim][32 tokens], V [32 tokens][head_stride] }`, where `head_stride` is
//! head_dim rounded up to 16. K is transposed, so that one vector yields the scores of 16 tokens without a sum across
//! lanes. V is stored by token, so that its weighted sum is a vector too. A key is written once and read by every
//! later token, which pays for the scattered write.
//!
//! 8-bit codes have a scale for each [`KV_GROUP`] values of a token: `f16 [group][32 tokens]` after K, and again after V.

use half::f16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::memory::Memory;
use super::pool::Pool;
use super::simd::{LANES, Level, Simd, vectorize};
use crate::backend::{BackendError, KV_GROUP, KV_PAGE_TOKENS, KvType};
use crate::program::{State, StateId};

/// An element of the cache.
pub trait KvElement:
    Copy + Default + Send + Sync + FromBytes + IntoBytes + Immutable + KnownLayout + 'static
{
    /// Whether elements are codes, which have a scale for each [`KV_GROUP`] of them.
    const SCALED: bool = false;

    /// Sixteen elements, without their scale.
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::V;
    /// Writes one token's key and value of a head into that head's part of a page.
    fn write(level: Level, rows: HeadRows<'_>, head: KvHeadMut<'_, Self>);
}

/// An element that holds a value by itself.
pub trait Plain: KvElement {
    fn store<S: Simd>(simd: S, v: S::V, to: &mut [Self; LANES]);
}

/// Key and value of one token and head, and the token's index in the page.
#[derive(Clone, Copy)]
pub struct HeadRows<'a> {
    key: &'a [f32],
    value: &'a [f32],
    token: usize,
}

vectorize!(fn write_f16 = write_lanes::<_, f16>, (rows: HeadRows<'_>, head: KvHeadMut<'_, f16>));
vectorize!(fn write_f32 = write_lanes::<_, f32>, (rows: HeadRows<'_>, head: KvHeadMut<'_, f32>));
vectorize!(fn write_i8 = write_codes, (rows: HeadRows<'_>, head: KvHeadMut<'_, i8>));

impl KvElement for f16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::V {
        simd.load_f16(from)
    }
    fn write(level: Level, rows: HeadRows<'_>, head: KvHeadMut<'_, Self>) {
        write_f16(level, rows, head);
    }
}

impl Plain for f16 {
    #[inline(always)]
    fn store<S: Simd>(simd: S, v: S::V, to: &mut [Self; LANES]) {
        simd.store_f16(v, to);
    }
}

impl KvElement for f32 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::V {
        simd.load(from)
    }
    fn write(level: Level, rows: HeadRows<'_>, head: KvHeadMut<'_, Self>) {
        write_f32(level, rows, head);
    }
}

impl Plain for f32 {
    #[inline(always)]
    fn store<S: Simd>(simd: S, v: S::V, to: &mut [Self; LANES]) {
        simd.store(v, to);
    }
}

impl KvElement for i8 {
    const SCALED: bool = true;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::V {
        simd.load_i8(from)
    }
    fn write(level: Level, rows: HeadRows<'_>, head: KvHeadMut<'_, Self>) {
        write_i8(level, rows, head);
    }
}

#[inline(always)]
fn write_lanes<S: Simd, E: Plain>(s: S, rows: HeadRows<'_>, head: KvHeadMut<'_, E>) {
    let HeadRows { key, value, token } = rows;
    let v_row = &mut head.v[token * value.len().next_multiple_of(LANES)..][..value.len()];
    for (value, out) in value.chunks(LANES).zip(v_row.chunks_mut(LANES)) {
        out.copy_from_slice(&narrow::<S, E>(s, value)[..value.len()]);
    }
    for (key, columns) in key.chunks(LANES).zip(head.k.chunks_mut(LANES * KV_PAGE_TOKENS)) {
        let narrow = narrow::<S, E>(s, key);
        for (x, column) in narrow.iter().zip(columns.chunks_exact_mut(KV_PAGE_TOKENS)) {
            column[token] = *x;
        }
    }
}

/// Converts up to sixteen values; the rest of the sixteen are zero.
#[inline(always)]
fn narrow<S: Simd, E: Plain>(s: S, values: &[f32]) -> [E; LANES] {
    let mut wide = [0.0; LANES];
    wide[..values.len()].copy_from_slice(values);
    let mut narrow = [E::default(); LANES];
    E::store(s, s.load(&wide), &mut narrow);
    narrow
}

#[inline(always)]
fn write_codes<S: Simd>(s: S, rows: HeadRows<'_>, head: KvHeadMut<'_, i8>) {
    let HeadRows { key, value, token } = rows;
    let v_row = &mut head.v[token * value.len().next_multiple_of(LANES)..][..value.len()];
    let outs = v_row.chunks_exact_mut(KV_GROUP).zip(head.v_scales.chunks_exact_mut(KV_PAGE_TOKENS));
    for ((values, scales), group) in outs.zip(value.as_chunks::<KV_GROUP>().0) {
        let (scale, codes) = quantised(s, group);
        values.copy_from_slice(&codes);
        scales[token] = scale;
    }
    let columns = head.k.chunks_exact_mut(KV_GROUP * KV_PAGE_TOKENS);
    let outs = columns.zip(head.k_scales.chunks_exact_mut(KV_PAGE_TOKENS));
    for ((columns, scales), group) in outs.zip(key.as_chunks::<KV_GROUP>().0) {
        let (scale, codes) = quantised(s, group);
        for (code, column) in codes.iter().zip(columns.chunks_exact_mut(KV_PAGE_TOKENS)) {
            column[token] = *code;
        }
        scales[token] = scale;
    }
}

/// The scale of a group of values, and their codes: the greatest magnitude has the code 127 or -127. If a value is not
/// finite, the scale is NaN, so that an overflow is not hidden.
#[inline(always)]
fn quantised<S: Simd>(s: S, values: &[f32; KV_GROUP]) -> (f16, [i8; KV_GROUP]) {
    let (halves, _) = values.as_chunks::<LANES>();
    let [low, high] = [s.load(&halves[0]), s.load(&halves[1])];
    let zero = s.splat(0.0);
    let most = |v| s.reduce_max(s.max(v, s.sub(zero, v)));
    // Zero, unless a value is infinite or NaN.
    let fault = s.reduce_add(s.add(s.mul(low, zero), s.mul(high, zero)));
    let mut scales = [f16::ZERO; LANES];
    s.store_f16(s.splat(most(low).max(most(high)) / 127.0 + fault), &mut scales);
    let mut wide = [0.0; LANES];
    s.store(s.load_f16(&scales), &mut wide);
    let inverse = if wide[0] > 0.0 { 1.0 / wide[0] } else { 0.0 };
    let mut codes = [0i8; KV_GROUP];
    for (half, codes) in [low, high].into_iter().zip(codes.as_chunks_mut::<LANES>().0) {
        // A scale that is rounded down leaves values above 127 of it.
        let within = s.max(s.splat(-127.0), s.min(s.splat(127.0), s.mul(half, s.splat(inverse))));
        s.store(s.round(within), &mut wide);
        for (code, value) in codes.iter_mut().zip(wide) {
            *code = value as i8;
        }
    }
    (scales[0], codes)
}

/// Bytes of memory per page; `u64::MAX` if it exceeds the address space.
pub fn page_bytes(states: &[State], kv: KvType) -> u64 {
    place(states, kv, |_| {}).unwrap_or(usize::MAX) as u64
}

/// Position of one state's keys and values in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Bytes from the page's start.
    start: usize,
    /// Number of KV heads.
    pub heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// Distance between V rows of a head: head_dim rounded up to whole vectors.
    pub head_stride: usize,
    /// Bytes of an element.
    element: usize,
    /// Scales of a token's key, and of its value.
    groups: usize,
}

impl KvLayout {
    /// `None` if the state exceeds the address space.
    fn new(state: &State, kv: KvType, start: usize) -> Option<Self> {
        let (heads, head_dim) = match state {
            State::Kv { heads, head_dim } => (*heads as usize, *head_dim as usize),
            State::Recurrent { .. } => (0, 0),
        };
        let groups = if kv == KvType::Int8 { head_dim.div_ceil(KV_GROUP) } else { 0 };
        let head_stride = head_dim.checked_next_multiple_of(LANES)?;
        let layout = Self { start, heads, head_dim, head_stride, element: element_bytes(kv), groups };
        let elements = head_dim.checked_add(head_stride)?.checked_mul(layout.element)?;
        let token = elements.checked_add(groups.checked_mul(2 * size_of::<f16>())?)?;
        start.checked_add(token.checked_mul(KV_PAGE_TOKENS)?.checked_mul(heads)?)?;
        Some(layout)
    }

    fn k_bytes(&self) -> usize {
        self.head_dim * KV_PAGE_TOKENS * self.element
    }

    fn v_bytes(&self) -> usize {
        self.head_stride * KV_PAGE_TOKENS * self.element
    }

    /// Bytes of the scales of all keys of a head, and again of its values.
    fn scale_bytes(&self) -> usize {
        self.groups * KV_PAGE_TOKENS * size_of::<f16>()
    }

    fn head_bytes(&self) -> usize {
        self.k_bytes() + self.v_bytes() + 2 * self.scale_bytes()
    }

    /// Bytes from the page's start to the end of the state.
    fn end(&self) -> usize {
        self.start + self.heads * self.head_bytes()
    }

    fn head_start(&self, head: usize) -> usize {
        assert!(head < self.heads, "a head outside the page");
        self.start + head * self.head_bytes()
    }
}

/// Places every state. Returns the bytes of a page's mapping, rounded to whole kernel pages, the unit in which the kernel
/// gives memory. `None` if a page exceeds the address space.
fn place(states: &[State], kv: KvType, mut take: impl FnMut(KvLayout)) -> Option<usize> {
    let mut end = 0usize;
    for state in states {
        let layout = KvLayout::new(state, kv, end)?;
        end = layout.end();
        take(layout);
    }
    let mapped_bytes = end.checked_next_multiple_of(rustix::param::page_size())?;
    // A program without keys and values has pages all the same: they count positions.
    let mapped_bytes = mapped_bytes.max(rustix::param::page_size());
    isize::try_from(mapped_bytes).is_ok().then_some(mapped_bytes)
}

fn element_bytes(kv: KvType) -> usize {
    match kv {
        KvType::F16 => 2,
        KvType::Int8 => 1,
        KvType::F32 => 4,
    }
}

/// Keys and values of one head in one page.
pub struct KvHead<'a, E> {
    /// Shape `[head_dim][32 tokens]`.
    pub k: &'a [E],
    /// Shape `[groups][32 tokens]`; empty for elements without scales.
    pub k_scales: &'a [f16],
    /// Shape `[32 tokens][head_stride]`.
    pub v: &'a [E],
    /// As those of keys.
    pub v_scales: &'a [f16],
}

/// As [`KvHead`], to write.
pub struct KvHeadMut<'a, E> {
    k: &'a mut [E],
    k_scales: &'a mut [f16],
    v: &'a mut [E],
    v_scales: &'a mut [f16],
}

/// The KV pages of one model.
pub struct KvPool {
    /// Layout by state number.
    layouts: Vec<KvLayout>,
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
        let mapped_bytes = placed.ok_or(refused)?;
        Ok(Self { layouts, mapped_bytes, kv, size, pages: Vec::new(), used: 0 })
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
            memory.bytes_mut().fill(0xff); // NaN in all types (as a scale of codes), so that a read of unwritten values shows
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

    /// Start of a head in a page with memory. Panics if the page has none, or if the head does not lie in it. Another
    /// pool's element type panics too. `begin_step` checks all pages, so these would be broken invariants.
    fn head_base<E: KvElement>(&self, page: u32, layout: &KvLayout, head: usize) -> *mut u8 {
        assert!(
            size_of::<E>() == layout.element && E::SCALED == (layout.groups > 0),
            "another pool's element type"
        );
        let memory = self.pages.get(page as usize).and_then(Option::as_ref);
        assert!(memory.is_some_and(|m| m.len() == self.mapped_bytes), "a KV page without memory");
        let start = layout.head_start(head);
        assert!(start + layout.head_bytes() <= self.mapped_bytes, "a head outside the page");
        memory.map_or(std::ptr::null_mut(), |m| m.base().wrapping_add(start))
    }

    /// Keys and values of one head.
    ///
    /// # Panics
    /// If the page has no memory, or `E` is not the pool's element type (broken invariants of this backend).
    pub fn head<E: KvElement>(&self, page: u32, layout: &KvLayout, head: usize) -> KvHead<'_, E> {
        let base = self.head_base::<E>(page, layout, head);
        // SAFETY: `head_base` checked that the head's bytes lie in a live mapping. It lives as long as `&self`; writes go
        // through `&mut self` only.
        let bytes = unsafe { std::slice::from_raw_parts(base, layout.head_bytes()) };
        let (k, rest) = bytes.split_at(layout.k_bytes());
        let (k_scales, rest) = rest.split_at(layout.scale_bytes());
        let (v, v_scales) = rest.split_at(layout.v_bytes());
        KvHead { k: elements(k), k_scales: elements(k_scales), v: elements(v), v_scales: elements(v_scales) }
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
            KvType::Int8 => unsafe { this.write_head::<i8>(level, &layout, kv_head, places, &rows) },
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
        for (row, place) in places.iter().enumerate() {
            let base = self.head_base::<E>(place.page, layout, kv_head);
            // SAFETY: in bounds as in `head`. `base` is the mapping's own pointer, made from no reference, so it may be
            // written through. The caller has exclusive use of the head: heads do not overlap.
            let bytes = unsafe { std::slice::from_raw_parts_mut(base, layout.head_bytes()) };
            let (k, rest) = bytes.split_at_mut(layout.k_bytes());
            let (k_scales, rest) = rest.split_at_mut(layout.scale_bytes());
            let (v, v_scales) = rest.split_at_mut(layout.v_bytes());
            let [key, value] = rows(row, kv_head);
            let token = place.token as usize;
            let head = KvHeadMut {
                k: elements_mut(k),
                k_scales: elements_mut(k_scales),
                v: elements_mut(v),
                v_scales: elements_mut(v_scales),
            };
            E::write(level, HeadRows { key, value, token }, head);
        }
    }
}

/// Bytes as elements. A head's parts begin at multiples of 32 bytes of a mapping, so any element is aligned.
fn elements<T: FromBytes + Immutable + KnownLayout>(bytes: &[u8]) -> &[T] {
    let elements = <[T]>::ref_from_bytes(bytes);
    debug_assert!(elements.is_ok(), "parts of a head are aligned");
    elements.unwrap_or_default()
}

/// As [`elements`], to write.
fn elements_mut<T: FromBytes + IntoBytes + KnownLayout>(bytes: &mut [u8]) -> &mut [T] {
    let elements = <[T]>::mut_from_bytes(bytes);
    debug_assert!(elements.is_ok(), "parts of a head are aligned");
    elements.unwrap_or_default()
}

#[cfg(test)]
mod tests;
