//! Matrices with a factor of their own, `STEM.scale`: a file with them is the file whose weights were multiplied before.

use rocmforge::backend::cpu::Isa;
use rocmforge::backend::{ActivationType, KvType};
use rocmforge_test_support::forge::{Forge, tiny_llama};

use crate::runner::Runner;

const FACTORS: [(&str, f32); 7] = [
    ("blk.0.attn_q", 2.0),
    ("blk.0.attn_k", 0.5),
    ("blk.1.attn_v", 4.0),
    ("blk.1.attn_output", 0.25),
    ("blk.0.ffn_gate", 8.0),
    ("blk.0.ffn_up", 0.5),
    ("blk.1.ffn_down", 2.0),
];

fn logits(forge: &Forge) -> Vec<f32> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, forge.build().bytes).unwrap();
    Runner::open(&path, Isa::Portable, ActivationType::F32, KvType::F32).feed(&[1, 70, 80, 90])
}

/// The same file with this factor beside the matrix.
fn beside(forge: Forge, stem: &str, factor: f32) -> Forge {
    let name = format!("{stem}.scale");
    let forge = forge.tensor(&name, &[1], 0).tensor(&format!("{stem}.input_scale"), &[1], 0);
    forge.with_tensor(&name, |tensor| tensor.data = Some(factor.to_le_bytes().to_vec()))
}

/// The same file with the matrix's weights times this factor.
fn inside(forge: Forge, stem: &str, factor: f32) -> Forge {
    forge.with_tensor(&format!("{stem}.weight"), |tensor| {
        let data = tensor.data.as_mut().unwrap();
        for value in data.as_chunks_mut::<4>().0 {
            *value = (f32::from_le_bytes(*value) * factor).to_le_bytes();
        }
    })
}

#[test]
fn factors_of_matrices_are_those_of_their_weights() {
    let plain = || tiny_llama(7).filled();
    let without = logits(&plain());
    for (stem, factor) in FACTORS {
        // Powers of two: all numbers are the same before and after the factor.
        let (want, got) = (logits(&inside(plain(), stem, factor)), logits(&beside(plain(), stem, factor)));
        assert_ne!(want, without, "{stem}");
        assert_eq!(want, got, "{stem}");
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
