//! What people forget: the order of the layers, rooms for unsafe code and outside crates, file length, words, layout.

mod crates;
mod layers;
mod source;
mod text;
