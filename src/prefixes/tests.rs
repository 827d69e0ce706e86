use std::sync::Arc;

use super::*;

fn model(path: &Path) -> Arc<Model> {
    let file = fs::File::open(path).unwrap();
    Arc::new(Model::open(crate::model::ModelId(1), "story", vec![file]).unwrap())
}

fn kept_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/tinystories-260k-f32.gguf")
}

fn prefixes(uid: Option<u32>, pages: u32, token: u32) -> Prefixes {
    let page = |i: u32| PrefixPage {
        after: i.checked_sub(1),
        tokens: vec![token; KV_PAGE_TOKENS],
        bytes: vec![i as u8; 1000],
        state: None,
    };
    Prefixes { uid, layout: "cpu f16".to_owned(), pages: (0..pages).map(page).collect() }
}

/// Takes all of the pages that a prompt begins with.
fn take(store: &PrefixStore, key: Key, prompt: &[u32]) -> Option<Prefixes> {
    let mut offer = store.read(key, prompt)?;
    let prefixes = offer.take();
    store.given(&offer, u32::MAX);
    Some(prefixes)
}

/// A store with one file of three pages, in a folder that lives as long as the first value.
fn with_three_pages() -> (tempfile::TempDir, Arc<PrefixStore>, Key, Vec<u32>) {
    let dir = tempfile::tempdir().unwrap();
    let model = model(&kept_model());
    let store = PrefixStore::open(dir.path(), 1 << 20, Reuse::User).unwrap();
    store.keep(&model, prefixes(Some(1000), 3, 7));
    store.finish();
    let key = store.key(1000, &model);
    (dir, store, key, vec![7; 3 * KV_PAGE_TOKENS])
}

#[test]
fn pages_without_room_stay_in_the_file_and_its_index_is_read_once() {
    let (_dir, store, key, prompt) = with_three_pages();
    let index = |store: &PrefixStore| {
        let files = store.files.lock();
        Arc::as_ptr(&files.get(&key).unwrap().opened.as_ref().unwrap().known.index)
    };
    let first = store.read(key, &prompt).unwrap();
    let known = index(&store);
    store.given(&first, 1);
    assert!(!store.has(&key, &prompt), "it is not offered again at once");
    store.files.lock().get_mut(&key).unwrap().refused_until = Some(Instant::now());
    assert!(
        store.has(&key, &prompt) && !store.has(&key, &prompt[..KV_PAGE_TOKENS]),
        "one page of three was given"
    );
    let again = store.read(key, &prompt).unwrap();
    assert_eq!((index(&store), again.prefixes.pages.len()), (known, 3));
    // An offer of a file that another one replaced says nothing about that one.
    store.given(&Offer { number: again.number + 1, ..store.read(key, &prompt).unwrap() }, 3);
    assert_eq!(store.sums().0, 1);
    store.given(&again, 3);
    assert_eq!((store.sums().0, store.read(key, &prompt).map(|_| ())), (0, None));
}

#[test]
fn each_prompt_gets_the_last_state_that_it_begins_with() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(&kept_model());
    let store = PrefixStore::open(dir.path(), 1 << 20, Reuse::User).unwrap();
    let mut of = prefixes(Some(1000), 4, 7);
    for (page, state) in [(1, 11), (3, 13)] {
        of.pages[page].state = Some(vec![state; 50]);
    }
    let all_bytes = 4 * 1000 + 2 * 50;
    store.keep(&model, of);
    store.finish();
    assert!(store.sums().1 > all_bytes && store.sums().1 < all_bytes + 1000, "{:?}", store.sums());
    let (key, long) = (store.key(1000, &model), vec![7; 4 * KV_PAGE_TOKENS]);
    let short = &long[..3 * KV_PAGE_TOKENS];
    let states = |prefixes: Prefixes| {
        prefixes.pages.into_iter().filter_map(|page| page.state).map(|state| state[0]).collect::<Vec<_>>()
    };
    assert_eq!(take(&store, key, &long).map(states), Some(vec![13]));
    assert!(!store.has(&key, &long) && store.has(&key, short), "a state before is for another prompt");
    let again = take(&store, key, short).unwrap();
    assert_eq!((again.pages.len(), states(again)), (2, vec![11]));
    assert_eq!(store.sums(), (0, 0), "all of it was given back");
}

