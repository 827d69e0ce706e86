//! Shares of the address space and of descriptors that passed files take.

use super::*;

const CAROL: u32 = 1003;

/// Sparse files cost nothing on disk, and each byte of one is an address. 64 of them once left no address for the daemon's memory.
#[test]
fn passed_files_take_no_more_addresses_and_descriptors_than_their_users_shares() {
    let dir = tempfile::tempdir().unwrap();
    let open = |id, name: &str, files, charge| {
        let own_vocabulary = crate::model::tokenizer::Tokenizers::default();
        Ok(Model::open_beside(id, name, files, &own_vocabulary, charge)?)
    };
    let store = Store::new(vec![dir.path().into()], passing(64), Box::new(open), Box::new(|_| ()));
    let pass = |uid, number: usize, bytes: u64| {
        let path = dir.path().join(format!("{number}"));
        copy_model(&path);
        File::options().write(true).open(&path).unwrap().set_len(bytes).unwrap();
        store.pass(uid, &format!("p{number}"), File::open(&path).unwrap()).map(drop)
    };
    let large = 1 << 40;
    let held = (0..16).take_while(|number| pass(ALICE, *number, large).is_ok()).count();
    assert_eq!(held, 7, "half of what users may have of 16 TiB");
    let error = pass(ALICE, 20, large).unwrap_err();
    assert!(error.to_string().contains("mapping of this file: this user's share"), "{error}");
    pass(ALICE, 21, 4 << 20).unwrap();
    assert_eq!((0..16).take_while(|number| pass(BOB, 30 + number, large).is_ok()).count(), 3, "of the rest");
    for number in 0..held {
        store.unload(ALICE, true, &format!("p{number}")).unwrap();
    }
    pass(ALICE, 22, large).unwrap();
    store.passed_descriptors().set(16);
    let held = (0..16).take_while(|number| pass(CAROL, 50 + number, 4 << 20).is_ok()).count();
    let error = pass(CAROL, 70, 4 << 20).unwrap_err();
    assert!(held < 3 && error.to_string().contains("no descriptor is left"), "{held}: {error}");
}
