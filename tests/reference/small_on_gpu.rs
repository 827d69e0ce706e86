//! Random decoders with weights of every type on a GPU or the look-alike, against f64.

use rocmforge::backend::cpu::quant::SUPPORTED;
use rocmforge::backend::hip::{HipBackend, HipOptions};
use rocmforge::backend::{ActivationType, KvType};
use rocmforge::program::RopeLayout;
use rocmforge::tensor::DType;

use crate::dense::divergence;
use crate::forward;
use crate::gpu;
use crate::small::{Recipe, Small};
use crate::steps::{Batch, Runner, rows, table, tokens};

/// Rows of the steps: many, one alone, and few, so that padding rows fill up recorded steps.
const STEPS: [usize; 5] = [12, 1, 1, 3, 5];

/// Error limit of logits in single precision, relative to their norm.
const EXACT: f64 = 1e-5;

/// Limit of the mean KL divergence with 8-bit activations, in nats.
const INT8_KL: f64 = 3e-3;

/// The same with experts: a row with two nearly equal experts may choose the other one.
const INT8_EXPERTS_KL: f64 = 3e-2;

/// Runs a recipe's model on the GPU and compares it with f64; false after reporting that there is no GPU.
fn check(recipe: &Recipe, activations: ActivationType, kv: KvType) -> bool {
    let Some(runtime) = gpu::runtime() else { return false };
    let options = HipOptions { activations, kv, upload_threads: 1, ..HipOptions::default() };
    let backend = HipBackend::with_runtime(runtime, options).expect("the device did not open");
    let model = Small::new(recipe);
    let ids = tokens(recipe.seed + 100, STEPS.iter().sum());
    let want = forward::logits(&model, &ids);
    let mut runner = Runner::on(&model, backend);
    let tables = [table(2)];
    let mut got = Vec::new();
    for count in STEPS {
        got.extend(runner.step(&rows(&ids, got.len(), got.len() + count), &tables));
    }
    assert_eq!(got.len(), want.len());
    let (mut off, mut kl) = (0f64, 0.0);
    for (got, want) in got.iter().zip(&want) {
        let got: Vec<f64> = got.iter().map(|&x| f64::from(x)).collect();
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let far = norm(&mut got.iter().zip(want).map(|(g, w)| g - w)) / norm(&mut want.iter().copied());
        assert!(far.is_finite(), "{recipe:?}: the logits are not finite");
        off = off.max(far);
        kl += divergence(want, &got) / ids.len() as f64;
    }
    let (dtype, experts) = (recipe.dtype, recipe.experts.is_some());
    println!(
        "{dtype}, experts {experts}, {activations:?}: logits off by {off:.1e} of their norm, mean KL {kl:.1e}"
    );
    match activations {
        ActivationType::F32 => assert!(off <= EXACT, "{recipe:?}: off by {off:e}"),
        ActivationType::Int8 => {
            let most = if experts { INT8_EXPERTS_KL } else { INT8_KL };
            assert!(kl <= most, "{recipe:?}: mean KL {kl:e}");
        }
    }
    true
}

const SINGLE: (ActivationType, KvType) = (ActivationType::F32, KvType::F32);
const DEFAULTS: (ActivationType, KvType) = (ActivationType::Int8, KvType::F16);

/// Checks a recipe of each type, until one finds no GPU.
fn check_types(recipe: impl Fn(DType) -> Recipe, (activations, kv): (ActivationType, KvType)) {
    let _ = SUPPORTED.iter().all(|&dtype| check(&recipe(dtype), activations, kv));
}

fn weights(dtype: DType) -> Recipe {
    Recipe { seed: 3 + u64::from(dtype.ggml()), ffn: 256, ..Recipe::plain(dtype) }
}

fn experts(dtype: DType) -> Recipe {
    let seed = 203 + u64::from(dtype.ggml());
    let mut recipe = Recipe { seed, ffn: 256, ..Recipe::plain(dtype).with_experts() };
    let experts = recipe.experts.as_mut().unwrap();
    (experts.count, experts.used) = (10, 2);
    recipe
}

#[test]
fn weights_of_every_type_give_the_logits_of_f64() {
    check_types(weights, SINGLE);
}

