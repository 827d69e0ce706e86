//! Kernels that multiply with weights, and those that lay weights out.
//!
//! Weights are planar on the device ([`planes`]). A quantised type meets 8-bit activations or, as a checking mode, f32 ones;
//! a float type f32 ones. `kernels/gemv/gemv.h` says what each argument means; here is how launches are shaped: [`choice`].

pub mod choice;
pub mod planes;

use super::super::pointer::DevicePtr;
use super::kernels;

kernels! {
    /// Groups of 32 values of a quantised tensor from the file's bytes to its planes.
    Repack [
        repack_q8_0,
        repack_q4_0,
        repack_q4_1,
        repack_q5_0,
        repack_q5_1,
        repack_mxfp4,
        repack_q4_k,
        repack_q5_k,
        repack_q6_k,
    ] {
        /// Whole file blocks, at any address.
        file: DevicePtr<u8>,
        /// The tensor.
        planes: DevicePtr<u8>,
        /// Values of the tensor.
        weights: u64,
        /// First group, the first of a file block.
        first: u64,
        /// Groups.
        groups: u64,
    }

    /// Rows of a float tensor from the file's bytes to the device, each padded to 16 bytes.
    RepackRows [repack_rows] {
        /// Whole rows, at any address.
        file: DevicePtr<u8>,
        /// The tensor.
        planes: DevicePtr<u8>,
        /// First row.
        first: u64,
        /// Rows.
        rows: u64,
        /// Bytes of a row in the file.
        row_bytes: u64,
    }

    /// Rows of a tensor as f16, each padded to 16 bytes.
    Dequant [
        dequant_q8_0,
        dequant_q4_0,
        dequant_q4_1,
        dequant_q5_0,
        dequant_q5_1,
        dequant_mxfp4,
        dequant_q4_k,
        dequant_q5_k,
        dequant_q6_k,
        dequant_bf16,
        dequant_f32,
    ] {
        /// The tensor.
        planes: DevicePtr<u8>,
        /// Values of the tensor.
        weights: u64,
        /// Values of a row.
        cols: u32,
        /// First row.
        first: u32,
        /// Rows.
        rows: u32,
        /// f16 `[rows][cols rounded up to 8]`.
        out: DevicePtr<u16>,
    }

    /// f16 matrix product for many rows: [`choice::gemm`] says which and its grid.
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
    GemvA8 [
        gemv_q8_0_a8_1, gemv_q8_0_a8_2, gemv_q8_0_a8_4, gemv_q8_0_a8_8,
        gemv_q4_0_a8_1, gemv_q4_0_a8_2, gemv_q4_0_a8_4, gemv_q4_0_a8_8,
        gemv_q4_1_a8_1, gemv_q4_1_a8_2, gemv_q4_1_a8_4, gemv_q4_1_a8_8,
        gemv_q5_0_a8_1, gemv_q5_0_a8_2, gemv_q5_0_a8_4, gemv_q5_0_a8_8,
        gemv_q5_1_a8_1, gemv_q5_1_a8_2, gemv_q5_1_a8_4, gemv_q5_1_a8_8,
        gemv_mxfp4_a8_1, gemv_mxfp4_a8_2, gemv_mxfp4_a8_4, gemv_mxfp4_a8_8,
        gemv_q4_k_a8_1, gemv_q4_k_a8_2, gemv_q4_k_a8_4, gemv_q4_k_a8_8,
        gemv_q5_k_a8_1, gemv_q5_k_a8_2, gemv_q5_k_a8_4, gemv_q5_k_a8_8,
        gemv_q6_k_a8_1, gemv_q6_k_a8_2, gemv_q6_k_a8_4, gemv_q6_k_a8_8,
    ] {
        /// First matrix.
        w0: DevicePtr<u8>,
        /// Second matrix.
        w1: DevicePtr<u8>,
        /// Third matrix.
        w2: DevicePtr<u8>,
        /// Outputs of the first.
        n0: u32,
        /// Outputs of the second, 0 for none.
        n1: u32,
        /// Outputs of the third, 0 for none.
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
    GemvGatedA8 [
        gemv_gated_q8_0_a8_1, gemv_gated_q8_0_a8_2, gemv_gated_q8_0_a8_4, gemv_gated_q8_0_a8_8,
        gemv_gated_q4_0_a8_1, gemv_gated_q4_0_a8_2, gemv_gated_q4_0_a8_4, gemv_gated_q4_0_a8_8,
        gemv_gated_q4_1_a8_1, gemv_gated_q4_1_a8_2, gemv_gated_q4_1_a8_4, gemv_gated_q4_1_a8_8,
        gemv_gated_q5_0_a8_1, gemv_gated_q5_0_a8_2, gemv_gated_q5_0_a8_4, gemv_gated_q5_0_a8_8,
        gemv_gated_q5_1_a8_1, gemv_gated_q5_1_a8_2, gemv_gated_q5_1_a8_4, gemv_gated_q5_1_a8_8,
        gemv_gated_mxfp4_a8_1, gemv_gated_mxfp4_a8_2, gemv_gated_mxfp4_a8_4, gemv_gated_mxfp4_a8_8,
        gemv_gated_q4_k_a8_1, gemv_gated_q4_k_a8_2, gemv_gated_q4_k_a8_4, gemv_gated_q4_k_a8_8,
        gemv_gated_q5_k_a8_1, gemv_gated_q5_k_a8_2, gemv_gated_q5_k_a8_4, gemv_gated_q5_k_a8_8,
        gemv_gated_q6_k_a8_1, gemv_gated_q6_k_a8_2, gemv_gated_q6_k_a8_4, gemv_gated_q6_k_a8_8,
    ] {
        /// Gate matrix.
        gate: DevicePtr<u8>,
        /// Up matrix.
        up: DevicePtr<u8>,
        /// Outputs of each, a multiple of 32 for an A8 result.
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
        /// What gates go through: [`super::ops::SILU`] or [`super::ops::GELU`].
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
    ExpertsA8 [
        gemv_experts_q8_0_a8,
        gemv_experts_q4_0_a8,
        gemv_experts_q4_1_a8,
        gemv_experts_q5_0_a8,
        gemv_experts_q5_1_a8,
        gemv_experts_mxfp4_a8,
        gemv_experts_q4_k_a8,
        gemv_experts_q5_k_a8,
        gemv_experts_q6_k_a8,
    ] {
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
    ExpertsGatedA8 [
        gemv_experts_gated_q8_0_a8,
        gemv_experts_gated_q4_0_a8,
        gemv_experts_gated_q4_1_a8,
        gemv_experts_gated_q5_0_a8,
        gemv_experts_gated_q5_1_a8,
        gemv_experts_gated_mxfp4_a8,
        gemv_experts_gated_q4_k_a8,
        gemv_experts_gated_q5_k_a8,
        gemv_experts_gated_q6_k_a8,
    ] {
        /// Address of each expert's gate matrix.
        gate_table: DevicePtr<u64>,
        /// Address of each expert's up matrix.
        up_table: DevicePtr<u64>,
        /// Expert of each pair.
        experts: DevicePtr<u32>,
        /// Outputs of each, a multiple of 32 for an A8 result.
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
        /// What gates go through: [`super::ops::SILU`] or [`super::ops::GELU`].
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
    GemvF32 [
        gemv_q8_0_f32_1, gemv_q8_0_f32_4,
        gemv_q4_0_f32_1, gemv_q4_0_f32_4,
        gemv_q4_1_f32_1, gemv_q4_1_f32_4,
        gemv_q5_0_f32_1, gemv_q5_0_f32_4,
        gemv_q5_1_f32_1, gemv_q5_1_f32_4,
        gemv_mxfp4_f32_1, gemv_mxfp4_f32_4,
        gemv_q4_k_f32_1, gemv_q4_k_f32_4,
        gemv_q5_k_f32_1, gemv_q5_k_f32_4,
        gemv_q6_k_f32_1, gemv_q6_k_f32_4,
        gemv_f32_f32_1, gemv_f32_f32_2, gemv_f32_f32_4, gemv_f32_f32_8,
        gemv_f16_f32_1, gemv_f16_f32_2, gemv_f16_f32_4, gemv_f16_f32_8,
        gemv_bf16_f32_1, gemv_bf16_f32_2, gemv_bf16_f32_4, gemv_bf16_f32_8,
    ] {
        /// First matrix.
        w0: DevicePtr<u8>,
        /// Second matrix.
        w1: DevicePtr<u8>,
        /// Third matrix.
        w2: DevicePtr<u8>,
        /// Outputs of the first.
        n0: u32,
        /// Outputs of the second, 0 for none.
        n1: u32,
        /// Outputs of the third, 0 for none.
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
    GemvGatedF32 [
        gemv_gated_q8_0_f32_1, gemv_gated_q8_0_f32_2,
        gemv_gated_q4_0_f32_1, gemv_gated_q4_0_f32_2,
        gemv_gated_q4_1_f32_1, gemv_gated_q4_1_f32_2,
        gemv_gated_q5_0_f32_1, gemv_gated_q5_0_f32_2,
        gemv_gated_q5_1_f32_1, gemv_gated_q5_1_f32_2,
        gemv_gated_mxfp4_f32_1, gemv_gated_mxfp4_f32_2,
        gemv_gated_q4_k_f32_1, gemv_gated_q4_k_f32_2,
        gemv_gated_q5_k_f32_1, gemv_gated_q5_k_f32_2,
        gemv_gated_q6_k_f32_1, gemv_gated_q6_k_f32_2,
        gemv_gated_f32_f32_1, gemv_gated_f32_f32_2, gemv_gated_f32_f32_4, gemv_gated_f32_f32_8,
        gemv_gated_f16_f32_1, gemv_gated_f16_f32_2, gemv_gated_f16_f32_4, gemv_gated_f16_f32_8,
        gemv_gated_bf16_f32_1, gemv_gated_bf16_f32_2, gemv_gated_bf16_f32_4, gemv_gated_bf16_f32_8,
    ] {
        /// Gate matrix.
        gate: DevicePtr<u8>,
        /// Up matrix.
        up: DevicePtr<u8>,
        /// Outputs of each, a multiple of 32 for an A8 result.
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
        /// What gates go through: [`super::ops::SILU`] or [`super::ops::GELU`].
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
    ExpertsF32 [
        gemv_experts_q8_0_f32,
        gemv_experts_q4_0_f32,
        gemv_experts_q4_1_f32,
        gemv_experts_q5_0_f32,
        gemv_experts_q5_1_f32,
        gemv_experts_mxfp4_f32,
        gemv_experts_q4_k_f32,
        gemv_experts_q5_k_f32,
        gemv_experts_q6_k_f32,
        gemv_experts_f32_f32,
        gemv_experts_f16_f32,
        gemv_experts_bf16_f32,
    ] {
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
    ExpertsGatedF32 [
        gemv_experts_gated_q8_0_f32,
        gemv_experts_gated_q4_0_f32,
        gemv_experts_gated_q4_1_f32,
        gemv_experts_gated_q5_0_f32,
        gemv_experts_gated_q5_1_f32,
        gemv_experts_gated_mxfp4_f32,
        gemv_experts_gated_q4_k_f32,
        gemv_experts_gated_q5_k_f32,
        gemv_experts_gated_q6_k_f32,
        gemv_experts_gated_f32_f32,
        gemv_experts_gated_f16_f32,
        gemv_experts_gated_bf16_f32,
    ] {
        /// Address of each expert's gate matrix.
        gate_table: DevicePtr<u64>,
        /// Address of each expert's up matrix.
        up_table: DevicePtr<u64>,
        /// Expert of each pair.
        experts: DevicePtr<u32>,
        /// Outputs of each, a multiple of 32 for an A8 result.
        n: u32,
        /// Inputs.
        cols: u32,
        /// Activations: f32 `[rows][x_stride]`.
        x: DevicePtr<f32>,
        /// Values from row to row of `x`.
        x_stride: u32,
        /// Pairs that share an activation row.
        slots: u32,
        /// What gates go through: [`super::ops::SILU`] or [`super::ops::GELU`].
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
