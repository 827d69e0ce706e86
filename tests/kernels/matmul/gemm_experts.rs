//! `gemm_experts_<type>_x16_<pairs>` and `gemm_wide_experts_<type>_x16_<pairs>`: products of experts with the f16 rows that chose them.

use rocmforge::backend::hip::kernels::MatrixUnit;
use rocmforge::backend::hip::kernels::experts::GroupPairs;
use rocmforge::backend::hip::kernels::matmul::{GemmExperts, GemmWideExperts, choice};
use rocmforge::backend::hip::kernels::types::weight_type;
use rocmforge::tensor::DType;

use super::gemm_quant::{Chosen, Product, rig_with_gemm, rounded, rounding, same_bits};
use super::weights::{Weights, quantised_types};
use super::{Sum, or_null, untouched};
use crate::forms::tiled;
use crate::random::Random;
use crate::rig::Rig;

type Experts = Chosen<GemmExperts, GemmWideExperts>;

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
            let cols = usize::next_multiple_of(cols, dtype.block_len());
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
