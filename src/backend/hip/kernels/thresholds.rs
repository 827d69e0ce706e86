//! How many rows take which kernel: the only home of row thresholds of the GPU.
//!
//! A product of weights with the rows of a step is computed by one [`Family`] of kernels, which [`family`] chooses. The
//! rows from which each takes over depend on the device's [`MatrixUnit`]; [`of`] gives a device's row of this table.
//! `OfWave` are CDNA, RDNA3 and RDNA4, and NVIDIA's GPUs other than Hopper. `AcrossWorkgroups`, which has the row of `AcrossWaves`,
//! is Hopper. `None` are gfx906 and
//! RDNA2. [`super::types::unit`] finds out by the kernels that a device's code has.
//!
//! | Matrix unit   | 8-bit rows (`gemv_*_a8`) | `gemm_*_x16`, `gemm_wide_*` | expanded, `gemm_f16` | experts sorted | recorded |
//! |---------------|--------------------------|-----------------------------|----------------------|----------------|----------|
//! | `None`        | 1 to 63                  | never                       | from 64              | never          | to 8     |
//! | `OfWave`      | 1 to 8                   | 9 to 128                    | from 129             | from 9         | to 64    |
//! | `AcrossWaves` | 1 to 4                   | from 5                      | never                | from 9         | to 128   |
//!
//! That is for quantised weights. F16 and BF16 weights take f32 rows (`gemv_*_f32`) where quantised ones take 8-bit
//! rows; above, `AcrossWaves` has `gemm_wide_*` for them, and any other device `gemm_f16`. F32 weights always take f32
//! rows. So do all weights in the checking mode of f32 activations. Rows whose width is no multiple of 8 never become f16.
//! With `AcrossWorkgroups`, `gemm_cluster_*` takes more than 128 rows whose sums are not split. Products of 1,024 rows of an 8B model
//! then take 0.7 of the time of `gemm_wide_*` on an H200, and have the same bits. Decode attention takes the matrix unit from
//! [`ATTENTION_MATRIX_ROWS`] rows on. Prefill attention of f16 pages and heads of 64 or 128 has kernels of its own from
//! `AcrossWaves` on. On an H200, 1,024 rows of an 8B model after 8,000 tokens take a quarter of the time with them, and 17 rows half.
//!
//! A family has variants by the rows of one workgroup, such as `_1`, `_2`, `_4`, `_8`. They are listed in
//! [`super::types`], and [`super::types::fitting`] takes the narrowest that holds all rows. The constants below are
//! thresholds that all devices share. Those of the CPU are in `src/backend/cpu/thresholds.rs`.
//!
//! Which family takes a row decides its last bits. With [`Order::Fixed`] one family takes all row counts: the one for many rows,
//! never expanded; where there is no matrix unit, the one for few. Experts are always sorted where they ever are, and decode
//! attention on vector units, which sums each row alone, takes prompts too.
//!
//! Two places ask [`family`], so that they agree. `form` in `step/bind/forms.rs` asks for the form of rows in which a
//! value is written. `Run::group` in `step/run/product.rs` launches.

use super::MatrixUnit;
use crate::backend::ActivationType;
use crate::tensor::DType;

/// Most rows of a step. Up to here, four times the rows take far less than four times as long. Products of an 8B model
/// on an H200 take 30 ms for 256 rows, 53 ms for 1024. Answers that decode beside such a step wait a tenth of a second.
pub const STEP_ROWS: usize = 1024;

/// Sequences that run at once. An 8B model on an H200 answered 128 clients with 5,400 tokens a second when 32 ran at once,
/// and with 7,800 when all ran. A step took 4.5 ms with 32 and 11.9 with 128. Steps of more rows are not recorded.
pub const SEQUENCES: usize = 128;

/// Most rows per launch: what all runtimes accept as the second grid dimension.
pub const LAUNCH_ROWS_MAX: usize = 65_535;

/// Most rows of `gemm_*_x16_*`. With more rows, expanded weights are multiplied faster.
pub const GEMM_QUANT_ROWS_MAX: usize = 128;

/// From this many rows on, a slab of expanded weights need not be larger than the last-level cache: its product fills a
/// large device.
pub const WIDE_ROWS: u32 = 512;

/// From this many rows on, attention takes tiles of queries together, unless each row is of its own sequence. Decode attention
/// would read a sequence once for each of its rows. Beside 16 answers of an 8B model, 24 rows of a prompt at token 2,000 took 4 ms
/// longer on an H100.
pub const TILED_ROWS: usize = 17;

/// From this many rows on, decode attention of f16 pages takes the matrix unit. On an H200, 64 rows of an 8B model took 6.0 ms instead
/// of 6.5 after 190 tokens, and 10.4 instead of 12.2 after 2,100. 32 rows took as long as before, and a row alone 9 % longer: it
/// waits for longer splits.
pub const ATTENTION_MATRIX_ROWS: usize = 33;

