//! As in the daemon's crate, so that the paths inside hold.

#[path = "../../src/model/gguf/mod.rs"]
pub mod gguf;
