//! Progress of one upload: the uploader sets it, steps query it and wait for it.
//!
//! `Loading -> Resident`, or `Loading -> Failed`. Between queued and resident an upload is submitted: all its copies
//! are in the upload stream, followed by an event. From then on the device waits, not the host.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::backend::hip::device::wait::Standstill;
use crate::backend::{BackendError, LoadState};
use crate::lock::atomic::AtomicBool;
use crate::lock::{Condvar, Mutex, Rank};

/// How often a waiter checks whether loads still make progress.
const LOOK: Duration = Duration::from_secs(1);

/// Runs when a load is resident or has failed.
type Done = Box<dyn FnOnce() + Send>;

enum Phase<E> {
    /// The bytes are being read, or wait in the queue.
    Queued,
    /// All copies are submitted; the event follows the last one.
    Submitted(Arc<E>),
    Resident,
    Failed(BackendError),
}

struct State<E> {
    phase: Phase<E>,
    waiting: Vec<Done>,
}

/// Progress of one upload. `E` is the event recorded after its last copy.
pub struct Arrival<E> {
    /// The compute stream is ordered behind the upload, so steps skip all other checks.
    ordered: AtomicBool,
    state: Mutex<State<E>>,
    changed: Condvar,
}

impl<E> Arrival<E> {
    /// An upload with nothing submitted.
    pub fn new() -> Self {
        Self {
            ordered: AtomicBool::new(false),
            state: Mutex::new(Rank::Weight, State { phase: Phase::Queued, waiting: Vec::new() }),
            changed: Condvar::new(),
        }
    }

    /// Whether the compute stream is ordered behind the upload. Costs one atomic load.
    pub fn is_ordered(&self) -> bool {
        self.ordered.load(Ordering::Acquire)
    }

    /// Records that the compute stream is ordered behind the upload. The thread that made the stream wait calls this.
    pub fn set_ordered(&self) {
        self.ordered.store(true, Ordering::Release);
    }

    /// Waits until all copies are submitted. Returns the event after the last copy, or `None` when the tensor is
    /// already resident. Times out once `arrived` (bytes of all loads) has not grown for `limit`.
    ///
    /// # Errors
    /// The load's own error; `late` on timeout.
    pub fn submitted(
        &self,
        limit: Duration,
        arrived: impl Fn() -> u64,
        late: impl FnOnce() -> BackendError,
    ) -> Result<Option<Arc<E>>, BackendError> {
        self.wait(limit, arrived, late, |phase| match phase {
            Phase::Queued => None,
            Phase::Submitted(event) => Some(Ok(Some(Arc::clone(event)))),
            Phase::Resident => Some(Ok(None)),
            Phase::Failed(error) => Some(Err(error.clone())),
        })?
    }

    /// Waits until the load is resident or has failed. Times out like [`Arrival::submitted`].
    ///
    /// # Errors
    /// `late` on timeout.
    pub fn decided(
        &self,
        limit: Duration,
        arrived: impl Fn() -> u64,
        late: impl FnOnce() -> BackendError,
    ) -> Result<(), BackendError> {
        self.wait(limit, arrived, late, |phase| {
            matches!(phase, Phase::Resident | Phase::Failed(_)).then_some(())
        })
    }

    /// Waits until `reached` returns a value.
    fn wait<T>(
        &self,
        limit: Duration,
        arrived: impl Fn() -> u64,
        late: impl FnOnce() -> BackendError,
        reached: impl Fn(&Phase<E>) -> Option<T>,
    ) -> Result<T, BackendError> {
        let mut standstill = Standstill::default();
        let mut stood = standstill.since(arrived(), Instant::now());
        let mut state = self.state.lock();
        loop {
            if let Some(reached) = reached(&state.phase) {
                return Ok(reached);
            }
            let look = Instant::now() + LOOK.min(limit.saturating_sub(stood));
            if self.changed.wait_until(&mut state, look) && reached(&state.phase).is_none() {
                stood = standstill.since(arrived(), Instant::now());
                if stood >= limit {
                    return Err(late());
                }
            }
        }
    }

