//! The CPU backend: computes in place from the mapping.

pub mod activations;
pub mod convert;
pub mod isa;
pub mod matmul;
pub mod quant;

pub use isa::{Isa, Kernels};
