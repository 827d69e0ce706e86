//! Devices smaller than the model: layers are evicted and reloaded, and answers stay the same.

use std::sync::Arc;

use rocmforge::backend::hip::{HipOptions, UploadPath};
use rocmforge::model::Model;
use rocmforge::scheduler::{JobError, PartState};

use crate::common::tinystories;
use crate::rig::{Rig, beside_weights, model};

const PROMPT: [u32; 5] = [1, 403, 407, 261, 378];
const TOKENS: u32 = 8;

/// Each buffer is its own allocation, so the look-alike detects every use after free.
fn options(upload: UploadPath, memory_bytes: u64) -> HipOptions {
    HipOptions { upload, memory_bytes, upload_threads: 1, chunk_bytes: 0, ..HipOptions::default() }
}

/// One model's answer, its weight bytes, and the device bytes that it takes beside them.
fn measured() -> Option<(Vec<u32>, u64, u64)> {
    measured_by(options(UploadPath::Ring, 0))
}

fn measured_by(options: HipOptions) -> Option<(Vec<u32>, u64, u64)> {
    let rig = Rig::open_with(options)?;
    let answer = rig.ask(&model(1, &tinystories()), &PROMPT, TOKENS);
    let memory = rig.handle().snapshot().memory;
    assert!(memory.weights > 0 && memory.taken == memory.used(), "{memory:?}");
    Some((answer.ids, memory.weights, beside_weights(&memory)))
}

/// Upper bound on the bytes of a part, without the first part, whose rows stay in the file.
fn largest_part(rig: &Rig) -> u64 {
    let models = &rig.handle().snapshot().models;
    models[0].weight_bytes / (models[0].parts.len() as u64 - 1) * 3 / 2
}

#[test]
fn a_model_larger_than_its_room_streams_through_by_every_way() {
    let Some((ids, weights, rest)) = measured() else { return };
    for upload in [UploadPath::Ring, UploadPath::Copy, UploadPath::Registered] {
        let Some(rig) = Rig::open_with(options(upload, rest + weights * 4 / 5)) else { return };
        let streamed = model(1, &tinystories());
        for _ in 0..2 {
            let answer = rig.ask(&streamed, &PROMPT, TOKENS);
            assert_eq!(answer.ids, ids, "{upload:?}: {:?}", answer.end);
        }
        let seen = rig.handle().snapshot();
        assert!(seen.counters.evictions >= u64::from(2 * TOKENS), "{upload:?}: {:?}", seen.counters);
        assert!(seen.memory.taken <= seen.memory.budget, "{:?}", seen.memory);
        assert!(seen.memory.weights <= weights * 4 / 5);
        assert_eq!(seen.device.graph_replays, 0, "a step replayed a graph of evicted weights");
        assert!(largest_part(&rig) > 0);
        rig.handle().model_gone(streamed.id);
        assert!(rig.comes(|s| s.memory.weights == 0 && s.memory.kv == 0), "memory was left on the device");
    }
}

#[test]
fn three_models_share_room_for_one_and_a_half() {
    let Some((ids, weights, rest)) = measured() else { return };
    // ActivationType and KV pages of three models, weights of one and a half.
    let Some(rig) = Rig::open_with(options(UploadPath::Ring, 3 * rest + weights * 3 / 2)) else { return };
    let models: Vec<Arc<Model>> = (1..4).map(|id| model(id, &tinystories())).collect();
    let round = || {
        for model in &models {
            let answer = rig.ask(model, &PROMPT, TOKENS);
            assert_eq!(answer.ids, ids, "{:?}", answer.end);
        }
    };
    (0..3).for_each(|_| round());
    let before = rig.handle().snapshot();
    (0..4).for_each(|_| round());
    let after = rig.handle().snapshot();
    let moved = after.counters.load_bytes - before.counters.load_bytes;
    let room = after.memory.budget - beside_weights(&after.memory);
    let beside = room.saturating_sub(weights).min(2 * weights) as f64 / weights as f64;
    // Each switch loads what did not stay from before. On average half of `beside` belongs to the next model.
    let best = 12.0 * (1.0 - beside / 2.0) * weights as f64;
    println!(
        "loaded {:.3} times the optimum; {beside:.2} of a model fits beside the running one",
        moved as f64 / best
    );
    assert!((moved as f64) <= 1.2 * best, "{moved} bytes loaded, optimum {best}");
    // Graphs are replayed for the weights that are resident now.
    assert!(after.device.graph_replays > before.device.graph_replays);
}

#[test]
fn sequences_of_three_models_at_once_are_all_answered() {
    let Some((ids, weights, rest)) = measured() else { return };
    let Some(rig) = Rig::open_with(options(UploadPath::Ring, 3 * rest + weights * 3 / 2)) else { return };
    let models: Vec<Arc<Model>> = (1..4).map(|id| model(id, &tinystories())).collect();
    let asked: Vec<_> =
        models.iter().cycle().take(9).map(|model| rig.submit(model, &PROMPT, TOKENS)).collect();
    for answer in asked.into_iter().map(crate::rig::Asked::finish) {
        assert_eq!(answer.ids, ids, "{:?}", answer.end);
    }
}

