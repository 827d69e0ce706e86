//! Keys and values of one model: pages in device memory, and the table of their addresses that kernels read.
//!
//! A page holds 32 tokens of one sequence for all layers, `[layer][k | v][kv_head][32][head_dim]`, and takes memory from
//! its first write to its release.

use super::{ALIGN, Buffer, Device, HipError, Owner, Stream};
use crate::backend::{BackendError, KV_PAGE_TOKENS, KvType, ModelDims};

/// Addresses that the table has room for at first.
const TABLE_MIN: usize = 64;

/// The pages of one model.
#[derive(Debug)]
pub struct KvPool {
    page_bytes: usize,
    layer_bytes: u64,
    size: u32,
    pages: Vec<Option<Buffer>>,
    /// As on the device, but for those in `changed`.
    addresses: Vec<u64>,
    table: Buffer,
    room: usize,
    /// The first and the last entry that the device does not have yet.
    changed: Option<(usize, usize)>,
}

/// Bytes of a page of one layer, and of a whole page; `None` past the address space.
fn sizes(dims: &ModelDims, kv: KvType) -> Option<(u64, usize)> {
    let element = match kv {
        KvType::F16 => 2,
        KvType::F32 => 4,
    };
    let values = dims.n_kv_heads.checked_mul(dims.head_dim)?.checked_mul(2 * KV_PAGE_TOKENS * element)?;
    let all = values.checked_mul(dims.n_layers)?.checked_next_multiple_of(ALIGN)?;
    (all < isize::MAX as usize).then_some((values as u64, all))
}

/// What one page takes of the device; `u64::MAX` when there can be no such page.
pub fn page_bytes(dims: &ModelDims, kv: KvType) -> u64 {
    sizes(dims, kv).map_or(u64::MAX, |(_, all)| all as u64)
}

impl KvPool {
    /// What an empty pool takes of the device.
    pub const TABLE_BYTES: u64 = (TABLE_MIN * size_of::<u64>()).next_multiple_of(ALIGN) as u64;

    /// An empty pool of `size` page numbers.
    ///
    /// # Errors
    /// [`BackendError::Dims`], [`HipError`] for the table.
    pub fn new(device: &Device, dims: &ModelDims, kv: KvType, size: u32) -> Result<Self, BackendError> {
        let (layer_bytes, page_bytes) =
            sizes(dims, kv).ok_or(BackendError::Dims("a KV page exceeds the address space"))?;
        Ok(Self {
            page_bytes,
            layer_bytes,
            size,
            pages: Vec::new(),
            addresses: Vec::new(),
            table: device.take(TABLE_MIN * size_of::<u64>(), Owner::Scratch)?,
            room: TABLE_MIN,
            changed: None,
        })
    }

    /// Bytes from one layer of a page to the next.
    pub fn layer_bytes(&self) -> u64 {
        self.layer_bytes
    }

    /// Addresses by page number, on the device.
    pub fn table(&self) -> &Buffer {
        &self.table
    }

    /// Bytes that pages take now.
    pub fn bytes(&self) -> u64 {
        self.pages.iter().flatten().map(Buffer::taken_bytes).sum()
    }

    /// Whether a page has memory.
    pub fn is_used(&self, page: u32) -> bool {
        self.pages.get(page as usize).is_some_and(Option::is_some)
    }

    /// Gives a page memory, if it has none.
    ///
    /// # Errors
    /// [`BackendError::Batch`] for a number outside the pool, [`HipError`].
    pub fn materialise(&mut self, device: &Device, stream: &Stream, page: u32) -> Result<(), BackendError> {
        if page >= self.size {
            return Err(BackendError::Batch("a KV page outside the pool"));
        }
        let index = page as usize;
        if self.pages.len() <= index {
            self.pages.resize_with(index + 1, || None);
            self.addresses.resize(index + 1, 0);
        }
        let (Some(slot), Some(address)) = (self.pages.get_mut(index), self.addresses.get_mut(index)) else {
            return Err(BackendError::Batch("a KV page outside the pool"));
        };
        if slot.is_some() {
            return Ok(());
        }
        let buffer = device.take(self.page_bytes, Owner::Kv)?;
        if cfg!(debug_assertions) {
            stream.fill(buffer.all(), 0xff)?; // NaN: a row that reads what none wrote shows
        }
        *address = buffer.ptr::<u8>().address();
        *slot = Some(buffer);
        let (first, last) = self.changed.unwrap_or((index, index));
        self.changed = Some((first.min(index), last.max(index)));
        Ok(())
    }

    /// Gives a page's memory back. No work that uses it may be under way.
    pub fn release(&mut self, page: u32) {
        if let Some(slot) = self.pages.get_mut(page as usize) {
            *slot = None;
        }
    }

    /// Brings the device's table up to date. True when the table moved: what holds its address is stale.
    ///
    /// # Errors
    /// [`HipError`].
    pub fn send_table(&mut self, device: &Device, stream: &Stream) -> Result<bool, HipError> {
        let Some((first, last)) = self.changed else { return Ok(false) };
        let moved = self.addresses.len() > self.room;
        if moved {
            let room = self.addresses.len().next_power_of_two();
            self.table = device.take(room * size_of::<u64>(), Owner::Scratch)?;
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