#[test]
fn an_index_is_read_again_where_the_file_changed() {
    let (_dir, store, key, prompt) = with_three_pages();
    let path = store.path(&key);
    assert!(store.read(key, &prompt).is_some());
    let mut bytes = fs::read(&path).unwrap();
    bytes[60] ^= 1; // of the index
    fs::remove_file(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    assert!(store.read(key, &prompt).is_none() && !path.exists(), "the changed index was found");
}

#[test]
fn a_later_store_gives_back_what_an_earlier_one_kept_once() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(&kept_model());
    let store = PrefixStore::open(dir.path(), 1 << 20, Reuse::User).unwrap();
    store.keep(&model, prefixes(Some(1000), 3, 7));
    store.keep(&model, prefixes(Some(1001), 2, 8));
    store.finish();
    store.keep(&model, prefixes(Some(1002), 2, 8)); // too late, and of no harm
    drop(store);

    let store = PrefixStore::open(dir.path(), 1 << 20, Reuse::User).unwrap();
    assert_eq!(store.sums().0, 2);
    let key = |uid| store.key(uid, &model);
    let prompt = |pages: usize| vec![7; pages * KV_PAGE_TOKENS];
    // Two of three pages, then all: those that were given back may be gone since.
    assert!(store.has(&key(1000), &prompt(2)) && !store.has(&key(1002), &prompt(2)));
    assert_eq!(take(&store, key(1000), &prompt(2)), Some(prefixes(Some(1000), 2, 7)));
    assert!(!store.has(&key(1000), &prompt(2)) && store.has(&key(1000), &prompt(3)));
    assert_eq!(take(&store, key(1000), &[8; 40]), None, "nothing begins so");
    assert_eq!((store.sums().0, take(&store, key(1000), &prompt(4))), (2, Some(prefixes(Some(1000), 3, 7))));
    assert!(!store.has(&key(1000), &prompt(3)));
    assert_eq!((take(&store, key(1000), &prompt(3)), take(&store, key(1002), &prompt(3))), (None, None));
    assert_eq!(store.sums().0, 1);
    store.finish();
    let left = fs::read_dir(dir.path().join("1000")).unwrap().count();
    assert_eq!(left, 0, "the file went");
}

#[test]
fn a_damaged_file_and_one_of_another_user_are_removed_and_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(&kept_model());
    let store = PrefixStore::open(dir.path(), 1 << 20, Reuse::User).unwrap();
    for uid in [1000, 1001] {
        store.keep(&model, prefixes(Some(uid), 3, 7));
    }
    store.finish();
    let key = |uid| Key { uid: Some(uid), model: digest(&model) };
    let (mine, theirs) = (store.path(&key(1000)), store.path(&key(1001)));
    let mut bytes = fs::read(&mine).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1; // of the third page
    fs::write(&mine, bytes).unwrap();
    let prompt = |pages: usize| vec![7; pages * KV_PAGE_TOKENS];
    assert_eq!(take(&store, key(1000), &prompt(2)), Some(prefixes(Some(1000), 2, 7)), "it is not of these");
    assert_eq!(take(&store, key(1000), &prompt(3)), None);
    assert!(!mine.exists() && !store.has(&key(1000), &prompt(2)));
    // A user who could move files would still get nothing of another's.
    fs::rename(&theirs, &mine).unwrap();
    drop(store);
    let store = PrefixStore::open(dir.path(), 1 << 20, Reuse::User).unwrap();
    assert_eq!((store.sums().0, take(&store, key(1000), &prompt(2))), (1, None));
    assert!(!mine.exists());
    store.finish();
}

