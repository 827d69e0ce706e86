//! Decides which models' weights are on the device: a step loads them part by part, and a lack of room evicts them part
//! by part.
//!
//! A step's weights: [`Residency::load_part`] -> `load_current` -> `with_room` -> [`ResidentModel::begin_loads`] ->
//! [`TensorCache::load`], which alone calls [`Backend::load_tensor`]. Experts that rows chose come by
//! [`Residency::load_chosen`], weights that a client asked for by [`Residency::load_for_client`].
//!
//! While a layer computes, the next layers load ([`Backend::parts_ahead`]). A load without room evicts parts of other
//! models in the order of [`Eviction`], but never pinned ones. If there are none, the current model exceeds the room.
//! Then it evicts the model's most recently used part, because that part is needed last. So a fixed share of the model
//! stays and the rest streams through. Three kinds of parts are never evicted: the current layer, those loaded ahead,
//! and the layer before the current one. The last operation of that layer may not be launched yet.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::resident::{Loader, ResidentModel};
use super::snapshot::PartState;
use crate::backend::{Backend, BackendError, DeviceMemory, DeviceTensor, Weights};
use crate::cache::{CacheCounters, Candidate, Eviction, Held, TensorCache, used_again_last};
use crate::model::{Model, ModelId};
use crate::program::{FIRST_PART, PartId, Tensor, TensorId};
use crate::tensor::LazyTensor;

/// Rules for a model's weights on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidencyRules {
    /// Its weights are never evicted to make room. Only its idle rule, a clear of this model or its unload removes
    /// them.
    pub pinned: bool,
    /// Models of a lower priority are evicted first.
    pub priority: u8,
    /// This many of its first parts (the embedding, then layers) stay when other models need room.
    pub parts_min: u32,
    /// Evict the weights after the model was idle for this long.
    pub idle_max: Option<Duration>,
}

/// A part that was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gone {
    pub model: ModelId,
    pub part: u32,
    pub bytes: u64,
}

#[derive(Debug)]
struct Place {
    resident: ResidentModel,
    /// Number of tensors in each part.
    part_tensors: Vec<usize>,
    /// Device bytes of all its weights, once asked for: models of experts have ten thousands of tensors.
    all_bytes: Option<u64>,
    rules: ResidencyRules,
}

/// All models hosted on one device.
#[derive(Debug, Default)]
pub(super) struct Residency {
    cache: TensorCache,
    places: BTreeMap<ModelId, Place>,
    eviction: Eviction,
    /// Parts that became resident since the last [`Residency::take_came`].
    came: Vec<PartId>,
    /// Parts evicted since the last [`Residency::take_gone`].
    gone: Vec<Gone>,
    /// Parts to evict when their load in flight completes.
    unwanted: BTreeSet<PartId>,
    /// Weights of a step found no room for this part although everything evictable was evicted.
    starved: Option<PartId>,
}

/// Result of a search for room.
#[derive(Clone, Debug)]
pub(super) enum RoomMade {
    /// A part was evicted.
    Evicted,
    /// All evictable parts are in flight; this load belongs to one of them.
    InFlight(Arc<dyn DeviceMemory>),
    /// Nothing can be evicted.
    None,
}

/// Result of a load that no step needs yet.
#[derive(Debug)]
pub(super) enum Asked {
    /// The tensor is resident or in flight.
    Loading(DeviceTensor),
    /// There is no room until this load completes.
    After(Arc<dyn DeviceMemory>),
}

/// The current part of the current model, and the parts around it that must stay.
#[derive(Clone, Debug)]
pub(super) struct Window {
    pub model: ModelId,
    at: u32,
    parts: RangeInclusive<u32>,
}

impl Window {
    /// The window around a part of a step, with up to `ahead` parts that load early.
    fn around(model: ModelId, at: u32, ahead: usize) -> Self {
        let ahead = u32::try_from(ahead).unwrap_or(u32::MAX);
        Self { model, at, parts: at.saturating_sub(1)..=at.saturating_add(ahead) }
    }

