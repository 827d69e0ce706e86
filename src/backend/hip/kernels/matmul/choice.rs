//! Choice of a kernel by weight type and row count, and the shape of its launch.

use super::super::super::launch::Grid;
use super::super::Kernel;
use super::{
    Dequant, ExpertsA8, ExpertsF32, ExpertsGatedA8, ExpertsGatedF32, GemmF16, GemvA8, GemvF32, GemvGatedA8,
    GemvGatedF32, Repack,
};
use crate::tensor::DType;

/// Outputs per tile of `gemv_*` and `gemv_experts_*`.
const GEMV_TILE: u32 = 16;
/// Above this many workgroups, each takes several tiles. 1024 is more than any device runs at a time, so none is idle.
/// It is few enough that a workgroup's start, when it waits for its activations, costs little.
const GEMV_BLOCKS: u32 = 1024;
/// Outputs per workgroup of `gemv_gated_*` and `gemv_experts_gated_*`.
const GATED_TILE: u32 = 32;
/// With fewer workgroups of `gemm_f16_128`, the smaller tiles of `gemm_f16_64` fill a large device better.
const GEMM_BLOCKS: u32 = 128;

/// A kernel, and the activation rows that one workgroup takes.
#[derive(Debug)]
pub struct Columns<A> {
    /// The kernel to launch.
    pub kernel: Kernel<A>,
    /// Activation rows per workgroup.
    pub columns: u32,
}

/// The variant with the fewest columns that still takes all `rows`, else the widest one.
fn fitting<A: super::super::Arguments, const N: usize>(
    kernels: [(Kernel<A>, u32); N],
    rows: u32,
) -> Option<Columns<A>> {
    let chosen = kernels.iter().find(|k| k.1 >= rows).or(kernels.last())?;
    Some(Columns { kernel: chosen.0, columns: chosen.1 })
}

/// Grid of a `gemv_*` launch, from the outputs of its matrices and the activation rows.
pub fn gemv_grid(outputs: [u32; 3], rows: u32, columns: u32) -> Grid {
    let tiles = outputs.iter().map(|n| n.div_ceil(GEMV_TILE)).fold(0, u32::saturating_add).max(1);
    // All workgroups but the last take the same number of tiles.
    let each = tiles.div_ceil(GEMV_BLOCKS);
    Grid::xy(tiles.div_ceil(each), rows.div_ceil(columns.max(1)).max(1))
}

/// Grid of a `gemv_gated_*` launch.
pub fn gated_grid(outputs: u32, rows: u32, columns: u32) -> Grid {
    Grid::xy(outputs.div_ceil(GATED_TILE).max(1), rows.div_ceil(columns.max(1)).max(1))
}

/// Grid of a `gemv_experts_*` launch; `pairs` counts pairs of a row and an expert.
pub fn experts_grid(outputs: u32, pairs: u32) -> Grid {
    Grid::xy(outputs.div_ceil(GEMV_TILE).max(1), pairs.max(1))
}

/// Grid of a `gemv_experts_gated_*` launch.
pub fn experts_gated_grid(outputs: u32, pairs: u32) -> Grid {
    Grid::xy(outputs.div_ceil(GATED_TILE).max(1), pairs.max(1))
}

/// The f16 product kernel and its grid. Both kernels give the same bits.
pub fn gemm(outputs: u32, rows: u32) -> (Kernel<GemmF16>, Grid) {
    let tiles = |side: u32| (rows.div_ceil(side).max(1), outputs.div_ceil(side).max(1));
    let ((across, down), kernel) = match tiles(128) {
        few if few.0.saturating_mul(few.1) < GEMM_BLOCKS => (tiles(64), GemmF16::gemm_f16_64),
        many => (many, GemmF16::gemm_f16_128),
    };
    (kernel, Grid::xy(across, down))
}

