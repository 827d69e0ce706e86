//! Which models' files are kept in memory: by configuration, by name on request, and what goes when memory is short.

use std::sync::Arc;

use super::{Model, NAMES_MAX, Store, StoreError};
use crate::model::pages::{HostPolicy, LockBudget, PagesReport, PagesState, Refusal, Residency};

impl Store {
    /// What is wanted from now on, also of models that are mapped. Returns at once; the pages come and go by and by.
    pub fn set_host_policy(&self, policy: HostPolicy) {
        self.keeper.budget.set_max(policy.lock_bytes_max);
        self.tables.lock().host = policy;
        let models = self.tables.lock().wanted_pages();
        for (model, wanted) in models {
            // Also what was refused: more may be allowed now.
            if model.pages.want(wanted) {
                self.keeper.work_on(&model);
            }
        }
    }

    /// Maps the models that the configuration names to be kept in memory.
    pub fn map_wanted(self: &Arc<Self>) {
        let models = self.tables.lock().host.models.clone();
        let uid = rustix::process::geteuid().as_raw();
        for (name, _) in models.iter().filter(|(_, residency)| **residency != Residency::None) {
            if let Err(error) = self.acquire(uid, name) {
                tracing::warn!("{name} is named in host.models and not there: {error}");
            }
        }
    }

    /// Locks the model of that name in memory, now and whenever it is mapped again, until [`Store::unpin`] or
    /// [`Store::unload`]; maps it if it was not. Returns before its pages are there: [`Store::pages`] tells how far that is
    /// or why it is refused. Again, it tries again what was refused.
    ///
    /// # Errors
    /// [`StoreError::NotAdministrator`], and as [`Store::acquire`].
    pub fn pin(self: &Arc<Self>, uid: u32, administrator: bool, name: &str) -> Result<(), StoreError> {
        if !administrator {
            return Err(StoreError::NotAdministrator { name: name.into() });
        }
        let (lease, _) = self.acquire(uid, name)?;
        if !self.tables.lock().pin(uid, name) {
            return Err(StoreError::Quota { limit: NAMES_MAX });
        }
        if lease.model().pages.want(Residency::Lock) {
            self.keeper.work_on(lease.model());
        }
        Ok(())
    }

    /// Takes [`Store::pin`] back; what the configuration wants stays. True when it was pinned.
    ///
    /// # Errors
    /// [`StoreError::NotAdministrator`].
    pub fn unpin(&self, uid: u32, administrator: bool, name: &str) -> Result<bool, StoreError> {
        if !administrator {
            return Err(StoreError::NotAdministrator { name: name.into() });
        }
        let was_pinned = self.tables.lock().unpin(uid, name);
        self.settle_pages();
        Ok(was_pinned)
    }

    /// The pages of the model that a name leads to; `None` while it is not mapped. Looks at no file.
    pub fn pages(&self, uid: u32, name: &str) -> Option<PagesReport> {
        Some(self.tables.lock().mapped_by(uid, name)?.pages.report())
    }

    /// How many models are to be locked and are not, and why the first of them is not.
    pub fn locks_refused(&self) -> (u32, Option<Refusal>) {
        let models = self.tables.lock().mapped_models();
        let refused = models.into_iter().filter_map(|model| match model.pages.report().state {
            PagesState::Refused(refusal) => Some(refusal),
            _ => None,
        });
        refused.fold((0, None), |(count, first), refusal| (count + 1, first.or(Some(refusal))))
    }

    /// What is locked for all models, and may be.
    pub fn lock_budget(&self) -> &LockBudget {
        &self.keeper.budget
    }

    /// Memory is short: lets go of the pages of all models that no request uses and that are not to be locked. How many
    /// models that were. Some milliseconds for each GiB that was in memory.
    pub fn give_idle_pages_back(&self) -> usize {
        let idle = self.tables.lock().idle();
        let given = |model: &Arc<Model>| {
            let given = !model.pages.wants_lock() && model.pages.give_back(&model.files).is_ok();
            usize::from(given)
        };
        idle.iter().map(given).sum()
    }

    /// A name led to `model`: what is wanted of it begins, if it has not.
    pub(super) fn keep_pages(&self, uid: u32, name: &str, model: &Arc<Model>) {
        let wanted = self.tables.lock().residency(uid, name);
        if model.pages.want_at_least(wanted) {
            self.keeper.work_on(model);
        }
    }

    /// Brings all mapped models to what is wanted of them by now.
    pub(super) fn settle_pages(&self) {
        let models = self.tables.lock().wanted_pages();
        for (model, wanted) in models {
            if model.pages.report().wanted != wanted && model.pages.want(wanted) {
                self.keeper.work_on(&model);
            }
        }
    }

    /// What only running requests use is not kept in memory for them.
    pub(super) fn let_retired_pages_go(&self) {
        let retired = std::mem::take(&mut self.tables.lock().retired_pages);
        for model in retired {
            if model.pages.want(Residency::None) {
                self.keeper.work_on(&model);
            }
        }
    }
}
