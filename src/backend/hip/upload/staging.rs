//! A thread that brings pieces of files to the device: through pinned memory that it reads them into, or from pages of the
//! file that it has the driver pin.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::super::{Buffer, Device, Event, HipError, Owner, PinnedBuffer, RegisteredPages, Stream};
use super::job::{Part, Piece};
use super::routes::{CopyRates, LONG_BYTES, Way};
use super::{BUFFER_BYTES, BUFFERS, Queue, REGISTERED_BYTES, Shared, Streams, UploadPath};
use crate::backend::BackendError;

/// Registered pieces whose copies may be under way: one is registered while the other crosses the link.
const REGISTERED: usize = 2;

/// Copies of a trial: the first finds nothing warm.
const COPIES: usize = 4;

/// What one staging thread owns.
pub struct Staging {
    number: usize,
    lanes: Vec<Lane>,
    /// Lane that is next.
    turn: usize,
    /// Pages that copies may still read, oldest first.
    registered: VecDeque<RegisteredPages>,
}

/// Where a part lies on its way: on the host, then on the device as the file has it.
struct Lane {
    /// `None` where the driver has none to give.
    pinned: Option<PinnedBuffer>,
    /// Ordinary memory, once it was needed.
    plain: Vec<u8>,
    slot: Buffer,
    /// The bytes are in `slot`.
    copied: Event,
    /// They are in their planes.
    laid_out: Event,
}

impl Staging {
    /// Buffers on both sides. With `pinned` those on the host are pinned.
    ///
    /// # Errors
    /// [`HipError`] when there is no memory for them.
    pub fn new(device: &Device, number: usize, pinned: bool) -> Result<Self, HipError> {
        let lane = |_| {
            Ok(Lane {
                pinned: pinned.then(|| device.pinned(BUFFER_BYTES)).transpose()?,
                plain: Vec::new(),
                slot: device.take(BUFFER_BYTES, Owner::Staging)?,
                copied: device.event(false)?,
                laid_out: device.event(false)?,
            })
        };
        let lanes = (0..BUFFERS).map(lane).collect::<Result<_, HipError>>()?;
        Ok(Self { number, lanes, turn: 0, registered: VecDeque::new() })
    }

    /// How fast one buffer is copied to the device from pinned and from ordinary memory: the best of a few copies each.
    ///
    /// # Errors
    /// [`HipError`].
    pub fn copy_rates(&mut self, stream: &Stream) -> Result<Option<CopyRates>, HipError> {
        let Some(Lane { pinned: Some(pinned), plain, slot, .. }) = self.lanes.first_mut() else {
            return Ok(None);
        };
        plain.resize(BUFFER_BYTES, 1);
        pinned.bytes_mut()?.fill(1);
        let best = |copy: &mut dyn FnMut() -> Result<(), HipError>| {
            let mut best = f64::INFINITY;
            for _ in 0..COPIES {
                let begin = Instant::now();
                copy()?;
                stream.synchronize()?;
                best = best.min(begin.elapsed().as_secs_f64());
            }
            Ok::<f64, HipError>(BUFFER_BYTES as f64 / best.max(1e-9))
        };
        let rates = CopyRates {
            plain: best(&mut || stream.upload(slot.all(), plain.as_slice()))?,
            pinned: best(&mut || stream.upload_pinned(slot.all(), pinned, 0))?,
        };
        plain.clear();
        plain.shrink_to_fit();
        Ok(Some(rates))
    }

    /// Takes pieces until there will be no more.
    pub fn run(mut self, shared: &Shared) {
        while let Some((piece, way)) = self.next(shared) {
            match way.path {
                UploadPath::Registered => self.carry_registered(shared, piece),
                path => self.carry(shared, piece, path),
            }
        }
    }

    /// Waits for a piece; `None` at the end. Who waits keeps no pages from the file.
    fn next(&mut self, shared: &Shared) -> Option<(Piece, Way)> {
        let mut queue = shared.queue.lock();
        loop {
            if queue.stop {
                return None;
            }
            if let Some(taken) = take(&mut queue, shared, self.number) {
                return Some(taken);
            }
            if self.registered.is_empty() {
                shared.work.wait(&mut queue);
            } else {
                drop(queue);
                self.registered.clear();
                queue = shared.queue.lock();
            }
        }
    }

    /// Brings a piece through buffers of ours.
    fn carry(&mut self, shared: &Shared, piece: Piece, path: UploadPath) {
        let mut result = Ok(());
        for part in piece.parts() {
            result = result.and_then(|()| self.bring(shared, &part, path));
        }
        piece.end(shared, &shared.streams.lock(), result);
    }

