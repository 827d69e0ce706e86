//! Keeps models' files in memory: by configuration, by name on request, and what is evicted when memory is short.

use std::sync::Arc;

use super::{Model, NAMES_MAX, Store, StoreError};
use crate::model::pages::{HostPolicy, LockBudget, PageResidency, PagesReport, PagesState, Refusal};

impl Store {
    /// Sets the policy, also for mapped models. Returns at once; pages are loaded and freed in the background.
    pub fn set_host_policy(&self, policy: HostPolicy) {
        self.keeper.budget.set_max(policy.lock_bytes_max);
        self.tables.lock().host = policy;
        let models = self.tables.lock().wanted_pages();
        for (model, wanted) in models {
            // Retries refused models too: the new limits may allow more.
            if model.pages.want(wanted) {
                self.keeper.work_on(&model);
            }
        }
    }

    /// Maps the models that the configuration keeps in memory.
    pub fn map_wanted(self: &Arc<Self>) {
        let models = self.tables.lock().host.models.clone();
        let uid = rustix::process::geteuid().as_raw();
        for (name, _) in models.iter().filter(|(_, residency)| **residency != PageResidency::None) {
            if let Err(error) = self.acquire(uid, name) {
                tracing::warn!("{name} is named in host.models but was not mapped: {error}");
            }
        }
    }

    /// Locks a model in memory, now and at each later mapping, until [`Store::unpin`] or [`Store::unload`]. Maps it
    /// first if needed. Returns before its pages are loaded; [`Store::pages`] reports the progress or the refusal.
    /// Another call retries a refused lock.
    ///
    /// # Errors
    /// [`StoreError::NotAdministrator`], and as [`Store::acquire`].
    pub fn pin(self: &Arc<Self>, uid: u32, administrator: bool, name: &str) -> Result<(), StoreError> {
        if !administrator {
            return Err(StoreError::NotAdministrator { name: name.into() });
        }
        let (lease, _) = self.acquire(uid, name)?;
        if !self.tables.lock().pin(uid, name) {
            return Err(StoreError::Pins { limit: NAMES_MAX });
        }
        if lease.model().pages.want(PageResidency::Lock) {
            self.keeper.work_on(lease.model());
        }
        Ok(())
    }

    /// Reverts [`Store::pin`]; the configured policy stays. Returns true when the model was pinned.
    ///
    /// # Errors
    /// [`StoreError::NotAdministrator`].
    pub fn unpin(&self, uid: u32, administrator: bool, name: &str) -> Result<bool, StoreError> {
        if !administrator {
            return Err(StoreError::NotAdministrator { name: name.into() });
        }
        let was_pinned = self.tables.lock().unpin(uid, name);
        self.want_pages();
        Ok(was_pinned)
    }

    /// The pages of the named model; `None` while it is not mapped. Reads no file.
    pub fn pages(&self, uid: u32, name: &str) -> Option<PagesReport> {
        Some(self.tables.lock().mapped_by(uid, name)?.pages.report())
    }

    /// The number of models whose lock was refused, and the first reason.
    pub fn locks_refused(&self) -> (u32, Option<Refusal>) {
        let models = self.tables.lock().mapped_models();
        let refused = models.into_iter().filter_map(|model| match model.pages.report().state {
            PagesState::Refused(refusal) => Some(refusal),
            _ => None,
        });
        refused.fold((0, None), |(count, first), refusal| (count + 1, first.or(Some(refusal))))
    }

    /// The budget for locked bytes of all models.
    pub fn lock_budget(&self) -> &LockBudget {
        &self.keeper.budget
    }

    /// Frees the pages of all models that no request uses and that are not locked. Returns the number of these models.
    /// For memory pressure. Takes some milliseconds for each GiB that was in memory.
    pub fn give_idle_pages_back(&self) -> usize {
        let idle = self.tables.lock().idle();
        let given = |model: &Arc<Model>| {
            let given = !model.pages.wants_lock() && model.pages.give_back(&model.files).is_ok();
            usize::from(given)
        };
        idle.iter().map(given).sum()
    }

    /// Starts the wanted residency of `model`, found by `name`, if it has not started.
    pub(super) fn keep_pages(&self, uid: u32, name: &str, model: &Arc<Model>) {
        let wanted = self.tables.lock().residency(uid, name);
        if model.pages.want_at_least(wanted) {
            self.keeper.work_on(model);
        }
    }

    /// Applies the wanted residency to all mapped models.
    pub(super) fn want_pages(&self) {
        let models = self.tables.lock().wanted_pages();
        for (model, wanted) in models {
            if model.pages.report().wanted != wanted && model.pages.want(wanted) {
                self.keeper.work_on(&model);
            }
        }
    }

    /// Stops keeping pages of retired models, which only running requests still use.
    pub(super) fn let_retired_pages_go(&self) {
        let retired = std::mem::take(&mut self.tables.lock().retired_pages);
        for model in retired {
            if model.pages.want(PageResidency::None) {
                self.keeper.work_on(&model);
            }
        }
    }
}
