//! Rules that are easy to forget: the order of the layers, rooms for unsafe code and outside crates, kernels'
//! contracts, file length, words, sentences, layout. Functions that pages name exist.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)] // a test fails by panicking

mod chains;
mod contracts;
mod crates;
mod forwarding;
mod layers;
mod prose;
mod sentences;
mod source;
mod text;
mod words;