/// Kernel that repacks a quantised type into planes. `None` for float types, which [`super::RepackRows`] copies, and
/// for types without kernels.
pub fn repack(dtype: DType) -> Option<Kernel<Repack>> {
    Some(match dtype {
        DType::Q8_0 => Repack::repack_q8_0,
        DType::Q4_0 => Repack::repack_q4_0,
        DType::Q4_1 => Repack::repack_q4_1,
        DType::Q5_0 => Repack::repack_q5_0,
        DType::Q5_1 => Repack::repack_q5_1,
        DType::MXFP4 => Repack::repack_mxfp4,
        DType::Q4_K => Repack::repack_q4_k,
        DType::Q5_K => Repack::repack_q5_k,
        DType::Q6_K => Repack::repack_q6_k,
        _ => return None,
    })
}

/// Kernel that expands weights to f16 rows. `None` for F16, which needs none, and for types without kernels.
pub fn dequant(dtype: DType) -> Option<Kernel<Dequant>> {
    Some(match dtype {
        DType::Q8_0 => Dequant::dequant_q8_0,
        DType::Q4_0 => Dequant::dequant_q4_0,
        DType::Q4_1 => Dequant::dequant_q4_1,
        DType::Q5_0 => Dequant::dequant_q5_0,
        DType::Q5_1 => Dequant::dequant_q5_1,
        DType::MXFP4 => Dequant::dequant_mxfp4,
        DType::Q4_K => Dequant::dequant_q4_k,
        DType::Q5_K => Dequant::dequant_q5_k,
        DType::Q6_K => Dequant::dequant_q6_k,
        DType::BF16 => Dequant::dequant_bf16,
        DType::F32 => Dequant::dequant_f32,
        _ => return None,
    })
}

/// Product of a quantised type with 8-bit rows.
pub fn gemv_a8(dtype: DType, rows: u32) -> Option<Columns<GemvA8>> {
    match dtype {
        DType::Q8_0 => fitting(
            [
                (GemvA8::gemv_q8_0_a8_1, 1),
                (GemvA8::gemv_q8_0_a8_2, 2),
                (GemvA8::gemv_q8_0_a8_4, 4),
                (GemvA8::gemv_q8_0_a8_8, 8),
            ],
            rows,
        ),
        DType::Q4_0 => fitting(
            [
                (GemvA8::gemv_q4_0_a8_1, 1),
                (GemvA8::gemv_q4_0_a8_2, 2),
                (GemvA8::gemv_q4_0_a8_4, 4),
                (GemvA8::gemv_q4_0_a8_8, 8),
            ],
            rows,
        ),
        DType::Q4_1 => fitting(
            [
                (GemvA8::gemv_q4_1_a8_1, 1),
                (GemvA8::gemv_q4_1_a8_2, 2),
                (GemvA8::gemv_q4_1_a8_4, 4),
                (GemvA8::gemv_q4_1_a8_8, 8),
            ],
            rows,
        ),
        DType::Q5_0 => fitting(
            [
                (GemvA8::gemv_q5_0_a8_1, 1),
                (GemvA8::gemv_q5_0_a8_2, 2),
                (GemvA8::gemv_q5_0_a8_4, 4),
                (GemvA8::gemv_q5_0_a8_8, 8),
            ],
            rows,
        ),
        DType::Q5_1 => fitting(
            [
                (GemvA8::gemv_q5_1_a8_1, 1),
                (GemvA8::gemv_q5_1_a8_2, 2),
                (GemvA8::gemv_q5_1_a8_4, 4),
                (GemvA8::gemv_q5_1_a8_8, 8),
            ],
            rows,
        ),
        DType::MXFP4 => fitting(
            [
                (GemvA8::gemv_mxfp4_a8_1, 1),
                (GemvA8::gemv_mxfp4_a8_2, 2),
                (GemvA8::gemv_mxfp4_a8_4, 4),
                (GemvA8::gemv_mxfp4_a8_8, 8),
            ],
            rows,
        ),
        DType::Q4_K => fitting(
            [
                (GemvA8::gemv_q4_k_a8_1, 1),
                (GemvA8::gemv_q4_k_a8_2, 2),
                (GemvA8::gemv_q4_k_a8_4, 4),
                (GemvA8::gemv_q4_k_a8_8, 8),
            ],
            rows,
        ),
        DType::Q5_K => fitting(
            [
                (GemvA8::gemv_q5_k_a8_1, 1),
                (GemvA8::gemv_q5_k_a8_2, 2),
                (GemvA8::gemv_q5_k_a8_4, 4),
                (GemvA8::gemv_q5_k_a8_8, 8),
            ],
            rows,
        ),
        DType::Q6_K => fitting(
            [
                (GemvA8::gemv_q6_k_a8_1, 1),
                (GemvA8::gemv_q6_k_a8_2, 2),
                (GemvA8::gemv_q6_k_a8_4, 4),
                (GemvA8::gemv_q6_k_a8_8, 8),
            ],
            rows,
        ),
        _ => None,
    }
}

