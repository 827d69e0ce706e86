//! How many elements a launch may touch behind each pointer, and whether they are there.
//!
//! The declaration of a kernel gives these extents as expressions over its arguments and the launch (see `kernels!`).
//! They are exact: the last row of a matrix ends after its columns, not after its stride. All arithmetic is in u64, and
//! a number that overflows refuses the launch.

use std::ops::{Add, Div, Mul};

use super::Kernel;
use super::matmul::planes::planes;
use crate::backend::hip::device::launch::Grid;
use crate::backend::hip::device::pointer::DevicePtr;
use crate::tensor::DType;

/// A launch that would touch memory outside an argument's. It was refused before the driver saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("refused: {kernel}: {}", Fault(self))]
pub struct OutOfBounds {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Name of the argument.
    pub argument: &'static str,
    /// Elements that the launch may touch. `None` if the arguments and the grid do not fit together.
    pub need: Option<u64>,
    /// Elements behind the pointer.
    pub present: u64,
}

struct Fault<'a>(&'a OutOfBounds);

impl std::fmt::Display for Fault<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let OutOfBounds { argument, need, present, .. } = self.0;
        match need {
            Some(need) => write!(f, "{argument} needs {need} elements, {present} are there"),
            None => write!(
                f,
                "the sizes or the grid do not fit {argument}: they overflow, or reach past its rows"
            ),
        }
    }
}

/// A number of elements; none after an overflow or a division by 0, and in all that is computed from that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count(Option<u64>);

impl Count {
    /// A count that no memory satisfies.
    const IMPOSSIBLE: Self = Self(None);

    /// The quotient, rounded up.
    pub fn div_ceil(self, by: impl Into<Self>) -> Self {
        self.with(by, |a, b| (b > 0).then(|| a.div_ceil(b)))
    }

    /// The next multiple of `of`.
    pub fn round_up(self, of: impl Into<Self>) -> Self {
        self.with(of, u64::checked_next_multiple_of)
    }

    /// The smaller of both numbers.
    pub fn min(self, other: impl Into<Self>) -> Self {
        self.with(other, |a, b| Some(a.min(b)))
    }

    /// The same number if it is at least `least`, else impossible.
    pub fn at_least(self, least: impl Into<Self>) -> Self {
        self.with(least, |a, b| (a >= b).then_some(a))
    }

    fn with(self, other: impl Into<Self>, of: impl FnOnce(u64, u64) -> Option<u64>) -> Self {
        Self(self.0.zip(other.into().0).and_then(|(a, b)| of(a, b)))
    }
}

impl From<u64> for Count {
    fn from(count: u64) -> Self {
        Self(Some(count))
    }
}

impl PartialEq<u64> for Count {
    fn eq(&self, other: &u64) -> bool {
        self.0 == Some(*other)
    }
}

macro_rules! operators {
    ($( $operator:ident $name:ident $checked:ident; )*) => { $(
        impl $operator for Count {
            type Output = Self;

            fn $name(self, other: Self) -> Self {
                self.with(other, u64::$checked)
            }
        }

        impl $operator<u64> for Count {
            type Output = Self;

            fn $name(self, other: u64) -> Self {
                self.with(other, u64::$checked)
            }
        }

        impl $operator<Count> for u64 {
            type Output = Count;

            fn $name(self, other: Count) -> Count {
                Count::from(self).with(other, u64::$checked)
            }
        }
    )* };
}
operators! {
    Add add checked_add;
    Mul mul checked_mul;
    Div div checked_div;
}

/// Facts that the extents of a launch depend on, beside its arguments.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Workgroups in x.
    pub x: Count,
    /// Workgroups in y.
    pub y: Count,
    /// Workgroups in z.
    pub z: Count,
    kernel: &'static str,
    weights: Option<DType>,
    last: Option<DType>,
    columns: u32,
}

fn matrix_of(dtype: Option<DType>, rows: Count, cols: Count) -> Count {
    let (Some(dtype), Some(rows), Some(cols)) = (dtype, rows.0, cols.0) else { return Count::IMPOSSIBLE };
    if rows == 0 { Count::from(0) } else { Count(planes(dtype, rows, cols).map(|all| all.bytes)) }
}

impl Launch {
    /// A launch of `kernel` on `grid`.
    pub fn of<A>(kernel: &Kernel<A>, grid: &Grid) -> Self {
        let [x, y, z] = grid.workgroups.map(|workgroups| Count::from(u64::from(workgroups)));
        let Kernel { name, weights, last, columns, .. } = *kernel;
        Self { x, y, z, kernel: name, weights, last: last.or(weights), columns }
    }

