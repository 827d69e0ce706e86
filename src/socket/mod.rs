//! Sockets and frames: accepts clients and cuts bytes into frames. This layer knows no models.
//!
//! The listener (bound, or passed by systemd) and each accepted stream are interprocess types. Descriptors travel by
//! rustix over the stream's own descriptor.

mod accept;
mod connection;
mod groups;
mod listener;
mod open;
mod rate;
mod receive;
mod refusing;
mod unmapped;

pub use accept::Acceptor;
pub use listener::{Endpoint, ListenError};
pub use refusing::tell_waiting;
