#![no_main]
//! The target without a planted fault.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rocmforge_fuzz::http_body(data, false));
