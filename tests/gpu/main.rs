//! The engine on a GPU or the look-alike: weights that load on first use, and devices that fail.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)] // tests fail by panicking

mod cold;
#[path = "../common/mod.rs"]
mod common;
mod drafts;
mod experts;
mod faults;
mod gate;
#[path = "../common/gpu.rs"]
mod gpu;
#[path = "../common/hooked.rs"]
mod hooked;
mod installed;
mod lazy;
mod recurrent;
mod residency;
mod rig;
mod steering;
mod truncated;
mod upload;

use rocmforge_test_support::forge;