#[test]
fn a_device_too_small_for_two_layers_says_what_is_missing() {
    let Some((_, weights, rest)) = measured() else { return };
    let Some(rig) = Rig::open_with(options(UploadPath::Ring, rest + weights / 8)) else { return };
    let small = model(1, &tinystories());
    let answer = rig.ask(&small, &PROMPT, TOKENS);
    let error = answer.end.unwrap_err();
    let JobError::NoRoom { need_bytes, free_bytes, budget_bytes, .. } = &error else { panic!("{error}") };
    assert!(need_bytes > free_bytes && *budget_bytes == rest + weights / 8, "{error}");
    assert!(error.to_string().contains("the model itself has"), "{error}");
    rig.handle().model_gone(small.id);
    assert!(rig.comes(|s| s.memory.weights == 0));
}

#[test]
fn a_plan_says_what_then_happens() {
    // The memory of recorded steps is an estimate that sees other tests' memory: a plan would count on it.
    let exact = |memory_bytes| HipOptions { graphs: false, ..options(UploadPath::Ring, memory_bytes) };
    let Some((_, weights, rest)) = measured_by(exact(0)) else { return };
    let Some(rig) = Rig::open_with(exact(2 * rest + weights * 3 / 2)) else { return };
    let (first, second) = (model(1, &tinystories()), model(2, &tinystories()));
    let plan = rig.handle().plan(&first, PROMPT.len() as u32 + TOKENS);
    assert_eq!((plan.weight_bytes, plan.resident_bytes, plan.leaving.len()), (weights, 0, 0), "{plan:?}");
    rig.ask(&first, &PROMPT, TOKENS);
    let seen = rig.handle().snapshot();
    assert_eq!(plan.kv_bytes, rig.handle().kv_bytes(&first.plan.program, PROMPT.len() as u32 + TOKENS));
    assert_eq!(
        (seen.models[0].kv_bytes, seen.memory.kv),
        (0, 0),
        "KV pages were held after the answer ended"
    );
    // The rotary table grows with positions; nothing else exceeds the plan.
    let tables = seen.memory.scratch - plan.scratch_bytes;
    assert!(tables < 256 << 10, "{tables} bytes of scratch exceed the plan");
    let plan = rig.handle().plan(&second, PROMPT.len() as u32 + TOKENS);
    rig.ask(&second, &PROMPT, TOKENS);
    let seen = rig.handle().snapshot();
    let left = weights - seen.models[0].weight_bytes;
    let planned: u64 = plan.leaving.iter().map(|leaving| leaving.bytes).sum();
    assert!(
        left >= planned && left <= planned + largest_part(&rig),
        "{left} bytes are left, {planned} were planned"
    );
    assert!(seen.models[1].parts.iter().skip(1).all(|part| *part == PartState::Resident));
}

/// A fake `/sys` for the test device, in which the kernel reports `used` bytes.
fn kernel(used: u64) -> Option<tempfile::TempDir> {
    let pci = crate::gpu::runtime()?.describe(0).unwrap().pci;
    let root = tempfile::tempdir().unwrap();
    let device = root.path().join("sys/class/drm/card0/device");
    std::fs::create_dir_all(&device).unwrap();
    let file = |name: &str, text: String| std::fs::write(device.join(name), text).unwrap();
    file("uevent", format!("DRIVER=amdgpu\nPCI_SLOT_NAME={pci}\n"));
    file("mem_info_vram_total", format!("{}\n", 1u64 << 40));
    file("mem_info_vram_used", format!("{used}\n"));
    Some(root)
}

#[test]
fn the_ledger_is_held_against_the_kernels_count() {
    let Some((_, weights, _)) = measured() else { return };
    for (more, contradicts) in [(0, false), (3 << 30, true)] {
        let Some(rig) = Rig::open() else { return };
        let memory = rig.handle().snapshot().memory;
        assert_eq!((memory.kernel_used, memory.contradiction()), (None, None), "a missing file gave a value");
        let used = memory.total - memory.free + weights + more;
        drop(rig);
        let Some(root) = kernel(used) else { return };
        let options = HipOptions { root: root.path().into(), ..options(UploadPath::Ring, 0) };
        let Some(rig) = Rig::open_with(options) else { return };
        rig.ask(&model(1, &tinystories()), &PROMPT, TOKENS);
        let memory = rig.handle().snapshot().memory;
        assert_eq!(memory.kernel_used, Some(used));
        assert_eq!(memory.contradiction().is_some(), contradicts, "{memory:?}: {:?}", memory.contradiction());
    }
}
