//! Tracks the tensors that a device holds: each is loaded once, by one loader, when first needed.
//!
//! A tensor's life on a device: `Absent -> Loading -> Resident -> Absent`. A failed load leaves it absent, and the next
//! request tries again. The engine thread that owns the device owns its cache too, so there is no lock and no second
//! loader. All callers for a loading tensor get the same handle and wait for it.
//!
//! Tensors are loaded one by one and evicted by [`PartId`]: a layer that lacks one tensor is useless. `eviction` picks
//! the part.

mod eviction;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

pub use eviction::{Candidate, Eviction, used_again_last};

use crate::backend::{Backend, BackendError, DeviceMemory, DeviceTensor, LoadState, Storage};
use crate::program::{ModelId, PartId, Residence, Tensor};
use crate::tensor::{LazyTensor, MappedFile};

/// Counters of a cache since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Loads begun.
    pub loads: u64,
    /// Device bytes that these loads took.
    pub load_bytes: u64,
    /// Requests for tensors that were resident or in flight.
    pub hits: u64,
    /// Parts of models evicted: to make room, by a model's idle rule, or on request.
    pub evictions: u64,
    /// Device bytes freed by these evictions.
    pub evicted_bytes: u64,
}

/// Lookups of a request's steps in a cache. A step of a model whose handles are all known makes none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookups {
    /// Tensors that were resident or in flight.
    pub hits: u64,
    /// Tensors whose loads began.
    pub loads: u64,
    /// Device bytes that these loads took.
    pub load_bytes: u64,
}

impl CacheCounters {
    /// The lookups since an earlier state of the counters.
    pub fn since(&self, before: &Self) -> Lookups {
        Lookups {
            hits: self.hits - before.hits,
            loads: self.loads - before.loads,
            load_bytes: self.load_bytes - before.load_bytes,
        }
    }
}

impl std::ops::AddAssign for Lookups {
    fn add_assign(&mut self, more: Self) {
        self.hits += more.hits;
        self.loads += more.loads;
        self.load_bytes += more.load_bytes;
    }
}

/// Tensors and bytes of a part on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Bytes of device memory, with those of loads in flight.
    pub bytes: u64,
    /// Tensors that are resident or in flight.
    pub tensors: usize,
    /// Tensors in flight, as of the last [`TensorCache::look`].
    pub loading: usize,
}

/// The table of one device: the only record of what is loaded on it.
#[derive(Debug, Default)]
pub struct TensorCache {
    resident: HashMap<Key, Entry>,
    parts: BTreeMap<PartId, Members>,
    /// Entries in flight at the last look.
    on_the_way: Vec<Key>,
    /// Tensors evicted while loading; their memory is freed when the load completes.
    departing: Vec<Weak<dyn DeviceMemory>>,
    counters: CacheCounters,
    device_bytes: u64,
}

#[derive(Debug)]
struct Entry {
    tensor: DeviceTensor,
    part: PartId,
}

#[derive(Debug, Default)]
struct Members {
    held: Held,
    keys: Vec<Key>,
}

/// A tensor is identified by its bytes. So a tied output matrix is the embedding where both are used alike, and a part
/// of a tensor differs from the whole. An entry keeps its mapping alive, so no other mapping can reuse its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    mapping: usize,
    start: u64,
    end: u64,
    /// The host reads the tensor in the file.
    host: bool,
}

/// Logs the start of a tensor's load.
fn begins(tensor: &LazyTensor, part: PartId) {
    let (tensor, bytes) = (tensor.name(), tensor.range().end - tensor.range().start);
    tracing::debug!(tensor, bytes, model = part.model.0, part = part.part, "a tensor's load begins");
}

impl Key {
    fn of(tensor: &LazyTensor, host: bool) -> Self {
        let bytes = tensor.range();
        Self { mapping: address(tensor.file()), start: bytes.start, end: bytes.end, host }
    }
}

fn address(file: &Arc<MappedFile>) -> usize {
    Arc::as_ptr(file).addr()
}

impl TensorCache {
    /// An empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the tensor on the device. Starts its load for `part` if it is neither resident nor in flight. A tensor
    /// that the host reads stays in the file. A hit costs one lookup; the handle is cheap to clone.
    ///
    /// # Errors
    /// [`BackendError`] of the load; the tensor stays absent.
    pub fn load(
        &mut self,
        backend: &mut dyn Backend,
        tensor: &Tensor,
        part: PartId,
    ) -> Result<DeviceTensor, BackendError> {
        let lazy = &tensor.lazy;
        self.load_with(Key::of(lazy, tensor.residence == Residence::Host), part, || {
            begins(lazy, part);
            match tensor.residence {
                Residence::Host => Ok(DeviceTensor { tensor: lazy.clone(), storage: Storage::InPlace }),
                Residence::Device | Residence::Chosen => backend.load_tensor(lazy),
            }
        })
    }

