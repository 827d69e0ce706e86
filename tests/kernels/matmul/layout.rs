//! Planes hold the file's values, bit by bit.

use half::f16;
use rocmforge::backend::hip::Grid;
use rocmforge::backend::hip::kernels::matmul::{Dequant, choice, planes::planes};
use rocmforge::tensor::DType;

use super::gemv::{Matrices, multiply};
use super::weights::{Weights, float_types, quantised_types};
use super::{Kind, Rows};
use crate::random::Random;
use crate::rig::rig;

/// One activation row per column, 1 there and 0 elsewhere: the products are the weights.
#[test]
fn unit_vectors_give_the_weights_back() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for dtype in quantised_types().chain(float_types()) {
        let cols = if dtype.block_len() == 1 { 45 } else { 96_usize.next_multiple_of(dtype.block_len()) };
        let weights = Weights::random(dtype, 21, cols, &mut random);
        let mut units = vec![0f32; cols * cols];
        units.iter_mut().step_by(cols + 1).for_each(|v| *v = 1.0);
        let rows = Rows::new(rig, Kind::F32, units, cols);
        let got = multiply(rig, &Matrices::one(rig, &weights), &rows, cols, None).0;
        for k in 0..cols {
            for n in 0..21 {
                let (got, want) = (got[k * 21 + n], weights.row(n)[k]);
                assert!(got == want, "{dtype} row {n} column {k}: {got} instead of {want}");
            }
        }
    }
}

#[test]
fn rows_become_f16_by_one_rounding() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for dtype in quantised_types().chain([DType::F32, DType::BF16]) {
        // First few parts for two workgroups, then so many that a workgroup takes several.
        let long = if dtype.block_len() == 1 { 653 } else { 2560 };
        for (cols, blocks) in [(long % 256 + dtype.block_len().max(5), 2), (long, 1), (long, 2)] {
            let weights = Weights::random(dtype, 11, cols, &mut random);
            let (planes, stride) = (weights.lay_out(rig), cols.next_multiple_of(8));
            let out = rig.output::<u16>(7 * stride);
            let arguments = Dequant {
                planes: planes.ptr(),
                weights: (11 * cols) as u64,
                cols: cols as u32,
                first: 3,
                rows: 7,
                out: out.ptr(),
            };
            let kernel = choice::dequant(dtype).unwrap();
            rig.device.launch(&rig.stream, kernel, Grid::x(blocks), &arguments).unwrap();
            for (row, got) in rig.download::<f16>(&out).chunks_exact(stride).enumerate() {
                for (k, got) in got.iter().enumerate() {
                    let want = if k < cols { f16::from_f32(weights.row(3 + row)[k]) } else { f16::ZERO };
                    assert!(*got == want, "{dtype} row {row} column {k}: {got} instead of {want}");
                }
            }
        }
    }
}

#[test]
fn values_beyond_f16_become_its_largest() {
    let Some(rig) = rig() else { return };
    let values = [1e30f32, -65600.0, 65510.0, f32::INFINITY, f32::NAN, 1e-30, -3.0, 0.5];
    let out = rig.output::<u16>(8);
    let planes = rig.upload(&values);
    let arguments = Dequant { planes: planes.ptr(), weights: 8, cols: 8, first: 0, rows: 1, out: out.ptr() };
    rig.device.launch(&rig.stream, choice::dequant(DType::F32).unwrap(), Grid::x(1), &arguments).unwrap();
    let got: Vec<f32> = rig.download::<f16>(&out).iter().map(|v| v.to_f32()).collect();
    assert_eq!(got[..4], [65504.0, -65504.0, 65504.0, f32::INFINITY]);
    assert!(got[4].is_nan());
    assert_eq!(got[5..], [0.0, -3.0, 0.5]);
}

/// The kernels use the offsets that Rust computes: planes hold each number at its offset.
#[test]
fn planes_lie_where_rust_says() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    let rows = 5;
    for (dtype, cols) in [(DType::Q8_0, 96), (DType::Q5_1, 32), (DType::MXFP4, 64), (DType::Q6_K, 512)] {
        let weights = Weights::random(dtype, rows, cols, &mut random);
        let place = planes(dtype, rows as u64, cols as u64).unwrap();
        let device = rig.download::<u8>(&weights.lay_out(rig));
        assert_eq!(device.len() as u64, place.bytes);
        // The scale of a quant block: its plane, its bytes, and its offset in the file's block.
        let (plane, size, at) = match dtype {
            DType::Q8_0 => (1, 2, 0),
            DType::Q5_1 => (2, 4, 0),
            DType::MXFP4 => (1, 1, 0),
            _ => (3, 2, 208),
        };
        for (block, bytes) in weights.bytes.chunks_exact(dtype.block_bytes()).enumerate() {
            let found = &device[place.offsets[plane] as usize + block * size..][..size];
            assert_eq!(found, &bytes[at..at + size], "{dtype} block {block}");
        }
    }
}
