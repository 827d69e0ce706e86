//! Counts the bytes that a thread allocates, so that tests can assert a bound on memory.

#![allow(unsafe_code)] // the allocator trait is unsafe

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

thread_local! {
    static NOW: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn grow(bytes: usize) {
    NOW.with(|now| {
        now.set(now.get().wrapping_add(bytes));
        PEAK.with(|peak| peak.set(peak.get().max(now.get())));
    });
}

fn shrink(bytes: usize) {
    // A block from another thread may be freed here; saturating keeps the figure an upper bound.
    NOW.with(|now| now.set(now.get().saturating_sub(bytes)));
}

// SAFETY: every call is passed to `System` unchanged; the counters are plain cells of the thread and allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        shrink(layout.size());
        // SAFETY: the caller keeps `dealloc`'s contract; the block came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both blocks exist while one is copied to the other.
        grow(new_size);
        // SAFETY: the caller keeps `realloc`'s contract; the block came from `System`.
        let moved = unsafe { System.realloc(pointer, layout, new_size) };
        shrink(layout.size());
        moved
    }
}

/// Most bytes that `work` had allocated at once on this thread.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> usize {
    let before = NOW.with(Cell::get);
    PEAK.with(|peak| peak.set(before));
    drop(work());
    PEAK.with(Cell::get) - before
}
