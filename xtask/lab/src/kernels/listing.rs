//! Reads assembly listings of the compiler: kernels, their blocks and loops, and the loads in them.

use std::collections::HashMap;

/// A kernel's code.
#[derive(Debug)]
pub struct Kernel<'a> {
    pub name: &'a str,
    /// In the order of the listing, so a block without a last jump goes on in the next one.
    pub blocks: Vec<Block<'a>>,
}

/// Instructions that run one after the other.
#[derive(Debug, Default)]
pub struct Block<'a> {
    /// `BB0_3`, or empty where no jump leads.
    pub label: &'a str,
    /// Label of the header of the innermost loop around it.
    pub in_loop: Option<&'a str>,
    pub instructions: Vec<Instruction<'a>>,
}

/// An instruction without its comment.
#[derive(Clone, Copy, Debug)]
pub struct Instruction<'a> {
    pub name: &'a str,
    pub operands: &'a str,
}

/// The kernels of a listing.
pub fn kernels(listing: &str) -> Vec<Kernel<'_>> {
    let names: Vec<&str> =
        listing.lines().filter_map(|line| line.trim().strip_prefix(".amdhsa_kernel ")).collect();
    let mut found = Vec::new();
    let mut current: Option<Kernel<'_>> = None;
    for line in listing.lines() {
        if let Some(name) = line.split(':').next().filter(|label| names.contains(label)) {
            current = Some(Kernel { name, blocks: vec![Block::default()] });
        } else if line.starts_with(".Lfunc_end") {
            found.extend(current.take());
        } else if let Some(kernel) = &mut current {
            kernel.read(line);
        }
    }
    found
}

impl<'a> Kernel<'a> {
    fn read(&mut self, line: &'a str) {
        let (code, comment) = line.split_once(';').unwrap_or((line, ""));
        if line.starts_with(".LBB") || line.starts_with("; %bb.") {
            let label = code.split(':').next().and_then(|label| label.strip_prefix(".L"));
            self.blocks.push(Block { label: label.unwrap_or_default(), ..Block::default() });
        }
        let Some(block) = self.blocks.last_mut() else { return };
        // A block's comments follow its label: `=>This Inner Loop Header`, `in Loop: Header=BB0_4`. A header's also name the
        // loops around it.
        if let Some((_, header)) = comment.split_once("in Loop: Header=") {
            block.in_loop = header.split_whitespace().next();
        } else if comment.contains("Loop Header: Depth") {
            block.in_loop = Some(block.label);
        }
        let mut words = code.trim().splitn(2, char::is_whitespace);
        let name = words.next().unwrap_or_default();
        if !name.is_empty() && !name.starts_with('.') {
            let operands = words.next().unwrap_or_default().trim();
            block.instructions.push(Instruction { name, operands });
        }
    }

    pub fn instructions(&self) -> impl Iterator<Item = Instruction<'a>> {
        self.blocks.iter().flat_map(|block| block.instructions.iter().copied())
    }

    /// Bytes that a lane loads in the blocks of `header`'s loop, without loops inside it.
    pub fn bytes_of_loop(&self, header: &str) -> u32 {
        let own = self.blocks.iter().filter(|block| block.in_loop == Some(header));
        own.map(Block::loaded_bytes).sum()
    }

    /// Header of the loop that loads most bytes by itself. `None` if no loop loads anything.
    pub fn streaming_loop(&self) -> Option<&'a str> {
        let headers = self.blocks.iter().filter(|block| block.in_loop == Some(block.label)).map(|b| b.label);
        headers
            .max_by_key(|header| self.bytes_of_loop(header))
            .filter(|header| self.bytes_of_loop(header) > 0)
    }

    /// Numbers of the blocks that may follow block `at`.
    pub fn successors(&self, at: usize) -> Vec<usize> {
        let places: HashMap<&str, usize> =
            self.blocks.iter().enumerate().map(|(n, block)| (block.label, n)).collect();
        let mut next = Vec::new();
        for instruction in &self.blocks[at].instructions {
            let jumps = instruction.name.starts_with("s_cbranch_") || instruction.name == "s_branch";
            let target = instruction.operands.strip_prefix(".L").filter(|_| jumps);
            next.extend(target.and_then(|label| places.get(label)));
            if matches!(instruction.name, "s_branch" | "s_endpgm" | "s_setpc_b64") {
                return next;
            }
        }
        next.extend(Some(at + 1).filter(|n| *n < self.blocks.len()));
        next
    }
}