/// Product with f32 rows.
pub fn gemv_f32(dtype: DType, rows: u32) -> Option<Columns<GemvF32>> {
    match dtype {
        DType::Q8_0 => fitting([(GemvF32::gemv_q8_0_f32_1, 1), (GemvF32::gemv_q8_0_f32_4, 4)], rows),
        DType::Q4_0 => fitting([(GemvF32::gemv_q4_0_f32_1, 1), (GemvF32::gemv_q4_0_f32_4, 4)], rows),
        DType::Q4_1 => fitting([(GemvF32::gemv_q4_1_f32_1, 1), (GemvF32::gemv_q4_1_f32_4, 4)], rows),
        DType::Q5_0 => fitting([(GemvF32::gemv_q5_0_f32_1, 1), (GemvF32::gemv_q5_0_f32_4, 4)], rows),
        DType::Q5_1 => fitting([(GemvF32::gemv_q5_1_f32_1, 1), (GemvF32::gemv_q5_1_f32_4, 4)], rows),
        DType::MXFP4 => fitting([(GemvF32::gemv_mxfp4_f32_1, 1), (GemvF32::gemv_mxfp4_f32_4, 4)], rows),
        DType::Q4_K => fitting([(GemvF32::gemv_q4_k_f32_1, 1), (GemvF32::gemv_q4_k_f32_4, 4)], rows),
        DType::Q5_K => fitting([(GemvF32::gemv_q5_k_f32_1, 1), (GemvF32::gemv_q5_k_f32_4, 4)], rows),
        DType::Q6_K => fitting([(GemvF32::gemv_q6_k_f32_1, 1), (GemvF32::gemv_q6_k_f32_4, 4)], rows),
        DType::F32 => fitting(
            [
                (GemvF32::gemv_f32_f32_1, 1),
                (GemvF32::gemv_f32_f32_2, 2),
                (GemvF32::gemv_f32_f32_4, 4),
                (GemvF32::gemv_f32_f32_8, 8),
            ],
            rows,
        ),
        DType::F16 => fitting(
            [
                (GemvF32::gemv_f16_f32_1, 1),
                (GemvF32::gemv_f16_f32_2, 2),
                (GemvF32::gemv_f16_f32_4, 4),
                (GemvF32::gemv_f16_f32_8, 8),
            ],
            rows,
        ),
        DType::BF16 => fitting(
            [
                (GemvF32::gemv_bf16_f32_1, 1),
                (GemvF32::gemv_bf16_f32_2, 2),
                (GemvF32::gemv_bf16_f32_4, 4),
                (GemvF32::gemv_bf16_f32_8, 8),
            ],
            rows,
        ),
        _ => None,
    }
}

