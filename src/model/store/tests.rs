//! Tests the store with real files: copies of the small model, in temporary directories.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::*;
use crate::model::pages::{HostPolicy, PageResidency, PagesReport, PagesState};
use crate::share::limits::{Limit, OfEveryUser, OfOneUser, Origin};
use crate::tensor::HostPages;

mod confirmed;
mod passed;
mod shares;

const ALICE: u32 = 1001;
const BOB: u32 = 1002;

struct Fixture {
    dir: tempfile::TempDir,
    store: Arc<Store>,
    opened: Arc<AtomicUsize>,
    gone: Arc<Mutex<Vec<ModelId>>>,
}

/// Limits by which each uid passes at most this many files.
fn passing(passed_models: u32) -> Arc<UserLimits> {
    UserLimits::new(OfEveryUser { passed_models, ..OfEveryUser::default() })
}

/// A store of one directory with a model `tiny`. `before` runs in each opening.
fn fixture(before: impl Fn(usize) + Send + Sync + 'static) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    copy_model(&dir.path().join("tiny.gguf"));
    let (opened, gone) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
    let (count, list) = (Arc::clone(&opened), Arc::clone(&gone));
    let open = move |id, name: &str, files, _charge| {
        before(count.fetch_add(1, Ordering::SeqCst));
        Ok(Model::open(id, name, files)?)
    };
    let store = Store::new(
        vec![dir.path().into()],
        passing(2),
        Box::new(open),
        Box::new(move |id| list.lock().push(id)),
    );
    store.rescan();
    Fixture { dir, store, opened, gone }
}

fn copy_model(to: &Path) {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/tinystories-260k-f32.gguf");
    std::fs::copy(model, to).unwrap();
}

impl Fixture {
    fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    fn opened(&self) -> usize {
        self.opened.load(Ordering::SeqCst)
    }

    fn status(&self, uid: u32, name: &str) -> Option<ModelStatus> {
        self.store.status(uid, name).map(|listing| listing.status)
    }
}

#[test]
fn ten_callers_at_once_open_a_model_once() {
    let f = fixture(|_| std::thread::sleep(Duration::from_millis(50)));
    let leases: Vec<(Lease, bool)> = std::thread::scope(|scope| {
        let callers: Vec<_> =
            (0..10).map(|_| scope.spawn(|| f.store.acquire(ALICE, "tiny").unwrap())).collect();
        callers.into_iter().map(|caller| caller.join().unwrap()).collect()
    });
    assert_eq!(f.opened(), 1);
    assert_eq!(leases.iter().filter(|(_, mapped_now)| *mapped_now).count(), 1);
    assert!(leases.windows(2).all(|pair| Arc::ptr_eq(pair[0].0.model(), pair[1].0.model())));
    assert_eq!(f.store.status(ALICE, "tiny").unwrap().in_use, 10);
}

#[test]
fn a_panic_while_opening_fails_its_callers_and_the_next_request_tries_again() {
    let f = fixture(|call| {
        if call == 0 {
            std::thread::sleep(Duration::from_millis(50));
            panic!("a fault in the parser");
        }
    });
    let errors: Vec<StoreError> = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..4).map(|_| scope.spawn(|| f.store.acquire(ALICE, "tiny"))).collect();
        callers.into_iter().filter_map(|caller| caller.join().unwrap().err()).collect()
    });
    assert!(!errors.is_empty());
    for error in &errors {
        let StoreError::Open { source, .. } = error else { panic!("{error}") };
        assert!(
            matches!(&**source, OpenError::Panicked(text) if text == "a fault in the parser"),
            "{source}"
        );
    }
    f.store.acquire(ALICE, "tiny").unwrap();
    assert_eq!(f.status(ALICE, "tiny"), Some(ModelStatus::Mapped));
}

#[test]
fn a_file_that_appears_is_found_and_one_that_goes_is_not() {
    let f = fixture(|_| ());
    assert!(matches!(f.store.acquire(ALICE, "new"), Err(StoreError::NotFound { .. })));
    copy_model(&f.path("new.gguf"));
    f.store.acquire(ALICE, "new").unwrap();
    std::fs::remove_file(f.path("new.gguf")).unwrap();
    assert!(matches!(f.store.acquire(ALICE, "new"), Err(StoreError::NotFound { .. })));
    assert_eq!(f.gone.lock().len(), 1, "its mapping went with it");
    assert_eq!(f.store.list(ALICE).len(), 1);
}

