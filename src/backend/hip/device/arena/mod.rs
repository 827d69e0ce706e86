//! Device memory: the arena takes large chunks from the driver, hands out pieces, and keeps a ledger of bytes per
//! purpose.
//!
//! A tensor costs no driver call, and freeing memory does not stop the device. The arena keeps a few empty chunks for
//! the next allocation. It returns the others to the driver at once, and the kept ones at the latest when the device is
//! idle.

mod buffer;
mod spans;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

pub use buffer::{Buffer, DeviceRange};

use crate::backend::hip::device::driver::{Chunk, Context};
use crate::backend::hip::device::error::HipError;
use crate::lock::{Mutex, Rank};
use spans::{Place, Spans};

/// Alignment of every buffer: what the widest loads and the runtimes' own allocators use.
pub const ALIGN: usize = 256;

/// Bytes requested from the driver at once: a few dozen chunks for a large model, a twentieth of a small card.
pub const CHUNK_BYTES: usize = 256 << 20;

/// Empty chunks kept for the next allocation. On a full device, loads and evictions alternate all the time, and a
/// driver stops the device to take a chunk back.
const KEPT_CHUNKS: usize = 4;

/// Larger requests round up to this, so that chunks of one size serve tensors of nearly that size.
const LARGE_ROUND: usize = 2 << 20;

/// Purpose of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// Weights of models.
    Weights,
    /// KV pages.
    Kv,
    /// Activations between kernels, and the step's arrays.
    Scratch,
    /// Staging buffers: an upload's bytes before the repack kernels run.
    Staging,
}

impl Purpose {
    /// Every purpose.
    pub const ALL: [Self; 4] = [Self::Weights, Self::Kv, Self::Scratch, Self::Staging];
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Weights => "weights",
            Self::Kv => "KV pages",
            Self::Scratch => "scratch",
            Self::Staging => "staging",
        })
    }
}

/// How an arena requests memory from the driver.
#[derive(Clone, Copy, Debug)]
pub struct ArenaOptions {
    /// Bytes of a chunk. With 0 every buffer is its own allocation, so that a driver which checks lifetimes sees each
    /// one.
    pub chunk_bytes: usize,
    /// Most bytes to take from the driver.
    pub limit_bytes: u64,
}

impl Default for ArenaOptions {
    fn default() -> Self {
        Self { chunk_bytes: CHUNK_BYTES, limit_bytes: u64::MAX }
    }
}

/// Bytes per purpose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Bytes in buffers, by purpose; purposes without buffers are absent.
    pub bytes: BTreeMap<Purpose, u64>,
    /// Bytes in buffers now.
    pub used_bytes: u64,
    /// Peak of `used_bytes`.
    pub peak_bytes: u64,
    /// Bytes taken from the driver.
    pub driver_bytes: u64,
    /// Chunks taken from the driver.
    pub chunks: usize,
}

impl Ledger {
    /// Bytes in buffers of `purpose`.
    pub fn of(&self, purpose: Purpose) -> u64 {
        self.bytes.get(&purpose).copied().unwrap_or(0)
    }
}

/// The memory of one device.
#[derive(Debug)]
pub struct Arena {
    context: Arc<Context>,
    options: ArenaOptions,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    spans: Spans,
    chunks: BTreeMap<u32, Taken>,
    next: u32,
    ledger: Ledger,
}

#[derive(Debug)]
struct Taken {
    chunk: Chunk,
    bytes: usize,
}

impl Arena {
    pub(in crate::backend::hip) fn new(context: &Arc<Context>, options: ArenaOptions) -> Self {
        Self { context: context.clone(), options, state: Mutex::new(Rank::Arena, State::default()) }
    }

    /// Allocates `bytes` bytes (at least one) for `purpose`, aligned to [`ALIGN`]. Their content is undefined.
    ///
    /// # Errors
    /// [`HipError::OutOfMemory`], [`HipError::Call`], [`HipError::Lost`].
    pub fn take(self: &Arc<Self>, bytes: usize, purpose: Purpose) -> Result<Buffer, HipError> {
        self.context.alive()?;
        let room = bytes.max(1).checked_next_multiple_of(ALIGN);
        let room = room.ok_or_else(|| {
            HipError::refused("device memory", format!("{bytes} bytes exceed the address space"))
        })?;
        let mut state = self.state.lock();
        // A chunk made to measure when memory was short fits its own size again, or stays empty. A small long-lived
        // piece cut from it would spoil it.
        while let Some((chunk, _)) = state.spans.whole(room).filter(|(_, size)| self.is_wasted(room, *size)) {
            state.give_back(chunk);
        }
        let place = match state.spans.take(room) {
            Some(place) => place,
            None => self.take_from_driver(&mut state, room, purpose)?,
        };
        let base = state.chunks.get(&place.chunk).map(|taken| taken.chunk.address());
        let base = base.ok_or_else(|| HipError::refused("device memory", "the ledger has no such chunk"))?;
        let ledger = &mut state.ledger;
        *ledger.bytes.entry(purpose).or_default() += room as u64;
        ledger.used_bytes += room as u64;
        ledger.peak_bytes = ledger.peak_bytes.max(ledger.used_bytes);
        drop(state);
        Ok(Buffer::new(self, place, base + place.start as u64, bytes, purpose))
    }

