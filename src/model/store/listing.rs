//! Facts of a name and its model, as clients are told them.

use std::sync::Arc;
use std::time::Duration;

use super::tables::Slot;
use crate::model::Model;
use crate::tensor::MapError;

/// State of a name's model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelStatus {
    /// A name and a file; nothing is read yet.
    Registered,
    /// Ready for requests.
    Mapped,
    /// Unloaded while requests run on it.
    Draining,
    /// Its file lost bytes or changed while it was mapped.
    Poisoned,
    /// The file cannot be a model, it failed to open, or its file system does not answer.
    Unusable,
}

/// A name and the state of its model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The model's name for the asking uid.
    pub name: String,
    /// State of the model.
    pub status: ModelStatus,
    /// Total size of the files.
    pub file_bytes: u64,
    /// Architecture; empty while not mapped.
    pub architecture: String,
    /// Requests that use the model or wait for its mapping.
    pub in_use: u32,
    /// The reason when poisoned or unusable; otherwise empty.
    pub reason: String,
}

/// A listing from the tables alone. The file itself is checked later, without the lock.
pub(super) struct InTables {
    pub listing: Listing,
    pub model: Option<Arc<Model>>,
    /// For a directory's name: the device number of its file's mount, if known.
    pub directory: Option<Option<u64>>,
}

impl InTables {
    /// Completes the listing with the file's current state. Asks no server: what is mapped is a local file or a copy.
    /// `silent` tells how long a thread has waited for a name or a device.
    pub fn look_at_file(self, silent: impl Fn(&str, Option<u64>) -> Option<Duration>) -> Listing {
        let Self { mut listing, model, directory } = self;
        if let Some(waited) = directory.and_then(|device| silent(&listing.name, device)) {
            listing.status = ModelStatus::Unusable;
            listing.reason = format!("its file system has not answered for {} s", waited.as_secs());
            return listing;
        }
        let Some(model) = model else { return listing };
        let whole = model.files.check_poison().and_then(|()| model.files.check_unchanged());
        if let Err(error @ (MapError::Poisoned | MapError::Changed)) = whole {
            listing.status = ModelStatus::Poisoned;
            listing.reason = error.to_string();
        }
        listing
    }

    pub fn of_slot(name: &str, slot: &Slot) -> Self {
        let opening = Self::unmapped(name, slot.bytes(), ModelStatus::Registered, "");
        let listing = Listing { in_use: slot.in_use, ..opening.listing };
        let Some(model) = slot.model() else { return Self { listing, ..opening } };
        let status = if slot.retired { ModelStatus::Draining } else { ModelStatus::Mapped };
        let architecture = model.plan.architecture.clone();
        let listing = Listing { status, architecture, ..listing };
        Self { listing, model: Some(Arc::clone(model)), directory: None }
    }

    pub fn unmapped(name: &str, file_bytes: u64, status: ModelStatus, reason: &str) -> Self {
        let listing = Listing {
            name: name.to_owned(),
            status,
            file_bytes,
            architecture: String::new(),
            in_use: 0,
            reason: reason.to_owned(),
        };
        Self { listing, model: None, directory: None }
    }
}
