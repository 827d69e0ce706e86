//! Drawing tokens, compared with a simple f64 implementation that sorts all logits, and changes of logits before that.

use rocmforge::backend::hip::Grid;
use rocmforge::backend::hip::kernels::ops::{AdjustRows, NO_MASK, SampleDraw, SampleGreedy};

use crate::random::Random;
use crate::rig::{Rig, rig};

const REPORT_WORDS: usize = 8;
const TOPS: usize = 24;

#[derive(Clone, Copy, Debug)]
struct Settings {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    seed: u64,
    position: u32,
    top: u32,
}

impl Settings {
    fn words(&self) -> [u32; 8] {
        let min_p_log = if self.min_p > 0.0 { self.min_p.ln() } else { f32::NEG_INFINITY };
        let (low, high) = (self.seed as u32, (self.seed >> 32) as u32);
        [
            self.temperature.to_bits(),
            self.top_k,
            self.top_p.to_bits(),
            min_p_log.to_bits(),
            low,
            high,
            self.position,
            self.top,
        ]
    }
}

fn uniform(seed: u64, position: u32) -> f64 {
    let mix = |z: u64| {
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let bits = mix(mix(seed.wrapping_add(GOLDEN)).wrapping_add(GOLDEN.wrapping_mul(u64::from(position) + 1)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Token ids by descending logit, then ascending id.
fn ranked(logits: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    order
}

/// The drawn token, and the distance of the random number or a cut from the nearest boundary, as a share of the total.
fn drawn(logits: &[f32], row: &Settings) -> (usize, f64) {
    let mut order = ranked(logits);
    let best = f64::from(logits[order[0]]);
    if row.temperature.is_nan() || row.temperature <= 0.0 {
        return (order[0], 1.0);
    }
    let mut margin = 1.0f64;
    let share = |id: usize, t: f64| ((f64::from(logits[id]) - best) / t).exp();
    let is_ranked = (row.top_k > 0 && (row.top_k as usize) < logits.len()) || row.top_p < 1.0;
    if row.top_k > 0 {
        order.truncate(row.top_k as usize);
    }
    if row.top_p < 1.0 {
        let total: f64 = order.iter().map(|&id| share(id, 1.0)).sum();
        let mut sum = 0.0;
        let last = order.iter().position(|&id| {
            sum += share(id, 1.0);
            margin = margin.min((sum / total - f64::from(row.top_p)).abs());
            sum >= f64::from(row.top_p) * total
        });
        order.truncate(last.map_or(order.len(), |last| last + 1));
    }
    if row.min_p > 0.0 {
        let floor = (best as f32 + row.min_p.ln()).min(best as f32);
        order.retain(|&id| logits[id] >= floor);
    }
    if !is_ranked {
        order.sort_unstable();
    }
    let t = f64::from(row.temperature);
    let total: f64 = order.iter().map(|&id| share(id, t)).sum();
    let target = uniform(row.seed, row.position) * total;
    let mut sum = 0.0;
    let chosen = order.iter().position(|&id| {
        sum += share(id, t);
        margin = margin.min((sum - target).abs() / total);
        sum > target
    });
    (chosen.map_or(order[order.len() - 1], |i| order[i]), margin)
}

struct Outcome {
    reports: Vec<[u32; REPORT_WORDS]>,
    tops: Vec<[[u32; 2]; TOPS]>,
}

fn run(rig: &Rig, logits: &[f32], vocab: usize, rows: Option<&[Settings]>) -> Outcome {
    let count = logits.len() / vocab;
    let blocks = vocab.div_ceil(2048);
    let input = rig.upload(logits);
    let (parts, counters) = (rig.output::<u64>(count * blocks), rig.upload(&vec![0u32; count]));
    let reports = rig.output::<u32>(count * REPORT_WORDS);
    let tops = rig.output::<u32>(count * TOPS * 2);
    let arguments = SampleGreedy {
        logits: input.ptr(),
        parts: parts.ptr(),
        counters: counters.ptr(),
        reports: reports.ptr(),
        vocab: vocab as u32,
    };
    // Launches twice: the arrival counter must be reset for the next launch.
    for _ in 0..2 {
        let grid = Grid::xy(blocks as u32, count as u32);
        rig.device.launch(&rig.stream, SampleGreedy::sample_greedy, grid, &arguments).unwrap();
    }
    if let Some(rows) = rows {
        let settings = rig.upload(&rows.iter().map(Settings::words).collect::<Vec<_>>());
        let arguments = SampleDraw {
            logits: input.ptr(),
            settings: settings.ptr(),
            reports: reports.ptr(),
            tops: tops.ptr(),
            vocab: vocab as u32,
            top_stride: TOPS as u32,
        };
        let grid = Grid::x(count as u32).threads(1024);
        rig.device.launch(&rig.stream, SampleDraw::sample_draw, grid, &arguments).unwrap();
    }
    Outcome { reports: rig.download(&reports), tops: rig.download(&tops) }
}

#[test]
fn greedy_takes_the_lowest_id_of_equals_and_tells_what_is_not_finite() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for vocab in [1, 7, 2048, 2049, 50_000] {
        let mut logits = random.normals(5 * vocab);
        let (first, second) = (random.below(vocab), random.below(vocab));
        for (row, bad) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().enumerate() {
            logits[(1 + row) * vocab + first] = bad;
        }
        logits[first] = 9.0;
        logits[second] = 9.0;
        // -0 and 0 are equal.
        logits[4 * vocab..].fill(-1.0);
        logits[4 * vocab + first] = 0.0;
        logits[4 * vocab + second] = -0.0;
        let out = run(rig, &logits, vocab, None);
        let lowest = first.min(second) as u32;
        for row in [0, 4] {
            assert_eq!(out.reports[row][..2], [lowest, 0], "vocabulary {vocab}, row {row}");
            let [_, _, logit, best, _, _, listed, _] = out.reports[row];
            assert_eq!(f32::from_bits(logit), logits[row * vocab + lowest as usize]);
            assert_eq!((best, listed), (logit, 0));
        }
        for row in 1..4 {
            assert_eq!(out.reports[row][..2], [0, 1], "vocabulary {vocab}, row {row}");
        }
    }
}

#[test]
fn draws_are_those_of_the_plain_chain() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    // The last vocabulary takes each team through more than one chunk.
    for (vocab, kinds) in [(1, 1), (100, 6), (1024, 2), (1025, 6), (5000, 6), (33_800, 1)] {
        for kind in 0..kinds {
            let mut rows = Vec::new();
            for (i, temperature) in [0.0, 0.7, 1.0, 2.0, f32::NAN]
                .into_iter()
                .cycle()
                .take(if vocab > 5000 { 15 } else { 40 })
                .enumerate()
            {
                let top_k = [0, 1, 40, 1500][random.below(4)];
                let top_p = [1.0, 0.95, 0.3, 0.0][random.below(4)];
                let min_p = [0.0, 0.05, 2.0][random.below(3)];
                let top = [0, 20][random.below(2)];
                let (seed, position) = (random.bits(), i as u32);
                rows.push(Settings { temperature, top_k, top_p, min_p, seed, position, top });
            }
            // A usual row, a flat one, one with many equal logits, one with only equal logits. Of the next a mask left some 12
            // tokens, and the last has far tokens that only a high temperature draws.
            let value = |random: &mut Random| match kind {
                0 => random.normal() * 3.0,
                1 => random.normal() * 0.01,
                2 => (random.normal() * 2.0).trunc(),
                3 => 1.0,
                4 if random.below(vocab) >= 12 => f32::MIN,
                5 if random.below(50) > 0 => random.normal() - 40.0,
                _ => random.normal() * 3.0,
            };
            let logits: Vec<f32> = (0..rows.len() * vocab).map(|_| value(random)).collect();
            let out = run(rig, &logits, vocab, Some(&rows));
            for (i, (row, logits)) in rows.iter().zip(logits.chunks_exact(vocab)).enumerate() {
                let (want, margin) = drawn(logits, row);
                // Weights are within 2^-22 of their f64 values, and so are their sums.
                let may_differ = margin < 2f64.powi(-21);
                let id = out.reports[i][0] as usize;
                assert!(
                    id == want || may_differ,
                    "{row:?} of {vocab}, kind {kind}: drew {id} instead of {want}, margin {margin}"
                );
                assert_eq!(out.reports[i][..3], [id as u32, 0, logits[id].to_bits()]);
                check_tops(&out, i, row, logits);
            }
        }
    }
}

fn check_tops(out: &Outcome, i: usize, row: &Settings, logits: &[f32]) {
    let report = out.reports[i];
    let count = (row.top as usize).min(logits.len());
    assert_eq!(report[6] as usize, count);
    if count == 0 {
        return;
    }
    let order = ranked(logits);
    let want: Vec<[u32; 2]> = order[..count].iter().map(|&id| [id as u32, logits[id].to_bits()]).collect();
    assert_eq!(out.tops[i][..count], want);
    let best = f64::from(logits[order[0]]);
    let total: f64 = logits.iter().map(|&l| (f64::from(l) - best).exp()).sum();
    let got = (u64::from(report[5]) << 32 | u64::from(report[4])) as f64 / 2f64.powi(40);
    assert!((got / total - 1.0).abs() < 2f64.powi(-22), "{got} instead of {total}");
}

#[test]
fn a_row_that_failed_is_left_alone() {
    let Some(rig) = rig() else { return };
    let mut logits = vec![1.0f32; 64];
    logits[3] = f32::NAN;
    let row = Settings { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 1, position: 0, top: 5 };
    let out = run(rig, &logits, 64, Some(&[row]));
    assert_eq!(out.reports[0][..2], [0, 1]);
}

/// A change of a logit: id, bias, repeat, less.
type Change = (u32, f32, f32, f32);

/// The change in f64, each operation rounded to f32: sums, products and quotients of two f32 are rounded right this way.
fn changed(logit: f32, (_, bias, repeat, less): Change) -> f32 {
    let rounded = |value: f64| value as f32;
    let biased = rounded(f64::from(logit) + f64::from(bias));
    let scaled = match biased > 0.0 {
        true => f64::from(biased) / f64::from(repeat),
        false => f64::from(biased) * f64::from(repeat),
    };
    rounded(f64::from(rounded(scaled)) - f64::from(less))
}

#[test]
fn logits_are_changed_and_masked_in_their_row_alone() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for vocab in [1usize, 31, 2048, 2049, 5000] {
        let mask_words = vocab.div_ceil(32) + 3;
        // Rows with nothing, changes alone, a mask alone, and both.
        let kinds = [(false, false), (true, false), (false, true), (true, true), (true, true)];
        let mut logits = random.normals(kinds.len() * vocab);
        // A fault of the model stays one, masked or not.
        logits[2 * vocab + vocab / 2] = f32::NAN;
        let (mut rows, mut changes, mut masks) = (Vec::new(), Vec::<Change>::new(), Vec::<u32>::new());
        for (has_changes, has_mask) in kinds {
            let first = changes.len();
            if has_changes {
                let step = 1 + random.below(7);
                let number =
                    |random: &mut Random| if random.below(3) == 0 { 0.0 } else { random.normal() * 5.0 };
                changes.extend((0..vocab).step_by(step).take(700).map(|id| {
                    let repeat = [1.0, 1.3, 0.7][random.below(3)];
                    (id as u32, number(random), repeat, number(random))
                }));
            }
            let mask = if has_mask { (masks.len() / mask_words) as u32 } else { NO_MASK };
            if has_mask {
                masks.extend((0..mask_words).map(|_| random.bits() as u32));
            }
            rows.extend([first as u32, (changes.len() - first) as u32, mask, 0]);
        }
        let words =
            |(id, bias, repeat, less): &Change| [*id, bias.to_bits(), repeat.to_bits(), less.to_bits(), 7];
        let (input, rows_at) = (rig.upload(&logits), rig.upload(&rows));
        let changes_at = rig.upload(&changes.iter().map(words).collect::<Vec<_>>());
        let masks_at = rig.upload(&masks);
        let arguments = AdjustRows {
            logits: input.ptr(),
            rows: rows_at.ptr(),
            changes: changes_at.ptr(),
            masks: masks_at.ptr(),
            vocab: vocab as u32,
            mask_words: mask_words as u32,
        };
        let grid = Grid::xy(vocab.div_ceil(2048) as u32, kinds.len() as u32);
        rig.device.launch(&rig.stream, AdjustRows::adjust_rows, grid, &arguments).unwrap();
        let (got, after) = (rig.download::<f32>(&input), rig.download::<[u32; 5]>(&changes_at));
        for (number, row) in rows.chunks_exact(4).enumerate() {
            let own = row[0] as usize..(row[0] + row[1]) as usize;
            for id in 0..vocab {
                let before = logits[number * vocab + id];
                let change = own.clone().find(|at| changes[*at].0 == id as u32);
                let bit = |mask: u32| masks[mask as usize * mask_words + id / 32] >> (id % 32) & 1 == 1;
                let allowed = row[2] == NO_MASK || bit(row[2]);
                let want = match (allowed, change) {
                    (false, _) if before.is_finite() => f32::MIN,
                    (true, Some(at)) => changed(before, changes[at]),
                    _ => before,
                };
                let got = got[number * vocab + id];
                assert_eq!(
                    got.to_bits(),
                    want.to_bits(),
                    "{vocab}, row {number}, token {id}: {got}, not {want}"
                );
                if let Some(at) = change.filter(|_| allowed) {
                    assert_eq!(after[at][4], before.to_bits(), "the logit as it was");
                }
            }
        }
    }
}
