//! Host memory for keys and values of parked sequences, and for their recurrent states.
//!
//! A parked sequence's pages are cached, and go when others need their bytes. On a device with memory of its own, whole pages
//! that it begins with are copied to host memory then. They come back when it is admitted again, and it computes only the
//! tokens of its last, unfinished page anew. A copy moves some MB; to compute a page's tokens, a step reads all weights.
//!
//! A sequence with a recurrent state goes on where that ends. So its last page is copied too, and comes back with the state
//! and all pages before it, those that the cache lacks. Without one of them the others are of no use.
//!
//! A sequence owns its copies: they go with it. Together they have a limit, and no user takes more than half of what the others
//! leave of it. Pages that found no room are computed again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::SequenceId;
use super::device::Device;
use super::facts::Facts;
use super::kv::{Evicted, Place};
use super::schedule::Schedule;
use crate::backend::{BackendError, KV_PAGE_TOKENS, ModelSlot};
use crate::model::ModelId;

/// Host memory of one engine's parked sequences.
#[derive(Debug, Default)]
pub(super) struct HostMemory {
    limit_bytes: u64,
    held_bytes: Arc<AtomicU64>,
    /// Pages and states copied to the host so far.
    pub pages_out: u64,
    /// Those copied back so far.
    pub pages_in: u64,
}

impl HostMemory {
    pub fn new(limit_bytes: u64) -> Self {
        Self { limit_bytes, ..Self::default() }
    }

    /// Bytes of all copies.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// True if a user that holds `own_bytes` may hold so many more.
    fn has_room(&self, bytes: u64, own_bytes: u64) -> bool {
        let others = self.held_bytes().saturating_sub(own_bytes);
        own_bytes.saturating_add(bytes) <= self.limit_bytes.saturating_sub(others) / 2
    }

    fn page(&mut self, bytes: Vec<u8>) -> Arc<HostPage> {
        self.held_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.pages_out += 1;
        Arc::new(HostPage { bytes, held_bytes: Arc::clone(&self.held_bytes) })
    }
}

/// The content of a KV page or of a recurrent state, as the device had it.
#[derive(Debug)]
struct HostPage {
    bytes: Vec<u8>,
    held_bytes: Arc<AtomicU64>,
}

impl Drop for HostPage {
    fn drop(&mut self) {
        self.held_bytes.fetch_sub(self.bytes.len() as u64, Ordering::Relaxed);
    }
}

/// A sequence's pages in host memory, and its last recurrent state there, by the number of tokens up to their ends. Sequences
/// with the same tokens share copies.
#[derive(Clone, Debug, Default)]
pub(super) struct Swapped {
    pages: BTreeMap<usize, Arc<HostPage>>,
    state: Option<(usize, Arc<HostPage>)>,
}

impl Swapped {
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.state.is_none()
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }

    pub fn bytes(&self) -> u64 {
        let state = self.state.iter().map(|(_, state)| state);
        self.pages.values().chain(state).map(|page| page.bytes.len() as u64).sum()
    }

    /// True if it is of use: all but a state that ends before the one that is there.
    fn takes(&self, evicted: &Evicted) -> bool {
        let later = self.state.as_ref().is_some_and(|(end, _)| *end >= evicted.tokens.len());
        matches!(evicted.place, Place::Page(_)) || !later
    }

    fn put(&mut self, evicted: &Evicted, content: Arc<HostPage>) {
        let end = evicted.tokens.len();
        match evicted.place {
            Place::Page(_) => drop(self.pages.insert(end, content)),
            Place::State(_) => self.state = Some((end, content)),
        }
    }
}

/// A page to write back: that of a sequence after the whole pages that it has.
struct Returning {
    model: ModelId,
    uid: u32,
    /// Its tokens up to this page's end.
    tokens: Vec<u32>,
    page: Arc<HostPage>,
}

/// A recurrent state to write back, with the pages before it.
struct ReturningState {
    of: (ModelId, u32),
    tokens: Vec<u32>,
    /// By the number of tokens up to their ends.
    pages: Vec<(usize, Arc<HostPage>)>,
    state: Arc<HostPage>,
}

