//! Model files that tests, benches, fuzz targets and project commands make: good ones and malformed ones. And a file
//! system that hangs.

#![allow(missing_docs)] // a library of this project's tests alone
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)] // as in tests

pub mod forge;
pub mod hanging;
pub mod malformed;
