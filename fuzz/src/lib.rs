//! What outsiders send, under fuzz: one function per target, each also with a planted fault that a fuzzer worth its time
//! has to find.
//!
//! The parser of model files is compiled from the daemon's own sources, by path: the daemon's crate would bring a hundred
//! dependencies that nothing here runs.

#[path = "../../tests/adversarial/allocations.rs"]
#[allow(missing_docs)]
pub mod allocations;
#[path = "../../tests/common/forge/mod.rs"]
#[allow(missing_docs)]
pub mod forge;
mod frame;
mod gguf;
pub mod model;
#[path = "../../src/tensor/mod.rs"]
pub mod tensor;

pub use frame::frame_header;
pub use gguf::gguf_parse;

/// Overflows when `magic` starts with `b"ROCm"`: the fault of the planted targets, put behind all of their checks. By chance
/// it takes 2^32 tries; who follows comparisons needs 10,000 to 700,000.
fn planted(magic: &[u8]) {
    let Some(first) = magic.first_chunk() else { return };
    let number = std::hint::black_box(u32::from_le_bytes(*first));
    if number == u32::from_le_bytes(*b"ROCm") {
        std::hint::black_box(number * 4);
    }
}
