//! Panics, device errors and changed files fail only the requests that they affect.

use std::io::Write;

use super::fake::{BROKEN_SEED, Fault};
use super::*;

#[test]
fn a_panic_fails_its_step_and_the_others_take_in_anew() {
    let rig = Rig::new(EngineOptions::default());
    let other = open(2, &kept_model());
    let (mut job, mut stalled) = rig.job(&prompt(1, 40), 30);
    job.credit = 4;
    rig.handle().submit(job).unwrap();
    let mut ids = stalled.take(4);
    let (mut job, mut neighbour) = rig.job(&prompt(2, 50), 30);
    (job.model, job.credit) = (Arc::clone(&other), 2);
    rig.handle().submit(job).unwrap();
    let mut neighbours = neighbour.take(2);

    rig.control.fault(Fault::PanicInAttention);
    let answer = rig.ask(&prompt(3, 10), 5).finish();
    match answer.error() {
        JobError::Panicked(text) => {
            assert!(text.starts_with("planted in attention") && text.len() <= 256, "{text}");
        }
        error => panic!("{error}"),
    }
    assert_eq!(rig.control.holds().2, 1, "the device was not reopened");
    rig.handle().credit(stalled.id, 100);
    rig.handle().credit(neighbour.id, 100);
    ids.extend(stalled.finish().ids);
    neighbours.extend(neighbour.finish().ids);
    assert_eq!(ids, expected(&prompt(1, 40), 30), "same model, not in the step");
    assert_eq!(neighbours, expected(&prompt(2, 50), 30), "another model");
    assert_eq!(rig.ask(&prompt(3, 10), 5).finish().ids, expected(&prompt(3, 10), 5));
    rig.assert_empty();
}

#[test]
fn a_cold_start_taken_back_at_a_layer_leaves_two_more_and_goes_on_from_there() {
    let rig = Rig::new(EngineOptions::default());
    let (job, asked) = rig.job(&prompt(1, 40), 5);
    let (handle, id) = (rig.handle(), asked.id);
    rig.control.load_ahead(2, 1, move || handle.cancel(id));
    rig.handle().submit(job).unwrap();
    assert!(matches!(asked.finish().error(), JobError::Cancelled));
    let layer = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse::<u32>().ok();
    let loads = rig.control.loads();
    assert_eq!(loads.iter().filter_map(|name| layer(name)).max(), Some(3), "{loads:?}");
    assert!(!loads.iter().any(|name| name == "output_norm.weight"), "{loads:?}");
    // The counter includes the embedding, which stays in the file.
    assert_eq!(rig.handle().snapshot().counters.tensors_loaded, loads.len() as u64 + 1);
    // A resident tensor is not loaded again.
    assert_eq!(rig.ask(&prompt(1, 40), 5).finish().ids, expected(&prompt(1, 40), 5));
    let mut all = rig.control.loads();
    assert!(all.len() > loads.len() && all.starts_with(&loads));
    all.sort_unstable();
    let count = all.len();
    all.dedup();
    assert_eq!(all.len(), count, "a tensor was loaded twice");
    rig.assert_empty();
}

/// The fake device accepts a step's tokens only after each of its parts, in order.
#[test]
fn a_step_that_lacked_an_expert_runs_all_its_parts_again() {
    let rig = Rig::new(EngineOptions::default());
    assert_eq!(rig.ask(&prompt(1, 40), 5).finish().ids, expected(&prompt(1, 40), 5));
    let loads = rig.control.loads();
    rig.control.fault(Fault::LackInHead);
    assert_eq!(rig.ask(&prompt(2, 40), 5).finish().ids, expected(&prompt(2, 40), 5));
    assert!(!rig.control.has_fault(), "no step was repeated");
    assert_eq!(rig.control.loads(), loads, "a repeated step loaded resident tensors");
    rig.assert_empty();
}

#[test]
fn a_device_broken_by_a_panic_is_opened_anew() {
    for fault in [Fault::PanicInAttentionAndClose, Fault::PanicInRelease] {
        // Without cached pages, each end gives pages back.
        let rig = Rig::new(EngineOptions { reuse: Reuse::Off, ..EngineOptions::default() });
        let (mut job, mut bystander) = rig.job(&prompt(1, 40), 30);
        job.credit = 1;
        rig.handle().submit(job).unwrap();
        bystander.take(1);
        rig.control.fault(fault);
        let answer = rig.ask(&prompt(3, 10), 5).finish();
        assert!(answer.end.is_some());
        assert!(matches!(bystander.finish().error(), JobError::Panicked(_)), "{fault:?}");
        assert!(rig.comes(|s| s.sequences.is_empty()));
        assert_eq!(rig.control.holds().2, 2);
        assert_eq!(rig.ask(&prompt(3, 10), 5).finish().ids, expected(&prompt(3, 10), 5));
        rig.assert_empty();
    }
}

