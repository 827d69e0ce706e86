//! Tables of names and mappings, changed under the store's one lock. No code here opens a file or waits.

use std::collections::hash_map::HashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use super::directory::Entry;
use super::listing::{InTables, ModelStatus};
use super::{Identity, Model, ModelId, NAMES_MAX, OpenError, Passed, Source, StoreError, Unloaded};
use crate::model::pages::{HostPolicy, PageResidency};

/// The result of an opening, shared with its waiters.
pub(super) type Opened = OnceLock<Result<Arc<Model>, Arc<OpenError>>>;

/// Mappings removed from the tables. Unmapping gigabytes takes milliseconds, so drop this after the lock is released.
pub(super) type Gone = Vec<(ModelId, Slot)>;

/// A mapping, from its first request on.
pub(super) struct Slot {
    identity: Identity,
    state: SlotState,
    /// Requests that hold a lease or wait for the opening.
    pub(super) in_use: u32,
    /// No name keeps the mapping. A new request for the same file revives it.
    pub(super) retired: bool,
}

#[derive(Clone)]
pub(super) enum SlotState {
    Opening(Arc<Opened>),
    Ready(Arc<Model>),
}

impl Slot {
    /// A slot in the opening state, in use by its opener.
    pub(super) fn opening(identity: Identity, flight: Arc<Opened>) -> Self {
        Self { identity, state: SlotState::Opening(flight), in_use: 1, retired: false }
    }

    /// Total size of the files.
    pub(super) fn bytes(&self) -> u64 {
        self.identity.bytes()
    }

    pub(super) fn model(&self) -> Option<&Arc<Model>> {
        match &self.state {
            SlotState::Ready(model) => Some(model),
            SlotState::Opening(_) => None,
        }
    }
}

/// A directory's name.
struct Listed {
    entry: Entry,
    /// Identity of the file at the last request.
    seen: Option<Identity>,
    /// The error of that file's opening.
    failure: Option<String>,
}

/// Names and mappings.
pub(super) struct Tables {
    pub(super) directories: Vec<PathBuf>,
    listed: BTreeMap<String, Listed>,
    /// Files passed by descriptor, by uid and name.
    passed: BTreeMap<(u32, String), ModelId>,
    /// Passed names unloaded while requests still run. A uid has at most as many as it may pass.
    draining: BTreeMap<(u32, String), ModelId>,
    slots: HashMap<ModelId, Slot>,
    /// Passed files in memory, which are to go with their names.
    pub(super) in_memory: BTreeSet<ModelId>,
    /// The slot that serves new requests for a file.
    current: HashMap<Identity, ModelId>,
    /// The configured residency policy.
    pub(super) host: HostPolicy,
    /// Names locked on request: a directory's (`None`), or a uid's own.
    pinned: BTreeSet<(Option<u32>, String)>,
    /// Models retired since the last take; their pages need not stay in memory.
    pub(super) retired_pages: Vec<Arc<Model>>,
}

impl Tables {
    pub(super) fn new(directories: Vec<PathBuf>) -> Self {
        Self {
            directories,
            listed: BTreeMap::new(),
            passed: BTreeMap::new(),
            draining: BTreeMap::new(),
            slots: HashMap::new(),
            in_memory: BTreeSet::new(),
            current: HashMap::new(),
            host: HostPolicy::default(),
            pinned: BTreeSet::new(),
            retired_pages: Vec::new(),
        }
    }

    pub(super) fn resolve(&self, uid: u32, name: &str) -> Option<Source> {
        if let Some(id) = self.passed.get(&(uid, name.to_owned())) {
            return Some(Source::Passed(*id));
        }
        self.listed.get(name).map(|listed| Source::Directory(listed.entry.clone()))
    }

    /// The directories' names and files.
    pub(super) fn entries(&self) -> Vec<(String, Entry)> {
        self.listed.iter().map(|(name, listed)| (name.clone(), listed.entry.clone())).collect()
    }

