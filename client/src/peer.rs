//! The user at the other end of a socket.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Uid of the process that listens, as of its call of listen(2) (`SO_PEERCRED`, unix(7)).
///
/// Asked of the kernel itself: the crates refuse a peer without a process id here. A daemon outside of the client's
/// container has none, and one in a container has none for clients outside.
///
/// # Errors
/// Those of getsockopt(2); [`io::ErrorKind::NotConnected`] if there is no peer.
pub(crate) fn uid(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut bytes = libc::socklen_t::try_from(size_of_val(&peer)).unwrap_or(0);
    // SAFETY: the kernel writes at most `bytes` bytes to `peer`, which has as many, and their number to `bytes`. Both
    // outlive the call; all fields are integers, for which all bytes are valid.
    let status = unsafe {
        let value = (&raw mut peer).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, value, &raw mut bytes)
    };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    if peer.uid == u32::MAX { Err(io::ErrorKind::NotConnected.into()) } else { Ok(peer.uid) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    #[test]
    fn the_kernel_tells_the_uid_of_a_peer() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert_eq!(super::uid(ours.as_fd()).unwrap(), rustix::process::geteuid().as_raw());
        let alone = UnixDatagram::unbound().unwrap();
        assert_eq!(super::uid(alone.as_fd()).unwrap_err().kind(), std::io::ErrorKind::NotConnected);
        let file = tempfile::tempfile().unwrap();
        assert!(super::uid(file.as_fd()).is_err());
    }
}
