//! Weight types that kernels read: each with its planes and its kernels, in one table.
//!
//! A family of kernels has one entry point for each type, form of the activations and number of columns, named
//! `FAMILY_TYPE_FORM_COLUMNS`. `kernels/quant/list.h` names the same types for the entry points of the other kernel files, and
//! `kernels/gemv_TYPE.hip` has those of the products. `cargo xtask kernels` holds the code objects to this table.

use super::matmul::{
    Dequant, ExpertsA8, ExpertsF32, ExpertsGatedA8, ExpertsGatedF32, GemmCluster, GemmExperts, GemmQuant,
    GemmWide, GemmWideExperts, GemvA8, GemvF32, GemvGatedA8, GemvGatedF32, GemvHeads, Repack,
};
use super::ops::EmbedRows;
use super::{Arguments, Declaration, Kernel, MatrixUnit};
use crate::tensor::DType;

/// A kernel, and the activation rows that one workgroup takes.
#[derive(Debug)]
pub struct Columns<A> {
    /// The kernel to launch.
    pub kernel: Kernel<A>,
    /// Activation rows per workgroup.
    pub columns: u32,
}

impl<A> Clone for Columns<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Columns<A> {}

/// A weight type's planes on the device and its kernels. A family that has no kernel for the type is empty or none.
#[derive(Debug)]
pub struct WeightType {
    /// The type.
    pub dtype: DType,
    /// Of each plane of a quantised type: bytes, and the number of values they hold. A float type has rows instead.
    pub planes: &'static [(u64, u64)],
    /// Converts embedding rows from the file's layout to f32.
    pub embed: Kernel<EmbedRows>,
    /// Repacks quant blocks into planes. Rows of float types are copied by [`super::matmul::RepackRows`].
    pub repack: Option<Kernel<Repack>>,
    /// Expands weights to f16 rows. F16 needs no expansion.
    pub dequant: Option<Kernel<Dequant>>,
    /// Products with f16 rows on the matrix unit. Only code for devices that have one contains them.
    pub gemm: &'static [Columns<GemmQuant>],
    /// The same for experts.
    pub gemm_experts: &'static [Columns<GemmExperts>],
    /// Products with f16 rows in tiles, on a matrix unit across waves.
    pub gemm_wide: &'static [Columns<GemmWide>],
    /// The same for many rows, by clusters of workgroups.
    pub gemm_cluster: &'static [Columns<GemmCluster>],
    /// As `gemm_wide`, for experts.
    pub gemm_wide_experts: &'static [Columns<GemmWideExperts>],
    /// Products with 8-bit rows.
    pub gemv_a8: &'static [Columns<GemvA8>],
    /// Products with f32 rows.
    pub gemv_f32: &'static [Columns<GemvF32>],
    /// Products of a matrix for each head with f32 rows.
    pub heads_f32: &'static [Columns<GemvHeads>],
    /// Gate and up products with 8-bit rows.
    pub gated_a8: &'static [Columns<GemvGatedA8>],
    /// Gate and up products with f32 rows.
    pub gated_f32: &'static [Columns<GemvGatedF32>],
    /// Products of experts with 8-bit rows.
    pub experts_a8: Option<Kernel<ExpertsA8>>,
    /// Products of experts with f32 rows.
    pub experts_f32: Kernel<ExpertsF32>,
    /// Gate and up products of experts with 8-bit rows.
    pub experts_gated_a8: Option<Kernel<ExpertsGatedA8>>,
    /// Gate and up products of experts with f32 rows.
    pub experts_gated_f32: Kernel<ExpertsGatedF32>,
}

macro_rules! columns {
    ($dtype:ident, $last:ident, $family:literal, $name:literal, $form:literal, [$($columns:literal),*]) => {
        &[$( Columns {
            kernel: Kernel::new(concat!($family, "_", $name, "_", $form, "_", $columns))
                .of(DType::$dtype)
                .and(DType::$last)
                .taking($columns),
            columns: $columns,
        } ),*]
    };
    ($dtype:ident, $family:literal, $name:literal, $form:literal, [$($columns:literal),*]) => {
        &[$( Columns {
            kernel: Kernel::new(concat!($family, "_", $name, "_", $form, "_", $columns))
                .of(DType::$dtype)
                .taking($columns),
            columns: $columns,
        } ),*]
    };
}

