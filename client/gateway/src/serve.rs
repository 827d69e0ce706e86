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

/// Time for open answers to end when the gateway stops.
const DRAIN: Duration = Duration::from_secs(10);

/// Pause after an accept that the system refused, for want of descriptors.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);

/// Serves a listening socket until `stop` is ready. Then it accepts no more, and open answers have 10 s to end.
pub async fn serve(gateway: Arc<Gateway>, listener: Listener, stop: impl Future<Output = ()>) {
    let slots = Arc::new(Semaphore::new(gateway.settings.connections));
    let (stopping, stopped) = watch::channel(false);
    let mut tasks = JoinSet::new();
    let mut stop = pin!(stop);
    loop {
        let accept = async {
            // The semaphore is never closed, so this is an error only in theory.
            let slot = Arc::clone(&slots).acquire_owned().await.ok();
            (listener.accept().await, slot)
        };
        tokio::select! {
            () = &mut stop => break,
            Some(_ended) = tasks.join_next() => {}
            (accepted, slot) = accept => match accepted {
                Ok(socket) => {
                    let (gateway, stopped) = (Arc::clone(&gateway), stopped.clone());
                    let access = listener.access.of_connection(socket.peer());
                    tasks.spawn(async move {
                        connection(gateway, access, socket, stopped).await;
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
    drop(listener);
    let _ = stopping.send(true);
    let all_ended = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN, all_ended).await.is_err() {
        tasks.abort_all();
    }
}

/// Serves one connection until either side ends it.
async fn connection(
    gateway: Arc<Gateway>,
    access: Access,
    socket: Socket,
    mut stopped: watch::Receiver<bool>,
) {
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
        _ = stopped.changed() => served.as_mut().graceful_shutdown(),
    }
    let _ = served.await;
}
