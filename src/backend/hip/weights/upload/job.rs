//! The upload of one tensor, in pieces.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::routes::Way;
use super::{BUFFER_BYTES, Ended, Shared, Streams};
use crate::backend::hip::kernels::matmul::choice::repack;
use crate::backend::hip::kernels::matmul::{Repack, RepackRows};
use crate::backend::hip::weights::Weight;
use crate::backend::hip::weights::arrival::Arrival;
use crate::backend::hip::{Buffer, Device, DevicePtr, Event, Grid, HipError, Stream};
use crate::backend::{BackendError, cause};
use crate::lock::{Mutex, Rank};
use crate::tensor::{LazyTensor, MappedFile};

/// Values per group, the unit that repack kernels count in.
const GROUP: u64 = 32;

/// A tensor's upload.
pub struct Job {
    pub(super) arrival: Arc<Arrival<Event>>,
    /// Target address. Must not be written to after the load has ended.
    planes: DevicePtr<u8>,
    /// Keeps the target memory alive until the load ends. It is dropped first, so that evicting a loaded weight frees
    /// the memory at once, even if a thread still holds this job.
    memory: Mutex<Option<Arc<Weight>>>,
    pub(super) tensor: LazyTensor,
    /// The memory may have had another purpose, so writes wait for this event.
    behind: Option<Arc<Event>>,
    /// Bytes of an indivisible unit: a quant block of a quantised type, a row of a float type.
    unit_bytes: u64,
    units: u64,
    /// The chosen way and the time of the choice, set when the first piece is taken.
    way: OnceLock<(Way, Instant)>,
    /// Units handed out to staging threads.
    taken: AtomicU64,
    /// Units that were submitted or abandoned.
    ended: AtomicU64,
    failed: Mutex<Option<BackendError>>,
    /// Events after pieces that ended before the last one, each with its pair of streams.
    marks: Mutex<Vec<(usize, Arc<Event>)>>,
}

/// The part of a tensor that a staging thread takes at a time.
pub struct Piece {
    pub job: Arc<Job>,
    units: Range<u64>,
}

/// The part of a piece that fits one buffer.
pub struct Segment<'a> {
    job: &'a Job,
    units: Range<u64>,
}

impl Job {
    /// The upload of `tensor` into `weight`. Writes to its memory wait for `behind`.
    ///
    /// # Errors
    /// [`BackendError::Upload`] when a row or quant block is longer than a pinned buffer.
    pub fn new(
        tensor: &LazyTensor,
        weight: Arc<Weight>,
        behind: Option<Arc<Event>>,
    ) -> Result<Self, BackendError> {
        let (arrival, planes) = (Arc::clone(weight.arrival()), weight.buffer().ptr());
        Self::to(tensor, (planes, arrival), Some(weight), behind)
    }

    /// Like [`Job::new`], but with an explicit target address and the arrival to notify.
    pub(super) fn to(
        tensor: &LazyTensor,
        (planes, arrival): (DevicePtr<u8>, Arc<Arrival<Event>>),
        memory: Option<Arc<Weight>>,
        behind: Option<Arc<Event>>,
    ) -> Result<Self, BackendError> {
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        let unit_values = if repack(dtype).is_some() { dtype.block_len() as u64 } else { shape.cols() };
        let unit_bytes = dtype.row_bytes(unit_values).filter(|b| (1..=BUFFER_BYTES as u64).contains(b));
        let unit_bytes = unit_bytes.ok_or_else(|| BackendError::Upload {
            tensor: tensor.name().to_owned(),
            source: cause(format!("one of its rows is longer than {BUFFER_BYTES} bytes")),
        })?;
        Ok(Self {
            arrival,
            planes,
            memory: Mutex::new(Rank::UploadJob, memory),
            tensor: tensor.clone(),
            behind,
            unit_bytes,
            units: shape.elements() / unit_values,
            way: OnceLock::new(),
            taken: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            failed: Mutex::new(Rank::UploadJob, None),
            marks: Mutex::new(Rank::UploadJob, Vec::new()),
        })
    }

    /// Bytes of the tensor in the file.
    pub fn bytes(&self) -> u64 {
        self.units * self.unit_bytes
    }

    /// Ends the load: drops the memory, then notifies the waiters. All submitted work for it must be done.
    pub(super) fn decide(&self, result: Result<(), BackendError>) {
        let memory = self.memory.lock().take();
        drop(memory);
        self.arrival.decide(result);
    }

    /// The way of this upload; the first call runs `decide` to choose it.
    pub fn way(&self, decide: impl FnOnce() -> Way) -> Way {
        self.way.get_or_init(|| (decide(), Instant::now())).0
    }

    /// The chosen way and when it was chosen; `None` before the first piece.
    pub fn begun(&self) -> Option<(Way, Instant)> {
        self.way.get().copied()
    }

    /// Bytes of an indivisible unit.
    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// The next piece, of at most `bytes` bytes or one unit, and whether it is the last. The caller holds the queue's
    /// lock.
    pub fn next_piece(self: &Arc<Self>, bytes: u64) -> (Piece, bool) {
        let units = (bytes / self.unit_bytes).max(1);
        let first = self.taken.fetch_add(units, Ordering::Relaxed);
        let end = first.saturating_add(units).min(self.units);
        (Piece { job: Arc::clone(self), units: first.min(end)..end }, end == self.units)
    }

