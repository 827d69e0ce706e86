//! Input that the CPU backend refuses: contradictory batches, parts out of order, weights that are NaN or not loaded,
//! steps larger than memory.

use std::sync::Arc;

use rocmforge::backend::cpu::{CpuBackend, CpuOptions};
use rocmforge::backend::{Backend, BackendError, Progress, SampleRow, StepBatch, StepLimits};
use rocmforge::program::TensorId;
use rocmforge::tensor::DType;

use crate::small::{Recipe, Small, VOCAB, weight_of};
use crate::steps::{Batch, Runner, long_recipe, rows, table, tokens};

#[test]
fn batches_that_contradict_themselves_are_refused() {
    let model = Small::new(&long_recipe(DType::F32));
    let mut runner = Runner::new(&model, CpuOptions::default(), 1);
    let good = rows(&tokens(1, 40), 0, 40);
    let tables = table(2);
    let refused = |runner: &mut Runner<'_>, batch: &Batch, tables: &[u32], stride: usize, why: &str| {
        let step = StepBatch {
            token_ids: &batch.tokens,
            positions: &batch.positions,
            row_sequences: &batch.sequences,
            page_tables: tables,
            page_table_stride: stride,
            logits_rows: &batch.logits,
            recurrent: &[],
        };
        match runner.loaded.backend.begin_step(runner.loaded.slot, &step) {
            Err(BackendError::Batch(text) | BackendError::Absent(text)) => {
                assert!(text.contains(why), "the error {text:?} does not contain {why:?}")
            }
            other => panic!("{why}: {other:?}"),
        }
        // After a refused batch, no part can run.
        assert!(matches!(runner.loaded.try_run(0), Err(BackendError::OutOfOrder(_))));
    };
    let with = |change: &dyn Fn(&mut Batch)| {
        let mut batch = good.clone();
        change(&mut batch);
        batch
    };
    let mut check = |change: &dyn Fn(&mut Batch), why: &str| {
        refused(&mut runner, &with(change), &tables, 2, why);
    };
    check(&|b| *b = Batch::default(), "no rows");
    check(&|b| *b = rows(&tokens(1, 129), 0, 129), "more than the model");
    check(&|b| b.positions.truncate(39), "differ in number");
    check(&|b| b.sequences.push(0), "differ in number");
    check(&|b| b.tokens[3] = VOCAB as u32, "outside the vocabulary");
    check(&|b| b.tokens[3] = u32::MAX, "outside the vocabulary");
    check(&|b| b.sequences[39] = 1, "no page table");
    check(&|b| b.sequences[39] = u32::MAX, "no page table");
    check(&|b| b.logits[39] = 40, "outside the step");
    check(&|b| b.logits.swap(1, 2), "do not rise");
    check(&|b| b.logits[1] = 0, "do not rise");
    check(&|b| b.positions[7] = 6, "do not rise");
    check(&|b| b.positions[39] = 64, "past the end");
    check(&|b| b.positions[39] = u32::MAX, "past the end");
    refused(&mut runner, &good, &[3, 256], 2, "outside the pool");
    refused(&mut runner, &good, &[3, u32::MAX], 2, "outside the pool");
    refused(&mut runner, &good, &[3, 4, 5], 2, "no multiple of their stride");
    refused(&mut runner, &good, &[], 0, "no multiple of their stride");
    refused(&mut runner, &rows(&tokens(1, 40), 32, 40), &[30, 31], 2, "never written");
    runner.step(&good, std::slice::from_ref(&tables));
    let closed = runner.loaded.slot;
    runner.loaded.backend.close_model(closed);
    refused(&mut runner, &good, &tables, 2, "not open");
}

