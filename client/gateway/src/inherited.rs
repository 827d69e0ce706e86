//! The socket that systemd passes.

use std::os::fd::{FromRawFd, OwnedFd};

/// Takes the listening socket of socket activation, sd_listen_fds(3); `None` without one.
///
/// Call it once, before threads start: the descriptor gets its only owner here.
///
/// # Errors
/// A text, if the environment contradicts itself or more than one socket is passed.
pub fn socket() -> Result<Option<OwnedFd>, String> {
    let fds: Vec<_> = sd_notify::listen_fds().map_err(|error| format!("LISTEN_FDS: {error}"))?.collect();
    match fds.as_slice() {
        [] => Ok(None),
        [fd] => Ok(Some(owned(*fd))),
        more => Err(format!("systemd passed {} sockets, but the gateway takes one", more.len())),
    }
}

#[allow(unsafe_code)]
fn owned(fd: i32) -> OwnedFd {
    // SAFETY: sd_notify checked that LISTEN_PID names this process and that the descriptor is open (it set FD_CLOEXEC on
    // it). By sd_listen_fds(3) it is passed to this process alone. Nothing here opened it, and `socket` is called once,
    // at start, so it has no other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
