//! `gemm_<type>_x16_<rows>` and `gemm_wide_<type>_x16_<rows>`: products of weights with f16 rows on a matrix unit.

use half::f16;
use rocmforge::backend::hip::kernels::MatrixUnit;
use rocmforge::backend::hip::kernels::matmul::{GemmCluster, GemmQuant, GemmWide, choice};
use rocmforge::backend::hip::kernels::thresholds::{self, Order};
use rocmforge::backend::hip::kernels::types::{Columns, TWO_TYPES, weight_type};
use rocmforge::backend::hip::{DevicePtr, Grid};
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
pub enum Chosen<W, A> {
    OfWave(Columns<W>),
    AcrossWaves(Columns<A>),
}
type Gemm = Chosen<GemmQuant, GemmWide>;

impl<W, A> Chosen<W, A> {
    pub fn columns(&self) -> u32 {
        match self {
            Self::OfWave(chosen) => chosen.columns,
            Self::AcrossWaves(chosen) => chosen.columns,
        }
    }
}

/// Arguments that all kernels of products take.
struct Given {
    w: [DevicePtr<u8>; 3],
    n: [u32; 3],
    bias: [DevicePtr<f32>; 3],
    cols: u32,
    x_scale: DevicePtr<f32>,
    rows: u32,
    out: DevicePtr<f32>,
    out_stride: u32,
    add: u32,
}

pub struct Product {
    matrices: Vec<Weights>,
    /// f16 rows with unused values after each, and their values.
    pub bits: Vec<u16>,
    pub x: Vec<f32>,
    pub stride: usize,
    pub scales: Vec<f32>,
    bias: Option<Vec<Vec<f32>>>,
    base: Option<Vec<f32>>,
}

/// The weight as the kernel sees it: rounded to f16, finite values not past its range.
pub fn rounded(value: f32) -> f32 {
    f16::from_f32(value.clamp(-65504.0, 65504.0)).to_f32()
}

