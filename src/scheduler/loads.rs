//! Loads that clients requested, independent of steps: a state machine of events and actions.
//!
//! The engine reports arrivals ([`Loads::look`]) and the result of the last action ([`Loads::begun`]); [`Loads::next`]
//! says what to do. It never waits, and steps run in between. A tensor that is in flight for a step is the same load.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use tokio::sync::watch;

use super::JobError;
use super::loading::{LoadProgress, LoadTarget, LoadedTensor};
use super::snapshot::LoadingProgress;
use crate::backend::{BackendError, DeviceMemory, DeviceTensor, LoadState, Storage};
use crate::model::{Model, ModelId};
use crate::program::{Residence, Tensor};
use crate::tensor::LazyTensor;

/// Bytes of one request in flight at once. A fast link moves them in about ten milliseconds; then the engine thread
/// looks again.
const IN_FLIGHT_BYTES: u64 = 512 << 20;

/// Tensors of one request in flight at once, whatever their size.
const IN_FLIGHT_MAX: usize = 1024;

/// A client's request for weights.
pub(super) struct LoadRequest {
    pub model: Arc<Model>,
    pub target: LoadTarget,
    /// When all its receivers are dropped, the engine skips the rest of the request.
    pub progress: watch::Sender<LoadProgress>,
}

impl std::fmt::Debug for LoadRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadRequest").field("target", &self.target).finish_non_exhaustive()
    }
}

/// A load in flight.
pub(super) trait Flight {
    fn state(&self) -> LoadState;
    fn tensor(&self) -> LoadedTensor;
}

/// A tensor's load on a device. It does not keep the tensor resident; the cache does.
pub(super) struct TensorFlight {
    /// None where weights are read in place.
    pub memory: Option<Weak<dyn DeviceMemory>>,
    tensor: LoadedTensor,
}

impl TensorFlight {
    pub fn new(tensor: &DeviceTensor) -> Self {
        let bytes = tensor.device_bytes();
        match &tensor.storage {
            Storage::InPlace => Self { memory: None, tensor: LoadedTensor { address: 0, bytes } },
            Storage::Device(memory) => {
                let tensor = LoadedTensor { address: memory.address(), bytes };
                Self { memory: Some(Arc::downgrade(memory)), tensor }
            }
        }
    }
}

impl Flight for TensorFlight {
    /// Counts a tensor that was evicted before the engine looked as arrived.
    fn state(&self) -> LoadState {
        let memory = self.memory.as_ref().and_then(Weak::upgrade);
        memory.map_or(LoadState::Resident, |memory| memory.state())
    }

    fn tensor(&self) -> LoadedTensor {
        self.tensor
    }
}

/// A tensor to load.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub tensor: Tensor,
    pub part: u32,
}

/// Result of [`Action::Begin`].
#[derive(Debug)]
pub(super) enum Begun<F> {
    /// The tensor is resident or in flight.
    Flying(F),
    /// There is no room until another load completes; the engine is woken then.
    Blocked,
    Failed(JobError),
}

/// The engine's next action.
pub(super) enum Action<'a, F> {
    /// Begin a load, then report the result to [`Loads::begun`].
    Begin { model: ModelId, wanted: Wanted },
    /// Wake the engine when this load completes or fails.
    Wake(&'a F),
    /// Report the end to the requester.
    End(Ended),
}

/// A request that has ended.
pub(super) struct Ended {
    pub model: ModelId,
    /// The cause of a failure.
    pub error: Option<JobError>,
    reached: LoadProgress,
    progress: watch::Sender<LoadProgress>,
}

impl Ended {
    pub fn tell(mut self) {
        self.reached.ended = Some(self.error.map_or(Ok(()), Err));
        self.progress.send_replace(self.reached);
    }
}

/// A request in progress.
struct Task<F> {
    model: ModelId,
    progress: watch::Sender<LoadProgress>,
    /// Tensors whose load has not begun.
    left: VecDeque<Wanted>,
    /// Loads in the order in which they began, which is roughly their order of arrival. The flag says whether the load
    /// wakes the engine.
    in_flight: VecDeque<(F, bool)>,
    in_flight_bytes: u64,
    reached: LoadProgress,
    /// The request found no room in this turn.
    blocked: bool,
    error: Option<JobError>,
}

