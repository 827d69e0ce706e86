//! Lies, damage and accidents: what the file system and hostile files can do, and the typed error or clean behaviour that
//! each meets.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)] // helpers of tests may fail by panic

mod allocations;
mod child;
#[path = "../common/mod.rs"]
mod common;
#[path = "../../fuzz/src/config.rs"]
mod config;
mod corpus;
#[path = "../common/forge/mod.rs"]
mod forge;
#[path = "../../fuzz/src/frame.rs"]
mod frame;
mod gguf;
mod gguf_fields;
#[path = "../../fuzz/src/gguf.rs"]
mod gguf_parse;
mod gguf_values;
mod lost_bytes;
#[path = "../common/malformed/mod.rs"]
mod malformed;
#[path = "../../fuzz/src/message.rs"]
mod message;
mod model_fields;
mod models;
#[path = "../../fuzz/src/template.rs"]
mod rendered;
#[path = "../../fuzz/src/semantic.rs"]
mod semantic;
#[path = "../../fuzz/src/session.rs"]
mod session;
mod template;
#[path = "../../fuzz/src/tokenizer.rs"]
mod tokenizer;

/// The targets' planted faults: nothing is planted here.
fn planted(_: &[u8]) {}
fn planted_short(_: &[u8]) {}
