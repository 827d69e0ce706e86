//! An engine's device state: the backend, the hosted models, their weights, and the loads that clients requested.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use super::facts::Facts;
use super::life::HostedModels;
use super::loads::{self, Action, Begun, LoadRequest, Loads, TensorFlight};
use super::prefixes::{KEPT_BESIDE_WORK, PrefixKeeper};
use super::residency::{Asked, Residency, RoomMade, Window};
use super::schedule::{Schedule, StepPlan};
use super::swap::HostMemory;
use super::{Bytes, JobError};
use crate::backend::{Backend, BackendError, ModelSlot};
use crate::lock;
use crate::model::{Model, ModelId};
use crate::program::PartId;
use crate::tensor::LazyTensor;

/// How often the engine looks at loads in flight between steps, so that it notices other work.
const ARRIVAL: std::time::Duration = std::time::Duration::from_millis(1);

pub(super) struct Device {
    pub backend: Box<dyn Backend>,
    pub residency: Residency,
    pub models: HostedModels,
    pub loads: Loads,
    /// Takes the known prefixes of a pool before it closes.
    pub keeper: Option<Arc<dyn PrefixKeeper>>,
    /// Pages of parked sequences.
    pub host: HostMemory,
    /// Parts that were loaded before all others since a step of their model was complete or failed.
    loaded_first: BTreeSet<PartId>,
}

impl Device {
    pub fn new(backend: Box<dyn Backend>, keeper: Option<Arc<dyn PrefixKeeper>>, host: HostMemory) -> Self {
        let (residency, models, loads) = Default::default();
        Self { backend, residency, models, loads, keeper, host, loaded_first: BTreeSet::new() }
    }

    /// Hosts a model without loading anything.
    pub fn enter(&mut self, model: &Arc<Model>, now: Instant) {
        self.residency.enter(model);
        self.models.enter(model, now);
    }

    /// Returns the slot of a hosted model. Opens its activations and KV pool if they are closed.
    ///
    /// # Errors
    /// [`BackendError`] of [`Backend::open_model`].
    pub fn open(
        &mut self,
        model: &Model,
        facts: &Facts,
        schedule: &Schedule,
    ) -> Result<ModelSlot, BackendError> {
        if let Some(slot) = self.models.get(model.id).and_then(|hosted| hosted.slot) {
            return Ok(slot);
        }
        let program = &model.plan.program;
        let pages = schedule.pool_pages(facts.page_bytes(program));
        let slot = self.backend.open_model(program, facts.limits_of(program), pages)?;
        self.models.opened(model.id, slot);
        Ok(slot)
    }

    /// Closes a model's activations and KV pool, if they are open. The keeper gets what the pool knows.
    pub fn close(&mut self, id: ModelId, schedule: &mut Schedule) {
        self.keep_prefixes(id, schedule, KEPT_BESIDE_WORK);
        if let Some(slot) = self.models.take_slot(id) {
            self.backend.close_model(slot);
            schedule.close_pool(id);
        }
    }

    /// Copies the pages of which sequences of a step begin with the first tokens.
    ///
    /// # Errors
    /// [`BackendError`] of a copy. The sequences still wait for the copies that were not made.
    pub fn copy_pages(
        &mut self,
        slot: ModelSlot,
        step: &StepPlan,
        schedule: &mut Schedule,
    ) -> Result<(), BackendError> {
        for work in &step.work {
            if let Some((from, to)) = schedule.copy_of(work.id) {
                self.backend.copy_page(slot, from, to)?;
                schedule.copied(work.id);
            }
        }
        Ok(())
    }

    /// Gives the memory of freed KV pages back, after those of parked sequences were copied.
    pub fn release_freed(&mut self, schedule: &mut Schedule) {
        self.swap_out(schedule);
        for (model, pages) in schedule.take_freed() {
            if let Some(slot) = self.models.get(model).and_then(|hosted| hosted.slot) {
                self.backend.release_pages(slot, &pages);
            }
        }
        for (model, states) in schedule.take_freed_states() {
            if let Some(slot) = self.models.get(model).and_then(|hosted| hosted.slot) {
                self.backend.release_states(slot, &states);
            }
        }
    }

    /// Drops the cached KV pages of a model, or of all. True if that freed any.
    pub fn drop_cached(&mut self, of: Option<ModelId>, schedule: &mut Schedule) -> bool {
        let dropped = schedule.drop_cached(of);
        self.release_freed(schedule);
        dropped
    }

