#![no_main]
//! The target as it is.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rocmforge_fuzz::gguf_semantic(data, false));