    /// Records that all copies are submitted.
    pub fn set_submitted(&self, event: Arc<E>) {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Queued) {
            state.phase = Phase::Submitted(event);
            self.changed.notify_all();
        }
    }

    /// Ends the load. Only the first result counts.
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

    /// The load's [`DeviceMemory::state`](crate::backend::DeviceMemory::state).
    pub fn state(&self) -> LoadState {
        match &self.state.lock().phase {
            Phase::Queued | Phase::Submitted(_) => LoadState::Loading,
            Phase::Resident => LoadState::Resident,
            Phase::Failed(error) => LoadState::Failed(error.clone()),
        }
    }

    /// Calls `done` once, with no lock held: when the load ends, or now if it has ended.
    pub fn when_decided(&self, done: Done) {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Queued | Phase::Submitted(_)) {
            state.waiting.push(done);
        } else {
            drop(state);
            done();
        }
    }
}

#[cfg(all(test, feature = "loom"))]
mod interleavings {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::lock::checker::{explore, spawn};

    fn failed() -> BackendError {
        BackendError::Upload { tensor: "blk.0".into(), source: crate::backend::cause("planted") }
    }

    fn submitted(arrival: &Arrival<u32>) -> Result<Option<Arc<u32>>, BackendError> {
        arrival.submitted(Duration::from_secs(1), || 0, || panic!("nothing is ever late here"))
    }

    /// An uploader submits and decides, a closing device fails the rest, and two waiters wait.
    #[test]
    fn nobody_waits_for_ever_and_only_the_first_word_counts() {
        explore(3, || {
            let (arrival, told) = (Arc::new(Arrival::new()), Arc::new(AtomicU32::new(0)));
            let uploads = Arc::clone(&arrival);
            let uploads = spawn(move || {
                uploads.set_submitted(Arc::new(7));
                uploads.decide(Ok(()));
            });
            let closes = Arc::clone(&arrival);
            let closes = spawn(move || closes.decide(Err(failed())));
            let (waits, count) = (Arc::clone(&arrival), Arc::clone(&told));
            let waits = spawn(move || {
                let done = Arc::clone(&count);
                waits.when_decided(Box::new(move || {
                    done.fetch_add(1, Ordering::Relaxed);
                }));
                match submitted(&waits) {
                    Ok(Some(event)) => assert_eq!(*event, 7),
                    Ok(None) => assert!(matches!(waits.state(), LoadState::Resident)),
                    Err(_) => assert!(matches!(waits.state(), LoadState::Failed(_))),
                }
            });
            [uploads, closes, waits].into_iter().for_each(|thread| thread.join().unwrap());
            assert!(!matches!(arrival.state(), LoadState::Loading), "decided");
            assert_eq!(told.load(Ordering::Relaxed), 1, "called once");
        });
    }

    /// A step that finds the tensor ordered uses the device without another check: the event was recorded before.
    #[test]
    fn an_ordered_upload_was_submitted() {
        explore(3, || {
            let (arrival, waited) =
                (Arc::new(Arrival::new()), Arc::new(crate::lock::atomic::AtomicU64::new(0)));
            let uploads = Arc::clone(&arrival);
            let uploads = spawn(move || uploads.set_submitted(Arc::new(7)));
            let (steps, stream) = (Arc::clone(&arrival), Arc::clone(&waited));
            let steps = spawn(move || {
                let event = submitted(&steps).unwrap().expect("not decided here");
                stream.store(u64::from(*event), Ordering::Relaxed);
                steps.set_ordered();
            });
            if arrival.is_ordered() {
                assert_eq!(waited.load(Ordering::Relaxed), 7, "the stream waits already");
            }
            [uploads, steps].into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}