    /// Drops cached KV pages for so many bytes of a model's weights, as far as weights of other models would go otherwise.
    /// Each step of these needs all their weights; a cached page serves only a prompt that begins as an earlier one. A
    /// model larger than the room of all these streams in any case: then pages stay that would only make its share larger.
    fn spare_others(&mut self, id: ModelId, need_bytes: u64, schedule: &mut Schedule) {
        let cached_bytes = schedule.page_sums().cached_bytes;
        if cached_bytes == 0 {
            return;
        }
        let memory = self.backend.memory();
        let short_bytes = need_bytes.saturating_sub(memory.available());
        // Without a budget, weights are read in place.
        if short_bytes == 0 || memory.budget == 0 {
            return;
        }
        let others_bytes = self.residency.evictable_bytes(id);
        let fits = short_bytes <= others_bytes.saturating_add(cached_bytes);
        schedule.drop_first_cached(if fits { short_bytes } else { short_bytes.min(others_bytes) });
        self.release_freed(schedule);
    }

    /// Before a step: drops cached KV pages for weights of the model that are not there. See [`Device::spare_others`].
    pub fn make_way_for(&mut self, id: ModelId, facts: &Facts, schedule: &mut Schedule) {
        if !self.residency.has_all(id) {
            let missing = self.missing_bytes(id, facts, schedule);
            self.spare_others(id, missing, schedule);
        }
    }

    /// Device bytes of a model's weights that are not there, and of KV pages that have no memory yet.
    fn missing_bytes(&mut self, id: ModelId, facts: &Facts, schedule: &Schedule) -> u64 {
        let weights = self.residency.missing_bytes(id, |tensor| facts.weight_bytes(tensor));
        let pages = schedule.kv().used_bytes().saturating_sub(self.backend.memory().kv);
        weights.saturating_add(pages)
    }

    /// Closes the open model that has been idle longest, except `but`. False when there is none.
    pub fn close_idle(&mut self, but: Option<ModelId>, schedule: &mut Schedule) -> bool {
        let oldest = self.models.open_and_idle_longest(but);
        oldest.inspect(|id| self.close(*id, schedule)).is_some()
    }

    /// Removes unloaded models without sequences from the device: activations, KV pool, weights, mapping.
    pub fn remove_left(&mut self, schedule: &mut Schedule) {
        while let Some(hosted) = self.models.take_left() {
            let id = hosted.model.id;
            if let Some(slot) = hosted.slot {
                self.backend.close_model(slot);
            }
            schedule.close_pool(id);
            // If the device does not answer, the next step reports the loss.
            if let Err(error) = self.backend.retire() {
                tracing::warn!(%error, "weights are freed on a device that does not answer");
            }
            self.residency.leave(id);
            self.step_over(id);
        }
    }

    /// Evicts all weights of a model.
    pub fn evict(&mut self, id: ModelId) {
        if let Err(error) = self.residency.evict_model(id, self.backend.as_mut()) {
            tracing::warn!(model = id.0, %error, "the model's weights could not be evicted");
        }
    }

    /// Between steps: frees one thing for a step that ran out of memory. False when nothing can be freed.
    ///
    /// Cached pages go first, then pools of idle models, then weights of other models. Then a sequence gives its pages up. For
    /// a sequence alone the model's own weights go, unless they are pinned.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`].
    pub fn make_room_for_step(
        &mut self,
        step: &StepPlan,
        error: &BackendError,
        schedule: &mut Schedule,
    ) -> Result<bool, BackendError> {
        let id = step.model;
        // The step has already evicted all weights that it may: only KV pages and activations can still make room.
        let starved = self.residency.take_starved();
        let few =
            error.needs().map_or(0, |(_, bytes)| bytes).max(schedule.page_sums().cached_bytes / 8).max(1);
        schedule.release_drafters(None); // these are cached now
        let dropped = schedule.drop_first_cached(few) > 0;
        self.release_freed(schedule);
        if dropped || self.drop_cached(None, schedule) || self.close_idle(Some(id), schedule) {
            return Ok(true);
        }
        if let Some(part) = starved {
            return self.load_first(part, error);
        }
        let others = self.residency.make_room_of_others(id, self.backend.as_mut())?;
        if matches!(others, RoomMade::None) {
            // The step would load the model's own weights again, each time.
            if schedule.park_for_memory(step, self.backend.memory().kv, lock::now()) {
                self.release_freed(schedule);
                return Ok(true);
            }
            if self.residency.rules(id).pinned {
                return Ok(false);
            }
        }
        self.is_made(id, others)
    }

    /// Makes one piece of free memory for a part. A step leaves the layer before the part where it is. A few tensors here and
    /// there split memory that would be enough: a head of 29 MiB found no room in 47 of 64 MiB. Tried once for a step.
    fn load_first(&mut self, part: PartId, error: &BackendError) -> Result<bool, BackendError> {
        let enough = error.needs().is_some_and(|(_, bytes)| bytes <= self.backend.memory().available());
        if !enough || !self.loaded_first.insert(part) {
            return Ok(false);
        }
        tracing::debug!(
            model = part.model.0,
            part = part.part,
            "free memory is in pieces: the part is loaded first"
        );
        match self.residency.load_first(part, self.backend.as_mut()) {
            Err(lost @ BackendError::DeviceLost { .. }) => Err(lost),
            Err(error) if error.is_out_of_memory() => Ok(false),
            // The step meets any other error again, and reports it.
            _ => Ok(true),
        }
    }

