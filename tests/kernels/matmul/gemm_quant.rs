//! `gemm_<type>_x16_<rows>` and `gemm_wide_<type>_x16_<rows>`: products of weights with f16 rows on a matrix unit.

use half::f16;
use rocmforge::backend::hip::Grid;
use rocmforge::backend::hip::kernels::MatrixUnit;
use rocmforge::backend::hip::kernels::experts::GroupPairs;
use rocmforge::backend::hip::kernels::matmul::{GemmExperts, GemmQuant, GemmWide, GemmWideExperts, choice};
use rocmforge::backend::hip::kernels::thresholds::{self, Order};
use rocmforge::backend::hip::kernels::types::{Columns, TWO_TYPES, weight_type};
use rocmforge::tensor::DType;

use super::weights::{Weights, quantised_types};
use super::{Sum, or_null, untouched};
use crate::forms::tiled;
use crate::random::Random;
use crate::rig::{Rig, rig};

/// Bytes that fill `parts` before a launch: NaN as floats.
const UNREAD: f32 = f32::from_bits(u32::MAX);

/// A kernel of either matrix unit.
#[derive(Clone, Copy)]
enum Chosen<W, A> {
    OfWave(Columns<W>),
    AcrossWaves(Columns<A>),
}
type Gemm = Chosen<GemmQuant, GemmWide>;
type Experts = Chosen<GemmExperts, GemmWideExperts>;

impl<W, A> Chosen<W, A> {
    fn columns(&self) -> u32 {
        match self {
            Self::OfWave(chosen) => chosen.columns,
            Self::AcrossWaves(chosen) => chosen.columns,
        }
    }
}

struct Product {
    matrices: Vec<Weights>,
    /// f16 rows with unused values after each, and their values.
    bits: Vec<u16>,
    x: Vec<f32>,
    stride: usize,
    scales: Vec<f32>,
    bias: Option<Vec<Vec<f32>>>,
    base: Option<Vec<f32>>,
}

/// The weight as the kernel sees it: rounded to f16, finite values not past its range.
fn rounded(value: f32) -> f32 {
    f16::from_f32(value.clamp(-65504.0, 65504.0)).to_f32()
}

/// The largest difference that scales and minimums make that are rounded to f16: those of types with blocks of 256 have more
/// digits. `|x|` times `2^-12` of the weight and its minimum, each as often as it is rounded.
fn rounding(matrix: &Weights, row: usize, x: &[f64]) -> f64 {
    let (len, size) = (matrix.dtype.block_len(), matrix.dtype.block_bytes());
    if len < 256 {
        return 0.0;
    }
    let blocks = matrix.bytes[row * matrix.cols / len * size..].chunks_exact(size);
    let of_block = |(block, (x, w)): (&[u8], (&[f64], &[f32]))| {
        // The second number of the block's header times the largest integer minimum. Other types have no minimums.
        let header = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f64().abs();
        let most = match matrix.dtype {
            DType::Q4_K | DType::Q5_K => 63.0 * header(2),
            DType::Q2_K => 15.0 * header(82),
            _ => 0.0,
        };
        // Below 2^-14, f16 has steps of 2^-24: a scale is off by up to 2^-25, as often as the code says.
        let small = f64::from(largest_code(matrix.dtype) + 1) / 8192.0;
        x.iter().zip(w).map(|(x, w)| x.abs() * (3.0 * f64::from(w.abs()) + 2.0 * most + small)).sum::<f64>()
    };
    let rows = x.chunks_exact(len).zip(matrix.row(row).chunks_exact(len));
    blocks.zip(rows).map(of_block).sum::<f64>() / 4096.0
}

/// The largest code of a type with blocks of 256 whose scale has more digits than f16.
fn largest_code(dtype: DType) -> u32 {
    match dtype {
        DType::IQ4_XS => 127,
        DType::IQ3_XXS => 62,
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => 43,
        DType::Q6_K => 32,
        DType::Q5_K => 31,
        DType::Q4_K | DType::IQ3_S => 15,
        DType::IQ1_S | DType::IQ1_M => 9,
        DType::Q2_K | DType::Q3_K => 4,
        _ => 0,
    }
}