#[test]
fn parts_out_of_order_are_refused() {
    let model = Small::new(&long_recipe(DType::F32));
    let mut runner = Runner::new(&model, CpuOptions::default(), 1);
    let refused =
        |result: Result<Progress, BackendError>| assert!(matches!(result, Err(BackendError::OutOfOrder(_))));
    refused(runner.loaded.try_run(0)); // no step has begun
    runner.begin(&rows(&tokens(1, 3), 0, 3), &[table(1)]);
    let draw = SampleRow {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 0,
        position: 3,
        top_logprobs: 0,
        changes: None,
        mask: None,
        chain: None,
    };
    let drawn = runner.loaded.backend.sample(std::slice::from_ref(&draw));
    assert!(matches!(drawn, Err(BackendError::OutOfOrder(_))), "sampling worked before any logits");
    assert!(matches!(
        runner.loaded.backend.logits(0),
        Err(BackendError::OutOfOrder(_) | BackendError::Absent(_))
    ));
    refused(runner.loaded.try_run(0));
    refused(runner.loaded.try_run(2));
    refused(runner.loaded.try_run(99));
    (0..model.layers.len()).for_each(|layer| {
        runner.attention(layer);
        runner.ffn(layer);
    });
    runner.head();
    refused(runner.loaded.try_run(runner.loaded.program.head_part()));
    let drawn = runner.loaded.backend.sample(&[draw]);
    assert!(
        matches!(drawn, Err(BackendError::Batch(_))),
        "sampling took one draw for three rows with logits"
    );
    assert!(matches!(runner.loaded.backend.logits(3), Err(BackendError::Absent(_))));
    assert_eq!(runner.loaded.backend.logits(2).unwrap().len(), VOCAB);
}

#[test]
fn a_part_stops_at_experts_that_are_not_loaded_and_goes_on_with_them() {
    let model = Small::new(&long_recipe(DType::F32).with_experts());
    let mut runner = Runner::new(&model, CpuOptions::default(), 1);
    runner.begin(&rows(&tokens(1, 3), 0, 3), &[table(1)]);
    runner.attention(0);
    let Progress::Needs(chosen) = runner.loaded.try_run(2).unwrap() else {
        panic!("the part ran without experts")
    };
    let experts: Vec<u32> = chosen.iter().map(|TensorId(number)| *number).collect();
    assert!(experts.is_sorted_by(|a, b| a < b), "experts are not listed once each: {experts:?}");
    assert!(
        (9..=18).contains(&experts.len()) && experts.len().is_multiple_of(3),
        "not three of six experts for each row: {experts:?}"
    );
    assert_eq!(
        runner.loaded.try_run(2).unwrap(),
        Progress::Needs(chosen.clone()),
        "the part needs other experts although none was loaded"
    );
    let (first, rest) = chosen.split_at(3);
    runner.loaded.load(2, rest);
    assert_eq!(runner.loaded.try_run(2).unwrap(), Progress::Needs(first.to_vec()));
    runner.loaded.load(2, first);
    assert_eq!(runner.loaded.try_run(2).unwrap(), Progress::Done);
    assert!(
        matches!(runner.loaded.try_run(2), Err(BackendError::OutOfOrder(_))),
        "a finished part ran again"
    );
}

#[test]
fn steps_beyond_memory_are_refused() {
    let program = Arc::new(Small::new(&long_recipe(DType::F32)).program().0);
    let mut backend = CpuBackend::new(CpuOptions::default()).unwrap();
    let huge = StepLimits { rows: 1 << 50, wanted_rows: 1 };
    assert!(matches!(backend.open_model(&program, huge, 4), Err(BackendError::OutOfMemory { .. })));
    let slot = backend.open_model(&program, StepLimits { rows: 8, wanted_rows: 1 }, 4).unwrap();
    assert_eq!(backend.kv_bytes(slot), 0);
    backend.close_model(slot);
    backend.close_model(slot);
    assert_eq!(backend.kv_bytes(slot), 0);
}

#[test]
fn weights_that_are_no_numbers_are_reported() {
    let recipe = Recipe { seed: 4, ..long_recipe(DType::F32) };
    let mut model = Small::new(&recipe);
    let nan: Vec<u8> = f32::NAN.to_le_bytes().repeat(recipe.hidden);
    model.output_norm = weight_of(DType::F32, 1, recipe.hidden, &nan);
    let mut runner = Runner::new(&model, CpuOptions::default(), 1);
    runner.step(&rows(&tokens(1, 1), 0, 1), &[table(1)]);
    let draw = SampleRow {
        temperature: 0.7,
        top_k: 40,
        top_p: 0.9,
        min_p: 0.0,
        seed: 0,
        position: 1,
        top_logprobs: 0,
        changes: None,
        mask: None,
        chain: None,
    };
    assert!(matches!(runner.loaded.backend.sample(&[draw]).unwrap()[..], [Err(BackendError::NotFinite)]));
}
