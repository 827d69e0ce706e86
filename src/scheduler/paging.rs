//! Pages of weights that a step reads in place, read in before the step needs them.
//!
//! A page that is not in memory stops the thread that touches it, for as long as the disk takes. To fill a hole of a
//! sparse file, the kernel takes 2 s for 3 GiB. So other threads touch the pages first, some parts ahead of the step. A
//! step that reaches a part whose pages are still to come is suspended, and other models' steps run meanwhile. The
//! threads are less urgent than the engine's, and may be lost to a disk that never answers.
//!
//! Pages that were read are trusted while steps use the model. The kernel may take them all the same where memory is
//! short; the step then waits for them itself.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::aside::{self, Aside, Subject, thread_time};
use crate::lock;
use crate::model::{Model, ModelId};
use crate::program::{FIRST_PART, Residence, TensorId};
use crate::tensor::{LazyTensor, MapError, MappedFile};

/// Bytes that are read beyond the part that a step is at, without the part that exceeds them.
const AHEAD_BYTES: u64 = 64 << 20;
/// Bytes read between two signs of life: a disk of 1 MB/s gives one in time.
const PIECE_BYTES: u64 = 8 << 20;
/// Bytes of an embedding table that are read with one of its rows. The kernel maps as many around a page that it has.
const GROUP_BYTES: u64 = 64 << 10;
/// Pages of a model without a step for this long are read again.
const TRUSTED: Duration = Duration::from_secs(5);
/// The niceness of the reading threads: the engine's get ten times as much time.
const NICE: i32 = 10;

/// Reads the pages of one range of a file, while the kernel may begin to read the other.
pub(super) type Read = Arc<dyn Fn(&MappedFile, Range<u64>, Range<u64>) + Send + Sync>;

/// How pages are read.
#[derive(Clone)]
pub struct PageReader {
    pub(super) aside: Arc<Aside>,
    pub(super) read: Read,
}

impl std::fmt::Debug for PageReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PageReader").field("aside", &self.aside).finish_non_exhaustive()
    }
}

impl Default for PageReader {
    fn default() -> Self {
        // A file that cannot be read fails the step, which reports it.
        let read = |file: &MappedFile, range, next| drop(file.populate(range, next));
        Self { aside: Aside::new(aside::Limits::default()), read: Arc::new(read) }
    }
}

impl PageReader {
    /// Threads that wait for a disk that does not answer.
    pub(crate) fn lost(&self) -> usize {
        self.aside.lost()
    }
}

/// Wakes the engine.
type Wake = Arc<dyn Fn() + Send + Sync>;

/// The pages of all models whose weights are read in place.
pub(super) struct Paging {
    reader: PageReader,
    wake: Wake,
    models: BTreeMap<ModelId, Pages>,
}

/// Pages of one model that were looked at.
#[derive(Debug)]
struct Pages {
    progress: Arc<Progress>,
    /// Bytes of all parts before each part, and of all.
    starts: Vec<u64>,
    /// Groups of the embedding tables that were read, or are being read.
    groups: BTreeSet<Group>,
    /// Experts' tensors that were read, or are being read.
    chosen: BTreeSet<TensorId>,
    /// Number of batches of rows and experts that a thread was told to read.
    batches: u64,
    /// The last step.
    used: Instant,
    awaited: Awaited,
}

/// [`GROUP_BYTES`] of an embedding table, and their number in it.
type Group = (TensorId, u64);

/// Pages that a suspended step waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    Nothing,
    /// A part and all batches.
    Part(u32),
    /// The thread's end: what the step needs was not asked for yet.
    End,
}

/// Report of the reading thread.
#[derive(Debug, Default)]
struct Progress {
    busy: AtomicBool,
    /// All parts below this one were read.
    parts: AtomicU32,
    /// Number of batches that were read.
    batches: AtomicU64,
    /// Processor time in nanoseconds that no step was charged for.
    spent: AtomicU64,
    unwanted: AtomicBool,
}

/// One range to read, and what is known once it is read.
struct Piece {
    tensor: LazyTensor,
    range: Range<u64>,
    then: Then,
}

#[derive(Clone, Copy)]
enum Then {
    Nothing,
    /// All parts below are read.
    Parts(u32),
    /// One more batch is read.
    Batch,
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.progress.unwanted.store(true, Ordering::Relaxed);
    }
}

impl Paging {
    pub fn new(reader: PageReader, wake: Wake) -> Self {
        Self { reader, wake, models: BTreeMap::new() }
    }

