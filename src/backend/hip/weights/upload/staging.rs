//! A thread that uploads pieces of files: through pinned memory that it fills, or from file pages that the driver pins.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::Instant;

use super::job::{Job, Piece, Segment, end};
use super::routes::{CopyRates, LONG_BYTES, Routes, Way};
use super::{
    BUFFER_BYTES, BUFFERS, Ended, FileReads, Queue, REGISTERED_BYTES, STREAMS, Shared, Streams, UploadPath,
};
use crate::backend::BackendError;
use crate::backend::hip::{
    ALIGN, Buffer, Device, Event, HipError, PinnedBuffer, Purpose, RegisteredPages, Stream,
};
use crate::lock::Mutex;
use crate::tensor::BLOCK_BYTES;

/// Registered pieces per thread: one is registered while the other is copied.
const REGISTERED: usize = 2;

/// Smallest piece that a share per thread may be cut to.
const SHARE_MIN: u64 = 512 << 10;

/// A thread that reads less per second reads from the disk. From the page cache it reads four to six times as much.
const COLD_BYTES_PER_SECOND: f64 = 1e9;

/// Copies per trial; the first one runs cold.
const COPIES: usize = 4;

/// Pieces, each with its result.
type Carried = Vec<(Piece, Result<(), BackendError>)>;

/// State of one staging thread.
pub struct Staging {
    number: usize,
    lanes: Vec<Lane>,
    /// The lane used last.
    turn: usize,
    /// Pages that copies in flight may read, oldest first.
    registered: VecDeque<RegisteredPages>,
    /// Whether files are read past the page cache.
    direct: bool,
    /// Index of its pair of streams.
    pair: usize,
    /// Event after its last piece.
    mark: Arc<Event>,
}

/// Buffers of a part: on the host, then on the device in the file's layout.
struct Lane {
    /// `None` when the driver could not allocate it.
    pinned: Option<PinnedBuffer>,
    /// Ordinary memory, allocated on first use.
    plain: Vec<u8>,
    slot: Buffer,
    /// The last read came from the disk.
    cold: bool,
    /// Recorded when the bytes are in `slot`.
    copied: Event,
    /// Recorded when the bytes are in their planes.
    laid_out: Event,
}

impl Staging {
    /// Allocates buffers on host and device. With `pinned` the host buffers are pinned.
    ///
    /// # Errors
    /// [`HipError`] when memory is short.
    pub fn new(device: &Device, number: usize, pinned: bool, reads: FileReads) -> Result<Self, HipError> {
        let direct = pinned && reads == FileReads::Direct;
        let room = BUFFER_BYTES + if direct { 2 * BLOCK_BYTES } else { 0 };
        let lane = |_| {
            Ok(Lane {
                pinned: pinned.then(|| device.pinned(room)).transpose()?,
                plain: Vec::new(),
                slot: device.take(BUFFER_BYTES, Purpose::Staging)?,
                cold: true,
                copied: device.event(false)?,
                laid_out: device.event(false)?,
            })
        };
        let lanes = (0..BUFFERS).map(lane).collect::<Result<_, HipError>>()?;
        let pair = number % STREAMS;
        let mark = Arc::new(device.event(false)?);
        Ok(Self { number, lanes, turn: 0, registered: VecDeque::new(), direct, pair, mark })
    }

    /// Measures the copy rate of one buffer from pinned and from ordinary memory: the best of a few copies each.
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

    /// Takes and uploads pieces until the queue stops.
    pub fn run(mut self, shared: &Shared, ended: &Sender<Ended>) {
        while let Some((pieces, way)) = self.next(shared) {
            let pieces = match way.path {
                UploadPath::Registered => self.carry_registered(shared, pieces),
                path => self.carry(shared, pieces, path),
            };
            let Some(streams) = shared.streams.get(self.pair) else { return };
            let streams = streams.lock();
            end(shared, (self.pair, &streams), &self.mark, ended, pieces);
        }
    }

