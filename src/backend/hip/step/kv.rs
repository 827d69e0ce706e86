//! Keys and values of one model: pages in device memory, and the table of their addresses for kernels.
//!
//! A page holds 32 tokens of one sequence for all states of the program, one after the other. Each state is
//! `[k | v][head][32][head_dim]`; codes of a head are followed by their scales (kernels/common/pages.h). A page has memory from its
//! first write to its release.

use crate::backend::hip::{ALIGN, Buffer, Device, HipError, Purpose, Stream};
use crate::backend::{BackendError, KV_GROUP, KV_PAGE_TOKENS, KvType};
use crate::program::{Program, State};

/// Entries of the first address table.
const TABLE_MIN: usize = 64;

/// Layout of a KV page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Bytes from a page's start to each state, by state number.
    pub offsets: Vec<u64>,
    /// Bytes per page.
    pub page_bytes: usize,
}

impl KvLayout {
    /// Layout for a program's states; `None` when a page would exceed the address space. `kv`: a type that is
    /// [within](KvType::within) the program.
    pub fn of(program: &Program, kv: KvType) -> Option<Self> {
        let bytes = |values: usize| match kv {
            KvType::F16 => values.checked_mul(2),
            KvType::Int8 => values.checked_add(values / KV_GROUP * size_of::<half::f16>()),
            KvType::F32 => values.checked_mul(4),
        };
        let (mut offsets, mut end) = (Vec::with_capacity(program.states().len()), 0usize);
        for state in program.states() {
            let values = match state {
                State::Kv { heads, head_dim } => (*heads as usize).checked_mul(*head_dim as usize)?,
                State::Recurrent { .. } => 0,
            };
            offsets.push(end as u64);
            // A multiple of 16 bytes, because kernels read 16 bytes at a time.
            end = end.checked_add(bytes(values)?.checked_mul(2 * KV_PAGE_TOKENS)?)?;
        }
        // A program without keys and values has pages all the same: they count positions.
        let page_bytes = end.max(1).checked_next_multiple_of(ALIGN)?;
        (page_bytes < isize::MAX as usize).then_some(Self { offsets, page_bytes })
    }
}

/// Device bytes per page; `u64::MAX` when a page would exceed the address space.
pub fn page_bytes(program: &Program, kv: KvType) -> u64 {
    KvLayout::of(program, kv.within(program)).map_or(u64::MAX, |layout| layout.page_bytes as u64)
}

/// The pages of one model.
#[derive(Debug)]
pub struct KvPool {
    page_bytes: usize,
    size: u32,
    pages: Vec<Option<Buffer>>,
    /// Page addresses. The device has the same, except for the entries in `changed`.
    addresses: Vec<u64>,
    table: Buffer,
    room: usize,
    /// First and last entry that the device lacks.
    changed: Option<(usize, usize)>,
}

impl KvPool {
    /// Device bytes of an empty pool.
    pub const TABLE_BYTES: u64 = (TABLE_MIN * size_of::<u64>()).next_multiple_of(ALIGN) as u64;

    /// An empty pool of `size` page numbers, with `page_bytes` bytes per page.
    ///
    /// # Errors
    /// [`HipError`] when the table cannot be allocated.
    pub fn new(device: &Device, page_bytes: usize, size: u32) -> Result<Self, HipError> {
        Ok(Self {
            page_bytes,
            size,
            pages: Vec::new(),
            addresses: Vec::new(),
            table: device.take(TABLE_MIN * size_of::<u64>(), Purpose::Scratch)?,
            room: TABLE_MIN,
            changed: None,
        })
    }

    /// Page addresses by page number, on the device.
    pub fn table(&self) -> &Buffer {
        &self.table
    }

    /// Device bytes of all pages with memory.
    pub fn bytes(&self) -> u64 {
        self.pages.iter().flatten().map(Buffer::taken_bytes).sum()
    }

    /// Whether a page has memory.
    pub fn is_used(&self, page: u32) -> bool {
        self.pages.get(page as usize).is_some_and(Option::is_some)
    }