impl Product {
    fn random(dtype: DType, outputs: &[usize], rows: usize, cols: usize, random: &mut Random) -> Self {
        let stride = cols + 8;
        let mut bits = vec![f16::NAN.to_bits(); rows * stride];
        let mut x = Vec::new();
        for row in bits.chunks_exact_mut(stride) {
            for to in &mut row[..cols] {
                let value = f16::from_f32(random.normal());
                x.push(value.to_f32());
                *to = value.to_bits();
            }
        }
        let matrices = outputs.iter().map(|n| Weights::random(dtype, *n, cols, random)).collect();
        let scales = (0..rows).map(|_| (random.uniform() * 8.0) as f32).collect();
        Self { matrices, bits, x, stride, scales, bias: None, base: None }
    }

    fn outputs(&self) -> usize {
        self.matrices.iter().map(|matrix| matrix.rows).sum()
    }

    fn cols(&self) -> usize {
        self.matrices[0].cols
    }

    /// The first `rows` rows of the product with that many splits; `None` for those of [`choice::gemm_quant_grid`].
    fn run(&self, rig: &Rig, chosen: Gemm, rows: usize, splits: Option<u32>) -> Vec<f32> {
        let (n, stride) = (self.outputs(), self.outputs() + 3);
        let mut start = vec![UNREAD; rows * stride];
        if let Some(base) = &self.base {
            for (to, from) in start.chunks_exact_mut(stride).zip(base.chunks_exact(n)) {
                to[..n].copy_from_slice(from);
            }
        }
        let sizes = [0, 1, 2].map(|i| self.matrices.get(i).map_or(0, |matrix| matrix.rows as u32));
        let shape = (sizes, self.cols() as u32, rows as u32, chosen.columns());
        let mut grid = match chosen {
            Chosen::OfWave(_) => choice::gemm_quant_grid(shape.0, shape.1, shape.2, shape.3),
            Chosen::AcrossWaves(_) => {
                choice::gemm_wide_grid(shape.0, shape.1, shape.2, shape.3, Order::ByRows)
            }
        };
        if let Some(splits) = splits {
            let [x, y, _] = grid.workgroups;
            grid = Grid::xyz(x, y, splits).lds(grid.lds_bytes);
        }
        let blocks: u32 = grid.workgroups.iter().product();
        let parts = rig.output::<f32>((blocks * chosen.columns() * choice::GEMM_TILE) as usize);
        let counters = rig.upload(&vec![0u32; (grid.workgroups[0] * grid.workgroups[1]) as usize]);
        let weights: Vec<_> = self.matrices.iter().map(|matrix| matrix.lay_out(rig)).collect();
        let biases: Vec<_> = self.bias.iter().flatten().map(|bias| rig.upload(bias)).collect();
        let (scales, out) = (rig.upload(&self.scales), rig.upload(&start));
        let (w0, w1, w2) = (or_null(weights.first()), or_null(weights.get(1)), or_null(weights.get(2)));
        let [n0, n1, n2] = sizes;
        let (bias0, bias1, bias2) = (or_null(biases.first()), or_null(biases.get(1)), or_null(biases.get(2)));
        let (cols, rows, add) = (self.cols() as u32, rows as u32, u32::from(self.base.is_some()));
        let (x_scale, out_at, out_stride) = (scales.ptr(), out.ptr(), stride as u32);
        let (parts_at, counters_at) = (parts.ptr(), counters.ptr());
        match chosen {
            Chosen::OfWave(chosen) => {
                let x = rig.upload(&self.bits);
                let arguments = GemmQuant {
                    w0,
                    w1,
                    w2,
                    n0,
                    n1,
                    n2,
                    bias0,
                    bias1,
                    bias2,
                    cols,
                    x: x.ptr(),
                    x_stride: self.stride as u32,
                    x_scale,
                    rows,
                    out: out_at,
                    out_stride,
                    add,
                    parts: parts_at,
                    counters: counters_at,
                };
                rig.device.launch(&rig.stream, chosen.kernel, grid, &arguments).unwrap();
            }
            Chosen::AcrossWaves(chosen) => {
                let x = rig.upload(&tiled(&self.bits, self.stride, self.cols()));
                let arguments = GemmWide {
                    w0,
                    w1,
                    w2,
                    n0,
                    n1,
                    n2,
                    bias0,
                    bias1,
                    bias2,
                    cols,
                    x: x.ptr(),
                    x_scale,
                    rows,
                    out: out_at,
                    out_stride,
                    add,
                    parts: parts_at,
                    counters: counters_at,
                };
                rig.device.launch(&rig.stream, chosen.kernel, grid, &arguments).unwrap();
            }
        }
        assert!(rig.download::<u32>(&counters).iter().all(|count| *count == 0), "counters are not 0 again");
        let mut got = Vec::new();
        for row in rig.download::<f32>(&out).chunks_exact(stride) {
            got.extend_from_slice(&row[..n]);
            assert!(row[n..].iter().copied().all(untouched), "wrote between rows");
        }
        got
    }

