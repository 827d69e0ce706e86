//! The choice of experts, their grouping, and the sum of their results.

use rocmforge::backend::hip::kernels::ops::{Combine, Route, RouteGroup};
use rocmforge::backend::hip::{DevicePtr, Grid};

use crate::random::Random;
use crate::rig::rig;

#[test]
fn experts_are_chosen_grouped_and_summed() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    // The last has so many pairs that a team groups more than one of each of its lanes.
    for (count, used, rows, normalise) in [
        (1, 1, 1, true),
        (8, 2, 3, false),
        (60, 4, 9, true),
        (128, 8, 17, true),
        (512, 8, 2, false),
        (8, 3, 259, true),
    ] {
        // Among them equals; the last row holds what is no number.
        let mut logits: Vec<f32> = (0..rows * count)
            .map(|i| if i % 3 == 0 { random.normal().trunc() } else { random.normal() })
            .collect();
        let broken = rows > 1;
        if broken {
            // Of either sign.
            logits[(rows - 1) * count + count / 2] = if used == 8 { -f32::NAN } else { f32::NAN };
        }
        let scale = 1.5f32;
        let input = rig.upload(&logits);
        let (experts, weights) = (rig.output::<u32>(rows * used), rig.output::<f32>(rows * used));
        let arguments = Route {
            logits: input.ptr(),
            experts: experts.ptr(),
            weights: weights.ptr(),
            scale,
            rows: rows as u32,
            count: count as u32,
            used: used as u32,
            normalise: normalise.into(),
        };
        rig.device.launch(&rig.stream, Route::route, Grid::x(rows.div_ceil(8) as u32), &arguments).unwrap();
        let (chosen, shares) = (rig.download::<u32>(&experts), rig.download::<f32>(&weights));
        for (row, logits) in logits.chunks_exact(count).enumerate() {
            let (chosen, shares) = (&chosen[row * used..][..used], &shares[row * used..][..used]);
            if broken && row == rows - 1 {
                assert!(chosen[0] as usize == count / 2 && shares.iter().all(|s| s.is_nan()), "{shares:?}");
                continue;
            }
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
            let share = |i: usize| f64::from(logits[order[i]] - logits[order[0]]).exp();
            let total: f64 = (0..if normalise { used } else { count }).map(share).sum();
            for place in 0..used {
                assert_eq!(chosen[place] as usize, order[place], "row {row} place {place}");
                // An exponent down to -10 in f32: 10 log2(e) * 2^-24, and the sum.
                let want = share(place) / total * f64::from(scale);
                assert!(
                    (f64::from(shares[place]) / want - 1.0).abs() < 4e-6,
                    "row {row}: {shares:?}, {want}"
                );
            }
        }

        let pairs = rows * used;
        let (offsets, order) = (rig.output::<u32>(count + 1), rig.output::<u32>(pairs));
        let places = rig.output::<u32>(pairs);
        let arguments = RouteGroup {
            experts: experts.ptr(),
            offsets: offsets.ptr(),
            order: order.ptr(),
            places: places.ptr(),
            pairs: pairs as u32,
            count: count as u32,
        };
        rig.device.launch(&rig.stream, RouteGroup::route_group, Grid::x(count as u32), &arguments).unwrap();
        let mut want: Vec<u32> = (0..pairs as u32).collect();
        want.sort_by_key(|&pair| chosen[pair as usize]);
        assert_eq!(rig.download::<u32>(&order), want);
        let places_got = rig.download::<u32>(&places);
        assert!(want.iter().enumerate().all(|(place, &pair)| places_got[pair as usize] as usize == place));
        let before = |expert: usize| chosen.iter().filter(|&&e| (e as usize) < expert).count() as u32;
        assert_eq!(rig.download::<u32>(&offsets), (0..=count).map(before).collect::<Vec<_>>());

        for (cols, grouped) in [(70, false), (1028, true)] {
            let (results, residual) = (random.normals(pairs * cols), random.normals(rows * cols));
            let (results_in, residual_in) = (rig.upload(&results), rig.upload(&residual));
            let arguments = Combine {
                results: results_in.ptr(),
                weights: weights.ptr(),
                places: if grouped { places.ptr() } else { DevicePtr::NULL },
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
                    let place = if grouped { places_got[pair] as usize } else { pair };
                    let part = f64::from(shares[pair]) * f64::from(results[place * cols + k]);
                    want += part;
                    size += part.abs();
                }
                if broken && row == rows - 1 {
                    assert!(got.is_nan());
                } else {
                    assert!(
                        (f64::from(got) - want).abs() <= size * 1e-6,
                        "row {row} value {k}: {got} for {want}"
                    );
                }
            }
        }
    }
}