    /// Bytes on the device of a matrix of the kernel's weight type. A matrix without rows has none.
    pub fn matrix(&self, rows: impl Into<Count>, cols: Count) -> Count {
        matrix_of(self.weights, rows.into(), cols)
    }

    /// As [`Launch::matrix`], for the third of three matrices.
    pub fn last_matrix(&self, rows: Count, cols: Count) -> Count {
        matrix_of(self.last, rows, cols)
    }

    /// Bytes in a file of `values` values of the kernel's weight type.
    pub fn file_bytes(&self, values: Count) -> Count {
        Count(self.weights.zip(values.0).and_then(|(dtype, values)| dtype.row_bytes(values)))
    }

    /// Values per quant block of the kernel's weight type.
    pub fn block(&self) -> Count {
        Count(self.weights.map(|dtype| dtype.block_len() as u64))
    }

    /// Activation rows of a product. Workgroups of a row past the last would count their rows below 0, so a grid with
    /// such workgroups is impossible.
    pub fn rows(&self, rows: Count) -> Count {
        let (Some(y), Some(all)) = (self.y.0, rows.0) else { return Count::IMPOSSIBLE };
        let last = y.saturating_sub(1).saturating_mul(self.columns.into());
        if last <= all { rows } else { Count::IMPOSSIBLE }
    }

    /// Activation rows per workgroup.
    pub fn columns(&self) -> Count {
        u64::from(self.columns).into()
    }

    /// The count for a grid of several workgroups in z; 0 for one.
    pub fn if_split(&self, count: Count) -> Count {
        if self.z.0 == Some(1) { Count::from(0) } else { count }
    }

    /// Query heads of attention, whose grid has a row of workgroups for each KV head. A grid that reaches past the last
    /// head is impossible.
    pub fn heads(&self, n_heads: Count, n_kv_heads: Count) -> Count {
        let group = n_heads / n_kv_heads;
        n_heads.at_least(self.x.div_ceil(group.div_ceil(u64::from(self.columns))) * group)
    }

    /// Checks one argument.
    ///
    /// # Errors
    /// [`OutOfBounds`] when `present` elements are fewer than `need`.
    pub fn require(
        &self,
        argument: &'static str,
        present: u64,
        need: impl Into<Count>,
    ) -> Result<(), OutOfBounds> {
        match need.into().0 {
            Some(need) if need <= present => Ok(()),
            need => Err(OutOfBounds { kernel: self.kernel, argument, need, present }),
        }
    }
}

/// `rows` rows of `cols` elements, `stride` apart; nothing follows the last row's columns.
pub fn strided(rows: Count, stride: Count, cols: Count) -> Count {
    match (rows.0, cols.0) {
        (Some(0), Some(_)) | (Some(_), Some(0)) => Count::from(0),
        (Some(rows), Some(_)) => Count::from(rows - 1) * stride + cols,
        _ => Count::IMPOSSIBLE,
    }
}

/// The first `count` rows, as [`strided`], or those that the numbers at `rows` name. The host does not know these
/// numbers: then one row is all that is sure.
pub fn named(rows: DevicePtr<u32>, count: Count, stride: impl Into<Count>, cols: impl Into<Count>) -> Count {
    let (stride, cols) = (stride.into(), cols.into());
    if rows.is_null() { strided(count, stride, cols) } else { cols }
}

/// Codes of `rows` 8-bit rows. Kernels write whole groups of 32.
pub fn a8_codes(rows: Count, padded: Count) -> Count {
    rows * padded.round_up(32)
}

/// Scales of `rows` 8-bit rows, one for each group of 32.
pub fn a8_scales(rows: Count, padded: Count) -> Count {
    rows * padded.div_ceil(32)
}

/// Sums of `rows` 8-bit rows, two for each group of 32.
pub fn a8_sums(rows: Count, padded: Count) -> Count {
    2 * a8_scales(rows, padded)
}

/// Values of `rows` f16 rows of `cols` values, one after the other or in tiles.
pub fn x16(rows: Count, cols: Count, tiled: Count) -> Count {
    if tiled == 0 { rows * cols } else { x16_tiled(rows, cols) }
}

