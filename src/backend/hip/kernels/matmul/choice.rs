//! The variant of a family for a weight type and row count, and the shape of its launch. [`thresholds`] chooses the family.

use super::super::ops::EmbedRows;
use super::super::thresholds::Order;
pub use super::super::types::Columns;
use super::super::types::{fitting, two_types, weight_type};
use super::super::{Kernel, MatrixUnit, thresholds};
use super::{
    Dequant, ExpertsA8, ExpertsF32, ExpertsGatedA8, ExpertsGatedF32, GemmCluster, GemmExperts, GemmF16,
    GemmQuant, GemmWide, GemmWideExperts, GemvA8, GemvF32, GemvGatedA8, GemvGatedF32, GemvHeads, Repack,
};
use crate::backend::hip::device::launch::Grid;
use crate::tensor::DType;

/// Outputs per tile of `gemv_*` and `gemv_experts_*`.
const GEMV_TILE: u32 = 16;
/// Outputs per tile of `gemv_heads_*`, at least.
const HEADS_TILE: u32 = 8;
/// Above this many workgroups, each takes several tiles. 1024 is more than any device runs at a time, so none is idle.
/// It is few enough that a workgroup's start, when it waits for its activations, costs little.
const GEMV_BLOCKS: u32 = 1024;
/// Workgroups of `gemv_*_f32_*` that keep the units of a large device busy.
const GEMV_F32_BLOCKS: u32 = 128;
/// Workgroups of `gemv_experts_*` that a large device runs at a time: four on each of its units.
const EXPERTS_BLOCKS: u32 = 512;
/// Outputs per workgroup of `gemv_gated_*` and `gemv_experts_gated_*`.
const GATED_TILE: u32 = 32;
/// With fewer workgroups of `gemm_f16_128`, the smaller tiles of `gemm_f16_64` fill a large device better.
const GEMM_BLOCKS: u32 = 128;

/// Outputs per workgroup of `gemm_*_x16_*`.
pub const GEMM_TILE: u32 = 128;
/// Inputs per step of `gemm_*_x16_*`.
const GEMM_STEP: u32 = 128;
/// Workgroups of `gemm_*_x16_*` that fill a large device, two on each of its units.
const GEMM_QUANT_BLOCKS: u32 = 256;
/// A split of `gemm_*_x16_*` is worth its sums from this many steps on.
const GEMM_SPLIT_STEPS: u32 = 4;

/// Words that count the workgroups of a split product that have ended, where more rows are split less: more than any launch has.
const GEMM_COUNTERS: usize = 1024;

/// Matrices of a `gemm_*_x16_*` launch.
const GEMM_MATRICES: u32 = 3;

/// Grid of a `gemm_*_x16_*` launch. The splits depend on the matrices alone, so a row's bits do not depend on the rows.
pub fn gemm_quant_grid(outputs: [u32; 3], cols: u32, rows: u32, columns: u32) -> Grid {
    let tiles = gemm_tiles(outputs);
    Grid::xyz(tiles, rows.div_ceil(columns.max(1)).max(1), gemm_splits(tiles, cols, GEMM_QUANT_BLOCKS))
}

/// Workgroups of `gemm_wide_*` with so many columns that a large device runs at a time: two on a unit, or one.
fn wide_blocks(columns: u32) -> u32 {
    if columns < 128 { GEMM_QUANT_BLOCKS } else { GEMM_QUANT_BLOCKS / 2 }
}

/// Bytes of LDS of a workgroup of `gemm_wide_*`: steps of f16 rows, and what the first tile's alignment may cost.
fn wide_lds(columns: u32) -> u32 {
    let stages = if columns < 256 { 4 } else { 3 };
    stages * columns * 2 * GEMM_STEP + 1024
}

/// Grid of a `gemm_wide_*` launch. Up to 64 rows, and in a fixed order at any number of rows, the splits depend on the matrices
/// alone. With more rows, fewer fill a device.
pub fn gemm_wide_grid(outputs: [u32; 3], cols: u32, rows: u32, columns: u32, order: Order) -> Grid {
    let (tiles, down) = (gemm_tiles(outputs), rows.div_ceil(columns.max(1)).max(1));
    let splits = match order {
        Order::ByRows => gemm_splits(tiles.saturating_mul(down), cols, wide_blocks(columns)),
        Order::Fixed => gemm_splits(tiles, cols, GEMM_QUANT_BLOCKS),
    };
    Grid::xyz(tiles, down, splits).lds(wide_lds(columns))
}