#[test]
fn a_broken_file_is_refused_listed_with_its_reason_and_works_once_mended() {
    let f = fixture(|_| ());
    let whole = std::fs::read(f.path("tiny.gguf")).unwrap();
    std::fs::write(f.path("tiny.gguf"), &whole[..whole.len() / 2]).unwrap();
    let error = f.store.acquire(ALICE, "tiny").unwrap_err();
    assert!(error.to_string().contains("incomplete or damaged"), "{error}");
    let listing = f.store.status(ALICE, "tiny").unwrap();
    assert_eq!(listing.status, ModelStatus::Unusable);
    assert!(listing.reason.contains("incomplete or damaged"));
    std::fs::write(f.path("tiny.gguf"), &whole).unwrap();
    f.store.acquire(ALICE, "tiny").unwrap();
    assert_eq!(f.status(ALICE, "tiny"), Some(ModelStatus::Mapped));
}

#[test]
fn a_replaced_file_is_a_new_model_and_requests_finish_on_the_old_one() {
    let f = fixture(|_| ());
    let (old, _) = f.store.acquire(ALICE, "tiny").unwrap();
    copy_model(&f.path("next"));
    std::fs::rename(f.path("next"), f.path("tiny.gguf")).unwrap();
    let (new, mapped_now) = f.store.acquire(ALICE, "tiny").unwrap();
    assert!(mapped_now && old.model().id != new.model().id);
    assert!(old.model().files.check_unchanged().is_ok(), "what was mapped is still whole");
    assert!(f.gone.lock().is_empty());
    let id = old.model().id;
    drop(old);
    assert_eq!(*f.gone.lock(), [id]);
    assert_eq!(f.store.mapped(), 1);
}

#[test]
fn a_file_changed_in_place_is_told_from_one_that_only_got_another_name() {
    let f = fixture(|_| ());
    let (lease, _) = f.store.acquire(ALICE, "tiny").unwrap();
    std::fs::hard_link(f.path("tiny.gguf"), f.path("other")).unwrap();
    std::fs::rename(f.path("tiny.gguf"), f.path("renamed")).unwrap();
    assert!(lease.model().files.check_unchanged().is_ok(), "links and names are no content");
    let file = std::fs::OpenOptions::new().append(true).open(f.path("renamed")).unwrap();
    file.set_len(file.metadata().unwrap().len() + 1).unwrap();
    assert!(lease.model().files.check_unchanged().is_err());
}

#[test]
fn an_unloaded_model_drains_and_is_mapped_again_when_asked_for() {
    let f = fixture(|_| ());
    let (lease, _) = f.store.acquire(ALICE, "tiny").unwrap();
    for uid in [ALICE, BOB] {
        // Also for the user that asked first: a directory's model belongs to nobody.
        assert!(matches!(f.store.unload(uid, false, "tiny"), Err(StoreError::NotYours { .. })));
    }
    assert_eq!(f.store.unload(ALICE, true, "tiny").unwrap(), Unloaded { was_mapped: true, in_use: 1 });
    assert_eq!(f.status(ALICE, "tiny"), Some(ModelStatus::Draining));
    // The same file again: the draining mapping serves it, and no second mapping is made.
    let (again, mapped_now) = f.store.acquire(BOB, "tiny").unwrap();
    assert!(!mapped_now && Arc::ptr_eq(again.model(), lease.model()));
    assert_eq!(f.status(ALICE, "tiny"), Some(ModelStatus::Mapped));
    assert_eq!(f.store.unload(0, true, "tiny").unwrap().in_use, 2);
    drop((lease, again));
    assert_eq!((f.gone.lock().len(), f.store.mapped()), (1, 0));
    assert_eq!(f.status(ALICE, "tiny"), Some(ModelStatus::Registered));
    assert_eq!(f.store.unload(ALICE, true, "tiny").unwrap(), Unloaded { was_mapped: false, in_use: 0 });
}

