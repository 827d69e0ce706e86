//! Bringing tensors to the device because somebody asked for them, without a step that needs them.
//!
//! The engine's thread begins a few loads at a time and looks at them again when the device says that one is decided; it
//! never waits for one, and steps run in between. A tensor that is on the way for a step is the same load.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::{Core, Room};
use crate::backend::{BackendError, DeviceMemory, DeviceTensor, LoadState, Storage};
use crate::model::{Model, ModelId};
use crate::program::{Residence, Tensor};
use crate::scheduler::residency::Asked;
use crate::scheduler::{JobError, LoadProgress, LoadTarget, LoadedTensor, LoadingProgress};
use crate::tensor::LazyTensor;

/// Bytes that are on the way at once: ten milliseconds of a fast link, in which the engine's thread looks again.
const ON_THE_WAY_BYTES: u64 = 512 << 20;

/// And so many tensors at most, however small.
const ON_THE_WAY_MAX: usize = 1024;

/// What somebody asked for.
pub(in crate::scheduler) struct LoadRequest {
    pub model: Arc<Model>,
    pub target: LoadTarget,
    /// Nobody looks any more when all receivers are gone: then the rest is not loaded.
    pub progress: tokio::sync::watch::Sender<LoadProgress>,
}

impl std::fmt::Debug for LoadRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadRequest").field("target", &self.target).finish_non_exhaustive()
    }
}

/// A request that is worked on.
pub(super) struct LoadTask {
    request: LoadRequest,
    /// Those that are still to be begun.
    left: VecDeque<Wanted>,
    /// In the order in which they were begun, which is nearly that in which they arrive.
    on_the_way: VecDeque<OnTheWay>,
    reached: LoadProgress,
}

/// A tensor that is to be loaded.
struct Wanted {
    tensor: Tensor,
    part: u32,
}

/// A load whose end is waited for. It does not keep the tensor there: that is the cache's.
struct OnTheWay {
    /// None where weights are read in place.
    memory: Option<Weak<dyn DeviceMemory>>,
    tensor: LoadedTensor,
    /// The engine is woken when it is decided.
    wakes: bool,
}

impl OnTheWay {
    fn new(tensor: &DeviceTensor) -> Self {
        let bytes = tensor.device_bytes();
        match &tensor.storage {
            Storage::InPlace => {
                Self { memory: None, tensor: LoadedTensor { address: 0, bytes }, wakes: false }
            }
            Storage::Device(memory) => {
                let tensor = LoadedTensor { address: memory.address(), bytes };
                Self { memory: Some(Arc::downgrade(memory)), tensor, wakes: false }
            }
        }
    }

    /// What came and left again before anybody looked had come.
    fn state(&self) -> LoadState {
        let memory = self.memory.as_ref().and_then(Weak::upgrade);
        memory.map_or(LoadState::Resident, |memory| memory.state())
    }

    fn is_loading(&self) -> bool {
        matches!(self.state(), LoadState::Loading)
    }
}

impl LoadTask {
    /// With the bytes that a tensor takes of the device.
    pub fn new(request: LoadRequest, bytes_of: impl Fn(&LazyTensor) -> u64) -> Self {
        let program = &request.model.plan.program;
        let all_of = |part: u32| {
            program.part_tensors(part).map(move |(_, tensor)| Wanted { tensor: tensor.clone(), part })
        };
        let left: VecDeque<Wanted> = match &request.target {
            LoadTarget::Parts(parts) => parts.iter().copied().flat_map(all_of).collect(),
            // A tied output is the embedding, which the host reads rows of: as a whole it belongs to the head.
            LoadTarget::Tensor(wanted) => {
                let named = |found: &Wanted| found.tensor.lazy.name() == wanted;
                let found = (0..program.part_count()).flat_map(all_of).filter(named).last();
                let whole = |lazy| Tensor { lazy, residence: Residence::Device };
                let found = found.map(|found| Wanted { tensor: whole(found.tensor.lazy), ..found });
                found.into_iter().collect()
            }
        };
        let taken = left.iter().filter(|wanted| wanted.tensor.residence != Residence::Host);
        let bytes_total = taken.map(|wanted| bytes_of(&wanted.tensor.lazy)).sum();
        let reached = LoadProgress { tensors_total: left.len(), bytes_total, ..LoadProgress::default() };
        Self { request, left, on_the_way: VecDeque::new(), reached }
    }