/// All requests of one engine.
pub(super) struct Loads<F = TensorFlight> {
    tasks: VecDeque<Task<F>>,
    /// Tasks that this turn has not visited.
    left: usize,
    /// Loads in flight when their request ended. If one fails, the engine clears it from the cache later.
    strays: Vec<F>,
}

impl<F> Default for Loads<F> {
    fn default() -> Self {
        Self { tasks: VecDeque::new(), left: 0, strays: Vec::new() }
    }
}

/// Tensors that a request names, in the order in which a step needs them, and their device bytes.
pub(super) fn wanted(
    model: &Model,
    target: &LoadTarget,
    bytes_of: impl Fn(&LazyTensor) -> u64,
) -> (VecDeque<Wanted>, u64) {
    let program = &model.plan.program;
    let all_of = |part: u32| {
        program.part_tensors(part).map(move |(_, tensor)| Wanted { tensor: tensor.clone(), part })
    };
    let found: VecDeque<Wanted> = match target {
        LoadTarget::Parts(parts) => parts.iter().copied().flat_map(all_of).collect(),
        // A tied output is the embedding. The host reads only rows of the embedding, so a request for the whole tensor
        // loads it for the head.
        LoadTarget::Tensor(name) => {
            let named = |found: &Wanted| found.tensor.lazy.name() == name;
            let found = (0..program.part_count()).flat_map(all_of).filter(named).last();
            let whole = |lazy| Tensor { lazy, residence: Residence::Device };
            found.map(|found| Wanted { tensor: whole(found.tensor.lazy), ..found }).into_iter().collect()
        }
    };
    let taken = found.iter().filter(|wanted| wanted.tensor.residence != Residence::Host);
    let bytes = taken.map(|wanted| bytes_of(&wanted.tensor.lazy)).sum();
    (found, bytes)
}

impl<F: Flight> Task<F> {
    /// Counts arrivals up to the first load still in flight. True when there were any.
    fn take_arrived(&mut self) -> bool {
        let before = self.reached.tensors;
        while let Some((flight, _)) = self.in_flight.front() {
            match flight.state() {
                LoadState::Loading => break,
                LoadState::Failed(error) => {
                    self.error = Some(JobError::Backend(error));
                    return true;
                }
                LoadState::Resident => {}
            }
            let tensor = flight.tensor();
            self.in_flight.pop_front();
            self.in_flight_bytes = self.in_flight_bytes.saturating_sub(tensor.bytes);
            self.reached.tensors += 1;
            self.reached.bytes += tensor.bytes;
            self.reached.last = Some(tensor);
        }
        let any = self.reached.tensors > before;
        if any {
            self.progress.send_replace(self.reached.clone());
        }
        any
    }

    fn may_begin(&self) -> bool {
        let room = self.in_flight_bytes < IN_FLIGHT_BYTES && self.in_flight.len() < IN_FLIGHT_MAX;
        room && !self.blocked && !self.left.is_empty()
    }

    fn is_over(&self) -> bool {
        self.error.is_some() || (self.left.is_empty() && self.in_flight.is_empty())
    }

    /// Chooses the load whose arrival leaves half of the loads in flight; the engine can then begin more. `None` if
    /// that load wakes the engine already. Waking for each load would cost more than loading a small tensor.
    fn wake_at(&mut self) -> Option<usize> {
        let count = self.in_flight.len();
        let loading = |at: &usize| {
            self.in_flight.get(*at).is_some_and(|(flight, _)| matches!(flight.state(), LoadState::Loading))
        };
        // If all have arrived meanwhile, this wakes the engine at once.
        let at = (count / 2..count).find(loading).or_else(|| (0..count / 2).find(loading)).unwrap_or(0);
        let (_, wakes) = self.in_flight.get_mut(at)?;
        (!std::mem::replace(wakes, true)).then_some(at)
    }
}

impl<F: Flight> Loads<F> {
    /// Adds a request: tensors to load, and their device bytes.
    pub fn ask(
        &mut self,
        model: ModelId,
        (left, bytes_total): (VecDeque<Wanted>, u64),
        progress: watch::Sender<LoadProgress>,
    ) {
        let reached = LoadProgress { tensors_total: left.len(), bytes_total, ..LoadProgress::default() };
        let (in_flight, in_flight_bytes) = (VecDeque::new(), 0);
        let (blocked, error) = (false, None);
        self.tasks.push_back(Task {
            model,
            progress,
            left,
            in_flight,
            in_flight_bytes,
            reached,
            blocked,
            error,
        });
    }

