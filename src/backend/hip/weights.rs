//! One tensor's copy on the device: where it lies, and how far its upload is.
//!
//! `Loading -> Resident`, or `Loading -> Failed`. Between asked-for and resident lies a moment of its own: all copies are
//! submitted to the upload stream and an event stands behind them. From then on the device waits, not the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{Buffer, Event};
use crate::backend::{BackendError, DeviceMemory, LoadState};
use crate::lock::{Condvar, Mutex, Rank};
use crate::tensor::DType;

/// What a tensor's kernels need to know of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// Element type: which kernels take it.
    pub dtype: DType,
    /// Outputs.
    pub rows: u32,
    /// Inputs.
    pub cols: u32,
}

/// How often who waits looks whether loads still arrive.
const LOOK: Duration = Duration::from_secs(1);

/// Called when a load is decided.
type Done = Box<dyn FnOnce() + Send>;

enum Phase {
    /// Its bytes are read, or wait to be.
    Queued,
    /// All its copies are under way; the event stands behind the last.
    Submitted(Arc<Event>),
    Resident,
    Failed(BackendError),
}

struct State {
    phase: Phase,
    waiting: Vec<Done>,
}

/// A tensor's copy.
pub struct Weight {
    name: String,
    form: Form,
    buffer: Buffer,
    /// The compute stream is ordered behind the upload: steps need not look further.
    ordered: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

impl std::fmt::Debug for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Weight").field("name", &self.name).field("form", &self.form).finish_non_exhaustive()
    }
}

impl Weight {
    /// A copy that is to be, in `buffer`.
    pub fn new(name: &str, form: Form, buffer: Buffer) -> Self {
        Self {
            name: name.to_owned(),
            form,
            buffer,
            ordered: AtomicBool::new(false),
            state: Mutex::new(Rank::Weight, State { phase: Phase::Queued, waiting: Vec::new() }),
            changed: Condvar::new(),
        }
    }

    /// What it is.
    pub fn form(&self) -> Form {
        self.form
    }

    /// Where it lies.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// True when the compute stream runs behind its upload. One load.
    pub fn is_ordered(&self) -> bool {
        self.ordered.load(Ordering::Acquire)
    }

    /// Said by who made the compute stream wait.
    pub fn set_ordered(&self) {
        self.ordered.store(true, Ordering::Release);
    }

    /// Waits until all copies are submitted, at most `limit` after the last time that `arrived`, the bytes of all loads, grew. The
    /// event that stands behind them, or `None` where they are done already.
    ///
    /// # Errors
    /// Of the load; `late` when the time is over.
    pub fn submitted(
        &self,
        limit: Duration,
        arrived: impl Fn() -> u64,
        late: impl FnOnce() -> BackendError,
    ) -> Result<Option<Arc<Event>>, BackendError> {
        let (mut until, mut seen) = (Instant::now() + limit, arrived());
        let mut state = self.state.lock();
        loop {
            match &state.phase {
                Phase::Queued => {}
                Phase::Submitted(event) => return Ok(Some(Arc::clone(event))),
                Phase::Resident => return Ok(None),
                Phase::Failed(error) => return Err(error.clone()),
            }
            let look = until.min(Instant::now() + LOOK);
            if self.changed.wait_until(&mut state, look) && matches!(state.phase, Phase::Queued) {
                let now = arrived();
                if now != seen {
                    (until, seen) = (Instant::now() + limit, now);
                } else if Instant::now() >= until {
                    return Err(late());
                }
            }
        }
    }

    /// All copies are submitted.
    pub fn set_submitted(&self, event: Arc<Event>) {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Queued) {
            state.phase = Phase::Submitted(event);
            self.changed.notify_all();
        }
    }

    /// The load is over. Only the first word counts.
    pub fn decide(&self, result: Result<(), BackendError>) {
        let waiting = {
            let mut state = self.state.lock();
            if matches!(state.phase, Phase::Resident | Phase::Failed(_)) {
                return;
            }
            state.phase = match result {
                Ok(()) => Phase::Resident,
                Err(error) => Phase::Failed(error),
            };
            self.changed.notify_all();
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(|done| done());
    }
}

impl DeviceMemory for Weight {
    fn bytes(&self) -> u64 {
        self.buffer.taken_bytes()
    }

    fn address(&self) -> u64 {
        self.buffer.ptr::<u8>().address()
    }

    fn state(&self) -> LoadState {
        match &self.state.lock().phase {
            Phase::Queued | Phase::Submitted(_) => LoadState::Loading,
            Phase::Resident => LoadState::Resident,
            Phase::Failed(error) => LoadState::Failed(error.clone()),
        }
    }

    fn when_decided(&self, done: Done) {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Queued | Phase::Submitted(_)) {
            state.waiting.push(done);
        } else {
            drop(state);
            done();
        }
    }
}
