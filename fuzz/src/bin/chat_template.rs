#![no_main]
//! The target as it is.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rocmforge_fuzz::chat_template(data, false));