/// Gate and up products of a quantised type with 8-bit rows.
pub fn gated_a8(dtype: DType, rows: u32) -> Option<Columns<GemvGatedA8>> {
    match dtype {
        DType::Q8_0 => fitting(
            [
                (GemvGatedA8::gemv_gated_q8_0_a8_1, 1),
                (GemvGatedA8::gemv_gated_q8_0_a8_2, 2),
                (GemvGatedA8::gemv_gated_q8_0_a8_4, 4),
                (GemvGatedA8::gemv_gated_q8_0_a8_8, 8),
            ],
            rows,
        ),
        DType::Q4_0 => fitting(
            [
                (GemvGatedA8::gemv_gated_q4_0_a8_1, 1),
                (GemvGatedA8::gemv_gated_q4_0_a8_2, 2),
                (GemvGatedA8::gemv_gated_q4_0_a8_4, 4),
                (GemvGatedA8::gemv_gated_q4_0_a8_8, 8),
            ],
            rows,
        ),
        DType::Q4_1 => fitting(
            [
                (GemvGatedA8::gemv_gated_q4_1_a8_1, 1),
                (GemvGatedA8::gemv_gated_q4_1_a8_2, 2),
                (GemvGatedA8::gemv_gated_q4_1_a8_4, 4),
                (GemvGatedA8::gemv_gated_q4_1_a8_8, 8),
            ],
            rows,
        ),
        DType::Q5_0 => fitting(
            [
                (GemvGatedA8::gemv_gated_q5_0_a8_1, 1),
                (GemvGatedA8::gemv_gated_q5_0_a8_2, 2),
                (GemvGatedA8::gemv_gated_q5_0_a8_4, 4),
                (GemvGatedA8::gemv_gated_q5_0_a8_8, 8),
            ],
            rows,
        ),
        DType::Q5_1 => fitting(
            [
                (GemvGatedA8::gemv_gated_q5_1_a8_1, 1),
                (GemvGatedA8::gemv_gated_q5_1_a8_2, 2),
                (GemvGatedA8::gemv_gated_q5_1_a8_4, 4),
                (GemvGatedA8::gemv_gated_q5_1_a8_8, 8),
            ],
            rows,
        ),
        DType::MXFP4 => fitting(
            [
                (GemvGatedA8::gemv_gated_mxfp4_a8_1, 1),
                (GemvGatedA8::gemv_gated_mxfp4_a8_2, 2),
                (GemvGatedA8::gemv_gated_mxfp4_a8_4, 4),
                (GemvGatedA8::gemv_gated_mxfp4_a8_8, 8),
            ],
            rows,
        ),
        DType::Q4_K => fitting(
            [
                (GemvGatedA8::gemv_gated_q4_k_a8_1, 1),
                (GemvGatedA8::gemv_gated_q4_k_a8_2, 2),
                (GemvGatedA8::gemv_gated_q4_k_a8_4, 4),
                (GemvGatedA8::gemv_gated_q4_k_a8_8, 8),
            ],
            rows,
        ),
        DType::Q5_K => fitting(
            [
                (GemvGatedA8::gemv_gated_q5_k_a8_1, 1),
                (GemvGatedA8::gemv_gated_q5_k_a8_2, 2),
                (GemvGatedA8::gemv_gated_q5_k_a8_4, 4),
                (GemvGatedA8::gemv_gated_q5_k_a8_8, 8),
            ],
            rows,
        ),
        DType::Q6_K => fitting(
            [
                (GemvGatedA8::gemv_gated_q6_k_a8_1, 1),
                (GemvGatedA8::gemv_gated_q6_k_a8_2, 2),
                (GemvGatedA8::gemv_gated_q6_k_a8_4, 4),
                (GemvGatedA8::gemv_gated_q6_k_a8_8, 8),
            ],
            rows,
        ),
        _ => None,
    }
}

