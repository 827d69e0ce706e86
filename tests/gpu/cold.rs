//! Cold starts, with no weights on the device: a request that is cancelled midway, or fails, and the next one.

use std::sync::Mutex;

use rocmforge::backend::hip::{HipBackend, HipOptions};
use rocmforge::backend::{Backend, BackendError};
use rocmforge::scheduler::JobError;

use crate::common::tinystories;
use crate::faults::child;
use crate::gate::gated;
use crate::gpu;
use crate::rig::{Rig, model};

const PROMPT: [u32; 5] = [1, 403, 407, 261, 378];

/// Weights of a layer: two norms, four attention projections, three of the feed-forward layer.
const LAYER_TENSORS: u64 = 9;

#[test]
fn a_cold_start_cancelled_in_a_layer_has_loaded_two_layers_more() {
    let Some(runtime) = gpu::runtime() else { return };
    for layer in 0..2u32 {
        let backend = HipBackend::with_runtime(runtime.clone(), HipOptions::default()).unwrap();
        let (gated, gate) = gated(backend, layer);
        let once = Mutex::new(Some(gated));
        let rig = Rig::with(move || Ok(Box::new(once.lock().unwrap().take().unwrap()) as Box<dyn Backend>));
        let model = model(1, &tinystories());
        assert_eq!(
            model.plan.program.layer_count(),
            5,
            "the model has too few layers to leave some unloaded"
        );
        let asked = rig.submit(&model, &PROMPT, 4);
        gate.reached.recv().unwrap();
        rig.handle().cancel(asked.id);
        gate.open.send(()).unwrap();
        let answer = asked.finish();
        assert!(matches!(answer.end, Err(JobError::Cancelled)), "{:?}", answer.end);
        let loaded = u64::from(layer + 3) * LAYER_TENSORS;
        assert!(rig.comes(|s| s.device.uploads == loaded), "{:?}", rig.handle().snapshot().device);
        // The request uses the loaded tensors and loads the rest, including the last norm and the output matrix.
        let whole = rig.ask(&model, &PROMPT, 4);
        assert_eq!(whole.ids.len(), 4, "{:?}", whole.end);
        assert!(rig.comes(|s| s.device.uploads == 5 * LAYER_TENSORS + 2));
        assert_eq!(rig.handle().snapshot().device.upload_failures, 0);
    }
}

#[test]
fn an_upload_that_fails_leaves_nothing_and_the_next_request_brings_it() {
    let test = "cold::an_upload_that_fails_leaves_nothing_and_the_next_request_brings_it";
    // The second of these calls makes the first tensor's layout wait for its copy; 1 is hipErrorInvalidValue.
    if !child(test, &[("ROCMFORGE_LOOKALIKE_FAULTS", "hipStreamWaitEvent:2=1")]) {
        return;
    }
    let Some(rig) = Rig::open() else { return };
    let model = model(1, &tinystories());
    let used = rig.handle().snapshot().device.used_bytes;
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let bring = || runtime.block_on(rig.handle().preload_tensor(&model, "blk.0.attn_q.weight"));
    let failed = bring();
    assert!(matches!(failed, Err(JobError::Backend(BackendError::Device { .. }))), "{failed:?}");
    assert!(
        rig.comes(|s| s.device.upload_failures == 1 && s.device_bytes == 0 && s.device.used_bytes == used),
        "{:?}",
        rig.handle().snapshot()
    );
    assert_eq!(rig.handle().snapshot().device.uploads, 0);
    let loaded = bring().unwrap();
    assert!(rig.comes(|s| s.device.uploads == 1 && s.device_bytes == loaded.bytes));
    assert_eq!(rig.ask(&model, &PROMPT, 4).ids.len(), 4);
    assert_eq!(rig.handle().snapshot().device.upload_failures, 1);
}

#[test]
fn a_request_whose_upload_fails_says_so_and_the_next_one_is_answered() {
    let test = "cold::a_request_whose_upload_fails_says_so_and_the_next_one_is_answered";
    if !child(test, &[("ROCMFORGE_LOOKALIKE_FAULTS", "hipStreamWaitEvent:2=1")]) {
        return;
    }
    let Some(rig) = Rig::open() else { return };
    let model = model(1, &tinystories());
    let failed = rig.ask(&model, &PROMPT, 4);
    assert!(matches!(failed.end, Err(JobError::Backend(BackendError::Device { .. }))), "{:?}", failed.end);
    let whole = rig.ask(&model, &PROMPT, 12);
    assert_eq!(whole.ids, [432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338]);
    assert!(rig.comes(|s| s.device.upload_failures >= 1 && s.device.uploads == 5 * LAYER_TENSORS + 2));
}