    /// Whether an empty chunk of `size` bytes is too valuable for a piece of `room` bytes.
    fn is_wasted(&self, room: usize, size: usize) -> bool {
        size > LARGE_ROUND && size < self.options.chunk_bytes && room <= size / 2
    }

    /// Takes a chunk of at least `room` bytes from the driver, and cuts `room` bytes from it.
    fn take_from_driver(&self, state: &mut State, room: usize, purpose: Purpose) -> Result<Place, HipError> {
        let chunk_bytes = self.options.chunk_bytes;
        let large = room.checked_next_multiple_of(LARGE_ROUND).unwrap_or(room);
        // A whole chunk first; when memory is short, only the bytes requested.
        let wishes = match room {
            _ if chunk_bytes == 0 => vec![room],
            _ if room > chunk_bytes => vec![large, room],
            _ => vec![chunk_bytes, large.min(chunk_bytes), room],
        };
        let mut tried = 0;
        for bytes in wishes {
            if bytes == tried {
                continue;
            }
            tried = bytes;
            if let Some(id) = self.add_chunk(state, bytes)? {
                return state.spans.take_in(id, room).ok_or_else(|| {
                    HipError::refused(
                        "device memory",
                        format!("a new chunk of {bytes} bytes holds no piece of {room} bytes"),
                    )
                });
            }
        }
        let (free, _) = self.context.memory()?;
        let allowed = self.options.limit_bytes.saturating_sub(state.ledger.driver_bytes);
        Err(HipError::OutOfMemory {
            device: self.context.index(),
            purpose,
            need_bytes: room as u64,
            free_bytes: free.min(allowed),
        })
    }

    /// Adds a chunk. `None` when memory or the limit is short even after returning all empty chunks to the driver.
    fn add_chunk(&self, state: &mut State, bytes: usize) -> Result<Option<u32>, HipError> {
        let over =
            |state: &State| state.ledger.driver_bytes.saturating_add(bytes as u64) > self.options.limit_bytes;
        if over(state) {
            state.give_back_empty(0);
        }
        if over(state) {
            return Ok(None);
        }
        let mut got = Chunk::new(&self.context, bytes);
        if got.as_ref().is_err_and(HipError::is_out_of_memory) && state.give_back_empty(0) {
            got = Chunk::new(&self.context, bytes);
        }
        let chunk = match got {
            Ok(chunk) => chunk,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        };
        let id = state.next;
        state.next += 1;
        state.chunks.insert(id, Taken { chunk, bytes });
        state.spans.add(id, bytes);
        state.ledger.driver_bytes += bytes as u64;
        state.ledger.chunks += 1;
        Ok(Some(id))
    }

    /// Frees a piece; a buffer's drop calls this.
    fn give(&self, place: Place, purpose: Purpose) {
        let mut state = self.state.lock();
        let bytes = place.bytes as u64;
        if let Some(all) = state.ledger.bytes.get_mut(&purpose) {
            *all = all.saturating_sub(bytes);
            if *all == 0 {
                state.ledger.bytes.remove(&purpose);
            }
        }
        state.ledger.used_bytes = state.ledger.used_bytes.saturating_sub(bytes);
        state.spans.give(place);
        state.give_back_empty(if self.options.chunk_bytes > 0 { KEPT_CHUNKS } else { 0 });
    }

    /// Returns every empty chunk to the driver.
    pub fn trim(&self) {
        self.state.lock().give_back_empty(0);
    }

    /// A copy of the ledger.
    pub fn ledger(&self) -> Ledger {
        self.state.lock().ledger.clone()
    }

    /// Bytes still available: free at the driver within the limit, plus free bytes in chunks.
    ///
    /// # Errors
    /// [`HipError::Call`], [`HipError::Lost`].
    pub fn free_bytes(&self) -> Result<u64, HipError> {
        let (free, _) = self.context.memory()?;
        let ledger = self.ledger();
        let allowed = self.options.limit_bytes.saturating_sub(ledger.driver_bytes);
        Ok(free.min(allowed) + (ledger.driver_bytes - ledger.used_bytes))
    }
}

impl State {
    /// Returns empty chunks to the driver until at most `stay` are left, large ones first. True when any was returned.
    fn give_back_empty(&mut self, stay: usize) -> bool {
        let mut empty: Vec<(usize, u32)> = self
            .spans
            .empty_chunks()
            .filter_map(|id| self.chunks.get(&id).map(|taken| (taken.bytes, id)))
            .collect();
        empty.sort_unstable();
        let gone: Vec<u32> = empty.into_iter().skip(stay).map(|(_, id)| id).collect();
        gone.iter().for_each(|id| self.give_back(*id));
        !gone.is_empty()
    }

    /// Returns an empty chunk to the driver.
    fn give_back(&mut self, id: u32) {
        self.spans.remove(id);
        if let Some(taken) = self.chunks.remove(&id) {
            self.ledger.driver_bytes = self.ledger.driver_bytes.saturating_sub(taken.bytes as u64);
            self.ledger.chunks -= 1;
            drop(taken.chunk);
        }
    }
}
