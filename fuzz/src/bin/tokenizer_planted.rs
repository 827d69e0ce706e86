#![no_main]
//! The target with a fault that has to be found.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rocmforge_fuzz::tokenizer(data, true));
