//! Bringing tensors to the device because somebody asked for them, without a step that needs them.
//!
//! The engine's thread begins a few loads at a time and looks at them again when the device says that one is decided; it
//! never waits for one, and steps run in between. A tensor that is on the way for a step is the same load.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Core, Room};
use crate::backend::{BackendError, DeviceMemory, DeviceTensor, LoadState, Storage};
use crate::model::{Model, ModelId};
use crate::scheduler::resident::ResidentModel;
use crate::scheduler::{JobError, LoadProgress, LoadTarget, LoadedTensor};

/// Loads that are on the way at once: enough to keep staging threads busy while one is decided.
const ON_THE_WAY: usize = 8;

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
    /// Numbers of the plan's tensors that are still to be begun.
    left: VecDeque<usize>,
    on_the_way: Vec<DeviceTensor>,
    reached: LoadProgress,
}

impl LoadTask {
    pub fn new(request: LoadRequest) -> Self {
        let tensors = || request.model.plan.tensors();
        let wanted = |name: &str| match &request.target {
            LoadTarget::All => true,
            LoadTarget::Tensor(wanted) => wanted == name,
        };
        let left: VecDeque<usize> = match &request.target {
            // The plan names a tied output twice: once is enough where one is asked for by name.
            LoadTarget::Tensor(_) => tensors().position(|t| wanted(t.name())).into_iter().collect(),
            LoadTarget::All => (0..tensors().count()).collect(),
        };
        let reached = LoadProgress { tensors_total: left.len(), ..LoadProgress::default() };
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
        // Who unloads the model finds the copies by its room.
        self.rooms.entry(model.id).or_insert_with(|| Room {
            resident: ResidentModel::new(Arc::clone(model)),
            slot: None,
            idle_since: Some(std::time::Instant::now()),
            gone: false,
        });
        self.loads.push(LoadTask::new(request));
    }

    /// Looks at what is on the way and begins more. True when something moved.
    pub(super) fn drive_loads(&mut self) -> bool {
        let mut moved = false;
        for _ in 0..self.loads.len() {
            // The others stay where `evict_idle` sees them.
            let mut task = self.loads.remove(0);
            if task.request.progress.is_closed() {
                self.strays.append(&mut task.on_the_way);
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
                    self.strays.append(&mut task.on_the_way);
                    self.cache.clear_failed();
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

    /// Clears away loads that failed after the request that began them had ended.
    pub(super) fn look_at_strays(&mut self) {
        let mut failed = false;
        self.strays.retain(|tensor| match tensor.state() {
            LoadState::Loading => true,
            LoadState::Resident => false,
            LoadState::Failed(_) => {
                failed = true;
                false
            }
        });
        if failed {
            self.cache.clear_failed();
        }
    }

    /// An idle model counts as idle from now on: what was just brought is not what leaves first.
    fn used_now(&mut self, id: ModelId) {
        if let Some(since) = self.rooms.get_mut(&id).and_then(|room| room.idle_since.as_mut()) {
            *since = std::time::Instant::now();
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
                    task.reached.bytes += tensor.device_bytes();
                    let address = match &tensor.storage {
                        Storage::InPlace => 0,
                        Storage::Device(memory) => memory.address(),
                    };
                    task.reached.last = Some(LoadedTensor { address, bytes: tensor.device_bytes() });
                    task.request.progress.send_replace(task.reached.clone());
                }
            }
        }
        while task.on_the_way.len() < ON_THE_WAY
            && let Some(number) = task.left.pop_front()
        {
            moved = true;
            let Some(lazy) = task.request.model.plan.tensors().nth(number) else { continue };
            // The embedding is the plan's first: a step takes single rows of it.
            let rows_only = number == 0 && matches!(task.request.target, LoadTarget::All);
            let loaded = loop {
                let (cache, backend) = (&mut self.cache, self.backend.as_mut());
                let loaded = if rows_only {
                    cache.load_table(backend, lazy)
                } else {
                    cache.load_tensor(backend, lazy)
                };
                match loaded {
                    // As for a step: as often as there is something to let go of.
                    Err(error) if error.is_out_of_memory() && self.evict_idle(task.model()) => {}
                    loaded => break loaded.map_err(JobError::Backend)?,
                }
            };
            if let Storage::Device(memory) = &loaded.storage {
                self.wake_when_decided(memory);
            }
            task.on_the_way.push(loaded);
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

    /// Lets go of the device copies of the model that has been idle longest. False when every model is in use.
    pub(super) fn evict_idle(&mut self, but: ModelId) -> bool {
        let loading = |id: ModelId| self.loads.iter().any(|task| task.model() == id);
        let idle = self.rooms.iter().filter(|(id, _)| **id != but && !loading(**id));
        let oldest = idle.filter_map(|(id, room)| Some((room.idle_since?, *id))).min();
        let Some((_, id)) = oldest else { return false };
        let before = self.cache.device_bytes();
        if let Some(room) = self.rooms.get_mut(&id) {
            tracing::info!(model = id.0, "its copies leave the device: another model needs the room");
            if let Some(slot) = room.slot.take() {
                self.backend.close_model(slot);
            }
            room.resident.forget();
            let model = Arc::clone(room.resident.model());
            for file in model.files.mappings() {
                self.cache.clear_file(file);
            }
            self.policy.close_pool(id);
            self.rooms.remove(&id);
        }
        before > self.cache.device_bytes() || self.evict_idle(but)
    }
}
