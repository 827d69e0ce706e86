//! Survives SIGBUS: a truncated model file or a failing disk must not end the process.
//!
//! Reading a mapped page that the file no longer has raises SIGBUS. The handler here finds the mapping that holds the
//! faulting address and puts anonymous zero pages over the whole rest of it. That takes one fault instead of one per
//! page: for 63 MiB, 1 instead of 16,235. It marks the mapping as poisoned and returns; the reader continues over
//! zeros. The computing code then checks [`Watched::poisoned`] and discards the result. A SIGBUS anywhere else goes
//! where it would have gone without this handler.
//!
//! Not covered: a system call or a device that reads the mapping. `write(2)` from a lost page fails with `EFAULT`, so
//! bytes for a device pass through memory that the daemon's own threads fill. The one exception are pages that the
//! configuration lets a GPU's driver pin. The driver refuses pages that are already lost, and accesses of its library
//! in this process fault here. Pages it has pinned stay when the file loses them. A driver that follows the page table
//! instead, as AMD's can, may stop the device then. After such a copy, the caller checks that the file is still whole.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_long, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize as PlainUsize, Ordering};

use super::MapError;
use crate::lock::atomic::{AtomicBool, AtomicUsize, fence};
use crate::lock::table;

/// Mappings watched at once. The handler scans the table once per fault: 1,024 slots are 40 KiB and take some
/// microseconds.
pub const WATCHED_MAX: usize = if cfg!(feature = "loom") { 4 } else { 1024 };

/// One watched mapping. `generation` is even while the slot is at rest and odd while its owner changes it. The handler
/// can interrupt any thread anywhere and may not wait, so it skips a slot in change. It cannot miss its own mapping
/// that way: a mapping that is being read is neither being entered nor removed.
struct Slot {
    taken: AtomicBool,
    generation: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    poisoned: AtomicBool,
}

table!(static TABLE: [Slot; WATCHED_MAX] = Slot {
    taken: AtomicBool::new(false),
    generation: AtomicUsize::new(0),
    start: AtomicUsize::new(0),
    end: AtomicUsize::new(0),
    poisoned: AtomicBool::new(false),
});

impl Slot {
    /// Sets the range. Only the thread that owns the slot calls this, so writers never conflict.
    fn set(&self, range: Range<usize>) {
        self.generation.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(range.start, Ordering::Relaxed);
        self.end.store(range.end, Ordering::Relaxed);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// The range, or `None` while it is being changed.
    fn get(&self) -> Option<Range<usize>> {
        let before = self.generation.load(Ordering::Acquire);
        let range = self.start.load(Ordering::Relaxed)..self.end.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let after = self.generation.load(Ordering::Relaxed);
        (before == after && before.is_multiple_of(2)).then_some(range)
    }
}

/// A mapping in the table. Dropping this removes the entry; drop it before the unmapping.
#[derive(Debug)]
pub(super) struct Watched {
    slot: usize,
}

impl Watched {
    /// Watches the mapping at `range`, installing the handler at the first call of the process.
    ///
    /// # Safety
    /// `range` is a live file mapping, page-aligned at its start. Its owner only reads it, and only through references
    /// that do not outlive the returned value. No other code maps anything inside `range` before that is dropped.
    ///
    /// # Errors
    /// [`MapError::TooMany`] when the table is full, [`MapError::Os`] when the handler cannot be installed.
    pub unsafe fn new(range: Range<usize>) -> Result<Self, MapError> {
        install()?;
        for (index, slot) in TABLE.iter().enumerate() {
            if slot.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                slot.poisoned.store(false, Ordering::Relaxed);
                slot.set(range);
                return Ok(Self { slot: index });
            }
        }
        Err(MapError::TooMany { limit: WATCHED_MAX })
    }

    /// True when the mapping lost bytes: data read since its creation may be zeros. Costs one load.
    pub fn poisoned(&self) -> bool {
        // The handler stores on the reading thread before the read returns. A thread that synchronises with the reader
        // in any way also sees the store.
        TABLE.get(self.slot).is_some_and(|slot| slot.poisoned.load(Ordering::Acquire))
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(slot) = TABLE.get(self.slot) {
            slot.set(0..0);
            slot.taken.store(false, Ordering::Release);
        }
    }
}

/// The handler's data besides the table, written once before the handler is installed.
struct Installed {
    page_bytes: PlainUsize,
    /// The previous SIGBUS action.
    previous: UnsafeCell<libc::sigaction>,
}

// SAFETY: `previous` is written once, inside `install`'s OnceLock and before the handler can run, and only read after.
unsafe impl Sync for Installed {}

