//! Owning wrappers of the driver's objects: one call creates each, another frees it on drop.
//!
//! Handles are kept as numbers. Only the driver follows them, so the types are `Send` without unsafe code. The driver's
//! functions may be called from any thread.

mod checked;
mod context;
mod event;
mod graph;
mod memory;
mod module;
mod registered;
mod runtime;
mod stream;
mod transfer;

pub(in crate::backend::hip) use context::Context;
pub use event::Event;
pub use graph::{Graph, GraphExec};
pub(in crate::backend::hip) use memory::Chunk;
pub use memory::{HostWords, PinnedBuffer};
pub(in crate::backend::hip) use module::{Function, Module};
pub use registered::RegisteredPages;
pub use runtime::{DeviceDescription, Runtime};
pub use stream::{Stream, StreamPriority};
