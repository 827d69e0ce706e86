//! Which models' weights are on the device: brought part by part as a step goes on, and sent away part by part when room is
//! needed.
//!
//! While a layer is computed the loads of the next ones are under way ([`Backend::parts_ahead`]). When a load finds no room,
//! parts of other models leave, in the order of [`Eviction`]; pinned ones never do. When there are none, the model at hand is
//! larger than the room there is: then the part goes whose turn comes last, which is the one that was used last, and so a
//! fixed share stays where it is and the rest streams through. The layer at hand, the one before it (whose last operation may
//! not be launched yet) and those that are asked for ahead never leave.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::resident::{Loader, ResidentModel};
use super::snapshot::PartState;
use crate::backend::{Backend, BackendError, DeviceMemory, DeviceTensor, Weights};
use crate::cache::{CacheCounters, Candidate, Eviction, Held, Owner, Part, TensorCache, used_again_last};
use crate::model::{Model, ModelId};
use crate::program::{FIRST_PART, Tensor, TensorId};

/// Tensors of an expert, which find room together.
const EXPERT_TENSORS: usize = 3;

/// What is wanted of a model's place on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidencyRules {
    /// Its weights leave only when they are told to.
    pub pinned: bool,
    /// Weights of models of a lower priority leave first.
    pub priority: u8,
    /// So many of its first parts (the embedding, then layers) stay when others need room.
    pub parts_min: u32,
    /// Weights leave after the model was idle for this long.
    pub idle_max: Option<Duration>,
}

/// A part that left to make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gone {
    pub model: ModelId,
    pub part: u32,
    pub bytes: u64,
}

#[derive(Debug)]
struct Place {
    resident: ResidentModel,
    /// Tensors of each part.
    part_tensors: Vec<usize>,
    rules: ResidencyRules,
}

/// All models that have a place on one device.
#[derive(Debug, Default)]
pub(super) struct Residency {
    cache: TensorCache,
    places: BTreeMap<ModelId, Place>,
    eviction: Eviction,
    /// What arrived since somebody asked.
    came: Vec<Part>,
    /// What left since somebody asked.
    gone: Vec<Gone>,
    /// Parts that were told to leave while they were on their way: they go when they have come.
    unwanted: BTreeSet<Part>,
    /// Weights of a step found no room, with all gone that may go.
    starved: bool,
}

/// What came of looking for room.
#[derive(Clone, Debug)]
pub(super) enum RoomMade {
    /// A part was evicted.
    Evicted,
    /// All parts that may leave are in flight; this load is of one of them.
    InFlight(Arc<dyn DeviceMemory>),
    /// Nothing may leave.
    None,
}

/// What came of asking for a tensor that no step needs yet.
#[derive(Debug)]
pub(super) enum Asked {
    /// It is there or on its way.
    Loading(DeviceTensor),
    /// There is no room before this has come.
    After(Arc<dyn DeviceMemory>),
}

/// Parts of the model at hand that must stay, and the one at hand among them.
#[derive(Clone, Debug)]
pub(super) struct Window {
    pub model: ModelId,
    at: u32,
    parts: RangeInclusive<u32>,
}

impl Window {
    /// Around a part of a step, with those asked for up to `ahead` parts early.
    fn around(model: ModelId, at: u32, ahead: usize) -> Self {
        let ahead = u32::try_from(ahead).unwrap_or(u32::MAX);
        Self { model, at, parts: at.saturating_sub(1)..=at.saturating_add(ahead) }
    }

    /// Without the parts ahead: where there is no room for them.
    fn narrowed(&self) -> Self {
        Self { model: self.model, at: self.at, parts: self.at.saturating_sub(1)..=self.at }
    }

    /// Nothing of the model is in use: it is about to begin a step, or to be loaded.
    pub fn none(model: ModelId) -> Self {
        Self { model, at: FIRST_PART, parts: FIRST_PART..=FIRST_PART }
    }