    fn check(&self, got: &[f32]) {
        let (n, cols) = (self.outputs(), self.cols());
        for (i, &got) in got.iter().enumerate() {
            let (row, output) = (i / n, i % n);
            let scale = f64::from(self.scales[row]);
            let x: Vec<f64> = self.x[row * cols..][..cols].iter().map(|&v| f64::from(v) * scale).collect();
            let (mut at, mut of) = (output, 0);
            while at >= self.matrices[of].rows {
                at -= self.matrices[of].rows;
                of += 1;
            }
            let weights: Vec<f32> = self.matrices[of].row(at).iter().map(|&w| rounded(w)).collect();
            let sum = Sum::of(&weights, &x).plus(self.bias.as_ref().map_or(0.0, |bias| bias[of][at]));
            let sum = sum.plus(self.base.as_ref().map_or(0.0, |base| base[i]));
            let dtype = self.matrices[of].dtype;
            let rounding = rounding(&self.matrices[of], at, &x);
            sum.check_to(rounding, got, &|| {
                format!("{dtype}, {cols} inputs, row {row}, matrix {of}, output {at}")
            });
        }
    }
}

/// The kernels of each matrix unit that the rig's device has: one family after the other.
fn families(rig: &Rig, dtype: DType) -> Vec<Vec<Gemm>> {
    let known = weight_type(dtype).unwrap();
    of_units(rig, known.gemm, known.gemm_wide)
}

fn of_units(
    rig: &Rig,
    gemm: &'static [Columns<GemmQuant>],
    wide: &'static [Columns<GemmWide>],
) -> Vec<Vec<Gemm>> {
    let unit = rig.device.unit();
    let of_wave = unit.has(MatrixUnit::OfWave).then(|| gemm.iter().copied().map(Gemm::OfWave).collect());
    let across = || wide.iter().copied().map(Gemm::AcrossWaves).collect();
    let across_waves = unit.has(MatrixUnit::AcrossWaves).then(across);
    of_wave.into_iter().chain(across_waves).filter(|all: &Vec<Gemm>| !all.is_empty()).collect()
}

/// The kernel with the fewest columns that takes all rows, else the widest.
fn fitting(all: &[Gemm], rows: usize) -> Gemm {
    *all.iter().find(|one| one.columns() as usize >= rows).or(all.last()).unwrap()
}

/// The rig, if its device has a matrix unit.
fn rig_with_gemm() -> Option<&'static Rig> {
    rig().filter(|rig| rig.device.unit() != MatrixUnit::None)
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Whole and partial tiles of outputs and rows, steps that end early, one matrix and several.
#[test]
fn products_of_every_type_are_the_sums_of_their_terms() {
    let Some(rig) = rig_with_gemm() else { return };
    let mut random = Random::new();
    for dtype in quantised_types().chain([DType::F16, DType::BF16]) {
        let long = dtype.block_len() == 256;
        let odd = if dtype.block_len() == 1 { 40 } else { 352 };
        for all in families(rig, dtype) {
            for (outputs, rows, cols) in [
                (&[128][..], 16, if long { 256 } else { 128 }),
                (&[37, 130, 5], 9, if long { 768 } else { odd }),
                (&[1], 67, if long { 256 } else { 32 }),
            ] {
                let mut product = Product::random(dtype, outputs, rows, cols, &mut random);
                let got = product.run(rig, all[0], rows, Some(1));
                product.check(&got);
                for chosen in &all[1..] {
                    let same = same_bits(&product.run(rig, *chosen, rows, Some(1)), &got);
                    assert!(same, "{dtype}: {} rows a block give other bits", chosen.columns());
                }
                product.bias = Some(outputs.iter().map(|n| random.normals(*n)).collect());
                product.base = Some(random.normals(rows * product.outputs()));
                product.check(&product.run(rig, fitting(&all, rows), rows, Some(2)));
            }
        }
    }
}

