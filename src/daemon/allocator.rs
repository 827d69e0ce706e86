//! What the C library's allocator keeps of memory that was freed, always and when memory is short.

#![allow(unsafe_code)]

/// Blocks of at least this size are mapped one by one, and so given back the moment they are freed.
const MAPPED_FROM_BYTES: libc::c_int = 1 << 20;

/// Has the allocator give large blocks back when they are freed, and all threads take small ones from one heap. To be called
/// before other threads start.
///
/// By itself glibc opens up to eight heaps a core as threads meet, each of which keeps what its threads ever needed at once: over a
/// thousand loads and unloads, which 64 threads share, some hundred KiB at a time came to 0.6 MiB, and with one heap to 0.06. Blocks up
/// to a KiB come from each thread's own store without a lock, and no step waits for an allocation.
///
/// glibc moves this bound up to 32 MiB as blocks are freed, so that the working memory of a large request comes from the
/// heap of whichever thread served it, and each such heap keeps what its largest request took. Measured with texts of
/// 0.7 MB tokenised by 8 clients at once (SentencePiece): 154 MB kept before, 14 MB with a bound that stays. A mapping
/// costs a system call and a fault per page, which a request of that size does not notice; the logits of a row, in a
/// vocabulary of 150,000 tokens, are smaller.
pub fn keep_little() {
    #[cfg(target_env = "gnu")]
    for (setting, value) in [(libc::M_MMAP_THRESHOLD, MAPPED_FROM_BYTES), (libc::M_ARENA_MAX, 1)] {
        // SAFETY: mallopt(3) takes two numbers and touches nothing but the allocator's own settings; no other thread
        // allocates meanwhile, and one that did would see the old setting or the new one.
        let taken = unsafe { libc::mallopt(setting, value) };
        if taken == 0 {
            tracing::warn!(setting, value, "the allocator does not take a setting");
        }
    }
}

/// Has the allocator give back all whole pages that are free. Some milliseconds; other threads wait for it one by one.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: malloc_trim(3) takes a number and works on the allocator's free memory alone, under its own locks.
        unsafe { libc::malloc_trim(0) };
    }
}