    /// Begins a step. Forgets the model's pages if the last look at them is old: true then.
    pub fn begin(&mut self, model: &Arc<Model>) -> bool {
        let now = lock::now();
        let old = self
            .models
            .get(&model.id)
            .is_some_and(|pages| now.saturating_duration_since(pages.used) >= TRUSTED && !pages.is_busy());
        if old {
            self.models.remove(&model.id);
        }
        self.models.entry(model.id).or_insert_with(|| Pages::of(model, now)).used = now;
        old
    }

    /// True if the pages of a part and of these tokens' rows are read. Otherwise they are being read, and the step is
    /// to be suspended.
    ///
    /// # Errors
    /// As [`Paging::start`].
    pub fn has_part(&mut self, model: &Arc<Model>, part: u32, tokens: &[u32]) -> Result<bool, MapError> {
        let Some(pages) = self.models.get_mut(&model.id) else { return Ok(true) };
        pages.forget_unread();
        let rows = if part == FIRST_PART { pages.missing_rows(model, tokens) } else { Vec::new() };
        pages.awaited = Awaited::Nothing;
        let busy = pages.is_busy();
        let read = pages.progress.parts.load(Ordering::Acquire);
        let has = rows.is_empty() && pages.has(part);
        let rests = read >= model.plan.program.part_count() || pages.ahead(part, read) >= AHEAD_BYTES / 2;
        if !has {
            pages.awaited = if busy && !rows.is_empty() { Awaited::End } else { Awaited::Part(part) };
        }
        if !(busy || has && rests) {
            let mut pieces = pages.pieces_of_rows(model, &rows);
            pages.add_parts(model, read, part, &mut pieces);
            self.start(model, pieces)?;
        }
        Ok(has)
    }

    /// As [`Paging::has_part`] for tensors of experts that rows chose in this part.
    ///
    /// # Errors
    /// As [`Paging::start`].
    pub fn has_chosen(
        &mut self,
        model: &Arc<Model>,
        part: u32,
        chosen: &[TensorId],
    ) -> Result<bool, MapError> {
        let Some(pages) = self.models.get_mut(&model.id) else { return Ok(true) };
        pages.forget_unread();
        let missing: Vec<TensorId> = chosen.iter().copied().filter(|id| !pages.chosen.contains(id)).collect();
        if missing.is_empty() && pages.has(part) {
            return Ok(true);
        }
        if pages.is_busy() {
            pages.awaited = if missing.is_empty() { Awaited::Part(part) } else { Awaited::End };
            return Ok(false);
        }
        pages.awaited = Awaited::Part(part);
        pages.chosen.extend(&missing);
        let tensors = missing.iter().filter_map(|id| model.plan.program.tensor(*id));
        let mut pieces: Vec<Piece> = tensors.flat_map(|tensor| whole(&tensor.lazy)).collect();
        pages.end_batch(&mut pieces);
        self.start(model, pieces)?;
        Ok(false)
    }

    /// Models whose suspended steps cannot go on yet. Reading for models that are not `wanted` stops.
    pub fn waiting(&mut self, wanted: impl Fn(ModelId) -> bool) -> BTreeSet<ModelId> {
        let busy = self.models.iter().filter(|(_, pages)| pages.is_busy());
        let waiting = busy.filter(|(id, pages)| {
            let wanted = wanted(**id);
            pages.progress.unwanted.store(!wanted, Ordering::Relaxed);
            wanted
                && match pages.awaited {
                    Awaited::Nothing => false,
                    Awaited::Part(part) => !pages.has(part),
                    Awaited::End => true,
                }
        });
        waiting.map(|(id, _)| *id).collect()
    }

    /// Of these models, those whose disk does not answer, with the seconds that it has been silent.
    pub fn silent(&self, waiting: &BTreeSet<ModelId>) -> Vec<(ModelId, MapError)> {
        let silence = |id: &ModelId| Some((*id, no_answer(self.reader.aside.silent(&name(*id), None)?)));
        waiting.iter().filter_map(silence).collect()
    }

    /// Takes the processor time that reading took for a model since the last call.
    pub fn take_spent(&self, id: ModelId) -> Duration {
        let spent = self.models.get(&id).map_or(0, |pages| pages.progress.spent.swap(0, Ordering::Relaxed));
        Duration::from_nanos(spent)
    }

    /// Forgets models that the engine does not host any more.
    pub fn keep(&mut self, hosted: impl Fn(ModelId) -> bool) {
        self.models.retain(|id, _| hosted(*id));
    }

