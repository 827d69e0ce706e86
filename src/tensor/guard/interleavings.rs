//! Tests the poison flag against its readers, in every order of the threads.
//!
//! A flag models a page of the mapping: lost, then zeros. Putting pages is a system call that every processor sees
//! before the reader continues. A reader that finds zeros has seen it.

use std::sync::Arc;

use super::*;
use crate::lock::checker::{explore, spawn};

/// A file's mapping whose bytes are lost from some page on.
struct Mapping {
    watched: Watched,
    zeros: AtomicBool,
    lost: usize,
}

fn watch(range: Range<usize>) -> Watched {
    // SAFETY: no code reads these addresses: both the faults and the zero pages are simulated.
    unsafe { Watched::new(range) }.unwrap()
}

impl Mapping {
    fn new(range: Range<usize>, lost: usize) -> Arc<Self> {
        Arc::new(Self { watched: watch(range), zeros: AtomicBool::new(false), lost })
    }

    /// Reads the lost page: faults while it holds no zeros. True when this fault put them.
    fn read(&self, end: usize) -> bool {
        if self.zeros.load(Ordering::Acquire) {
            return false;
        }
        let put = |pages: Range<usize>| {
            assert_eq!(pages, self.lost..end, "the rest of that mapping");
            self.zeros.store(true, Ordering::Release);
            true
        };
        assert!(replace_rest(self.lost, put), "the mapping is found");
        true
    }
}

#[test]
fn a_reader_of_zeros_sees_the_poison() {
    explore(3, || {
        let mapping = Mapping::new(0x10_0000..0x20_0000, 0x14_0000);
        let faulting = Arc::clone(&mapping);
        let faults = spawn(move || {
            faulting.read(0x20_0000);
            assert!(faulting.watched.poisoned(), "on the thread that faulted");
        });
        let reading = Arc::clone(&mapping);
        let reads = spawn(move || {
            if reading.zeros.load(Ordering::Acquire) {
                assert!(reading.watched.poisoned(), "what was read were zeros");
            }
        });
        let both = Arc::clone(&mapping);
        let faults_too = spawn(move || {
            both.read(0x20_0000);
            assert!(both.watched.poisoned());
        });
        [faults, reads, faults_too].into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_fault_finds_its_own_mapping_while_others_come_and_go() {
    explore(3, || {
        // A slot earlier in the table, so that the handler checks it first. A range of its old start and new end would
        // hold the address.
        let before = watch(0x10_0000..0x20_0000);
        let mapping = Mapping::new(0x40_0000..0x50_0000, 0x44_0000);
        let changes = spawn(move || {
            drop(before);
            let after = watch(0x80_0000..0x90_0000);
            assert!(!after.poisoned(), "its file is whole");
            after
        });
        let faults = {
            let mapping = Arc::clone(&mapping);
            spawn(move || {
                mapping.read(0x50_0000);
                assert!(mapping.watched.poisoned());
            })
        };
        faults.join().unwrap();
        let after = changes.join().unwrap();
        assert!(!after.poisoned(), "its file is whole");
    });
}

#[test]
fn a_slot_belongs_to_one_mapping_and_forgets_the_last_ones_poison() {
    explore(3, || {
        let lost = Mapping::new(0x10_0000..0x20_0000, 0x10_0000);
        lost.read(0x20_0000);
        let goes = spawn(move || drop(lost));
        let comes = spawn(|| {
            let next = watch(0x40_0000..0x50_0000);
            assert!(!next.poisoned());
            let other = watch(0x60_0000..0x70_0000);
            assert!(!replace_rest(0x80_0000, |_| true));
            assert_ne!(next.slot, other.slot);
            assert!(!next.poisoned() && !other.poisoned());
        });
        goes.join().unwrap();
        comes.join().unwrap();
    });
}