    /// Waits for pieces; `None` at the end. A waiting thread keeps no pages registered.
    fn next(&mut self, shared: &Shared) -> Option<(Vec<Piece>, Way)> {
        let mut queue = shared.queue.lock();
        loop {
            if queue.stop {
                return None;
            }
            let waiting = queue.jobs.len();
            if let Some(taken) = queue.take(&shared.routes, shared.reads, self.number) {
                if queue.jobs.len() < waiting {
                    shared.work.notify_all(); // the next tensor may use more threads
                }
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

    /// Uploads pieces that fit into one host buffer.
    fn carry(&mut self, shared: &Shared, pieces: Vec<Piece>, path: UploadPath) -> Carried {
        let mut results = Vec::new();
        let parts: Vec<Segment<'_>> = pieces.iter().map(Piece::part).collect();
        let brought = self.bring(shared, &parts, path, &mut results);
        drop(parts);
        results.resize_with(pieces.len(), || Ok(()));
        let brought = |result: Result<(), BackendError>| result.and(brought.clone());
        pieces.into_iter().zip(results.into_iter().map(brought)).collect()
    }

    /// Reads parts into a buffer, one after the other, and submits their copy and repacking. Parts that cannot be read
    /// are left out; `read` receives the result of each part.
    fn bring(
        &mut self,
        shared: &Shared,
        parts: &[Segment<'_>],
        path: UploadPath,
        read: &mut Vec<Result<(), BackendError>>,
    ) -> Result<(), BackendError> {
        let pair = self.pair(shared)?;
        let direct = self.direct && path != UploadPath::Copy;
        let lane = self.lane()?;
        let pinned = lane.pinned.as_mut().filter(|_| path != UploadPath::Copy);
        let bytes = match pinned {
            Some(pinned) => pinned.bytes_mut()?,
            None => {
                lane.plain.resize(BUFFER_BYTES, 0);
                &mut lane.plain
            }
        };
        if lane.cold && !direct {
            parts.iter().for_each(Segment::will_need);
        }
        let begun = Instant::now();
        let (placed, first) = match parts {
            [part] if direct => read_part_past_cache(part, bytes, read),
            parts => (read_parts(parts, bytes, read), 0),
        };
        let count: u64 = placed.iter().map(|(part, _)| part.bytes() as u64).sum();
        shared.counts.bytes.fetch_add(count, Ordering::Relaxed);
        lane.cold = (count as f64) < COLD_BYTES_PER_SECOND * begun.elapsed().as_secs_f64();
        let Some((last, start)) = placed.last() else { return Ok(()) };
        let all = start + last.bytes();
        let Lane { pinned, plain, .. } = lane;
        let copy = |stream: &Stream, slot: &Buffer| {
            let slot = slot.range(0, all)?;
            match pinned.as_mut().filter(|_| path != UploadPath::Copy) {
                Some(pinned) => stream.upload_pinned(slot, pinned, first),
                None => stream.upload(slot, plain.get(..all).unwrap_or_default()),
            }
        };
        let streams = pair.lock();
        Ok(submit(shared, &streams, &placed, (&lane.slot, &lane.copied, &lane.laid_out), copy)?)
    }

    /// Uploads pieces from file pages that the driver pins. Bytes that share a page with other tensors go through
    /// buffers. If the driver refuses, this piece and all later ones go through buffers.
    fn carry_registered(&mut self, shared: &Shared, pieces: Vec<Piece>) -> Carried {
        let carry = |piece: Piece| {
            let result = self.bring_registered(shared, &piece);
            (piece, result)
        };
        pieces.into_iter().map(carry).collect()
    }

    fn bring_registered(&mut self, shared: &Shared, piece: &Piece) -> Result<(), BackendError> {
        let page = rustix::param::page_size() as u64;
        let Some((pages, [before, inside, after])) = piece.pages(page) else {
            return self.bring_each(shared, piece.parts());
        };
        while self.registered.len() >= REGISTERED {
            self.registered.pop_front(); // waits for its copies
        }
        let mut registered = match shared.device.register(piece.file(), pages) {
            Ok(registered) => registered,
            Err(error) => {
                // The driver also refuses pages that the file has lost. Then the file is at fault, and reading it
                // reports that.
                if !error.is_lost() && piece.file().check_unchanged().is_ok() {
                    tracing::warn!(%error, "pages of model files cannot be registered: weights take another upload path");
                    shared.routes.lock().refuse(UploadPath::Registered);
                }
                return self.bring_each(shared, piece.parts());
            }
        };
        let mut result = self.bring_each(shared, piece.parts_of(before).chain(piece.parts_of(after)));
        for part in piece.parts_of(inside) {
            result = result.and_then(|()| self.bring_pages(shared, &part, &mut registered));
        }
        self.registered.push_back(registered);
        result
    }

    /// Uploads parts through buffers, one each.
    fn bring_each<'p>(
        &mut self,
        shared: &Shared,
        parts: impl Iterator<Item = Segment<'p>>,
    ) -> Result<(), BackendError> {
        for part in parts {
            let mut read = Vec::new();
            self.bring(shared, &[part], UploadPath::Ring, &mut read)?;
            read.into_iter().collect::<Result<(), _>>()?;
        }
        Ok(())
    }

    fn bring_pages(
        &mut self,
        shared: &Shared,
        part: &Segment<'_>,
        from: &mut RegisteredPages,
    ) -> Result<(), BackendError> {
        let pair = self.pair(shared)?;
        let lane = self.lane()?;
        shared.counts.bytes.fetch_add(part.bytes() as u64, Ordering::Relaxed);
        let copy = |stream: &Stream, slot: &Buffer| {
            stream.upload_registered(slot.range(0, part.bytes())?, from, &part.range())
        };
        let streams = pair.lock();
        Ok(submit(shared, &streams, &[(part, 0)], (&lane.slot, &lane.copied, &lane.laid_out), copy)?)
    }

    /// Its pair of streams.
    fn pair<'s>(&self, shared: &'s Shared) -> Result<&'s Mutex<Streams>, BackendError> {
        let none = || BackendError::Internal("a staging thread has no streams".to_owned());
        shared.streams.get(self.pair).ok_or_else(none)
    }

    /// The next lane.
    fn lane(&mut self) -> Result<&mut Lane, BackendError> {
        let count = self.lanes.len().max(1);
        self.turn = (self.turn + 1) % count;
        let none = || BackendError::Internal("a staging thread has no buffers".to_owned());
        self.lanes.get_mut(self.turn).ok_or_else(none)
    }
}

/// Parts with their offset in a buffer.
type Placed<'p> = Vec<(&'p Segment<'p>, usize)>;

/// Reads one part past the page cache if possible. Returns the part and the offset of its first byte in `bytes`.
fn read_part_past_cache<'p>(
    part: &'p Segment<'p>,
    bytes: &mut [u8],
    read: &mut Vec<Result<(), BackendError>>,
) -> (Placed<'p>, usize) {
    match part.read_past_cache(bytes) {
        Ok(None) => (read_parts(std::slice::from_ref(part), bytes, read), 0),
        Ok(Some(first)) => {
            read.push(Ok(()));
            (vec![(part, 0)], first)
        }
        Err(error) => {
            read.push(Err(error));
            (Vec::new(), 0)
        }
    }
}