    /// A step of the model is complete, or has failed.
    pub fn step_over(&mut self, id: ModelId) {
        self.loaded_first.retain(|part| part.model != id);
    }

    /// Whether an eviction made room, or one of the model's own weights does.
    fn is_made(&mut self, id: ModelId, others: RoomMade) -> Result<bool, BackendError> {
        let made = match others {
            RoomMade::None => self.residency.make_room(&Window::none(id), self.backend.as_mut())?,
            made => made,
        };
        if let RoomMade::InFlight(_) = made {
            lock::pause(ARRIVAL);
        }
        Ok(!matches!(made, RoomMade::None))
    }

    /// Makes the error for a model without room, with the bytes that others hold.
    pub fn no_room(&self, id: ModelId, error: &BackendError) -> JobError {
        let memory = self.backend.memory();
        let Some((what, need_bytes)) = error.needs() else { return JobError::Backend(error.clone()) };
        // No names: one user's file name must not reach another user. `residency` names the models that its caller may
        // see.
        let (mut own, mut others, mut pinned, mut count) = (0, 0, 0, 0);
        for (other, _) in self.models.iter() {
            let bytes: u64 = self.residency.held(other).map(|(_, held)| held.bytes).sum();
            if other == id {
                own = bytes;
            } else if bytes > 0 {
                count += 1;
                others += bytes;
                pinned += if self.residency.rules(other).pinned { bytes } else { 0 };
            }
        }
        let models = if count == 1 { "model" } else { "models" };
        let held = [
            format!("the model itself has {}", Bytes(own)),
            format!("{count} other {models} {} ({} pinned)", Bytes(others), Bytes(pinned)),
            format!("KV pages {}", Bytes(memory.kv)),
            format!("activations {}", Bytes(memory.scratch)),
            format!("upload buffers {}", Bytes(memory.staging)),
            format!("other programs {}", Bytes(memory.others())),
        ];
        JobError::NoRoom {
            what,
            need_bytes,
            free_bytes: memory.available(),
            budget_bytes: memory.budget,
            held: held.join(", "),
        }
    }

    /// Adds a client's request for weights.
    pub fn ask(&mut self, request: LoadRequest, bytes_of: impl Fn(&LazyTensor) -> u64) {
        let model = &request.model;
        // The model must be hosted, so that an unload frees the weights.
        self.enter(model, lock::now());
        self.residency.used(model.id);
        self.loads.ask(model.id, loads::wanted(model, &request.target, bytes_of), request.progress);
    }

    /// Begins loads until none may begin, or returns a request that ended. `wake` makes callbacks that wake the engine;
    /// `moved` becomes true when a load began.
    pub fn drive_loads(
        &mut self,
        schedule: &mut Schedule,
        wake: &dyn Fn() -> Box<dyn FnOnce() + Send>,
        moved: &mut bool,
    ) -> Option<loads::Ended> {
        loop {
            match self.loads.next()? {
                Action::End(ended) => return Some(ended),
                Action::Wake(flight) => match flight.memory.as_ref().and_then(std::sync::Weak::upgrade) {
                    Some(memory) => memory.when_decided(wake()),
                    None => wake()(),
                },
                Action::Begin { model, wanted } => {
                    let begun = self.begin(model, &wanted, schedule, wake);
                    *moved |= !matches!(begun, Begun::Blocked);
                    self.loads.begun(begun);
                }
            }
        }
    }

    fn begin(
        &mut self,
        id: ModelId,
        wanted: &loads::Wanted,
        schedule: &mut Schedule,
        wake: &dyn Fn() -> Box<dyn FnOnce() + Send>,
    ) -> Begun<TensorFlight> {
        self.spare_others(id, self.backend.weight_bytes()(&wanted.tensor.lazy), schedule);
        loop {
            match self.residency.load_for_client(id, wanted.part, &wanted.tensor, self.backend.as_mut()) {
                Ok(Asked::Loading(tensor)) => return Begun::Flying(TensorFlight::new(&tensor)),
                Ok(Asked::After(load)) => {
                    load.when_decided(wake());
                    return Begun::Blocked;
                }
                Err(error)
                    if error.is_out_of_memory()
                        && (self.drop_cached(None, schedule) || self.close_idle(Some(id), schedule)) => {}
                Err(error) if error.is_out_of_memory() => return Begun::Failed(self.no_room(id, &error)),
                Err(error) => return Begun::Failed(JobError::Backend(error)),
            }
        }
    }

    /// Clears loads from the cache that failed after their request had ended.
    pub fn clear_strays(&mut self) {
        if self.loads.strays_failed() {
            self.residency.clear_failed();
        }
    }

    /// Records loads that completed since the last look.
    pub fn look(&mut self) {
        if let Err(error) = self.residency.look(self.backend.as_mut()) {
            tracing::warn!(%error, "weights that became unwanted while in flight could not be evicted");
        }
    }
}