/// Values of f16 rows in tiles of 8 rows, two of which hold 128 values of a row.
pub fn x16_tiled(rows: Count, cols: Count) -> Count {
    rows.round_up(8) * cols.round_up(128)
}

/// As [`x16`], of the first `count` rows or of those that the numbers at `rows` name: then one row is all that is sure.
pub fn named_x16(rows: DevicePtr<u32>, count: Count, cols: Count, tiled: Count) -> Count {
    if rows.is_null() { x16(count, cols, tiled) } else { cols }
}

/// `count` when `used`, else nothing: for arguments that a kernel touches in one of its forms only.
pub fn only(used: bool, count: impl Into<Count>) -> Count {
    if used { count.into() } else { Count::from(0) }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::experts::Route;
    use super::super::matmul::{Dequant, GemmF16, GemvA8, GemvGatedF32, Repack, RepackRows, choice};
    use super::super::ops::{AddRows, AttnDecode, NormF32, RopeKv, SampleGreedy};
    use super::*;

    /// Allows a launch whose pointers have exactly these lengths, and refuses it when one of them is shorter by one.
    macro_rules! exact {
        ($kernel:expr, $grid:expr, $arguments:expr, [$($field:ident: $need:expr),+ $(,)?]) => {{
            let (kernel, grid, mut exact) = ($kernel, $grid, $arguments);
            $( exact.$field = DevicePtr::of_len($need); )+
            assert_eq!(kernel.check(&grid, &exact), Ok(()));
            $( {
                let (argument, present) = (stringify!($field), $need - 1);
                let mut short = exact;
                short.$field = DevicePtr::of_len(present);
                let refused = OutOfBounds { kernel: kernel.name(), argument, need: Some($need), present };
                assert_eq!(kernel.check(&grid, &short), Err(refused));
            } )+
            exact
        }};
    }
    pub(in crate::backend::hip::kernels) use exact;

    const ADD: AddRows = AddRows {
        x: DevicePtr::NULL,
        out: DevicePtr::NULL,
        scale: 1.0,
        keep: 0,
        x_stride: 100,
        out_stride: 40,
        cols: 40,
    };

    const NORM: NormF32 = NormF32 {
        x: DevicePtr::NULL,
        weight: DevicePtr::NULL,
        bias: DevicePtr::NULL,
        rows: DevicePtr::NULL,
        out: DevicePtr::NULL,
        eps: 1e-5,
        cols: 64,
        x_stride: 200,
        out_stride: 64,
        centre: 0,
        add: 0,
    };

    fn gemv(n: [u32; 3], cols: u32, rows: u32) -> GemvA8 {
        GemvA8 {
            w0: DevicePtr::NULL,
            w1: DevicePtr::NULL,
            w2: DevicePtr::NULL,
            n0: n[0],
            n1: n[1],
            n2: n[2],
            bias0: DevicePtr::NULL,
            bias1: DevicePtr::NULL,
            bias2: DevicePtr::NULL,
            cols,
            codes: DevicePtr::NULL,
            scales: DevicePtr::NULL,
            sums: DevicePtr::NULL,
            rows,
            out: DevicePtr::NULL,
            out_stride: 70,
            add: 0,
        }
    }

    fn attention(codes: DevicePtr<i8>) -> AttnDecode {
        AttnDecode {
            q: DevicePtr::NULL,
            rows: DevicePtr::NULL,
            positions: DevicePtr::NULL,
            row_seq: DevicePtr::NULL,
            page_tables: DevicePtr::NULL,
            page_base: DevicePtr::NULL,
            part_values: DevicePtr::NULL,
            part_stats: DevicePtr::NULL,
            counters: DevicePtr::NULL,
            out: DevicePtr::NULL,
            codes,
            scales: DevicePtr::NULL,
            sums: DevicePtr::NULL,
            halves: DevicePtr::NULL,
            row_scales: DevicePtr::NULL,
            sinks: DevicePtr::NULL,
            layer_offset: 0,
            scale: 1.0,
            cap: 0.0,
            n_heads: 12,
            n_kv_heads: 2,
            head_dim: 64,
            table_stride: 7,
            padded: 768,
            window: 0,
            tiled: 0,
            each: 1,
            splits_max: 128,
            qkv: DevicePtr::NULL,
            q_norm: DevicePtr::NULL,
            k_norm: DevicePtr::NULL,
            angles: DevicePtr::NULL,
            eps: 0.0,
            rope_dims: 0,
            pairs_by_halves: 0,
        }
    }

    #[test]
    fn rows_end_after_their_columns_and_not_after_their_stride() {
        exact!(AddRows::add_rows, Grid::xy(1, 3), ADD, [x: 240, out: 120]);
        let greedy = SampleGreedy {
            logits: DevicePtr::NULL,
            parts: DevicePtr::NULL,
            counters: DevicePtr::NULL,
            reports: DevicePtr::NULL,
            vocab: 5000,
        };
        exact!(SampleGreedy::sample_greedy, Grid::xy(3, 2), greedy, [
            logits: 10_000, parts: 6, counters: 2, reports: 16,
        ]);
    }

    #[test]
    fn null_is_refused_unless_the_kernel_takes_it() {
        // Neither bias nor rows: both may be null.
        let norm = exact!(NormF32::norm_f32, Grid::x(3), NORM, [x: 464, weight: 64, out: 192]);
        let named = NormF32 { bias: DevicePtr::of_len(64), rows: DevicePtr::of_len(3), ..norm };
        // The host does not know which rows are named: one row of x must be there.
        exact!(NormF32::norm_f32, Grid::x(3), named, [x: 64, bias: 64, rows: 3]);
        let null = NormF32 { weight: DevicePtr::NULL, ..norm };
        let refused = OutOfBounds { kernel: "norm_f32", argument: "weight", need: Some(64), present: 0 };
        assert_eq!(NormF32::norm_f32.check(&Grid::x(3), &null), Err(refused));
        // An offset past the end is not null.
        let past = NormF32 { bias: DevicePtr::of_len(64).offset(65), ..norm };
        let refused = OutOfBounds { argument: "bias", ..refused };
        assert_eq!(NormF32::norm_f32.check(&Grid::x(3), &past), Err(refused));
    }

    #[test]
    fn a_product_needs_the_planes_of_its_weight_type() {
        let kernel = choice::gemv_a8(DType::Q4_K, DType::Q4_K, 3).unwrap().kernel;
        let bytes = |rows| planes(DType::Q4_K, rows, 256).unwrap().bytes;
        let exact = exact!(kernel, Grid::xy(4, 1), gemv([48, 16, 0], 256, 3), [
            w0: bytes(48), w1: bytes(16), codes: 768, scales: 24, sums: 48, out: 204,
        ]);
        exact!(kernel, Grid::xy(4, 1), exact, [bias0: 48, bias1: 16]);
        // Four rows a workgroup: a second row of workgroups would start past the last row.
        let fault = kernel.check(&Grid::xy(4, 2), &exact).unwrap_err();
        assert_eq!((fault.kernel, fault.need), ("gemv_q4_k_a8_4", None));
        // 250 values are no whole quant workgroups.
        let fault = kernel.check(&Grid::xy(4, 1), &GemvA8 { cols: 250, ..exact }).unwrap_err();
        assert_eq!((fault.argument, fault.need), ("w0", None));
    }

    #[test]
    fn a_gate_needs_the_result_that_it_writes() {
        let none = DevicePtr::NULL;
        let (kernel, grid) = (choice::gated_f32(DType::F16, 2).unwrap().kernel, Grid::x(2));
        let arguments = GemvGatedF32 {
            gate: DevicePtr::NULL,
            up: DevicePtr::NULL,
            n: 64,
            gate_bias: none,
            up_bias: none,
            cols: 12,
            x: none,
            x_stride: 40,
            rows: 2,
            activation: 0,
            out_codes: DevicePtr::NULL,
            out_scales: none,
            out_sums: DevicePtr::NULL,
            out: none,
        };
        // A row of 12 f16 values takes 32 bytes.
        exact!(kernel, grid, arguments, [
            gate: 2048, up: 2048, x: 52, out_codes: 128, out_scales: 4, out_sums: 8,
        ]);
        exact!(kernel, grid, arguments, [gate: 2048, up: 2048, x: 52, out: 128]);
    }

    #[test]
    fn attention_needs_its_partial_results_and_one_form_of_its_output() {
        // 2 KV heads of 6 query heads, 4 of them a workgroup; 5 splits of 3 rows.
        let (kernel, grid) = (AttnDecode::attn_decode_f16_64_4, Grid::xyz(4, 5, 3));
        let exact = exact!(kernel, grid, attention(DevicePtr::NULL), [
            q: 2304, positions: 3, row_seq: 3, page_tables: 7, page_base: 1, part_values: 11520, part_stats: 360,
            counters: 12, out: 2304,
        ]);
        let a8 = AttnDecode { out: DevicePtr::NULL, ..exact };
        exact!(kernel, grid, a8, [codes: 2304, scales: 72, sums: 144, sinks: 12]);
        // A grid with a workgroup more would read past the last head.
        let fault = kernel.check(&Grid::xyz(5, 5, 3), &exact).unwrap_err();
        assert_eq!((fault.argument, fault.need), ("q", None));
    }

    #[test]
    fn pieces_of_a_tensor_stay_inside_it() {
        let kernel = choice::dequant(DType::Q8_0).unwrap();
        let (planes_of, null) = (|rows| planes(DType::Q8_0, rows, 96).unwrap().bytes, DevicePtr::NULL);
        let slab = Dequant { planes: null, weights: 960, cols: 96, first: 4, rows: 6, out: DevicePtr::NULL };
        let exact = exact!(kernel, Grid::x(1), slab, [planes: planes_of(10), out: 576]);
        let fault = kernel.check(&Grid::x(1), &Dequant { first: 5, ..exact }).unwrap_err();
        assert_eq!((fault.argument, fault.need), ("planes", None));

        let kernel = choice::repack(DType::Q4_K).unwrap();
        let piece = Repack { file: null, planes: null, weights: 2560, first: 16, groups: 24 };
        let bytes = planes(DType::Q4_K, 10, 256).unwrap().bytes;
        exact!(kernel, Grid::x(1), piece, [file: 3 * 144, planes: bytes]);

        let rows = RepackRows { file: null, planes: null, first: 2, rows: 3, row_bytes: 18 };
        exact!(RepackRows::repack_rows, Grid::x(1), rows, [file: 54, planes: 160]);
    }

    #[test]
    fn a_wide_product_needs_no_more_than_its_columns() {
        let none = DevicePtr::NULL;
        let arguments = GemmF16 {
            w: DevicePtr::NULL,
            w_stride: 40,
            n: 8,
            x: DevicePtr::NULL,
            x_stride: 33,
            x_scale: none,
            k: 33,
            rows: 70,
            out: none,
            out_stride: 20,
            bias: none,
            add: 0,
        };
        let (kernel, grid) = choice::gemm(8, 70);
        exact!(kernel, grid, arguments, [w: 313, x: 2310, x_scale: 70, out: 1388, bias: 8]);
    }

    #[test]
    fn extents_that_cannot_be_counted_are_refused() {
        let most = RopeKv {
            qkv: DevicePtr::of_len(u64::MAX / 4),
            q_norm: DevicePtr::NULL,
            k_norm: DevicePtr::NULL,
            angles: DevicePtr::NULL,
            positions: DevicePtr::NULL,
            row_seq: DevicePtr::NULL,
            page_tables: DevicePtr::NULL,
            page_base: DevicePtr::NULL,
            q: DevicePtr::NULL,
            layer_offset: 0,
            eps: 0.0,
            n_heads: u32::MAX,
            n_kv_heads: 0,
            head_dim: u32::MAX,
            rope_dims: 0,
            halves: 0,
            table_stride: 0,
        };
        let fault = RopeKv::rope_kv_f16.check(&Grid::xy(1, 4), &most).unwrap_err();
        assert_eq!((fault.argument, fault.need), ("qkv", None));
        let text = fault.to_string();
        assert!(text.starts_with("refused: rope_kv_f16: the sizes or the grid do not fit qkv"), "{text}");
        // Without rows, `rows - 1` of the kernel would name a row far outside.
        let none = Route {
            logits: DevicePtr::of_len(1000),
            bias: DevicePtr::NULL,
            row_seq: DevicePtr::NULL,
            table: DevicePtr::NULL,
            experts: DevicePtr::NULL,
            weights: DevicePtr::NULL,
            absent: DevicePtr::NULL,
            scale: 1.0,
            rows: 0,
            count: 8,
            used: 2,
            normalise: 1,
            sigmoid: 0,
        };
        assert_eq!(Route::route.check(&Grid::x(1), &none).unwrap_err().argument, "logits");
    }

    #[test]
    fn the_text_names_kernel_argument_and_numbers() {
        let fault = AddRows::add_rows.check(&Grid::xy(1, 3), &ADD).unwrap_err();
        assert_eq!(fault.to_string(), "refused: add_rows: x needs 240 elements, 0 are there");
    }
}
