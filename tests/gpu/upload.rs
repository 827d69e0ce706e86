//! Upload paths: each puts the same bytes on the device, and a failed upload leaves nothing.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use rocmforge::backend::hip::{FileReads, HipBackend, HipOptions, Purpose, UploadPath};
use rocmforge::backend::{Backend, BackendError, LoadState, Storage, UploadRate};
use rocmforge::model::ModelId;
use rocmforge::scheduler::JobError;
use tempfile::NamedTempFile;

use crate::faults::child;
use crate::forge::wide_llama;
use crate::gpu;
use crate::rig::{Answer, Rig, model};

const PROMPT: [u32; 3] = [1, 70, 90];

fn file() -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&wide_llama(7).build().bytes).unwrap();
    file
}

fn rig(upload: UploadPath) -> Option<Rig> {
    Rig::open_with(HipOptions { upload, upload_threads: 2, ..HipOptions::default() })
}

/// An answer with its log-probabilities: one changed bit of the weights changes them.
fn answer(rig: &Rig, file: &NamedTempFile) -> Answer {
    let answer = rig.ask_with_logprobs(&model(1, file.path()), &PROMPT, 4, 3);
    assert!(answer.end.is_ok(), "{:?}", answer.end);
    assert_eq!((answer.ids.len(), answer.logprobs.len()), (4, 4));
    answer
}

fn rates(rig: &Rig) -> Vec<UploadRate> {
    rig.handle().snapshot().device.upload_rates.into_iter().filter(|rate| !rate.path.is_empty()).collect()
}

#[test]
fn every_way_brings_the_same_bytes() {
    let file = file();
    let Some(ring) = rig(UploadPath::Ring) else { return };
    let expected = answer(&ring, &file);
    let bytes = ring.handle().snapshot().device.upload_bytes;
    for path in [UploadPath::Copy, UploadPath::Registered, UploadPath::Auto] {
        let rig = rig(path).unwrap();
        let found = answer(&rig, &file);
        assert_eq!(found.ids, expected.ids);
        assert_eq!(found.logprobs, expected.logprobs, "{}", path.name());
        assert_eq!(rig.handle().snapshot().device.upload_bytes, bytes, "{}", path.name());
        let rates = rates(&rig);
        assert_eq!(rates.iter().filter(|rate| rate.in_use).count(), 1);
        assert!(rates.iter().all(|rate| !rate.refused), "{rates:?}");
        if path != UploadPath::Auto {
            let used = rates.iter().find(|rate| rate.in_use).unwrap();
            assert_eq!(used.path, path.name());
            assert!(used.bytes > bytes / 2 && !used.busy.is_zero(), "{used:?}");
        }
    }
}

/// Reads past the page cache load the same bytes, and leave at most a small tensor's bytes in the cache.
#[test]
fn cold_bytes_are_read_past_the_page_cache_where_wanted() {
    let file = file();
    file.as_file().sync_all().unwrap();
    let Some(ring) = rig(UploadPath::Ring) else { return };
    let expected = answer(&ring, &file);
    let options = HipOptions { upload_threads: 2, reads: FileReads::Direct, ..HipOptions::default() };
    let rig = Rig::open_with(options).unwrap();
    let model = model(2, file.path());
    let mapping = model.files.mappings().next().unwrap();
    ring.handle().model_gone(ModelId(1));
    assert!(ring.comes(|s| s.device_bytes == 0));
    mapping.give_pages_back().unwrap();
    let (all, before) = (mapping.len(), mapping.cached_bytes().unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async { rig.handle().preload_all(&model).unwrap().wait().await }).unwrap();
    // If the kernel keeps the pages, or the folder is in memory, the effect is not visible.
    if let (Some(before), Some(after)) = (before, mapping.cached_bytes().unwrap())
        && before < all / 10
    {
        assert!(after < all / 2, "{after} of {all} bytes are in the page cache, {before} were");
    }
    // Only now: the embedding's rows are read through the mapping. The kernel reads ahead, 8 MiB each on disks so
    // configured.
    let found = rig.ask_with_logprobs(&model, &PROMPT, 4, 3);
    assert_eq!((found.ids, found.logprobs), (expected.ids, expected.logprobs));
}

#[test]
fn where_pages_cannot_be_registered_the_ring_is_taken() {
    let test = "upload::where_pages_cannot_be_registered_the_ring_is_taken";
    if !child(test, &[("ROCMFORGE_LOOKALIKE_FAULTS", "hipHostRegister:1+=801")]) {
        return;
    }
    let file = file();
    let expected = answer(&rig(UploadPath::Ring).unwrap(), &file);
    let rig = rig(UploadPath::Registered).unwrap();
    assert_eq!(answer(&rig, &file).logprobs, expected.logprobs);
    let device = rig.handle().snapshot().device;
    assert_eq!(device.upload_failures, 0);
    let rates = rates(&rig);
    assert!(rates.iter().any(|rate| rate.path == "registered" && rate.refused), "{rates:?}");
    let used = rates.iter().find(|rate| rate.in_use).unwrap();
    assert!(used.path == "ring" && used.bytes > 0, "{rates:?}");
}

