//! Prefetching, by the instruction of each processor.

/// Bytes of a cache line.
pub(super) const CACHE_LINE_BYTES: usize = 64;

/// Prefetches the cache line of `at`; has no other effect. Any address may be given.
#[inline(always)]
pub(super) fn prefetch(at: *const u8) {
    // SAFETY: SSE is part of x86-64; prefetching reads nothing and never faults.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    // SAFETY: part of aarch64; prefetching reads nothing and never faults.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

/// As [`prefetch`], but only as near as the second cache, which has more misses in flight.
#[inline(always)]
pub(super) fn prefetch_far(at: *const u8) {
    // SAFETY: as in `prefetch`.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast());
    }
    // SAFETY: as in `prefetch`.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

/// Prefetches all cache lines of `elements`.
#[inline(always)]
pub(super) fn prefetch_all<T>(elements: &[T]) {
    const { assert!(0 < size_of::<T>() && size_of::<T>() <= CACHE_LINE_BYTES, "whole elements fit in a line") };
    for line in elements.chunks(CACHE_LINE_BYTES / size_of::<T>()) {
        prefetch(line.as_ptr().cast());
    }
}
