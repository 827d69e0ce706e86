//! A lease on a mapped model without asking any file system, for runtime threads.
//!
//! To open a file takes a thread that may be lost, and two thread hops cost 50 us. Nearly all requests name a model that is
//! mapped already. The kernel's caches alone then tell whether the name still means that file. `RESOLVE_CACHED` looks a
//! path up without a disk or a server. A descriptor made by `O_PATH` is closed without a word to either. Whatever the
//! caches do not tell at once is left to [`Store::acquire`].

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Statx, StatxFlags};

use super::{Identity, Lease, Source, Store};
use crate::model::Model;
use crate::tensor::FileIdentity;

impl Store {
    /// A lease on the model that this name means, if it is mapped, whole, and of an unchanged local file. `None` says
    /// nothing: ask [`Store::acquire`]. Never waits: one system call for a passed file, three for each other one.
    pub fn acquire_now(self: &Arc<Self>, uid: u32, name: &str) -> Option<Lease> {
        let known = self.tables.lock().known(uid, name)?;
        let Known { model, listed } = &known;
        let same = match listed {
            None => model.files.are_as_mapped(),
            // A copy's original is asked for, by a thread that may be lost.
            Some((paths, identity)) => {
                model.copied.is_none() && model.files.check_poison().is_ok() && are_still(paths, identity)
            }
        };
        if !same || !self.tables.lock().use_again(name, &known) {
            return None;
        }
        let model = known.model;
        let lease = Lease { store: Arc::clone(self), model };
        self.keep_pages(uid, name, lease.model());
        Some(lease)
    }
}

/// The meaning of a name at its last request.
struct Known {
    model: Arc<Model>,
    /// Paths and identity of a directory's files; `None` for a passed file.
    listed: Option<(Vec<PathBuf>, Identity)>,
}

impl super::Tables {
    /// The mapping that a name meant last. `None` unless a request may simply use it.
    fn known(&self, uid: u32, name: &str) -> Option<Known> {
        match self.resolve(uid, name)? {
            Source::Passed(id) => Some(Known { model: self.ready(id)?, listed: None }),
            Source::Directory(entry) => {
                let identity = self.seen_at(name)?;
                let model = self.ready(self.current_id(identity)?)?;
                Some(Known { model, listed: Some((entry.paths, identity.clone())) })
            }
        }
    }

    /// Adds a request to that mapping if nothing changed since [`known`](Self::known).
    fn use_again(&mut self, name: &str, Known { model, listed }: &Known) -> bool {
        let same = listed.as_ref().is_none_or(|(_, identity)| {
            self.seen_at(name) == Some(identity) && self.current_id(identity) == Some(model.id)
        });
        same && self.revive_and_use(model.id)
    }
}

/// True if the kernel has these paths in its caches, and they lead to those files.
fn are_still(paths: &[PathBuf], identity: &Identity) -> bool {
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

/// False on a kernel before 5.12, and where a filter forbids the call: then nothing is ever confirmed here.
#[cfg(test)]
pub(super) fn caches_can_be_asked() -> bool {
    rustix::fs::openat2(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::CACHED).is_ok()
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
        if !caches_can_be_asked() {
            return;
        }
        let now = identity_now(file.path()).unwrap();
        assert_eq!(now, mapped);
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o640)).unwrap();
        let touched = identity_now(file.path()).unwrap();
        assert_eq!((touched.ino, touched.size, touched.mtime_ns), (mapped.ino, mapped.size, mapped.mtime_ns));
        assert!(touched.ctime_ns >= mapped.ctime_ns);
        assert_eq!(identity_now(&file.path().with_extension("none")), None);
    }
}