/// Whole and partial tiles of all three matrices, with and without splits. Each output has the bits that the kernels of its
/// own type give with as many splits.
#[test]
fn a_third_matrix_of_another_type_is_multiplied_beside_two() {
    let Some(rig) = rig_with_gemm() else { return };
    let mut random = Random::new();
    for pair in TWO_TYPES {
        for (all, alone) in of_units(rig, pair.gemm, pair.gemm_wide).into_iter().zip(families(rig, pair.last))
        {
            for (outputs, rows, splits) in
                [([37, 130, 131], 9, 1), ([128, 5, 40], 70, 2), ([1, 1, 256], 33, 3)]
            {
                let mut product = Product::random(pair.first, &outputs[..2], rows, 768, &mut random);
                product.matrices.push(Weights::random(pair.last, outputs[2], 768, &mut random));
                product.bias = Some(outputs.iter().map(|n| random.normals(*n)).collect());
                let got = product.run(rig, all[0], rows, Some(splits));
                product.check(&got);
                for chosen in &all[1..] {
                    assert!(
                        same_bits(&product.run(rig, *chosen, rows, Some(splits)), &got),
                        "{:?}",
                        pair.last
                    );
                }
                let first = outputs[0] + outputs[1];
                let (n, all) = (outputs[2], product.outputs());
                product.matrices.drain(..2);
                product.bias = product.bias.map(|bias| bias[2..].to_vec());
                let last = product.run(rig, alone[0], rows, Some(splits));
                for (all, last) in got.chunks_exact(all).zip(last.chunks_exact(n)) {
                    assert!(same_bits(&all[first..], last), "{:?} beside others", pair.last);
                }
            }
        }
    }
}

/// A row's bits depend on the splits, but not on the rows beside it. With every number of splits, empty ones too, the sums
/// are right. Steps outnumber the copies of steps in LDS.
#[test]
fn splits_are_added_in_order_and_rows_do_not_depend_on_each_other() {
    let Some(rig) = rig_with_gemm() else { return };
    let mut random = Random::new();
    let (rows, cols) = (70, 1280);
    let product = Product::random(DType::Q4_K, &[140], rows, cols, &mut random);
    for kernels in families(rig, DType::Q4_K) {
        for splits in [None, Some(1), Some(3), Some(10), Some(12)] {
            let all = product.run(rig, kernels[2], rows, splits);
            product.check(&all);
            for (few, chosen) in [(1, 0), (17, 1), (64, 2), (70, 0)] {
                let got = product.run(rig, kernels[chosen], few, splits);
                assert!(
                    same_bits(&got, &all[..got.len()]),
                    "{few} rows give other bits with {splits:?} splits"
                );
            }
        }
    }
}

/// More rows than a block's, with a last block that is not full.
#[test]
fn many_rows_are_multiplied_by_several_blocks() {
    let Some(rig) = rig_with_gemm() else { return };
    let mut random = Random::new();
    let rows = 300;
    let product = Product::random(DType::Q8_0, &[130, 20], rows, 96, &mut random);
    for kernels in families(rig, DType::Q8_0) {
        for chosen in kernels {
            product.check(&product.run(rig, chosen, rows, None));
        }
    }
}

#[test]
fn small_matrices_are_split_and_large_ones_are_not() {
    let grid =
        |outputs, cols, rows, columns| choice::gemm_quant_grid(outputs, cols, rows, columns).workgroups;
    // The matrices of an 8B model: query, key and value; output; gate and up; down; head.
    assert_eq!(grid([4096, 1024, 1024], 4096, 16, 16), [48, 1, 5]);
    assert_eq!(grid([4096, 0, 0], 4096, 16, 16), [32, 1, 8]);
    assert_eq!(grid([14336, 14336, 0], 4096, 33, 64), [224, 1, 1]);
    assert_eq!(grid([4096, 0, 0], 14336, 65, 64), [32, 2, 8]);
    assert_eq!(grid([128256, 0, 0], 4096, 9, 16), [1002, 1, 1]);
    assert_eq!(grid([5, 0, 0], 32, 1, 16), [1, 1, 1]);
}

