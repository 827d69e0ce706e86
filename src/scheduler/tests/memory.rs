//! The fake device's memory: has a limit, tracks live copies and records forbidden operations.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::backend::hip::Arrival;
use crate::backend::*;
use crate::program::{self, Program};
use crate::tensor::LazyTensor;

/// Bytes of a page on this device: more than its values, as on a device that pads and rounds.
pub fn page_bytes(of: &Program) -> u64 {
    let values = |state: &program::State| match *state {
        program::State::Kv { heads, head_dim } => u64::from(heads * head_dim),
        program::State::Recurrent { .. } => 0,
    };
    of.states().iter().map(values).sum::<u64>() * 1000
}

/// The device's memory. Without a limit, weights are read in place.
#[derive(Clone, Default)]
pub struct Memory(Arc<Mutex<Book>>);

#[derive(Default)]
struct Book {
    limit: Option<u64>,
    used: u64,
    /// Bytes of KV pages, once they are counted.
    pages: Option<u64>,
    /// Largest piece of free memory while more than [`SPLITTERS`] copies live.
    piece: Option<u64>,
    next: u64,
    /// Address by source bytes: mapping, start, end.
    live: HashMap<(usize, u64, u64), u64>,
    loads: u64,
    /// This many of the next loads fail when the engine waits for them.
    failing: u32,
    /// Loads complete only when a step waits for them.
    held: bool,
    /// Number of the step's last unit so far, which may not be launched yet.
    unit: u64,
    /// The last unit before the last [`Memory::retire`].
    retired: u64,
    /// Receives new loads and completes them; they then do not complete when looked at.
    uploads: Option<Arc<dyn Fn(Upload) + Send + Sync>>,
    /// Errors if the step continues; dropped if it ends.
    doubts: Vec<String>,
    wrongs: Vec<String>,
}

/// So many copies leave the rest of the memory in one piece.
const SPLITTERS: usize = 2;

/// Exceeds the duration of any test.
const PATIENCE: Duration = Duration::from_secs(60);

/// State of a copy in flight; decided once.
pub type Upload = Arc<Arrival<()>>;

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a device's memory")
    }
}

/// A copy of a tensor on the device.
struct Copy {
    book: Arc<Mutex<Book>>,
    key: (usize, u64, u64),
    address: u64,
    bytes: u64,
    name: String,
    arrival: Upload,
    /// The receiver in `uploads` decides the load.
    uploaded: bool,
    state: Mutex<State>,
}

impl std::fmt::Debug for Copy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copy").field("name", &self.name).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct State {
    fails: bool,
    looks: u32,
    /// The last unit that used it.
    used: u64,
}

impl Memory {
    pub fn limit(&self, bytes: u64) {
        self.0.lock().limit = Some(bytes);
    }

    /// Sends new loads to `uploads`, which must decide them.
    #[cfg(feature = "loom")]
    pub fn upload_by(&self, uploads: impl Fn(Upload) + Send + Sync + 'static) {
        self.0.lock().uploads = Some(Arc::new(uploads));
    }

    /// Free memory is in pieces of at most so many bytes while more than a few copies live.
    pub fn split(&self, piece: u64) {
        self.0.lock().piece = Some(piece);
    }

    /// KV pages take memory from now on.
    pub fn count_pages(&self) {
        self.0.lock().pages = Some(0);
    }

    /// Gives memory to KV pages of so many bytes.
    pub fn take_pages(&self, bytes: u64) -> Result<(), BackendError> {
        let mut book = self.0.lock();
        let Some(pages) = book.pages else { return Ok(()) };
        if book.limit.is_some_and(|limit| book.used + pages + bytes > limit) {
            return Err(BackendError::OutOfMemory { what: "KV pages", need_bytes: bytes });
        }
        book.pages = Some(pages + bytes);
        Ok(())
    }

    /// Takes the memory of KV pages back.
    pub fn free_pages(&self, bytes: u64) {
        let mut book = self.0.lock();
        book.pages = book.pages.map(|pages| pages - bytes);
    }

    /// The device was opened again.
    pub fn free_all_pages(&self) {
        let mut book = self.0.lock();
        book.pages = book.pages.map(|_| 0);
    }

    pub fn fail_loads(&self, count: u32) {
        self.0.lock().failing = count;
    }

    /// Keeps loads in flight, or lets them arrive when the engine looks next.
    pub fn hold_loads(&self, held: bool) {
        self.0.lock().held = held;
    }

    /// Bytes of live copies.
    pub fn used(&self) -> u64 {
        self.0.lock().used
    }

    pub fn loads(&self) -> u64 {
        self.0.lock().loads
    }

    /// Forbidden operations so far.
    pub fn wrongs(&self) -> Vec<String> {
        self.0.lock().wrongs.clone()
    }

