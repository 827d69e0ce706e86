//! Whole malformed models, opened as the daemon opens them: each is refused with its code and takes little memory.
//!
//! `cargo test --release --test adversarial models -- --nocapture` prints the time and heap that they take.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge::model::Model;
use rocmforge::model::store::{Store, StoreError};
use rocmforge::session::store_code;

use crate::allocations::peak_of;
use crate::malformed::{Case, cases, templates};

/// Heap limit for opening a malformed model.
const HEAP_BYTES_MAX: usize = 16 << 20;

const NAME: &str = "bad";

fn store() -> Arc<Store> {
    Store::new(
        Vec::new(),
        Arc::default(),
        Box::new(|id, name, files, _charge| Ok(Model::open(id, name, files)?)),
        Box::new(|_| {}),
    )
}

/// Opens the model in `dir`; returns the result, the peak heap bytes and the time.
fn open(store: &Arc<Store>, dir: &Path) -> (Result<(), StoreError>, usize, Duration) {
    store.set_directories(vec![dir.to_path_buf()]);
    let begun = Instant::now();
    let (result, heap) = peak_of(|| {
        store.rescan();
        store.acquire(0, NAME).map(drop)
    });
    (result, heap, begun.elapsed())
}

/// The fault of a case's result; `None` if nothing is.
fn fault(case: &Case, result: &Result<(), StoreError>, heap: usize) -> Option<String> {
    let code = result.as_ref().err().map(store_code);
    let says = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
    if code != case.code {
        return Some(format!(
            "class {}, {}: code {code:?} instead of {:?}: {says}",
            case.class, case.what, case.code
        ));
    }
    if code.is_some() && says.len() < 20 {
        return Some(format!("class {}, {}: the error text is too short: {says:?}", case.class, case.what));
    }
    (heap > HEAP_BYTES_MAX)
        .then(|| format!("class {}, {}: opening took {heap} bytes of heap", case.class, case.what))
}

#[test]
fn every_malformed_model_is_refused_with_its_code_and_little_memory() {
    let (dir, store) = (tempfile::tempdir().unwrap(), store());
    let (mut faults, mut of_class) = (Vec::new(), BTreeMap::<u8, (usize, usize)>::new());
    let (mut slowest, mut largest) = ((Duration::ZERO, String::new()), (0, String::new()));
    for (number, case) in cases().iter().enumerate() {
        let place = dir.path().join(number.to_string());
        std::fs::create_dir(&place).unwrap();
        case.write(&place, NAME);
        let (result, heap, time) = open(&store, &place);
        faults.extend(fault(case, &result, heap));
        let counts = of_class.entry(case.class).or_default();
        *(if result.is_ok() { &mut counts.0 } else { &mut counts.1 }) += 1;
        if result.is_err() {
            slowest = slowest.max((time, case.what.clone()));
        }
        largest = largest.max((heap, case.what.clone()));
        std::fs::remove_dir_all(&place).unwrap();
    }
    of_class
        .iter()
        .for_each(|(class, (good, bad))| println!("class {class}: {bad} refused, {good} accepted"));
    println!(
        "slowest refusal: {:?}, {}; most heap: {} KiB, {}",
        slowest.0,
        slowest.1,
        largest.0 >> 10,
        largest.1
    );
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
    let enough = [(1, 45), (2, 16), (3, 80), (4, 55), (5, 150), (7, 30), (8, 10)];
    for (class, least) in enough {
        assert!(of_class[&class].1 >= least, "class {class} has only {} refused cases", of_class[&class].1);
    }
}

#[test]
fn a_hostile_template_is_no_reason_to_refuse_its_model() {
    let (dir, store) = (tempfile::tempdir().unwrap(), store());
    for (what, forge) in templates() {
        std::fs::write(dir.path().join(format!("{NAME}.gguf")), forge.build().bytes).unwrap();
        let (result, heap, _) = open(&store, dir.path());
        assert!(result.is_ok(), "{what}: {result:?}");
        // The reader copies a template of 10 MiB twice before it drops it: once in growing pieces, once whole.
        assert!(heap <= HEAP_BYTES_MAX + (10 << 20), "{what}: {heap} bytes of heap");
    }
}
