//! The accept loop: takes connections within the limits, and refuses the rest with a reason.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use interprocess::os::unix::uds_local_socket::tokio::Stream;
use rocmforge_client::wire::ErrorCode;
use rustix::net::SendFlags;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::listener::Endpoint;
use super::open::Open;
use super::rate::Rates;
use super::{connection, groups, unmapped};
use crate::lock::{Mutex, Rank};
use crate::session::{Credentials, LoggedUids, Service, share_code};
use crate::share::{Refusal, Taker};

/// Longest time between two ticks of an idle loop.
const TICK: Duration = Duration::from_secs(1);

/// Delays after a failed accept: without descriptors or memory, retrying at once would only burn a core.
const BACKOFF_MIN: Duration = Duration::from_millis(10);
const BACKOFF_MAX: Duration = Duration::from_millis(500);

/// After this many connections of users that connect too fast, the loop pauses.
///
/// Without a pause 64 threads of one user were accepted and closed 47,000 times a second, on three quarters of a processor.
/// Now the queue fills, and those threads sleep in `connect`. Others wait behind a full queue for some 20 ms, and behind
/// 8,000 threads that fill it again for a second.
const HASTY_AT_ONCE: u32 = 64;
const HASTY_PAUSE: Duration = Duration::from_millis(8);

/// Most refused clients that the daemon waits for, so that they can read the reason; it refuses more without waiting.
const REFUSALS_MAX: usize = 64;

/// Longest wait for a refused client.
const REFUSAL_TIME: Duration = Duration::from_secs(1);

/// Delay after which a refused client may retry.
const REFUSAL_RETRY_MS: u32 = 1000;

/// Accepts connections.
#[derive(Debug)]
pub struct Acceptor {
    service: Arc<Service>,
    open: Arc<Open>,
    refused: Mutex<LoggedUids>,
    refusals: Arc<Semaphore>,
    ticks: AtomicU64,
    tasks: TaskTracker,
    /// The uid of those that are told apart by none.
    unmapped: Option<u32>,
}

impl Acceptor {
    /// An acceptor for sessions of `service`, of at most `total` connections.
    pub fn new(service: Arc<Service>, total: u32) -> Arc<Self> {
        service.connections().set(total.into());
        let open = Open::new(Arc::clone(service.connections()), Arc::clone(service.users()));
        Arc::new(Self {
            service,
            open,
            refused: Mutex::new(Rank::LoggedUids, LoggedUids::new(1)),
            refusals: Arc::new(Semaphore::new(REFUSALS_MAX)),
            ticks: AtomicU64::new(0),
            tasks: TaskTracker::new(),
            unmapped: unmapped::uid(),
        })
    }

    /// Sets the most connections of all users; open ones stay.
    pub fn set_total(&self, total: u32) {
        self.service.connections().set(total.into());
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
        let (mut backoff, mut rates, mut hasty) = (BACKOFF_MIN, Rates::default(), 0);
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
                    let Some(uid) = hasty_user(&stream, &mut rates) else {
                        self.take(stream, &close);
                        continue;
                    };
                    drop(stream);
                    self.tell_of_haste(uid);
                    hasty += 1;
                    if hasty == HASTY_AT_ONCE {
                        hasty = 0;
                        tokio::time::sleep(HASTY_PAUSE).await;
                    }
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
        if self.unmapped == Some(peer.uid) {
            tracing::info!(
                uid = peer.uid,
                "refused a client: the daemon's user namespace has no uid for its user; map it, or run the daemon outside"
            );
            return self.refuse(stream, ErrorCode::PeerRefused, 0);
        }
        let place = match self.open.place(Taker::of(peer.uid), Instant::now()) {
            Ok(place) => place,
            Err(refusal) => return self.refuse_for_room(stream, peer.uid, &refusal),
        };
        let (service, close) = (Arc::clone(&self.service), close.clone());
        self.tasks.spawn(async move {
            connection::serve(stream, peer, service, close, place.life()).await;
            drop(place);
        });
    }

    /// `Quota` where the user has its own share, `Busy` where all users together leave no room.
    fn refuse_for_room(&self, stream: Stream, uid: u32, refusal: &Refusal) {
        if let Some(more) = self.refused.lock().tell(uid, Instant::now()) {
            let mut why = refusal.words(1, "connections");
            let limit = self.service.users().of(uid).connections;
            if refusal.fixed && limit.is_own() {
                why = format!("{why}; {}", limit.words(uid));
            }
            tracing::warn!(
                name: "refused",
                uid,
                untold = more.of_uid,
                untold_of_others = more.of_others,
                "refused a connection: {why}"
            );
        }
        self.refuse(stream, share_code(refusal), REFUSAL_RETRY_MS);
    }

    /// Logs that a user connects too fast.
    fn tell_of_haste(&self, uid: u32) {
        if let Some(more) = self.refused.lock().tell(uid, Instant::now()) {
            let (untold, untold_of_others) = (more.of_uid, more.of_others);
            tracing::warn!(
                name: "refused",
                uid,
                untold,
                untold_of_others,
                "closed a connection at once: the user connects too fast"
            );
        }
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

/// The user of a connection if it connects too fast. Checked first, because it has to be cheap: nothing is sent to such a
/// client, and nothing started.
fn hasty_user(stream: &Stream, rates: &mut Rates) -> Option<u32> {
    let uid = stream.inner().peer_cred().ok()?.uid();
    (!Taker::of(uid).privileged && !rates.may_connect(uid, Instant::now())).then_some(uid)
}

/// The client's ids at connect time.
///
/// They are asked of tokio's stream. The other crate refuses a peer without a process id here, and clients outside the
/// daemon's container have none.
fn peer(stream: &Stream) -> std::io::Result<Credentials> {
    let credentials = stream.inner().peer_cred()?;
    let mut gids = groups::of_peer(stream.as_fd())?;
    gids.push(credentials.gid());
    Ok(Credentials { uid: credentials.uid(), gids, by: None })
}
