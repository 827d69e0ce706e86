//! Kernels of recurrent layers. Each file in `kernels/` documents its arguments, accepted shapes and launch.

use super::extent::strided;
use super::kernels;
use crate::backend::hip::device::pointer::DevicePtr;

/// Words that describe the rows and arrays of a sequence: `RUN_WORDS` of kernels/recurrent/runs.h.
pub const RUN_WORDS: usize = 8;
/// Most columns of [`SelectiveScan`], and most values of a key of [`DeltaRule`].
pub const SUMMED_MAX: u32 = 256;

kernels! { |launch|
    /// Short convolutions over the rows of each sequence. Grid: 1024 values per workgroup, tiles of rows.
    Convolve [convolve_2, convolve_3, convolve_4] {
        /// f32, row m at `m * x_stride`.
        x: DevicePtr<f32> [strided(rows, x_stride, width)],
        /// `[M]`: the sequence of each row.
        row_seq: DevicePtr<u32> [rows],
        /// `[sequences][8]`: rows and arrays. `row_seq` decides which are read.
        runs: DevicePtr<u32> [at least 8],
        /// f32, that of value c at `4 * c`.
        weight: DevicePtr<f32> [4 * width],
        /// f32 `[width]`, or null.
        bias: DevicePtr<f32> [null or width],
        /// f32, row m at `m * out_stride`.
        out: DevicePtr<f32> [strided(rows, out_stride, width)],
        /// Bytes from an array's start to the state.
        state_offset: u64,
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Values from row to row of `out`.
        out_stride: u32,
        /// Number of rows, M.
        rows: u32,
        /// Rows of a workgroup.
        tile: u32,
        /// Values of a row.
        width: u32,
        /// Number of the sum's activation.
        activation: u32,
    }

    /// The recurrence of Mamba 2. Grid: stripes of a head, heads, sequences.
    SelectiveScan [selective_scan_64, selective_scan_128, selective_scan_256] {
        /// f32, row m at `m * stride`: x of all heads, b of all groups, c of all groups. `runs` decides which rows.
        from: DevicePtr<f32> [at least heads.at_least(launch.y) * head_dim + 2 * groups * columns],
        /// f32, one for each head, row m at `m * steps_stride`. `runs` decides which rows.
        steps: DevicePtr<f32> [at least heads],
        /// f32, that of head h at `h * bias_stride`.
        step_bias: DevicePtr<f32> [strided(heads, bias_stride, 1.into())],
        /// f32, that of head h at `h * rate_stride`.
        rate: DevicePtr<f32> [strided(heads, rate_stride, 1.into())],
        /// f32, that of head h at `h * skip_stride`.
        skip: DevicePtr<f32> [strided(heads, skip_stride, 1.into())],
        /// `[sequences][8]`: rows and arrays.
        runs: DevicePtr<u32> [8 * launch.z],
        /// f32, row m at `m * out_stride`. `runs` decides which rows.
        out: DevicePtr<f32> [at least heads.at_least(launch.y) * head_dim],
        /// Bytes from an array's start to the state.
        state_offset: u64,
        /// Values from row to row of `from`.
        stride: u32,
        /// Values from row to row of `steps`.
        steps_stride: u32,
        /// Values from row to row of `out`.
        out_stride: u32,
        /// 1 or 4.
        bias_stride: u32,
        /// 1 or 4.
        rate_stride: u32,
        /// 1 or 4.
        skip_stride: u32,
        /// Number of heads.
        heads: u32,
        /// Groups of heads.
        groups: u32,
        /// Values of a head.
        head_dim: u32,
        /// Values of b and of c for a group, at most those of the variant.
        columns: u32,
    }

    /// The gated delta rule. Grid: stripes of a value head, value heads, sequences.
    DeltaRule [delta_rule_64, delta_rule_128, delta_rule_256] {
        /// f32, row m at `m * stride`: q and k of all key heads, v of all value heads. `runs` decides which rows.
        from: DevicePtr<f32> [at least 2 * keys * key_dim + values.at_least(launch.y) * value_dim],
        /// f32, one for each value head, row m at `m * decay_stride`. `runs` decides which rows.
        decay: DevicePtr<f32> [at least values],
        /// f32, that of value head h at `h * bias_stride`.
        decay_bias: DevicePtr<f32> [strided(values, bias_stride, 1.into())],
        /// f32, that of value head h at `h * rate_stride`.
        rate: DevicePtr<f32> [strided(values, rate_stride, 1.into())],
        /// f32, one for each value head, row m at `m * amount_stride`. `runs` decides which rows.
        amount: DevicePtr<f32> [at least values],
        /// `[sequences][8]`: rows and arrays.
        runs: DevicePtr<u32> [8 * launch.z],
        /// f32, row m at `m * out_stride`. `runs` decides which rows.
        out: DevicePtr<f32> [at least values.at_least(launch.y) * value_dim],
        /// Bytes from an array's start to the state.
        state_offset: u64,
        /// Added to the squared lengths of q and k, above 0.
        eps: f32,
        /// Values from row to row of `from`.
        stride: u32,
        /// Values from row to row of `decay`.
        decay_stride: u32,
        /// Values from row to row of `amount`.
        amount_stride: u32,
        /// Values from row to row of `out`.
        out_stride: u32,
        /// 1 or 4.
        bias_stride: u32,
        /// 1 or 4.
        rate_stride: u32,
        /// Key heads.
        keys: u32,
        /// Values of a key, at most those of the variant.
        key_dim: u32,
        /// Value heads.
        values: u32,
        /// Values of a value head.
        value_dim: u32,
        /// 1 gives value head h the key head `h % keys`, 0 gives one to neighbours.
        in_turn: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::super::extent::OutOfBounds;
    use super::super::extent::tests::exact;
    use super::*;
    use crate::backend::hip::device::launch::Grid;

    const CONVOLVE: Convolve = Convolve {
        x: DevicePtr::NULL,
        row_seq: DevicePtr::NULL,
        runs: DevicePtr::NULL,
        weight: DevicePtr::NULL,
        bias: DevicePtr::NULL,
        out: DevicePtr::NULL,
        state_offset: 64,
        x_stride: 40,
        out_stride: 24,
        rows: 5,
        tile: 4,
        width: 20,
        activation: 0,
    };

    const SCAN: SelectiveScan = SelectiveScan {
        from: DevicePtr::NULL,
        steps: DevicePtr::NULL,
        step_bias: DevicePtr::NULL,
        rate: DevicePtr::NULL,
        skip: DevicePtr::NULL,
        runs: DevicePtr::NULL,
        out: DevicePtr::NULL,
        state_offset: 0,
        stride: 100,
        steps_stride: 6,
        out_stride: 48,
        bias_stride: 1,
        rate_stride: 4,
        skip_stride: 1,
        heads: 6,
        groups: 2,
        head_dim: 8,
        columns: 12,
    };

    const DELTA: DeltaRule = DeltaRule {
        from: DevicePtr::NULL,
        decay: DevicePtr::NULL,
        decay_bias: DevicePtr::NULL,
        rate: DevicePtr::NULL,
        amount: DevicePtr::NULL,
        runs: DevicePtr::NULL,
        out: DevicePtr::NULL,
        state_offset: 0,
        eps: 1e-6,
        stride: 100,
        decay_stride: 6,
        amount_stride: 6,
        out_stride: 48,
        bias_stride: 4,
        rate_stride: 1,
        keys: 2,
        key_dim: 12,
        values: 6,
        value_dim: 8,
        in_turn: 1,
    };

    #[test]
    fn convolutions_end_with_the_last_row() {
        let grid = Grid::xy(1, 2);
        let sizes = exact!(Convolve::convolve_3, grid, CONVOLVE, [
            x: 180, row_seq: 5, runs: 8, weight: 80, out: 116,
        ]);
        exact!(Convolve::convolve_3, grid, sizes, [bias: 20]);
    }

    #[test]
    fn states_have_rows_for_each_sequence_and_numbers_for_each_head() {
        let grid = Grid::xyz(1, 6, 3);
        let scan = exact!(SelectiveScan::selective_scan_64, grid, SCAN, [
            from: 96, steps: 6, step_bias: 6, rate: 21, skip: 6, runs: 24, out: 48,
        ]);
        let delta = exact!(DeltaRule::delta_rule_64, grid, DELTA, [
            from: 96, decay: 6, decay_bias: 21, rate: 6, amount: 6, runs: 24, out: 48,
        ]);
        // A grid for more heads than there are.
        let far = Grid::xyz(1, 7, 3);
        assert_eq!(SelectiveScan::selective_scan_64.check(&far, &scan).unwrap_err().argument, "from");
        assert_eq!(DeltaRule::delta_rule_64.check(&far, &delta).unwrap_err().argument, "from");
    }
}
