//! Kernels and the device layer, through whatever libamdhip64 `ROCMFORGE_HIP_LIB` names, else through the look-alike that
//! runs the same kernels on the CPU. What comes back is compared with f64.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)] // a test fails by panicking

mod attention;
mod child;
#[path = "../common/mod.rs"]
mod common;
mod device;
mod doctor;
mod embed;
mod experts;
mod faults;
mod forms;
mod gated;
#[path = "../common/gpu.rs"]
mod gpu;
mod lookalike;
mod matmul;
mod norm;
mod pages;
mod random;
mod rig;
mod rope;
mod rows;
mod sample;