    /// Replaces the directories' entries by a new scan. Retires models whose file was removed.
    pub(super) fn replace_entries(&mut self, entries: BTreeMap<String, Entry>) -> Gone {
        let mut old = std::mem::take(&mut self.listed);
        for (name, entry) in entries {
            let before = old.remove(&name);
            let (seen, failure) = before.map_or((None, None), |listed| (listed.seen, listed.failure));
            self.listed.insert(name, Listed { entry, seen, failure });
        }
        let lost: Vec<Identity> = old.into_values().filter_map(|listed| listed.seen).collect();
        lost.into_iter().flat_map(|identity| self.retire_unnamed(&identity)).collect()
    }

    /// Records a name's current file and retires the mapping of its previous file.
    pub(super) fn seen(&mut self, name: &str, identity: &Identity) -> Gone {
        let Some(listed) = self.listed.get_mut(name) else { return Vec::new() };
        match listed.seen.replace(identity.clone()) {
            Some(before) if before != *identity => self.retire_unnamed(&before),
            _ => Vec::new(),
        }
    }

    pub(super) fn note_failure(&mut self, name: &str, identity: &Identity, error: Option<&StoreError>) {
        if let Some(listed) = self.listed.get_mut(name)
            && listed.seen.as_ref() == Some(identity)
        {
            listed.failure = error.map(ToString::to_string);
        }
    }

    pub(super) fn current(&self, identity: &Identity) -> Option<(ModelId, SlotState)> {
        let by_identity = self.current.get(identity).copied();
        // Prefer a retired mapping of the same file over a second mapping.
        let id = by_identity.or_else(|| {
            let whole = |model: &Arc<Model>| model.files.check_poison().is_ok();
            self.slots
                .iter()
                .find(|(_, s)| s.identity == *identity && s.model().is_some_and(whole))
                .map(|(id, _)| *id)
        })?;
        self.slots.get(&id).map(|slot| (id, slot.state.clone()))
    }

    /// Identity of a directory's file at the last request.
    pub(super) fn seen_at(&self, name: &str) -> Option<&Identity> {
        self.listed.get(name).filter(|listed| !listed.entry.incomplete)?.seen.as_ref()
    }

    /// The mapping that serves new requests for a file.
    pub(super) fn current_id(&self, identity: &Identity) -> Option<ModelId> {
        self.current.get(identity).copied()
    }

    /// True if these files are mapped, and whole as far as is known.
    pub(super) fn is_ready(&self, identity: &Identity) -> bool {
        let current = self.current(identity);
        matches!(current, Some((_, SlotState::Ready(model))) if model.files.check_poison().is_ok())
    }

    /// Requests that use a mapping or wait for it.
    pub(super) fn in_use(&self, id: ModelId) -> u32 {
        self.slots.get(&id).map_or(0, |slot| slot.in_use)
    }

    pub(super) fn ready(&self, id: ModelId) -> Option<Arc<Model>> {
        self.slots.get(&id).and_then(Slot::model).cloned()
    }

    pub(super) fn insert(&mut self, id: ModelId, slot: Slot) {
        self.current.insert(slot.identity.clone(), id);
        self.slots.insert(id, slot);
    }