    /// The tensor on the device if its load is complete. Costs one lookup, and counts nothing.
    pub fn resident(&self, tensor: &Tensor) -> Option<DeviceTensor> {
        let entry = self.resident.get(&Key::of(&tensor.lazy, tensor.residence == Residence::Host))?;
        matches!(entry.tensor.state(), LoadState::Resident).then(|| entry.tensor.clone())
    }

    fn load_with(
        &mut self,
        key: Key,
        part: PartId,
        load: impl FnOnce() -> Result<DeviceTensor, BackendError>,
    ) -> Result<DeviceTensor, BackendError> {
        if let Some(there) = self.resident.get(&key) {
            if !matches!(there.tensor.state(), LoadState::Failed(_)) {
                self.counters.hits += 1;
                let (tensor, model) = (there.tensor.tensor.name(), part.model.0);
                tracing::debug!(tensor, model, part = part.part, "a tensor was there");
                return Ok(there.tensor.clone());
            }
            self.remove(&key); // before the new load: there may be room for only one copy
        }
        let loaded = load()?;
        let bytes = loaded.device_bytes();
        self.counters.loads += 1;
        self.counters.load_bytes += bytes;
        self.device_bytes += bytes;
        let members = self.parts.entry(part).or_default();
        members.held.bytes += bytes;
        members.held.tensors += 1;
        members.keys.push(key);
        if matches!(loaded.state(), LoadState::Loading) {
            members.held.loading += 1;
            self.on_the_way.push(key);
        }
        self.resident.insert(key, Entry { tensor: loaded.clone(), part });
        Ok(loaded)
    }

    fn remove(&mut self, key: &Key) {
        let Some(Entry { tensor, part }) = self.resident.remove(key) else { return };
        let bytes = tensor.device_bytes();
        self.device_bytes -= bytes;
        let was_loading = self.on_the_way.iter().position(|other| other == key);
        if let Some(at) = was_loading {
            self.on_the_way.swap_remove(at);
            if let Storage::Device(memory) = &tensor.storage {
                self.departing.push(Arc::downgrade(memory));
            }
        }
        if let Some(members) = self.parts.get_mut(&part) {
            members.held.bytes -= bytes;
            members.held.tensors -= 1;
            members.held.loading -= usize::from(was_loading.is_some());
            members.keys.retain(|other| other != key);
            if members.keys.is_empty() {
                self.parts.remove(&part);
            }
        }
    }

    fn remove_all(&mut self, gone: impl Fn(&Key, &Entry) -> bool) -> usize {
        let keys: Vec<Key> =
            self.resident.iter().filter(|(key, entry)| gone(key, entry)).map(|(key, _)| *key).collect();
        keys.iter().for_each(|key| self.remove(key));
        keys.len()
    }

    /// Updates the loads in flight; returns the parts whose last tensor completed since the last call.
    pub fn look(&mut self) -> Vec<PartId> {
        let (mut left, mut arrived) = (Vec::new(), Vec::new());
        for key in std::mem::take(&mut self.on_the_way) {
            let Some(entry) = self.resident.get(&key) else { continue };
            if matches!(entry.tensor.state(), LoadState::Loading) {
                left.push(key);
                continue;
            }
            if let Some(members) = self.parts.get_mut(&entry.part) {
                members.held.loading -= 1;
                if members.held.loading == 0 {
                    arrived.push(entry.part);
                }
            }
        }
        self.on_the_way = left;
        let on_its_way = |memory: &Weak<dyn DeviceMemory>| {
            memory.upgrade().is_some_and(|memory| matches!(memory.state(), LoadState::Loading))
        };
        self.departing.retain(on_its_way);
        arrived
    }

    /// Memory of one tensor of `part` that was in flight at the last [`TensorCache::look`].
    pub fn on_its_way(&self, part: PartId) -> Option<Arc<dyn DeviceMemory>> {
        let entries = self.on_the_way.iter().filter_map(|key| self.resident.get(key));
        entries.filter(|entry| entry.part == part).find_map(|entry| match &entry.tensor.storage {
            Storage::Device(memory) => Some(Arc::clone(memory)),
            Storage::InPlace => None,
        })
    }

