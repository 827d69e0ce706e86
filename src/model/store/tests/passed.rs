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