impl<A> Schedule<A> {
    /// Parked sequences that begin with the tokens of what was evicted and lack it, and the bytes that the user of the first one holds.
    fn parked_with(&self, evicted: &Evicted) -> (Vec<SequenceId>, u64) {
        let begins = self.waiting_sequences().filter(|sequence| {
            sequence.restarts > 0
                && sequence.request.model == evicted.model
                && self.kv().user_of_tree(sequence.request.uid) == evicted.uid
                && sequence.swapped.takes(evicted)
                && sequence.reusable().starts_with(&evicted.tokens)
        });
        let ids: Vec<SequenceId> = begins.map(|sequence| sequence.request.id).collect();
        let uid = ids.first().and_then(|id| self.get(*id)).map(|sequence| sequence.request.uid);
        let of_user = self.all().filter(|sequence| Some(sequence.request.uid) == uid);
        (ids, of_user.map(|sequence| sequence.swapped.bytes()).sum())
    }

    /// The next page of an admitted sequence that comes back, if the sequence was not computed further meanwhile.
    fn returning(&mut self, id: SequenceId, at: usize) -> Option<Returning> {
        let sequence = self.get_mut(id).filter(|sequence| sequence.fresh)?;
        let end = (at + 1) * KV_PAGE_TOKENS;
        let page = sequence.swapped.pages.remove(&end)?;
        let tokens = sequence.reusable().get(..end)?.to_vec();
        Some(Returning { model: sequence.request.model, uid: sequence.request.uid, tokens, page })
    }

    /// The copies with which an admitted sequence goes on: its recurrent state, and the pages before it that the cache lacks.
    /// `None` if it knows as much already, or if a page is nowhere.
    fn returning_state(&mut self, id: SequenceId) -> Option<ReturningState> {
        let sequence = self.get(id).filter(|sequence| sequence.fresh)?;
        let (end, state) = sequence.swapped.state.clone()?;
        let tokens = sequence.reusable().get(..end)?.to_vec();
        if end <= sequence.computed as usize {
            return None;
        }
        let of = (sequence.request.model, sequence.request.uid);
        let ends = (1..=end.div_ceil(KV_PAGE_TOKENS)).map(|page| (page * KV_PAGE_TOKENS).min(end));
        let ends: Vec<usize> = ends.collect();
        // A tree has no page without those before it. Each look-up walks from the root on, so one for each page would take time by
        // the square of their number.
        let (_, lacked) = ends.split_at(ends.partition_point(|end| self.kv().has(of, &tokens[..*end]).0));
        let pages = lacked.iter().map(|end| Some((*end, sequence.swapped.pages.get(end).cloned()?)));
        let pages = pages.collect::<Option<Vec<_>>>()?;
        self.kv_mut().use_pages(of, &tokens);
        Some(ReturningState { of, tokens, pages, state })
    }
}

impl Device {
    /// Copies evicted pages and states with which parked sequences begin, before anything else is written to them. One that cannot
    /// be copied is computed again.
    pub fn swap_out(&mut self, schedule: &mut Schedule) {
        if !schedule.kv().watches_evictions() {
            return;
        }
        for evicted in schedule.kv_mut().take_evicted_list() {
            let slot = self.models.get(evicted.model).and_then(|hosted| hosted.slot);
            let Some(slot) = slot.filter(|_| !self.backend.reads_in_place()) else { continue };
            let (ids, own_bytes) = schedule.parked_with(&evicted);
            if ids.is_empty() || !self.host.has_room(evicted.bytes, own_bytes) {
                continue;
            }
            let read = match evicted.place {
                Place::Page(page) => self.backend.read_page(slot, page),
                Place::State(state) => self.backend.read_state(slot, state),
            };
            match read {
                Ok(bytes) => {
                    let content = self.host.page(bytes);
                    for id in ids {
                        if let Some(sequence) = schedule.get_mut(id) {
                            sequence.swapped.put(&evicted, Arc::clone(&content));
                        }
                    }
                }
                // If the device is lost, the next step reports it.
                Err(error) => {
                    tracing::warn!(model = evicted.model.0, %error, "a parked sequence's page could not be read: it is computed again");
                }
            }
        }
        let parked = schedule.waiting_sequences().any(|sequence| sequence.restarts > 0);
        schedule.kv_mut().watch_evictions(parked && self.host.limit_bytes > 0);
    }

