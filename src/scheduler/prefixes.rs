//! Prefixes that outlive their pool. The engine reads their pages from the device before a pool closes. It writes them back
//! when a session asks for it.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::JobError;
use super::core::orders::Order;
use super::device::Device;
use super::handle::EngineHandle;
use super::schedule::Schedule;
use crate::backend::{BackendError, KV_PAGE_TOKENS};
use crate::model::{Model, ModelId};

/// The known prefixes of one user and model, with their keys and values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefixes {
    /// The user; `None` where all users share prefixes.
    pub uid: Option<u32>,
    /// Layout of the pages' and states' bytes: only a device with the same one can take them.
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
    /// The recurrent state after its tokens, of those prefixes of a recurrent model that end here.
    pub state: Option<Vec<u8>>,
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
        let most = keeper.room(page_bytes).min(bytes_max / kept_page_bytes(page_bytes));
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        if model.files.check_poison().and_then(|()| model.files.check_unchanged()).is_err() {
            return;
        }
        for (uid, known) in schedule.kv().known(id, most) {
            let read = known.into_iter().map(|page| {
                let bytes = self.backend.read_page(slot, page.page)?;
                let state = page.state.map(|state| self.backend.read_state(slot, state)).transpose()?;
                Ok(PrefixPage { after: page.after, tokens: page.tokens.to_vec(), bytes, state })
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

/// Least bytes that a page takes where it is kept: a model without attention has pages of tokens alone.
pub(super) fn kept_page_bytes(page_bytes: u64) -> u64 {
    page_bytes.saturating_add(4 * KV_PAGE_TOKENS as u64)
}

/// Most bytes that are read from a device while it serves: others wait for some 50 ms.
pub(super) const KEPT_BESIDE_WORK: u64 = 256 << 20;

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