    /// The window without the parts ahead, for when they find no room.
    fn narrowed(&self) -> Self {
        Self { model: self.model, at: self.at, parts: self.at.saturating_sub(1)..=self.at }
    }

    /// The window of a model that uses none of its parts: before a step or a load.
    pub fn none(model: ModelId) -> Self {
        Self { model, at: FIRST_PART, parts: FIRST_PART..=FIRST_PART }
    }

    fn holds(&self, part: u32) -> bool {
        part == FIRST_PART || self.parts.contains(&part)
    }
}

impl Residency {
    /// Adds a model without loading anything. Does nothing if the model is known.
    pub fn enter(&mut self, model: &Arc<Model>) {
        self.places.entry(model.id).or_insert_with(|| Place {
            resident: ResidentModel::new(Arc::clone(model)),
            part_tensors: model.plan.program.parts().iter().map(|part| part.tensors.len()).collect(),
            all_bytes: None,
            rules: ResidencyRules::default(),
        });
    }

    /// Device bytes of a model's weights that are not there, from the bytes that each tensor would take.
    pub fn missing_bytes(&mut self, id: ModelId, bytes_of: impl Fn(&LazyTensor) -> u64) -> u64 {
        let held: u64 = self.held(id).map(|(_, held)| held.bytes).sum();
        let Some(place) = self.places.get_mut(&id) else { return 0 };
        let program = &place.resident.model().plan.program;
        let all = *place.all_bytes.get_or_insert_with(|| {
            // Rows of the embedding are read from the file.
            let parts = FIRST_PART + 1..program.part_count();
            let tensors = parts.flat_map(|part| program.part_tensors(part));
            tensors.map(|(_, tensor)| bytes_of(&tensor.lazy)).sum()
        });
        all.saturating_sub(held)
    }

    /// Removes a model and all its tensors.
    pub fn leave(&mut self, id: ModelId) {
        if let Some(place) = self.places.remove(&id) {
            for file in place.resident.model().files.mappings() {
                self.cache.clear_file(file);
            }
        }
        self.unwanted.retain(|part| part.model != id);
        self.eviction.forget(id);
    }

    /// The rules of a model, mutable. A change applies from the next eviction on.
    pub fn rules_mut(&mut self, id: ModelId) -> Option<&mut ResidencyRules> {
        self.places.get_mut(&id).map(|place| &mut place.rules)
    }

    /// The rules of a model.
    pub fn rules(&self, id: ModelId) -> ResidencyRules {
        self.places.get(&id).map(|place| place.rules).unwrap_or_default()
    }

    /// Records a use of a model, by a step or a requested load.
    pub fn used(&mut self, id: ModelId) {
        self.eviction.used(id);
    }

    /// True when a step of the model needs no load.
    pub fn has_all(&self, id: ModelId) -> bool {
        self.places.get(&id).is_some_and(|place| place.resident.has_all())
    }

    /// After a failed step: drops all handles of the model and clears failed loads, so that the next step requests them
    /// again.
    pub fn forget_handles(&mut self, id: ModelId) {
        if let Some(place) = self.places.get_mut(&id) {
            place.resident.forget();
        }
        self.clear_failed();
    }

    /// Removes failed loads. Call it between steps: models of one file share loads, so every model drops its handles of
    /// these parts and requests them again.
    pub fn clear_failed(&mut self) {
        for part in self.cache.clear_failed() {
            self.places.values_mut().for_each(|place| place.resident.forget_part(part.part));
        }
    }

    /// Bytes and tensors that the device holds of a model, by part.
    pub fn held(&self, id: ModelId) -> impl DoubleEndedIterator<Item = (u32, Held)> {
        self.cache.parts_of(id)
    }

    /// Bytes and tensors that the device holds of one part.
    pub fn held_part(&self, part: PartId) -> Held {
        self.cache.held(part)
    }

