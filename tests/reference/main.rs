//! Answers compared with those of programs we did not write, and arithmetic with plain f64.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)] // helpers of tests may fail by panic

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/forge/mod.rs"]
mod forge;
#[path = "../common/good.rs"]
mod good;
#[path = "../common/gpu.rs"]
mod gpu;

mod answers_on_gpu;
mod decoders;
mod dense;
mod forward;
mod greedy;
mod invariance;
mod keys;
mod loaded;
mod logits;
mod on_gpu;
mod refusals;
mod runner;
mod small;
mod small_on_gpu;
mod steps;
mod template;
mod tokenizer;
mod written;