    /// Abandons all units that no thread has taken.
    pub(super) fn give_up(self: &Arc<Self>, shared: &Shared, ended: &Sender<Ended>, why: &str) {
        let first = self.taken.load(Ordering::Relaxed).min(self.units);
        let piece = Piece { job: Arc::clone(self), units: first..self.units };
        let result = Err(self.failure(why.to_owned()));
        if let (Some(streams), Ok(mark)) = (shared.streams.first(), shared.device.event(false)) {
            end(shared, (0, &streams.lock()), &Arc::new(mark), ended, vec![(piece, result)]);
        }
    }

    pub(super) fn failure(&self, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> BackendError {
        BackendError::Upload { tensor: self.tensor.name().to_owned(), source: cause(why) }
    }

    /// Byte range of units in the file.
    fn range(&self, units: &Range<u64>) -> Range<u64> {
        let start = self.tensor.range().start;
        start + units.start * self.unit_bytes..start + units.end * self.unit_bytes
    }
}

impl Piece {
    /// The whole pages within the piece, and the units before, in and after them. Units before and after share pages
    /// with other data.
    pub fn pages(&self, page: u64) -> Option<(Range<u64>, [Range<u64>; 3])> {
        whole_pages(&self.job.range(&self.units), &self.units, self.job.unit_bytes, page)
    }

    /// The file that holds the piece.
    pub fn file(&self) -> &Arc<MappedFile> {
        self.job.tensor.file()
    }

    /// The whole piece as one part, when it fits a buffer.
    pub fn part(&self) -> Segment<'_> {
        Segment { job: &self.job, units: self.units.clone() }
    }

    /// The piece in parts that each fit a buffer.
    pub fn parts(&self) -> impl Iterator<Item = Segment<'_>> {
        self.parts_of(self.units.clone())
    }

    /// The units `units` in parts that each fit a buffer.
    pub fn parts_of(&self, units: Range<u64>) -> impl Iterator<Item = Segment<'_>> {
        let most = (BUFFER_BYTES as u64 / self.job.unit_bytes).max(1);
        let starts = (units.start..units.end).step_by(usize::try_from(most).unwrap_or(usize::MAX));
        starts.map(move |start| Segment {
            job: &self.job,
            units: start..start.saturating_add(most).min(units.end),
        })
    }

    /// Whether the piece is the whole tensor.
    fn is_whole(&self) -> bool {
        self.units.end - self.units.start == self.job.units
    }

    /// Bytes of the piece.
    pub fn bytes(&self) -> u64 {
        (self.units.end - self.units.start) * self.job.unit_bytes
    }

    /// Counts the piece as submitted, or as abandoned with an error. True when it was the last of its job.
    fn count(&self, number: usize, mark: &Arc<Event>, result: Result<(), BackendError>) -> bool {
        let (job, units) = (&self.job, self.units.end - self.units.start);
        if let Err(error) = result {
            job.failed.lock().get_or_insert(error);
        }
        if !self.is_whole() {
            job.marks.lock().push((number, Arc::clone(mark)));
        }
        job.ended.fetch_add(units, Ordering::AcqRel) + units >= job.units
    }
}

/// Counts pieces as submitted to stream pair `number`, or as abandoned. When some were the last of their tensors, one
/// event is recorded for all of these. `mark` follows all work submitted for these pieces. Its thread records it again
/// and again, so a waiter may wait for more work than it needs, never for less.
pub fn end(
    shared: &Shared,
    (number, streams): (usize, &Streams),
    mark: &Arc<Event>,
    ended: &Sender<Ended>,
    pieces: Vec<(Piece, Result<(), BackendError>)>,
) {
    let mut jobs: Vec<(Arc<Job>, Option<BackendError>)> = Vec::new();
    let mut marks = Vec::new();
    let marked = match pieces.iter().any(|(piece, _)| !piece.is_whole()) {
        true => streams.layout.record(mark).map_err(BackendError::from),
        false => Ok(()),
    };
    for (piece, result) in pieces {
        let result = result.and(if piece.is_whole() { Ok(()) } else { marked.clone() });
        if piece.count(number, mark, result) {
            let job = piece.job;
            marks.append(&mut job.marks.lock());
            let failed = job.failed.lock().take();
            jobs.push((job, failed));
        }
    }
    if jobs.is_empty() {
        return;
    }
    let event = shared.device.event(false).and_then(|event| {
        for (_, mark) in marks.iter().filter(|(other, _)| *other != number) {
            streams.layout.wait(mark)?;
        }
        streams.layout.record(&event)?;
        Ok(Arc::new(event))
    });
    for (job, failed) in &mut jobs {
        match &event {
            Ok(event) if failed.is_none() => job.arrival.set_submitted(Arc::clone(event)),
            Ok(_) => {}
            Err(error) => drop(failed.get_or_insert_with(|| error.clone().into())),
        }
    }
    // The event thread decides the load, not this one: deciding runs callbacks, which may take any lock.
    let _ = ended.send(Ended { jobs, event: event.ok() }); // no thread receives when the device closes
}