    /// Writes pages of sequences back that were parked and are admitted again. True if there were any.
    pub fn swap_in(&mut self, schedule: &mut Schedule, facts: &Facts) -> bool {
        let mut any = false;
        for id in schedule.swapped_sequences() {
            let recurrent = schedule.get(id).is_some_and(|sequence| sequence.is_recurrent());
            let returned = match recurrent {
                true => self.return_state(id, schedule, facts),
                false => self.return_pages(id, schedule, facts),
            };
            match returned {
                Ok(count) => {
                    self.host.pages_in += count;
                    any |= count > 0;
                }
                Err(error) => {
                    tracing::debug!(sequence = id.0, %error, "pages of a parked sequence could not be written back");
                }
            }
            if let Some(sequence) = schedule.get_mut(id) {
                sequence.swapped.clear();
            }
        }
        any
    }

    fn return_pages(
        &mut self,
        id: SequenceId,
        schedule: &mut Schedule,
        facts: &Facts,
    ) -> Result<u64, BackendError> {
        let Some(sequence) = schedule.get(id) else { return Ok(0) };
        let (first, model) = (sequence.kv.known_tokens() / KV_PAGE_TOKENS, sequence.request.model);
        let Some(hosted) = self.models.get(model) else { return Ok(0) };
        let model = Arc::clone(&hosted.model);
        let slot = self.open(&model, facts, schedule)?;
        let mut at = first;
        while let Some(Returning { model: of, uid, tokens, page }) = schedule.returning(id, at) {
            if !self.return_page(slot, (of, uid), &tokens, &page, schedule)? {
                break;
            }
            at += 1;
        }
        Ok((at - first) as u64)
    }

    /// Writes the page back that ends with `tokens`. False if there is no room for it, or if the cache lacks one before.
    fn return_page(
        &mut self,
        slot: ModelSlot,
        (of, uid): (ModelId, u32),
        tokens: &[u32],
        page: &HostPage,
        schedule: &mut Schedule,
    ) -> Result<bool, BackendError> {
        let Some(to) = schedule.kv_mut().take(of, uid) else { return Ok(false) };
        self.swap_out(schedule); // what was evicted for it
        if let Err(error) = self.backend.write_page(slot, to, &page.bytes) {
            schedule.kv_mut().drop_page(of, uid, to);
            return Err(error);
        }
        let (stem, tokens) =
            tokens.split_at(tokens.len().saturating_sub(1) / KV_PAGE_TOKENS * KV_PAGE_TOKENS);
        Ok(schedule.kv_mut().enter_page((of, uid), stem, tokens, to))
    }

    /// Writes a sequence's recurrent state back, after those pages before it that the cache lacks.
    fn return_state(
        &mut self,
        id: SequenceId,
        schedule: &mut Schedule,
        facts: &Facts,
    ) -> Result<u64, BackendError> {
        let Some(back) = schedule.returning_state(id) else { return Ok(0) };
        let ((model, uid), mut count) = (back.of, 0);
        let Some(hosted) = self.models.get(model) else { return Ok(0) };
        let model_file = Arc::clone(&hosted.model);
        let slot = self.open(&model_file, facts, schedule)?;
        for (end, page) in &back.pages {
            if !self.return_page(slot, back.of, &back.tokens[..*end], page, schedule)? {
                return Ok(count);
            }
            count += 1;
        }
        let Some(to) = schedule.kv_mut().take_state(model, uid) else { return Ok(count) };
        self.swap_out(schedule); // what was evicted for it
        if let Err(error) = self.backend.write_state(slot, to, &back.state.bytes) {
            schedule.kv_mut().drop_state(model, uid, to);
            return Err(error);
        }
        Ok(count + u64::from(schedule.kv_mut().enter_state(back.of, &back.tokens, to)))
    }
}