    /// State of each part of a model's plan.
    pub fn part_states(&self, id: ModelId) -> Vec<PartState> {
        let Some(place) = self.places.get(&id) else { return Vec::new() };
        let mut states = vec![PartState::Absent; place.part_tensors.len()];
        for (part, held) in self.held(id) {
            let all = place.part_tensors.get(part as usize).copied().unwrap_or(0);
            if let Some(state) = states.get_mut(part as usize) {
                *state = match held {
                    Held { loading: 1.., .. } => PartState::Loading,
                    Held { tensors, .. } if tensors < all => PartState::Partial,
                    Held { .. } => PartState::Resident,
                };
            }
        }
        states
    }

    /// Device bytes of all models' weights.
    pub fn device_bytes(&self) -> u64 {
        self.cache.device_bytes()
    }

    /// Counters of the cache.
    pub fn counters(&self) -> CacheCounters {
        self.cache.counters()
    }

    /// Takes the parts that became resident since the last call.
    pub fn take_came(&mut self) -> Vec<PartId> {
        std::mem::take(&mut self.came)
    }

    /// Records completed loads, and evicts those that became unwanted while in flight.
    pub fn look(&mut self, backend: &mut dyn Backend) -> Result<(), BackendError> {
        for part in self.cache.look() {
            self.came.push(part);
            if self.unwanted.remove(&part) {
                self.evict(part.model, part.part, backend)?;
            } else if let Some(place) = self.places.get_mut(&part.model) {
                place.resident.adopt(part.part, &self.cache);
            }
        }
        Ok(())
    }

    /// Takes the parts evicted since the last call.
    pub fn take_gone(&mut self) -> Vec<Gone> {
        std::mem::take(&mut self.gone)
    }

    /// Models in the order in which they would be evicted for `model`, without pinned ones.
    pub fn order(&self, model: Option<ModelId>) -> Vec<ModelId> {
        let others = self.places.iter().filter(|(id, place)| Some(**id) != model && !place.rules.pinned);
        let mut candidates: Vec<Candidate> =
            others.map(|(id, place)| Candidate { model: *id, priority: place.rules.priority }).collect();
        self.eviction.order(&mut candidates);
        candidates.into_iter().map(|candidate| candidate.model).collect()
    }

    /// Bytes of other models' weights that would be evicted for a model.
    pub fn evictable_bytes(&self, id: ModelId) -> u64 {
        let of_model = |other: ModelId| {
            let least = self.rules(other).parts_min;
            self.held(other).filter(move |(part, _)| *part >= least).map(|(_, held)| held.bytes)
        };
        self.order(Some(id)).into_iter().flat_map(of_model).sum()
    }

    /// Loads a part that a step needs. Begins loads of later parts, as many parts ahead as the backend asks for.
    ///
    /// # Errors
    /// [`BackendError`] of a load; out of memory only when nothing more can be evicted.
    pub fn load_part(
        &mut self,
        id: ModelId,
        part: u32,
        backend: &mut dyn Backend,
    ) -> Result<(), BackendError> {
        if part == FIRST_PART {
            return self.load_current(&Window::none(id), FIRST_PART, backend);
        }
        if self.has_all(id) {
            return Ok(());
        }
        let last = self.places.get(&id).map_or(0, |place| place.resident.model().plan.program.head_part());
        let ahead = backend.parts_ahead();
        let window = Window::around(id, part, ahead);
        self.load_current(&window, part, backend)?;
        for later in part + 1..=last.min(part.saturating_add(ahead as u32)) {
            if !self.load_ahead(&window, later, backend)? {
                break;
            }
        }
        Ok(())
    }

    /// Loads the experts that rows of the current step chose in a part.
    ///
    /// # Errors
    /// As [`Residency::load_part`].
    pub fn load_chosen(
        &mut self,
        id: ModelId,
        part: u32,
        chosen: &[TensorId],
        backend: &mut dyn Backend,
    ) -> Result<(), BackendError> {
        let window = Window::around(id, part, backend.parts_ahead());
        // After an eviction this goes on where room ran out: loads that it began stay.
        self.with_room(&window, part, backend, |resident, loader| {
            resident.begin_chosen_loads(part, chosen, loader)
        })
    }