/// Workgroups of a cluster of `gemm_cluster_*`, and threads of each.
const CLUSTER: u32 = 2;
const CLUSTER_THREADS: u32 = 384;

/// Grid of a `gemm_cluster_*` launch on a device with so many compute units: a workgroup on each, if there are as many tiles.
pub fn gemm_cluster_grid(outputs: [u32; 3], rows: u32, columns: u32, units: u32) -> Grid {
    let down = rows.div_ceil(columns.max(1)).max(1);
    let all = gemm_tiles(outputs).div_ceil(CLUSTER).saturating_mul(down);
    let clusters = all.min(units / CLUSTER).max(1);
    Grid::x(CLUSTER * clusters).threads(CLUSTER_THREADS).lds(wide_lds(columns))
}

fn gemm_tiles(outputs: [u32; 3]) -> u32 {
    outputs.iter().map(|n| n.div_ceil(GEMM_TILE)).fold(0, u32::saturating_add).max(1)
}

/// Splits of a launch with so many tiles on a device that runs `blocks` workgroups at a time.
fn gemm_splits(tiles: u32, cols: u32, blocks: u32) -> u32 {
    let steps = cols.div_ceil(GEMM_STEP).max(1);
    let splits = (blocks / tiles).clamp(1, (steps / GEMM_SPLIT_STEPS).max(1));
    // As many steps in each but the last: no split is empty.
    steps.div_ceil(steps.div_ceil(splits))
}

/// Most tiles with all their splits of a launch of one row of workgroups that has a matrix of that shape, and no larger
/// ones. 0 if it is not split.
pub fn gemm_sums(outputs: u32, cols: u32) -> u32 {
    let tiles = outputs.div_ceil(GEMM_TILE).max(1);
    match gemm_splits(tiles, cols, GEMM_QUANT_BLOCKS) {
        // With other matrices beside it, it has no more splits.
        1 => 0,
        splits => (GEMM_MATRICES * tiles * splits).min(GEMM_QUANT_BLOCKS),
    }
}

/// Bytes of `parts` of launches with at most so many rows, from the [`gemm_sums`] of their matrices.
pub fn gemm_parts(unit: MatrixUnit, order: Order, sums: u32, rows: usize) -> usize {
    // Columns of the variant that `fitting` takes, or those of all workgroups side by side.
    let few = if rows <= 32 { rows.next_power_of_two().max(16) } else { rows.next_multiple_of(64) };
    let (columns, down) = if rows <= 128 { (128, 1) } else { (256, rows.div_ceil(256)) };
    let blocks_by_columns = match (unit, order) {
        (MatrixUnit::None, _) => 0,
        (MatrixUnit::OfWave, Order::ByRows) => sums as usize * few.min(thresholds::GEMM_QUANT_ROWS_MAX),
        (MatrixUnit::OfWave, Order::Fixed) => (sums as usize).saturating_mul(few),
        (MatrixUnit::AcrossWaves | MatrixUnit::AcrossWorkgroups, _) if rows <= 64 => sums as usize * few,
        (MatrixUnit::AcrossWaves | MatrixUnit::AcrossWorkgroups, Order::ByRows) => {
            (sums as usize).saturating_mul(down).min(wide_blocks(columns) as usize) * columns as usize
        }
        (MatrixUnit::AcrossWaves | MatrixUnit::AcrossWorkgroups, Order::Fixed) => {
            (sums as usize).saturating_mul(down * columns as usize)
        }
    };
    blocks_by_columns.saturating_mul(4 * GEMM_TILE as usize)
}

/// Words of `counters` of launches with at most so many rows that split their sums: one for each tile of outputs and rows.
pub fn gemm_counters(order: Order, rows: usize) -> usize {
    // Two splits or more of as many tiles as a device runs workgroups, times the rows of the narrowest variant that takes many.
    let tiles = GEMM_QUANT_BLOCKS as usize / 2;
    match order {
        Order::ByRows => GEMM_COUNTERS,
        Order::Fixed => GEMM_COUNTERS.max(tiles.saturating_mul(rows.div_ceil(64))),
    }
}

/// Tiles into which `group_pairs` cuts pairs of a row and an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertTiles {
    /// Most pairs of a tile: the columns of the kernel.
    pub size: u32,
    /// Most tiles: each expert's last one may hold few pairs.
    pub most: u32,
}

impl ExpertTiles {
    /// The tiles of `pairs` pairs among `count` experts: as small as hold most experts' pairs.
    pub fn of(pairs: u32, count: u32) -> Self {
        let size = thresholds::expert_tile(pairs.div_ceil(count.max(1)));
        Self { size, most: pairs.min((pairs / size).saturating_add(count)).max(1) }
    }