#[test]
fn without_pinned_memory_plain_copies_are_taken() {
    let test = "upload::without_pinned_memory_plain_copies_are_taken";
    if !child(test, &[("ROCMFORGE_LOOKALIKE_FAULTS", "hipHostMalloc:1=2")]) {
        return;
    }
    let file = file();
    let rig = rig(UploadPath::Auto).unwrap();
    let found = answer(&rig, &file);
    let rates = rates(&rig);
    assert!(rates.iter().all(|rate| rate.in_use == (rate.path == "copy")), "{rates:?}");
    assert!(rates.iter().all(|rate| rate.refused == (rate.path != "copy")), "{rates:?}");
    let other = self::rig(UploadPath::Copy).unwrap();
    assert_eq!(answer(&other, &file).logprobs, found.logprobs);
}

/// A failed copy fails the loads of all tensors that it carried; the next request loads them again.
#[test]
fn a_copy_that_fails_leaves_nothing_by_any_way() {
    let test = "upload::a_copy_that_fails_leaves_nothing_by_any_way";
    let Some(path) = by_environment(test) else { return };
    let file = file();
    let rig = rig(path).unwrap();
    let model = model(1, file.path());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let failed = runtime.block_on(async { rig.handle().preload_all(&model).unwrap().wait().await });
    assert!(matches!(failed, Err(JobError::Backend(_))), "{failed:?}");
    assert!(rig.comes(|s| s.device.upload_failures >= 1));
    rig.handle().model_gone(model.id);
    assert!(rig.comes(|s| s.device_bytes == 0), "a failed load left memory behind");
    assert_eq!(answer(&rig, &file).ids.len(), 4);
}

/// A waiter may evict a tensor once it is notified and use the memory at once: no upload thread holds a part of it
/// then.
#[test]
fn a_resident_tensor_gives_its_memory_back_when_evicted() {
    let Some(runtime) = gpu::runtime() else { return };
    let options = HipOptions { upload: UploadPath::Ring, upload_threads: 2, ..HipOptions::default() };
    let mut backend = HipBackend::with_runtime(runtime, options).unwrap();
    let file = file();
    let model = model(1, file.path());
    let tensor = &model.plan.program.part_tensors(1).next().unwrap().1.lazy;
    for _ in 0..20 {
        let Storage::Device(memory) = backend.load_tensor(tensor).unwrap().storage else {
            panic!("the tensor is read in place, not uploaded");
        };
        let (told, holders) = std::sync::mpsc::channel();
        let load = Arc::clone(&memory);
        load.when_decided(Box::new(move || told.send(Arc::strong_count(&memory)).unwrap()));
        assert_eq!(holders.recv().unwrap(), 2, "more holders than the callback and the waiter");
        drop(load);
    }
    let Storage::Device(load) = backend.load_tensor(tensor).unwrap().storage else { unreachable!() };
    backend.until_decided(&load).unwrap();
    assert!(matches!(load.state(), LoadState::Resident), "{:?}", load.state());
    assert!(backend.device().ledger().of(Purpose::Weights) >= load.bytes());
    drop(load);
    assert_eq!(backend.device().ledger().of(Purpose::Weights), 0);
}

/// The path for this child; `None` in the parent, which runs a child for each path.
fn by_environment(test: &str) -> Option<UploadPath> {
    const NAME: &str = "ROCMFORGE_TEST_UPLOAD";
    let paths = [UploadPath::Ring, UploadPath::Copy, UploadPath::Registered];
    if let Ok(name) = std::env::var(NAME) {
        return paths.into_iter().find(|path| path.name() == name);
    }
    for path in paths {
        // A model load is the only copy while no step runs.
        let faults = ("ROCMFORGE_LOOKALIKE_FAULTS", "hipMemcpyAsync:3=1");
        child(test, &[faults, (NAME, path.name())]);
    }
    None
}

#[test]
fn a_file_cut_short_is_the_files_fault_and_not_the_paths() {
    let Some(rig) = rig(UploadPath::Registered) else { return };
    let (whole, cut) = (file(), file());
    let broken = model(2, cut.path());
    let length = cut.as_file().metadata().unwrap().len();
    cut.as_file().set_len(length / 2).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    // The pages are lost: no thread may read them, the driver does not pin them, and the load reports the cause.
    let loaded = runtime.block_on(rig.handle().preload_tensor(&broken, "blk.1.ffn_down.weight"));
    assert!(loaded.is_err(), "{loaded:?}");
    assert!(rig.comes(|s| s.device_bytes == 0), "a failed load left memory behind");
    answer(&rig, &whole);
    let rates = rates(&rig);
    assert!(
        rates.iter().all(|rate| !rate.refused && rate.in_use == (rate.path == "registered")),
        "{rates:?}"
    );
}

/// A device is lost if loads are in flight and nothing arrives in time. Without loads it may stay silent.
#[test]
fn patience_is_of_loads_under_way_alone() {
    let Some(runtime) = gpu::runtime() else { return };
    let patience = Duration::from_millis(50);
    let mut backend =
        HipBackend::with_runtime(runtime, HipOptions { patience, ..HipOptions::default() }).unwrap();
    backend.watch_loads(true).unwrap();
    std::thread::sleep(2 * patience);
    backend.watch_loads(false).unwrap();
    backend.watch_loads(true).unwrap();
    std::thread::sleep(2 * patience);
    let lost = backend.watch_loads(true).unwrap_err();
    assert!(matches!(lost, BackendError::DeviceLost { .. }), "{lost:?}");
}
