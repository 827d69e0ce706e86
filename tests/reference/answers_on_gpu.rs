//! Logits and greedy tokens of a GPU against another engine's. A test takes all 20 prompts on a real GPU, some on the
//! look-alike, where a step of a large model takes seconds.

use std::path::Path;

use rocmforge::backend::{ActivationType, KvType};

use crate::common;
use crate::gpu;
use crate::logits::{CACHE, Expected, Loss, Part};
use crate::on_gpu::on_gpu;

/// 8-bit activations: unlike the CPU, the GPU has no finer codes for outliers.
const INT8: Loss = Loss { ratio: 1.5, kl_max: 0.05, clear: 0.5 };

/// The whole reference on a GPU, or `part` of it on the look-alike.
fn extent(part: Part) -> Part {
    let lookalike = gpu::runtime().is_some_and(|runtime| gpu::is_lookalike(&runtime));
    if lookalike { part } else { Part::WHOLE }
}

/// Checks that single precision on the GPU matches the reference within the CPU's bound.
fn check_exact(name: &str, path: &Path, part: Part) {
    let Some(mut gpu) = on_gpu(path, ActivationType::F32, KvType::F32) else { return };
    Expected::read(name, path).check_exact(&mut gpu, extent(part));
}

/// Checks that the default settings lose no more than `allowed`.
fn check_loss(name: &str, path: &Path, part: Part, allowed: Loss) {
    let Some(mut gpu) = on_gpu(path, ActivationType::Int8, KvType::F16) else { return };
    Expected::read(name, path).check_loss(&mut gpu, extent(part), allowed);
}

#[test]
fn smollm2_in_single_precision_gives_the_reference() {
    let Some(path) = common::smollm2() else { return };
    check_exact("smollm2", &path, Part { prompts: 1, steps: 2 });
}

#[test]
fn smollm2_in_eight_bits_loses_about_what_llama_cpp_does() {
    let Some(path) = common::smollm2() else { return };
    check_loss("smollm2", &path, Part { prompts: 2, steps: 3 }, INT8);
}

#[test]
fn qwen_in_single_precision_gives_the_reference() {
    let Some(path) = common::qwen() else { return };
    check_exact(common::QWEN, &path, Part { prompts: 1, steps: 1 });
}

#[test]
fn qwen_in_eight_bits_loses_about_what_llama_cpp_does() {
    let Some(path) = common::qwen() else { return };
    check_loss(common::QWEN, &path, Part { prompts: 1, steps: 1 }, INT8);
}

#[test]
fn tinystories_gives_the_reference() {
    let path = common::tinystories();
    let part = Part { prompts: 5, steps: 8 };
    check_exact("tinystories", &path, part);
    check_loss("tinystories", &path, part, CACHE);
}
