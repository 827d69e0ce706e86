//! Descriptors passed by systemd.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use super::kept::{Handed, is_kept_name};
use crate::socket::{Endpoint, ListenError};

/// Descriptors that systemd passes at a start.
#[derive(Debug, Default)]
pub struct Inherited {
    /// The listening socket.
    pub listener: Option<OwnedFd>,
    /// Descriptors that an earlier process stored.
    pub kept: Handed,
    /// Names of all other descriptors: another version stored them, and they are closed here.
    pub unknown: Vec<String>,
}

/// Takes the descriptors that systemd passes (`LISTEN_FDS`, `LISTEN_FDNAMES`, sd_listen_fds(3)); empty without systemd.
///
/// Call it once, before threads start: each descriptor gets its only owner here.
///
/// # Errors
/// [`ListenError::HandedOver`] for several sockets, or when the environment contradicts itself.
pub fn descriptors() -> Result<Inherited, ListenError> {
    let failed = |error: std::io::Error| ListenError::HandedOver(error.to_string());
    let fds = sd_notify::listen_fds_with_names().map_err(failed)?;
    sort(fds.map(|(fd, name)| (name, owned(fd))).collect())
}

/// Separates the socket, stored descriptors, and the rest.
fn sort(handed: Handed) -> Result<Inherited, ListenError> {
    let (kept, others): (Handed, Handed) = handed.into_iter().partition(|(name, _)| is_kept_name(name));
    let (mut sockets, mut rest): (Handed, Handed) =
        others.into_iter().partition(|(_, fd)| Endpoint::is_listening(fd.as_fd()));
    if sockets.len() > 1 {
        return Err(ListenError::HandedOver(format!("{} sockets", sockets.len())));
    }
    // Stored descriptors never come without the socket. So without stored ones this should be the socket; opening it
    // reports the fault.
    let listener = sockets.pop().or_else(|| if kept.is_empty() { rest.pop() } else { None });
    let unknown = rest.into_iter().map(|(name, _)| name).collect();
    Ok(Inherited { listener: listener.map(|(_, fd)| fd), kept, unknown })
}

#[allow(unsafe_code)]
fn owned(fd: i32) -> OwnedFd {
    // SAFETY: sd_notify checked that LISTEN_PID names this process and that the descriptor is open (it set FD_CLOEXEC
    // on it), and returns each number once. By sd_listen_fds(3) they are passed to this process alone. Nothing here
    // opened them, and `descriptors` is called once, at start, so they have no other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketType, bind, listen, socket};

    use super::*;

    fn listener() -> OwnedFd {
        let fd = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        let dir = tempfile::tempdir().unwrap();
        bind(&fd, &rustix::net::SocketAddrUnix::new(dir.path().join("s")).unwrap()).unwrap();
        listen(&fd, 1).unwrap();
        fd
    }

    fn file() -> OwnedFd {
        tempfile::tempfile().unwrap().into()
    }

    fn named(list: Vec<(&str, OwnedFd)>) -> Result<Inherited, ListenError> {
        sort(list.into_iter().map(|(name, fd)| (name.to_owned(), fd)).collect())
    }

    #[test]
    fn sockets_and_what_was_stored_are_told_apart() {
        let all = vec![
            ("model-4", file()),
            ("api", listener()),
            ("state-5", file()),
            ("tensor-1", file()),
            ("model-", file()),
        ];
        let found = named(all).unwrap();
        assert!(found.listener.is_some());
        let kept: Vec<&str> = found.kept.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(kept, ["model-4", "state-5"]);
        assert_eq!(found.unknown, ["tensor-1", "model-"]);
        // The socket unit may be stopped, or its socket may have another name.
        let found = named(vec![("model-4", file()), ("stored", file())]).unwrap();
        assert!(found.listener.is_none());
        assert_eq!((found.kept.len(), found.unknown.as_slice()), (1, ["stored".to_owned()].as_slice()));
        assert!(named(vec![("unknown", listener())]).unwrap().listener.is_some());
        assert!(named(vec![]).unwrap().listener.is_none());
    }

    #[test]
    fn two_sockets_are_one_too_many_and_what_is_none_is_looked_at_as_one() {
        let two = named(vec![("api", listener()), ("other", listener())]);
        assert!(matches!(two, Err(ListenError::HandedOver(text)) if text == "2 sockets"));
        let found = named(vec![("api", file())]).unwrap();
        assert!(found.listener.is_some() && found.unknown.is_empty());
    }
}
