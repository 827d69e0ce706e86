//! Heap bytes that a piece of work allocates, counted per thread.

#![allow(unsafe_code)] // a global allocator is unsafe to implement

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // A deallocation after the thread's locals are destroyed is not counted: no test reads the count then.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

// SAFETY: every call goes to System unchanged, which keeps the allocator's contract; the counters are thread-local
// cells without destructors and do not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: `ptr` came from `alloc` above, so from System, with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `work`; returns its result and the peak heap bytes that it held on this thread.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = work();
    (result, usize::try_from(PEAK.get() - before).unwrap_or(0))
}

#[test]
fn the_counter_counts() {
    let (kept, peak) = peak_of(|| {
        drop(vec![0u8; 1 << 20]);
        vec![0u8; 1000]
    });
    assert_eq!(kept.len(), 1000);
    assert!((1 << 20..(1 << 20) + 2000).contains(&peak), "{peak}");
}