/// Kernels for matrices of one type and a third one of another, with the same rows: queries and keys, and values.
#[derive(Debug)]
pub struct TwoTypes {
    /// Type of the first two matrices.
    pub first: DType,
    /// Type of the third one.
    pub last: DType,
    /// As [`WeightType::gemm`], for few rows.
    pub gemm: &'static [Columns<GemmQuant>],
    /// As [`WeightType::gemm_wide`], for few rows.
    pub gemm_wide: &'static [Columns<GemmWide>],
    /// As [`WeightType::gemv_a8`].
    pub gemv_a8: &'static [Columns<GemvA8>],
}

macro_rules! two_types {
    ($( $first:ident, $last:ident $name:literal; )*) => {
        /// The pairs that files mix in a layer: of Q4_K_M and Q5_K_M, half of the layers have values in Q6_K.
        pub static TWO_TYPES: &[TwoTypes] = &[
            $( TwoTypes {
                first: DType::$first,
                last: DType::$last,
                gemm: columns!($first, $last, "gemm", $name, "x16", [16, 32]),
                gemm_wide: columns!($first, $last, "gemm_wide", $name, "x16", [16, 32, 64]),
                gemv_a8: columns!($first, $last, "gemv", $name, "a8", [1, 2, 4, 8]),
            }, )*
        ];
    };
}

two_types! {
    Q4_K, Q6_K "q4_k_q6_k";
    Q5_K, Q6_K "q5_k_q6_k";
}

macro_rules! weight_types {
    (
        quantised { $( $quant:ident $quant_name:literal $planes:expr; )* }
        float { $( $float:ident $float_name:literal $dequant:expr, $wide:tt, $cluster:tt; )* }
    ) => {
        /// All weight types that kernels read.
        pub static WEIGHT_TYPES: &[WeightType] = &[
            $( WeightType {
                dtype: DType::$quant,
                planes: &$planes,
                embed: Kernel::new(concat!("embed_rows_", $quant_name)).of(DType::$quant),
                repack: Some(Kernel::new(concat!("repack_", $quant_name)).of(DType::$quant)),
                dequant: Some(Kernel::new(concat!("dequant_", $quant_name)).of(DType::$quant)),
                gemm: columns!($quant, "gemm", $quant_name, "x16", [16, 32, 64]),
                gemm_experts: columns!($quant, "gemm_experts", $quant_name, "x16", [16, 32, 64]),
                gemm_wide: columns!($quant, "gemm_wide", $quant_name, "x16", [16, 32, 64, 128, 256]),
                gemm_cluster: columns!($quant, "gemm_cluster", $quant_name, "x16", [256]),
                gemm_wide_experts: columns!($quant, "gemm_wide_experts", $quant_name, "x16", [16, 32, 64]),
                gemv_a8: columns!($quant, "gemv", $quant_name, "a8", [1, 2, 4, 8]),
                gemv_f32: columns!($quant, "gemv", $quant_name, "f32", [1, 4]),
                heads_f32: columns!($quant, "gemv_heads", $quant_name, "f32", [1, 4]),
                gated_a8: columns!($quant, "gemv_gated", $quant_name, "a8", [1, 2, 4, 8]),
                gated_f32: columns!($quant, "gemv_gated", $quant_name, "f32", [1, 2]),
                experts_a8: Some(Kernel::new(concat!("gemv_experts_", $quant_name, "_a8")).of(DType::$quant)),
                experts_f32: Kernel::new(concat!("gemv_experts_", $quant_name, "_f32")).of(DType::$quant),
                experts_gated_a8: Some(Kernel::new(concat!("gemv_experts_gated_", $quant_name, "_a8")).of(DType::$quant)),
                experts_gated_f32: Kernel::new(concat!("gemv_experts_gated_", $quant_name, "_f32")).of(DType::$quant),
            }, )*
            $( WeightType {
                dtype: DType::$float,
                planes: &[],
                embed: Kernel::new(concat!("embed_rows_", $float_name)).of(DType::$float),
                repack: None,
                dequant: $dequant,
                gemm: &[],
                gemm_experts: &[],
                gemm_wide: columns!($float, "gemm_wide", $float_name, "x16", $wide),
                gemm_cluster: columns!($float, "gemm_cluster", $float_name, "x16", $cluster),
                gemm_wide_experts: &[],
                gemv_a8: &[],
                gemv_f32: columns!($float, "gemv", $float_name, "f32", [1, 2, 4, 8]),
                heads_f32: columns!($float, "gemv_heads", $float_name, "f32", [1, 4]),
                gated_a8: &[],
                gated_f32: columns!($float, "gemv_gated", $float_name, "f32", [1, 2, 4, 8]),
                experts_a8: None,
                experts_f32: Kernel::new(concat!("gemv_experts_", $float_name, "_f32")).of(DType::$float),
                experts_gated_a8: None,
                experts_gated_f32: Kernel::new(concat!("gemv_experts_gated_", $float_name, "_f32")).of(DType::$float),
            }, )*
        ];
    };
}

