//! Which tensors a device holds: each is loaded once, by one loader, when first needed.
//!
//! A tensor's life on a device: `Absent -> Loading -> Resident -> Absent`. A load that fails leaves it absent and the
//! next request tries again. The engine thread that owns the device owns its cache too, so there is no lock and no
//! second loader: whoever asks while a tensor is on the way gets the same handle, and waits for that.

use std::collections::HashMap;
use std::sync::Arc;

use crate::backend::{Backend, BackendError, DeviceTensor, LoadState};
use crate::tensor::{LazyTensor, MappedFile};

/// What a cache did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Loads begun.
    pub loads: u64,
    /// Requests for tensors that were there or on the way.
    pub hits: u64,
}

/// The table of one device: the only truth about what is loaded on it.
#[derive(Debug, Default)]
pub struct TensorCache {
    resident: HashMap<Key, DeviceTensor>,
    counters: CacheCounters,
    device_bytes: u64,
}

/// What a tensor is loaded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Use {
    /// All of it is read in a step.
    Whole,
    /// Single rows are taken.
    Rows,
}

/// A tensor is its bytes: a tied output matrix is the embedding where both are used alike, and a part of a tensor is not
/// the whole. An entry keeps its mapping alive, so no other mapping can come to have its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    mapping: usize,
    start: u64,
    end: u64,
    used: Use,
}

impl Key {
    fn of(tensor: &LazyTensor, used: Use) -> Self {
        let bytes = tensor.range();
        Self { mapping: address(tensor.file()), start: bytes.start, end: bytes.end, used }
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

    /// The tensor on the device; its load begins now when it is not there and not on the way. A hit costs one lookup;
    /// the handle is cheap to clone.
    ///
    /// # Errors
    /// [`BackendError`] of the load; the tensor stays absent.
    pub fn load_tensor(
        &mut self,
        backend: &mut dyn Backend,
        tensor: &LazyTensor,
    ) -> Result<DeviceTensor, BackendError> {
        self.load(Key::of(tensor, Use::Whole), || backend.load_tensor(tensor))
    }

    /// As [`TensorCache::load_tensor`] for a table of which a step takes single rows.
    ///
    /// # Errors
    /// As [`TensorCache::load_tensor`].
    pub fn load_table(
        &mut self,
        backend: &mut dyn Backend,
        tensor: &LazyTensor,
    ) -> Result<DeviceTensor, BackendError> {
        self.load(Key::of(tensor, Use::Rows), || backend.load_table(tensor))
    }

    fn load(
        &mut self,
        key: Key,
        load: impl FnOnce() -> Result<DeviceTensor, BackendError>,
    ) -> Result<DeviceTensor, BackendError> {
        if let Some(there) = self.resident.get(&key) {
            if !matches!(there.state(), LoadState::Failed(_)) {
                self.counters.hits += 1;
                return Ok(there.clone());
            }
            self.remove(&key); // before the new load: there may be room for one copy only
        }
        let loaded = load()?;
        self.counters.loads += 1;
        self.device_bytes += loaded.device_bytes();
        self.resident.insert(key, loaded.clone());
        Ok(loaded)
    }

    fn remove(&mut self, key: &Key) {
        if let Some(gone) = self.resident.remove(key) {
            self.device_bytes -= gone.device_bytes();
        }
    }

    /// Lets go of loads that failed, so that nothing of them stays behind.
    pub fn clear_failed(&mut self) {
        self.resident.retain(|_, there| !matches!(there.state(), LoadState::Failed(_)));
        self.device_bytes = self.resident.values().map(DeviceTensor::device_bytes).sum();
    }

    /// Lets go of all tensors of a file; their memory is free once the last handle is dropped. Returns how many.
    pub fn clear_file(&mut self, file: &Arc<MappedFile>) -> usize {
        let (mapping, before) = (address(file), self.resident.len());
        self.resident.retain(|key, _| key.mapping != mapping);
        self.device_bytes = self.resident.values().map(DeviceTensor::device_bytes).sum();
        before - self.resident.len()
    }

    /// Lets go of everything.
    pub fn clear(&mut self) {
        self.resident.clear();
        self.device_bytes = 0;
    }

    /// Bytes of the tensors of a file on the device, and how many there are.
    pub fn of_file(&self, file: &Arc<MappedFile>) -> (u64, usize) {
        let mapping = address(file);
        let tensors = self.resident.iter().filter(|(key, _)| key.mapping == mapping);
        tensors.fold((0, 0), |(bytes, count), (_, there)| (bytes + there.device_bytes(), count + 1))
    }

    /// Tensors that are resident or on the way.
    pub fn len(&self) -> usize {
        self.resident.len()
    }

    /// True when nothing is resident.
    pub fn is_empty(&self) -> bool {
        self.resident.is_empty()
    }

    /// Device bytes of these tensors beyond their mappings.
    pub fn device_bytes(&self) -> u64 {
        self.device_bytes
    }

    /// Sums since the cache was made.
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

    fn tensor(file: &Arc<MappedFile>, name: &str, start: u64, dtype: DType) -> LazyTensor {
        let shape = Shape::new(&[256]).unwrap();
        let end = start + dtype.row_bytes(256).unwrap();
        LazyTensor::new(name, dtype, shape, start..end, Arc::clone(file)).unwrap()
    }

    #[test]
    fn a_tensor_is_loaded_once_and_a_tied_one_is_the_same() {
        let (mut cache, mut backend, file) = (TensorCache::new(), backend(), file());
        let embedding = tensor(&file, "token_embd.weight", 0, DType::F32);
        let tied = tensor(&file, "token_embd.weight", 0, DType::F32);
        let other = tensor(&file, "output_norm.weight", 1024, DType::F32);
        for tensor in [&embedding, &tied, &other, &embedding] {
            let loaded = cache.load_tensor(&mut backend, tensor).unwrap();
            assert_eq!(loaded.tensor.range(), tensor.range());
        }
        assert_eq!(cache.counters(), CacheCounters { loads: 2, hits: 2 });
        assert_eq!((cache.len(), cache.device_bytes()), (2, 0), "the CPU reads in place");
    }

    #[test]
    fn a_failed_load_leaves_the_tensor_absent() {
        let (mut cache, mut backend, file) = (TensorCache::new(), backend(), file());
        let tensor = tensor(&file, "blk.0.ffn_up.weight", 0, DType::IQ1_S);
        for _ in 0..2 {
            let error = cache.load_tensor(&mut backend, &tensor).unwrap_err();
            assert!(matches!(error, BackendError::Unsupported { dtype: DType::IQ1_S, .. }), "{error}");
        }
        assert_eq!((cache.len(), cache.counters()), (0, CacheCounters::default()));
    }

    #[test]
    fn a_model_is_dropped_without_the_others() {
        let (mut cache, mut backend, files) = (TensorCache::new(), backend(), [file(), file()]);
        for file in &files {
            for start in [0, 1024] {
                cache.load_tensor(&mut backend, &tensor(file, "t", start, DType::F32)).unwrap();
            }
        }
        let handles = files.each_ref().map(Arc::strong_count);
        assert_eq!(cache.clear_file(&files[0]), 2);
        assert_eq!(cache.len(), 2);
        assert_eq!(Arc::strong_count(&files[0]), handles[0] - 2, "the mapping is let go of");
        assert_eq!(Arc::strong_count(&files[1]), handles[1]);
        assert_eq!((cache.clear_file(&files[0]), cache.counters().loads), (0, 4));
        cache.clear();
        assert!(cache.is_empty());
    }
}
