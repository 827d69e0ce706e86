//! Connections: accepted while there are places, each served by a task, ended in order when the gateway stops.

use std::convert::Infallible;
use std::future::Future;
use std::io::{self, Write};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::life::{Life, Times, Watched};
use crate::listen::{Listener, Socket};
use crate::places::Places;
use crate::routes::answer;
use crate::{Gateway, access::Access};

/// Most bytes of a request's headers, and of a response that waits to be written.
const BUFFER_BYTES: usize = 64 * 1024;

/// Most headers of a request.
const HEADERS_MAX: usize = 100;

/// Time for the last bytes of answers to be written.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Pause after an accept that the system refused, for want of descriptors.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);

/// Time between two lines of the log about closed connections.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// A listening socket whose connections are served.
struct Door {
    gateway: Arc<Gateway>,
    listener: Listener,
    places: Arc<Places>,
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
    let places = Places::new(gateway.settings.connections);
    let door = Door { gateway, listener, places, ending: watch::channel(()).0 };
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
    door.report();
}

impl Door {
    /// Accepts connections, each served by a task of the set, until `until` is ready.
    async fn accept(&self, tasks: &mut JoinSet<()>, until: impl Future<Output = ()>) {
        let mut until = pin!(until);
        let mut report = tokio::time::interval_at(Instant::now() + REPORT_EVERY, REPORT_EVERY);
        loop {
            tokio::select! {
                () = &mut until => return,
                Some(_ended) = tasks.join_next() => {}
                _ = report.tick() => self.report(),
                accepted = self.next() => match accepted {
                    Ok(socket) => {
                        let gateway = Arc::clone(&self.gateway);
                        let access = self.listener.access.of_connection(socket.peer());
                        let ending = self.ending.subscribe();
                        let times = Times { head: gateway.settings.head, idle: gateway.settings.idle };
                        let life = Life::new(&self.places, socket.peer(), times);
                        tasks.spawn(connection(gateway, access, life, socket, ending));
                    }
                    Err(error) => {
                        eprintln!("rocmforge-gateway: a connection cannot be accepted: {error}");
                        // The system may have fewer descriptors than there are places.
                        self.places.push_out();
                        tokio::time::sleep(REFUSED_PAUSE).await;
                    }
                },
            }
        }
    }

    /// The next connection, once there is room for it: until then, clients wait with the system.
    async fn next(&self) -> io::Result<Socket> {
        loop {
            self.places.room().await;
            tokio::select! {
                biased;
                () = self.places.full() => {}
                accepted = self.listener.accept() => return accepted,
            }
        }
    }

    /// Logs the connections that were closed for want of a request.
    fn report(&self) {
        if let Some(report) = self.places.report() {
            // Clients cause these lines: a log that is gone must not end the gateway.
            let _ = writeln!(io::stderr(), "rocmforge-gateway: {report}");
        }
    }
}

/// Serves one connection until either side ends it.
async fn connection(
    gateway: Arc<Gateway>,
    access: Access,
    life: Arc<Life>,
    socket: Socket,
    mut ending: watch::Receiver<()>,
) {
    let _open = gateway.metrics.connection();
    let service = service_fn(|request| {
        let (gateway, access, life) = (Arc::clone(&gateway), access.clone(), Arc::clone(&life));
        async move { Ok::<_, Infallible>(answer(gateway, access, life, request).await) }
    });
    let served = http1::Builder::new()
        // The connection's life has times of its own: the library's counts the rest between two requests too.
        .header_read_timeout(None)
        .max_buf_size(BUFFER_BYTES)
        .max_header_size(BUFFER_BYTES)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(Watched::new(socket, Arc::clone(&life))), service);
    let mut served = pin!(served);
    // An error is the client's: it broke the protocol, hung up, or took nothing for too long.
    tokio::select! {
        () = life.run(served.as_mut()) => return,
        _ = ending.changed() => served.as_mut().graceful_shutdown(),
    }
    life.run(served).await;
}