#[test]
fn the_sums_of_splits_have_room() {
    let sizes = [0, 1, 128, 129, 700, 4096, 32640, 40000];
    for outputs in sizes.iter().flat_map(|a| sizes.iter().flat_map(move |b| sizes.map(|c| [*a, *b, c]))) {
        for cols in [32, 576, 1536, 4096, 28672] {
            let sums = outputs.map(|n| if n > 0 { choice::gemm_sums(n, cols) } else { 0 });
            let sums = sums.into_iter().max().unwrap();
            let check = |unit, order, rows: u32, columns: u32, grid: Grid| {
                let [x, y, z] = grid.workgroups;
                let bytes = if z > 1 { 4 * (x * y * z * columns * choice::GEMM_TILE) as usize } else { 0 };
                let room = choice::gemm_parts(unit, order, sums, rows as usize);
                assert!(
                    bytes <= room || outputs == [0; 3],
                    "{unit:?}, {order:?}, {outputs:?}, {cols} inputs, {rows} rows: {bytes} of {room}"
                );
                assert!(z == 1 || (x * y) as usize <= choice::gemm_counters(order, rows as usize));
            };
            for (order, rows) in [Order::ByRows, Order::Fixed].into_iter().flat_map(|order| {
                let rows = [1, 5, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1000, 4096];
                rows.map(|rows| (order, rows))
            }) {
                if rows as usize <= thresholds::GEMM_QUANT_ROWS_MAX || order == Order::Fixed {
                    let columns = choice::gemm_quant(DType::Q4_K, DType::Q4_K, rows).unwrap().columns;
                    let grid = choice::gemm_quant_grid(outputs, cols, rows, columns);
                    check(MatrixUnit::OfWave, order, rows, columns, grid);
                }
                let columns = choice::gemm_wide(DType::Q4_K, DType::Q4_K, rows).unwrap().columns;
                let grid = choice::gemm_wide_grid(outputs, cols, rows, columns, order);
                check(MatrixUnit::AcrossWaves, order, rows, columns, grid);
                assert!(
                    order == Order::ByRows
                        || grid.workgroups[2]
                            == choice::gemm_wide_grid(outputs, cols, 1, 16, order).workgroups[2],
                    "{outputs:?}, {cols} inputs, {rows} rows"
                );
            }
        }
    }
}

/// Pairs of a row and an expert, with the matrices of two products side by side. The expert of number 2 is absent, and the
/// first pair has none.
struct Choice {
    product: Product,
    /// Gate and up matrix of each expert.
    experts: Vec<[Weights; 2]>,
    chosen: Vec<u32>,
    slots: usize,
}

impl Choice {
    fn random(dtype: DType, [n, rows, cols]: [usize; 3], random: &mut Random) -> Self {
        let (count, slots) = (5, 3);
        let mut chosen: Vec<u32> = (0..rows * slots).map(|_| random.below(count) as u32).collect();
        chosen[0] = u32::MAX;
        let matrix = |random: &mut Random| Weights::random(dtype, n, cols, random);
        let experts = (0..count).map(|_| [matrix(random), matrix(random)]).collect();
        Self { product: Product::random(dtype, &[1], rows, cols, random), experts, chosen, slots }
    }

