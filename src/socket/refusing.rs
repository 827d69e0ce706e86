//! A daemon that cannot start tells those who wait for it why.
//!
//! systemd starts the daemon for a connection, which waits in the socket's queue. A daemon that ends without taking it is started
//! again for it at once. After twelve such starts in a minute systemd closes the socket, and clients find no daemon and no reason.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use interprocess::os::unix::uds_local_socket::tokio::Stream;
use rocmforge_client::wire::{
    self, ClientHello, ErrorCode, FEATURE_CHECKSUM, Flags, Op, ServerOffer, WireError,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::task::TaskTracker;

use super::listener::Endpoint;
use super::receive;

/// A start that nobody waits for ends at once: an administrator's, who reads its exit status.
const WAITING: Duration = Duration::from_millis(50);

/// Clients are told for so long. Four such starts in a minute stay below systemd's limit of twelve. An administrator who tries to mend the
/// configuration ends one and begins another with each restart, and has four restarts a minute.
const TELLING: Duration = Duration::from_secs(15);

/// Longest time for one client.
const EACH: Duration = Duration::from_secs(2);

/// Most clients at a time; more wait in the socket's queue.
const AT_A_TIME: usize = 64;

/// Answers every client with `why`, if one waits already, for 15 seconds. `listener` is systemd's. Returns how many
/// clients were told.
///
/// # Errors
/// It is not a listening Unix stream socket, or no runtime can be started.
pub fn tell_waiting(listener: OwnedFd, why: &str) -> io::Result<usize> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let endpoint = Endpoint::from_systemd(listener).map_err(io::Error::other)?;
        let (clients, mut told) = (TaskTracker::new(), 0);
        let mut until = Instant::now() + WAITING;
        while let Ok(accepted) = timeout_at(until, endpoint.accept()).await {
            if told == 0 {
                until = Instant::now() + TELLING;
            }
            let Ok(stream) = accepted else {
                tokio::time::sleep(WAITING).await;
                continue;
            };
            told += 1;
            let why = why.to_owned();
            clients.spawn(async move { timeout(EACH, tell(stream, &why)).await });
            while clients.len() >= AT_A_TIME {
                tokio::time::sleep(WAITING).await;
            }
        }
        clients.close();
        clients.wait().await;
        Ok(told)
    })
}

/// Accepts a hello, because a refused one has no room for words, and ends the connection with an error. `None` if the
/// client speaks another protocol or is gone.
async fn tell(mut stream: Stream, why: &str) -> Option<()> {
    let hello = ClientHello::parse(&receive::hello(&stream).await.ok()?).ok()?;
    let answer = ServerOffer::default().answer(&hello);
    stream.write_all(&answer.to_bytes()).await.ok()?;
    let flags = if answer.features & FEATURE_CHECKSUM != 0 { Flags::CRC } else { Flags::NONE };
    // Not worth another attempt before a person acts.
    let error = WireError { retryable: false, ..WireError::new(ErrorCode::Unavailable, why) };
    let frame = wire::encode_frame(0, Op::Error, flags, answer.limits.max_frame, &error).ok()?;
    stream.write_all(&frame).await.ok()?;
    // A close before the request is read would take the error from the client.
    let mut rest = [0; 4096];
    while stream.read(&mut rest).await.is_ok_and(|bytes| bytes > 0) {}
    Some(())
}