weight_types! {
    quantised {
        Q8_0 "q8_0" [(32, 32), (2, 32)];
        Q4_0 "q4_0" [(16, 32), (2, 32)];
        Q4_1 "q4_1" [(16, 32), (4, 32)];
        Q5_0 "q5_0" [(16, 32), (4, 32), (2, 32)];
        Q5_1 "q5_1" [(16, 32), (4, 32), (4, 32)];
        MXFP4 "mxfp4" [(16, 32), (1, 32)];
        MXFP6_E2M3 "mxfp6_e2m3" [(16, 32), (8, 32), (1, 32)];
        MXFP6_E3M2 "mxfp6_e3m2" [(16, 32), (8, 32), (1, 32)];
        NVFP4 "nvfp4" [(16, 32), (2, 32)];
        Q4_K "q4_k" [(16, 32), (16, 256)];
        Q5_K "q5_k" [(16, 32), (4, 32), (16, 256)];
        Q6_K "q6_k" [(16, 32), (8, 32), (2, 32), (2, 256)];
        Q2_K "q2_k" [(8, 32), (2, 32), (4, 256)];
        Q3_K "q3_k" [(8, 32), (4, 32), (2, 32), (2, 256)];
        IQ4_NL "iq4_nl" [(16, 32), (2, 32)];
        IQ4_XS "iq4_xs" [(16, 32), (1, 32), (2, 256)];
        IQ3_XXS "iq3_xxs" [(16, 32), (1, 32), (2, 256)];
        IQ3_S "iq3_s" [(16, 32), (1, 32), (2, 256)];
        IQ2_XXS "iq2_xxs" [(8, 32), (4, 32), (1, 32), (2, 256)];
        IQ2_XS "iq2_xs" [(8, 32), (4, 32), (2, 32), (2, 256)];
        IQ2_S "iq2_s" [(8, 32), (4, 32), (2, 32), (2, 256)];
        IQ1_S "iq1_s" [(8, 32), (1, 32), (2, 256)];
        IQ1_M "iq1_m" [(8, 32), (2, 32), (2, 256)];
        TQ1_0 "tq1_0" [(8, 32), (2, 256)];
        TQ2_0 "tq2_0" [(8, 32), (2, 256)];
    }
    float {
        F32 "f32" Some(Kernel::new("dequant_f32").of(DType::F32)), [], [];
        F16 "f16" None, [16, 32, 64, 128, 256], [256];
        BF16 "bf16" Some(Kernel::new("dequant_bf16").of(DType::BF16)), [16, 32, 64, 128, 256], [256];
    }
}

