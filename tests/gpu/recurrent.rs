//! Models with recurrent states on a device: an array of memory for each sequence, read at one place and written at another.

use std::sync::Arc;

use rocmforge::backend::hip::HipOptions;
use rocmforge::model::Model;

use crate::forge;
use crate::rig::{Answer, Rig, model};

/// Short convolutions, scans, and delta rules; the second without any attention.
const NAMES: [&str; 3] = ["lfm2", "mamba2", "qwen35"];

fn small(scratch: &tempfile::TempDir, id: u64, name: &str) -> Arc<Model> {
    let (_, forge) = forge::newer_decoders().into_iter().find(|(known, _)| *known == name).unwrap();
    let path = scratch.path().join(name);
    std::fs::write(&path, forge.build().bytes).unwrap();
    model(id, &path)
}

fn ids(answer: Answer) -> Vec<u32> {
    answer.end.unwrap();
    answer.ids
}

/// A fixed order of sums, so that company changes no bit of products either.
fn rig() -> Option<Rig> {
    Rig::open_with(HipOptions { upload_threads: 2, deterministic: true, ..HipOptions::default() })
}

#[test]
fn sequences_with_states_get_the_answers_they_get_alone() {
    let Some(rig) = rig() else { return };
    let scratch = tempfile::tempdir().unwrap();
    for (id, name) in (1..).zip(NAMES) {
        let model = small(&scratch, id, name);
        // The longest is cut into steps of 32 rows.
        let prompts: Vec<Vec<u32>> =
            [1, 5, 70, 33].map(|len| (0..len).map(|i| (i * 37 + len * 11) % 250 + 3).collect()).into();
        let alone: Vec<Vec<u32>> = prompts.iter().map(|prompt| ids(rig.ask(&model, prompt, 16))).collect();
        let differ = alone.iter().any(|answer| *answer != alone[0]);
        assert!(differ, "{name}: all prompts have one answer");
        let before = rig.handle().snapshot();
        let asked: Vec<_> = prompts.iter().map(|prompt| rig.submit(&model, prompt, 16)).collect();
        for (asked, alone) in asked.into_iter().zip(&alone) {
            assert_eq!(ids(asked.finish()), *alone, "{name}");
        }
        let after = rig.handle().snapshot();
        let steps = after.counters.steps - before.counters.steps;
        let sequences = after.counters.step_sequences - before.counters.step_sequences;
        assert!(sequences > steps, "{name}: {steps} steps, none was shared");
        assert!(after.device.graph_replays > 0, "{name}: no step was replayed");
        rig.handle().model_gone(model.id);
        assert!(rig.comes(|s| s.device_bytes == 0), "{name}: states are left");
    }
}
