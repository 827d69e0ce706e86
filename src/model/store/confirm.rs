//! A lease on a mapped model without asking any file system, for runtime threads.
//!
//! To open a file takes a thread that may be lost, and two thread hops cost 50 us. Nearly all requests name a model that is
//! mapped already. The kernel's caches alone then tell whether the name still means that file. `RESOLVE_CACHED` looks a
//! path up without a disk or a server. A descriptor made by `O_PATH` is closed without a word to either. Whatever the
//! caches do not tell at once is left to [`Store::acquire`].

use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Statx, StatxFlags};

use super::{Identity, Lease, Source, Store};
use crate::model::Model;
use crate::tensor::FileIdentity;

impl Store {
    /// A lease on the model that this name means, if it is mapped, whole, and of an unchanged local file. `None` says
    /// nothing: ask [`Store::acquire`]. Never waits: one system call for a passed file, three for each other one.
    pub fn acquire_now(self: &Arc<Self>, uid: u32, name: &str) -> Option<Lease> {
        let source = self.tables.lock().resolve(uid, name)?;
        let model = match source {
            Source::Passed(id) => {
                let model = self.tables.lock().ready(id)?;
                model.files.are_as_mapped().then_some(())?;
                self.tables.lock().revive_and_use(id).then_some(model)?
            }
            Source::Directory(entry) => {
                let (identity, model) = self.tables.lock().usable(name)?;
                // A copy's original is asked for, by a thread that may be lost.
                let local = model.copied.is_none() && model.files.are_as_mapped();
                (local && are_still(&entry.paths, &identity)).then_some(())?;
                self.tables.lock().use_again(name, &identity, &model).then_some(model)?
            }
        };
        let lease = Lease { store: Arc::clone(self), model };
        self.keep_pages(uid, name, lease.model());
        Some(lease)
    }
}

impl super::Tables {
    /// The file that a directory's name meant last, and its mapping. `None` unless a request may simply use it.
    fn usable(&self, name: &str) -> Option<(Identity, Arc<Model>)> {
        let identity = self.seen_at(name)?;
        let model = self.ready(self.current_id(identity)?)?;
        Some((identity.clone(), model))
    }

    /// Adds a request to that mapping if nothing changed since [`usable`](Self::usable).
    fn use_again(&mut self, name: &str, identity: &Identity, model: &Arc<Model>) -> bool {
        let same = self.seen_at(name) == Some(identity) && self.current_id(identity) == Some(model.id);
        same && self.revive_and_use(model.id)
    }
}

/// True if the kernel has these paths in its caches, and they lead to those files.
fn are_still(paths: &[std::path::PathBuf], identity: &Identity) -> bool {
    let files = identity.0.iter();
    paths.len() == files.len()
        && paths.iter().zip(files).all(|(path, file)| identity_now(path) == Some(*file))
}

/// The identity of the file that a path leads to, if that takes neither disk nor server. A file of another file system may
/// have old sizes and times here, because its server is not asked. Its device tells it apart from a local file.
fn identity_now(path: &Path) -> Option<FileIdentity> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::CACHED).ok()?;
    let wanted =
        StatxFlags::TYPE | StatxFlags::INO | StatxFlags::SIZE | StatxFlags::MTIME | StatxFlags::CTIME;
    let how = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(&file, c"", how, wanted).ok()?;
    StatxFlags::from_bits_retain(stat.stx_mask).contains(wanted).then(|| identity_of(&stat))
}

fn identity_of(stat: &Statx) -> FileIdentity {
    let ns = |time: &rustix::fs::StatxTimestamp| {
        i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
    };
    FileIdentity {
        dev: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
        ino: stat.stx_ino,
        size: stat.stx_size,
        mtime_ns: ns(&stat.stx_mtime),
        ctime_ns: ns(&stat.stx_ctime),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::tensor::MappedFile;

    #[test]
    fn both_ways_to_look_at_a_file_tell_the_same() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "some bytes").unwrap();
        let mapped = MappedFile::inspect(&File::open(file.path()).unwrap()).unwrap();
        // A kernel before 5.12 has no look-up in its caches alone.
        let Some(now) = identity_now(file.path()) else { return };
        assert_eq!(now, mapped);
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o640)).unwrap();
        let touched = identity_now(file.path()).unwrap();
        assert_eq!((touched.ino, touched.size, touched.mtime_ns), (mapped.ino, mapped.size, mapped.mtime_ns));
        assert!(touched.ctime_ns >= mapped.ctime_ns);
        assert_eq!(identity_now(&file.path().with_extension("none")), None);
    }
}