/// The largest difference that scales and minimums make that are rounded to f16: those of types with blocks of 256 have more
/// digits. `|x|` times `2^-12` of the weight and its minimum, each as often as it is rounded.
pub fn rounding(matrix: &Weights, row: usize, x: &[f64]) -> f64 {
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
    pub fn random(dtype: DType, outputs: &[usize], rows: usize, cols: usize, random: &mut Random) -> Self {
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

    pub fn cols(&self) -> usize {
        self.matrices[0].cols
    }

    /// The first `rows` rows of the product with that many splits; `None` for those of [`choice::gemm_quant_grid`].
    fn run(&self, rig: &Rig, chosen: Gemm, rows: usize, splits: Option<u32>) -> Vec<f32> {
        let shape = (self.sizes(), self.cols() as u32, rows as u32, chosen.columns());
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
        let (parts, counted) = (parts.ptr(), counters.ptr());
        let got = self.launched(rig, rows, |given| {
            let &Given { w: [w0, w1, w2], n: [n0, n1, n2], bias: [bias0, bias1, bias2], .. } = given;
            let &Given { cols, x_scale, rows, out, out_stride, add, .. } = given;
            match chosen {
                Chosen::OfWave(chosen) => {
                    let (x, x_stride) = (rig.upload(&self.bits), self.stride as u32);
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
                        x_stride,
                        x_scale,
                        rows,
                        out,
                        out_stride,
                        add,
                        parts,
                        counters: counted,
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
                        out,
                        out_stride,
                        add,
                        parts,
                        counters: counted,
                    };
                    rig.device.launch(&rig.stream, chosen.kernel, grid, &arguments).unwrap();
                }
            }
        });
        assert!(rig.download::<u32>(&counters).iter().all(|count| *count == 0), "counters are not 0 again");
        got
    }

    /// All rows of the product by clusters of workgroups, as many as a device with so many units runs.
    fn run_clusters(&self, rig: &Rig, chosen: Columns<GemmCluster>, units: u32) -> Vec<f32> {
        let x = rig.upload(&tiled(&self.bits, self.stride, self.cols()));
        self.launched(rig, self.scales.len(), |given| {
            let &Given { w: [w0, w1, w2], n: [n0, n1, n2], bias: [bias0, bias1, bias2], .. } = given;
            let &Given { cols, x_scale, rows, out, out_stride, add, .. } = given;
            let grid = choice::gemm_cluster_grid(given.n, rows, chosen.columns, units);
            let arguments = GemmCluster {
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
                out,
                out_stride,
                add,
            };
            rig.device.launch(&rig.stream, chosen.kernel, grid, &arguments).unwrap();
        })
    }

    /// Outputs of each matrix.
    fn sizes(&self) -> [u32; 3] {
        [0, 1, 2].map(|i| self.matrices.get(i).map_or(0, |matrix| matrix.rows as u32))
    }

    /// Launches, and reads the first `rows` rows of `out`, which has unused values after each.
    fn launched(&self, rig: &Rig, rows: usize, launch: impl FnOnce(&Given)) -> Vec<f32> {
        let (n, stride) = (self.outputs(), self.outputs() + 3);
        let mut start = vec![UNREAD; rows * stride];
        if let Some(base) = &self.base {
            for (to, from) in start.chunks_exact_mut(stride).zip(base.chunks_exact(n)) {
                to[..n].copy_from_slice(from);
            }
        }
        let weights: Vec<_> = self.matrices.iter().map(|matrix| matrix.lay_out(rig)).collect();
        let biases: Vec<_> = self.bias.iter().flatten().map(|bias| rig.upload(bias)).collect();
        let (scales, out) = (rig.upload(&self.scales), rig.upload(&start));
        launch(&Given {
            w: [0, 1, 2].map(|i| or_null(weights.get(i))),
            n: self.sizes(),
            bias: [0, 1, 2].map(|i| or_null(biases.get(i))),
            cols: self.cols() as u32,
            x_scale: scales.ptr(),
            rows: rows as u32,
            out: out.ptr(),
            out_stride: stride as u32,
            add: u32::from(self.base.is_some()),
        });
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
pub fn rig_with_gemm() -> Option<&'static Rig> {
    rig().filter(|rig| rig.device.unit() != MatrixUnit::None)
}

pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
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
                let cols = usize::next_multiple_of(cols, dtype.block_len());
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

/// Partial tiles of rows and outputs, an odd number of tiles, and clusters that take several tiles in turn. Steps outnumber the copies
/// of steps in LDS.
#[test]
fn clusters_of_workgroups_give_the_bits_of_each_alone() {
    let Some(rig) = rig().filter(|rig| rig.device.unit().has(MatrixUnit::AcrossWorkgroups)) else { return };
    let mut random = Random::new();
    for dtype in quantised_types().chain([DType::F16, DType::BF16]) {
        let known = weight_type(dtype).unwrap();
        let (clusters, wide) = (known.gemm_cluster[0], *known.gemm_wide.last().unwrap());
        let short = match dtype.block_len() {
            1 => 40,
            len if len < 128 => 96_usize.next_multiple_of(len),
            len => len,
        };
        for (outputs, rows, cols, units) in [
            (&[128, 256][..], 256, 256, 132),
            (&[37, 130, 5], 9, 768, 132),
            (&[300, 200], 300, 1280, 2),
            (&[700], 517, 512, 4),
            // Types with short blocks have one step that is not full, and two of which the last is not.
            (&[130], 130, short, 2),
            (&[300], 40, (128 + short).next_multiple_of(dtype.block_len()), 4),
        ] {
            let mut product = Product::random(dtype, outputs, rows, cols, &mut random);
            let check = |product: &Product| {
                let got = product.run_clusters(rig, clusters, units);
                let alone = product.run(rig, Gemm::AcrossWaves(wide), rows, Some(1));
                assert!(same_bits(&got, &alone), "{dtype}: {outputs:?}, {rows} rows of {cols}");
            };
            check(&product);
            product.bias = Some(outputs.iter().map(|n| random.normals(*n)).collect());
            product.base = Some(random.normals(rows * product.outputs()));
            check(&product);
        }
    }
}

#[test]
fn clusters_are_as_many_as_a_device_runs_and_never_split() {
    let grid = |outputs, rows, units| {
        let Grid { workgroups, threads, .. } = choice::gemm_cluster_grid(outputs, rows, 256, units);
        (workgroups, threads)
    };
    assert_eq!(grid([14336, 14336, 0], 1024, 132), ([132, 1, 1], 384));
    assert_eq!(grid([4096, 0, 0], 1024, 132), ([128, 1, 1], 384));
    assert_eq!(grid([129, 128, 0], 1, 132), ([4, 1, 1], 384), "three tiles");
    assert_eq!(grid([4096, 0, 0], 1024, 1).0, [2, 1, 1]);
    let wide = |rows| choice::gemm_wide(DType::Q4_K, DType::Q4_K, rows).unwrap();
    let cluster = |unit, rows, splits| {
        choice::gemm_cluster(unit, &wide(rows), &Grid::xyz(32, 1, splits)).map(|chosen| chosen.columns)
    };
    assert_eq!(cluster(MatrixUnit::AcrossWorkgroups, 1024, 1), Some(256));
    assert_eq!(cluster(MatrixUnit::AcrossWorkgroups, 1024, 2), None);
    assert_eq!(cluster(MatrixUnit::AcrossWorkgroups, 128, 1), None);
    assert_eq!(cluster(MatrixUnit::AcrossWaves, 1024, 1), None);
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
