//! How to reach the daemon.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::ClientError;

/// Default socket of the system's daemon.
pub const DEFAULT_SOCKET: &str = "/run/rocmforge/api.sock";

/// Default socket of a user's own daemon: `$XDG_RUNTIME_DIR/rocmforge/api.sock`. `None` without that variable, and
/// for root, whose daemon is the system's.
pub fn user_socket() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return None;
    }
    let dir = std::env::var_os("XDG_RUNTIME_DIR").filter(|value| !value.is_empty())?;
    Some(PathBuf::from(dir).join("rocmforge/api.sock"))
}

/// Environment variable that names another socket.
pub const SOCKET_VARIABLE: &str = "ROCMFORGE_SOCKET";

/// Silence after which a daemon that is waited for is pinged.
pub const PING_AFTER: Duration = Duration::from_secs(30);

/// Further silence after which its connection is given up. A daemon answers a ping at once, also while a request waits
/// or a model loads; this is long enough for a machine that swaps.
pub const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// How to reach the daemon.
#[derive(Clone, Debug)]
pub struct Options {
    /// Path of the daemon's socket.
    pub socket: PathBuf,
    /// Name for the daemon's log; at most 64 bytes are sent.
    pub client_name: String,
    /// Most time for connecting, including a full queue, a restart and the hello.
    pub connect_timeout: Duration,
    /// The part of `connect_timeout` in which a socket without a listener is retried. It covers a restart, but does
    /// not make callers wait long for a missing daemon.
    pub absent_timeout: Duration,
    /// Most time for one reply. It does not apply to a generation's items.
    pub reply_timeout: Duration,
    /// Time during which [`crate::Client`] repeats a call that is safe to repeat.
    pub retry_timeout: Duration,
    /// While a request waits and no frame comes for this long, the daemon is pinged on the same connection.
    pub ping_after: Duration,
    /// If no frame comes for this long after that ping, every request of the connection fails.
    pub ping_timeout: Duration,
    /// The uids that may serve.
    pub trust: ServerTrust,
    /// Checksums on all frames, both ways. The kernel loses no bytes of a local socket; use them to find faults.
    pub checksum: bool,
    /// The user that connections act for: its number among those that the daemon's configuration gives this program's user
    /// (`policy.subordinates`). The daemon then counts them for that user, and not for this program's.
    pub acts_as: Option<u32>,
}

/// Most bytes of a socket's path: the kernel's `sun_path` has 108, the last of them zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

impl Options {
    /// Takes a program's arguments `--socket` and `--server-uid`; without them, the defaults stay.
    pub fn set_server(&mut self, socket: Option<&Path>, uids: &[u32]) {
        if let Some(socket) = socket {
            self.socket = socket.to_owned();
        }
        if !uids.is_empty() {
            self.trust = ServerTrust::Uids(uids.to_vec());
        }
    }

    /// Checks that the options are usable; connecting checks it too.
    ///
    /// # Errors
    /// [`ClientError::SocketPath`].
    pub fn check(&self) -> Result<(), ClientError> {
        let bytes = self.socket.as_os_str().len();
        if (1..=SOCKET_PATH_BYTES_MAX).contains(&bytes) {
            return Ok(());
        }
        Err(ClientError::SocketPath { socket: self.socket.clone(), bytes, max: SOCKET_PATH_BYTES_MAX })
    }
}

impl Default for Options {
    /// `$ROCMFORGE_SOCKET`, else [`user_socket`] if it exists, else [`DEFAULT_SOCKET`]; 2 s to connect, 30 s for a
    /// reply.
    fn default() -> Self {
        let named = std::env::var_os(SOCKET_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
        let socket = named.or_else(|| user_socket().filter(|path| path.exists()));
        Self {
            socket: socket.unwrap_or_else(|| PathBuf::from(DEFAULT_SOCKET)),
            client_name: concat!("rocmforge-client/", env!("CARGO_PKG_VERSION")).to_owned(),
            connect_timeout: Duration::from_secs(2),
            absent_timeout: Duration::from_millis(300),
            reply_timeout: Duration::from_secs(30),
            retry_timeout: Duration::from_secs(5),
            ping_after: PING_AFTER,
            ping_timeout: PING_TIMEOUT,
            trust: ServerTrust::Usual,
            checksum: false,
            acts_as: None,
        }
    }
}

/// The uids that may be at the other end. Any other process that made the socket could read prompts and forge
/// answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ServerTrust {
    /// root (also if systemd made the socket), the user `rocmforge`, and the caller's own uid.
    #[default]
    Usual,
    /// Exactly these uids.
    Uids(Vec<u32>),
    /// Any uid.
    Anyone,
}

/// The daemon's user name.
const DAEMON_USER: &str = "rocmforge";

impl std::fmt::Display for ServerTrust {
    /// The trusted users, as words after "not by".
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Usual => f.write_str("root, the user rocmforge or you"),
            Self::Uids(uids) => {
                let uids: Vec<_> = uids.iter().map(|uid| format!("uid {uid}")).collect();
                f.write_str(&uids.join(" or "))
            }
            Self::Anyone => f.write_str("anyone"),
        }
    }
}

impl ServerTrust {
    /// Whether a server of this uid is trusted.
    pub(crate) fn trusts(&self, uid: u32) -> bool {
        match self {
            Self::Anyone => true,
            Self::Uids(uids) => uids.contains(&uid),
            Self::Usual => {
                uid == 0
                    || uid == rustix::process::geteuid().as_raw()
                    || std::fs::read_to_string("/etc/passwd")
                        .is_ok_and(|passwd| uid_of(DAEMON_USER, &passwd) == Some(uid))
            }
        }
    }
}

/// Uid of a user in the text of a passwd file. System users are in it, because systemd-sysusers writes them there.
pub fn uid_of(user: &str, passwd: &str) -> Option<u32> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == user).then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_users_uid_is_the_third_field_of_its_line() {
        let passwd =
            "root:x:0:0:root:/root:/bin/sh\nrocmforge-users:x:7:7::/:\nrocmforge:x:994:993:ROCmForge:/:\n";
        assert_eq!(uid_of("rocmforge", passwd), Some(994));
        assert_eq!(uid_of("rocm", passwd), None);
        assert_eq!(uid_of("rocmforge", "rocmforge:x"), None);
    }

    #[test]
    fn a_stranger_is_not_trusted_unless_named() {
        let stranger = u32::MAX - 7;
        assert!(!ServerTrust::Usual.trusts(stranger));
        assert!(ServerTrust::Uids(vec![stranger]).trusts(stranger));
        assert!(!ServerTrust::Uids(vec![stranger]).trusts(0));
        assert!(ServerTrust::Usual.trusts(0));
        assert!(ServerTrust::Usual.trusts(rustix::process::geteuid().as_raw()));
    }
}