    fn bring(&mut self, shared: &Shared, part: &Part<'_>, path: UploadPath) -> Result<(), BackendError> {
        let lane = self.lane()?;
        let pinned = lane.pinned.as_mut().filter(|_| path != UploadPath::Copy);
        let bytes = match pinned {
            Some(pinned) => pinned.bytes_mut()?,
            None => {
                lane.plain.resize(BUFFER_BYTES, 0);
                &mut lane.plain
            }
        };
        part.read(bytes)?;
        shared.counts.bytes.fetch_add(part.bytes() as u64, Ordering::Relaxed);
        let Lane { pinned, plain, .. } = lane;
        let copy = |stream: &Stream, slot: &Buffer| {
            let slot = slot.range(0, part.bytes())?;
            match pinned.as_mut().filter(|_| path != UploadPath::Copy) {
                Some(pinned) => stream.upload_pinned(slot, pinned, 0),
                None => stream.upload(slot, plain.get(..part.bytes()).unwrap_or_default()),
            }
        };
        let streams = shared.streams.lock();
        Ok(submit(shared, &streams, part, (&lane.slot, &lane.copied, &lane.laid_out), copy)?)
    }

    /// Has the driver pin the pages of a piece, and brings it from there; what shares a page with other tensors goes through
    /// buffers. Where the driver refuses, all of it does, and all that comes after.
    fn carry_registered(&mut self, shared: &Shared, piece: Piece) {
        let page = rustix::param::page_size() as u64;
        let Some((pages, [before, inside, after])) = piece.pages(page) else {
            return self.carry(shared, piece, UploadPath::Ring);
        };
        while self.registered.len() >= REGISTERED {
            self.registered.pop_front(); // waits for its copies
        }
        let mut registered = match shared.device.register(piece.job.tensor.file(), pages) {
            Ok(registered) => registered,
            Err(error) => {
                // Pages that the file has lost are refused too: then it is the file, and reading it says so.
                if !error.is_lost() && piece.job.tensor.file().check_unchanged().is_ok() {
                    tracing::warn!(%error, "pages of model files cannot be registered: weights go another way");
                    shared.routes.lock().refuse(UploadPath::Registered);
                }
                return self.carry(shared, piece, UploadPath::Ring);
            }
        };
        let mut result = Ok(());
        for part in piece.parts_of(before).chain(piece.parts_of(after)) {
            result = result.and_then(|()| self.bring(shared, &part, UploadPath::Ring));
        }
        for part in piece.parts_of(inside) {
            result = result.and_then(|()| self.bring_registered(shared, &part, &mut registered));
        }
        self.registered.push_back(registered);
        piece.end(shared, &shared.streams.lock(), result);
    }

    fn bring_registered(
        &mut self,
        shared: &Shared,
        part: &Part<'_>,
        from: &mut RegisteredPages,
    ) -> Result<(), BackendError> {
        let lane = self.lane()?;
        shared.counts.bytes.fetch_add(part.bytes() as u64, Ordering::Relaxed);
        let copy = |stream: &Stream, slot: &Buffer| {
            stream.upload_registered(slot.range(0, part.bytes())?, from, &part.range())
        };
        let streams = shared.streams.lock();
        Ok(submit(shared, &streams, part, (&lane.slot, &lane.copied, &lane.laid_out), copy)?)
    }

    /// The lane whose turn it is.
    fn lane(&mut self) -> Result<&mut Lane, BackendError> {
        let count = self.lanes.len().max(1);
        self.turn = (self.turn + 1) % count;
        let none = || BackendError::Internal("a staging thread without buffers".to_owned());
        self.lanes.get_mut(self.turn).ok_or_else(none)
    }
}

/// Submits what brings a part into a slot and from there into its planes. The slot's last part is out of it by then.
fn submit(
    shared: &Shared,
    streams: &Streams,
    part: &Part<'_>,
    (slot, copied, laid_out): (&Buffer, &Event, &Event),
    copy: impl FnOnce(&Stream, &Buffer) -> Result<(), HipError>,
) -> Result<(), HipError> {
    streams.copy.wait(laid_out)?;
    copy(&streams.copy, slot)?;
    streams.copy.record(copied)?;
    streams.layout.wait(copied)?;
    part.lay_out(&shared.device, &streams.layout, slot)?;
    streams.layout.record(laid_out)
}

/// The next piece for this thread, if the tensor at the front has use for it.
fn take(queue: &mut Queue, shared: &Shared, number: usize) -> Option<(Piece, Way)> {
    let job = queue.jobs.front()?;
    let way = job.way(|| {
        let routes = shared.routes.lock();
        if job.bytes() < LONG_BYTES { routes.short() } else { routes.current() }
    });
    if number >= way.threads {
        return None;
    }
    let most = if way.path == UploadPath::Registered { REGISTERED_BYTES } else { BUFFER_BYTES as u64 };
    let (piece, last) = job.next_piece(most);
    if last {
        queue.jobs.pop_front();
        shared.work.notify_all(); // the next tensor may take more threads
    }
    Some((piece, way))
}
