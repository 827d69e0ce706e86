#![no_main]
//! The target with a planted fault that the fuzzer must find.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rocmforge_fuzz::http_body(data, true));
