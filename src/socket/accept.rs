//! The accept loop: takes connections within the limits, and refuses the rest with a reason.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use interprocess::local_socket::traits::StreamCommon;
use interprocess::os::unix::uds_local_socket::tokio::Stream;
use rocmforge_client::wire::ErrorCode;
use rustix::net::SendFlags;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::listener::Endpoint;
use super::{connection, groups};
use crate::lock::{Mutex, Rank};
use crate::session::{Credentials, Service};

/// Longest time between two ticks of an idle loop.
const TICK: Duration = Duration::from_secs(1);

/// Delays after a failed accept: without descriptors or memory, retrying at once would only burn a core.
const BACKOFF_MIN: Duration = Duration::from_millis(10);
const BACKOFF_MAX: Duration = Duration::from_millis(500);

/// Most refused clients that the daemon waits for, so that they can read the reason; it refuses more without waiting.
const REFUSALS_MAX: usize = 64;

/// Longest wait for a refused client.
const REFUSAL_TIME: Duration = Duration::from_secs(1);

/// Delay after which a refused client may retry.
const REFUSAL_RETRY_MS: u32 = 1000;

/// Bounds on open connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Total.
    pub total: u32,
    /// For each uid.
    pub per_uid: u32,
}

/// Accepts connections.
#[derive(Debug)]
pub struct Acceptor {
    service: Arc<Service>,
    open: Arc<Mutex<Open>>,
    limits: Mutex<ConnectionLimits>,
    refusals: Arc<Semaphore>,
    ticks: AtomicU64,
    tasks: TaskTracker,
}

/// Counts of open connections.
#[derive(Debug, Default)]
struct Open {
    total: u32,
    per_uid: HashMap<u32, u32>,
}

/// A connection, counted until this drops.
struct Counted {
    open: Arc<Mutex<Open>>,
    service: Arc<Service>,
    uid: u32,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut open = self.open.lock();
        open.total -= 1;
        if let Some(count) = open.per_uid.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                open.per_uid.remove(&self.uid);
            }
        }
        self.service.set_connections(open.total);
    }
}

impl Acceptor {
    /// An acceptor for sessions of `service`.
    pub fn new(service: Arc<Service>, limits: ConnectionLimits) -> Arc<Self> {
        Arc::new(Self {
            service,
            open: Arc::new(Mutex::new(Rank::Connections, Open::default())),
            limits: Mutex::new(Rank::ConnectionLimits, limits),
            refusals: Arc::new(Semaphore::new(REFUSALS_MAX)),
            ticks: AtomicU64::new(0),
            tasks: TaskTracker::new(),
        })
    }

    /// Sets the limits for new connections.
    pub fn set_limits(&self, limits: ConnectionLimits) {
        *self.limits.lock() = limits;
    }

    /// A counter that increases at least once a second while the loop runs.
    pub fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// Completes when every connection has ended.
    pub async fn closed(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Accepts until `stop`; each connection lives on until `close`.
    pub async fn run(
        self: Arc<Self>,
        endpoint: Arc<Endpoint>,
        stop: CancellationToken,
        close: CancellationToken,
    ) {
        let mut backoff = BACKOFF_MIN;
        loop {
            self.ticks.fetch_add(1, Ordering::Relaxed);
            let accepted = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                accepted = endpoint.accept() => accepted,
                () = tokio::time::sleep(TICK) => continue,
            };
            match accepted {
                Ok(stream) => {
                    backoff = BACKOFF_MIN;
                    self.take(stream, &close);
                }
                Err(error) => {
                    if backoff == BACKOFF_MIN {
                        tracing::warn!(%error, "connections cannot be accepted; trying again");
                    }
                    tokio::time::sleep(backoff).await;
                    backoff = (backoff * 2).min(BACKOFF_MAX);
                }
            }
        }
    }

    fn take(&self, stream: Stream, close: &CancellationToken) {
        let peer = match peer(&stream) {
            Ok(peer) => peer,
            Err(error) => {
                tracing::info!(%error, "refused a client: the kernel does not report its credentials");
                return self.refuse(stream, ErrorCode::PeerRefused, 0);
            }
        };
        let Some(counted) = self.count(peer.uid) else {
            return self.refuse(stream, ErrorCode::Quota, REFUSAL_RETRY_MS);
        };
        let service = Arc::clone(&self.service);
        let close = close.clone();
        self.tasks.spawn(async move {
            connection::serve(stream, peer, service, close).await;
            drop(counted);
        });
    }

    fn count(&self, uid: u32) -> Option<Counted> {
        let limits = *self.limits.lock();
        let mut open = self.open.lock();
        let of_uid = open.per_uid.get(&uid).copied().unwrap_or(0);
        if open.total >= limits.total || of_uid >= limits.per_uid {
            return None;
        }
        open.total += 1;
        open.per_uid.insert(uid, of_uid + 1);
        self.service.set_connections(open.total);
        Some(Counted { open: Arc::clone(&self.open), service: Arc::clone(&self.service), uid })
    }

    /// Sends the reason, then waits briefly for the client to read it. Closing at once would make its own hello fail
    /// first.
    fn refuse(&self, stream: Stream, code: ErrorCode, retry_after_ms: u32) {
        let words = self.service.offer().refuse(code, retry_after_ms).to_bytes();
        // 80 bytes fit an empty socket buffer, so this does not block.
        if rustix::net::send(stream.as_fd(), &words, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_err() {
            return;
        }
        let Ok(permit) = Arc::clone(&self.refusals).try_acquire_owned() else { return };
        self.tasks.spawn(async move {
            let _ = tokio::time::timeout(REFUSAL_TIME, super::receive::hello(&stream)).await;
            drop(permit);
        });
    }
}

/// The client's ids at connect time.
fn peer(stream: &Stream) -> std::io::Result<Credentials> {
    let unknown = |what: &'static str| move || std::io::Error::other(what);
    let credentials = stream.peer_creds()?;
    let uid = credentials.euid().ok_or_else(unknown("no user id"))?;
    let mut gids = groups::of_peer(stream.as_fd())?;
    gids.push(credentials.egid().ok_or_else(unknown("no group id"))?);
    Ok(Credentials { uid, gids })
}
