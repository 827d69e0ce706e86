//! Reads the loads in a kernel's loops from an assembly listing.

/// Bytes that the instructions of a kernel's innermost loops load from global memory. Each instruction counts once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoopLoads {
    pub kernel: String,
    /// Bytes in loads of 16.
    pub wide: u32,
    /// Bytes in loads of 8 or more.
    pub half: u32,
    /// Bytes in all loads.
    pub all: u32,
}

/// One entry for each kernel of the listing.
pub fn loop_loads(listing: &str) -> Vec<LoopLoads> {
    let kernels: Vec<&str> =
        listing.lines().filter_map(|line| line.trim().strip_prefix(".amdhsa_kernel ")).collect();
    let mut found = Vec::new();
    let mut current: Option<LoopLoads> = None;
    let mut in_loop = false;
    for line in listing.lines() {
        if let Some(label) = line.split(':').next().filter(|label| kernels.contains(label)) {
            current = Some(LoopLoads { kernel: label.into(), ..LoopLoads::default() });
            in_loop = false;
        } else if line.starts_with(".Lfunc_end") {
            found.extend(current.take());
        } else if is_block_start(line) {
            in_loop = line.contains("Loop Header") || line.contains("in Loop:");
        } else if let Some(loads) = current.as_mut().filter(|_| in_loop) {
            let bytes = loaded_bytes(line);
            loads.all += bytes;
            loads.wide += if bytes >= 16 { bytes } else { 0 };
            loads.half += if bytes >= 8 { bytes } else { 0 };
        }
    }
    found
}

/// Block starts are `.LBB0_3:` and `; %bb.4:`; the line's comment names the loop that the block belongs to.
fn is_block_start(line: &str) -> bool {
    line.starts_with(".LBB") || line.starts_with("; %bb.")
}

/// Bytes per lane that the instruction of this line loads from global memory; 0 for other instructions.
fn loaded_bytes(line: &str) -> u32 {
    let mnemonic = line.split_whitespace().next().unwrap_or_default();
    let width = ["global_load_", "flat_load_", "buffer_load_"].iter().find_map(|p| mnemonic.strip_prefix(p));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_of_loops_are_counted_by_width() {
        let listing = "\
gemv:                                   ; @gemv
; %bb.0:
\tglobal_load_b32 v1, v[2:3], off
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\tglobal_load_b128 v[4:7], v[2:3], off offset:16
\tglobal_load_u16 v8, v[2:3], off
\tglobal_load_dwordx2 v[8:9], v[2:3], off
\tds_load_b128 v[4:7], v9
; %bb.2:                                ;   in Loop: Header=BB0_1 Depth=1
\tglobal_load_dwordx4 v[4:7], v[2:3], off
; %bb.3:
\tglobal_load_b64 v[4:5], v[2:3], off
.Lfunc_end0:
\t.amdhsa_kernel gemv
other:
.Lfunc_end1:
\t.amdhsa_kernel other
";
        let want = [
            LoopLoads { kernel: "gemv".into(), wide: 32, half: 40, all: 42 },
            LoopLoads { kernel: "other".into(), wide: 0, half: 0, all: 0 },
        ];
        assert_eq!(loop_loads(listing), want);
    }
}
