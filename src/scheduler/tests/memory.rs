//! Memory of the fake device: bounded, with a book of what is live and what was done to it that must not be.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::backend::*;
use crate::tensor::LazyTensor;

/// The device's memory; without a limit weights are read in place.
#[derive(Clone, Debug, Default)]
pub struct Memory(Arc<Mutex<Book>>);

#[derive(Debug, Default)]
struct Book {
    limit: Option<u64>,
    used: u64,
    next: u64,
    /// By the bytes of the file they are copies of: mapping, start, end.
    live: HashMap<(usize, u64, u64), u64>,
    loads: u64,
    /// So many of the next loads will fail once somebody waits for them.
    failing: u32,
    /// No load arrives that no step waits for.
    held: bool,
    /// Number of the unit that is the step's last one so far, which may not be launched yet; 0 outside of steps.
    unit: u64,
    /// The last unit before the last time that weights were said to leave.
    retired: u64,
    /// What would be wrong if the step went on.
    doubts: Vec<String>,
    wrongs: Vec<String>,
}

/// A copy.
#[derive(Debug)]
struct Copy {
    book: Arc<Mutex<Book>>,
    key: (usize, u64, u64),
    address: u64,
    bytes: u64,
    name: String,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    load: LoadState,
    fails: bool,
    looks: u32,
    /// The unit that used it last.
    used: u64,
}

impl Memory {
    pub fn limit(&self, bytes: u64) {
        self.0.lock().limit = Some(bytes);
    }

    pub fn fail_loads(&self, count: u32) {
        self.0.lock().failing = count;
    }

    /// Keeps loads on their way, or lets them arrive when they are looked at next.
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

    /// What was done that must not be.
    pub fn wrongs(&self) -> Vec<String> {
        self.0.lock().wrongs.clone()
    }

    pub fn in_use(&self) -> DeviceMemoryUse {
        let book = self.0.lock();
        let budget = book.limit.unwrap_or(0);
        let (used, free) = (book.used, budget.saturating_sub(book.used));
        DeviceMemoryUse { weights: used, taken: used, budget, total: budget, free, ..Default::default() }
    }

    /// A copy that is on its way; in place where there is no limit.
    pub fn load(&self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        let mut book = self.0.lock();
        book.loads += 1;
        let Some(limit) = book.limit else {
            return Ok(DeviceTensor { tensor: tensor.clone(), storage: Storage::InPlace });
        };
        let bytes = tensor.byte_len();
        if book.used + bytes > limit {
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
        let state = State { load: LoadState::Loading, fails, looks: 0, used: 0 };
        drop(book);
        let name = tensor.name().to_owned();
        let copy = Copy { book: Arc::clone(&self.0), key, address, bytes, name, state: Mutex::new(state) };
        Ok(DeviceTensor { tensor: tensor.clone(), storage: Storage::Device(Arc::new(copy)) })
    }

    /// A step begins a unit that reads these.
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
            let any: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(memory) as _;
            let copy = any.downcast::<Copy>().expect("a copy of this device");
            let mut state = copy.state.lock();
            copy.decide(&mut state);
            state.used = unit;
            if let LoadState::Failed(error) = &state.load {
                return Err(error.clone());
            }
        }
        Ok(())
    }

    /// A step is over, and so is its work.
    pub fn step_over(&self) {
        let mut book = self.0.lock();
        book.doubts.clear();
        book.unit += 1;
        book.retired = book.unit;
    }

    /// Weights are about to leave: work up to the last unit but one is launched.
    pub fn retire(&self) {
        let mut book = self.0.lock();
        book.retired = book.unit.saturating_sub(1);
    }
}

impl Copy {
    fn decide(&self, state: &mut State) {
        if matches!(state.load, LoadState::Loading) {
            let lost = || BackendError::Upload { tensor: self.name.clone(), why: "planted".into() };
            state.load = if state.fails { LoadState::Failed(lost()) } else { LoadState::Resident };
        }
    }
}

impl DeviceMemory for Copy {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn address(&self) -> u64 {
        self.address
    }

    /// It arrives by itself: when somebody looks for the third time.
    fn state(&self) -> LoadState {
        let held = self.book.lock().held;
        let mut state = self.state.lock();
        state.looks += 1;
        if state.looks > 2 && !held {
            self.decide(&mut state);
        }
        state.load.clone()
    }

    fn when_decided(&self, done: Box<dyn FnOnce() + Send>) {
        // Of one that is held the engine learns when it looks by itself.
        if !self.book.lock().held {
            self.decide(&mut self.state.lock());
            done();
        }
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
            let doubt =
                format!("{name} left after unit {used} used it, and only units up to {retired} are launched");
            book.doubts.push(doubt);
        }
    }
}
