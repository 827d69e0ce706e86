//! How many memory latencies one pass of a kernel's streaming loop takes, read from its assembly.
//!
//! In this model an instruction costs nothing, and a load arrives one latency after it is issued. A wait lasts until the loads
//! that it names have arrived. Loads of vectors arrive in order. A loop that has always something in flight takes one latency
//! a pass. A loop that waits for each load before it issues the next takes as many as it has loads.

use std::cmp::Reverse;
use std::collections::VecDeque;

use super::listing::{Instruction, Kernel};

/// Passes over which latencies are counted, after as many that only fill the queue. One latency may span
/// some passes, so it is a multiple of small numbers.
const PASSES: u32 = 12;
/// Steps of the search for the usual path.
const STEPS_MAX: u32 = 1 << 16;

/// A pass of the streaming loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pass {
    /// Bytes that a lane loads.
    pub bytes: u32,
    /// Latencies that the pass takes: a mean, because a pass may use what an earlier one loaded.
    pub latencies: f64,
}

impl Pass {
    /// Bytes that a lane has in flight at any time, as a mean.
    pub fn bytes_in_flight(&self) -> f64 {
        f64::from(self.bytes) / self.latencies.max(1.0 / f64::from(PASSES))
    }
}

/// A usual pass of the kernel's streaming loop: it fills no LDS between barriers if it can do without. Of such paths the one that
/// loads most by 16 bytes, and least else: not the one that goes on to other rows or pages. `stores_wait`: on this target the
/// counter of loads counts stores too.
pub fn streaming_pass(kernel: &Kernel<'_>, stores_wait: bool) -> Option<Pass> {
    let header = kernel.streaming_loop()?;
    let start = kernel.blocks.iter().position(|block| block.label == header)?;
    let inside = |n: &usize| kernel.blocks[*n].in_loop.is_some();
    let mut search = Search {
        loads: kernel.blocks.iter().map(|block| Loads::of(&block.instructions)).collect(),
        next: (0..kernel.blocks.len())
            .map(|n| kernel.successors(n).into_iter().filter(inside).collect())
            .collect(),
        start,
        ..Search::default()
    };
    search.walk(start, Loads::default());
    let (_, path) = search.best?;
    let best: Vec<Instruction<'_>> =
        path.iter().flat_map(|n| kernel.blocks[*n].instructions.iter().copied()).collect();
    let mut queue = Queue { stores_wait, ..Queue::default() };
    let run = |queue: &mut Queue| (0..PASSES).for_each(|_| best.iter().for_each(|at| queue.take(*at)));
    run(&mut queue);
    let filled = queue.now;
    run(&mut queue);
    let latencies = f64::from(queue.now - filled) / f64::from(PASSES);
    Some(Pass { bytes: best.iter().map(Instruction::loaded_bytes).sum(), latencies })
}

/// Barriers of a path, and bytes that it loads: all, and those by 16.
#[derive(Clone, Copy, Debug, Default)]
struct Loads {
    barriers: usize,
    wide: u32,
    all: u32,
}

impl Loads {
    fn of(instructions: &[Instruction<'_>]) -> Self {
        let bytes = || instructions.iter().map(Instruction::loaded_bytes);
        Self {
            barriers: instructions.iter().filter(|at| at.name.starts_with("s_barrier")).count(),
            wide: bytes().filter(|bytes| *bytes >= 16).sum(),
            all: bytes().sum(),
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            barriers: self.barriers + other.barriers,
            wide: self.wide + other.wide,
            all: self.all + other.all,
        }
    }

    /// The greatest is that of a usual pass.
    fn order(self) -> impl Ord {
        (Reverse(self.barriers), self.wide, Reverse(self.all))
    }
}

/// A search for the usual path from a loop's first block back to it. A path takes no block twice and does not leave the loop.
#[derive(Default)]
struct Search {
    /// Loads of each block.
    loads: Vec<Loads>,
    /// Blocks of the loop that may follow each.
    next: Vec<Vec<usize>>,
    start: usize,
    path: Vec<usize>,
    best: Option<(Loads, Vec<usize>)>,
    steps: u32,
}

impl Search {
    fn walk(&mut self, at: usize, before: Loads) {
        let loads = before.and(self.loads[at]);
        self.path.push(at);
        for way in 0..self.next[at].len() {
            let next = self.next[at][way];
            self.steps += 1;
            if next == self.start {
                if self.best.as_ref().is_none_or(|(best, _)| best.order() < loads.order()) {
                    self.best = Some((loads, self.path.clone()));
                }
            } else if self.steps < STEPS_MAX && !self.path.contains(&next) {
                self.walk(next, loads);
            }
        }
        self.path.pop();
    }
}

/// Loads in flight, by the latency count at which each arrives.
#[derive(Default)]
struct Queue {
    now: u32,
    stores_wait: bool,
    vector: VecDeque<u32>,
    scalar: u32,
}

impl Queue {
    fn take(&mut self, instruction: Instruction<'_>) {
        let Instruction { name, operands } = instruction;
        let is = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
        if is(&["global_load_", "flat_load_", "buffer_load_", "scratch_load_"]) {
            self.vector.push_back(self.now + 1);
        } else if self.stores_wait && is(&["global_store_", "flat_store_", "buffer_store_", "global_atomic_"])
        {
            self.vector.push_back(self.now);
        } else if is(&["s_load_", "s_buffer_load_"]) {
            self.scalar = self.now + 1;
        } else if name == "s_waitcnt" {
            if let Some(left) = count_in(operands, "vmcnt(") {
                self.wait_until(left);
            }
            // Loads of scalars arrive in any order, so only a wait for all of them is a wait for one.
            if count_in(operands, "lgkmcnt(") == Some(0) {
                self.now = self.now.max(self.scalar);
            }
        } else if let Some(count) = hex(operands).filter(|_| name.starts_with("s_wait_")) {
            match name {
                "s_wait_loadcnt" => self.wait_until(count),
                "s_wait_loadcnt_dscnt" => self.wait_until(count >> 8),
                "s_wait_kmcnt" if count == 0 => self.now = self.now.max(self.scalar),
                _ => {}
            }
        }
    }

