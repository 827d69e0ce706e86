//! Models share a device that is too small for them: which weights stay, which are evicted, and which events report it.

use super::*;
use crate::scheduler::{EngineEvent, Fit, PartState, Preload, RulesChange};

/// An engine whose device has room for this many hundredths of one model's weights.
fn rig(hundredths: u64) -> Rig {
    let rig = Rig::new(EngineOptions::default());
    rig.control.memory().limit(device_bytes(&rig.model) * hundredths / 100);
    rig.control.load_ahead_always(2);
    rig
}

/// Device bytes of a model: all but the embedding, whose rows are read from the file.
fn device_bytes(model: &Model) -> u64 {
    (1..model.plan.program.part_count())
        .flat_map(|part| model.plan.program.part_tensors(part))
        .map(|(_, tensor)| tensor.lazy.byte_len())
        .sum()
}

fn ask(rig: &Rig, model: &Arc<Model>, seed: u32, tokens: usize) {
    let prompt = prompt(seed, 10);
    let (mut job, asked) = rig.job(&prompt, tokens as u32);
    job.model = Arc::clone(model);
    rig.handle().submit(job).unwrap();
    assert_eq!(asked.finish().ids, expected(&prompt, tokens));
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
}

#[test]
fn three_models_through_room_for_one_and_a_half_move_what_the_best_order_moves() {
    let rig = rig(150);
    let models: Vec<_> = (1..4).map(|id| open(id, &kept_model())).collect();
    let one = device_bytes(&models[0]);
    for round in 0..3 {
        models.iter().for_each(|model| ask(&rig, model, round, 4));
    }
    let before = rig.handle().snapshot().counters.load_bytes;
    let switches = 30;
    for round in 0..switches / 3 {
        models.iter().for_each(|model| ask(&rig, model, round, 4));
    }
    let moved = rig.handle().snapshot().counters.load_bytes - before;
    // Half a model has room beside the running one, so at least three quarters of a model must load at each switch.
    let best = f64::from(switches) * 0.75 * one as f64;
    println!("{:.3} times the best possible", moved as f64 / best);
    assert!(moved as f64 <= 1.2 * best, "moved {moved} bytes, {best} are needed");
    assert!(rig.control.memory().wrongs().is_empty());
}

#[test]
fn switching_between_two_models_that_fit_moves_nothing() {
    let rig = rig(200);
    let models: Vec<_> = (1..3).map(|id| open(id, &kept_model())).collect();
    models.iter().for_each(|model| ask(&rig, model, 1, 3));
    let before = rig.handle().snapshot().counters;
    for round in 0..10 {
        models.iter().for_each(|model| ask(&rig, model, round, 3));
    }
    let after = rig.handle().snapshot().counters;
    assert_eq!((after.load_bytes, after.evictions), (before.load_bytes, 0));
    assert_eq!(after.tensor_hits, before.tensor_hits, "a step over a resident model makes no request");
}

#[test]
fn swapping_models_frees_what_the_other_had() {
    let rig = rig(100);
    let (first, second) = (open(1, &kept_model()), open(2, &kept_model()));
    ask(&rig, &first, 1, 3);
    ask(&rig, &second, 1, 3);
    let models = rig.handle().snapshot().models.clone();
    assert_eq!(models[0].weight_bytes, 0, "the first model was evicted");
    assert!(models[0].parts[1..].iter().all(|part| *part == PartState::Absent), "{:?}", models[0].parts);
    assert!(models[1].parts.iter().all(|part| *part == PartState::Resident), "{:?}", models[1].parts);
    assert_eq!(models[1].weight_bytes, device_bytes(&second));
    assert_eq!(rig.control.memory().used(), models[1].weight_bytes);
}