    /// True while the first load of any request is in flight.
    pub fn are_in_flight(&self) -> bool {
        let loading = |task: &Task<F>| {
            task.in_flight.front().is_some_and(|(flight, _)| matches!(flight.state(), LoadState::Loading))
        };
        self.tasks.iter().any(loading)
    }

    /// True when there is no request.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Begins a turn: counts arrivals and drops requests without a receiver. True when something arrived.
    pub fn look(&mut self) -> bool {
        let mut moved = false;
        for mut task in std::mem::take(&mut self.tasks) {
            if task.progress.is_closed() {
                self.strays.extend(task.in_flight.drain(..).map(|(flight, _)| flight));
                continue;
            }
            task.blocked = false;
            moved |= task.take_arrived();
            self.tasks.push_back(task);
        }
        self.left = self.tasks.len();
        moved
    }

    /// The next action of this turn; `None` when the turn is over.
    pub fn next(&mut self) -> Option<Action<'_, F>> {
        while self.left > 0 {
            let task = self.tasks.front_mut()?;
            if task.is_over() {
                self.left -= 1;
                let task = self.tasks.pop_front()?;
                return Some(Action::End(self.ended(task)));
            }
            if task.may_begin() {
                let wanted = task.left.front()?.clone();
                return Some(Action::Begin { model: task.model, wanted });
            }
            self.left -= 1;
            let wake_at = task.wake_at();
            self.tasks.rotate_left(1);
            if let Some(at) = wake_at {
                return self
                    .tasks
                    .back()
                    .and_then(|task| task.in_flight.get(at))
                    .map(|(f, _)| Action::Wake(f));
            }
        }
        None
    }

    /// Takes the result of the last [`Action::Begin`].
    pub fn begun(&mut self, begun: Begun<F>) {
        let Some(task) = self.tasks.front_mut() else { return };
        match begun {
            Begun::Flying(flight) => {
                task.left.pop_front();
                task.in_flight_bytes = task.in_flight_bytes.saturating_add(flight.tensor().bytes);
                task.in_flight.push_back((flight, false));
            }
            Begun::Blocked => task.blocked = true,
            Begun::Failed(error) => task.error = Some(error),
        }
    }

    /// Fails all requests, or those for one model.
    pub fn fail(&mut self, of: Option<ModelId>, error: &dyn Fn() -> JobError) -> Vec<Ended> {
        let (fail, keep) = std::mem::take(&mut self.tasks)
            .into_iter()
            .partition::<VecDeque<_>, _>(|task| of.is_none_or(|model| model == task.model));
        (self.tasks, self.left) = (keep, 0);
        let mut ended = Vec::new();
        for mut task in fail {
            task.error = Some(error());
            ended.push(self.ended(task));
        }
        ended
    }

    fn ended(&mut self, task: Task<F>) -> Ended {
        self.strays.extend(task.in_flight.into_iter().map(|(flight, _)| flight));
        Ended { model: task.model, error: task.error, reached: task.reached, progress: task.progress }
    }

    /// Forgets loads of ended requests that have completed. True when one of them failed.
    pub fn strays_failed(&mut self) -> bool {
        let mut failed = false;
        self.strays.retain(|flight| {
            let state = flight.state();
            failed |= matches!(state, LoadState::Failed(_));
            matches!(state, LoadState::Loading)
        });
        failed
    }

    /// Progress of the request that has the most bytes of a model still to load.
    pub fn progress(&self, model: ModelId) -> Option<LoadingProgress> {
        let of_it = self.tasks.iter().filter(|task| task.model == model).map(|task| &task.reached);
        of_it.max_by_key(|reached| reached.bytes_total.saturating_sub(reached.bytes)).map(|reached| {
            LoadingProgress {
                tensors: reached.tensors,
                tensors_total: reached.tensors_total,
                bytes: reached.bytes,
                bytes_total: reached.bytes_total,
            }
        })
    }
}

/// The error of a lost device, if it caused the failure.
pub(super) fn lost_device(error: &JobError) -> Option<BackendError> {
    match error {
        JobError::Backend(lost @ BackendError::DeviceLost { .. }) => Some(lost.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
