//! Passed files in memory that lost their last name.
//!
//! Such a file is its owner's while it has a name: whoever looks for memory finds it there. After that the daemon alone would hold it,
//! for nobody, and also when its owner has left.

use super::Store;

impl Store {
    /// True if a client has passed a file in memory.
    pub fn has_files_in_memory(&self) -> bool {
        !self.tables.lock().in_memory.is_empty()
    }

    /// Unloads passed files in memory that have no name any more; returns how many. Answers in progress end as after
    /// [`Store::unload`]. Costs one `fstat` for each such file.
    pub fn unload_nameless(&self) -> usize {
        let all = self.tables.lock().all_in_memory();
        let nameless = all.into_iter().filter(|model| !model.files.mappings().all(|file| file.has_name()));
        let mut count = 0;
        for model in nameless.collect::<Vec<_>>() {
            let names = self.tables.lock().passed_names(model.id);
            for (uid, name) in names {
                tracing::info!(uid, name, "a passed file in memory has no name any more and is unloaded");
                count += usize::from(self.unload(uid, false, &name).is_ok());
            }
        }
        count
    }
}