#[test]
fn a_passed_file_shares_the_mapping_and_its_name_is_its_uids_alone() {
    let f = fixture(|_| ());
    let file = || File::open(f.path("tiny.gguf")).unwrap();
    let (of_directory, _) = f.store.acquire(ALICE, "tiny").unwrap();
    let (passed, mapped_now) = f.store.pass(ALICE, "mine", file()).unwrap();
    assert!(!mapped_now && Arc::ptr_eq(of_directory.model(), passed.model()));
    assert_eq!(f.opened(), 1);
    assert!(matches!(f.store.acquire(BOB, "mine"), Err(StoreError::NotFound { .. })));
    assert_eq!(f.store.list(BOB).len(), 1);
    assert_eq!(f.store.list(ALICE).len(), 2);
    drop((of_directory, passed));
    // The directory's name is unloaded; the passed one keeps the mapping.
    f.store.unload(ALICE, true, "tiny").unwrap();
    assert_eq!(f.store.mapped(), 1);
    f.store.unload(ALICE, false, "mine").unwrap();
    assert!(matches!(f.store.acquire(ALICE, "mine"), Err(StoreError::NotFound { .. })));
}

#[test]
fn an_unload_tells_what_its_own_mapping_waits_for() {
    let f = fixture(|_| ());
    let file = || File::open(f.path("tiny.gguf")).unwrap();
    let (running, _) = f.store.acquire(ALICE, "tiny").unwrap();
    drop(f.store.pass(BOB, "his", file()).unwrap());
    drop(f.store.pass(ALICE, "mine", file()).unwrap());
    let stays = Unloaded { was_mapped: true, in_use: 0 };
    assert_eq!(f.store.unload(ALICE, false, "mine").unwrap(), stays, "the directory's name has it");
    assert_eq!(f.status(ALICE, "mine"), None, "nothing of it drains");
    assert_eq!(f.store.unload(ALICE, true, "tiny").unwrap(), stays, "his name has it");
    assert_eq!(f.status(ALICE, "tiny"), Some(ModelStatus::Mapped));
    f.store.unload(BOB, false, "his").unwrap();
    let goes = Unloaded { was_mapped: true, in_use: 1 };
    assert_eq!(f.store.unload(ALICE, true, "tiny").unwrap(), goes);
    drop(running);
    assert_eq!(f.store.mapped(), 0);
}

#[test]
fn a_passed_model_is_listed_while_it_drains() {
    let f = fixture(|_| ());
    copy_model(&f.path("other"));
    let pass = || f.store.pass(ALICE, "mine", File::open(f.path("other")).unwrap()).unwrap().0;
    let running = pass();
    assert_eq!(f.store.unload(ALICE, false, "mine").unwrap(), Unloaded { was_mapped: true, in_use: 1 });
    let listed = f.store.list(ALICE);
    assert_eq!((listed[0].name.as_str(), listed[0].status), ("mine", ModelStatus::Draining));
    assert_eq!((listed[0].in_use, f.store.list(BOB).len()), (1, 1));
    assert!(matches!(f.store.acquire(ALICE, "mine"), Err(StoreError::NotFound { .. })));
    assert!(matches!(f.store.unload(ALICE, false, "mine"), Err(StoreError::NotFound { .. })));
    // Passing the file again revives the mapping.
    drop(pass());
    assert_eq!(f.status(ALICE, "mine"), Some(ModelStatus::Mapped));
    f.store.unload(ALICE, false, "mine").unwrap();
    drop(running);
    assert_eq!((f.status(ALICE, "mine"), f.store.list(ALICE).len()), (None, 1));
    assert_eq!(f.store.mapped(), 0);
    // Draining names have the same bound as serving names.
    let running = pass();
    for name in ["a", "b", "c"] {
        f.store.unload(ALICE, false, "mine").ok();
        drop(f.store.pass(ALICE, name, File::open(f.path("other")).unwrap()).unwrap());
        f.store.unload(ALICE, true, name).unwrap();
    }
    assert_eq!(f.store.list(ALICE).len(), 1 + 2);
    drop(running);
    assert_eq!(f.store.list(ALICE).len(), 1);
}

#[test]
fn a_mapped_file_that_changed_or_shrank_is_listed_as_such_at_once() {
    let f = fixture(|_| ());
    copy_model(&f.path("other"));
    drop(f.store.pass(ALICE, "mine", File::open(f.path("other")).unwrap()).unwrap());
    let told = || {
        let listing = f.store.list(ALICE).remove(0);
        (listing.name, listing.status, listing.reason)
    };
    assert_eq!(told(), ("mine".to_owned(), ModelStatus::Mapped, String::new()));
    let writer = File::options().write(true).open(f.path("other")).unwrap();
    writer.set_modified(std::time::UNIX_EPOCH).unwrap();
    let (_, status, reason) = told();
    assert_eq!(status, ModelStatus::Poisoned);
    assert!(reason.contains("changed on disk"), "{reason}");
    writer.set_len(20_000).unwrap();
    let (_, status, reason) = told();
    assert_eq!(status, ModelStatus::Poisoned);
    assert!(reason.contains("lost bytes"), "{reason}");
}