impl Block<'_> {
    fn loaded_bytes(&self) -> u32 {
        self.instructions.iter().map(Instruction::loaded_bytes).sum()
    }
}

impl Instruction<'_> {
    /// Bytes per lane that this instruction loads from global memory.
    pub fn loaded_bytes(&self) -> u32 {
        let prefixes = ["global_load_", "flat_load_", "buffer_load_"];
        let width = prefixes.iter().find_map(|prefix| self.name.strip_prefix(prefix));
        match width.unwrap_or_default() {
            "dwordx4" | "b128" => 16,
            "dwordx3" | "b96" => 12,
            "dwordx2" | "b64" => 8,
            "dword" | "b32" => 4,
            width if width.contains("16") || width.contains("short") => 2,
            width if width.contains("u8") || width.contains("i8") || width.contains("byte") => 1,
            _ => 0,
        }
    }
}

/// Bytes that the instructions of a kernel's loops load from global memory. Each instruction counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoopLoads {
    /// Bytes in loads of 16.
    pub wide: u32,
    /// Bytes in loads of 8 or more.
    pub half: u32,
    /// Bytes in all loads.
    pub all: u32,
}

/// The loads of a kernel's loops.
pub fn loop_loads(kernel: &Kernel<'_>) -> LoopLoads {
    let mut loads = LoopLoads::default();
    for block in kernel.blocks.iter().filter(|block| block.in_loop.is_some()) {
        for bytes in block.instructions.iter().map(Instruction::loaded_bytes) {
            loads.all += bytes;
            loads.wide += if bytes >= 16 { bytes } else { 0 };
            loads.half += if bytes >= 8 { bytes } else { 0 };
        }
    }
    loads
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "\
gemv:                                   ; @gemv
; %bb.0:
\tglobal_load_b32 v1, v[2:3], off
.LBB0_1:                                ; =>This Loop Header: Depth=1
                                        ;     Child Loop BB0_2 Depth 2
\tglobal_load_b128 v[4:7], v[2:3], off offset:16
\tglobal_load_u16 v8, v[2:3], off
\tglobal_load_dwordx2 v[8:9], v[2:3], off
\ts_cbranch_scc1 .LBB0_3
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
                                        ; =>  This Inner Loop Header: Depth=2
\tds_load_b128 v[4:7], v9
\tglobal_load_d16_b16 v1, v[2:3], off
\ts_cbranch_vccnz .LBB0_2
.LBB0_3:                                ;   in Loop: Header=BB0_1 Depth=1
\tglobal_load_dwordx4 v[4:7], v[2:3], off
\ts_branch .LBB0_1
; %bb.4:
\tglobal_load_b64 v[4:5], v[2:3], off
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel gemv
other:
.Lfunc_end1:
\t.amdhsa_kernel other
";

    #[test]
    fn loads_of_loops_are_counted_by_width() {
        let found: Vec<_> = kernels(LISTING).iter().map(|kernel| (kernel.name, loop_loads(kernel))).collect();
        let want = [("gemv", LoopLoads { wide: 32, half: 40, all: 44 }), ("other", LoopLoads::default())];
        assert_eq!(found, want);
    }

    #[test]
    fn blocks_know_their_loop_and_what_follows() {
        let all = kernels(LISTING);
        let gemv = &all[0];
        let loops: Vec<_> = gemv.blocks.iter().map(|block| block.in_loop).collect();
        assert_eq!(loops, [None, None, Some("BB0_1"), Some("BB0_2"), Some("BB0_1"), None]);
        let next: Vec<_> = (0..gemv.blocks.len()).map(|n| gemv.successors(n)).collect();
        assert_eq!(next, [vec![1], vec![2], vec![4, 3], vec![3, 4], vec![2], vec![]]);
        assert_eq!((gemv.streaming_loop(), gemv.bytes_of_loop("BB0_1")), (Some("BB0_1"), 42));
        assert_eq!(all[1].streaming_loop(), None);
    }
}
