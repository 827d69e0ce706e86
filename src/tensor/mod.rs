//! Tensors as they lie in a file: types, shapes, byte ranges, and the mapping that holds the bytes.
//!
//! The lowest layer: it knows files and bytes, no models and no devices.

pub mod dtype;
mod guard;
pub mod lazy;
pub mod map;
mod residency;
mod resident;

pub use dtype::DType;
pub use lazy::{LazyTensor, Shape};
pub use map::{FileIdentity, MapError, MappedFile, is_shortage};
pub use resident::HostPages;