#[test]
fn a_model_larger_than_the_room_streams_through_it() {
    let rig = rig(80);
    rig.control.load_ahead_always(0); // the layers ahead would be most of the five
    let parts = f64::from(rig.model.plan.program.part_count() - 1);
    ask(&rig, &rig.model, 1, 2);
    let (before, tokens) = (rig.handle().snapshot().counters, 20);
    ask(&rig, &rig.model, 2, tokens);
    let after = rig.handle().snapshot().counters;
    let moved = (after.load_bytes - before.load_bytes) as f64 / tokens as f64;
    let all = device_bytes(&rig.model) as f64;
    println!("{:.3} of the model a step, {parts} parts", moved / all);
    // A fifth of the model has no room, so no order moves less. Parts are not split: at most two more load in each
    // step.
    assert!(moved >= 0.2 * all && moved <= (0.2 + 2.0 / parts) * all, "{moved} of {all} bytes a step");
    assert!(rig.control.memory().wrongs().is_empty(), "{:?}", rig.control.memory().wrongs());
}

#[test]
fn a_head_without_a_piece_of_memory_is_loaded_before_all_others() {
    let rig = rig(130);
    let program = &rig.model.plan.program;
    let bytes =
        |part: u32| program.part_tensors(part).map(|(_, tensor)| tensor.lazy.byte_len()).max().unwrap();
    let (head, layers) = (program.head_part(), 1..program.head_part());
    let largest = layers.map(bytes).max().unwrap();
    assert!(largest < bytes(head));
    rig.control.memory().split(largest);
    ask(&rig, &rig.model, 1, 5);
    let before = rig.handle().snapshot().counters;
    ask(&rig, &rig.model, 2, 5);
    let after = rig.handle().snapshot().counters;
    assert_eq!((before.load_bytes, before.evictions), (after.load_bytes, after.evictions), "all of it stays");
    assert!(rig.control.memory().wrongs().is_empty(), "{:?}", rig.control.memory().wrongs());
}

#[test]
fn a_tensor_that_finds_no_piece_of_memory_at_all_fails_its_request_alone() {
    let rig = rig(130);
    rig.control.memory().split(0);
    let asked = rig.ask(&prompt(1, 10), 3).finish();
    let JobError::NoRoom { need_bytes, free_bytes, .. } = asked.error() else { panic!("{:?}", asked.end) };
    assert!(need_bytes <= free_bytes);
    // A later request tries again.
    let program = &rig.model.plan.program;
    let of_layers = (1..program.head_part()).flat_map(|part| program.part_tensors(part));
    rig.control.memory().split(of_layers.map(|(_, tensor)| tensor.lazy.byte_len()).max().unwrap());
    ask(&rig, &rig.model, 2, 3);
}

#[test]
fn a_pinned_model_stays_and_a_refusal_says_who_has_the_room() {
    let rig = rig(120);
    let (kept, other) = (open(1, &kept_model()), open(2, &kept_model()));
    let pin = RulesChange { pinned: Some(true), ..RulesChange::default() };
    let rules = runtime().block_on(rig.handle().set_rules(&kept, pin)).unwrap();
    assert!(rules.pinned);
    ask(&rig, &kept, 1, 3);
    assert!(matches!(rig.handle().plan(&other, 30).fit, Fit::No { missing_bytes: 1.. }));
    let (mut job, asked) = rig.job(&prompt(1, 10), 3);
    job.model = Arc::clone(&other);
    rig.handle().submit(job).unwrap();
    let answer = asked.finish();
    let error = answer.error();
    let JobError::NoRoom { need_bytes, free_bytes, budget_bytes, .. } = error else { panic!("{error}") };
    assert!(need_bytes > free_bytes && *budget_bytes > device_bytes(&kept), "{error}");
    let text = error.to_string();
    assert!(text.contains("1 other model ") && text.contains("pinned)"), "{text}");
    assert!(!text.contains("tinystories"), "the name may be another user's: {text}");
    let models = &rig.handle().snapshot().models;
    assert_eq!((models[0].weight_bytes, models[0].eviction_place), (device_bytes(&kept), 0));
    // The unpinned model is evicted.
    let unpin = RulesChange { pinned: Some(false), ..RulesChange::default() };
    runtime().block_on(rig.handle().set_rules(&kept, unpin)).unwrap();
    let plan = rig.handle().plan(&other, 30);
    assert_eq!((plan.fit, plan.leaving.len(), plan.leaving[0].model), (Fit::Whole, 1, kept.id), "{plan:?}");
    ask(&rig, &other, 1, 3);
}

