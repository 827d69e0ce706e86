//! Connections: accepted up to a bound, each served by a task, ended in order when the gateway stops.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::listen::{Listener, Socket};
use crate::routes::answer;
use crate::{Gateway, access::Access};

/// Time for a request's headers, and for an idle connection's next request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// Most bytes of a request's headers, and of a response that waits to be written.
const BUFFER_BYTES: usize = 64 * 1024;

/// Most headers of a request.
const HEADERS_MAX: usize = 100;

/// Time for the last bytes of answers to be written.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Pause after an accept that the system refused, for want of descriptors.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);

/// A listening socket whose connections are served.
struct Door {
    gateway: Arc<Gateway>,
    listener: Listener,
    slots: Arc<Semaphore>,
    /// Tells connections to end once their last bytes are written.
    ending: watch::Sender<()>,
}

/// Serves a listening socket until `stop` is ready, and then ends in steps.
///
/// First `/health` says that the gateway stops, and for [`crate::Settings::notice`] requests are answered as ever: a router that
/// does not repeat requests loses none. Then requests are refused, and running answers have [`crate::Settings::drain`] to end. On
/// a socket from systemd new connections wait for the next gateway instead.
pub async fn serve(gateway: Arc<Gateway>, listener: Listener, stop: impl Future<Output = ()>) {
    let (notice, drain) = (gateway.settings.notice, gateway.settings.drain);
    let slots = Arc::new(Semaphore::new(gateway.settings.connections));
    let door = Door { gateway, listener, slots, ending: watch::channel(()).0 };
    let mut open = JoinSet::new();
    door.accept(&mut open, stop).await;
    door.gateway.ending.tell();
    door.accept(&mut open, tokio::time::sleep(notice)).await;
    door.gateway.ending.refuse();
    // Connections stay: a request that is on its way hears the refusal. Answers that take longer end with the set.
    let ended = async { drop(tokio::time::timeout(drain, door.gateway.ending.none_runs()).await) };
    if door.listener.is_inherited() {
        ended.await;
    } else {
        door.accept(&mut open, ended).await;
    }
    door.ending.send_replace(());
    let written = async { while open.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(LAST_WORDS, written).await;
}

impl Door {
    /// Accepts connections, each served by a task of the set, until `until` is ready.
    async fn accept(&self, tasks: &mut JoinSet<()>, until: impl Future<Output = ()>) {
        let mut until = pin!(until);
        loop {
            let accept = async {
                // The semaphore is never closed, so this is an error only in theory.
                let slot = Arc::clone(&self.slots).acquire_owned().await.ok();
                (self.listener.accept().await, slot)
            };
            tokio::select! {
                () = &mut until => return,
                Some(_ended) = tasks.join_next() => {}
                (accepted, slot) = accept => match accepted {
                    Ok(socket) => {
                        let gateway = Arc::clone(&self.gateway);
                        let access = self.listener.access.of_connection(socket.peer());
                        let ending = self.ending.subscribe();
                        tasks.spawn(async move {
                            connection(gateway, access, socket, ending).await;
                            drop(slot);
                        });
                    }
                    Err(error) => {
                        eprintln!("rocmforge-gateway: a connection cannot be accepted: {error}");
                        tokio::time::sleep(REFUSED_PAUSE).await;
                    }
                },
            }
        }
    }
}

/// Serves one connection until either side ends it.
async fn connection(gateway: Arc<Gateway>, access: Access, socket: Socket, mut ending: watch::Receiver<()>) {
    let _open = gateway.metrics.connection();
    let service = service_fn(|request| {
        let (gateway, access) = (Arc::clone(&gateway), access.clone());
        async move { Ok::<_, Infallible>(answer(gateway, access, request).await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(BUFFER_BYTES)
        .max_header_size(BUFFER_BYTES)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(socket), service);
    let mut served = pin!(served);
    // An error is the client's: it broke the protocol, hung up, or took nothing for too long.
    tokio::select! {
        _ = &mut served => return,
        _ = ending.changed() => served.as_mut().graceful_shutdown(),
    }
    let _ = served.await;
}
