//! Files that clients pass.

use super::*;

#[test]
fn a_passed_file_holds_no_memory_that_outlives_its_owner() {
    let f = fixture(|_| ());
    let model = std::fs::read(f.dir.path().join("tiny.gguf")).unwrap();
    let memory: File = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
    std::io::Write::write_all(&mut &memory, &model).unwrap();
    let reopened =
        || File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memory))).unwrap();
    let error = f.store.pass(ALICE, "mine", reopened()).unwrap_err();
    assert!(matches!(error, StoreError::InMemory { .. }), "{error}");
    f.store.allow_remote_files(true);
    f.store.pass(ALICE, "mine", reopened()).unwrap();
    f.store.allow_remote_files(false);
    // A file with a name stays its owner's, but its holes would be filled by the daemon.
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
    let path = dir.path().join("named.gguf");
    std::fs::write(&path, &model).unwrap();
    f.store.pass(ALICE, "named", File::open(&path).unwrap()).unwrap();
    let sparse = File::create(dir.path().join("holes.gguf")).unwrap();
    std::io::Write::write_all(&mut &sparse, &model[..4096]).unwrap();
    sparse.set_len(model.len() as u64).unwrap();
    let on_tmpfs = rustix::fs::fstatfs(&sparse).unwrap().f_type as u64 == 0x0102_1994;
    let error = f.store.pass(BOB, "holes", File::open(dir.path().join("holes.gguf")).unwrap()).unwrap_err();
    assert_eq!(matches!(error, StoreError::InMemory { .. }), on_tmpfs, "{error}");
}

#[test]
fn a_passed_file_in_memory_goes_with_its_last_name() {
    let f = fixture(|_| ());
    let model = std::fs::read(f.dir.path().join("tiny.gguf")).unwrap();
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
    if rustix::fs::statfs(dir.path()).unwrap().f_type as u64 != 0x0102_1994 {
        return; // no file system in memory
    }
    let (path, other) = (dir.path().join("a.gguf"), dir.path().join("b.gguf"));
    std::fs::write(&path, &model).unwrap();
    std::fs::hard_link(&path, &other).unwrap();
    let pass = |uid, name: &str| f.store.pass(uid, name, File::open(&path).unwrap()).unwrap().0;
    let (lease, _) = (pass(ALICE, "one"), pass(ALICE, "two"));
    drop(pass(BOB, "his"));
    assert!(f.store.has_files_in_memory());
    std::fs::remove_file(&path).unwrap();
    assert_eq!(f.store.unload_nameless(), 0, "it has another name");
    std::fs::remove_file(&other).unwrap();
    assert_eq!(f.store.unload_nameless(), 3, "all names of all users");
    assert!(f.store.passed().is_empty());
    assert!(matches!(f.store.acquire(ALICE, "one"), Err(StoreError::NotFound { .. })));
    assert!(lease.model().files.check_unchanged().is_ok(), "a request in progress ends as always");
    drop(lease);
    assert_eq!((f.store.mapped(), f.store.unload_nameless()), (0, 0));
    assert!(!f.store.has_files_in_memory());
    // A file on a disk lives on without a name.
    let disk = f.dir.path().join("disk.gguf");
    std::fs::write(&disk, &model).unwrap();
    drop(f.store.pass(ALICE, "disk", File::open(&disk).unwrap()).unwrap());
    std::fs::remove_file(&disk).unwrap();
    f.store.unload_nameless();
    assert_eq!(f.store.passed().len(), 1);
}
