//! Weights are loaded on first use, once; a failed load leaves nothing behind.

use std::sync::Arc;

use rocmforge::lock::{self, Rank};
use rocmforge::scheduler::{JobError, LoadedTensor};

use crate::common::tinystories;
use crate::faults::child;
use crate::rig::{Rig, model};

const PROMPT: [u32; 5] = [1, 403, 407, 261, 378];

#[test]
fn registering_uploads_nothing_and_a_second_request_neither() {
    let Some(rig) = Rig::open() else { return };
    let model = model(1, &tinystories());
    assert_eq!(rig.handle().snapshot().device.uploads, 0);
    let first = rig.ask(&model, &PROMPT, 12);
    assert_eq!(first.ids.len(), 12, "{:?}", first.end);
    assert!(
        first.end.is_ok_and(|outcome| !outcome.load.is_zero()),
        "a cold request did not wait for weights"
    );
    let weights = rig.handle().snapshot();
    assert!(weights.device.upload_bytes > 0 && weights.device.upload_failures == 0);
    // All except the embedding: its rows travel with steps unless the output matrix is the same tensor.
    assert!(weights.device.upload_bytes <= model.plan.program.weight_bytes());
    let second = rig.ask(&model, &PROMPT, 12);
    assert_eq!(second.ids, first.ids);
    assert!(second.end.is_ok_and(|outcome| outcome.load.is_zero()), "a warm request waited for weights");
    let after = rig.handle().snapshot();
    assert_eq!(after.device.uploads, weights.device.uploads);
    assert_eq!(after.device.upload_bytes, weights.device.upload_bytes);
    assert!(after.device.graphs > 0 && after.device.graph_replays > 0, "{:?}", after.device);
    assert_eq!(after.device.graphs_refused, None);
}

#[test]
fn ten_callers_of_one_tensor_share_one_upload() {
    let Some(rig) = Rig::open() else { return };
    let (handle, model) = (rig.handle(), model(1, &tinystories()));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let loaded: Vec<LoadedTensor> = runtime.block_on(async {
        let callers: Vec<_> = (0..10)
            .map(|_| {
                let (handle, model) = (handle.clone(), Arc::clone(&model));
                tokio::spawn(async move { handle.preload_tensor(&model, "blk.0.attn_q.weight").await })
            })
            .collect();
        let mut loaded = Vec::new();
        for caller in callers {
            loaded.push(caller.await.unwrap().unwrap());
        }
        loaded
    });
    assert!(loaded.iter().all(|tensor| *tensor == loaded[0] && tensor.address != 0), "{loaded:?}");
    assert!(rig.comes(|s| s.device.uploads == 1 && s.device_bytes == loaded[0].bytes));
    let unknown = runtime.block_on(handle.preload_tensor(&model, "no such tensor"));
    assert!(matches!(unknown, Err(JobError::Invalid(_))));
}

#[test]
fn a_whole_model_is_loaded_with_progress_and_then_served_without_uploads() {
    let Some(rig) = Rig::open() else { return };
    let model = model(1, &tinystories());
    let before = rig.handle().snapshot().device.used_bytes;
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let reached = runtime.block_on(async { rig.handle().preload_all(&model).unwrap().wait().await }).unwrap();
    assert_eq!(reached.tensors, reached.tensors_total);
    assert_eq!(reached.tensors, model.plan.program.tensors().len());
    let uploads = rig.handle().snapshot().device.uploads;
    assert_eq!(rig.ask(&model, &PROMPT, 4).ids.len(), 4);
    assert_eq!(rig.handle().snapshot().device.uploads, uploads);
    rig.handle().model_gone(model.id);
    assert!(
        rig.comes(|s| s.device_bytes == 0 && s.device.used_bytes == before),
        "memory was left on the device"
    );
}

/// In its own process: the lock counters are per process.
#[test]
fn a_resident_model_takes_no_lock_of_a_load() {
    if !child("lazy::a_resident_model_takes_no_lock_of_a_load", &[]) {
        return;
    }
    let rig = Rig::open().unwrap();
    let model = model(1, &tinystories());
    let first = rig.ask(&model, &PROMPT, 12);
    let locks = || [Rank::UploadQueue, Rank::UploadStreams, Rank::UploadJob, Rank::Weight].map(lock::taken);
    let (taken, before) = (locks(), rig.handle().snapshot());
    assert!(taken.iter().all(|count| count.is_none_or(|count| count > 0)), "{taken:?}");
    assert_eq!(rig.ask(&model, &PROMPT, 12).ids, first.ids);
    let after = rig.handle().snapshot();
    assert!(after.counters.steps >= before.counters.steps + 12);
    assert_eq!(locks(), taken);
    // The table of tensors is not used either.
    assert_eq!(after.counters.tensor_hits, before.counters.tensor_hits);
    assert_eq!(after.counters.tensors_loaded, before.counters.tensors_loaded);
}

#[test]
fn evicted_weights_come_back_elsewhere_and_answer_alike() {
    let Some(rig) = Rig::open() else { return };
    let (first, other) = (model(1, &tinystories()), model(2, &tinystories()));
    let before = rig.ask(&first, &PROMPT, 12);
    let replays = rig.handle().snapshot().device.graph_replays;
    assert!(replays > 0);
    rig.handle().model_gone(first.id);
    assert!(rig.comes(|s| s.device_bytes == 0));
    // The second model's weights take the memory that the first model's weights had.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(rig.handle().preload_tensor(&other, "blk.0.ffn_down.weight")).unwrap();
    let after = rig.ask(&first, &PROMPT, 12);
    assert_eq!(after.ids, before.ids);
    assert!(rig.handle().snapshot().device.graph_replays > replays);
}

#[test]
fn a_file_cut_short_fails_its_request_and_leaves_nothing() {
    let Some(rig) = Rig::open() else { return };
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::copy(tinystories(), file.path()).unwrap();
    let broken = model(1, file.path());
    let length = std::fs::metadata(file.path()).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(file.path()).unwrap().set_len(length / 2).unwrap();
    let answer = rig.ask(&broken, &PROMPT, 4);
    assert!(matches!(answer.end, Err(JobError::Model(_))), "{:?}", answer.end);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let loaded = runtime.block_on(rig.handle().preload_tensor(&broken, "output_norm.weight"));
    assert!(loaded.is_err(), "{loaded:?}");
    assert!(rig.comes(|s| s.device_bytes == 0), "a failed load left memory behind");
    // The device serves the next request.
    assert_eq!(rig.ask(&model(2, &tinystories()), &PROMPT, 4).ids.len(), 4);
}