    /// Reads these pieces on a thread.
    ///
    /// # Errors
    /// [`MapError::Os`] if an earlier thread for the model has had no answer from its disk, or none can be started.
    fn start(&mut self, model: &Arc<Model>, pieces: Vec<Piece>) -> Result<(), MapError> {
        let Some(pages) = self.models.get(&model.id).filter(|_| !pieces.is_empty()) else { return Ok(()) };
        let name = name(model.id);
        if let Some(silence) = self.reader.aside.silent(&name, None) {
            return Err(no_answer(silence));
        }
        let progress = Arc::clone(&pages.progress);
        progress.unwanted.store(false, Ordering::Relaxed);
        progress.busy.store(true, Ordering::Release);
        let (read, wake) = (Arc::clone(&self.reader.read), Arc::clone(&self.wake));
        let subject = Subject { what: WHAT, name, device: None };
        let ended = Ended(Arc::clone(&progress), Arc::clone(&self.wake));
        let started = self.reader.aside.send(subject, move |errand| {
            let _ended = ended;
            // Only less urgent: without it the pages are read all the same.
            let _ = rustix::process::setpriority_process(None, NICE);
            for (at, piece) in pieces.iter().enumerate() {
                if progress.unwanted.load(Ordering::Relaxed) {
                    return;
                }
                let begun = thread_time();
                let file = piece.tensor.file();
                let next = pieces.get(at + 1).filter(|next| Arc::ptr_eq(next.tensor.file(), file));
                read(file, piece.range.clone(), next.map_or(0..0, |next| next.range.clone()));
                let took = u64::try_from(thread_time().saturating_sub(begun).as_nanos()).unwrap_or(u64::MAX);
                progress.spent.fetch_add(took, Ordering::Relaxed);
                errand.goes_on();
                match piece.then {
                    Then::Nothing => continue,
                    Then::Parts(parts) => drop(progress.parts.fetch_max(parts, Ordering::Release)),
                    Then::Batch => drop(progress.batches.fetch_add(1, Ordering::Release)),
                }
                wake();
            }
        });
        started.map_err(|error| MapError::Os { what: WHAT, source: std::io::Error::other(error.to_string()) })
    }
}

/// Ends a thread's work, also if it panics.
struct Ended(Arc<Progress>, Wake);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Release);
        (self.1)();
    }
}

impl Pages {
    fn of(model: &Model, now: Instant) -> Self {
        let program = &model.plan.program;
        let mut starts = vec![0];
        for part in 0..program.part_count() {
            let in_place = |tensor: &&crate::program::Tensor| tensor.residence == Residence::Device;
            let tensors = program.part_tensors(part).map(|(_, tensor)| tensor).filter(in_place);
            let bytes: u64 = tensors.map(|tensor| tensor.lazy.byte_len()).sum();
            starts.push(starts.last().copied().unwrap_or(0) + bytes);
        }
        Self {
            progress: Arc::default(),
            starts,
            groups: BTreeSet::new(),
            chosen: BTreeSet::new(),
            batches: 0,
            used: now,
            awaited: Awaited::Nothing,
        }
    }

    fn is_busy(&self) -> bool {
        self.progress.busy.load(Ordering::Acquire)
    }

    /// Forgets batches that the thread did not read to their end.
    fn forget_unread(&mut self) {
        let read = self.progress.batches.load(Ordering::Acquire);
        if read < self.batches && !self.is_busy() {
            self.batches = self.progress.batches.load(Ordering::Acquire);
            if self.batches == read {
                self.groups.clear();
                self.chosen.clear();
            }
        }
    }

    /// True if a part and all batches are read.
    fn has(&self, part: u32) -> bool {
        part < self.progress.parts.load(Ordering::Acquire)
            && self.progress.batches.load(Ordering::Acquire) >= self.batches
    }

    /// Bytes of the parts between, without the first one.
    fn ahead(&self, part: u32, read: u32) -> u64 {
        let start = |part: u32| self.starts.get(part as usize).copied().unwrap_or(0);
        start(read).saturating_sub(start(part.saturating_add(1)))
    }

    /// Groups of the embedding tables that these tokens' rows need and that were not read.
    fn missing_rows(&self, model: &Model, tokens: &[u32]) -> Vec<Group> {
        let groups = tables(model).flat_map(|(id, _, row)| {
            tokens.iter().flat_map(move |token| {
                let first = u64::from(*token).saturating_mul(row);
                let groups = first / GROUP_BYTES..=first.saturating_add(row - 1) / GROUP_BYTES;
                groups.map(move |group| (id, group))
            })
        });
        let missing: BTreeSet<Group> = groups.filter(|group| !self.groups.contains(group)).collect();
        missing.into_iter().collect()
    }

