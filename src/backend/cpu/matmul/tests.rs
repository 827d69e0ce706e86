use super::*;
use crate::backend::cpu::activations::{ActivationBuffer, FINE_ABOVE};
use crate::backend::cpu::isa::Isa;
use crate::backend::cpu::quant::{SUPPORTED, dequantize_row, group};
use half::{bf16, f16};

/// xorshift64*. Assertions that use a seed print it.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In -1..1: four uniform numbers added and scaled; near normal with standard deviation 0.58.
    fn normal(&mut self) -> f32 {
        (0..4).map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5).sum()
    }
}

/// The place of the f16 scale in a block of a type that has just one.
fn scale_at(dtype: DType) -> usize {
    match dtype {
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 | DType::IQ4_NL | DType::IQ4_XS => 0,
        DType::IQ3_XXS | DType::IQ3_S | DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S | DType::IQ1_S => 0,
        DType::Q6_K => 208,
        DType::Q3_K => 108,
        DType::TQ1_0 => 52,
        DType::TQ2_0 => 64,
        other => panic!("say where {other} has its scales"),
    }
}

/// Writes the scale of an IQ1_M block: four bits of it in the top of each of the last four 16-bit words.
fn put_split_scale(block: &mut [u8], scale: f16) {
    for (i, word) in block[48..].chunks_exact_mut(2).enumerate() {
        word[1] = word[1] & 15 | ((scale.to_bits() >> (4 * i)) as u8 & 15) << 4;
    }
}

/// Random weights of `dtype` at an odd address: all code bits random, scales of ordinary size.
struct Weights {
    dtype: DType,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
}

impl Weights {
    fn random(dtype: DType, rows: usize, cols: usize, random: &mut Random) -> Self {
        let mut bytes = vec![0u8];
        for _ in 0..rows * cols / dtype.block_len() {
            let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| (random.next() >> 33) as u8).collect();
            let mut scale = |at: usize, size: f32, block: &mut [u8]| {
                let value = random.normal() * size;
                block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
            };
            match dtype {
                DType::F32 => block.copy_from_slice(&random.normal().to_le_bytes()),
                DType::F16 => scale(0, 1.0, &mut block),
                DType::BF16 => block.copy_from_slice(&bf16::from_f32(random.normal()).to_le_bytes()),
                DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => {
                    scale(0, 0.01, &mut block);
                    scale(2, 0.05, &mut block);
                }
                DType::Q2_K => {
                    scale(80, 0.01, &mut block);
                    scale(82, 0.01, &mut block);
                }
                DType::Q3_K | DType::Q6_K => scale(scale_at(dtype), 0.001, &mut block),
                DType::MXFP4 | DType::MXFP6_E2M3 | DType::MXFP6_E3M2 => {
                    block[0] = 118 + (random.next() >> 61) as u8
                }
                // Scales of 2^-6 to 2^-5, all mantissas.
                DType::NVFP4 => block[..4].iter_mut().for_each(|scale| *scale = 16 | *scale & 7),
                DType::IQ1_M => put_split_scale(&mut block, f16::from_f32(random.normal() * 0.01)),
                other => scale(scale_at(other), 0.01, &mut block),
            }
            bytes.extend(block);
        }
        Self { dtype, rows, cols, bytes }
    }

    fn view(&self) -> MatrixView<'_> {
        MatrixView::new(self.dtype, self.rows, self.cols, &self.bytes[1..]).unwrap()
    }

    fn values(&self, row: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; self.cols];
        dequantize_row(self.dtype, self.view().row(row), &mut values).unwrap();
        values
    }
}

/// Random rows. Most have outliers in some groups, so that these have fine codes.
fn activations(kernels: Kernels, rows: usize, cols: usize, random: &mut Random) -> ActivationBuffer {
    let mut buffer = ActivationBuffer::new();
    buffer.reset(rows, cols);
    for (m, mut row) in buffer.rows_mut().enumerate() {
        row.values_mut().iter_mut().for_each(|v| *v = random.normal() * 3.0);
        for _ in 0..m % 4 {
            let at = random.next() as usize % cols;
            row.values_mut()[at] = 60.0;
        }
        row.quantize(kernels, FINE_ABOVE);
    }
    let fine = buffer.view().fine.scales.iter().filter(|&&scale| scale != 0.0).count();
    assert!(fine > 0 || rows < 2 || cols < 96, "no group of {rows} rows of {cols} has fine codes");
    buffer
}

