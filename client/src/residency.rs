//! Models' weights on a device: bringing them, sending them away, who has the memory.

use crate::client::Client;
use crate::error::ClientError;
use crate::generation::{DeviceLoading, Events};
use crate::wire::{
    CacheScope, ClearCacheReply, ClearCacheRequest, LoadToDeviceRequest, PlanReply, PlanRequest, Preload,
    ResidencyReply, ResidencyRequest, SetRulesReply, SetRulesRequest, SubscribeRequest,
};

impl Client {
    /// Has some of a model's weights brought to the device now, rather than when a request needs them: an iterator over how
    /// far that is. To be asked again where the connection breaks; what is there stays there.
    ///
    /// # Errors
    /// As [`crate::Connection::call`], those of sending.
    pub fn preload(&self, model: &str, what: Preload) -> Result<DeviceLoading, ClientError> {
        let request = LoadToDeviceRequest { model: model.to_owned(), what, ext: vec![] };
        self.connection()?.load_to_device(&request)
    }

    /// As [`Client::preload`] for all of them.
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

    /// Sends weights away from the device: of one model, or of all that are not pinned. What is needed is brought again.
    ///
    /// # Errors
    /// As [`crate::Connection::call`]; `Forbidden` for models that another user loaded.
    pub fn clear_gpu_cache(&self, model: Option<&str>) -> Result<ClearCacheReply, ClientError> {
        let scope = model.map_or(CacheScope::All, |model| CacheScope::Model(model.to_owned()));
        self.call(&ClearCacheRequest { scope, ext: vec![] })
    }

    /// Keeps a model's weights on the device until they are told to leave, and for an administrator its file in memory.
    ///
    /// # Errors
    /// As [`Client::clear_gpu_cache`].
    pub fn pin(&self, model: &str) -> Result<SetRulesReply, ClientError> {
        self.pinned(model, true)
    }

    /// Takes [`Client::pin`] back.
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

    /// Changes what is wanted for a model.
    ///
    /// # Errors
    /// As [`Client::pin`].
    pub fn set_rules(&self, request: &SetRulesRequest) -> Result<SetRulesReply, ClientError> {
        self.call(request)
    }

    /// What happens to weights and models from now on: an iterator that ends when the daemon stops. To be asked again where
    /// the connection breaks; what happened meanwhile is not told.
    ///
    /// # Errors
    /// As [`crate::Connection::call`], those of sending.
    pub fn events(&self) -> Result<Events, ClientError> {
        self.connection()?.subscribe(&SubscribeRequest::default())
    }

    /// What serving one sequence of `context_tokens` tokens would take of the device; 0: of the longest allowed.
    ///
    /// # Errors
    /// As [`crate::Connection::call`].
    pub fn plan(&self, model: &str, context_tokens: u32) -> Result<PlanReply, ClientError> {
        self.call(&PlanRequest { model: model.to_owned(), context_tokens, ext: vec![] })
    }

    /// Who has the devices' memory, in as many calls as that takes.
    ///
    /// # Errors
    /// As [`crate::Connection::call`].
    pub fn residency(&self) -> Result<ResidencyReply, ClientError> {
        let mut whole = self.call(&ResidencyRequest::default())?;
        while whole.more
            && let Some(last) = whole.models.last()
        {
            let mut next = self.call(&ResidencyRequest { after: last.id, ext: vec![] })?;
            whole.more = next.more && !next.models.is_empty();
            whole.models.append(&mut next.models);
        }
        Ok(whole)
    }
}