/// Reads parts one after the other. Returns the parts that could be read; `read` receives the result of each.
fn read_parts<'p>(
    parts: &'p [Segment<'p>],
    bytes: &mut [u8],
    read: &mut Vec<Result<(), BackendError>>,
) -> Placed<'p> {
    let (mut placed, mut at) = (Vec::with_capacity(parts.len()), 0);
    for part in parts {
        let result = part.read(bytes.get_mut(at..).unwrap_or_default());
        if result.is_ok() {
            placed.push((part, at));
            at = (at + part.bytes()).next_multiple_of(ALIGN);
        }
        read.push(result);
    }
    placed
}

/// Submits the copy of parts into a slot and their repacking into planes. The copy waits until the slot's last parts
/// are repacked.
fn submit(
    shared: &Shared,
    streams: &Streams,
    parts: &[(&Segment<'_>, usize)],
    (slot, copied, laid_out): (&Buffer, &Event, &Event),
    copy: impl FnOnce(&Stream, &Buffer) -> Result<(), HipError>,
) -> Result<(), HipError> {
    streams.copy.wait(laid_out)?;
    copy(&streams.copy, slot)?;
    streams.copy.record(copied)?;
    streams.layout.wait(copied)?;
    for (part, start) in parts {
        part.lay_out(&shared.device, &streams.layout, slot, *start)?;
    }
    streams.layout.record(laid_out)
}

impl Queue {
    /// The next pieces for thread `number`, if the front tensor can use it: one piece, or as many as fit a buffer. They
    /// do not exceed the thread's share of the queue.
    fn take(&mut self, routes: &Mutex<Routes>, reads: FileReads, number: usize) -> Option<(Vec<Piece>, Way)> {
        let way_of = |job: &Job| {
            job.way(|| {
                let routes = routes.lock();
                if job.bytes() < LONG_BYTES { routes.short() } else { routes.current() }
            })
        };
        let way = way_of(self.jobs.front()?);
        if number >= way.threads {
            return None;
        }
        let share = self.bytes / way.threads as u64;
        let most = match way.path {
            UploadPath::Registered => REGISTERED_BYTES,
            _ => share.clamp(SHARE_MIN, BUFFER_BYTES as u64),
        };
        let (mut pieces, mut room) = (Vec::new(), most);
        while let Some(job) = self.jobs.front() {
            // A read past the page cache starts in the buffer at its offset in a disk block. Only a single part can be
            // copied from there.
            let alone = way.path == UploadPath::Registered || reads == FileReads::Direct;
            let fits = pieces.is_empty() || (!alone && job.unit_bytes() <= room);
            if !fits || way_of(job) != way {
                break;
            }
            let (piece, last) = job.next_piece(room);
            let bytes = piece.bytes();
            pieces.push(piece);
            self.bytes = self.bytes.saturating_sub(bytes);
            room = room.saturating_sub(bytes.next_multiple_of(ALIGN as u64));
            if !last {
                break;
            }
            self.jobs.pop_front();
        }
        Some((pieces, way))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::backend::hip::DevicePtr;
    use crate::backend::hip::weights::arrival::Arrival;
    use crate::lock::Rank;
    use crate::tensor::{DType, LazyTensor, MappedFile, Shape};

    const THREADS: usize = 2;

    /// Loads of vectors with these byte sizes, in this order.
    fn queue(bytes: impl IntoIterator<Item = u64>) -> Queue {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let (mut queue, mut at) = (Queue::default(), 0);
        file.write_all(&vec![0; 16 << 20]).unwrap();
        let file = MappedFile::map(std::fs::File::open(file.path()).unwrap()).unwrap();
        for bytes in bytes {
            let shape = Shape::new(&[4, bytes / 16]).unwrap();
            let tensor = LazyTensor::new("a", DType::F32, shape, at..at + bytes, Arc::clone(&file)).unwrap();
            let to = (DevicePtr::NULL, Arc::new(Arrival::new()));
            queue.jobs.push_back(Arc::new(Job::to(&tensor, to, None, None).unwrap()));
            queue.bytes += bytes;
            at += bytes;
        }
        queue
    }

    /// Bytes of the pieces that threads take, in order.
    fn taken(queue: &mut Queue, path: UploadPath, reads: FileReads) -> Vec<Vec<u64>> {
        let routes = Mutex::new(Rank::UploadRoutes, Routes::new(path, THREADS, None));
        let take = |_| queue.take(&routes, reads, 0);
        let taken = (0..).map_while(take).map(|(pieces, _)| pieces.iter().map(Piece::bytes).collect());
        let taken = taken.collect();
        assert_eq!((queue.jobs.len(), queue.bytes), (0, 0));
        taken
    }

    #[test]
    fn small_tensors_that_wait_together_share_a_buffer() {
        let small = [16 << 10; 20];
        assert_eq!(taken(&mut queue(small), UploadPath::Ring, FileReads::Cached), [small.to_vec()]);
        assert_eq!(taken(&mut queue(small), UploadPath::Copy, FileReads::Cached), [small.to_vec()]);
        // Each starts in the buffer at its offset in a disk block.
        let each: Vec<Vec<u64>> = small.iter().map(|bytes| vec![*bytes]).collect();
        assert_eq!(taken(&mut queue(small), UploadPath::Ring, FileReads::Direct), each);
    }

    #[test]
    fn a_thread_takes_its_share_and_no_more_than_a_buffer_holds() {
        const MIB: u64 = 1 << 20;
        // With two threads: half of the queue, and at least half a mebibyte.
        let found = taken(&mut queue([MIB; 2]), UploadPath::Ring, FileReads::Cached);
        assert_eq!(found, [vec![MIB], vec![MIB / 2], vec![MIB / 2]]);
        let found = taken(&mut queue([16 * MIB]), UploadPath::Ring, FileReads::Cached);
        assert_eq!(found[..3], [vec![4 * MIB], vec![4 * MIB], vec![4 * MIB]]);
        assert_eq!(found[3..], [vec![2 * MIB], vec![MIB], vec![MIB / 2], vec![MIB / 2]]);
    }

    #[test]
    fn a_thread_more_than_a_way_has_takes_nothing() {
        let routes = Mutex::new(Rank::UploadRoutes, Routes::new(UploadPath::Ring, THREADS, None));
        assert!(queue([4096]).take(&routes, FileReads::Cached, THREADS).is_none());
        assert!(queue([4096]).take(&routes, FileReads::Cached, THREADS - 1).is_some());
        assert!(queue([]).take(&routes, FileReads::Cached, 0).is_none());
    }
}
