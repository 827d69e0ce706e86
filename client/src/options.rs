//! How to reach the daemon.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::ClientError;

/// Where the system's daemon listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/rocmforge/api.sock";

/// Where a user's own daemon listens unless told otherwise: `$XDG_RUNTIME_DIR/rocmforge/api.sock`. `None` without that
/// variable, and for root, whose daemon is the system's.
pub fn user_socket() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return None;
    }
    let dir = std::env::var_os("XDG_RUNTIME_DIR").filter(|value| !value.is_empty())?;
    Some(PathBuf::from(dir).join("rocmforge/api.sock"))
}

/// Environment variable that names another socket.
pub const SOCKET_VARIABLE: &str = "ROCMFORGE_SOCKET";

/// How to reach the daemon.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its socket.
    pub socket: PathBuf,
    /// For its log; at most 64 bytes are sent.
    pub client_name: String,
    /// How long connecting may take in all: a full queue, a restart and the hello counted.
    pub connect_timeout: Duration,
    /// How long of it a socket that nobody listens on is tried again: covers a restart, and keeps a missing daemon from being
    /// waited for.
    pub absent_timeout: Duration,
    /// How long one reply may take. Items of a generation are not bound by it.
    pub reply_timeout: Duration,
    /// How long [`crate::Client`] repeats a call that may be repeated.
    pub retry_timeout: Duration,
    /// Who may serve.
    pub trust: ServerTrust,
    /// Checksums on all frames, both ways. The kernel loses no bytes of a local socket; this is for finding faults.
    pub checksum: bool,
}

/// Bytes of a socket's path: the kernel's `sun_path` has 108, and a zero ends it.
const SOCKET_PATH_BYTES_MAX: usize = 107;

impl Options {
    /// Whether they can be used at all; connecting checks it too.
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
    /// `$ROCMFORGE_SOCKET`, else the [`user_socket`] where there is one, else [`DEFAULT_SOCKET`]; 2 s to connect, 30 s for
    /// a reply.
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
            trust: ServerTrust::Usual,
            checksum: false,
        }
    }
}

/// Which uid may be at the other end: whoever else made the socket could read prompts and forge answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ServerTrust {
    /// root (also where systemd made the socket), the user `rocmforge`, and our own uid.
    #[default]
    Usual,
    /// Exactly these.
    Uids(Vec<u32>),
    /// Anyone.
    Anyone,
}

/// The daemon's user.
const DAEMON_USER: &str = "rocmforge";

impl std::fmt::Display for ServerTrust {
    /// Who is trusted, after "not by".
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

/// Uid of a user in the text of a passwd file. System users are there: systemd-sysusers writes them into it.
fn uid_of(user: &str, passwd: &str) -> Option<u32> {
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
