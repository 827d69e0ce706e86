//! ROCmForge: a resident inference daemon for GGUF models.
//!
//! Layers, calls go down only: `socket` > `session` > `prefixes` > `scheduler` > `model` > `cache` > `backend` > `program` >
//! `tensor` > `share` > `lock`.
//! `cargo tidy` holds them to it. ARCHITECTURE.md has the map.

pub mod aside;
pub mod backend;
pub mod cache;
pub mod config;
pub mod daemon;
pub mod lock;
pub mod model;
pub mod numbers;
pub mod prefixes;
pub mod program;
pub mod scheduler;
pub mod session;
pub mod share;
pub mod socket;
pub mod tensor;
