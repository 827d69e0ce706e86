use rocmforge_test_support::quant_blocks::quant_blocks;

use super::*;

/// Type, values per row, rows of bytes, and their values, for the types that the CPU computes.
fn golden() -> Vec<(DType, usize, &'static [u8], Vec<f32>)> {
    let typed = quant_blocks().into_iter().filter_map(|blocks| {
        let dtype = DType::from_ggml(blocks.number)?;
        is_supported(dtype).then_some((dtype, blocks.cols, blocks.bytes, blocks.values))
    });
    typed.collect()
}

#[test]
fn golden_blocks_decode_to_ggmls_bits() {
    let mut seen = vec![DType::F32];
    for (dtype, cols, bytes, want) in golden() {
        let mut got = vec![f32::NAN; want.len()];
        let row_bytes = dtype.row_bytes(cols as u64).unwrap() as usize;
        for (row, out) in bytes.chunks_exact(row_bytes).zip(got.chunks_exact_mut(cols)) {
            dequantize_row(dtype, row, out).unwrap();
        }
        for (i, (g, w)) in got.iter().zip(&want).enumerate() {
            assert_eq!(g.to_bits(), w.to_bits(), "{dtype} value {i}: {g} instead of {w}");
        }
        assert!(
            want.iter().filter(|v| **v != 0.0).count() > want.len() / 2,
            "{dtype}: the golden says too little"
        );
        seen.push(dtype);
    }
    assert!(SUPPORTED.iter().all(|t| seen.contains(t)), "{seen:?}");
    let readme = include_str!("../../../../README.md");
    assert!(
        SUPPORTED.iter().all(|t| readme.contains(t.name())),
        "README.md does not list one of {SUPPORTED:?}"
    );
}

#[test]
fn groups_are_the_same_numbers() {
    for (dtype, cols, bytes, want) in golden().into_iter().filter(|g| GroupKind::of(g.0).is_some()) {
        let row_bytes = dtype.row_bytes(cols as u64).unwrap() as usize;
        for (row, want) in bytes.chunks_exact(row_bytes).zip(want.chunks_exact(cols)) {
            for (g, want) in want.chunks_exact(32).enumerate() {
                let group = group(dtype, row, g);
                for (i, want) in want.iter().enumerate() {
                    let value = f32::from(group.codes[i]) * group.scales[i / 16] + group.mins[i / 16];
                    assert_eq!(value, *want, "{dtype} group {g} value {i}");
                }
            }
        }
    }
}

#[test]
fn f32_and_wrong_sizes() {
    let mut out = [f32::NAN; 2];
    dequantize_row(DType::F32, &[0, 0, 128, 63, 0, 0, 0, 192], &mut out).unwrap();
    assert_eq!(out, [1.0, -2.0]);
    let err = dequantize_row(DType::Q4_0, &[0; 18], &mut out);
    assert_eq!(err, Err(QuantError::Length { dtype: DType::Q4_0, bytes: 18, values: 2 }));
    assert_eq!(dequantize_row(DType::Q8_K, &[], &mut []), Err(QuantError::Unsupported(DType::Q8_K)));
    assert_eq!(out, [1.0, -2.0], "a refused call writes nothing");
}

#[test]
fn eight_bit_exponents_are_powers_of_two() {
    for (e, less) in (0..256).flat_map(|e| [1, 3, 4].map(|less| (e, less))) {
        let part = f64::from(f32::from_bits(e8m0_bits(e, less)));
        assert_eq!(part, 2f64.powi(e as i32 - 127 - less as i32), "{e} {less}");
    }
}

#[test]
fn kernels_have_the_same_codebooks() {
    let kernels = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/quant/grids.h"));
    let numbers = |text: &str, name: &str| -> Vec<u16> {
        let (_, table) = text.split_once(name).unwrap().1.split_once('=').unwrap();
        let (table, _) = table.split_once(';').unwrap();
        let hex = table.split("0x").skip(1).map(|rest| u16::from_str_radix(&rest[..4], 16).unwrap());
        hex.collect()
    };
    let books =
        [("IQ2_XXS", 256), ("IQ2_XS", 512), ("IQ2_S", 1024), ("IQ3_XXS", 256), ("IQ3_S", 512), ("IQ1", 2048)];
    for (name, entries) in books {
        let here = numbers(include_str!("grids.rs"), &format!("const {name}_PACKED"));
        assert_eq!(here.len(), entries, "{name}");
        assert!(numbers(kernels, &format!("{name}_GRID[")) == here, "{name} differs");
    }
}
