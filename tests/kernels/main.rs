//! Kernels and the device layer, on the libamdhip64 that `ROCMFORGE_HIP_LIB` names, else on the look-alike that runs
//! the same kernels on the CPU. Results are compared with f64.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)] // tests fail by panicking

mod around;
mod attending;
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
mod groups;
mod heads;
mod lookalike;
mod making;
mod matmul;
mod norm;
mod pages;
mod random;
mod recurrent;
mod rig;
mod rope;
mod router;
mod rows;
mod sample;
mod streams;
mod wide;
