//! `gemm_f16_64` and `gemm_f16_128`.

use half::f16;
use rocmforge::backend::hip::Grid;
use rocmforge::backend::hip::kernels::Kernel;
use rocmforge::backend::hip::kernels::matmul::{GemmF16, choice};

use super::{Sum, or_null, untouched};
use crate::random::Random;
use crate::rig::{Rig, rig};

/// An f16 matrix with unused values after each row.
struct Half {
    values: Vec<f32>,
    bits: Vec<u16>,
    cols: usize,
    stride: usize,
}

impl Half {
    fn random(rows: usize, cols: usize, stride: usize, random: &mut Random) -> Self {
        let (mut values, mut bits) = (Vec::new(), vec![f16::NAN.to_bits(); rows * stride]);
        for row in bits.chunks_exact_mut(stride) {
            for to in &mut row[..cols] {
                let value = f16::from_f32(random.normal());
                values.push(value.to_f32());
                *to = value.to_bits();
            }
        }
        Self { values, bits, cols, stride }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }
}

struct Product {
    x: Half,
    w: Half,
    scales: Vec<f32>,
    bias: Option<Vec<f32>>,
    base: Option<Vec<f32>>,
    n: usize,
}

impl Product {
    /// The first `rows` rows of the product; checks that both kernels give the same bits.
    fn run(&self, rig: &Rig, rows: usize) -> Vec<f32> {
        let got = self.run_with(rig, rows, GemmF16::gemm_f16_64, 64);
        let same = self.run_with(rig, rows, GemmF16::gemm_f16_128, 128);
        assert!(
            got.iter().zip(&same).all(|(a, b)| a.to_bits() == b.to_bits()),
            "the two tile sizes give different bits"
        );
        got
    }

    fn run_with(&self, rig: &Rig, rows: usize, kernel: Kernel<GemmF16>, side: usize) -> Vec<f32> {
        let stride = self.n + 3;
        let mut start = vec![f32::from_bits(u32::MAX); rows * stride];
        if let Some(base) = &self.base {
            for (to, from) in start.chunks_exact_mut(stride).zip(base.chunks_exact(self.n)) {
                to[..self.n].copy_from_slice(from);
            }
        }
        let (w, x, scales) = (rig.upload(&self.w.bits), rig.upload(&self.x.bits), rig.upload(&self.scales));
        let (out, bias) = (rig.upload(&start), self.bias.as_ref().map(|b| rig.upload(b)));
        let arguments = GemmF16 {
            w: w.ptr(),
            w_stride: self.w.stride as u32,
            n: self.n as u32,
            x: x.ptr(),
            x_stride: self.x.stride as u32,
            x_scale: scales.ptr(),
            k: self.w.cols as u32,
            rows: rows as u32,
            out: out.ptr(),
            out_stride: stride as u32,
            bias: or_null(bias.as_ref()),
            add: u32::from(self.base.is_some()),
        };
        let grid = Grid::xy(rows.div_ceil(side) as u32, self.n.div_ceil(side) as u32);
        rig.device.launch(&rig.stream, kernel, grid, &arguments).unwrap();
        let mut got = Vec::new();
        for row in rig.download::<f32>(&out).chunks_exact(stride) {
            got.extend_from_slice(&row[..self.n]);
            assert!(row[self.n..].iter().copied().all(untouched), "wrote between rows");
        }
        got
    }

    fn check(&self, got: &[f32]) {
        for (i, &got) in got.iter().enumerate() {
            let (row, n) = (i / self.n, i % self.n);
            let scale = f64::from(self.scales[row]);
            let x: Vec<f64> = self.x.row(row).iter().map(|&v| f64::from(v) * scale).collect();
            let sum = Sum::of(self.w.row(n), &x).plus(self.bias.as_ref().map_or(0.0, |b| b[n]));
            let sum = sum.plus(self.base.as_ref().map_or(0.0, |b| b[i]));
            sum.check(got, &|| format!("k {} row {row} output {n}", self.w.cols));
        }
    }
}

/// Rows, outputs, inputs, and the strides of both matrices. There are whole tiles, partial tiles, steps that end early,
/// rows that do not begin at multiples of 16 bytes.
const SIZES: [(usize, usize, usize, usize, usize); 6] = [
    (128, 128, 64, 64, 64),
    (9, 130, 96, 96, 96),
    (131, 1, 40, 40, 48),
    (17, 37, 33, 33, 40),
    (1, 5, 1, 1, 8),
    (3, 70, 264, 264, 272),
];

#[test]
fn products_are_the_sums_of_their_terms() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    for (rows, n, k, x_stride, w_stride) in SIZES {
        let x = Half::random(rows, k, x_stride, &mut random);
        let w = Half::random(n, k, w_stride, &mut random);
        let scales = (0..rows).map(|_| (random.uniform() * 8.0) as f32).collect();
        let mut product = Product { x, w, scales, bias: None, base: None, n };
        product.check(&product.run(rig, rows));
        product.bias = Some(random.normals(n));
        product.check(&product.run(rig, rows));
        product.base = Some(random.normals(rows * n));
        product.check(&product.run(rig, rows));
    }
}

/// A row's bits depend neither on the rows beside it nor on its tile.
#[test]
fn rows_have_the_same_bits_in_any_number() {
    let Some(rig) = rig() else { return };
    let mut random = Random::new();
    let (rows, n, k) = (140, 20, 100);
    let (x, w) = (Half::random(rows, k, k, &mut random), Half::random(n, k, 104, &mut random));
    let scales = vec![1.0; rows];
    let product = Product { x, w, scales, bias: None, base: None, n };
    let all = product.run(rig, rows);
    for m in [1, 17, 129] {
        let same = product.run(rig, m).iter().zip(&all).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{m} rows give other bits");
    }
    // The last row alone, as the first row of another launch.
    let mut alone = product;
    alone.x.bits.drain(..(rows - 1) * k);
    let alone = alone.run(rig, 1);
    assert!(alone.iter().zip(&all[(rows - 1) * n..]).all(|(a, b)| a.to_bits() == b.to_bits()));
}

#[test]
fn few_tiles_are_small_ones() {
    // Products of a long prompt fill any device with large tiles; those of a short prompt do not.
    let (long, grid) = choice::gemm(4096, 1024);
    assert_eq!((long.name(), grid), (GemmF16::gemm_f16_128.name(), Grid::xy(8, 32)));
    let (short, grid) = choice::gemm(4096, 65);
    assert_eq!((short.name(), grid), (GemmF16::gemm_f16_64.name(), Grid::xy(2, 64)));
}