/// Rows per decode attention launch with the most splits: bounds the size of partial results.
pub const ATTENTION_ROWS: usize = 8;

/// The same for wide heads, of which there are many: 128 of DeepSeek V3 take 75 MB.
pub const WIDE_HEAD_ROWS: usize = 2;

/// Rows per decode attention launch with few splits.
pub const ATTENTION_ROWS_MAX: usize = 64;

/// Sizes of tiles into which pairs of a row and an expert are sorted: the most pairs of a mean expert, and the tile's
/// pairs. A tile has more room than the mean, because experts get unequal numbers.
const EXPERT_TILES: [(u32, u32); 2] = [(12, 16), (26, 32)];

/// Pairs of the largest tile.
const EXPERT_TILE_MAX: u32 = 64;

/// Whether a row's bits may depend on the rows that are computed with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Each number of rows takes what is fastest for it.
    #[default]
    ByRows,
    /// Sums are taken in one order at any number of rows.
    Fixed,
}

/// Thresholds of devices with one kind of matrix unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Rows from which products take f16 rows. Below, reading weights once for each eight rows is faster.
    pub half_from: usize,
    /// Rows from which f16 rows meet quantised weights that were expanded to f16 first. `None` for never.
    pub expanded_from: Option<usize>,
    /// Rows from which pairs of a row and an expert are sorted by expert. `None` for never.
    pub sorted_from: Option<usize>,
    /// Rows from which attention takes tiles of queries together; `usize::MAX` for never.
    pub tiled_from: usize,
    /// Rows from which decode attention takes the matrix unit where it can; `usize::MAX` for never.
    pub attention_matrix_from: usize,
    /// Most rows of a step recorded for replay. Without products for quantised weights, more rows are multiplied eight
    /// at a time, or with expanded weights.
    pub recorded_max: usize,
}

const NONE: Thresholds = Thresholds {
    half_from: 64,
    expanded_from: Some(64),
    sorted_from: None,
    tiled_from: TILED_ROWS,
    attention_matrix_from: NEVER,
    recorded_max: 8,
};

const OF_WAVE: Thresholds = Thresholds {
    half_from: 9,
    expanded_from: Some(GEMM_QUANT_ROWS_MAX + 1),
    sorted_from: Some(9),
    tiled_from: TILED_ROWS,
    attention_matrix_from: ATTENTION_MATRIX_ROWS,
    recorded_max: 64,
};

const ACROSS_WAVES: Thresholds = Thresholds {
    half_from: 5,
    expanded_from: None,
    sorted_from: Some(9),
    tiled_from: TILED_ROWS,
    attention_matrix_from: ATTENTION_MATRIX_ROWS,
    recorded_max: 128,
};

/// A number of rows that no step has.
const NEVER: usize = usize::MAX;

/// The thresholds of a device.
pub const fn of(unit: MatrixUnit, order: Order) -> Thresholds {
    let tiled_from = match order {
        Order::ByRows => TILED_ROWS,
        Order::Fixed => NEVER,
    };
    match (unit, order) {
        (MatrixUnit::None, Order::ByRows) => NONE,
        (MatrixUnit::OfWave, Order::ByRows) => OF_WAVE,
        (MatrixUnit::AcrossWaves | MatrixUnit::AcrossWorkgroups, Order::ByRows) => ACROSS_WAVES,
        (MatrixUnit::None, Order::Fixed) => Thresholds { half_from: NEVER, tiled_from, ..NONE },
        (MatrixUnit::OfWave, Order::Fixed) => Thresholds {
            half_from: 1,
            expanded_from: Some(NEVER),
            sorted_from: Some(1),
            tiled_from,
            attention_matrix_from: NEVER,
            ..OF_WAVE
        },
        (MatrixUnit::AcrossWaves | MatrixUnit::AcrossWorkgroups, Order::Fixed) => Thresholds {
            half_from: 1,
            sorted_from: Some(1),
            tiled_from,
            attention_matrix_from: NEVER,
            ..ACROSS_WAVES
        },
    }
}

/// A family of product kernels, by the form of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `gemv_*_a8_*`: 8-bit rows.
    GemvA8,
    /// `gemv_*_f32_*`: f32 rows.
    GemvF32,
    /// `gemm_*_x16_*`: f16 rows, on a matrix unit of a wave.
    GemmQuant,
    /// `gemm_wide_*`: f16 rows in tiles, on a matrix unit across waves.
    GemmWide,
    /// `dequant_*`, then `gemm_f16_*`: f16 rows with weights expanded to f16.
    Expanded,
}