    /// Memory of one tensor that was evicted while loading and still holds its memory.
    pub fn departing(&self) -> Option<Arc<dyn DeviceMemory>> {
        self.departing.iter().find_map(Weak::upgrade)
    }

    /// Evicts tensors whose loads failed. Returns the parts they were loaded for, possibly with repeats.
    pub fn clear_failed(&mut self) -> Vec<PartId> {
        let failed = |entry: &&Entry| matches!(entry.tensor.state(), LoadState::Failed(_));
        let parts = self.resident.values().filter(failed).map(|entry| entry.part).collect();
        self.remove_all(|_, entry| failed(&entry));
        parts
    }

    /// True if the last load of a tensor failed and the failed entry is still in the table.
    pub fn has_failed(&self, tensor: &LazyTensor) -> bool {
        let there = self.resident.get(&Key::of(tensor, false));
        there.is_some_and(|entry| matches!(entry.tensor.state(), LoadState::Failed(_)))
    }

    /// Evicts all tensors of a file; their memory is free once the last handle drops. Returns how many.
    pub fn clear_file(&mut self, file: &Arc<MappedFile>) -> usize {
        let mapping = address(file);
        self.remove_all(|key, _| key.mapping == mapping)
    }

    /// Evicts a part, and counts that if it held anything. Returns its bytes, which are free once the last handle
    /// drops.
    pub fn evict(&mut self, part: PartId) -> u64 {
        let Some(members) = self.parts.get(&part) else { return 0 };
        let (bytes, keys) = (members.held.bytes, members.keys.clone());
        keys.iter().for_each(|key| self.remove(key));
        self.counters.evictions += 1;
        self.counters.evicted_bytes += bytes;
        bytes
    }

    /// A model's tensors and bytes on the device, by part, in the order of use.
    pub fn parts_of(&self, model: ModelId) -> impl DoubleEndedIterator<Item = (u32, Held)> {
        let all = PartId { model, part: 0 }..=PartId { model, part: u32::MAX };
        self.parts.range(all).map(|(part, members)| (part.part, members.held))
    }

    /// Tensors and bytes of a part on the device.
    pub fn held(&self, part: PartId) -> Held {
        self.parts.get(&part).map(|members| members.held).unwrap_or_default()
    }

    /// Device bytes that the tensors take beyond their mappings.
    pub fn device_bytes(&self) -> u64 {
        self.device_bytes
    }