#[test]
fn an_engine_without_a_device_ends_and_says_so() {
    for fault in [Fault::LoseDevice, Fault::LoseDeviceByPanic] {
        let mut rig = Rig::new(EngineOptions { reuse: Reuse::Off, ..EngineOptions::default() });
        let (mut job, mut bystander) = rig.job(&prompt(1, 40), 30);
        job.credit = 1;
        rig.handle().submit(job).unwrap();
        bystander.take(1);
        rig.control.fault(fault);
        assert!(rig.ask(&prompt(3, 10), 5).finish().end.is_some());
        assert!(matches!(bystander.finish().error(), JobError::Panicked(_)), "{fault:?}");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let told = async { tokio::time::timeout(Duration::from_secs(20), rig.handle().failed()).await };
        runtime.block_on(told).expect("the failure is reported");
        runtime.block_on(rig.handle().drained());
        let (job, _asked) = rig.job(&prompt(1, 10), 5);
        assert!(matches!(rig.handle().submit(job), Err(JobError::Draining)), "new work is refused");
        rig.engine.take().unwrap().stop();
    }
}

#[test]
fn an_engine_that_is_stopped_has_not_failed() {
    let mut rig = Rig::new(EngineOptions::default());
    let handle = rig.handle();
    rig.engine.take().unwrap().stop();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(handle.drained());
    assert!(!*handle.shared.failed.borrow());
}

#[test]
fn a_device_error_fails_the_step_alone() {
    for (fault, want) in [(Fault::FailInHead, "not finite"), (Fault::FailInOpen, "scratch needs")] {
        let rig = Rig::new(EngineOptions::default());
        rig.control.fault(fault);
        let answer = rig.ask(&prompt(1, 10), 5).finish();
        assert!(answer.error().to_string().contains(want), "{answer:?}");
        assert_eq!(rig.ask(&prompt(1, 10), 5).finish().ids, expected(&prompt(1, 10), 5));
        rig.assert_empty();
    }
}

#[test]
fn logits_that_are_not_finite_fail_their_sequence_alone() {
    let rig = Rig::new(EngineOptions::default());
    rig.control.allow(0); // all are submitted before the first step
    let before = rig.ask(&prompt(1, 10), 20);
    let (mut job, broken) = rig.job(&prompt(2, 10), 20);
    job.sampling.seed = BROKEN_SEED;
    rig.handle().submit(job).unwrap();
    let after = rig.ask(&prompt(3, 10), 20);
    rig.control.wait_held();
    rig.control.release();
    let answer = broken.finish();
    assert!(matches!(answer.error(), JobError::Backend(BackendError::NotFinite)), "{answer:?}");
    assert_eq!(answer.ids, [0_u32; 0]);
    assert_eq!(before.finish().ids, expected(&prompt(1, 10), 20));
    assert_eq!(after.finish().ids, expected(&prompt(3, 10), 20), "each sequence gets its own token");
    rig.assert_empty();
}

#[test]
fn a_file_that_changes_fails_its_model_alone() {
    let mut copy = tempfile::NamedTempFile::new().unwrap();
    copy.write_all(&std::fs::read(kept_model()).unwrap()).unwrap();
    let rig = Rig::new(EngineOptions::default());
    let changing = open(2, copy.path());
    rig.control.allow(4);
    let (mut job, asked) = rig.job(&prompt(1, 10), 50);
    job.model = Arc::clone(&changing);
    rig.handle().submit(job).unwrap();
    let steady = rig.ask(&prompt(2, 10), 50);
    rig.control.wait_held();
    copy.as_file().set_len(4096).unwrap();
    rig.control.release();
    let answer = asked.finish();
    assert!(matches!(answer.error(), JobError::Model(_)), "{answer:?}");
    assert_eq!(
        answer.ids,
        expected(&prompt(1, 10), answer.ids.len()),
        "the tokens before the change are right"
    );
    assert_eq!(steady.finish().ids, expected(&prompt(2, 10), 50));
    assert_eq!(Arc::strong_count(&changing), 1, "the engine holds nothing of it");
    rig.assert_empty();
}
