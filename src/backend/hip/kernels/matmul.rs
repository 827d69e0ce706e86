//! Kernels that multiply with weights, and kernels that repack weights.
//!
//! Weights are planar on the device ([`planes`]). A quantised type is multiplied with 8-bit activations, or with f32
//! ones in the checking mode. A float type is multiplied with f32 activations. `kernels/gemv/gemv.h` documents the
//! arguments; [`super::types`] names the kernels of each type, and [`choice`] picks one and shapes its launch.

pub mod choice;
pub mod planes;

use super::extent::{a8_codes, a8_scales, a8_sums, only, strided, x16_tiled};
use super::kernels;
use crate::backend::hip::device::pointer::DevicePtr;

kernels! { |launch|
    /// Repacks groups of 32 values of a quantised tensor from the file's layout into planes.
    Repack [] {
        /// Whole quant blocks as in the file, at any address.
        file: DevicePtr<u8> [launch.file_bytes((32 * groups).round_up(launch.block()))],
        /// The tensor on the device.
        planes: DevicePtr<u8> [launch.matrix(1, weights.at_least(32 * (first + groups)))],
        /// Values of the tensor.
        weights: u64,
        /// First group; it starts a quant block.
        first: u64,
        /// Number of groups.
        groups: u64,
    }

    /// Copies rows of a float tensor from the file's layout to the device, padding each to 16 bytes.
    RepackRows [repack_rows] {
        /// Whole rows as in the file, at any address.
        file: DevicePtr<u8> [rows * row_bytes],
        /// The tensor on the device.
        planes: DevicePtr<u8> [(first + rows) * row_bytes.round_up(16)],
        /// First row.
        first: u64,
        /// Number of rows.
        rows: u64,
        /// Bytes of a row in the file.
        row_bytes: u64,
    }

    /// Expands rows of a tensor to f16, padding each to 16 bytes.
    Dequant [] {
        /// The tensor on the device.
        planes: DevicePtr<u8> [launch.matrix((weights / cols).at_least(first + rows), cols)],
        /// Values of the tensor.
        weights: u64,
        /// Values of a row.
        cols: u32,
        /// First row.
        first: u32,
        /// Number of rows.
        rows: u32,
        /// f16 `[rows][cols rounded up to 8]`.
        out: DevicePtr<u16> [rows * cols.round_up(8)],
    }

    /// f16 matrix product for many rows. [`choice::gemm`] gives the kernel and its grid.
    GemmF16 [gemm_f16_64, gemm_f16_128] {
        /// f16 `[n][w_stride]`.
        w: DevicePtr<u16> [strided(n.at_least(1), w_stride, k)],
        /// Values from row to row of `w`.
        w_stride: u32,
        /// Outputs.
        n: u32,
        /// f16 `[rows][x_stride]`.
        x: DevicePtr<u16> [strided(rows.at_least(1), x_stride, k)],
        /// Values from row to row of `x`.
        x_stride: u32,
        /// f32 `[rows]`.
        x_scale: DevicePtr<f32> [rows],
        /// Inputs.
        k: u32,
        /// Activation rows.
        rows: u32,
        /// f32 `[rows][out_stride]`.
        out: DevicePtr<f32> [strided(rows, out_stride, n)],
        /// Values from row to row of `out`.
        out_stride: u32,
        /// f32 `[n]`, or null.
        bias: DevicePtr<f32> [null or n],
        /// 1 adds to `out`, 0 overwrites it.
        add: u32,
    }

    /// Up to three quantised matrices times f16 rows, on the matrix unit. Grid: [`choice::gemm_quant_grid`].
    GemmQuant [] {
        /// First matrix.
        w0: DevicePtr<u8> [launch.matrix(n0, cols)],
        /// Second matrix.
        w1: DevicePtr<u8> [launch.matrix(n1, cols)],
        /// Third matrix, which may be of another type.
        w2: DevicePtr<u8> [launch.last_matrix(n2, cols)],
        /// Outputs of the first matrix.
        n0: u32,
        /// Outputs of the second matrix, 0 for none.
        n1: u32,
        /// Outputs of the third matrix, 0 for none.
        n2: u32,
        /// f32 `[n0]`, or null.
        bias0: DevicePtr<f32> [null or n0],
        /// f32 `[n1]`, or null.
        bias1: DevicePtr<f32> [null or n1],
        /// f32 `[n2]`, or null.
        bias2: DevicePtr<f32> [null or n2],
        /// Inputs.
        cols: u32,
        /// f16 `[rows][x_stride]`.
        x: DevicePtr<u16> [strided(launch.rows(rows).at_least(1), x_stride, cols)],
        /// Values from row to row of `x`, a multiple of 8.
        x_stride: u32,
        /// f32 `[rows]`.
        x_scale: DevicePtr<f32> [rows],
        /// Activation rows.
        rows: u32,
        /// f32 `[rows][out_stride]`: outputs of all matrices, one after the other.
        out: DevicePtr<f32> [strided(launch.rows(rows), out_stride, n0 + n1 + n2)],
        /// Values from row to row of `out`.
        out_stride: u32,
        /// 1 adds to `out`, 0 overwrites it.
        add: u32,
        /// f32 `[workgroups][columns * 128]`: sums of the splits. None without splits.
        parts: DevicePtr<f32> [
            launch.if_split(launch.x * launch.y * launch.z * launch.columns() * u64::from(choice::GEMM_TILE))
        ],
        /// `[grid x * grid y]`, all 0 at launch. None without splits.
        counters: DevicePtr<u32> [launch.if_split(launch.x * launch.y)],
    }

    /// Quantised matrices of experts times the f16 rows that chose them, on the matrix unit. Grid:
    /// [`choice::ExpertTiles::grid`].
    GemmExperts [] {
        /// Address of each expert's matrix, 0 if it is absent. `tiles` decides which are read.
        table0: DevicePtr<u64> [at least 1],
        /// The same of a second matrix, whose outputs follow; or null.
        table1: DevicePtr<u64> [null or at least 1],
        /// `[grid y][4]`, from `group_pairs`.
        tiles: DevicePtr<u32> [4 * launch.y],
        /// Pair numbers, from `group_pairs`. `tiles` decides which are read.
        members: DevicePtr<u32> [at least 1],
        /// Outputs of a matrix.
        n: u32,
        /// Inputs.
        cols: u32,
        /// f16 `[rows][x_stride]`. `members` decides which are read.
        x: DevicePtr<u16> [at least cols],
        /// Values from row to row of `x`, a multiple of 8.
        x_stride: u32,
        /// f32 `[rows]`. `members` decides which are read.
        x_scale: DevicePtr<f32> [at least 1],
        /// Pairs that share an activation row.
        slots: u32,
        /// f32 `[pairs][out_stride]`. `members` decides which are written.
        out: DevicePtr<f32> [at least n],
        /// Values from pair to pair of `out`.
        out_stride: u32,
    }

    /// Up to three matrices times f16 rows in tiles, on the matrix unit across waves. Grid: [`choice::gemm_wide_grid`].
    GemmWide [] {
        /// First matrix.
        w0: DevicePtr<u8> [launch.matrix(n0, cols)],
        /// Second matrix.
        w1: DevicePtr<u8> [launch.matrix(n1, cols)],
        /// Third matrix, which may be of another type.
        w2: DevicePtr<u8> [launch.last_matrix(n2, cols)],
        /// Outputs of the first matrix.
        n0: u32,
        /// Outputs of the second matrix, 0 for none.
        n1: u32,
        /// Outputs of the third matrix, 0 for none.
        n2: u32,
        /// f32 `[n0]`, or null.
        bias0: DevicePtr<f32> [null or n0],
        /// f32 `[n1]`, or null.
        bias1: DevicePtr<f32> [null or n1],
        /// f32 `[n2]`, or null.
        bias2: DevicePtr<f32> [null or n2],
        /// Inputs.
        cols: u32,
        /// f16 in tiles.
        x: DevicePtr<u16> [x16_tiled(launch.rows(rows), cols)],
        /// f32 `[rows]`.
        x_scale: DevicePtr<f32> [rows],
        /// Activation rows.
        rows: u32,
        /// f32 `[rows][out_stride]`: outputs of all matrices, one after the other.
        out: DevicePtr<f32> [strided(launch.rows(rows), out_stride, n0 + n1 + n2)],
        /// Values from row to row of `out`.
        out_stride: u32,
        /// 1 adds to `out`, 0 overwrites it.
        add: u32,
        /// f32 `[workgroups][columns * 128]`: sums of the splits. None without splits.
        parts: DevicePtr<f32> [
            launch.if_split(launch.x * launch.y * launch.z * launch.columns() * u64::from(choice::GEMM_TILE))
        ],
        /// `[grid x * grid y]`, all 0 at launch. None without splits.
        counters: DevicePtr<u32> [launch.if_split(launch.x * launch.y)],
    }

    /// The same for many rows, by clusters of workgroups, without splits. Grid: [`choice::gemm_cluster_grid`].
    GemmCluster [] {
        /// First matrix.
        w0: DevicePtr<u8> [launch.matrix(n0, cols)],
        /// Second matrix.
        w1: DevicePtr<u8> [launch.matrix(n1, cols)],
        /// Third matrix.
        w2: DevicePtr<u8> [launch.matrix(n2, cols)],
        /// Outputs of the first matrix.
        n0: u32,
        /// Outputs of the second matrix, 0 for none.
        n1: u32,
        /// Outputs of the third matrix, 0 for none.
        n2: u32,
        /// f32 `[n0]`, or null.
        bias0: DevicePtr<f32> [null or n0],
        /// f32 `[n1]`, or null.
        bias1: DevicePtr<f32> [null or n1],
        /// f32 `[n2]`, or null.
        bias2: DevicePtr<f32> [null or n2],
        /// Inputs.
        cols: u32,
        /// f16 in tiles.
        x: DevicePtr<u16> [x16_tiled(rows, cols)],
        /// f32 `[rows]`.
        x_scale: DevicePtr<f32> [rows],
        /// Activation rows.
        rows: u32,
        /// f32 `[rows][out_stride]`: outputs of all matrices, one after the other.
        out: DevicePtr<f32> [strided(rows, out_stride, n0 + n1 + n2)],
        /// Values from row to row of `out`.
        out_stride: u32,
        /// 1 adds to `out`, 0 overwrites it.
        add: u32,
    }

    /// Quantised matrices of experts times the f16 rows in tiles that chose them, on the matrix unit across waves. Grid:
    /// [`choice::ExpertTiles::wide_grid`].
    GemmWideExperts [] {
        /// Address of each expert's matrix, 0 if it is absent. `tiles` decides which are read.
        table0: DevicePtr<u64> [at least 1],
        /// The same of a second matrix, whose outputs follow; or null.
        table1: DevicePtr<u64> [null or at least 1],
        /// `[grid y][4]`, from `group_pairs`.
        tiles: DevicePtr<u32> [4 * launch.y],
        /// Pair numbers, from `group_pairs`. `tiles` decides which are read.
        members: DevicePtr<u32> [at least 1],
        /// Outputs of a matrix.
        n: u32,
        /// Inputs.
        cols: u32,
        /// f16 in tiles. `members` decides which are read.
        x: DevicePtr<u16> [at least x16_tiled(1u64.into(), cols)],
        /// f32 `[rows]`. `members` decides which are read.
        x_scale: DevicePtr<f32> [at least 1],
        /// Pairs that share an activation row.
        slots: u32,
        /// f32 `[pairs][out_stride]`. `members` decides which are written.
        out: DevicePtr<f32> [at least n],
        /// Values from pair to pair of `out`.
        out_stride: u32,
    }

    /// Up to three matrices times 8-bit rows. Grid: [`choice::gemv_grid`].
    GemvA8 [] {
        /// First matrix.
        w0: DevicePtr<u8> [launch.matrix(n0, cols)],
        /// Second matrix.
        w1: DevicePtr<u8> [launch.matrix(n1, cols)],
        /// Third matrix, which may be of another type.
        w2: DevicePtr<u8> [launch.last_matrix(n2, cols)],
        /// Outputs of the first matrix.
        n0: u32,
        /// Outputs of the second matrix, 0 for none.
        n1: u32,
        /// Outputs of the third matrix, 0 for none.
        n2: u32,
        /// f32 `[n0]`, or null.
        bias0: DevicePtr<f32> [null or n0],
        /// f32 `[n1]`, or null.
        bias1: DevicePtr<f32> [null or n1],
        /// f32 `[n2]`, or null.
        bias2: DevicePtr<f32> [null or n2],
        /// Inputs.
        cols: u32,
        /// Activation codes: i8 `[rows][cols]`.
        codes: DevicePtr<i8> [a8_codes(launch.rows(rows), cols)],
        /// f32 `[rows][cols / 32]`.
        scales: DevicePtr<f32> [a8_scales(launch.rows(rows), cols)],
        /// i16 `[rows][cols / 16]`.
        sums: DevicePtr<i16> [a8_sums(launch.rows(rows), cols)],
        /// Activation rows.
        rows: u32,
        /// f32 `[rows][out_stride]`: outputs of all matrices, one after the other.
        out: DevicePtr<f32> [strided(launch.rows(rows), out_stride, n0 + n1 + n2)],
        /// Values from row to row of `out`.
        out_stride: u32,
        /// 1 adds to `out`, 0 overwrites it.
        add: u32,
    }

    /// `act(gate x) * (up x)` for 8-bit rows. Grid: [`choice::gated_grid`].
    GemvGatedA8 [] {
        /// Gate matrix.
        gate: DevicePtr<u8> [launch.matrix(n, cols)],
        /// Up matrix.
        up: DevicePtr<u8> [launch.matrix(n, cols)],
        /// Outputs of each matrix, a multiple of 32 for an A8 result.
        n: u32,
        /// f32 `[n]`, or null.
        gate_bias: DevicePtr<f32> [null or n],
        /// f32 `[n]`, or null.
        up_bias: DevicePtr<f32> [null or n],
        /// Inputs.
        cols: u32,
        /// Activation codes: i8 `[rows][cols]`.
        codes: DevicePtr<i8> [a8_codes(launch.rows(rows), cols)],
        /// f32 `[rows][cols / 32]`.
        scales: DevicePtr<f32> [a8_scales(launch.rows(rows), cols)],
        /// i16 `[rows][cols / 16]`.
        sums: DevicePtr<i16> [a8_sums(launch.rows(rows), cols)],
        /// Activation rows.
        rows: u32,
        /// Activation of the gate: [`super::ops::SILU`] or [`super::ops::GELU`].
        activation: u32,
        /// A8 result: i8 `[rows][n]`.
        out_codes: DevicePtr<i8> [only(out.is_null(), a8_codes(launch.rows(rows), n))],
        /// f32 `[rows][n / 32]`.
        out_scales: DevicePtr<f32> [only(out.is_null(), a8_scales(launch.rows(rows), n))],
        /// i16 `[rows][n / 16]`.
        out_sums: DevicePtr<i16> [only(out.is_null(), a8_sums(launch.rows(rows), n))],
        /// f32 `[rows][n]` instead, or null.
        out: DevicePtr<f32> [null or launch.rows(rows) * n],
    }

    /// One matrix per pair of a row and an expert, 8-bit rows. Grid: [`choice::experts_grid`].
    ExpertsA8 [] {
        /// Address of each expert's matrix. `experts` decides which are read.
        table: DevicePtr<u64> [at least 1],
        /// Expert of each pair.
        experts: DevicePtr<u32> [launch.y],
        /// Outputs.
        n: u32,
        /// Inputs.
        cols: u32,
        /// Activation codes: i8 `[rows][cols]`.
        codes: DevicePtr<i8> [a8_codes(launch.y.div_ceil(slots), cols)],
        /// f32 `[rows][cols / 32]`.
        scales: DevicePtr<f32> [a8_scales(launch.y.div_ceil(slots), cols)],
        /// i16 `[rows][cols / 16]`.
        sums: DevicePtr<i16> [a8_sums(launch.y.div_ceil(slots), cols)],
        /// Pairs that share an activation row.
        slots: u32,
        /// f32 `[pairs][out_stride]`.
        out: DevicePtr<f32> [strided(launch.y, out_stride, n)],
        /// Values from pair to pair of `out`.
        out_stride: u32,
        /// 1: a launch before the last wrote `experts`.
        chosen_before: u32,
    }

    /// `act(gate x) * (up x)` per pair of a row and an expert, 8-bit rows. Grid: [`choice::experts_gated_grid`].
    ExpertsGatedA8 [] {
        /// Address of each expert's gate matrix. `experts` decides which are read.
        gate_table: DevicePtr<u64> [at least 1],
        /// Address of each expert's up matrix. `experts` decides which are read.
        up_table: DevicePtr<u64> [at least 1],
        /// Expert of each pair.
        experts: DevicePtr<u32> [launch.y],
        /// Outputs of each matrix, a multiple of 32 for an A8 result.
        n: u32,
        /// Inputs.
        cols: u32,
        /// Activation codes: i8 `[rows][cols]`.
        codes: DevicePtr<i8> [a8_codes(launch.y.div_ceil(slots), cols)],
        /// f32 `[rows][cols / 32]`.
        scales: DevicePtr<f32> [a8_scales(launch.y.div_ceil(slots), cols)],
        /// i16 `[rows][cols / 16]`.
        sums: DevicePtr<i16> [a8_sums(launch.y.div_ceil(slots), cols)],
        /// Pairs that share an activation row.
        slots: u32,
        /// Activation of the gate: [`super::ops::SILU`] or [`super::ops::GELU`].
        activation: u32,
        /// A8 result: i8 `[rows][n]`.
        out_codes: DevicePtr<i8> [only(out.is_null(), a8_codes(launch.y, n))],
        /// f32 `[rows][n / 32]`.
        out_scales: DevicePtr<f32> [only(out.is_null(), a8_scales(launch.y, n))],
        /// i16 `[rows][n / 16]`.
        out_sums: DevicePtr<i16> [only(out.is_null(), a8_sums(launch.y, n))],
        /// f32 `[rows][n]` instead, or null.
        out: DevicePtr<f32> [null or launch.y * n],
    }

    /// Up to three matrices times f32 rows. Grid: [`choice::gemv_grid`].
    GemvF32 [] {
        /// First matrix.
        w0: DevicePtr<u8> [launch.matrix(n0, cols)],
        /// Second matrix.
        w1: DevicePtr<u8> [launch.matrix(n1, cols)],
        /// Third matrix.
        w2: DevicePtr<u8> [launch.matrix(n2, cols)],
        /// Outputs of the first matrix.
        n0: u32,
        /// Outputs of the second matrix, 0 for none.
        n1: u32,
        /// Outputs of the third matrix, 0 for none.
        n2: u32,
        /// f32 `[n0]`, or null.
        bias0: DevicePtr<f32> [null or n0],
        /// f32 `[n1]`, or null.
        bias1: DevicePtr<f32> [null or n1],
        /// f32 `[n2]`, or null.
        bias2: DevicePtr<f32> [null or n2],
        /// Inputs.
        cols: u32,
        /// Activations: f32 `[rows][x_stride]`.
        x: DevicePtr<f32> [strided(launch.rows(rows), x_stride, cols)],
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Activation rows.
        rows: u32,
        /// f32 `[rows][out_stride]`: outputs of all matrices, one after the other.
        out: DevicePtr<f32> [strided(launch.rows(rows), out_stride, n0 + n1 + n2)],
        /// Values from row to row of `out`.
        out_stride: u32,
        /// 1 adds to `out`, 0 overwrites it.
        add: u32,
    }

    /// `act(gate x) * (up x)` for f32 rows. Grid: [`choice::gated_grid`].
    GemvGatedF32 [] {
        /// Gate matrix.
        gate: DevicePtr<u8> [launch.matrix(n, cols)],
        /// Up matrix.
        up: DevicePtr<u8> [launch.matrix(n, cols)],
        /// Outputs of each matrix, a multiple of 32 for an A8 result.
        n: u32,
        /// f32 `[n]`, or null.
        gate_bias: DevicePtr<f32> [null or n],
        /// f32 `[n]`, or null.
        up_bias: DevicePtr<f32> [null or n],
        /// Inputs.
        cols: u32,
        /// Activations: f32 `[rows][x_stride]`.
        x: DevicePtr<f32> [strided(launch.rows(rows), x_stride, cols)],
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Activation rows.
        rows: u32,
        /// Activation of the gate: [`super::ops::SILU`] or [`super::ops::GELU`].
        activation: u32,
        /// A8 result: i8 `[rows][n]`.
        out_codes: DevicePtr<i8> [only(out.is_null(), a8_codes(launch.rows(rows), n))],
        /// f32 `[rows][n / 32]`.
        out_scales: DevicePtr<f32> [only(out.is_null(), a8_scales(launch.rows(rows), n))],
        /// i16 `[rows][n / 16]`.
        out_sums: DevicePtr<i16> [only(out.is_null(), a8_sums(launch.rows(rows), n))],
        /// f32 `[rows][n]` instead, or null.
        out: DevicePtr<f32> [null or launch.rows(rows) * n],
    }

    /// A matrix for each head times a part of each head of f32 rows. Grid: [`choice::heads_grid`].
    GemvHeads [] {
        /// The matrices of all heads, as one tensor.
        w: DevicePtr<u8> [launch.matrix(launch.z * n, cols)],
        /// Outputs of a head.
        n: u32,
        /// Values of the part.
        cols: u32,
        /// f32: the part of head h of row m at `m * x_stride + h * x_head`.
        x: DevicePtr<f32> [strided(launch.rows(rows), x_stride, strided(launch.z, x_head, cols))],
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Values from head to head of `x`, a multiple of 4.
        x_head: u32,
        /// Activation rows.
        rows: u32,
        /// f32: outputs of head h of row m at `m * out_stride + h * n`.
        out: DevicePtr<f32> [strided(launch.rows(rows), out_stride, launch.z * n)],
        /// Values from row to row of `out`.
        out_stride: u32,
    }

    /// One matrix per pair of a row and an expert, f32 rows. Grid: [`choice::experts_grid`].
    ExpertsF32 [] {
        /// Address of each expert's matrix. `experts` decides which are read.
        table: DevicePtr<u64> [at least 1],
        /// Expert of each pair.
        experts: DevicePtr<u32> [launch.y],
        /// Outputs.
        n: u32,
        /// Inputs.
        cols: u32,
        /// Activations: f32 `[rows][x_stride]`.
        x: DevicePtr<f32> [strided(launch.y.div_ceil(slots), x_stride, cols)],
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Pairs that share an activation row.
        slots: u32,
        /// f32 `[pairs][out_stride]`.
        out: DevicePtr<f32> [strided(launch.y, out_stride, n)],
        /// Values from pair to pair of `out`.
        out_stride: u32,
        /// 1: a launch before the last wrote `experts`.
        chosen_before: u32,
    }

    /// `act(gate x) * (up x)` per pair of a row and an expert, f32 rows. Grid: [`choice::experts_gated_grid`].
    ExpertsGatedF32 [] {
        /// Address of each expert's gate matrix. `experts` decides which are read.
        gate_table: DevicePtr<u64> [at least 1],
        /// Address of each expert's up matrix. `experts` decides which are read.
        up_table: DevicePtr<u64> [at least 1],
        /// Expert of each pair.
        experts: DevicePtr<u32> [launch.y],
        /// Outputs of each matrix, a multiple of 32 for an A8 result.
        n: u32,
        /// Inputs.
        cols: u32,
        /// Activations: f32 `[rows][x_stride]`.
        x: DevicePtr<f32> [strided(launch.y.div_ceil(slots), x_stride, cols)],
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Pairs that share an activation row.
        slots: u32,
        /// Activation of the gate: [`super::ops::SILU`] or [`super::ops::GELU`].
        activation: u32,
        /// A8 result: i8 `[rows][n]`.
        out_codes: DevicePtr<i8> [only(out.is_null(), a8_codes(launch.y, n))],
        /// f32 `[rows][n / 32]`.
        out_scales: DevicePtr<f32> [only(out.is_null(), a8_scales(launch.y, n))],
        /// i16 `[rows][n / 16]`.
        out_sums: DevicePtr<i16> [only(out.is_null(), a8_sums(launch.y, n))],
        /// f32 `[rows][n]` instead, or null.
        out: DevicePtr<f32> [null or launch.y * n],
    }
}