    fn holds(&self, part: u32) -> bool {
        part == FIRST_PART || self.parts.contains(&part)
    }
}

fn owner(model: ModelId) -> Owner {
    Owner(model.0)
}

impl Residency {
    /// Gives a model a place, if it has none. Nothing is loaded.
    pub fn enter(&mut self, model: &Arc<Model>) {
        self.places.entry(model.id).or_insert_with(|| Place {
            resident: ResidentModel::new(Arc::clone(model)),
            part_tensors: model.plan.program.parts().iter().map(|part| part.tensors.len()).collect(),
            rules: ResidencyRules::default(),
        });
    }

    /// Takes a model's place away, and all its tensors.
    pub fn leave(&mut self, id: ModelId) {
        if let Some(place) = self.places.remove(&id) {
            for file in place.resident.model().files.mappings() {
                self.cache.clear_file(file);
            }
        }
        self.unwanted.retain(|part| part.owner != owner(id));
        self.eviction.forget(owner(id));
    }

    /// What is wanted for a model; changes count from the next eviction on.
    pub fn rules_mut(&mut self, id: ModelId) -> Option<&mut ResidencyRules> {
        self.places.get_mut(&id).map(|place| &mut place.rules)
    }

    /// What is wanted for a model.
    pub fn rules(&self, id: ModelId) -> ResidencyRules {
        self.places.get(&id).map(|place| place.rules).unwrap_or_default()
    }

    /// A model is used: by a step, or a load that was asked for.
    pub fn used(&mut self, id: ModelId) {
        self.eviction.used(owner(id));
    }

    /// True when a step needs no load.
    pub fn is_resolved(&self, id: ModelId) -> bool {
        self.places.get(&id).is_some_and(|place| place.resident.is_resolved())
    }

    /// After a step that failed: all handles are asked for anew, and what failed leaves nothing behind.
    pub fn forget_handles(&mut self, id: ModelId) {
        if let Some(place) = self.places.get_mut(&id) {
            place.resident.forget();
        }
        self.clear_failed();
    }

    /// Lets go of loads that failed. Between steps: models of one file share what is loaded, so all forget their handles of these
    /// parts, and ask for them anew.
    pub fn clear_failed(&mut self) {
        for part in self.cache.clear_failed() {
            self.places.values_mut().for_each(|place| place.resident.forget_part(part.number));
        }
    }

    /// What a model has on the device, by part.
    pub fn held(&self, id: ModelId) -> impl DoubleEndedIterator<Item = (u32, Held)> {
        self.cache.parts_of(owner(id))
    }

    /// What is held of a part.
    pub fn held_part(&self, part: Part) -> Held {
        self.cache.held(part)
    }

    /// How much of each part of a model's plan is on the device.
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

    /// Bytes of all models' weights on the device.
    pub fn device_bytes(&self) -> u64 {
        self.cache.device_bytes()
    }

    /// Sums of the cache.
    pub fn counters(&self) -> CacheCounters {
        self.cache.counters()
    }

    /// Parts whose last tensor arrived since the last time.
    pub fn take_came(&mut self) -> Vec<Part> {
        std::mem::take(&mut self.came)
    }

    /// Looks at what is on its way. What came and is not wanted any more goes.
    pub fn look(&mut self, backend: &mut dyn Backend) -> Result<(), BackendError> {
        for part in self.cache.look() {
            self.came.push(part);
            if self.unwanted.remove(&part) {
                self.evict(ModelId(part.owner.0), part.number, backend)?;
            }
        }
        Ok(())
    }

    /// Parts that left to make room since the last time.
    pub fn take_gone(&mut self) -> Vec<Gone> {
        std::mem::take(&mut self.gone)
    }