#[test]
fn priority_and_a_least_share_decide_who_leaves() {
    let rig = rig(250);
    let models: Vec<_> = (1..4).map(|id| open(id, &kept_model())).collect();
    let first = RulesChange { priority: Some(1), ..RulesChange::default() };
    let share = RulesChange { parts_min: Some(3), ..RulesChange::default() };
    runtime().block_on(rig.handle().set_rules(&models[0], first)).unwrap();
    runtime().block_on(rig.handle().set_rules(&models[1], share)).unwrap();
    models.iter().for_each(|model| ask(&rig, model, 1, 3));
    let parts = |number: usize| rig.handle().snapshot().models[number].parts.clone();
    assert!(
        parts(0).iter().all(|part| *part == PartState::Resident),
        "it has the higher priority: {:?}",
        parts(0)
    );
    assert!(parts(1)[..3].iter().all(|part| *part == PartState::Resident), "its least share: {:?}", parts(1));
    assert_eq!(parts(1).last(), Some(&PartState::Absent), "the last parts are evicted first");
}

#[test]
fn weights_leave_when_idle_for_long_and_when_told_to() {
    let options = EngineOptions { idle_release: Duration::from_millis(10), ..EngineOptions::default() };
    let rig = Rig::new(options);
    rig.control.memory().limit(1 << 30);
    let (short, long) = (open(1, &kept_model()), open(2, &kept_model()));
    let idle = RulesChange { idle_max: Some(Some(Duration::from_millis(30))), ..RulesChange::default() };
    runtime().block_on(rig.handle().set_rules(&short, idle)).unwrap();
    ask(&rig, &short, 1, 3);
    ask(&rig, &long, 1, 3);
    assert!(rig.comes(|s| s.models[0].weight_bytes == 0), "idle for long");
    assert!(rig.handle().snapshot().models[1].weight_bytes > 0);
    let cleared = runtime().block_on(rig.handle().evict_weights(Some(long.id))).unwrap();
    assert_eq!((cleared.bytes, rig.control.memory().used()), (device_bytes(&long), 0));
    assert_eq!(cleared.parts, u64::from(long.plan.program.part_count()), "the embedding's part counts too");
    ask(&rig, &long, 2, 3);
}

#[test]
fn the_answer_to_an_eviction_follows_unloads_that_came_with_it() {
    let rig = Rig::new(EngineOptions::default());
    rig.control.memory().limit(1 << 30);
    let (pinned, other) = (open(1, &kept_model()), open(2, &kept_model()));
    let pin = RulesChange { pinned: Some(true), ..RulesChange::default() };
    runtime().block_on(rig.handle().set_rules(&pinned, pin)).unwrap();
    ask(&rig, &pinned, 1, 3);
    assert_eq!(rig.control.memory().used(), device_bytes(&pinned));

    // The step holds the engine while both commands arrive.
    rig.control.allow(0);
    let (mut job, asked) = rig.job(&prompt(2, 3), 1);
    job.model = other;
    rig.handle().submit(job).unwrap();
    rig.control.wait_held();
    rig.handle().model_gone(pinned.id);
    runtime().block_on(async {
        let handle = rig.handle();
        let clearing = handle.evict_weights(None);
        tokio::pin!(clearing);
        tokio::select! { biased;
            _ = &mut clearing => panic!("the engine is held"),
            () = std::future::ready(()) => rig.control.release(),
        }
        clearing.await.unwrap();
    });
    assert_eq!(rig.handle().snapshot().device_bytes, 0, "the model that was unloaded is not shown");
    assert_eq!(rig.control.memory().used(), 0);
    drop(asked);
}

