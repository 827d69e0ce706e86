//! Memory read rate of this machine. It limits decode, which reads every weight once per token.

use std::hint::black_box;
use std::thread;
use std::time::Instant;

/// Bytes that each thread reads per pass: far more than any cache.
const BYTES_PER_THREAD: usize = 384 << 20;

/// Compared with the memory; fits in the first-level cache.
const BLOCK: usize = 16 << 10;

/// Memory to read, written once so that its pages exist.
pub struct Memory {
    parts: Vec<Vec<u8>>,
}

impl Memory {
    /// Allocates for `threads` threads.
    pub fn new(threads: usize) -> Self {
        Self { parts: (0..threads).map(|_| vec![1; BYTES_PER_THREAD]).collect() }
    }

    /// Bytes per second that all threads read together, in one pass of about 50 ms.
    pub fn read_rate(&self) -> f64 {
        let block = vec![1u8; BLOCK];
        let started = Instant::now();
        let differing: usize = thread::scope(|scope| {
            let work = |part: &'_ Vec<u8>| {
                // The C library's comparison uses vector code, whatever the build flags of this program.
                part.chunks_exact(BLOCK).filter(|chunk| black_box(*chunk) != block.as_slice()).count()
            };
            let running: Vec<_> = self.parts.iter().map(|part| scope.spawn(move || work(part))).collect();
            running.into_iter().map(|thread| thread.join().unwrap_or(1)).sum()
        });
        let seconds = started.elapsed().as_secs_f64();
        debug_assert_eq!(differing, 0);
        (self.parts.len() * BYTES_PER_THREAD) as f64 / seconds
    }
}