    /// Grid of a `group_pairs` launch.
    pub fn group_grid() -> Grid {
        Grid::x(1).threads(1024)
    }

    /// Grid of a `gemm_wide_experts_*` launch with so many matrices of an expert.
    pub fn wide_grid(self, outputs: u32, matrices: u32) -> Grid {
        self.grid(outputs, matrices).lds(wide_lds(self.size))
    }

    /// Grid of a `gemm_experts_*` launch with so many matrices of an expert.
    pub fn grid(self, outputs: u32, matrices: u32) -> Grid {
        Grid::xy(matrices.saturating_mul(outputs.div_ceil(GEMM_TILE)).max(1), self.most)
    }
}

/// Tiles of the outputs of a `gemv_*` launch.
fn gemv_tiles(outputs: [u32; 3]) -> u32 {
    outputs.iter().map(|n| n.div_ceil(GEMV_TILE)).fold(0, u32::saturating_add).max(1)
}

/// Grid of a `gemv_*` launch, from the outputs of its matrices and the activation rows.
pub fn gemv_grid(outputs: [u32; 3], rows: u32, columns: u32) -> Grid {
    let tiles = gemv_tiles(outputs);
    // All workgroups but the last take the same number of tiles.
    let each = tiles.div_ceil(GEMV_BLOCKS);
    Grid::xy(tiles.div_ceil(each), rows.div_ceil(columns.max(1)).max(1))
}

/// Grid of a `gemv_heads_*` launch, from the outputs of each head. A workgroup takes several tiles where there are more than
/// a device runs at a time, as in [`gemv_grid`].
pub fn heads_grid(outputs: u32, heads: u32, rows: u32, columns: u32) -> Grid {
    let (tiles, down) = (outputs.div_ceil(HEADS_TILE).max(1), rows.div_ceil(columns.max(1)).max(1));
    let all = u64::from(tiles) * u64::from(heads) * u64::from(down);
    let each = (all / u64::from(GEMV_BLOCKS)).clamp(1, tiles.into()) as u32; // at most `tiles`
    Grid::xyz(tiles.div_ceil(each), down, heads)
}

/// Grid of a `gemv_gated_*` launch.
pub fn gated_grid(outputs: u32, rows: u32, columns: u32) -> Grid {
    Grid::xy(outputs.div_ceil(GATED_TILE).max(1), rows.div_ceil(columns.max(1)).max(1))
}

/// Grid of a `gemv_experts_*` launch; `pairs` counts pairs of a row and an expert. A workgroup takes several tiles where
/// there are more than a device runs at a time. It then waits once for the choice of experts and for its activations.
pub fn experts_grid(outputs: u32, pairs: u32) -> Grid {
    let (tiles, pairs) = (outputs.div_ceil(GEMV_TILE).max(1), pairs.max(1));
    let each = (tiles.saturating_mul(pairs) / EXPERTS_BLOCKS).clamp(1, tiles);
    Grid::xy(tiles.div_ceil(each), pairs)
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
    weight_type(dtype)?.repack
}

/// Kernel that expands weights to f16 rows. `None` for F16, which needs none, and for types without kernels.
pub fn dequant(dtype: DType) -> Option<Kernel<Dequant>> {
    weight_type(dtype)?.dequant
}

/// Kernel that converts embedding rows to f32.
pub fn embed(dtype: DType) -> Option<Kernel<EmbedRows>> {
    weight_type(dtype).map(|known| known.embed)
}

/// Product of a quantised type with 8-bit rows, the third matrix of type `last`.
pub fn gemv_a8(dtype: DType, last: DType, rows: u32) -> Option<Columns<GemvA8>> {
    fitting(if last == dtype { weight_type(dtype)?.gemv_a8 } else { two_types(dtype, last)?.gemv_a8 }, rows)
}

/// Product with f32 rows.
pub fn gemv_f32(dtype: DType, rows: u32) -> Option<Columns<GemvF32>> {
    fitting(weight_type(dtype)?.gemv_f32, rows)
}

/// Products of a matrix for each head with f32 rows.
pub fn heads_f32(dtype: DType, rows: u32) -> Option<Columns<GemvHeads>> {
    fitting(weight_type(dtype)?.heads_f32, rows)
}

