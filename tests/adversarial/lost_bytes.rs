//! Model files that lose bytes while they are mapped. Each test causes a real SIGBUS, in a child.

#![allow(unsafe_code)] // raw mappings and signal actions play foreign code

use std::fs::File;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;

use rocmforge::tensor::{MapError, MappedFile};
use tempfile::NamedTempFile;

use crate::child;

const PAGE: usize = 4096;
const PAGES: usize = 256;

fn file_of(byte: u8) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&vec![byte; PAGES * PAGE]).unwrap();
    file
}

fn map(file: &NamedTempFile) -> Arc<MappedFile> {
    MappedFile::map(File::open(file.path()).unwrap()).unwrap()
}

fn all(mapped: &MappedFile) -> &[u8] {
    mapped.bytes(0..mapped.len()).unwrap()
}

#[test]
fn truncation_gives_zeros_and_poison_and_leaves_others_alone() {
    if !child::inside() {
        return child::passes("lost_bytes::truncation_gives_zeros_and_poison_and_leaves_others_alone");
    }
    let (cut, before, after) = (file_of(1), file_of(2), file_of(3));
    let (other, mapped, another) = (map(&before), map(&cut), map(&after));
    assert_eq!(all(&mapped)[PAGE * 100], 1);

    cut.as_file().set_len((10 * PAGE) as u64).unwrap();
    mapped.check_poison().unwrap();
    assert!(
        matches!(mapped.check_unchanged(), Err(MapError::Poisoned)),
        "fstat did not notice the loss before a read"
    );

    // Reads from the middle, so that the pages before it fault separately later.
    assert_eq!(all(&mapped)[PAGE * 100 + 5], 0);
    assert!(matches!(mapped.check_poison(), Err(MapError::Poisoned)));
    assert!(all(&mapped)[..10 * PAGE].iter().all(|&b| b == 1), "bytes that the file still has were not read");
    assert!(all(&mapped)[10 * PAGE..].iter().all(|&b| b == 0));

    for (intact, byte) in [(&other, 2), (&another, 3)] {
        intact.check_poison().unwrap();
        intact.check_unchanged().unwrap();
        assert!(all(intact).iter().all(|&b| b == byte));
    }
    // The slot is free and clean again: the next mapping starts unpoisoned.
    drop(mapped);
    let next = map(&after);
    next.check_poison().unwrap();
    assert!(all(&next).iter().all(|&b| b == 3));
}

#[test]
fn many_threads_reading_lost_bytes_all_go_on() {
    if !child::inside() {
        return child::passes("lost_bytes::many_threads_reading_lost_bytes_all_go_on");
    }
    // Another thread maps and unmaps meanwhile, so that the handler meets slots that change.
    let stop = std::sync::atomic::AtomicBool::new(false);
    let whole = file_of(9);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let mapped = map(&whole);
                assert_eq!(all(&mapped)[PAGE], 9);
                mapped.check_poison().unwrap();
            }
        });
        for round in 0..100u64 {
            let cut = file_of(1);
            let mapped = map(&cut);
            cut.as_file().set_len(round * PAGE as u64).unwrap();
            std::thread::scope(|readers| {
                for start in 0..4 {
                    let mapped = &mapped;
                    readers.spawn(move || {
                        let sum: u64 = all(mapped)[start..].iter().step_by(512).map(|&b| u64::from(b)).sum();
                        assert_eq!(sum, 8 * round);
                        assert!(matches!(mapped.check_poison(), Err(MapError::Poisoned)));
                    });
                }
            });
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn the_handler_runs_on_the_alternate_stack_of_our_threads() {
    if !child::inside() {
        return child::passes("lost_bytes::the_handler_runs_on_the_alternate_stack_of_our_threads");
    }
    let stack_is_set = || {
        // SAFETY: sigaltstack with a null new stack only writes the current one to `now`, a valid stack_t.
        unsafe {
            let mut now: libc::stack_t = std::mem::zeroed();
            assert_eq!(libc::sigaltstack(std::ptr::null(), &mut now), 0);
            now.ss_flags & libc::SS_DISABLE == 0 && now.ss_size >= libc::MINSIGSTKSZ
        }
    };
    assert!(std::thread::spawn(stack_is_set).join().unwrap(), "std::thread set no alternate stack");
    // A foreign library may start a thread without an alternate stack; the handler must work there too.
    let cut = file_of(1);
    let mapped = map(&cut);
    cut.as_file().set_len(0).unwrap();
    let read = std::thread::spawn(move || {
        // SAFETY: SS_DISABLE takes no memory; the runtime keeps its own stack.
        unsafe {
            let off = libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
            assert_eq!(libc::sigaltstack(&off, std::ptr::null_mut()), 0);
        }
        (all(&mapped)[PAGE], mapped.check_poison().is_err())
    });
    assert_eq!(read.join().unwrap(), (0, true));
}

/// Installs the guard, then reads lost bytes of a mapping that the guard does not watch.
fn foreign_fault() {
    let watched = file_of(1);
    let _watched = map(&watched);
    let foreign = file_of(2);
    // SAFETY: this test needs the file to be cut short under the mapping; the process is meant to die from it.
    let raw = unsafe { memmap2::Mmap::map(foreign.as_file()) }.unwrap();
    foreign.as_file().set_len(0).unwrap();
    println!("read {}", raw[PAGE]);
}

#[test]
fn a_fault_outside_the_watched_mappings_ends_the_process() {
    if child::inside() {
        return foreign_fault();
    }
    let output = child::run("lost_bytes::a_fault_outside_the_watched_mappings_ends_the_process");
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
}

#[test]
fn a_sigbus_that_a_process_sends_ends_the_process() {
    if child::inside() {
        let file = file_of(1);
        let _watched = map(&file);
        // SAFETY: raise has no memory preconditions.
        unsafe { libc::raise(libc::SIGBUS) };
        return;
    }
    let output = child::run("lost_bytes::a_sigbus_that_a_process_sends_ends_the_process");
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
}

#[test]
fn a_fault_outside_goes_to_the_handler_that_was_there_before() {
    extern "C" fn earlier(_: libc::c_int) {
        // SAFETY: _exit is async-signal-safe.
        unsafe { libc::_exit(42) }
    }
    if child::inside() {
        // SAFETY: `earlier` is a valid handler of one argument.
        unsafe { libc::signal(libc::SIGBUS, earlier as *const () as usize) };
        return foreign_fault();
    }
    let output = child::run("lost_bytes::a_fault_outside_goes_to_the_handler_that_was_there_before");
    assert_eq!(output.status.code(), Some(42), "{output:?}");
}

#[test]
fn one_mapping_too_many_is_refused_by_name_and_room_comes_back() {
    if !child::inside() {
        return child::passes("lost_bytes::one_mapping_too_many_is_refused_by_name_and_room_comes_back");
    }
    let file = file_of(1);
    let mut mapped = Vec::new();
    let limit = loop {
        match MappedFile::map(File::open(file.path()).unwrap()) {
            Ok(one) => {
                mapped.push(one);
                // At the usual limit of 1,024 descriptors run out first: raise it as the daemon's unit does.
                if mapped.len() == 1 {
                    raise_descriptor_limit();
                }
            }
            Err(MapError::TooMany { limit }) => break limit,
            Err(other) => panic!("{other}"),
        }
    };
    assert_eq!(mapped.len(), limit);
    mapped.swap_remove(limit / 2);
    let again = map(&file);
    assert_eq!(all(&again)[0], 1);
}

fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let hard = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard }).unwrap();
}
