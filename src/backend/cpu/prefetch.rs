//! Prefetching, by the instruction of each processor.

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