/// As [`gemv_f32`] for so many outputs. Few, such as a router's, take a variant of fewer columns, until the launch has
/// 128 workgroups: they read the weights again from a cache. All variants give the same bits.
pub fn gemv_f32_of(dtype: DType, outputs: [u32; 3], rows: u32) -> Option<Columns<GemvF32>> {
    let (variants, fits) = (weight_type(dtype)?.gemv_f32, gemv_f32(dtype, rows)?);
    let tiles = gemv_tiles(outputs);
    let fills = |variant: &&Columns<GemvF32>| {
        tiles.saturating_mul(rows.div_ceil(variant.columns.max(1))) >= GEMV_F32_BLOCKS
    };
    let narrow = variants.iter().filter(|variant| variant.columns <= fits.columns);
    narrow.clone().rev().find(fills).or(narrow.min_by_key(|variant| variant.columns)).copied()
}

/// Product of a quantised type with f16 rows, the third matrix of type `last`. `None` for a float type.
pub fn gemm_quant(dtype: DType, last: DType, rows: u32) -> Option<Columns<GemmQuant>> {
    fitting(if last == dtype { weight_type(dtype)?.gemm } else { two_types(dtype, last)?.gemm }, rows)
}

/// Product with f16 rows in tiles, the third matrix of type `last`. `None` for F32, which f16 would round.
pub fn gemm_wide(dtype: DType, last: DType, rows: u32) -> Option<Columns<GemmWide>> {
    fitting(
        if last == dtype { weight_type(dtype)?.gemm_wide } else { two_types(dtype, last)?.gemm_wide },
        rows,
    )
}

/// The kernel that gives the same bits as this one by clusters of workgroups. `None` where the device has none, the rows are fewer, or
/// the sums are split.
pub fn gemm_cluster(unit: MatrixUnit, wide: &Columns<GemmWide>, grid: &Grid) -> Option<Columns<GemmCluster>> {
    let has = unit.has(MatrixUnit::AcrossWorkgroups) && grid.workgroups[2] == 1;
    let (dtype, last) = wide.kernel.weights();
    let known = weight_type(dtype.filter(|_| has && last.is_none())?)?;
    known.gemm_cluster.iter().find(|kernel| kernel.columns == wide.columns).copied()
}

/// Most rows of a launch on that unit, or on none, with two matrices of a type and a third one of another. 0 where no launch takes
/// them. Without a unit, a row of workgroups takes the next rows.
pub fn two_types_rows_max(unit: MatrixUnit, first: DType, last: DType) -> u32 {
    let Some(pair) = two_types(first, last) else { return 0 };
    let widest = match unit {
        MatrixUnit::None => Some(u32::MAX),
        MatrixUnit::OfWave => pair.gemm.last().map(|kernel| kernel.columns),
        MatrixUnit::AcrossWaves | MatrixUnit::AcrossWorkgroups => {
            pair.gemm_wide.last().map(|kernel| kernel.columns)
        }
    };
    widest.unwrap_or(0)
}

/// Products of experts of a quantised type with f16 rows in tiles, tiles of so many pairs. `None` for a float type.
pub fn gemm_wide_experts(dtype: DType, size: u32) -> Option<Columns<GemmWideExperts>> {
    fitting(weight_type(dtype)?.gemm_wide_experts, size)
}

/// Products of experts of a quantised type with f16 rows, tiles of so many pairs. `None` for a float type.
pub fn gemm_experts(dtype: DType, size: u32) -> Option<Columns<GemmExperts>> {
    fitting(weight_type(dtype)?.gemm_experts, size)
}

/// Gate and up products of a quantised type with 8-bit rows.
pub fn gated_a8(dtype: DType, rows: u32) -> Option<Columns<GemvGatedA8>> {
    fitting(weight_type(dtype)?.gated_a8, rows)
}

/// Gate and up products with f32 rows.
pub fn gated_f32(dtype: DType, rows: u32) -> Option<Columns<GemvGatedF32>> {
    fitting(weight_type(dtype)?.gated_f32, rows)
}

/// Expert products of a quantised type with 8-bit rows.
pub fn experts_a8(dtype: DType) -> Option<Kernel<ExpertsA8>> {
    weight_type(dtype)?.experts_a8
}

/// Expert products with f32 rows.
pub fn experts_f32(dtype: DType) -> Option<Kernel<ExpertsF32>> {
    weight_type(dtype).map(|known| known.experts_f32)
}

/// Gate and up products of experts of a quantised type with 8-bit rows.
pub fn experts_gated_a8(dtype: DType) -> Option<Kernel<ExpertsGatedA8>> {
    weight_type(dtype)?.experts_gated_a8
}

/// Gate and up products of experts with f32 rows.
pub fn experts_gated_f32(dtype: DType) -> Option<Kernel<ExpertsGatedF32>> {
    weight_type(dtype).map(|known| known.experts_gated_f32)
}
