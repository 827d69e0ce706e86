//! The groups of a connecting client.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

/// Most groups of a process (`NGROUPS_MAX` of the kernel).
const GROUPS_MAX: usize = 65_536;

/// Initial room for groups.
const GROUPS_USUAL: usize = 64;

/// Supplementary groups of the connecting process at connect time (`SO_PEERGROUPS`, unix(7)).
///
/// # Errors
/// Those of getsockopt(2).
pub(super) fn of_peer(socket: BorrowedFd<'_>) -> std::io::Result<Vec<u32>> {
    let mut gids = vec![0u32; GROUPS_USUAL];
    loop {
        let mut bytes = libc::socklen_t::try_from(size_of_val(gids.as_slice())).unwrap_or(0);
        // SAFETY: the kernel writes at most `bytes` bytes to `gids`, which has as many. It stores in `bytes` the number
        // that it wrote or would have written. Both outlive the call; gid_t is a u32, for which all bytes are valid.
        let status = unsafe {
            let value = gids.as_mut_ptr().cast();
            libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERGROUPS, value, &raw mut bytes)
        };
        let count = bytes as usize / size_of::<u32>();
        if status == 0 {
            gids.truncate(count);
            return Ok(gids);
        }
        let error = std::io::Error::last_os_error();
        let too_short = error.raw_os_error() == Some(libc::ERANGE);
        if !too_short || count <= gids.len() || count > GROUPS_MAX {
            return Err(error);
        }
        gids.resize(count, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn the_kernel_tells_our_own_groups() {
        let (ours, _theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let mut told = super::of_peer(ours.as_fd()).unwrap();
        let mut own: Vec<u32> =
            rustix::process::getgroups().unwrap().iter().map(|gid| gid.as_raw()).collect();
        told.sort_unstable();
        own.sort_unstable();
        assert_eq!(told, own);
        let file = tempfile::tempfile().unwrap();
        assert!(super::of_peer(file.as_fd()).is_err());
    }
}