/// All outputs of `rows`, `[m][row]`, from a buffer filled with NaN and checked for writes outside.
fn product(
    kernels: Kernels,
    weights: &Weights,
    rows: Range<usize>,
    acts: &ActivationView<'_>,
    mode: ActivationType,
) -> Vec<f32> {
    let stride = rows.len() + 3;
    let poison = f32::from_bits(0x7fc1_2345);
    let mut out = vec![poison; acts.rows() * stride];
    let mut scratch = MatmulScratch::new();
    kernels.matmul_rows(&weights.view(), rows.clone(), acts, mode, &mut scratch, &mut out, stride).unwrap();
    let mut result = Vec::new();
    for row in out.chunks_exact(stride) {
        result.extend_from_slice(&row[..rows.len()]);
        assert!(row[rows.len()..].iter().all(|v| v.to_bits() == poison.to_bits()), "wrote between rows");
    }
    result
}

fn available() -> impl Iterator<Item = Kernels> {
    Isa::ALL.into_iter().filter_map(|isa| Kernels::new(isa).ok())
}

/// Column counts that `dtype` allows: one quant block, odd counts of blocks, a ragged end for plain types.
fn col_counts(dtype: DType) -> &'static [usize] {
    match dtype.block_len() {
        1 => &[1, 15, 16, 33, 64, 576],
        32 => &[32, 64, 96, 576, 800, 1536],
        64 => &[64, 192, 576, 832, 1536],
        _ => &[256, 768, 1280],
    }
}

const MODES: [ActivationType; 2] = [ActivationType::Int8, ActivationType::F32];

/// Tier A: compares with f64 sums over the same inputs, `|y - ref| <= 2e-6 * sum |w x| + 1e-30`. A sum of n f32 terms
/// in one chain has an error of about sqrt(n) * 2^-24 of its partial sums. These stay far below sum |w x|.
#[test]
fn products_equal_f64_sums_over_the_same_inputs() {
    let mut random = Random(0x5eed_0001);
    for &dtype in SUPPORTED {
        for &cols in col_counts(dtype) {
            let weights = Weights::random(dtype, 37, cols, &mut random);
            for kernels in available() {
                let acts = activations(kernels, 7, cols, &mut random);
                for mode in MODES {
                    let got = product(kernels, &weights, 0..37, &acts.view(), mode);
                    for (m, got) in got.chunks_exact(37).enumerate() {
                        for (row, got) in got.iter().enumerate() {
                            check_tier_a(&weights, row, &acts.view(), m, mode, *got, kernels.isa());
                        }
                    }
                }
            }
        }
    }
}

fn check_tier_a(
    weights: &Weights,
    row: usize,
    acts: &ActivationView<'_>,
    m: usize,
    mode: ActivationType,
    got: f32,
    isa: Isa,
) {
    let int8 = mode == ActivationType::Int8 && GroupKind::of(weights.dtype).is_some();
    let (mut sum, mut size) = (0f64, 0f64);
    for (k, w) in weights.values(row).into_iter().enumerate() {
        let x = if int8 { acts.decoded(m, k) } else { f64::from(acts.values(m)[k]) };
        sum += f64::from(w) * x;
        size += (f64::from(w) * x).abs();
    }
    let off = (f64::from(got) - sum).abs();
    assert!(
        off <= 2e-6 * size + 1e-30,
        "{} cols {} {mode:?} {isa} row {row} m {m}: {got} instead of {sum}, off {off:e} of {size:e}",
        weights.dtype,
        weights.cols
    );
}

/// Tier B: compares with f64 sums over unquantised activations: the error of the format itself.
#[test]
fn products_stay_near_unquantised_ones() {
    let mut random = Random(0x5eed_0002);
    for &dtype in SUPPORTED {
        let weights = Weights::random(dtype, 64, 768, &mut random);
        for kernels in available() {
            let acts = activations(kernels, 4, 768, &mut random);
            for mode in MODES {
                let int8 = mode == ActivationType::Int8 && GroupKind::of(dtype).is_some();
                let got = product(kernels, &weights, 0..64, &acts.view(), mode);
                let (mut off, mut size) = (0f64, 0f64);
                for row in 0..64 {
                    let values = weights.values(row);
                    for m in 0..4 {
                        let x = acts.view().values(m);
                        let want: f64 =
                            values.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                        off += (f64::from(got[m * 64 + row]) - want).powi(2);
                        size += want.powi(2);
                    }
                }
                let error = (off / size).sqrt();
                assert!(
                    error <= if int8 { 1.2e-2 } else { 1e-6 },
                    "{dtype} {mode:?} {}: {error:e}",
                    kernels.isa()
                );
            }
        }
    }
}

