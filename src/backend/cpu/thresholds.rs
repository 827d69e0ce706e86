//! How many rows take which loop: the only home of row thresholds of the CPU.
//!
//! A product reads weights in place. Up to `in_place` rows, codes go from the file's bytes directly into the sums. With
//! more rows, weights are decoded once into panels, which are multiplied with `tile` rows at a time. Weights that meet
//! f32 rows are multiplied with `float_tile` rows at a time, whatever the number of rows. All give the same bits.
//!
//! | Instruction set | In place  | Panels, by tiles of | f32 rows, by tiles of |
//! |-----------------|-----------|---------------------|-----------------------|
//! | AVX-512 VNNI    | to 2 rows | 6 rows              | 6 rows                |
//! | AVX2            | 1 row     | 4 rows              | 1 row                 |
//! | NEON            | 1 row     | 4 rows              | 1 row                 |
//!
//! The portable code has one loop for any number of rows. The thresholds of a GPU are in
//! `src/backend/hip/kernels/thresholds.rs`.

/// Most rows of a step. Weights are read once for this many rows; more rows only add scratch.
pub const STEP_ROWS: usize = 256;

/// Sequences that run at once. Products take most of a step from a few rows on, so more would only wait longer.
pub const SEQUENCES: usize = 32;

/// Most queries (rows times heads of a group) in a tile of attention, unless one group is larger. Widening a key then
/// costs little beside its products, and the sums still fit in the first-level cache.
pub const ATTENTION_TILE_MAX: usize = 16;

/// Thresholds of an instruction set's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Most rows for which decoding again for each strip is faster than panels.
    pub in_place: usize,
    /// Most rows that a panel is multiplied with at a time.
    pub tile: usize,
    /// Most f32 rows at a time: their sums leave registers for operands.
    pub float_tile: usize,
}

/// AVX-512 with VNNI. Each number of rows, in place and of a tile, has a function in `matmul/avx512/mod.rs`.
pub const AVX512: Thresholds = Thresholds { in_place: 2, tile: 6, float_tile: 6 };

/// AVX2; one function for each number of rows, as above.
pub const AVX2: Thresholds = Thresholds { in_place: 1, tile: 4, float_tile: 1 };

/// NEON; one function for each number of rows, as above. Not measured: chosen by the registers that a loop needs.
pub const NEON: Thresholds = Thresholds { in_place: 1, tile: 4, float_tile: 1 };
