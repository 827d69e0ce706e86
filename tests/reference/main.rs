//! Answers compared with those of programs we did not write.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)] // a test fails by panicking

#[path = "../common/mod.rs"]
mod common;

mod greedy;
mod template;
mod tokenizer;