#[test]
fn passed_files_are_bounded_and_checked() {
    let f = fixture(|_| ());
    for name in ["a", "b", "c"] {
        copy_model(&f.path(name));
    }
    let file = |name: &str| File::open(f.path(name)).unwrap();
    f.store.pass(ALICE, "a", file("a")).unwrap();
    f.store.pass(ALICE, "b", file("b")).unwrap();
    let own = OfOneUser { passed_models: Some(1), ..OfOneUser::default() };
    f.store.users.request(ALICE, false, own);
    let error = f.store.pass(ALICE, "c", file("c")).unwrap_err();
    assert!(error.to_string().contains("an administrator set the limit of uid 1001 to 1"), "{error}");
    f.store.users.request(ALICE, true, OfOneUser::default());
    let limit = Limit { value: 2, origin: Origin::EveryUser };
    let refused = f.store.pass(ALICE, "c", file("c")).map(drop).unwrap_err();
    assert!(matches!(refused, StoreError::Quota { uid: ALICE, limit: found } if found == limit));
    f.store.pass(BOB, "c", file("c")).unwrap();
    f.store.pass(ALICE, "a", file("c")).unwrap();
    assert_eq!(f.gone.lock().len(), 1, "what `a` named before is gone");

    let writable = std::fs::OpenOptions::new().read(true).write(true).open(f.path("a")).unwrap();
    assert!(matches!(f.store.pass(ALICE, "a", writable), Err(StoreError::File { .. })));
    let directory = File::open(f.dir.path()).unwrap();
    assert!(matches!(f.store.pass(ALICE, "a", directory), Err(StoreError::File { .. })));
    assert!(matches!(f.store.pass(ALICE, "\n", file("a")), Err(StoreError::BadName { .. })));

    let grown = std::fs::OpenOptions::new().append(true).open(f.path("b")).unwrap();
    grown.set_len(grown.metadata().unwrap().len() + 1).unwrap();
    assert!(matches!(f.store.acquire(ALICE, "b"), Err(StoreError::Changed { .. })));
    grown.set_len(1000).unwrap();
    assert!(matches!(f.store.acquire(ALICE, "b"), Err(StoreError::Poisoned { .. })));
}

#[test]
fn a_passed_file_that_was_rewritten_is_refused_though_its_time_was_set_back() {
    use std::os::unix::fs::FileExt;
    let f = fixture(|_| ());
    copy_model(&f.path("mine"));
    let pass = || f.store.pass(ALICE, "mine", File::open(f.path("mine")).unwrap()).unwrap();
    let (lease, _) = pass();
    let writer = File::options().write(true).open(f.path("mine")).unwrap();
    let before = writer.metadata().unwrap().modified().unwrap();
    // The file system's clock ticks every 4 ms or so.
    std::thread::sleep(Duration::from_millis(30));
    writer.write_all_at(b"x", 100_000).unwrap();
    writer.set_modified(before).unwrap();
    assert!(lease.model().files.check_unchanged().is_ok(), "size and modification time are as before");
    assert!(matches!(f.store.acquire(ALICE, "mine"), Err(StoreError::Changed { .. })));
    let (again, mapped_now) = pass();
    assert!(mapped_now && again.model().id != lease.model().id);
    assert!(f.store.acquire(ALICE, "mine").is_ok());
}

#[test]
fn files_mapped_while_the_quota_filled_are_let_go() {
    let all_open = Barrier::new(4);
    let f = fixture(move |_| {
        all_open.wait();
    });
    let pass = |name: &str| {
        copy_model(&f.path(name));
        f.store.pass(ALICE, name, File::open(f.path(name)).unwrap())
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let callers = ["a", "b", "c", "d"].map(|name| scope.spawn(move || pass(name)));
        callers.into_iter().map(|caller| caller.join().unwrap()).collect()
    });
    let refused = results.iter().filter(|r| matches!(r, Err(StoreError::Quota { .. }))).count();
    assert_eq!((refused, f.store.mapped(), f.gone.lock().len()), (2, 2, 2));
    drop(results);
    assert_eq!(f.store.mapped(), 2, "what has a name stays");
}

