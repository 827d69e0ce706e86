//! Lies, damage and accidents: what the file system and hostile files can do, and the typed error or clean behaviour that
//! each meets.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)] // helpers of tests may fail by panic

mod allocations;
mod child;
#[path = "../common/mod.rs"]
mod common;
mod corpus;
#[path = "../common/forge/mod.rs"]
mod forge;
mod gguf;
mod gguf_fields;
mod lost_bytes;
#[path = "../common/malformed/mod.rs"]
mod malformed;
mod models;
mod template;