    pub fn in_use(&self) -> DeviceMemoryUse {
        let book = self.0.lock();
        let budget = book.limit.unwrap_or(0);
        let kv = book.pages.unwrap_or(0);
        let taken = book.used + kv;
        let free = budget.saturating_sub(taken);
        DeviceMemoryUse { weights: book.used, kv, taken, budget, total: budget, free, ..Default::default() }
    }

    /// Begins the copy of a tensor; reads it in place if there is no limit.
    pub fn load(&self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        let mut book = self.0.lock();
        book.loads += 1;
        let Some(limit) = book.limit else {
            return Ok(DeviceTensor { tensor: tensor.clone(), storage: Storage::InPlace });
        };
        let bytes = tensor.byte_len();
        let split = book.live.len() > SPLITTERS && book.piece.is_some_and(|piece| bytes > piece);
        if split || book.used + book.pages.unwrap_or(0) + bytes > limit {
            return Err(BackendError::OutOfMemory { what: "weights", need_bytes: bytes });
        }
        let range = tensor.range();
        let key = (Arc::as_ptr(tensor.file()).addr(), range.start, range.end);
        book.used += bytes;
        book.next += 4096;
        let address = book.next;
        if let Some(other) = book.live.insert(key, address) {
            let name = tensor.name();
            book.wrongs.push(format!("{name} is loaded twice: at {other} and {address}"));
        }
        let fails = book.failing > 0;
        book.failing = book.failing.saturating_sub(1);
        let state = Mutex::new(State { fails, looks: 0, used: 0 });
        let uploads = book.uploads.clone();
        drop(book);
        let (name, arrival) = (tensor.name().to_owned(), Upload::new(Arrival::new()));
        if let Some(uploads) = &uploads {
            uploads(Arc::clone(&arrival));
        }
        let (book, uploaded) = (Arc::clone(&self.0), uploads.is_some());
        let copy = Copy { book, key, address, bytes, name, arrival, uploaded, state };
        Ok(DeviceTensor { tensor: tensor.clone(), storage: Storage::Device(Arc::new(copy)) })
    }

    /// Begins a unit of a step that reads `weights`.
    pub fn unit<'a>(&self, weights: impl IntoIterator<Item = &'a DeviceTensor>) -> Result<(), BackendError> {
        let unit = {
            let mut book = self.0.lock();
            let doubts = std::mem::take(&mut book.doubts);
            book.wrongs.extend(doubts);
            book.unit += 1;
            book.unit
        };
        for weight in weights {
            let Storage::Device(memory) = &weight.storage else { continue };
            let copy = own(memory);
            copy.decide();
            copy.state.lock().used = unit;
            copy.arrival.submitted(PATIENCE, || 0, || BackendError::Batch("nothing arrives"))?;
        }
        Ok(())
    }

    /// Waits for a load, which decides it.
    pub fn until_decided(&self, load: &Arc<dyn DeviceMemory>) -> Result<(), BackendError> {
        let copy = own(load);
        copy.decide();
        copy.arrival.decided(PATIENCE, || 0, || BackendError::Batch("nothing arrives"))
    }

    /// Ends a step; all its units have run.
    pub fn step_over(&self) {
        let mut book = self.0.lock();
        book.doubts.clear();
        book.unit += 1;
        book.retired = book.unit;
    }

    /// Called before weights are evicted: launches all units begun so far.
    pub fn retire(&self) {
        let mut book = self.0.lock();
        book.retired = book.unit;
    }
}

fn own(memory: &Arc<dyn DeviceMemory>) -> Arc<Copy> {
    let any: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(memory) as _;
    any.downcast().expect("a copy of this device")
}

impl Copy {
    /// Holds no lock during the decision, because the callback may take any lock.
    fn decide(&self) {
        if self.uploaded {
            return;
        }
        let lost = || BackendError::Upload { tensor: self.name.clone(), source: cause("planted") };
        let fails = self.state.lock().fails;
        self.arrival.decide(if fails { Err(lost()) } else { Ok(()) });
    }
}

impl DeviceMemory for Copy {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn address(&self) -> u64 {
        self.address
    }

    /// Completes the load at the third look.
    fn state(&self) -> LoadState {
        let held = self.book.lock().held;
        let looks = {
            let mut state = self.state.lock();
            state.looks += 1;
            state.looks
        };
        if looks > 2 && !held {
            self.decide();
        }
        self.arrival.state()
    }

    fn when_decided(&self, done: Box<dyn FnOnce() + Send>) {
        // While loads are held, the engine learns of a completed one at its own look, or when a step uses it.
        if !self.book.lock().held {
            self.decide();
        }
        self.arrival.when_decided(done);
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let used = self.state.lock().used;
        let mut book = self.book.lock();
        book.used -= self.bytes;
        if book.live.get(&self.key) == Some(&self.address) {
            book.live.remove(&self.key);
        }
        if used > book.retired {
            let (name, retired) = (&self.name, book.retired);
            let doubt = format!(
                "{name} was freed after unit {used} used it, but only units up to {retired} are launched"
            );
            book.doubts.push(doubt);
        }
    }
}
