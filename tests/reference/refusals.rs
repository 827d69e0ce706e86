//! What the CPU backend refuses: batches, weights and sizes that contradict each other, units out of order, weights that
//! are no numbers.

use rocmforge::backend::cpu::{CpuBackend, CpuOptions};
use rocmforge::backend::{
    AttentionInput, Backend, BackendError, Expert, ExpertDims, Experts, FfnInput, ModelDims, Router,
    SampleRow, StepBatch,
};
use rocmforge::tensor::DType;

use crate::small::{Ffn, Recipe, Small, VOCAB, weight_of};
use crate::steps::{Batch, Runner, long_recipe, projection, rows, table, tokens};

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
        };
        match runner.backend.begin_step(runner.slot, &step) {
            Err(BackendError::Batch(text)) => assert!(text.contains(why), "{text:?} does not say {why:?}"),
            other => panic!("{why}: {other:?}"),
        }
        // Nothing can be computed after it.
        assert!(matches!(runner.backend.attention(0), Err(BackendError::Batch(_))));
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
    check(&|b| b.sequences[39] = 1, "without page table");
    check(&|b| b.sequences[39] = u32::MAX, "without page table");
    check(&|b| b.logits[39] = 40, "does not have");
    check(&|b| b.logits.swap(1, 2), "do not rise");
    check(&|b| b.logits[1] = 0, "do not rise");
    check(&|b| b.positions[7] = 6, "do not rise");
    check(&|b| b.positions[39] = 64, "past the end");
    check(&|b| b.positions[39] = u32::MAX, "past the end");
    refused(&mut runner, &good, &[3, 256], 2, "outside the pool");
    refused(&mut runner, &good, &[3, u32::MAX], 2, "outside the pool");
    refused(&mut runner, &good, &[3, 4, 5], 2, "not whole");
    refused(&mut runner, &good, &[], 0, "not whole");
    refused(&mut runner, &rows(&tokens(1, 40), 32, 40), &[30, 31], 2, "never written");
    runner.step(&good, std::slice::from_ref(&tables));
    let closed = runner.slot;
    runner.backend.close_model(closed);
    refused(&mut runner, &good, &tables, 2, "not open");
}

#[test]
fn units_out_of_order_and_foreign_weights_are_refused() {
    let model = Small::new(&long_recipe(DType::F32));
    let wider = Small::new(&Recipe { hidden: 128, ..long_recipe(DType::F32) });
    let mut backend = CpuBackend::new(CpuOptions::default()).unwrap();
    assert!(matches!(backend.attention(0), Err(BackendError::Batch(_))));
    let mut runner = Runner::new(&model, CpuOptions::default(), 1);
    runner.begin(&rows(&tokens(1, 3), 0, 3), &[table(1)]);
    let draw = SampleRow {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 0,
        position: 3,
        top_logprobs: 0,
    };
    assert!(
        matches!(runner.backend.sample(std::slice::from_ref(&draw)), Err(BackendError::Batch(_))),
        "no logits yet"
    );
    assert!(matches!(runner.backend.logits(0), Err(BackendError::Batch(_))));
    assert!(matches!(runner.backend.attention(2), Err(BackendError::Batch(_))), "a layer there is not");
    let shape = |result: Result<(), BackendError>| assert!(matches!(result, Err(BackendError::Shape { .. })));
    let (layer, foreign) = (&model.layers[0], &wider.layers[0]);
    let (Ffn::Dense { gate, .. }, Ffn::Dense { up, down, .. }) = (&layer.ffn, &foreign.ffn) else {
        panic!("dense layers");
    };
    shape(runner.backend.embed(&wider.embedding.device));
    shape(runner.backend.attention_output(&projection(&foreign.attn_output)));
    shape(runner.backend.ffn_output(&projection(down)));
    shape(runner.backend.head(&wider.output_norm.device, &model.output.device));
    shape(runner.backend.head(&model.output_norm.device, &wider.output.device));
    let input = FfnInput { norm: &layer.ffn_norm.device, gate: projection(gate), up: projection(up) };
    shape(runner.backend.ffn_input(&input));
    let input = AttentionInput {
        norm: &layer.attn_norm.device,
        q: projection(&layer.q),
        k: projection(&layer.q),
        v: projection(&layer.v),
        q_norm: None,
        k_norm: None,
        rope_factors: None,
    };
    shape(runner.backend.attention_input(0, &input));
    runner.head();
    assert!(matches!(runner.backend.sample(&[draw]), Err(BackendError::Batch(_))), "three rows have logits");
    assert!(matches!(runner.backend.logits(3), Err(BackendError::Batch(_))));
    assert_eq!(runner.backend.logits(2).unwrap().len(), VOCAB);
}