    /// Waits until at most `left` loads of vectors are in flight.
    fn wait_until(&mut self, left: usize) {
        while self.vector.len() > left {
            let arrives = self.vector.pop_front().unwrap_or_default();
            self.now = self.now.max(arrives);
        }
    }
}

/// The number after `name` in the operands of `s_waitcnt`.
fn count_in(operands: &str, name: &str) -> Option<usize> {
    operands.split_once(name)?.1.split(')').next()?.parse().ok()
}

fn hex(operand: &str) -> Option<usize> {
    usize::from_str_radix(operand.trim().strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::super::listing::kernels;
    use super::*;

    /// A loop with these instructions, and a part between barriers that the first pass alone takes.
    fn pass_of(body: &str, stores_wait: bool) -> Option<Pass> {
        let listing = format!(
            "gemv:\n\
             .LBB0_1: ; =>This Inner Loop Header: Depth=1\n\
             \ts_cbranch_scc1 .LBB0_3\n\
             ; %bb.2: ; in Loop: Header=BB0_1 Depth=1\n\
             \ts_barrier\n\
             \tglobal_load_b128 v[0:3], v[4:5], off\n\
             \ts_waitcnt vmcnt(0)\n\
             .LBB0_3: ; in Loop: Header=BB0_1 Depth=1\n\
             {body}\
             \ts_cbranch_scc0 .LBB0_1\n\
             \ts_endpgm\n\
             .Lfunc_end0:\n\
             \t.amdhsa_kernel gemv\n"
        );
        streaming_pass(&kernels(&listing)[0], stores_wait)
    }

    const LOAD: &str = "\tglobal_load_b128 v[0:3], v[4:5], off\n";

    #[test]
    fn a_loop_with_loads_in_flight_takes_one_latency_a_pass() {
        let double = format!("{LOAD}\ts_waitcnt vmcnt(1)\n{LOAD}\ts_waitcnt vmcnt(1)\n");
        assert_eq!(pass_of(&double, false), Some(Pass { bytes: 32, latencies: 1.0 }));
        let undone = format!("{LOAD}\ts_waitcnt vmcnt(0)\n{LOAD}\ts_waitcnt vmcnt(0)\n");
        assert_eq!(pass_of(&undone, false), Some(Pass { bytes: 32, latencies: 2.0 }));
        let together = format!("{LOAD}{LOAD}\ts_wait_loadcnt 0x0\n");
        assert_eq!(pass_of(&together, false), Some(Pass { bytes: 32, latencies: 1.0 }));
        // Three loads in flight: three passes go by in one latency.
        let deep = format!("{LOAD}\ts_wait_loadcnt_dscnt 0x202\n");
        assert_eq!(pass_of(&deep, false), Some(Pass { bytes: 16, latencies: 4.0 / 12.0 }));
        assert_eq!(pass_of("\ts_nop 0\n", false).map(|pass| pass.bytes), Some(0));
    }

    #[test]
    fn chased_addresses_and_counted_stores_are_waited_for() {
        let chased =
            format!("\ts_load_b64 s[0:1], s[2:3], 0x0\n\ts_waitcnt lgkmcnt(0)\n{LOAD}\ts_waitcnt vmcnt(0)\n");
        assert_eq!(pass_of(&chased, false), Some(Pass { bytes: 16, latencies: 2.0 }));
        // The store is newer than the load. Where it counts, a wait for all but one leaves the store alone.
        let store = format!("{LOAD}\tglobal_store_b32 v[4:5], v0, off\n\ts_waitcnt vmcnt(1)\n");
        assert_eq!(pass_of(&store, true), Some(Pass { bytes: 16, latencies: 1.0 }));
        assert_eq!(pass_of(&store, false), Some(Pass { bytes: 16, latencies: 0.5 }));
    }
}
