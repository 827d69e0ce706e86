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

    /// Unloads passed files in memory that have no name any more; returns how many names they had. Answers in progress end as after
    /// [`Store::unload`]. Costs one `fstat` for each such file.
    pub fn unload_nameless(&self) -> usize {
        let all = self.tables.lock().all_in_memory();
        let mut count = 0;
        for model in all.into_iter().filter(|model| !model.files.mappings().all(|file| file.has_name())) {
            let (names, gone) = self.tables.lock().unload_passed(model.id);
            self.tell(gone);
            for (uid, name) in &names {
                tracing::info!(uid, name, "a passed file in memory has no name any more and is unloaded");
            }
            count += names.len();
        }
        if count > 0 {
            self.want_pages();
        }
        count
    }
}
