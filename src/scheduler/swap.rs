//! Host memory for keys and values of parked sequences.
//!
//! A parked sequence's pages are cached, and go when others need their bytes. On a device with memory of its own, whole pages
//! that it begins with are copied to host memory then. They come back when it is admitted again, and it computes only the
//! tokens of its last, unfinished page anew. A copy moves some MB; to compute a page's tokens, a step reads all weights.
//!
//! A sequence owns its copies: they go with it. Together they have a limit, and no user takes more than half of what the others
//! leave of it. Pages that found no room are computed again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::SequenceId;
use super::device::Device;
use super::handle::Facts;
use super::kv::EvictedPage;
use super::schedule::Schedule;
use crate::backend::{BackendError, KV_PAGE_TOKENS};
use crate::model::ModelId;

/// Host memory of one engine's parked sequences.
#[derive(Debug, Default)]
pub(super) struct HostMemory {
    limit_bytes: u64,
    held_bytes: Arc<AtomicU64>,
    /// Pages copied to the host so far.
    pub pages_out: u64,
    /// Pages copied back so far.
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

/// The content of a KV page, as the device had it.
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

/// A sequence's pages in host memory, by their place in the order of position. Sequences with the same tokens share copies.
#[derive(Clone, Debug, Default)]
pub(super) struct Swapped(BTreeMap<usize, Arc<HostPage>>);

impl Swapped {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn bytes(&self) -> u64 {
        self.0.values().map(|page| page.bytes.len() as u64).sum()
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

impl<A> Schedule<A> {
    /// Parked sequences that begin with an evicted page's tokens, and the bytes that the user of the first one holds.
    fn parked_with(&self, evicted: &EvictedPage) -> (Vec<SequenceId>, u64) {
        let begins = self.waiting_sequences().filter(|sequence| {
            sequence.restarts > 0
                && sequence.request.model == evicted.model
                && self.kv().user_of_tree(sequence.request.uid) == evicted.uid
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
        let page = sequence.swapped.0.remove(&at)?;
        let tokens = sequence.reusable().get(..(at + 1) * KV_PAGE_TOKENS)?.to_vec();
        Some(Returning { model: sequence.request.model, uid: sequence.request.uid, tokens, page })
    }
}

impl Device {
    /// Copies evicted pages with which parked sequences begin, before anything else is written to them. A page that cannot be
    /// copied is computed again.
    pub fn swap_out(&mut self, schedule: &mut Schedule) {
        if !schedule.kv().watches_evictions() {
            return;
        }
        for evicted in schedule.kv_mut().take_evicted_pages() {
            let slot = self.models.get(evicted.model).and_then(|hosted| hosted.slot);
            let Some(slot) = slot.filter(|_| !self.backend.reads_in_place()) else { continue };
            let (ids, own_bytes) = schedule.parked_with(&evicted);
            if ids.is_empty() || !self.host.has_room(evicted.page_bytes, own_bytes) {
                continue;
            }
            match self.backend.read_page(slot, evicted.page) {
                Ok(bytes) => {
                    let (page, at) = (self.host.page(bytes), evicted.tokens.len() / KV_PAGE_TOKENS - 1);
                    for id in ids {
                        if let Some(sequence) = schedule.get_mut(id) {
                            sequence.swapped.0.insert(at, Arc::clone(&page));
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
            match self.return_pages(id, schedule, facts) {
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
            let Some(to) = schedule.kv_mut().take(of, uid) else { break };
            self.swap_out(schedule); // what was evicted for it
            if let Err(error) = self.backend.write_page(slot, to, &page.bytes) {
                schedule.kv_mut().drop_page(of, uid, to);
                return Err(error);
            }
            let (stem, tokens) = tokens.split_at(at * KV_PAGE_TOKENS);
            if !schedule.kv_mut().enter_page((of, uid), stem, tokens, to) {
                break;
            }
            at += 1;
        }
        Ok((at - first) as u64)
    }
}
