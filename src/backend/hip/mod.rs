//! GPUs through the HIP runtime: any installed libamdhip64, with kernels built in advance for each architecture.
//!
//! Four rooms. `device` is the runtime: its library, the objects it hands out, memory, launches; only `device::binding` and
//! `device::driver` contain unsafe code. `weights` are copies of tensors and how they get there. [`kernels`] declares the
//! kernels, names one for each weight type and chooses the code for the device. `step` binds a program and runs its parts.
//! [`HipBackend`] puts them together.

mod backend;
mod device;
pub mod kernels;
mod step;
mod weights;

#[cfg(test)]
pub(crate) use weights::arrival::Arrival;

pub use backend::{HipBackend, HipOptions, refuses};
pub use device::arena::{ALIGN, Arena, ArenaOptions, Buffer, CHUNK_BYTES, DeviceRange, Ledger, Purpose};
pub use device::binding::{Library, LibraryError};
pub use device::driver::{
    DeviceDescription, Event, Graph, GraphExec, HostWords, PinnedBuffer, RegisteredPages, Runtime, Stream,
    StreamPriority,
};
pub use device::error::{CallFailure, HipError};
pub use device::launch::{Grid, MAX_ARGUMENTS, Slots, WORKGROUP};
pub use device::pointer::DevicePtr;
pub(super) use device::sysfs::CardMemory;
pub use device::{Device, DeviceOptions};
pub use weights::upload::{FileReads, UploadPath};
