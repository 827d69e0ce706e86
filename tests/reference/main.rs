//! Answers compared with those of other programs, and arithmetic compared with plain f64.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)] // test helpers fail by panicking

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/good.rs"]
mod good;
#[path = "../common/gpu.rs"]
mod gpu;

mod answers_on_gpu;
mod decoders;
mod dense;
mod encoders;
mod forward;
mod greedy;
mod invariance;
mod invariance_on_gpu;
mod keys;
mod loaded;
mod logits;
mod on_gpu;
mod recurrent;
mod recurrent_on_gpu;
mod refusals;
mod runner;
mod sampling;
mod scaled;
mod small;
mod small_on_gpu;
mod steps;
mod template;
mod tokenizer;
mod written;

use rocmforge_test_support::forge;
