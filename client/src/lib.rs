//! Client side of the `rocmforged` inference daemon: the wire types that both sides share, and a blocking client.
//!
//! [`wire`] does no I/O: it converts bytes to values and back, so the asynchronous daemon and the blocking client use
//! the same code. `PROTOCOL.md` at the repository's root describes every byte it produces.
//!
//! Most programs want [`Client`]: it connects when first needed, reconnects after a restart of the daemon, and
//! repeats calls that are safe to repeat. [`Connection`] is one connection, with many requests in flight at once.
//! The feature `tokio` adds `asynchronous`: the same for tasks of that runtime, over the same code of the wire.
//!
//! ```no_run
//! use rocmforge_client::{Client, Options, wire};
//!
//! let client = Client::new(Options::default());
//! let request = wire::GenerateRequest {
//!     max_tokens: 32,
//!     ..wire::GenerateRequest::new("smollm2-135m-instruct-q4_1", wire::Prompt::Text("Once upon a time".into()))
//! };
//! for item in &mut client.generate(&request)? {
//!     print!("{}", item?.text);
//! }
//! # Ok::<(), rocmforge_client::ClientError>(())
//! ```

// The command line's modules refer to the library by its crate name, as any program does.
#[cfg(feature = "cli")]
extern crate self as rocmforge_client;

#[cfg(feature = "tokio")]
pub mod asynchronous;
#[cfg(feature = "calls")]
pub mod calls;
#[cfg(feature = "cli")]
pub mod cli;
mod client;
mod connection;
mod dial;
mod embedding;
mod error;
mod generation;
mod inbox;
pub mod metrics;
mod options;
mod peer;
mod printable;
mod relevance;
mod residency;
mod transport;
mod watch;

pub mod wire;

pub use client::{Client, random_request_id};
pub use connection::{Connection, Pending};
pub use embedding::Embedding;
pub use error::{ClientError, ProtocolError};
pub use generation::{DeviceLoading, Events, Generation, Items};
pub use options::{
    DEFAULT_SOCKET, Options, PING_AFTER, PING_TIMEOUT, SOCKET_VARIABLE, ServerTrust, uid_of, user_socket,
};
pub use printable::{printable, printable_text};
pub use relevance::Relevance;
