//! Client side of the `rocmforged` inference daemon: the wire types both sides share, and a blocking connection.
//!
//! [`wire`] does no I/O: bytes to values and back, so the asynchronous daemon and the blocking client use the same code.
//! `PROTOCOL.md` at the repository's root describes every byte it produces.

pub mod wire;