#[test]
fn pages_that_were_not_given_back_stay_when_more_are_kept_and_go_when_they_are_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(&kept_model());
    let open = || PrefixStore::open(dir.path(), 9_000, Reuse::User).unwrap();
    let key = |store: &PrefixStore| store.key(1000, &model);
    for token in [7, 8] {
        let store = open();
        store.keep(&model, prefixes(Some(1000), 3, token));
        store.finish();
    }
    let store = open();
    assert_eq!(store.sums().0, 1);
    for (token, pages) in [(7, 3), (8, 2)] {
        let found = take(&store, key(&store), &vec![token; pages * KV_PAGE_TOKENS]);
        assert_eq!(found, Some(prefixes(Some(1000), pages as u32, token)));
    }
    // The newer pages have room, and of the others as many as fit.
    store.keep(&model, prefixes(Some(1000), 4, 9));
    store.finish();
    let store = open();
    assert!(store.sums().1 <= 9_000, "{:?}", store.sums());
    let found = |token: u32| {
        let found = take(&store, key(&store), &vec![token; 4 * KV_PAGE_TOKENS]);
        found.map_or(0, |found| found.pages.len())
    };
    assert_eq!([9, 8, 7].map(found), [4, 3, 0]);
    assert_eq!(store.forget(Some(&model)), usize::from(store.sums().0 == 1));
    assert_eq!(found(8), 0);
    store.finish();
}

#[test]
fn the_oldest_file_of_the_user_with_most_goes_first() {
    let dir = tempfile::tempdir().unwrap();
    // Copies are other models: other files.
    let models: Vec<_> = (0..4)
        .map(|i| {
            let path = dir.path().join(format!("{i}.gguf"));
            fs::copy(kept_model(), &path).unwrap();
            model(&path)
        })
        .collect();
    let store = PrefixStore::open(&dir.path().join("kept"), 10_000, Reuse::User).unwrap();
    store.keep(&models[0], prefixes(Some(1), 1, 7));
    for model in &models[..3] {
        store.keep(model, prefixes(Some(2), 2, 7));
    }
    store.keep(&models[3], prefixes(Some(3), 2, 7));
    store.finish();
    let has = |uid, at: usize| store.path(&store.key(uid, &models[at])).exists();
    let there = [has(1, 0), has(2, 0), has(2, 1), has(2, 2), has(3, 3)];
    assert_eq!(there, [true, false, true, true, true]);
    assert!(store.sums().1 <= 10_000, "{:?}", store.sums());
    // A lower limit, and an order to forget.
    let store = PrefixStore::open(&dir.path().join("kept"), 5_000, Reuse::User).unwrap();
    assert!(store.sums().1 <= 5_000 && store.sums().0 > 0, "{:?}", store.sums());
    assert_eq!(store.forget(Some(&models[0])), 1);
    let left = store.sums().0;
    assert_eq!((store.forget(None), store.sums()), (left, (0, 0)));
    store.finish();
}

#[test]
fn as_many_pages_are_taken_as_a_file_within_the_limit_has() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(&kept_model());
    for limit in [0, 100, 3_000, 10_000, 100_000] {
        let store = PrefixStore::open(dir.path(), limit, Reuse::User).unwrap();
        let room = store.room(1000);
        if room > 0 {
            store.keep(&model, prefixes(Some(1000), room as u32, 7));
        }
        store.finish();
        let (files, bytes) = store.sums();
        assert!(files == usize::from(room > 0) && bytes <= limit, "{bytes} of {limit}");
        assert!(bytes + 2 * 1140 > limit || limit < 1500, "{bytes} of {limit}: room for more");
        let again = PrefixStore::open(dir.path(), limit, Reuse::User).unwrap();
        assert_eq!(again.sums(), (files, bytes), "the next daemon finds it within the limit");
        again.finish();
    }
}

#[test]
fn foreign_files_stay() {
    let dir = tempfile::tempdir().unwrap();
    for folder in ["1000", "all", "else"] {
        fs::create_dir(dir.path().join(folder)).unwrap();
        fs::write(dir.path().join(folder).join("letter.txt"), "dear").unwrap();
        fs::write(dir.path().join(folder).join("x.part"), "half").unwrap();
    }
    let store = PrefixStore::open(dir.path(), 1, Reuse::User).unwrap();
    store.finish();
    assert_eq!((store.sums().0, store.forget(None)), (0, 0));
    for (folder, parts) in [("1000", 1), ("all", 1), ("else", 2)] {
        assert_eq!(fs::read_dir(dir.path().join(folder)).unwrap().count(), parts, "{folder}");
    }
}