    /// Models in the order in which they would make room for `model`: the first to lose its weights first, pinned ones left out.
    pub fn order(&self, model: Option<ModelId>) -> Vec<ModelId> {
        let others = self.places.iter().filter(|(id, place)| Some(**id) != model && !place.rules.pinned);
        let mut candidates: Vec<Candidate> = others
            .map(|(id, place)| Candidate { owner: owner(*id), priority: place.rules.priority })
            .collect();
        self.eviction.order(&mut candidates);
        candidates.into_iter().map(|candidate| ModelId(candidate.owner.0)).collect()
    }

    /// Brings what a part of a step needs. Loads of later parts begin as many parts ahead as the backend finds worth it.
    ///
    /// # Errors
    /// [`BackendError`] of a load; out of memory only when nothing is left that could leave.
    pub fn bring(&mut self, id: ModelId, part: u32, backend: &mut dyn Backend) -> Result<(), BackendError> {
        if part == FIRST_PART {
            return self.resolve(&Window::none(id), FIRST_PART, backend);
        }
        if self.is_resolved(id) {
            return Ok(());
        }
        let last = self.places.get(&id).map_or(0, |place| place.resident.model().plan.program.head_part());
        let ahead = backend.parts_ahead();
        let window = Window::around(id, part, ahead);
        self.resolve(&window, part, backend)?;
        for later in part + 1..=last.min(part.saturating_add(ahead as u32)) {
            if !self.resolve_ahead(&window, later, backend)? {
                break;
            }
        }
        Ok(())
    }

    /// Brings experts of a part that rows of the step at hand have chosen.
    ///
    /// # Errors
    /// As [`Residency::bring`].
    pub fn bring_chosen(
        &mut self,
        id: ModelId,
        part: u32,
        chosen: &[TensorId],
        backend: &mut dyn Backend,
    ) -> Result<(), BackendError> {
        let window = Window::around(id, part, backend.parts_ahead());
        for one in chosen.chunks(EXPERT_TENSORS) {
            self.with_room(&window, part, backend, |resident, loader| {
                resident.resolve_chosen(part, one, loader)
            })?;
        }
        Ok(())
    }