    /// The products of each pair, with tiles of `chosen.columns` pairs; both matrices, or the first one alone.
    fn run(&self, rig: &Rig, chosen: Experts, both: bool) -> Vec<f32> {
        let (count, pairs) = (self.experts.len() as u32, self.chosen.len() as u32);
        let (n, cols) = (self.experts[0][0].rows, self.product.cols());
        let tiles =
            choice::ExpertTiles { size: chosen.columns(), most: pairs.min(pairs / chosen.columns() + count) };
        let (experts, members) = (rig.upload(&self.chosen), rig.output::<u32>(pairs as usize));
        let table = rig.output::<u32>(4 * tiles.most as usize);
        let sort = GroupPairs {
            experts: experts.ptr(),
            members: members.ptr(),
            tiles: table.ptr(),
            pairs,
            count,
            size: tiles.size,
            tiles_max: tiles.most,
        };
        rig.device
            .launch(&rig.stream, GroupPairs::group_pairs, choice::ExpertTiles::group_grid(), &sort)
            .unwrap();
        let weights: Vec<_> =
            self.experts.iter().map(|both| both.each_ref().map(|w| w.lay_out(rig))).collect();
        let addresses = [0, 1].map(|which| {
            let of = |(expert, pair): (usize, &[_; 2])| match expert {
                2 => 0,
                _ => rocmforge::backend::hip::Buffer::ptr::<u8>(&pair[which]).address(),
            };
            rig.upload(&weights.iter().enumerate().map(of).collect::<Vec<u64>>())
        });
        let matrices = if both { 2 } else { 1 };
        let stride = n * matrices + 3;
        let out = rig.output::<f32>(pairs as usize * stride);
        let scales = rig.upload(&self.product.scales);
        let (table0, table1) = (addresses[0].ptr(), or_null(addresses.get(1).filter(|_| both)));
        let (places, members, x_scale, out_at) = (table.ptr(), members.ptr(), scales.ptr(), out.ptr());
        let (n, cols, slots, out_stride) = (n as u32, cols as u32, self.slots as u32, stride as u32);
        match chosen {
            Chosen::OfWave(chosen) => {
                let x = rig.upload(&self.product.bits);
                let arguments = GemmExperts {
                    table0,
                    table1,
                    tiles: places,
                    members,
                    n,
                    cols,
                    x: x.ptr(),
                    x_stride: self.product.stride as u32,
                    x_scale,
                    slots,
                    out: out_at,
                    out_stride,
                };
                let grid = tiles.grid(n, matrices as u32);
                rig.device.launch(&rig.stream, chosen.kernel, grid, &arguments).unwrap();
            }
            Chosen::AcrossWaves(chosen) => {
                let x = rig.upload(&tiled(&self.product.bits, self.product.stride, self.product.cols()));
                let arguments = GemmWideExperts {
                    table0,
                    table1,
                    tiles: places,
                    members,
                    n,
                    cols,
                    x: x.ptr(),
                    x_scale,
                    slots,
                    out: out_at,
                    out_stride,
                };
                let grid = tiles.wide_grid(n, matrices as u32);
                rig.device.launch(&rig.stream, chosen.kernel, grid, &arguments).unwrap();
            }
        }
        rig.download::<f32>(&out)
    }

    fn check(&self, got: &[f32], both: bool) {
        let (n, cols) = (self.experts[0][0].rows, self.product.cols());
        let stride = got.len() / self.chosen.len();
        for (pair, (got, &expert)) in got.chunks_exact(stride).zip(&self.chosen).enumerate() {
            let row = pair / self.slots;
            let scale = f64::from(self.product.scales[row]);
            let x = &self.product.x[row * cols..][..cols];
            let x: Vec<f64> = x.iter().map(|&v| f64::from(v) * scale).collect();
            let written = if expert == u32::MAX || expert == 2 { 0 } else { n * (1 + usize::from(both)) };
            assert!(got[written..].iter().copied().all(untouched), "pair {pair} of expert {expert}");
            for (output, &got) in got[..written].iter().enumerate() {
                let (matrix, at) = (&self.experts[expert as usize][output / n], output % n);
                let weights: Vec<f32> = matrix.row(at).iter().map(|&w| rounded(w)).collect();
                Sum::of(&weights, &x).check_to(rounding(matrix, at, &x), got, &|| {
                    format!("{}, pair {pair}, expert {expert}, output {output}", matrix.dtype)
                });
            }
        }
    }
}

#[test]
fn experts_multiply_the_rows_that_chose_them() {
    let Some(rig) = rig_with_gemm() else { return };
    let mut random = Random::new();
    for dtype in quantised_types() {
        let long = dtype.block_len() == 256;
        for (n, rows, cols, both) in
            [(130, 33, if long { 512 } else { 352 }, true), (20, 9, if long { 256 } else { 64 }, false)]
        {
            let choice = Choice::random(dtype, [n, rows, cols], &mut random);
            let (known, unit) = (weight_type(dtype).unwrap(), rig.device.unit());
            let of_wave = known.gemm_experts.iter().copied().map(Experts::OfWave).collect();
            let across_waves = known.gemm_wide_experts.iter().copied().map(Experts::AcrossWaves).collect();
            let families: [(MatrixUnit, Vec<Experts>); 2] =
                [(MatrixUnit::OfWave, of_wave), (MatrixUnit::AcrossWaves, across_waves)];
            for (_, all) in families.into_iter().filter(|(of, _)| unit.has(*of)) {
                let got = choice.run(rig, all[0], both);
                choice.check(&got, both);
                for chosen in &all[1..] {
                    let same = same_bits(&choice.run(rig, *chosen, both), &got);
                    assert!(same, "{dtype}: tiles of {} pairs give other bits", chosen.columns());
                }
            }
        }
    }
}
