//! Logits and greedy tokens of a GPU against another engine's: all 20 prompts on a real one, a part on the look-alike,
//! where a step of a large model takes seconds.

use std::path::Path;

use rocmforge::backend::{Activations, KvType};

use crate::common;
use crate::gpu;
use crate::logits::{Expected, Part};
use crate::on_gpu::on_gpu;

/// What 8-bit activations may lose of what llama.cpp's own do: here outliers have no finer codes than the others.
const INT8_LOSS_RATIO_MAX: f64 = 1.5;

/// What they may lose of one prompt, in nats.
const INT8_KL_MAX: f64 = 0.05;

/// How much more than llama.cpp's F16 cache ours may lose.
const CACHE_LOSS_RATIO_MAX: f64 = 1.5;

/// All of a reference, or `part` of it where the look-alike plays the GPU.
fn extent(part: Part) -> Part {
    let lookalike = gpu::runtime().is_some_and(|runtime| gpu::is_lookalike(&runtime));
    if lookalike { part } else { Part::WHOLE }
}

/// Single precision on the GPU gives the reference within the bound of the CPU.
fn check_exact(name: &str, path: &Path, part: Part) {
    let Some(mut gpu) = on_gpu(path, Activations::F32, KvType::F32) else { return };
    let expected = Expected::read(name, path);
    let far = expected.compare(&mut gpu, extent(part), |p, step| p.margins[step] > 0.1);
    assert!(far.diff_max <= expected.diff_max(), "a log-probability is off by {}", far.diff_max);
}

/// Eight bits lose about as much as those of llama.cpp do.
fn check_int8(name: &str, path: &Path, part: Part) {
    let Some(mut gpu) = on_gpu(path, Activations::Int8, KvType::F16) else { return };
    let expected = Expected::read(name, path);
    let far = expected.compare(&mut gpu, extent(part), |p, step| p.margins[step] > 0.5);
    let most = INT8_LOSS_RATIO_MAX * expected.default_kl_mean;
    assert!(far.kl_mean <= most, "mean KL {} where {most} is allowed", far.kl_mean);
    assert!(far.kl_max <= INT8_KL_MAX, "KL of one prompt is {}", far.kl_max);
}

#[test]
fn smollm2_in_single_precision_gives_the_reference() {
    let Some(path) = common::smollm2() else { return };
    check_exact("smollm2", &path, Part { prompts: 1, steps: 2 });
}

#[test]
fn smollm2_in_eight_bits_loses_about_what_llama_cpp_does() {
    let Some(path) = common::smollm2() else { return };
    check_int8("smollm2", &path, Part { prompts: 2, steps: 3 });
}

#[test]
fn qwen_in_single_precision_gives_the_reference() {
    let Some(path) = common::qwen() else { return };
    check_exact(common::QWEN, &path, Part { prompts: 1, steps: 1 });
}

#[test]
fn qwen_in_eight_bits_loses_about_what_llama_cpp_does() {
    let Some(path) = common::qwen() else { return };
    check_int8(common::QWEN, &path, Part { prompts: 1, steps: 1 });
}

#[test]
fn tinystories_gives_the_reference() {
    let path = common::tinystories();
    let part = Part { prompts: 5, steps: 8 };
    check_exact("tinystories", &path, part);
    // The file's weights are F32, which 8-bit activations never meet: what is lost is lost by the F16 cache.
    let Some(mut gpu) = on_gpu(&path, Activations::Int8, KvType::F16) else { return };
    let expected = Expected::read("tinystories", &path);
    let far = expected.compare(&mut gpu, extent(part), |p, step| p.margins[step] > 0.1);
    let most = CACHE_LOSS_RATIO_MAX * expected.default_kl_mean;
    assert!(far.kl_mean <= most, "mean KL {} where {most} is allowed", far.kl_mean);
}