    /// Handles of a model's tensors, as far as they are loaded.
    ///
    /// # Errors
    /// [`BackendError::Absent`] for an unknown model.
    pub fn weights(&self, id: ModelId) -> Result<Weights<'_>, BackendError> {
        let place =
            self.places.get(&id).ok_or(BackendError::Absent("a model that has no place on the device"))?;
        Ok(place.resident.weights())
    }

    /// Loads the current part. If room is short, the parts ahead wait.
    fn load_current(
        &mut self,
        window: &Window,
        part: u32,
        backend: &mut dyn Backend,
    ) -> Result<(), BackendError> {
        if self.has(window.model, part) {
            return Ok(());
        }
        self.with_room(window, part, backend, |resident, loader| resident.begin_loads(part, loader))
    }

    fn has(&self, id: ModelId, part: u32) -> bool {
        self.places.get(&id).is_some_and(|place| place.resident.has(part))
    }

    /// Loads a part ahead; false when there is no room for it now. Loads that it began stay.
    fn load_ahead(
        &mut self,
        window: &Window,
        part: u32,
        backend: &mut dyn Backend,
    ) -> Result<bool, BackendError> {
        while !self.has(window.model, part) {
            match self
                .try_load(window.model, part, backend, |resident, loader| resident.begin_loads(part, loader))
            {
                Err(error) if error.is_out_of_memory() => {
                    if !matches!(self.make_room(window, backend)?, RoomMade::Evicted) {
                        return Ok(false);
                    }
                }
                result => result?,
            }
        }
        Ok(true)
    }

    /// Runs `load` for a current part, again after each eviction that makes room for it.
    fn with_room(
        &mut self,
        window: &Window,
        part: u32,
        backend: &mut dyn Backend,
        load: impl Fn(&mut ResidentModel, &mut Loader<'_>) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let mut window = window.clone();
        loop {
            match self.try_load(window.model, part, backend, &load) {
                Err(error) if error.is_out_of_memory() => {
                    let narrow = window.narrowed();
                    match self.make_room(&window, backend)? {
                        RoomMade::Evicted => {}
                        _ if narrow.parts != window.parts => window = narrow,
                        // Wait here: a restarted step would evict the parts it has loaded so far.
                        RoomMade::InFlight(load) => backend.until_decided(&load)?,
                        RoomMade::None => {
                            self.starved = Some(PartId { model: window.model, part });
                            return Err(error);
                        }
                    }
                }
                result => return result,
            }
        }
    }

    fn try_load(
        &mut self,
        id: ModelId,
        part: u32,
        backend: &mut dyn Backend,
        load: impl Fn(&mut ResidentModel, &mut Loader<'_>) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let Some(place) = self.places.get_mut(&id) else {
            return Err(BackendError::Absent("a model that has no place on the device"));
        };
        let part = PartId { model: id, part };
        self.unwanted.remove(&part);
        load(&mut place.resident, &mut Loader { cache: &mut self.cache, backend, part })
    }

    /// The part that found no room in the last step after all evictions. Forgets it.
    pub fn take_starved(&mut self) -> Option<PartId> {
        self.starved.take()
    }

    /// Between steps: evicts everything evictable and all of the model's own weights, then loads this part before any other.
    ///
    /// # Errors
    /// As [`Residency::load_part`].
    pub fn load_first(&mut self, part: PartId, backend: &mut dyn Backend) -> Result<(), BackendError> {
        loop {
            match self.make_room(&Window::none(part.model), backend)? {
                RoomMade::Evicted => {}
                RoomMade::InFlight(load) => backend.until_decided(&load)?,
                RoomMade::None => break,
            }
        }
        // The part itself must stay while it loads.
        self.load_current(&Window::around(part.model, part.part, 0), part.part, backend)
    }

    /// Loads one tensor of a part on a client's request, without a step.
    ///
    /// # Errors
    /// As [`Residency::load_part`].
    pub fn load_for_client(
        &mut self,
        id: ModelId,
        part: u32,
        tensor: &Tensor,
        backend: &mut dyn Backend,
    ) -> Result<Asked, BackendError> {
        let part = PartId { model: id, part };
        self.unwanted.remove(&part);
        if self.cache.has_failed(&tensor.lazy) {
            self.clear_failed();
        }
        loop {
            match self.cache.load(backend, tensor, part) {
                // The model's other parts may be requested too, so only other models make room.
                Err(error) if error.is_out_of_memory() => match self.make_room_of_others(id, backend)? {
                    RoomMade::Evicted => {}
                    RoomMade::InFlight(load) => return Ok(Asked::After(load)),
                    RoomMade::None => return Err(error),
                },
                loaded => return loaded.map(Asked::Loading),
            }
        }
    }

    /// Evicts one part to make room for the window's model.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`].
    pub fn make_room(
        &mut self,
        window: &Window,
        backend: &mut dyn Backend,
    ) -> Result<RoomMade, BackendError> {
        let others = self.make_room_of_others(window.model, backend)?;
        if matches!(others, RoomMade::Evicted) {
            return Ok(others);
        }
        let Some(place) = self.places.get(&window.model) else { return Ok(others) };
        let head = place.resident.model().plan.program.head_part();
        let own = || {
            let parts = self.cache.parts_of(window.model);
            parts.filter(|(part, held)| held.bytes > 0 && !window.holds(*part))
        };
        let there = own().filter(|(_, held)| held.loading == 0).map(|(part, _)| part);
        if let Some(part) = used_again_last(there, window.at, head) {
            return self.evict(window.model, part, backend).map(|_| RoomMade::Evicted);
        }
        // Only parts seen as arrived are evicted: the step may already use one that the cache still counts as loading.
        let coming = own().find_map(|(part, _)| self.on_its_way(window.model, part));
        Ok(coming.map_or(others, RoomMade::InFlight))
    }

    fn on_its_way(&self, id: ModelId, part: u32) -> Option<Arc<dyn DeviceMemory>> {
        self.cache.on_its_way(PartId { model: id, part })
    }

    /// As [`Residency::make_room`], of other models alone.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`].
    pub fn make_room_of_others(
        &mut self,
        id: ModelId,
        backend: &mut dyn Backend,
    ) -> Result<RoomMade, BackendError> {
        self.look(backend)?;
        let mut coming = self.cache.departing();
        for other in self.order(Some(id)) {
            let least = self.rules(other).parts_min;
            let may_go = |(part, held): &(u32, Held)| held.bytes > 0 && *part >= least;
            let mut there = self.cache.parts_of(other).filter(may_go);
            if let Some((part, _)) = there.rfind(|(_, held)| held.loading == 0) {
                drop(there);
                self.evict(other, part, backend)?;
                return Ok(RoomMade::Evicted);
            }
            let mut may_go = self.cache.parts_of(other).filter(may_go);
            coming = coming.or_else(|| may_go.find_map(|(part, _)| self.on_its_way(other, part)));
        }
        Ok(coming.map_or(RoomMade::None, RoomMade::InFlight))
    }

    fn evict(&mut self, id: ModelId, part: u32, backend: &mut dyn Backend) -> Result<u64, BackendError> {
        backend.retire()?; // This must precede the drop of the last handle.
        if let Some(place) = self.places.get_mut(&id) {
            place.resident.forget_part(part);
        }
        let bytes = self.cache.evict(PartId { model: id, part });
        tracing::debug!(model = id.0, part, bytes, "evicted a part");
        self.gone.push(Gone { model: id, part, bytes });
        Ok(bytes)
    }

    /// Evicts a model's weights; parts in flight follow when their loads complete. Returns the bytes freed at once.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`].
    pub fn evict_model(&mut self, id: ModelId, backend: &mut dyn Backend) -> Result<u64, BackendError> {
        self.look(backend)?;
        let parts: Vec<(u32, Held)> = self.cache.parts_of(id).collect();
        let mut bytes = 0;
        for (part, held) in parts.into_iter().rev() {
            if held.loading > 0 {
                self.unwanted.insert(PartId { model: id, part });
            } else {
                bytes += self.evict(id, part, backend)?;
            }
        }
        Ok(bytes)
    }
}
