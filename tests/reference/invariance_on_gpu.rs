//! On a GPU with `device.deterministic`, the bits of a row's logits do not depend on the other rows of a step. Nor do they
//! depend on where steps begin and end. Without it, they do.

use rocmforge::backend::hip::{HipBackend, HipOptions};
use rocmforge::tensor::DType;

use crate::gpu;
use crate::invariance::differ_in_company;
use crate::small::{Recipe, Small};
use crate::steps::Runner;

/// A model whose `down` matrix is wide enough for its sums to be split: 1280 inputs are ten steps of 128.
fn split(dtype: DType) -> Recipe {
    Recipe { seed: 90 + u64::from(dtype.ggml()), hidden: 256, ffn: 1280, n_layers: 1, ..Recipe::plain(dtype) }
}

fn backend(deterministic: bool) -> Option<HipBackend> {
    let options = HipOptions { deterministic, upload_threads: 1, ..HipOptions::default() };
    Some(HipBackend::with_runtime(gpu::runtime()?, options).expect("the device did not open"))
}

/// The sequences of a recipe's model that differ; `None` after reporting that there is no GPU.
fn differ(recipe: &Recipe, deterministic: bool) -> Option<Vec<usize>> {
    let model = Small::new(recipe);
    let shared = Runner::on(&model, backend(deterministic)?);
    Some(differ_in_company(shared, || Runner::on(&model, backend(deterministic).expect("it opened before"))))
}

#[test]
fn a_fixed_order_of_sums_makes_company_change_no_bit() {
    for dtype in [DType::Q4_K, DType::F16] {
        let Some(differ) = differ(&split(dtype), true) else { return };
        assert!(differ.is_empty(), "{dtype}: {differ:?}");
    }
}

#[test]
fn a_fixed_order_of_sums_makes_company_change_no_bit_of_experts() {
    let Some(differ) = differ(&split(DType::Q4_K).with_experts(), true) else { return };
    assert!(differ.is_empty(), "{differ:?}");
}

/// Else the tests above would show nothing.
#[test]
fn without_it_company_changes_bits() {
    let Some(differ) = differ(&split(DType::Q4_K), false) else { return };
    assert!(!differ.is_empty());
}
