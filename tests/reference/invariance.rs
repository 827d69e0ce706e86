//! The bits of a row's logits do not depend on the step boundaries of its sequence or on other rows of a step. Nor do
//! they depend on its pages, their old content, the number of threads, or the instruction set.

use std::time::Duration;

use rocmforge::backend::Backend;
use rocmforge::backend::cpu::{CpuBackend, CpuOptions, Isa, Slices};
use rocmforge::tensor::DType;

use crate::loaded::Device;
use crate::small::{Random, Recipe, Small};
use crate::steps::{Batch, FLOAT, Runner, isas, long_recipe, rows, table, tokens};

const LONG: usize = 1110;

/// Logits of every row from 1000 on, and of 4 more rows decoded one by one; each reads all keys and values.
fn run_long(runner: &mut Runner<'_>, ids: &[u32], chunk: usize) -> Vec<Vec<u32>> {
    let tables = [table(36)];
    let mut out = Vec::new();
    let mut start = 0;
    while start < LONG {
        let end = (start + chunk).min(LONG);
        out.extend(runner.step(&rows(ids, start, end), &tables));
        start = end;
    }
    for position in LONG..LONG + 4 {
        out.extend(runner.step(&rows(ids, position, position + 1), &tables));
    }
    out.drain(..1000);
    out.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn chunks_threads_and_instructions_change_no_bit() {
    for (dtype, options) in [(DType::Q8_0, CpuOptions::default()), (DType::F16, FLOAT)] {
        let dense = long_recipe(dtype);
        let model = Small::new(&if dtype == DType::F16 { dense.with_experts() } else { dense });
        let ids = tokens(5, LONG + 4);
        let mut fast = Runner::new(&model, options, 2);
        let want = run_long(&mut fast, &ids, 128);
        for (chunk, threads) in [(64, 1), (7, 3), (1, 2), (33, 2), (1, 1)] {
            let got = run_long(&mut Runner::new(&model, options, threads), &ids, chunk);
            assert!(got == want, "{dtype}: chunks of {chunk} on {threads} threads differ");
        }
        for isa in isas() {
            let options = CpuOptions { isa: Some(isa), ..options };
            let got = run_long(&mut Runner::new(&model, options, 1), &ids, 100);
            assert!(got == want, "{dtype}: {isa} differs");
        }
    }
}

#[test]
fn other_rows_of_a_step_change_no_bit() {
    check_company(&Small::new(&long_recipe(DType::Q4_1)));
    check_company(&Small::new(&long_recipe(DType::Q4_1).with_experts()));
}

fn check_company(model: &Small) {
    let shared = Runner::new(model, CpuOptions::default(), 2);
    let differ = differ_in_company(shared, || Runner::new(model, CpuOptions::default(), 1));
    assert!(differ.is_empty(), "sequences {differ:?} differ when they share steps");
}

/// Computes five sequences together, prefill beside decode in changing combinations, and each of them in steps of its own.
/// Returns the sequences of which some logits' bits differ.
pub fn differ_in_company<'a, B: Device>(
    mut shared: Runner<'a, B>,
    mut alone: impl FnMut() -> Runner<'a, B>,
) -> Vec<usize> {
    let sequences: Vec<Vec<u32>> = (0..5).map(|s| tokens(200 + s, 90 + 13 * s as usize)).collect();
    let tables: Vec<Vec<u32>> = (0..5).map(|s| (0..5).map(|p| s * 5 + 4 - p).collect()).collect();
    let mut random = Random::new(6);
    let mut done = [0usize; 5];
    let mut mixed: Vec<Vec<Vec<f32>>> = vec![Vec::new(); 5];
    while done.iter().zip(&sequences).any(|(d, s)| *d < s.len()) {
        let (mut batch, mut own_tables) = (Batch::default(), Vec::new());
        let mut owners = Vec::new();
        for s in 0..5 {
            let count = [0, 1, 1, 5, 20][random.below(5)].min(sequences[s].len() - done[s]);
            if count > 0 {
                own_tables.push(tables[s].clone());
            }
            for _ in 0..count {
                batch.logits.push(batch.tokens.len() as u32);
                batch.tokens.push(sequences[s][done[s]]);
                batch.positions.push(done[s] as u32);
                batch.sequences.push(own_tables.len() as u32 - 1);
                owners.push(s);
                done[s] += 1;
            }
        }
        if !owners.is_empty() {
            for (logits, s) in shared.step(&batch, &own_tables).into_iter().zip(owners) {
                mixed[s].push(logits);
            }
        }
    }
    let bits = |rows: &[Vec<f32>]| rows.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
    let differs = |s: &usize| {
        let (sequence, own) = (&sequences[*s], [tables[*s].clone()]);
        let (mut alone, mut want) = (alone(), Vec::new());
        for start in (0..sequence.len()).step_by(100) {
            let end = (start + 100).min(sequence.len());
            want.extend(alone.step(&rows(sequence, start, end), &own));
        }
        bits(&mixed[*s]) != bits(&want)
    };
    (0..sequences.len()).filter(differs).collect()
}

