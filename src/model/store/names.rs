//! Lists the names of mapped models.

use std::sync::Arc;

use super::{Model, ModelId, Store};

/// A file passed by a client, with its name for that uid.
#[derive(Clone, Debug)]
pub struct Passed {
    /// Uid of the client that passed it.
    pub uid: u32,
    /// Name for that uid.
    pub name: String,
    /// The mapped model.
    pub model: Arc<Model>,
}

impl Store {
    /// All files passed by clients, ordered by uid and name.
    pub fn passed(&self) -> Vec<Passed> {
        self.tables.lock().all_passed()
    }

    /// All names of mapped models. The uid is `None` for a directory's name.
    pub fn mapped_names(&self) -> Vec<(Option<u32>, String, ModelId)> {
        self.tables.lock().mapped_names()
    }

    /// Number of mapped models that this user has a name for.
    pub fn mapped_for(&self, uid: u32) -> usize {
        let names = self.mapped_names().into_iter();
        let own = names.filter(|(of, ..)| of.is_none_or(|of| of == uid)).map(|(.., id)| id);
        own.collect::<std::collections::BTreeSet<_>>().len()
    }

    /// All names locked by [`Store::pin`]. The uid is as in [`Store::mapped_names`].
    pub fn pinned_names(&self) -> Vec<(Option<u32>, String)> {
        self.tables.lock().pinned_names()
    }
}