#[test]
fn weights_of_every_type_with_eight_bits_give_nearly_the_logits_of_f64() {
    check_types(weights, DEFAULTS);
}

#[test]
fn experts_of_every_type_give_the_logits_of_f64() {
    check_types(experts, SINGLE);
}

#[test]
fn experts_of_every_type_with_eight_bits_give_nearly_the_logits_of_f64() {
    check_types(experts, DEFAULTS);
}

/// Queries and keys of one type share a launch with values of the other, at few rows and at many.
#[test]
fn layers_of_two_types_give_the_logits_of_f64() {
    for (seed, first, second) in [(61, DType::Q4_K, DType::Q6_K), (62, DType::Q5_K, DType::Q6_K)] {
        let dense = Recipe { seed, second: Some(second), ffn: 256, ..Recipe::plain(first) };
        let both = [dense.clone(), Recipe { second: Some(second), ..experts(first) }];
        for (recipe, (activations, kv)) in both.iter().flat_map(|r| [(r, SINGLE), (r, DEFAULTS)]) {
            if !check(recipe, activations, kv) {
                return;
            }
        }
    }
}

#[test]
fn heads_of_every_shape_give_the_logits_of_f64() {
    let (halves, interleaved) = (RopeLayout::Halves, RopeLayout::Interleaved);
    let shapes = [
        (1, 8, 8, interleaved),
        (2, 64, 64, halves),
        (3, 80, 32, halves),
        (4, 128, 128, halves),
        (5, 64, 16, interleaved),
        (7, 96, 96, interleaved),
        (8, 64, 64, halves),
    ];
    for (group, head_dim, rope_dims, layout) in shapes {
        let seed = 300 + group as u64;
        let recipe = Recipe { seed, ..Recipe::of_heads(group, head_dim, rope_dims, layout) };
        if ![SINGLE, DEFAULTS].iter().all(|&(activations, kv)| check(&recipe, activations, kv)) {
            return;
        }
    }
}

/// One row each of many sequences, more than one step after the other: recorded, replayed, and filled up with padding rows.
#[test]
fn sequences_that_decode_together_give_the_logits_of_f64() {
    let Some(runtime) = gpu::runtime() else { return };
    const LENGTH: usize = 5;
    let recipe = Recipe { seed: 41, ffn: 256, ..Recipe::plain(DType::Q4_K) };
    let model = Small::new(&recipe);
    let options = HipOptions { upload_threads: 1, ..HipOptions::default() };
    let backend = HipBackend::with_runtime(runtime, options).expect("the device did not open");
    let mut runner = Runner::on(&model, backend);
    for sequences in [9, 40, 64] {
        let ids: Vec<Vec<u32>> = (0..sequences).map(|seed| tokens(500 + seed, LENGTH)).collect();
        let tables: Vec<Vec<u32>> = (0..sequences as u32).map(|page| vec![page * 3 + 1]).collect();
        let wants: Vec<_> = ids.iter().map(|ids| forward::logits(&model, ids)).collect();
        let mut kl = 0.0;
        for at in 0..LENGTH {
            let batch = Batch {
                tokens: ids.iter().map(|ids| ids[at]).collect(),
                positions: vec![at as u32; ids.len()],
                sequences: (0..sequences as u32).collect(),
                logits: (0..sequences as u32).collect(),
            };
            let step = runner.step(&batch, &tables);
            assert_eq!(step.len(), ids.len());
            for (got, want) in step.iter().zip(&wants) {
                let got: Vec<f64> = got.iter().map(|&x| f64::from(x)).collect();
                let off = divergence(&want[at], &got);
                assert!(
                    off.is_finite() && off <= 30.0 * INT8_KL,
                    "{sequences} sequences, token {at}: KL {off:e}"
                );
                kl += off / (ids.len() * LENGTH) as f64;
            }
        }
        println!("{sequences} sequences: mean KL {kl:.1e}");
        assert!(kl <= INT8_KL, "{sequences} sequences: mean KL {kl:e}");
    }
}

#[test]
fn a_type_without_kernels_is_refused_by_name() {
    let (program, _) = Small::new(&weights(DType::Q1_0)).program();
    let refused = rocmforge::backend::hip::refuses(&program).unwrap().to_string();
    assert!(refused.contains("Q1_0"), "{refused}");
}
