//! Lies, damage and accidents: what the file system and hostile files can do, and the typed error or clean behaviour that
//! each meets.

#[path = "../common/mod.rs"]
mod common;

mod child;
mod lost_bytes;
