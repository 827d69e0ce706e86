//! Hostile files and file-system accidents, and the typed error or clean behaviour that each must meet.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)] // test helpers fail by panicking

mod allocations;
#[path = "../../fuzz/src/body.rs"]
mod body;
mod child;
#[path = "../common/mod.rs"]
mod common;
#[path = "../../fuzz/src/config.rs"]
mod config;
mod corpus;
#[path = "../../fuzz/src/frame.rs"]
mod frame;
mod gguf;
mod gguf_fields;
#[path = "../../fuzz/src/gguf.rs"]
mod gguf_parse;
mod gguf_values;
mod lost_bytes;
#[path = "../../fuzz/src/message.rs"]
mod message;
mod model_fields;
mod models;
#[path = "../../fuzz/src/template.rs"]
mod rendered;
#[path = "../../fuzz/src/semantic.rs"]
mod semantic;
#[path = "../../fuzz/src/served.rs"]
mod served;
#[path = "../../fuzz/src/session.rs"]
mod session;
mod template;
#[path = "../../fuzz/src/tokenizer.rs"]
mod tokenizer;

use rocmforge_test_support::{forge, malformed};

/// Stubs for the fuzz targets' planted faults: nothing is planted here.
fn planted(_: &[u8]) {}
fn planted_short(_: &[u8]) {}
