//! One connection, from its hello to its end: a reader that feeds the session and a writer that empties its outbox.

use std::sync::Arc;
use std::time::{Duration, Instant};

use interprocess::os::unix::uds_local_socket::tokio::Stream;
use rocmforge_client::wire::{ClientHello, ErrorCode, ServerHello};
use tokio::io::AsyncWriteExt;
use tokio_util::sync::CancellationToken;

use super::open::{IDLE, Life};
use super::receive::{self, Frames, ReceiveError};
use crate::session::{Credentials, Fatal, Outbox, Service, Session};

/// Longest time that a closing connection may take to deliver its queued output.
const LINGER: Duration = Duration::from_secs(1);

/// How often a writer that waits for its client checks the soft limit.
const SLOW_CHECK: Duration = Duration::from_secs(1);

/// Serves a client until it hangs up, breaks the rules, or stops reading.
///
/// At `close`, answers that are ready are still sent.
pub(super) async fn serve(
    stream: Stream,
    peer: Credentials,
    service: Arc<Service>,
    close: CancellationToken,
    life: Arc<Life>,
) {
    let stream = Arc::new(stream);
    let agreed = tokio::select! {
        agreed = handshake(&stream, &service, peer) => agreed,
        () = close.cancelled() => None,
        () = life.given_up.cancelled() => None,
    };
    let Some((hello, user)) = agreed else { return };
    let (uid, real_uid, acts) = (user.uid, user.real_uid(), user.by.is_some());
    let outbox = Outbox::new(service.budget.answers(uid));
    let room = service.budget.room(uid);
    let users = Arc::clone(service.users());
    // A peer that acts for users passes no files: descriptors that are slow to close count against a uid, and it has many.
    let may_pass = move || !acts && users.of(uid).passed_models.value > 0;
    let frames = Frames::new(&stream, hello.limits.max_frame, &room, &may_pass);
    let mut session = Session::new(Arc::clone(&service), user, &hello, outbox.clone());
    let overflow = session.last_words(&Fatal {
        code: ErrorCode::OutputOverflow,
        message: "too much unread output is queued: read answers as they arrive".to_owned(),
    });
    life.serves(session.watch());
    life.moved();
    let writer = tokio::spawn(write(Arc::clone(&stream), outbox.clone(), overflow, Arc::clone(&life)));
    let end = tokio::select! {
        end = read(frames, &mut session, &life) => end,
        () = life.given_up.cancelled() => End::Tell(given_up()),
        () = outbox.closed() => End::Quiet,
        () = close.cancelled() => End::Quiet,
    };
    if let End::Tell(fatal) = end {
        if let Some(untold) = service.may_log(real_uid) {
            let code = fatal.code as u16;
            tracing::info!(uid, code, untold, reason = fatal.message, "closed a connection");
        }
        match session.last_words(&fatal) {
            Some(frame) => outbox.close_with(frame),
            None => outbox.close(),
        }
    } else {
        outbox.close();
    }
    if outbox.overflowed() && service.may_log(real_uid).is_some() {
        tracing::info!(uid, "disconnected a client that does not read");
    }
    drop(session);
    let abort = writer.abort_handle();
    if tokio::time::timeout(LINGER, writer).await.is_err() {
        abort.abort();
    }
}

/// How a connection ends.
enum End {
    /// The client is gone or needs no reason.
    Quiet,
    /// Send the client the reason.
    Tell(Fatal),
}

/// The end of an idle connection whose place another user needs.
fn given_up() -> Fatal {
    let message = format!(
        "the daemon has no room for another user's connection, and this one was idle for {} s: connect again when needed",
        IDLE.as_secs()
    );
    Fatal { code: ErrorCode::Busy, message }
}

async fn read(mut frames: Frames<'_>, session: &mut Session, life: &Life) -> End {
    loop {
        let received = frames.next().await;
        life.moved();
        let fatal = match received {
            Ok(frame) => match session.on_frame(frame) {
                Ok(None) => continue,
                Ok(Some(paid)) => {
                    tokio::time::sleep_until(paid.into()).await;
                    continue;
                }
                Err(fatal) => fatal,
            },
            Err(error) => match error.code() {
                None => return End::Quiet,
                Some(code) => Fatal { code, message: error.to_string() },
            },
        };
        return End::Tell(fatal);
    }
}

/// Exchanges the hellos, and finds the user that the connection counts for. `None` when the connection is over; the client got
/// the reason if it could be sent.
async fn handshake(
    stream: &Stream,
    service: &Service,
    peer: Credentials,
) -> Option<(ServerHello, Credentials)> {
    let offer = service.offer();
    let (answer, user) = match receive::hello(stream).await {
        Ok(bytes) => match ClientHello::parse(&bytes) {
            Ok(hello) => agree(service, peer, &hello),
            Err(error) => (offer.refuse(error.code(), 0), None),
        },
        Err(ReceiveError::HungUp | ReceiveError::CutShort { .. } | ReceiveError::Os(_)) => return None,
        Err(error) => (offer.refuse(error.code().unwrap_or(ErrorCode::NotProtocol), 0), None),
    };
    // 80 bytes always fit an empty socket buffer.
    (&*stream).write_all(&answer.to_bytes()).await.ok()?;
    user.map(|user| (answer, user))
}

/// The answer to a hello, and the user that the connection counts for if it is accepted.
fn agree(service: &Service, peer: Credentials, hello: &ClientHello) -> (ServerHello, Option<Credentials>) {
    let (offer, uid) = (service.offer(), peer.uid);
    let answer = offer.answer(hello);
    if answer.status != 0 {
        return (answer, None);
    }
    match service.user_of(peer, hello) {
        Ok(user) => (answer, Some(user)),
        Err(refused) => {
            if let Some(untold) = service.may_log(uid) {
                tracing::info!(name: "refused", uid, untold, "refused a connection: {refused}");
            }
            (offer.refuse(ErrorCode::Forbidden, 0), None)
        }
    }
}

/// Writes the outbox's frames until it ends, the client hangs up, or the client reads too slowly; then, last,
/// `overflow`.
async fn write(stream: Arc<Stream>, outbox: Outbox, overflow: Option<Vec<u8>>, life: Arc<Life>) {
    let mut stream = &*stream;
    while let Some(chunk) = outbox.next_chunk().await {
        let mut rest = chunk.as_slice();
        while !rest.is_empty() {
            tokio::select! {
                written = stream.write(rest) => match written {
                    Ok(bytes @ 1..) => {
                        life.moved();
                        outbox.written(bytes);
                        rest = &rest[bytes..];
                    }
                    Ok(0) | Err(_) => return outbox.abandon(),
                },
                () = tokio::time::sleep(SLOW_CHECK) => outbox.check_soft_limit(Instant::now()),
            }
        }
    }
    if let Some(frame) = overflow
        && outbox.overflowed()
    {
        // The last frame was written whole. This one is only tried: the client does not read.
        let _ = stream.write_all(&frame).await;
    }
}
