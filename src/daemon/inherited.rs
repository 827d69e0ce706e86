//! Descriptors handed over by systemd.

use std::os::fd::{FromRawFd, OwnedFd};

use crate::socket::ListenError;

/// The socket that systemd listens on for us, if any (`LISTEN_FDS`, sd_listen_fds(3)).
///
/// To be called once, before threads are started: each descriptor gets its one owner here.
///
/// # Errors
/// [`ListenError::HandedOver`] when there are several, or the environment contradicts itself.
#[allow(unsafe_code)]
pub fn listener() -> Result<Option<OwnedFd>, ListenError> {
    let mut fds = sd_notify::listen_fds().map_err(|error| ListenError::HandedOver(error.to_string()))?;
    let Some(fd) = fds.next() else { return Ok(None) };
    if fds.len() > 0 {
        return Err(ListenError::HandedOver(format!("{} descriptors", fds.len() + 1)));
    }
    // SAFETY: `listen_fds` checked that LISTEN_PID names this process and that descriptor 3 is open (it set FD_CLOEXEC on
    // it). By sd_listen_fds(3) it is passed to this process alone; nothing here opened it, and this is called once, at
    // start, so it has no other owner.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
}