/// A fixture whose first opening waits twice; the test acts between the two waits.
fn paused_fixture() -> (Fixture, Arc<Barrier>) {
    let pause = Arc::new(Barrier::new(2));
    let inside = Arc::clone(&pause);
    let f = fixture(move |call| {
        if call == 0 {
            inside.wait();
            inside.wait();
        }
    });
    (f, pause)
}

#[test]
fn a_file_replaced_while_it_is_opened_goes_with_its_last_request() {
    let (f, pause) = paused_fixture();
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| f.store.acquire(ALICE, "tiny").unwrap().0);
        pause.wait();
        copy_model(&f.path("next"));
        std::fs::rename(f.path("next"), f.path("tiny.gguf")).unwrap();
        f.store.acquire(ALICE, "tiny").unwrap();
        pause.wait();
        let old = caller.join().unwrap();
        assert_eq!((f.store.mapped(), f.gone.lock().len()), (2, 0));
        let id = old.model().id;
        drop(old);
        assert_eq!((f.store.mapped(), f.gone.lock().clone()), (1, vec![id]));
    });
}

#[test]
fn a_model_whose_name_vanishes_before_or_while_it_is_opened_goes_with_its_last_request() {
    let f = fixture(|_| ());
    let Some(Source::Directory(entry)) = f.store.tables.lock().resolve(ALICE, "tiny") else { panic!() };
    f.store.set_directories(Vec::new());
    f.store.rescan();
    let (lease, _) = f.store.acquire_entry(ALICE, "tiny", &entry).unwrap();
    drop(lease);
    assert_eq!((f.store.mapped(), f.gone.lock().len()), (0, 1));

    let (f, pause) = paused_fixture();
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| f.store.acquire(ALICE, "tiny").unwrap().0);
        pause.wait();
        f.store.set_directories(Vec::new());
        f.store.rescan();
        pause.wait();
        drop(caller.join().unwrap());
    });
    assert_eq!((f.store.mapped(), f.gone.lock().len()), (0, 1));
}

#[test]
fn a_model_unloaded_while_it_is_opened_serves_who_waits_and_goes_with_them() {
    let (f, pause) = paused_fixture();
    let leases: Vec<Lease> = std::thread::scope(|scope| {
        let callers: Vec<_> =
            (0..3).map(|_| scope.spawn(|| f.store.acquire(ALICE, "tiny").unwrap().0)).collect();
        pause.wait();
        while f.store.status(ALICE, "tiny").unwrap().in_use < 3 {
            std::thread::yield_now();
        }
        assert_eq!(f.store.unload(ALICE, true, "tiny").unwrap(), Unloaded { was_mapped: true, in_use: 3 });
        pause.wait();
        callers.into_iter().map(|caller| caller.join().unwrap()).collect()
    });
    assert_eq!((f.opened(), f.status(ALICE, "tiny")), (1, Some(ModelStatus::Draining)));
    drop(leases);
    assert_eq!((f.store.mapped(), f.gone.lock().len()), (0, 1));
    assert_eq!(f.status(ALICE, "tiny"), Some(ModelStatus::Registered));
}

#[test]
fn a_mapping_is_unmapped_after_the_tables_are_free() {
    let dir = tempfile::tempdir().unwrap();
    copy_model(&dir.path().join("tiny.gguf"));
    let (model, alive) = (Arc::new(Mutex::new(Weak::<Model>::new())), Arc::new(AtomicUsize::new(0)));
    let (seen, count) = (Arc::clone(&model), Arc::clone(&alive));
    let on_gone = move |_| {
        count.fetch_add(Weak::strong_count(&seen.lock()), Ordering::SeqCst);
    };
    let open = |id, name: &str, files, _charge| Ok(Model::open(id, name, files)?);
    let store = Store::new(vec![dir.path().into()], passing(2), Box::new(open), Box::new(on_gone));
    let (lease, _) = store.acquire(ALICE, "tiny").unwrap();
    *model.lock() = Arc::downgrade(lease.model());
    drop(lease);
    store.unload(ALICE, true, "tiny").unwrap();
    // `on_gone` runs without the lock, and nothing it still finds was dropped under the lock.
    assert_eq!((alive.load(Ordering::SeqCst), model.lock().strong_count()), (1, 0));
}

