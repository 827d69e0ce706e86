//! Bringing tensors to the device because somebody asked for them, without a step that needs them.
//!
//! The engine's thread begins a few loads at a time and looks at them again when the device says that one is decided; it
//! never waits for one, and steps run in between. A tensor that is on the way for a step is the same load.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::{Core, Room};
use crate::backend::{BackendError, DeviceMemory, DeviceTensor, LoadState, Storage};
use crate::model::plan::FIRST_PART;
use crate::model::{Model, ModelId};
use crate::scheduler::{JobError, LoadProgress, LoadTarget, LoadedTensor, LoadingProgress};
use crate::tensor::LazyTensor;

/// Bytes that are on the way at once: ten milliseconds of a fast link, in which the engine's thread looks again.
const ON_THE_WAY_BYTES: u64 = 512 << 20;

/// And so many tensors at most, however small.
const ON_THE_WAY_MAX: usize = 1024;

/// Part and number of the tensor that steps take single rows of: it stays in the file.
const EMBEDDING: (u32, usize) = (FIRST_PART, 0);

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
    /// Tensors that are still to be begun: the number of a part, and of a tensor in it.
    left: VecDeque<(u32, usize)>,
    on_the_way: Vec<OnTheWay>,
    reached: LoadProgress,
}

/// A load whose end is waited for. It does not keep the tensor there: that is the cache's.
struct OnTheWay {
    /// None where weights are read in place.
    memory: Option<Weak<dyn DeviceMemory>>,
    tensor: LoadedTensor,
}

impl OnTheWay {
    fn new(tensor: &DeviceTensor) -> Self {
        let bytes = tensor.device_bytes();
        match &tensor.storage {
            Storage::InPlace => Self { memory: None, tensor: LoadedTensor { address: 0, bytes } },
            Storage::Device(memory) => {
                let tensor = LoadedTensor { address: memory.address(), bytes };
                Self { memory: Some(Arc::downgrade(memory)), tensor }
            }
        }
    }

    /// What came and left again before anybody looked had come.
    fn state(&self) -> LoadState {
        let memory = self.memory.as_ref().and_then(Weak::upgrade);
        memory.map_or(LoadState::Resident, |memory| memory.state())
    }
}

impl LoadTask {
    /// With the bytes that a tensor takes of the device.
    pub fn new(request: LoadRequest, bytes_of: impl Fn(&LazyTensor) -> u64) -> Self {
        let plan = &request.model.plan;
        let all_of = |part: u32| (0..plan.part_tensors(part).count()).map(move |number| (part, number));
        let left: VecDeque<(u32, usize)> = match &request.target {
            LoadTarget::Parts(parts) => parts.iter().copied().flat_map(all_of).collect(),
            // A tied output is the embedding, which steps take rows of: as a whole it belongs to the head.
            LoadTarget::Tensor(wanted) => {
                let named = |(part, number): &(u32, usize)| {
                    plan.part_tensors(*part).nth(*number).is_some_and(|tensor| tensor.name() == wanted)
                };
                (0..plan.part_count()).flat_map(all_of).rfind(named).into_iter().collect()
            }
        };
        let whole = matches!(request.target, LoadTarget::Tensor(_));
        let taken = left.iter().filter(|at| whole || **at != EMBEDDING);
        let bytes_total =
            taken.filter_map(|(part, number)| plan.part_tensors(*part).nth(*number)).map(bytes_of).sum();
        let reached = LoadProgress { tensors_total: left.len(), bytes_total, ..LoadProgress::default() };
        Self { request, left, on_the_way: Vec::new(), reached }
    }

    pub fn model(&self) -> ModelId {
        self.request.model.id
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
        let room = || Room { idle_since: Some(Instant::now()), ..Room::new(model) };
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
            *since = Instant::now();
        }
    }

    fn drive(&mut self, task: &mut LoadTask) -> Result<bool, JobError> {
        let mut moved = false;
        let mut looked_at = std::mem::take(&mut task.on_the_way).into_iter();
        while let Some(tensor) = looked_at.next() {
            match tensor.state() {
                LoadState::Loading => task.on_the_way.push(tensor),
                LoadState::Failed(error) => {
                    task.on_the_way.extend(looked_at);
                    return Err(JobError::Backend(error));
                }
                LoadState::Resident => {
                    moved = true;
                    task.reached.tensors += 1;
                    task.reached.bytes += tensor.tensor.bytes;
                    task.reached.last = Some(tensor.tensor);
                    task.request.progress.send_replace(task.reached.clone());
                }
            }
        }
        let mut bytes: u64 = task.on_the_way.iter().map(|load| load.tensor.bytes).sum();
        while bytes < ON_THE_WAY_BYTES
            && task.on_the_way.len() < ON_THE_WAY_MAX
            && let Some((part, number)) = task.left.pop_front()
        {
            moved = true;
            let model = &task.request.model;
            let Some(tensor) = model.plan.part_tensors(part).nth(number) else { continue };
            // A step takes single rows of the embedding.
            let whole = matches!(task.request.target, LoadTarget::Tensor(_));
            let rows_only = !whole && (part, number) == EMBEDDING;
            let loaded = loop {
                let backend = self.backend.as_mut();
                match self.residency.load(model.id, part, tensor, rows_only, backend) {
                    Err(error) if error.is_out_of_memory() && self.close_idle_room(Some(model.id)) => {}
                    Err(error) if error.is_out_of_memory() => return Err(self.no_room(model.id, &error)),
                    loaded => break loaded.map_err(JobError::Backend)?,
                }
            };
            let Some(loaded) = loaded else {
                task.left.push_front((part, number)); // again in the next turn
                break;
            };
            bytes += loaded.device_bytes();
            task.on_the_way.push(OnTheWay::new(&loaded));
            if let Storage::Device(memory) = &loaded.storage {
                self.wake_when_decided(memory);
            }
        }
        Ok(moved)
    }

    fn wake_when_decided(&self, memory: &Arc<dyn DeviceMemory>) {
        let shared = Arc::clone(&self.shared);
        memory.when_decided(Box::new(move || {
            shared.inbox.lock().woken = true;
            shared.wake.notify_one();
        }));
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
