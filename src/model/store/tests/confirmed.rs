//! Leases that the kernel's caches confirm.

use super::*;

#[test]
fn a_mapped_model_is_leased_without_asking_and_a_changed_one_is_not() {
    let f = fixture(|_| {});
    let now = || f.store.acquire_now(ALICE, "tiny");
    assert!(now().is_none(), "not mapped yet");
    let (lease, _) = f.store.acquire(ALICE, "tiny").unwrap();
    let id = lease.model().id;
    if !confirm::caches_can_be_asked() {
        return;
    }
    let again = now().unwrap();
    assert_eq!((again.model().id, f.store.status(ALICE, "tiny").unwrap().in_use), (id, 2));
    drop((lease, again));
    assert_eq!(f.store.status(ALICE, "tiny").unwrap().in_use, 0);

    // Another file of the same size under the name.
    copy_model(&f.path("new"));
    std::fs::rename(f.path("new"), f.path("tiny.gguf")).unwrap();
    assert!(now().is_none());
    let (replaced, mapped_now) = f.store.acquire(ALICE, "tiny").unwrap();
    assert!(mapped_now && replaced.model().id != id);
    assert_eq!(now().unwrap().model().id, replaced.model().id);

    f.store.unload(ALICE, true, "tiny").unwrap();
    assert!(now().is_none(), "its requests finish, and the next one maps it again");
    std::fs::remove_file(f.path("tiny.gguf")).unwrap();
    assert!(now().is_none());
    assert!(matches!(f.store.acquire(ALICE, "tiny"), Err(StoreError::NotFound { .. })));
}