    pub fn model(&self) -> ModelId {
        self.request.model.id
    }

    /// Counts what has arrived, up to the first that has not. Returns whether there was any.
    ///
    /// # Errors
    /// Of a load that failed.
    fn take_arrived(&mut self) -> Result<bool, JobError> {
        let mut any = false;
        while let Some(load) = self.on_the_way.front() {
            match load.state() {
                LoadState::Loading => break,
                LoadState::Failed(error) => return Err(JobError::Backend(error)),
                LoadState::Resident => {}
            }
            any = true;
            self.reached.tensors += 1;
            self.reached.bytes += load.tensor.bytes;
            self.reached.last = Some(load.tensor);
            self.on_the_way.pop_front();
        }
        if any {
            self.request.progress.send_replace(self.reached.clone());
        }
        Ok(any)
    }

    fn end(mut self, result: Result<(), JobError>) {
        self.reached.ended = Some(result);
        self.request.progress.send_replace(self.reached);
    }
}

impl Core {
    /// Takes a request on.
    pub(super) fn begin_load(&mut self, request: LoadRequest) {
        let model = &request.model;
        self.residency.enter(model);
        // Who unloads the model finds the copies by its room.
        let room = || Room { idle_since: Some(crate::lock::now()), ..Room::new(model) };
        self.rooms.entry(model.id).or_insert_with(room);
        self.residency.used(model.id);
        let facts = self.shared.facts();
        self.loads.push(LoadTask::new(request, |tensor| facts.weight_bytes(tensor)));
    }

    /// How far the request is that brings most of a model's weights.
    pub(super) fn loading(&self, id: ModelId) -> Option<LoadingProgress> {
        let of_it = self.loads.iter().filter(|task| task.model() == id).map(|task| &task.reached);
        of_it.max_by_key(|reached| reached.bytes_total.saturating_sub(reached.bytes)).map(|reached| {
            LoadingProgress {
                tensors: reached.tensors,
                tensors_total: reached.tensors_total,
                bytes: reached.bytes,
                bytes_total: reached.bytes_total,
            }
        })
    }

    /// Looks at what is on the way and begins more. True when something moved.
    pub(super) fn drive_loads(&mut self) -> bool {
        let mut moved = false;
        let is_loading = |task: &LoadTask| task.on_the_way.front().is_some_and(OnTheWay::is_loading);
        let under_way = self.loads.iter().any(is_loading);
        if let Err(lost) = self.backend.watch_loads(under_way) {
            self.replace_device(&lost);
            return true;
        }
        for _ in 0..self.loads.len() {
            let mut task = self.loads.remove(0);
            if task.request.progress.is_closed() {
                self.stray(&mut task);
                continue; // nobody looks any more
            }
            match self.drive(&mut task) {
                Ok(progress) => {
                    moved |= progress;
                    if task.left.is_empty() && task.on_the_way.is_empty() {
                        self.publish(); // who is told finds it in the snapshot
                        self.used_now(task.model());
                        task.end(Ok(()));
                    } else {
                        self.loads.push(task);
                    }
                }
                Err(error) => {
                    moved = true;
                    self.stray(&mut task);
                    self.residency.clear_failed();
                    self.publish();
                    let lost = match &error {
                        JobError::Backend(lost @ BackendError::DeviceLost { .. }) => Some(lost.clone()),
                        _ => None,
                    };
                    task.end(Err(error));
                    if let Some(lost) = lost {
                        self.replace_device(&lost); // ends the other loads as well
                        return true;
                    }
                }
            }
        }
        moved
    }

