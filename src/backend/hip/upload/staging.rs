//! A thread that reads pieces of files into pinned memory and submits their copies.

use std::sync::atomic::Ordering;

use super::super::{Buffer, Device, Event, Owner, PinnedBuffer};
use super::job::Piece;
use super::{BUFFER_BYTES, BUFFERS, Shared, UploadPath};
use crate::backend::BackendError;

/// What one staging thread owns.
pub struct Staging {
    lanes: Vec<Lane>,
}

/// Where a piece lies on its way: on the host, then on the device as the file has it.
struct Lane {
    host: Host,
    slot: Buffer,
    /// The bytes are in `slot`.
    copied: Event,
    /// They are in their planes.
    laid_out: Event,
}

enum Host {
    Pinned(PinnedBuffer),
    Plain(Vec<u8>),
}

impl Staging {
    /// Buffers on both sides.
    ///
    /// # Errors
    /// [`BackendError`] when there is no memory for them.
    pub fn new(device: &Device, path: UploadPath) -> Result<Self, BackendError> {
        let lane = |_| {
            let host = match path {
                UploadPath::Copy => Host::Plain(vec![0; BUFFER_BYTES]),
                UploadPath::Auto | UploadPath::Ring => Host::Pinned(device.pinned(BUFFER_BYTES)?),
            };
            Ok(Lane {
                host,
                slot: device.take(BUFFER_BYTES, Owner::Staging)?,
                copied: device.event(false)?,
                laid_out: device.event(false)?,
            })
        };
        Ok(Self { lanes: (0..BUFFERS).map(lane).collect::<Result<_, BackendError>>()? })
    }

    /// Takes pieces until there will be no more.
    pub fn run(mut self, shared: &Shared) {
        for turn in 0.. {
            let Some(piece) = next(shared) else { return };
            let count = self.lanes.len().max(1);
            let Some(lane) = self.lanes.get_mut(turn % count) else { return };
            lane.carry(shared, piece);
        }
    }
}

/// Waits for a piece; `None` at the end.
fn next(shared: &Shared) -> Option<Piece> {
    let mut queue = shared.queue.lock();
    loop {
        if queue.stop {
            return None;
        }
        if let Some(job) = queue.jobs.front() {
            let (piece, last) = job.next_piece();
            if last {
                queue.jobs.pop_front();
            }
            return Some(piece);
        }
        shared.work.wait(&mut queue);
    }
}

impl Lane {
    fn carry(&mut self, shared: &Shared, piece: Piece) {
        let read = self.read(shared, &piece);
        let streams = shared.streams.lock();
        let submitted = read.and_then(|()| {
            let slot = self.slot.range(0, piece.bytes())?;
            streams.copy.wait(&self.laid_out)?;
            match &mut self.host {
                Host::Pinned(pinned) => streams.copy.upload_pinned(slot, pinned, 0)?,
                Host::Plain(bytes) => {
                    streams.copy.upload(slot, bytes.get(..piece.bytes()).unwrap_or_default())?;
                }
            }
            streams.copy.record(&self.copied)?;
            streams.layout.wait(&self.copied)?;
            piece.lay_out(&shared.device, &streams.layout, &self.slot)?;
            Ok(streams.layout.record(&self.laid_out)?)
        });
        piece.end(shared, &streams, submitted);
    }

    /// Reads the piece, once the buffer's last copy is done.
    fn read(&mut self, shared: &Shared, piece: &Piece) -> Result<(), BackendError> {
        let bytes = match &mut self.host {
            Host::Pinned(pinned) => pinned.bytes_mut()?,
            Host::Plain(bytes) => bytes,
        };
        piece.read(bytes)?;
        shared.counts.bytes.fetch_add(piece.bytes() as u64, Ordering::Relaxed);
        Ok(())
    }
}
