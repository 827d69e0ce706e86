//! Sockets and frames: who connects, and which bytes make a frame. It knows no models.
//!
//! Everything here is an interprocess type: the listener, bound or handed over by systemd, and each accepted stream.
//! Descriptors travel by rustix over the stream's own descriptor.

mod accept;
mod connection;
mod groups;
mod listener;
mod receive;

pub use accept::{Acceptor, ConnectionLimits};
pub use listener::{Endpoint, ListenError};
