//! Fuzz targets for untrusted input: one function per target. Each also has a planted fault that a working fuzzer must
//! find.

#[path = "../../tests/adversarial/allocations.rs"]
#[allow(missing_docs)]
pub mod allocations;
mod body;
mod config;
mod frame;
mod gguf;
mod message;
mod semantic;
mod served;
mod session;
mod template;
mod tokenizer;

pub use body::http_body;
pub use config::config;
pub use frame::frame_header;
pub use gguf::gguf_parse;
pub use message::message;
pub use rocmforge_test_support::forge;
pub use semantic::gguf_semantic;
pub use session::session;
pub use template::chat_template;
pub use tokenizer::tokenizer;

/// Overflows when `magic` starts with `b"ROCm"`: the fault of the planted targets, placed after all of their checks. By
/// chance it takes 2^32 tries; a fuzzer that follows comparisons needs 10,000 to 700,000.
fn planted(magic: &[u8]) {
    let Some(first) = magic.first_chunk() else { return };
    let number = std::hint::black_box(u32::from_le_bytes(*first));
    if number == u32::from_le_bytes(*b"ROCm") {
        std::hint::black_box(number * 4);
    }
}

/// As [`planted`] with `b"R"`: for targets that run only some thousand times a second. The fuzzer follows comparisons
/// of four and of eight bytes; shorter ones are found by chance.
fn planted_short(magic: &[u8]) {
    let number = std::hint::black_box(magic.first().copied().unwrap_or(0));
    if number == b'R' {
        std::hint::black_box(number * 4);
    }
}
