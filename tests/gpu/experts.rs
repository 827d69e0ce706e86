//! Models with experts on a device: only the experts that a row is routed to are loaded.

use std::sync::Arc;

use rocmforge::model::Model;

use crate::forge;
use crate::rig::{Answer, Rig, model};

/// Weights besides experts: per layer (of two) two norms, four projections, two head norms and the router; then the
/// last norm and the output matrix. Embeddings stay in the file.
const OTHERS: u64 = 2 * 9 + 2;

/// Three matrices of each of three experts, in two layers.
const CHOSEN: u64 = 2 * 3 * 3;

/// A small model with 8 experts, of which each row uses 3.
fn qwen3moe(scratch: &tempfile::TempDir) -> Arc<Model> {
    let (name, forge) = forge::decoders().into_iter().find(|(name, _)| *name == "qwen3moe").unwrap();
    let path = scratch.path().join(name);
    std::fs::write(&path, forge.build().bytes).unwrap();
    model(1, &path)
}

fn ids(answer: Answer) -> Vec<u32> {
    answer.end.unwrap();
    answer.ids
}

#[test]
fn experts_that_no_row_was_sent_to_are_never_uploaded() {
    let Some(rig) = Rig::open() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let model = qwen3moe(&scratch);
    let ask = |prompt: &[u32]| ids(rig.ask(&model, prompt, 1));
    let one = ask(&[17]);
    assert!(rig.comes(|s| s.device.uploads == OTHERS + CHOSEN), "{:?}", rig.handle().snapshot().device);
    assert_eq!(ask(&[17]), one);
    assert_eq!(
        rig.handle().snapshot().device.uploads,
        OTHERS + CHOSEN,
        "the same token loaded other experts"
    );
    let long: Vec<u32> = (0..200).map(|i| (i * 37 + 11) % 256 + 3).collect();
    ask(&long);
    let all = OTHERS + 2 * 3 * 8;
    assert!(rig.comes(|s| s.device.uploads == all), "two hundred tokens did not load every expert");
    assert_eq!(ask(&[17]), one);
}

/// Padding rows of a recorded step are routed to experts too, and those need not be resident.
#[test]
fn sequences_that_share_steps_get_the_answers_they_get_alone() {
    let Some(rig) = Rig::open() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let model = qwen3moe(&scratch);
    let prompts = [[17], [99], [201], [42], [7]];
    let alone: Vec<Vec<u32>> = prompts.iter().map(|prompt| ids(rig.ask(&model, prompt, 16))).collect();
    for count in [2, 3, 5] {
        rig.handle().model_gone(model.id);
        assert!(rig.comes(|s| s.device_bytes == 0));
        ids(rig.ask(&model, &[17], 1));
        let before = rig.handle().snapshot().counters.steps;
        let asked: Vec<_> = prompts[..count].iter().map(|prompt| rig.submit(&model, prompt, 16)).collect();
        for (asked, alone) in asked.into_iter().zip(&alone) {
            assert_eq!(ids(asked.finish()), *alone);
        }
        let steps = rig.handle().snapshot().counters.steps - before;
        assert!(steps < 16 * count as u64, "{steps} steps: no step was shared");
    }
}

/// Recorded steps of a warm model are launched without a look at the choice. One whose row chose an absent expert runs again.
#[test]
fn a_recorded_step_that_lacks_an_expert_runs_again() {
    let Some(rig) = Rig::open() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let model = qwen3moe(&scratch);
    let prompts: Vec<[u32; 1]> = (0..8).map(|i| [i * 31 + 5]).collect();
    // All experts are loaded by then, and nothing is lacking.
    let long: Vec<u32> = (0..200).map(|i| (i * 37 + 11) % 256 + 3).collect();
    ids(rig.ask(&model, &long, 1));
    let complete: Vec<Vec<u32>> = prompts.iter().map(|prompt| ids(rig.ask(&model, prompt, 12))).collect();
    assert_eq!(rig.handle().snapshot().device.steps_repeated, 0);
    rig.handle().model_gone(model.id);
    assert!(rig.comes(|s| s.device_bytes == 0));
    for (prompt, complete) in prompts.iter().zip(&complete) {
        assert_eq!(ids(rig.ask(&model, prompt, 12)), *complete);
    }
    assert!(rig.comes(|s| s.device.steps_repeated > 0), "{:?}", rig.handle().snapshot().device);
}