/// The table's row for a type. `None` for a type that no kernel reads.
pub fn weight_type(dtype: DType) -> Option<&'static WeightType> {
    WEIGHT_TYPES.iter().find(|known| known.dtype == dtype)
}

/// The kernels for two matrices of one type and a third one of another. `None` for a pair without them.
pub fn two_types(first: DType, last: DType) -> Option<&'static TwoTypes> {
    TWO_TYPES.iter().find(|pair| (pair.first, pair.last) == (first, last))
}

/// The variant with the fewest columns that still takes all `rows`, else the widest one.
pub fn fitting<A>(variants: &[Columns<A>], rows: u32) -> Option<Columns<A>> {
    variants.iter().find(|variant| variant.columns >= rows).or(variants.last()).copied()
}

fn declaration<A: Arguments>(kernel: &Kernel<A>) -> Declaration {
    Declaration { name: kernel.name(), arguments: A::LAYOUT, unit: MatrixUnit::None }
}

fn all<A: Arguments>(variants: &'static [Columns<A>]) -> impl Iterator<Item = Declaration> {
    variants.iter().map(|variant| declaration(&variant.kernel))
}

/// Says that only code for devices with this unit has a kernel.
fn on(unit: MatrixUnit) -> impl Fn(Declaration) -> Declaration {
    move |declared| Declaration { unit, ..declared }
}

impl TwoTypes {
    /// Its kernels.
    fn declared(&'static self) -> impl Iterator<Item = Declaration> {
        let wide = all(self.gemm_wide).map(on(MatrixUnit::AcrossWaves));
        let gemv = all(self.gemv_a8);
        all(self.gemm).map(on(MatrixUnit::OfWave)).chain(wide).chain(gemv)
    }
}

impl WeightType {
    /// True for a type of quant blocks, which is multiplied with 8-bit rows.
    pub fn is_quantised(&self) -> bool {
        !self.planes.is_empty()
    }

    /// Its kernels.
    fn declared(&'static self) -> impl Iterator<Item = Declaration> {
        let one = [Some(declaration(&self.embed)), self.repack.as_ref().map(declaration)];
        let dequant = self.dequant.as_ref().map(declaration);
        let experts = [
            self.experts_a8.as_ref().map(declaration),
            Some(declaration(&self.experts_f32)),
            self.experts_gated_a8.as_ref().map(declaration),
            Some(declaration(&self.experts_gated_f32)),
        ];
        let gemm = all(self.gemm).chain(all(self.gemm_experts)).map(on(MatrixUnit::OfWave));
        let wide = all(self.gemm_wide).chain(all(self.gemm_wide_experts)).map(on(MatrixUnit::AcrossWaves));
        let cluster = all(self.gemm_cluster).map(on(MatrixUnit::AcrossWorkgroups));
        let gemm = gemm.chain(wide).chain(cluster);
        let products = gemm.chain(all(self.gemv_a8)).chain(all(self.gemv_f32)).chain(all(self.heads_f32));
        let gated = all(self.gated_a8).chain(all(self.gated_f32));
        one.into_iter()
            .flatten()
            .chain(dequant)
            .chain(experts.into_iter().flatten())
            .chain(products)
            .chain(gated)
    }
}

/// The widest matrix unit that a device's code has products for, by whether it has a kernel of that name.
pub fn unit(has: impl Fn(&'static str) -> bool) -> MatrixUnit {
    let all = |unit| declared().filter(|kernel| kernel.unit == unit).all(|kernel| has(kernel.name));
    let widest = [MatrixUnit::AcrossWorkgroups, MatrixUnit::AcrossWaves, MatrixUnit::OfWave];
    widest.into_iter().find(|unit| all(*unit)).unwrap_or_default()
}

/// The kernels of all types.
pub fn declared() -> impl Iterator<Item = Declaration> {
    WEIGHT_TYPES.iter().flat_map(WeightType::declared).chain(TWO_TYPES.iter().flat_map(TwoTypes::declared))
}