/// The bits of an output depend only on its weight row and its activation row.
#[test]
fn bits_depend_on_neither_batch_nor_tile_nor_instruction_set() {
    let mut random = Random(0x5eed_0003);
    for &dtype in SUPPORTED {
        for &cols in &col_counts(dtype)[2..] {
            let weights = Weights::random(dtype, 75, cols, &mut random);
            let portable = Kernels::new(Isa::Portable).unwrap();
            let acts = activations(portable, 17, cols, &mut random);
            for mode in MODES {
                let want = product(portable, &weights, 0..75, &acts.view(), mode);
                for kernels in available() {
                    for rows in 1..=17 {
                        check_batch(kernels, &weights, 0..75, &acts, 17 - rows, rows, mode, &want);
                    }
                    for (start, end) in [(0, 1), (3, 20), (31, 33), (74, 75), (11, 75), (16, 48)] {
                        check_batch(kernels, &weights, start..end, &acts, 2, 5, mode, &want);
                    }
                }
            }
        }
    }
}

/// Rows so long that a block of weight rows is a tile, or a few.
#[test]
fn bits_do_not_depend_on_blocks_of_weight_rows() {
    let mut random = Random(0x5eed_0009);
    for (dtype, rows, cols) in [(DType::F16, 11, 33_000), (DType::F32, 31, 5_001), (DType::Q8_0, 11, 16_384)]
    {
        let weights = Weights::random(dtype, rows, cols, &mut random);
        let portable = Kernels::new(Isa::Portable).unwrap();
        let acts = activations(portable, 8, cols, &mut random);
        let want = product(portable, &weights, 0..rows, &acts.view(), ActivationType::F32);
        for kernels in available() {
            for (start, end) in [(0, rows), (1, rows), (2, 9), (rows - 1, rows)] {
                check_batch(kernels, &weights, start..end, &acts, 0, 8, ActivationType::F32, &want);
            }
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn check_batch(
    kernels: Kernels,
    weights: &Weights,
    range: Range<usize>,
    acts: &ActivationBuffer,
    first: usize,
    rows: usize,
    mode: ActivationType,
    want: &[f32],
) {
    let view = acts.view().rows_from(first, rows);
    let got = product(kernels, weights, range.clone(), &view, mode);
    for m in 0..rows {
        for (i, row) in range.clone().enumerate() {
            let (got, want) = (got[m * range.len() + i], want[(first + m) * weights.rows + row]);
            assert_eq!(
                got.to_bits(),
                want.to_bits(),
                "{} cols {} {mode:?} {}: row {row}, {m} of {rows}: {got} instead of {want}",
                weights.dtype,
                weights.cols,
                kernels.isa()
            );
        }
    }
}

/// The largest codes on both sides, all of one sign: faulty kernels would saturate 16 bits or wrap.
#[test]
fn extreme_codes_neither_saturate_nor_wrap() {
    let mut random = Random(0x5eed_0004);
    for dtype in SUPPORTED.iter().copied().filter(|&t| GroupKind::of(t).is_some()) {
        for fill in [0x00, 0xff, 0x80, 0x7f] {
            let mut weights = Weights::random(dtype, 33, 512, &mut random);
            let scale_bytes = match dtype {
                DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => vec![0, 1, 2, 3],
                DType::Q2_K => vec![80, 81, 82, 83],
                DType::MXFP4 | DType::MXFP6_E2M3 | DType::MXFP6_E3M2 => vec![0],
                DType::NVFP4 => vec![0, 1, 2, 3],
                DType::IQ1_M => vec![49, 51, 53, 55],
                other => vec![scale_at(other), scale_at(other) + 1],
            };
            for (i, byte) in weights.bytes[1..].iter_mut().enumerate() {
                if !scale_bytes.contains(&(i % dtype.block_bytes())) {
                    *byte = fill;
                }
            }
            for sign in [1.0, -1.0] {
                let mut acts = ActivationBuffer::new();
                acts.reset(2, 512);
                for kernels in available() {
                    for (m, mut row) in acts.rows_mut().enumerate() {
                        row.values_mut().fill(sign);
                        if m == 1 {
                            // Group 2 has outliers: 126 and a half steps, so codes are 126 and fine codes 127.
                            row.values_mut()[64..96].fill(sign * 126.5);
                            row.values_mut()[70] = sign * 127.0;
                        }
                        row.quantize(kernels, FINE_ABOVE);
                    }
                    let fine = &acts.view().fine.codes[512 + 64..][..32];
                    assert!(fine.iter().filter(|&&code| code == sign as i8 * 127).count() == 31);
                    let got = product(kernels, &weights, 0..33, &acts.view(), ActivationType::Int8);
                    for (i, got) in got.iter().enumerate() {
                        let (m, row) = (i / 33, i % 33);
                        check_tier_a(
                            &weights,
                            row,
                            &acts.view(),
                            m,
                            ActivationType::Int8,
                            *got,
                            kernels.isa(),
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn no_numbers_in_give_no_numbers_out() {
    let mut random = Random(0x5eed_0005);
    for &dtype in SUPPORTED {
        let mut weights = Weights::random(dtype, 19, 512, &mut random);
        for kernels in available() {
            for mode in MODES {
                let mut acts = activations(kernels, 3, 512, &mut random);
                let mut row = acts.row_mut(1).unwrap();
                row.values_mut()[300] = f32::NAN;
                row.quantize(kernels, FINE_ABOVE);
                let got = product(kernels, &weights, 0..19, &acts.view(), mode);
                assert!(got[..19].iter().all(|v| v.is_finite()), "{dtype}");
                assert!(got[19..38].iter().all(|v| v.is_nan()), "{dtype} {mode:?} {}", kernels.isa());
                assert!(got[38..].iter().all(|v| v.is_finite()), "{dtype}");
            }
        }
        if matches!(dtype, DType::MXFP4 | DType::MXFP6_E2M3 | DType::MXFP6_E3M2 | DType::NVFP4) {
            continue; // the types have no infinity
        }
        // An infinite scale or value in row 4.
        let row_bytes = weights.view().row_bytes();
        let row = &mut weights.bytes[1 + 4 * row_bytes..][..row_bytes];
        let mut put = |at: usize, infinity: &[u8]| row[at..at + infinity.len()].copy_from_slice(infinity);
        match dtype {
            DType::F32 => put(0, &[0, 0, 128, 127]),
            DType::BF16 => put(0, &[128, 127]),
            DType::F16 | DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => put(0, &[0, 124]),
            DType::Q2_K => put(80, &[0, 124]),
            DType::IQ1_M => put_split_scale(&mut row[..56], f16::INFINITY),
            other => put(scale_at(other), &[0, 124]),
        }
        for kernels in available() {
            for mode in MODES {
                let acts = activations(kernels, 2, 512, &mut random);
                let got = product(kernels, &weights, 0..19, &acts.view(), mode);
                for (i, v) in got.iter().enumerate() {
                    assert_eq!(v.is_finite(), i % 19 != 4, "{dtype} {mode:?} {}: {v}", kernels.isa());
                }
            }
        }
    }
}

#[test]
fn shapes_that_do_not_match_are_refused() {
    let bytes = vec![0; 4 * 18];
    assert_eq!(
        MatrixView::new(DType::Q8_K, 1, 256, &bytes).unwrap_err(),
        MatmulError::Unsupported(DType::Q8_K)
    );
    let size = MatrixView::new(DType::Q4_0, 5, 32, &bytes).unwrap_err();
    assert_eq!(size, MatmulError::Size { dtype: DType::Q4_0, rows: 5, cols: 32, bytes: 72 });
    assert!(MatrixView::new(DType::Q4_0, 4, 33, &bytes).is_err());
    let weight = MatrixView::new(DType::Q4_0, 4, 32, &bytes).unwrap();
    let mut acts = ActivationBuffer::new();
    acts.reset(2, 32);
    let mut scratch = MatmulScratch::new();
    let mut call = |rows: Range<usize>, acts: &ActivationBuffer, len: usize, stride: usize| {
        let mut out = vec![f32::NAN; len];
        let mode = ActivationType::Int8;
        let kernels = Kernels::detect();
        let result = kernels.matmul_rows(&weight, rows, &acts.view(), mode, &mut scratch, &mut out, stride);
        assert!(result.is_ok() || out.iter().all(|v| v.is_nan()));
        result
    };
    assert_eq!(call(1..5, &acts, 8, 4), Err(MatmulError::Range { start: 1, end: 5, rows: 4 }));
    assert_eq!(call(0..4, &acts, 7, 4), Err(MatmulError::Output { need: 8, stride: 4, len: 7 }));
    assert_eq!(call(0..4, &acts, 99, 3), Err(MatmulError::Output { need: 7, stride: 3, len: 99 }));
    assert_eq!(call(2..2, &acts, 0, 0), Ok(()));
    assert_eq!(call(0..4, &acts, 8, 4), Ok(()));
    acts.reset(1, 64);
    assert_eq!(call(0..4, &acts, 8, 4), Err(MatmulError::Cols { weight: 32, activation: 64 }));
}

/// The integer form and the f32 form of a weight are equal up to the last rounding, so both modes agree.
#[test]
fn groups_hold_what_dequantisation_gives() {
    let mut random = Random(0x5eed_0006);
    for dtype in SUPPORTED.iter().copied().filter(|&t| GroupKind::of(t).is_some()) {
        let weights = Weights::random(dtype, 3, 768, &mut random);
        for row in 0..3 {
            for (k, want) in weights.values(row).into_iter().enumerate() {
                let g = group(dtype, weights.view().row(row), k / 32);
                let half = k % 32 / 16;
                assert_eq!(f32::from(g.codes[k % 32]) * g.scales[half] + g.mins[half], want, "{dtype} {k}");
            }
        }
    }
}