/// Waits until the pages of `name` have the wanted state.
#[track_caller]
fn pages(f: &Fixture, name: &str, wanted: impl Fn(&PagesReport) -> bool) -> PagesReport {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let report = f.store.pages(ALICE, name).expect("it is mapped");
        if wanted(&report) {
            return report;
        }
        assert!(Instant::now() < until, "{report:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn locked(report: &PagesReport) -> bool {
    report.state == PagesState::Here && report.locked
}

#[test]
fn a_pin_is_a_names_and_outlives_the_file_it_led_to() {
    let f = fixture(|_| ());
    let bytes = std::fs::metadata(f.path("tiny.gguf")).unwrap().len();
    assert!(matches!(f.store.pin(ALICE, false, "tiny"), Err(StoreError::NotAdministrator { .. })));
    assert!(matches!(f.store.pin(ALICE, true, "none"), Err(StoreError::NotFound { .. })));
    assert_eq!(f.store.pages(ALICE, "tiny"), None, "a refused pin maps nothing");
    f.store.pin(ALICE, true, "tiny").unwrap();
    let report = pages(&f, "tiny", locked);
    assert_eq!((report.wanted, report.read_bytes), (PageResidency::Lock, bytes));
    assert_eq!(f.store.lock_budget().bytes(), bytes);
    f.store.pin(ALICE, true, "tiny").unwrap(); // a second pin changes nothing
    assert_eq!(f.store.give_idle_pages_back(), 0, "pinned pages stay when memory is short");
    // A new file under the name while a request uses the old one: only the new file is locked.
    let (old, _) = f.store.acquire(BOB, "tiny").unwrap();
    copy_model(&f.path("new"));
    std::fs::rename(f.path("new"), f.path("tiny.gguf")).unwrap();
    let (new, mapped_now) = f.store.acquire(BOB, "tiny").unwrap();
    assert!(mapped_now && !Arc::ptr_eq(old.model(), new.model()));
    pages(&f, "tiny", locked);
    let until = Instant::now() + Duration::from_secs(60);
    while f.store.lock_budget().bytes() != bytes {
        assert!(Instant::now() < until, "the replaced file stays locked");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!old.model().pages.report().locked);
    drop((old, new));
    assert_eq!(f.store.unpin(ALICE, true, "tiny").ok(), Some(true));
    pages(&f, "tiny", |report| *report == PagesReport { read_bytes: 0, ..AS_THEY_COME });
    assert_eq!(f.store.unpin(ALICE, true, "tiny").ok(), Some(false));
    assert_eq!(f.store.lock_budget().bytes(), 0);
}

const AS_THEY_COME: PagesReport =
    PagesReport { wanted: PageResidency::None, state: PagesState::AsTheyCome, locked: false, read_bytes: 0 };

#[test]
fn idle_models_give_their_pages_back_and_running_ones_do_not() {
    let f = fixture(|_| ());
    copy_model(&f.path("busy.gguf"));
    let policy = HostPolicy { residency: PageResidency::Populate, ..HostPolicy::default() };
    f.store.set_host_policy(policy);
    let (busy, _) = f.store.acquire(ALICE, "busy").unwrap();
    let (tiny, _) = f.store.acquire(ALICE, "tiny").unwrap();
    let model = Arc::clone(tiny.model());
    drop(tiny);
    let here = |report: &PagesReport| report.state == PagesState::Here;
    pages(&f, "tiny", here);
    pages(&f, "busy", here);
    let resident =
        |model: &Model| HostPages::of(model.files.mappings().map(|file| &**file)).unwrap().resident_bytes;
    assert!(resident(&model) >= model.files.bytes());
    assert_eq!(f.store.give_idle_pages_back(), 1);
    assert_eq!(resident(&model), 0);
    assert_eq!(pages(&f, "tiny", |_| true).state, PagesState::GivenBack);
    assert!(resident(busy.model()) >= model.files.bytes());
    // Reads load its pages again one by one. Only a new request loads them all at once.
    let (_tiny, _) = f.store.acquire(ALICE, "tiny").unwrap();
    assert_eq!(pages(&f, "tiny", |_| true).state, PagesState::GivenBack);
    f.store.set_host_policy(HostPolicy { residency: PageResidency::Populate, ..HostPolicy::default() });
    pages(&f, "tiny", here);
}

#[test]
fn an_unloaded_name_loses_its_pin_and_a_passed_file_is_not_locked_by_configuration() {
    let f = fixture(|_| ());
    f.store.pin(ALICE, true, "tiny").unwrap();
    pages(&f, "tiny", locked);
    f.store.unload(ALICE, true, "tiny").unwrap();
    f.store.acquire(ALICE, "tiny").unwrap();
    assert_eq!(f.store.pages(ALICE, "tiny"), Some(AS_THEY_COME));
    let models = [("own".to_owned(), PageResidency::Lock)].into();
    f.store.set_host_policy(HostPolicy { residency: PageResidency::Lock, models, ..HostPolicy::default() });
    copy_model(&f.path("passed"));
    f.store.pass(ALICE, "own", File::open(f.path("passed")).unwrap()).unwrap();
    let report = pages(&f, "own", |report| report.state == PagesState::Here);
    assert_eq!((report.wanted, report.locked), (PageResidency::Populate, false));
    f.store.pin(ALICE, true, "own").unwrap();
    pages(&f, "own", locked);
    assert_eq!(f.store.unpin(ALICE, true, "own").ok(), Some(true));
    pages(&f, "own", |report| report.state == PagesState::Here && !report.locked);
}

#[test]
fn models_of_one_vocabulary_have_one_tokenizer_for_as_long_as_one_is_mapped() {
    let tokenizers = Arc::new(crate::model::tokenizer::Tokenizers::default());
    let dir = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..100).map(|number| format!("m{number}")).collect();
    names.iter().for_each(|name| copy_model(&dir.path().join(format!("{name}.gguf"))));
    let known = Arc::clone(&tokenizers);
    let open = move |id, name: &str, files, charge| Ok(Model::open_beside(id, name, files, &known, charge)?);
    let store = Store::new(vec![dir.path().into()], passing(2), Box::new(open), Box::new(|_| ()));
    store.rescan();
    let leases: Vec<Lease> = names.iter().map(|name| store.acquire(ALICE, name).unwrap().0).collect();
    assert!(leases.iter().all(|lease| lease.model().tokenizer.is(&leases[0].model().tokenizer)));
    assert_eq!((store.mapped(), tokenizers.living()), (100, 1));
    for name in &names {
        store.unload(ALICE, true, name).unwrap();
    }
    assert_eq!(tokenizers.living(), 1, "requests still use it");
    drop(leases);
    assert_eq!((store.mapped(), tokenizers.living()), (0, 0));
}

