//! Project commands, and what they share with the lab, which has those commands that need the library.

#![allow(missing_docs)] // only the lab uses it

pub mod bench;
pub mod boot;
pub mod check;
pub mod coverage;
pub mod daemon;
pub mod demo;
pub mod error;
#[path = "../../tests/common/forge/mod.rs"]
#[allow(clippy::unwrap_used)] // shared with the tests
pub mod forge;
pub mod host;
pub mod install;
pub mod interleavings;
pub mod lab;
pub mod lookalike;
pub mod models;
pub mod mutants;
pub mod oracle;
pub mod progress;
pub mod python;