    /// Gives a page memory, unless it has some.
    ///
    /// # Errors
    /// [`BackendError::Batch`] for a page outside the pool, [`HipError`].
    pub fn materialise(&mut self, device: &Device, stream: &Stream, page: u32) -> Result<(), BackendError> {
        if page >= self.size {
            return Err(BackendError::Batch("a KV page is outside the pool"));
        }
        let index = page as usize;
        if self.pages.len() <= index {
            self.pages.resize_with(index + 1, || None);
            self.addresses.resize(index + 1, 0);
        }
        let (Some(slot), Some(address)) = (self.pages.get_mut(index), self.addresses.get_mut(index)) else {
            return Err(BackendError::Batch("a KV page is outside the pool"));
        };
        if slot.is_some() {
            return Ok(());
        }
        let buffer = device.take(self.page_bytes, Purpose::Kv)?;
        if cfg!(debug_assertions) {
            stream.fill(buffer.all(), 0xff)?; // NaN: makes reads of unwritten rows visible
        }
        *address = buffer.ptr::<u8>().address();
        *slot = Some(buffer);
        let (first, last) = self.changed.unwrap_or((index, index));
        self.changed = Some((first.min(index), last.max(index)));
        Ok(())
    }

    /// Starts copying a page to another, which gets memory if it has none.
    ///
    /// # Errors
    /// As [`KvPool::materialise`], and [`BackendError::Batch`] if `from` has no memory.
    pub fn copy(&mut self, device: &Device, stream: &Stream, from: u32, to: u32) -> Result<(), BackendError> {
        self.materialise(device, stream, to)?;
        let page = |page: u32| self.pages.get(page as usize).and_then(Option::as_ref);
        let (Some(from), Some(to)) = (page(from), page(to)) else {
            return Err(BackendError::Batch("a KV page without memory is copied"));
        };
        Ok(stream.copy(to.all(), from.all())?)
    }

    /// All bytes of a page; waits for the stream.
    ///
    /// # Errors
    /// [`BackendError::Batch`] if the page has no memory, [`HipError`].
    pub fn read(&self, stream: &Stream, page: u32) -> Result<Vec<u8>, BackendError> {
        let buffer = self.pages.get(page as usize).and_then(Option::as_ref);
        let buffer = buffer.ok_or(BackendError::Batch("a KV page without memory is read"))?;
        let mut bytes = vec![0u8; self.page_bytes];
        stream.download(buffer.all(), bytes.as_mut_slice())?;
        Ok(bytes)
    }

    /// Fills a page, which gets memory if it has none; waits for the stream.
    ///
    /// # Errors
    /// As [`KvPool::materialise`], and [`BackendError::Batch`] if `bytes` is not as long as a page.
    pub fn fill(
        &mut self,
        device: &Device,
        stream: &Stream,
        page: u32,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        if bytes.len() != self.page_bytes {
            return Err(BackendError::Batch("a KV page is filled with another number of bytes"));
        }
        self.materialise(device, stream, page)?;
        let buffer = self.pages.get(page as usize).and_then(Option::as_ref);
        let buffer = buffer.ok_or(BackendError::Batch("a KV page without memory is filled"))?;
        Ok(stream.upload(buffer.all(), bytes)?)
    }

    /// Frees a page's memory. No work in flight may use it.
    pub fn release(&mut self, page: u32) {
        if let Some(slot) = self.pages.get_mut(page as usize) {
            *slot = None;
        }
    }

    /// Sends changed entries to the device's table. True when the table moved, so that its old address is stale.
    ///
    /// # Errors
    /// [`HipError`].
    pub fn send_table(&mut self, device: &Device, stream: &Stream) -> Result<bool, HipError> {
        let Some((first, last)) = self.changed else { return Ok(false) };
        let moved = self.addresses.len() > self.room;
        if moved {
            let room = self.addresses.len().next_power_of_two();
            self.table = device.take(room * size_of::<u64>(), Purpose::Scratch)?;
            self.room = room;
        }
        let first = if moved { 0 } else { first };
        let changed = self.addresses.get(first..=last).unwrap_or_default();
        let bytes = size_of::<u64>();
        stream.upload(self.table.range(first * bytes, size_of_val(changed))?, changed)?;
        self.changed = None;
        Ok(moved)
    }
}
