//! Weight matrices assembled from blocks that ggml quantised and decoded.

use rocmforge::backend::hip::kernels::matmul::{Repack, RepackRows, choice, planes::planes};
use rocmforge::backend::hip::kernels::types::WEIGHT_TYPES;
use rocmforge::backend::hip::{Buffer, Grid};
use rocmforge::tensor::DType;
use rocmforge_test_support::quant_blocks::quant_blocks;

use crate::random::Random;
use crate::rig::Rig;

/// Types whose quant blocks are multiplied with 8-bit activations.
pub fn quantised_types() -> impl Iterator<Item = DType> {
    WEIGHT_TYPES.iter().filter(|known| known.is_quantised()).map(|known| known.dtype)
}

/// Float types.
pub fn float_types() -> impl Iterator<Item = DType> {
    WEIGHT_TYPES.iter().filter(|known| !known.is_quantised()).map(|known| known.dtype)
}

/// A matrix as bytes of a file, and its values as ggml decodes them.
pub struct Weights {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    pub bytes: Vec<u8>,
    pub values: Vec<f32>,
}

/// Golden quant blocks of a type, and their values.
fn golden(dtype: DType) -> (&'static [u8], Vec<f32>) {
    let found = quant_blocks().into_iter().find(|blocks| DType::from_ggml(blocks.number) == Some(dtype));
    let blocks = found.unwrap_or_else(|| panic!("no golden blocks of {dtype}"));
    (blocks.bytes, blocks.values)
}

impl Weights {
    /// Quant blocks of `dtype` in random order.
    pub fn random(dtype: DType, rows: usize, cols: usize, random: &mut Random) -> Self {
        if dtype == DType::F32 {
            let values = random.normals(rows * cols);
            let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            return Self { dtype, rows, cols, bytes, values };
        }
        let (blocks, block_values) = golden(dtype);
        let (len, size) = (dtype.block_len(), dtype.block_bytes());
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for _ in 0..rows * cols / len {
            let block = random.below(blocks.len() / size);
            bytes.extend_from_slice(&blocks[block * size..][..size]);
            values.extend_from_slice(&block_values[block * len..][..len]);
        }
        Self { dtype, rows, cols, bytes, values }
    }

    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }

    /// Lays the matrix out on the device, from an odd source address and in two pieces.
    pub fn lay_out(&self, rig: &Rig) -> Buffer {
        let bytes = planes(self.dtype, self.rows as u64, self.cols as u64).unwrap().bytes;
        let out = rig.output::<u8>(bytes as usize);
        let mut shifted = vec![0u8];
        shifted.extend_from_slice(&self.bytes);
        let file = rig.upload(&shifted);
        let Some(kernel) = choice::repack(self.dtype) else {
            let row_bytes = self.bytes.len() / self.rows;
            let half = self.rows / 2;
            for (first, rows) in [(0, half), (half, self.rows - half)] {
                let arguments = RepackRows {
                    file: file.ptr_at(1 + first * row_bytes).unwrap(),
                    planes: out.ptr(),
                    first: first as u64,
                    rows: rows as u64,
                    row_bytes: row_bytes as u64,
                };
                rig.device.launch(&rig.stream, RepackRows::repack_rows, Grid::x(2), &arguments).unwrap();
            }
            return out;
        };
        let blocks = self.bytes.len() / self.dtype.block_bytes();
        let groups = self.dtype.block_len() / 32;
        let half = blocks / 2;
        for (first, blocks) in [(0, half), (half, blocks - half)] {
            let arguments = Repack {
                file: file.ptr_at(1 + first * self.dtype.block_bytes()).unwrap(),
                planes: out.ptr(),
                weights: (self.rows * self.cols) as u64,
                first: (first * groups) as u64,
                groups: (blocks * groups) as u64,
            };
            rig.device.launch(&rig.stream, kernel, Grid::x(3), &arguments).unwrap();
        }
        out
    }
}
