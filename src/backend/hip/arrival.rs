//! How far an upload is: told by who brings it, asked and waited for by who needs it.
//!
//! `Loading -> Resident`, or `Loading -> Failed`. Between asked-for and resident lies a moment of its own: all copies are
//! submitted to the upload stream and an event stands behind them. From then on the device waits, not the host.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::wait::Standstill;
use crate::backend::{BackendError, LoadState};
use crate::lock::atomic::AtomicBool;
use crate::lock::{Condvar, Mutex, Rank};

/// How often who waits looks whether loads still arrive.
const LOOK: Duration = Duration::from_secs(1);

/// Called when a load is decided.
type Done = Box<dyn FnOnce() + Send>;

enum Phase<E> {
    /// Its bytes are read, or wait to be.
    Queued,
    /// All its copies are under way; the event stands behind the last.
    Submitted(Arc<E>),
    Resident,
    Failed(BackendError),
}

struct State<E> {
    phase: Phase<E>,
    waiting: Vec<Done>,
}

/// An upload behind whose last copy stands an `E`.
pub struct Arrival<E> {
    /// The compute stream is ordered behind the upload: steps need not look further.
    ordered: AtomicBool,
    state: Mutex<State<E>>,
    changed: Condvar,
}

impl<E> Arrival<E> {
    /// One of which nothing is submitted.
    pub fn new() -> Self {
        Self {
            ordered: AtomicBool::new(false),
            state: Mutex::new(Rank::Weight, State { phase: Phase::Queued, waiting: Vec::new() }),
            changed: Condvar::new(),
        }
    }

    /// True when the compute stream runs behind the upload. One load.
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
    ) -> Result<Option<Arc<E>>, BackendError> {
        self.wait(limit, arrived, late, |phase| match phase {
            Phase::Queued => None,
            Phase::Submitted(event) => Some(Ok(Some(Arc::clone(event)))),
            Phase::Resident => Some(Ok(None)),
            Phase::Failed(error) => Some(Err(error.clone())),
        })?
    }

    /// Waits until the load is decided, whichever way, as long as [`Arrival::submitted`].
    ///
    /// # Errors
    /// `late` when the time is over.
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

    /// Waits until `reached` says something.
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

    /// All copies are submitted.
    pub fn set_submitted(&self, event: Arc<E>) {
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

    /// What [`DeviceMemory::state`](crate::backend::DeviceMemory::state) says.
    pub fn state(&self) -> LoadState {
        match &self.state.lock().phase {
            Phase::Queued | Phase::Submitted(_) => LoadState::Loading,
            Phase::Resident => LoadState::Resident,
            Phase::Failed(error) => LoadState::Failed(error.clone()),
        }
    }

    /// Calls `done` once, with no lock held: when the load is decided, or now where it is.
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
        BackendError::Upload { tensor: "blk.0".into(), why: "planted".into() }
    }

    fn submitted(arrival: &Arrival<u32>) -> Result<Option<Arc<u32>>, BackendError> {
        arrival.submitted(Duration::from_secs(1), || 0, || panic!("nothing is ever late here"))
    }

    /// An uploader that submits and decides, a closing device that fails what is left, and two who wait.
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
            assert_eq!(told.load(Ordering::Relaxed), 1, "told once");
        });
    }

    /// A step that finds the tensor ordered reads the device without another look: the event was there by then.
    #[test]
    fn what_is_ordered_was_submitted() {
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
