//! Tensors in a file: types, shapes, byte ranges, and the mapping that holds the bytes.
//!
//! The lowest layer: it knows files and bytes, no models and no devices.

mod direct;
pub mod dtype;
mod guard;
pub mod lazy;
pub mod map;
mod pages;
mod resident;

pub use direct::BLOCK_BYTES;
pub use dtype::DType;
pub use lazy::{LazyTensor, Shape};
pub use map::{FileIdentity, MapError, MappedFile, is_shortage};
pub use resident::HostPages;