    /// Marks a slot as ready.
    pub(super) fn opened(&mut self, id: ModelId, model: &Arc<Model>) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        slot.state = SlotState::Ready(Arc::clone(model));
        if slot.retired {
            self.not_current(id);
        }
    }

    /// Removes a slot whose opening failed. No request holds a lease on it; all waiters get the error.
    pub(super) fn failed(&mut self, id: ModelId) {
        self.remove(id);
    }

    fn remove(&mut self, id: ModelId) -> Gone {
        self.not_current(id);
        self.draining.retain(|_, draining| *draining != id);
        self.slots.remove(&id).map(|slot| (id, slot)).into_iter().collect()
    }

    fn not_current(&mut self, id: ModelId) {
        if let Some(slot) = self.slots.get(&id)
            && self.current.get(&slot.identity) == Some(&id)
        {
            let identity = slot.identity.clone();
            self.current.remove(&identity);
        }
    }

    /// Adds a request to the slot and revives a retired one. Returns false when the slot is gone.
    pub(super) fn revive_and_use(&mut self, id: ModelId) -> bool {
        let Some(slot) = self.slots.get_mut(&id) else { return false };
        slot.in_use += 1;
        slot.retired = false;
        self.current.entry(slot.identity.clone()).or_insert(id);
        true
    }

    pub(super) fn release(&mut self, id: ModelId) -> Gone {
        let Some(slot) = self.slots.get_mut(&id) else { return Vec::new() };
        slot.in_use = slot.in_use.saturating_sub(1);
        self.sweep(id)
    }

    /// Stops new requests for a mapping. Its users and waiters finish. Returns the mappings that are gone.
    pub(super) fn retire(&mut self, id: ModelId) -> Gone {
        let Some(slot) = self.slots.get_mut(&id) else { return Vec::new() };
        slot.retired = true;
        // An opening stays current: otherwise the next request for the same file would open it again.
        let model = slot.model().cloned();
        if model.is_some() {
            self.not_current(id);
        }
        let gone = self.sweep(id);
        // A mapping that is gone frees its pages itself.
        self.retired_pages.extend(model.filter(|_| gone.is_empty()));
        gone
    }

    /// Removes a slot that no request uses and no name keeps. This one rule covers all ways to lose the names or to
    /// never get one. Examples are a quota that filled meanwhile, or a name that vanished during the opening. The last
    /// user removes the slot.
    fn sweep(&mut self, id: ModelId) -> Gone {
        let Some(slot) = self.slots.get(&id) else { return Vec::new() };
        if slot.in_use > 0 || self.passed.values().any(|passed| *passed == id) {
            return Vec::new();
        }
        // Up to `NAMES_MAX` comparisons, about 10 us, and only when no request uses the model.
        if !slot.retired && self.is_seen(&slot.identity) {
            return Vec::new();
        }
        self.remove(id)
    }

    /// True when a directory's name refers to that file.
    fn is_seen(&self, identity: &Identity) -> bool {
        self.listed.values().any(|listed| listed.seen.as_ref() == Some(identity))
    }

    /// Retires the mapping of a file that no name refers to any more.
    fn retire_unnamed(&mut self, identity: &Identity) -> Gone {
        let Some(id) = self.current.get(identity).copied() else { return Vec::new() };
        let passed = self.passed.values().any(|passed| *passed == id);
        if passed || self.is_seen(identity) { Vec::new() } else { self.retire(id) }
    }

    pub(super) fn may_pass(&self, uid: u32, name: &str, limit: u32) -> bool {
        let passed = of_uid(&self.passed, uid).count() as u64;
        self.passed.contains_key(&(uid, name.to_owned())) || passed < u64::from(limit)
    }

    /// Gives a passed file a name and retires the name's previous mapping.
    pub(super) fn set_passed(&mut self, uid: u32, name: &str, id: ModelId) -> Gone {
        self.draining.remove(&(uid, name.to_owned()));
        match self.passed.insert((uid, name.to_owned()), id) {
            Some(before) if before != id => self.unnamed(before),
            _ => Vec::new(),
        }
    }

    /// Handles a mapping that lost a passed name.
    fn unnamed(&mut self, id: ModelId) -> Gone {
        let Some(slot) = self.slots.get(&id) else { return Vec::new() };
        let identity = slot.identity.clone();
        if slot.retired { self.sweep(id) } else { self.retire_unnamed(&identity) }
    }

    /// Unloads a name. At most `draining_max` names of a uid stay listed while they drain.
    pub(super) fn unload(
        &mut self,
        uid: u32,
        manages: bool,
        name: &str,
        draining_max: u32,
    ) -> Result<(Unloaded, Gone), StoreError> {
        if let Some(unloaded) = self.unload_own(uid, name, draining_max) {
            return Ok(unloaded);
        }
        let listed = self.listed.get(name).ok_or_else(|| StoreError::NotFound { name: name.into() })?;
        let id = self.current_of(listed);
        let Some((id, slot)) = id.and_then(|id| Some((id, self.slots.get(&id)?))) else {
            return Ok((Unloaded { was_mapped: false, in_use: 0 }, Vec::new()));
        };
        if !manages {
            return Err(StoreError::NotYours { name: name.into() });
        }
        let in_use = slot.in_use;
        if self.passed.values().any(|passed| *passed == id) {
            return Ok((Unloaded { was_mapped: true, in_use: 0 }, Vec::new()));
        }
        Ok((Unloaded { was_mapped: true, in_use }, self.retire(id)))
    }

    /// Unloads a name of a passed file; `None` if the uid has none of that name.
    pub(super) fn unload_own(&mut self, uid: u32, name: &str, draining_max: u32) -> Option<(Unloaded, Gone)> {
        let own = (uid, name.to_owned());
        let id = self.passed.remove(&own)?;
        let was_mapped = self.slots.contains_key(&id);
        let gone = self.unnamed(id);
        let in_use = self.slots.get(&id).filter(|slot| slot.retired).map_or(0, |slot| slot.in_use);
        if in_use > 0 && (of_uid(&self.draining, uid).count() as u64) < u64::from(draining_max) {
            self.draining.insert(own, id);
        }
        Some((Unloaded { was_mapped, in_use }, gone))
    }

    /// The mapped models that are passed files in memory.
    pub(super) fn all_in_memory(&mut self) -> Vec<Arc<Model>> {
        let slots = &self.slots;
        self.in_memory.retain(|id| slots.contains_key(id));
        self.in_memory.iter().filter_map(|id| self.ready(*id)).collect()
    }

    /// Takes all passed names of a mapping away. Its users finish.
    pub(super) fn unload_passed(&mut self, id: ModelId) -> (Vec<(u32, String)>, Gone) {
        let names: Vec<_> =
            self.passed.iter().filter(|(_, passed)| **passed == id).map(|(name, _)| name.clone()).collect();
        for (uid, name) in &names {
            self.unpin(*uid, name);
            self.passed.remove(&(*uid, name.clone()));
        }
        let gone = if names.is_empty() { Vec::new() } else { self.unnamed(id) };
        (names, gone)
    }

    /// The key of a name in `pinned`: the uid's own name before a directory's.
    fn pin_key(&self, uid: u32, name: &str) -> (Option<u32>, String) {
        let own = self.passed.contains_key(&(uid, name.to_owned()));
        (own.then_some(uid), name.to_owned())
    }

    /// Pins a name; false when too many are pinned.
    pub(super) fn pin(&mut self, uid: u32, name: &str) -> bool {
        let key = self.pin_key(uid, name);
        let room = self.pinned.len() < NAMES_MAX || self.pinned.contains(&key);
        if room {
            self.pinned.insert(key);
        }
        room
    }

    /// Unpins a name; true when it was pinned.
    pub(super) fn unpin(&mut self, uid: u32, name: &str) -> bool {
        let key = self.pin_key(uid, name);
        // A just unloaded passed name is no longer the uid's own, so its key is removed too.
        self.pinned.remove(&key) | self.pinned.remove(&(Some(uid), key.1))
    }

    pub(super) fn pinned_names(&self) -> Vec<(Option<u32>, String)> {
        self.pinned.iter().cloned().collect()
    }

    pub(super) fn all_passed(&self) -> Vec<Passed> {
        let passed = self.passed.iter().filter_map(|((uid, name), id)| {
            let model = Arc::clone(self.slots.get(id)?.model()?);
            Some(Passed { uid: *uid, name: name.clone(), model })
        });
        passed.collect()
    }

    pub(super) fn mapped_names(&self) -> Vec<(Option<u32>, String, ModelId)> {
        let own = self.passed.iter().map(|((uid, name), id)| (Some(*uid), name.clone(), *id));
        let listed = self
            .listed
            .iter()
            .filter_map(|(name, listed)| Some((None, name.clone(), self.current_of(listed)?)));
        own.chain(listed).collect()
    }

    /// The wanted residency of the named model.
    pub(super) fn residency(&self, uid: u32, name: &str) -> PageResidency {
        self.residency_by(&self.pin_key(uid, name))
    }

    fn residency_by(&self, key: &(Option<u32>, String)) -> PageResidency {
        if self.pinned.contains(key) {
            return PageResidency::Lock;
        }
        match key.0 {
            Some(_) => self.host.residency.min(PageResidency::Populate),
            None => self.host.models.get(&key.1).copied().unwrap_or(self.host.residency),
        }
    }

    /// Every mapped model with the highest residency that its names want.
    pub(super) fn wanted_pages(&self) -> Vec<(Arc<Model>, PageResidency)> {
        let mut wanted: HashMap<ModelId, PageResidency> = HashMap::new();
        let mut raise = |id: ModelId, residency: PageResidency| {
            let entry = wanted.entry(id).or_default();
            *entry = residency.max(*entry);
        };
        for (name, listed) in &self.listed {
            if let Some(id) = listed.seen.as_ref().and_then(|identity| self.current.get(identity)) {
                raise(*id, self.residency_by(&(None, name.clone())));
            }
        }
        for ((uid, name), id) in &self.passed {
            raise(*id, self.residency_by(&(Some(*uid), name.clone())));
        }
        let ready = self.slots.iter().filter_map(|(id, slot)| Some((id, slot.model()?)));
        ready.map(|(id, model)| (Arc::clone(model), wanted.get(id).copied().unwrap_or_default())).collect()
    }

    /// The mapped model of a name.
    pub(super) fn mapped_by(&self, uid: u32, name: &str) -> Option<&Arc<Model>> {
        let listed = || self.listed.get(name)?.seen.as_ref().and_then(|identity| self.current.get(identity));
        let id = self.passed.get(&(uid, name.to_owned())).or_else(listed)?;
        self.slots.get(id)?.model()
    }

    /// All mapped models, retired ones included.
    pub(super) fn mapped_models(&self) -> Vec<Arc<Model>> {
        self.slots.values().filter_map(Slot::model).cloned().collect()
    }

    /// Mapped models that no request uses.
    pub(super) fn idle(&self) -> Vec<Arc<Model>> {
        self.slots.values().filter(|slot| slot.in_use == 0).filter_map(Slot::model).cloned().collect()
    }

    pub(super) fn owned(
        &self,
        uid: u32,
        manages: bool,
        name: &str,
    ) -> Result<Option<Arc<Model>>, StoreError> {
        let id = match (self.passed.get(&(uid, name.to_owned())), self.listed.get(name)) {
            (Some(id), _) => Some(*id),
            (None, Some(listed)) => self.current_of(listed),
            (None, None) => return Err(StoreError::NotFound { name: name.into() }),
        };
        match id.and_then(|id| self.slots.get(&id)) {
            Some(slot) if !manages && !self.has_alone(uid, slot) => {
                Err(StoreError::NotYours { name: name.into() })
            }
            slot => Ok(slot.and_then(Slot::model).cloned()),
        }
    }

    /// True if all names of a mapping are names under which that uid passed it.
    fn has_alone(&self, uid: u32, slot: &Slot) -> bool {
        let id = self.current.get(&slot.identity);
        let mut owners =
            self.passed.iter().filter(|(_, passed)| Some(*passed) == id).map(|((owner, _), _)| *owner);
        !self.is_seen(&slot.identity) && owners.all(|owner| owner == uid)
    }

    /// The current mapping of a directory's name.
    fn current_of(&self, listed: &Listed) -> Option<ModelId> {
        listed.seen.as_ref().and_then(|identity| self.current.get(identity)).copied()
    }

    pub(super) fn names_of(
        &self,
        uid: u32,
        administrator: bool,
        ids: &[ModelId],
    ) -> HashMap<ModelId, String> {
        let mut names = HashMap::new();
        let mut name = |id: ModelId, name: &str| {
            if ids.contains(&id) {
                names.entry(id).or_insert_with(|| name.to_owned());
            }
        };
        let passed = || self.passed.iter().chain(&self.draining);
        passed().filter(|((owner, _), _)| *owner == uid).for_each(|((_, own), id)| name(*id, own));
        for (public, listed) in &self.listed {
            if let Some(id) = self.current_of(listed) {
                name(id, public);
            }
        }
        if administrator {
            passed().for_each(|((_, other), id)| name(*id, other));
        }
        names
    }

    pub(super) fn names(&self) -> usize {
        self.listed.len()
    }

    pub(super) fn mapped(&self) -> usize {
        self.slots.values().filter(|slot| slot.model().is_some()).count()
    }

    pub(super) fn list(&self, uid: u32) -> Vec<InTables> {
        let mut all: BTreeMap<&String, InTables> = BTreeMap::new();
        for (name, listed) in &self.listed {
            all.insert(name, self.listed_listing(name, listed));
        }
        for (name, id) in of_uid(&self.passed, uid) {
            all.insert(name, self.passed_listing(name, id));
        }
        for (name, id) in of_uid(&self.draining, uid) {
            if let Some(listing) = self.draining_listing(name, id) {
                all.entry(name).or_insert(listing);
            }
        }
        all.into_values().collect()
    }

    pub(super) fn listing(&self, uid: u32, name: &str) -> Option<InTables> {
        let own = (uid, name.to_owned());
        if let Some(id) = self.passed.get(&own) {
            return Some(self.passed_listing(name, *id));
        }
        let listed = self.listed.get(name).map(|listed| self.listed_listing(name, listed));
        listed.or_else(|| self.draining_listing(name, *self.draining.get(&own)?))
    }

    /// `None` where another name keeps the mapping.
    fn draining_listing(&self, name: &str, id: ModelId) -> Option<InTables> {
        self.slots.get(&id).filter(|slot| slot.retired).map(|slot| InTables::of_slot(name, slot))
    }

    fn passed_listing(&self, name: &str, id: ModelId) -> InTables {
        match self.slots.get(&id) {
            Some(slot) => InTables::of_slot(name, slot),
            None => InTables::unmapped(name, 0, ModelStatus::Unusable, "the mapping is gone: load it again"),
        }
    }

    fn listed_listing(&self, name: &str, listed: &Listed) -> InTables {
        let slot = listed.seen.as_ref().and_then(|identity| {
            let current = self.current.get(identity).and_then(|id| self.slots.get(id));
            current.or_else(|| self.slots.values().find(|slot| slot.identity == *identity))
        });
        let bytes = listed.entry.bytes;
        let found = match (slot, listed.entry.unusable.as_ref().or(listed.failure.as_ref())) {
            (Some(slot), _) => InTables::of_slot(name, slot),
            (None, Some(reason)) => InTables::unmapped(name, bytes, ModelStatus::Unusable, reason),
            (None, None) => InTables::unmapped(name, bytes, ModelStatus::Registered, ""),
        };
        InTables { directory: Some(listed.entry.device), ..found }
    }
}

/// The uid's own entries of `names`.
fn of_uid(names: &BTreeMap<(u32, String), ModelId>, uid: u32) -> impl Iterator<Item = (&String, ModelId)> {
    names.range((uid, String::new())..).take_while(move |((u, _), _)| *u == uid).map(|((_, n), id)| (n, *id))
}