    /// Counters since the cache's creation.
    pub fn counters(&self) -> CacheCounters {
        self.counters
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::backend::cpu::{CpuBackend, CpuOptions};
    use crate::tensor::{DType, Shape};

    fn backend() -> CpuBackend {
        CpuBackend::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap()
    }

    fn file() -> Arc<MappedFile> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[0; 4096]).unwrap();
        MappedFile::map(std::fs::File::open(file.path()).unwrap()).unwrap()
    }

    const PART: PartId = PartId { model: ModelId(1), part: 0 };

    /// Tensors of the two models of these tests.
    fn tensors(cache: &TensorCache) -> usize {
        [1, 2]
            .into_iter()
            .flat_map(|model| cache.parts_of(ModelId(model)))
            .map(|(_, held)| held.tensors)
            .sum()
    }

    fn tensor(file: &Arc<MappedFile>, name: &str, start: u64, dtype: DType) -> Tensor {
        let shape = Shape::new(&[256]).unwrap();
        let end = start + dtype.row_bytes(256).unwrap();
        let lazy = LazyTensor::new(name, dtype, shape, start..end, Arc::clone(file)).unwrap();
        Tensor { lazy, residence: Residence::Device }
    }

    #[test]
    fn a_tensor_is_loaded_once_and_a_tied_one_is_the_same() {
        let (mut cache, mut backend, file) = (TensorCache::new(), backend(), file());
        let embedding = tensor(&file, "token_embd.weight", 0, DType::F32);
        let tied = tensor(&file, "token_embd.weight", 0, DType::F32);
        let other = tensor(&file, "output_norm.weight", 1024, DType::F32);
        for tensor in [&embedding, &tied, &other, &embedding] {
            let loaded = cache.load(&mut backend, tensor, PART).unwrap();
            assert_eq!(loaded.tensor.range(), tensor.lazy.range());
        }
        assert_eq!(cache.counters(), CacheCounters { loads: 2, hits: 2, ..CacheCounters::default() });
        assert_eq!((tensors(&cache), cache.device_bytes()), (2, 0), "the CPU reads in place");
    }

    #[test]
    fn a_failed_load_leaves_the_tensor_absent() {
        let (mut cache, mut backend, file) = (TensorCache::new(), backend(), file());
        let tensor = tensor(&file, "blk.0.ffn_up.weight", 0, DType::Q8_K);
        for _ in 0..2 {
            let error = cache.load(&mut backend, &tensor, PART).unwrap_err();
            assert!(matches!(error, BackendError::Unsupported { dtype: DType::Q8_K, .. }), "{error}");
        }
        assert_eq!((tensors(&cache), cache.counters()), (0, CacheCounters::default()));
    }

    #[test]
    fn a_model_is_dropped_without_the_others() {
        let (mut cache, mut backend, files) = (TensorCache::new(), backend(), [file(), file()]);
        for file in &files {
            for start in [0, 1024] {
                cache.load(&mut backend, &tensor(file, "t", start, DType::F32), PART).unwrap();
            }
        }
        let handles = files.each_ref().map(Arc::strong_count);
        assert_eq!(cache.clear_file(&files[0]), 2);
        assert_eq!(tensors(&cache), 2);
        assert_eq!(Arc::strong_count(&files[0]), handles[0] - 2, "the mapping is dropped");
        assert_eq!(Arc::strong_count(&files[1]), handles[1]);
        assert_eq!((cache.clear_file(&files[0]), cache.counters().loads), (0, 4));
    }

    /// A copy that completes when the test says so.
    #[derive(Debug, Default)]
    struct Copy(std::sync::atomic::AtomicBool);

    impl DeviceMemory for Copy {
        fn bytes(&self) -> u64 {
            1024
        }
        fn address(&self) -> u64 {
            0
        }
        fn state(&self) -> LoadState {
            match self.0.load(std::sync::atomic::Ordering::Relaxed) {
                true => LoadState::Resident,
                false => LoadState::Loading,
            }
        }
        fn when_decided(&self, _: Box<dyn FnOnce() + Send>) {}
    }

    #[test]
    fn a_tensor_evicted_in_flight_has_memory_until_its_load_ends() {
        let (mut cache, file) = (TensorCache::new(), file());
        let tensor = tensor(&file, "t", 0, DType::F32).lazy;
        let copy = Arc::new(Copy::default());
        let storage = Storage::Device(Arc::clone(&copy) as _);
        let loaded = DeviceTensor { tensor: tensor.clone(), storage };
        cache.load_with(Key::of(&tensor, false), PART, || Ok(loaded)).unwrap();
        let other = PartId { part: 1, ..PART };
        assert!(cache.on_its_way(PART).is_some() && cache.on_its_way(other).is_none());
        assert!(cache.departing().is_none(), "it was not evicted");
        cache.clear_file(&file);
        assert_eq!((tensors(&cache), cache.device_bytes()), (0, 0));
        assert!(cache.on_its_way(PART).is_none() && cache.departing().is_some());
        assert!(cache.look().is_empty() && cache.departing().is_some(), "the load has not completed");
        copy.0.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(cache.look().is_empty() && cache.departing().is_none());
    }

    #[test]
    fn a_part_leaves_whole_and_alone() {
        let (mut cache, mut backend, file) = (TensorCache::new(), backend(), file());
        let part = |model, part| PartId { model: ModelId(model), part };
        for (start, part) in [(0, part(1, 0)), (1024, part(1, 2)), (2048, part(1, 2)), (3072, part(2, 2))] {
            cache.load(&mut backend, &tensor(&file, "t", start, DType::F32), part).unwrap();
        }
        let held = |cache: &TensorCache| -> Vec<(u32, usize)> {
            cache.parts_of(ModelId(1)).map(|(number, held)| (number, held.tensors)).collect()
        };
        assert_eq!(held(&cache), [(0, 1), (2, 2)]);
        cache.evict(part(1, 2));
        assert_eq!((held(&cache), tensors(&cache)), (vec![(0, 1)], 2));
        assert_eq!(cache.evict(part(1, 2)), 0, "gone already");
        assert_eq!((cache.counters().evictions, cache.held(part(2, 2)).tensors), (1, 1));
        assert!(cache.look().is_empty(), "nothing is in flight if weights are read in place");
    }
}
