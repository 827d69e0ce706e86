//! Names that lead to mapped models, for those who list them.

use std::sync::Arc;

use super::{Model, ModelId, Store};

/// A file that a client passed, under the name that it has for that uid.
#[derive(Clone, Debug)]
pub struct Passed {
    /// Who passed it.
    pub uid: u32,
    /// What it is called for that uid.
    pub name: String,
    /// What it is.
    pub model: Arc<Model>,
}

impl Store {
    /// All files that clients passed, by uid and name.
    pub fn passed(&self) -> Vec<Passed> {
        self.tables.lock().all_passed()
    }

    /// All names of mapped models: a uid's own, and those of the directories, which have none.
    pub fn mapped_names(&self) -> Vec<(Option<u32>, String, ModelId)> {
        self.tables.lock().mapped_names()
    }

    /// All names that [`Store::pin`] has locked: as in [`Store::mapped_names`].
    pub fn pinned_names(&self) -> Vec<(Option<u32>, String)> {
        self.tables.lock().pinned_names()
    }
}