#[test]
fn headers_of_passed_models_are_charged_to_their_user_until_they_are_unmapped() {
    let dir = tempfile::tempdir().unwrap();
    let copies: Vec<PathBuf> = (0..4).map(|number| dir.path().join(format!("m{number}.gguf"))).collect();
    copies.iter().for_each(|path| copy_model(path));
    let open = |id, name: &str, files, charge| {
        let own_vocabulary = crate::model::tokenizer::Tokenizers::default();
        Ok(Model::open_beside(id, name, files, &own_vocabulary, charge)?)
    };
    let store = Store::new(vec![dir.path().into()], passing(4), Box::new(open), Box::new(|_| ()));
    let pass = |uid, number: usize| {
        let file = File::open(&copies[number]).unwrap();
        store.pass(uid, &format!("p{number}"), file).map(drop)
    };
    store.rescan();
    drop(store.acquire(ALICE, "m0").unwrap());
    assert_eq!(store.headers().held(), 0, "a directory's model is charged to nobody");
    pass(ALICE, 1).unwrap();
    let one = store.headers().held();
    assert!((10_000..400_000).contains(&one), "{one}");
    // While it is read, the first chunk of 64 KiB is charged four times.
    store.headers().set(2 * one + (1 << 20));
    pass(BOB, 2).unwrap();
    store.headers().set(2 * one + 1000);
    let error = pass(BOB, 3).unwrap_err();
    assert!(error.to_string().contains("limits.header_mib"), "{error}");
    store.unload(ALICE, true, "p1").unwrap();
    assert_eq!(store.headers().most(), Some((BOB, one)));
    store.unload(BOB, true, "p2").unwrap();
    assert_eq!(store.headers().held(), 0);
}
