//! Answers compared with those of programs we did not write.

#[path = "../common/mod.rs"]
mod common;

mod tokenizer;