    /// Notes that these groups are being read.
    fn pieces_of_rows(&mut self, model: &Model, groups: &[Group]) -> Vec<Piece> {
        self.groups.extend(groups);
        let tensor = |id| model.plan.program.tensor(id).map(|tensor| &tensor.lazy);
        let pieces = groups.iter().filter_map(|(id, group)| {
            let (tensor, all) = (tensor(*id)?, tensor(*id)?.range());
            let from = all.start.saturating_add(group.saturating_mul(GROUP_BYTES)).min(all.end);
            let range = from..from.saturating_add(GROUP_BYTES).min(all.end);
            Some(Piece { tensor: tensor.clone(), range, then: Then::Nothing })
        });
        let mut pieces: Vec<Piece> = pieces.collect();
        self.end_batch(&mut pieces);
        pieces
    }

    /// Makes these pieces one batch.
    fn end_batch(&mut self, pieces: &mut [Piece]) {
        if let Some(last) = pieces.last_mut() {
            last.then = Then::Batch;
            self.batches += 1;
        }
    }

    /// Adds the parts from `read` on, to [`AHEAD_BYTES`] beyond `part`.
    fn add_parts(&self, model: &Model, read: u32, part: u32, pieces: &mut Vec<Piece>) {
        let program = &model.plan.program;
        for next in read..program.part_count() {
            if next > part && self.ahead(part, next) >= AHEAD_BYTES {
                return;
            }
            let tensors = program.part_tensors(next).filter(|(_, t)| t.residence == Residence::Device);
            let mut of_part: Vec<Piece> = tensors.flat_map(|(_, tensor)| whole(&tensor.lazy)).collect();
            match of_part.last_mut() {
                Some(last) => last.then = Then::Parts(next + 1),
                // The first part: it has no more than the rows, which are a batch.
                None => drop(self.progress.parts.fetch_max(next + 1, Ordering::Release)),
            }
            pieces.append(&mut of_part);
        }
    }
}

/// The embedding tables, which stay in the file, with a row for each token, and the bytes of their rows.
fn tables(model: &Model) -> impl Iterator<Item = (TensorId, &LazyTensor, u64)> {
    let program = &model.plan.program;
    let tensors = program.part_tensors(FIRST_PART).filter(|(_, t)| t.residence == Residence::Host);
    let vocab = program.vocab() as u64;
    // Frequency divisors of rotary embeddings are there too: a few hundred bytes.
    let tables = tensors.filter(move |(_, tensor)| tensor.lazy.shape().rows() == vocab);
    tables.filter_map(move |(id, table)| {
        let row = table.lazy.byte_len() / vocab.max(1);
        (row > 0).then_some((id, &table.lazy, row))
    })
}

/// A tensor in pieces.
fn whole(tensor: &LazyTensor) -> impl Iterator<Item = Piece> + use<> {
    let (range, tensor) = (tensor.range(), tensor.clone());
    let starts = range.clone().step_by(usize::try_from(PIECE_BYTES).unwrap_or(usize::MAX));
    starts.map(move |from| Piece {
        tensor: tensor.clone(),
        range: from..range.end.min(from.saturating_add(PIECE_BYTES)),
        then: Then::Nothing,
    })
}

/// The name of a model's reading thread.
fn name(id: ModelId) -> String {
    format!("model {}", id.0)
}

/// The operation of the reading threads.
const WHAT: &str = "reading the model's pages";

fn no_answer(silence: Duration) -> MapError {
    let text = format!("the disk has not answered for {} s", silence.as_secs());
    MapError::Os { what: WHAT, source: std::io::Error::other(text) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn rows_of_every_embedding_table_are_read() {
        let mut forged = rocmforge_test_support::forge::newer_decoders();
        let (_, forge) =
            forged.remove(forged.iter().position(|(name, _)| *name == "gemma3n-shallow").unwrap());
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&forge.build().bytes).unwrap();
        let files = vec![std::fs::File::open(file.path()).unwrap()];
        let model = Model::open(ModelId(1), "streams", files).unwrap();
        let mut pages = Pages::of(&model, lock::now());
        let tokens = [3, 3, 200];
        let missing = pages.missing_rows(&model, &tokens);
        let pieces = pages.pieces_of_rows(&model, &missing);
        assert!(pages.missing_rows(&model, &tokens).is_empty(), "the same rows are not read again");
        let tables: Vec<_> = tables(&model).collect();
        assert_eq!(tables.len(), 2);
        for (id, table, row) in tables {
            for token in tokens {
                let at = table.range().start + token as u64 * row;
                let read = |byte: u64| {
                    pieces
                        .iter()
                        .any(|piece| piece.tensor.name() == table.name() && piece.range.contains(&byte))
                };
                assert!(read(at) && read(at + row - 1), "row {token} of table {}", id.0);
            }
        }
        assert!(pieces.iter().all(|piece| piece.range.end <= piece.tensor.range().end));
    }
}