/// Gate and up products with f32 rows.
pub fn gated_f32(dtype: DType, rows: u32) -> Option<Columns<GemvGatedF32>> {
    match dtype {
        DType::Q8_0 => fitting(
            [(GemvGatedF32::gemv_gated_q8_0_f32_1, 1), (GemvGatedF32::gemv_gated_q8_0_f32_2, 2)],
            rows,
        ),
        DType::Q4_0 => fitting(
            [(GemvGatedF32::gemv_gated_q4_0_f32_1, 1), (GemvGatedF32::gemv_gated_q4_0_f32_2, 2)],
            rows,
        ),
        DType::Q4_1 => fitting(
            [(GemvGatedF32::gemv_gated_q4_1_f32_1, 1), (GemvGatedF32::gemv_gated_q4_1_f32_2, 2)],
            rows,
        ),
        DType::Q5_0 => fitting(
            [(GemvGatedF32::gemv_gated_q5_0_f32_1, 1), (GemvGatedF32::gemv_gated_q5_0_f32_2, 2)],
            rows,
        ),
        DType::Q5_1 => fitting(
            [(GemvGatedF32::gemv_gated_q5_1_f32_1, 1), (GemvGatedF32::gemv_gated_q5_1_f32_2, 2)],
            rows,
        ),
        DType::MXFP4 => fitting(
            [(GemvGatedF32::gemv_gated_mxfp4_f32_1, 1), (GemvGatedF32::gemv_gated_mxfp4_f32_2, 2)],
            rows,
        ),
        DType::Q4_K => fitting(
            [(GemvGatedF32::gemv_gated_q4_k_f32_1, 1), (GemvGatedF32::gemv_gated_q4_k_f32_2, 2)],
            rows,
        ),
        DType::Q5_K => fitting(
            [(GemvGatedF32::gemv_gated_q5_k_f32_1, 1), (GemvGatedF32::gemv_gated_q5_k_f32_2, 2)],
            rows,
        ),
        DType::Q6_K => fitting(
            [(GemvGatedF32::gemv_gated_q6_k_f32_1, 1), (GemvGatedF32::gemv_gated_q6_k_f32_2, 2)],
            rows,
        ),
        DType::F32 => fitting(
            [
                (GemvGatedF32::gemv_gated_f32_f32_1, 1),
                (GemvGatedF32::gemv_gated_f32_f32_2, 2),
                (GemvGatedF32::gemv_gated_f32_f32_4, 4),
                (GemvGatedF32::gemv_gated_f32_f32_8, 8),
            ],
            rows,
        ),
        DType::F16 => fitting(
            [
                (GemvGatedF32::gemv_gated_f16_f32_1, 1),
                (GemvGatedF32::gemv_gated_f16_f32_2, 2),
                (GemvGatedF32::gemv_gated_f16_f32_4, 4),
                (GemvGatedF32::gemv_gated_f16_f32_8, 8),
            ],
            rows,
        ),
        DType::BF16 => fitting(
            [
                (GemvGatedF32::gemv_gated_bf16_f32_1, 1),
                (GemvGatedF32::gemv_gated_bf16_f32_2, 2),
                (GemvGatedF32::gemv_gated_bf16_f32_4, 4),
                (GemvGatedF32::gemv_gated_bf16_f32_8, 8),
            ],
            rows,
        ),
        _ => None,
    }
}

/// Expert products of a quantised type with 8-bit rows.
pub fn experts_a8(dtype: DType) -> Option<Kernel<ExpertsA8>> {
    Some(match dtype {
        DType::Q8_0 => ExpertsA8::gemv_experts_q8_0_a8,
        DType::Q4_0 => ExpertsA8::gemv_experts_q4_0_a8,
        DType::Q4_1 => ExpertsA8::gemv_experts_q4_1_a8,
        DType::Q5_0 => ExpertsA8::gemv_experts_q5_0_a8,
        DType::Q5_1 => ExpertsA8::gemv_experts_q5_1_a8,
        DType::MXFP4 => ExpertsA8::gemv_experts_mxfp4_a8,
        DType::Q4_K => ExpertsA8::gemv_experts_q4_k_a8,
        DType::Q5_K => ExpertsA8::gemv_experts_q5_k_a8,
        DType::Q6_K => ExpertsA8::gemv_experts_q6_k_a8,
        _ => return None,
    })
}

