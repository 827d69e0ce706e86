//! Connections for tasks of the tokio runtime, over the same dial, frames, streams and limits as the blocking client.
//!
//! One task per connection reads and writes its socket. Requests on it are values in other tasks: dropping one cancels
//! its request at once. Passing descriptors is left to the blocking client.

mod client;
mod connection;
mod drive;

pub use client::Client;
pub use connection::{Connection, Generation, Items};
