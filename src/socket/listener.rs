//! The socket that the daemon listens on: bound by the daemon, or passed by systemd.
//!
//! Standalone: the daemon holds an exclusive `flock` on `<socket>.lock` as long as it runs. It removes a stale socket
//! only under this lock, and only after a connect was refused, so a live socket is never removed. The lock file stays,
//! empty: removing it would let two daemons hold locks on two files of one name.

use std::fs::{DirBuilder, File};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use interprocess::ConnectWaitMode;
use interprocess::local_socket::traits::tokio::Listener as _;
use interprocess::local_socket::{ConnectOptions, GenericFilePath, ListenerOptions, Name, ToFsName};
use interprocess::os::unix::local_socket::ListenerOptionsExt;
use interprocess::os::unix::uds_local_socket::tokio::{Listener, Stream};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::sockopt;

/// Longest path that the kernel takes: `sun_path` has 108 bytes, one of them for the final zero.
const PATH_BYTES_MAX: usize = 107;

/// Connections that wait to be accepted; more wait in the kernel, first come, first served. Beside a user that connects as
/// fast as it can, another waited for 63 ms behind a queue of 4,096. Behind one of this length it waited for 6 ms.
const BACKLOG: i32 = 128;

/// Only the daemon's user and group may connect.
const SOCKET_MODE: u32 = 0o660;

/// Why the daemon has no socket to listen on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another daemon holds the lock or answers on the socket.
    #[error("{}: another rocmforged serves this socket: stop it, or choose another path with --socket", path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// The path exists and is not a socket.
    #[error("{}: the path is a {kind}, not a socket: remove it, or choose another path with --socket", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
        /// The kind of file found there.
        kind: &'static str,
    },
    /// The path does not fit a socket address.
    #[error("{}: the socket path has {bytes} bytes, the limit is {PATH_BYTES_MAX}: choose a shorter one", path.display())]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        bytes: usize,
    },
    /// The operating system refused.
    #[error("{}: {what}: {source}", path.display())]
    Os {
        /// The socket or lock.
        path: PathBuf,
        /// The operation.
        what: &'static str,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
    /// systemd passed something else than one listening socket.
    #[error(
        "the descriptor handed over by systemd is unusable: {0}; the socket unit must have exactly one ListenStream= path"
    )]
    HandedOver(String),
}

/// A listening socket.
#[derive(Debug)]
pub struct Endpoint {
    listener: Listener,
    /// Present when the daemon bound the socket itself; then it also removes the path.
    bound: Option<Bound>,
}

#[derive(Debug)]
struct Bound {
    path: PathBuf,
    /// Device and inode of the socket file, so that the daemon removes only its own.
    id: (u64, u64),
    /// Held until the process ends.
    _lock: File,
}

