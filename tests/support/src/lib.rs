//! Model files that tests, benches, fuzz targets and project commands make: good ones and malformed ones. A file
//! system that hangs, and programs of shell.

#![allow(missing_docs)] // a library of this project's tests alone
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)] // as in tests

pub mod forge;
pub mod hanging;
pub mod malformed;
pub mod quant_blocks;
pub mod script;