    /// Keeps an eye on what a request that is over has on its way.
    fn stray(&mut self, task: &mut LoadTask) {
        self.strays.extend(task.on_the_way.drain(..).filter_map(|load| load.memory));
    }

    /// Clears away loads that failed after the request that began them had ended.
    pub(super) fn look_at_strays(&mut self) {
        let mut failed = false;
        self.strays.retain(|memory| match memory.upgrade().map(|memory| memory.state()) {
            Some(LoadState::Loading) => true,
            Some(LoadState::Resident) | None => false,
            Some(LoadState::Failed(_)) => {
                failed = true;
                false
            }
        });
        if failed {
            self.residency.clear_failed();
        }
    }

    /// An idle model counts as idle from now on: what was just brought is not what leaves first.
    fn used_now(&mut self, id: ModelId) {
        if let Some(since) = self.rooms.get_mut(&id).and_then(|room| room.idle_since.as_mut()) {
            *since = crate::lock::now();
        }
    }

    fn drive(&mut self, task: &mut LoadTask) -> Result<bool, JobError> {
        let arrived = task.take_arrived()?;
        let mut begun = false;
        let mut bytes: u64 = task.on_the_way.iter().map(|load| load.tensor.bytes).sum();
        while bytes < ON_THE_WAY_BYTES
            && task.on_the_way.len() < ON_THE_WAY_MAX
            && let Some(Wanted { tensor, part }) = task.left.front()
        {
            let id = task.request.model.id;
            let asked = loop {
                let backend = self.backend.as_mut();
                match self.residency.load(id, *part, tensor, backend) {
                    Err(error) if error.is_out_of_memory() && self.close_idle_room(Some(id)) => {}
                    Err(error) if error.is_out_of_memory() => return Err(self.no_room(id, &error)),
                    asked => break asked.map_err(JobError::Backend)?,
                }
            };
            let loaded = match asked {
                Asked::Loading(loaded) => loaded,
                Asked::After(load) => {
                    load.when_decided(self.wake());
                    break;
                }
            };
            begun = true;
            bytes += loaded.device_bytes();
            task.on_the_way.push_back(OnTheWay::new(&loaded));
            task.left.pop_front();
        }
        self.wake_for(task);
        Ok(arrived || begun)
    }

    /// Has the engine woken when half of what is on the way is there: there is more to begin then. To be woken for each costs
    /// more than bringing a small one.
    fn wake_for(&self, task: &mut LoadTask) {
        let count = task.on_the_way.len();
        let loading = |at: &usize| task.on_the_way.get(*at).is_some_and(OnTheWay::is_loading);
        // Where all have arrived meanwhile it is woken at once.
        let at = (count / 2..count).find(loading).or_else(|| (0..count / 2).find(loading)).unwrap_or(0);
        let Some(load) = task.on_the_way.get_mut(at).filter(|load| !load.wakes) else { return };
        load.wakes = true;
        let wake = self.wake();
        match load.memory.as_ref().and_then(Weak::upgrade) {
            Some(memory) => memory.when_decided(wake),
            None => wake(),
        }
    }

    /// Wakes the engine when it is called.
    fn wake(&self) -> Box<dyn FnOnce() + Send> {
        let shared = Arc::clone(&self.shared);
        Box::new(move || {
            shared.inbox.lock().woken = true;
            shared.wake.notify_one();
        })
    }

    /// Ends all requests of this kind.
    pub(super) fn fail_loads(&mut self, of: Option<ModelId>, error: &dyn Fn() -> JobError) {
        let tasks = std::mem::take(&mut self.loads);
        for task in tasks {
            if of.is_none_or(|model| model == task.model()) {
                task.end(Err(error()));
            } else {
                self.loads.push(task);
            }
        }
    }
}
