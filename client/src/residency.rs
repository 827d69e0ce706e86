//! Models' weights on a device: loads, evictions, memory use.

use crate::client::{Client, Parts};
use crate::error::ClientError;
use crate::generation::{DeviceLoading, Events};
use crate::wire::{
    CacheScope, ClearCacheReply, ClearCacheRequest, LoadToDeviceRequest, PlanReply, PlanRequest, Preload,
    ResidencyReply, ResidencyRequest, SetRulesReply, SetRulesRequest, SubscribeRequest,
};

impl Client {
    /// Loads some of a model's weights to the device now, instead of when a request needs them. Returns an iterator
    /// over the progress. If the connection breaks, call it again; loaded weights stay resident.
    ///
    /// # Errors
    /// The sending errors of [`crate::Connection::call`].
    pub fn preload(&self, model: &str, what: Preload) -> Result<DeviceLoading, ClientError> {
        let request = LoadToDeviceRequest { model: model.to_owned(), what, ext: vec![] };
        self.connection()?.load_to_device(&request)
    }

    /// As [`Client::preload`] for all weights.
    ///
    /// # Errors
    /// As [`Client::preload`].
    pub fn preload_all(&self, model: &str) -> Result<DeviceLoading, ClientError> {
        self.preload(model, Preload::All)
    }

    /// As [`Client::preload`] for the embedding and the first `layers` layers.
    ///
    /// # Errors
    /// As [`Client::preload`].
    pub fn preload_layers(&self, model: &str, layers: u32) -> Result<DeviceLoading, ClientError> {
        self.preload(model, Preload::First(layers))
    }

    /// Evicts weights from the device: those of one model, or of all models that are not pinned. Requests load what
    /// they need again.
    ///
    /// # Errors
    /// As [`crate::Connection::call`]; `Forbidden` for models that another user loaded.
    pub fn evict_weights(&self, model: Option<&str>) -> Result<ClearCacheReply, ClientError> {
        let scope = model.map_or(CacheScope::All, |model| CacheScope::Model(model.to_owned()));
        self.call(&ClearCacheRequest { scope, ext: vec![] })
    }

    /// Keeps a model's weights on the device until [`Client::unpin`]. For an administrator, the daemon also locks the
    /// model's file in memory.
    ///
    /// # Errors
    /// As [`Client::evict_weights`].
    pub fn pin(&self, model: &str) -> Result<SetRulesReply, ClientError> {
        self.pinned(model, true)
    }

    /// Reverts [`Client::pin`].
    ///
    /// # Errors
    /// As [`Client::pin`].
    pub fn unpin(&self, model: &str) -> Result<SetRulesReply, ClientError> {
        self.pinned(model, false)
    }

    fn pinned(&self, model: &str, pinned: bool) -> Result<SetRulesReply, ClientError> {
        self.set_rules(&SetRulesRequest {
            model: model.to_owned(),
            pinned: Some(pinned),
            ..Default::default()
        })
    }

    /// Changes a model's rules.
    ///
    /// # Errors
    /// As [`Client::pin`].
    pub fn set_rules(&self, request: &SetRulesRequest) -> Result<SetRulesReply, ClientError> {
        self.call(request)
    }

    /// Events of weights and models from now on: an iterator that ends when the daemon stops. If the connection
    /// breaks, call it again; events in between are lost.
    ///
    /// # Errors
    /// The sending errors of [`crate::Connection::call`].
    pub fn events(&self) -> Result<Events, ClientError> {
        self.connection()?.subscribe(&SubscribeRequest::default())
    }

    /// Device memory needed to serve one sequence of `context_tokens` tokens; 0: the longest allowed.
    ///
    /// # Errors
    /// As [`crate::Connection::call`].
    pub fn plan(&self, model: &str, context_tokens: u32) -> Result<PlanReply, ClientError> {
        self.call(&PlanRequest { model: model.to_owned(), context_tokens, ext: vec![] })
    }

    /// The use of all devices' memory, in as many calls as needed.
    ///
    /// # Errors
    /// As [`crate::Connection::call`].
    pub fn residency(&self) -> Result<ResidencyReply, ClientError> {
        let mut whole = self.call(&ResidencyRequest::default())?;
        let mut parts = Parts::default();
        while whole.more
            && let Some(last) = whole.models.last()
        {
            self.one_more(&mut parts)?;
            let mut next = self.call(&ResidencyRequest { after: last.id, ext: vec![] })?;
            whole.more = next.more && !next.models.is_empty();
            whole.models.append(&mut next.models);
        }
        Ok(whole)
    }
}
