//! Kernels that multiply with weights, and kernels that repack weights.
//!
//! Weights are planar on the device ([`planes`]). A quantised type is multiplied with 8-bit activations, or with f32
//! ones in the checking mode. A float type is multiplied with f32 activations. `kernels/gemv/gemv.h` documents the
//! arguments; [`super::types`] names the kernels of each type, and [`choice`] picks one and shapes its launch.

pub mod choice;
pub mod planes;

use super::kernels;
use crate::backend::hip::device::pointer::DevicePtr;

kernels! {
    /// Repacks groups of 32 values of a quantised tensor from the file's layout into planes.
    Repack [] {
        /// Whole quant blocks as in the file, at any address.
        file: DevicePtr<u8>,
        /// The tensor on the device.
        planes: DevicePtr<u8>,
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
        file: DevicePtr<u8>,
        /// The tensor on the device.
        planes: DevicePtr<u8>,
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
        planes: DevicePtr<u8>,
        /// Values of the tensor.
        weights: u64,
        /// Values of a row.
        cols: u32,
        /// First row.
        first: u32,
        /// Number of rows.
        rows: u32,
        /// f16 `[rows][cols rounded up to 8]`.
        out: DevicePtr<u16>,
    }

    /// f16 matrix product for many rows. [`choice::gemm`] gives the kernel and its grid.
    GemmF16 [gemm_f16_64, gemm_f16_128] {
        /// f16 `[n][w_stride]`.
        w: DevicePtr<u16>,
        /// Values from row to row of `w`.
        w_stride: u32,
        /// Outputs.
        n: u32,
        /// f16 `[rows][x_stride]`.
        x: DevicePtr<u16>,
        /// Values from row to row of `x`.
        x_stride: u32,
        /// f32 `[rows]`.
        x_scale: DevicePtr<f32>,
        /// Inputs.
        k: u32,
        /// Activation rows.
        rows: u32,
        /// f32 `[rows][out_stride]`.
        out: DevicePtr<f32>,
        /// Values from row to row of `out`.
        out_stride: u32,
        /// f32 `[n]`, or null.
        bias: DevicePtr<f32>,
        /// 1 adds to `out`, 0 overwrites it.
        add: u32,
    }

    /// Up to three matrices times 8-bit rows. Grid: [`choice::gemv_grid`].
    GemvA8 [] {
        /// First matrix.
        w0: DevicePtr<u8>,
        /// Second matrix.
        w1: DevicePtr<u8>,
        /// Third matrix.
        w2: DevicePtr<u8>,
        /// Outputs of the first matrix.
        n0: u32,
        /// Outputs of the second matrix, 0 for none.
        n1: u32,
        /// Outputs of the third matrix, 0 for none.
        n2: u32,
        /// f32 `[n0]`, or null.
        bias0: DevicePtr<f32>,
        /// f32 `[n1]`, or null.
        bias1: DevicePtr<f32>,
        /// f32 `[n2]`, or null.
        bias2: DevicePtr<f32>,
        /// Inputs.
        cols: u32,
        /// Activations: i8 `[rows][cols]`.
        codes: DevicePtr<i8>,
        /// f32 `[rows][cols / 32]`.
        scales: DevicePtr<f32>,
        /// i16 `[rows][cols / 16]`.
        sums: DevicePtr<i16>,
        /// Activation rows.
        rows: u32,
        /// f32 `[rows][out_stride]`: outputs of all matrices, one after the other.
        out: DevicePtr<f32>,
        /// Values from row to row of `out`.
        out_stride: u32,
        /// 1 adds to `out`, 0 overwrites it.
        add: u32,
    }

    /// `act(gate x) * (up x)` for 8-bit rows. Grid: [`choice::gated_grid`].
    GemvGatedA8 [] {
        /// Gate matrix.
        gate: DevicePtr<u8>,
        /// Up matrix.
        up: DevicePtr<u8>,
        /// Outputs of each matrix, a multiple of 32 for an A8 result.
        n: u32,
        /// f32 `[n]`, or null.
        gate_bias: DevicePtr<f32>,
        /// f32 `[n]`, or null.
        up_bias: DevicePtr<f32>,
        /// Inputs.
        cols: u32,
        /// Activations: i8 `[rows][cols]`.
        codes: DevicePtr<i8>,
        /// f32 `[rows][cols / 32]`.
        scales: DevicePtr<f32>,
        /// i16 `[rows][cols / 16]`.
        sums: DevicePtr<i16>,
        /// Activation rows.
        rows: u32,
        /// Activation of the gate: [`super::ops::SILU`] or [`super::ops::GELU`].
        activation: u32,
        /// A8 result: i8 `[rows][n]`.
        out_codes: DevicePtr<i8>,
        /// f32 `[rows][n / 32]`.
        out_scales: DevicePtr<f32>,
        /// i16 `[rows][n / 16]`.
        out_sums: DevicePtr<i16>,
        /// f32 `[rows][n]` instead, or null.
        out: DevicePtr<f32>,
    }

    /// One matrix per pair of a row and an expert, 8-bit rows. Grid: [`choice::experts_grid`].
    ExpertsA8 [] {
        /// Address of each expert's matrix.
        table: DevicePtr<u64>,
        /// Expert of each pair.
        experts: DevicePtr<u32>,
        /// Outputs.
        n: u32,
        /// Inputs.
        cols: u32,
        /// Activations: i8 `[rows][cols]`.
        codes: DevicePtr<i8>,
        /// f32 `[rows][cols / 32]`.
        scales: DevicePtr<f32>,
        /// i16 `[rows][cols / 16]`.
        sums: DevicePtr<i16>,
        /// Pairs that share an activation row.
        slots: u32,
        /// f32 `[pairs][out_stride]`.
        out: DevicePtr<f32>,
        /// Values from pair to pair of `out`.
        out_stride: u32,
    }

    /// `act(gate x) * (up x)` per pair of a row and an expert, 8-bit rows. Grid: [`choice::experts_gated_grid`].
    ExpertsGatedA8 [] {
        /// Address of each expert's gate matrix.
        gate_table: DevicePtr<u64>,
        /// Address of each expert's up matrix.
        up_table: DevicePtr<u64>,
        /// Expert of each pair.
        experts: DevicePtr<u32>,
        /// Outputs of each matrix, a multiple of 32 for an A8 result.
        n: u32,
        /// Inputs.
        cols: u32,
        /// Activations: i8 `[rows][cols]`.
        codes: DevicePtr<i8>,
        /// f32 `[rows][cols / 32]`.
        scales: DevicePtr<f32>,
        /// i16 `[rows][cols / 16]`.
        sums: DevicePtr<i16>,
        /// Pairs that share an activation row.
        slots: u32,
        /// Activation of the gate: [`super::ops::SILU`] or [`super::ops::GELU`].
        activation: u32,
        /// A8 result: i8 `[rows][n]`.
        out_codes: DevicePtr<i8>,
        /// f32 `[rows][n / 32]`.
        out_scales: DevicePtr<f32>,
        /// i16 `[rows][n / 16]`.
        out_sums: DevicePtr<i16>,
        /// f32 `[rows][n]` instead, or null.
        out: DevicePtr<f32>,
    }

    /// Up to three matrices times f32 rows. Grid: [`choice::gemv_grid`].
    GemvF32 [] {
        /// First matrix.
        w0: DevicePtr<u8>,
        /// Second matrix.
        w1: DevicePtr<u8>,
        /// Third matrix.
        w2: DevicePtr<u8>,
        /// Outputs of the first matrix.
        n0: u32,
        /// Outputs of the second matrix, 0 for none.
        n1: u32,
        /// Outputs of the third matrix, 0 for none.
        n2: u32,
        /// f32 `[n0]`, or null.
        bias0: DevicePtr<f32>,
        /// f32 `[n1]`, or null.
        bias1: DevicePtr<f32>,
        /// f32 `[n2]`, or null.
        bias2: DevicePtr<f32>,
        /// Inputs.
        cols: u32,
        /// Activations: f32 `[rows][x_stride]`.
        x: DevicePtr<f32>,
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Activation rows.
        rows: u32,
        /// f32 `[rows][out_stride]`: outputs of all matrices, one after the other.
        out: DevicePtr<f32>,
        /// Values from row to row of `out`.
        out_stride: u32,
        /// 1 adds to `out`, 0 overwrites it.
        add: u32,
    }

    /// `act(gate x) * (up x)` for f32 rows. Grid: [`choice::gated_grid`].
    GemvGatedF32 [] {
        /// Gate matrix.
        gate: DevicePtr<u8>,
        /// Up matrix.
        up: DevicePtr<u8>,
        /// Outputs of each matrix, a multiple of 32 for an A8 result.
        n: u32,
        /// f32 `[n]`, or null.
        gate_bias: DevicePtr<f32>,
        /// f32 `[n]`, or null.
        up_bias: DevicePtr<f32>,
        /// Inputs.
        cols: u32,
        /// Activations: f32 `[rows][x_stride]`.
        x: DevicePtr<f32>,
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Activation rows.
        rows: u32,
        /// Activation of the gate: [`super::ops::SILU`] or [`super::ops::GELU`].
        activation: u32,
        /// A8 result: i8 `[rows][n]`.
        out_codes: DevicePtr<i8>,
        /// f32 `[rows][n / 32]`.
        out_scales: DevicePtr<f32>,
        /// i16 `[rows][n / 16]`.
        out_sums: DevicePtr<i16>,
        /// f32 `[rows][n]` instead, or null.
        out: DevicePtr<f32>,
    }

    /// One matrix per pair of a row and an expert, f32 rows. Grid: [`choice::experts_grid`].
    ExpertsF32 [] {
        /// Address of each expert's matrix.
        table: DevicePtr<u64>,
        /// Expert of each pair.
        experts: DevicePtr<u32>,
        /// Outputs.
        n: u32,
        /// Inputs.
        cols: u32,
        /// Activations: f32 `[rows][x_stride]`.
        x: DevicePtr<f32>,
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Pairs that share an activation row.
        slots: u32,
        /// f32 `[pairs][out_stride]`.
        out: DevicePtr<f32>,
        /// Values from pair to pair of `out`.
        out_stride: u32,
    }

    /// `act(gate x) * (up x)` per pair of a row and an expert, f32 rows. Grid: [`choice::experts_gated_grid`].
    ExpertsGatedF32 [] {
        /// Address of each expert's gate matrix.
        gate_table: DevicePtr<u64>,
        /// Address of each expert's up matrix.
        up_table: DevicePtr<u64>,
        /// Expert of each pair.
        experts: DevicePtr<u32>,
        /// Outputs of each matrix, a multiple of 32 for an A8 result.
        n: u32,
        /// Inputs.
        cols: u32,
        /// Activations: f32 `[rows][x_stride]`.
        x: DevicePtr<f32>,
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Pairs that share an activation row.
        slots: u32,
        /// Activation of the gate: [`super::ops::SILU`] or [`super::ops::GELU`].
        activation: u32,
        /// A8 result: i8 `[rows][n]`.
        out_codes: DevicePtr<i8>,
        /// f32 `[rows][n / 32]`.
        out_scales: DevicePtr<f32>,
        /// i16 `[rows][n / 16]`.
        out_sums: DevicePtr<i16>,
        /// f32 `[rows][n]` instead, or null.
        out: DevicePtr<f32>,
    }
}