/// The family that multiplies `rows` rows of `cols` values with weights of a type.
pub fn family(
    thresholds: Thresholds,
    activations: ActivationType,
    dtype: DType,
    rows: usize,
    cols: u32,
) -> Family {
    // F32 weights stay f32, because f16 would round them.
    let half = rows >= thresholds.half_from && cols.is_multiple_of(8) && dtype != DType::F32;
    match (activations, half) {
        (ActivationType::F32, _) => Family::GemvF32,
        (ActivationType::Int8, false) if dtype.is_float() => Family::GemvF32,
        (ActivationType::Int8, false) => Family::GemvA8,
        (ActivationType::Int8, true) => match thresholds.expanded_from {
            None => Family::GemmWide,
            Some(from) if rows < from && !dtype.is_float() => Family::GemmQuant,
            Some(_) => Family::Expanded,
        },
    }
}

/// Rows from which a step sorts pairs of a row and an expert by expert. The matrix unit then multiplies those of an
/// expert together. `None` for never. `dtypes`: the type of gate and up matrices, and of down matrices.
pub fn sorted_from(thresholds: Thresholds, activations: ActivationType, dtypes: [DType; 2]) -> Option<usize> {
    let sorts = activations == ActivationType::Int8 && !dtypes.into_iter().any(DType::is_float);
    thresholds.sorted_from.filter(|_| sorts)
}

/// Pairs of a tile, where an expert has `mean` pairs on average.
pub fn expert_tile(mean: u32) -> u32 {
    let fits = EXPERT_TILES.into_iter().find(|(most, _)| mean <= *most);
    fits.map_or(EXPERT_TILE_MAX, |(_, size)| size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The module's table, by families at the rows where they change.
    #[test]
    fn families_change_at_the_rows_that_the_table_names() {
        let by_rows = |unit| of(unit, Order::ByRows);
        let at = |unit, dtype, rows| family(by_rows(unit), ActivationType::Int8, dtype, rows, 256);
        let cases = [
            (MatrixUnit::None, 63, Family::GemvA8, Family::GemvF32),
            (MatrixUnit::None, 64, Family::Expanded, Family::Expanded),
            (MatrixUnit::OfWave, 8, Family::GemvA8, Family::GemvF32),
            (MatrixUnit::OfWave, 9, Family::GemmQuant, Family::Expanded),
            (MatrixUnit::OfWave, 128, Family::GemmQuant, Family::Expanded),
            (MatrixUnit::OfWave, 129, Family::Expanded, Family::Expanded),
            (MatrixUnit::AcrossWaves, 4, Family::GemvA8, Family::GemvF32),
            (MatrixUnit::AcrossWaves, 5, Family::GemmWide, Family::GemmWide),
            (MatrixUnit::AcrossWaves, 1024, Family::GemmWide, Family::GemmWide),
        ];
        for (unit, rows, quantised, half) in cases {
            assert_eq!(at(unit, DType::Q4_K, rows), quantised, "{unit:?}, {rows} rows");
            assert_eq!(at(unit, DType::F16, rows), half, "{unit:?}, {rows} rows");
            assert_eq!(at(unit, DType::F32, rows), Family::GemvF32);
            let exact = family(by_rows(unit), ActivationType::F32, DType::Q4_K, rows, 256);
            assert_eq!(exact, Family::GemvF32);
        }
        // Rows of f16 are read eight values at a time.
        let odd = family(by_rows(MatrixUnit::AcrossWaves), ActivationType::Int8, DType::F16, 64, 12);
        assert_eq!(odd, Family::GemvF32);
    }

    #[test]
    fn a_fixed_order_has_one_family_for_all_rows() {
        for unit in [MatrixUnit::None, MatrixUnit::OfWave, MatrixUnit::AcrossWaves] {
            let fixed = of(unit, Order::Fixed);
            assert!(fixed.tiled_from > STEP_ROWS && fixed.sorted_from.is_none_or(|from| from == 1));
            assert!(fixed.attention_matrix_from > STEP_ROWS, "{unit:?}: attention sums in another order");
            for dtype in [DType::Q4_K, DType::F16, DType::F32] {
                let at = |rows| family(fixed, ActivationType::Int8, dtype, rows, 256);
                assert!((2..=4096).all(|rows| at(rows) == at(1)), "{unit:?}, {dtype}");
            }
        }
    }

    #[test]
    fn pairs_are_sorted_from_nine_rows_on_where_a_matrix_unit_takes_them() {
        let by_rows = |unit| of(unit, Order::ByRows);
        let from = |unit, dtypes| sorted_from(by_rows(unit), ActivationType::Int8, dtypes);
        assert_eq!(from(MatrixUnit::None, [DType::Q4_K; 2]), None);
        assert_eq!(from(MatrixUnit::OfWave, [DType::Q4_K; 2]), Some(9));
        assert_eq!(from(MatrixUnit::AcrossWaves, [DType::Q4_K, DType::F16]), None);
        let exact = sorted_from(by_rows(MatrixUnit::OfWave), ActivationType::F32, [DType::Q4_K; 2]);
        assert_eq!(exact, None);
        assert_eq!([1, 12, 13, 26, 27, u32::MAX].map(expert_tile), [16, 16, 32, 32, 64, 64]);
    }
}