#[test]
fn experts_out_of_order_and_experts_not_loaded_are_refused() {
    let model = Small::new(&long_recipe(DType::F32).with_experts());
    let dense = Small::new(&long_recipe(DType::F32));
    let (norm, Ffn::Experts { router, experts }) = (&model.layers[0].ffn_norm.device, &model.layers[0].ffn)
    else {
        panic!("a layer of experts");
    };
    let router = Router { norm, logits: projection(router) };
    let mut loaded: Vec<Option<Expert>> = experts
        .iter()
        .map(|parts| parts.each_ref().map(|w| w.device.clone()))
        .map(|[gate, up, down]| Some(Expert { gate, up, down }))
        .collect();
    let batch = |result: Result<(), BackendError>| assert!(matches!(result, Err(BackendError::Batch(_))));
    let given = |loaded: &[Option<Expert>], runner: &mut Runner<'_>, layer| {
        runner.backend.experts(layer, &Experts { loaded, version: 0 })
    };

    let mut other = Runner::new(&dense, CpuOptions::default(), 1);
    other.begin(&rows(&tokens(1, 3), 0, 3), &[table(1)]);
    batch(other.backend.route(0, &router));
    let mut runner = Runner::new(&model, CpuOptions::default(), 1);
    runner.begin(&rows(&tokens(1, 3), 0, 3), &[table(1)]);
    batch(given(&loaded, &mut runner, 0));
    assert!(matches!(runner.backend.routed(), Err(BackendError::Batch(_))));
    batch(runner.backend.route(2, &router));
    runner.backend.route(0, &router).unwrap();
    batch(given(&loaded, &mut runner, 1));
    runner.backend.route(0, &router).unwrap();
    batch(given(&loaded[1..], &mut runner, 0));
    runner.backend.route(0, &router).unwrap();
    given(&loaded, &mut runner, 0).unwrap();
    batch(given(&loaded, &mut runner, 0)); // twice
    runner.backend.route(0, &router).unwrap();
    let chosen = runner.backend.routed().unwrap();
    assert!(chosen.is_sorted_by(|a, b| a < b) && (3..=6).contains(&chosen.len()), "{chosen:?}");
    let expert = loaded[chosen[0] as usize].take();
    batch(given(&loaded, &mut runner, 0));
    let crossed = expert.map(|e| Expert { gate: e.down.clone(), ..e });
    loaded[chosen[0] as usize] = crossed;
    runner.backend.route(0, &router).unwrap();
    assert!(matches!(given(&loaded, &mut runner, 0), Err(BackendError::Shape { .. })));
}

#[test]
fn sizes_that_contradict_themselves_are_refused() {
    let good = Small::new(&long_recipe(DType::F32)).dims;
    let mut backend = CpuBackend::new(CpuOptions::default()).unwrap();
    let mut check = |change: &dyn Fn(&mut ModelDims)| {
        let mut dims = good.clone();
        change(&mut dims);
        assert!(matches!(backend.open_model(&dims, 4), Err(BackendError::Dims(_))), "{dims:?}");
    };
    check(&|d| d.hidden = 0);
    check(&|d| d.n_kv_heads = 0);
    check(&|d| d.n_kv_heads = 4);
    let experts = ExpertDims { count: 4, used: 2, ffn: 8, normalise: true, scale: 1.0 };
    check(&|d| d.experts = Some(ExpertDims { used: 5, ..experts.clone() }));
    check(&|d| d.experts = Some(ExpertDims { used: 0, ..experts.clone() }));
    check(&|d| d.experts = Some(ExpertDims { ffn: 0, ..experts.clone() }));
    check(&|d| d.rope.dims = 15);
    check(&|d| d.rope.dims = 18);
    check(&|d| d.rows_max = 0);
    check(&|d| d.logits_rows_max = d.rows_max + 1);
    check(&|d| d.head_dim = usize::MAX / 64);
    let huge = ModelDims { rows_max: 1 << 50, ..good.clone() };
    assert!(matches!(backend.open_model(&huge, 4), Err(BackendError::OutOfMemory { .. })));
    let slot = backend.open_model(&good, 4).unwrap();
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
    };
    assert!(matches!(runner.backend.sample(&[draw]).unwrap()[..], [Err(BackendError::NotFinite)]));
}
