//! Listening sockets: TCP addresses, Unix sockets, and one that systemd passes; and the connections they give.

use std::fmt;
use std::fs;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::str::FromStr;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::Sleep;

use crate::access::{Access, Peer, Tokens};

/// Where to listen without a word about it: the port beside Ollama's.
pub const DEFAULT_ADDRESS: &str = "127.0.0.1:11435";

/// A connection whose client takes no byte for so long is closed. The daemon ends an answer after 30 s of it.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// Bytes that the kernel keeps for a client that reads slowly.
const SEND_BUFFER_BYTES: usize = 128 * 1024;

/// Clients that the kernel lets wait for the gateway to accept them: as many as with a socket of systemd. With fewer, a burst makes
/// others' connections take a second, after which their systems try again.
const BACKLOG: i32 = 4096;

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// An IP address and port.
    Tcp(SocketAddr),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path.is_empty() {
                true => Err("the path after unix: is empty".to_owned()),
                false => Ok(Self::Unix(path.into())),
            };
        }
        let text =
            text.strip_prefix("localhost:").map_or(text.to_owned(), |port| format!("127.0.0.1:{port}"));
        let address = text.parse().map_err(|_| {
            "not an address: write 127.0.0.1:PORT, [::1]:PORT or unix:/path; names of hosts are not looked up"
        })?;
        Ok(Self::Tcp(address))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A listening socket, and who may ask there.
#[derive(Debug)]
pub struct Listener {
    socket: Listening,
    /// The rules for its requests.
    pub access: Access,
    /// A Unix socket's path, removed at the end if this process made it.
    path: Option<PathBuf>,
    inherited: bool,
}

#[derive(Debug)]
enum Listening {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// Listens. A Unix socket's file gets mode 0600: its directory and later changes of the mode decide who may connect.
    /// Call it in a tokio runtime.
    ///
    /// # Errors
    /// A text that says why the gateway does not listen there.
    pub fn open(address: &Address, tokens: Option<Tokens>) -> Result<Self, String> {
        let failed = |error: io::Error| format!("{address}: {error}");
        match address {
            Address::Tcp(tcp) => {
                let access = Access::of_address(*tcp, tokens)?;
                let listener = std::net::TcpListener::bind(tcp).map_err(failed)?;
                rustix::net::listen(&listener, BACKLOG).map_err(|error| failed(error.into()))?;
                Self::tcp(listener, access, false).map_err(failed)
            }
            Address::Unix(path) => {
                remove_left_over(path).map_err(failed)?;
                let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
                let bound = UnixListener::bind(path);
                rustix::process::umask(before);
                let socket = Listening::Unix(bound.map_err(failed)?);
                let access = tokens.map_or(Access::File, Access::Token);
                Ok(Self { socket, access, path: Some(path.clone()), inherited: false })
            }
        }
    }

    /// Takes a listening socket that systemd opened. Call it in a tokio runtime.
    ///
    /// # Errors
    /// As [`Listener::open`].
    pub fn inherited(fd: OwnedFd, tokens: Option<Tokens>) -> Result<Self, String> {
        let failed = |error: io::Error| format!("the socket that systemd passed: {error}");
        if !sockopt::socket_acceptconn(&fd).unwrap_or(false) {
            return Err("the descriptor that systemd passed is no listening socket".to_owned());
        }
        let family = sockopt::socket_domain(&fd).map_err(|error| failed(error.into()))?;
        if family == rustix::net::AddressFamily::UNIX {
            let listener = std::os::unix::net::UnixListener::from(fd);
            listener.set_nonblocking(true).map_err(failed)?;
            let socket = Listening::Unix(UnixListener::from_std(listener).map_err(failed)?);
            let access = tokens.map_or(Access::File, Access::Token);
            return Ok(Self { socket, access, path: None, inherited: true });
        }
        let listener = std::net::TcpListener::from(fd);
        let address = listener.local_addr().map_err(failed)?;
        let access = Access::of_address(address, tokens)?;
        Self::tcp(listener, access, true).map_err(failed)
    }

