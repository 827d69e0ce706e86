//! Requests to load a model's weights to the device: map the model if necessary, then report progress until all are
//! resident.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_client::wire::{self, ErrorCode, Ext, LoadToDeviceEnd, LoadToDeviceItem, LoadToDeviceRequest};

use super::Call;
use super::error::{Failure, failure, of_job};
use super::responder::Responder;
use crate::scheduler::{LoadProgress, Preload};

/// At most one item in this time: hundreds of tensors arrive in a tenth of a second.
const PAUSE: Duration = Duration::from_millis(20);

/// Answers one request: items of progress, then the end of the stream. After a cancel, loads in flight still complete
/// and no new ones start.
pub(super) async fn run(
    call: &Call,
    responder: &Responder,
    request: LoadToDeviceRequest,
) -> Result<LoadToDeviceEnd, Failure> {
    let begun = Instant::now();
    call.service().refuse_while_draining()?;
    let _ticket = call.service().ticket(call.peer().uid)?;
    tokio::select! {
        loaded = follow(call, responder, request, begun) => loaded,
        () = call.control.cancel.cancelled() => Err(failure(ErrorCode::Cancelled, "cancelled")),
    }
}

async fn follow(
    call: &Call,
    responder: &Responder,
    request: LoadToDeviceRequest,
    begun: Instant,
) -> Result<LoadToDeviceEnd, Failure> {
    let LoadToDeviceRequest { model, what, .. } = request;
    let (lease, _) = call.blocking(move |call| call.acquire(&model)).await?;
    let loading = call.service().engine.preload(lease.model(), &wanted(what));
    let mut loading = loading.map_err(|error| of_job(&error))?;
    let mut told = None;
    loop {
        let progress = loading.changed().await.map_err(|error| of_job(&error))?;
        match progress.ended {
            Some(Ok(())) => return Ok(end(&progress, begun)),
            Some(Err(error)) => {
                call.note_poison(Arc::new(lease)).await;
                return Err(of_job(&error));
            }
            None if told.is_some_and(|told: Instant| told.elapsed() < PAUSE) => {}
            // Without credit no progress is sent; the load goes on.
            None if call.control.take_credit() => {
                responder.item(&item(&progress, begun.elapsed()))?;
                told = Some(Instant::now());
            }
            None => {}
        }
    }
}

fn count(tensors: usize) -> u32 {
    u32::try_from(tensors).unwrap_or(u32::MAX)
}

fn wanted(what: wire::Preload) -> Preload {
    match what {
        wire::Preload::All => Preload::All,
        wire::Preload::Critical => Preload::Critical,
        wire::Preload::First(layers) => Preload::First(layers),
        wire::Preload::Layers(layers) => Preload::Layers(layers),
    }
}

fn item(progress: &LoadProgress, elapsed: Duration) -> LoadToDeviceItem {
    LoadToDeviceItem {
        tensors: count(progress.tensors),
        tensors_total: count(progress.tensors_total),
        device_bytes: progress.bytes,
        device_bytes_total: progress.bytes_total,
        bytes_per_second: (progress.bytes as f64 / elapsed.as_secs_f64()) as u64,
        ext: Ext::new(),
    }
}

fn end(progress: &LoadProgress, begun: Instant) -> LoadToDeviceEnd {
    LoadToDeviceEnd {
        tensors: count(progress.tensors),
        device_bytes: progress.bytes,
        elapsed_us: u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX),
        ext: Ext::new(),
    }
}
