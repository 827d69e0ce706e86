//! Tensor types of GGUF files and the geometry of their quant blocks.
//!
//! Numbers, names and sizes follow ggml (`ggml.h`, `ggml-common.h`). The table also lists types that no backend
//! computes, so that a file with them can be shown and refused by name.
//!
//! ggml has no 6-bit floats. Those of the OCP microscaling format (MX, section 5.3.2) have private numbers here, far from
//! ggml's and its forks': 6023 is E2M3, 6032 is E3M2. `cargo xtask requantize` writes them.

/// Element type of a tensor: a ggml type with its quant-block geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, missing_docs)] // the names are ggml's own
pub enum DType {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    I8,
    I16,
    I32,
    I64,
    F64,
    IQ1_M,
    BF16,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    MXFP6_E2M3,
    MXFP6_E3M2,
}

/// Number, type, name, values per quant block, bytes per quant block.
const TABLE: &[(u32, DType, &str, u32, u32)] = &[
    (0, DType::F32, "F32", 1, 4),
    (1, DType::F16, "F16", 1, 2),
    (2, DType::Q4_0, "Q4_0", 32, 18),
    (3, DType::Q4_1, "Q4_1", 32, 20),
    (6, DType::Q5_0, "Q5_0", 32, 22),
    (7, DType::Q5_1, "Q5_1", 32, 24),
    (8, DType::Q8_0, "Q8_0", 32, 34),
    (9, DType::Q8_1, "Q8_1", 32, 36),
    (10, DType::Q2_K, "Q2_K", 256, 84),
    (11, DType::Q3_K, "Q3_K", 256, 110),
    (12, DType::Q4_K, "Q4_K", 256, 144),
    (13, DType::Q5_K, "Q5_K", 256, 176),
    (14, DType::Q6_K, "Q6_K", 256, 210),
    (15, DType::Q8_K, "Q8_K", 256, 292),
    (16, DType::IQ2_XXS, "IQ2_XXS", 256, 66),
    (17, DType::IQ2_XS, "IQ2_XS", 256, 74),
    (18, DType::IQ3_XXS, "IQ3_XXS", 256, 98),
    (19, DType::IQ1_S, "IQ1_S", 256, 50),
    (20, DType::IQ4_NL, "IQ4_NL", 32, 18),
    (21, DType::IQ3_S, "IQ3_S", 256, 110),
    (22, DType::IQ2_S, "IQ2_S", 256, 82),
    (23, DType::IQ4_XS, "IQ4_XS", 256, 136),
    (24, DType::I8, "I8", 1, 1),
    (25, DType::I16, "I16", 1, 2),
    (26, DType::I32, "I32", 1, 4),
    (27, DType::I64, "I64", 1, 8),
    (28, DType::F64, "F64", 1, 8),
    (29, DType::IQ1_M, "IQ1_M", 256, 56),
    (30, DType::BF16, "BF16", 1, 2),
    (34, DType::TQ1_0, "TQ1_0", 256, 54),
    (35, DType::TQ2_0, "TQ2_0", 256, 66),
    (39, DType::MXFP4, "MXFP4", 32, 17),
    (40, DType::NVFP4, "NVFP4", 64, 36),
    (41, DType::Q1_0, "Q1_0", 128, 18),
    (6023, DType::MXFP6_E2M3, "MXFP6_E2M3", 32, 25),
    (6032, DType::MXFP6_E3M2, "MXFP6_E3M2", 32, 25),
];

impl DType {
    fn row(self) -> &'static (u32, DType, &'static str, u32, u32) {
        // Every variant is in TABLE (unit test `every_variant_has_a_row`), so the fallback is never taken.
        TABLE.iter().find(|r| r.1 == self).unwrap_or(&TABLE[0])
    }

    /// The type with this ggml number; `None` when ggml removed it or never had it.
    pub fn from_ggml(number: u32) -> Option<Self> {
        TABLE.iter().find(|r| r.0 == number).map(|r| r.1)
    }

    /// All types.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|r| r.1)
    }

    /// Number of the type in files: ggml's where it has one.
    pub fn ggml(self) -> u32 {
        self.row().0
    }

    /// Name of the type, ggml's where it has one, such as `Q4_K`.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Whether it is one of the unquantised types that products take.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }

    /// Values under one quant block: 1, 32, 64, 128 or 256.
    pub fn block_len(self) -> usize {
        self.row().3 as usize
    }

    /// Bytes of one quant block in the file.
    pub fn block_bytes(self) -> usize {
        self.row().4 as usize
    }

    /// Bytes of a row of `cols` values, or `None` when `cols` is not whole quant blocks or the product overflows.
    pub fn row_bytes(self, cols: u64) -> Option<u64> {
        let len = self.block_len() as u64;
        if !cols.is_multiple_of(len) {
            return None;
        }
        (cols / len).checked_mul(self.block_bytes() as u64)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_has_a_row() {
        for &(number, dtype, name, ..) in TABLE {
            assert_eq!(DType::from_ggml(number), Some(dtype));
            assert_eq!((dtype.ggml(), dtype.name()), (number, name));
            assert_eq!(format!("{dtype:?}"), name);
        }
        assert_eq!(TABLE.len(), DType::MXFP6_E3M2 as usize + 1);
        assert_eq!(DType::from_ggml(4), None, "Q4_2 was removed from ggml");
    }

    #[test]
    fn row_bytes_refuses_partial_blocks_and_overflow() {
        assert_eq!(DType::Q4_K.row_bytes(512), Some(288));
        assert_eq!(DType::Q4_K.row_bytes(255), None);
        assert_eq!(DType::F64.row_bytes(u64::MAX), None);
    }
}