/// Expert products with f32 rows.
pub fn experts_f32(dtype: DType) -> Option<Kernel<ExpertsF32>> {
    Some(match dtype {
        DType::Q8_0 => ExpertsF32::gemv_experts_q8_0_f32,
        DType::Q4_0 => ExpertsF32::gemv_experts_q4_0_f32,
        DType::Q4_1 => ExpertsF32::gemv_experts_q4_1_f32,
        DType::Q5_0 => ExpertsF32::gemv_experts_q5_0_f32,
        DType::Q5_1 => ExpertsF32::gemv_experts_q5_1_f32,
        DType::MXFP4 => ExpertsF32::gemv_experts_mxfp4_f32,
        DType::Q4_K => ExpertsF32::gemv_experts_q4_k_f32,
        DType::Q5_K => ExpertsF32::gemv_experts_q5_k_f32,
        DType::Q6_K => ExpertsF32::gemv_experts_q6_k_f32,
        DType::F32 => ExpertsF32::gemv_experts_f32_f32,
        DType::F16 => ExpertsF32::gemv_experts_f16_f32,
        DType::BF16 => ExpertsF32::gemv_experts_bf16_f32,
        _ => return None,
    })
}

/// Gate and up products of experts of a quantised type with 8-bit rows.
pub fn experts_gated_a8(dtype: DType) -> Option<Kernel<ExpertsGatedA8>> {
    Some(match dtype {
        DType::Q8_0 => ExpertsGatedA8::gemv_experts_gated_q8_0_a8,
        DType::Q4_0 => ExpertsGatedA8::gemv_experts_gated_q4_0_a8,
        DType::Q4_1 => ExpertsGatedA8::gemv_experts_gated_q4_1_a8,
        DType::Q5_0 => ExpertsGatedA8::gemv_experts_gated_q5_0_a8,
        DType::Q5_1 => ExpertsGatedA8::gemv_experts_gated_q5_1_a8,
        DType::MXFP4 => ExpertsGatedA8::gemv_experts_gated_mxfp4_a8,
        DType::Q4_K => ExpertsGatedA8::gemv_experts_gated_q4_k_a8,
        DType::Q5_K => ExpertsGatedA8::gemv_experts_gated_q5_k_a8,
        DType::Q6_K => ExpertsGatedA8::gemv_experts_gated_q6_k_a8,
        _ => return None,
    })
}

/// Gate and up products of experts with f32 rows.
pub fn experts_gated_f32(dtype: DType) -> Option<Kernel<ExpertsGatedF32>> {
    Some(match dtype {
        DType::Q8_0 => ExpertsGatedF32::gemv_experts_gated_q8_0_f32,
        DType::Q4_0 => ExpertsGatedF32::gemv_experts_gated_q4_0_f32,
        DType::Q4_1 => ExpertsGatedF32::gemv_experts_gated_q4_1_f32,
        DType::Q5_0 => ExpertsGatedF32::gemv_experts_gated_q5_0_f32,
        DType::Q5_1 => ExpertsGatedF32::gemv_experts_gated_q5_1_f32,
        DType::MXFP4 => ExpertsGatedF32::gemv_experts_gated_mxfp4_f32,
        DType::Q4_K => ExpertsGatedF32::gemv_experts_gated_q4_k_f32,
        DType::Q5_K => ExpertsGatedF32::gemv_experts_gated_q5_k_f32,
        DType::Q6_K => ExpertsGatedF32::gemv_experts_gated_q6_k_f32,
        DType::F32 => ExpertsGatedF32::gemv_experts_gated_f32_f32,
        DType::F16 => ExpertsGatedF32::gemv_experts_gated_f16_f32,
        DType::BF16 => ExpertsGatedF32::gemv_experts_gated_bf16_f32,
        _ => return None,
    })
}
