//! Project commands, and what they share with the lab, which has those commands that need the library.

#![allow(missing_docs)] // only the lab uses it

pub mod bench;
pub mod boot;
pub mod check;
pub mod coverage;
pub mod daemon;
pub mod demo;
pub mod error;
pub mod host;
pub mod install;
pub mod interleavings;
pub mod lab;
pub mod lookalike;
pub mod models;
pub mod mutants;
pub mod progress;
pub mod python;
pub mod release;
