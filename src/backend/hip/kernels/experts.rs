//! Kernels that choose experts for rows, and that join the experts' results. Each file in `kernels/` documents its arguments,
//! accepted shapes and launch.

use super::extent::{a8_codes, a8_scales, a8_sums, only};
use super::kernels;
use crate::backend::hip::device::pointer::DevicePtr;

/// Most values of a row of [`Router`]: a norm's workgroup is as large as the router's up to there.
pub const ROUTER_COLS: u32 = 4096;
/// Experts per workgroup of [`Router`].
pub const ROUTER_EXPERTS: u32 = 8;

kernels! { |launch|
    /// Chooses the experts of each row. Grid: 8 rows per workgroup.
    Route [route] {
        /// f32 `[M][count]`.
        logits: DevicePtr<f32> [rows.at_least(1) * count],
        /// f32 `[count]`, added to the chances for the choice; or null.
        bias: DevicePtr<f32> [null or count],
        /// `[M]`: page table of each row; a padding row gets no experts.
        row_seq: DevicePtr<u32> [rows.at_least(1)],
        /// Address of each expert, 0 if it is absent; or null.
        table: DevicePtr<u64> [null or count],
        /// `[M][used]`, best first.
        experts: DevicePtr<u32> [rows * used],
        /// f32 `[M][used]`.
        weights: DevicePtr<f32> [rows * used],
        /// `[1]`: becomes 1 when a row chose an absent expert; or null.
        absent: DevicePtr<u32> [null or 1],
        /// Factor of the weights.
        scale: f32,
        /// Number of rows, M.
        rows: u32,
        /// Number of experts, at most 512.
        count: u32,
        /// Experts per row.
        used: u32,
        /// 1 normalises weights over the chosen experts, 0 over all, or not at all if chances are sigmoids.
        normalise: u32,
        /// 1 makes chances by a sigmoid of each logit, 0 by a softmax over all.
        sigmoid: u32,
    }

    /// Chooses the experts of each row, of the best groups alone. Grid: rows.
    RouteGroups [route_groups] {
        /// f32 `[M][count]`.
        logits: DevicePtr<f32> [rows.at_least(1) * count],
        /// f32 `[count]`, added to the chances for the choice; or null.
        bias: DevicePtr<f32> [null or count],
        /// `[M]`: page table of each row; a padding row gets no experts.
        row_seq: DevicePtr<u32> [rows.at_least(1)],
        /// Address of each expert, 0 if it is absent; or null.
        table: DevicePtr<u64> [null or count],
        /// `[M][used]`, best first.
        experts: DevicePtr<u32> [rows * used],
        /// f32 `[M][used]`.
        weights: DevicePtr<f32> [rows * used],
        /// `[1]`: becomes 1 when a row chose an absent expert; or null.
        absent: DevicePtr<u32> [null or 1],
        /// Factor of the weights.
        scale: f32,
        /// Number of rows, M.
        rows: u32,
        /// Number of experts, at most 512.
        count: u32,
        /// Experts per row.
        used: u32,
        /// 1 normalises weights over the chosen experts, 0 over all, or not at all if chances are sigmoids.
        normalise: u32,
        /// 1 makes chances by a sigmoid of each logit, 0 by a softmax over all.
        sigmoid: u32,
        /// Runs of neighbouring experts, at least 2 in each.
        groups: u32,
        /// Groups of which experts are chosen.
        groups_used: u32,
    }

    /// RMS norm to 8-bit rows, products with a router's weights, and the choice of experts. Grid: 8 experts per workgroup, rows.
    Router [router] {
        /// f32 `[M][cols]`.
        x: DevicePtr<f32> [launch.y * cols],
        /// f32 `[cols]`: weights of the norm.
        gain: DevicePtr<f32> [cols],
        /// f32 `[count][cols]`: the router's weights.
        w: DevicePtr<f32> [count * cols],
        /// f32 `[count]`, added to the logits; or null.
        w_bias: DevicePtr<f32> [null or count],
        /// i8 `[M][padded]`.
        codes: DevicePtr<i8> [a8_codes(launch.y, padded)],
        /// f32 `[M][padded / 32]`.
        scales: DevicePtr<f32> [a8_scales(launch.y, padded)],
        /// i16 `[M][padded / 16]`.
        sums: DevicePtr<i16> [a8_sums(launch.y, padded)],
        /// f32 `[M][count]`: scratch.
        logits: DevicePtr<f32> [launch.y * count],
        /// `[M]`, all 0 at launch.
        counters: DevicePtr<u32> [launch.y],
        /// f32 `[count]`, added to the chances for the choice; or null.
        bias: DevicePtr<f32> [null or count],
        /// `[M]`: page table of each row; a padding row gets no experts.
        row_seq: DevicePtr<u32> [launch.y],
        /// Address of each expert, 0 if it is absent; or null.
        table: DevicePtr<u64> [null or count],
        /// `[M][used]`, best first.
        experts: DevicePtr<u32> [launch.y * used],
        /// f32 `[M][used]`.
        weights: DevicePtr<f32> [launch.y * used],
        /// `[1]`: becomes 1 when a row chose an absent expert; or null.
        absent: DevicePtr<u32> [null or 1],
        /// Epsilon added to the mean square.
        eps: f32,
        /// Factor of the weights.
        scale: f32,
        /// Values of a row: a multiple of 4, at most [`ROUTER_COLS`].
        cols: u32,
        /// Values of a row, padded with zeros to a multiple of 32.
        padded: u32,
        /// Number of experts, at most 512.
        count: u32,
        /// Experts per row.
        used: u32,
        /// As of [`Route`].
        normalise: u32,
        /// As of [`Route`].
        sigmoid: u32,
    }

    /// Sorts pairs of a row and an expert by expert, in tiles of at most `size`. Grid:
    /// [`super::matmul::choice::ExpertTiles::group_grid`].
    GroupPairs [group_pairs] {
        /// `[pairs]`: expert of each pair.
        experts: DevicePtr<u32> [pairs],
        /// `[pairs]`: pair numbers, expert by expert.
        members: DevicePtr<u32> [pairs],
        /// `[tiles_max][4]`: expert, first of `members`, pairs, 0.
        tiles: DevicePtr<u32> [4 * tiles_max.at_least(pairs.min(pairs / size + count))],
        /// Number of pairs.
        pairs: u32,
        /// Number of experts, at most 512.
        count: u32,
        /// Most pairs of a tile.
        size: u32,
        /// Entries of `tiles`.
        tiles_max: u32,
    }

    /// Residual += weighted sum of the experts' results. Grid: 1024 values per workgroup, rows.
    Combine [combine] {
        /// f32 `[pairs][cols]`.
        results: DevicePtr<f32> [launch.y * used * cols],
        /// f32 `[M][used]`.
        weights: DevicePtr<f32> [launch.y * used],
        /// `[pairs]`: the expert of each pair, or null: there are no factors and no biases.
        experts: DevicePtr<u32> [null or launch.y * used],
        /// f32, one for each expert, or null. `experts` decides which are read.
        factor: DevicePtr<f32> [null or at least only(!experts.is_null(), 1)],
        /// f32, row e at e times `cols` rounded up to 4, or null. `experts` decides which are read.
        bias: DevicePtr<f32> [null or at least only(!experts.is_null(), cols)],
        /// f32 `[M][cols]`.
        residual: DevicePtr<f32> [launch.y * cols],
        /// Experts of a row.
        used: u32,
        /// Values of a row.
        cols: u32,
    }
}
