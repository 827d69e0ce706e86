//! GPUs through the HIP runtime: any installed libamdhip64, with kernels built in advance for each architecture.
//!
//! `binding` finds the runtime, `driver` owns its objects, `arena` allocates memory, [`objects`] chooses the code,
//! [`kernels`] declares the kernels in it, `launch` starts them. A [`Device`] combines them. Only `binding` and
//! `driver` contain unsafe code.
//!
//! [`HipBackend`] computes with it. `upload` loads weights, `weights` tracks them, and `model` holds an open model's
//! state. `run` launches units and `sampling` samples tokens. `wait` waits for the device; `waits` measures how long
//! the device waited for weights.

mod arena;
mod arrays;
mod arrival;
mod backend;
#[allow(unsafe_code)] // foreign functions; layers.rs lists this module
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
