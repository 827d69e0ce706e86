//! The driver's objects, each owned: made by one call, given back by another when dropped.
//!
//! Handles are kept as numbers. They mean something to the driver alone and are never followed here, so that the types may go
//! to other threads without a word of unsafe code; the driver's functions may be called from any thread.

mod context;
mod event;
mod graph;
mod memory;
mod module;
mod registered;
mod runtime;
mod stream;
mod transfer;

pub(super) use context::Context;
pub use event::Event;
pub use graph::{Graph, GraphExec};
pub(super) use memory::Chunk;
pub use memory::{HostWords, PinnedBuffer};
pub(super) use module::{Function, Module};
pub use registered::RegisteredPages;
pub use runtime::{DeviceDescription, Runtime};
pub(super) use stream::Shape;
pub use stream::{Stream, StreamPriority};