static INSTALLED: Installed = Installed {
    page_bytes: PlainUsize::new(0),
    // SAFETY: all-zero is a valid sigaction (SIG_DFL, empty mask, no flags): plain integers and a nullable pointer.
    previous: UnsafeCell::new(unsafe { std::mem::zeroed() }),
};

fn install() -> Result<(), MapError> {
    static ONCE: OnceLock<Result<(), i32>> = OnceLock::new();
    let done = ONCE.get_or_init(|| {
        INSTALLED.page_bytes.store(rustix::param::page_size(), Ordering::Relaxed);
        let last_error = || Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0));
        // SAFETY: the previous action is read into `previous`, which nothing else touches. This closure runs once, and
        // the handler, its only reader, is not installed yet.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), INSTALLED.previous.get()) } != 0 {
            return last_error();
        }
        // SAFETY: as above, all-zero is a valid sigaction.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_sigbus as *const () as usize;
        // Use the alternate stack where the thread has one (the Rust runtime gives each std::thread one). This also
        // handles a fault near the end of a deep stack. Elsewhere the thread's own stack serves; the handler takes < 1
        // KiB.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `action` is initialised and `on_sigbus` has the three-argument form that SA_SIGINFO asks for.
        if unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) } != 0 {
            return last_error();
        }
        Ok(())
    });
    done.map_err(|code| MapError::Os {
        what: "installing the SIGBUS handler",
        source: std::io::Error::from_raw_os_error(code),
    })
}

/// The handler. Async-signal-safe: atomics on statics, and the system calls mmap, sigaction and tgkill.
extern "C" fn on_sigbus(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler, filled for SIGBUS, so `si_addr` is its
    // address field. For a signal sent by a process it holds other bits; `code` tells that apart before it is used.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // SAFETY: __errno_location gives this thread's errno, always valid; the interrupted code may be about to read it.
    let errno = unsafe { &mut *libc::__errno_location() };
    let saved = *errno;
    // The kernel reports a lost page. A misaligned access (BUS_ADRALN) would fault again on any page.
    let lost_page = code > 0 && code != libc::BUS_ADRALN;
    if !(lost_page && replace_rest(address, zero_pages)) {
        hand_on(code > 0);
    }
    *errno = saved;
}

/// Puts zero pages from the page of `address` to the end of the watched mapping that holds it, and poisons the mapping.
/// False when no mapping holds it or the kernel refuses.
fn replace_rest(address: usize, zero_pages: impl FnOnce(Range<usize>) -> bool) -> bool {
    let page_bytes = INSTALLED.page_bytes.load(Ordering::Relaxed);
    for slot in TABLE.iter() {
        let Some(range) = slot.get().filter(|range| range.contains(&address)) else { continue };
        let page = address & !(page_bytes.wrapping_sub(1));
        // Before the pages: a reader that sees the zeros then finds the flag set.
        slot.poisoned.store(true, Ordering::Release);
        return zero_pages(page..range.end);
    }
    false
}

/// Puts zero pages over `pages`, a part of a watched mapping up to its end. False when the kernel refuses.
fn zero_pages(pages: Range<usize>) -> bool {
    // Called by number: libc's mmap may take a lock (musl's does for MAP_FIXED).
    // Arguments of a variadic function keep the type they are passed with, and libc takes a full register of each. An
    // int would leave the upper half of its register undefined, including the sign of -1.
    let length = pages.end.wrapping_sub(pages.start) as c_long;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: `pages` lies inside a mapping that `Watched::new`'s caller owns and reads only: `replace_rest`, the only
    // caller, says so. It is live: the faulting read goes through a reference that `Watched` outlives. Readers see zeros in
    // place of bytes that could not be read at all; no other mapping is touched.
    let got: c_long = unsafe {
        libc::syscall(
            libc::SYS_mmap,
            pages.start as c_long,
            length,
            c_long::from(libc::PROT_READ),
            c_long::from(flags),
            -1 as c_long,
            0 as c_long,
        )
    };
    got as usize == pages.start
}

/// Passes a foreign SIGBUS on. A fault returns to the previous action: the instruction runs and faults again, now
/// there. A signal sent by a process (`kill -BUS`) ends this process as it would have without the handler. The previous
/// action may be the Rust runtime's, which swallows the first one it does not know.
fn hand_on(fault: bool) {
    // SAFETY: `previous` was written before this handler was installed; sigaction is async-signal-safe. All-zero is
    // SIG_DFL. SIGBUS is blocked while we run, so what raise() sends arrives when the handler returns.
    unsafe {
        if fault {
            libc::sigaction(libc::SIGBUS, INSTALLED.previous.get(), ptr::null_mut());
        } else {
            let default: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGBUS, &default, ptr::null_mut());
            libc::raise(libc::SIGBUS);
        }
    }
}

#[cfg(all(test, feature = "loom"))]
mod interleavings;