impl Endpoint {
    /// Binds `path`. Must be called inside the runtime.
    ///
    /// # Errors
    /// [`ListenError::InUse`] when another daemon serves it; otherwise the variant that names the fault.
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        let bytes = path.as_os_str().as_bytes().len();
        if bytes > PATH_BYTES_MAX {
            return Err(ListenError::PathTooLong { path: path.into(), bytes });
        }
        let os = |what| move |source| ListenError::Os { path: path.into(), what, source };
        // Checked before anything is created: `--socket /tmp` must not leave a /tmp.lock.
        socket_exists(path)?;
        make_directory(path).map_err(os("cannot make the directory of the socket"))?;
        let lock = lock(path)?;
        remove_stale(path)?;
        let listener = ListenerOptions::new()
            .name(name(path)?)
            .reclaim_name(false)
            .mode(SOCKET_MODE)
            .create_tokio_as::<Listener>()
            .map_err(os("cannot listen"))?;
        rustix::net::listen(listener.as_fd(), BACKLOG).map_err(|e| os("cannot listen")(e.into()))?;
        // bind(2) subtracts the umask from the mode; chmod restores it. In between, the mode is never wider than
        // wanted.
        rustix::fs::chmod(path, Mode::from_raw_mode(SOCKET_MODE)).map_err(|e| ListenError::Os {
            path: path.into(),
            what: "cannot chmod",
            source: e.into(),
        })?;
        let meta = std::fs::symlink_metadata(path).map_err(os("cannot stat"))?;
        let bound = Bound { path: path.into(), id: (meta.dev(), meta.ino()), _lock: lock };
        Ok(Self { listener, bound: Some(bound) })
    }

    /// Takes over a socket that systemd listens on; the path stays systemd's. Must be called inside the runtime.
    ///
    /// # Errors
    /// [`ListenError::HandedOver`] when it is not a listening Unix stream socket.
    pub fn from_systemd(fd: OwnedFd) -> Result<Self, ListenError> {
        let wrong = |what: &str| ListenError::HandedOver(what.into());
        let failed = |error: rustix::io::Errno| ListenError::HandedOver(error.to_string());
        if sockopt::socket_domain(fd.as_fd()).map_err(failed)? != rustix::net::AddressFamily::UNIX {
            return Err(wrong("not a Unix socket"));
        }
        if sockopt::socket_type(fd.as_fd()).map_err(failed)? != rustix::net::SocketType::STREAM {
            return Err(wrong("not a stream socket"));
        }
        if !sockopt::socket_acceptconn(fd.as_fd()).map_err(failed)? {
            return Err(wrong("not listening"));
        }
        let listener = Listener::try_from(fd).map_err(|e| ListenError::HandedOver(e.to_string()))?;
        Ok(Self { listener, bound: None })
    }

    /// True for a listening socket of any kind.
    pub fn is_listening(fd: BorrowedFd<'_>) -> bool {
        sockopt::socket_acceptconn(fd).unwrap_or(false)
    }

    /// The next connection.
    ///
    /// # Errors
    /// Those of `accept(2)`.
    pub async fn accept(&self) -> std::io::Result<Stream> {
        self.listener.accept().await
    }

    /// Removes the path if the daemon bound it and it is unchanged, so that no new client finds it. Drop does this too.
    /// But the last reference can belong to a task of a runtime that is shutting down, and then Drop may never run.
    pub fn unlink(&self) {
        // Under the lock no other daemon binds this path. So it cannot change owner between check and removal, unless a
        // person removes and binds it by hand.
        let Some(bound) = &self.bound else { return };
        let ours = std::fs::symlink_metadata(&bound.path).is_ok_and(|m| (m.dev(), m.ino()) == bound.id);
        if ours && let Err(error) = std::fs::remove_file(&bound.path) {
            tracing::warn!(path = %bound.path.display(), %error, "removing the socket failed");
        }
    }

    /// True when systemd keeps the socket: clients that connect during a restart wait for the next daemon.
    pub fn is_handed_over(&self) -> bool {
        self.bound.is_none()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.unlink();
    }
}

/// Creates the socket's directory with mode 0700, if only that one is missing.
fn make_directory(socket: &Path) -> std::io::Result<()> {
    let Some(dir) = socket.parent().filter(|dir| !dir.as_os_str().is_empty() && !dir.exists()) else {
        return Ok(());
    };
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()), // another daemon was faster
        outcome => outcome,
    }
}

/// Takes the exclusive lock of a socket path.
fn lock(socket: &Path) -> Result<File, ListenError> {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    let path = PathBuf::from(path);
    let os =
        |what, source: rustix::io::Errno| ListenError::Os { path: path.clone(), what, source: source.into() };
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR)
        .map_err(|e| os("cannot open the lock file (does the directory exist, and is it yours?)", e))?;
    match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(fd.into()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(ListenError::InUse { path: socket.into() }),
        Err(e) => Err(os("cannot lock", e)),
    }
}

/// True when a socket is at `path`, false when nothing is.
fn socket_exists(path: &Path) -> Result<bool, ListenError> {
    let kind = match std::fs::symlink_metadata(path) {
        Ok(meta) => meta.file_type(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(source) => return Err(ListenError::Os { path: path.into(), what: "cannot stat", source }),
    };
    let kind = match () {
        () if kind.is_socket() => return Ok(true),
        () if kind.is_symlink() => "symbolic link",
        () if kind.is_dir() => "directory",
        () if kind.is_file() => "file",
        () => "device or pipe",
    };
    Err(ListenError::NotASocket { path: path.into(), kind })
}

/// Removes a socket without a listener. The caller holds the lock.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let os = |what, source| ListenError::Os { path: path.into(), what, source };
    if !socket_exists(path)? {
        return Ok(());
    }
    // With a full backlog the connect is deferred: that listener is live too.
    let probe = ConnectOptions::new()
        .name(name(path)?)
        .wait_mode(ConnectWaitMode::Deferred)
        .nonblocking_stream(true)
        .connect_sync();
    match probe {
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "removing a stale socket: no process listens on it");
            std::fs::remove_file(path).map_err(|e| os("cannot remove the stale socket", e))
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Ok(_) => Err(ListenError::InUse { path: path.into() }),
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => Err(ListenError::InUse { path: path.into() }),
        Err(e) => Err(os("cannot tell whether another process listens", e)),
    }
}

