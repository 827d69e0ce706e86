//! Prefixes that outlive their pool. The engine reads their pages from the device before a pool closes. It writes them back
//! when a session asks for it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::JobError;
use super::core::Core;
use super::core::orders::Order;
use super::device::Device;
use super::handle::{EngineHandle, Facts};
use super::schedule::Schedule;
use crate::backend::BackendError;
use crate::lock;
use crate::model::{Model, ModelId};

/// The known prefixes of one user and model, with their keys and values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefixes {
    /// The user; `None` where all users share prefixes.
    pub uid: Option<u32>,
    /// Layout of the pages' bytes: only a device with the same one can take them.
    pub layout: String,
    /// Each page comes after the one that it continues.
    pub pages: Vec<PrefixPage>,
}

/// One KV page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixPage {
    /// Index of the page that this one continues; `None` at the start of prompts.
    pub after: Option<u32>,
    /// Tokens whose keys and values it holds: 1 to [`KV_PAGE_TOKENS`](crate::backend::KV_PAGE_TOKENS).
    pub tokens: Vec<u32>,
    /// Content as the device had it.
    pub bytes: Vec<u8>,
}

/// Keeps prefixes whose pool closes. The engine's thread calls it, so it must not block.
pub trait PrefixKeeper: std::fmt::Debug + Send + Sync {
    /// How many pages of so many bytes it can take now.
    fn room(&self, page_bytes: u64) -> u64;

    /// Takes a model's prefixes of one user.
    fn keep(&self, model: &Arc<Model>, prefixes: Prefixes);
}

/// A client's order to write prefixes back. `done` gets the number of pages.
#[derive(Debug)]
pub(super) struct RestoreOrder {
    pub model: Arc<Model>,
    pub uid: u32,
    pub prefixes: Prefixes,
    pub done: oneshot::Sender<u32>,
}

impl Device {
    /// Offers a model's known prefixes to the keeper, at most so many bytes of those used last. None if the model's file can
    /// no longer be trusted.
    pub(super) fn keep_prefixes(&mut self, id: ModelId, schedule: &Schedule, bytes_max: u64) {
        let (Some(keeper), Some(hosted)) = (self.keeper.clone(), self.models.get(id)) else { return };
        let Some(slot) = hosted.slot else { return };
        let model = Arc::clone(&hosted.model);
        let page_bytes = self.backend.kv_page_bytes()(&model.plan.program);
        let most = keeper.room(page_bytes).min(bytes_max / page_bytes.max(1));
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        if model.files.check_poison().and_then(|()| model.files.check_unchanged()).is_err() {
            return;
        }
        for (uid, known) in schedule.kv().known(id, most) {
            let read = known.into_iter().map(|page| {
                let bytes = self.backend.read_page(slot, page.page)?;
                Ok(PrefixPage { after: page.after, tokens: page.tokens.to_vec(), bytes })
            });
            match read.collect::<Result<Vec<_>, BackendError>>() {
                Ok(pages) if pages.is_empty() => {}
                Ok(pages) => {
                    let layout = self.backend.page_layout().to_owned();
                    keeper.keep(&model, Prefixes { uid, layout, pages });
                }
                Err(error) => {
                    tracing::warn!(model = id.0, %error, "known prefixes could not be read: they are lost")
                }
            }
        }
    }
}

/// Most bytes that are read from a device while it serves: others wait for some 50 ms.
pub(super) const KEPT_BESIDE_WORK: u64 = 256 << 20;

/// Pages of a restore are written for so long in one turn of the engine.
const SLICE: Duration = Duration::from_millis(10);

/// A restore that goes on in the next turn, and the index of its next page.
#[derive(Debug)]
pub(super) struct Restoring {
    order: RestoreOrder,
    next: usize,
    taken: u32,
}

impl From<RestoreOrder> for Restoring {
    fn from(order: RestoreOrder) -> Self {
        Self { order, next: 0, taken: 0 }
    }
}

impl Core {
    /// Writes some prefixes to free pages; true if there were any. A device that fails here fails in the next step too.
    pub(super) fn restore_some(&mut self) -> bool {
        let Some(mut restoring) = self.restores().pop_front() else { return false };
        let (begun, facts) = (lock::now(), self.shared().facts());
        let (device, schedule) = self.parts();
        let wants = || !restoring.order.done.is_closed();
        let ended = !wants() || {
            let written = restoring.write(device, schedule, &facts, || lock::now() - begun >= SLICE);
            written.unwrap_or_else(|error| {
                let model = restoring.order.model.id.0;
                tracing::warn!(model, %error, "kept prefixes could not be written back");
                true
            })
        };
        device.release_freed(schedule);
        match ended {
            true => drop(restoring.order.done.send(restoring.taken)),
            false => self.restores().push_back(restoring),
        }
        true
    }
}

impl Restoring {
    /// Writes pages until the time is `over`. True if none is left, or if the device cannot take them.
    fn write(
        &mut self,
        device: &mut Device,
        schedule: &mut Schedule,
        facts: &Facts,
        over: impl Fn() -> bool,
    ) -> Result<bool, BackendError> {
        let RestoreOrder { model, uid, prefixes, .. } = &self.order;
        let page_bytes = facts.page_bytes(&model.plan.program);
        let fits = schedule.kv().reuses()
            && prefixes.layout == device.backend.page_layout()
            && prefixes.uid == schedule.kv().user_of_tree(*uid)
            && prefixes.pages.iter().all(|page| page.bytes.len() as u64 == page_bytes)
            && (0..).zip(&prefixes.pages).all(|(at, page)| page.after.is_none_or(|before| before < at));
        let gone = self.next > 0 && device.models.get(model.id).is_none();
        if !fits || gone {
            return Ok(true);
        }
        device.enter(model, lock::now());
        let slot = device.open(model, facts, schedule)?;
        schedule.kv_mut().open(model.id, page_bytes);
        while let Some(page) = prefixes.pages.get(self.next) {
            let stem = prefixes.stem(self.next);
            let backend = device.backend.as_mut();
            let fill = |to| backend.write_page(slot, to, &page.bytes);
            if schedule.kv_mut().adopt((model.id, *uid), &stem, &page.tokens, fill)? {
                self.taken += 1;
            }
            self.next += 1;
            if over() {
                return Ok(self.next == prefixes.pages.len());
            }
        }
        Ok(true)
    }
}

impl Prefixes {
    /// Tokens of the pages before one.
    fn stem(&self, of: usize) -> Vec<u32> {
        let mut pages = Vec::new();
        let mut at = of;
        while let Some(before) = self.pages.get(at).and_then(|page| page.after) {
            at = before as usize; // less than before, as `write` checked
            pages.push(at);
        }
        pages.into_iter().rev().flat_map(|at| self.pages[at].tokens.iter().copied()).collect()
    }
}

impl EngineHandle {
    /// Gives a user's kept prefixes of a model back to the device, where there is room for them. Returns how many pages;
    /// none if the device has another layout of pages.
    ///
    /// # Errors
    /// As [`EngineHandle::evict_weights`].
    pub async fn restore_prefixes(
        &self,
        model: &Arc<Model>,
        uid: u32,
        prefixes: Prefixes,
    ) -> Result<u32, JobError> {
        let (done, count) = oneshot::channel();
        self.order(Order::Restore(RestoreOrder { model: Arc::clone(model), uid, prefixes, done }))?;
        count.await.map_err(|_| JobError::Draining)
    }
}