#[test]
fn pages_hold_nothing_of_the_sequence_before() {
    let model = Small::new(&long_recipe(DType::Q8_0));
    let mut runner = Runner::new(&model, CpuOptions::default(), 2);
    let tables = [table(3)];
    let (first, second) = (tokens(1, 90), tokens(2, 40));
    let page_bytes = {
        let mut fresh = Runner::new(&model, CpuOptions::default(), 1);
        fresh.step(&rows(&first, 0, 1), &tables);
        fresh.loaded.backend.kv_bytes(fresh.loaded.slot)
    };
    let want = Runner::new(&model, CpuOptions::default(), 2).step(&rows(&second, 0, 40), &tables);
    runner.step(&rows(&first, 0, 90), &tables);
    assert_eq!(runner.loaded.backend.kv_bytes(runner.loaded.slot), 3 * page_bytes);
    // The pages are not released: the second sequence overwrites other tokens in them.
    assert!(runner.step(&rows(&second, 0, 40), &tables) == want);
    runner.loaded.backend.release_pages(runner.loaded.slot, &tables[0]);
    assert_eq!(runner.loaded.backend.kv_bytes(runner.loaded.slot), 0);
    assert!(runner.step(&rows(&second, 0, 40), &tables) == want);
}

/// A part may pause inside a product, and inside the attention of many rows.
#[test]
fn pauses_change_no_bit() {
    let ids = tokens(5, 140);
    // Each column and each tile is a slice of its own, and each slice ends with a pause.
    let slices = Slices { whole: 0, first: 0, time: Duration::ZERO, pause: Duration::ZERO };
    for recipe in [Recipe::plain(DType::Q8_0), Recipe::plain(DType::Q4_K).with_experts()] {
        let recipe = Recipe { biases: recipe.experts.is_none(), ..recipe };
        let model = Small::new(&recipe);
        let run = |slices: Slices| {
            let mut backend = CpuBackend::with_exact_threads(CpuOptions::default(), 2).unwrap();
            backend.set_slices(slices);
            let mut runner = Runner::on(&model, backend);
            let tables = [table(5)];
            let mut out = runner.step(&rows(&ids, 0, 120), &tables);
            (120..ids.len()).for_each(|at| out.extend(runner.step(&rows(&ids, at, at + 1), &tables)));
            (out, runner.loaded.pauses)
        };
        let (whole, _) = run(Slices::default());
        let (cut, pauses) = run(slices);
        assert!(pauses > 1000 && cut == whole, "{pauses} pauses: {recipe:?}");
    }
}

/// A fused unit computes the same bits as its operations one by one.
#[test]
fn fusing_operations_changes_no_bit() {
    let ids = tokens(5, 140);
    for (dtype, options) in
        [(DType::Q8_0, CpuOptions::default()), (DType::Q4_K, CpuOptions::default()), (DType::F16, FLOAT)]
    {
        for recipe in [Recipe::plain(dtype), Recipe::plain(dtype).with_experts()] {
            let recipe = Recipe { biases: recipe.experts.is_none(), head_norms: true, ..recipe };
            let model = Small::new(&recipe);
            let run = |options| {
                let mut runner = Runner::new(&model, options, 2);
                let tables = [table(5)];
                let mut out = runner.step(&rows(&ids, 0, 120), &tables);
                (120..ids.len()).for_each(|at| out.extend(runner.step(&rows(&ids, at, at + 1), &tables)));
                out
            };
            let fused = run(options);
            let alone = run(CpuOptions { unfused: true, isa: Some(Isa::Portable), ..options });
            assert!(fused == alone, "{recipe:?}");
        }
    }
}
