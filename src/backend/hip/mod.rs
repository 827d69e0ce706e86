//! GPUs through the HIP runtime: whatever libamdhip64 is there, with kernels built ahead for each architecture.
//!
//! `binding` finds the runtime, `driver` owns its objects, `arena` hands out memory, [`objects`] chooses the code,
//! [`kernels`] declares what is in it, `launch` starts it. A [`Device`] is all of that together. Unsafe code is in `binding`
//! and `driver` alone.
//!
//! [`HipBackend`] computes with it: `upload` brings weights, `weights` says how far they are, `model` is what an open model
//! keeps, `run` makes launches of units, `sampling` draws, `wait` waits for the device, `waits` tells how long the device
//! waited for weights.

mod arena;
mod arrays;
mod arrival;
mod backend;
#[allow(unsafe_code)] // functions of another language; layers.rs names this room
mod binding;
mod device;
#[allow(unsafe_code)] // as above
mod driver;
mod error;
mod experts;
mod graphs;
pub mod kernels;
mod kv;
mod launch;
mod memory;
mod model;
pub mod objects;
mod pointer;
mod resolve;
mod rope;
mod run;
mod sampling;
mod scratch;
mod step;
mod sysfs;
mod topology;
mod upload;
mod wait;
mod waits;
mod weights;

#[cfg(test)]
pub(crate) use arrival::Arrival;

pub use arena::{ALIGN, Arena, ArenaOptions, Buffer, CHUNK_BYTES, DeviceRange, Ledger, Owner};
pub use backend::{HipBackend, HipOptions};
pub use binding::{Library, LibraryError};
pub use device::{Device, DeviceOptions};
pub use driver::{
    DeviceDescription, Event, Graph, GraphExec, HostWords, PinnedBuffer, RegisteredPages, Runtime, Stream,
    StreamPriority,
};
pub use error::{CallFailure, HipError};
pub use launch::{BLOCK, Grid, MAX_ARGUMENTS, Slots};
pub use pointer::DevicePtr;
pub(super) use sysfs::CardMemory;
pub use upload::{FileReads, UploadPath};