    fn tcp(listener: std::net::TcpListener, access: Access, inherited: bool) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let socket = Listening::Tcp(TcpListener::from_std(listener)?);
        Ok(Self { socket, access, path: None, inherited })
    }

    /// True if systemd opened the socket: clients that nobody accepts wait there for the next gateway.
    pub fn is_inherited(&self) -> bool {
        self.inherited
    }

    /// The address in force, with the port that the kernel chose for port 0.
    pub fn address(&self) -> String {
        match &self.socket {
            Listening::Tcp(listener) => listener
                .local_addr()
                .map_or_else(|error| error.to_string(), |address| format!("http://{address}")),
            Listening::Unix(listener) => {
                let address = listener.local_addr().ok();
                let path = address.as_ref().and_then(|address| address.as_pathname());
                path.map_or_else(|| "unix:?".to_owned(), |path| format!("unix:{}", path.display()))
            }
        }
    }

    /// The next connection.
    ///
    /// # Errors
    /// Errors of the kernel, such as a lack of descriptors.
    pub async fn accept(&self) -> io::Result<Socket> {
        let (stream, peer) = match &self.socket {
            Listening::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                stream.set_nodelay(true)?;
                sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER_BYTES)?;
                (Stream::Tcp(stream), Peer::of_address(from.ip()))
            }
            Listening::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let uid = stream.peer_cred().ok().map(|peer| peer.uid());
                (Stream::Unix(stream), uid.map_or(Peer::Machine, Peer::User))
            }
        };
        Ok(Socket { stream, peer, stalled: None })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // If it is gone already, nothing is left to do.
            let _ = fs::remove_file(path);
        }
    }
}

/// Removes the socket of a process that ended without removing it. Any other stays, and binding then fails.
fn remove_left_over(path: &Path) -> io::Result<()> {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    // Any other error may be that of a socket that serves others.
    let refuses = || {
        let connected = std::os::unix::net::UnixStream::connect(path);
        connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    };
    if is_socket && refuses() { fs::remove_file(path) } else { Ok(()) }
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A client's connection. Writing fails when the client takes no byte for [`WRITE_TIMEOUT`].
#[derive(Debug)]
pub struct Socket {
    stream: Stream,
    peer: Peer,
    /// Runs while the client takes nothing.
    stalled: Option<Pin<Box<Sleep>>>,
}

/// Calls a function of the stream, whatever its kind.
macro_rules! of_stream {
    ($socket:expr, $function:ident $(, $argument:expr)*) => {
        match &mut $socket.stream {
            Stream::Tcp(stream) => Pin::new(stream).$function($($argument),*),
            Stream::Unix(stream) => Pin::new(stream).$function($($argument),*),
        }
    };
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        of_stream!(self, poll_read, cx, buf)
    }
}

impl Socket {
    /// The other end: of a Unix socket, its process's user if the kernel tells it.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Passes an outcome of writing on, or the error of a client that has not read for too long.
    fn timed<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.stalled = None;
            return outcome;
        }
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(WRITE_TIMEOUT)));
        stalled.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = of_stream!(self, poll_write, cx, buf);
        self.timed(cx, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = of_stream!(self, poll_write_vectored, cx, bufs);
        self.timed(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        of_stream!(self, poll_flush, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        of_stream!(self, poll_shutdown, cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_loopback_others_or_paths() {
        let address = |text: &str| text.parse::<Address>();
        assert_eq!(address("127.0.0.1:80").unwrap(), Address::Tcp(([127, 0, 0, 1], 80).into()));
        assert_eq!(address("localhost:80").unwrap(), address("127.0.0.1:80").unwrap());
        assert_eq!(address("unix:/run/x").unwrap(), Address::Unix("/run/x".into()));
        for bad in ["", "unix:", "80", "localhost", "example.com:80", "127.0.0.1"] {
            assert!(address(bad).is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn a_left_over_socket_is_replaced_and_one_in_use_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let address = Address::Unix(dir.path().join("door.sock"));
        drop(std::os::unix::net::UnixListener::bind(dir.path().join("door.sock")).unwrap());
        let first = Listener::open(&address, None).unwrap();
        assert!(Listener::open(&address, None).unwrap_err().contains("door.sock"));
        drop(first);
        assert!(!dir.path().join("door.sock").exists(), "its file is removed");
    }
}
