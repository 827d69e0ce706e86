//! Routing to experts, and the sum of their results.

use rocmforge::backend::hip::kernels::experts::{Combine, GroupPairs, Route};
use rocmforge::backend::hip::kernels::matmul::choice::ExpertTiles;
use rocmforge::backend::hip::{DevicePtr, Grid};

use crate::random::Random;
use crate::rig::rig;

#[test]
fn experts_are_chosen_and_summed() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for (count, used, rows, normalise, sigmoid, biased) in [
        (1, 1, 1, true, false, false),
        (8, 2, 3, false, false, false),
        (60, 4, 9, true, false, false),
        (128, 8, 17, true, false, false),
        (512, 8, 2, false, false, false),
        (8, 3, 259, true, false, false),
        (1, 1, 1, true, true, true),
        (160, 8, 17, true, true, true),
        (512, 3, 9, false, true, true),
        (8, 3, 33, true, true, false),
        (64, 6, 17, true, false, true),
        (300, 4, 9, false, false, true),
    ] {
        // Some logits are equal; the last row contains a NaN.
        let mut logits: Vec<f32> = (0..rows * count)
            .map(|i| if i % 3 == 0 { random.normal().trunc() } else { random.normal() })
            .collect();
        let broken = rows > 1;
        if broken {
            // A NaN of either sign.
            logits[(rows - 1) * count + count / 2] = if used == 8 { -f32::NAN } else { f32::NAN };
        }
        let scale = 1.5f32;
        let bias: Vec<f32> = random.normals(count).iter().map(|bias| bias * 0.2).collect();
        let added = biased.then(|| rig.upload(&bias));
        let input = rig.upload(&logits);
        // Every fourth row is a padding row; every fifth expert is absent.
        let sequences: Vec<u32> =
            (0..rows as u32).map(|row| if row % 4 == 3 { u32::MAX } else { row }).collect();
        let addresses: Vec<u64> =
            (0..count as u64).map(|expert| if expert % 5 == 4 { 0 } else { 256 }).collect();
        let (row_seq, table, absent) = (rig.upload(&sequences), rig.upload(&addresses), rig.upload(&[0u32]));
        let (experts, weights) = (rig.output::<u32>(rows * used), rig.output::<f32>(rows * used));
        let arguments = Route {
            logits: input.ptr(),
            bias: added.as_ref().map_or(DevicePtr::NULL, |bias| bias.ptr()),
            row_seq: row_seq.ptr(),
            table: table.ptr(),
            experts: experts.ptr(),
            weights: weights.ptr(),
            absent: absent.ptr(),
            scale,
            rows: rows as u32,
            count: count as u32,
            used: used as u32,
            normalise: normalise.into(),
            sigmoid: sigmoid.into(),
        };
        rig.device.launch(&rig.stream, Route::route, Grid::x(rows as u32), &arguments).unwrap();
        let (chosen, shares) = (rig.download::<u32>(&experts), rig.download::<f32>(&weights));
        let lacks = chosen.iter().any(|&expert| expert != u32::MAX && addresses[expert as usize] == 0);
        assert_eq!(rig.download::<u32>(&absent), [u32::from(lacks)]);
        for (row, logits) in logits.chunks_exact(count).enumerate() {
            let (chosen, shares) = (&chosen[row * used..][..used], &shares[row * used..][..used]);
            if sequences[row] == u32::MAX {
                assert!(chosen.iter().all(|&expert| expert == u32::MAX), "{chosen:?} of a padding row");
                assert!(shares.iter().all(|&share| share == 0.0));
                continue;
            }
            if broken && row == rows - 1 {
                let unknown = if sigmoid && !normalise { 1 } else { used };
                // Chances with a bias are all NaN where their sum is.
                let first = if biased && !sigmoid { 0 } else { count / 2 };
                assert_eq!(chosen[0] as usize, first, "{chosen:?}");
                assert!(shares[..unknown].iter().all(|share| share.is_nan()), "{shares:?}");
                continue;
            }
            let most = logits.iter().copied().fold(f32::MIN, f32::max);
            let chance = |expert: usize| match sigmoid {
                true => 1.0 / (1.0 + (-f64::from(logits[expert])).exp()),
                false => f64::from(logits[expert] - most).exp(),
            };
            let all: f64 = if sigmoid { 1.0 } else { (0..count).map(chance).sum() };
            let size = |expert: usize| match biased {
                true => chance(expert) / all + f64::from(bias[expert]),
                false => f64::from(logits[expert]),
            };
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by(|&a, &b| size(b).partial_cmp(&size(a)).unwrap().then(a.cmp(&b)));
            let total =
                if normalise { order[..used].iter().map(|&expert| chance(expert)).sum() } else { all };
            for place in 0..used {
                let expert = chosen[place] as usize;
                // Biased chances that differ by less than the error of a chance may be in either order.
                let near = biased && (size(expert) - size(order[place])).abs() < 1e-5;
                assert!(expert == order[place] || near, "row {row} place {place}: {chosen:?}");
                // The exponent goes down to -10 in f32: 10 log2(e) * 2^-24, and the error of the sum.
                let want = chance(expert) / total * f64::from(scale);
                assert!(
                    (f64::from(shares[place]) / want - 1.0).abs() < 4e-6,
                    "row {row}: {shares:?}, want {want}"
                );
            }
        }

        let pairs = rows * used;
        for (cols, with_factor, with_bias) in
            [(70, false, false), (70, false, true), (1028, true, true), (72, true, false)]
        {
            // Rows of biases begin at multiples of 4 values.
            let bias_stride = usize::next_multiple_of(cols, 4);
            let biases = random.normals(count * bias_stride);
            let biases_in = rig.upload(&biases);
            let factors = random.normals(count);
            let factors_in = rig.upload(&factors);
            let (results, residual) = (random.normals(pairs * cols), random.normals(rows * cols));
            let (results_in, residual_in) = (rig.upload(&results), rig.upload(&residual));
            let arguments = Combine {
                results: results_in.ptr(),
                weights: weights.ptr(),
                experts: if with_factor || with_bias { experts.ptr() } else { DevicePtr::NULL },
                factor: if with_factor { factors_in.ptr() } else { DevicePtr::NULL },
                bias: if with_bias { biases_in.ptr() } else { DevicePtr::NULL },
                residual: residual_in.ptr(),
                used: used as u32,
                cols: cols as u32,
            };
            let grid = Grid::xy(cols.div_ceil(1024) as u32, rows as u32);
            rig.device.launch(&rig.stream, Combine::combine, grid, &arguments).unwrap();
            let got = rig.download::<f32>(&residual_in);
            for (i, (&got, &before)) in got.iter().zip(&residual).enumerate() {
                let (row, k) = (i / cols, i % cols);
                let (mut want, mut size) = (f64::from(before), f64::from(before.abs()));
                for pair in row * used..(row + 1) * used {
                    let expert = Some(chosen[pair]).filter(|&expert| expert != u32::MAX).map(|e| e as usize);
                    let bias = expert.filter(|_| with_bias).map_or(0.0, |e| biases[e * bias_stride + k]);
                    let factor = expert.filter(|_| with_factor).map_or(1.0, |e| factors[e]);
                    let (result, share) = (f64::from(results[pair * cols + k]), f64::from(shares[pair]));
                    let result = result * f64::from(factor);
                    want += share * (result + f64::from(bias));
                    size += (share * result).abs() + (share * f64::from(bias)).abs();
                }
                if broken && row == rows - 1 && sequences[row] != u32::MAX {
                    assert!(got.is_nan());
                } else {
                    assert!(
                        (f64::from(got) - want).abs() <= size * 1e-6,
                        "row {row} value {k}: {got} instead of {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn pairs_are_grouped_by_expert_and_cut_into_tiles() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for (pairs, count) in [(1, 1), (72, 128), (511, 60), (8200, 512), (3000, 2)] {
        // Some pairs have no expert; low numbers are more frequent.
        let expert = |random: &mut Random| {
            let below = random.below(count) + 1;
            if random.below(9) == 0 { u32::MAX } else { random.below(below) as u32 }
        };
        let experts: Vec<u32> = (0..pairs).map(|_| expert(random)).collect();
        let tiles = ExpertTiles::of(pairs as u32, count as u32);
        let (input, members) = (rig.upload(&experts), rig.output::<u32>(pairs));
        let out = rig.output::<u32>(4 * tiles.most as usize);
        let arguments = GroupPairs {
            experts: input.ptr(),
            members: members.ptr(),
            tiles: out.ptr(),
            pairs: pairs as u32,
            count: count as u32,
            size: tiles.size,
            tiles_max: tiles.most,
        };
        rig.device
            .launch(&rig.stream, GroupPairs::group_pairs, ExpertTiles::group_grid(), &arguments)
            .unwrap();
        let (members, out) = (rig.download::<u32>(&members), rig.download::<u32>(&out));
        let mut seen: Vec<u32> = Vec::new();
        let (mut last, mut ended) = (0, false);
        for tile in out.chunks_exact(4) {
            let [expert, first, held, rest] = [tile[0], tile[1], tile[2], tile[3]];
            assert_eq!(rest, 0);
            assert!(held <= tiles.size && (held == 0 || !ended && expert >= last), "{pairs}: {tile:?}");
            (last, ended) = (last.max(expert), held == 0);
            let held = &members[first as usize..][..held as usize];
            assert!(held.iter().all(|&pair| experts[pair as usize] == expert), "{pairs}: {tile:?}");
            seen.extend(held);
        }
        seen.sort_unstable();
        let want: Vec<u32> = (0..pairs as u32).filter(|&pair| experts[pair as usize] != u32::MAX).collect();
        assert_eq!(seen, want, "{pairs} pairs among {count} experts");
    }
}