fn name(path: &Path) -> Result<Name<'_>, ListenError> {
    path.to_fs_name::<GenericFilePath>().map_err(|source| ListenError::Os {
        path: path.into(),
        what: "not a socket path",
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn a_second_daemon_is_refused_and_the_first_keeps_its_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let runtime = runtime();
        let _guard = runtime.enter();
        let first = Endpoint::bind(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().mode();
        assert_eq!(mode & 0o777, 0o660);
        assert!(matches!(Endpoint::bind(&path), Err(ListenError::InUse { .. })));
        assert!(path.exists(), "the live socket stays");
        drop(first);
        assert!(!path.exists(), "an orderly end removes the socket");
        Endpoint::bind(&path).unwrap();
    }

    #[test]
    fn the_directory_of_a_socket_is_made_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = runtime();
        let _guard = runtime.enter();
        let endpoint = Endpoint::bind(&dir.path().join("rocmforge/api.sock")).unwrap();
        let mode = std::fs::metadata(dir.path().join("rocmforge")).unwrap().mode();
        assert_eq!(mode & 0o077, 0);
        drop(endpoint);
    }

    #[test]
    fn a_live_socket_without_a_lock_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let runtime = runtime();
        let _guard = runtime.enter();
        let first = Endpoint::bind(&path).unwrap();
        std::fs::remove_file(dir.path().join("api.sock.lock")).unwrap();
        assert!(matches!(Endpoint::bind(&path), Err(ListenError::InUse { .. })));
        assert!(path.exists());
        drop(first);
    }

    #[test]
    fn a_stale_socket_is_replaced_and_other_things_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let runtime = runtime();
        let _guard = runtime.enter();
        // A killed daemon leaves this behind: a bound name without a listener.
        let stale =
            ListenerOptions::new().name(name(&path).unwrap()).reclaim_name(false).create_sync().unwrap();
        drop(stale);
        assert!(path.exists());
        drop(Endpoint::bind(&path).unwrap());

        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(Endpoint::bind(&path), Err(ListenError::NotASocket { kind: "file", .. })));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");

        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("elsewhere", &path).unwrap();
        assert!(matches!(Endpoint::bind(&path), Err(ListenError::NotASocket { kind: "symbolic link", .. })));
        let device = Endpoint::bind(Path::new("/dev/null"));
        assert!(matches!(device, Err(ListenError::NotASocket { kind: "device or pipe", .. })));

        let long = dir.path().join("x".repeat(120));
        assert!(matches!(Endpoint::bind(&long), Err(ListenError::PathTooLong { .. })));
        let nowhere = dir.path().join("no/such/api.sock");
        assert!(matches!(Endpoint::bind(&nowhere), Err(ListenError::Os { .. })));
    }

    #[test]
    fn a_path_that_is_no_socket_gets_no_lock_file_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("models");
        std::fs::create_dir(&path).unwrap();
        assert!(matches!(Endpoint::bind(&path), Err(ListenError::NotASocket { kind: "directory", .. })));
        let entries: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(entries, ["models"]);
    }

    #[test]
    fn a_socket_is_unlinked_while_others_still_hold_it_and_its_successor_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let runtime = runtime();
        let _guard = runtime.enter();
        let endpoint = std::sync::Arc::new(Endpoint::bind(&path).unwrap());
        let held_by_a_task = std::sync::Arc::clone(&endpoint);
        endpoint.unlink();
        assert!(!path.exists());
        std::fs::write(&path, "another's").unwrap();
        drop((endpoint, held_by_a_task));
        assert!(path.exists(), "only our own socket is removed");
    }

    #[test]
    fn only_a_listening_stream_socket_is_taken_from_systemd() {
        let runtime = runtime();
        let _guard = runtime.enter();
        let (read, _write) = rustix::pipe::pipe().unwrap();
        assert!(matches!(Endpoint::from_systemd(read), Err(ListenError::HandedOver(_))));
        let network =
            rustix::net::socket(rustix::net::AddressFamily::NETLINK, rustix::net::SocketType::RAW, None);
        match Endpoint::from_systemd(network.unwrap()) {
            Err(ListenError::HandedOver(why)) => assert_eq!(why, "not a Unix socket"),
            other => panic!("{:?}", other.map(|endpoint| endpoint.is_handed_over())),
        }
        let unix = rustix::net::AddressFamily::UNIX;
        let datagram = rustix::net::socket(unix, rustix::net::SocketType::DGRAM, None).unwrap();
        assert!(matches!(Endpoint::from_systemd(datagram), Err(ListenError::HandedOver(_))));
        let stream = rustix::net::socket(unix, rustix::net::SocketType::STREAM, None).unwrap();
        assert!(matches!(Endpoint::from_systemd(stream), Err(ListenError::HandedOver(_))));
    }
}