    /// A model's tensors as far as they are here.
    ///
    /// # Errors
    /// [`BackendError::Batch`] for a model without a place.
    pub fn weights(&self, id: ModelId) -> Result<Weights<'_>, BackendError> {
        let place =
            self.places.get(&id).ok_or(BackendError::Batch("a model that has no place on the device"))?;
        Ok(place.resident.weights())
    }

    /// Resolves a part whose turn it is. Where there is no room for those ahead, they wait.
    fn resolve(&mut self, window: &Window, part: u32, backend: &mut dyn Backend) -> Result<(), BackendError> {
        if self.has(window.model, part) {
            return Ok(());
        }
        self.with_room(window, part, backend, |resident, loader| resident.resolve(part, loader))
    }

    fn has(&self, id: ModelId, part: u32) -> bool {
        self.places.get(&id).is_some_and(|place| place.resident.has(part))
    }

    /// Resolves a part whose turn is yet to come: false when there is no room for it now. What was begun of it stays.
    fn resolve_ahead(
        &mut self,
        window: &Window,
        part: u32,
        backend: &mut dyn Backend,
    ) -> Result<bool, BackendError> {
        while !self.has(window.model, part) {
            match self
                .try_load(window.model, part, backend, |resident, loader| resident.resolve(part, loader))
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

    /// Does `load` for a part at hand, as often as there is something that can make room for it.
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
                        // Begun again the step would send away what it has brought so far.
                        RoomMade::InFlight(load) => backend.until_decided(&load)?,
                        RoomMade::None => {
                            self.starved = true;
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
            return Err(BackendError::Batch("a model that has no place on the device"));
        };
        let part = Part { owner: place.resident.owner(), number: part };
        self.unwanted.remove(&part);
        load(&mut place.resident, &mut Loader { cache: &mut self.cache, backend, part })
    }

    /// Whether weights of the last step found no room, whatever left; asked once.
    pub fn take_starved(&mut self) -> bool {
        std::mem::take(&mut self.starved)
    }

    /// Loads one tensor of a part because it was asked for, not for a step.
    ///
    /// # Errors
    /// As [`Residency::bring`].
    pub fn load(
        &mut self,
        id: ModelId,
        part: u32,
        tensor: &Tensor,
        backend: &mut dyn Backend,
    ) -> Result<Asked, BackendError> {
        let part = Part { owner: owner(id), number: part };
        self.unwanted.remove(&part);
        if self.cache.has_failed(&tensor.lazy) {
            self.clear_failed();
        }
        loop {
            match self.cache.load(backend, tensor, part) {
                // What else is there of the model is as much asked for as this.
                Err(error) if error.is_out_of_memory() => match self.make_room_of_others(id, backend)? {
                    RoomMade::Evicted => {}
                    RoomMade::InFlight(load) => return Ok(Asked::After(load)),
                    RoomMade::None => return Err(error),
                },
                loaded => return loaded.map(Asked::Loading),
            }
        }
    }

    /// Sends one part away so that there is more room for the model at hand.
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
            let parts = self.cache.parts_of(owner(window.model));
            parts.filter(|(part, held)| held.bytes > 0 && !window.holds(*part))
        };
        let there = own().filter(|(_, held)| held.loading == 0).map(|(part, _)| part);
        if let Some(part) = used_again_last(there, window.at, head) {
            return self.evict(window.model, part, backend).map(|_| RoomMade::Evicted);
        }
        // Steps do not wait on the host: a part may have been used before it is known that it has arrived.
        let coming = own().find_map(|(part, _)| self.on_its_way(window.model, part));
        Ok(coming.map_or(others, RoomMade::InFlight))
    }

    fn on_its_way(&self, id: ModelId, part: u32) -> Option<Arc<dyn DeviceMemory>> {
        self.cache.on_its_way(Part { owner: owner(id), number: part })
    }

    fn make_room_of_others(
        &mut self,
        id: ModelId,
        backend: &mut dyn Backend,
    ) -> Result<RoomMade, BackendError> {
        self.look(backend)?;
        let mut coming = self.cache.departing();
        for other in self.order(Some(id)) {
            let least = self.rules(other).parts_min;
            let may_go = |(part, held): &(u32, Held)| held.bytes > 0 && *part >= least;
            let mut there = self.cache.parts_of(owner(other)).filter(may_go);
            if let Some((part, _)) = there.rfind(|(_, held)| held.loading == 0) {
                drop(there);
                self.evict(other, part, backend)?;
                return Ok(RoomMade::Evicted);
            }
            let mut may_go = self.cache.parts_of(owner(other)).filter(may_go);
            coming = coming.or_else(|| may_go.find_map(|(part, _)| self.on_its_way(other, part)));
        }
        Ok(coming.map_or(RoomMade::None, RoomMade::InFlight))
    }

    fn evict(&mut self, id: ModelId, part: u32, backend: &mut dyn Backend) -> Result<u64, BackendError> {
        backend.retire()?; // before the last handle drops
        if let Some(place) = self.places.get_mut(&id) {
            place.resident.forget_part(part);
        }
        let bytes = self.cache.evict(Part { owner: owner(id), number: part });
        tracing::debug!(model = id.0, part, bytes, "a part leaves the device");
        self.gone.push(Gone { model: id, part, bytes });
        Ok(bytes)
    }

    /// Sends a model's weights away; those on their way go when they have come. Bytes that the others took.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`].
    pub fn evict_model(&mut self, id: ModelId, backend: &mut dyn Backend) -> Result<u64, BackendError> {
        self.look(backend)?;
        let parts: Vec<(u32, Held)> = self.cache.parts_of(owner(id)).collect();
        let mut bytes = 0;
        for (part, held) in parts.into_iter().rev() {
            if held.loading > 0 {
                self.unwanted.insert(Part { owner: owner(id), number: part });
            } else {
                bytes += self.evict(id, part, backend)?;
            }
        }
        Ok(bytes)
    }
}