impl Segment<'_> {
    /// Byte range in the file.
    pub fn range(&self) -> Range<u64> {
        self.job.range(&self.units)
    }

    /// Bytes of the part.
    pub fn bytes(&self) -> usize {
        let range = self.range();
        (range.end - range.start) as usize // at most BUFFER_BYTES
    }

    /// Advises the kernel that the part will be read soon.
    pub fn will_need(&self) {
        self.job.tensor.file().will_need(&self.range());
    }

    /// Reads the part past the page cache. Returns the offset of its first byte in `out`, or `None` when it could not.
    ///
    /// # Errors
    /// As [`Segment::read`].
    pub fn read_past_cache(&self, out: &mut [u8]) -> Result<Option<usize>, BackendError> {
        let (file, range) = (self.job.tensor.file(), self.range());
        if self.job.failed.lock().is_some() {
            return Ok(None);
        }
        file.read_past_cache(&range, out).map_err(|error| self.job.failure(error))
    }

    /// Reads the part into the first bytes of `out`.
    ///
    /// # Errors
    /// [`BackendError::Upload`] when the file is too short or unreadable, or when another part of the tensor failed.
    pub fn read(&self, out: &mut [u8]) -> Result<(), BackendError> {
        if let Some(error) = &*self.job.failed.lock() {
            return Err(error.clone());
        }
        let out = out.get_mut(..self.bytes()).unwrap_or_default();
        let read = self.job.tensor.file().read_at(self.range().start, out);
        read.map_err(|error| self.job.failure(error))
    }

    /// Launches the kernel that repacks the bytes in `slot`, from `start` on, into planes. It waits for the memory's
    /// earlier users.
    ///
    /// # Errors
    /// [`HipError`].
    pub fn lay_out(
        &self,
        device: &Device,
        stream: &Stream,
        slot: &Buffer,
        start: usize,
    ) -> Result<(), HipError> {
        let (job, planes) = (self.job, self.job.planes);
        if let Some(event) = &job.behind {
            stream.wait(event)?;
        }
        let (first, units) = (self.units.start, self.units.end - self.units.start);
        let dtype = job.tensor.dtype();
        let blocks = |threads: u64| Grid::x(threads.div_ceil(256).clamp(1, 4096) as u32);
        let Some(kernel) = repack(dtype) else {
            let row_bytes = job.unit_bytes;
            let arguments = RepackRows {
                file: slot.ptr_at(start)?,
                planes: planes.cast(),
                first,
                rows: units,
                row_bytes,
            };
            let grid = blocks(units * row_bytes.div_ceil(16));
            return device.launch(stream, RepackRows::repack_rows, grid, &arguments);
        };
        let groups = dtype.block_len() as u64 / GROUP;
        let arguments = Repack {
            file: slot.ptr_at(start)?,
            planes: planes.cast(),
            weights: job.tensor.shape().elements(),
            first: first * groups,
            groups: units * groups,
        };
        device.launch(stream, kernel, blocks(units * groups), &arguments)
    }
}

/// The whole pages in `bytes`, which are `units` of `unit` bytes each. Also returns the units before, in and after
/// these pages.
fn whole_pages(
    bytes: &Range<u64>,
    units: &Range<u64>,
    unit: u64,
    page: u64,
) -> Option<(Range<u64>, [Range<u64>; 3])> {
    let pages = bytes.start.next_multiple_of(page)..bytes.end / page * page;
    let first = units.start + pages.start.checked_sub(bytes.start)?.div_ceil(unit);
    let last = units.end.checked_sub(bytes.end.checked_sub(pages.end)?.div_ceil(unit))?;
    let parts = [units.start..first, first..last, last..units.end];
    (pages.start < pages.end && first < last).then_some((pages, parts))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 4096;

    proptest! {
        #[test]
        fn whole_pages_hold_their_units_and_leave_less_than_a_page_and_a_unit(
            offset in 0u64..3 * PAGE, first in 0u64..1000, count in 1u64..3000, unit in 1u64..9000,
        ) {
            let units = first..first + count;
            let bytes = offset + units.start * unit..offset + units.end * unit;
            let Some((pages, [before, inside, after])) = whole_pages(&bytes, &units, unit, PAGE) else {
                prop_assert!(bytes.end - bytes.start < 2 * (PAGE + unit), "{bytes:?} has whole pages");
                return Ok(());
            };
            prop_assert_eq!((before.start, before.end), (units.start, inside.start));
            prop_assert_eq!((after.start, after.end), (inside.end, units.end));
            prop_assert!(pages.start % PAGE == 0 && pages.end % PAGE == 0);
            prop_assert!(bytes.start <= pages.start && pages.end <= bytes.end);
            let at = |number: u64| offset + number * unit;
            prop_assert!(pages.start <= at(inside.start) && at(inside.end) <= pages.end);
            prop_assert!((before.end - before.start) * unit < PAGE + unit);
            prop_assert!((after.end - after.start) * unit < PAGE + unit);
        }
    }
}