#[test]
fn preloading_brings_what_was_asked_for_and_no_more() {
    let rig = rig(100);
    let (handle, layers) = (rig.handle(), rig.model.plan.program.layer_count());
    let there = |what: Preload| -> Vec<bool> {
        runtime().block_on(rig.handle().evict_weights(Some(rig.model.id))).unwrap();
        runtime().block_on(rig.handle().preload(&rig.model, &what).unwrap().wait()).unwrap();
        let parts = &rig.handle().snapshot().models[0].parts;
        parts.iter().map(|part| *part == PartState::Resident).collect()
    };
    let wanted = |parts: &[u32]| (0..layers + 2).map(|part| parts.contains(&part)).collect::<Vec<_>>();
    assert_eq!(there(Preload::First(2)), wanted(&[0, 1, 2]));
    assert_eq!(there(Preload::Critical), wanted(&[0, 1, layers + 1]));
    assert_eq!(there(Preload::Layers(vec![3, 1, 3])), wanted(&[2, 4]));
    assert_eq!(there(Preload::First(1000)), wanted(&(0..=layers).collect::<Vec<_>>()));
    assert_eq!(there(Preload::All), vec![true; layers as usize + 2]);
    let loads = rig.control.memory().loads();
    ask(&rig, &rig.model, 1, 3);
    assert_eq!(rig.control.memory().loads(), loads, "all weights are resident");
    let error = handle.preload(&rig.model, &Preload::Layers(vec![0, layers])).unwrap_err();
    assert!(matches!(error, JobError::NoSuchLayer { layer, .. } if layer == layers), "{error}");
}

#[test]
fn how_far_a_load_is_can_be_seen_by_all() {
    let rig = rig(100);
    rig.control.memory().hold_loads(true);
    let one = rig.handle().preload(&rig.model, &Preload::First(1)).unwrap();
    let all = rig.handle().preload(&rig.model, &Preload::All).unwrap();
    let whole = device_bytes(&rig.model);
    let of_all = |s: &EngineSnapshot| {
        s.models.first().and_then(|model| model.loading).filter(|loading| loading.bytes_total == whole)
    };
    // The embedding stays in the file, so it counts as resident at once.
    let begun = |s: &EngineSnapshot| of_all(s).is_some_and(|loading| loading.tensors == 1);
    assert!(rig.comes(begun), "shows the larger of two requests");
    let seen = of_all(&rig.handle().snapshot()).unwrap();
    let tensors = rig.model.plan.program.parts().iter().map(|part| part.tensors.len());
    assert_eq!((seen.tensors_total, seen.bytes), (tensors.sum(), 0));
    rig.control.memory().hold_loads(false);
    runtime().block_on(async { (one.wait().await.unwrap(), all.wait().await.unwrap()) });
    assert!(rig.comes(|s| s.models[0].loading.is_none()), "no load is in progress");
}

/// Weights that load for another model take all the room. A step waits for some of them and continues where it was.
#[test]
fn a_step_waits_for_room_that_is_on_its_way() {
    let rig = rig(100);
    let (first, second) = (open(1, &kept_model()), open(2, &kept_model()));
    rig.control.memory().hold_loads(true);
    let preload = rig.handle().preload(&first, &Preload::All).unwrap();
    let whole = device_bytes(&first);
    assert!(rig.comes(|s| s.device_bytes == whole), "begun, and held");
    ask(&rig, &second, 1, 2);
    rig.control.memory().hold_loads(false);
    runtime().block_on(preload.wait()).unwrap();
    assert_eq!(rig.control.memory().wrongs(), Vec::<String>::new());
    let counters = rig.handle().snapshot().counters;
    // The model streams through the room of the first parts that arrived, so each step loads the whole model once.
    assert!(counters.load_bytes <= (1 + counters.steps) * whole, "a step was restarted: {counters:?}");
}

#[test]
fn a_watcher_is_told_of_loads_and_evictions() {
    let rig = rig(100);
    let (first, second) = (open(1, &kept_model()), open(2, &kept_model()));
    let mut events = rig.handle().events();
    ask(&rig, &first, 1, 2);
    ask(&rig, &second, 1, 2);
    runtime().block_on(rig.handle().release_idle()).unwrap();
    let (mut came, mut went) = (0u64, 0u64);
    while let Ok(event) = events.try_recv() {
        match event {
            EngineEvent::Loaded { bytes, .. } => came += bytes,
            EngineEvent::Evicted { bytes, .. } => went += bytes,
            EngineEvent::DeviceLost { text } => panic!("{text}"),
        }
    }
    let all = device_bytes(&first) + device_bytes(&second);
    assert_eq!((came, went), (all, all));
    assert_eq!(rig.control.memory().used(), 0);
}
