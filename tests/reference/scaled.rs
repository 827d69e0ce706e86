//! Matrices and experts with a factor of their own, `STEM.scale`: a file with them is the file whose weights were multiplied before.

use rocmforge::backend::cpu::Isa;
use rocmforge::backend::{ActivationType, KvType};
use rocmforge_test_support::forge::{Forge, newer_decoders, tiny_llama};

use crate::decoders::LOGP_DIFF_MAX;
use crate::logits::log_softmax;
use crate::on_gpu::on_gpu;
use crate::runner::Runner;

const FACTORS: [(&str, f32); 8] = [
    ("blk.0.attn_q", 2.0),
    ("blk.0.attn_k", 0.5),
    ("blk.1.attn_v", 4.0),
    ("blk.1.attn_output", 0.25),
    ("blk.0.ffn_gate", 8.0),
    ("blk.0.ffn_up", 0.5),
    ("blk.1.ffn_down", 2.0),
    ("output", 0.5),
];

/// Experts without gates, with biases, and others.
const OF_EXPERTS: [&str; 3] = ["nemotron_h_moe", "gpt-oss", "qwen2moe"];

/// Of one expert after another.
const PATTERN: [f32; 5] = [2.0, 0.25, 1.0, 4.0, 0.5];

/// Tensors of experts by stem, with a factor for each expert.
type Factors = Vec<(String, Vec<f32>)>;

/// Opens the file's model.
fn open<R>(forge: &Forge, open: impl FnOnce(&std::path::Path) -> R) -> R {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, forge.build().bytes).unwrap();
    open(&path)
}

fn logits(forge: &Forge) -> Vec<f32> {
    open(forge, |path| Runner::open(path, Isa::Portable, ActivationType::F32, KvType::F32))
        .feed(&[1, 70, 80, 90])
}

/// The same file with these factors beside the matrices.
fn beside(forge: Forge, stem: &str, factors: &[f32]) -> Forge {
    let (name, count) = (format!("{stem}.scale"), factors.len() as u64);
    let forge = forge.tensor(&name, &[count], 0).tensor(&format!("{stem}.input_scale"), &[count], 0);
    forge.with_tensor(&name, |tensor| {
        tensor.data = Some(factors.iter().flat_map(|factor| factor.to_le_bytes()).collect());
    })
}

/// The same file with the weights of each matrix times its factor.
fn inside(forge: Forge, stem: &str, factors: &[f32]) -> Forge {
    forge.with_tensor(&format!("{stem}.weight"), |tensor| {
        let data = tensor.data.as_mut().unwrap();
        let each = data.len() / factors.len();
        for (matrix, factor) in data.chunks_exact_mut(each).zip(factors) {
            for value in matrix.as_chunks_mut::<4>().0 {
                *value = (f32::from_le_bytes(*value) * factor).to_le_bytes();
            }
        }
    })
}

/// The models of [`OF_EXPERTS`], with the tensors of experts in some layer and their factors.
fn experts() -> Vec<(&'static str, Forge, Factors)> {
    let made = newer_decoders().into_iter().filter(|(name, _)| OF_EXPERTS.contains(name));
    let with_factors = made.map(|(name, forge)| {
        let forge = forge.filled();
        let of_experts = forge.tensors.iter().filter_map(|tensor| {
            let stem = std::str::from_utf8(&tensor.name).ok()?.strip_suffix("_exps.weight")?;
            let factors = PATTERN.into_iter().cycle().take(*tensor.dims.last()? as usize).collect();
            Some((format!("{stem}_exps"), factors))
        });
        let of_experts = of_experts.collect();
        (name, forge, of_experts)
    });
    with_factors.collect()
}

#[test]
fn factors_of_matrices_are_those_of_their_weights() {
    let plain = || tiny_llama(7).filled();
    let without = logits(&plain());
    for (stem, factor) in FACTORS {
        // Powers of two: all numbers are the same before and after the factor.
        let (want, got) =
            (logits(&inside(plain(), stem, &[factor])), logits(&beside(plain(), stem, &[factor])));
        assert_ne!(want, without, "{stem}");
        assert_eq!(want, got, "{stem}");
    }
}

#[test]
fn factors_of_experts_are_those_of_their_weights() {
    let made = experts();
    assert_eq!(made.len(), OF_EXPERTS.len());
    for (name, forge, of_experts) in made {
        let without = logits(&forge);
        assert!(of_experts.len() >= 2, "{name}");
        for (stem, factors) in of_experts {
            let want = logits(&inside(forge.clone(), &stem, &factors));
            assert_ne!(want, without, "{name} {stem}");
            assert_eq!(want, logits(&beside(forge.clone(), &stem, &factors)), "{name} {stem}");
        }
    }
}

/// All factors at once, in a step of many rows and in steps of one.
#[test]
fn factors_of_experts_are_those_of_their_weights_on_a_gpu() {
    let ids: Vec<u32> = (0..42).map(|i| (i * 53 + 7) % 250 + 3).collect();
    let answers = |runner: &mut Runner| {
        let first = runner.feed(&ids[..40]);
        [first, runner.feed(&ids[40..41]), runner.feed(&ids[41..])]
    };
    for (name, forge, of_experts) in experts() {
        let all = |forge: Forge, put: fn(Forge, &str, &[f32]) -> Forge| {
            of_experts.iter().fold(forge, |forge, (stem, factors)| put(forge, stem, factors))
        };
        let (on, kv) = (ActivationType::F32, KvType::F32);
        let gpu = open(&all(forge.clone(), beside), |path| on_gpu(path, on, kv));
        let Some(mut gpu) = gpu else { return };
        let mut cpu = open(&all(forge, inside), |path| Runner::open(path, Isa::Portable, on, kv));
        for (got, want) in answers(&mut gpu).iter().zip(answers(&mut cpu)) {
            let both = log_softmax(got).into_iter().zip(log_softmax(&want));
            let worst = both.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(worst < LOGP_DIFF_MAX, "{name}: off by {worst:.1e}");
        }
    }
}

#[test]
fn factors_that_are_not_one_number_are_refused() {
    let forge = tiny_llama(7).filled().tensor("blk.0.attn_q.scale", &[2], 0);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, forge.build().bytes).unwrap();
    let file = std::fs::File::open(path).unwrap();
    let error =
        rocmforge::model::Model::open(rocmforge::model::ModelId(1), "scaled", vec![file]).unwrap_err();
    assert!(error.to_string().contains("blk.0.attn_q.scale"), "{error}");
}
